"""The device `acme`: a simulated accelerator that torch knows as a device of its own, registered from Python alone.

A vendor has a C++ extension instead of this file. Its memory is host memory behind storages of device type `acme`:
tensors are plain tensors, with real storages, strides, offsets and views. Every operator runs as torch's CPU kernel on
that memory. What is simulated: memory is limited and counted, launching is asynchronous (a kernel keeps the device busy
for a while after its launch returned), and random numbers come from a generator of the device's own.

torch offers for this (2.13, `torch.utils.backend_registration._setup_privateuseone_for_python_backend`, experimental):
one device, no streams and events, no allocator. `torch.accelerator.synchronize` does not reach Python code; ours is
`synchronize` below.
"""

from __future__ import annotations

import threading
import time
import types
import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree

NAME = "acme"
KERNEL_S, PRODUCT_S = 20e-6, 2e-3  # for which a kernel keeps the device busy; a matrix product or convolution
TOTAL_BYTES = 1 << 30

_HOST = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_aten = torch.ops.aten
_SET = _aten.set_.source_Storage_storage_offset
_COPY = _aten._copy_from.default
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution"}
_MAY_MIX = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put", "aten::_index_put_impl_"}


class _State:
    """The one device of this process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.used = self.peak = 0
        self.busy_until = 0.0
        self.random = torch.Generator().manual_seed(torch.initial_seed() & (2**63 - 1))
        self.library = torch.library.Library("_", "IMPL", "PrivateUse1")
        self.operators = torch.library.Library("aten", "IMPL", "PrivateUse1")


_state: _State | None = None
_starting = threading.Lock()


def start() -> _State:
    """Make `acme` a device of torch in this process. Once; torch has room for one such device in a process."""
    global _state
    with _starting:
        if _state is not None:
            return _state
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, backend_module=_module())
        state = _State()
        state.library.fallback(_kernel)
        for name, function in _OPERATORS.items():
            state.operators.impl(name, function)
        _state = state
        return state


def synchronize(device: Any = None) -> None:
    """Wait until every kernel that was launched has ended."""
    left = start().busy_until - time.perf_counter()
    if left > 0:
        time.sleep(left)


def manual_seed(seed: int) -> None:
    """Seed the device's own generator."""
    start().random.manual_seed(seed)


def memory() -> tuple[int, int, int]:
    """(used, peak, total) bytes of the device."""
    state = start()
    return state.used, state.peak, TOTAL_BYTES


def _module() -> types.ModuleType:
    """What torch knows as `torch.acme`."""
    module = types.ModuleType(f"torch.{NAME}")
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": synchronize,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed,
        "get_rng_state": lambda device=NAME: start().random.get_state(),
        "set_rng_state": lambda new, device=NAME: start().random.set_state(new),
        "memory_allocated": lambda device=None: memory()[0],
        "max_memory_allocated": lambda device=None: memory()[1],
        "get_amp_supported_dtype": lambda: [torch.bfloat16],
    }
    vars(module).update(functions)
    return module


def _launch(name: str) -> None:
    state = start()
    state.busy_until = max(state.busy_until, time.perf_counter()) + (PRODUCT_S if name in _PRODUCTS else KERNEL_S)


