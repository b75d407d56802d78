"""The roofline: what this machine's measured peak allows a computation (Williams, Waterman and Patterson 2009).

Peak and workloads are measured by the same timer in the same process. The bandwidth depends on where the data fits, so
it is measured for several sizes; a workload is held to that of the next larger one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from .timer import interleave

SIZES = (1 << 18, 1 << 22, 1 << 25, 1 << 28)  # bytes read and written by a copy
_MATMULS = (384, 1024)


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
    for dtype, n in itertools.product((torch.float32, torch.bfloat16), _MATMULS):
        a = torch.randn(n, n, device=device).to(dtype)
        functions[f"{dtype} {n}"] = functools.partial(torch.matmul, a, a)
    best = {name: min(samples) for name, samples in interleave(functions, budget_s=budget_s, min_rounds=3).items()}
    flops = {t: max(2 * n**3 / best[f"{t} {n}"] for n in _MATMULS) for t in (torch.float32, torch.bfloat16)}
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
    """The compulsory cost of one call: its operations by torch's counter; every input read, every output written,
    once; of a table that is looked up, the rows that are found.

    Args:
        function: the call; it runs once, in eager.
        inputs: the tensors (in any structure) that it reads: arguments, parameters, buffers.
    """
    with _Counter() as counter:
        outputs = function()
    read = _unique(inputs)
    written = [t for t in _unique(outputs) if all(t is not r for r in read)]
    floats = [t.dtype for t in read if t.dtype.is_floating_point]
    moved = sum(min(counter.looked_up.get(t.data_ptr(), _bytes(t)), _bytes(t)) for t in read) + sum(
        map(_bytes, written)
    )
    return Cost(counter.flops, moved, floats[0] if floats else torch.float32)


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(q.shape, k.shape, v.shape)


def _sdpa_backward(grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape)


def _convolution_backward(*args: Any, **_: Any) -> int:
    grad, x, weight, transposed, mask = args[0], args[1], args[2], args[7], args[10]
    forward = 2 * (x if transposed else grad).numel() * weight[0].numel()
    return forward * (bool(mask[0]) + bool(mask[1]))


_aten = torch.ops.aten
_OWN: dict[Any, Callable[..., int]] = {  # what torch's counter lacks, or has without regard to groups
    _aten.convolution_backward: _convolution_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _sdpa,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _sdpa_backward,
}


_LOOKUPS = (_aten.embedding, _aten.index_select, _aten.gather)  # of their first argument they read what they return


class _Counter(TorchDispatchMode):
    """Counts operations by torch's formulas, and what look-ups read of their tables.

    torch's own FlopCounterMode cannot be used around autograd.grad.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.looked_up: dict[int, int] = {}  # address of a table → bytes that were read of it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        formula: Callable[..., int] | None = _OWN.get(packet, flop_registry.get(packet))
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=out)
        if packet in _LOOKUPS:
            table = args[0].data_ptr()
            self.looked_up[table] = self.looked_up.get(table, 0) + _bytes(out)
        return out


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _unique(structure: Any) -> list[torch.Tensor]:
    return list({id(t): t for t in pytree.tree_leaves(structure) if isinstance(t, torch.Tensor)}.values())
