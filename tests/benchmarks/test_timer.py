"""The timer, with functions whose time is known: a clock that only they move."""

import pytest

from benchmarks.timer import MIN_SAMPLE_S, interleave


class Machine:
    """A fake clock; `function(name, seconds)` moves it, and notes that it ran."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def clock(self):
        return self.now

    def sync(self):
        self.log.append("sync")

    def function(self, name, seconds):
        times = iter(seconds) if isinstance(seconds, list) else None

        def run():
            self.log.append(name)
            self.now += next(times, seconds[-1]) if times else seconds

        return run

    def interleave(self, functions, **options):
        made = {name: self.function(name, seconds) for name, seconds in functions.items()}
        return interleave(made, sync=self.sync, clock=self.clock, **options)


def test_it_gives_seconds_per_call_one_a_round():
    samples = Machine().interleave({"a": 0.01, "b": 0.002}, budget_s=1.0, min_rounds=5)
    assert len(samples["a"]) == len(samples["b"]) >= 5
    assert samples["a"] == pytest.approx([0.01] * len(samples["a"]))
    assert samples["b"] == pytest.approx([0.002] * len(samples["b"]))


def test_a_short_function_is_repeated_until_a_sample_is_long_enough():
    machine = Machine()
    samples = machine.interleave({"a": 1e-6}, budget_s=0.0, min_rounds=1)
    assert samples["a"] == pytest.approx([1e-6])
    last = len(machine.log) - 1 - machine.log[:-1][::-1].index("sync") - 1
    assert (len(machine.log) - 1 - last) * 1e-6 >= MIN_SAMPLE_S


def test_a_long_function_is_called_once_a_sample():
    machine = Machine()
    machine.interleave({"a": 0.1}, budget_s=0.0, min_rounds=3)
    assert machine.log.count("a") == 2 + 3  # calibration, then a sample in each round


def test_rounds_alternate_the_order_and_warm_up_every_turn():
    machine = Machine()
    machine.interleave({"a": 0.02, "b": 0.02}, budget_s=0.0, min_rounds=2)
    calls = [entry for entry in machine.log if entry != "sync"]
    assert calls[4:] == ["a", "a", "b", "b", "b", "b", "a", "a"]


def test_the_device_is_waited_for_before_and_after_each_sample():
    machine = Machine()
    machine.interleave({"a": 0.02}, budget_s=0.0, min_rounds=1)
    assert machine.log[-3:] == ["sync", "a", "sync"]


def test_outliers_are_kept():
    samples = Machine().interleave({"a": [0.01] * 6 + [5.0] + [0.01] * 99}, budget_s=0.0, min_rounds=7)
    assert len(samples["a"]) == 7
    assert max(samples["a"]) == pytest.approx(0.01) or 5.0 in samples["a"]
    rounds = Machine().interleave({"a": [0.01] * 3 + [5.0] + [0.01] * 99}, budget_s=0.0, min_rounds=7)
    assert 5.0 in [round(s, 6) for s in rounds["a"]]


def test_it_stops_at_the_budget_but_never_before_the_least_rounds():
    assert len(Machine().interleave({"a": 1.0}, budget_s=9.0, min_rounds=2)["a"]) == 8
    assert len(Machine().interleave({"a": 1.0}, budget_s=0.0, min_rounds=7)["a"]) == 7
    assert len(Machine().interleave({"a": 1e-3}, budget_s=1e9, max_rounds=20)["a"]) == 20


def test_a_failure_names_the_function():
    def broken():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory") as raised:
        interleave({"kernel mine": broken}, budget_s=1.0)
    assert raised.value.__notes__ == ["while timing 'kernel mine'"]


def test_the_cyclic_collector_is_left_as_it_was():
    import gc

    enabled = gc.isenabled()
    Machine().interleave({"a": 0.1}, budget_s=0.0, min_rounds=1)
    assert gc.isenabled() == enabled


def test_nothing_to_time_is_refused():
    with pytest.raises(ValueError, match="functions"):
        interleave({}, budget_s=1.0)
