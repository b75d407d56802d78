"""Random ops that a backward pass computes again, as activation checkpointing has it do.

AOTAutograd's partitioner makes of such an op of the forward graph `run_and_save_rng_state`, which gives the generator's
state beside the result, and of the same op of the backward graph `run_with_rng_state`, which takes that state. Both
graphs become programs of ours and nothing else reads the state: it holds the random key of the draw, then zeros, up to
the size of a state of torch's generator.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import fx
from torch._ops import OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from portable import dtypes
from portable.lowering.context import Refused
from portable.lowering.draws import generator_state
from portable.lowering.registry import TracedScalar

FORWARD, BACKWARD = run_and_save_rng_state, run_with_rng_state
KEY_BYTES = 8


def state_of(key: jax.Array) -> jax.Array:
    """The state, uint8 of the size of torch's, that stands for a threefry key."""
    data = lax.bitcast_convert_type(jax.random.key_data(key), np.uint8)
    return jnp.pad(lax.reshape(data, (KEY_BYTES,)), (0, len(generator_state()) - KEY_BYTES))


def key_in(state: jax.Array) -> jax.Array:
    """The key that `state_of` has made this state of."""
    data = lax.bitcast_convert_type(lax.reshape(state[:KEY_BYTES], (2, KEY_BYTES // 2)), np.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def origin(node: fx.Node) -> fx.Node:
    """The node that tells which line of the user's ``node`` comes from: the partitioner leaves that to what reads the
    result, and in the backward graph only to what takes one of several."""
    readers = [n for n in node.users if n.target is operator.getitem and n.meta.get("stack_trace")]
    return readers[-1] if readers else node


def result_of(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What torch gives for JAX values of these types, as fake tensors: the partitioner keeps it for one graph alone.

    Raises:
        Refused: it takes a number that is known only at run time.
    """
    if any(isinstance(leaf, TracedScalar) for leaf in pytree.tree_leaves((list(args), kwargs))):
        raise Refused("a number that is known only at run time")
    with FakeTensorMode(), torch.no_grad():
        arguments, options = pytree.tree_map_only(jax.Array, _fake, (list(args), kwargs))
        return op(*arguments, **options)


def _fake(x: jax.Array) -> torch.Tensor:
    return torch.empty(x.shape, dtype=dtypes.to_torch(x.dtype))
