"""One functional ATen graph → one StableHLO module, or what would keep it from being one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from portable.errors import LoweringError, UnsupportedOp, UnsupportedOpError
from portable.explain import FELL_BACK, Fallback
from portable.lowering import registry
from portable.lowering.context import Spec
from portable.lowering.fallback import HOSTS
from portable.lowering.placement import Place
from portable.lowering.platforms import callbacks, missing
from portable.lowering.program import Program

if TYPE_CHECKING:
    from portable.kernels.choice import Choice


REFUSED = "refused"
SEED_WORDS = 3  # of a program's first argument: two of the random seed, and a zero


class Use(NamedTuple):
    """How an op runs at one line: "lowered", "decomposed", "aten fallback" or "refused", the last two with a reason."""

    op: str
    how: str
    where: str
    reason: str = ""


class Output(NamedTuple):
    """Where an output of a graph comes from: "array" (index among the program's results), "number" (the same, of a 0-d
    array that stands for it), "argument" (the index of the argument that it is), "output" (of another output whose
    memory it shares) or "constant" (a number or None). ``place`` says how it lies in that memory, if not as all of it;
    it is a ``copy`` where the array has not its memory's order."""

    kind: str
    value: Any
    place: Place | None = None
    copy: bool = False


@dataclass(frozen=True)
class Lowered:
    """A StableHLO module and how to call it.

    The module takes the random seed and a zero (uint32[3], see `rounding`), then the tensor arguments in order; it
    returns the arrays of ``outputs``.

    Attributes:
        module: MLIR bytecode.
        outputs: one entry for each output of the graph.
        random: whether the program reads the seed.
        checks: one for each array that the module returns after those of ``outputs``; see `assemble`.
        ops: how many nodes of each overload ran as ("lowered" | "decomposed" | "aten fallback"); an op that fell back
            inside a decomposition counts too.
        fallbacks: how many nodes fell back, by op, reason and line.
    """

    module: bytes
    outputs: tuple[Output, ...]
    random: bool
    checks: tuple[Callable[[torch.Tensor], None], ...]
    ops: dict[tuple[str, str], int]
    fallbacks: dict[Fallback, int]
    text: Callable[[], str]

    def assemble(self, results: list[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """The graph's outputs from the arrays that the module returned and the arguments.

        Raises:
            What torch raises for these values: each check has seen its array.
        """
        if self.checks:
            for check, value in zip(self.checks, results[len(results) - len(self.checks) :], strict=True):
                check(value)
        return self.values(results, args)

    def values(self, results: list[torch.Tensor], args: Sequence[Any]) -> list[Any]:
        """As `assemble`, without the checks."""
        values: list[Any] = []
        sources: dict[str, Sequence[Any]] = {"array": results, "argument": args}
        for kind, value, place, copy in self.outputs:
            if kind in sources:
                source = sources[kind][value]
                values.append(source if place is None else place.copy(source) if copy else place.on(source))
            else:
                values.append(results[value].item() if kind == "number" else value)
        for i, (kind, value, place, _) in enumerate(self.outputs):
            if kind == "output" and place:
                values[i] = place.on(values[value])
        return values


def lower_graph(
    gm: fx.GraphModule,
    args: Sequence[Spec | int | float | bool | None],
    *,
    platform: str,
    backend: str,
    choice: Choice | None = None,
    inference: bool = False,
    fallback: str = "error",
    mutated: Sequence[int] = (),
    places: Sequence[Place | None] = (),
) -> Lowered:
    """Lower ``gm`` for arguments of these types; numbers are constants of the program.

    Args:
        choice: says for each op that has kernels which one runs; without it none does.
        inference: no backward pass runs a branch or a loop's body a second time, so that they may draw random numbers.
        fallback: a mode of PORTABLE_FALLBACK; whoever calls this says what `Lowered.fallbacks` holds.
        mutated: positions of arguments that get new values after the call: an output that is one of them is a copy.
        places: how the first outputs lie in memory; the others are row-major.

    Raises:
        UnsupportedOpError: names every op that has no exact lowering, and does not fall back.
        LoweringError: a rule is wrong.
    """
    program = Program(backend, platform, choice, inference=inference, fallback=fallback != "error")
    with jax.enable_x64(True):
        lowered, outputs = _lower(program, gm, args, mutated, places)
        module = _bytecode(lowered)
    checks = tuple(check.check for check in program.checks)
    ops = Counter((f.op, FELL_BACK) for f in program.fell_back)
    for (op, how, _), n in program.ops.items():
        ops[op, how] += n
    fallbacks = Counter(program.fell_back)
    return Lowered(module, tuple(outputs), program.uses > 0, checks, dict(ops), dict(fallbacks), lowered.as_text)


def survey(gm: fx.GraphModule, args: Sequence[Any], *, platform: str, backend: str, inference: bool) -> dict[Use, int]:
    """How each op of ``gm`` would run on a platform that need not be here, and how often at each line.

    Arguments and errors are those of `lower_graph`, in whose mode "allow" the ops are lowered; what that would refuse
    is in the result.
    """
    program = Program(backend, platform, inference=inference, fallback=True)
    refused: tuple[UnsupportedOp, ...] = ()
    try:
        with jax.enable_x64(True):
            _lower(program, gm, args)
    except UnsupportedOpError as failure:
        refused = failure.ops
    uses = Counter(Use(f.op, FELL_BACK, f.where, f.reason) for f in program.fell_back)
    uses.update(Use(o.op, REFUSED, o.where, o.reason) for o in refused)
    elsewhere = {(o.op, o.where) for o in refused}  # lowered, but not for this platform
    uses.update({Use(*key): n for key, n in program.ops.items() if (key[0], key[2]) not in elsewhere})
    return dict(uses)


def _lower(
    program: Program,
    gm: fx.GraphModule,
    args: Sequence[Any],
    mutated: Sequence[int] = (),
    places: Sequence[Place | None] = (),
) -> tuple[Any, list[Output]]:
    """What `lower_graph` and `survey` have in common: JAX's lowering of ``gm`` and the plan of its outputs."""
    outputs: list[Output] = []
    returned = {i: argument for i, argument in _returned_arguments(gm).items() if argument not in mutated}

    def traced(seed: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
        remaining = iter(arrays)
        values = [next(remaining) if isinstance(a, Spec) else a for a in args]
        program.begin(seed, arrays)
        results: list[jax.Array] = []
        for i, value in enumerate(pytree.tree_leaves(program.run(gm, values), is_leaf=lambda x: x is None)):
            place = places[i] if i < len(places) else None
            if i in returned:
                outputs.append(Output("argument", returned[i]))
            elif place and place.argument is not None:
                outputs.append(Output("argument", place.argument, place))
            elif place and place.output is not None:
                outputs.append(Output("output", place.output, place))
            elif isinstance(value, registry.TracedScalar):
                outputs.append(Output("number", len(results)))
                results.append(value.value)
            elif isinstance(value, jax.Array):
                order = place.order() if place else None
                outputs.append(Output("array", len(results), place, copy=order is None))
                results.append(place.in_order(value, order) if place and order is not None else value)
            else:
                outputs.append(Output("constant", value))
        return results + [check.value for check in program.checks]

    registry.load()
    types = [jax.ShapeDtypeStruct(a.shape, a.jax_dtype) for a in args if isinstance(a, Spec)]
    trace = jax.jit(traced, keep_unused=True).trace(jax.ShapeDtypeStruct((SEED_WORDS,), np.uint32), *types)
    refused, lowered = list(program.refused), None
    try:
        lowered = trace.lower(lowering_platforms=(program.platform,))
    except (NotImplementedError, ValueError) as failure:  # JAX's, of one of its primitives
        found = callbacks(trace.jaxpr.jaxpr, program.platform, _names(gm))
        if found:
            raise _calls_back(found) from failure
        if isinstance(failure, ValueError):
            raise
        absent = missing(trace.jaxpr.jaxpr, program.platform, _names(gm))
        if not absent:
            raise LoweringError("this program", f"failed on {program.platform}: {failure}") from failure
        refused += absent
    if refused:
        off = not program.fallback and program.platform in HOSTS
        raise UnsupportedOpError(refused, backend=program.backend, fallback_is_off=off)
    if lowered is not None and lowered._lowering.compile_args.get("host_callbacks"):
        # they belong to an executable of JAX's own: in ours the call would end the process
        raise _calls_back(callbacks(trace.jaxpr.jaxpr, program.platform, _names(gm)))
    return lowered, outputs


def _calls_back(found: list[tuple[str, str, str]]) -> LoweringError:
    primitive, op, where = found[0] if found else ("a callback", "this program", "")
    return LoweringError(
        op,
        f"calls back into Python (jax's {primitive}), which no compiled program can",
        where=where,
        remedy="write it with jax.numpy and jax.lax alone, or leave the op without a lowering: on the CPU it then "
        "falls back to torch's own kernel",
    )


def _names(gm: fx.GraphModule) -> set[str]:
    graphs = [m.graph for m in gm.modules() if isinstance(m, fx.GraphModule)]
    calls = [node for graph in graphs for node in graph.nodes if node.op == "call_function"]
    wrapped = {str(arg) for node in calls for arg in node.args if isinstance(arg, OpOverload)}
    return wrapped.union(str(node.target) for node in calls)


def _returned_arguments(gm: fx.GraphModule) -> dict[int, int]:
    """{position of an output: position of the argument that it is}, e.g. a weight that the backward pass wants: no copy
    of it."""
    position = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    outputs = pytree.tree_leaves(next(iter(reversed(gm.graph.nodes))).args[0])
    return {i: position[n] for i, n in enumerate(outputs) if n in position}


def _bytecode(lowered: Any) -> bytes:
    from jax._src.interpreters import mlir

    return mlir.module_to_bytecode(lowered.compiler_ir("stablehlo"))
