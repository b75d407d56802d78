"""Kernels in compiled programs: none without evidence, one with it, and back to portable when it goes stale."""

import logging
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest
import torch

import portable as pt
from portable.errors import ConfigError, KernelError
from portable.kernels import registry
from portable.kernels.fingerprint import Fingerprint, fingerprint
from portable.kernels.ledger import Ledger, Verdict
from portable.lowering import module

OP = "aten.sinh.default"
LABEL = "xla:cpu"
SIGNATURE = "float32[3,4]"
X = torch.randn(3, 4)


def model(x):
    return torch.sinh(x).cumsum(1) + 1


@pytest.fixture
def doubled(kernel):
    """A kernel that tells by its answer that it ran."""

    @kernel(OP, provider="doubled", backends=("xla",), abi="jax")
    def sinh(self):
        from jax import lax

        return 2 * lax.sinh(self)


@pytest.fixture
def texts(monkeypatch):
    """The StableHLO texts of the programs that are lowered."""
    found = []
    lower_graph = module.lower_graph

    def noting(*args, **options):
        lowered = lower_graph(*args, **options)
        found.append(lowered.text())
        return lowered

    monkeypatch.setattr(module, "lower_graph", noting)
    return found


def compiled(kernels=None, x=X):
    torch._dynamo.reset()
    function = pt.compile(model, backend="xla", kernels=kernels)
    with torch.no_grad():
        return function, function(x)


def sinh_of(function):
    (row,) = pt.explain(function, show=False).decisions[OP]
    return row


def portable(result, x=X):
    torch.testing.assert_close(result, model(x))
    return True


def with_kernel(result, x=X):
    torch.testing.assert_close(result, (2 * torch.sinh(x)).cumsum(1) + 1)
    return True


# No evidence, no cost.


def test_without_evidence_the_program_is_the_one_without_a_registry(texts, doubled, monkeypatch):
    function, result = compiled()
    assert portable(result)
    assert (sinh_of(function).runs_as, sinh_of(function).why) == ("portable", "unmeasured on this machine")
    compiled("off")
    with monkeypatch.context() as patch:
        patch.setattr(registry, "KERNELS", {})
        bare, result = compiled()
    assert portable(result)
    assert len(texts) == 3 and len(set(texts)) == 1
    assert sinh_of(bare).why == "unmeasured on this machine"


def test_without_evidence_the_ledger_is_not_even_made(doubled):
    compiled()
    assert not Ledger().path.exists()


def test_selection_happens_at_compile_time_only(doubled, monkeypatch):
    from portable.kernels import choice

    asked = []
    select = choice.select

    def noting(op, *args, **options):
        asked.append(op)
        return select(op, *args, **options)

    monkeypatch.setattr(choice, "select", noting)
    function, _ = compiled()
    assert asked.count(OP) == 1
    before = len(asked)
    with torch.no_grad():
        for _ in range(3):
            function(X)
    assert len(asked) == before


# Evidence.


def test_a_decision_activates_the_kernel_at_the_next_compilation_and_explain_shows_why(doubled, decide):
    early, result = compiled()
    decide(OP, SIGNATURE, LABEL, "doubled")
    with torch.no_grad():
        assert portable(early(X)), "a program that exists does not change"
    function, result = compiled()
    assert with_kernel(result)
    row = sinh_of(function)
    (decision,) = Ledger().decisions(OP)
    assert row.runs_as == "kernel doubled"
    assert "1.02× [1.00, 1.05]" in row.why
    assert row.verdict and decision.verdict_id.startswith(row.verdict)
    shown = str(pt.explain(function, show=False))
    assert "kernel doubled" in shown and "1.02×" in shown and row.verdict in shown
    assert pt.explain(function, show=False).to_dict()["decisions"][OP][0]["verdict"] == row.verdict


