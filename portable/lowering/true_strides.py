"""Strides that torch's fake tensors state otherwise than its CPU kernels give them.

A row of ``ORDERS`` says how the first result of an op lies in memory, which has no gaps; pointwise ops of two tensors
follow TensorIterator. Within ``true_strides()`` fake tensors follow it, so that Dynamo, AOTAutograd and the lowering
see what eager gives: in ``stride()``, in ``as_strided`` and in what is returned. Each row is a finding of the sweep in
tests/conformance/test_strides.py (torch 2.13).
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import guarding_hint_or_throw, has_guarding_hint
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

Order = Sequence[int]  # the dimensions in the order of memory, the outermost first


def _hint(n: int | torch.SymInt) -> int:
    return n if isinstance(n, int) else guarding_hint_or_throw(n)


def _row_major(result: torch.Tensor, *_: Any, **__: Any) -> Order:
    return range(result.ndim)


def _column_major(result: torch.Tensor, *_: Any, **__: Any) -> Order:
    """As LAPACK leaves matrices; a vector is one column of them."""
    n = result.ndim
    return range(n) if n < 2 else (*range(n - 2), n - 1, n - 2)


def _suggested(result: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Order:
    """Channels-last if the first argument is, else row-major: ``suggest_memory_format`` of the kernels."""
    last = torch._prims_common.suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)
    return (0, *range(2, result.ndim), 1) if last else range(result.ndim)


def _of_iterator(result: torch.Tensor, *args: Any, **_: Any) -> Order:
    """That of TensorIterator, which is that of an addition of the operands."""
    operands = [a for a in args if isinstance(a, torch.Tensor)]
    with _disable_current_modes(), no_python_dispatcher():
        like = [*map(_like, operands)]
        strides = functools.reduce(torch.add, like).stride() if len(like) > 1 else like[0].mul(2).stride()
    return sorted(range(result.ndim), key=lambda d: -strides[d])


def _of_ldexp(result: torch.Tensor, x: torch.Tensor, exponent: torch.Tensor) -> Order:
    """The kernel multiplies by a power of two whose layout is its own."""
    with _disable_current_modes(), no_python_dispatcher():
        strides = torch.ldexp(_like(x, "cpu"), _like(exponent, "cpu")).stride()
    return sorted(range(result.ndim), key=lambda d: -strides[d])


def _unless_resized(result: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Order:
    """A tensor that has the size already stays as it is."""
    if [*map(_hint, x.shape)] != [*map(_hint, result.shape)]:
        return range(result.ndim)
    return sorted(range(result.ndim), key=lambda d: -_hint(x.stride()[d]))


def _unless_overlapping(result: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> Order | None:
    """A tensor of which elements share memory is copied row by row, another as torch says."""
    overlaps = any(_hint(s) == 0 and _hint(n) > 1 for n, s in zip(x.shape, x.stride(), strict=True))
    return range(result.ndim) if overlaps else None


def _like(x: torch.Tensor, device: str = "meta") -> torch.Tensor:
    return torch.empty_strided([*map(_hint, x.shape)], [*map(_hint, x.stride())], device=device)


ORDERS: dict[OpOverload, Callable[..., Order | None]] = {
    **dict.fromkeys(
        (
            aten._batch_norm_with_update.default,
            aten._batch_norm_with_update_functional.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten.native_batch_norm.default,
            aten.max_unpool2d.default,
            aten.native_channel_shuffle.default,
            aten.channel_shuffle.default,
            aten.reflection_pad2d.default,
            aten.reflection_pad3d.default,
            aten.replication_pad2d.default,
            aten.replication_pad3d.default,
        ),
        _suggested,
    ),
    **dict.fromkeys(
        (
            aten.masked_fill.Scalar,
            aten.masked_fill.Tensor,
            aten.nll_loss2d_forward.default,
            aten.normal.Tensor_float,
            aten.normal.Tensor_Tensor,
            aten.normal.float_Tensor,
            aten.one_hot.default,
            aten.upsample_linear1d.default,
            aten.upsample_nearest1d.default,
            aten._upsample_nearest_exact1d.default,
        ),
        _row_major,
    ),
    aten.as_strided_scatter.default: _unless_overlapping,
    aten.ldexp.Tensor: _of_ldexp,
    aten.linalg_lstsq.default: _column_major,
    aten.resize.default: _unless_resized,
    aten.resize_as.default: _unless_resized,
    aten.native_dropout_backward.default: _of_iterator,
    aten.xlogy.Tensor: _of_iterator,
}


def _order_of(op: Any) -> Callable[..., Order | None] | None:
    """What says how the first result of ``op`` lies, None if torch does."""
    if not isinstance(op, OpOverload):
        return None
    order = ORDERS.get(op)
    if order is None and torch.Tag.pointwise in op.tags and not op._schema.is_mutable and _operands(op) == 2:
        return _of_iterator
    return order


@functools.cache
def _operands(op: OpOverload) -> int:
    return sum(isinstance(a.type, torch.TensorType) for a in op._schema.arguments)


def _strides(size: Sequence[int | torch.SymInt], order: Order) -> list[int | torch.SymInt]:
    strides: list[int | torch.SymInt] = [1] * len(size)
    step: int | torch.SymInt = 1
    for d in reversed(order):
        strides[d] = step
        step = step * size[d]
    return strides


def _corrected(mode: FakeTensorMode, x: Any, order: Callable[..., Order | None], args: Any, kwargs: Any) -> Any:
    if not isinstance(x, FakeTensor) or x.ndim == 0 or not all(map(has_guarding_hint, _symbols(x))):
        return x
    if any(_hint(n) == 0 for n in x.shape):
        return x
    found = order(x, *args, **kwargs)
    if found is None:
        return x
    strides = _strides(x.shape, found)
    pairs = zip(x.shape, strides, x.stride(), strict=True)
    if all(_hint(n) == 1 or _hint(s) == _hint(t) for n, s, t in pairs):
        return x
    with mode:
        return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


def _symbols(x: torch.Tensor) -> list[torch.SymInt]:
    return [n for n in (*x.shape, *x.stride()) if isinstance(n, torch.SymInt)]


def _dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(
        mode: FakeTensorMode, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = original(mode, op, types, args, kwargs)
        order = _order_of(op)
        if order is None or result is NotImplemented:
            return result
        first, *rest = result if isinstance(result, (tuple, list)) else (result,)
        first = _corrected(mode, first, order, args, kwargs or {})
        if isinstance(result, list):
            return [first, *rest]
        return (first, *rest) if isinstance(result, tuple) else first

    return dispatch


_lock = threading.Lock()
_inside = 0
_original: Any = None


@contextlib.contextmanager
def true_strides() -> Iterator[None]:
    """Within it fake tensors have the strides of eager. Reentrant; counted over threads."""
    global _inside, _original
    with _lock:
        _inside += 1
        if _inside == 1:
            _original = FakeTensorMode.dispatch
            FakeTensorMode.dispatch = _dispatch(_original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                FakeTensorMode.dispatch = _original  # type: ignore[method-assign]
