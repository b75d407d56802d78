"""rotary_embedding in Triton, forward and backward: the gradient is the rotation by the opposite angles."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from portable.kernels import triton_code
from portable.kernels.registry import register_kernel
from portable.kernels.triton_code import BACKENDS, HALF_AND_SINGLE, block, jit

if TYPE_CHECKING:
    import triton.language as tl

SIZE = 2048  # pairs that a program rotates
WIDEST = 8192


@jit
def rotate(
    x, cos, sin, out, rows, heads, tokens, pairs, width,
    x_batch, x_head, x_token, angle_batch, angle_head, angle_token,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head, batch = row % tokens, row // tokens % heads, row // tokens // heads
    x += batch * x_batch + head * x_head + token * x_token
    angle = batch * angle_batch + head * angle_head + token * angle_token
    out += row * width
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (row < rows) & (pair < pairs)
    c = tl.load(cos + angle + pair, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle + pair, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        s = -s
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + pairs
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + second, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first, a * c - b * s, mask=inside)
    tl.store(out + second, b * c + a * s, mask=inside)
    if REST > 0:  # the channels that pass
        channel = 2 * pairs + tl.arange(0, REST)[None, :]
        inside = (row < rows) & (channel < width)
        tl.store(out + channel, tl.load(x + channel, mask=inside), mask=inside)


def accepts(x: Any, cos: Any, sin: Any, interleaved: bool = False) -> bool:
    """At least one pair; angles of each sequence or head for at most two leading axes."""
    return bool(0 < cos.shape[-1] <= WIDEST and x.shape[-1] <= WIDEST and (cos.ndim == 2 or x.ndim <= 4))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """``x`` as (batch, heads, tokens, width), of any strides but the last; the angles broadcast by strides of 0."""
    tokens, width = x.shape[-2:]
    pairs = cos.shape[-1]
    if x.ndim <= 4:
        values = x.view(*[1] * (4 - x.ndim), *x.shape)
    else:
        values = x.reshape(1, math.prod(x.shape[:-2]), tokens, width)
    values = values if values.stride(-1) == 1 else values.contiguous()
    cos, sin = (v.contiguous().expand(*values.shape[:3], pairs) for v in (cos, sin))
    out = x.new_empty(values.shape)
    columns, rest, rows = block(pairs), width - 2 * pairs, out.numel() // max(width, 1)
    at_once = block(SIZE // columns)
    rotate.launch(
        (-(-rows // at_once),), values, cos, sin, out, rows, values.shape[1], tokens, pairs, width,
        *values.stride()[:3], *cos.stride()[:3], INTERLEAVED=interleaved, BACK=back, ROWS=at_once, PAIRS=columns,
        REST=block(rest) if rest else 0, values=at_once * columns,
    )  # fmt: skip
    return out.view(x.shape)


def _of_angles(grad: Tensor, x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Of cosine and sine, for each row: rarely wanted, so in torch's own operations."""
    rotated = (v[..., : 2 * pairs].float() for v in (grad, x))
    split = [(v[..., ::2], v[..., 1::2]) if interleaved else v.chunk(2, -1) for v in rotated]
    (of_a, of_b), (a, b) = split
    return of_a * a + of_b * b, of_b * a - of_a * b


def backward(
    grads: Sequence[Tensor | None], needs: Sequence[bool], x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
) -> tuple[Tensor | None, ...]:
    grad: Tensor = grads[0]  # type: ignore[assignment]
    of_x = _rotated(grad, cos, sin, interleaved, True) if needs[0] else None
    if not (needs[1] or needs[2]):
        return of_x, None, None, None
    of_cos, of_sin = _of_angles(grad, x, cos.shape[-1], interleaved)
    return of_x, of_cos.sum_to_size(cos.shape).to(cos.dtype), of_sin.sum_to_size(sin.shape).to(sin.dtype), None


@register_kernel(
    "rotary_embedding",
    provider="triton",
    backends=BACKENDS,
    dtypes=HALF_AND_SINGLE,
    accepts=accepts,
    backward=backward,
    sources=(Path(triton_code.__file__),),
)
def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    return _rotated(x, cos, sin, interleaved, False)


def typical() -> Iterator[tuple[Any, ...]]:
    """Llama's and GPT-2's head sizes, one that is rotated in part, angles of half precision and of each sequence."""
    for dtype in HALF_AND_SINGLE:
        for interleaved in (False, True):
            for width, pairs in ((128, 64), (64, 32), (80, 16)):
                x = torch.empty(2, 8, 512, width, dtype=dtype, device="meta")
                yield x, *(torch.empty(512, pairs, device="meta") for _ in range(2)), interleaved
            yield x, *(torch.empty(2, 1, 512, 32, dtype=dtype, device="meta") for _ in range(2)), interleaved
