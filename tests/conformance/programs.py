"""Random small torch programs: what each step may be given, and how far two runs of it may differ.

A value is *exact* if every correct implementation gives the same bits: it was made from numbers on a coarse grid by
operations that round nowhere. Steps that jump or magnify (floor, sort, comparisons, logarithms) are given exact values
alone, so that what differs beyond a few roundings of the largest number involved is wrong, and not ill-conditioned.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st

F = torch.nn.functional
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
GRID, LARGEST = 64, 1024.0  # exact numbers are multiples of 1/GRID below LARGEST
MAX_SIZE, MAX_INPUTS, MAX_STEPS = 4096, 3, 12


class Value(NamedTuple):
    """A tensor of the program: its number, what eager gives for it, the largest number that went into it."""

    index: int
    tensor: torch.Tensor
    exact: bool
    scale: float


@dataclass(frozen=True)
class Step:
    """One call: ``values[result] = function(*(values[i] for i in operands))``."""

    text: str
    function: Callable[..., torch.Tensor]
    operands: tuple[int, ...]


class Program:
    """Steps on inputs; called, it gives every value, the inputs included since steps may write to them."""

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = list(inputs)
        self.steps: list[Step] = []

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for step in self.steps:
            values.append(step.function(*(values[i] for i in step.operands)))
        return values

    def __repr__(self) -> str:
        lines = [
            f"v{i} = torch.tensor({t.tolist()}, dtype={t.dtype}).reshape{tuple(t.shape)}"
            for i, t in enumerate(self.inputs)
        ]
        for i, step in enumerate(self.steps, len(self.inputs)):
            lines.append(f"v{i} = {step.text.format(*(f'v{o}' for o in step.operands))}")
        return "\n".join(lines)


class Op(NamedTuple):
    """A kind of step.

    Attributes:
        arity: how many values it takes.
        fits: whether it takes these tensors.
        make: (text, function) of the step, its constants drawn; None if there are none that fit.
        exact: it rounds nowhere, given exact values.
        needs_exact: it jumps or magnifies.
        kinked: its derivative jumps.
    """

    arity: int
    fits: Callable[..., bool]
    make: Callable[..., tuple[str, Callable[..., torch.Tensor]] | None]
    exact: bool = True
    needs_exact: bool = False
    kinked: bool = False


OPS: dict[str, Op] = {}


def is_float(*tensors: torch.Tensor) -> bool:
    return all(t.is_floating_point() for t in tensors)


def is_integer(*tensors: torch.Tensor) -> bool:
    return all(not t.is_floating_point() and t.dtype is not torch.bool for t in tensors)


def is_number(*tensors: torch.Tensor) -> bool:
    return all(t.dtype is not torch.bool for t in tensors)


def is_any(*tensors: torch.Tensor) -> bool:
    return True


def broadcast(*tensors: torch.Tensor) -> bool:
    try:
        return torch.broadcast_shapes(*(t.shape for t in tensors)).numel() <= MAX_SIZE
    except RuntimeError:
        return False


def both(*tests: Callable[..., bool]) -> Callable[..., bool]:
    return lambda *tensors: all(test(*tensors) for test in tests)


def has_dims(least: int, most: int = 8) -> Callable[..., bool]:
    return lambda *tensors: all(least <= t.ndim <= most for t in tensors)


def plain(
    name: str, arity: int, fits: Callable[..., bool], function: Callable[..., torch.Tensor], **kinds: bool
) -> None:
    operands = ", ".join(["{}"] * arity)
    OPS[name] = Op(arity, fits, lambda draw, *tensors: (f"torch.{name}({operands})", function), **kinds)


def drawn(name: str, arity: int, fits: Callable[..., bool], **kinds: bool) -> Callable[..., Any]:
    def register(make: Callable[..., Any]) -> Callable[..., Any]:
        OPS[name] = Op(arity, fits, make, **kinds)
        return make

    return register


for _name in ("neg", "square"):
    plain(_name, 1, is_number, getattr(torch, _name))
for _name in ("abs", "relu"):
    plain(_name, 1, is_number, getattr(torch, _name), kinked=True)
for _name in ("floor", "ceil", "trunc", "round", "sign", "sgn"):
    plain(_name, 1, is_number, getattr(torch, _name), needs_exact=True)
for _name in ("isnan", "isfinite", "logical_not"):  # not signbit: the sign of a zero is left open
    plain(_name, 1, is_any, getattr(torch, _name), needs_exact=True)
plain("bitwise_not", 1, lambda x: not is_float(x), torch.bitwise_not)
for _name in ("tanh", "sigmoid", "sin", "cos", "atan", "erf", "asinh"):
    plain(_name, 1, is_float, getattr(torch, _name), exact=False)
for _name in ("exp", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "lgamma", "digamma", "acosh", "atanh", "erfinv"):
    plain(_name, 1, is_float, getattr(torch, _name), exact=False, needs_exact=True)
# torch's vectorised gelu gives NaN for infinity, the one for what is left over gives infinity
plain("gelu", 1, lambda x: is_float(x) and bool(x.isfinite().all()), F.gelu, exact=False, kinked=True)
for _name in ("silu", "softplus", "mish", "elu", "selu", "hardswish", "hardsigmoid", "logsigmoid"):
    plain(_name, 1, is_float, getattr(F, _name), exact=False, kinked=True)

for _name in ("add", "mul"):
    plain(_name, 2, both(broadcast, is_any), getattr(torch, _name))
plain("sub", 2, both(broadcast, is_number), torch.sub)
for _name in ("maximum", "minimum", "fmax", "fmin"):
    plain(_name, 2, broadcast, getattr(torch, _name), kinked=True)
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"):
    plain(_name, 2, broadcast, getattr(torch, _name), needs_exact=True)
plain("div", 2, broadcast, torch.div, exact=False, needs_exact=True)
for _name in ("remainder", "fmod", "floor_divide"):
    plain(_name, 2, both(broadcast, is_number), getattr(torch, _name), needs_exact=True)
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    plain(
        _name,
        2,
        both(broadcast, lambda x, y: not x.is_floating_point() and not y.is_floating_point()),
        getattr(torch, _name),
    )
for _name in ("bitwise_left_shift", "bitwise_right_shift", "gcd"):
    plain(_name, 2, both(broadcast, is_integer), getattr(torch, _name))
plain("atan2", 2, both(broadcast, is_float), torch.atan2, exact=False, needs_exact=True)
plain("hypot", 2, both(broadcast, is_float, lambda x, y: x.dtype == y.dtype), torch.hypot, exact=False)
plain("logaddexp", 2, both(broadcast, is_float, lambda x, y: x.dtype == y.dtype), torch.logaddexp, exact=False)
plain("where", 3, both(broadcast, lambda c, x, y: c.dtype is torch.bool), torch.where)


@drawn("scalar", 1, is_any)
def scalar(draw: Any, x: torch.Tensor) -> Any:
    """An operation with a Python number, on either side."""
    name = pick(draw, ["add", "mul", "rsub", "sub"])
    if x.dtype is torch.bool and "sub" in name:
        return None
    number = pick(draw, [0, 1, -1, 2, 3, 0.5, -0.25, True])
    if isinstance(number, bool) and "sub" in name:
        return None
    return f"torch.{name}({{}}, {number})", lambda x: getattr(torch, name)(x, number)


@drawn("clamp", 1, is_number, kinked=True)
def clamp(draw: Any, x: torch.Tensor) -> Any:
    low = pick(draw, [None, -2, 0, 1])
    high = pick(draw, [None, -1, 0, 2] if low is not None else [-1, 0, 2])
    return f"torch.clamp({{}}, {low}, {high})", lambda x: torch.clamp(x, low, high)


@drawn("to", 1, is_any, needs_exact=True)
def to(draw: Any, x: torch.Tensor) -> Any:
    dtype = pick(draw, DTYPES)
    if x.is_floating_point() and not dtype.is_floating_point and not bool((x.abs() < 100).all()):
        return None  # what does not fit differs between processors
    if dtype is torch.uint8 and x.is_floating_point() and bool((x < 0).any()):
        return None
    return f"{{}}.to({dtype})", lambda x: x.to(dtype)


@drawn("pow", 1, is_number, needs_exact=True, exact=False)
def power(draw: Any, x: torch.Tensor) -> Any:
    exponent = pick(draw, [0, 1, 2, 3] if is_integer(x) else [0, 1, 2, 3, -1, 0.5, -2, 2.5])
    return f"torch.pow({{}}, {exponent})", lambda x: torch.pow(x, exponent)


def _dim(draw: Any, x: torch.Tensor) -> int:
    return draw(st.integers(-x.ndim, x.ndim - 1))


def _reduction(name: str, fits: Callable[..., bool], **kinds: bool) -> None:
    @drawn(name, 1, both(fits, has_dims(1)), **kinds)
    def make(draw: Any, x: torch.Tensor) -> Any:
        function = getattr(torch, name)
        dim = _dim(draw, x)
        if x.shape[dim] == 0 and name in ("amax", "amin", "argmax", "argmin", "logsumexp", "cummax", "cummin", "mode"):
            return None
        if name in ("cummax", "cummin"):
            return f"torch.{name}({{}}, {dim}).indices", lambda x: function(x, dim).indices
        if name in ("cumsum", "cumprod", "logcumsumexp"):
            return f"torch.{name}({{}}, {dim})", lambda x: function(x, dim)
        keep = draw(st.booleans())
        return f"torch.{name}({{}}, dim={dim}, keepdim={keep})", lambda x: function(x, dim=dim, keepdim=keep)


for _name in ("sum", "cumsum"):
    _reduction(_name, lambda x: x.dtype not in (torch.float16, torch.bfloat16))
for _name in ("prod", "cumprod"):
    _reduction(_name, is_any, exact=False)
for _name in ("mean", "var", "std", "logsumexp"):
    _reduction(_name, is_float, exact=False, needs_exact=_name in ("std", "var"))
for _name in ("amax", "amin"):
    _reduction(_name, is_any, kinked=True)
for _name in ("argmax", "argmin"):
    _reduction(_name, is_number, needs_exact=True)
for _name in ("cummax", "cummin", "any", "all"):
    _reduction(_name, is_any, needs_exact=True)


@drawn("softmax", 1, both(is_float, has_dims(1)), exact=False)
def softmax(draw: Any, x: torch.Tensor) -> Any:
    dim, name = _dim(draw, x), pick(draw, ["softmax", "log_softmax"])
    return f"torch.{name}({{}}, {dim})", lambda x: getattr(torch, name)(x, dim)


@drawn("sort", 1, both(is_any, has_dims(1)), needs_exact=True)
def sort(draw: Any, x: torch.Tensor) -> Any:
    dim, descending, index = _dim(draw, x), draw(st.booleans()), int(draw(st.booleans()))
    return (
        f"torch.sort({{}}, dim={dim}, descending={descending}, stable=True)[{index}]",
        lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)[index],
    )


@drawn("topk", 1, both(is_number, has_dims(1)), needs_exact=True)
def topk(draw: Any, x: torch.Tensor) -> Any:
    dim, largest = _dim(draw, x), draw(st.booleans())
    k = draw(st.integers(0, x.shape[dim]))
    return f"torch.topk({{}}, {k}, {dim}, {largest}).values", lambda x: torch.topk(x, k, dim, largest).values


# shapes and views


@drawn("reshape", 1, is_any)
def reshape(draw: Any, x: torch.Tensor) -> Any:
    sizes = {0: [(0, 3), (2, 0)], 1: [(), (1, 1)]}.get(x.numel(), [])
    n = x.numel()
    sizes = [*sizes, (n,), (1, n), *((d, n // d) for d in range(2, 5) if n and n % d == 0)]
    size = pick(draw, sizes)
    return f"{{}}.reshape{size}", lambda x: x.reshape(size)


@drawn("permute", 1, has_dims(2))
def permute(draw: Any, x: torch.Tensor) -> Any:
    dims = draw(st.permutations(range(x.ndim)))
    return f"{{}}.permute({dims})", lambda x: x.permute(dims)


@drawn("unsqueeze", 1, has_dims(0, 3))
def unsqueeze(draw: Any, x: torch.Tensor) -> Any:
    dim = draw(st.integers(-x.ndim - 1, x.ndim))
    return f"{{}}.unsqueeze({dim})", lambda x: x.unsqueeze(dim)


@drawn("select", 1, lambda x: x.ndim > 0 and all(x.shape))
def select(draw: Any, x: torch.Tensor) -> Any:
    dim = _dim(draw, x)
    index = draw(st.integers(-x.shape[dim], x.shape[dim] - 1))
    return f"{{}}.select({dim}, {index})", lambda x: x.select(dim, index)


def _slice(draw: Any, x: torch.Tensor) -> tuple[slice, ...]:
    bound = st.one_of(st.none(), st.integers(-4, 4))
    return tuple(slice(draw(bound), draw(bound), draw(st.integers(1, 3))) for _ in range(draw(st.integers(1, x.ndim))))


@drawn("slice", 1, has_dims(1))
def slice_(draw: Any, x: torch.Tensor) -> Any:
    where = _slice(draw, x)
    return f"{{}}[{where}]", lambda x: x[where]


@drawn("expand", 1, lambda x: 1 in x.shape or x.ndim < 3)
def expand(draw: Any, x: torch.Tensor) -> Any:
    size = [draw(st.integers(0, 3)) if n == 1 else -1 for n in x.shape]
    if x.ndim < 3:
        size.insert(0, draw(st.integers(1, 3)))
    return f"{{}}.expand({size})", lambda x: x.expand(size)


@drawn("flip", 1, has_dims(1))
def flip(draw: Any, x: torch.Tensor) -> Any:
    dims = draw(st.lists(st.integers(0, x.ndim - 1), unique=True))
    return f"{{}}.flip({dims})", lambda x: x.flip(dims)


@drawn("roll", 1, has_dims(1))
def roll(draw: Any, x: torch.Tensor) -> Any:
    shift, dim = draw(st.integers(-5, 5)), _dim(draw, x)
    return f"{{}}.roll({shift}, {dim})", lambda x: x.roll(shift, dim)


@drawn("cat", 2, lambda x, y: 0 < x.ndim == y.ndim)
def cat(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    dims = [d for d in range(x.ndim) if x.shape[:d] == y.shape[:d] and x.shape[d + 1 :] == y.shape[d + 1 :]]
    if not dims:
        return None
    dim = pick(draw, dims)
    return f"torch.cat([{{}}, {{}}], {dim})", lambda x, y: torch.cat([x, y], dim)


@drawn("stack", 2, lambda x, y: x.shape == y.shape and x.ndim < 4 and x.dtype == y.dtype)
def stack(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    dim = draw(st.integers(-x.ndim - 1, x.ndim))
    return f"torch.stack([{{}}, {{}}], {dim})", lambda x, y: torch.stack([x, y], dim)


@drawn("tril", 1, has_dims(2))
def tril(draw: Any, x: torch.Tensor) -> Any:
    name, k = pick(draw, ["tril", "triu"]), draw(st.integers(-3, 3))
    return f"torch.{name}({{}}, {k})", lambda x: getattr(torch, name)(x, k)


@drawn("diagonal", 1, has_dims(2))
def diagonal(draw: Any, x: torch.Tensor) -> Any:
    k = draw(st.integers(-3, 3))
    return f"{{}}.diagonal({k}, -2, -1)", lambda x: x.diagonal(k, -2, -1)


@drawn("unfold", 1, lambda x: x.ndim in (1, 2, 3) and all(x.shape))
def unfold(draw: Any, x: torch.Tensor) -> Any:
    dim = _dim(draw, x)
    size, step = draw(st.integers(1, x.shape[dim])), draw(st.integers(1, 3))
    return f"{{}}.unfold({dim}, {size}, {step})", lambda x: x.unfold(dim, size, step)


@drawn("pad", 1, both(is_any, has_dims(1)))
def pad(draw: Any, x: torch.Tensor) -> Any:
    widths = draw(st.lists(st.integers(-1, 3), min_size=2, max_size=2))
    if x.shape[-1] + sum(widths) < 0 or x.shape[-1] + min(widths) < 0:
        return None
    number = 0 if x.dtype is torch.bool else draw(st.integers(0, 2))
    return f"F.pad({{}}, {widths}, value={number})", lambda x: F.pad(x, widths, value=number)


# indexing


@drawn("gather", 1, lambda x: x.ndim > 0 and all(x.shape))
def gather(draw: Any, x: torch.Tensor) -> Any:
    dim = _dim(draw, x)
    name = pick(draw, ["index_select", "index"])
    index = draw(st.lists(st.integers(0, x.shape[dim] - 1), max_size=5))
    if name == "index_select":
        return f"{{}}.index_select({dim}, {index})", lambda x: x.index_select(
            dim, torch.tensor(index, dtype=torch.int64)
        )
    index = draw(st.lists(st.integers(-x.shape[0], x.shape[0] - 1), max_size=5))
    return f"{{}}[{index}]", lambda x: x[torch.tensor(index, dtype=torch.int64)]


@drawn("index_put", 1, lambda x: is_number(x) and x.ndim > 0 and all(x.shape))
def index_put(draw: Any, x: torch.Tensor) -> Any:
    index = draw(st.lists(st.integers(-x.shape[0], x.shape[0] - 1), max_size=5))
    return (
        f"{{}}.index_put(({index},), 1, accumulate=True)",
        lambda x: x.index_put(
            (torch.tensor(index, dtype=torch.int64),), torch.ones((), dtype=x.dtype), accumulate=True
        ),
    )


@drawn(
    "scatter_reduce",
    2,
    lambda x, y: (
        is_number(x)
        and 0 < x.ndim == y.ndim
        and x.dtype == y.dtype
        and all(x.shape)
        and x.dtype not in (torch.float16, torch.bfloat16)
    ),
)
def scatter_reduce(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    if any(a < b for a, b in zip(x.shape, y.shape, strict=True)):
        return None
    dim = draw(st.integers(0, x.ndim - 1))
    how, own = pick(draw, ["sum", "amax", "amin"]), draw(st.booleans())
    values = draw(st.lists(st.integers(0, x.shape[dim] - 1), min_size=y.numel(), max_size=y.numel()))
    shape = tuple(y.shape)
    return (
        f"{{}}.scatter_reduce({dim}, torch.tensor({values}).reshape{shape}, {{}}, '{how}', include_self={own})",
        lambda x, y: x.scatter_reduce(
            dim, torch.tensor(values, dtype=torch.int64).reshape(shape), y, how, include_self=own
        ),
    )


@drawn(
    "masked_fill",
    2,
    lambda x, m: m.dtype is torch.bool and broadcast(x, m) and torch.broadcast_shapes(x.shape, m.shape) == x.shape,
)
def masked_fill(draw: Any, x: torch.Tensor, m: torch.Tensor) -> Any:
    number = pick(draw, [0, 1])
    return f"{{}}.masked_fill({{}}, {number})", lambda x, m: x.masked_fill(m, number)


# writes


@drawn("add_", 2, lambda x, y: _writable(x) and is_number(x, y) and _fits_into(y, x))
def add_(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return "{}.add_({})", lambda x, y: x.add_(y)


@drawn("setitem", 2, lambda x, y: _writable(x) and x.ndim > 0 and y.ndim == 0 and _castable(y, x), needs_exact=True)
def setitem(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    where = _slice(draw, x)

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[where] = y
        return x

    return f"({{}}.__setitem__({where}, {{}}))", function


@drawn("copy_", 2, lambda x, y: _writable(x) and _fits_into(y, x) and _castable(y, x), needs_exact=True)
def copy_(draw: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return "{}.copy_({})", lambda x, y: x.copy_(y)


@drawn("zero_", 1, lambda x: _writable(x))
def zero_(draw: Any, x: torch.Tensor) -> Any:
    return "{}.zero_()", lambda x: x.zero_()


def _writable(x: torch.Tensor) -> bool:
    """Whether no two of its elements share memory."""
    return not any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True)) and not _overlaps(x)


def _overlaps(x: torch.Tensor) -> bool:
    reach = 1
    for size, stride in sorted(zip(x.shape, x.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1 and stride < reach:
            return True
        reach += stride * max(size - 1, 0)
    return False


def _fits_into(y: torch.Tensor, x: torch.Tensor) -> bool:
    return broadcast(x, y) and torch.broadcast_shapes(x.shape, y.shape) == x.shape and torch.can_cast(y.dtype, x.dtype)


def _castable(y: torch.Tensor, x: torch.Tensor) -> bool:
    return torch.can_cast(y.dtype, x.dtype)


# products, convolutions, normalisation, pooling


def _same_float(*tensors: torch.Tensor) -> bool:
    return is_float(*tensors) and len({t.dtype for t in tensors}) == 1


plain("matmul", 2, lambda x, y: _same_float(x, y) and _multiplies(x, y), torch.matmul, exact=False)


def _multiplies(x: torch.Tensor, y: torch.Tensor) -> bool:
    if not x.ndim or not y.ndim or x.shape[-1] != y.shape[max(-2, -y.ndim)]:
        return False
    try:
        return torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]).numel() <= 64
    except RuntimeError:
        return False


@drawn(
    "conv1d",
    2,
    lambda x, w: (
        _same_float(x, w)
        and x.ndim in (2, 3)
        and w.ndim == 3
        and x.shape[-2] == w.shape[1]
        and all(w.shape)
        and all(x.shape)
        and bool(w.isfinite().all())  # torch's convolutions differ on whether padding meets an infinite weight
    ),
    exact=False,
)
def conv1d(draw: Any, x: torch.Tensor, w: torch.Tensor) -> Any:
    stride, padding, dilation = draw(st.integers(1, 2)), draw(st.integers(0, 3)), draw(st.integers(1, 2))
    if x.shape[-1] + 2 * padding < dilation * (w.shape[-1] - 1) + 1:
        return None
    return (
        f"F.conv1d({{}}, {{}}, None, {stride}, {padding}, {dilation})",
        lambda x, w: F.conv1d(x, w, None, stride, padding, dilation),
    )


@drawn("pool", 1, lambda x: is_float(x) and x.ndim in (2, 3) and all(x.shape), exact=False, kinked=True)
def pool(draw: Any, x: torch.Tensor) -> Any:
    size, stride, ceil = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.booleans())
    padding = draw(st.integers(0, size // 2))
    if x.shape[-1] + 2 * padding < size:
        return None
    if draw(st.booleans()):
        return (
            f"F.max_pool1d({{}}, {size}, {stride}, {padding}, ceil_mode={ceil})",
            lambda x: F.max_pool1d(x, size, stride, padding, ceil_mode=ceil),
        )
    counted = draw(st.booleans())
    return (
        f"F.avg_pool1d({{}}, {size}, {stride}, {padding}, {ceil}, {counted})",
        lambda x: F.avg_pool1d(x, size, stride, padding, ceil, counted),
    )


@drawn(
    "layer_norm",
    1,
    lambda x: is_float(x) and x.ndim > 0 and all(x.shape) and x.shape[-1] > 1,
    exact=False,
    needs_exact=True,
)
def layer_norm(draw: Any, x: torch.Tensor) -> Any:
    return "F.layer_norm({0}, {0}.shape[-1:])", lambda x: F.layer_norm(x, x.shape[-1:])


@drawn("interpolate", 1, lambda x: is_float(x) and x.ndim == 3 and all(x.shape), exact=False)
def interpolate(draw: Any, x: torch.Tensor) -> Any:
    size, mode = draw(st.integers(1, 6)), pick(draw, ["nearest", "linear", "nearest-exact"])
    corners = draw(st.booleans()) if mode == "linear" else None
    return (
        f"F.interpolate({{}}, {size}, mode='{mode}', align_corners={corners})",
        lambda x: F.interpolate(x, size, mode=mode, align_corners=corners),
    )


@drawn("one_hot", 1, lambda x: x.dtype is torch.int64 and x.ndim < 3 and bool((x >= 0).all()) and bool((x < 8).all()))
def one_hot(draw: Any, x: torch.Tensor) -> Any:
    return "F.one_hot({}, 8)", lambda x: F.one_hot(x, 8)


def on_grid(x: torch.Tensor) -> bool:
    """Whether all numbers are exact, see the head of this file."""
    if not x.is_floating_point():
        return True
    wide = x.double()
    finite = wide[wide.isfinite()]
    return bool((finite * GRID == (finite * GRID).round()).all()) and bool((finite.abs() <= LARGEST).all())


def largest(x: torch.Tensor) -> float:
    if not x.numel() or x.dtype is torch.bool:
        return 0.0
    wide = x.double()
    wide = wide[wide.isfinite()]
    return float(wide.abs().max()) if wide.numel() else 0.0


def pick(draw: Any, items: Sequence[Any]) -> Any:
    """One of ``items``, all as likely: what hypothesis draws by itself is mostly the first."""
    return items[draw(st.integers(0, 0xFFFF)) * 40503 % 0x10001 % len(items)]


@st.composite
def tensors(draw: Any, *, special: bool = True) -> torch.Tensor:
    """A small tensor of any dtype whose numbers are exact; NaN, infinities and the largest numbers now and then."""
    dtype, rank = pick(draw, DTYPES), pick(draw, (0, 1, 1, 2, 2, 2, 3, 3, 4))
    sizes = (1, 2, 3, 4) if draw(st.integers(0, 7)) else (0, 1, 2, 3)
    shape = [pick(draw, sizes) for _ in range(rank)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 0xFFFF)))
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype.is_floating_point:
        odd: tuple[float, ...] = (float("nan"), float("inf"), -float("inf"))
        x = torch.randint(-16, 17, shape, generator=generator) / 4
    else:
        info = torch.iinfo(dtype)
        odd = (info.min, info.max, info.max - 1)
        x = torch.randint(max(info.min, -8), 9, shape, generator=generator)
    x = x.to(dtype)
    if special and x.numel() and not draw(st.integers(0, 3)):
        for place in torch.randint(0, x.numel(), (2,), generator=generator).tolist():
            x.view(-1)[place] = pick(draw, odd)
    return x


def _candidates(op: Op, values: Sequence[Value], gradient: bool) -> list[tuple[Value, ...]]:
    if op.needs_exact or (gradient and op.kinked):
        values = [v for v in values if v.exact]
    return [c for c in itertools.product(values, repeat=op.arity) if op.fits(*(v.tensor for v in c))]


@st.composite
def programs(draw: Any, *, gradient: bool = False) -> tuple[Program, list[Value]]:
    """A program, and its values as eager gives them.

    Args:
        gradient: one whose derivatives can be compared: steps that are kinked get exact values too.
    """
    inputs = [draw(tensors(special=not gradient)) for _ in range(draw(st.integers(1, MAX_INPUTS)))]
    program = Program([t.clone() for t in inputs])
    values = [Value(i, t.clone(), True, largest(t)) for i, t in enumerate(inputs)]
    for _ in range(draw(st.integers(1, MAX_STEPS))):
        op = OPS[pick(draw, sorted(OPS))]
        candidates = _candidates(op, values, gradient)
        chosen = pick(draw, candidates) if candidates else ()
        given = [v.tensor for v in chosen]
        made = op.make(draw, *given) if chosen else None
        if made is None:
            continue
        text, function = made
        try:
            result = function(*given)
        except (RuntimeError, IndexError, ValueError, NotImplementedError):
            continue  # eager refuses it
        if result.numel() > MAX_SIZE:
            continue
        written = [i for i, v in enumerate(values) if any(result is g for g in given) and _shares(v.tensor, result)]
        exact = op.exact and all(v.exact for v in chosen) and on_grid(result)
        scale = max([largest(result), *(v.scale for v in chosen)])
        for i in written:
            values[i] = values[i]._replace(exact=values[i].exact and exact, scale=max(values[i].scale, scale))
        program.steps.append(Step(text, function, tuple(v.index for v in chosen)))
        values.append(Value(len(values), result, exact, scale))
    return program, values


def _shares(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
