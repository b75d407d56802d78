"""What eager refuses: torch is asked itself, once for each op and types of arguments, while a graph is lowered.

A graph is captured on fake tensors, and torch's shape propagation checks less than its kernels do: `mm` of int64 and
float32 has a shape, and eager raises. So the op's own CPU kernel is called on tensors of constants, of the same dtypes
and shapes. Large sizes are replaced by small ones, the same by the same. A call counts as refused only if the kernel
raises for every constant: an error that depends on values is none of a program's.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from portable.errors import InvalidInputError
from portable.lowering import source

LARGE = 1 << 13  # elements of arguments and results together, beyond which sizes are replaced
HUGE = 1 << 23  # and beyond which the op is never called on the sizes themselves
KEPT = 8  # sizes up to here are never replaced: kernel sizes, groups, small ranks
CONSTANTS = ((0, 0), (1, 1), (1, 0))  # (of floating-point and complex tensors, of the others)

# ops that check values which no constant may satisfy: of these what torch says of types counts alone
BY_VALUES = frozenset(("cholesky", "ctc_loss", "repeat_interleave", "remainder", "fmod", "div", "floor_divide"))
# fused kernels that end the process for some of the constants
NEVER = frozenset(("_native_multi_head_attention", "_transformer_encoder_layer_fwd"))
BY_MASKS = frozenset(
    ("_index_put_impl_", "_unsafe_index_put", "index_put", "index_put_")
)  # where an argument is a mask
# autograd calls the others, on results of which shape propagation may state the dtype wrongly
BACKWARD = frozenset(("_log_softmax_backward_data", "_softmax_backward_data", "max_pool2d_with_indices_backward"))
NAMESPACES = ("aten", "torch_nn")
_TYPES = re.compile(r"d?type|not implemented for|tensors used as indices|shape of the mask", re.IGNORECASE)
_NARROW = re.compile(r"not implemented for '(Half|BFloat16|Float8\w*)'")  # other devices have kernels of these


@dataclass(frozen=True, slots=True)
class Like:
    """Shape (ints; texts where Dynamo has symbols) and dtype of a tensor argument."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


class Constant:
    """A non-tensor argument as part of a cache key: equal only to the same value of the same type."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        self.key = (type(value), repr(value))

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.key == other.key


def check(
    op: OpOverload,
    leaves: Sequence[Like | Constant],
    tree: Any,
    *,
    results: int = 0,
    platform: str = "cpu",
    failed: bool = False,
) -> str:
    """What torch says against a call, whatever its values; '' if eager takes it, or where that cannot be known.

    Args:
        leaves: those of (list of arguments, keyword arguments), whose structure is ``tree``.
        results: elements of the results.
        platform: the XLA platform of the program: the CPU speaks for others except where it lacks a narrow dtype.
        failed: the op's lowering failed: all ops can be asked for the reason.
    """
    if not (_has_kernel(op) if failed else _can_be_asked(op)) or not any(isinstance(x, Like) for x in leaves):
        return ""
    reason = _reason(op, tuple(leaves), tree, results, torch.get_default_dtype())
    return "" if platform != "cpu" and _NARROW.search(reason) else reason


def check_traced(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise for a call that is being traced: for ops that the trace takes apart, and so loses their checks.

    Raises:
        InvalidInputError: eager refuses it too.
    """
    leaves, tree = pytree.tree_flatten((list(args), kwargs))
    described: list[Like | Constant] = []
    for x in leaves:
        if isinstance(x, torch.Tensor):
            if x.layout is not torch.strided or any(type(n) is not int for n in x.shape):
                return
            described.append(Like(tuple(x.shape), x.dtype))
        elif isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return
        else:
            described.append(Constant(x))
    reason = check(op, described, tree)
    if reason:
        raise refusal(str(op), described, reason, source.users_line(source.traced()))


