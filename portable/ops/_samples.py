"""Tensors for the ops' samples: fresh at every call, the same values every time, by kind."""

from __future__ import annotations

import torch
from torch import Tensor


class Draw:
    """Draws tensors from a generator of its own; torch's global one is not touched."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(dtype)

    def strided(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values; not contiguous: every second element, from an offset, of axes laid out in reverse."""
        wide = [2 * n + 1 for n in reversed(shape)]
        every_second = self.normal(*wide, dtype=dtype)[tuple(slice(1, None, 2) for _ in wide)]
        return every_second.permute(*reversed(range(len(shape))))

    def special(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal values among which NaN, both infinities and -0 appear, one a row."""
        x = self.normal(*shape, dtype=dtype)
        values = (float("nan"), float("inf"), float("-inf"), -0.0)
        rows = x.view(-1, shape[-1]) if x.numel() else x
        for i, value in enumerate(values[: len(rows)]):
            rows[i, i % shape[-1]] = value
        return x

    def integers(self, *shape: int, below: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Uniform integers in [0, below)."""
        return torch.randint(0, below, shape, generator=self._generator, dtype=dtype)
