"""Activation functions and their backward ops. Formulas are those that torch documents for each module."""

from __future__ import annotations

import math

import jax
import numpy as np
import torch
from jax import lax

from portable.lowering.context import Context
from portable.lowering.elementwise import at_least, at_most, is_complex, num, where
from portable.lowering.registry import (
    DEFAULT,
    NO_OPMATH,
    apply_elementwise,
    cast,
    elementwise,
    elementwise_table,
    lower,
    promoted,
)

aten = torch.ops.aten

SELU_ALPHA = 1.6732632423543772848170429916717
SELU_SCALE = 1.0507009873554804934193349852946


def within(x: jax.Array, low: float, high: float) -> jax.Array:
    """Whether ``low <= x <= high``; false for NaN."""
    return lax.bitwise_and(lax.ge(x, num(low, x)), lax.le(x, num(high, x)))


def bounded(x: jax.Array, low: float, high: float) -> jax.Array:
    return at_most(at_least(x, lax.full_like(x, low)), lax.full_like(x, high))


# Piecewise linear


def relu(x: jax.Array) -> jax.Array:
    return at_least(x, lax.full_like(x, 0))


@elementwise(aten.hardtanh.default, operands=(0,), promote=NO_OPMATH)
def hardtanh(x: jax.Array, min_val: float = -1, max_val: float = 1) -> jax.Array:
    return bounded(x, min_val, max_val)


@elementwise(aten.hardtanh_backward.default, operands=(0, 1))
def hardtanh_backward(grad: jax.Array, x: jax.Array, min_val: float, max_val: float) -> jax.Array:
    outside = lax.bitwise_or(lax.le(x, num(min_val, x)), lax.ge(x, num(max_val, x)))
    return where(outside, 0, grad)


