"""The conformance kit on the backends that run everywhere. What takes long is marked slow: Inductor builds each kernel
by a C++ compiler, and tests of the lowering itself cover every operator of `xla`."""

from portable.testing import BackendConformance

OTHER_DTYPES = ("*-float64-*", "*-float16-*", "*-uint8-*", "*-int8-*", "*-int16-*", "*-int64-*")


class TestCpu(BackendConformance):
    backend = "cpu"
    slow = ("test_a_program*", "test_gradients*", "test_training*", "test_a_model*", "test_one_compiled*")

    limitations = {  # of Inductor, torch 2.13.0; torch.compile alone does the same
        "test_gradients*-float32-pooling]": "max_pool2d and avg_pool2d of one tensor, beside a transposed convolution",
    }


class TestCpuEager(BackendConformance):
    backend = "cpu:eager"
    slow = OTHER_DTYPES


class TestXla(BackendConformance):
    backend = "xla"
    slow = (*OTHER_DTYPES, "*-bfloat16-*", "test_gradients*", "test_training*sgd*", "test_a_model*")
