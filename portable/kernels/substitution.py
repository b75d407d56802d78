"""Kernels on the native path: calls that were decided for a kernel become calls of a custom op around it.

The custom op has the signature of the op that it stands for, and that op's own fake form; it is functional. Inductor
fuses everything around it as before. A portable op, or an overload that was kept whole for its kernel's sake, is
decomposed in place where a call was not decided for the kernel: nothing that is not a kernel is a wall.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from portable.errors import PortableError, RegistrationError
from portable.kernels import differentiation
from portable.kernels.choice import Choice
from portable.kernels.registry import Kernel, op_name, own_arguments

Decompositions = Mapping[Any, Callable[..., Any]]

NAMESPACE = "portable_kernel"
_LIBRARY: torch.library.Library | None = None
_OPERATORS: dict[tuple[Kernel, OpOverload], OpOverload] = {}
_KERNELS: dict[OpOverload, Kernel] = {}
_LOCK = threading.Lock()
_MOST_TYPES = 4096


def substitute(gm: fx.GraphModule, choice: Choice, whole: frozenset[str], decompositions: Decompositions) -> None:
    """Put kernels where ``choice`` says so, in a functional ATen graph whose nodes carry their fake values as "val".

    Args:
        whole: the ops that were kept whole; those of their calls that no kernel takes are decomposed in place.
        decompositions: what Inductor would have decomposed them by.
    """
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        name = op_name(node.target)
        kernel = _chosen(node, name, choice, "val") if name in choice.ops else None
        if kernel is not None:
            node.target = operator(kernel, node.target)
        elif name in whole and (decomposition := _decomposition(node.target, decompositions)) is not None:
            _inline(gm, node, decomposition, decompositions)
    gm.recompile()


def substitute_differentiable(gm: fx.GraphModule, choice: Choice) -> None:
    """Put kernels that bring their own gradients into a graph of Dynamo's, where a gradient is wanted: autograd has yet
    to see these calls. All others are found in the ATen graphs."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or getattr(node.target, "namespace", "") != "portable":
            continue
        name = op_name(node.target)
        outputs = pytree.tree_leaves(node.meta.get("example_value"))
        if name in choice.ops and any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs):
            kernel = _chosen(node, name, choice, "example_value", only=lambda k: k.backward is not None)
            node.target = operator(kernel, node.target) if kernel is not None else node.target
    gm.recompile()


def substitute_eager(gm: fx.GraphModule, choice: Choice) -> None:
    """The same in a graph of Dynamo's that runs as it is: its portable ops and overloads alone, and where no gradient
    is wanted, since autograd sees these calls."""
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            continue
        name = op_name(node.target)
        outputs = pytree.tree_leaves(node.meta.get("example_value"))
        tracked = any(isinstance(x, torch.Tensor) and x.requires_grad for x in outputs)
        barred = "gradients are wanted, and this graph runs in eager" if tracked else ""
        kernel = _chosen(node, name, choice, "example_value", barred) if name in choice.ops else None
        if kernel is not None:
            node.target = operator(kernel, node.target)
        elif node.target.namespace == "portable":
            node.target = _reference(node.target)
    gm.recompile()


def counted(gm: fx.GraphModule, how: str) -> Counter[tuple[str, str]]:
    """The graph's calls by (op, how it runs): ``how``, or "kernel <provider>"."""
    found: Counter[tuple[str, str]] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_function":
            kernel = _KERNELS.get(node.target)
            found[(kernel.op, f"kernel {kernel.provider}") if kernel else (str(node.target), how)] += 1
    return found


def _chosen(
    node: fx.Node,
    name: str,
    choice: Choice,
    value: str,
    barred: str = "",
    only: Callable[[Kernel], bool] | None = None,
) -> Kernel | None:
    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, lambda n: _value(n, value))
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: _value(n, value))
    if target.namespace == "portable":
        args, kwargs = own_arguments(target, args, kwargs), {}
    with _no_new_guards((args, kwargs)):
        return choice.kernel(name, args, kwargs, barred, only)


def _value(node: fx.Node, key: str) -> Any:
    if key not in node.meta and node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target), None)
    return node.meta.get(key)


def _no_new_guards(values: Any) -> contextlib.AbstractContextManager[Any]:
    """Within it a predicate that asks for the value of a symbolic size fails, instead of specialising the graph."""
    for x in pytree.tree_leaves(values):
        for n in (*x.shape, x) if isinstance(x, torch.Tensor) else (x,):
            if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                forbid = getattr(n.node.shape_env, "error_on_new_guards", None)
                return forbid() if forbid else contextlib.nullcontext()
    return contextlib.nullcontext()


def _reference(target: OpOverload) -> Callable[..., Any]:
    from portable import ops

    found: Callable[..., Any] = getattr(ops, op_name(target)).reference
    return found


def _decomposition(target: OpOverload, decompositions: Decompositions) -> Callable[..., Any] | None:
    return _reference(target) if target.namespace == "portable" else decompositions.get(target)


