"""The choice of a kernel: a pure function of what is registered, what the ledger holds and what the user says."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portable.errors import ConfigError
from portable.kernels.registry import Kernel
from portable.kernels.select import Decision, Evidence, Policy, select, signature_of
from portable.lowering.context import Spec

OP = "aten.cumsum.default"
ARGS = [Spec((2, 3), torch.float32), 1]
AUTO, OFF = Policy(), Policy("off")


def kernel(provider="mine", **fields):
    made = Kernel(OP, provider, ("xla",), None, None, "jax", False, lambda self, dim, dtype=None: self, "d1")
    return replace(made, **fields)


def evidence(provider="mine", stale=""):
    return Evidence(provider, "1.02× eager", "verdict1", stale)


def chosen(*kernels, evidence=None, policy=AUTO, **options):
    return select(OP, ARGS, {}, kernels, evidence, policy, **options)


def test_without_evidence_the_portable_path_runs_unmeasured():
    assert chosen(kernel()) == Decision("portable", "unmeasured on this machine")


def test_without_kernels_the_portable_path_runs():
    assert chosen(evidence=evidence("portable")) == Decision("portable", "1.02× eager", "verdict1")


def test_the_ledger_s_decision_runs_with_its_figures_and_its_verdict():
    assert chosen(kernel(), kernel("other"), evidence=evidence()) == Decision("mine", "1.02× eager", "verdict1")


def test_a_decision_for_the_portable_path_keeps_it_and_says_why():
    assert chosen(kernel(), evidence=evidence("portable")) == Decision("portable", "1.02× eager", "verdict1")


def test_stale_evidence_goes_back_to_the_portable_path_and_says_what_changed():
    decision = chosen(kernel(), evidence=evidence(stale="torch 2.12 → 2.13"))
    assert (decision.provider, decision.verdict) == ("portable", "verdict1")
    assert "stale: torch 2.12 → 2.13" in decision.why


def test_a_kernel_in_quarantine_does_not_run_whatever_the_evidence():
    quarantined = {f"{OP}/mine": "in quarantine: crashed"}
    for policy in (AUTO, Policy("mine"), Policy(by_op={OP: "mine"})):
        decision = chosen(kernel(), evidence=evidence(), policy=policy, quarantined=lambda n: quarantined.get(n, ""))
        assert decision.provider == "portable"
        assert "in quarantine: crashed" in decision.why
        assert decision.rejected == ((f"{OP}/mine", "in quarantine: crashed"),)


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"accepts": lambda self, dim: False}, "refuses"),
        ({"accepts": lambda self, dim: 1 / 0}, "ZeroDivisionError"),
        ({"accepts": lambda self, dim: "yes"}, "not a bool"),
        ({"dtypes": (torch.float64,)}, "not for torch.float32"),
    ],
)
def test_a_kernel_that_does_not_take_the_arguments_does_not_run_and_is_named(fields, why):
    for policy in (AUTO, Policy("mine"), Policy(by_op={OP: "mine"})):
        decision = chosen(kernel(**fields), evidence=evidence(), policy=policy)
        assert decision.provider == "portable"
        assert why in decision.why
        assert why in dict(decision.rejected)[f"{OP}/mine"]


def test_a_decision_for_a_kernel_that_is_not_registered_here_keeps_the_portable_path():
    decision = chosen(kernel("other"), evidence=evidence())
    assert (decision.provider, decision.verdict) == ("portable", "verdict1")
    assert "mine is not registered" in decision.why


# What the user says comes first.


def test_off_turns_every_kernel_off():
    decision = chosen(kernel(), evidence=evidence(), policy=OFF)
    assert decision == Decision("portable", "kernels are off (PORTABLE_KERNELS)")


def test_a_provider_that_is_named_runs_without_evidence():
    for policy in (Policy("mine"), Policy(by_op={OP: "mine"}), Policy("off", {OP: "mine"})):
        assert chosen(kernel(), kernel("other"), policy=policy) == Decision("mine", "named by PORTABLE_KERNELS")


def test_of_the_kernels_that_do_not_run_the_one_that_was_named_comes_first():
    refusing = [kernel(provider, accepts=lambda self, dim: False) for provider in ("a", "b", "c")]
    for policy in (Policy("b"), Policy(by_op={OP: "b"})):
        assert [name for name, _ in chosen(*refusing, policy=policy).rejected] == [f"{OP}/{p}" for p in "bac"]


def test_what_is_named_for_the_op_comes_before_what_is_named_for_all():
    both = (kernel(), kernel("other"))
    assert chosen(*both, policy=Policy("mine", {OP: "other"})).provider == "other"
    assert chosen(*both, policy=Policy("mine", {OP: "off"})).provider == "portable"
    assert chosen(*both, evidence=evidence(), policy=Policy("other", {OP: "auto"})).provider == "mine"


def test_a_provider_named_for_all_leaves_an_op_that_it_does_not_have_to_the_evidence():
    assert chosen(kernel(), evidence=evidence(), policy=Policy("other")).provider == "mine"
    assert chosen(kernel(), policy=Policy("other")).why == "unmeasured on this machine"


def test_a_provider_named_for_an_op_that_lacks_it_is_refused_with_those_it_has():
    with pytest.raises(ConfigError, match=f"(?s){OP} has no kernel by 'nonsense'.*mine, other"):
        chosen(kernel(), kernel("other"), policy=Policy(by_op={OP: "nonsense"}))


@pytest.mark.parametrize(
    "text, policy",
    [
        ("", Policy()),
        ("auto", Policy()),
        ("off", Policy("off")),
        ("aten", Policy("aten")),
        ("rms_norm=mine", Policy("auto", {"rms_norm": "mine"})),
        (" off , aten.cumsum.default = aten ,", Policy("off", {OP: "aten"})),
    ],
)
def test_a_policy_is_read_from_text(text, policy):
    assert Policy.parse(text) == policy


@pytest.mark.parametrize("text", ["a,b", "=mine", "op=", "op=a=b,x,y", "off,auto"])
def test_text_that_is_no_policy_is_refused(text):
    with pytest.raises(ValueError):
        Policy.parse(text)


# In all cases.

PROVIDERS = ("a", "b", "c")
PREDICATES = (None, lambda self, dim: True, lambda self, dim: False, lambda self, dim: 1 / 0, lambda self, dim: dim)
names = st.sampled_from(PROVIDERS)
kernels = st.lists(
    st.builds(
        kernel, names, accepts=st.sampled_from(PREDICATES), dtypes=st.sampled_from([None, (torch.float64,)]),
        abi=st.sampled_from(["jax", "torch"]),
    ),
    unique_by=lambda k: k.provider,
)  # fmt: skip
policies = st.builds(
    Policy,
    st.sampled_from(["auto", "off", *PROVIDERS]),
    st.dictionaries(st.sampled_from([OP, "rms_norm"]), st.sampled_from(["auto", "off", *PROVIDERS])),
)
found = st.none() | st.builds(evidence, st.sampled_from(["portable", *PROVIDERS]), st.sampled_from(["", "torch 1 → 2"]))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine says nothing about the property
@given(kernels, found, policies, st.sets(names), st.sampled_from(["stablehlo", "native"]))
def test_what_runs_is_always_registered_able_and_asked_for(kernels, evidence, policy, bad, path):
    quarantined = lambda name: "bad" if name.partition("/")[2] in bad else ""  # noqa: E731
    asked: tuple = (OP, ARGS, {}, kernels, evidence, policy)
    try:
        decision = select(*asked, quarantined=quarantined, path=path)
    except ConfigError:
        assert policy.by_op[OP] not in [k.provider for k in kernels]
        return
    assert decision == select(*asked, quarantined=quarantined, path=path)
    assert decision.why
    if decision.provider == "portable":
        return
    (kernel,) = [k for k in kernels if k.provider == decision.provider]
    assert not kernel.why_not(ARGS, {}) and not kernel.not_on(path) and kernel.provider not in bad
    assert kernel.name not in dict(decision.rejected)
    named = policy.named(OP)
    assert named == kernel.provider or (named != "off" and evidence.provider == kernel.provider and not evidence.stale)


# Signatures.


def test_a_signature_tells_shapes_dtypes_and_constants_apart():
    x = Spec((2, 3), torch.float32)
    assert signature_of([x, 1], {"dtype": None}) == "float32[2,3] 1 dtype=None"
    calls: list[list] = [
        [x, 1], [x, 2], [x, 1.0], [x, True], [x, None], [x, (1,)], [x, [1, 2]], [[x, x], 1], [x, x, 1],
        [Spec((3, 2), torch.float32), 1], [Spec((2, 3), torch.float64), 1], [Spec((), torch.float32), 1],
    ]  # fmt: skip
    others = [signature_of(c, {}) for c in calls] + [signature_of([x], {"dim": 1})]
    assert len(set(others)) == len(others)
    assert signature_of([x, [1, 2]], {}) == signature_of([x, (1, 2)], {})
    assert signature_of([x], {"a": 1, "b": 2}) == signature_of([x], {"b": 2, "a": 1})
