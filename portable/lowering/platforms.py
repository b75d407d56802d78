"""Which ops of a traced program cannot be part of a program of a platform, because XLA has no form of them or because
they call back into Python: JAX would name its own primitive, not the op."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from jax._src import core, source_info_util
from jax._src.interpreters import mlir

from portable.errors import UnsupportedOp
from portable.lowering.source import place

CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print", "buffer_callback")


def missing(jaxpr: core.Jaxpr, platform: str, ops: Set[str]) -> list[UnsupportedOp]:
    """The ops of a program that cannot be lowered for ``platform``, each with the user's line.

    Args:
        ops: names of the program's ops, as they stand in JAX's name stack.
    """
    tables = mlir._lowerings, mlir._platform_specific_lowerings[platform]
    return list(
        dict.fromkeys(
            UnsupportedOp(op, f"XLA has no {primitive.name} on {platform}", where)
            for primitive, op, where in _applied(jaxpr, platform, ops)
            if not any(primitive in table for table in tables)
        )
    )


def callbacks(jaxpr: core.Jaxpr, platform: str, ops: Set[str]) -> list[tuple[str, str, str]]:
    """(JAX's primitive, op, the user's line) of what calls back into Python; arguments as of `missing`."""
    return [(p.name, op, where) for p, op, where in _applied(jaxpr, platform, ops) if p.name in CALLBACKS]


def _applied(
    jaxpr: core.Jaxpr, platform: str, ops: Set[str], op: str = "this program", where: str = ""
) -> Iterator[tuple[core.Primitive, str, str]]:
    """Each primitive of the program, with the op that it is a part of, and the user's line."""
    for eqn in jaxpr.eqns:
        named = [scope.name for scope in eqn.source_info.name_stack.stack if scope.name in ops]
        frame = source_info_util.user_frame(eqn.source_info.traceback) if named else None
        here = named[-1] if named else op
        there = place(frame.file_name, frame.start_line, frame.function_name) if frame else where
        yield eqn.primitive, here, there
        for inner in _inner(eqn, platform):
            yield from _applied(inner, platform, ops, here, there)


def _inner(eqn: Any, platform: str) -> Iterator[core.Jaxpr]:
    """The programs within an equation, without branches for other platforms."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        yield from core.jaxprs_in_params(eqn.params)
        return
    for named, branch in zip(platforms, eqn.params["branches"], strict=True):
        if named is None or platform in named:
            yield branch.jaxpr
            return
