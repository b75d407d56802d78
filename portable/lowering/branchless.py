"""Functions that torch's kernels compute with branches on data, as torch code without: a trace cannot follow a branch.

What the kernel refuses is asserted instead. `kept_whole` puts these in the kernels' place while it traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

aten = torch.ops.aten


def cov(
    self: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Covariance of the rows; a factor of no degrees of freedom divides by zero, as in torch (and numpy)."""
    x = self.view(1, -1) if self.ndim < 2 else self
    weights = None
    for given, name in ((fweights, "fweights"), (aweights, "aweights")):
        if given is not None:
            if given.numel():
                torch._assert_async((given >= 0).all(), f"cov(): {name} cannot be negative")
            weights = given if weights is None else weights * given
    if weights is None:
        total: torch.Tensor = torch.scalar_tensor(x.shape[1], dtype=torch.int64)
    else:
        total = weights.sum()
        torch._assert_async(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (x if weights is None else x * weights).sum(1) / total
    degrees = total - correction
    if weights is not None and aweights is not None and correction != 0:
        degrees = total - correction * (weights * aweights).sum() / total
    degrees = torch.where(degrees <= 0, torch.zeros_like(degrees), degrees)
    centred = x - mean.unsqueeze(1)
    products = torch.mm(centred, (centred if weights is None else centred * weights).t().conj())
    return torch.true_divide(products, degrees).squeeze()


def lstsq(
    self: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The solution of least norm among those of least squares.

    Singular values up to ``rcond`` times the largest count as zero. The drivers gelss and gelsd return residuals only
    where every matrix has full rank: a shape that depends on data, which only a specialised trace may read.
    """
    driver = driver or "gelsy"
    m, n = self.shape[-2:]
    is_vector = b.ndim == 1 or (self.ndim - 1 == b.ndim and b.shape == self.shape[:-1])
    right = b.unsqueeze(-1) if is_vector else b
    tolerance = max(m, n) * torch.finfo(self.dtype).eps if rcond is None else rcond
    solution = torch.matmul(torch.linalg.pinv(self, rtol=0.0 if driver == "gels" else tolerance), right)
    values = torch.linalg.svdvals(self.detach())
    absent = values.new_empty(0)
    residuals = absent
    full = (values > tolerance * values[..., :1]).all()
    if m > n and (driver == "gels" or (driver in ("gelss", "gelsd") and _read(full))):
        error = torch.matmul(self, solution) - right
        residuals = (error * error.conj()).real.sum(-2)
    rank = absent.to(torch.int64)
    if driver == "gels":
        torch._assert_async((values > 0).all(), "torch.linalg.lstsq: the input matrix does not have full rank")
    else:
        rank = (values > tolerance * values[..., :1]).sum(-1)
    found = values if driver in ("gelss", "gelsd") else absent
    # LAPACK leaves it by columns, in the memory of the right side
    by_columns = torch.nn.functional.pad(solution, (0, 0, 0, max(m - n, 0))).mT.contiguous().mT[..., :n, :]
    return by_columns.squeeze(-1) if is_vector else by_columns, residuals, rank, found


def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int],
    target_lengths: Sequence[int],
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """The kernel's own code, which fills a tensor with the lengths in a way that no trace can follow."""
    batched = log_probs.ndim == 3
    if not batched:
        log_probs, targets = log_probs.unsqueeze(1), targets.unsqueeze(0)
    loss = aten._ctc_loss.default(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        loss = torch.where(loss == math.inf, torch.zeros_like(loss), loss)
    if reduction == 1:
        lengths = torch.tensor(target_lengths, dtype=loss.dtype, device=loss.device)
        return (loss / lengths.clamp_min(1)).mean()
    if reduction == 2:
        return loss.sum()
    return loss if batched else loss.squeeze(0)


def _read(condition: torch.Tensor) -> bool:
    try:
        return bool(condition.item())
    except (DataDependentOutputException, GuardOnDataDependentSymNode) as failure:
        raise DynamicOutputShapeException(aten.linalg_lstsq.default) from failure


REPLACED: dict[tuple[OpOverload, DispatchKey], Callable[..., Any]] = {
    (aten.cov.default, DispatchKey.CompositeImplicitAutograd): cov,
    (aten.ctc_loss.IntList, DispatchKey.CompositeImplicitAutograd): ctc_loss,
    (aten.linalg_lstsq.default, DispatchKey.AutogradCPU): lstsq,
}
