"""`tpu`: Google TPUs through our lowering and libtpu's PJRT client; the code is `xla`'s.

`tpu:torch_tpu` and `tpu:torch_xla` run the captured graphs with another package instead, where it is installed.
"""

from __future__ import annotations

import torch

from portable.backends import deviceless
from portable.backends.base import TOLERANCES, Backend, Capabilities, State, ask, installed
from portable.backends.xla import Xla

_CHIPS = "from jax._src import hardware_utils; print(hardware_utils.num_available_tpu_chips_and_device_id()[0])"


class Tpu(Xla):
    name = "tpu"
    variants = ("torch_tpu", "torch_xla")
    platform = "tpu"
    evidence = "compiled for"

    @classmethod
    def of(cls, variant: str) -> Backend:
        if variant == "torch_tpu":
            from portable.backends.torch_tpu import TorchTpu

            return TorchTpu(variant)
        if variant == "torch_xla":
            from portable.backends.torch_xla import TorchXla

            return TorchXla(variant)
        return cls(variant)

    @classmethod
    def other_variants(cls) -> tuple[str, ...]:
        return ()

    @classmethod
    def deviceless(cls) -> tuple[str, ...]:
        return deviceless.devices(cls.name)

    @classmethod
    def probe(cls) -> State:
        if not installed("libtpu"):
            return State(False, "libtpu is not installed", "pip install 'portable[tpu]' on a TPU host")
        ok, text = ask(_CHIPS)
        if ok and text == "0":
            return State(False, "no TPU in this machine", "run on a TPU host; `portable check` compiles for one here")
        ok, text = ask("import jax; print(jax.devices('tpu')[0].device_kind)")
        if not ok:
            return State(False, f"no device: {text}", "run on a TPU host")
        return State(True, f"ready, {text}")

    diagnose = probe


def capabilities(kind: str) -> Capabilities:
    """What a TPU of this kind is good at.

    TPUs have no arithmetic of 64 bits: XLA makes it of pieces (its pass “X64 rewriting”); float16 they convert. The
    matrix unit is 256 × 256 from v6e on, 128 × 128 before (Cloud TPU's system architecture); a register holds 8 rows
    of 128 lanes.
    """
    parts = "made of two 32-bit numbers"
    emulated = {
        torch.float64: f"{parts}: slow, and its range is float32's",
        torch.int64: f"{parts}: slow",
        torch.float16: "computed in float32: the matrix unit takes bfloat16",
    }
    integers = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
    wide = any(generation in kind.lower() for generation in ("v6", "v7", "tpu7"))
    multiples = {"matmul": 256 if wide else 128, "lane": 128, "sublane": 8}
    return Capabilities(frozenset({*TOLERANCES, *integers}), emulated, multiples, collectives="XLA")


BACKEND = Tpu
