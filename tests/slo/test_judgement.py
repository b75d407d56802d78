"""An SLO is judged by the worse bound of the interval, against what it names."""

import pytest

from portable.slo.judgement import best_native, judge
from portable.slo.objective import SLO

FAST, SLOW = [0.010, 0.0101, 0.0099, 0.010, 0.0102, 0.0098], [0.020, 0.0201, 0.0199, 0.020, 0.0202, 0.0198]
SPREAD = [0.008, 0.009, 0.010, 0.012, 0.015, 0.030]


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO("p50_ms", 12), True),
        (SLO("p50_ms", 9), False),
        (SLO("p99_ms", 12), True),
        (SLO("ratio", 0.6), True),
        (SLO("ratio", 1.25, "inductor"), True),
        (SLO("roofline", 0.4), True),
        (SLO("roofline", 0.6), False),
        (SLO("peak_mb", 100), True),
        (SLO("peak_mb", 50), False),
    ],
)
def test_each_metric_is_judged(slo, met):
    samples = {"portable": FAST, "eager": SLOW, "inductor": SLOW}
    judged = judge(slo, samples, ideal_s=0.005, peak_mb=64.0)
    assert judged.met is met
    assert judged.reason.startswith(("meets" if met else "misses") + f" {slo}")
    assert (judged.badness <= 1) is met


def test_the_median_alone_does_not_meet_an_slo():
    assert judge(SLO("p50_ms", 14), {"portable": SPREAD}).met is False
    assert judge(SLO("p50_ms", 14), {"portable": FAST}).met is True


def test_a_ratio_to_the_best_native_takes_the_faster_baseline():
    samples = {"portable": SLOW, "eager": SLOW, "inductor": FAST}
    assert best_native(samples) == "inductor"
    judged = judge(SLO("ratio", 1.25), samples)
    assert judged.met is False
    assert judged.limit_s == pytest.approx(0.0125)


@pytest.mark.parametrize("slo", [SLO("ratio", 1), SLO("ratio", 1, "inductor"), SLO("roofline", 0.5), SLO("peak_mb", 1)])
def test_what_was_not_measured_is_not_judged(slo):
    judged = judge(slo, {"portable": FAST})
    assert judged.met is None
    assert "not measured" in judged.reason
