"""Compile a StableHLO module for a device that is not here, by the device's own compiler, in a process of its own.

The process is this module, run as a program: libtpu and XLA's CUDA plugin are loaded there alone, with what they print
and what they break. It imports no torch. Results are kept by content in PORTABLE_CACHE_DIR.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from portable import config
from portable.backends import targets
from portable.backends.frames import receive, send
from portable.backends.targets import Target
from portable.errors import BackendUnavailableError, ConfigError

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # of plugins: registered, not asked for a device
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}
TIMEOUT_S = 1800.0
_COMPILER = Path(__file__).with_name("compiler.py")  # a result is kept as long as what made it stays the same


@dataclass(frozen=True)
class Compiled:
    """What a compiler said of one program. Bytes are those of one device.

    Attributes:
        problem: why it did not compile; '' where it did.
        argument_bytes, output_bytes, temporary_bytes, code_bytes: the compiler's own figures.
        alias_bytes: of outputs that lie in arguments.
        needed_bytes: where it did not compile for lack of memory: how much the compiler asked for.
        flops: {dtype: floating-point operations of its matrix products and convolutions}, of the whole program.
        compiler_flops, bytes_accessed: the compiler's count of all operations and memory traffic; 0 where it has none.
        collectives: {kind: (how many, bytes that they give)}.
        seconds: that compiling took, when it was done.
        no_such_slice: the compiler knows no slice of this form; that is then the problem.
    """

    problem: str = ""
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    alias_bytes: int = 0
    needed_bytes: int = 0
    flops: dict[str, float] = field(default_factory=dict)
    compiler_flops: float = 0.0
    bytes_accessed: float = 0.0
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    no_such_slice: bool = False

    @property
    def bytes(self) -> int:
        """What the program needs on a device: arguments, outputs that are not arguments, temporaries and code."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes + self.code_bytes
        return max(held, self.needed_bytes)


def devices(backend: str) -> tuple[str, ...]:
    """The devices of a backend that programs can be compiled for with what is installed here."""
    named = targets.devices(backend)
    return named if named and compiles(targets.find(f"{backend}:{named[0]}")) else ()


def require(target: Target) -> None:
    """Raise unless the compiler for ``target`` is installed.

    Raises:
        BackendUnavailableError: it is not; the remedy installs it.
    """
    if not compiles(target):
        raise BackendUnavailableError(
            f"nothing here compiles for {target}: {target.package} is not installed", remedy=target.remedy
        )


def compiles(target: Target) -> bool:
    """Whether the compiler for ``target`` is installed."""
    return bool(_version("jax") and _version(target.package))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def compile_for(target: Target, module: bytes, shardings: Sequence[str] = (), mesh_size: int = 1) -> Compiled:
    """Compile a module (MLIR bytecode) for one device of ``target``, or for ``mesh_size`` devices of it.

    Args:
        shardings: one for each argument of the module, in XLA's syntax; without them the program is for one device.

    Raises:
        BackendUnavailableError: the compiler is not installed, or its process died or gave no answer.
        ConfigError: the compiler knows no such slice.
    """
    require(target)
    request = {"target": asdict(target), "shardings": list(shardings), "mesh_size": mesh_size}
    kept = _Kept(_key(target, request, module))
    found = kept.read()
    if found is None:
        found = _process(target.backend).compile(request, module)
        if found.no_such_slice:
            raise ConfigError(
                f"{target} is no slice that its compiler knows: {found.problem}",
                remedy=f"as {target.backend}:{target.device}:{target.host}",
            )
        kept.write(found)
    return found


