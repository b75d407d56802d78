"""The functions that every backend must compute as eager does on the CPU: a table, by family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Draw:
    """Inputs of one dtype, the same in every process; torch's own generators are left alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(20)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def positive(self, *shape: int) -> torch.Tensor:
        return (self.normal(*shape).abs() + 0.5).to(self.dtype)

    def distinct(self, *shape: int) -> torch.Tensor:
        """No two elements are equal: sorting has one answer."""
        count = torch.Size(shape).numel()
        return (torch.randperm(count, generator=self._generator) - count // 2).reshape(shape).to(self.dtype)

    def special(self, *shape: int) -> torch.Tensor:
        """NaN, infinities and zeros among normal numbers."""
        x = self.normal(*shape).reshape(-1)
        odd = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], dtype=self.dtype)
        x[: 2 * len(odd) : 2] = odd
        return x.reshape(shape)

    def index(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self._generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator) > 0

    def whole(self, *shape: int) -> torch.Tensor:
        """Integers over the whole range of the dtype, its ends among them."""
        info = torch.iinfo(self.dtype)
        x = torch.randint(max(info.min, -(2**40)), min(info.max, 2**40), shape, generator=self._generator)
        x.view(-1)[:2] = torch.tensor([info.min, info.max])
        return x.to(self.dtype)

    def small(self, *shape: int) -> torch.Tensor:
        """Integers in 1 … 6, for divisors and shifts."""
        return torch.randint(1, 7, shape, generator=self._generator).to(self.dtype)


