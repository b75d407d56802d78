"""The roofline: what this machine's measured peak allows a computation (Williams, Waterman and Patterson 2009).

Peak and workloads are measured by the same timer in the same process. The bandwidth depends on where the data fits, so
it is measured for several sizes; a workload is held to that of the next larger one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .timer import interleave

SIZES = (1 << 18, 1 << 22, 1 << 25, 1 << 28)  # bytes read and written by a copy
_MATMUL = 1024


@dataclass(frozen=True)
class Peak:
    """What one device can do at most, measured.

    Attributes:
        bandwidth: bytes per second (read and written) of a copy, by the bytes that it moves.
        flops: operations per second of a square matrix product, by dtype.
    """

    bandwidth: dict[int, float]
    flops: dict[torch.dtype, float]

    def ideal_s(self, moved: float, flops: float, dtype: torch.dtype) -> float:
        """The least seconds in which ``moved`` bytes and ``flops`` operations in ``dtype`` can be done."""
        size = next((s for s in sorted(self.bandwidth) if s >= moved), max(self.bandwidth))
        return max(moved / self.bandwidth[size], flops / self.flops.get(dtype, self.flops[torch.float32]))

    def to_dict(self) -> dict[str, Any]:
        """Plain data: bytes per second by bytes, operations per second by dtype."""
        flops = {str(dtype).removeprefix("torch."): value for dtype, value in self.flops.items()}
        return {"bandwidth": {str(size): value for size, value in self.bandwidth.items()}, "flops": flops}


def measure_peak(device: torch.device, *, budget_s: float = 3.0) -> Peak:
    """Measure copies of SIZES and matrix products on ``device``; the best round counts."""
    functions = dict(_copies(device))
    for dtype in (torch.float32, torch.bfloat16):
        a = torch.randn(_MATMUL, _MATMUL, device=device).to(dtype)
        functions[str(dtype)] = functools.partial(torch.matmul, a, a)
    best = {name: min(samples) for name, samples in interleave(functions, budget_s=budget_s, min_rounds=3).items()}
    flops = {dtype: 2 * _MATMUL**3 / best[str(dtype)] for dtype in (torch.float32, torch.bfloat16)}
    return Peak({size: size / best[str(size)] for size in SIZES}, flops)


def _copies(device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    for size in SIZES:
        source = torch.zeros(size // 8, device=device)
        target = torch.empty_like(source)
        yield str(size), functools.partial(target.copy_, source)


@dataclass(frozen=True)
class Cost:
    """What a call must do at least: floating-point operations, bytes read and written, and in which dtype."""

    flops: int
    moved: int
    dtype: torch.dtype


def cost(function: Callable[[], Any], inputs: Any) -> Cost:
    """The compulsory cost of one call: its operations by torch's counter; every input read, every output written, once.

    Args:
        function: the call; it runs once, in eager.
        inputs: the tensors (in any structure) that it reads: arguments, parameters, buffers.
    """
    with _Flops() as counter:
        outputs = function()
    read = _unique(inputs)
    written = [t for t in _unique(outputs) if all(t is not r for r in read)]
    floats = [t.dtype for t in read if t.dtype.is_floating_point]
    moved = sum(t.numel() * t.element_size() for t in (*read, *written))
    return Cost(counter.flops, moved, floats[0] if floats else torch.float32)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _sdpa_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


_aten = torch.ops.aten
_MORE = {  # what torch's own counter lacks
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


class _Flops(TorchDispatchMode):
    """Counts by torch's own formulas. FlopCounterMode does too, but cannot be used around autograd.grad."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet in _MORE:
            self.flops += _MORE[packet](*args, **(kwargs or {}))
        return out


def _unique(structure: Any) -> list[torch.Tensor]:
    return list({id(t): t for t in pytree.tree_leaves(structure) if isinstance(t, torch.Tensor)}.values())
