"""Control flow: torch's higher-order operators cond, while_loop, scan and map as lax's.

A subgraph is interpreted inside the lax branch or body, so that what it leaves in the program must leave by the
branch's results: values to be checked after the run (with a flag that says whether the branch ran, or one for each
iteration) and the turn of calls that may not run side by side. A number that a subgraph takes or gives (torch's SymInt)
is a 0-d array inside, a `TracedScalar` to the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.extend.core import jaxpr_as_fun
from torch import fx
from torch.utils import _pytree as pytree

from portable import dtypes
from portable.errors import LoweringError
from portable.lowering.context import Check, Refused, Spec
from portable.lowering.registry import TracedScalar

if TYPE_CHECKING:
    from portable.lowering.program import Program

Kind = Spec | type | None  # a tensor, a number, nothing
NUMBERS = {bool: np.bool_, int: np.int64, float: np.float64}


class Application:
    """One application of a higher-order operator: what `Program` knows of the node, and how to run its subgraphs.

    Attributes:
        kinds: what each result is.
    """

    def __init__(self, program: Program, name: str, result: Any, symbols: dict[Any, int]) -> None:
        self.program, self.name, self.symbols = program, name, symbols
        self.kinds = [_kind(r) for r in _leaves(result)]

    def run(self, gm: fx.GraphModule, args: Sequence[Any], kinds: Sequence[Kind]) -> list[jax.Array]:
        """The results of a subgraph as arrays; None is left out."""
        values = _leaves(self.program.run(gm, args, self.symbols))
        if len(values) != len(kinds):
            raise LoweringError(self.name, f"a subgraph gives {len(values)} results, torch gives {len(kinds)}")
        pairs = zip(values, kinds, strict=True)
        return [array for value, kind in pairs if (array := self._array(value, kind)) is not None]

    def _array(self, value: Any, kind: Kind) -> jax.Array | None:
        if isinstance(kind, Spec):
            if not isinstance(value, jax.Array) or value.shape != kind.shape or value.dtype != kind.jax_dtype:
                raise LoweringError(self.name, f"a subgraph gives {value!r}, torch gives {kind}")
            return lax.convert_element_type(value, kind.jax_dtype)
        if kind is None:
            if value is not None:
                raise LoweringError(self.name, f"a subgraph gives {value!r}, torch gives None")
            return None
        if isinstance(value, TracedScalar):
            value = value.value
        elif not isinstance(value, (bool, int, float)):
            raise Refused(f"a subgraph gives {value!r} where torch gives a number")
        return lax.convert_element_type(jnp.asarray(value), NUMBERS[kind])

    def predicate(self, gm: fx.GraphModule, args: Sequence[Any]) -> jax.Array:
        """The one result of a subgraph as a bool[]."""
        (value,) = _leaves(self.program.run(gm, args, self.symbols))
        return _flag(value)


def _leaves(tree: Any) -> list[Any]:
    return pytree.tree_leaves(tree, is_leaf=lambda x: x is None)


def _kind(result: Any) -> Kind:
    if result is None or isinstance(result, Spec):
        return result
    for numbers, kind in (
        ((bool, torch.SymBool), bool),
        ((int, torch.SymInt), int),
        ((float, torch.SymFloat), float),
    ):
        if isinstance(result, numbers):
            return kind
    raise Refused(f"it takes or gives a {type(result).__name__}")


def _kind_of(value: Any) -> Kind:
    if isinstance(value, jax.Array):
        return Spec(value.shape, dtypes.to_torch(value.dtype))
    return value.type if isinstance(value, TracedScalar) else _kind(value)


def _flag(value: Any) -> jax.Array:
    if isinstance(value, TracedScalar):
        value = value.value
    array = jnp.asarray(value)
    if array.dtype != np.bool_ or array.size != 1:
        raise Refused(f"a predicate of type {array.dtype} and shape {list(array.shape)}")
    return lax.reshape(array, ())


def _values(arrays: Sequence[jax.Array], kinds: Sequence[Kind]) -> list[Any]:
    """As the interpreter has them: numbers as `TracedScalar`, None where nothing was."""
    remaining = iter(arrays)
    return [
        None if kind is None else next(remaining) if isinstance(kind, Spec) else TracedScalar(next(remaining), kind)
        for kind in kinds
    ]


def _arrays(values: Sequence[Any]) -> list[jax.Array]:
    if not all(isinstance(v, jax.Array) for v in values):
        raise Refused("it steps over something that is not a tensor")
    return list(values)


def _turn(program: Program) -> jax.Array:
    return jnp.zeros((), np.bool_) if program.turn is None else program.turn


def cond(at: Application, predicate: Any, on_true: Any, on_false: Any, operands: Sequence[Any]) -> list[Any]:
    """`lax.cond`. Each branch is traced once, to learn what the other has to stand in for."""
    program, turn = at.program, _turn(at.program)
    if isinstance(predicate, bool):
        return _leaves(program.run(on_true if predicate else on_false, operands, at.symbols))
    yes, no = (_branch(at, gm, operands, turn) for gm in (on_true, on_false))

    def full(branch: _Branch, first: bool) -> Callable[[jax.Array], Any]:
        def call(turn: jax.Array) -> Any:
            values, turn, checked = branch.call(turn)
            ran = [_guarded(v) for v in checked]
            other = [_guarded(c.value, ran=False) for c in (no if first else yes).checks]
            return values, turn, [*ran, *other] if first else [*other, *ran]

        return call

    values, program.turn, checked = lax.cond(_flag(predicate), full(yes, True), full(no, False), turn)
    checks = [*yes.checks, *no.checks]
    program.checks += [_if_ran(guarded, check) for guarded, check in zip(checked, checks, strict=True)]
    return _values(values, at.kinds)


class _Branch(NamedTuple):
    """A traced branch: ``call(turn)`` gives its values, the next turn and the values of ``checks`` (which has their
    types)."""

    call: Callable[[jax.Array], Any]
    checks: list[Check]


def _branch(at: Application, gm: fx.GraphModule, operands: Sequence[Any], turn: jax.Array) -> _Branch:
    checks: list[Check] = []

    def branch(turn: jax.Array) -> Any:
        with at.program.inside(turn) as inside:
            values = at.run(gm, operands, at.kinds)
            checks[:] = inside.checks
            return values, _turn(inside), [check.value for check in checks]

    call, types = _traced(branch, turn)
    return _Branch(call, [c._replace(value=t) for c, t in zip(checks, types[2], strict=True)])


def _traced(function: Callable[[Any], Any], argument: Any) -> tuple[Callable[[Any], Any], Any]:
    """``function`` of trees like ``argument``, traced once; and the types of what it gives."""
    jaxpr, types = jax.make_jaxpr(function, return_shape=True)(argument)
    run, structure = jaxpr_as_fun(jaxpr), jax.tree.structure(types)
    return lambda argument: jax.tree.unflatten(structure, run(*jax.tree.leaves(argument))), types


def _guarded(value: Any, *, ran: bool = True) -> jax.Array:
    """A value to check behind a flag that says whether it was computed at all."""
    flag = jnp.full((1,), ran, value.dtype)
    flat = lax.reshape(value, (value.size,)) if ran else jnp.zeros((value.size,), value.dtype)
    return lax.concatenate([flag, flat], 0)


def _if_ran(guarded: jax.Array, of: Check) -> Check:
    """The check ``of`` a value that is `_guarded`."""
    shape, check_value = of.value.shape, of.check
    merge_values: Any = of.merge

    def check(guarded: torch.Tensor) -> None:
        if guarded[0]:
            check_value(guarded[1:].reshape(shape))

    def merge(x: jax.Array, y: jax.Array) -> jax.Array:
        both = _guarded(merge_values(x[1:].reshape(shape), y[1:].reshape(shape)))
        return jnp.where(x[0] == 0, y, jnp.where(y[0] == 0, x, both))

    return Check(guarded, check, merge if merge_values else None)


def _each(rows: jax.Array, of: Check) -> Check:
    """The check ``of`` a value, for one of each iteration."""
    check_value = of.check

    def check(rows: torch.Tensor) -> None:
        for row in rows:
            check_value(row)

    return Check(rows, check, jax.vmap(of.merge) if of.merge else None)


def while_loop(at: Application, go_on: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`lax.while_loop`; the condition is computed with the body, so that it too may leave a turn."""
    program = at.program
    kinds = [_kind_of(v) for v in carried]
    if kinds != at.kinds:
        raise LoweringError(at.name, f"carries {kinds}, torch gives {at.kinds}")
    start = [array for v, kind in zip(carried, kinds, strict=True) if (array := at._array(v, kind)) is not None]

    checks: list[Check] = []

    def step(state: Any) -> Any:
        _, iteration, turn, arrays = state
        with program.inside(turn, iteration) as inside:
            arrays = at.run(body, [*_values(arrays, kinds), *others], kinds)
            going = at.predicate(go_on, [*_values(arrays, kinds), *others])
            checks[:] = inside.checks
            return (going, iteration + 1, _turn(inside), arrays), [check.value for check in checks]

    counted = program.ops.copy()
    going = at.predicate(go_on, [*_values(start, kinds), *others])
    program.ops = counted  # it counts with the body
    state = (going, jnp.int32(0), _turn(program), start)
    call, (_, types) = _traced(step, state)
    if any(check.merge is None for check in checks):
        raise Refused("an op in it whose data is checked after the run: use scan")
    checks = [_if_ran(_guarded(t, ran=False), c._replace(value=t)) for c, t in zip(checks, types, strict=True)]

    def guarded_step(state: Any) -> Any:
        state, earlier = state
        state, checked = call(state)
        return state, [m(x, _guarded(y)) for m, x, y in zip(merges, earlier, checked, strict=True)]

    merges: list[Any] = [check.merge for check in checks]
    whole = (state, [check.value for check in checks])
    (_, _, program.turn, arrays), checked = lax.while_loop(lambda state: state[0][0], guarded_step, whole)
    program.checks += [c._replace(value=v) for c, v in zip(checks, checked, strict=True)]
    return _values(arrays, kinds)


