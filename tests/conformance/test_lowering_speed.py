"""Lowering is fast beside the capture that comes before it: one run, whole models of several kinds."""

import statistics

import pytest
import torch

import portable as pt

SIZES = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "d_ff": 64, "d_kv": 8, "vocab_size": 128, "image_size": 32, "patch_size": 8,
}  # fmt: skip
TEXT = ("bert", "gpt2", "llama", "mistral", "qwen3", "gemma3_text", "phi", "electra", "falcon", "opt")
IMAGES = ("vit", "deit", "resnet", "regnet")
LIMIT = 0.25  # of the time that torch's own capture takes


def model_of(kind):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind)
    own = {
        name for name in SIZES if hasattr(config, name) and not isinstance(getattr(type(config), name, None), property)
    }
    config = transformers.AutoConfig.for_model(kind, **{name: SIZES[name] for name in own})
    return transformers.AutoModel.from_config(config).eval()


@pytest.mark.slow
def test_lowering_takes_a_quarter_of_the_time_of_capture_at_most():
    ratios = {}
    for kind in (*TEXT, *IMAGES):
        torch._dynamo.reset()
        compiled = pt.compile(model_of(kind), backend="xla")
        images = kind in IMAGES
        inputs = (
            {"pixel_values": torch.randn(2, 3, 32, 32)} if images else {"input_ids": torch.randint(3, 100, (2, 12))}
        )
        with torch.no_grad():
            compiled(**inputs)
        done = pt.explain(compiled, show=False).compiles
        ratios[kind] = sum(c.lowering_s for c in done) / sum(c.capture_s for c in done)
    assert statistics.median(ratios.values()) <= LIMIT, ratios
