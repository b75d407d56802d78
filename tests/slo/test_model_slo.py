"""`pt.compile(model, slo=…)`: which path runs, why, and that deciding leaves no trace."""

import json
import types

import pytest
import torch

import portable as pt
from portable.errors import ConfigError, RecompileError
from portable.slo import paths, trial

X = torch.randn(4, 8)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls.add_(1)
        return self.linear(x).relu()


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


@pytest.fixture
def timer(monkeypatch):
    """Stubs the timer: seconds a call by name; keeps what was timed in each run."""
    stub = types.SimpleNamespace(seconds={}, runs=[])

    def interleave(functions, *, budget_s, min_rounds):
        stub.runs.append(sorted(functions))
        for function in functions.values():
            function()
        return {n: [stub.seconds[n] * (1 + 0.001 * (i % 3)) for i in range(min_rounds)] for n in functions}

    monkeypatch.setattr(trial, "_timer", lambda: types.SimpleNamespace(interleave=interleave))
    return stub


def run(model, slo, x=X, **options):
    compiled = pt.compile(model, slo=slo, **options)
    with torch.no_grad():
        return compiled, compiled(x)


def decision(compiled):
    (only,) = pt.explain(compiled, show=False).objectives
    return only


def test_the_selected_path_stays_where_it_meets_the_objective_and_nothing_else_is_compiled(timer):
    timer.seconds = {"xla": 1e-3, "cpu": 1e-4}
    model = Model()
    compiled, got = run(model, pt.SLO("p50_ms", 5.0), backend="xla")
    torch.testing.assert_close(got, model.linear(X).relu())
    chosen = decision(compiled)
    assert (chosen.backend, chosen.met) == ("xla", True)
    assert chosen.rejected == (("cpu", "not needed"),)
    assert timer.runs == [["xla"]]


@pytest.mark.parametrize(("selected", "other"), [("xla", "cpu"), ("cpu", "xla:cpu"), ("cpu:eager", "cpu")])
def test_another_path_takes_over_where_only_it_meets_the_objective(timer, selected, other):
    timer.seconds = {"xla": 9e-3, "cpu": 9e-3, "cpu:eager": 9e-3, "xla:cpu": 9e-3, other: 1e-3}
    model = Model()
    compiled, got = run(model, pt.SLO("p50_ms", 5.0), backend=selected)
    torch.testing.assert_close(got, model.linear(X).relu())
    chosen = decision(compiled)
    assert (chosen.backend, chosen.met) == (other, True)
    assert chosen.rejected[0][0] == selected
    assert chosen.rejected[0][1].startswith("misses p50 ≤ 5 ms: 9")
    assert timer.runs[0] == [selected]
    assert {selected, other} <= set(timer.runs[1])
    assert pt.explain(compiled, show=False).backend == other


def test_where_no_path_meets_it_the_selected_one_stays_and_a_warning_says_unmet(timer):
    timer.seconds = {"xla": 9e-3, "cpu": 8e-3}
    with pytest.warns(
        UserWarning, match=r"Model: UNMET objective p50 ≤ 5 ms for float32\[4,8\].*: xla misses .*not cpu"
    ):
        compiled, _ = run(Model(), pt.SLO("p50_ms", 5.0), backend="xla")
    chosen = decision(compiled)
    assert (chosen.backend, chosen.met) == ("xla", False)
    assert {name: round(1e3 * t.median) for name, t in chosen.seconds.items()} == {"xla": 9, "cpu": 8}


def test_a_path_that_disagrees_with_eager_is_no_candidate(timer, monkeypatch):
    timer.seconds = {"xla": 9e-3, "cpu": 1e-3}
    original = paths.difference
    answers = []

    def second_is_wrong(result, eager, exact):
        answers.append(original(result, eager, exact))
        return "result 0 is off by 0.1 of its scale" if len(answers) == 2 else answers[-1]

    monkeypatch.setattr(paths, "difference", second_is_wrong)
    with pytest.warns(UserWarning, match="UNMET"):
        compiled, _ = run(Model(), pt.SLO("p50_ms", 5.0), backend="xla")
    assert answers == ["", ""]
    assert decision(compiled).backend == "xla"
    assert decision(compiled).rejected == (("cpu", "disagrees with eager: result 0 is off by 0.1 of its scale"),)


def test_a_selected_path_that_disagrees_with_eager_does_not_meet_anything(timer, monkeypatch):
    timer.seconds = {"xla": 1e-3, "cpu": 1e-3}
    problems = iter(["is off", ""])
    monkeypatch.setattr(paths, "difference", lambda *a: next(problems))
    compiled, _ = run(Model(), pt.SLO("p50_ms", 5.0), backend="xla")
    assert decision(compiled).backend == "cpu"
    assert decision(compiled).rejected == (("xla", "disagrees with eager: is off"),)


