"""The gate: its order, and that each way to cheat or fail is caught, named and put into quarantine, and no more."""

import random
import re
from dataclasses import replace

import pytest
import torch

from portable.errors import LedgerError
from portable.kernels import registry
from portable.kernels.fingerprint import fingerprint
from portable.kernels.ledger import Ledger, Verdict
from portable.kernels.select import signature_of
from portable.lowering.context import Spec
from portable.slo import trial
from portable.slo.gate import Gate, Rejected
from portable.slo.objective import SLO
from portable.slo.trial import Trial, Unit
from tests.slo import cheats

OP = cheats.OP
LABEL = "xla:cpu"
RATIO = SLO("ratio", 1.25, "eager")


def unit(*shape: int) -> Unit:
    args = (Spec(shape, torch.float32),)
    return Unit(OP, args, {}, signature_of(args, {}))


UNIT = unit(*cheats.SHAPE)


def samples(**milliseconds: float) -> dict[str, list[float]]:
    """30 rounds a name, with a spread of 1 %."""
    return {name: [ms / 1e3 * (1 + (i % 5 - 2) / 200) for i in range(30)] for name, ms in milliseconds.items()}


MISSES = samples(portable=3.0, eager=1.0)
MEETS = samples(portable=1.1, eager=1.0)


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "ledger.sqlite", timeout_s=20)


@pytest.fixture
def candidates(monkeypatch):
    """Make these providers the op's only kernels."""

    def set_to(*providers: str) -> None:
        kernels = [registry.KERNELS[OP, p] for p in providers]
        monkeypatch.setattr(registry, "kernels_for", lambda op, backend: kernels if op == OP else [])

    return set_to


class Stub:
    """Trials by provider, without a process; notes which were asked for."""

    def __init__(self, **trials: Trial) -> None:
        self.trials = trials
        self.asked: list[str] = []

    def __call__(self, request, **limits):
        self.asked.append(request.provider)
        return self.trials[request.provider]


def measured(**milliseconds: float) -> Trial:
    return Trial("measured", "", 9, samples(portable=3.0, eager=1.0, **milliseconds))


def in_this_process(request, **limits):
    return trial.try_here(request)


# The order.


def test_it_counts_the_verdicts_that_it_wrote(ledger, candidates):
    candidates("right")
    gate = Gate("xla", LABEL, ledger, Stub(right=measured(candidate=1.1)))
    gate.decide(UNIT, RATIO, samples(portable=3.0))
    assert gate.written == 0
    gate.decide(UNIT, RATIO, MISSES)
    assert gate.written == len(ledger.verdicts()) == 2


def test_where_the_portable_path_meets_its_slo_no_candidate_is_tried(ledger, candidates):
    candidates("right", "also_right")
    stub = Stub()
    outcome = Gate("xla", LABEL, ledger, stub).decide(UNIT, RATIO, MEETS)
    assert (outcome.provider, outcome.met, stub.asked) == ("portable", True, [])
    assert outcome.not_tried == (f"{OP}/right", f"{OP}/also_right")
    (decision,) = ledger.decisions(OP)
    assert decision.provider == "portable"
    assert "meets" in decision.why


def test_without_its_baseline_nothing_is_decided_or_claimed(ledger, candidates):
    candidates("right")
    outcome = Gate("xla", LABEL, ledger, Stub()).decide(UNIT, RATIO, samples(portable=3.0))
    assert (outcome.provider, outcome.met) == ("portable", False)
    assert "not measured" in outcome.reason
    assert ledger.verdicts() == [] and ledger.decisions() == []


def test_where_it_misses_a_correct_kernel_that_meets_it_is_activated_with_its_evidence(ledger, candidates):
    candidates("right")
    outcome = Gate("xla", LABEL, ledger, Stub(right=measured(candidate=1.1))).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met) == ("right", True)
    (decision,) = ledger.decisions(OP, signature=UNIT.signature, backend=LABEL)
    assert decision.provider == "right"
    verdict = decision.verdict
    assert verdict.outcome == "met" and verdict.evidence == "measured"
    assert verdict.fingerprint == fingerprint(LABEL).text
    assert verdict.kernel_digest == registry.KERNELS[OP, "right"].digest
    assert verdict.low_s <= verdict.median_s <= verdict.high_s
    assert "× eager" in decision.why and "× the portable path" in decision.why and "9 cases" in decision.why


