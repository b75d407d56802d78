"""Rotary position embedding of queries and keys (Llama, GPT-NeoX, GPT-J)."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse, wide
from portable.ops._samples import Draw

SCHEMA = "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor"


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate pairs of channels by their position's angles (Su et al. 2021, equation 34).

    ``(a, b) → (a·cos - b·sin, b·cos + a·sin)``. In half precision this is float32 and is rounded once.

    Args:
        x: (\\*, T, D), floating point, e.g. (batch, heads, tokens, head size).
        cos, sin: cosine and sine of the angles, one for each pair: (T, R/2) with R ≤ D, or with leading axes that
            broadcast with those of ``x``, e.g. (batch, 1, T, R/2). Channels from R on pass unchanged. Any floating
            dtype.
        interleaved: pairs are channels (2i, 2i + 1) (GPT-J) instead of (i, i + R/2) (GPT-NeoX, Llama).

    Returns:
        (\\*, T, D) in the dtype of ``x``.

    Raises:
        OpArgumentError: ``cos`` and ``sin`` differ in shape, have fewer than two axes or more than ``x``, or more than
            D/2 angles.
    """
    if cos.shape != sin.shape or not 2 <= cos.ndim <= x.ndim or 2 * cos.shape[-1] > x.shape[-1]:
        shapes = f"x {list(x.shape)}, cos {list(cos.shape)}, sin {list(sin.shape)}"
        refuse("rotary_embedding", f"does not take {shapes}", "x is (*, T, D), cos and sin (T, R/2) with R <= D")
    rotated = 2 * cos.shape[-1]
    values = wide(x[..., :rotated])
    cos, sin = cos.to(values.dtype), sin.to(values.dtype)
    if interleaved:
        a, b = values.unflatten(-1, (-1, 2)).unbind(-1)
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = values.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((out.to(x.dtype), x[..., rotated:]), -1)


def _angles(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    frequency = 10000.0 ** (-torch.arange(pairs) / max(pairs, 1))
    angles = torch.arange(tokens)[:, None] * frequency
    return angles.cos(), angles.sin()


def samples() -> Samples:
    draw = Draw()
    for interleaved in (False, True):
        yield (draw.normal(2, 3, 5, 8), *_angles(5, 4)), {"interleaved": interleaved}
        yield (draw.normal(2, 7, 9), *_angles(7, 3), interleaved), {}  # the last three channels pass
        yield (draw.normal(4, 2), *_angles(4, 1)), {"interleaved": interleaved}
        yield (draw.normal(2, 0, 8), *_angles(0, 4)), {"interleaved": interleaved}
        yield (draw.strided(2, 5, 6), *_angles(5, 3)), {"interleaved": interleaved}
        yield (draw.special(6, 4), *_angles(6, 2)), {"interleaved": interleaved}
        for dtype in (torch.float16, torch.bfloat16):
            yield (draw.normal(1, 2, 5, 16, dtype=dtype), *_angles(5, 8)), {"interleaved": interleaved}
    yield (draw.normal(2, 3, 5, 4), draw.normal(2, 1, 5, 2), draw.normal(2, 1, 5, 2)), {}  # positions of each sequence
