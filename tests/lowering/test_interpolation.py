"""Resampling and grid sampling agree with eager: all modes, sizes and factors, gradients."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from portable.errors import UnsupportedOpError
from portable.testing import lowered
from tests.lowering.networks import assert_agree

SIZES = [{"size": (5, 10, 3)}, {"size": (1, 14, 5)}, {"scale_factor": (0.37, 1.9, 2.0)}, {"scale_factor": (2.0,) * 3}]
# a factor that leaves the size as it is: torch copies
SIZES += [{"scale_factor": (1.05, 1.05, 1.05)}]
MODES = {
    1: ("nearest", "nearest-exact", "linear"),
    2: ("nearest", "nearest-exact", "bilinear", "bicubic"),
    3: ("nearest", "trilinear"),
}


def volume(rank):
    return torch.randn(2, 3, *(9, 7, 5)[:rank], generator=torch.Generator().manual_seed(rank))


CASES = [(rank, mode, None) for rank, modes in MODES.items() for mode in modes]
CASES += [(rank, mode, True) for rank, mode, _ in CASES if "nearest" not in mode]  # which has no corners to align


@pytest.mark.parametrize("rank, mode, align_corners", CASES)
def test_interpolate(rank, mode, align_corners):
    def resized(x):
        sizes = [{name: v[:rank] for name, v in size.items()} for size in SIZES]
        return [F.interpolate(x, mode=mode, align_corners=align_corners, **size) for size in sizes]

    assert_agree(resized, volume(rank))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased(mode):
    sizes = [{"size": (5, 4)}, {"size": (13, 3)}, {"size": (1, 1)}, {"scale_factor": (0.37, 1.9)}]

    def resized(x):
        return [F.interpolate(x, mode=mode, antialias=True, align_corners=a, **s) for s in sizes for a in (False, True)]

    assert_agree(resized, volume(2))


def test_half_precision_and_integers():
    x = volume(2).to(torch.bfloat16)
    assert_agree(lambda x: [F.interpolate(x, (5, 11), mode=m) for m in MODES[2]], x)
    image = torch.arange(256).reshape(1, 4, 8, 8).to(torch.uint8)
    assert_agree(lambda x: F.interpolate(x, (5, 11)), image, gradients=False)
    with pytest.raises(UnsupportedOpError, match="fixed-point"):
        lowered(lambda x: F.interpolate(x, (5, 11), mode="bilinear"), image)


def test_nan_reaches_only_what_reads_it():
    x = volume(2)
    x[0, 0, 4, 4] = math.nan
    assert_agree(lambda x: [F.interpolate(x, (5, 11), mode=m) for m in MODES[2]], x, gradients=False)


PADDINGS = ("zeros", "border", "reflection")


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("align_corners", [False, True])
def test_grid_sample(padding, align_corners):
    generator = torch.Generator().manual_seed(0)
    x, grid = volume(2), torch.randn(2, 6, 7, 2, generator=generator) * 1.3
    x3, grid3 = volume(3), torch.randn(2, 3, 2, 4, 3, generator=generator) * 1.3

    def sampled(x, grid, x3, grid3):
        modes = ("bilinear", "nearest", "bicubic")
        return [F.grid_sample(x, grid, mode, padding, align_corners) for mode in modes] + [
            F.grid_sample(x3, grid3, mode, padding, align_corners) for mode in modes[:2]
        ]

    assert_agree(sampled, x, grid, x3, grid3, tolerance=1e-4)


def test_grid_points_at_edges_beyond_and_nan():
    x = volume(2)
    points = [[1.0, -1.0], [0.0, 0.0], [math.inf, 0.0], [math.nan, 0.0], [1.0, 1.0], [-3.0, 0.2]]
    grid = torch.tensor(points).reshape(1, 2, 3, 2).expand(2, -1, -1, -1)
    assert_agree(lambda x, g: [F.grid_sample(x, g, "bilinear", p, False) for p in PADDINGS], x, grid, gradients=False)


def grid_gradients(*cases):
    """What grid_sample gives in each case (mode, padding, align_corners), and both gradients."""

    def run(x, grid):
        x, grid = x.detach().requires_grad_(), grid.detach().requires_grad_()
        results = []
        for case in cases:
            out = F.grid_sample(x, grid, *case)
            tangent = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).reshape(out.shape)
            results += [out.detach(), *torch.autograd.grad(out, (x, grid), tangent)]
        return results

    return run


def assert_equal(run, *args):
    for want, got in zip(run(*args), lowered(run, *args), strict=True):
        limit = 2e-2 if want.dtype == torch.float16 and HALF_IN_HARDWARE else 0
        torch.testing.assert_close(got, want, rtol=limit, atol=limit)


def scattered_grid(dtype, *shape):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 1.3).to(dtype)


# Where a processor computes in float16, LLVM rounds some steps of a gradient that torch's kernel rounds elsewhere.
HALF_IN_HARDWARE = "avx512_fp16" in Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else False
ROUNDED = [("bilinear", "zeros", True), ("bilinear", "border", False), ("bilinear", "reflection", True)]
ROUNDED += [("nearest", "reflection", False)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_grid_sample_of_half_precision_rounds_each_step_as_eager(dtype):
    assert_equal(grid_gradients(*ROUNDED), volume(2).to(dtype), scattered_grid(dtype, 2, 6, 7, 2))
    assert_equal(grid_gradients(("bicubic", "border", False)), volume(2).to(dtype), scattered_grid(dtype, 2, 6, 7, 2))
    assert_equal(grid_gradients(*ROUNDED), volume(3).to(dtype), scattered_grid(dtype, 2, 4, 5, 3, 3))


@pytest.mark.parametrize("layout", [(0, 2, 1, 3), (0, 3, 1, 2), (0, 3, 2, 1)], ids=str)
def test_grid_sample_of_half_precision_sums_in_the_order_of_the_grids_memory(layout):
    grid = scattered_grid(torch.bfloat16, 2, 6, 23, 2)
    grid = grid.permute(layout).contiguous().permute([layout.index(d) for d in range(4)])
    assert_equal(grid_gradients(("bilinear", "border", False)), volume(2).to(torch.bfloat16), grid)


@pytest.mark.parametrize("rank", [2, 3])
def test_grid_points_at_the_border_have_no_slope(rank):
    values = torch.tensor([-1.0, 1.0, 0.0, 0.5, -3.0, 3.0, -1.0, 0.25, 1.0, -0.75, 2.0, -2.0])
    grid = torch.stack([values.roll(7 * d) for d in range(rank)], -1).reshape(1, *((3, 4), (3, 2, 2))[rank - 2], rank)
    x = torch.randn(1, 2, *(5, 4, 1)[:rank], generator=torch.Generator().manual_seed(0))
    cases = [("bilinear", padding, align) for padding in ("border", "reflection") for align in (False, True)]
    assert_agree(grid_gradients(*cases), x, grid, gradients=False)


def test_affine_grid_fold_and_unfold():
    theta = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(2))
    assert_agree(lambda t: [F.affine_grid(t, (2, 3, 4, 5), align_corners=a) for a in (False, True)], theta)

    def there_and_back(x):
        columns = F.unfold(x, (3, 2), dilation=(1, 2), padding=1, stride=2)
        return [columns, F.fold(columns, (9, 7), (3, 2), dilation=(1, 2), padding=1, stride=2)]

    assert_agree(there_and_back, volume(2))
