"""Capture: a call of a torch function → one functional ATen graph."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._library.effects import EffectType
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from portable.capture.backward import Backward, Watch
from portable.errors import UnsupportedInputError, UnsupportedOp, UnsupportedOpError
from portable.lowering import refusals
from portable.lowering.draws import Draws, generator_state
from portable.lowering.functional import exact_writes
from portable.lowering.kept_whole import kept_whole

if TYPE_CHECKING:
    from portable.lowering.specialise import Specialisation


def trace_decomposition(function: Callable[..., Sequence[Any]], args: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Trace a decomposition, which is functional as a rule; it is functionalised where it is not."""
    with kept_whole(), torch._guards.tracing(None), enable_python_dispatcher(), torch.no_grad():
        gm = make_fx(function, tracing_mode="real", decomposition_table={})(*args)
    if any(isinstance(n.target, OpOverload) and n.target._schema.is_mutable for n in gm.graph.nodes):
        return trace(function, args)
    return gm


def trace(
    function: Callable[..., Sequence[Any]],
    args: Sequence[torch.Tensor],
    *,
    mutated: list[int] | None = None,
    data: Specialisation | None = None,
) -> fx.GraphModule:
    """Trace ``function(*args)`` at ATen level, functionalised: no op of the result writes to a tensor.

    ``function`` may call autograd inside; it returns a flat sequence. The graph returns the same, followed by the new
    values of the arguments that ``function`` wrote to, whose positions are appended to ``mutated``, and by the numbers
    of ``data.reads``.

    Args:
        args: fake tensors of one mode.
        data: what the trace may depend on; without it what depends on data raises.
    """

    draws = Draws()

    def functional(*inputs: torch.Tensor) -> list[Any]:
        mode = _Functional(draws, data)
        mode._tokens[EffectType.ORDERED] = torch.empty(
            0
        )  # orders what may raise; the interpreter keeps the graph's order
        off = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with off, mode:
            wrapped = [FunctionalTensor.to_functional(t) for t in inputs]
            for w, t in zip(wrapped, args, strict=True):
                if t.requires_grad and not w.requires_grad:
                    w.requires_grad_(True)
            outputs = [_unwrapped(o) for o in function(*wrapped)]
            for i, w in enumerate(wrapped):
                torch._sync(w)
                if _is_elsewhere(w):
                    refused = UnsupportedOp("this program", "it changes the shape, strides or memory of an argument")
                    raise UnsupportedOpError([refused], backend="xla")
                if mutated is not None and torch._functionalize_has_data_mutation(w.elem):  # type: ignore[attr-defined]
                    mutated.append(i)
                    outputs.append(_unwrapped(w))
            return [*outputs, *(data.tensors if data else ())]

    detached = [a.detach() for a in args]
    try:
        with kept_whole(), exact_writes(), torch._guards.tracing(None), enable_python_dispatcher():
            return make_fx(functional, tracing_mode="real", decomposition_table={})(*detached)
    finally:
        draws.close()


class _Functional(FunctionalTensorMode):
    """Functionalisation that notes on each random node which draw it is, and specialises on data where it may."""

    supports_higher_order_operators = True

    def __init__(self, draws: Draws, data: Specialisation | None = None) -> None:
        super().__init__()
        self._draws = draws
        self._data = data

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):  # the errors that ops in its subgraphs may raise would be lost
            refused = UnsupportedOp(f"higher_order.{func.name()}", "only pt.compile captures control flow")
            raise UnsupportedOpError([refused], backend="xla")
        if any(a.is_out for a in func._schema.arguments):  # a functional op has none, and its result any dtype
            refusals.check_traced(func, args, kwargs or {})
        if func is RANDOM_FROM:  # torch.fx cannot print the name of its functional form: `from` is a keyword
            with self:
                return _random_from(*args, **(kwargs or {}))
        rewrite = self._data.rewrite(func, args, kwargs or {}) if self._data else None
        if self._data and rewrite:
            with self:
                return self._data.apply(rewrite, func, args, kwargs or {})
        proxies = get_proxy_mode() if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) else None
        if proxies is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        last = next(iter(reversed(proxies.tracer.graph.nodes)), None)
        before = generator_state()  # an op on fake tensors draws nothing, one on real tensors does
        result = super().__torch_dispatch__(func, types, args, kwargs)
        added = itertools.takewhile(lambda node: node is not last, reversed(proxies.tracer.graph.nodes))
        for node in reversed(list(added)):
            random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
            if random and "draw" not in node.meta and node.kwargs.get("generator") is None:
                node.meta["draw"] = self._draws.next(before)
                before = generator_state()
        return result


