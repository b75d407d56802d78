"""Gradients that a kernel brings itself: its custom op gets a second one beside it, which autograd calls.

AOTAutograd traces both, so that Inductor's backward graph holds one node for the kernel's backward. Only the op's own
arguments are kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from portable.errors import KernelError, PortableError
from portable.kernels.registry import Kernel, own_arguments
from portable.ops._op import keep_arguments, kept_arguments


def register(library: torch.library.Library, op: OpOverload, kernel: Kernel) -> OpOverload:
    """Give ``op``, the custom op around ``kernel``, the kernel's gradients; returns the custom op that computes them:
    ``<op>_backward(grads, needs, *args)``, a list of the gradients that are needed."""
    name = f"{op._schema.name.partition('::')[2]}_backward"
    text = str(op._schema)
    arguments = text[text.index("(") + 1 : text.rindex(") ->")]
    schema = f"(Tensor?[] grads, bool[] needs, {arguments}) -> Tensor[]"
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, _Gradients(kernel, op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::{name}", _like_arguments, lib=library)
    gradients: OpOverload = getattr(getattr(torch.ops, library.ns), name).default

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args, needs = kept_arguments(ctx)
        own = [g if g is not None and g.is_floating_point() else None for g in grads]  # of an integer: none
        found = iter(gradients(own, needs, *args))
        return tuple(next(found) if need else None for need in needs)

    torch.library.register_autograd(op._schema.name, backward, setup_context=keep_arguments, lib=library)
    return gradients


def _like_arguments(grads: Sequence[Tensor | None], needs: Sequence[bool], *args: Any) -> list[Tensor]:
    return [a.new_empty(a.shape) for a, need in zip(args, needs, strict=False) if need]


class _Gradients:
    """The kernel's backward, which gives exactly what it has to: contiguous gradients of the arguments' shapes and
    dtypes, in memory of their own."""

    def __init__(self, kernel: Kernel, op: OpOverload) -> None:
        self._kernel, self._op = kernel, op
        self.__name__ = f"{kernel.name} backward"

    def __call__(
        self, grads: Sequence[Tensor | None], needs: Sequence[bool], *arguments: Any, **kwargs: Any
    ) -> list[Tensor]:
        args = own_arguments(self._op, arguments, kwargs)
        try:
            given = self._kernel.backward(grads, needs, *args)  # type: ignore[misc]
        except (PortableError, torch.OutOfMemoryError):  # which a program may catch, to go on with less
            raise
        except Exception as failure:  # of another author's kernel
            raise self._wrong(f"raised {type(failure).__name__}: {failure}") from failure
        if len(given) != len(args):
            raise self._wrong(f"gave {len(given)} gradients for {len(args)} arguments")
        inputs = [x for x in (*grads, *args) if isinstance(x, Tensor)]
        return [
            self._conform(i, g, args[i], inputs) for i, (g, need) in enumerate(zip(given, needs, strict=True)) if need
        ]

    def _conform(self, i: int, gradient: Tensor | None, argument: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        if gradient is None:
            return argument.new_zeros(argument.shape)
        if gradient.shape != argument.shape or gradient.dtype != argument.dtype:
            got, wanted = (f"{x.dtype}{list(x.shape)}" for x in (gradient, argument))
            raise self._wrong(f"gave {got} as the gradient of argument {i}, which is {wanted}")
        own = gradient.contiguous()
        return own.clone() if any(torch._C._is_alias_of(own, x) for x in inputs) else own  # type: ignore[attr-defined]

    def _wrong(self, what: str) -> KernelError:
        return KernelError(
            f"the backward of kernel {self._kernel.name} {what}",
            remedy=f"mend the kernel, or run without it: PORTABLE_KERNELS={self._kernel.op}=off",
        )
