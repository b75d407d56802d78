"""Buffers in and out of PJRT: every memory layout, nothing shared that should not be, nothing stale."""

import gc

import pytest
import torch

import portable as pt
from portable import dtypes
from portable.backends import pjrt


def roundtrip(tensor: torch.Tensor) -> torch.Tensor:
    client = pjrt.client()
    return client.take([client.put(tensor)])[0]


@pytest.mark.parametrize("dtype", sorted(dtypes.TO_JAX, key=str), ids=str)
def test_every_dtype_survives_the_round_trip(dtype):
    values = torch.tensor([0, 1, 2, 3]).to(dtype)
    out = roundtrip(values)
    assert out.dtype == dtype
    assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))


LAYOUTS = {
    "contiguous": lambda x: x,
    "0-d": lambda x: x[1, 2],
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.t(),
    "every second": lambda x: x[:, ::2],
    "offset by one element, unaligned": lambda x: x.flatten()[1:],
    "expanded": lambda x: x[:1].expand(5, 8),
    "channels last": lambda x: x.reshape(1, 2, 4, 4).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda x: x.flatten().unfold(0, 3, 1),
    "flipped": lambda x: x.flip(0),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "conjugate": lambda x: torch.complex(x, x).conj(),
    "imaginary part of a conjugate": lambda x: torch.complex(x, x).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_keeps_its_values(layout):
    x = LAYOUTS[layout](torch.arange(32.0).reshape(4, 8))
    assert torch.equal(roundtrip(x), x.detach().resolve_conj().resolve_neg())
    torch.testing.assert_close(pt.compile(lambda t: t + 1, backend="xla")(x), x + 1)


def test_a_result_without_elements_can_be_enlarged():
    assert roundtrip(torch.empty(0, 3)).resize_(2, 3).shape == (2, 3)


def test_an_aligned_contiguous_tensor_goes_in_and_out_without_a_copy():
    x = torch.arange(64.0)
    buffer = pjrt.client().put(x)
    assert buffer.unsafe_buffer_pointer() == x.data_ptr()
    assert pjrt.client().take([buffer])[0].data_ptr() == x.data_ptr()


def test_results_share_no_memory_with_arguments_or_each_other():
    compiled = pt.compile(lambda x, y: (x.clone(), y + 0, (x + y).clone(), x + y), backend="xla")
    x, y = torch.zeros(64), torch.ones(64)
    outputs = compiled(x, y)
    assert len({t.data_ptr() for t in (x, y, *outputs)}) == 6
    outputs[0].fill_(7)
    assert x.sum() == 0


def test_a_result_outlives_the_compiled_function():
    out = pt.compile(lambda x: x * 2, backend="xla")(torch.full((1000,), 3.0))
    gc.collect()
    torch.empty(1000).fill_(5)
    assert torch.equal(out, torch.full((1000,), 6.0))


WRITES = {
    "add_": lambda p: p.add_(1),
    "optimiser": lambda p: torch.optim.SGD([p], lr=1.0).step(),
    ".data write": lambda p: p.data.mul_(3),
    ".data replaced": lambda p: setattr(p, "data", p.data + 5),
    ".data transposed": lambda p: setattr(p, "data", p.data.t()),
    "copy_": lambda p: p.copy_(torch.full_like(p, 9)),
    "numpy": lambda p: p.detach().numpy().fill(4),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "unaligned"])
@pytest.mark.parametrize("write", WRITES)
def test_a_parameter_that_was_written_to_is_seen(write, layout):
    base = torch.randn(65)
    weight = {
        "contiguous": base[:64].reshape(8, 8).clone(),
        "transposed": base[:64].reshape(8, 8).t(),
        "unaligned": base[1:].reshape(8, 8),
    }
    module = torch.nn.Linear(8, 8, bias=False)
    module.weight = torch.nn.Parameter(weight[layout])
    module.weight.grad = torch.ones(8, 8)
    compiled = pt.compile(module, backend="xla")
    x = torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x))
        WRITES[write](module.weight)
        torch.testing.assert_close(compiled(x), module(x))


def test_parameters_stay_resident_and_leave_with_their_model():
    residents = pjrt.client().residents
    before = len(residents)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    compiled = pt.compile(module, backend="xla")
    with torch.no_grad():
        compiled(torch.ones(1, 8))
        kept = {id(p): residents.get(p) for p in module.parameters()}
        compiled(torch.ones(1, 8))
        assert all(residents.get(p) is kept[id(p)] for p in module.parameters())
    assert len(residents) == before + 4
    del module, compiled, kept
    torch._dynamo.reset()
    gc.collect()
    assert len(residents) <= before


def test_a_tensor_may_be_written_as_soon_as_the_call_returns():
    compiled = pt.compile(lambda x: (x @ x).sum(), backend="xla")
    x = torch.ones(128, 128)
    for i in range(3):
        x.fill_(2**i)
        assert compiled(x) == 128**3 * 4**i


def identity(n: int) -> bytes:
    return f"func.func public @main(%x: tensor<{n}xf32>) -> tensor<{n}xf32> {{ return %x : tensor<{n}xf32> }}".encode()


def test_a_module_that_comes_again_is_not_compiled_again(monkeypatch):
    client = pjrt.client()
    first = client.compile(identity(3))
    assert client.compile(identity(3)) is first
    assert client.compile(identity(4)) is not first


def test_few_and_small_modules_are_kept(monkeypatch):
    client = pjrt.client()
    monkeypatch.setattr(pjrt, "KEPT", 2)
    monkeypatch.setattr(client, "_kept", type(client._kept)())
    first = client.compile(identity(5))
    second = client.compile(identity(6))
    assert client.compile(identity(5)) is first, "used again, it is the last to go"
    client.compile(identity(7))
    assert client.compile(identity(5)) is first
    assert client.compile(identity(6)) is not second
    monkeypatch.setattr(pjrt, "KEPT_BYTES", 10)
    assert client.compile(identity(8)) is not client.compile(identity(8))