RANDOM_FROM = getattr(torch.ops.aten.random_, "from")


def _random_from(x: torch.Tensor, low: int, high: int | None, *, generator: Any = None) -> torch.Tensor:
    if high is None:
        raise UnsupportedOpError([UnsupportedOp("aten.random_.from", "a range without an end")], backend="xla")
    like = torch.ops.aten.randint_like
    if generator is None:
        return x.copy_(like.low_dtype(x, low, high))
    return x.copy_(like.low_generator_dtype(x, low, high, generator=generator))


def _is_elsewhere(x: FunctionalTensor) -> bool:
    """Whether it was made another view, or got other memory."""
    moved: bool = torch._functionalize_has_metadata_mutation(x.elem) or torch._functionalize_was_storage_changed(x.elem)
    return moved


def _unwrapped(value: Any) -> Any:
    if not isinstance(value, FunctionalTensor):
        return value
    torch._sync(value)
    return torch._from_functional_tensor(value.elem).detach()


def aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_aten: Callable[[fx.GraphModule, Sequence[Any], str], Callable[..., Any]],
) -> Callable[..., Any]:
    """Trace a graph of Dynamo's through AOTAutograd and compile its functional ATen graphs.

    Args:
        compile_aten: called with (graph, fake inputs, kind), kind one of "inference", "forward", "backward"; gives a
            function that takes its arguments as one list.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    watch: Watch | None = None

    def compiler(kind: str) -> Callable[..., Any]:
        def compiled(aten: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            nonlocal watch
            if kind == "backward":
                return Backward(aten, inputs, compile_aten)
            watch = Watch.of_this_graph()
            return compile_aten(aten, inputs, kind)

        return compiled

    compile_graph = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=min_cut_rematerialization_partition,
    )
    with (
        kept_whole(),
        exact_writes(),
        torch._functorch.config.patch(unlift_effect_tokens=True),
    ):  # else tokens are arguments at run time
        compiled: Callable[..., Any] = compile_graph(gm, example_inputs)
    return (watch or Watch(())).watched(compiled)


@contextlib.contextmanager
def without_values(model: Any, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Within it tensors have no values. Gives a twin of ``model`` and (args, kwargs), whose tensors are fake ones on
    the CPU of the same shape, strides and dtype; what the twin does to itself, the model does not see."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    made: dict[int, torch.Tensor] = {}

    def fake(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in made:
            with mode:
                empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            parameter = isinstance(x, torch.nn.Parameter)
            made[id(x)] = torch.nn.Parameter(empty, x.requires_grad) if parameter else empty
            if not parameter and x.requires_grad:
                empty.requires_grad_()
        return made[id(x)]

    inputs = pytree.tree_map_only(torch.Tensor, fake, (args, kwargs))
    other = twin(model, fake)
    with mode:
        yield other, *inputs


def twin(model: Any, replaced: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a module with other parameters and buffers; a function is itself.

    Raises:
        UnsupportedInputError: the module cannot be copied.
    """
    if not isinstance(model, torch.nn.Module):
        return model
    memo: dict[int, Any] = {id(x): replaced(x) for x in (*model.parameters(), *model.buffers())}
    try:
        return copy.deepcopy(model, memo)
    except Exception as failure:  # whatever a user's object raises that is no copy
        raise UnsupportedInputError(
            f"{type(model).__name__} cannot be copied: {failure}",
            remedy="keep what cannot be copied (locks, files, generators, tensors with a history) outside the module",
        ) from failure


def static_positions() -> frozenset[int]:
    """Positions of the parameters and buffers among the arguments of the graph that AOTAutograd is compiling."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return frozenset(metadata.static_input_indices or ()) if metadata else frozenset()


def returned_to_user(kind: str) -> int | None:
    """How many outputs of the graph that AOTAutograd is compiling it hands on as they are; None means all.

    They come first; the others are kept for the backward pass, or are gradients.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    if kind == "backward":
        return 0
    return metadata.num_forward_returns if kind == "forward" and metadata else None


def mutated_positions() -> tuple[int, ...]:
    """Positions of the arguments that the graph that AOTAutograd is compiling gives new values, which are copied there
    after the call."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context else None
    return tuple(metadata.mutated_inp_runtime_indices) if metadata else ()
