"""Views, creation, bitcasts and writes into views agree with eager, elements and dtypes."""

import pytest
import torch

from portable.errors import UnsupportedOpError
from portable.testing import lowered


def same(function, *args):
    expected = function(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
    got = lowered(function, *args)
    for e, g in zip(expected, got, strict=True):
        assert g.dtype == e.dtype
        torch.testing.assert_close(g, e, rtol=0, atol=0, equal_nan=True, check_stride=False)


X = torch.arange(60, dtype=torch.float32).reshape(3, 4, 5)

VIEWS = {
    "dims": lambda x: (x.transpose(-1, 0), x.permute(-1, 0, 1), x.movedim(0, -1), x.mT, x[0].T, x.flatten(-2)),
    "slices": lambda x: (x[1:], x[:, -3:-1], x[..., ::2], x[5:], x[:, 3:1], x.narrow(-1, 1, 2), x.select(-1, -2)),
    "splits": lambda x: (
        *x.split(2, 1),
        *x.chunk(3, -1),
        *x.tensor_split((1, 3), 2),
        *x.unbind(1),
        *x.split((1, 4), -1),
    ),
    "joins": lambda x: (
        torch.cat([x, torch.empty(0), x.int()], -1),
        torch.stack([x[0], x[1]], -1),
        torch.cat([x[:0], x]),
        torch.hstack([x, x]),
        torch.cat([torch.empty(0), torch.empty(0)]),
    ),
    "repeats": lambda x: (
        x.repeat(2, 1, 2, 1),
        x.tile(2),
        x.repeat(0, 1, 1),
        x[:, :1].expand(3, 2, 5),
        x.expand(2, -1, -1, 5),
    ),
    "turns": lambda x: (x.flip(0, -1), x.roll(7), x.roll((1, -2), (0, 2)), x.rot90(3, (0, 2)), x[:0].roll(1, 0)),
    "diagonals": lambda x: (
        x.diagonal(),
        x.diagonal(1, -1, 0),
        x.diagonal(-2, 1, 2),
        x.diagonal(9),
        torch.diag_embed(x, -1, 0, -1),
        torch.diag(x[0, 0], 2),
    ),
    "triangles": lambda x: (x.tril(), x.triu(2), x.tril(-9), torch.tril_indices(3, 4, 1), torch.triu_indices(4, 3, -1)),
    "windows": lambda x: (x.unfold(1, 2, 2), x.unfold(-1, 5, 1), x.unfold(0, 1, 3), torch.tensor(2.0).unfold(0, 1, 1)),
    "0-d": lambda x: (x[0, 0, 0].reshape(1, 1), x[0, 0, 0].unsqueeze(-1), x[0, 0, 0].flip(()), x[0, 0, 0].t()),
    "shuffles": lambda x: (
        torch.pixel_shuffle(x.reshape(1, 4, 3, 5), 2),
        torch.pixel_unshuffle(x.reshape(1, 3, 4, 5)[..., :4], 2),
        torch.channel_shuffle(x.reshape(1, 4, 3, 5), 2),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("layout", ["dense", "transposed"])
def test_views_agree_with_eager(name, layout):
    same(VIEWS[name], X if layout == "dense" else X.permute(2, 1, 0).contiguous().permute(2, 1, 0))


CREATED = {
    "arange": lambda: (
        torch.arange(5),
        torch.arange(5.0),
        torch.arange(1, -6, -2),
        torch.arange(0.5, 3, 0.25),
        torch.arange(0, 1, 0.1),
        torch.arange(2, 9, 3, dtype=torch.bfloat16),
        torch.arange(1 << 40, (1 << 40) + 3),
        torch.arange(3, 3),
        torch.arange(0.6, 5, dtype=torch.int32),
    ),
    "spaced": lambda: (
        torch.linspace(0, 10, 5),
        torch.linspace(3, 3, 1),
        torch.linspace(0, 1, 0),
        torch.linspace(0, 10, 4, dtype=torch.int64),
        torch.linspace(5, -7, 6, dtype=torch.float64),
    ),
    "filled": lambda: (
        torch.full((2,), 3),
        torch.full((2,), True),
        torch.full((), 1.5, dtype=torch.int8),
        torch.zeros(2, 0),
        torch.eye(2, 3),
        torch.eye(3, dtype=torch.bool),
        torch.scalar_tensor(2),
        torch.ones((2,), dtype=torch.complex64),
        torch.full((2,), float("nan")),
    ),
}


@pytest.mark.parametrize("name", CREATED)
def test_creation_agrees_with_eager(name):
    same(CREATED[name])


def test_bits_read_as_another_type():
    def views(x, b, c):
        return (
            x.view(torch.int32),
            x[..., :4].contiguous().view(torch.float64),
            x.view(torch.uint8),
            b.view(torch.uint8),
            b.view(torch.int8).view(torch.bool),
            torch.view_as_real(c),
            torch.view_as_complex(torch.view_as_real(c)),
            c.view(torch.float32),
            c.conj() * 1j,
            c.imag,
            c.real,
            torch.view_as_real(c)[..., 0].view(torch.int32),
        )

    same(views, X + 0.1, torch.tensor([True, False]), torch.tensor([1 + 2j, -0.5 - 1j]))


WRITES = {
    "slice": lambda x, v: x[:, 1:4:2].copy_(v[0, 0]),
    "row": lambda x, v: x[-1].fill_(7),
    "negative": lambda x, v: x[:, -2:].mul_(2),
    "diagonal": lambda x, v: x.diagonal(1, 1, 2).add_(100),
    "view of a view": lambda x, v: x.transpose(0, 2)[1:].unbind(-1)[2].zero_(),
    "strided": lambda x, v: x.as_strided((2, 3), (7, 2), 4).fill_(-1),
    "empty": lambda x, v: x[:0].fill_(1),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_view_reaches_its_base(name):
    def function(x, v):
        base = x * 2
        WRITES[name](base, v)
        return (base,)

    same(function, X, -X)


def test_scatters_of_views_and_their_gradients():
    def function(x, v):
        x, v = x.clone().requires_grad_(), v.clone().requires_grad_()
        y = torch.slice_scatter(x, v[:, :2], 1, 1, 4, 2)
        y = torch.select_scatter(y, v[:, :, 0], 2, -1)
        y = torch.diagonal_scatter(y, v[:, 0, :3] * 2, -1, 1, 2)
        y = y.unfold(2, 3, 1).sum(-1) * y[..., 1:4] + y.diagonal(0, 0, 1).sum()
        return (y, *torch.autograd.grad((y * y).sum(), (x, v)))

    same(function, X, -X[..., :].clone())


def test_as_strided_reads_what_its_input_covers():
    def function(x):
        y = x.transpose(0, 2)
        return (
            x.as_strided((2, 2), (20, 3), 1),
            y.as_strided((3,), (1,), 7),
            x[1:].as_strided((2, 3), (5, 1)),
            x[:, 1].as_strided((2, 2), (20, 1)),
            x.as_strided((0,), (1,)),
        )

    same(function, X)


@pytest.mark.parametrize("offset", [0, 50])
def test_as_strided_beyond_its_input_is_refused(offset):
    with pytest.raises(UnsupportedOpError, match="outside of its input"):
        lowered(lambda x: x[1:2].as_strided((20,), (1,), offset), X)