def _kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operator on the device: torch's CPU kernel on the memory behind its tensors."""
    state = start()
    with state.lock:
        _launch(op._schema.name)
        call = _Call(op, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return call.result(op(*call.args, **call.kwargs))
        before = torch.get_rng_state()
        torch.set_rng_state(state.random.get_state())
        try:
            return call.result(op(*call.args, **call.kwargs))
        finally:
            state.random.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _copy_from(source: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    with start().lock:
        _launch("aten::_copy_from")
        _on_host(destination).copy_(_on_host(source))
    if destination.device.type == "cpu":
        synchronize()
    return destination


def _as_strided(x: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """A view: of the same storage, as torch's own kernel makes it; nothing runs on the device."""
    return _aten.as_strided.default.redispatch(_HOST, x, size, stride, storage_offset)


def _convolution(*args: Any) -> Any:
    return _kernel(_aten.convolution.default, *args)


def _convolution_backward(gradient: Any, x: Any, weight: Any, *rest: Any) -> Any:
    *geometry, wanted = rest
    sizes = [weight.shape[1] * geometry[-1] if geometry[3] else weight.shape[0]]
    return _kernel(_aten.convolution_backward.default, gradient, x, weight, sizes, *geometry, wanted)


# What has no CPU kernel of its own, or does not run on the device.
_OPERATORS = {
    "_copy_from": _copy_from,
    "as_strided": _as_strided,
    "convolution_overrideable": _convolution,
    "convolution_backward_overrideable": _convolution_backward,
}


class _Call:
    """One call of an operator, with host tensors over the memory of the device's."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.op = op
        self.own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the host tensor: (host's, device's)
        self.args, self.kwargs = pytree.tree_map_only((torch.Tensor, torch.device), self._in, (args, dict(kwargs)))

    def _in(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu") if x.type == NAME else x
        if x.device.type == NAME:
            host = _on_host(x)
            self.own[id(host)] = (host, x)
            return host
        if x.dim() and self.op._schema.name not in _MAY_MIX:
            raise RuntimeError(f"{self.op} got tensors on {NAME} and on {x.device}: move them to one device")
        return x

    def result(self, results: Any) -> Any:
        """What the host's kernel gave or wrote, as tensors of the device."""
        for host, own in self.own.values():
            if _layout(host) != _layout(own) or host.untyped_storage()._cdata != _memory(own)._cdata:
                _place(own, host, _storages(self.own).get(host.untyped_storage()._cdata))
        return pytree.tree_map_only(torch.Tensor, self._out, results)

    def _out(self, x: torch.Tensor) -> torch.Tensor:
        if id(x) in self.own:
            return self.own[id(x)][1]
        if x.layout is not torch.strided:
            raise NotImplementedError(f"{self.op} gives a {x.layout} tensor, which {NAME} does not have")
        new = torch._C._acc.create_empty_tensor((0,), x.dtype)
        return _place(new, x, _storages(self.own).get(x.untyped_storage()._cdata))


def _storages(own: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.UntypedStorage]:
    """The device's storages by the identity of the host memory behind them."""
    return {_memory(x)._cdata: x.untyped_storage() for _, x in own.values()}


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    return x.storage_offset(), tuple(x.shape), x.stride(), x.untyped_storage().nbytes()


def _place(x: torch.Tensor, host: torch.Tensor, storage: torch.UntypedStorage | None) -> torch.Tensor:
    """Let the device's tensor ``x`` be what ``host`` is: over ``storage``, or over a new one of that memory."""
    if storage is None or storage.nbytes() != host.untyped_storage().nbytes():
        storage = _allocated(host.untyped_storage())
    placed: torch.Tensor = _SET.redispatch(_HOST, x, storage, host.storage_offset(), host.shape, host.stride())
    return placed


def _allocated(host: torch.UntypedStorage) -> torch.UntypedStorage:
    """A storage of the device over new memory; counted until the last tensor over it is gone."""
    state, size = start(), host.nbytes()
    if state.used + size > TOTAL_BYTES:
        raise torch.OutOfMemoryError(
            f"{NAME} is out of memory: {size} bytes asked for, {TOTAL_BYTES - state.used} free"
        )
    storage: Any = torch._C._construct_storage_from_data_pointer(host.data_ptr(), torch.device(NAME, 0), size)
    storage.memory = host
    state.used += size
    state.peak = max(state.peak, state.used)
    weakref.finalize(storage, lambda: _freed(size)).atexit = False
    counted: torch.UntypedStorage = storage
    return counted


def _freed(size: int) -> None:
    state = start()
    with state.lock:
        state.used -= size


def _memory(x: torch.Tensor) -> torch.UntypedStorage:
    storage: Any = x.untyped_storage()
    if not hasattr(storage, "memory"):  # made by torch without memory, as `create_empty_tensor` does
        storage.memory = torch.UntypedStorage(storage.nbytes())
    memory: torch.UntypedStorage = storage.memory
    return memory


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the same memory; the tensor itself where it is one."""
    if x.device.type != NAME:
        return x
    with torch._C._AutoDispatchBelowAutograd():
        return torch.empty(0, dtype=x.dtype).set_(_memory(x), x.storage_offset(), x.shape, x.stride())
