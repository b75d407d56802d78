"""Any ATen kernel of the host inside an XLA program: the generic XLA FFI handler of aten_ffi.cc, built at first use.

The handler wraps the program's own buffers as tensors, calls the overload through torch's dispatcher and copies its
results back. It is built once with the C++ compiler on PATH and kept under PORTABLE_CACHE_DIR, keyed by its source,
torch and jaxlib.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import torch
from torch._ops import OpOverload

from portable import config, dtypes
from portable.errors import BackendUnavailableError
from portable.lowering.context import Refused, Spec

if TYPE_CHECKING:
    from portable.lowering.context import Context

TARGET = "portable_aten"
SOURCE = Path(__file__).with_name("aten_ffi.cc")


@functools.cache
def register() -> None:
    """Build the handler if need be, and make it known to XLA's CPU client in this process.

    Raises:
        BackendUnavailableError: there is no C++ compiler, or it fails.
    """
    library = ctypes.CDLL(str(built()))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.portable_aten), platform="cpu")


def built() -> Path:
    """The shared library, built if there is none for this source, torch and jaxlib."""
    import jaxlib

    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {jaxlib.__version__}".encode()).hexdigest()[:16]
    folder = config.get("PORTABLE_CACHE_DIR") / "native"
    path: Path = folder / f"aten-{key}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _build(path)
    return path


def _build(path: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise BackendUnavailableError(
            "the aten kernels of the xla backend need a C++ compiler, and none is on PATH",
            remedy="install g++ or clang++, or set PORTABLE_KERNELS=off",
        )
    handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    includes = [f"-I{p}" for p in (*include_paths(), jax.ffi.include_dir())]
    libraries = [flag for p in library_paths() for flag in (f"-L{p}", f"-Wl,-rpath,{p}")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    command = [compiler, "-std=c++20", "-O2", "-fPIC", "-shared", "-w", abi, *includes, str(SOURCE), "-o", scratch]
    done = subprocess.run([*command, *libraries, "-ltorch_cpu", "-lc10"], capture_output=True, text=True, check=False)
    if done.returncode:
        Path(scratch).unlink(missing_ok=True)
        raise BackendUnavailableError(
            f"{compiler} could not build the aten handler:\n{done.stderr[-2000:]}",
            remedy="use a compiler with C++20, or set PORTABLE_KERNELS=off",
        )
    os.replace(scratch, path)  # atomic: two processes that build at once both leave a whole file


def call(ctx: Context, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call the ATen overload ``op`` on JAX values, as part of the program.

    Raises:
        Refused: an argument that the handler cannot carry (a layout, a generator, a random op).
    """
    register()
    operands: list[jax.Array] = []
    tokens: list[str] = []
    for i, argument in enumerate(op._schema.arguments):
        value = args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        tokens.append(_token(value, operands, str(argument.type)))
    results = ctx.result if isinstance(ctx.result, (tuple, list)) else (ctx.result,)
    if not all(isinstance(r, Spec) for r in results):
        raise Refused("a result that is not a tensor")
    types = [jax.ShapeDtypeStruct(r.shape, r.jax_dtype) for r in results]
    outputs = jax.ffi.ffi_call(TARGET, types)(
        *operands, op=op._schema.name, overload=op._schema.overload_name, arguments=" ".join(tokens)
    )
    return outputs[0] if isinstance(ctx.result, Spec) else tuple(outputs)


def _token(value: Any, operands: list[jax.Array], kind: str) -> str:
    if isinstance(value, jax.Array):
        operands.append(value)
        return "t"
    if value is None:
        return "n"
    if isinstance(value, bool):
        return f"b{int(value)}"
    if isinstance(value, torch.dtype):
        return f"d{_code(value)}"
    if isinstance(value, int):
        return f"f{float(value).hex()}" if kind.startswith("float") else f"i{value}"
    if isinstance(value, float):
        return f"f{value.hex()}"
    if isinstance(value, str) and value.isalpha():
        return f"s{value}"
    if isinstance(value, (list, tuple)):
        return _list_token(value, operands, kind)
    raise Refused(f"an argument of type {type(value).__name__} cannot go into the aten handler")


def _list_token(value: Sequence[Any], operands: list[jax.Array], kind: str) -> str:
    if value and all(isinstance(v, jax.Array) for v in value):
        operands.extend(value)
        return f"l{len(value)}"
    if "float" in kind.lower():
        return f"F{len(value)}:{','.join(float(v).hex() for v in value)}"
    if all(isinstance(v, bool) for v in value) and "bool" in kind.lower():
        return f"B{len(value)}:{','.join(str(int(v)) for v in value)}"
    if all(isinstance(v, int) for v in value):
        return f"I{len(value)}:{','.join(str(int(v)) for v in value)}"
    raise Refused("a list of this kind cannot go into the aten handler")


@functools.cache
def _code(dtype: torch.dtype) -> int:
    """The number of a dtype in c10::ScalarType, which torch's C++ dispatcher takes for it."""
    dtypes.to_jax(dtype)
    order = (
        torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64,
        None, torch.complex64, torch.complex128, torch.bool, None, None, None, torch.bfloat16,
    )  # fmt: skip
    if dtype not in order:
        raise Refused(f"{dtype} cannot go into the aten handler")
    return order.index(dtype)
