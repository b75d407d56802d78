"""A backend that looks at each functional graph of a model and runs it in eager: for what is asked of a model without
running it anywhere else."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import unset_fake_temporarily

from portable import capture
from portable.backends.base import Backend, State
from portable.explain import GraphRecord, Record, ran
from portable.lowering.context import Spec


class Observing(Backend):
    """Subclasses say what they look for; they are never registered by a name."""

    path = "stablehlo"

    @classmethod
    def probe(cls) -> State:
        return State(True, "it runs in eager", evidence="verified here")

    def device(self) -> torch.device:
        return torch.device("cpu")

    @abstractmethod
    def observe(self, aten: fx.GraphModule, specs: Sequence[Any], kind: str, graph: GraphRecord) -> None:
        """Look at one functional graph.

        Args:
            specs: the types of its arguments, or their values where they are numbers.
            kind: "inference", "forward" or "backward".
        """

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        def compile_aten(aten: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
            specs = [Spec(tuple(map(int, x.shape)), x.dtype) if isinstance(x, torch.Tensor) else x for x in inputs]
            with unset_fake_temporarily():
                self.observe(aten, specs, kind, graph)

            def call(*args: Any) -> Any:
                ran()
                return aten(*args)

            return make_boxed_func(call)

        return capture.aot(gm, example_inputs, compile_aten)
