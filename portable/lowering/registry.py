"""The table of lowerings: ``OpOverload`` → rule, one rule an overload.

A rule is a function of JAX values: ``rule(ctx, *args, **kwargs)`` with the op's own arguments, tensors replaced by JAX
arrays. Register one in its family's file::

    @lower(aten.view.default, aten.reshape.default)
    def view(ctx, x, size):
        return lax.reshape(x, ctx.result.shape)

    @elementwise(aten.add.Tensor)                       # operands arrive promoted and broadcast; the result is cast
    def add(x, y, *, alpha=1):
        return x + y * alpha

    elementwise_table({aten.exp.default: lax.exp, ...}, promote=INT_TO_FLOAT)

An overload is registered once; a packet (``aten.add``), a duplicate or a missing overload raises here, at import.
Another package adds lowerings through the entry-point group ``portable.lowerings`` (a module that registers rules).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import math
import pkgutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from jax import lax
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _disable_current_modes

from portable import dtypes
from portable.dtypes import Promotion
from portable.errors import RegistrationError

if TYPE_CHECKING:
    from portable.lowering.context import Context

DEFAULT = Promotion.DEFAULT
NO_OPMATH = Promotion.NO_OPMATH
INT_TO_FLOAT = Promotion.INT_TO_FLOAT
ALWAYS_BOOL = Promotion.ALWAYS_BOOL
COMPLEX_TO_FLOAT = Promotion.COMPLEX_TO_FLOAT
BOOL_TO_LONG = Promotion.BOOL_TO_LONG


@dataclass(frozen=True)
class Rule:
    """One lowering: its overload, the function, and where it was registered."""

    op: OpOverload
    apply: Callable[..., Any]
    where: str


# functions of JAX's stand in the tables of this package
_OWN = tuple(f"{Path(str(package.__file__)).parent}/" for package in (dtypes, jax))


def is_own(where: str) -> bool:
    """Whether a rule or kernel that was made at ``where`` ("file:line") came with portable."""
    return ":" not in where or where.startswith(_OWN)


RULES: dict[OpOverload, Rule] = {}
LIBRARY_RULES: dict[str, Callable[..., Any]] = {}


def register(op: OpOverload, apply: Callable[..., Any], where: str) -> None:
    """Enter one rule.

    Raises:
        RegistrationError: ``op`` is not an overload, or has a rule already, or the rule cannot be called as the op is.
    """
    if isinstance(op, OpOverloadPacket):
        raise RegistrationError(
            f"{op} is a packet of overloads",
            remedy=f"name one: {', '.join(f'{op}.{o}' for o in op.overloads()[:4])}",
        )
    if not isinstance(op, OpOverload):
        raise RegistrationError(
            f"a lowering is keyed by an OpOverload, not by {op!r}", remedy="pass e.g. torch.ops.aten.add.Tensor"
        )
    if op in RULES:
        raise RegistrationError(
            f"{op} has a lowering already, at {RULES[op].where}; the second is at {where}", remedy="remove one of them"
        )
    if not is_own(where):  # a torch whose op has got one more argument need not break what does not use it
        _check_signature(op, apply, where)
    RULES[op] = Rule(op, apply, where)


def _check_signature(op: OpOverload, apply: Callable[..., Any], where: str) -> None:
    """The rule can be called with all arguments of the op, and without those that have defaults."""
    leading = ["ctx"]
    if isinstance(apply, functools.partial) and apply.func is apply_elementwise:
        apply, leading = apply.args[0], []
    every = op._schema.arguments
    try:
        signature = inspect.signature(apply)
        for arguments in (every, [a for a in every if not a.has_default_value()]):
            positional = [a.name for a in arguments if not a.kwarg_only]
            signature.bind(*leading, *positional, **{a.name: None for a in arguments if a.kwarg_only})
    except (TypeError, ValueError) as failure:
        positional = [*leading, *(_parameter(a) for a in every if not a.kwarg_only)]
        by_name = [_parameter(a) for a in every if a.kwarg_only]
        wanted = ", ".join([*positional, *(["*", *by_name] if by_name else [])])
        raise RegistrationError(
            f"the lowering of {op} at {where} cannot be called as the op is: {failure}",
            remedy=f"let it take ({wanted})",
        ) from failure


def _parameter(argument: Any) -> str:
    return f"{argument.name}={argument.default_value!r}" if argument.has_default_value() else str(argument.name)


def lower(*ops: OpOverload) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``rule(ctx, *args, **kwargs)`` lowers each of ``ops``."""

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            register(op, rule, place(rule))
        return rule

    return decorate


