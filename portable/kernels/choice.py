"""The decisions of one compilation: for each op that has kernels, which implementation runs, asked once a signature.

This is where the ledger is read; the choosing itself is `select`, which is pure.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch.utils import _pytree as pytree

from portable import config, dtypes, ops
from portable.errors import ConfigError
from portable.kernels import registry
from portable.kernels.registry import Kernel
from portable.kernels.select import Decision, Evidence, Policy, select, signature_of
from portable.lowering.context import Spec

if TYPE_CHECKING:
    from portable.explain import GraphRecord

Lookup = Callable[[str, str], Evidence | None]


class Choice:
    """Chooses kernels for one compilation on one backend, and keeps what it decided.

    Attributes:
        ops: names of the ops that have a kernel here, or for which one is named; no other op is even asked about.
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
        path: str = "stablehlo",
    ) -> None:
        self.backend, self.path = backend, path
        self.policy = policy or config.get("PORTABLE_KERNELS")
        self.ops = registry.ops_with_kernels(backend) | _named(self.policy)
        check_provider(self.policy.default)
        self.decisions: dict[tuple[str, str], Decision] = {}
        self.calls: Counter[tuple[str, str]] = Counter()
        self.arguments: dict[tuple[str, str], tuple[list[Any], dict[str, Any]]] = {}
        self._lookup, self._quarantined = lookup, quarantined

    @classmethod
    def here(cls, backend: str, path: str, policy: Policy | None = None) -> Choice:
        """With what the ledger says about this machine.

        Args:
            backend: what decisions are stored under, `Backend.label`.
            path: "stablehlo" or "native".
        """
        from portable.kernels.evidence import Evidences

        choice = cls(backend, policy, path=path)
        if choice.ops and not _off(choice.policy):
            evidences = Evidences(backend)
            choice._lookup, choice._quarantined = evidences.lookup, evidences.quarantined
        return choice

    def kernel(
        self,
        op: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        barred: str = "",
        only: Callable[[Kernel], bool] | None = None,
    ) -> Kernel | None:
        """The kernel that runs for this call of ``op``, or None for the portable path.

        Args:
            args, kwargs: JAX values, or torch tensors, which may be fake.
            barred: why none can run in this place.
            only: which can be put in here; where another runs, or none, the call is not counted: another place asks
                again.
        """
        specs = [_spec(a) for a in args]
        named = {name: _spec(value) for name, value in kwargs.items()}
        signature = signature_of(specs, named)
        key = (op, f"{signature} ({barred})" if barred else signature)
        kernels = registry.kernels_for(op, self.backend)
        decision = self.decisions.get(key)
        if decision is None:
            evidence = self._lookup(op, signature)
            decision = select(
                op, specs, named, kernels, evidence, self.policy, quarantined=self._quarantined, path=self.path,
                barred=barred,
            )  # fmt: skip
        chosen = next((k for k in kernels if k.provider == decision.provider), None)
        if only is not None and (chosen is None or not only(chosen)):
            return None
        self.calls[key] += 1
        if key not in self.decisions:
            self.decisions[key] = decision
            if not barred and not _symbolic(specs, named):
                self.arguments[key] = (specs, named)
        return chosen

    def note(self, graph: GraphRecord) -> None:
        """Enter what was decided into the record that `explain` reads; warn once a model of each kernel that was named
        and does not run."""
        for key, decision in self.decisions.items():
            _, before = graph.decisions.get(key, (decision, 0))
            graph.decisions[key] = (decision, before + self.calls[key])
        graph.arguments_of.update(self.arguments)
        for (op, _), decision in self.decisions.items():
            name = f"{op}/{self.policy.named(op)}"
            why = dict(decision.rejected).get(name, "")
            if why and name not in graph.told:
                graph.told.add(name)
                warnings.warn(
                    f"kernel {name} is named and does not run in a call, the portable path does: {why} "
                    f"(PORTABLE_KERNELS={op}=off or auto runs it without this warning; pt.explain lists it)",
                    stacklevel=2,
                )


def whole_ops(backend: str, path: str, policy: Policy | None = None) -> frozenset[str]:
    """The ops that a capture has to keep whole, so that a kernel finds them: PORTABLE_KERNELS names a kernel for them,
    or the ledger has decided for one. Every other op is captured as if there were no kernels.

    Args:
        backend, path: as in `Choice.here`.

    Raises:
        ConfigError: PORTABLE_KERNELS names a portable op that does not exist.
    """
    from portable.kernels.evidence import Evidences

    policy = policy or config.get("PORTABLE_KERNELS")
    if _off(policy):
        return frozenset()
    named = _named(policy)
    if unknown := [op for op in named if "." not in op and op not in ops.names()]:
        raise ConfigError(
            f"PORTABLE_KERNELS: there is no portable op {unknown[0]!r}",
            remedy=f"one of {', '.join(ops.names())}, or an overload, e.g. aten.cumsum.default",
        )
    relevant = lambda op: path == "native" or "." not in op  # noqa: E731 - StableHLO is made of the overloads themselves
    kernels = [
        k
        for op in registry.ops_with_kernels(backend)
        if relevant(op) and policy.named(op) != "off"
        for k in registry.kernels_for(op, backend)
        if not k.not_on(path)
    ]
    whole = {k.op for k in kernels if policy.named(k.op) == k.provider} | {op for op in named if relevant(op)}
    if undecided := {k.op for k in kernels} - whole:
        whole |= undecided & Evidences(backend).with_kernels()
    return frozenset(whole)


def check_provider(provider: str) -> None:
    """Refuse a provider, named for every op, that no kernel has: it would do nothing, silently.

    Raises:
        ConfigError: lists those that there are.
    """
    registry.load()
    known = {k.provider for k in list(registry.KERNELS.values())}
    if provider not in ("auto", "off", *known):
        raise ConfigError(
            f"PORTABLE_KERNELS: no kernel has the provider {provider!r}",
            remedy=f"auto, off, op=provider, or one of {', '.join(sorted(known)) or 'none'}",
        )


def _off(policy: Policy) -> bool:
    return policy.default == "off" and all(provider == "off" for provider in policy.by_op.values())


def _named(policy: Policy) -> frozenset[str]:
    return frozenset(op for op, provider in policy.by_op.items() if provider not in ("auto", "off"))


def _spec(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return Spec(value.shape, dtypes.to_torch(value.dtype))
    if isinstance(value, torch.Tensor):
        return Spec(tuple(value.shape), value.dtype)
    if isinstance(value, (list, tuple)):
        return [_spec(v) for v in value]
    return value


def _symbolic(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    leaves = [n for x in pytree.tree_leaves((args, kwargs)) for n in (x.shape if isinstance(x, Spec) else (x,))]
    return any(isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) for n in leaves)
