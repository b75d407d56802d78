"""Whether a result is right: its error against a float64 reference, relative to the scale of the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.backends.base import TOLERANCES

_AS_EAGER = 4.0  # times eager's own error


def exactly(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The result of ``function`` with every float argument in float64."""

    def widen(x: torch.Tensor) -> torch.Tensor:
        return (
            x.to(torch.complex128 if x.is_complex() else torch.float64)
            if x.dtype.is_floating_point or x.is_complex()
            else x
        )

    args, kwargs = pytree.tree_map_only(torch.Tensor, widen, (args, kwargs))
    return function(*args, **kwargs)


def difference(result: Any, eager: Any, exact: Any, tolerances: Mapping[torch.dtype, float] = TOLERANCES) -> str:
    """How ``result`` differs from the float64 reference by more than rounding explains; '' if it does not.

    The error of a tensor is its largest distance from the reference over the reference's largest magnitude. Allowed is
    what the dtype's tolerance says, or a few times eager's own error.
    """
    got, plain, right = (pytree.tree_leaves(x) for x in (result, eager, exact))
    if len(got) != len(right):
        return f"{len(got)} results instead of {len(right)}"
    for i, (x, y, z) in enumerate(zip(got, plain, right, strict=True)):
        if not isinstance(x, torch.Tensor):
            continue
        x, y = x.detach().cpu(), y.detach().cpu()
        z = z.detach().cpu()
        if x.shape != y.shape or x.dtype != y.dtype:
            return f"result {i} is {x.dtype}{list(x.shape)} instead of {y.dtype}{list(y.shape)}"
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return f"result {i} differs in {int((x != y).sum())} of {x.numel()} elements"
            continue
        if problem := _non_finite(x, y, z):
            return f"result {i} {problem}"
        error, allowed = _error(x, z), max(tolerances.get(x.dtype, 1e-2), _AS_EAGER * _error(y, z))
        if not error <= allowed:
            return f"result {i} is off by {error:.2g} of its scale, allowed {allowed:.2g}"
    return ""


def _non_finite(x: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> str:
    """Where a result or the reference is NaN or infinite, it must be what the reference or eager has there."""
    odd = ~(x.isfinite() & exact.isfinite())
    agrees = _same(x.double(), exact) | _same(x, eager)
    wrong = int((odd & ~agrees).sum())
    return f"has NaN or infinities in {wrong} elements where they do not belong, or none where they do" if wrong else ""


def _same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x == y) | (x.isnan() & y.isnan())


def _error(x: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance from ``exact`` relative to its largest magnitude, where both are finite."""
    both = x.isfinite() & exact.isfinite()
    if not bool(both.any()):
        return 0.0
    distance = (x.double() - exact).abs()[both]
    return float(distance.max()) / max(float(exact[both].abs().max()), 1e-30)