def _inline(gm: fx.GraphModule, node: fx.Node, function: Callable[..., Any], decompositions: Decompositions) -> None:
    """Put what ``function`` does in the place of the node, traced for the node's own arguments."""
    inputs = list(node.all_input_nodes)
    position = {n: i for i, n in enumerate(inputs)}
    fakes = [_value(n, "val") for n in inputs]

    def call(*values: Any) -> Any:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[position[n]])
        out = function(*args, **kwargs)
        return tuple(out) if isinstance(out, (tuple, list)) else out  # not a named tuple, which fx would call

    mode = next((x.fake_mode for x in fakes if isinstance(x, torch._subclasses.FakeTensor)), contextlib.nullcontext())
    with mode, torch.no_grad():
        traced = make_fx(call, decomposition_table=dict(decompositions))(*fakes)
    values: dict[fx.Node, Any] = dict(
        zip([n for n in traced.graph.nodes if n.op == "placeholder"], inputs, strict=True)
    )
    with gm.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "output":
                _replace(node, fx.node.map_arg(inner.args[0], values.__getitem__))
            elif inner.op == "get_attr":
                name = f"_inlined_{len(gm.graph.nodes)}_{str(inner.target).strip('_')}"
                setattr(gm, name, getattr(traced, str(inner.target)))
                values[inner] = gm.graph.get_attr(name)
                values[inner].meta = dict(inner.meta)
            elif inner.op == "call_function":
                values[inner] = gm.graph.node_copy(inner, values.__getitem__)
                values[inner].meta |= {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}


def _replace(node: fx.Node, result: Any) -> None:
    """Use ``result`` (a node, or a tuple of nodes) instead of ``node``."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):  # of a node with several results: each takes one
            user.replace_all_uses_with(result[user.args[1]])
            user.graph.erase_node(user)
    node.graph.erase_node(node)


def operator(kernel: Kernel, op: OpOverload) -> OpOverload:
    """The custom op around ``kernel`` that has the signature of ``op``; registered when first asked for.

    Raises:
        RegistrationError: ``op`` writes to its arguments or returns views of them.
    """
    with _LOCK:
        if (kernel, op) not in _OPERATORS:
            _OPERATORS[kernel, op] = found = _register(kernel, op)
            _KERNELS[found] = kernel
            if kernel.backward is not None and _LIBRARY is not None:
                _KERNELS[differentiation.register(_LIBRARY, found, kernel)] = kernel
        return _OPERATORS[kernel, op]


def _register(kernel: Kernel, op: OpOverload) -> OpOverload:
    global _LIBRARY
    schema = op._schema
    if any(a.alias_info is not None for a in (*schema.arguments, *schema.returns)):
        raise RegistrationError(
            f"{kernel.name}: {op} writes to its arguments or returns a view of them, so no kernel can stand for it",
            remedy="register the kernel for the functional op",
        )
    _LIBRARY = _LIBRARY or torch.library.Library(NAMESPACE, "FRAGMENT")
    name = f"{kernel.op.replace('.', '_')}_{kernel.provider}_{kernel.digest[:8]}"
    known = sum(str(o).startswith(f"{NAMESPACE}.{name}") for o in _KERNELS)
    name += f"_{known}" if known else ""
    text = str(schema)
    _LIBRARY.define(name + text[text.index("(") :], tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, _Implementation(kernel, op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args, **kwargs: op(*args, **kwargs), lib=_LIBRARY)
    found: OpOverload = getattr(getattr(torch.ops, NAMESPACE), name).default
    return found


class _Implementation:
    """A kernel that gives exactly what its op gives: the same shapes, dtypes and strides, and nothing of its inputs'
    memory."""

    def __init__(self, kernel: Kernel, op: OpOverload) -> None:
        self._kernel, self._op = kernel, op
        self._types: dict[Any, Any] = {}
        self.__name__ = kernel.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        key = (*map(_key, args), *map(_key, kwargs.values()))
        if key not in self._types:
            if len(self._types) >= _MOST_TYPES:
                self._types.clear()
            self._types[key] = self._types_for(args, kwargs)
        try:
            given = self._kernel.implementation(*all_arguments(self._op, args), **kwargs)
        except (PortableError, torch.OutOfMemoryError):  # which a program may catch, to go on with less
            raise
        except Exception as failure:  # of another author's kernel
            raise self._kernel.error(f"raised {type(failure).__name__}: {failure}", failure=failure) from failure
        wanted = self._types[key]
        if wanted is None:
            return given
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if len(results) != len(wanted):
            raise self._kernel.error(f"gave {len(results)} results instead of {len(wanted)}")
        conformed = [self._conform(x, want, inputs) for x, want in zip(results, wanted, strict=True)]
        return tuple(conformed) if isinstance(given, (tuple, list)) else conformed[0]

    def _conform(self, x: Any, want: Any, inputs: Sequence[torch.Tensor]) -> Any:
        if want is None:
            return x
        shape, stride, dtype = want
        if not isinstance(x, torch.Tensor) or x.shape != shape or x.dtype != dtype:
            got = f"{x.dtype}{list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise self._kernel.error(f"gave {got} instead of {dtype}{list(shape)}")
        if x.stride() != stride:
            return x.new_empty_strided(shape, stride).copy_(x)
        aliased = any(torch._C._is_alias_of(x, y) for y in inputs)  # type: ignore[attr-defined]
        return x.clone() if aliased else x

    def _types_for(self, args: Any, kwargs: Any) -> list[Any] | None:
        """(shape, strides, dtype) of each result of the op; None where they depend on the data."""
        with unset_fake_temporarily(), FakeTensorMode() as mode:
            args, kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            try:
                out = self._op(*args, **kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                return None
        outs = out if isinstance(out, (tuple, list)) else (out,)
        return [(x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else None for x in outs]


def all_arguments(op: OpOverload, args: Sequence[Any]) -> list[Any]:
    """The positional arguments with those that the dispatcher leaves out because they equal their defaults."""
    rest = [p for p in op._schema.arguments[len(args) :] if not p.kwarg_only and p.has_default_value()]
    return [*args, *(p.default_value for p in rest)]


def _key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_key, value)) if isinstance(value, (list, tuple)) else value
