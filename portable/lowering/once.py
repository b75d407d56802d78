"""One call of a function as one StableHLO program: captured, lowered, compiled and run at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils import _pytree as pytree

from portable import backends, config
from portable.backends import pjrt
from portable.backends.base import Backend
from portable.backends.xla import Xla
from portable.capture import trace
from portable.errors import (
    ConfigError,
    UnsupportedInputError,
    UnsupportedOp,
    UnsupportedOpError,
    UnsupportedOutputError,
)
from portable.lowering.context import Spec
from portable.lowering.draws import generator_at, generator_state
from portable.lowering.fallback import warn
from portable.lowering.module import lower_graph
from portable.lowering.placement import Place, overlapping, places
from portable.lowering.program import DATA_DEPENDENT
from portable.lowering.refusals import said_once
from portable.lowering.specialise import Number, Specialisation

ATTEMPTS = 5  # the next is specialised on the floats that the program has computed, if they are rounded otherwise


class Call:
    """One call of a function: what is traced of it, and with which tensors.

    Attributes:
        tensors: its tensor arguments, in order.
        mutated: after `trace`, the positions among them of those that it writes to.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Backend) -> None:
        self._fn, self._backend = fn, str(chosen)
        self.leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        for i in self._where:
            chosen.check_input(self.leaves[i], f"argument {i}")
        self.tensors = [self.leaves[i].resolve_conj().resolve_neg() for i in self._where]
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes = [mode.from_tensor(t, static_shapes=True) for t in self.tensors]
        self.specs = [Spec(tuple(t.shape), t.dtype) for t in self.tensors]
        self.mutated: list[int] = []
        self._structure: Any = None
        self._returned = 0

    def _flat(self, *inputs: torch.Tensor) -> list[Any]:
        values = list(self.leaves)
        for i, value in zip(self._where, inputs, strict=True):
            values[i] = value
        args, kwargs = pytree.tree_unflatten(values, self._tree)
        outputs, self._structure = pytree.tree_flatten(self._fn(*args, **kwargs))
        self._returned = len(outputs)
        return outputs

    def trace(self, data: Specialisation) -> fx.GraphModule:
        """Its functional ATen graph.

        Raises:
            UnsupportedOpError: torch cannot trace it without its data.
        """
        self.mutated = []
        try:
            gm = trace(self._flat, self._fakes, mutated=self.mutated, data=data)
        except DATA_DEPENDENT as failure:
            op = str(getattr(failure, "func", None) or "this program")
            refused = UnsupportedOp(op, "its result's shape or a branch depends on the data")
            raise UnsupportedOpError([refused], backend=self._backend) from failure
        except UnsupportedOperatorException as failure:
            refused = UnsupportedOp(str(failure), "torch cannot trace it")
            raise UnsupportedOpError([refused], backend=self._backend) from failure
        except RuntimeError as failure:
            if "internal overlap" not in str(failure):
                raise
            refused = UnsupportedOp("this program", "it writes to a tensor of which elements share memory")
            raise UnsupportedOpError([refused], backend=self._backend) from failure
        if overlapping(self.tensors, self.mutated):
            raise UnsupportedInputError(
                "arguments overlap in memory, and one of them is written to", remedy="pass a clone of one of them"
            )
        return gm

    def places(self, gm: fx.GraphModule) -> list[Place | None]:
        """How what the call returns lies in memory."""
        outputs = next(iter(reversed(gm.graph.nodes))).args[0]
        values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in outputs]
        inputs = [n.meta.get("val") for n in gm.graph.find_nodes(op="placeholder")]
        return places(values[: self._returned], inputs, lambda n: n if isinstance(n, int) else None)

    def finish(self, values: list[Any]) -> Any:
        """What the call returns: the new values of what it writes to are written, the rest is in its own structure."""
        outputs = values[: len(values) - len(self.mutated)]
        for i, value in zip(self.mutated, values[len(outputs) :], strict=True):
            with torch.no_grad():
                self.leaves[self._where[i]].copy_(value)
        for value in outputs:
            if not isinstance(value, (torch.Tensor, int, float, complex, bool, str, type(None))):
                raise UnsupportedOutputError(
                    f"the function returns a {type(value).__name__}", remedy="return tensors, numbers, strings or None"
                )
        return pytree.tree_unflatten(outputs, self._structure)


def run(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, fallback: str | None
) -> Any:
    """See `portable.testing.lowered`."""
    fallback = config.fallback_mode(fallback)
    chosen = backends.get(backend)
    if not isinstance(chosen, Xla):
        raise ConfigError(f"backend {chosen} does not lower to StableHLO", remedy="name xla or tpu")
    call = Call(fn, args, kwargs, chosen)
    client = pjrt.client(chosen.platform)
    start = generator_state()
    known: dict[int, Number] = {}
    for _ in range(ATTEMPTS):
        data = Specialisation(call.tensors, known, backend)
        with compile_lock, said_once():  # what traces changes torch for the whole process
            gm = call.trace(data)
            low = lower_graph(
                gm,
                call.specs,
                platform=client.platform,
                backend=backend,
                fallback=fallback,
                mutated=call.mutated,
                places=call.places(gm),
            )
        buffers = client.compile(low.module)([client.seed(low.random), *map(client.put, call.tensors)])
        results = client.take(buffers)
        values = low.values(results, call.tensors)
        computed = values[len(values) - len(data.reads) :]
        if data.agrees(computed):
            break
        known = data.rounded(computed)
        torch.default_generator.set_state(generator_at(start).get_state())
    else:
        raise data.disagreement(computed)
    values = low.assemble(results, call.tensors)[: len(values) - len(data.reads)]
    if fallback == "warn":
        warn(low.fallbacks, set())
    return call.finish(values)