def lower_library(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: lowers the overload ``namespace::op.overload`` of a library that may be absent or not imported yet."""

    def decorate(rule: Callable[..., Any]) -> Callable[..., Any]:
        if name in LIBRARY_RULES:
            raise RegistrationError(f"{name} has a lowering already", remedy="remove one of them")
        LIBRARY_RULES[name] = rule
        return rule

    return decorate


def rule_for(op: OpOverload) -> Rule | None:
    """The rule of ``op``, if it has one."""
    rule = RULES.get(op)
    if rule is None and op.name() in LIBRARY_RULES:
        register(op, LIBRARY_RULES[op.name()], place(LIBRARY_RULES[op.name()]))
        rule = RULES[op]
    return rule


def elementwise(
    *ops: OpOverload, promote: Promotion = DEFAULT, operands: tuple[int, ...] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: ``formula(*operands, **kwargs)`` lowers each of ``ops`` elementwise.

    The operands arrive in torch's computation dtype and broadcast to the result's shape; what the formula returns is
    cast to torch's result dtype.

    Args:
        promote: torch's type promotion kind.
        operands: positions of the arguments that take part in promotion and broadcasting; by default all positional
            arguments that are tensors or numbers.
    """

    def decorate(formula: Callable[..., Any]) -> Callable[..., Any]:
        rule = functools.partial(apply_elementwise, formula, promote, operands)
        for op in ops:
            register(op, rule, place(formula))
        return formula

    return decorate


def elementwise_table(rows: Mapping[OpOverload, Callable[..., Any]], promote: Promotion = DEFAULT) -> None:
    """Register one elementwise formula a row."""
    for op, formula in rows.items():
        elementwise(op, promote=promote)(formula)


def place(function: Callable[..., Any]) -> str:
    """Where ``function`` is defined, as "file:line"; its name where that is not known."""
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else getattr(function, "__name__", repr(function))


def apply_elementwise(
    formula: Callable[..., Any],
    kind: Promotion,
    operands: tuple[int, ...] | None,
    ctx: Context,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Apply ``formula`` as the decorator `elementwise` does: for a rule that chooses its formula by its arguments."""
    candidates = range(len(args)) if operands is None else operands
    positions = [i for i in candidates if i < len(args) and isinstance(args[i], (jax.Array, Number, TracedScalar))]
    values = list(args)
    converted, result = promoted(kind, ctx.result.shape, *(args[i] for i in positions))
    for i, value in zip(positions, converted, strict=True):
        values[i] = value
    return cast(formula(*values, **kwargs), result)


def promoted(
    kind: Promotion, shape: tuple[int, ...], *operands: Any, rounded: bool = True
) -> tuple[list[jax.Array], torch.dtype]:
    """The operands in torch's computation dtype, broadcast to ``shape``; and torch's result dtype.

    In half precision torch rounds a number, or a 0-d tensor of another dtype, to that dtype before it computes in
    float32; with ``rounded=False`` it does not (products, quotients, weights of lerp).
    """
    computation, result = dtypes.promote(kind, tuple(described(x) for x in operands))
    if rounded and result in (torch.bfloat16, torch.float16):
        operands = tuple(cast(x, result) for x in operands)
    return [broadcast(cast(x, computation), shape) for x in operands], result


class TracedScalar:
    """A Python number whose value is known only when the program runs: a 0-d array that promotes like a number."""

    __slots__ = ("type", "value")

    def __init__(self, value: jax.Array, kind: type) -> None:
        self.value, self.type = value, kind

    def __eq__(self, other: object) -> bool:
        raise TypeError("a number that is known only at run time")

    def __bool__(self) -> bool:
        raise TypeError("a number that is known only at run time")

    __hash__ = object.__hash__


def described(x: Any) -> tuple[torch.dtype, bool] | type:
    """What promotion needs to know of an operand: a tensor's dtype and whether it is 0-d, or a number's type."""
    if isinstance(x, jax.Array):
        return dtypes.to_torch(x.dtype), x.ndim == 0
    if isinstance(x, TracedScalar):
        return x.type
    for kind in (bool, int, float, complex):
        if isinstance(x, kind):
            return kind
    raise TypeError(f"neither a tensor nor a number: {x!r}")


def cast(x: Any, dtype: torch.dtype) -> jax.Array:
    """``x`` (array or number) as an array of ``dtype``, by torch's conversion rules.

    A complex number cast to a real type loses its imaginary part.
    """
    to = dtypes.to_jax(dtype)
    if isinstance(x, TracedScalar):
        x = x.value
    if isinstance(x, jax.Array):
        if x.dtype == to:
            return x
        if to == np.bool_:
            return lax.ne(x, lax.full_like(x, 0))
        if x.dtype == np.bool_ and to.kind not in "iu":  # else XLA makes a selection of mask · NaN
            return lax.select(x, lax.full(x.shape, 1, to), lax.full(x.shape, 0, to))
        if np.issubdtype(x.dtype, np.complexfloating) and not np.issubdtype(to, np.complexfloating):
            x = lax.real(x)
        if to.kind in "iu" and jax.numpy.issubdtype(x.dtype, np.floating):
            return _float_to_int(x, to)
        if bound := _saturates_at(dtype):
            x = lax.clamp(place_scalar(-bound, x), x, place_scalar(bound, x))
        return lax.convert_element_type(x, to)
    if bound := _saturates_at(dtype):
        x = np.clip(x, -bound, bound)
    with np.errstate(all="ignore"):
        return jax.numpy.asarray(np.asarray(x).astype(to))


def narrowed(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """A float32 array rounded to the half precision ``dtype`` and kept wide; as it is for other dtypes.

    For the ops that torch computes in half precision step by step. (`lax.reduce_precision` has no subnormal numbers,
    and those of float16 are large.)
    """
    if x.dtype != np.float32 or dtype not in (torch.bfloat16, torch.float16):
        return x
    if dtype == torch.bfloat16:
        return lax.reduce_precision(x, 8, 7)
    rounded = lax.convert_element_type(lax.convert_element_type(x, np.float16), np.float32)
    return lax.reduce_precision(rounded, 8, 12)  # as it is; LLVM would make half-precision products and sums one


@functools.cache
def _saturates_at(dtype: torch.dtype) -> float:
    """The largest number of ``dtype`` if torch gives it for every larger one, else 0.0: releases of torch differ in
    what they make of a number that float8_e4m3fn does not hold, and XLA gives NaN."""
    if not dtype.is_floating_point or dtype.itemsize > 1:
        return 0.0
    with _disable_current_modes():
        largest = torch.tensor(float("inf")).to(dtype).float().item()
    return largest if math.isfinite(largest) else 0.0


def _float_to_int(x: jax.Array, to: np.dtype) -> jax.Array:
    """As torch's hosts convert: by a signed integer of 32 bits at least, whose smallest value stands for NaN and for
    what does not fit; narrower types keep its low bits (300.0 is 44 as a byte, -1.0 is 255). XLA saturates.
    """
    wide = np.dtype(np.int32) if to.itemsize < 4 else np.dtype(np.int64) if to.kind == "u" else to
    least = float(np.iinfo(wide).min)
    with np.errstate(over="ignore"):  # float16 holds neither bound: infinity stands for it
        low, high = (np.asarray(v).astype(x.dtype) for v in (least, -least))
    fits = lax.bitwise_and(lax.ge(x, low), lax.lt(x, high))
    value = lax.convert_element_type(x, wide)
    return lax.convert_element_type(lax.select(fits, value, lax.full_like(value, np.iinfo(wide).min)), to)


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """``x`` broadcast to ``shape`` by torch's (numpy's) rules."""
    if x.shape == tuple(shape):
        return x
    offset = len(shape) - x.ndim
    kept = [i for i, n in enumerate(x.shape) if n == shape[offset + i]]
    x = lax.reshape(x, tuple(x.shape[i] for i in kept)) if len(kept) != x.ndim else x
    return lax.broadcast_in_dim(x, shape, tuple(offset + i for i in kept))


def place_scalar(value: Any, like: jax.Array) -> jax.Array:
    """A number (or 0-d array) as an array of the shape and dtype of ``like``."""
    return broadcast(cast(value, dtypes.to_torch(like.dtype)), like.shape)


_LOADED = threading.Event()
_LOADING = threading.RLock()
_FAILED: list[Exception] = []


def load() -> dict[OpOverload, Rule]:
    """All rules: the families of this package, then those of other packages (entry points).

    A load that fails leaves no rule behind, and its cause is raised again by the next.
    """
    if not _LOADED.is_set():
        with _LOADING:
            if not _LOADED.is_set():
                if _FAILED:
                    raise _FAILED[0]
                rules, of_libraries = dict(RULES), dict(LIBRARY_RULES)
                try:
                    _load()
                except Exception as failure:
                    RULES.clear()
                    RULES.update(rules)
                    LIBRARY_RULES.clear()
                    LIBRARY_RULES.update(of_libraries)
                    _FAILED.append(failure)
                    raise
                _LOADED.set()
    return RULES


def _load() -> None:
    package = importlib.import_module("portable.lowering")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"portable.lowering.{module.name}")
    for entry in importlib.metadata.entry_points(group="portable.lowerings"):
        entry.load()


def absent() -> list[str]:
    """The overloads of `lower_library` that are not here: this torch release, or a library, does not define them."""
    load()
    return sorted(n for n in LIBRARY_RULES if not torch._C._jit_get_schemas_for_operator(n.partition(".")[0]))


@functools.cache
def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """A decomposition of ``op`` into other ATen ops, torch's own where there is one, or None."""
    from torch._decomp import decomposition_table

    from portable.lowering import foreach

    if op in decomposition_table:
        return decomposition_table[op]
    if op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return op.decompose
    return foreach.decomposition(op)
