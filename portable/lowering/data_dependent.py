"""Ops whose result is a number, or as large as the data says, as torch code for a trace specialised on its data.

Each reads the numbers that it needs (`Specialisation.number`); everything else is computed by ops of static size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from portable.lowering.sorting import SMALL_SORT
from portable.lowering.specialise import Number, Specialisation

aten = torch.ops.aten
Rewrite = Callable[..., Any]
REWRITES: dict[OpOverload, Rewrite] = {}


def rewrites(*ops: OpOverload) -> Callable[[Rewrite], Rewrite]:
    """Decorator: ``rewrite(data, *args, **kwargs)`` stands for each of ``ops`` in a specialised trace."""

    def decorate(rewrite: Rewrite) -> Rewrite:
        REWRITES.update(dict.fromkeys(ops, rewrite))
        return rewrite

    return decorate


@rewrites(aten._local_scalar_dense.default)
def local_scalar_dense(data: Specialisation, x: Tensor) -> Number:
    return data.number(x)


@rewrites(aten.equal.default)
def equal(data: Specialisation, x: Tensor, other: Tensor) -> bool:
    return x.shape == other.shape and bool(data.number(torch.eq(x, other).all()))


@rewrites(aten.allclose.default)
def allclose(
    data: Specialisation, x: Tensor, other: Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(data.number(torch.isclose(x, other, rtol, atol, equal_nan).all()))


@rewrites(aten.nonzero.default)
def nonzero(data: Specialisation, x: Tensor) -> Tensor:
    found = torch.nonzero_static(x, size=data.size((x != 0).sum()))
    return found.t().contiguous().t()  # the kernel fills the transpose


def _positions(data: Specialisation, hit: Tensor) -> Tensor:
    return nonzero(data, hit).squeeze(1)


@rewrites(aten.masked_select.default)
def masked_select(data: Specialisation, x: Tensor, mask: Tensor) -> Tensor:
    x, mask = torch.broadcast_tensors(x, mask)
    return x.reshape(-1).index_select(0, _positions(data, mask.reshape(-1)))


@rewrites(aten.bincount.default)
def bincount(data: Specialisation, x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    size = max(minlength, data.size(x.max().long()) + 1) if x.numel() else minlength
    if x.numel() and data.size(x.min().long()) < 0:  # the program found it, eager did not
        raise RuntimeError("bincount only supports 1-d non-negative integral inputs.")
    if not x.numel() or weights is None or not weights.numel():
        return x.new_zeros(size, dtype=torch.int64).index_add(0, x.long(), torch.ones_like(x, dtype=torch.int64))
    amount = weights if weights.dtype is torch.float32 else weights.double()
    return amount.new_zeros(size).index_add(0, x.long(), amount)


@rewrites(aten.repeat_interleave.Tensor)
def repeat_interleave(data: Specialisation, repeats: Tensor, *, output_size: None = None) -> Tensor:
    return aten.repeat_interleave.Tensor(repeats, output_size=data.size(repeats.sum()))


def _differs(values: Tensor) -> Tensor:
    """Whether each row differs from the one before (bool[rows]; the first one does). NaN differs from NaN."""
    changed = (values[1:] != values[:-1]).flatten(1).any(1) if values.ndim > 1 else values[1:] != values[:-1]
    return torch.cat([torch.ones_like(values[:1].reshape(-1)[:1], dtype=torch.bool), changed])


def _runs(data: Specialisation, starts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of consecutive equal rows, from where one starts: positions of the starts, each row's run, the runs' lengths."""
    first = _positions(data, starts)
    ends = torch.cat([first[1:], first.new_full((min(first.numel(), 1),), starts.numel())])
    return first, starts.cumsum(0) - 1, ends - first