def test_a_decision_is_for_its_signature_alone(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    wider = torch.randn(3, 5)
    function, result = compiled(x=wider)
    assert portable(result, wider)
    assert sinh_of(function).why == "unmeasured on this machine"


def test_off_and_a_named_provider_come_before_the_ledger(doubled, decide, monkeypatch):
    decide(OP, SIGNATURE, LABEL, "doubled")
    assert portable(compiled("off")[1])
    monkeypatch.setenv("PORTABLE_KERNELS", f"{OP}=off")
    assert portable(compiled()[1])
    assert with_kernel(compiled("auto")[1]), "what is said in Python comes before the environment"
    monkeypatch.setenv("PORTABLE_KERNELS", "doubled")
    assert with_kernel(compiled(x=X[:2])[1], X[:2])


def test_a_provider_that_the_op_does_not_have_is_refused(doubled):
    with pytest.raises(ConfigError, match=f"{OP} has no kernel by 'nonsense'"):
        compiled(f"{OP}=nonsense")


@pytest.mark.parametrize("backend", ["xla", "cpu"])
def test_a_provider_that_no_kernel_has_is_refused_before_the_first_call(doubled, backend):
    with pytest.raises(ConfigError, match="(?s)'nonsense'.*doubled"):
        pt.compile(model, backend=backend, kernels="nonsense")


def test_a_provider_of_the_environment_that_no_kernel_has_is_refused_at_the_first_call(doubled, monkeypatch):
    monkeypatch.setenv("PORTABLE_KERNELS", "nonsense")
    with pytest.raises(ConfigError, match="(?s)'nonsense'.*doubled"):
        compiled()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            lambda x: x / (1 // 0),
            r"failed for \(float32\[3, 4\]\): ZeroDivisionError.* \(test_compile.py:\d+, in <lambda>\)",
        ),
        (lambda x: x.astype("float16"), r"gave float16\[3, 4\], torch gives float32\[3, 4\]"),
        (lambda x: x[:2], r"gave float32\[2, 4\], torch gives float32\[3, 4\]"),
        (lambda x: None, "gave None, torch gives"),
    ],
)
def test_a_kernel_that_is_wrong_is_named_and_not_the_lowering(kernel, result, message):
    @kernel(OP, provider="bad", backends=("xla",), abi="jax")
    def sinh(self):
        return result(self)

    with pytest.raises(KernelError, match=rf"kernel {OP}/bad at test_compile.py:\d+.* {message}") as raised:
        compiled(f"{OP}=bad")
    assert raised.value.remedy == f"mend the kernel, or run without it: PORTABLE_KERNELS={OP}=off"


def test_a_rollback_goes_back_to_portable(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    Ledger().rollback(OP)
    assert portable(compiled()[1])


# Evidence that does not count.


def test_a_stale_fingerprint_goes_back_to_portable_and_explain_names_what_changed(doubled):
    old = Fingerprint.of({**fingerprint(LABEL).parts, "torch": "2.0.0"})
    verdict = Verdict.new(
        op=OP, signature=SIGNATURE, backend=LABEL, provider="doubled", outcome="met", metric="ratio", limit=1.25,
        fingerprint=old, kernel_digest=registry.KERNELS[OP, "doubled"].digest,
    )  # fmt: skip
    Ledger().add(verdict)
    Ledger().decide(OP, SIGNATURE, LABEL, "doubled", verdict.id, "1.02×")
    function, result = compiled()
    assert portable(result)
    assert sinh_of(function).runs_as == "portable"
    assert f"stale: torch 2.0.0 → {torch.__version__}" in sinh_of(function).why


def test_a_changed_kernel_goes_back_to_portable_and_explain_says_so(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    registry.KERNELS[OP, "doubled"] = replace(registry.KERNELS[OP, "doubled"], digest="f" * 64)
    function, result = compiled()
    assert portable(result)
    assert "stale: kernel doubled source" in sinh_of(function).why
    assert "→ ffffffff" in sinh_of(function).why


def test_a_kernel_that_is_gone_goes_back_to_portable(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    del registry.KERNELS[OP, "doubled"]
    assert portable(compiled()[1])


def test_a_kernel_in_quarantine_goes_back_to_portable_even_where_it_is_named(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    Ledger().quarantine(OP, "doubled", "crashed: signal 11")
    for kernels in (None, f"{OP}=doubled"):
        function, result = compiled(kernels)
        assert portable(result)
        assert "crashed: signal 11" in sinh_of(function).why


# A ledger that cannot be used.


def test_a_corrupt_ledger_stops_no_compilation(doubled, decide, caplog):
    decide(OP, SIGNATURE, LABEL, "doubled")
    Ledger().path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    with caplog.at_level(logging.WARNING, "portable"):
        function, result = compiled()
    assert portable(result)
    assert sinh_of(function).runs_as == "portable"
    assert "is damaged" in caplog.text


def test_a_ledger_of_a_newer_version_stops_no_compilation(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    with closing(sqlite3.connect(Ledger().path)) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.warns(UserWarning, match="kernels are not used: .*version 99"):
        assert portable(compiled()[1])


def test_a_locked_ledger_stops_no_compilation_and_holds_it_up_for_seconds_only(doubled, decide):
    decide(OP, SIGNATURE, LABEL, "doubled")
    with closing(sqlite3.connect(Ledger().path, isolation_level=None)) as db:
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")
        db.execute("DELETE FROM quarantines")
        began = time.monotonic()
        with pytest.warns(UserWarning, match="kernels are not used: .*locked"):
            assert portable(compiled()[1])
        assert time.monotonic() - began < 20


def test_a_ledger_path_that_is_a_folder_stops_no_compilation(doubled, monkeypatch, tmp_path):
    monkeypatch.setenv("PORTABLE_LEDGER", str(tmp_path))
    with pytest.warns(UserWarning, match="kernels are not used"):
        assert portable(compiled()[1])