@dataclass(frozen=True)
class Program:
    """One function and its inputs, which it may write to.

    Attributes:
        gradients: whether its float inputs have gradients that are compared.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[Draw], tuple[Any, ...]]
    gradients: bool = True


def _table(*rows: tuple[Any, ...]) -> tuple[Program, ...]:
    return tuple(Program(*row) for row in rows)


def _two(d: Draw) -> tuple[Any, ...]:
    return d.normal(4, 6), d.normal(4, 6)


def _one(d: Draw) -> tuple[Any, ...]:
    return (d.normal(3, 8),)


def _wide(d: Draw) -> tuple[Any, ...]:
    return (3 * d.normal(4, 6),)


def _special(d: Draw) -> tuple[Any, ...]:
    return (d.special(3, 8),)


def _whole(d: Draw) -> tuple[Any, ...]:
    return d.whole(12), d.whole(12)


def _divided(d: Draw) -> tuple[Any, ...]:
    return d.whole(12), d.small(12)


def _images(d: Draw) -> tuple[Any, ...]:
    return d.normal(2, 4, 9, 8), d.normal(6, 4, 3, 3), d.normal(6)


def _heads(d: Draw) -> tuple[Any, ...]:
    return d.normal(2, 2, 5, 8), d.normal(2, 2, 7, 8), d.normal(2, 2, 7, 8)


def _sequence(d: Draw) -> tuple[Any, ...]:
    return d.normal(2, 2, 6, 8), d.normal(2, 2, 6, 8), d.normal(2, 2, 6, 8)


ELEMENTWISE = _table(
    ("arithmetic", lambda x, y: (x + 2 * y - x * y) / (y.abs() + 1), _two),
    ("exp-log-sqrt", lambda x: x.log() + x.sqrt() - x.rsqrt() + (-x).exp(), lambda d: (d.positive(4, 6),)),
    ("expm1-log1p", lambda x: (torch.expm1(x), torch.log1p(x.abs())), _one),
    ("trigonometry", lambda x, y: (x.sin() * y.cos(), torch.atan2(x, y), x.tanh()), _two),
    ("erf", lambda x: torch.erf(x), _one),
    ("relu-family", lambda x: (F.relu(x), F.leaky_relu(x, 0.1), F.elu(x), F.hardtanh(x)), _one),
    ("smooth-activations", lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), x.sigmoid()), _one),
    ("softplus", lambda x: F.softplus(x), _one),
    ("rounding", lambda x: (x.floor(), x.ceil(), x.round(), x.trunc(), x.sign()), _wide, False),
    ("comparison", lambda x, y: (x > y, x == y, torch.where(x < y, x, 2 * y)), _two, False),
    ("clamp", lambda x, y: (x.clamp(-0.5, 0.5), torch.maximum(x, y), torch.minimum(x, y)), _two),
    ("power", lambda x: (x**2, x**1.5, x**-1), lambda d: (d.positive(4, 6),)),
    ("broadcasting", lambda x, y: x * y + 1.5, lambda d: (d.normal(3, 1, 5), d.normal(4, 1))),
    ("lerp-addcmul", lambda x, y: (torch.lerp(x, y, 0.3), torch.addcmul(x, y, x, value=0.5)), _two),
    ("casts", lambda x: (x.to(torch.float32), x.to(torch.int32), x.bool()), _wide, False),
)  # fmt: skip

REDUCTIONS = _table(
    ("sum-mean", lambda x: (x.sum(), x.mean(-1), x.sum((0, 1), keepdim=True)), lambda d: (d.normal(3, 5, 7),)),
    ("extremes", lambda x: (x.amax(0), x.amin(-1), x.max(1)), lambda d: (d.distinct(4, 6),)),
    ("arg-extremes", lambda x: (x.argmax(), x.argmin(0)), lambda d: (d.distinct(4, 6),), False),
    ("variance", lambda x: (x.var(-1), x.std(0, unbiased=False)), _one),
    ("product", lambda x: x.prod(-1), lambda d: (d.positive(3, 4),)),
    ("logsumexp", lambda x: torch.logsumexp(x, 1), _one),
    ("norms", lambda x: (x.norm(), torch.linalg.vector_norm(x, 1, -1)), lambda d: (d.positive(3, 8),)),
    ("cumulative", lambda x: (x.cumsum(1), x.cumprod(0)), lambda d: (d.positive(3, 5),)),
    ("sort-topk", lambda x: (*x.sort(-1), *x.topk(3)), lambda d: (d.distinct(3, 8),)),
    ("any-all", lambda m: (m.any(), m.all(0), m.sum(1)), lambda d: (d.mask(3, 8),), False),
)

PRODUCTS = _table(
    ("matmul", lambda a, b: a @ b, lambda d: (d.normal(5, 16), d.normal(16, 7))),
    ("batched-matmul", lambda a, b: torch.bmm(a, b), lambda d: (d.normal(3, 4, 8), d.normal(3, 8, 5))),
    ("broadcast-matmul", lambda a, b: a @ b, lambda d: (d.normal(2, 1, 4, 8), d.normal(3, 8, 5))),
    ("vectors", lambda a, b: (a @ b, torch.outer(a, b)), lambda d: (d.normal(8), d.normal(8))),
    ("linear", lambda x, w, b: F.linear(x, w, b), lambda d: (d.normal(2, 3, 8), d.normal(5, 8), d.normal(5))),
    ("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), lambda d: (d.normal(2, 3, 8), d.normal(2, 4, 8))),
    ("conv1d", lambda x, w: F.conv1d(x, w, padding=1), lambda d: (d.normal(2, 4, 9), d.normal(6, 4, 3))),
    ("conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), _images),
    ("strided-conv2d", lambda x, w, b: F.conv2d(x, w, b, stride=2, dilation=2), _images),
    ("grouped-conv2d", lambda x, w: F.conv2d(x, w, groups=2), lambda d: (d.normal(2, 4, 6, 6), d.normal(6, 2, 3, 3))),
    ("depthwise-conv2d", lambda x, w: F.conv2d(x, w, groups=4), lambda d: (d.normal(2, 4, 6, 6), d.normal(4, 1, 3, 3))),
    (
        "transposed-conv2d",
        lambda x, w: F.conv_transpose2d(x, w, stride=2, output_padding=1),
        lambda d: (d.normal(2, 4, 5, 5), d.normal(4, 3, 3, 3)),
    ),
    ("pooling", lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 3, 2)), lambda d: (d.distinct(1, 2, 8, 8),)),
    ("adaptive-pooling", lambda x: F.adaptive_avg_pool2d(x, 3), lambda d: (d.normal(1, 2, 8, 8),)),
)

NORMALISATION = _table(
    ("layer-norm", lambda x, w, b: F.layer_norm(x, (8,), w, b), lambda d: (d.normal(3, 8), d.normal(8), d.normal(8))),
    ("group-norm", lambda x, w: F.group_norm(x, 2, w), lambda d: (d.normal(2, 4, 5), d.normal(4))),
    (
        "batch-norm",
        lambda x, m, v: F.batch_norm(x, m, v),
        lambda d: (d.normal(3, 4, 5), d.normal(4), d.positive(4)),
        False,
    ),
    ("rms-norm", lambda x, w: F.rms_norm(x, (8,), w), lambda d: (d.normal(3, 8), d.normal(8))),
    ("softmax", lambda x: (x.softmax(-1), x.log_softmax(0)), _one),
    ("cross-entropy", lambda x, y: F.cross_entropy(x, y), lambda d: (d.normal(6, 5), d.index(5, 6))),
    ("regression-losses", lambda x, y: (F.mse_loss(x, y), F.smooth_l1_loss(x, y), F.l1_loss(x, y)), _two),
    (
        "binary-cross-entropy",
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
        _two,
    ),
    ("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v), _heads),
    ("causal-attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), _sequence),
    (
        "masked-attention",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        lambda d: (*_heads(d), d.mask(5, 7) | torch.eye(5, 7, dtype=torch.bool)),
    ),
)  # fmt: skip

INDEXING = _table(
    ("slices", lambda x: (x[1:, ::2], x[-1], x[..., None], x[:, 2:5].flip(1)), _one),
    ("advanced-index", lambda x, i: (x[i], x[:, i]), lambda d: (d.normal(5, 6), d.index(5, 4))),
    ("gather", lambda x, i: x.gather(1, i), lambda d: (d.normal(3, 8), d.index(8, 3, 4))),
    ("index-select", lambda x, i: x.index_select(0, i), lambda d: (d.normal(5, 3), d.index(5, 7))),
    ("embedding", lambda w, i: F.embedding(i, w), lambda d: (d.normal(9, 4), d.index(9, 2, 5))),
    (
        "scatter-add",
        lambda x, i, y: x.scatter_add(0, i, y),
        lambda d: (d.normal(5, 4), d.index(5, 3, 4), d.normal(3, 4)),
    ),
    (
        "index-put-accumulate",
        lambda x, i, y: x.index_put((i,), y, accumulate=True),
        lambda d: (d.normal(5, 4), d.index(5, 7), d.normal(7, 4)),
    ),
    ("masked-fill", lambda x, m: x.masked_fill(m, -2.0), lambda d: (d.normal(3, 8), d.mask(3, 8))),
    ("one-hot", lambda i: F.one_hot(i, 7), lambda d: (d.index(7, 5),), False),
    ("triangles", lambda x: (x.tril(), x.triu(1), x.diagonal()), lambda d: (d.normal(5, 5),)),
    ("joining", lambda x, y: (torch.cat([x, y], 1), torch.stack([x, y])), _two),
    ("splitting", lambda x: (*x.split(3, 1), *x.chunk(2, 0)), lambda d: (d.normal(4, 8),)),
    ("moving", lambda x: (x.roll(1, 0), x.flip(0), x.repeat(2, 1), x.repeat_interleave(2, 0)), _one),
    ("padding", lambda x: (F.pad(x, (1, 2), value=0.5), F.pad(x[None], (1, 1), mode="reflect")), _one),
    ("shapes", lambda x: (x.reshape(4, -1), x.permute(2, 0, 1), x.unfold(1, 2, 1)), lambda d: (d.normal(2, 3, 4),)),
)  # fmt: skip


def _write_through_a_view(x: torch.Tensor) -> torch.Tensor:
    x.view(-1)[1] = 7.0
    x.t()[0].mul_(2)
    return x.sum(0)


def _write_to_an_argument(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    y[1:].zero_()
    return x * y


def _write_at_an_index(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x[i] = 3.0
    return x + 1


def _write_to_a_copy(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.relu_()[0] = 1.0
    return y


def _write_one_from_another(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.copy_(y.t())
    y.fill_(2.0)
    return x + y


MUTATION = _table(
    ("argument", _write_to_an_argument, _two, False),
    ("view", _write_through_a_view, lambda d: (d.normal(4, 4),), False),
    ("index", _write_at_an_index, lambda d: (d.normal(5, 3), d.index(5, 2)), False),
    ("copy", _write_to_a_copy, lambda d: (d.normal(4, 4),), False),
    ("one-from-another", _write_one_from_another, lambda d: (d.normal(4, 4), d.normal(4, 4)), False),
)  # fmt: skip

EDGES = _table(
    ("nan-inf-arithmetic", lambda x: (x + 1, x * 2, 1 / x, x - x), _special, False),
    ("nan-inf-times-zero", lambda x: x * 0, _special, False),
    ("nan-inf-extremes", lambda x: (x.amax(1), x.clamp(-1, 1), torch.maximum(x, x.flip(1))), _special, False),
    ("nan-inf-functions", lambda x: (x.sigmoid(), x.tanh(), x.exp(), F.relu(x)), _special, False),
    ("nan-inf-tests", lambda x: (x.isnan(), x.isinf(), x == x, x > 0, x.nan_to_num(1.0, 2.0, -2.0)), _special, False),
    (
        "softmax-of-minus-inf",
        lambda x, m: x.masked_fill(m, float("-inf")).softmax(-1),
        lambda d: (d.normal(3, 8), torch.arange(24).reshape(3, 8) < 13),
        False,
    ),
    ("sum-of-nothing", lambda x: (x.sum(0), x.mean(0), x.prod(0)), lambda d: (d.normal(0, 3),), False),
    ("matmul-of-nothing", lambda a, b: a @ b, lambda d: (d.normal(3, 0), d.normal(0, 4)), False),
    ("nothing-elementwise", lambda x: (x + 1, torch.cat([x, x])), lambda d: (d.normal(0, 3),), False),
    ("zero-dimensional", lambda x, y: (x * y, x.sum(), x.reshape(1), y.expand(3)), lambda d: (d.normal(), d.normal())),
    ("transposed", lambda x, y: x @ y + x.t().sum(), lambda d: (d.normal(6, 4).t(), d.normal(6, 5))),
    ("strided", lambda x: x.exp().sum(1), lambda d: (d.normal(6, 8)[::2, 1::3],)),
    ("expanded", lambda x: x * 2 + x.sum(0), lambda d: (d.normal(1, 5).expand(4, 5),), False),
    ("channels-last", lambda x: F.relu(x).mean((2, 3)), lambda d: (d.normal(2, 4, 4, 3).permute(0, 3, 1, 2),)),
)  # fmt: skip

INTEGER = _table(
    ("wraps-around", lambda x: (x + 1, x * 3, x - 2, -x), lambda d: (d.whole(12),), False),
    ("division", lambda x, y: (x // y, x % y, torch.div(x, y, rounding_mode="trunc"), x / y), _divided, False),
    ("bits", lambda x, y: (x & y, x | y, x ^ y, ~x), _whole, False),
    ("shifts", lambda x, y: (x << y, x >> y), _divided, False),
    (
        "integer-reductions",
        lambda x: (x.sum(), x.amax(0), x.cumsum(1), x.prod(0)),
        lambda d: (d.small(3, 4),),
        False,
    ),
    ("integer-comparison", lambda x, y: (x < y, x == y, torch.maximum(x, y), x.clamp(2, 5)), _whole, False),
    (
        "mixed-types",
        lambda x, y: (x + y, x * 1.5, x.bool(), x.to(torch.int64) + 1),
        lambda d: (d.small(6), d.small(6).float()),
        False,
    ),
    ("integer-sort", lambda x: x.sort(stable=True), lambda d: (d.whole(3, 6),), False),
)  # fmt: skip

FAMILIES: dict[str, tuple[tuple[torch.dtype, ...], tuple[Program, ...]]] = {
    "elementwise": (FLOATS, ELEMENTWISE),
    "reduction": (FLOATS, REDUCTIONS),
    "product": (FLOATS, PRODUCTS),
    "normalisation": (FLOATS, NORMALISATION),
    "indexing": (FLOATS, INDEXING),
    "mutation": (FLOATS, MUTATION),
    "edge": (FLOATS, EDGES),
    "integer": (INTEGERS, INTEGER),
}