def _sorted_runs(data: Specialisation, x: Tensor, inverse: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """As `_runs`, of the elements of ``x`` (1-d) in ascending order: positions in ``x``."""
    if inverse and x.is_floating_point() and x.numel() > SMALL_SORT and data.size((x != x).sum()) > 1:
        data.refuse("torch leaves open which NaN comes first, and its choice cannot be reproduced")
    values, order = torch.sort(x, stable=True)
    first, run, counts = _runs(data, _differs(values))
    return order.index_select(0, first), torch.zeros_like(run).scatter(0, order, run), counts


@rewrites(aten._unique2.default)
def unique2(
    data: Specialisation, x: Tensor, sorted: bool = True, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """On CPU the result is sorted in any case."""
    return _distinct(x, _sorted_runs(data, x.reshape(-1), return_inverse), return_inverse, return_counts)


@rewrites(aten._unique.default)
def unique(data: Specialisation, x: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    return unique2(data, x, sorted, return_inverse)[:2]


@rewrites(aten.unique_consecutive.default)
def unique_consecutive(
    data: Specialisation, x: Tensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if dim is not None:
        return unique_dim_consecutive(data, x, dim, return_inverse, return_counts)
    return _distinct(x, _runs(data, _differs(x.reshape(-1))), return_inverse, return_counts)


def _distinct(
    x: Tensor, runs: tuple[Tensor, Tensor, Tensor], return_inverse: bool, return_counts: bool
) -> tuple[Tensor, Tensor, Tensor]:
    first, run, counts = runs
    absent = run.new_empty(0)
    return (
        x.reshape(-1).index_select(0, first),
        run.reshape(x.shape) if return_inverse else absent,
        counts if return_counts else absent,
    )


@rewrites(aten.unique_dim_consecutive.default)
def unique_dim_consecutive(
    data: Specialisation, x: Tensor, dim: int, return_inverse: bool = False, return_counts: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        return x.clone(), x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.int64)
    rows = x.movedim(dim, 0)
    first, run, counts = _runs(data, _differs(rows))
    return x.index_select(dim, first), run, counts


@rewrites(aten.unique_dim.default)
def unique_dim(
    data: Specialisation,
    x: Tensor,
    dim: int,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in lexicographic order, by integers of the same order: columns ranked alone, then pair by pair."""
    if x.numel() == 0:
        return x.clone(), x.new_empty(0, dtype=torch.int64), x.new_empty(0, dtype=torch.int64)
    if x.is_floating_point() and data.number((x != x).any()):
        data.refuse("rows with NaN have no order")
    rows = x.movedim(dim, 0)
    rank = _ranks(rows.reshape(rows.shape[0], -1))
    while rank.shape[1] > 1:
        pairs, odd = rank.shape[1] // 2, rank[:, rank.shape[1] // 2 * 2 :]
        rank = torch.cat([_ranks(rank[:, 0 : 2 * pairs : 2] * rank.shape[0] + rank[:, 1 : 2 * pairs : 2]), odd], 1)
    first, run, counts = _sorted_runs(data, rank.squeeze(1))
    return x.index_select(dim, first), run, counts


def _ranks(x: Tensor) -> Tensor:
    """For each element how many distinct values of its column are less (int64)."""
    values, order = torch.sort(x, dim=0, stable=True)
    later = torch.cat([torch.zeros_like(order[:1]), (values[1:] != values[:-1]).long()])
    return torch.zeros_like(order).scatter(0, order, later.cumsum(0))


def is_mask(index: Tensor | None) -> bool:
    """Whether an index selects where it is true."""
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def selects_by_mask(op: OpOverload, indices: Sequence[Tensor | None]) -> bool:
    """Whether advanced indexing needs to know how many elements its masks select: a write by one mask does not."""
    masks = sum(is_mask(i) for i in indices)
    given = sum(i is not None for i in indices)
    return masks > 0 and (given > 1 or op in (aten.index.Tensor, aten._unsafe_index.Tensor))


def _by_position(op: OpOverload) -> Rewrite:
    def rewrite(data: Specialisation, x: Tensor, indices: Sequence[Tensor | None], *rest: Any, **kwargs: Any) -> Tensor:
        found: list[Tensor | None] = []
        for number, index in enumerate(indices):
            if index is None or not is_mask(index):
                found.append(index)
                continue
            here = x.shape[len(found) : len(found) + index.ndim]
            if index.ndim == 0 or index.shape != here:
                raise IndexError(
                    f"The shape of the mask {list(index.shape)} at index {number} does not match the shape of the "
                    f"indexed tensor {list(x.shape)} at index {len(found)}"
                )
            found.extend(nonzero(data, index).unbind(1))
        result: Tensor = op(x, found, *rest, **kwargs)
        return result

    return rewrite


MASKED = {
    op: _by_position(op)
    for op in (
        aten.index.Tensor,
        aten._unsafe_index.Tensor,
        aten.index_put.default,
        aten.index_put_.default,
        aten._unsafe_index_put.default,
        aten._index_put_impl.default,
        aten._index_put_impl_.default,
    )
}
