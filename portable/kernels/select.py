"""Which implementation of an op a program uses: one pure function. It measures nothing and reads nothing.

The order: what PORTABLE_KERNELS names; else the ledger's decision, if its evidence is of this very machine and kernel;
else the portable path. The answer says why, in words that `explain` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from portable.errors import ConfigError
from portable.kernels.registry import Kernel


@dataclass(frozen=True)
class Policy:
    """PORTABLE_KERNELS, parsed: ``default`` is "auto", "off" or a provider; ``by_op`` names a provider an op."""

    default: str = "auto"
    by_op: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """From ``auto``, ``off``, ``provider`` or ``op=provider,op=provider`` (also mixed, separated by commas).

        Raises:
            ValueError: an empty op or provider, or two defaults.
        """
        default, by_op = "", {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            op, equals, provider = (x.strip() for x in part.partition("="))
            if equals and not (op and provider):
                raise ValueError(f"{part!r} is not op=provider")
            if equals:
                by_op[op] = provider
            elif default:
                raise ValueError(f"two defaults: {default} and {op}")
            else:
                default = op
        return cls(default or "auto", by_op)

    def named(self, op: str) -> str:
        """What is in force for ``op``: "auto", "off" or a provider."""
        return self.by_op.get(op, self.default)


@dataclass(frozen=True)
class Decision:
    """What runs, and why.

    Attributes:
        provider: "portable" or a kernel's provider.
        why: for people.
        verdict: id of the verdict it rests on, '' if none.
        rejected: (kernel, why not) for each candidate that does not run, one that was named first.
    """

    provider: str
    why: str
    verdict: str = ""
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Evidence:
    """A decision of the ledger with what it rests on, ready for `select`.

    Attributes:
        provider: "portable" or a kernel's.
        why: the numbers, for people.
        verdict: id of the verdict.
        stale: why the evidence does not count here and now; '' if it does.
    """

    provider: str
    why: str
    verdict: str
    stale: str = ""


def select(
    op: str,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    kernels: Sequence[Kernel],
    evidence: Evidence | None,
    policy: Policy,
    *,
    quarantined: Callable[[str], str] = lambda name: "",
    path: str = "",
    barred: str = "",
) -> Decision:
    """Choose among ``kernels`` and the portable path for one call of ``op``.

    Args:
        args, kwargs: the op's arguments, tensors as objects with shape, dtype and ndim.
        kernels: those registered for this backend.
        evidence: the ledger's decision for this op and signature, if it has one.
        quarantined: why a kernel (op/provider) is in quarantine; '' if it is not.
        path: "stablehlo" or "native": kernels of another ABI are rejected.
        barred: why no kernel can run in this place; '' if one can.

    Raises:
        ConfigError: the policy names a provider that the op does not have here.
    """
    named = policy.named(op)
    able = {k.provider: k.not_on(path) or barred or quarantined(k.name) or k.why_not(args, kwargs) for k in kernels}
    named_first = sorted(kernels, key=lambda k: k.provider != named)
    rejected = tuple((k.name, able[k.provider]) for k in named_first if able[k.provider])
    if named == "off":
        return Decision("portable", "kernels are off (PORTABLE_KERNELS)", rejected=rejected)
    if named != "auto":
        if named in able and not able[named]:
            return Decision(named, "named by PORTABLE_KERNELS", rejected=rejected)
        if named in able:
            return Decision("portable", f"PORTABLE_KERNELS names {named}: {able[named]}", rejected=rejected)
        if op in policy.by_op:
            have = ", ".join(able) or "none"
            raise ConfigError(f"PORTABLE_KERNELS: {op} has no kernel by {named!r} here", remedy=f"it has: {have}")
    if evidence is None:
        return Decision("portable", "unmeasured on this machine", rejected=rejected)
    if evidence.stale:
        return Decision("portable", f"its evidence is stale: {evidence.stale}", evidence.verdict, rejected)
    if evidence.provider == "portable":
        return Decision("portable", evidence.why, evidence.verdict, rejected)
    if evidence.provider not in able:
        return Decision("portable", f"kernel {evidence.provider} is not registered here", evidence.verdict, rejected)
    if able[evidence.provider]:
        return Decision(
            "portable", f"kernel {evidence.provider}: {able[evidence.provider]}", evidence.verdict, rejected
        )
    return Decision(evidence.provider, evidence.why, evidence.verdict, rejected)


def signature_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The arguments of a call as canonical text: shapes and dtypes of tensors, values of constants."""
    texts = [_text(a) for a in args] + [f"{name}={_text(kwargs[name])}" for name in sorted(kwargs)]
    return " ".join(texts)


def _text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')}[{','.join(str(n) for n in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return f"({','.join(_text(v) for v in value)})"
    return str(value)