def test_a_kernel_that_is_correct_but_too_slow_leaves_the_row_unmet(ledger, candidates):
    candidates("right")
    outcome = Gate("xla", LABEL, ledger, Stub(right=measured(candidate=2.0))).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met) == ("portable", False)
    assert [(r.provider, r.outcome) for r in outcome.rejected] == [("right", "unmet")]
    assert "too slow" in outcome.reason
    assert ledger.quarantines() == []
    assert {(v.provider, v.outcome) for v in ledger.verdicts(OP)} == {("portable", "unmet"), ("right", "unmet")}
    assert [d.provider for d in ledger.decisions(OP)] == ["portable"]


def test_a_kernel_that_is_faster_only_within_the_noise_is_not_activated(ledger, candidates):
    candidates("right")
    portable = [1.0 + 0.4 * (i % 2) for i in range(30)]
    candidate = [1.0 + 0.4 * ((i + 1) % 2) - 0.01 for i in range(30)]
    told = Trial("measured", "", 9, {"portable": portable, "candidate": candidate, "eager": [2.0] * 30})
    outcome = Gate("xla", LABEL, ledger, Stub(right=told)).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met) == ("portable", False)
    assert [r.outcome for r in outcome.rejected] == ["slower"]
    assert "beyond the noise" in outcome.reason


@pytest.mark.parametrize("order", [("right", "also_right"), ("also_right", "right")])
def test_of_two_winners_the_faster_one_is_activated_whatever_their_order(ledger, candidates, order):
    candidates(*order)
    stub = Stub(right=measured(candidate=1.1), also_right=measured(candidate=0.6))
    outcome = Gate("xla", LABEL, ledger, stub).decide(UNIT, RATIO, MISSES)
    assert outcome.provider == "also_right"
    assert [d.provider for d in ledger.decisions(OP)] == ["also_right"]


def test_of_two_candidates_the_fastest_correct_one_is_activated(ledger, candidates):
    candidates("does_nothing", "right")
    stub = Stub(right=measured(candidate=1.1), does_nothing=Trial("wrong", "result 0 is off", 0))
    outcome = Gate("xla", LABEL, ledger, stub).decide(UNIT, RATIO, MISSES)
    assert outcome.provider == "right"
    assert outcome.rejected == (Rejected("does_nothing", "wrong", "result 0 is off"),)
    assert [q.provider for q in ledger.quarantines()] == ["does_nothing"]


# What was decided stands until it is contradicted beyond the noise.


def wide(portable: float, spread: float = 0.2, **others: float) -> dict[str, list[float]]:
    """Rounds whose portable path varies by ``spread`` around its median."""
    return samples(**others) | {"portable": [portable * (1 + spread * (i % 5 - 2) / 2) / 1e3 for i in range(30)]}


def test_a_portable_path_that_met_its_slo_keeps_it_within_the_noise_and_loses_it_beyond(ledger, candidates):
    candidates("right")
    gate = Gate("xla", LABEL, ledger, Stub(right=measured(candidate=1.0)))
    assert gate.decide(UNIT, RATIO, MEETS).provider == "portable"
    close = gate.decide(UNIT, RATIO, wide(1.25, eager=1.0))
    assert (close.provider, close.met) == ("portable", True)
    assert "stands as decided" in close.reason and "not beyond the noise" in close.reason
    assert gate.decide(UNIT, RATIO, MISSES).provider == "right"


def test_a_kernel_that_was_activated_keeps_its_place_within_the_noise_and_loses_it_beyond(ledger, candidates):
    candidates("right")
    run = lambda ms: Gate("xla", LABEL, ledger, Stub(right=ms)).decide(UNIT, RATIO, MISSES)  # noqa: E731
    close = replace(measured(), samples_s=wide(1.25, eager=1.0) | samples(portable=3.0))
    close.samples_s["candidate"] = wide(1.25)["portable"]
    assert run(close).provider == "portable"  # it was never activated
    assert run(measured(candidate=1.1)).provider == "right"
    kept = run(close)
    assert (kept.provider, kept.met) == ("right", True)
    assert "stands as decided" in kept.reason
    (decision,) = ledger.decisions(OP)
    assert (decision.provider, decision.verdict.outcome) == ("right", "met")
    assert run(measured(candidate=1.5)).provider == "portable"


def test_a_decision_by_another_slo_does_not_stand(ledger, candidates):
    candidates("right")
    gate = Gate("xla", LABEL, ledger, Stub(right=measured(candidate=1.0)))
    assert gate.decide(UNIT, SLO("ratio", 1.5, "eager"), MEETS).provider == "portable"
    assert gate.decide(UNIT, RATIO, wide(1.25, eager=1.0)).provider == "right"


