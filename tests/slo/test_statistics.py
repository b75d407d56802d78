"""Intervals cover what they say, and noise decides nothing."""

import math

import numpy as np
import pytest

from portable.slo.statistics import Interval, beats, bootstrap, ratio

DRAWS = {
    "normal": (lambda rng, n: rng.normal(1e-3, 1e-5, n), 1e-3),
    "lognormal": (lambda rng, n: 1e-3 * rng.lognormal(0, 0.5, n), 1e-3),
    "heavy tail": (lambda rng, n: 1e-3 * (1 + rng.pareto(1.5, n)), 1e-3 * 2 ** (1 / 1.5)),
}


@pytest.mark.parametrize("shape", DRAWS)
def test_the_interval_covers_the_true_median_about_as_often_as_it_says(shape):
    draw, median = DRAWS[shape]
    rng = np.random.default_rng(1)
    intervals = [bootstrap(draw(rng, 30)) for _ in range(100)]
    assert sum(i.low <= median <= i.high for i in intervals) >= 88  # 95 expected


def test_an_outlier_widens_nothing_but_is_not_dropped():
    quiet = [1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0, 1.01]
    assert bootstrap([*quiet, 50.0]).high < 1.03
    assert bootstrap([*quiet, 50.0], quantile=0.99).high == pytest.approx(50.0)


def test_the_same_samples_give_the_same_interval():
    samples = list(np.random.default_rng(0).lognormal(size=20))
    assert bootstrap(samples) == bootstrap(samples)


def test_equal_samples_have_no_spread():
    assert bootstrap([2.0] * 5) == Interval(2.0, 2.0, 2.0)


def test_one_sample_says_nothing_about_the_spread():
    assert bootstrap([2.0]) == Interval(2.0, 0.0, math.inf)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [1.0, math.inf]])
def test_samples_that_are_no_numbers_are_refused(bad):
    with pytest.raises(ValueError, match="finite samples"):
        bootstrap(bad)


def test_a_ratio_is_paired_by_round_so_that_a_slow_machine_cancels():
    rng = np.random.default_rng(2)
    machine = rng.pareto(1.0, 40) + 1  # what slows a round slows both
    a, b = 1.2 * machine, machine
    assert ratio(a, b).low == pytest.approx(1.2)
    assert ratio(a, b).high == pytest.approx(1.2)


def test_a_ratio_refuses_rounds_that_do_not_pair():
    with pytest.raises(ValueError, match="same rounds"):
        ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="positive"):
        ratio([1.0], [0.0])


def test_a_kernel_of_equal_speed_seldom_beats_the_portable_path():
    rng = np.random.default_rng(3)
    wins = sum(beats(rng.lognormal(0, 0.2, 20), rng.lognormal(0, 0.2, 20)) for _ in range(100))
    assert wins <= 8  # 2.5 expected


def test_a_kernel_that_is_faster_beats_it():
    rng = np.random.default_rng(4)
    assert beats(0.7 * rng.lognormal(0, 0.1, 20), rng.lognormal(0, 0.1, 20))


def test_one_round_beats_nothing():
    assert not beats([0.1], [1.0])