def asked(op: OpOverload, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which a trace puts in the place of ``op``, with the op's own checks."""

    @functools.wraps(kernel)
    def call(*args: Any, **kwargs: Any) -> Any:
        check_traced(op, args, kwargs)
        return kernel(*args, **kwargs)

    return call


def refusal(op: str, leaves: Sequence[Any], reason: str, where: str) -> InvalidInputError:
    """The error for a call that eager refuses for ``reason``, of an op with these arguments."""
    place = f" at {where}" if where else ""
    tensors = ", ".join(str(x) for x in leaves if isinstance(x, Like))
    error = InvalidInputError(
        f"{op}{place} does not take ({tensors}), and eager refuses it too: {reason}",
        remedy="pass tensors of the dtypes and shapes that the op takes",
    )
    error.call = (op, tuple(x for x in leaves if isinstance(x, Like)), reason)
    return error


_SAID_TWICE = "failed while attempting to run meta for"


def _is_news(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_SAID_TWICE)


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Within it torch does not log, with a traceback, the errors of shape propagation, which it raises as well."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(_is_news)
    try:
        yield
    finally:
        logger.removeFilter(_is_news)


_FAKE_CALL = re.compile(r"with fake tensors: call_\w+ (.+?)\((.*)\): got (\w+)\((['\"])(.*)\4\)", re.DOTALL)
_FAKE = re.compile(r"FakeTensor\(\.\.\., (?:device='[^']*', )?size=\(([^)]*)\)(?:, dtype=torch\.(\w+))?")
_NAME = re.compile(r"<(?:built-in )?(?:function|method|method descriptor) '?([\w.]+)'?")


def in_capture(failure: Exception, call: Any = ()) -> InvalidInputError | None:
    """What Dynamo raises for a call that torch's shape propagation refuses, in short; None for another error.

    Args:
        call: what was called with: its tensors are named where Dynamo has symbols for their sizes.
    """
    stack = getattr(failure, "real_stack", None)
    if not stack or not isinstance(failure, (TorchRuntimeError, IndexError, TypeError, ValueError)):
        return None
    text = str(failure)
    where = source.users_line("".join(f'File "{f.filename}", line {f.lineno}, in {f.name}\n' for f in stack))
    for cause in _causes(failure):
        if isinstance(cause, InvalidInputError) and cause.call:
            op, leaves, reason = cause.call
            return refusal(op, leaves, reason, where)
    found = _FAKE_CALL.search(text.partition("Hint:")[0])
    if not found:
        lines = text.strip().splitlines() or [type(failure).__name__]
        reason = next((x.partition("Explanation: ")[2] for x in lines if "Explanation: " in x), lines[0])
        return InvalidInputError(f"{where}: eager refuses this too: {reason}", remedy="change that line or its inputs")
    op, arguments, _, _, reason = found.groups()
    name = _NAME.match(op)
    leaves = [
        Like(tuple(re.findall(r"[^ ,]+", size)), getattr(torch, dtype or "float32"))
        for size, dtype in _FAKE.findall(arguments)
    ]
    reason = reason.replace("\\'", "'").partition("\\n")[0]
    if any(not n.isdigit() for x in leaves for n in x.shape):
        given = [Like(tuple(x.shape), x.dtype) for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor)]
        reason += f" (of a call with {', '.join(map(str, given))})"
    return refusal(name[1] if name else op, leaves, reason, where)


def _causes(failure: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = failure
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _elements(x: Like) -> int:
    return math.prod(x.shape)


@functools.cache
def _can_be_asked(op: OpOverload) -> bool:
    """Whether the op's CPU kernel can be called for its checks alone."""
    draws = torch.Tag.nondeterministic_seeded in op.tags and "generator" not in _arguments(op)
    return _has_kernel(op) and not draws and ("_backward" not in _name(op) or _name(op) in BACKWARD)


def _has_kernel(op: OpOverload) -> bool:
    known = op.namespace in NAMESPACES and not op.is_view and _name(op) not in NEVER
    return known and bool(torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), "CPU"))


@functools.lru_cache(maxsize=16384)
def _reason(op: OpOverload, leaves: tuple[Like | Constant, ...], tree: Any, results: int, default: torch.dtype) -> str:
    """Why eager refuses the call; '' if it does not, or where that is not known."""
    elements = results + sum(_elements(x) for x in leaves if isinstance(x, Like))
    reason = _raised(op, _smaller(op, leaves, tree) if elements > LARGE else leaves, tree)
    if not reason or _TYPES.search(reason):
        return reason
    name = _name(op)
    masked = any(isinstance(x, Like) and x.dtype in (torch.bool, torch.uint8) for x in leaves)
    if name in BY_VALUES or name.startswith("linalg_") or (name in BY_MASKS and masked) or elements > HUGE:
        return ""
    return reason if elements <= LARGE else _raised(op, leaves, tree)


