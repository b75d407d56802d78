"""`trainium`: AWS Trainium through torch-neuronx, which registers its own Dynamo backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from portable.backends.base import State, ask, installed
from portable.backends.native import NativeBackend
from portable.explain import Compilation, GraphRecord, Record, ran


class Trainium(NativeBackend):
    name = "trainium"
    device_type = "xla"

    @classmethod
    def probe(cls) -> State:
        if not installed("torch_neuronx"):
            return State(False, "torch_neuronx is not installed", "install torch-neuronx on a Trainium instance")
        ok, text = ask("import torch_neuronx, torch_xla; print(torch_xla.device())")
        if not ok:
            return State(False, f"no usable device: {text}", "check it with neuron-ls")
        return State(True, f"ready, {text}")

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        compiled = lookup_backend("openxla")(gm, list(example_inputs))
        record.add(Compilation(graph.index, "graph", graph.cause, graph.since_call(), 0.0, 0.0))

        def run(*args: Any) -> Any:
            ran()
            return compiled(*args)

        return run


BACKEND = Trainium
