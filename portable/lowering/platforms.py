"""Which ops of a traced program XLA has no form of on a platform: JAX would name its own primitive, not the op."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from jax._src import core, source_info_util
from jax._src.interpreters import mlir

from portable.errors import UnsupportedOp
from portable.lowering.source import place


def missing(jaxpr: core.Jaxpr, platform: str, ops: Set[str]) -> list[UnsupportedOp]:
    """The ops of a program that cannot be lowered for ``platform``, each with the user's line.

    Args:
        ops: names of the program's ops, as they stand in JAX's name stack.
    """
    return list(dict.fromkeys(_missing(jaxpr, platform, ops, "this program", "")))


def _missing(jaxpr: core.Jaxpr, platform: str, ops: Set[str], op: str, where: str) -> Iterator[UnsupportedOp]:
    for eqn in jaxpr.eqns:
        named = [scope.name for scope in eqn.source_info.name_stack.stack if scope.name in ops]
        frame = source_info_util.user_frame(eqn.source_info.traceback) if named else None
        here = named[-1] if named else op
        there = place(frame.file_name, frame.start_line, frame.function_name) if frame else where
        if not any(eqn.primitive in table for table in (mlir._lowerings, mlir._platform_specific_lowerings[platform])):
            yield UnsupportedOp(here, f"XLA has no {eqn.primitive.name} on {platform}", there)
        for inner in _inner(eqn, platform):
            yield from _missing(inner, platform, ops, here, there)


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
