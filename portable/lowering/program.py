"""The interpreter of a functional ATen graph on JAX values.

The graph is interpreted node by node on JAX tracers. Every result is checked against the FakeTensor that torch computed
for it. An op without a rule is decomposed by torch, one op at a time, and the outcome is cached by signature. Refusals
are collected, so that one error names all of them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from portable import dtypes
from portable.errors import LoweringError, PortableError, UnsupportedDtypeError, UnsupportedOp, UnsupportedOpError
from portable.explain import Fallback
from portable.kernels.registry import Kernel, op_name, own_arguments
from portable.lowering import control_flow, recomputed, refusals, registry, rounding, subnormals, written
from portable.lowering.context import Check, Context, Refused, Spec, Strides
from portable.lowering.draws import Draw, generator_at
from portable.lowering.fallback import torch_kernel
from portable.lowering.source import annotated, location, module_path, users_line

if TYPE_CHECKING:
    from portable.kernels.choice import Choice

PRECISION = {"highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT}
LOOP_KEYS = 1 << 31  # random keys of loops are folded in from here on, those of nodes below
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)


class Program:
    """The state of one lowering: the random seed and its uses, what was refused, what was counted.

    Args:
        platform: the XLA platform that the program is for.
        inference: no backward pass runs a branch or a loop's body a second time.
        fallback: whether refused ops fall back, where the platform can.
    """

    def __init__(
        self,
        backend: str,
        platform: str,
        choice: Choice | None = None,
        *,
        inference: bool = False,
        fallback: bool = False,
    ) -> None:
        self.backend = backend
        self.platform = platform
        self.choice = choice
        self.inference = inference
        self.fallback = fallback
        self.unbuilt = ""  # why the native code of a fallback cannot be built, once that was tried
        self.precision = PRECISION[torch.get_float32_matmul_precision()]
        self.seed: Any = None  # set when tracing begins, as is
        self.zero: Any = None  # a uint32 that is 0, which no compiler knows: see `rounding`
        self.sources: subnormals.Sources | None = None
        self.turn: jax.Array | None = None  # see Context.in_turn
        self.uses = 0
        self.draw: Draw | None = None  # of the node that runs; None where the trace did not note it
        self.states: dict[Draw, bytes] = {}
        self.refused: dict[UnsupportedOp, None] = {}
        self.ops: Counter[tuple[str, str, str]] = Counter()  # (op, how it runs, the user's line)
        self.fell_back: list[Fallback] = []
        self.checks: list[Check] = []
        self._where = ""
        self._depth = 0
        self._saved: jax.Array | None = None  # the key of the node that runs, where another program draws the same
        self._uses_of_node = 0
        self._nesting = 0  # how many branches and bodies are around the node that runs
        self._loops = 0
        self._iterations: tuple[tuple[int, jax.Array], ...] = ()  # (loop, iteration) of those that are loops

    def begin(self, seed: jax.Array, arguments: Sequence[jax.Array]) -> None:
        """Tracing begins, with the random seed and the zero (uint32[3]), and the tensor arguments."""
        self.seed, self.zero = seed[:2], seed[2]
        if self.platform == "cpu" and subnormals.usable():
            self.zero = subnormals.kept()
            self.seed = lax.bitwise_or(self.seed, lax.broadcast(self.zero, (2,)))
            self.sources = subnormals.Sources(self.zero)
            self.sources.add(arguments)

    @contextlib.contextmanager
    def inside(self, turn: jax.Array, iteration: jax.Array | None = None) -> Iterator[Program]:
        """Within it the nodes of a branch run, or of a loop's body: its checks and its turn are not those outside."""
        outside = self.checks, self.turn, self._iterations
        self.checks, self.turn = [], turn
        self._nesting += 1
        if iteration is not None:
            self._loops += 1
            self._iterations += ((self._loops, iteration),)
        try:
            yield self
        finally:
            self._nesting -= 1
            self.checks, self.turn, self._iterations = outside

    def _may_draw(self) -> None:
        if self._nesting and not self.inference:
            raise Refused("it is random in a branch or loop, which a backward pass may run again with other numbers")

    def key(self) -> jax.Array:
        self._may_draw()
        if self._saved is not None:
            self._uses_of_node += 1
            return jax.random.fold_in(self._saved, self._uses_of_node)
        self.uses += 1
        key = jax.random.wrap_key_data(self.seed, impl="threefry2x32")
        for loop, iteration in self._iterations:
            key = jax.random.fold_in(jax.random.fold_in(key, LOOP_KEYS + loop), iteration)
        if self.draw is None:
            return jax.random.fold_in(key, self.uses)
        if self.draw.start is not None:
            raise Refused("it draws from a generator that the function itself has seeded")
        self._uses_of_node += 1
        return jax.random.fold_in(jax.random.fold_in(key, self.draw.index), self._uses_of_node)

    def drawn(self, draw: Callable[[torch.Generator], torch.Tensor], counted: bool) -> jax.Array | None:
        self._may_draw()
        if self.draw is None or self.draw.start is None:
            return None
        state = self.draw.start if self.draw.index == 0 else self.states.get(self.draw)
        if state is None:
            raise Refused(
                "how much was drawn before, from a generator that the function itself has seeded, depends on data"
            )
        generator = generator_at(state)
        value = draw(generator)
        if counted:
            following = Draw(self.draw.start, self.draw.index + 1)
            self.states[following] = generator.get_state().numpy().tobytes()
        return jnp.asarray(from_host(value))

    def run(self, gm: fx.GraphModule, args: Sequence[Any], around: dict[Any, int] | None = None) -> Any:
        """Interpret ``gm`` on JAX values and numbers; returns its output tree.

        Args:
            around: the values of the symbols of the graph that ``gm`` is a part of.
        """
        env: dict[fx.Node, Any] = {}
        remaining = iter(args)
        symbols: dict[Any, int] = dict(around or {})
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                env[node] = value = next(remaining)
                _bind(symbols, node.meta.get("val"), value)
            elif node.op == "get_attr":
                env[node] = self._attribute(gm, node)
            elif node.op == "call_function":
                env[node] = self._node(node, env, symbols)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            else:
                raise LoweringError(str(node.target), f"is a {node.op} node, which no functional ATen graph has")
        raise LoweringError("graph", "has no output")

    def _attribute(self, gm: fx.GraphModule, node: fx.Node) -> Any:
        value = functools.reduce(getattr, str(node.target).split("."), gm)
        if isinstance(value, FakeTensor):  # what AOTAutograd leaves of the token of an effect in a subgraph
            reason = "torch's capture loses the error that an op in a branch or loop may raise: move that op out of it"
            self.refused[UnsupportedOp("higher_order.with_effects", reason, self._where)] = None
            raise UnsupportedOpError(list(self.refused), backend=self.backend)
        return jnp.asarray(from_host(value)) if isinstance(value, torch.Tensor) else value

    def _node(self, node: fx.Node, env: dict[fx.Node, Any], symbols: dict[Any, int]) -> Any:
        args: Any = fx.node.map_arg(node.args, env.__getitem__)
        kwargs: Any = fx.node.map_arg(node.kwargs, env.__getitem__)
        op: Any = node.target
        if op is operator.getitem:
            return args[0][args[1]]
        val: Any = node.meta.get("val")
        if self._depth == 0:
            self._where = location(node)
            self.draw, self._uses_of_node = node.meta.get("draw"), 0
        if isinstance(op, OpOverload):
            try:
                result = pytree.tree_map(functools.partial(_spec, symbols), val)
                strides = tuple(_strides(a, symbols, nested=self._depth + self._nesting > 0) for a in node.args)
            except Refused as refusal:
                self.refused[UnsupportedOp(str(op), str(refusal), self._where)] = None
                raise UnsupportedOpError(list(self.refused), backend=self.backend) from refusal
            if self._depth == 0:
                self._check(op, args, kwargs, result, node)
            with annotated(node) if self._depth == 0 else contextlib.nullcontext():
                return self.call(op, args, kwargs, result, strides, node)
        if op is with_effects:  # (token, op, *arguments of op); the order of effects is the order of the graph
            inner = args[1]
            result = pytree.tree_map(functools.partial(_spec, symbols), val[1] if len(val) == 2 else val[1:])
            value = self.call(inner, args[2:], kwargs, result, effect=True)
            return (args[0], *value) if isinstance(value, tuple) else (args[0], value)
        if op in (recomputed.FORWARD, recomputed.BACKWARD):
            return self._drawn_again(op, args, kwargs, node)
        if op is written.OP and isinstance(args[0], OpOverload):
            with annotated(node, args[0]):
                return self._on_copies(args[0], kwargs, node, symbols)
        if isinstance(op, HigherOrderOperator):
            return self._higher_order(op, args, kwargs, val, symbols)
        return self._arithmetic(op, args, kwargs)

    def _check(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        node: fx.Node,
        *,
        failed: bool = False,
    ) -> None:
        """Raise for a call that eager refuses: torch's shape propagation checks less than its kernels do."""
        leaves, tree = pytree.tree_flatten((list(args), kwargs))
        if any(isinstance(x, registry.TracedScalar) for x in leaves):
            return
        described = [
            refusals.Like(x.shape, dtypes.to_torch(x.dtype)) if isinstance(x, jax.Array) else refusals.Constant(x)
            for x in leaves
        ]
        elements = sum(math.prod(x.shape) for x in pytree.tree_leaves(result) if isinstance(x, Spec))
        reason = refusals.check(op, described, tree, results=elements, platform=self.platform, failed=failed)
        if reason:
            line = users_line(node.meta.get("stack_trace") or "", module_path(node))
            raise refusals.refusal(str(op), described, reason, line)

    def _drawn_again(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], node: fx.Node) -> Any:
        """A random op that the forward and the backward program draw with one key: see `recomputed`."""
        saved, (inner, *args) = (None, args) if op is recomputed.FORWARD else (args[0], args[1:])
        origin = recomputed.origin(node)
        self._where = location(origin)
        try:
            key = self.key() if saved is None else recomputed.key_in(saved)
            result = pytree.tree_map(functools.partial(_spec, {}), recomputed.result_of(inner, args, kwargs))
        except Refused as refusal:
            self.refused[UnsupportedOp(str(inner), str(refusal), self._where)] = None
            raise UnsupportedOpError(list(self.refused), backend=self.backend) from refusal
        self._saved, self._uses_of_node = key, 0
        try:
            with annotated(origin, inner):
                value = self.call(inner, args, kwargs, result)
        finally:
            self._saved = None
        return (recomputed.state_of(key), value) if saved is None else value

    def _on_copies(self, op: OpOverload, options: dict[str, Any], node: fx.Node, symbols: dict[Any, int]) -> Any:
        """An op that writes to its arguments: see `written`."""
        result = pytree.tree_map(functools.partial(_spec, symbols), node.meta["val"])
        if not self.fallback:
            return self._refuse(str(op), written.REASON, result)
        returned = result[: len(op._schema.returns)]
        try:
            bases: Any = node.kwargs.get("_all_bases", ())
            strides = tuple(_strides(base, symbols, nested=self._nesting > 0) for base in bases)
            value = written.on_copies(Context(self, op, returned), options, strides)
        except Refused as refusal:
            return self._refuse(str(op), f"{written.REASON}; and it cannot fall back: {refusal}", result)
        self.fell_back.append(Fallback(op_name(op), written.REASON, self._where))
        return self._checked(op, value, result, None)

    def _higher_order(
        self, op: HigherOrderOperator, args: Sequence[Any], kwargs: dict[str, Any], val: Any, symbols: dict[Any, int]
    ) -> Any:
        name = f"higher_order.{op.name()}"
        if self.sources is not None:
            args = pytree.tree_map(self.sources.waiting, list(args))
        result = None
        try:
            lower = control_flow.LOWERED.get(op.name())
            if lower is None or kwargs:
                raise Refused("this higher-order operator is not lowered")
            if lower is not control_flow.stacked_while_loop:
                result = pytree.tree_map(functools.partial(_spec, symbols), val)
            self.ops[name, "lowered", self._where] += 1
            return tuple(lower(control_flow.Application(self, name, result, symbols), *args))
        except Refused as refusal:
            if result is not None:
                return self._refuse(name, str(refusal), result)
            self.refused[UnsupportedOp(name, str(refusal), self._where)] = None
            raise UnsupportedOpError(list(self.refused), backend=self.backend) from refusal

    def _arithmetic(self, op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return _arithmetic(op, args, kwargs)
        except (TypeError, AttributeError, jax.errors.ConcretizationTypeError) as failure:
            name = getattr(op, "__name__", str(op))
            self.refused[UnsupportedOp(name, "of a number that is known only at run time", self._where)] = None
            raise UnsupportedOpError(list(self.refused), backend=self.backend) from failure

    def call(
        self,
        op: OpOverload,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        strides: tuple = (),
        node: fx.Node | None = None,
        *,
        effect: bool = False,
    ) -> Any:
        """Apply ``op`` to JAX values: by its rule, else by torch's decomposition, else by torch's own kernel."""
        if op is torch.ops.aten.detach.default and args[0] is None:  # a gradient that a mask did not ask for
            return None
        rule = registry.rule_for(op)
        chosen, name = None, op_name(op)
        if self.choice is not None and name in self.choice.ops:
            if op.namespace == "portable":
                args, kwargs = own_arguments(op, args, kwargs), {}
            chosen = self.choice.kernel(name, args, kwargs)
        result = _wanted(op, args, kwargs, result)
        context = Context(self, op, result, strides, node)
        how = f"kernel {chosen.provider}" if chosen else "lowered" if rule else "decomposed"
        before = self._noted()
        try:
            if chosen is not None:
                value = chosen.implementation(*((context,) if chosen.takes_context else ()), *args, **kwargs)
            elif rule is not None:
                value = self._apply(op, functools.partial(rule.apply, context), args, kwargs)
            else:
                function = registry.decomposition(op)
                if function is None:
                    raise Refused("no lowering and no decomposition")
                value = self.trace_and_run(function, args, kwargs)
        except (Refused, UnsupportedDtypeError) as refusal:
            reason = refusal.message if isinstance(refusal, UnsupportedDtypeError) else str(refusal)
            if chosen is not None or not self.fallback:
                return self._refuse(str(op), reason, result)
            self._forget_since(before)
            try:
                kernel = functools.partial(_torch_kernel, context, effect)
                value = self._apply(op, kernel, args, kwargs)
            except Refused as second:
                return self._refuse(str(op), f"{reason}; and it cannot fall back: {second}", result)
            self.fell_back.append(Fallback(name, reason, self._where))
            return self._checked(op, value, result, None)
        except PortableError as failure:
            if isinstance(failure, LoweringError) and self._depth == 0 and node is not None:
                self._check(op, args, kwargs, result, node, failed=True)
            raise
        except Exception as failure:
            if self._depth == 0 and node is not None:
                self._check(op, args, kwargs, result, node, failed=True)
            if any(isinstance(a, registry.TracedScalar) for a in pytree.tree_leaves((args, kwargs))):
                return self._refuse(str(op), "a number that is known only at run time", result)
            described = ", ".join(_described(a) for a in pytree.tree_leaves((args, kwargs)))
            message = f"failed for ({described}): {type(failure).__name__}: {failure}"
            raise self._wrong(op, message, chosen or rule, failure) from failure
        if self._depth == 0:
            self.ops[name, how, self._where] += 1
        return self._rounded(self._checked(op, value, result, chosen or rule))

    def _apply(self, op: OpOverload, rule: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return rule(*args, **kwargs) if self.sources is None else self.sources.apply(op, rule, args, kwargs)

    def _rounded(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self._rounded, value))
        return rounding.rounded(value, self.zero) if rounding.is_contractible(value, self.platform) else value

    def _noted(self) -> tuple[int, int, int, jax.Array | None]:
        return len(self.refused), len(self.checks), len(self.fell_back), self.turn

    def _forget_since(self, before: tuple[int, int, int, jax.Array | None]) -> None:
        """Forget what an op left behind on its way to a refusal: another way is tried."""
        refused, checks, fell_back, self.turn = before
        self.refused = dict(itertools.islice(self.refused.items(), refused))
        del self.checks[checks:], self.fell_back[fell_back:]

    def _refuse(self, op: str, reason: str, result: Any) -> Any:
        """Note the refusal and go on with zeros, to find the others."""
        self.refused[UnsupportedOp(op, reason, self._where)] = None
        try:
            return pytree.tree_map(lambda s: jnp.zeros(s.shape, s.jax_dtype) if isinstance(s, Spec) else s, result)
        except (PortableError, TypeError):
            raise UnsupportedOpError(list(self.refused), backend=self.backend) from None

    def _wrong(
        self, op: OpOverload, message: str, by: Kernel | registry.Rule | None, failure: Exception | None = None
    ) -> PortableError:
        """What is wrong with an op's result or failed, and whose it is to mend."""
        if isinstance(by, Kernel):
            return by.error(message, self._where, failure)
        if by is None or registry.is_own(by.where):
            return LoweringError(str(op), message, where=self._where)
        file = by.where.rpartition(":")[0]
        frames = traceback.walk_tb(failure.__traceback__ if failure else None)
        lines = [line for frame, line in frames if frame.f_code.co_filename == file]
        failed = f", which failed in line {lines[-1]}" if lines else ""
        return LoweringError(str(op), message, where=self._where, remedy=f"mend the lowering at {by.where}{failed}")

    def _checked(self, op: OpOverload, value: Any, result: Any, by: Kernel | registry.Rule | None) -> Any:
        if isinstance(result, Spec):
            if not isinstance(value, jax.Array) or value.shape != result.shape or value.dtype != result.jax_dtype:
                raise self._wrong(op, f"gave {_described(value)}, torch gives {_described(result)}", by)
        elif isinstance(result, (tuple, list)):
            if not isinstance(value, (tuple, list)) or len(value) != len(result):
                raise self._wrong(op, f"gave {_described(value)}, torch gives {len(result)} results", by)
            for v, r in zip(value, result, strict=True):
                self._checked(op, v, r, by)
        return value

    def trace_and_run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Trace ``function`` (torch code) for the types of these values to ATen, and interpret the result on them."""
        leaves, tree = pytree.tree_flatten((list(args), kwargs))
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        signature = []
        for leaf in leaves:
            if isinstance(leaf, registry.TracedScalar):
                raise Refused("a number that is known only at run time")
            is_array = isinstance(leaf, jax.Array)
            signature.append(Spec(leaf.shape, dtypes.to_torch(leaf.dtype)) if is_array else refusals.Constant(leaf))
        gm, spec = _traced(function, tuple(signature), tree, torch.get_default_dtype())
        self._depth += 1
        try:
            return pytree.tree_unflatten(pytree.tree_leaves(self.run(gm, arrays), is_leaf=lambda x: x is None), spec)
        finally:
            self._depth -= 1


def _wanted(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The results of ``op``, without the gradients that its mask does not ask for: eager gives None there, though its
    fake tensors may state a tensor."""
    names = [argument.name for argument in op._schema.arguments]
    if "output_mask" not in names or not isinstance(result, (tuple, list)):
        return result
    index = names.index("output_mask")
    mask = kwargs.get("output_mask") or args[index]
    return tuple(r if wanted else None for r, wanted in zip(result, mask, strict=True))


def _torch_kernel(context: Context, effect: bool, *args: Any, **kwargs: Any) -> Any:
    return torch_kernel(context, args, kwargs, effect=effect)


@functools.lru_cache(maxsize=4096)
def _traced(
    function: Callable[..., Any], signature: tuple[Spec | refusals.Constant, ...], tree: Any, default: torch.dtype
) -> tuple[fx.GraphModule, Any]:
    from portable.capture import trace_decomposition

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(s.shape, dtype=s.dtype) for s in signature if isinstance(s, Spec)]
    spec = None

    def call(*tensors: torch.Tensor) -> list[Any]:
        nonlocal spec
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(s, Spec) else s.value for s in signature]
        args, kwargs = pytree.tree_unflatten(leaves, tree)
        outputs, spec = pytree.tree_flatten(function(*args, **kwargs))
        return outputs

    try:
        return trace_decomposition(call, fakes), spec
    except DATA_DEPENDENT as failure:
        raise Refused("the shape or value depends on the data") from failure
    except UnsupportedOperatorException as failure:
        raise Refused(f"torch cannot trace {failure}") from failure


