"""`tpu`: Google TPUs through our lowering and libtpu's PJRT client; the code is `xla`'s."""

from __future__ import annotations

from portable.backends.base import State, ask, installed
from portable.backends.xla import Xla


class Tpu(Xla):
    name = "tpu"
    variants = ()
    platform = "tpu"

    @classmethod
    def probe(cls) -> State:
        if not installed("libtpu"):
            return State(False, "libtpu is not installed", "pip install 'portable[tpu]' on a TPU host")
        ok, text = ask("import jax; print(jax.devices('tpu')[0].device_kind)")
        if not ok:
            return State(False, f"no device: {text}", "run on a TPU host")
        return State(True, f"ready, {text}")

    diagnose = probe


BACKEND = Tpu
