"""A trace that meets what depends on data, specialised on the data of the call.

Where tracing needs a number (``item``, a branch, the size of a result), it is found by running eagerly what the trace
holds so far of the number's ancestors. The graph returns the number too, so that after the run it is compared with what
it was specialised on: the program itself has computed it. XLA rounds a float otherwise now and then: the trace is then
repeated with the program's, until the two are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import fx
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from portable.errors import SpecialisationError, UnsupportedOp, UnsupportedOpError
from portable.lowering import registry
from portable.lowering.source import location

Number = int | float | complex | bool


class Read(NamedTuple):
    """A number that the trace depends on: which op needs it, where (the user's line), its value."""

    op: OpOverload
    where: str
    value: Number


class Specialisation:
    """What one trace reads of its data.

    Attributes:
        reads: in the order of the trace.
        tensors: the traced tensor of each read (0-d), for the graph to return.
    """

    def __init__(self, args: Sequence[torch.Tensor], known: Mapping[int, Number], backend: str) -> None:
        """``known`` are floats that a program has computed, by the number of the read."""
        registry.load()
        self.reads: list[Read] = []
        self.tensors: list[torch.Tensor] = []
        self._args, self._known, self._backend = args, known, backend
        self._values: dict[fx.Node, Any] = {}
        self._op: Any = None
        self._root: Any = None  # holds the constants of the trace

    def rewrite(self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
        """What stands for ``op``, called with this and the op's arguments; None for an op that reads no data."""
        from portable.lowering.data_dependent import MASKED, REWRITES, selects_by_mask

        if op in MASKED and selects_by_mask(op, args[1]):
            return MASKED[op]
        if op is torch.ops.aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
            return None
        return REWRITES.get(op)

    def number(self, x: torch.Tensor) -> Number:
        """The value of a 0-d tensor; if it is traced, it is checked after the run."""
        x = _unwrapped(x)
        node = _node(x)
        if node is None:
            return self._evaluated_number(x)
        known = self._known.get(len(self.reads)) if x.is_floating_point() or x.is_complex() else None
        value = self._evaluated_number(x) if known is None else known
        self.tensors.append(x)
        self.reads.append(Read(self._op, location(node), value))
        return value

    def size(self, x: torch.Tensor) -> int:
        """The value of a traced 0-d tensor that counts."""
        return int(self.number(x).real)

    def agrees(self, computed: Sequence[Any]) -> bool:
        """Whether a program has computed for the reads what it was specialised on.

        Raises:
            SpecialisationError: another size or truth value; only a float may round otherwise.
        """
        differing = self._differing(computed)
        for i in differing:
            if not isinstance(self.reads[i].value, (float, complex)):
                raise self._disagreement(i, computed[i])
        return not differing

    def rounded(self, computed: Sequence[Any]) -> dict[int, Number]:
        """The floats that a program has computed, by the number of the read: what to specialise on next."""
        numbers = enumerate(map(_number, computed))
        return {i: number for i, number in numbers if isinstance(number, (float, complex))}

    def disagreement(self, computed: Sequence[Any]) -> SpecialisationError:
        """The error for what a program has computed otherwise than it was specialised on."""
        i = self._differing(computed)[0]
        return self._disagreement(i, computed[i])

    def _disagreement(self, i: int, computed: Any) -> SpecialisationError:
        op, where, value = self.reads[i]
        return SpecialisationError(
            f"{op}{f' ({where})' if where else ''}: the program was specialised on {value}, and computes "
            f"{_number(computed)}",
            remedy="the number lies where rounding decides: make the branch or the size independent of it",
        )

    def _differing(self, computed: Sequence[Any]) -> list[int]:
        pairs = zip(self.reads, computed, strict=True)
        return [i for i, (read, c) in enumerate(pairs) if repr(read.value) != repr(_number(c))]

    def refuse(self, reason: str) -> NoReturn:
        raise UnsupportedOpError([UnsupportedOp(str(self._op), reason)], backend=self._backend)

    def real(self, x: torch.Tensor) -> torch.Tensor:
        """The value of a traced tensor, computed eagerly."""
        x = _unwrapped(x)
        node = _node(x)
        if node is None:
            return x
        mode: Any = get_proxy_mode()
        self._root = mode.tracer.root
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            value: torch.Tensor = self._evaluated(node)
        return value

    def apply(self, rewrite: Callable[..., Any], op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of ``rewrite`` in place of ``op``; raises what eager raises for these arguments."""
        outer, self._op = self._op, op
        try:
            if not op._schema.is_mutable:
                real = pytree.tree_map_only(torch.Tensor, self.real, (list(args), kwargs))
                with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
                    op(*real[0], **real[1])
            return rewrite(self, *args, **kwargs)
        finally:
            self._op = outer

    def _evaluated_number(self, x: torch.Tensor) -> Number:
        value = self.real(x)
        with _disable_current_modes():
            return _number(value)

    def _evaluated(self, wanted: fx.Node) -> Any:
        pending, needed = [wanted], set()
        while pending:
            node = pending.pop()
            if node not in needed and node not in self._values:
                needed.add(node)
                pending.extend(node.all_input_nodes)
        placeholders = wanted.graph.find_nodes(op="placeholder")
        self._values.update(zip(placeholders, self._args, strict=False))
        for node in wanted.graph.nodes:
            if node in needed and node not in self._values:
                self._values[node] = self._run(node)
        return self._values[wanted]

    def _run(self, node: fx.Node) -> Any:
        args: Any = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        op: Any = node.target
        if node.op == "get_attr":
            return operator.attrgetter(op)(self._root)
        if torch.Tag.nondeterministic_seeded in getattr(op, "tags", ()):
            self.refuse(f"its result's shape or a branch depends on random numbers, those of {op}")
        if not isinstance(op, OpOverload) and op is not operator.getitem:
            self.refuse(f"its result's shape or a branch depends on {op}")
        return op(*args, **kwargs)


def _number(computed: Any) -> Number:
    value: Number = computed.item() if isinstance(computed, torch.Tensor) else computed
    return value


def _unwrapped(x: torch.Tensor) -> torch.Tensor:
    if isinstance(x, FunctionalTensor):
        x = x.elem
    if not torch._is_functional_tensor(x):
        return x
    torch._sync(x)
    return torch._from_functional_tensor(x)


def _node(x: torch.Tensor) -> Any:
    mode: Any = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return None if slot is None else slot.proxy.node
