"""Scaled dot product attention agrees with eager: masks, fully masked rows, causal, grouped heads, gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.networks import assert_agree

attend = F.scaled_dot_product_attention


def heads(dtype):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, n, 8, generator=generator).to(dtype) for n in (5, 7, 7)]


def masks(dtype):
    boolean = torch.rand(5, 7, generator=torch.Generator().manual_seed(1)) > 0.5
    boolean[1] = False
    additive = torch.where(boolean, 0.3, -math.inf).to(dtype)
    return boolean, additive


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masks_and_rows_that_are_masked_entirely(dtype):
    boolean, additive = masks(dtype)
    assert_agree(
        lambda q, k, v: [
            attend(q, k, v),
            attend(q, k, v, attn_mask=boolean),
            attend(q, k, v, attn_mask=additive),
            attend(q, k, v, attn_mask=additive[None, None], scale=0.3),
            attend(q[0], k[0], v[0]),
        ],
        *heads(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_with_fewer_and_more_queries_than_keys(dtype):
    assert_agree(lambda q, k, v: [attend(q, k, v, is_causal=True), attend(k, q, q, is_causal=True)], *heads(dtype))


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_query_heads(causal):
    assert_agree(
        lambda q, k, v: attend(q, k[:, :2], v[:, :2], enable_gqa=True, is_causal=causal), *heads(torch.float32)
    )


def test_the_gradient_of_a_mask():
    mask = torch.randn(2, 1, 5, 7, generator=torch.Generator().manual_seed(2))
    assert_agree(lambda q, k, v, m: attend(q, k, v, attn_mask=m), *heads(torch.float32), mask)


def test_values_of_another_width():
    assert_agree(lambda q, k, v: attend(q, k, v[..., :5]), *heads(torch.float32))


def test_multi_head_attention_modules():
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    for p in (*attention.parameters(), *layer.parameters()):
        p.requires_grad_(False)
    padding = torch.tensor([[False] * 5, [False, False, True, True, True]])
    x = torch.randn(2, 5, 8)
    assert_agree(lambda x: [*attention(x, x, x), attention(x, x, x, key_padding_mask=padding)[0], layer(x)], x)