def _spec(symbols: dict[Any, int], val: Any) -> Any:
    if isinstance(val, torch.Tensor):
        return Spec(tuple(n if type(n) is int else concrete(n, symbols) for n in val.shape), val.dtype)
    return val


def _strides(arg: Any, symbols: dict[Any, int], *, nested: bool) -> Strides | None:
    val = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    if not isinstance(val, torch.Tensor) or val.layout is not torch.strided:
        return None
    strides = Strides(n if type(n) is int else concrete(n, symbols) for n in val.stride())
    if not (nested and arg.op == "placeholder"):
        offset = val.storage_offset()
        with contextlib.suppress(Refused):
            strides.offset = offset if type(offset) is int else concrete(offset, symbols)
    return strides


def concrete(n: Any, symbols: dict[Any, int]) -> int:
    """The value of a symbolic int under these bindings.

    Raises:
        Refused: it depends on data.
    """
    expression = n.node.expr.xreplace(symbols)
    if not expression.is_number:
        raise Refused(f"the size {expression} depends on the data")
    return int(expression)


def _bind(symbols: dict[Any, int], val: Any, value: Any) -> None:
    pairs: list[tuple[Any, int]]
    if isinstance(value, registry.TracedScalar):
        return
    if isinstance(val, torch.SymInt):
        pairs = [(val, value)]
    elif isinstance(val, torch.Tensor) and isinstance(value, jax.Array):
        pairs = [(val.shape[d], n) for d, n in enumerate(value.shape)]
    else:
        return
    for symbolic, number in pairs:
        if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
            symbols[symbolic.node.expr] = _sympy_int(number)


