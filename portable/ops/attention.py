"""Scaled dot product attention, with grouped key and value heads."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from portable.ops._op import Samples, refuse
from portable.ops._samples import Draw

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor? mask=None, bool is_causal=False, float? scale=None) -> Tensor"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """``softmax(query keyᵀ · scale + mask) value`` (Vaswani et al. 2017, equation 1), for each head.

    The reference is torch's ``scaled_dot_product_attention``, so a device's flash attention serves where there is one;
    in half precision scores and softmax are float32. A query whose keys are all masked gets zeros; on the CPU torch
    (2.13) takes fewer than 16 scores that are all NaN for masked ones.

    Args:
        query: (B, H, L, E).
        key: (B, G, S, E); H is a multiple of G, and each key head serves H/G query heads (Ainslie et al. 2023).
        value: (B, G, S, V).
        mask: broadcasts to (B, H, L, S): bool, True where the key takes part; or of the query's dtype, added to the
            scores.
        is_causal: query i attends to keys 0…i (as torch aligns them where L ≠ S), and to those that ``mask`` allows.
        scale: default 1/sqrt(E).

    Returns:
        (B, H, L, V) in the dtype of ``query``.

    Raises:
        OpArgumentError: these shapes do not hold.
    """
    if not query.ndim == key.ndim == value.ndim == 4 or key.shape[1] == 0 or query.shape[1] % key.shape[1]:
        shapes = f"query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}"
        refuse(
            "attention", f"does not take {shapes}", "(B, H, L, E), (B, G, S, E), (B, G, S, V) with H a multiple of G"
        )
    if is_causal and mask is not None:
        earlier = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        mask = mask & earlier if mask.dtype == torch.bool else mask.masked_fill(~earlier, float("-inf"))
        is_causal = False
    # a bool for symbolic sizes too: torch takes no other
    groups = True if query.shape[1] != key.shape[1] else False
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=groups
    )


def _qkv(draw: Draw, b: int, h: int, g: int, rows: int, columns: int, e: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shapes = ((b, h, rows, e), (b, g, columns, e), (b, g, columns, e))
    return tuple(draw.normal(*shape, dtype=dtype) for shape in shapes)


def samples() -> Samples:
    draw = Draw()
    single = torch.float32
    yield _qkv(draw, 2, 2, 2, 5, 5, 4, single), {}
    yield _qkv(draw, 1, 2, 2, 5, 5, 4, single), {"is_causal": True}
    yield _qkv(draw, 1, 2, 2, 3, 7, 4, single), {"is_causal": True, "scale": 0.3}
    yield _qkv(draw, 2, 4, 2, 1, 9, 8, single), {}  # one token against a cache, two query heads a key head
    yield (*_qkv(draw, 1, 4, 1, 3, 3, 5, single), draw.normal(3, 3)), {}
    yield (*_qkv(draw, 1, 2, 2, 4, 4, 4, single), draw.integers(1, 1, 4, 4, below=2) > 0, True), {}
    nothing = torch.ones(3, 3, dtype=torch.bool)
    nothing[1] = False
    yield (*_qkv(draw, 1, 1, 1, 3, 3, 4, single), nothing), {}  # a query whose keys are all masked
    yield _qkv(draw, 0, 2, 2, 3, 3, 4, single), {}
    yield _qkv(draw, 1, 2, 2, 0, 3, 4, single), {}
    yield tuple(draw.strided(2, 2, 3, 4) for _ in range(3)), {"is_causal": True}
    q, k, v = _qkv(draw, 1, 1, 1, 16, 16, 4, single)
    q[0, 0, 1, 2] = float("nan")
    yield (q, k, v), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield _qkv(draw, 1, 2, 2, 17, 17, 16, dtype), {"is_causal": True}
