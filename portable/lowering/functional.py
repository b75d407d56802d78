"""What functionalisation loses of a tensor that is written to: where it lies, and what a view leaves out of it.

torch replaces a write by a new value. That value has the strides of the op that made it, not those of the tensor, and
no offset: what reads them next (``as_strided`` and its copies, a result's layout) would read other elements. Within
``exact_writes()`` each write is followed by ``laid_out``, which states the tensor's own strides and offset. Writes that
torch replaces wrongly (through ``unfold`` with gaps, to elements that share memory) are refused.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx
from torch._C import _functionalization
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from portable.errors import UnsupportedOp, UnsupportedOpError
from portable.lowering.context import Context
from portable.lowering.registry import lower
from portable.lowering.source import frame_of, place

# what torch says of views that it cannot replace: what that means
REFUSED_BY_TORCH = {
    "as_strided() is non-compositional": "it writes through an as_strided view of a view",
    "out of bounds for storage of size": "it reaches into storage outside of its input",
}
REMEDY = "write to a clone and copy that back by index, or outside of the compiled function"
_LIBRARY = torch.library.Library("portable_capture", "FRAGMENT")
_LIBRARY.define("laid_out(Tensor x, SymInt[] stride, SymInt offset) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
LAID_OUT: OpOverload = torch.ops.portable_capture.laid_out.default


def _laid_out(x: torch.Tensor, stride: Sequence[int], offset: int) -> torch.Tensor:
    extent = offset + 1 + sum((n - 1) * s for n, s in zip(x.shape, stride, strict=True))
    return x.new_empty((extent,)).as_strided(x.shape, stride, offset)


torch.library.register_fake("portable_capture::laid_out", _laid_out, lib=_LIBRARY)


@lower(LAID_OUT)
def laid_out(ctx: Context, x: Any, stride: Sequence[int], offset: int) -> Any:
    return x


class _Layout(NamedTuple):
    size: tuple[int | torch.SymInt, ...]
    stride: tuple[int | torch.SymInt, ...]
    offset: int | torch.SymInt

    @classmethod
    def of(cls, x: torch.Tensor) -> _Layout:
        return cls(tuple(x.shape), tuple(x.stride()), x.storage_offset())

    def same_size(self, other: _Layout) -> bool:
        pairs = zip(self.size, other.size, strict=False)
        return len(self.size) == len(other.size) and all(statically_known_true(n == m) for n, m in pairs)

    def is_that_of(self, other: _Layout) -> bool:
        """Whether every element lies where it does in the other; strides of single elements say nothing."""
        pairs = [(n, s, t) for n, s, t in zip(self.size, self.stride, other.stride, strict=True)]
        known = all(statically_known_true(n == 1) or statically_known_true(s == t) for n, s, t in pairs)
        return known and statically_known_true(self.offset == other.offset)


def _written(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[FunctionalTensor]:
    found: list[FunctionalTensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in (value if isinstance(value, (list, tuple)) else [value]) if _is_known(x)]
    return found


def _is_known(x: Any) -> TypeGuard[FunctionalTensor]:
    return isinstance(x, FunctionalTensor) and torch._is_functional_tensor(x.elem) and x.layout is torch.strided


def _refusal(x: FunctionalTensor) -> str:
    """Why a write to ``x`` would be replaced wrongly; '' where it is not."""
    views: Sequence[Any] = _functionalization.get_view_meta_sequence(x.elem)
    for meta in views:
        if type(meta).__name__ == "unfold_ViewMeta":
            *_, size, step = meta.as_tuple()
            if statically_known_true(size > step):
                return "it writes to an unfold view of which elements share memory"
            if not statically_known_true(size == step) or not _covers(x):
                return "it writes through an unfold view: torch's capture zeroes what lies between its windows"
    pairs = zip(x.elem.shape, x.elem.stride(), strict=True)
    if any(guard_or_false(s == 0) and not guard_or_false(n <= 1) for n, s in pairs):
        return "it writes to an expanded view of which elements share memory"
    return ""


def _covers(x: FunctionalTensor) -> bool:
    """Whether a view has every element of the tensor that it is of."""
    base = x._base
    return base is not None and statically_known_true(x.numel() == base.numel())


def _where() -> str:
    meta = fx.traceback.get_current_meta() if fx.traceback.has_preserved_node_meta() else {}
    frame = frame_of(meta.get("stack_trace") or "")
    return place(*frame) if frame else ""


def _restore(x: FunctionalTensor, layout: _Layout) -> None:
    """Have the new value of ``x`` lie where the tensor lies."""
    torch._sync(x)
    value = torch._from_functional_tensor(x.elem)
    now = _Layout.of(value)
    if not layout.same_size(now) or layout.is_that_of(now):
        return
    x.replace_(LAID_OUT(value, layout.stride, layout.offset))
    x.commit_update()
    x.sync()


def _refused(op: OpOverload, reason: str) -> UnsupportedOpError:
    return UnsupportedOpError([UnsupportedOp(str(op), f"{reason} ({REMEDY})", _where())], backend="xla")


def _run(original: Callable[..., Any], mode: FunctionalTensorMode, op: OpOverload, *rest: Any) -> Any:
    try:
        return original(mode, op, *rest)
    except RuntimeError as failure:
        for said, meant in REFUSED_BY_TORCH.items():
            if said in str(failure):
                raise _refused(op, meant) from failure
        raise


def _dispatch(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def dispatch(
        mode: FunctionalTensorMode, op: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not isinstance(op, OpOverload):
            return original(mode, op, types, args, kwargs)
        kwargs = _in_result_dtype(op, kwargs or {})
        run = functools.partial(_run, original, mode, op, types, args, kwargs)
        if not op._schema.is_mutable or torch.Tag.inplace_view in op.tags:
            return run()
        written = _written(op, args, kwargs)
        for x in written:
            if reason := _refusal(x):
                raise _refused(op, reason)
        bases = [x if x.is_base_tensor() else x._base for x in written]
        known = [base for base in bases if _is_known(base) and base.is_base_tensor()]
        before = [(base, _Layout.of(base.elem)) for base in known]
        result = run()
        for base, layout in before:
            _restore(base, layout)
        return result

    return dispatch


_COMPUTED_IN_RESULT_DTYPE = frozenset(
    f"aten::{name}" for name in ("sum", "nansum", "prod", "mean", "cumsum", "cumprod")
)


def _in_result_dtype(op: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the dtype that eager computes in: that of ``out``. The functional form that torch replaces
    the op by has no ``out``, and would compute in the input's."""
    out = kwargs.get("out")
    if op._schema.name not in _COMPUTED_IN_RESULT_DTYPE or out is None or kwargs.get("dtype") is not None:
        return kwargs
    return {**kwargs, "dtype": out.dtype}


_lock = threading.Lock()
_inside = 0
_original: Any = None


@contextlib.contextmanager
def exact_writes() -> Iterator[None]:
    """Within it functionalisation keeps layouts, and refuses what it would get wrong. Reentrant; counted over
    threads."""
    global _inside, _original
    with _lock:
        _inside += 1
        if _inside == 1:
            _original = FunctionalTensorMode.__torch_dispatch__
            FunctionalTensorMode.__torch_dispatch__ = _dispatch(_original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                FunctionalTensorMode.__torch_dispatch__ = _original  # type: ignore[method-assign]
