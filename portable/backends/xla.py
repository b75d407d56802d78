"""`xla`: our ATen → StableHLO lowering on whatever PJRT platform JAX has; the CPU client is the embedded default.

A captured graph becomes one executable for each concrete signature. Where Dynamo captured symbolic sizes, the ATen
graph is kept and lowered again for each new set of sizes, without a new capture.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils import _pytree as pytree

from portable import capture
from portable.backends import pjrt
from portable.backends.base import Backend, Capabilities, MemoryStats, State, ask, installed
from portable.backends.cpu import Cpu, host, process_memory
from portable.backends.gpu import driver
from portable.errors import UnsupportedInputError
from portable.explain import FELL_BACK, Compilation, Fallback, GraphRecord, Record, plain_name, ran
from portable.kernels.fingerprint import version
from portable.lowering.context import Spec


class Xla(Backend):
    name = "xla"
    path = "stablehlo"
    variants: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "rocm", "tpu", "xpu")
    no_graphs = "XLA runs a whole graph as one program: there are no launches to record"
    platform = ""

    def __init__(self, variant: str = "") -> None:
        super().__init__(variant)
        self.platform = variant or type(self).platform

    @classmethod
    def other_variants(cls) -> tuple[str, ...]:
        return platforms()

    @classmethod
    def probe(cls) -> State:
        if not installed("jax"):
            return State(False, "jax is not installed", "pip install 'jax>=0.10'")
        return State(True, "ready, PJRT", evidence="verified here")

    @classmethod
    def diagnose(cls) -> State:
        state = cls.probe()
        if not state.ready:
            return state
        ok, text = ask("import jax; d = jax.devices()[0]; print(f'PJRT platform {d.platform}, {d.device_kind}')")
        return (
            replace(state, reason=f"ready, {text}")
            if ok
            else State(False, f"JAX finds no device: {text}", "unset JAX_PLATFORMS")
        )

    def require(self) -> Backend:
        super().require()
        if self.platform == "xpu" and "xpu" not in platforms():
            self.platform = "oneapi"  # what JAX's own plugin for Intel GPUs calls it
        if self.platform:
            pjrt.client(self.platform)
        return self

    def device(self) -> torch.device:
        return torch.device("cpu")

    def label(self) -> str:
        return f"xla:{pjrt.client(self.platform).platform}"

    def capabilities(self) -> Capabilities:
        client = pjrt.client(self.platform)
        if client.on_host:
            return replace(Cpu().capabilities(), collectives="XLA")
        if client.platform == "tpu":
            from portable.backends import tpu

            return tpu.capabilities(str(client.device.device_kind))
        return replace(super().capabilities(), collectives="XLA")

    def hardware(self) -> dict[str, str]:
        client = pjrt.client(self.platform)
        options = hashlib.sha256(repr(sorted(client.flags.items())).encode()).hexdigest()[:8]
        runtime = f"PJRT {client.platform} {getattr(client.raw, 'platform_version', '')} options {options}"
        if client.on_host:
            return {**host(), "runtime": runtime}
        capability = getattr(client.device, "compute_capability", "")
        return {
            "device": str(client.device.device_kind),
            "architecture": str(capability) or client.platform,
            "driver": driver(),
            "runtime": f"{runtime} libtpu {version('libtpu')}" if client.platform == "tpu" else runtime,
        }

    def synchronize(self) -> None:
        """Nothing: a program has run and its results are here when its call returns."""

    def memory_stats(self) -> MemoryStats:
        """As the PJRT device counts; of the host, this process's memory."""
        client = pjrt.client(self.platform)
        if client.on_host:
            return process_memory()
        stats = client.device.memory_stats() or {}
        return MemoryStats(*(stats.get(key) for key in ("bytes_in_use", "peak_bytes_in_use", "bytes_limit")))

    def other_paths(self) -> tuple[str, ...]:
        return ("cpu",) if pjrt.client(self.platform).platform == "cpu" else ()

    def compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], graph: GraphRecord, record: Record
    ) -> Callable[..., Any]:
        for name, x in zip(graph.arguments, example_inputs, strict=False):
            if isinstance(x, torch.Tensor):
                self.check_input(x, name)

        def compile_aten(aten: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
            return CompiledGraph(self, aten, inputs, kind, graph, record)

        return capture.aot(gm, example_inputs, compile_aten)


@functools.cache
def platforms() -> tuple[str, ...]:
    """The platforms that JAX has here, built in and of PJRT plugins (entry points ``jax_plugins``, modules of that
    namespace package, PJRT_NAMES_AND_LIBRARY_PATHS); found in a fresh process, no device is initialised."""
    ok, text = ask(_PLATFORMS) if installed("jax") else (False, "")
    return tuple(text.split()) if ok else ()


_PLATFORMS = """
import logging
logging.disable()
from jax._src import xla_bridge as bridge
bridge.discover_pjrt_plugins()
bridge.register_pjrt_plugin_factories_from_env()
print(*sorted(set(bridge._backend_factories) - {"mock"}))
"""


class _Program:
    """One executable with what is needed to call it: the host arguments' positions and the outputs' plan."""

    __slots__ = ("client", "executable", "lowered", "plain", "random")

    def __init__(self, client: pjrt.Client, lowered: Any) -> None:
        self.client = client
        self.lowered = lowered
        self.executable = client.compile(lowered.module)
        self.plain = not lowered.checks and all(
            output.kind == "array" and not output.place for output in lowered.outputs
        )
        self.random = lowered.random


class CompiledGraph:
    """A functional ATen graph as programs, one a concrete signature. Takes its arguments as one list, which it
    empties."""

    def __init__(
        self, backend: Xla, gm: fx.GraphModule, inputs: Sequence[Any], kind: str, graph: GraphRecord, record: Record
    ) -> None:
        self._backend, self._gm, self._kind, self._graph, self._record = backend, gm, kind, graph, record
        self._boxed_call = True  # on the instance: torch copies it to its wrappers from there
        self._placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
        self._inputs = [n.meta.get("val") for n in self._placeholders]
        self._symbolic = _symbolic_positions(self._inputs)
        self._names = _symbol_names(self._inputs, self._symbolic)
        output = next(iter(reversed(gm.graph.nodes))).args[0]
        returned = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in pytree.tree_leaves(output)]
        self._returned = returned[: capture.returned_to_user(kind)]
        self._resident = capture.static_positions() if kind != "backward" else frozenset()
        self._mutated = capture.mutated_positions() if kind != "backward" else ()
        self._written = [i for i in self._mutated if i not in self._resident]
        self._programs: dict[Any, _Program] = {}
        self._fallbacks: set[Fallback] = set()
        self._last: tuple[int, ...] | None = None
        self._lock = threading.Lock()
        self._capture_s = graph.since_call()
        if not self._symbolic:
            with unset_fake_temporarily():
                self._build((), [_static_spec(x) for x in self._inputs])

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._written:
            self._refuse_overlaps(args)
        client = pjrt.client(self._backend.platform)
        key = tuple(_size(args[i], dim) for i, dim in self._symbolic)
        program = self._programs.get(key)
        if program is None or program.client is not client:
            program = self._build(key, [_spec(a) for a in args])
        put, resident = client.put, client.residents.get
        buffers = [client.seed(program.random)]
        for i, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                keep = i in self._resident or type(a) is torch.nn.Parameter
                buffers.append(resident(a) if keep else put(a))
        try:
            results = client.take(program.executable(buffers))
        except RuntimeError as failure:
            _refuse_unknown_base(self._inputs, args, failure)
            raise
        ran()
        if not program.plain:
            results = program.lowered.assemble(results, args)
        args.clear()
        return results

    def _refuse_overlaps(self, args: list[Any]) -> None:
        """The graph was traced for arguments that do not overlap: else they would be one argument, their storage."""
        from portable.lowering.placement import overlapping

        where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and i not in self._resident]
        if overlapping([args[i] for i in where], [where.index(i) for i in self._written]):
            raise UnsupportedInputError(
                "arguments overlap in memory, one of them is written to, and the program was compiled for arguments "
                "that do not",
                remedy="pass a clone of one of them, or compile the function anew",
            )

    def _build(self, key: tuple[int, ...], specs: list[Any]) -> _Program:
        client = pjrt.client(self._backend.platform)
        with self._lock:
            program = self._programs.get(key)
            if program is not None and program.client is client:
                return program
            cause = self._cause(key)
            self._record.forbid_when_frozen(cause)
            began = time.perf_counter()
            lowered = program.lowered if program else self._lower(client, specs, key)
            lowered_at = time.perf_counter()
            program = _Program(client, lowered)
            compiled_at = time.perf_counter()
            capture_s, self._capture_s = self._capture_s, 0.0
            self._count(lowered)
            self._programs[key] = program
            self._last = key
            self._record.add(
                Compilation(
                    self._graph.index, self._kind, cause, capture_s, lowered_at - began, compiled_at - lowered_at
                )
            )
            return program

    def _count(self, lowered: Any) -> None:
        """Ops are counted in the graph's first program; those that fall back for other sizes alone, where they do."""
        new = {fallback: n for fallback, n in lowered.fallbacks.items() if fallback not in self._fallbacks}
        self._fallbacks.update(new)
        if not self._programs:
            self._graph.ops.update(lowered.ops)
        for fallback, n in new.items():
            self._record.add_fallback(fallback, n)
            if self._programs:
                self._graph.ops[fallback.op, FELL_BACK] += n

    def _lower(self, client: pjrt.Client, specs: list[Any], key: tuple[int, ...]) -> Any:
        from portable.kernels.choice import Choice
        from portable.lowering import fallback
        from portable.lowering.module import lower_graph
        from portable.lowering.placement import places

        record = self._record
        choice = Choice.here(self._backend.label(), self._backend.path, record.kernels)
        lowered = lower_graph(
            self._gm,
            specs,
            platform=client.platform,
            backend=str(self._backend),
            choice=choice,
            inference=self._kind == "inference",
            fallback=record.fallback,
            mutated=self._mutated,
            places=places(self._returned, self._inputs, functools.partial(_concrete, self._symbols(key))),
        )
        choice.note(self._graph)
        if record.fallback == "warn":
            fallback.warn(lowered.fallbacks, record.told)
        return lowered

    def _symbols(self, key: tuple[int, ...]) -> dict[Any, int]:
        """The values of the symbols that are sizes of arguments."""
        sizes = [self._inputs[i] if dim < 0 else self._inputs[i].shape[dim] for i, dim in self._symbolic]
        return {size.node.expr: sympy.sympify(value) for size, value in zip(sizes, key, strict=True)}

    def _cause(self, key: tuple[int, ...]) -> str:
        if key in self._programs:
            return "a forked process has a client of its own"
        if self._last is None:
            return self._graph.cause
        changed = [
            f"{name}: {old} → {new}" for name, old, new in zip(self._names, self._last, key, strict=True) if old != new
        ]
        return ", ".join(dict.fromkeys(changed))


