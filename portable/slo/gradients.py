"""Whether the gradients that a kernel brings are right: against the reference's in float64, as its values are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from portable.slo.correctness import difference

Call = Callable[..., Any]


def wrong_gradients(compiled: Call, reference: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """How the gradients of one call differ from the reference's by more than rounding explains; '' if they do not.

    Args:
        compiled: the kernel's call as a function of its tensors, which gives a list of one result.
        reference: the op.
    """
    cotangents: list[torch.Tensor] = []
    leaves = pytree.tree_leaves((args, kwargs))
    if not any(isinstance(x, torch.Tensor) and x.is_floating_point() for x in leaves):
        return ""
    eager = _gradients(reference, args, kwargs, cotangents)
    exact = _gradients(reference, _wide(args), _wide(kwargs), cotangents)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return compiled(*[x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])

    found = _gradients(kernel, args, kwargs, cotangents)
    wrong = [
        f"of argument {i}" for i, (f, e) in enumerate(zip(found, eager, strict=True)) if (f is None) != (e is None)
    ]
    return f"there is one, or none, {', '.join(wrong)}" if wrong else difference(found, eager, exact)


def _wide(arguments: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, arguments)


def _gradients(function: Call, args: Any, kwargs: Any, cotangents: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Of each floating-point tensor among the arguments.

    Args:
        cotangents: of each result; drawn if there are none yet.
    """
    wanted: list[torch.Tensor] = []

    def leaf(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            x = x.detach().requires_grad_()
            wanted.append(x)
        return x

    with torch.enable_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, leaf, (list(args), kwargs))
        results = [x for x in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(x, torch.Tensor)]
        results = [x for x in results if x.requires_grad]
    if not cotangents:
        draw = torch.Generator().manual_seed(0)
        cotangents += [torch.randn(x.shape, generator=draw).to(x.dtype) for x in results]
    given = [c.to(x.device, x.dtype) for c, x in zip(cotangents, results, strict=True)]
    return list(torch.autograd.grad(results, wanted, given, allow_unused=True))
