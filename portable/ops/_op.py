"""What a portable op is: its reference, and a custom op that stands in its place only where a kernel was chosen.

Two requirements shape it. An op for which no kernel was chosen must be no wall: every capture sees the reference's own
torch ops and fuses them. And a kernel that was chosen must find the op again in the captured graph: there the call is
one node, ``portable::<name>``, whose fake, autograd and vmap forms all come from the reference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._ops import OpOverload

from portable.errors import OpArgumentError, RegistrationError

Samples = Iterator[tuple[tuple[Any, ...], dict[str, Any]]]

_CHOSEN: ContextVar[frozenset[str]] = ContextVar("portable_ops_chosen", default=frozenset())
# aten/src/ATen/functorch/DynamicLayer.cpp, keysToExcludeWhenEnteringDynamicLayer; and the vmap rule's own
_EXCLUDED_BY_VMAP = (
    "FuncTorchDynamicLayerFrontMode",
    "FuncTorchDynamicLayerBackMode",
    "FuncTorchGradWrapper",
    "FuncTorchBatched",
    "FuncTorchBatchedDecomposition",
    "ADInplaceOrView",
    "AutogradFunctionality",
    "AutogradOther",
)
_REGISTERING = threading.Lock()


def chosen(name: str) -> bool:
    """Whether the compilation that is tracing now has a kernel for the op ``name``; see `choosing`.

    Not within ``torch.func`` transforms (vmap, grad, …): torch's custom ops do not compose with all of them, the
    reference does.
    """
    return name in _CHOSEN.get() and torch._C._functorch.peek_interpreter_stack() is None


# What `torch.compiler.assume_constant_result` sets, without its import of all of Dynamo: the call is evaluated while
# Dynamo traces, and leaves neither a node nor a guard behind. Dynamo cannot read a context variable.
chosen._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def choosing(names: Iterable[str]) -> Iterator[None]:
    """Within it, in this thread or task, a call of an op of ``names`` is captured as the node ``portable::<name>``.

    Whoever compiles holds it around everything that may trace: no guard watches it afterwards. An overload of torch's
    ("aten.cumsum.default") may be among the names: the native path then does not decompose it; see `kept_whole`.

    Raises:
        AttributeError: there is no such op.
    """
    from portable import ops

    selected = frozenset(names)
    for name in selected:
        if "." in name:
            continue
        getattr(ops, name).overload  # noqa: B018 - registered now: no capture could trace the registration
    token = _CHOSEN.set(selected)
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def kept_whole() -> frozenset[str]:
    """The names that the `choosing` around this call gave."""
    return _CHOSEN.get()


def refuse(op: str, message: str, remedy: str) -> NoReturn:
    """Raise OpArgumentError for the op ``op``."""
    raise OpArgumentError(f"{op}: {message}", remedy=remedy)


def wide(x: Tensor) -> Tensor:
    """``x`` in the dtype that ops compute in: float32 for half precision, else its own."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class PortableOp:
    """One portable op. Calling it runs the reference, or records ``portable::<name>`` where a kernel was `chosen`.

    Attributes:
        name: as in ``pt.ops.<name>``.
        reference: the plain-torch function.
        schema: the custom op's signature, e.g. ``(Tensor x, Tensor? weight, float eps=1e-06) -> Tensor``.
        samples: yields (args, kwargs) that cover the op's boundary cases; fresh tensors, the same values every time.
        backward: ``backward(grads, *args)``, a gradient or None for each argument; None: by recomputing the reference.
    """

    def __init__(
        self,
        name: str,
        reference: Callable[..., Any],
        schema: str,
        samples: Callable[[], Samples],
        backward: Callable[..., tuple[Tensor | None, ...]] | None = None,
    ) -> None:
        self.name, self.reference, self.schema, self.samples = name, reference, schema, samples
        self.backward = backward
        self._overload: OpOverload | None = None
        self.__doc__ = reference.__doc__
        self.__wrapped__ = reference  # inspect.signature reads it

    @classmethod
    def of(cls, name: str, module: ModuleType) -> PortableOp:
        """The op that the file ``portable/ops/<name>.py`` describes.

        Raises:
            RegistrationError: the file lacks a part, by name.
        """
        parts = {"reference": name, "schema": "SCHEMA", "samples": "samples"}
        missing = [part for part in parts.values() if not hasattr(module, part)]
        if missing:
            raise RegistrationError(
                f"{module.__name__} has no {', '.join(missing)}", remedy="see portable/ops/rms_norm.py"
            )
        given: dict[str, Any] = {part: getattr(module, attribute) for part, attribute in parts.items()}
        return cls(name, backward=getattr(module, "backward", None), **given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if chosen(self.name):
            return self._overload(*args, **kwargs)  # type: ignore[misc]
        return self.reference(*args, **kwargs)

    @property
    def overload(self) -> OpOverload:
        """``torch.ops.portable.<name>.default``: registered when first asked for. Runs the reference by itself."""
        if self._overload is None:
            with _REGISTERING:
                if self._overload is None:
                    self._overload = _register(self)
        return self._overload

    def __repr__(self) -> str:
        return f"<portable op {self.name}{self.schema}>"

    def __reduce__(self) -> Any:
        return _named, (self.name,)


def _named(name: str) -> PortableOp:
    from portable import ops

    return getattr(ops, name)


def _register(op: PortableOp) -> OpOverload:
    from torch._decomp import register_decomposition

    custom = torch.library.custom_op(f"portable::{op.name}", op.reference, mutates_args=(), schema=op.schema)
    custom.register_fake(op.reference)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args, needs = kept_arguments(ctx)
        # once differentiated again the reference is what autograd knows how to differentiate
        if op.backward is not None and not torch.is_grad_enabled():
            given = op.backward(grads if len(grads) > 1 else grads[0], *args)
            return tuple(g if need else None for g, need in zip(given, needs, strict=True))
        return recomputed(op.reference, args, grads, needs)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        with _as_before_vmap():
            out = torch.vmap(op.reference, in_dims, randomness=info.randomness)(*args)
        return out, tuple(0 for _ in out) if isinstance(out, tuple) else 0

    custom.register_autograd(backward, setup_context=keep_arguments)
    custom.register_vmap(vmap)
    overload = getattr(torch.ops.portable, op.name).default
    register_decomposition(overload)(op.reference)  # where a path has nothing for the node: the reference
    return overload


def keep_arguments(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keep the arguments of a custom op for its backward, and nothing else."""
    ctx.save_for_backward(*[x for x in inputs if isinstance(x, Tensor)])
    ctx.others = [None if isinstance(x, Tensor) else (x,) for x in inputs]


def kept_arguments(ctx: Any) -> tuple[list[Any], list[bool]]:
    """What `keep_arguments` kept, and which of them want a gradient."""
    saved = iter(ctx.saved_tensors)
    args = [next(saved) if other is None else other[0] for other in ctx.others]
    # the dispatcher leaves out trailing arguments that equal their defaults
    return args, [*ctx.needs_input_grad, *[False] * (len(args) - len(ctx.needs_input_grad))]


@contextlib.contextmanager
def _as_before_vmap() -> Iterator[None]:
    """Within a custom op's vmap rule: the dispatcher as it was before vmap was entered, so that another can be."""
    from torch._C import DispatchKey, DispatchKeySet
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _EXCLUDED_BY_VMAP:
        excluded = excluded - DispatchKeySet(getattr(DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set() - DispatchKeySet(DispatchKey.FuncTorchVmapMode)
    level = retrieve_current_functorch_interpreter()
    with torch._C._ForceDispatchKeyGuard(included, excluded), level.lower():
        yield


def recomputed(
    reference: Callable[..., Any], args: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of ``reference(*args)`` by running it again; differentiable where grad mode is on.

    Args:
        grads: one for each output; None or of an integer output: it takes no part.
        needs: which of ``args`` want a gradient.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # an alias each: the same tensor given twice has two gradients
        inputs = [
            (x.view_as(x) if again else x.detach().requires_grad_()) if need else x
            for x, need in zip(args, needs, strict=True)
        ]
        out = reference(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None and o.requires_grad]
    wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
    if not pairs:
        return (None,) * len(args)
    found = iter(
        torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True, create_graph=again)
    )
    return tuple(next(found) if need else None for need in needs)
