"""C++ sources of kernels: built at first use, once, and made known to XLA's CPU client.

A library is kept under PORTABLE_CACHE_DIR, keyed by everything that it is made from: the source and its headers, the
flags, jaxlib, torch where it is linked against it, and the CPU where the code is for this one alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from portable import config
from portable.errors import BackendUnavailableError

# no fast-math: NaN, infinities and the order of sums stay as written
PLAIN = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")
WITH_TORCH = ("-std=c++20", "-O2", "-w")
REMEDY = "install g++ or clang++ (CXX names another), or set PORTABLE_KERNELS=off"

_registered: dict[str, Path] = {}  # libraries by the targets that XLA knows in this process
_lock = threading.RLock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class NativeCode:
    """One C++ source that defines XLA FFI handlers.

    Attributes:
        source: the file; what it includes by ``#include "…"`` from its own folder or portable/kernels belongs to it.
        targets: the handlers' symbols, which are also the names that a program calls them by.
        torch: whether it is built and linked against torch.
    """

    def __init__(self, source: Path, *targets: str, torch: bool = False) -> None:
        self.source, self.targets, self.torch = source, targets, torch

    @functools.cached_property
    def sources(self) -> tuple[Path, ...]:
        """The source and the headers of this package that it includes, by itself or through another."""
        found = [self.source]
        for path in found:
            for name in re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE):
                candidates = (path.parent / name, Path(__file__).parent / name)
                header = next((c for c in candidates if c.exists()), None)
                if header is not None and header not in found:
                    found.append(header)
        return tuple(found)

    def register(self) -> None:
        """Build the library if need be, and make its targets known to XLA's CPU client in this process.

        Raises:
            BackendUnavailableError: there is no C++ compiler, it fails, or the library cannot be kept or loaded.
        """
        if all(t in _registered for t in self.targets):
            return
        with _lock:
            load(dict.fromkeys(self.targets, self.built()))

    def built(self) -> Path:
        """The shared library, built if there is none for this key."""
        folder = config.get("PORTABLE_CACHE_DIR") / "native"
        path: Path = folder / f"{self.source.parent.name}-{self.source.stem}-{self._key()}.so"
        if path.exists():
            return path
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _one_process_at_a_time(path.with_suffix(".lock")):
                if not path.exists():
                    self._build(path)
        except OSError as failure:
            raise BackendUnavailableError(
                f"the kernels of {self.source.name} cannot be built in {folder}: {failure}",
                remedy="let PORTABLE_CACHE_DIR name a folder that can be written, or set PORTABLE_KERNELS=off",
            ) from failure
        return path

    def _key(self) -> str:
        import jaxlib

        parts = [p.read_bytes() for p in self.sources]
        parts += [f.encode() for f in (*self._flags(), jaxlib.__version__, platform.machine())]
        if self.torch:
            import torch

            parts.append(torch.__version__.encode())
        else:
            parts.append(_cpu().encode())
        return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]

    def _flags(self) -> tuple[str, ...]:
        if not self.torch:
            return PLAIN
        import torch

        return (*WITH_TORCH, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}")

    def _build(self, path: Path) -> None:
        import jax

        compiler = _compiler(self.source.name)
        includes, libraries = [f"-I{Path(__file__).parent}", f"-isystem{jax.ffi.include_dir()}"], []
        if self.torch:
            from torch.utils.cpp_extension import include_paths, library_paths

            includes += [f"-isystem{p}" for p in include_paths()]
            libraries = [flag for p in library_paths() for flag in (f"-L{p}", f"-Wl,-rpath,{p}")]
            libraries += ["-ltorch_cpu", "-lc10"]
        config.logger().warning(
            "building the kernels of %s with %s; it takes %s, once: the result is kept in %s",
            self.source.name, compiler[0], "about half a minute" if self.torch else "some seconds", path.parent,
        )  # fmt: skip
        handle, scratch = tempfile.mkstemp(suffix=".so", dir=path.parent)
        os.close(handle)
        command = [*compiler, *self._flags(), "-fPIC", "-shared", *includes, str(self.source), "-o", scratch]
        try:
            done = subprocess.run([*command, *libraries], capture_output=True, text=True, check=False)
            if done.returncode:
                raise BackendUnavailableError(
                    f"{compiler[0]} could not build {self.source.name}:\n{done.stderr[-2000:]}", remedy=REMEDY
                )
            os.chmod(scratch, 0o755)
            os.replace(scratch, path)  # atomic: whoever looks finds a whole file or none
        finally:
            Path(scratch).unlink(missing_ok=True)


def _compiler(source: str) -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named:
        if shutil.which(named[0]):
            return named
        raise BackendUnavailableError(f"CXX names {named[0]!r}, and there is no such program", remedy=REMEDY)
    found = shutil.which("g++") or shutil.which("clang++")
    if not found:
        raise BackendUnavailableError(
            f"the kernels of {source} need a C++ compiler, and none is on PATH", remedy=REMEDY
        )
    return [found]


@contextlib.contextmanager
def _one_process_at_a_time(path: Path) -> Iterator[None]:
    """Hold the lock of a file; the system releases it when a process dies. Without file locks both build."""
    with open(path, "wb") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@functools.cache
def _cpu() -> str:
    """What code for this CPU alone depends on: its model and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return f"{platform.processor()} {platform.node()}"
    wanted = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU implementer", "CPU part")
    found: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())  # the first core speaks for all
    return "\n".join(f"{name}: {found.get(name, '')}" for name in wanted)


def load(libraries: Mapping[str, Path | str]) -> None:
    """Make targets known to XLA's CPU client: {symbol: shared library}. Those that it knows are left alone.

    Raises:
        BackendUnavailableError: a library cannot be loaded, or lacks the symbol.
    """
    import jax

    with _lock:
        for target, path in libraries.items():
            if target in _registered:
                continue
            try:
                symbol: Any = getattr(ctypes.CDLL(str(path)), target)
            except (OSError, AttributeError) as failure:
                raise BackendUnavailableError(
                    f"the library {path} of the kernel target {target} cannot be loaded: {failure}",
                    remedy="remove that file, so that it is built again, or set PORTABLE_KERNELS=off",
                ) from failure
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(symbol), platform="cpu")
            _registered[target] = Path(path)


def named_in(module: bytes) -> dict[str, str]:
    """{target: library} of the targets that a StableHLO module (MLIR bytecode) names: what must be loaded before
    another process can compile it."""
    return {target: str(path) for target, path in _registered.items() if target.encode() in module}
