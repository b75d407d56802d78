"""Comparisons, predicates, logic and bits agree with eager."""

import math

import pytest
import torch

inf, nan = math.inf, math.nan
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
EDGES = [0.0, -0.0, 1, -1, 2.5, 3e38, inf, -inf, nan]


def named(names):
    return {name: getattr(torch, name) for name in names.split()}


def integers(dtype):
    limits = torch.iinfo(dtype)
    values = [0, 1, -1, 2, 12, 18, -8, 100, limits.max, limits.min]
    return torch.tensor([v for v in values if v >= limits.min], dtype=dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_comparisons_and_logic_of_floats(agrees, dtype):
    x = torch.tensor(EDGES, dtype=dtype)
    agrees(named("eq ne lt le gt ge logical_and logical_or logical_xor isclose"), x[:, None], x[None])
    agrees(named("isnan isinf isposinf isneginf isfinite signbit logical_not isreal"), x)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_comparisons_and_bits_of_integers(agrees, dtype):
    x = integers(dtype)
    functions = named(
        "eq ne lt le gt ge logical_and logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift "
        "bitwise_right_shift gcd"
    )
    functions |= {"<<": lambda x, y: x << y, ">>": lambda x, y: x >> y}
    agrees(functions, x[:, None], x[None])
    unary = named("bitwise_not logical_not signbit isnan isinf isfinite isposinf")
    agrees({**unary, "& 6": lambda x: x & 6, "1 << x": lambda x: 1 << x.clamp(0, 3), "x >> 1": lambda x: x >> 1}, x)


def test_least_common_multiple(agrees):
    x = torch.tensor([0, 1, 4, 6, -6, 35])
    agrees({"lcm": torch.lcm}, x[:, None], x[None])


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8])
def test_a_least_common_multiple_that_does_not_fit_wraps_as_in_eager(agrees, dtype):
    largest = torch.iinfo(dtype).max
    x = torch.tensor([2, 7, 100, largest, largest - 1, largest // 3], dtype=dtype)
    x = torch.cat([x, -x])  # not the smallest integer, of which eager dies
    agrees({"lcm": torch.lcm}, x[:, None], x[None])


def test_booleans(agrees):
    x = torch.tensor([True, False])
    agrees(named("eq lt ge bitwise_and bitwise_or bitwise_xor logical_xor"), x[:, None], x[None])
    agrees({"~": lambda x: ~x, "signbit": torch.signbit, "isnan": torch.isnan}, x)


def test_a_number_is_rounded_to_the_tensors_dtype_before_it_is_compared(agrees):
    x = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)
    agrees({"eq": lambda x: x == 0.1, "ge": lambda x: x >= 0.1, "lt": lambda x: x < 0.1}, x)


def test_integers_compare_with_fractions(agrees):
    x = torch.tensor([1, 2, 3])
    agrees({"lt": lambda x: x < 1.5, "eq": lambda x: x == 2.0, "ge": lambda x: x >= 2.5, "bool": lambda x: x > True}, x)


def test_membership(agrees):
    x = torch.tensor([[1.0, nan], [2.0, -0.0]])
    functions = {
        "tensor": lambda x, t: torch.isin(x, t),
        "invert": lambda x, t: torch.isin(x, t, invert=True),
        "number": lambda x, t: torch.isin(x, 2),
        "in tensor": lambda x, t: torch.isin(2.0, t),
        "empty": lambda x, t: torch.isin(x, t[:0]),
    }
    agrees(functions, x, torch.tensor([2.0, nan, 0.0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_frexp_and_ldexp(agrees, dtype):
    x = torch.tensor([0.0, -0.0, 1, -3, 0.75, 6e4, inf, -inf, nan], dtype=dtype)
    agrees({"frexp": lambda x: tuple(torch.frexp(x)), "ldexp": lambda x: torch.ldexp(x, torch.tensor(3))}, x)


def test_frexp_of_subnormal_numbers(agrees):
    agrees({"frexp": lambda x: tuple(torch.frexp(x))[1]}, torch.tensor([1e-42, -1e-40, 1.4e-45]))