def scan(at: Application, combine: Any, init: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`lax.scan` over the first dimension of ``xs``."""
    program, n = at.program, len(init)
    kinds = [_row(kind) if i >= n else kind for i, kind in enumerate(at.kinds)]
    checks: list[Check] = []

    def step(state: tuple[Any, ...], rows: list[jax.Array]) -> tuple[Any, Any]:
        iteration, turn, carry = state
        with program.inside(turn, iteration) as inside:
            arrays = at.run(combine, [*carry, *rows, *others], kinds)
            checks[:] = inside.checks
            return (iteration + 1, _turn(inside), arrays[:n]), (arrays[n:], [check.value for check in checks])

    carry = _arrays(init)
    if [_kind_of(v) for v in carry] != kinds[:n]:
        raise LoweringError(at.name, f"starts from {carry}, torch gives {kinds[:n]}")
    start = (jnp.int32(0), _turn(program), [lax.convert_element_type(v, v.dtype) for v in carry])
    (_, program.turn, carry), (ys, checked) = lax.scan(step, start, _arrays(xs))
    program.checks += [_each(rows, check) for rows, check in zip(checked, checks, strict=True)]
    return _values([*carry, *ys], at.kinds)


def _row(kind: Kind) -> Kind:
    if kind is not None and not isinstance(kind, Spec):
        raise Refused("it collects something that is not a tensor")
    return kind and Spec(kind.shape[1:], kind.dtype)


def map_(at: Application, function: Any, xs: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """`scan` that carries nothing."""
    return scan(at, function, [], xs, others)


def stacked_while_loop(at: Application, *_: Any) -> list[Any]:
    raise Refused("the gradient of a while loop keeps as much as the data makes it run: use scan")


LOWERED: dict[str, Callable[..., list[Any]]] = {
    "cond": cond,
    "while_loop": while_loop,
    "while_loop_stack_output": stacked_while_loop,
    "scan": scan,
    "map_impl": map_,
}
