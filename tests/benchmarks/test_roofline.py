"""The roofline: what a call must do at least, and how long the measured peak allows for it."""

import pytest
import torch
from torch.nn import functional as F

from benchmarks.memory import peak_mb
from benchmarks.roofline import Peak, cost, measure_peak

PEAK = Peak({1_000: 1e9, 1_000_000: 1e8}, {torch.float32: 1e9, torch.bfloat16: 4e9})


def test_the_slower_of_memory_and_arithmetic_counts():
    assert PEAK.ideal_s(1_000, 10, torch.float32) == pytest.approx(1e-6)
    assert PEAK.ideal_s(1_000, 1e6, torch.float32) == pytest.approx(1e-3)
    assert PEAK.ideal_s(1_000, 1e6, torch.bfloat16) == pytest.approx(0.25e-3)
    assert PEAK.ideal_s(1_000, 1e6, torch.int64) == pytest.approx(1e-3)


def test_the_bandwidth_is_that_of_the_next_larger_size():
    assert PEAK.ideal_s(1_001, 0, torch.float32) == pytest.approx(1_001 / 1e8)
    assert PEAK.ideal_s(1e9, 0, torch.float32) == pytest.approx(10.0)


def test_a_call_reads_its_inputs_and_writes_its_outputs_once():
    a, b = torch.ones(4, 8), torch.ones(8, 16)
    found = cost(lambda: a @ b, [a, b, a])
    assert (found.flops, found.moved, found.dtype) == (2 * 4 * 8 * 16, 4 * (32 + 128 + 64), torch.float32)


def test_attention_is_counted_forward_and_backward():
    q = torch.ones(1, 2, 16, 8, requires_grad=True)
    forward = cost(lambda: F.scaled_dot_product_attention(q.detach(), q.detach(), q.detach()), [q]).flops
    assert forward == 2 * 2 * (2 * 16 * 16 * 8)
    both = cost(lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, q, q).sum(), q), [q]).flops
    assert both > 3 * forward


def test_of_a_table_that_is_looked_up_the_found_rows_are_read():
    table, ids = torch.ones(1000, 16), torch.tensor([3, 4])
    assert cost(lambda: F.embedding(ids, table), [ids, table]).moved == 2 * 8 + 2 * (2 * 16 * 4)


@pytest.mark.parametrize("groups", [1, 8])
def test_the_backward_of_a_convolution_is_twice_its_forward_whatever_the_groups(groups):
    x, w = torch.ones(1, 8, 6, 6, requires_grad=True), torch.ones(8, 8 // groups, 3, 3, requires_grad=True)
    forward = cost(lambda: F.conv2d(x.detach(), w.detach(), groups=groups), [x, w]).flops
    assert forward == 2 * (8 * 4 * 4) * (8 // groups) * 9
    both = cost(lambda: torch.autograd.grad(F.conv2d(x, w, groups=groups).sum(), (x, w)), [x, w]).flops
    assert both == 3 * forward


def test_the_peak_of_this_machine_is_a_plausible_one():
    peak = measure_peak(torch.device("cpu"), budget_s=0.1)
    assert all(1e8 < value < 1e13 for value in peak.bandwidth.values())
    assert all(1e8 < value < 1e15 for value in peak.flops.values())
    assert set(peak.to_dict()) == {"bandwidth", "flops"}


def test_the_peak_memory_of_a_call_is_at_least_what_it_returns():
    found = peak_mb(lambda: torch.ones(5_000_000))
    assert found is None or found >= 20
