"""Order agrees with eager: NaN is the largest, equal elements keep their order, infinities, empty and 0-d tensors."""

import math

import pytest
import torch

from portable.errors import UnsupportedOpError
from portable.testing import lowered

nan, inf = math.nan, math.inf
X = torch.tensor([[3.0, nan, -inf, 0.0, -0.0, 3.0, inf], [1.0, 2.0, 2.0, -1.0, nan, nan, 5.0]])
DISTINCT = torch.randperm(60, generator=torch.Generator().manual_seed(0)).reshape(3, 4, 5) - 30

SORTS = {
    f"{dim} {descending}": lambda x, d=dim, down=descending: torch.sort(x, dim=d, descending=down, stable=True)
    for dim in (0, -1)
    for descending in (False, True)
} | {
    "argsort": lambda x: x.argsort(stable=True),
    "msort": lambda x: x.msort(),
    "0-d": lambda x: x[0, 0].sort(),
    "empty": lambda x: x[:0].sort(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_a_stable_sort_agrees_with_eager(agrees, dtype):
    x = X if dtype.is_floating_point else X.nan_to_num(4, 7, 0)
    agrees(SORTS, x.to(dtype))


SELECTIONS = {
    "topk": lambda x: x.topk(3),
    "smallest": lambda x: x.topk(2, dim=1, largest=False),
    "unsorted": lambda x: x.topk(4, sorted=False)[0].sort()[0],
    "none": lambda x: x.topk(0),
    "kth": lambda x: x.kthvalue(2, dim=1, keepdim=True),
    "median": lambda x: x.median(),
    "median of a dim": lambda x: x.median(1),
    "nanmedian": lambda x: x.nanmedian(-1, keepdim=True),
    "mode": lambda x: x.mode(0),
    "0-d": lambda x: (*x[0, 0, 0].topk(1), *x[0, 0, 0].kthvalue(1), *x[0, 0, 0].mode(), x[0, 0, 0].median()),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_selections_of_distinct_elements_agree_with_eager(agrees, dtype):
    agrees(SELECTIONS, DISTINCT.to(dtype))


OPEN_TIES = {
    "sort": lambda x: x.sort(),
    "argsort": lambda x: x.argsort(),
    "mode": lambda x: x.mode(),
}


@pytest.mark.parametrize("name", OPEN_TIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_an_index_among_equal_elements_that_torch_leaves_open_is_refused(name, dtype):
    x = torch.arange(20).remainder(7).to(dtype)
    with pytest.raises(UnsupportedOpError, match="equal elements"):
        lowered(OPEN_TIES[name], x)


@pytest.mark.parametrize(("size", "dtype"), [(4, torch.float32), (17, torch.bfloat16), (70, torch.int64)])
def test_of_equal_elements_topk_and_kthvalue_take_those_that_eager_takes(agrees, size, dtype):
    x = torch.randint(-2, 3, (5, size), generator=torch.Generator().manual_seed(size)).to(dtype)
    k = size // 2
    functions = {
        "largest": lambda x: x.topk(k),
        "smallest": lambda x: x.topk(k, largest=False),
        "one": lambda x: x.topk(1),
        "kth": lambda x: x.kthvalue(k),
    }
    agrees(functions, x)


def test_of_equal_nan_topk_takes_those_that_eager_takes(agrees):
    x = torch.tensor([[nan, 1.0, nan, 1.0, nan], [0.0, -0.0, 0.0, -0.0, nan]])
    agrees({"topk": lambda x: x.topk(3), "all": lambda x: x.topk(5), "smallest": lambda x: x.topk(2, largest=False)}, x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int64])
def test_the_values_alone_and_stable_orders_are_lowered(agrees, dtype):
    functions = {
        "topk": lambda x: x.topk(3)[0],
        "kthvalue": lambda x: x.kthvalue(2)[0],
        "sort": lambda x: x.sort()[0],
        "stable": lambda x: x.sort(stable=True),
        "argsort": lambda x: x.argsort(stable=True),
        "few": lambda x: x[:16].sort(),
        "mode": lambda x: x.mode()[0],
        "median": lambda x: x.median(0),
    }
    agrees(functions, torch.arange(20).remainder(7).to(dtype))


def test_nan_in_selections(agrees):
    functions = {
        "topk": lambda x: x.topk(3)[0],
        "smallest": lambda x: x.topk(6, largest=False)[0],
        "kth": lambda x: x.kthvalue(6)[0],
        "median": lambda x: x.median(1),
        "nanmedian": lambda x: (x.nanmedian(), x.nanmedian(1)[0]),
        "all of them": lambda x: (x[1, 4:6].nanmedian(), x[1, 4:6].median()),
        "of none": lambda x: (x[:0].median(), x[:0].nanmedian()),
    }
    agrees(functions, X)


def test_the_mode_is_the_smallest_of_the_most_frequent(agrees):
    agrees({"mode": lambda x: (*x.mode(1), *x.mode(0, keepdim=True))}, torch.tensor([[2, 1, 1, 2, 0], [3, 3, 0, 0, 0]]))


def test_binary_search(agrees):
    edges = torch.tensor([1.0, 2.0, 2.0, 5.0])
    functions = {
        "left": lambda x: torch.searchsorted(edges, x),
        "right": lambda x: torch.searchsorted(edges, x, right=True, out_int32=True),
        "rows": lambda x: torch.searchsorted(x.nan_to_num(9).sort()[0], x, side="right"),
        "sorter": lambda x: torch.searchsorted(x.nan_to_num(9), x, sorter=x.nan_to_num(9).argsort(stable=True)),
        "number": lambda x: torch.searchsorted(edges, 2),
        "no edges": lambda x: torch.bucketize(x, edges[:0]),
        "bucketize": lambda x: (torch.bucketize(x, edges, right=True), torch.bucketize(3, edges)),
        "integers": lambda x: torch.bucketize(x.nan_to_num(4, 9, -9).long(), edges.long()),
    }
    agrees(functions, X)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 16])
def test_the_mode_among_nan_is_that_of_torchs_insertion_sort(length):
    choices = torch.tensor([math.nan, 1.0, 2.0, 3.0, -0.0, 0.0, math.inf])
    drawn = torch.randint(0, 7, (200, length), generator=torch.Generator().manual_seed(length))
    x = choices[drawn]
    for want, got in zip(torch.mode(x, 1), lowered(lambda x: tuple(torch.mode(x, 1)), x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
