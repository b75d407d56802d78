"""Where the outputs of a graph lie in memory: the strides, offsets and sharing that torch traced.

A program returns row-major arrays, each in memory of its own. A user sees more of a tensor than that (``stride()``,
``view``, ``is_contiguous``), and AOTAutograd derives an output that is a view of an argument from the strides and the
offset of what the program returns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch
from jax import lax

from portable.errors import UnsupportedOutputError


class Place(NamedTuple):
    """Sizes, strides and offset, in elements.

    Attributes:
        offset: from the beginning of ``argument`` or ``output``, if it lies in one; else of its own memory.
        argument, output: the position of the argument, or of another output, whose memory this is.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    argument: int | None = None
    output: int | None = None

    def extent(self) -> int:
        """How many elements its memory has."""
        return self.offset + 1 + sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))

    def order(self) -> list[int] | None:
        """The dimensions in the order of memory, if it has no gaps; those that are expanded count as of size 1."""
        order = sorted(range(len(self.size)), key=lambda d: -self.stride[d])
        expected = 1
        for d in reversed(order):
            if self.size[d] > 1 and self.stride[d] != 0:
                if self.stride[d] != expected:
                    return None
                expected *= self.size[d]
        return None if self.offset else order

    def in_order(self, value: jax.Array, order: Sequence[int]) -> jax.Array:
        """The array whose row-major memory is this."""
        for d, (n, s) in enumerate(zip(self.size, self.stride, strict=True)):
            if n > 1 and s == 0:
                value = lax.slice_in_dim(value, 0, 1, 1, d)
        return lax.transpose(value, order)

    def on(self, owner: torch.Tensor) -> torch.Tensor:
        """The tensor there, in the memory of ``owner``; to autograd it is no view."""
        offset = owner.storage_offset() + self.offset
        return owner.new_empty(0).set_(owner.untyped_storage(), offset, self.size, self.stride)

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """A tensor with these strides and ``value``'s elements."""
        owner = value.new_empty(self.extent())
        owner[_addresses(self.size, self.stride) + self.offset] = value
        return self._replace(offset=0).on(owner[self.offset :])


def _addresses(size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The place of each element in memory, from that of the first."""
    index = torch.zeros((), dtype=torch.int64)
    for n, s in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + s * torch.arange(n)
    return index


def overlapping(tensors: Sequence[torch.Tensor], written: Sequence[int]) -> bool:
    """Whether memory of one of the ``written`` (positions) is memory of another."""
    if len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors):
        return False
    spans = {i: _span(x) for i, x in enumerate(tensors) if x.numel()}
    ordered = sorted(spans.values())
    if all(before[1] <= after[0] for before, after in itertools.pairwise(ordered)):
        return False
    return any(
        i != j and i in spans and start < spans[i][1] and spans[i][0] < end and _share_memory(tensors[i], tensors[j])
        for i in written
        for j, (start, end) in spans.items()
    )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """Where its memory begins and ends, in bytes."""
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.itemsize


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    bytes_of = [t.data_ptr() + t.itemsize * _addresses(t.shape, t.stride()) for t in (x, y)]
    return x.itemsize != y.itemsize or bool(torch.isin(*bytes_of).any())


def places(
    outputs: Sequence[Any], inputs: Sequence[Any], concrete: Callable[[int | torch.SymInt], int | None]
) -> list[Place | None]:
    """The place of each output; None of what is no tensor, is empty, row-major, or not known.

    Args:
        outputs, inputs: of the graph, as torch traced them.
        concrete: the value of a symbolic size in the call that the program is for, if it is known.

    Raises:
        UnsupportedOutputError: an output is a view that AOTAutograd would derive wrongly.
    """
    owners = {_storage(x): i for i, x in reversed([*enumerate(inputs)]) if _plain(x)}
    found = [_place(x, inputs, owners, concrete) if _plain(x) else None for x in outputs]
    for i, (x, place) in enumerate(zip(outputs, found, strict=True)):
        others = [*inputs, *outputs[:i], *outputs[i + 1 :]]
        if place is None and _is_symbolic_view(x, others) and 0 not in map(concrete, x.shape):
            raise UnsupportedOutputError(
                "the function returns a conjugated or negated view of an argument, or of another tensor that it "
                "returns, whose sizes change from call to call",
                remedy="return a copy of it (clone()), or compile with dynamic=False",
            )
    groups: dict[int, list[int]] = {}
    for i, place in enumerate(found):
        if place and place.argument is None:
            groups.setdefault(_storage(outputs[i]), []).append(i)
    for group in groups.values():
        _share(found, outputs, group)
    return [place if place and not _is_row_major(place) else None for place in found]


def _place(
    x: torch.Tensor,
    inputs: Sequence[Any],
    owners: dict[int, int],
    concrete: Callable[[int | torch.SymInt], int | None],
) -> Place | None:
    argument = owners.get(_storage(x))
    if argument is not None and inputs[argument].dtype != x.dtype:
        argument = None
    begins = 0 if argument is None else inputs[argument].storage_offset()
    size, stride = [concrete(n) for n in x.shape], [concrete(n) for n in x.stride()]
    offset = concrete(x.storage_offset() - begins)
    if offset is None or None in size or None in stride or 0 in size:
        return None
    return Place(tuple(size), tuple(stride), offset, argument)  # type: ignore[arg-type]


def _share(found: list[Place | None], outputs: Sequence[Any], group: Sequence[int]) -> None:
    """Have the outputs of one memory lie in the one that is all of it, if there is one."""
    of = {i: place for i in group if (place := found[i])}
    extent = max(place.extent() for place in of.values())
    whole = [i for i, p in of.items() if p.order() is not None and p.extent() == extent]
    for i, place in of.items():
        if whole and i != whole[0] and outputs[i].dtype == outputs[whole[0]].dtype:
            found[i] = place._replace(output=whole[0])


def _is_symbolic_view(x: Any, others: Sequence[Any]) -> bool:
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
        return False
    static = all(isinstance(n, int) for n in (*x.shape, *x.stride(), x.storage_offset()))
    return not static and _storage(x) in [_storage(y) for y in others if isinstance(y, torch.Tensor)]


def _plain(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_conj() and not x.is_neg()


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_row_major(place: Place) -> bool:
    """Whether it is what a program returns by itself."""
    expected = tuple(math.prod(place.size[d + 1 :]) for d in range(len(place.size)))
    return place == Place(place.size, expected, 0)
