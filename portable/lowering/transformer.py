"""The fused ops that torch's transformer layers take in eval mode, in steps: the same products, in the same order.

``nn.TransformerEncoder``, ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` call them where no gradient is
wanted. They are written in torch after aten/src/ATen/native/transformers/attention.cpp and transformer.cpp, so that
half precision is rounded where torch's CPU kernels round it. What they do to masks differs from other attention: a mask
of numbers hides wherever it is not zero, and a row in which everything is hidden is NaN.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor

from portable.lowering.context import Context
from portable.lowering.registry import lower

aten = torch.ops.aten
OF_QUERIES, OF_KEYS = 0, 1  # mask types: (L, L) and (B, L); any other mask has the shape of the scores


def _masked_softmax(x: Tensor, mask: Tensor, dim: int | None = None, mask_type: int | None = None) -> Tensor:
    """Softmax of what ``mask`` does not hide."""
    if mask_type == OF_QUERIES:
        mask = mask.reshape(1, 1, *mask.shape)
    elif mask_type == OF_KEYS:
        mask = mask.reshape(mask.shape[0], 1, 1, mask.shape[1])
    return torch.softmax(x.masked_fill(mask, -torch.inf), -1 if dim is None else dim)


def _heads(x: Tensor, bias: Tensor, heads: int) -> Tensor:
    """(B, T, D) → (B, heads, T, D/heads), with the bias."""
    batch, length, width = x.shape
    return (x + bias).view(batch, length, heads, width // heads).transpose(1, 2)


def _transform_bias_rescale_qkv(qkv: Tensor, bias: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, 3D) → queries, which are scaled, keys and values."""
    q, k, v = (_heads(x, b, heads) for x, b in zip(qkv.chunk(3, -1), bias.chunk(3), strict=True))
    scale = torch.full((), q.shape[-1], dtype=q.dtype, device=q.device).sqrt().reciprocal()
    return q * scale, k.contiguous(), v.contiguous()


def _attention(
    qkv: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None,
    heads: int,
    mask_type: int | None,
    average: bool,
) -> tuple[Tensor, Tensor]:
    """The attended values, projected, and the weights of the heads or their ``average``."""
    q, k, v = _transform_bias_rescale_qkv(qkv, qkv_bias, heads)
    scores = torch.matmul(q, k.mT)
    if mask is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = _masked_softmax(scores, mask.bool(), -1, mask_type)
    out = torch.matmul(weights, v).transpose(1, 2).flatten(2)
    return F.linear(out, proj_weight, proj_bias), weights.sum(1) / heads if average else weights


def _projected(query: Tensor, key: Tensor, value: Tensor, weight: Tensor) -> Tensor:
    return torch.cat([F.linear(x, w) for x, w in zip((query, key, value), weight.chunk(3), strict=True)], 2)


@lower(aten._native_multi_head_attention.default)
def native_multi_head_attention(
    ctx: Context,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: jax.Array,
    qkv_bias: jax.Array,
    proj_weight: jax.Array,
    proj_bias: jax.Array,
    mask: jax.Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    if not query.size:
        if need_weights:
            ctx.refuse("attention weights of an empty query, which torch gives none")
        out, weights = query, None
    else:
        same = query is key and key is value
        qkv = ctx.torch(F.linear, query, qkv_weight) if same else ctx.torch(_projected, query, key, value, qkv_weight)
        average = need_weights and average_attn_weights
        out, weights = ctx.torch(_attention, qkv, qkv_bias, proj_weight, proj_bias, mask, num_head, mask_type, average)
    if not need_weights:  # an undefined tensor, which a trace takes for an empty one
        undefined = ctx.result[1]
        weights = None if undefined is None else jnp.zeros(undefined.shape, undefined.jax_dtype)
    return out, weights


def _encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    if not src.numel():
        return src.clone()

    def first_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def second_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    x = first_norm(src) if norm_first else src
    projection = (embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias)
    x = aten._native_multi_head_attention.default(x, x, x, *projection, mask, False, True, mask_type)[0] + src
    if not norm_first:
        x = first_norm(x)
    hidden = F.linear(second_norm(x) if norm_first else x, ffn_weight_1, ffn_bias_1)
    hidden = F.gelu(hidden) if use_gelu else F.relu(hidden)
    x = F.linear(hidden, ffn_weight_2, ffn_bias_2) + x
    return x if norm_first else second_norm(x)


@lower(aten._transformer_encoder_layer_fwd.default)
def transformer_encoder_layer(ctx: Context, *args: Any, **kwargs: Any) -> jax.Array:
    return ctx.torch(_encoder_layer, *args, **kwargs)


@lower(aten._masked_softmax.default)
def masked_softmax(ctx: Context, *args: Any, **kwargs: Any) -> jax.Array:
    return ctx.torch(_masked_softmax, *args, **kwargs)


@lower(aten._transform_bias_rescale_qkv.default)
def transform_bias_rescale_qkv(ctx: Context, *args: Any, **kwargs: Any) -> tuple[jax.Array, ...]:
    return ctx.torch(_transform_bias_rescale_qkv, *args, **kwargs)
