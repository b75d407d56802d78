"""Functions that torch's kernels compute with branches on data, as torch code without: a trace cannot follow a branch.

What the kernel refuses is asserted instead. `kept_whole` puts these in the kernels' place while it traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKey
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DynamicOutputShapeException

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
    where every matrix has full rank: a shape that depends on data.
    """
    driver = driver or "gelsy"
    m, n = self.shape[-2:]
    if driver in ("gelss", "gelsd") and m > n:
        raise DynamicOutputShapeException(aten.linalg_lstsq.default)
    is_vector = b.ndim == 1 or (self.ndim - 1 == b.ndim and b.shape == self.shape[:-1])
    right = b.unsqueeze(-1) if is_vector else b
    tolerance = max(m, n) * torch.finfo(self.dtype).eps if rcond is None else rcond
    solution = torch.matmul(torch.linalg.pinv(self, rtol=0.0 if driver == "gels" else tolerance), right)
    values = torch.linalg.svdvals(self.detach())
    absent = values.new_empty(0)
    residuals = absent
    if driver == "gels" and m > n:
        error = torch.matmul(self, solution) - right
        residuals = (error * error.conj()).real.sum(-2)
    rank = absent.to(torch.int64)
    if driver == "gels":
        torch._assert_async((values > 0).all(), "torch.linalg.lstsq: the input matrix does not have full rank")
    else:
        rank = (values > tolerance * values[..., :1]).sum(-1)
    found = values if driver in ("gelss", "gelsd") else absent
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, found


REPLACED: dict[tuple[OpOverload, DispatchKey], Callable[..., Any]] = {
    (aten.cov.default, DispatchKey.CompositeImplicitAutograd): cov,
    (aten.linalg_lstsq.default, DispatchKey.AutogradCPU): lstsq,
}
