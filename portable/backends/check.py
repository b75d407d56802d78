"""`pt.check`: a model compiled for devices that are not here, and what their compilers say of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from portable import capture
from portable.backends.deviceless import Compiled, compile_for
from portable.backends.notes import Note, merged, notes, read_by_row
from portable.backends.observing import Observing
from portable.backends.sharding import REPLICATED, Mesh
from portable.backends.targets import Target
from portable.errors import BackendUnavailableError, ConfigError, UnsupportedOp, UnsupportedOpError
from portable.explain import GraphBreak, GraphRecord, as_text
from portable.lowering.context import Spec
from portable.lowering.module import lower_graph

Told = Callable[[str], None]


@dataclass(frozen=True)
class Program:
    """One functional graph of the model.

    Attributes:
        kind: "inference", "forward" or "backward".
        shapes, names: of its tensor arguments; the module takes the random seed before them.
        weights: positions among them of parameters and buffers.
        weight_bytes, by_row_bytes: of the weights, and of those arguments of which only some rows are read. A backward
            pass takes weights that its forward pass has saved for it.
        modules, refused: {platform: StableHLO bytecode}, or {platform: ops that have no lowering there}.
        notes: {target: notes}.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    weights: frozenset[int]
    weight_bytes: int
    by_row_bytes: int
    modules: Mapping[str, bytes]
    refused: Mapping[str, tuple[UnsupportedOp, ...]]
    notes: Mapping[str, list[Note]]


class Lowering(Observing):
    """Lowers each graph for each target."""

    name = "check"

    def __init__(self, targets: Sequence[Target], model: Any, inputs: Any) -> None:
        super().__init__()
        self.targets = targets
        self.programs: list[Program] = []
        tensors = [x for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]
        for x in tensors:
            if x.is_nested or x.layout is not torch.strided:
                self.check_input(x, "an argument")
        own = {id(x): x for x in (*model.parameters(), *model.buffers())} if isinstance(model, torch.nn.Module) else {}
        self.weight_bytes = sum(x.numel() * x.itemsize for x in own.values())
        self.trained_bytes = sum(x.numel() * x.itemsize for x in own.values() if x.requires_grad)
        self.batch = next((x.shape[0] for x in tensors if x.ndim), None)
        self._saved: dict[int, set[str]] = {}  # by graph: names of the weights in its forward pass

    def observe(self, aten: fx.GraphModule, specs: Sequence[Any], kind: str, graph: GraphRecord) -> None:
        tensors = [i for i, s in enumerate(specs) if isinstance(s, Spec)]
        position = {i: at for at, i in enumerate(tensors)}
        sizes = {i: _bytes(specs[i]) for i in tensors}
        placeholders = [n.name for n in aten.graph.nodes if n.op == "placeholder"]
        if kind == "backward":  # AOTAutograd gives what it saves of the forward pass's arguments their names there
            weights = [i for i in tensors if placeholders[i] in self._saved.get(graph.index, ())]
        else:
            weights = [i for i in tensors if i in capture.static_positions()]
            self._saved[graph.index] = {placeholders[i] for i in weights}
        names = graph.arguments if len(graph.arguments) == len(specs) else [f"argument {i}" for i in range(len(specs))]
        modules, refused = {}, {}
        for platform in {t.platform for t in self.targets}:
            try:
                modules[platform] = _lowered(aten, specs, platform, kind)
            except UnsupportedOpError as failure:
                refused[platform] = failure.ops
        program = Program(
            kind=kind,
            shapes=tuple(specs[i].shape for i in tensors),
            names=tuple(names[i] for i in tensors),
            weights=frozenset(position[i] for i in weights),
            weight_bytes=sum(sizes[i] for i in weights),
            by_row_bytes=sum(sizes.get(i, 0) for i in read_by_row(aten)),
            modules=modules,
            refused=refused,
            notes={t.name: notes(aten, t) for t in self.targets},
        )
        self.programs.append(program)


def _lowered(aten: fx.GraphModule, specs: Sequence[Any], platform: str, kind: str) -> bytes:
    return lower_graph(aten, specs, platform=platform, backend=platform, inference=kind == "inference").module


def _bytes(spec: Spec) -> int:
    n = spec.dtype.itemsize
    for size in spec.shape:
        n *= size
    return n


@dataclass(frozen=True)
class Verdict:
    """What one target's compiler said. Printable as a row of `Check`.

    Attributes:
        target: its name.
        problem: why the model does not compile there; '' if it does.
        refused: ops without a lowering, each with the user's line.
        programs: what the compiler said of each program, in the order in which they run.
        needed_bytes, memory_bytes: of one device: what the model needs there (the largest program, with the weights
            that it does not take itself), and what there is. Nothing is needed where it does not compile for another
            reason than memory.
        batch: `predicted`: the largest batch that fits, where the inputs have one; 0 if none does.
        seconds: `predicted`: from the peak rates of matrix products and memory, if each argument and result is moved
            once; a step takes longer as a rule.
        notes: what the device lacks that the model asks for.
    """

    target: str
    problem: str
    refused: tuple[UnsupportedOp, ...]
    programs: tuple[Compiled, ...]
    needed_bytes: int
    memory_bytes: int
    batch: int | None
    seconds: float
    notes: tuple[Note, ...]

    @property
    def compiles(self) -> bool:
        """Whether every program compiled, or failed for lack of memory alone."""
        return not self.refused and (not self.problem or bool(self.needed_bytes))

    @property
    def fits(self) -> bool:
        """Whether it compiles and has room on one device."""
        return self.compiles and not self.problem and self.needed_bytes <= self.memory_bytes

    @property
    def collectives(self) -> dict[str, tuple[int, int]]:
        """{kind: (how many, bytes that they give)} over all programs."""
        total: dict[str, tuple[int, int]] = {}
        for program in self.programs:
            for kind, (n, size) in program.collectives.items():
                before = total.get(kind, (0, 0))
                total[kind] = before[0] + n, before[1] + size
        return total


