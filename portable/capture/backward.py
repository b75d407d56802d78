"""A compiled backward graph as autograd calls it: outputs without a gradient, batches of gradients, writes.

AOTAutograd's node takes a gradient for each output of the forward graph. Which of them autograd had to make up is seen
by a hook on that node (`Watch`), and the backward graph of the others is compiled in its place. The same hook refuses
second derivatives. ``is_grads_batched``
calls the node once under vmap, which no compiled program sees through: it runs once for each entry of the batch. A
custom function's backward may write to a tensor (an fp8 scale's history): AOTAutograd leaves that in the graph as a
``copy_``, which becomes a result that is copied there after the run.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch.autograd import forward_ad

from portable.capture import tangents
from portable.errors import UnsupportedGradientError

Compile = Callable[[fx.GraphModule, Sequence[Any], str], Callable[..., Any]]
_NODE = "CompiledFunctionBackward"  # what AOTAutograd calls its autograd node


class _Pending(threading.local):
    undefined: tuple[int, ...] = ()


_pending = _Pending()


class Watch:
    """The autograd nodes of one forward graph: which gradients are undefined when autograd comes to one, and whether it
    is to be differentiated again, which AOTAutograd cannot.

    Args:
        surviving: positions, among what the node takes, of the gradients that the backward graph takes.
    """

    def __init__(self, surviving: Sequence[int]) -> None:
        self._surviving = tuple(surviving)

    @classmethod
    def of_this_graph(cls) -> Watch:
        """For the graph that AOTAutograd is compiling."""
        context = torch._guards.TracingContext.try_get()
        return cls(_surviving(context.fw_metadata) if context and context.fw_metadata else ())

    def watched(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The forward graph, of which each call's node is watched."""

        def call(*args: Any) -> Any:
            if forward_ad._current_level >= 0:
                _refuse_duals(args)
            if not torch.is_grad_enabled():
                return compiled(*args)
            given = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
            before = {x.grad_fn for x in given}
            outputs = compiled(*args)
            self._attach(outputs if isinstance(outputs, (list, tuple)) else (outputs,), given, before)
            return outputs

        return call

    def _attach(self, outputs: Sequence[Any], given: list[torch.Tensor], before: set[Any]) -> None:
        for x in outputs:
            node = x.grad_fn if isinstance(x, torch.Tensor) else None
            while node is not None and node not in before:
                if type(node).__name__ == _NODE:
                    node.register_prehook(functools.partial(self._note, given))
                    return
                node = node.next_functions[0][0] if node.next_functions else None  # a view of what the node gave

    def _note(self, given: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """What autograd calls before it runs a node."""
        if torch.is_grad_enabled():  # create_graph=True
            _tie(torch._C._current_autograd_node(), given)
        if len(self._surviving) > 1:
            _pending.undefined = tuple(i for i, at in enumerate(self._surviving) if gradients[at] is None)


class _Tied(torch.autograd.Function):
    """Gradients as they are; they depend on what the compiled function was called with, in a way that is not known.

    AOTAutograd gives them without that dependence, so that a second derivative would come out as zero.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise UnsupportedGradientError(
            "a gradient of a gradient through a compiled function was asked for, and AOTAutograd compiles the first "
            "alone",
            remedy="take the inner gradient inside the compiled function (torch.func.grad, torch.func.hessian), or run "
            "this function uncompiled",
        )


def _refuse_duals(args: Sequence[Any]) -> None:
    """Raise for an argument with a tangent of forward mode, which AOTAutograd's node would drop.

    Raises:
        UnsupportedGradientError
    """
    for x in args:
        if isinstance(x, torch.Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise UnsupportedGradientError(
                f"a compiled function got a tensor {list(x.shape)} with a tangent of forward-mode differentiation, "
                "and AOTAutograd compiles no forward mode",
                remedy="take the derivative inside the compiled function (torch.func.jvp, torch.func.jacfwd), or run "
                "this function uncompiled",
            )


def _tie(node: Any, given: list[torch.Tensor]) -> None:
    """Have the gradients that this run of a node gives depend on ``given``."""

    def tied(found: Sequence[torch.Tensor | None], _: Any) -> tuple[torch.Tensor | None, ...]:
        handle.remove()
        return _tied(found, given)

    handle = node.register_hook(tied)


def _tied(found: Sequence[torch.Tensor | None], given: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    some = [x for x in found if x is not None]
    tied = iter(_Tied.apply(len(some), *some, *given))
    return tuple(None if x is None else next(tied) for x in found)


def _surviving(metadata: Any) -> list[int]:
    """The gradients that AOTAutograd hands on to the backward graph, in its order (its ``_codegen_backward_prologue``):
    those of inputs that were written to, of outputs that are no views of inputs, and of what outputs are views of."""
    from torch._functorch._aot_autograd.schemas import OutputType

    own = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    written = [metadata.input_info[i] for i in metadata.mutated_inp_runtime_indices]
    found = [i for i, info in enumerate(written) if info.mutates_data and info.requires_grad]
    for i, info in enumerate(metadata.output_info, len(written)):
        needed = getattr(info, "requires_grad_for_backward", info.requires_grad)
        if info.output_type in own and issubclass(info.raw_type, torch.Tensor) and needed:
            found.append(i)
    first = len(written) + len(metadata.output_info)
    return found + list(range(first, first + metadata.num_intermediate_bases))


class Backward:
    """A backward graph. Takes its arguments as one list, which it empties.

    Where it has several gradients to take, the program for those that are defined is compiled when it is called for.
    """

    def __init__(self, gm: fx.GraphModule, inputs: Sequence[Any], compile_aten: Compile) -> None:
        self._boxed_call = True  # on the instance: torch copies it to its wrappers from there
        self._gm, self._inputs, self._compile = gm, inputs, compile_aten
        self._tangents = tangents.positions(gm)
        self._written = _take_writes_out(gm)
        results: Any = gm.graph.output_node().args[0]
        self._results = len(results)
        self._programs: dict[tuple[int, ...], Callable[..., Any]] = {}
        self._lock = threading.Lock()
        if len(self._tangents) < 2:
            self._program(())

    def __call__(self, args: list[Any]) -> list[Any]:
        undefined, _pending.undefined = _pending.undefined, ()
        level = _level_of_batches()
        if level and any(_is_batched(args[i]) for i in self._tangents):
            return self._for_each(args, undefined, level)
        written = [args[i] for i in self._written]
        results = self._program(undefined)(args)
        if not written:
            return results
        given = self._results - len(written)
        with torch.no_grad():
            for x, value in zip(written, results[given:], strict=True):
                x.copy_(value)
        return results[:given]

    def _program(self, undefined: tuple[int, ...]) -> Callable[..., Any]:
        program = self._programs.get(undefined)
        if program is None:
            with self._lock:
                if undefined not in self._programs:
                    gm = tangents.without(self._gm, [self._tangents[i] for i in undefined]) if undefined else self._gm
                    self._programs[undefined] = self._compile(gm, self._inputs, "backward")
                program = self._programs[undefined]
        return program

    def _for_each(self, args: list[Any], undefined: tuple[int, ...], level: int) -> list[Any]:
        """The gradients of each entry of a batch, as a batch (``torch.autograd.grad(is_grads_batched=True)``)."""
        batch = {i: torch._remove_batch_dim(x, level, 0, 0) for i, x in enumerate(args) if _is_batched(x)}
        given = list(args)
        args.clear()
        rows: list[Any] = []
        for k in range(len(next(iter(batch.values())))):
            _pending.undefined = undefined
            rows.append(self([batch[i][k] if i in batch else x for i, x in enumerate(given)]))
        return [
            torch._add_batch_dim(torch.stack(column), 0, level) if isinstance(column[0], torch.Tensor) else column[0]
            for column in zip(*rows, strict=True)
        ]


def _level_of_batches() -> int:
    """How many of the vmaps that ``is_grads_batched`` uses are under way."""
    torch._C._vmapmode_increment_nesting()
    return torch._C._vmapmode_decrement_nesting()


def _is_batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def _take_writes_out(gm: fx.GraphModule) -> list[int]:
    """Make each write to an argument a result, after the others; the positions of those arguments."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    writes = [n for n in gm.graph.nodes if n.target is torch.ops.aten.copy_.default and n.args[0] in inputs]
    if not writes:
        return []
    output = gm.graph.output_node()
    results: Any = output.args[0]
    output.args = ([*results, *(n.args[1] for n in writes)],)
    where = [inputs.index(n.args[0]) for n in writes]
    for node in writes:
        node.replace_all_uses_with(node.args[1])
        gm.graph.erase_node(node)
    gm.recompile()
    return where