@elementwise(aten.leaky_relu.default, operands=(0,))
def leaky_relu(x: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    return lax.select(lax.gt(x, num(0, x)), x, lax.mul(x, num(negative_slope, x)))


@elementwise(aten.leaky_relu_backward.default, operands=(0, 1))
def leaky_relu_backward(grad: jax.Array, x: jax.Array, negative_slope: float, self_is_result: bool) -> jax.Array:
    return lax.select(lax.gt(x, num(0, x)), grad, lax.mul(grad, num(negative_slope, x)))


@elementwise(aten.rrelu_with_noise_backward.default, operands=(0, 1, 2))
def rrelu_backward(
    grad: jax.Array, x: jax.Array, noise: jax.Array, lower: float, upper: float, training: bool, self_is_result: bool
) -> jax.Array:
    if training and upper - lower > 1e-6:
        return lax.mul(grad, noise)
    return lax.select(lax.gt(x, num(0, x)), grad, lax.mul(grad, num((lower + upper) / 2, x)))


@elementwise(aten._prelu_kernel.default)
def prelu(x: jax.Array, weight: jax.Array) -> jax.Array:
    return lax.select(lax.gt(x, num(0, x)), x, lax.mul(weight, x))


@lower(aten._prelu_kernel_backward.default)
def prelu_backward(ctx: Context, grad: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    (grad, x, weight), result = promoted(DEFAULT, ctx.result[0].shape, grad, x, weight)
    positive = lax.gt(x, num(0, x))
    by_x = lax.select(positive, grad, lax.mul(weight, grad))
    by_weight = where(positive, 0, lax.mul(x, grad))
    return cast(by_x, result), cast(by_weight, result)


@elementwise(aten.threshold.default, operands=(0,), promote=NO_OPMATH)
def threshold(x: jax.Array, threshold: float, value: float) -> jax.Array:
    return where(lax.le(x, num(threshold, x)), value, x)


@elementwise(aten.threshold_backward.default, operands=(0, 1), promote=NO_OPMATH)
def threshold_backward(grad: jax.Array, x: jax.Array, threshold: float) -> jax.Array:
    return where(lax.le(x, num(threshold, x)), 0, grad)


@elementwise(aten.hardshrink.default, operands=(0,))
def hardshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    return where(within(x, -lambd, lambd), 0, x)


@elementwise(aten.softshrink.default, operands=(0,))
def softshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    edge = num(lambd, x)
    inner = lax.mul(x, num(0, x))  # 0, and NaN of NaN
    lower_ = lax.select(lax.lt(x, -edge), lax.add(x, edge), inner)
    return lax.select(lax.gt(x, edge), lax.sub(x, edge), lower_)


@elementwise(aten.hardshrink_backward.default, aten.softshrink_backward.default, operands=(0, 1))
def shrink_backward(grad: jax.Array, x: jax.Array, lambd: float) -> jax.Array:
    return where(within(x, -lambd, lambd), 0, grad)


def hardsigmoid(x: jax.Array) -> jax.Array:
    return lax.div(bounded(lax.add(x, num(3, x)), 0, 6), num(6, x))


def hardsigmoid_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    inside = lax.bitwise_and(lax.gt(x, num(-3, x)), lax.lt(x, num(3, x)))
    sixth = np.float32(1) / np.float32(6)  # torch's constant is a float32 for double too
    return where(inside, lax.mul(grad, num(sixth, x)), 0)


def hardswish(x: jax.Array) -> jax.Array:
    return lax.div(lax.mul(x, bounded(lax.add(x, num(3, x)), 0, 6)), num(6, x))


def hardswish_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    slope = lax.add(lax.div(x, num(3, x)), num(0.5, x))
    inner = lax.select(lax.lt(x, num(3, x)), lax.mul(grad, slope), grad)
    return where(lax.le(x, num(-3, x)), 0, inner)


# Exponential


def elu(x: jax.Array, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> jax.Array:
    low = lax.mul(lax.expm1(lax.mul(x, num(input_scale, x))), num(alpha * scale, x))
    return lax.select(lax.le(x, num(0, x)), low, lax.mul(x, num(scale, x)))


@elementwise(aten.celu.default, operands=(0,))
def celu(x: jax.Array, alpha: float = 1) -> jax.Array:
    return elu(x, alpha, 1, 1 / alpha)


@elementwise(aten.elu_backward.default, operands=(0, 5))
def elu_backward(
    grad: jax.Array, alpha: float, scale: float, input_scale: float, is_result: bool, x: jax.Array
) -> jax.Array:
    """``x`` is elu's result where ``is_result``, else its input."""
    low = alpha * scale
    if is_result:
        slope = lax.mul(lax.add(x, num(low, x)), num(input_scale, x))
    else:
        slope = lax.mul(lax.exp(lax.mul(x, num(input_scale, x))), num(low * input_scale, x))
    return lax.mul(grad, lax.select(lax.le(x, num(0, x)), slope, lax.full_like(x, scale)))


@elementwise(aten.softplus.default, operands=(0,))
def softplus(x: jax.Array, beta: float = 1, threshold: float = 20) -> jax.Array:
    scaled = lax.mul(x, num(beta, x))
    soft = lax.div(lax.log1p(lax.exp(scaled)), num(beta, x))
    return lax.select(lax.gt(scaled, num(threshold, x)), x, soft)


@elementwise(aten.softplus_backward.default, operands=(0, 1))
def softplus_backward(grad: jax.Array, x: jax.Array, beta: float, threshold: float) -> jax.Array:
    scaled = lax.mul(x, num(beta, x))
    return lax.select(lax.gt(scaled, num(threshold, x)), grad, lax.mul(grad, lax.logistic(scaled)))


def silu(x: jax.Array) -> jax.Array:
    return lax.mul(x, lax.logistic(x))


def silu_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    s = lax.logistic(x)
    one = num(1, x)
    return lax.mul(grad, lax.mul(s, lax.add(lax.mul(x, lax.sub(one, s)), one)))


def mish(x: jax.Array) -> jax.Array:
    return lax.mul(x, lax.tanh(lax.log1p(lax.exp(x))))


def mish_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    t = lax.tanh(lax.log1p(lax.exp(x)))
    slope = lax.mul(lax.mul(x, lax.logistic(x)), lax.sub(num(1, x), lax.mul(t, t)))
    return lax.mul(grad, lax.add(t, slope))


@elementwise(aten.gelu.default, operands=(0,))
def gelu(x: jax.Array, *, approximate: str = "none") -> jax.Array:
    """Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415: exact, or the tanh approximation."""
    half, one = num(0.5, x), num(1, x)
    if approximate == "tanh":
        return lax.mul(lax.mul(half, x), lax.add(one, lax.tanh(_gelu_inner(x))))
    return lax.mul(x, lax.mul(half, lax.add(one, lax.erf(lax.mul(x, num(math.sqrt(0.5), x))))))


def _gelu_inner(x: jax.Array) -> jax.Array:
    cube = lax.mul(lax.mul(x, x), x)
    return lax.mul(num(math.sqrt(2 / math.pi), x), lax.add(x, lax.mul(num(0.044715, x), cube)))


@elementwise(aten.gelu_backward.default, operands=(0, 1))
def gelu_backward(grad: jax.Array, x: jax.Array, *, approximate: str = "none") -> jax.Array:
    half, one = num(0.5, x), num(1, x)
    square = lax.mul(x, x)
    if approximate == "tanh":
        t = lax.tanh(_gelu_inner(x))
        inner_slope = lax.mul(num(math.sqrt(2 / math.pi), x), lax.add(one, lax.mul(num(3 * 0.044715, x), square)))
        left = lax.mul(half, lax.add(one, t))
        right = lax.mul(lax.mul(lax.mul(half, x), lax.sub(one, lax.mul(t, t))), inner_slope)
        return lax.mul(grad, lax.add(left, right))
    cdf = lax.mul(half, lax.add(one, lax.erf(lax.mul(x, num(math.sqrt(0.5), x)))))
    density = lax.mul(lax.exp(lax.mul(square, num(-0.5, x))), num(1 / math.sqrt(2 * math.pi), x))
    return lax.mul(grad, lax.add(cdf, lax.mul(x, density)))


# Sigmoid and tanh


def _conjugate(x: jax.Array) -> jax.Array:
    return lax.conj(x) if is_complex(x) else x


def sigmoid_backward(grad: jax.Array, y: jax.Array) -> jax.Array:
    return lax.mul(grad, _conjugate(lax.mul(lax.sub(num(1, y), y), y)))


def tanh_backward(grad: jax.Array, y: jax.Array) -> jax.Array:
    return lax.mul(grad, _conjugate(lax.sub(num(1, y), lax.mul(y, y))))


def log_sigmoid(x: jax.Array) -> jax.Array:
    return lax.sub(lax.min(x, num(0, x)), lax.log1p(lax.exp(lax.neg(lax.abs(x)))))


@lower(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = cast(x, torch.float32) if x.dtype.itemsize < 4 else x
    saved = cast(lax.exp(lax.neg(lax.abs(wide))), ctx.result[1].dtype)
    return cast(log_sigmoid(wide), ctx.result[0].dtype), lax.reshape(saved, ctx.result[1].shape)


@elementwise(aten.log_sigmoid_backward.default, operands=(0, 1))
def log_sigmoid_backward(grad: jax.Array, x: jax.Array, buffer: jax.Array) -> jax.Array:
    return lax.mul(grad, lax.logistic(lax.neg(x)))


@elementwise(aten.logit_backward.default, operands=(0, 1))
def logit_backward(grad: jax.Array, x: jax.Array, eps: float | None = None) -> jax.Array:
    low = 0.0 if eps is None else eps
    slope = lax.div(grad, lax.mul(x, lax.sub(num(1, x), x)))
    outside = lax.bitwise_or(lax.lt(x, num(low, x)), lax.gt(x, num(1 - low, x)))
    return where(outside, math.nan if eps is None else 0, slope)


elementwise_table({aten.relu.default: relu, aten.relu6.default: lambda x: bounded(x, 0, 6)}, promote=NO_OPMATH)
elementwise_table(
    {
        aten.hardsigmoid.default: hardsigmoid,
        aten.hardsigmoid_backward.default: hardsigmoid_backward,
        aten.hardswish.default: hardswish,
        aten.hardswish_backward.default: hardswish_backward,
        aten.selu.default: lambda x: elu(x, SELU_ALPHA, SELU_SCALE),
        aten.silu.default: silu,
        aten.silu_backward.default: silu_backward,
        aten.mish.default: mish,
        aten.mish_backward.default: mish_backward,
        aten.sigmoid_backward.default: sigmoid_backward,
        aten.tanh_backward.default: tanh_backward,
    }
)
elementwise(aten.elu.default, operands=(0,))(elu)


# Gated


@lower(aten.glu.default)
def glu(ctx: Context, x: jax.Array, dim: int = -1) -> jax.Array:
    a, b = halves(x, dim)
    return apply_elementwise(lambda a, b: lax.mul(a, lax.logistic(b)), DEFAULT, None, ctx, a, b)


@lower(aten.glu_backward.default)
def glu_backward(ctx: Context, grad: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    a, b = halves(x, dim)
    wide = torch.float32 if x.dtype.itemsize < 4 else ctx.result.dtype
    grad, a, b = (cast(v, wide) for v in (grad, a, b))
    s = lax.logistic(b)
    by_a = lax.mul(grad, s)
    by_b = lax.mul(by_a, lax.mul(lax.sub(num(1, s), s), a))
    return cast(lax.concatenate([by_a, by_b], dim % x.ndim), ctx.result.dtype)


def halves(x: jax.Array, dim: int) -> list[jax.Array]:
    axis = dim % x.ndim
    middle = x.shape[axis] // 2
    return [lax.slice_in_dim(x, 0, middle, axis=axis), lax.slice_in_dim(x, middle, 2 * middle, axis=axis)]
