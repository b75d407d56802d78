"""Random small programs give what eager gives, gradients too: a few in every run, ten minutes of them at night.

FUZZ_SECONDS and FUZZ_SEED say how long and from which seed on; a failure prints the smallest program that still fails.
"""

import os
import sys
import time

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from portable.errors import UnsupportedInputError, UnsupportedOpError
from portable.lowering import registry
from portable.testing import lowered
from tests.conformance.programs import FLOATS, Program, Value, largest, programs

ROUNDINGS = {torch.float32: 32, torch.float64: 32, torch.bfloat16: 4, torch.float16: 4}
GRADIENT_ROUNDINGS = 2000  # derivatives of a few steps magnify more than the values
BATCH = 100


def close(want: torch.Tensor, have: torch.Tensor, scale: float, roundings: float) -> str:
    """'' if ``have`` is ``want`` but for roundings of a number as large as ``scale``, else how they differ."""
    if want.dtype != have.dtype or want.shape != have.shape:
        return f"{have.dtype}{list(have.shape)}, want {want.dtype}{list(want.shape)}"
    if not want.is_floating_point():
        return "" if torch.equal(want, have) else f"{have.tolist()}, want {want.tolist()}"
    tolerance = roundings * torch.finfo(want.dtype).eps * max(scale, largest(want))
    e, g = want.detach().double(), have.detach().double()
    same = (e == g) | (e.isnan() & g.isnan()) | ((e - g).abs() <= tolerance)
    return "" if bool(same.all()) else f"{g.tolist()}, want {e.tolist()} ± {tolerance:.2g}"


def check_values(program: Program, values: list[Value]) -> None:
    want = program(*(t.clone() for t in program.inputs))
    inputs = [t.clone() for t in program.inputs]
    try:
        have = lowered(program, *inputs, fallback="error")
    except (UnsupportedOpError, UnsupportedInputError):
        return  # by name
    for i, (e, g, value) in enumerate(zip(want, have, values, strict=True)):
        roundings = 0 if value.exact or e.dtype not in ROUNDINGS else ROUNDINGS[e.dtype]
        how = close(e, g, value.scale, roundings)
        assert not how, f"v{i} is {how}\n{program}"
    for i, (e, g) in enumerate(zip(want, inputs, strict=False)):
        how = close(e, g, values[i].scale, 0 if values[i].exact else ROUNDINGS.get(e.dtype, 0))
        assert not how, f"after the call input v{i} is {how}\n{program}"


def check_gradient(program: Program, values: list[Value]) -> None:
    def gradient(*inputs: torch.Tensor) -> list[torch.Tensor | None]:
        leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in inputs]
        results = program(*(leaf.clone() for leaf in leaves))[len(leaves) :]
        outputs = [r.sum() for r in results if r.requires_grad and r.dtype in FLOATS]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        return list(torch.autograd.grad(outputs, wanted, allow_unused=True)) if outputs else []

    if any(v.tensor.dtype in (torch.bfloat16, torch.float16) for v in values):
        return
    inputs = [t.clone() for t in program.inputs]
    try:
        want = gradient(*inputs)
    except (RuntimeError, NotImplementedError):
        return  # eager refuses it
    try:
        have = lowered(gradient, *inputs, fallback="error")
    except (UnsupportedOpError, UnsupportedInputError):
        return
    scale = max([1.0, *(v.scale for v in values)])
    for i, (e, g) in enumerate(zip(want, have, strict=True)):
        how = ("" if e is g else f"{g}, want {e}") if e is None or g is None else close(e, g, scale, GRADIENT_ROUNDINGS)
        assert not how, f"gradient {i} is {how}\n{program}"


CHECKS = {"values": (programs(), check_values), "gradient": (programs(gradient=True), check_gradient)}


def batch(kind: str, number: int, examples: int, *, shrink: bool = True) -> None:
    """Random programs from one seed; a failure is shrunk, which takes minutes."""
    strategy, check = CHECKS[kind]
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    @settings(
        max_examples=examples, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def run(drawn: tuple[Program, list[Value]]) -> None:
        if drawn[0].steps:
            check(*drawn)

    run()


@pytest.mark.parametrize("kind", CHECKS)
def test_a_few_random_programs(kind):
    batch(kind, 0, 20)


def test_a_wrong_lowering_is_found(monkeypatch):
    registry.load()
    op = torch.ops.aten.abs.default
    monkeypatch.setitem(registry.RULES, op, registry.Rule(op, lambda ctx, x: x, "here"))
    with pytest.raises(AssertionError, match="abs"):
        batch("values", 0, 200, shrink=False)


@pytest.mark.slow
def test_ten_minutes_of_random_programs(capsys):
    first = int(os.environ.get("FUZZ_SEED") or time.time())
    end, number = time.monotonic() + float(os.environ.get("FUZZ_SECONDS") or 600), first
    while time.monotonic() < end:
        for kind in CHECKS:
            batch(kind, number, BATCH)
        number += 1
    with capsys.disabled():
        sys.stdout.write(
            f"\nrandom programs: seeds {first} to {number - 1}, {BATCH} of each of {', '.join(CHECKS)} a seed\n"
        )
