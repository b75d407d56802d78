"""Write the keys and values of new tokens into a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from portable.ops._op import Samples, refuse
from portable.ops._samples import Draw

SCHEMA = "(Tensor key_cache, Tensor value_cache, Tensor key, Tensor value, Tensor slots) -> (Tensor, Tensor)"


def paged_kv_update(
    key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor]:
    """The caches with each new token's key and value at its slot (Kwon et al. 2023, PagedAttention).

    The arguments are not written to. Compiled, ``cache.copy_(new)`` after the call is one update in place.

    Args:
        key_cache: (blocks, block size, heads, E); value_cache: (blocks, block size, heads, V).
        key: (T, heads, E); value: (T, heads, V), of their cache's dtype.
        slots: (T,), int64: ``block · block size + position in it``. A slot outside the cache (-1 for padding) is not
            written; of several tokens with one slot the last is kept.

    Returns:
        The new key cache and value cache.

    Raises:
        OpArgumentError: these shapes or dtypes do not hold.
    """
    for cache, new in ((key_cache, key), (value_cache, value)):
        fits = cache.ndim == 4 and new.shape[1:] == cache.shape[2:] and new.shape[:1] == slots.shape
        if not fits or cache.dtype != new.dtype or cache.shape[:2] != key_cache.shape[:2]:
            shapes = (
                f"cache {cache.dtype}{list(cache.shape)}, new {new.dtype}{list(new.shape)}, slots {list(slots.shape)}"
            )
            refuse("paged_kv_update", f"does not take {shapes}", "(blocks, size, heads, E), (T, heads, E), (T,)")
    places = key_cache.shape[0] * key_cache.shape[1]
    known = (slots >= 0) & (slots < places)
    tokens = torch.arange(1, slots.shape[0] + 1, device=slots.device)
    # for each slot, and for one more that takes the strays, 1 + the token that it gets; 0: it keeps what it has
    source = torch.zeros(places + 1, dtype=torch.int64, device=slots.device)
    source = source.scatter_reduce(0, torch.where(known, slots, places), tokens, "amax")[:places]
    return _written(key_cache, key, source), _written(value_cache, value, source)


def _written(cache: Tensor, new: Tensor, source: Tensor) -> Tensor:
    if new.shape[0] == 0:
        return cache.clone(memory_format=torch.contiguous_format)
    fresh = new.index_select(0, (source - 1).clamp(min=0)).view(cache.shape)
    return torch.where((source > 0).view(*cache.shape[:2], 1, 1), fresh, cache)


def samples() -> Samples:
    draw = Draw()
    single = torch.float32
    yield (*_caches(draw, 3, 4, 2, single), *_tokens(draw, 5, 2, single), torch.tensor([0, 11, 5, 4, 7])), {}
    yield (*_caches(draw, 3, 4, 2, single), *_tokens(draw, 4, 2, single), torch.tensor([-1, 2, 12, -1])), {}  # padding
    yield (*_caches(draw, 2, 3, 1, single), *_tokens(draw, 3, 1, single), torch.tensor([4, 4, 4])), {}  # the last wins
    yield (*_caches(draw, 2, 3, 1, single), *_tokens(draw, 0, 1, single), draw.integers(0, below=1)), {}
    yield (*_caches(draw, 0, 4, 1, single), *_tokens(draw, 2, 1, single), torch.tensor([0, -1])), {}
    strided = (draw.strided(2, 3, 2, 4), draw.strided(2, 3, 2, 5), draw.strided(2, 2, 4), draw.strided(2, 2, 5))
    yield (*strided, torch.tensor([5, 1])), {}
    special = (draw.special(2, 3, 2, 4), draw.special(2, 3, 2, 5), draw.special(3, 2, 4), draw.special(3, 2, 5))
    yield (*special, torch.tensor([5, 1, 0])), {}
    for dtype in (torch.float16, torch.bfloat16):
        yield (*_caches(draw, 3, 4, 2, dtype), *_tokens(draw, 3, 2, dtype), torch.tensor([9, 0, 3])), {}


def _caches(draw: Draw, blocks: int, size: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw.normal(blocks, size, heads, 4, dtype=dtype), draw.normal(blocks, size, heads, 5, dtype=dtype)


def _tokens(draw: Draw, n: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw.normal(n, heads, 4, dtype=dtype), draw.normal(n, heads, 5, dtype=dtype)