def _smaller(op: OpOverload, leaves: tuple[Like | Constant, ...], tree: Any) -> tuple[Like | Constant, ...]:
    """The arguments with small sizes in place of large ones: equal for equal ones, and in the same order."""
    sizes = sorted({n for x in leaves if isinstance(x, Like) for n in x.shape if n > KEPT})
    small = {n: KEPT + 1 + i for i, n in enumerate(sizes)}

    def replaced(value: Any) -> Any:
        return small.get(value, value) if type(value) is int else value

    args, kwargs = pytree.tree_unflatten(list(leaves), tree)
    symbolic = _sizes(op)
    named = zip((a.name for a in op._schema.arguments), args, strict=False)
    flat = [_shrunk(x, replaced, name in symbolic) for name, given in named for x in pytree.tree_leaves(given)]
    flat += [
        _shrunk(x, replaced, name in symbolic) for name, given in kwargs.items() for x in pytree.tree_leaves(given)
    ]
    return tuple(flat)


def _name(op: OpOverload) -> str:
    return str(op._schema.name.partition("::")[2])


@functools.cache
def _arguments(op: OpOverload) -> tuple[str, ...]:
    return tuple(a.name for a in op._schema.arguments)


@functools.cache
def _sizes(op: OpOverload) -> frozenset[str]:
    """The names of the op's arguments that are sizes."""
    return frozenset(re.findall(r"SymInt(?:\[\d*\])?\?? (\w+)", str(op._schema)))


def _shrunk(x: Like | Constant, replaced: Any, symbolic: bool) -> Like | Constant:
    if isinstance(x, Like):
        return Like(tuple(replaced(n) for n in x.shape), x.dtype)
    return Constant(replaced(x.value)) if symbolic else x


def _raised(op: OpOverload, leaves: tuple[Like | Constant, ...], tree: Any) -> str:
    """What the op's CPU kernel raises for each of the constants; '' if it does not for one of them."""
    said: list[str] = []
    for failure in _failures(op, leaves, tree):
        if failure is None:
            return ""
        said.append(failure)
    of_types = [failure for failure in said if _TYPES.search(failure)]
    if of_types:
        return of_types[0]
    return said[0] if len({re.sub(r"[-\d.]+", "", failure) for failure in said}) == 1 else ""


def _failures(op: OpOverload, leaves: tuple[Like | Constant, ...], tree: Any) -> Iterator[str | None]:
    draws = torch.Tag.nondeterministic_seeded in op.tags and "generator" not in _arguments(op)
    for floating, other in CONSTANTS:
        with (
            _disable_current_modes(),
            torch._C._DisablePythonDispatcher(),
            torch._C._DisableFuncTorch(),
            torch.no_grad(),
            warnings.catch_warnings(),
            torch.random.fork_rng([], enabled=draws),
        ):
            warnings.simplefilter("ignore")
            values = [_value(x, floating, other) for x in leaves]
            args, kwargs = pytree.tree_unflatten(values, tree)
            absent = _arguments(op)[len(args) :]
            if "generator" in absent:
                kwargs = {**kwargs, "generator": torch.Generator()}
            if "unsafe" in absent:  # it then checks no values
                kwargs = {**kwargs, "unsafe": True}
            try:
                op(*args, **kwargs)
            except Exception as failure:  # of any kind: it is eager's
                yield str(failure).strip().partition("\n")[0]
            else:
                yield None


def _value(x: Like | Constant, floating: int, other: int) -> Any:
    if isinstance(x, Constant):
        return torch.device("cpu") if isinstance(x.value, torch.device) else x.value
    wide = x.dtype.is_floating_point or x.dtype.is_complex
    return torch.full(x.shape, floating if wide else other, dtype=x.dtype, device="cpu")