def _key(target: Target, request: dict[str, Any], module: bytes) -> str:
    """What a result depends on: not the lines of the program that asks, which are in the module as well."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir, passmanager

    with mlir.make_ir_context():
        bare = ir.Module.parse(module)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(bare.operation)
        content = mlir.module_to_bytecode(bare)
    versions = [_version(p) for p in ("jax", "jaxlib", target.package)]
    about = json.dumps([request, versions], sort_keys=True)
    return hashlib.sha256(about.encode() + _COMPILER.read_bytes() + content).hexdigest()


class _Kept:
    """One result on disk. A file that cannot be read is as good as none: it is written anew."""

    def __init__(self, key: str) -> None:
        self._path = Path(config.get("PORTABLE_CACHE_DIR")) / "check" / f"{key}.json"

    def read(self) -> Compiled | None:
        try:
            return _from_json(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as failure:
            config.logger().warning("%s is not readable and is compiled again: %s", self._path, failure)
            return None

    def write(self, result: Compiled) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False, encoding="utf-8") as file:
                json.dump(asdict(result), file)
            os.replace(file.name, self._path)
        except OSError as failure:
            config.logger().warning(
                "%s cannot be written: %s; PORTABLE_CACHE_DIR names another folder", self._path, failure
            )


def _from_json(text: str | bytes) -> Compiled:
    """What `asdict` made of a result.

    Raises:
        ValueError: it is something else.
    """
    found = json.loads(text)
    if not isinstance(found, dict) or set(found) != {f.name for f in fields(Compiled)}:
        raise ValueError("no result")
    like = asdict(Compiled())
    for name, value in found.items():
        plain = type(value) is type(like[name]) or (type(like[name]) is float and type(value) is int)
        if not plain or (isinstance(value, int | float) and not 0 <= value < float("inf")):
            raise ValueError(f"{name} is {value!r}")
    try:
        found["flops"] = {str(dtype): float(n) for dtype, n in found["flops"].items()}
        found["collectives"] = {str(kind): (int(n), int(size)) for kind, (n, size) in found["collectives"].items()}
    except TypeError as failure:
        raise ValueError(str(failure)) from failure
    return Compiled(**found)


_lock = threading.Lock()
_processes: dict[str, _Process] = {}


def _process(backend: str) -> _Process:
    """The process that compiles for ``backend``: one, which is kept."""
    with _lock:
        return _processes.setdefault(backend, _Process(backend))


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.kill()


class _Process:
    """A process that compiles for one backend's devices; started when it is first asked, and again where it died."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._process: subprocess.Popen[bytes] | None = None
        self._said: Any = None
        self._lock = threading.Lock()

    def compile(self, request: dict[str, Any], module: bytes) -> Compiled:
        with self._lock:
            process = self._started()
            late = threading.Event()
            stop = threading.Timer(TIMEOUT_S, _stop, (process, late))
            stop.start()
            try:
                send(process.stdin, json.dumps(request).encode())
                send(process.stdin, module)
                answer = receive(process.stdout)
            except BrokenPipeError:
                answer = b""
            except BaseException:
                process.kill()  # an interrupt: the answer to this request must not be taken for that to the next
                raise
            finally:
                stop.cancel()
            if answer:
                return _from_json(answer)
            raise self._died(request["target"]["name"], process.wait(), late.is_set())

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._said = tempfile.TemporaryFile()
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                env={**os.environ, **ENVIRONMENT},
            )
        return self._process

    def _died(self, target: str, status: int, late: bool) -> BackendUnavailableError:
        if late:
            return BackendUnavailableError(
                f"the compiler for {target} gave no answer in {TIMEOUT_S:.0f} s and was stopped",
                remedy="check a smaller part of the model",
            )
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()[-8:]
        why = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return BackendUnavailableError(
            f"the process that compiles for {target} {why}:\n    " + "\n    ".join(lines),
            remedy="signal 9 is most often a lack of memory on this machine; otherwise please report it",
        )


def _serve() -> None:
    """Answer requests on standard input until it closes."""
    from portable.backends.compiler import compile_here

    with contextlib.suppress(BrokenPipeError):
        sink = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what the compilers print is no answer
        while request := receive(sys.stdin.buffer):
            result = compile_here(json.loads(request), receive(sys.stdin.buffer))
            send(sink, json.dumps(asdict(result)).encode())


if __name__ == "__main__":
    _serve()
