"""Any ATen kernel of the host inside an XLA program: the generic XLA FFI handler of aten_ffi.cc, built at first use.

The handler wraps the program's own buffers as tensors and calls the overload through torch's dispatcher, so that
results are written into the program's memory wherever torch lets them be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
from torch._ops import OpOverload

from portable import dtypes
from portable.kernels.native_code import NativeCode
from portable.lowering.context import Refused, Spec

if TYPE_CHECKING:
    from portable.lowering.context import Context

TARGET = "portable_aten"
PIECE_BYTES = 5 << 20  # small enough to be copied while still in the cache, large enough to be worth a parallel region
WRITTEN = {"t": "w", "l": "W"}  # the token of a tensor, or a list of them, that the op writes to
CODE = NativeCode(Path(__file__).with_name("aten_ffi.cc"), TARGET, torch=True)


def call(
    ctx: Context,
    op: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    out: OpOverload | None = None,
    apart: bool = False,
    written: frozenset[str] = frozenset(),
) -> Any:
    """Call the ATen overload ``op`` on JAX values, as part of the program.

    Args:
        out: its out= variant, where that writes to its argument and is not a copy of what ``op`` gives.
        apart: ``op`` treats the rows (the first dimension) of its first tensor apart, and they are the rows of its
            results: it may be called for a few of them at a time.
        written: names of all arguments that ``op`` writes to: it is given copies, and they follow the results, all in
            one tuple.

    Raises:
        Refused: an argument that the handler cannot carry (a layout, a generator), an op that writes to its arguments,
            or one that draws random numbers: its seed would not be the program's.
        BackendUnavailableError: the handler cannot be built here.
    """
    if op._schema.is_mutable and not written:
        raise Refused("it writes to its arguments, which are the program's buffers")
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise Refused("it draws from torch's generator, not from the program's seed")
    operands: list[jax.Array] = []
    copies: list[jax.Array] = []
    tokens: list[str] = []
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        before = len(operands)
        token = _token(value, operands, str(argument.type))
        if argument.name in written and len(operands) > before:
            if token[0] not in WRITTEN:
                raise Refused("it writes to a list in which a tensor may be missing")
            token = WRITTEN[token[0]] + token[1:]
            copies += operands[before:]
        tokens.append(token)
    results = ctx.result if isinstance(ctx.result, (tuple, list)) else (ctx.result,)
    types = [*map(_type, results), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in copies)]
    CODE.register()
    called = (out or op)._schema
    rows = _rows(types) if apart else 0
    outputs = emit(ctx, called.name, called.overload_name, tokens, operands, types, out=out is not None, rows=rows)
    if isinstance(ctx.result, Spec):
        return outputs[0]
    given = [output if isinstance(r, Spec) else None for output, r in zip(outputs, results, strict=False)]
    return (*given, *outputs[len(results) :])


def emit(
    ctx: Context,
    op: str,
    overload: str,
    tokens: Sequence[str],
    operands: Sequence[Any],
    types: Sequence[jax.ShapeDtypeStruct],
    *,
    out: bool = False,
    rows: int = 0,
) -> Sequence[jax.Array]:
    """The call of the handler itself; `aten_ffi.cc` says what its attributes mean.

    ATen's kernels use every core through OpenMP: two of them at once, called by two of XLA's threads, would have a team
    of threads each, so that a program calls them in turn.
    """
    flag = jax.ShapeDtypeStruct((), np.bool_)

    def call(turn: Any) -> Sequence[jax.Array]:
        results: Sequence[jax.Array] = jax.ffi.ffi_call(TARGET, [*types, flag])(
            *operands, turn, op=op, overload=overload, arguments=" ".join(tokens), out=out, rows=np.int64(rows)
        )
        return results

    return ctx.in_turn(call)


def _type(result: Any) -> jax.ShapeDtypeStruct:
    if result is None:  # what the op leaves undefined, e.g. a gradient that nobody asked for
        return jax.ShapeDtypeStruct((0,), np.bool_)
    if not isinstance(result, Spec):
        raise Refused("a result that is not a tensor")
    _code(result.dtype)
    return jax.ShapeDtypeStruct(result.shape, result.jax_dtype)


def _rows(results: Sequence[jax.ShapeDtypeStruct]) -> int:
    """How many rows at a time: about PIECE_BYTES of results, in pieces of equal length."""
    rows = results[0].shape[0] if results and results[0].shape else 0
    size = sum(r.size * r.dtype.itemsize for r in results)
    pieces = min(max(round(size / PIECE_BYTES), 1), max(rows, 1))
    return -(-rows // pieces)


def _token(value: Any, operands: list[jax.Array], kind: str) -> str:
    if isinstance(value, jax.Array):
        _code(dtypes.to_torch(value.dtype))
        operands.append(value)
        return "t"
    if kind in ("Tensor", "Optional[Tensor]") and value is not None:
        raise Refused("a number where the aten handler needs a tensor")
    if value is None:
        return "n"
    if isinstance(value, bool):
        return f"b{int(value)}"
    if isinstance(value, torch.dtype):
        return f"d{_code(value)}"
    if isinstance(value, int):
        return _integer_token(value, kind)
    if isinstance(value, float):
        return f"f{value.hex()}"
    if isinstance(value, str) and value.isalpha():
        return f"s{value}"
    if isinstance(value, (list, tuple)):
        return _list_token(value, operands, kind)
    raise Refused(f"an argument of type {type(value).__name__} cannot go into the aten handler")


def _integer_token(value: int, kind: str) -> str:
    if kind.startswith(("List[int]", "Optional[List[int]]")):
        return f"I1:{value}"
    return f"f{float(value).hex()}" if "float" in kind else f"i{value}"


def _list_token(value: Sequence[Any], operands: list[jax.Array], kind: str) -> str:
    if kind == "List[Optional[Tensor]]" and all(v is None or isinstance(v, jax.Array) for v in value):
        given = [v for v in value if v is not None]
        for v in given:
            _token(v, operands, "Tensor")
        return f"o{''.join(str(int(v is not None)) for v in value)}"
    if all(isinstance(v, jax.Array) for v in value) and "Tensor" in kind:
        for v in value:
            _token(v, operands, "Tensor")
        return f"l{len(value)}"
    if "float" in kind.lower():
        return f"F{len(value)}:{','.join(float(v).hex() for v in value)}"
    if all(isinstance(v, bool) for v in value) and "bool" in kind.lower():
        return f"B{len(value)}:{','.join(str(int(v)) for v in value)}"
    if all(isinstance(v, int) for v in value):
        return f"I{len(value)}:{','.join(str(int(v)) for v in value)}"
    raise Refused("a list of this kind cannot go into the aten handler")


@functools.cache
def _code(dtype: torch.dtype) -> int:
    """The number of a dtype in c10::ScalarType, which torch's C++ dispatcher takes for it."""
    dtypes.to_jax(dtype)
    order = (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
        None, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
    )  # fmt: skip
    if dtype not in order:
        raise Refused(f"{dtype} cannot go into the aten handler")
    return order.index(dtype)
