"""PJRT for the XLA family: the client, host buffers in and out, and executables.

This is the only module that touches jaxlib's client. Four facts shape it:

* The call path is short: the binding that takes a DLPack capsule costs 4 µs a tensor, the public one over 100.
* A CPU import is zero-copy where the tensor is dense, row-major and aligned; XLA then reads torch's memory, so an
  execution has always finished when `Executable.__call__` returns.
* On the CPU the client is our own and runs a program in the thread that calls it: JAX's hands each to another thread,
  and two wake-ups cost more than a small program.
* A forked child cannot use its parent's client, nor compile (a thread of the parent holds the compiler's alarm): a
  fresh process compiles for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from portable import config
from portable.backends.frames import receive, send
from portable.errors import BackendUnavailableError, ProgramError

COMPILE_OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}
# What XLA:CPU may not do to a program. Its algebraic simplifier reassociates, cancels and distributes (``exp(a)`` times
# ``exp(b)`` becomes ``exp(a + b)``); of its fusions for the YNN library those of sums give wrong sums and can end the
# process: only single matrix products are left to it. What no option forbids is in `lowering.rounding`.
CPU_OPTIONS: dict[str, Any] = {
    "xla_cpu_enable_fast_math": False,
    "xla_cpu_enable_fast_min_max": False,
    "xla_cpu_ftz": False,
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_disable_hlo_passes": "algsimp",
}

KEPT, KEPT_BYTES = 256, 1 << 20  # how many compiled modules a client keeps, and of which size, in case they come again

# A part of the names of jaxlib's LAPACK. Its calls wait for threads of the client's pool while they hold one: of the
# programs that make them one runs at a time (and within it one call, see `lowering.context.Context.alone`).
LAPACK = b"lapack_"

_lock = threading.RLock()
_clients: dict[str, Client] = {}
_forked = False
_abandoned: list[Any] = []  # of the parent: never freed in a child, whose copies of the parent's threads do not run


def _after_fork() -> None:
    global _forked, _lock
    _lock = threading.RLock()
    if _clients:
        _abandoned.append(dict(_clients))
        _clients.clear()
        _forked = True


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_after_fork)


def client(platform: str = "") -> Client:
    """This process's client of a JAX platform ('' is JAX's default one).

    Raises:
        BackendUnavailableError: JAX has no such platform here.
    """
    found = _clients.get(platform)
    if found is None:
        with _lock:
            found = _clients.get(platform)
            if found is None:
                _watch_forks()
                found = _clients[platform] = Client(platform)
    return found


class Client:
    """One PJRT client and its first device."""

    def __init__(self, platform: str) -> None:
        import jax
        import jaxlib._jax as binding
        from jax._src.lib import xla_client

        self._binding = binding
        self._xla = xla_client
        self.compiler: _CompilerProcess | None = None
        if _forked:
            if platform not in ("", "cpu"):
                raise BackendUnavailableError(
                    f"a forked process cannot use the parent's {platform} device",
                    remedy="start the process with the 'spawn' method",
                )
            raw = None
            self.compiler = _CompilerProcess()
        else:
            try:
                raw = (jax.devices(platform) if platform else jax.devices())[0].client
            except RuntimeError as failure:
                raise BackendUnavailableError(
                    f"JAX has no usable platform {platform or '(default)'}: {failure}",
                    remedy="install the device's PJRT plugin or unset JAX_PLATFORMS; see `portable doctor`",
                ) from failure
        if raw is None or raw.platform == "cpu":
            raw = xla_client.make_cpu_client(asynchronous=False)
            _keep_pages()
        self.raw: Any = raw
        self.device: Any = raw.local_devices()[0]
        self.platform: str = raw.platform
        self.on_host = self.platform == "cpu"
        self.options = self._options()
        self.residents = Residents(self)
        self._kept: OrderedDict[bytes, Executable] = OrderedDict()
        self._lock = threading.Lock()
        self._alone = threading.Lock()
        if self.on_host:
            self._keep_subnormals()
        self._no_seed = self.put(torch.zeros(3, dtype=torch.int64).to(torch.uint32))

    @property
    def flags(self) -> dict[str, Any]:
        """XLA's options that programs are compiled with here, where they are not its defaults."""
        return {**COMPILE_OPTIONS, **(CPU_OPTIONS if self.on_host else {})}

    def _options(self) -> Any:
        from jax._src import compiler

        options = compiler.get_compile_options(1, 1)
        options.env_option_overrides = list(self.flags.items())
        return options

    def _keep_subnormals(self) -> None:
        """The threads of the pool compute with subnormal numbers; what a program does on its own: `subnormals`."""
        from portable.lowering import subnormals

        if subnormals.usable() and self.take(self._compiled(subnormals.of_the_pool())([]))[0].item():
            config.logger().warning("a thread of XLA's pool did not answer: it may flush subnormal numbers to zero")

    def compile(self, module: bytes) -> Executable:
        """Compile a StableHLO module (MLIR bytecode), if it is none of the last ones that were compiled."""
        key = hashlib.sha256(module).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        executable = self._compiled(module)
        if len(module) <= KEPT_BYTES:
            with self._lock:
                self._kept[key] = executable
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        return executable

    def _compiled(self, module: bytes) -> Executable:
        devices = self._xla.DeviceList((self.device,))
        if self.compiler is not None:
            blob = self.compiler.compile(module)
            loaded = self.raw.deserialize_executable(blob, devices, self.options)
        else:
            loaded = self.raw.compile_and_load(module, devices, self.options)
        return Executable(self, loaded, self._alone if self.on_host and LAPACK in module else contextlib.nullcontext())

    def seed(self, random: bool) -> Any:
        """The buffer of a program's first argument: a random seed, and a zero that the compiler does not know.

        A ``random`` program's seed is drawn from torch's generator, so that torch.manual_seed reproduces and no two
        calls agree.
        """
        if not random:
            return self._no_seed
        words = torch.zeros(3, dtype=torch.int64)
        words[:2] = torch.randint(0, 2**32, (2,), dtype=torch.int64)
        return self.put(words.to(torch.uint32))

    def put(self, tensor: torch.Tensor) -> Any:
        """A buffer on the device with the values of a dense CPU ``tensor``; on the host without a copy if possible."""
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if tensor.requires_grad:
            tensor = tensor.detach()
        if self.on_host:
            return self._binding.dlpack_managed_tensor_to_buffer(torch._C._to_dlpack(tensor), self.device, None)
        import jax

        from portable.lowering.program import from_host

        with jax.enable_x64(True):
            return jax.device_put(from_host(tensor), self.device)

    def take(self, buffers: Sequence[Any]) -> list[torch.Tensor]:
        """The CPU tensors that hold the values of ``buffers``, once they are computed; zero-copy on the host.

        Those without elements are torch's own: ``out=`` and `resize_` enlarge them, which no memory of the runtime's
        allows.
        """
        try:
            self._xla.batched_block_until_ready(list(buffers))
        except RuntimeError as failure:
            raise _failed(failure, self.platform) from failure
        if self.on_host:
            export = self._binding.buffer_to_dlpack_managed_tensor
            tensors = [torch._C._from_dlpack(export(b)) for b in buffers]
        else:
            import numpy as np

            tensors = [_from_numpy(np.asarray(b)) for b in buffers]
        if 0 in map(torch.Tensor.numel, tensors):
            tensors = [t if t.numel() else t.clone() for t in tensors]
        return tensors