def test_a_path_that_cannot_compile_the_model_is_rejected_with_the_reason(timer, monkeypatch):
    monkeypatch.setenv("PORTABLE_FALLBACK", "error")
    timer.seconds = {"cpu": 9e-3}
    with pytest.warns(UserWarning, match="UNMET"):
        compiled, _ = run(lambda x: torch.ops.aten._logcumsumexp(x, 0), pt.SLO("p50_ms", 5.0), backend="cpu")
    ((name, why),) = decision(compiled).rejected
    assert name == "xla:cpu"
    assert "no exact lowering on xla" in why


@pytest.mark.parametrize("baseline", ["eager", "inductor", "best_native"])
def test_a_ratio_is_to_eager_or_to_inductor_which_is_a_path_itself(timer, baseline):
    timer.seconds = {"xla": 3e-3, "cpu": 2e-3, "eager": 2.5e-3}
    compiled, _ = run(Model(), pt.SLO("ratio", 1.1, baseline), backend="xla")
    chosen = decision(compiled)
    assert (chosen.backend, chosen.met) == ("cpu", True)
    native = "eager" if baseline == "eager" else "inductor"
    assert f"× {native}" in chosen.reason


def test_each_signature_is_decided_once(timer):
    timer.seconds = {"xla": 1e-3, "cpu": 1e-3}
    model = Model().eval()
    compiled = pt.compile(model, backend="xla", slo=pt.SLO("p50_ms", 5.0))
    with torch.no_grad():
        for x in (X, X, torch.randn(5, 8), X):
            compiled(x)
        assert len(timer.runs) == 2
        model.train()
        compiled(X)
    signatures = [o.signature for o in pt.explain(compiled, show=False).objectives]
    assert signatures == ["float32[4,8]", "float32[5,8]", "float32[4,8] training"]


def test_deciding_leaves_buffers_arguments_and_random_state_as_they_were(timer):
    timer.seconds = {"xla": 9e-3, "cpu": 1e-3}
    model = Model()

    class Written(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            x.add_(1)
            return self.inner(x)

    x = X.clone()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    compiled, got = run(Written(), pt.SLO("p50_ms", 5.0), x, backend="xla")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.calls.item() == 1
    torch.testing.assert_close(x, X + 1)
    torch.testing.assert_close(got, model.linear(X + 1).relu())


def test_calls_with_gradients_are_refused(timer):
    compiled = pt.compile(Model(), backend="xla", slo=pt.SLO("p50_ms", 5.0))
    with pytest.raises(ConfigError, match="is for inference, and gradients are enabled"):
        compiled(X)
    with torch.inference_mode():
        timer.seconds = {"xla": 1e-3}
        compiled(X)


@pytest.mark.parametrize("slo", ["p50", 5.0, pt.SLO("roofline", 0.5), pt.SLO("peak_mb", 10)])
def test_what_is_no_objective_of_a_model_is_refused_before_any_call(slo):
    with pytest.raises(ConfigError, match="slo"):
        pt.compile(Model(), slo=slo)


def test_explain_shows_the_decision_with_its_figures(timer):
    timer.seconds = {"xla": 9e-3, "cpu": 1e-3}
    compiled, _ = run(Model(), pt.SLO("p50_ms", 5.0), backend="xla")
    shown = pt.explain(compiled, show=False)
    lines = " ".join(str(shown).split())
    assert lines.startswith("Model on cpu (native)")
    assert "cpu meets p50 ≤ 5 ms: 1 ms [1, 1]; not xla: misses p50 ≤ 5 ms: 9.01 ms [9, 9.02]" in lines
    (row,) = json.loads(json.dumps(shown.to_dict()))["objectives"]
    assert (row["backend"], row["met"], row["slo"]) == ("cpu", True, "p50 ≤ 5 ms")
    assert row["seconds"]["cpu"]["median"] == pytest.approx(1e-3, rel=0.01)


def test_a_frozen_model_takes_no_new_decision(timer):
    timer.seconds = {"xla": 9e-3, "cpu": 1e-3}
    compiled, want = run(Model(), pt.SLO("p50_ms", 5.0), backend="xla")
    compiled.freeze()
    with torch.no_grad():
        torch.testing.assert_close(compiled(X), want)
        with pytest.raises(RecompileError, match=r"no path has been decided for float32\[6,8\]"):
            compiled(torch.randn(6, 8))


def test_a_model_in_half_precision_is_judged_by_its_dtype(timer):
    timer.seconds = {"xla": 1e-3}
    compiled, _ = run(Model().to(torch.bfloat16), pt.SLO("p50_ms", 5.0), X.bfloat16(), backend="xla")
    assert decision(compiled).met


def test_it_works_with_the_real_timer(monkeypatch):
    monkeypatch.setattr(paths, "BUDGET_S", 0.2)
    compiled, _ = run(Model(), pt.SLO("p50_ms", 60_000.0), backend="xla")
    assert decision(compiled).met
