"""torch's own LAPACK inside programs for the host.

Where a vector's sign, a phase or the basis of a space is open, LAPACKs differ: jaxlib's gives other eigenvectors of a
small matrix than the one that torch was built with, and so other gradients of what depends on them.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from portable import config
from portable.errors import BackendUnavailableError
from portable.kernels.native_code import NativeCode
from portable.lowering.context import Context

CODE = NativeCode(Path(__file__).with_name("lapack.cc"), "portable_eigh", "portable_svd")
ROUTINES = tuple(
    f"{routine}_" for routine in ("ssyevd", "dsyevd", "cheevd", "zheevd", "sgesdd", "dgesdd", "cgesdd", "zgesdd")
)


def here(ctx: Context) -> bool:
    """Whether the program of ``ctx`` can call it: without a C++ compiler, say, jaxlib's has to do."""
    return ctx.platform == "cpu" and _usable()


@functools.cache
def _usable() -> bool:
    try:
        torch = ctypes.CDLL("libtorch_cpu.so")
        if not all(hasattr(torch, routine) for routine in ROUTINES):
            raise BackendUnavailableError("this torch keeps its LAPACK to itself")
        CODE.register()
    except (OSError, BackendUnavailableError) as failure:
        config.logger().warning("signs of eigenvectors and singular vectors may differ from eager's: %s", failure)
        return False
    return True


def eigh(x: jax.Array, *, lower: bool, vectors: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Values, vectors (arbitrary where not ``vectors``) and LAPACK's info (0: it converged) of Hermitian matrices."""
    types = [_type(x), _type(x, x.shape[:-1], real=True), jax.ShapeDtypeStruct(x.shape[:-2], np.int32)]
    found, values, info = _call("portable_eigh", x, types, lower=lower, wanted=vectors)
    return values, found, info


def svd(x: jax.Array, *, full: bool) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """U, S, V^H and LAPACK's info (0: it converged)."""
    *batch, m, n = x.shape
    k = min(m, n)
    types = [
        _type(x, (*batch, m, m if full else k)),
        _type(x, (*batch, k), real=True),
        _type(x, (*batch, n if full else k, n)),
        jax.ShapeDtypeStruct(tuple(batch), np.int32),
    ]
    u, s, vh, info = _call("portable_svd", x, types, full=full)
    return u, s, vh, info


def _type(x: jax.Array, shape: tuple[int, ...] | None = None, *, real: bool = False) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        x.shape if shape is None else shape, np.zeros((), x.dtype).real.dtype if real else x.dtype
    )


def _call(target: str, x: jax.Array, types: Sequence[jax.ShapeDtypeStruct], **attributes: bool) -> Sequence[jax.Array]:
    matrix = len(x.shape)

    def columns(rank: int) -> tuple[int, ...]:  # major to minor
        return (*range(rank - 2), rank - 1, rank - 2) if rank == matrix else tuple(range(rank))

    call = jax.ffi.ffi_call(
        target, types, input_layouts=[columns(matrix)], output_layouts=[columns(len(t.shape)) for t in types]
    )
    results: Sequence[jax.Array] = call(x, **attributes)
    return results
