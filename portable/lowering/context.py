"""What a rule can ask for beside its arguments: the result's type, a random key, the precision, torch itself."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import Tensor
from torch.utils import _pytree as pytree

from portable import dtypes
from portable.lowering import rounding

if TYPE_CHECKING:
    from portable.lowering.program import Program


@dataclass(frozen=True, slots=True)
class Spec:
    """Shape (ints) and torch dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def jax_dtype(self) -> np.dtype:
        return dtypes.to_jax(self.dtype)


class Strides(tuple[int, ...]):
    """A tensor's strides in elements, and the ``offset`` of its first element in its storage.

    ``offset`` is None where the storage is not known: a decomposition sees its arguments as if they were row-major.
    """

    offset: int | None = None


class Check(NamedTuple):
    """A value that is looked at after each run, see `Context.check`."""

    value: jax.Array
    check: Callable[[Tensor], None]
    merge: Callable[[jax.Array, jax.Array], jax.Array] | None


class Refused(Exception):
    """A rule cannot be exact for these arguments. Collected into one UnsupportedOpError."""


class Context:
    """One application of a rule.

    Attributes:
        result: Spec of the op's result; a tuple of Specs (or None) for several results.
        strides: for each positional argument the Strides that torch gives it (None where not a tensor).
    """

    __slots__ = ("_node", "op", "program", "result", "strides")

    def __init__(
        self, program: Program, op: Any, result: Any, strides: tuple = (), node: torch.fx.Node | None = None
    ) -> None:
        self.program, self.op, self.result, self.strides, self._node = program, op, result, strides, node

    def uses(self, index: int) -> bool:
        """Whether anything reads result number ``index`` of several."""
        if self._node is None:
            return True
        readers = self._node.users
        return any(r.target is not operator.getitem or (r.args[1] == index and r.users) for r in readers)

    @property
    def dense(self) -> bool:
        """Whether all results are dense tensors in torch."""
        results = pytree.tree_leaves(self._node.meta.get("val")) if self._node is not None else []
        return all(r.layout is torch.strided for r in results if isinstance(r, Tensor))

    @property
    def platform(self) -> str:
        """The XLA platform that the program is for: "cpu", "cuda", "tpu", …"""
        return self.program.platform

    @property
    def precision(self) -> lax.Precision:
        """Precision of float32 matmuls and convolutions, from ``torch.get_float32_matmul_precision()``."""
        return self.program.precision

    def summand(self, x: Any) -> Any:
        """``x``, which is added to something: where it is a constant zero as one that no compiler leaves out."""
        if not rounding.is_zero(x):
            return x
        floats = x.dtype if isinstance(x, (jax.Array, np.ndarray, np.generic)) else self.result.jax_dtype
        return rounding.rounded(x, self.program.zero) if jnp.issubdtype(floats, jnp.floating) else x

    def key(self) -> jax.Array:
        """A fresh random key: derived from torch's generator state at run time, another one for each use."""
        return self.program.key()

    def drawn(self, draw: Callable[[torch.Generator], torch.Tensor], *, counted: bool = True) -> jax.Array | None:
        """What ``draw`` gives, where the op draws from a state that the traced function has seeded itself; else None.

        It is then a constant of the program, and the very numbers of eager. Without it, `key` refuses such an op.

        Args:
            counted: whether eager draws as many; if not, later ops that draw from the same generator are refused.
        """
        return self.program.drawn(draw, counted)

    def torch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Lower ``function``, written in torch, on these JAX values: it is traced to ATen ops, which are lowered."""
        return self.program.trace_and_run(function, args, kwargs)

    def check(
        self,
        value: jax.Array,
        check: Callable[[Tensor], None],
        merge: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    ) -> None:
        """After each run ``check`` is called with the tensor ``value``; it raises what eager raises for bad data.

        Args:
            merge: of two values the one that stands for both: without it the op is refused in a while loop.
        """
        self.program.checks.append(Check(value, check, merge))

    def in_turn(self, call: Callable[[jax.Array], Sequence[jax.Array]]) -> Sequence[jax.Array]:
        """Make a call that must not run beside another such call of the program: it has threads of its own.

        Args:
            call: takes a scalar that depends on the call before, and gives the results followed by a scalar for the
                next one.
        """
        turn = self.program.turn
        *results, self.program.turn = call(jnp.zeros((), np.bool_) if turn is None else turn)
        return results

    def alone(self, call: Callable[..., Any], *operands: jax.Array) -> Any:
        """The results of ``call(*operands)``, beside which no other such call of the program runs on the host.

        For calls that wait for threads of XLA's pool while they hold one of them, as jaxlib's batched LAPACK does: as
        many of them as there are threads would wait for ever.
        """
        if self.platform != "cpu":
            return call(*operands)
        turn = self.program.turn
        if turn is not None:  # false, which XLA does not know
            operands = tuple(lax.select(jnp.broadcast_to(turn, x.shape), lax.full_like(x, 0), x) for x in operands)
        results = call(*operands)
        floats = [r for r in jax.tree.leaves(results) if r.size and jnp.issubdtype(r.dtype, jnp.inexact)]
        if floats:
            self.program.turn = jnp.real(lax.reshape(floats[0], (floats[0].size,))[0]) < -np.inf
        return results

    def refuse(self, reason: str) -> NoReturn:
        """Refuse this op for these arguments, by name, rather than be inexact."""
        raise Refused(reason)
