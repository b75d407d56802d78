"""Torch's transformer layers in eval mode, which take fused ops there: lowered they agree with eager."""

import pytest
import torch
from torch import nn

import portable as pt
from portable.testing import lowered
from tests.lowering.networks import TOLERANCE

DTYPES = [torch.float32, torch.float64, torch.bfloat16]
BATCH, LENGTH, WIDTH, HEADS = 3, 5, 16, 4
aten = torch.ops.aten


def seeded(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def frozen(module, dtype=torch.float32):
    """In eval mode and without gradients, as the fused ops want it; no bias is 0 and no norm's weight 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return module.eval().requires_grad_(False).to(dtype)


def layer(dtype=torch.float32, **options):
    return frozen(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, **{"batch_first": True, **options}), dtype)


def causal():
    return nn.Transformer.generate_square_subsequent_mask(LENGTH)


def padding():
    return torch.arange(LENGTH) >= torch.tensor([[LENGTH], [2], [3]])


MASKS = {
    "none": dict,
    "causal": lambda: {"src_mask": causal(), "is_causal": True},
    "boolean": lambda: {"src_mask": causal() < 0, "is_causal": False},
    "padding": lambda: {"src_key_padding_mask": padding()},
    "both": lambda: {"src_mask": causal() < 0, "src_key_padding_mask": padding(), "is_causal": False},
}


@pytest.fixture
def fused():
    """``fused(op, f, *args)``: ``f`` takes the fused ``op``, and its lowering gives what eager gives."""

    def check(op, f, *args):
        with torch.profiler.profile() as profile:
            want = f(*args)
        assert op in {event.name for event in profile.events()}
        got = lowered(f, *args)
        for w, g in zip(*((v if isinstance(v, tuple) else (v,)) for v in (want, got)), strict=True):
            if w is None:
                assert g is None
                continue
            limit = TOLERANCE[w.dtype]
            scale = max([1.0, *w.nan_to_num().flatten().abs().tolist()])
            torch.testing.assert_close(g, w, rtol=limit, atol=limit * scale, equal_nan=True)

    return check


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_encoder_layer_with_every_mask(fused, dtype, mask):
    model, given = layer(dtype), MASKS[mask]()
    x = seeded(BATCH, LENGTH, WIDTH, dtype=dtype)
    fused("aten::_transformer_encoder_layer_fwd", lambda x: model(x, **given), x)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_orders_and_activations_of_an_encoder_layer(fused, dtype, activation, norm_first):
    model = layer(dtype, activation=activation, norm_first=norm_first)
    fused("aten::_transformer_encoder_layer_fwd", model, seeded(BATCH, LENGTH, WIDTH, dtype=dtype))


@pytest.mark.parametrize("mask", MASKS)
def test_an_encoder(fused, mask):
    model = frozen(nn.TransformerEncoder(layer(), 2, enable_nested_tensor=False))
    given = {name.replace("src_mask", "mask"): value for name, value in MASKS[mask]().items()}
    fused("aten::_transformer_encoder_layer_fwd", lambda x: model(x, **given), seeded(BATCH, LENGTH, WIDTH))


def test_an_encoder_that_may_nest_and_has_no_mask(fused):
    model = frozen(nn.TransformerEncoder(layer(), 2))
    fused("aten::_transformer_encoder_layer_fwd", model, seeded(BATCH, LENGTH, WIDTH))


ATTENTION_MASKS = {
    "none": dict,
    "causal": lambda: {"attn_mask": causal() < 0},
    "padding": lambda: {"key_padding_mask": padding()},
    "both": lambda: {"attn_mask": causal() < 0, "key_padding_mask": padding()},
}


WEIGHTS = {
    "average": {"need_weights": True},
    "of each head": {"need_weights": True, "average_attn_weights": False},
    "none": {"need_weights": False},
}


def attention(dtype=torch.float32):
    return frozen(nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), dtype)


@pytest.mark.parametrize("mask", ATTENTION_MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_self_attention_with_every_mask(fused, dtype, mask):
    model, given = attention(dtype), ATTENTION_MASKS[mask]()
    x = seeded(BATCH, LENGTH, WIDTH, dtype=dtype)
    fused("aten::_native_multi_head_attention", lambda x: model(x, x, x, **given), x)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_the_weights_of_self_attention(fused, weights):
    model, given = attention(), {**ATTENTION_MASKS["both"](), **WEIGHTS[weights]}
    fused("aten::_native_multi_head_attention", lambda x: model(x, x, x, **given), seeded(BATCH, LENGTH, WIDTH))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_compiled_self_attention_returns_what_eager_returns(weights):
    model, x = attention(), seeded(BATCH, LENGTH, WIDTH)
    compiled = pt.compile(model, backend="xla", fallback="error")
    with torch.no_grad():
        want, got = (m(x, x, x, **WEIGHTS[weights]) for m in (model, compiled))
    torch.testing.assert_close(got[0], want[0], rtol=2e-5, atol=2e-5)
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        torch.testing.assert_close(got[1], want[1], rtol=2e-5, atol=2e-5)


def operands():
    return seeded(3 * WIDTH, WIDTH), seeded(3 * WIDTH), seeded(WIDTH, WIDTH), seeded(WIDTH)


@pytest.mark.parametrize("same_values", [False, True])
def test_attention_to_another_tensor(fused, same_values):
    q, k, v = seeded(3, BATCH, LENGTH, WIDTH)

    def attend(q, k, v, *weights):
        return aten._native_multi_head_attention(q, k, k if same_values else v, WIDTH, HEADS, *weights)

    fused("aten::_native_multi_head_attention", attend, q, k, v, *operands())


def test_a_mask_of_numbers_hides_what_is_not_zero(fused):
    mask = torch.tensor([0, 0.5, 0, -torch.inf, 0]).expand(LENGTH, LENGTH)

    def attend(x, mask, *weights):
        return aten._native_multi_head_attention(x, x, x, WIDTH, HEADS, *weights, mask, True, True, 0)

    fused("aten::_native_multi_head_attention", attend, seeded(BATCH, LENGTH, WIDTH), mask, *operands())


@pytest.mark.parametrize(("shape", "kind"), [((5, 5), 0), ((3, 5), 1), ((3, 4, 5, 5), 2), ((3, 4, 5, 5), None)])
def test_masked_softmax_of_rows_that_are_hidden_and_of_what_is_not_finite(fused, shape, kind):
    x = seeded(BATCH, HEADS, LENGTH, LENGTH)
    x[0, 0, 0, 1], x[0, 0, 1, 0], x[0, 1, 2] = torch.inf, torch.nan, -torch.inf
    mask = seeded(*shape) > 0.3
    mask[0] = True
    fused("aten::_masked_softmax", lambda x, m: aten._masked_softmax(x, m, 3, kind), x, mask)


def test_an_empty_batch(fused):
    fused("aten::_transformer_encoder_layer_fwd", layer(), seeded(0, LENGTH, WIDTH))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_compiled_encoder_is_one_program_without_fallback(norm_first, mask):
    model = nn.TransformerEncoder(layer(norm_first=norm_first), 2, enable_nested_tensor=False).eval()
    given = {name.replace("src_mask", "mask"): value for name, value in MASKS[mask]().items()}
    x = seeded(BATCH, LENGTH, WIDTH)
    compiled = pt.compile(model, backend="xla", fallback="error")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, **given), model(x, **given), rtol=2e-5, atol=2e-5)
    report = pt.explain(compiled)
    assert not report.graph_breaks
    assert not report.fallbacks
