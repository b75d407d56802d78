"""The decisions of one compilation: for each op that has kernels, which implementation runs, asked once a signature.

This is where the ledger is read; the choosing itself is `select`, which is pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from portable import config, dtypes
from portable.kernels import registry
from portable.kernels.registry import Kernel
from portable.kernels.select import Decision, Evidence, Policy, select, signature_of
from portable.lowering.context import Spec

Lookup = Callable[[str, str], Evidence | None]


class Choice:
    """Chooses kernels for one compilation on one backend, and keeps what it decided.

    Attributes:
        ops: names of the ops that have a kernel here; every other op is not even asked about.
        decisions: {(op, signature): Decision}, in the order of first use.
        arguments: {(op, signature): (args, kwargs)}, tensors as Specs: what the gate measures.
        calls: how often each was asked for.
    """

    def __init__(
        self,
        backend: str,
        policy: Policy | None = None,
        lookup: Lookup = lambda op, signature: None,
        quarantined: Callable[[str], str] = lambda name: "",
    ) -> None:
        self.backend = backend
        self.policy = policy or config.get("PORTABLE_KERNELS")
        self.ops = registry.ops_with_kernels(backend)
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.arguments: dict[tuple[str, str], tuple[list[Any], dict[str, Any]]] = {}
        self._lookup, self._quarantined = lookup, quarantined

    def kernel(self, op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Kernel | None:
        """The kernel that runs for this call of ``op``, or None for the portable path."""
        specs = [_spec(a) for a in args]
        named = {name: _spec(value) for name, value in kwargs.items()}
        signature = signature_of(specs, named)
        kernels = registry.kernels_for(op, self.backend)
        self.calls[op, signature] += 1
        decision = self.decisions.get((op, signature))
        if decision is None:
            evidence = self._lookup(op, signature)
            decision = select(op, specs, named, kernels, evidence, self.policy, quarantined=self._quarantined)
            self.decisions[op, signature] = decision
            self.arguments[op, signature] = (specs, named)
        return next((k for k in kernels if k.provider == decision.provider), None)


def _spec(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return Spec(value.shape, dtypes.to_torch(value.dtype))
    if isinstance(value, (list, tuple)):
        return [_spec(v) for v in value]
    return value