@functools.lru_cache(maxsize=4096)
def _sympy_int(n: int) -> Any:
    import sympy

    return sympy.Integer(n)


def from_host(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as a numpy array of the matching dtype (bfloat16 and float8 through ml_dtypes)."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    to = dtypes.to_jax(tensor.dtype)
    if to.kind in "biufc":
        return tensor.numpy()
    return tensor.view({1: torch.uint8, 2: torch.int16}[to.itemsize]).numpy().view(to)


def _arithmetic(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Python arithmetic on sizes and numbers."""
    if any(isinstance(a, registry.TracedScalar) for a in args):
        value = op(*(a.value if isinstance(a, registry.TracedScalar) else a for a in args), **kwargs)
        kind = jnp.asarray(value).dtype.kind
        return registry.TracedScalar(value, bool if kind == "b" else float if kind == "f" else int)
    if any(isinstance(a, jax.Array) for a in args):
        raise LoweringError(getattr(op, "__name__", str(op)), "is Python code on a tensor inside an ATen graph")
    return op(*args, **kwargs)


def _described(x: Any) -> str:
    if isinstance(x, (jax.Array, Spec)):
        return str(refusals.Like(x.shape, dtypes.to_torch(x.dtype) if isinstance(x, jax.Array) else x.dtype))
    if isinstance(x, (tuple, list)):
        return f"({', '.join(_described(v) for v in x)})"
    return repr(x)[:80]