def judge(target: Target, model: Lowering, mesh: Mesh, told: Told, outside: Sequence[str]) -> Verdict:
    """Compile every program of a model for ``target`` and sum up.

    Args:
        outside: why parts of the model are in no program.

    Raises:
        ConfigError: the mesh or its plan does not fit the model, or the compiler knows no such slice.
    """
    programs = model.programs
    found = merged([note for p in programs for note in p.notes[target.name]])
    refused = tuple(dict.fromkeys(op for p in programs for op in p.refused.get(target.platform, ())))
    if target.note:
        found.insert(0, Note(target.note, (), 0))
    verdict = Verdict(target.name, "", refused, (), 0, target.memory_bytes, None, 0.0, tuple(found))
    if refused:
        return replace(verdict, problem=f"{len(refused)} operators have no lowering there")
    if not programs:
        why = "; ".join(outside) or "it computes nothing"
        return replace(verdict, problem=f"no part of the model was compiled: {why}")
    mesh.check([(p.names[i], p.shapes[i]) for p in programs for i in sorted(p.weights)])
    compiled: list[Compiled] = []
    for program in programs:
        told(f"compiling for {target}: program {len(compiled) + 1} of {len(programs)}, {program.kind}")
        divided = mesh.shardings(program.shapes, program.names, program.weights, model.batch) if mesh.size > 1 else ()
        shardings = (REPLICATED, *divided) if divided else ()
        try:
            compiled.append(compile_for(target, program.modules[target.platform], shardings, mesh.size))
        except BackendUnavailableError as failure:  # its compiler died, for this model
            return replace(verdict, problem=failure.message, programs=tuple(compiled))
    needed = max(_held(p, c, model, mesh) for p, c in zip(programs, compiled, strict=True))
    if any(c.problem and not c.needed_bytes for c in compiled):
        needed = 0
    return replace(
        verdict,
        problem=next((c.problem for c in compiled if c.problem), ""),
        programs=tuple(compiled),
        needed_bytes=needed,
        batch=_batch(model, needed, target) if mesh.size == 1 else None,
        seconds=sum(_seconds(p, c, target, mesh) for p, c in zip(programs, compiled, strict=True)),
    )


def _held(program: Program, compiled: Compiled, model: Lowering, mesh: Mesh) -> int:
    """What a device holds while the program runs: also the weights that it does not take (of a mesh they may be
    anywhere)."""
    return compiled.bytes + (max(model.weight_bytes - program.weight_bytes, 0) if mesh.size == 1 else 0)


def _batch(model: Lowering, needed: int, target: Target) -> int | None:
    """The largest batch that fits, if all grows with it but weights and their gradients."""
    if not model.batch or not needed:
        return None
    trains = any(p.kind == "backward" for p in model.programs)
    fixed = model.weight_bytes + (model.trained_bytes if trains else 0)
    room, growing = target.memory_bytes - fixed, max(needed - fixed, 1)
    return max(int(model.batch * room / growing), 0)


def _seconds(program: Program, compiled: Compiled, target: Target, mesh: Mesh) -> float:
    """The roofline: the matrix products at their dtypes' peak rates, or every argument and result moved once."""
    fastest = max(target.flops.values())
    products = sum(n / target.flops.get(dtype, fastest) for dtype, n in compiled.flops.items()) / mesh.size
    moved = compiled.argument_bytes + compiled.output_bytes - program.by_row_bytes // mesh.size
    return max(products, max(moved, 0) / target.bandwidth)


class Check:
    """What `pt.check` gives: printable, and machine-readable through ``to_dict``.

    Attributes:
        verdicts: {target: Verdict}.
        graph_breaks: why the model is more than one graph; the code between runs in eager, on the host.
        mesh: {axis: devices} of a sharded check.
    """

    def __init__(
        self, name: str, verdicts: Mapping[str, Verdict], graph_breaks: Sequence[GraphBreak], mesh: Mesh
    ) -> None:
        self.name, self.verdicts, self.graph_breaks = name, dict(verdicts), tuple(graph_breaks)
        self.mesh = mesh.shape

    @property
    def ok(self) -> bool:
        """Whether it compiles for every target, and fits."""
        return all(v.fits for v in self.verdicts.values())

    def __getitem__(self, target: str) -> Verdict:
        return self.verdicts[target]

    def to_dict(self) -> dict[str, Any]:
        rows = {
            name: {**asdict(v), "compiles": v.compiles, "fits": v.fits, "collectives": v.collectives}
            for name, v in self.verdicts.items()
        }
        breaks = [asdict(b) for b in self.graph_breaks]
        return {"model": self.name, "ok": self.ok, "mesh": self.mesh, "targets": rows, "graph_breaks": breaks}

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from portable.backends.check_table import lines

        yield from lines(self)

    def __str__(self) -> str:
        return as_text(self)

    __repr__ = __str__


def mesh_for(targets: Sequence[Target], shape: Mapping[str, int] | None, plan: Mapping[str, int] | None) -> Mesh:
    """The mesh of a sharded check.

    Raises:
        ConfigError: it is not legal, or it is not the whole of a target's slice.
    """
    mesh = Mesh(shape, plan)
    for target in targets if mesh.size > 1 else ():
        if target.size and target.size != mesh.size:
            raise ConfigError(
                f"{target} is {target.size} devices, the mesh is {mesh.size}",
                remedy="name a mesh of as many devices as the slice has, or another slice",
            )
    return mesh
