"""Kernels that exist for one test, and a ledger of its own for each."""

import pytest
import torch

from portable.kernels import registry
from portable.kernels.fingerprint import fingerprint
from portable.kernels.ledger import Ledger
from portable.kernels.records import Verdict


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.delenv("PORTABLE_KERNELS", raising=False)
    torch._dynamo.reset()


@pytest.fixture
def kernel():
    """Registers a kernel that is gone after the test; called like `register_kernel`."""
    registry.load()
    before = dict(registry.KERNELS)
    yield registry.register_kernel
    registry.KERNELS.clear()
    registry.KERNELS.update(before)


@pytest.fixture
def decide():
    """Enters a decision for a kernel, as the gate would."""

    def enter(op, signature, backend, provider, *, digest=None):
        found = registry.KERNELS[op, provider]
        verdict = Verdict.new(
            op=op,
            signature=signature,
            backend=backend,
            provider=provider,
            outcome="met",
            metric="ratio",
            limit=1.25,
            fingerprint=fingerprint(backend),
            reason="1.02× [1.00, 1.05]",
            kernel_digest=found.digest if digest is None else digest,
        )
        Ledger().add(verdict)
        Ledger().decide(op, signature, backend, provider, verdict.id, "kernel 1.02× [1.00, 1.05]")

    return enter
