"""The registry of kernels: what implements which op, for which backends, dtypes and arguments.

A kernel is a *candidate*. Registering one changes nothing: it is used where the gate has measured that the portable
path misses its objective, and that the kernel is correct and meets it (portable/slo/gate.py), or where PORTABLE_KERNELS
names it.

Kernels come from three places: the decorator `register_kernel`, the files ``portable/kernels/<op>/<provider>.py``, and
the entry-point group ``portable.kernels`` of other packages (a module that registers). The last two are imported when
kernels of a backend are first asked for.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import pkgutil
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils import _pytree as pytree

from portable import config
from portable.backends import BUILTIN
from portable.errors import KernelError, RegistrationError
from portable.lowering import source

ABI = Literal["torch", "jax"]


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    Attributes:
        op: a portable op's name ("rms_norm") or an overload's ("aten.cumsum.default").
        provider: who made it.
        backends: the backends it is for, without variants.
        dtypes: of its first tensor argument; None means all.
        accepts: predicate over the op's own arguments, tensors given as objects with shape, dtype and ndim; None means
            all.
        abi: "torch", a function of torch tensors; or "jax", a function of JAX values, which becomes part of the
            program.
        backward: its own gradients, ``backward(grads, needs, *args)``: a gradient or None for each of the op's
            arguments, from that of each result (None for one without) and whether each is wanted; None: the
            reference's are used. For kernels of torch tensors, of portable ops.
        implementation: the function, with the op's exact signature (a "jax" kernel may take the lowering's ``ctx``
            first).
        digest: SHA-256 of its source: a kernel that changed has no evidence.
    """

    op: str
    provider: str
    backends: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] | None
    accepts: Callable[..., Any] | None
    abi: ABI
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None
    implementation: Callable[..., Any]
    digest: str

    @property
    def name(self) -> str:
        return f"{self.op}/{self.provider}"

    @functools.cached_property
    def takes_context(self) -> bool:
        return next(iter(inspect.signature(self.implementation).parameters), "") == "ctx"

    def error(self, what: str, where: str = "", failure: BaseException | None = None) -> KernelError:
        """The kernel is wrong: it ``what``, e.g. "gave 2 results instead of 1".

        Args:
            where: the user's line; by default the one that makes the call.
            failure: what the kernel raised: the line of the kernel is named.
        """
        where = where or source.calling_line()
        inside = source.line_inside(failure, inspect.unwrap(self.implementation)) if failure else ""
        return KernelError(
            f"kernel {self.name}{f' at {where}' if where else ''} {what}{f' ({inside})' if inside else ''}",
            remedy=f"mend the kernel, or run without it: PORTABLE_KERNELS={self.op}=off",
        )

    def why_not(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
        """Why the kernel does not take these arguments; '' if it does. A predicate that raises or is no bool
        refuses."""
        leaves = pytree.tree_leaves((args, kwargs))
        first = next((a for a in leaves if hasattr(a, "dtype") and hasattr(a, "shape")), None)
        if self.dtypes is not None and first is not None and first.dtype not in self.dtypes:
            return f"not for {first.dtype}"
        if self.accepts is None:
            return ""
        try:
            answer = self.accepts(*args, **kwargs)
        except Exception as failure:  # a predicate of another author's may fail in any way; the kernel is then not used
            return f"its predicate failed: {type(failure).__name__}: {failure}"
        if isinstance(answer, torch.SymBool):
            answer = _known(answer)
        if not isinstance(answer, bool):
            return f"its predicate gave {type(answer).__name__}, not a bool"
        return "" if answer else "its predicate refuses these arguments"

    def not_on(self, path: str) -> str:
        """Why no program of ``path`` ("stablehlo" or "native") can call the kernel; '' if it can."""
        wanted = {"stablehlo": "jax", "native": "torch"}.get(path, self.abi)
        return "" if self.abi == wanted else f'the {path} path takes kernels with abi="{wanted}", it has "{self.abi}"'


KERNELS: dict[tuple[str, str], Kernel] = {}
BROKEN: dict[str, str] = {}  # traceback of each entry point that could not be loaded, by its value
_lock = threading.RLock()


def register_kernel(
    op: str,
    *,
    provider: str,
    backends: Sequence[str],
    dtypes: Sequence[torch.dtype] | None = None,
    accepts: Callable[..., Any] | None = None,
    abi: ABI = "torch",
    differentiable: bool = False,
    backward: Callable[..., tuple[torch.Tensor | None, ...]] | None = None,
    sources: Sequence[Path] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: register a function as a kernel of ``op``.

    The function has the op's exact parameters, in name and order; one with ``abi="jax"`` may take the lowering's
    ``ctx`` before them. It gives what the op gives: the same number of results, shapes and dtypes. It becomes a
    candidate: it runs where the gate has decided for it, or, unmeasured, where ``PORTABLE_KERNELS=op=provider`` names
    it.

    Args:
        op: a portable op's name ("rms_norm") or an ATen overload's full name ("aten.cumsum.default").
        provider: a name of your own; ``(op, provider)`` is unique.
        backends: the backends that it is for, as ("xla",) for all platforms of xla, or ("xla:cpu",) for one.
        dtypes: the dtypes of the first tensor argument that it takes; None means all.
        accepts: a predicate that is called as the op is, tensors given as objects with shape, dtype and ndim; it gives
            a bool. Where it is False, or raises, the op runs without the kernel. None means that all is accepted.
        abi: "torch", a function of torch tensors, for native backends (cpu, cuda, rocm, xpu, …); "jax", a function of
            JAX arrays that becomes part of the program, for xla and tpu.
        differentiable: the function is made of torch ops, whose gradients are the kernel's: short for a ``backward``
            that runs it again under autograd.
        backward: the kernel's own gradients, ``backward(grads, needs, *args)``: ``grads`` has one for each result (None
            for a result without), ``needs`` a bool for each of the op's arguments; it gives a gradient or None for each
            argument. For portable ops with ``abi="torch"``; where neither is given, the reference's gradients are used.
        sources: files that belong to the implementation beside the function itself, e.g. C++: if one changes, what was
            measured of the kernel no longer counts.

    Raises:
        RegistrationError: no such op or backend, a packet of overloads, a duplicate, an unknown abi, another signature
            than the op's, a predicate that cannot be called with the op's arguments, or gradients where none are taken.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        _check_declaration(op, provider, backends, dtypes, abi)
        _check_signature(op, function)
        _check_predicate(op, accepts)
        gradients = _through_autograd(function) if differentiable and backward is None else backward
        _check_backward(op, abi, gradients)
        kernel = Kernel(
            op, provider, tuple(backends), tuple(dtypes) if dtypes is not None else None, accepts, abi, gradients,
            function, _digest(function, sources, backward, differentiable),
        )  # fmt: skip
        with _lock:
            if (op, provider) in KERNELS:
                raise RegistrationError(
                    f"kernel {kernel.name} is registered already", remedy="choose another provider name, or remove one"
                )
            KERNELS[op, provider] = kernel
        return function

    return decorate


def kernels_for(op: str, backend: str) -> list[Kernel]:
    """The kernels of ``op`` for ``backend``, e.g. "xla:cpu" (which "xla" covers), in order of registration."""
    load()
    return [k for k in list(KERNELS.values()) if k.op == op and _is_for(k, backend)]


def ops_with_kernels(backend: str) -> frozenset[str]:
    """The ops that have a kernel for ``backend``."""
    load()
    return frozenset(k.op for k in list(KERNELS.values()) if _is_for(k, backend))


def _is_for(kernel: Kernel, backend: str) -> bool:
    return backend in kernel.backends or backend.partition(":")[0] in kernel.backends


_LOADED = threading.Event()


def load() -> None:
    """Import the kernels of this package and of other packages, once. A broken package costs its own kernels alone."""
    if _LOADED.is_set():
        return
    with _lock:
        if _LOADED.is_set():
            return
        package = importlib.import_module("portable.kernels")
        for module in pkgutil.walk_packages(package.__path__, "portable.kernels."):
            if module.name.count(".") > 2:
                importlib.import_module(module.name)
        for entry in importlib.metadata.entry_points(group="portable.kernels"):
            try:
                entry.load()
            except Exception as failure:  # of another author's module
                BROKEN[entry.value] = traceback.format_exc()
                config.logger().warning("the kernels of %s are not used: it failed to load: %s", entry.value, failure)
        _LOADED.set()


def _known(answer: torch.SymBool) -> Any:
    """A symbolic answer as a bool where it is the same for every size; else the answer."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(answer):
        return True
    return False if statically_known_true(torch.sym_not(answer)) else answer


def op_name(overload: OpOverload) -> str:
    """What kernels and decisions call an overload: a portable op by its own name, another by its full name."""
    return overload._schema.name.partition("::")[2] if overload.namespace == "portable" else str(overload)


def own_arguments(overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments of a call of a portable op, in order: the dispatcher leaves out those that equal their defaults."""
    parameters = overload._schema.arguments
    rest = [kwargs[p.name] if p.name in kwargs else p.default_value for p in parameters[len(args) :]]
    return [*args, *rest]


def overload_named(name: str) -> OpOverload | None:
    """The overload ``aten.add.Tensor``, or None if torch has none by this name."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    found: Any = torch.ops
    for part in parts:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if isinstance(found, OpOverload) else None


def _check_backends(name: str, backends: Sequence[str]) -> None:
    """They exist. Those of other packages are not loaded for it: their own modules register kernels."""
    unknown = [b for b in backends if b.partition(":")[0] not in BUILTIN]
    if not unknown:
        return
    plugins = {entry.name for entry in importlib.metadata.entry_points(group="portable.backends")}
    for backend in unknown:
        if backend.partition(":")[0] not in plugins:
            raise RegistrationError(
                f"the kernel {name} is for backend {backend!r}, which does not exist",
                remedy=f"one of {', '.join((*BUILTIN, *sorted(plugins - set(BUILTIN))))}; "
                "that of another package exists once the package is installed",
            )


def _check_declaration(
    op: str, provider: str, backends: Sequence[str], dtypes: Sequence[torch.dtype] | None, abi: str
) -> None:
    if not provider or not provider.isidentifier():
        raise RegistrationError(f"provider {provider!r} is not a name", remedy="use letters, digits and underscores")
    if provider in ("portable", "auto", "off"):
        raise RegistrationError(f"provider {provider!r} is reserved", remedy="choose a name of your own")
    if isinstance(backends, str) or not backends:
        raise RegistrationError("backends= is a non-empty sequence of names", remedy='e.g. backends=("xla",)')
    _check_backends(f"{op}/{provider}", backends)
    if dtypes is not None and not (isinstance(dtypes, Sequence) and all(isinstance(d, torch.dtype) for d in dtypes)):
        raise RegistrationError(f"dtypes={dtypes!r} are not torch dtypes", remedy="e.g. dtypes=(torch.float32,)")
    if abi not in ("torch", "jax"):
        raise RegistrationError(f"unknown abi {abi!r}", remedy='"torch" or "jax"')
    if "." in op and overload_named(op) is None:
        namespace, _, packet = op.partition(".")
        found = getattr(getattr(torch.ops, namespace, None), packet.partition(".")[0], None)
        if isinstance(found, OpOverloadPacket):
            names = ", ".join(f"{namespace}.{packet.partition('.')[0]}.{o}" for o in found.overloads()[:4])
            raise RegistrationError(f"{op} is not one overload", remedy=f"name one: {names}")
        raise RegistrationError(f"torch has no operator {op}", remedy="name an overload, e.g. aten.cumsum.default")


def _check_signature(op: str, function: Callable[..., Any]) -> None:
    """A kernel's parameters are the op's, in name and order."""
    try:
        given = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as failure:
        raise RegistrationError(
            f"the kernel of {op} has no signature: {failure}", remedy="register a Python function"
        ) from failure
    if given and given[0].name == "ctx":
        del given[0]
    if any(p.kind is p.VAR_POSITIONAL for p in given):
        return  # takes whatever the op takes
    wanted = parameters_of(op)
    names = [p.name for p in given if p.kind is not p.VAR_KEYWORD]
    if names != wanted:
        raise RegistrationError(
            f"the kernel of {op} takes ({', '.join(names)}), the op takes ({', '.join(wanted)})",
            remedy="give it the op's exact signature",
        )


def _check_predicate(op: str, accepts: Callable[..., Any] | None) -> None:
    """It can be called as the op is."""
    if accepts is None:
        return
    overload = overload_named(op)
    by_name = {a.name for a in overload._schema.arguments if a.kwarg_only} if overload is not None else set()
    names = parameters_of(op)
    try:
        inspect.signature(accepts).bind(*[n for n in names if n not in by_name], **{n: n for n in by_name})
    except (TypeError, ValueError) as failure:
        raise RegistrationError(
            f"accepts= of {op} cannot be called with ({', '.join(names)}): {failure}",
            remedy="give it the op's parameters, or **kwargs for the rest",
        ) from failure


def _through_autograd(function: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor | None, ...]]:
    def backward(grads: Sequence[Any], needs: Sequence[bool], *args: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            inputs = [a.detach().requires_grad_() if need else a for a, need in zip(args, needs, strict=True)]
            outputs = pytree.tree_leaves(function(*inputs))
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        if not pairs and any(g is not None for g in grads):
            raise KernelError(
                f"what {function.__name__} gives does not depend on its arguments by torch ops: it has no gradient",
                remedy="register it with backward=, or without differentiable=",
            )
        wanted = [x for x, need in zip(inputs, needs, strict=True) if need]
        if not pairs:
            return tuple(None for _ in needs)
        found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
        return tuple(next(found) if need else None for need in needs)

    return backward


def _check_backward(op: str, abi: ABI, backward: Callable[..., Any] | None) -> None:
    """There is a place for gradients, and it can be called with them."""
    if backward is None:
        return
    if "." in op or abi != "torch":
        raise RegistrationError(
            f"the kernel of {op} with abi={abi!r} cannot bring its own gradients",
            remedy='leave backward= out, or register a kernel of a portable op with abi="torch"',
        )
    names = parameters_of(op)
    try:
        inspect.signature(backward).bind("grads", "needs", *names)
    except (TypeError, ValueError) as failure:
        raise RegistrationError(
            f"backward= of {op} cannot be called with (grads, needs, {', '.join(names)}): {failure}",
            remedy="give it those parameters",
        ) from failure


def parameters_of(op: str) -> list[str]:
    """The names of the op's parameters, in order.

    Raises:
        RegistrationError: there is no such op.
    """
    overload = overload_named(op)
    if overload is not None:
        return [a.name for a in overload._schema.arguments]
    from portable import ops

    if op not in dir(ops):
        raise RegistrationError(
            f"there is no portable op {op!r}", remedy="name a file of portable/ops, or an ATen overload"
        )
    return list(inspect.signature(getattr(ops, op).reference).parameters)


def _source(function: Callable[..., Any]) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        return repr((code.co_code, code.co_consts, code.co_names) if code else function)


def _digest(
    function: Callable[..., Any],
    sources: Sequence[Path],
    backward: Callable[..., Any] | None = None,
    differentiable: bool = False,
) -> str:
    source = _source(function) + (_source(backward) if backward else "differentiable" if differentiable else "")
    with contextlib.suppress(OSError, TypeError):  # what the function calls of its own module belongs to it
        module = Path(inspect.getfile(function))
        sources = (*sources, module) if module.is_file() else sources
    return hashlib.sha256(b"\0".join([source.encode(), *(p.read_bytes() for p in sources)])).hexdigest()
