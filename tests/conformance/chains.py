"""Chains of IEEE operations on extreme numbers, which every correct implementation computes to the same bits.

Each of 1 to 6 steps takes inputs, earlier values and constants. A step rounds once (or in the steps of torch's kernel),
so that a compiler that contracts, reassociates, cancels or flushes is seen. What eager itself leaves open is
made definite: which of two zeros a maximum is (their sum with 0.0 tells no difference), and what torch built with MKL
computes one unit in the last place off, the square root (`root`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MAX_STEPS, SIZE = 6, 35  # more than two vectors of 16 numbers, and a rest

CONSTANTS = [0.0, -0.0, 1.0, -1.0, 2.0, 0.5, 3.0, 0.1, 1e-3, 1e20, -1e20, 1e-20, 1e25, 1e30, 3e38, 1e-38, 1e-40, 1e-45]
CONSTANTS += [12582912.0, 16777216.0, 6755399441055744.0, 65504.0, 6e-8, 1e-310, float("inf"), float("-inf")]
CONSTANTS += [float("nan")]

_in_eager = False


def root(x: torch.Tensor) -> torch.Tensor:
    """The square root, in eager the correctly rounded one."""
    if not _in_eager:
        return x.sqrt()
    with np.errstate(all="ignore"):
        wide = x if x.dtype == torch.float64 else x.float()
        return torch.from_numpy(np.sqrt(wide.numpy())).to(x.dtype)


def inverse_root(x: torch.Tensor) -> torch.Tensor:
    """``x.rsqrt()``; of half precision torch rounds the root too, but only where it does not fill a vector."""
    return x.rsqrt() if x.element_size() > 2 else x


def _integers(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < 1e4, x, torch.zeros_like(x)).to(torch.int32)


def factor(x: torch.Tensor, c: float) -> float:
    """``c``; in half precision torch rounds a product with it too, but only where it does not fill a vector."""
    return c if x.element_size() > 2 else 1.0


Unary = Callable[[torch.Tensor], torch.Tensor]
UNARY: dict[str, Unary] = {
    "{0}.neg()": torch.neg,
    "{0}.abs()": torch.abs,
    "root({0})": root,
    "inverse_root({0})": inverse_root,
    "{0}.reciprocal()": torch.reciprocal,
    "{0}.square()": torch.square,
    "{0} ** 2": lambda x: x**2,
    "{0}.floor()": torch.floor,
    "{0}.ceil()": torch.ceil,
    "{0}.trunc()": torch.trunc,
    "{0}.round()": torch.round,
    "{0}.sign()": torch.sign,
    "{0}.relu()": torch.relu,
    "{0}.exp().log().isinf().to({0}.dtype)": lambda x: x.exp().log().isinf().to(x.dtype),
    "{0}.isfinite().to({0}.dtype)": lambda x: x.isfinite().to(x.dtype),
    "{0} + torch.zeros_like({0})": lambda x: x + torch.zeros_like(x),
    "{0} - torch.zeros_like({0})": lambda x: x - torch.zeros_like(x),
    "{0} * torch.ones_like({0})": lambda x: x * torch.ones_like(x),
    "{0} - {0}": lambda x: x - x,
    "{0} / {0}": lambda x: x / x,
    "integers({0}).to({0}.dtype)": lambda x: _integers(x).to(x.dtype),
    "{0}.float().to({0}.dtype)": lambda x: x.float().to(x.dtype),
    "{0}.double().to({0}.dtype)": lambda x: x.double().to(x.dtype),
    "{0}.half().to({0}.dtype)": lambda x: x.half().to(x.dtype),
    "{0}.bfloat16().to({0}.dtype)": lambda x: x.bfloat16().to(x.dtype),
    "{0}.flip(0)": lambda x: x.flip(0),
    "{0}.reshape(5, 7).T.reshape(-1)": lambda x: x.reshape(5, 7).T.reshape(-1),
    "{0}.amax() + 0 * {0}": lambda x: (x.amax() + 0.0) + 0 * x,
    "{0}.amin() + 0 * {0}": lambda x: (x.amin() + 0.0) + 0 * x,
    "{0}[:1] * {0}": lambda x: x[:1] * x,
    "torch.cat(({0}[20:], {0}[:20]))": lambda x: torch.cat((x[20:], x[:20])),
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "{0} + {1}": torch.add,
    "{0} - {1}": torch.sub,
    "{0} * {1}": torch.mul,
    "{0} / {1}": torch.div,
    "torch.maximum({0}, {1}) + 0.0": lambda x, y: torch.maximum(x, y) + 0.0,
    "torch.minimum({0}, {1}) + 0.0": lambda x, y: torch.minimum(x, y) + 0.0,
    "torch.where({0} < {1}, {0}, {1})": lambda x, y: torch.where(x < y, x, y),
    "({0} <= {1}).to({0}.dtype)": lambda x, y: (x <= y).to(x.dtype),
    "({0} == {1}).to({0}.dtype)": lambda x, y: (x == y).to(x.dtype),
    "{0} * {1} + {0}": lambda x, y: x * y + x,
    "{0} * {0} - {1} * {1}": lambda x, y: x * x - y * y,
    "torch.copysign({0}, {1}.nan_to_num())": lambda x, y: torch.copysign(x, y.nan_to_num()),  # a NaN has any sign
    "torch.stack(({0} * {1}, {0})).sum(0) + 0.0": lambda x, y: torch.stack((x * y, x)).sum(0) + 0.0,
    "torch.stack(({0}, {1})).amax(0) + 0.0": lambda x, y: torch.stack((x, y)).amax(0) + 0.0,
    "torch.lerp({0}, {1}, 0.3)": lambda x, y: torch.lerp(x, y, 0.3),
    "torch.outer({0}, {1}).diagonal()": lambda x, y: torch.outer(x, y).diagonal(),
}
WITH_CONSTANT: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "{0} + {c}": lambda x, c: x + c,
    "{0} - {c}": lambda x, c: x - c,
    "{c} - {0}": lambda x, c: c - x,
    "{0} * {c}": lambda x, c: x * c,
    "{0} / {c}": lambda x, c: x / c,
    "{c} / {0}": lambda x, c: c / x,
    "{0} * {c} * {c}": lambda x, c: x * c * c,
    "{0} + {c} - {c}": lambda x, c: x + c - c,
    "{0} / {c} / {c}": lambda x, c: x / c / c,
    "torch.full_like({0}, {c}) + {0}": lambda x, c: torch.full_like(x, c) + x,
    "torch.add({0}, {0}, alpha=factor({c}))": lambda x, c: torch.add(x, x, alpha=factor(x, c)),
    "torch.sub({0}, {0}, alpha=factor({c}))": lambda x, c: torch.sub(x, x, alpha=factor(x, c)),
    "torch.addcmul({0}, {0}, {0}, value=factor({c}))": lambda x, c: torch.addcmul(x, x, x, value=factor(x, c)),
    "{0}.clamp(min={c}) + 0.0": lambda x, c: x.clamp(min=c) + 0.0,
    "torch.where({0} > {c}, {0}, {c})": lambda x, c: torch.where(x > c, x, c),
    "({0} == {c}).to({0}.dtype)": lambda x, c: (x == c).to(x.dtype),
}


@dataclass(frozen=True)
class Step:
    text: str
    function: Callable[..., torch.Tensor]
    operands: tuple[int, ...]
    constant: float | None = None


class Chain:
    """A function of its inputs; it gives the value of each step."""

    def __init__(self, inputs: Sequence[torch.Tensor], steps: Sequence[Step]) -> None:
        self.inputs, self.steps = list(inputs), list(steps)

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        values = list(inputs)
        for step in self.steps:
            operands: list[Any] = [values[i] for i in step.operands]
            values.append(step.function(*operands, *([] if step.constant is None else [step.constant])))
        return values[len(inputs) :]

    def eager(self) -> list[torch.Tensor]:
        global _in_eager
        _in_eager = True
        try:
            return self(*self.inputs)
        finally:
            _in_eager = False

    def __repr__(self) -> str:
        lines = [f"v{i} = torch.tensor({t.tolist()}, dtype={t.dtype})" for i, t in enumerate(self.inputs)]
        for i, step in enumerate(self.steps, len(self.inputs)):
            lines.append(f"v{i} = " + step.text.format(*(f"v{o}" for o in step.operands), c=step.constant))
        return "\n".join(lines)


def numbers(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """SIZE numbers: constants from above, ordinary ones and any bits at all."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor(CONSTANTS, dtype=torch.float64).to(dtype)
    signs = torch.randint(0, 2, (SIZE,), generator=generator) * 2 - 1
    extreme = pool[torch.randint(0, len(CONSTANTS), (SIZE,), generator=generator)] * signs.to(dtype)
    ordinary = torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)
    width = 8 * ordinary.element_size()
    words = [torch.randint(0, 256, (SIZE,), generator=generator, dtype=torch.uint8) for _ in range(width // 8)]
    bits = torch.stack(words, 1).view(dtype).reshape(SIZE)
    bits = torch.where(bits.isnan(), torch.zeros_like(bits), bits)  # of NaN one kind is enough
    kind = torch.randint(0, 3, (SIZE,), generator=generator)
    return torch.where(kind == 0, extreme, torch.where(kind == 1, ordinary, bits))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    dtype = draw(st.sampled_from(FLOATS))
    count = draw(st.integers(1, 3))
    inputs = [numbers(dtype, draw(st.integers(0, 10_000))) for _ in range(count)]
    steps: list[Step] = []
    for number in range(draw(st.integers(1, MAX_STEPS))):
        value = st.integers(0, count + number - 1)
        table: dict[str, Callable[..., torch.Tensor]] = draw(st.sampled_from([UNARY, BINARY, WITH_CONSTANT]))
        text = draw(st.sampled_from(sorted(table)))
        operands = tuple(draw(value) for _ in range(2 if table is BINARY else 1))
        constant = draw(st.sampled_from(CONSTANTS)) if table is WITH_CONSTANT else None
        steps.append(Step(text, table[text], operands, constant))
    return Chain(inputs, steps)


def difference(want: torch.Tensor, have: torch.Tensor) -> str:
    """'' if two tensors are equal to the bit (one NaN is as good as another), else where they differ."""
    if want.dtype != have.dtype or want.shape != have.shape:
        return f"{have.dtype}{list(have.shape)}, want {want.dtype}{list(want.shape)}"
    kind = BITS[want.element_size()]
    same = want.contiguous().view(kind) == have.contiguous().view(kind)
    if want.is_floating_point():
        same |= want.isnan() & have.isnan()
    if bool(same.all()):
        return ""
    at = int((~same).flatten().nonzero()[0])
    return f"{have.flatten()[at].item()!r} at {at}, want {want.flatten()[at].item()!r}"
