"""Recurrent layers agree with eager, forward and backward, packed or not; dropout between layers is there; their
programs do not grow with the number of steps."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import portable as pt
from portable.testing import lowered
from tests.lowering.networks import assert_agree

OPTIONS = [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]


def functional(module):
    names = [name for name, _ in module.named_parameters()]

    def call(x, *parameters):
        out, state = torch.func.functional_call(module, dict(zip(names, parameters, strict=True)), (x,))
        return [out, *(state if isinstance(state, tuple) else (state,))]

    return call, [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_layers(kind, options):
    torch.manual_seed(0)
    call, parameters = functional(kind(4, 3, **options))
    assert_agree(call, torch.randn(3, 2, 4), *parameters)


def test_gradients_of_the_weights_alone():
    torch.manual_seed(0)
    call, parameters = functional(nn.LSTM(4, 3))
    x = torch.randn(3, 2, 4)
    assert_agree(lambda *p: call(x, *p), *parameters)


def test_dropout_between_layers_is_not_left_out():
    torch.manual_seed(0)
    layers = nn.LSTM(4, 8, num_layers=2, dropout=0.5).train()
    call, parameters = functional(layers)
    x = torch.randn(3, 2, 4)
    layers.eval()
    without = call(x, *parameters)[0]
    layers.train()
    assert not torch.allclose(lowered(lambda *a: call(*a)[0], x, *parameters), without)


KINDS = [nn.LSTM, nn.GRU, nn.RNN]
LENGTHS = torch.tensor([2, 5, 1, 5])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind, dtype):
    torch.manual_seed(0)
    call, parameters = functional(kind(4, 3, bidirectional=True, dtype=dtype))
    assert_agree(call, torch.randn(3, 2, 4, dtype=dtype), *parameters)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(4, 6, 2, proj_size=3, bidirectional=True),
        lambda: nn.LSTM(4, 6, proj_size=3, bias=False),
        lambda: nn.RNN(4, 3, 2, nonlinearity="relu"),
    ],
)
def test_projections_and_relu(layer):
    torch.manual_seed(0)
    call, parameters = functional(layer())
    assert_agree(call, torch.randn(3, 2, 4), *parameters)


def packed(layers, bad=None):
    """A function of (steps, initial states, parameters), which runs the layers on a packed batch; its arguments."""
    batch = pack_padded_sequence(torch.randn(5, 4, 4), LENGTHS, enforce_sorted=False)
    sizes = batch.batch_sizes if bad is None else torch.tensor(bad)
    names = [name for name, _ in layers.named_parameters()]
    states = 2 if isinstance(layers, nn.LSTM) else 1
    shape = (layers.num_layers * (1 + layers.bidirectional), 4, layers.hidden_size)

    def call(steps, *rest):
        hx = rest[0] if states == 1 else rest[:2]
        parameters = dict(zip(names, rest[states:], strict=True))
        sequence = PackedSequence(steps, sizes, batch.sorted_indices, batch.unsorted_indices)
        out, state = torch.func.functional_call(layers, parameters, (sequence, hx))
        return [out.data, *(state if isinstance(state, tuple) else (state,))]

    return call, [batch.data, *torch.randn(states, *shape).unbind(), *(p.detach() for p in layers.parameters())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_packed_sequences(kind, bidirectional):
    torch.manual_seed(0)
    call, args = packed(kind(4, 3, 2, bidirectional=bidirectional))
    assert_agree(call, *args)


@pytest.mark.parametrize("sizes", [[4, 4, 4], [3, 4, 2, 2, 2]])
def test_lengths_that_are_none_raise(sizes):
    torch.manual_seed(0)
    call, args = packed(nn.LSTM(4, 3), sizes)
    with pytest.raises(RuntimeError):
        call(*args)
    with pytest.raises(RuntimeError, match=r"batch_sizes .* of a packed sequence"):
        lowered(call, *args)


def test_a_second_derivative():
    torch.manual_seed(0)
    call, parameters = functional(nn.GRU(3, 2, dtype=torch.float64))

    def slope(x, *p):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(call(x, *p)[0].square().sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)

    assert_agree(slope, torch.randn(3, 2, 3, dtype=torch.float64), *parameters, gradients=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_autocast(kind):
    torch.manual_seed(0)
    layers, x = kind(4, 3), torch.randn(3, 2, 4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        want = layers(x)[0]
        got = lowered(lambda x: layers(x)[0], x)
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_gradients_of_each_sample():
    torch.manual_seed(0)
    layers, x = nn.LSTM(4, 3), torch.randn(2, 3, 4)
    assert_agree(torch.func.vmap(torch.func.grad(lambda x: layers(x[:, None])[0].sum())), x, gradients=False)


def test_wrong_sizes_raise_what_eager_raises():
    weights = nn.GRU(4, 3)
    for parameters in ([weights.weight_ih_l0], [torch.ones(9, 5), torch.ones(9, 3)]):

        def call(x, *p):
            return torch.gru(x, torch.zeros(1, 2, 3), p, False, 1, 0.0, False, False, False)

        for run in (call, lambda *a: lowered(call, *a)):
            with pytest.raises(RuntimeError, match="number of RNN parameters|shapes cannot be|same reduction dim"):
                run(torch.ones(3, 2, 4), *parameters)


def test_no_steps_raise_what_eager_raises():
    call, parameters = functional(nn.GRU(4, 3))
    for run in (call, lambda *a: lowered(call, *a)):
        with pytest.raises(RuntimeError, match="sequence length to be larger than 0"):
            run(torch.ones(0, 2, 4), *parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_is_one_graph_that_does_not_grow(kind):
    torch.manual_seed(0)
    layers, programs = kind(4, 3, 2, bidirectional=True), []
    for steps in (4, 40):
        x = torch.randn(steps, 2, 4, requires_grad=True)
        compiled = pt.compile(layers, backend="xla")
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            out = compiled(x)[0]
        torch.testing.assert_close(out, layers(x)[0])
        (got,), (want,) = (torch.autograd.grad(y.square().sum(), x) for y in (out, layers(x)[0]))
        torch.testing.assert_close(got, want)
        report = pt.explain(compiled)
        assert not report.graph_breaks
        layers.train(steps == 4)  # the second mode of a call that was seen before
        torch.testing.assert_close(compiled(x)[0], out)
        assert not pt.explain(compiled).graph_breaks
        programs.append(sum(sum(kinds.values()) for kinds in report.ops.values()))
    assert programs[0] == programs[1]


def test_a_compiled_lstm_takes_packed_sequences():
    torch.manual_seed(0)
    layers = nn.LSTM(4, 3)
    sequence = pack_padded_sequence(torch.randn(5, 4, 4), LENGTHS, enforce_sorted=False)
    states = (torch.zeros(1, 4, 3), torch.zeros(1, 4, 3))
    compiled = pt.compile(layers, backend="xla")
    torch.testing.assert_close(compiled(sequence, states)[0].data, layers(sequence, states)[0].data)
    assert not pt.explain(compiled).graph_breaks
    assert torch._dynamo.config.allow_rnn is False


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_relu"])
def test_the_op_of_a_layer_runs_in_eager_with_the_gradients_of_torchs_own(kind, reverse):
    from portable.lowering.recurrent import LAYER

    torch.manual_seed(0)
    gates = {"lstm": 12, "gru": 9}.get(kind, 3)
    states = [torch.randn(2, 3)] * (2 if kind == "lstm" else 1)
    args = [torch.randn(5, 2, 4), *(torch.randn(gates, n) for n in (4, 3)), *states]

    def call(x, w_input, w_hidden, *states):
        h, c = states if kind == "lstm" else (*states, None)
        return LAYER(x, None, h, c, w_input, w_hidden, None, None, None, reverse, kind)[: 1 + len(states)]

    def by_torch(x, w_input, w_hidden, *states):
        x = x.flip(0) if reverse else x
        hidden = [s.unsqueeze(0) for s in states]
        layer = getattr(torch, kind)
        out, *final = layer(
            x, hidden if kind == "lstm" else hidden[0], [w_input, w_hidden], False, 1, 0.0, True, False, False
        )
        return (out.flip(0) if reverse else out, *(f[0] for f in final))

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in args]
        out = function(*leaves)
        return [*out, *torch.autograd.grad(sum((x * x).sum() for x in out), leaves)]

    assert_agree(call, *args, gradients=False)
    for found, wanted in zip(gradients(call), gradients(by_torch), strict=True):
        torch.testing.assert_close(found, wanted)