def _refuse_unknown_base(expected: Sequence[Any], args: Sequence[Any], failure: Exception) -> None:
    """torch passes arguments that overlap, if one is written to, as their storage: here not of the size it traced."""
    for e, a in zip(expected, args, strict=True):
        if isinstance(a, torch.Tensor) and all(type(n) is int for n in e.shape) and e.shape != a.shape:
            raise UnsupportedInputError(
                "arguments that overlap in memory, one of which is written to, are views of a tensor that is not known",
                remedy="pass a clone of one of them",
            ) from failure


def _spec(x: Any) -> Any:
    return Spec(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _static_spec(x: Any) -> Any:
    return Spec(tuple(int(n) for n in x.shape), x.dtype) if isinstance(x, torch.Tensor) else x


def _symbolic_positions(inputs: Sequence[Any]) -> list[tuple[int, int]]:
    """(argument, dimension) of each symbolic size; dimension -1 is the argument itself."""
    found = []
    for i, x in enumerate(inputs):
        if isinstance(x, torch.Tensor):
            found += [(i, d) for d, n in enumerate(x.shape) if not isinstance(n, int)]
        elif isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.append((i, -1))
    return found


def _symbol_names(inputs: Sequence[Any], positions: Sequence[tuple[int, int]]) -> list[str]:
    names = []
    for i, dim in positions:
        value = inputs[i] if dim < 0 else inputs[i].shape[dim]
        sources = value.node.shape_env.var_to_sources.get(value.node.expr, ())
        names.append(plain_name(sources[0].name) if sources else str(value))
    return names


def _concrete(symbols: dict[Any, int], size: int | torch.SymInt) -> int | None:
    if isinstance(size, int):
        return size
    value = size.node.expr.xreplace(symbols)
    return int(value) if value.is_Integer else None


def _size(value: Any, dim: int) -> int:
    return value if dim < 0 else value.shape[dim]


BACKEND = Xla
