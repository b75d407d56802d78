"""Assertions on data: what eager raises, the call raises once the program has run."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.registry import TracedScalar, cast, lower

aten = torch.ops.aten
prims = torch.ops.prims


@lower(prims._make_token.default)
def make_token(ctx: Context) -> jax.Array:
    return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)


@lower(prims._sink_tokens.default)
def sink_tokens(ctx: Context, tokens: Sequence[jax.Array]) -> None:
    """Checks run in the order of the graph: nothing waits for a token."""


@lower(aten._linalg_check_errors.default)
def check_info(ctx: Context, info: jax.Array, api_name: str, *, is_matrix: bool) -> None:
    """torch's own check of LAPACK's info, with its message."""
    check = functools.partial(aten._linalg_check_errors.default, api_name=api_name, is_matrix=is_matrix)
    ctx.check(info, check, lambda x, y: jnp.where(x == 0, y, x))


@lower(aten._assert_async.default)
def assert_async(ctx: Context, x: jax.Array) -> None:
    ctx.check(cast(x, torch.bool), aten._assert_async.default, lax.bitwise_and)


@lower(aten._assert_async.msg)
def assert_async_msg(ctx: Context, x: jax.Array, assert_msg: str) -> None:
    check = functools.partial(aten._assert_async.msg, assert_msg=assert_msg)
    ctx.check(cast(x, torch.bool), check, lax.bitwise_and)


@lower(aten._assert_scalar.default)
def assert_scalar(ctx: Context, x: TracedScalar | bool, assert_msg: str) -> None:
    assert_async_msg(ctx, cast(x, torch.bool), assert_msg)


@lower(aten._functional_assert_async.msg)
def functional_assert_async(ctx: Context, x: jax.Array, assert_msg: str, dep_token: jax.Array) -> jax.Array:
    assert_async_msg(ctx, x, assert_msg)
    return dep_token


@lower(aten._make_dep_token.default)
def make_dep_token(ctx: Context, **_: Any) -> jax.Array:
    return jnp.zeros(ctx.result.shape, ctx.result.jax_dtype)
