"""torch dtypes, JAX dtypes and type promotion.

Promotion is torch's own (``torch._prims_common.elementwise_dtypes``), never restated here.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as Promotion
from torch._prims_common import elementwise_dtypes

from portable.errors import UnsupportedDtypeError

TO_JAX: dict[torch.dtype, np.dtype] = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.uint16: np.dtype(np.uint16),
    torch.uint32: np.dtype(np.uint32),
    torch.uint64: np.dtype(np.uint64),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(jnp.bfloat16),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.complex64: np.dtype(np.complex64),
    torch.complex128: np.dtype(np.complex128),
    torch.float8_e4m3fn: np.dtype(jnp.float8_e4m3fn),
    torch.float8_e4m3fnuz: np.dtype(jnp.float8_e4m3fnuz),
    torch.float8_e5m2: np.dtype(jnp.float8_e5m2),
    torch.float8_e5m2fnuz: np.dtype(jnp.float8_e5m2fnuz),
}
TO_TORCH: dict[np.dtype, torch.dtype] = {v: k for k, v in TO_JAX.items()}


def to_jax(dtype: torch.dtype) -> np.dtype:
    """The JAX (numpy) dtype of a torch dtype.

    Raises:
        UnsupportedDtypeError: StableHLO has no such type (complex32, quantised and sub-byte types).
    """
    try:
        return TO_JAX[dtype]
    except KeyError:
        raise UnsupportedDtypeError(
            f"dtype {dtype} has no StableHLO type", remedy="convert the tensor first, or run with backend='cpu'"
        ) from None


def to_torch(dtype: Any) -> torch.dtype:
    """The torch dtype of a JAX dtype."""
    return TO_TORCH[np.dtype(dtype)]


@functools.lru_cache(maxsize=4096)
def _stand_in(dtype: torch.dtype, zero_dim: bool) -> torch.Tensor:
    return torch.empty(() if zero_dim else (1,), dtype=dtype, device="meta")


_NUMBER = {bool: True, int: 1, float: 1.0, complex: 1j}


def promote(kind: Promotion, operands: tuple[tuple[torch.dtype, bool] | type, ...]) -> tuple[torch.dtype, torch.dtype]:
    """(computation dtype, result dtype) of an elementwise op, under the default dtype of now.

    Args:
        kind: torch's promotion kind of the op.
        operands: for a tensor (dtype, is it 0-d?), for a Python number its type.
    """
    return _promote(kind, operands, torch.get_default_dtype())


@functools.lru_cache(maxsize=16384)
def _promote(kind: Promotion, operands: tuple[Any, ...], default: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    values = [_NUMBER[o] if isinstance(o, type) else _stand_in(*o) for o in operands]
    return elementwise_dtypes(*values, type_promotion_kind=kind)
