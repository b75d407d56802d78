"""Fallback: an op that has no exact lowering runs as torch's own kernel, inside the same program.

It does so on a host, whose memory XLA and torch share, and only where the kernel gives what eager gives: nothing else
is written to, nothing is drawn, and the result's shape is known. It is never silent: `Lowered.fallbacks` says which ops
fell back, why, and at which line.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable import errors
from portable.errors import BackendUnavailableError, UnsupportedDtypeError
from portable.explain import Fallback
from portable.kernels import aten
from portable.lowering.context import Context, Refused
from portable.lowering.registry import TracedScalar

# XLA platform: the dispatch key of the kernels that its programs can call; another needs a build of the FFI handler
HOSTS = {"cpu": "CPU"}

# what a schema does not say
UNFIT = {
    **dict.fromkeys(
        ("_reshape_alias", "as_strided", "as_strided_copy", "as_strided_scatter", "resize", "resize_as", "set"),
        "it goes by its argument's storage, which a program does not have",
    ),
    **dict.fromkeys(
        ("_batch_norm_impl_index", "batch_norm", "batch_norm_update_stats", "instance_norm", "native_batch_norm"),
        "it writes to the running statistics",
    ),
    **dict.fromkeys(
        ("multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss_forward"),
        "torch's kernel gives another shape than its shape propagation",
    ),
}


def torch_kernel(
    ctx: Context,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    effect: bool = False,
    written: frozenset[str] = frozenset(),
) -> Any:
    """The op of ``ctx`` on JAX values, by torch's own kernel on the program's platform.

    Args:
        effect: whether the op does something beside giving its results.
        written: names of the arguments that it writes to, whose new values follow the results; all are then one tuple.

    Raises:
        Refused: why it cannot run so.
    """
    op, key = ctx.op, HOSTS.get(ctx.platform)
    if key is None:
        raise Refused(f"torch's kernels cannot be called inside a program on {ctx.platform}")
    if op.namespace in ("aten", "prims") and (reason := UNFIT.get(op._schema.name.partition("::")[2])):
        raise Refused(reason)
    if not ctx.dense:
        raise Refused("its result is not a dense tensor")
    if effect or not (op._schema.returns or written):
        raise Refused("it is called for its effect, which no program orders or keeps")
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key):
        raise Refused(f"torch has no {key} kernel of it")
    if any(isinstance(leaf, TracedScalar) for leaf in pytree.tree_leaves((list(args), kwargs))):
        raise Refused("a number that is known only at run time")
    if ctx.program.unbuilt:
        raise Refused(ctx.program.unbuilt)
    try:
        return aten.call(ctx, op, args, kwargs, written=written)
    except UnsupportedDtypeError as failure:
        raise Refused(failure.message) from failure
    except BackendUnavailableError as failure:
        ctx.program.unbuilt = failure.message  # a second attempt would take as long
        if isinstance(failure.__cause__, OSError):
            ctx.program.unbuilt += " (set PORTABLE_CACHE_DIR to a folder that can be written)"
        raise Refused(ctx.program.unbuilt) from failure


def warn(fallbacks: Iterable[Fallback], told: set[str]) -> None:
    """Warn once for each op that fell back, by its first line, at the line that calls the program; ``told`` keeps the
    ops."""
    for fallback in fallbacks:
        if fallback.op not in told:
            told.add(fallback.op)
            place = f" ({fallback.where})" if fallback.where else ""
            warnings.warn(
                f"{fallback.op}{place} runs as torch's own kernel inside the program: {fallback.reason} "
                "(PORTABLE_FALLBACK=allow runs it without this warning, error refuses it; pt.explain lists it)",
                stacklevel=_users_level(),
            )


# `warnings` itself can skip files from Python 3.12 on
_NOT_THE_USERS = (
    *(f"{Path(str(package.__file__)).parent}/" for package in (errors, torch)),
    contextlib.__file__,
    "<eval_with_key>",  # code that torch has made
)


def _users_level() -> int:
    """The ``stacklevel`` at which a warning of the caller shows the innermost line of the user's code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        level, frame = level + 1, frame.f_back
    return level
