"""The native path, shared by the backends whose device PyTorch itself drives: Inductor, or eager where asked."""

from __future__ import annotations

import functools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from portable.backends.base import Backend, ask
from portable.errors import BackendUnavailableError
from portable.explain import Compilation, GraphRecord, Record, ran


class NativeBackend(Backend):
    """Compiles with Inductor for ``device_type``; the variant ``eager`` runs the captured graph as it is."""

    path = "native"
    variants = ("eager",)
    device_type: str

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        for name, x in zip(graph.arguments, example_inputs, strict=False):
            if isinstance(x, torch.Tensor):
                self.check_input(x, name)
        if self.variant == "eager":
            graph.ops.update({(str(n.target), "eager"): 1 for n in gm.graph.nodes if n.op == "call_function"})
            record.add(Compilation(graph.index, "eager", graph.cause, graph.since_call(), 0.0, 0.0))
            compiled: Callable[..., Any] = gm.forward
        else:
            self._require_compiler()
            compiled = self._inductor(gm, example_inputs, graph, record)

        def run(*args: Any) -> Any:
            ran()
            return compiled(*args)

        return run

    def _require_compiler(self) -> None:
        from torch._inductor import config

        candidates = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
        if self.device_type == "cpu" and not any(c and shutil.which(c) for c in candidates):
            raise BackendUnavailableError(
                "Inductor needs a C++ compiler for the CPU, and none is on PATH",
                remedy="install g++ or clang, or name backend='cpu:eager'",
            )

    def _inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        capture_s = graph.since_call()

        @functools.wraps(compile_fx_inner)
        def inner(aten: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
            record.forbid_when_frozen(graph.cause)
            counted = Counter((str(n.target), "inductor") for n in aten.graph.nodes if n.op == "call_function")
            began = time.perf_counter()
            output = compile_fx_inner(aten, *args, **kwargs)
            graph.ops.update(counted)
            record.add(Compilation(graph.index, kind, graph.cause, capture_s, 0.0, time.perf_counter() - began))
            return output

        # A hit in AOTAutograd's own cache would skip `inner`, and with it the record; Inductor's code cache still
        # serves.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Any = compile_fx(gm, list(example_inputs), inner_compile=inner)
        return compiled


def cuda_state() -> tuple[bool, str]:
    """(usable, device name or reason) of torch.cuda, which ROCm answers to as well; asked in a fresh process."""
    return ask("import torch; torch.cuda.init(); print(torch.cuda.get_device_name(0))")