def test_a_kernel_gives_way_to_another_that_is_faster_beyond_the_noise(ledger, candidates):
    candidates("right", "also_right")
    run = lambda **ms: Gate("xla", LABEL, ledger, Stub(**ms)).decide(UNIT, RATIO, MISSES).provider  # noqa: E731
    assert run(right=measured(candidate=1.1), also_right=measured(candidate=1.2)) == "right"
    assert run(right=measured(candidate=1.1), also_right=measured(candidate=1.098)) == "right"
    assert run(right=measured(candidate=1.1), also_right=measured(candidate=0.9)) == "also_right"


def test_a_kernel_gives_way_to_the_portable_path_where_that_meets_its_slo_by_more_than_runs_differ(ledger, candidates):
    candidates("right", "also_right")
    stub = Stub(right=measured(candidate=0.9), also_right=measured(candidate=0.5))
    gate = Gate("xla", LABEL, ledger, Stub(right=stub.trials["right"], also_right=measured(candidate=1.2)))
    assert gate.decide(UNIT, RATIO, MISSES).provider == "right"
    gate = Gate("xla", LABEL, ledger, stub)
    assert gate.decide(UNIT, RATIO, samples(portable=1.2, eager=1.0)).provider == "right"
    assert stub.asked == ["right"]  # no other is needed
    assert gate.decide(UNIT, RATIO, samples(portable=1.0, eager=1.0)).provider == "portable"


def test_noise_alone_flips_no_decision_back(ledger, candidates):
    candidates("right")
    generator = random.Random(0)

    def noisy(ms: float) -> list[float]:
        drift = generator.gauss(1.0, 0.03)  # of the whole run, beside that of each round
        return [ms / 1e3 * drift * generator.gauss(1.0, 0.05) for _ in range(30)]

    decided = []
    for _ in range(20):
        eager = noisy(1.0)
        told = Trial("measured", "", 9, {"portable": noisy(3.0), "candidate": noisy(1.2), "eager": eager})
        gate = Gate("xla", LABEL, ledger, Stub(right=told))
        decided.append(gate.decide(UNIT, RATIO, {"portable": noisy(1.27), "eager": eager}).provider)
    changes = sum(a != b for a, b in zip(decided, decided[1:], strict=False))
    assert changes <= 1, decided


def test_a_kernel_in_quarantine_is_not_tried_again(ledger, candidates):
    candidates("right")
    ledger.quarantine(OP, "right", "crashed: signal 11")
    stub = Stub()
    outcome = Gate("xla", LABEL, ledger, stub).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met, stub.asked) == ("portable", False, [])
    assert "in quarantine: crashed: signal 11" in outcome.rejected[0].reason


def test_a_kernel_that_another_process_quarantines_meanwhile_is_not_activated(ledger, candidates):
    candidates("right")

    def unlucky(request, **limits):
        ledger.quarantine(OP, "right", "wrong: elsewhere")
        return measured(candidate=1.0)

    outcome = Gate("xla", LABEL, ledger, unlucky).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met) == ("portable", False)
    assert "quarantine" in outcome.reason


def test_what_this_machine_cannot_try_is_neither_blamed_nor_activated(ledger, candidates):
    candidates("right")
    cannot = Trial("impossible", "BackendUnavailableError: no C++ compiler")
    outcome = Gate("xla", LABEL, ledger, Stub(right=cannot)).decide(UNIT, RATIO, MISSES)
    assert (outcome.provider, outcome.met) == ("portable", False)
    assert outcome.rejected == (Rejected("right", "not tried", cannot.reason),)
    assert ledger.quarantines() == []
    assert ledger.verdicts(OP, provider="right") == []


def test_a_ledger_that_cannot_be_written_is_an_error_that_names_it(tmp_path, candidates):
    candidates("right")
    (tmp_path / "file").write_text("")
    gate = Gate("xla", LABEL, Ledger(tmp_path / "file" / "ledger.sqlite"), Stub(right=measured(candidate=1.0)))
    with pytest.raises(LedgerError, match="ledger.sqlite"):
        gate.decide(UNIT, RATIO, MISSES)


# The cheats.

