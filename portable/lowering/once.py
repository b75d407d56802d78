"""One call of a function as one StableHLO program: captured, lowered, compiled and run at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch.utils import _pytree as pytree

from portable import backends, config
from portable.backends import pjrt
from portable.backends.xla import Xla
from portable.capture import trace
from portable.errors import ConfigError, UnsupportedOp, UnsupportedOpError, UnsupportedOutputError
from portable.lowering.context import Spec
from portable.lowering.draws import generator_at, generator_state
from portable.lowering.fallback import warn
from portable.lowering.program import DATA_DEPENDENT, lower_graph
from portable.lowering.specialise import Number, Specialisation

ATTEMPTS = 5  # the next is specialised on the floats that the program has computed, if they are rounded otherwise


def run(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], backend: str, fallback: str | None
) -> Any:
    """See `portable.testing.lowered`."""
    fallback = config.fallback_mode(fallback)
    leaves, tree = pytree.tree_flatten((args, kwargs))
    chosen = backends.get(backend)
    if not isinstance(chosen, Xla):
        raise ConfigError(f"backend {chosen} does not lower to StableHLO", remedy="name xla or tpu")
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for i in where:
        chosen.check_input(leaves[i], f"argument {i}")
    tensors = [leaves[i].resolve_conj().resolve_neg() for i in where]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(t, static_shapes=True) for t in tensors]
    structure: Any = None

    def flat(*inputs: torch.Tensor) -> list[Any]:
        nonlocal structure
        values = list(leaves)
        for i, value in zip(where, inputs, strict=True):
            values[i] = value
        call_args, call_kwargs = pytree.tree_unflatten(values, tree)
        outputs, structure = pytree.tree_flatten(fn(*call_args, **call_kwargs))
        return outputs

    client = pjrt.client(chosen.platform)
    specs = [Spec(tuple(t.shape), t.dtype) for t in tensors]
    start = generator_state()
    known: dict[int, Number] = {}
    for _ in range(ATTEMPTS):
        mutated: list[int] = []
        data = Specialisation(tensors, known, backend)
        gm = _traced(flat, fakes, mutated, data, backend)
        low = lower_graph(gm, specs, platform=client.platform, backend=backend, fallback=fallback)
        seed = torch.randint(0, 2**32, (2,), dtype=torch.int64) if low.random else torch.zeros(2, dtype=torch.int64)
        buffers = client.compile(low.module)([client.put(seed.to(torch.uint32)), *map(client.put, tensors)])
        results = client.take(buffers)
        values = low.values(results, tensors)
        computed = values[len(values) - len(data.reads) :]
        if data.agrees(computed):
            break
        known = data.rounded(computed)
        torch.default_generator.set_state(generator_at(start).get_state())
    else:
        raise data.disagreement(computed)
    values = low.assemble(results, tensors)[: len(values) - len(data.reads)]
    if fallback == "warn":
        warn(low.fallbacks, set())
    for i, value in zip(mutated, values[len(values) - len(mutated) :], strict=True):
        with torch.no_grad():
            leaves[where[i]].copy_(value)
    values = values[: len(values) - len(mutated)]
    for value in values:
        if not isinstance(value, (torch.Tensor, int, float, complex, bool, str, type(None))):
            raise UnsupportedOutputError(
                f"the function returns a {type(value).__name__}", remedy="return tensors, numbers, strings or None"
            )
    return pytree.tree_unflatten(values, structure)


def _traced(
    flat: Callable[..., list[Any]],
    fakes: Sequence[torch.Tensor],
    mutated: list[int],
    data: Specialisation,
    backend: str,
) -> torch.fx.GraphModule:
    try:
        return trace(flat, fakes, mutated=mutated, data=data)
    except DATA_DEPENDENT as failure:
        op = str(getattr(failure, "func", None) or "this program")
        reason = "its result's shape or a branch depends on the data"
        raise UnsupportedOpError([UnsupportedOp(op, reason)], backend=backend) from failure
    except UnsupportedOperatorException as failure:
        raise UnsupportedOpError([UnsupportedOp(str(failure), "torch cannot trace it")], backend=backend) from failure
