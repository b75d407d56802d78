"""Reading and writing by index agree with eager: negative, broadcast and repeated indices, masks, empty and 0-d."""

import math

import pytest
import torch
import torch.nn.functional as F

from portable.errors import UnsupportedOpError
from portable.testing import lowered

nan, inf = math.nan, math.inf
X = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5) - 20
ROWS = torch.tensor([[0, -1], [2, 1]])
MASK = X.remainder(3) == 0

READS = {
    "one index": lambda x, i, m: x[i],
    "after a slice": lambda x, i, m: x[:, i],
    "apart": lambda x, i, m: x[i, :, i],
    "adjacent": lambda x, i, m: x[:, i, i[0]],
    "with new dims": lambda x, i, m: x[None, i, ..., i],
    "narrow index types": lambda x, i, m: x[i.int(), i.to(torch.int8).long()],
    "numbers": lambda x, i, m: x[-1, i, 2],
    "empty": lambda x, i, m: x[i[:0], :, i[:0]],
    "select": lambda x, i, m: x.index_select(-1, i.remainder(3)[0]),
    "select 0-d": lambda x, i, m: x[0, 0, 0].index_select(0, i[0, 0].reshape(1)),
    "gather": lambda x, i, m: torch.gather(x, 1, (m[:2, :, :3].long() + 2)),
    "gather 0-d": lambda x, i, m: torch.gather(x[0, 0, 0], 0, i[0, 0]),
    "take": lambda x, i, m: torch.take(x, i * 7),
    "take along": lambda x, i, m: torch.take_along_dim(x, x.argsort(dim=1, stable=True), 1),
    "embedding": lambda x, i, m: F.embedding(i.remainder(3), x[:, :, 0]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_reads_agree_with_eager(agrees, dtype):
    agrees(READS, X.to(dtype), ROWS, MASK)


V = torch.linspace(-2, 2, 60).reshape(3, 4, 5)
DUPLICATES = torch.tensor([0, 2, 2, 0])
KEPT = torch.tensor([True, False, False, True])


def assigned(x, where, values):
    x = x.clone()
    x[where] = values
    return x


WRITES = {
    "put": lambda x, i, m, v: x.index_put((i,), v[0]),
    "put apart": lambda x, i, m, v: assigned(x, (i, slice(None), i), v[0, 0, 0]),
    "put a number": lambda x, i, m, v: assigned(x, (slice(None), i), v[0, 0, 0]),
    "put and add": lambda x, i, m, v: x.index_put((i * 0, i), v[:2, :2], accumulate=True),
    "put by mask": lambda x, i, m, v: x.index_put((m,), v[0, 0, 0]),
    "put by the mask of a dim": lambda x, i, m, v: assigned(x, (slice(None), KEPT), v[:, :2]),
    "put by a mask in order": lambda x, i, m, v: assigned(x, x > 2, v.flatten()[:37]),
    "put by a mask of bytes": lambda x, i, m, v: torch.ops.aten.index_put(x, [None, KEPT.byte()], v[:, :2]),
    "index add": lambda x, i, m, v: x.index_add(1, DUPLICATES, v, alpha=2),
    "index copy": lambda x, i, m, v: x.index_copy(-1, torch.tensor([4, 1]), v[..., :2]),
    "index fill": lambda x, i, m, v: x.index_fill(1, torch.tensor([-1, 0]), 3),
    "index fill by a tensor": lambda x, i, m, v: x.index_fill(0, torch.tensor([1]), v[0, 0, 0]),
    "scatter": lambda x, i, m, v: x.scatter(1, m[:2, :, :3].long() * 2, v),
    "scatter a number": lambda x, i, m, v: x.scatter(-1, m[:, :, :1].long(), 9),
    "scatter and add": lambda x, i, m, v: x.scatter_add(0, m.long(), v),
    "scatter and multiply": lambda x, i, m, v: x.scatter(0, m.long(), v, reduce="multiply"),
    "scatter 0-d": lambda x, i, m, v: x[0, 0, 0].scatter(0, i[0, 0], v[0, 0, 0]),
    "put flat": lambda x, i, m, v: x.put(i * 3, v[0, 0, :4].reshape(2, 2)),
    "put flat and add": lambda x, i, m, v: x.put(i * 0, v[0, 0, :4].reshape(2, 2), accumulate=True),
    "masked fill": lambda x, i, m, v: x.masked_fill(m[:, :1], 7),
    "masked fill by a tensor": lambda x, i, m, v: x[0].masked_fill(m, v[0, 0, 0]),
    "masked scatter": lambda x, i, m, v: x.masked_scatter(m, v),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_writes_agree_with_eager(agrees, dtype):
    agrees(WRITES, X.to(dtype), ROWS, MASK, (V * 3).to(dtype))


REDUCE = {
    f"{name} {include}": lambda x, i, v, name=name, include=include: x.scatter_reduce(
        1, i, v, name, include_self=include
    )
    for name in ("sum", "prod", "mean", "amax", "amin")
    for include in (True, False)
} | {
    f"rows {name} {include}": lambda x, i, v, name=name, include=include: x.index_reduce(
        0, i[0, :, 0] * 0 + torch.tensor([2, 0, 2, 2]), v.repeat(2, 1, 1)[:4], name, include_self=include
    )
    for name in ("prod", "mean", "amax", "amin")
    for include in (True, False)
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_reductions_by_index_agree_with_eager(agrees, dtype):
    x, v = (X - 9).to(dtype), (V * 3).to(dtype)
    if dtype.is_floating_point:
        v[0, 0, 0], v[1, 1, 1], v[2, 2, 2] = nan, inf, -inf
    agrees(REDUCE, x, MASK.long() * 2, v)


def test_gradients_by_index_agree_with_eager(agrees):
    def gradient(function):
        def run(x, i, m, v):
            x, v = x.clone().requires_grad_(), v.clone().requires_grad_()
            y = function(x, i, m, v)
            return [g for g in torch.autograd.grad((y * y).sum(), (x, v), allow_unused=True) if g is not None]

        return run

    left_out = "scatter", "scatter and multiply", "index fill by a tensor"  # eager has no gradient of a larger source
    functions = {name: f for name, f in (READS | WRITES).items() if name not in left_out}
    four = {name: (lambda x, i, m, v, f=f: f(x, i, m)) if name in READS else f for name, f in functions.items()}
    agrees({name: gradient(f) for name, f in four.items()}, X, ROWS, MASK, V)


def test_the_gradient_of_an_embedding(agrees):
    def gradient(**options):
        def run(w, i):
            w = w.clone().requires_grad_()
            return torch.autograd.grad(F.embedding(i, w, **options).pow(2).sum(), w)

        return run

    index = torch.tensor([[1, 2, 2], [0, 2, 1]])
    agrees(
        {"plain": gradient(), "padded": gradient(padding_idx=2), "by frequency": gradient(scale_grad_by_freq=True)},
        X[0],
        index,
    )


def test_static_selections(agrees):
    x = torch.tensor([[0.0, 2.0, nan], [-0.0, 1.0, 0.0]])
    functions = {
        "nonzero": lambda x: torch.nonzero_static(x, size=5, fill_value=-7),
        "too few": lambda x: torch.nonzero_static(x, size=2),
        "repeat": lambda x: x.repeat_interleave(torch.tensor([2, 0, 3]), dim=1, output_size=5),
        "isin": lambda x: torch.isin(x, torch.tensor([nan, 0.0, 2.0])),
        "one hot": lambda x: F.one_hot(x.nan_to_num(1).long(), 3),
        "unravel": lambda x: torch.stack(torch.unravel_index(torch.tensor([3, 5]), (2, 3))),
        "histogram": lambda x: torch.histc(x, 4, -1, 2),
        "histogram of all": lambda x: torch.histc(x[1], 3),
        "edges": lambda x: torch.histogram(x, torch.tensor([0.0, 1.0, 2.0]))[0],
        "density": lambda x: torch.histogram(x, 3, range=(0.0, 3.0), density=True)[0],
        "segments": lambda x: torch.segment_reduce(x[0], "mean", lengths=torch.tensor([2, 0, 1]), axis=0),
    }
    agrees(functions, x)


def test_an_index_into_an_empty_dimension_is_refused():
    with pytest.raises((UnsupportedOpError, IndexError)):
        lowered(lambda x, i: x[i], X[:0], ROWS)