LIES = {
    "wrong_values": "fresh values: .*off by",
    "wrong_for_nan": "NaN: .*NaN or infinities",
    "wrong_for_infinity": "infinity: .*NaN or infinities",
    "wrong_on_another_batch": "batch of 1: .*off by",
    "wrong_on_nothing": "batch of 0: it raised .*gave float32",
    "wrong_on_odd_rows": "off by",
    "wrong_dtype": "fresh values: it raised .*float16",
    "wrong_shape": r"fresh values: it raised .*\[256\]",
    "does_nothing": "fresh values: .*off by",
    "raises": "fresh values: it raised .*ValueError",
    "only_its_own_shape": "batch of 0: it raised .*NotImplementedError",
    "changes_its_mind": "its predicate refuses these arguments",
    "caches_its_first_answer": "other values: .*off by",
    "caches_by_address": "other values in the same memory: .*off by",
    "stops_once_it_is_timed": "fresh values after the timing: .*off by",
    "writes_to_its_input": "it wrote to its arguments",
    "raises_at_run_time": "it raised .*no luck today",
}
FAILURES = {
    "segfaults": ("crashed", "SIGSEGV"),
    "ends_the_process": ("crashed", "status 3"),
    "hangs": ("hung", "no answer in"),
    "eats_memory": ("crashed", "MB of memory, more than"),
}


def caught(ledger, provider, run):
    """The one rejection of a cheat; everything else in the ledger is as before, and it is in quarantine."""
    other = Verdict.new(
        op="rms_norm", signature="float32[8,64]", backend=LABEL, provider="mine", outcome="met", metric="ratio",
        limit=1.25, fingerprint=fingerprint(LABEL), kernel_digest="d1",
    )  # fmt: skip
    ledger.add(other)
    ledger.decide(other.op, other.signature, LABEL, "mine", other.id, "because")
    timeout_s = 3.0 if provider == "hangs" else 100.0
    cheats._ASKED.clear()
    gate = Gate("xla", LABEL, ledger, run, timeout_s=timeout_s, memory_mb=cheats.MEMORY_MB)
    outcome = gate.decide(UNIT, RATIO, MISSES, others=[unit(4, 66)], budget_s=0.3)
    assert (outcome.provider, outcome.met) == ("portable", False)
    (rejected,) = outcome.rejected
    assert [(q.op, q.provider) for q in ledger.quarantines()] == [(OP, provider)]
    assert ledger.quarantined(OP, provider) == f"{rejected.outcome}: {rejected.reason}"
    (verdict,) = ledger.verdicts(OP, provider=provider)
    assert (verdict.outcome, verdict.reason) == (rejected.outcome, rejected.reason)
    assert {(d.op, d.provider) for d in ledger.decisions()} == {("rms_norm", "mine"), (OP, "portable")}
    return rejected


@pytest.mark.parametrize("provider", LIES)
def test_a_kernel_that_lies_is_caught_named_and_quarantined(ledger, candidates, provider):
    candidates(provider)
    rejected = caught(ledger, provider, in_this_process)
    assert rejected.outcome == "wrong"
    assert _matches(LIES[provider], rejected.reason), rejected.reason


@pytest.mark.slow
@pytest.mark.parametrize("provider", LIES)
def test_a_kernel_that_lies_is_caught_in_a_process_of_its_own(ledger, candidates, provider):
    candidates(provider)
    rejected = caught(ledger, provider, trial.run)
    assert rejected.outcome == "wrong"
    assert _matches(LIES[provider], rejected.reason), rejected.reason


@pytest.mark.parametrize(
    "provider", [pytest.param(p, marks=pytest.mark.slow if p == "ends_the_process" else ()) for p in FAILURES]
)
def test_a_kernel_that_takes_its_process_down_takes_nothing_else_down(ledger, candidates, provider):
    candidates(provider)
    rejected = caught(ledger, provider, trial.run)
    outcome, words = FAILURES[provider]
    assert rejected.outcome == outcome
    assert words in rejected.reason


def test_a_kernel_that_is_right_is_measured_in_its_own_process_beside_the_portable_path(ledger, candidates):
    candidates("right")
    request = trial.Request(UNIT, "right", "xla", (unit(4, 66), unit(0, 3)), module=cheats.__name__, budget_s=0.3)
    result = trial.run(request, timeout_s=60)
    assert (result.outcome, result.reason) == ("measured", "")
    assert result.cases > 20
    assert set(result.samples_s) == {"portable", "candidate", "eager"}
    assert len({len(s) for s in result.samples_s.values()}) == 1


def test_a_kernel_that_the_program_does_not_call_is_not_measured(monkeypatch):
    monkeypatch.setattr(trial, "compiled_call", lambda unit, backend, provider, copies=1: _portable(unit, copies))
    result = trial.try_here(trial.Request(UNIT, "right", "xla", budget_s=0.1))
    assert result.outcome == "impossible"
    assert "does not call the kernel" in result.reason


def _portable(unit, copies):
    import portable as pt

    return pt.compile(trial.repeated(unit, copies), backend="xla", dynamic=False, kernels="off")


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None
