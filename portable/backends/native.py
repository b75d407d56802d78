"""The native path, shared by the backends whose device PyTorch itself drives: Inductor, or eager where asked."""

from __future__ import annotations

import functools
import operator
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from portable.backends import graphs
from portable.backends.base import Backend, installed
from portable.errors import BackendUnavailableError
from portable.explain import Compilation, GraphRecord, Record, ran
from portable.kernels.select import Decision

# Inductor's folding of uniform values takes x * 0 for 0, also where x is NaN or infinite (seen in torch 2.13).
EXACT = {"joint_graph_constant_folding": False}


class NativeBackend(Backend):
    """Compiles with Inductor for ``device_type``; the variant ``eager`` runs the captured graph as it is."""

    path = "native"
    variants = ("eager",)
    device_type: str

    def device(self) -> torch.device:
        return torch.device(self.device_type)

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        for name, x in zip(graph.arguments, example_inputs, strict=False):
            if isinstance(x, torch.Tensor):
                self.check_input(x, name)
        if self.variant == "eager":
            compiled: Callable[..., Any] = self._eager(gm, graph, record)
        else:
            self._require_compiler()
            compiled = self._inductor(gm, example_inputs, graph, record)

        def run(*args: Any) -> Any:
            ran()
            return compiled(*args)

        return run

    def other_paths(self) -> tuple[str, ...]:
        if self.device_type != "cpu" or not installed("jax"):
            return ()
        return ("cpu", "xla:cpu") if self.variant else ("xla:cpu",)

    def _eager(self, gm: fx.GraphModule, graph: GraphRecord, record: Record) -> Callable[..., Any]:
        if not installed("jax"):  # the registry of kernels needs it
            counted = calls(gm, "eager")
        else:
            from portable.kernels import substitution
            from portable.kernels.choice import Choice, whole_ops

            choice = Choice.here(self.label(), self.path, record.kernels)
            substitution.substitute_eager(gm, choice)
            choice.note(graph)
            counted = substitution.counted(gm, "eager") - python_calls(gm, "eager")
            for op in whole_ops(self.label(), self.path, record.kernels):
                if "." in op and not any(decided == op for decided, _ in choice.decisions):
                    graph.decisions[op, ""] = (Decision("portable", _NOT_IN_EAGER), 0)
        graph.ops.update(counted)
        record.add(Compilation(graph.index, "eager", graph.cause, graph.since_call(), 0.0, 0.0))
        compiled: Callable[..., Any] = gm.forward
        return compiled

    def _require_compiler(self) -> None:
        from torch._inductor import config

        candidates = config.cpp.cxx if isinstance(config.cpp.cxx, (tuple, list)) else (config.cpp.cxx,)
        if self.device_type == "cpu" and not any(c and shutil.which(c) for c in candidates):
            raise BackendUnavailableError(
                "Inductor needs a C++ compiler for the CPU, and none is on PATH",
                remedy="install g++ or clang, or name backend='cpu:eager'",
            )

    def _inductor(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        from torch._functorch import config as functorch_config
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner

        capture_s = graph.since_call()
        substitute, decompositions = self._kernels(gm, graph, record)
        recorded = self.records_graphs(record.graphs_policy)

        @functools.wraps(compile_fx_inner)
        def inner(aten: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            kind = "backward" if kwargs.get("is_backward") else "inference" if kwargs.get("is_inference") else "forward"
            record.forbid_when_frozen(graph.cause)
            counted = substitute(aten)
            plan = graphs.Plan.of(aten, kind) if recorded else None
            began = time.perf_counter()
            output = compile_fx_inner(aten, *args, **kwargs)
            if plan is not None:
                watch = graphs.Watch(graph, record, kind, record.graphs_policy == "require")
                watch.compiled(output, plan, bool(kwargs["cudagraphs"]))
            graph.ops.update(counted)
            record.add(Compilation(graph.index, kind, graph.cause, capture_s, 0.0, time.perf_counter() - began))
            return output

        # A hit in AOTAutograd's own cache would skip `inner`, and with it the record; Inductor's code cache still
        # serves.
        with functorch_config.patch(enable_autograd_cache=False):
            compiled: Any = compile_fx(
                gm,
                list(example_inputs),
                inner_compile=inner,
                config_patches={**EXACT, **graphs.settings(record.graphs_policy, recorded)},
                decompositions=decompositions,
            )
        return compiled

    def _kernels(
        self, gm: fx.GraphModule, graph: GraphRecord, record: Record
    ) -> tuple[Callable[[fx.GraphModule], Counter[tuple[str, str]]], dict[Any, Callable[..., Any]] | None]:
        """What puts kernels into an ATen graph and counts its calls; Inductor's decompositions without the ops that are
        kept whole for their kernels, None where nothing is."""
        if not installed("jax"):  # the registry of kernels needs it
            return functools.partial(calls, how="inductor"), None

        from torch._inductor.decomposition import select_decomp_table

        from portable.kernels import substitution
        from portable.kernels.choice import Choice, whole_ops
        from portable.ops._op import kept_whole

        whole = whole_ops(self.label(), self.path, record.kernels) | kept_whole()
        every = select_decomp_table()
        kept = {op for op in every if whole and str(op) in whole}

        if whole:
            differentiable = Choice.here(self.label(), self.path, record.kernels)
            substitution.substitute_differentiable(gm, differentiable)
            differentiable.note(graph)

        def substitute(aten: fx.GraphModule) -> Counter[tuple[str, str]]:
            choice = Choice.here(self.label(), self.path, record.kernels)
            substitution.substitute(aten, choice, whole, every)
            choice.note(graph)
            return substitution.counted(aten, "inductor") - python_calls(aten, "inductor")

        return substitute, {op: f for op, f in every.items() if op not in kept} if kept else None


_NOT_IN_EAGER = (
    "not looked for: cpu:eager runs the captured graph, whose calls are torch's functions and not overloads; "
    "name the backend without :eager"
)


def calls(gm: fx.GraphModule, how: str) -> Counter[tuple[str, str]]:
    """The graph's calls of ops by (op, ``how``)."""
    every = Counter((str(n.target), how) for n in gm.graph.nodes if n.op.startswith("call_"))
    return every - python_calls(gm, how)


def python_calls(gm: fx.GraphModule, how: str) -> Counter[tuple[str, str]]:
    """The graph's calls of Python's operators on no tensor, by (operator, ``how``): one of several results is taken,
    sizes are computed."""
    return Counter(
        (str(n.target), how)
        for n in gm.graph.nodes
        if getattr(n.target, "__module__", "") == operator.getitem.__module__
        and not any(isinstance(_value(a), torch.Tensor) for a in n.all_input_nodes)
    )


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))  # of Dynamo, of AOTAutograd