def _keep_pages() -> None:
    """Have glibc keep freed memory for the next allocation, up to 64 MiB.

    Every call allocates its results; while glibc has seen no large block freed it gives their pages back to the system
    each time, and faulting them in again costs more than a small program. Freeing a block of just under 32 MiB, which
    is never touched, moves its thresholds to their highest (mallopt(3), M_MMAP_THRESHOLD).
    """
    torch.empty((32 << 20) - 8192, dtype=torch.uint8)


def _failed(failure: RuntimeError, platform: str) -> ProgramError:
    return ProgramError(
        f"a compiled program failed on {platform}: {failure}",
        remedy="where a kernel is named there, PORTABLE_KERNELS=off runs the program without it; an op that fell back "
        "(`portable explain` lists them) raises there what torch raises",
    )


def _from_numpy(array: Any) -> torch.Tensor:
    from portable import dtypes

    kind = dtypes.to_torch(array.dtype)
    array = array.copy()
    if array.dtype.kind in "biufc":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view({1: "uint8", 2: "int16"}[array.dtype.itemsize])).view(kind)


@dataclass(frozen=True, slots=True)
class _Resident:
    tensor: weakref.ref[torch.Tensor]
    pointer: int
    shape: torch.Size
    stride: tuple[int, ...]
    version: int
    buffer: Any

    def serves(self, tensor: torch.Tensor, on_host: bool) -> bool:
        return (
            self.tensor() is tensor
            and self.pointer == tensor.data_ptr()
            and self.stride == tensor.stride()
            and self.shape == tensor.shape
            and (on_host or self.version == _version(tensor))
        )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class Residents:
    """Buffers of parameters and other long-lived tensors, uploaded again only when the tensor changed.

    A change is seen by the tensor's version counter and address. On the host only zero-copy buffers are kept, which
    see every write. On a device a write through ``.data`` moves no counter: it is not seen until `drop`.
    """

    def __init__(self, owner: Client) -> None:
        self._owner = owner
        self._entries: dict[int, _Resident] = {}

    def get(self, tensor: torch.Tensor) -> Any:
        key = id(tensor)
        kept = self._entries.get(key)
        if kept is not None and kept.serves(tensor, self._owner.on_host):
            return kept.buffer
        buffer = self._owner.put(tensor)
        shared = (
            tensor.is_contiguous()
            and tensor.numel()
            and self._owner.on_host
            and buffer.unsafe_buffer_pointer() == tensor.data_ptr()
        )
        if shared or not self._owner.on_host:
            entries = self._entries
            reference = weakref.ref(tensor, lambda _: entries.pop(key, None))
            entries[key] = _Resident(
                reference, tensor.data_ptr(), tensor.shape, tensor.stride(), _version(tensor), buffer
            )
        return buffer

    def drop(self) -> None:
        """Forget all buffers: the next call uploads again."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


class Executable:
    """A compiled program on one client. Calls are thread-safe."""

    def __init__(self, owner: Client, loaded: Any, turn: contextlib.AbstractContextManager[Any]) -> None:
        self.client = owner
        self._loaded = loaded
        self._turn = turn

    def __call__(self, buffers: list[Any]) -> list[Any]:
        """Run on device buffers; returns device buffers, not yet computed."""
        try:
            with self._turn:
                return self._loaded.execute(buffers)
        except RuntimeError as failure:
            raise _failed(failure, self.client.platform) from failure

    def memory(self) -> Any:
        """The compiler's memory statistics (bytes of arguments, outputs, temporaries and code)."""
        return self._loaded.get_compiled_memory_stats()

    def hlo(self) -> str:
        """The optimised HLO, with the module path and source line of each instruction."""
        return self._loaded.get_hlo_text()


class _CompilerProcess:
    """A fresh process that compiles for a forked child."""

    def __init__(self) -> None:
        self._process: Any = None
        self._lock = threading.Lock()

    def compile(self, module: bytes) -> bytes:
        import json
        import subprocess
        import sys

        from portable.kernels.native_code import named_in

        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "portable.backends.pjrt"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
                )
            send(self._process.stdin, json.dumps(named_in(module)).encode())
            send(self._process.stdin, module)
            blob = receive(self._process.stdout)
        if not blob:
            raise BackendUnavailableError(
                "the process that compiles for this forked child has failed",
                remedy="start child processes with the 'spawn' method",
            )
        return blob


def _serve() -> None:
    """Compile the modules that come in on standard input until it closes; before each, the libraries of the kernels
    that it calls."""
    import json
    import sys

    from portable.kernels import native_code

    sink, source = sys.stdout.buffer, sys.stdin.buffer
    here = client("cpu")
    while libraries := receive(source):
        module = receive(source)
        native_code.load(json.loads(libraries))
        devices = here._xla.DeviceList((here.device,))
        loaded = here.raw.compile_and_load(module, devices, here.options)
        send(sink, loaded.serialize())


if __name__ == "__main__":
    _serve()
