from portable.testing import BackendConformance


class TestAcme(BackendConformance):
    backend = "acme"
