"""Recurrent layers agree with eager, forward and backward; dropout between layers is there."""

import pytest
import torch
from torch import nn

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
