"""`acme`: what a vendor writes to bring an accelerator to portable. The guide is README.md beside this package.

Importing it registers nothing in torch and touches no device: portable imports it to list and to probe it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import fx

from portable import capture
from portable.backends.base import TOLERANCES, Backend, Capabilities, MemoryStats, State
from portable.errors import UnsupportedInputError
from portable.explain import Compilation, GraphRecord, Record, ran
from portable.kernels import substitution
from portable.kernels.choice import Choice


class Acme(Backend):
    """The device runs ATen operators one by one; the captured graph is its program."""

    name = "acme"
    path = "native"

    @classmethod
    def probe(cls) -> State:
        if not hasattr(torch._C, "_acc"):
            return State(
                False, f"torch {torch.__version__} cannot add a device from Python", "install torch 2.11 or newer"
            )
        return State(True, "ready, Acme A1 (simulated in host memory)", evidence="verified here")

    def device(self) -> torch.device:
        from . import device

        device.start()
        return torch.device(device.NAME)

    def capabilities(self) -> Capabilities:
        integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
        return Capabilities(
            frozenset({torch.float64, torch.float32, torch.bfloat16, *integers}),
            emulated={torch.float64: "by the host"},
            multiples={"matmul": 16},
        )

    def hardware(self) -> dict[str, str]:
        try:
            runtime = version("portable-acme")
        except PackageNotFoundError:  # run from a checkout
            runtime = "not installed"
        return {"device": "Acme A1", "architecture": "acme1", "driver": "simulated", "runtime": runtime}

    def check_input(self, tensor: torch.Tensor, name: str) -> None:
        super().check_input(tensor, name)
        if tensor.device.type == "cpu" and tensor.dim():
            raise UnsupportedInputError(f"{name} is on the host", remedy="move it: tensor.to('acme')")

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        for name, x in zip(graph.arguments, example_inputs, strict=False):
            if isinstance(x, torch.Tensor):
                self.check_input(x, name)

        def compile_aten(aten: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
            record.forbid_when_frozen(graph.cause)
            capture_s = graph.since_call()
            began = time.perf_counter()
            choice = Choice.here(self.label(), self.path, record.kernels)
            substitution.substitute(aten, choice, frozenset(), {})
            choice.note(graph)
            graph.ops.update(substitution.counted(aten, "acme"))
            program = _Program(aten)  # a vendor's compiler takes the graph here
            compile_s = time.perf_counter() - began
            record.add(Compilation(graph.index, kind, graph.cause, capture_s, 0.0, compile_s))
            return program

        return capture.aot(gm, example_inputs, compile_aten)

    def synchronize(self) -> None:
        from . import device

        device.synchronize()

    def memory_stats(self) -> MemoryStats:
        from . import device

        return MemoryStats(*device.memory())

    def manual_seed(self, seed: int) -> None:
        self.device()
        torch.manual_seed(seed)  # which seeds every started device of torch, ours too

    def tolerances(self) -> Mapping[torch.dtype, float]:
        return TOLERANCES


class _Program:
    """A compiled graph: takes its arguments as one list, which it empties, so that they can be freed while it runs."""

    def __init__(self, aten: fx.GraphModule) -> None:
        self._aten = aten
        self._boxed_call = True  # what torch asks for

    def __call__(self, args: list[Any]) -> Any:
        given = list(args)
        args.clear()
        with torch.no_grad() if not torch.is_inference_mode_enabled() else contextlib.nullcontext():
            results = self._aten(*given)
        ran()
        return results
