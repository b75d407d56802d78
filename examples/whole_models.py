"""Models of the usual sizes, to be checked for hardware that is not here; nothing is downloaded.

portable check examples/whole_models.py:llama_1b --target tpu:v5e:2x2 --target tpu:v6e:2x2 --target cuda:h200

Each function returns (model, args); `portable check` calls it on the meta device, so that weights take no memory.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

Made = tuple[torch.nn.Module, tuple[torch.Tensor, ...]]


def resnet50() -> Made:
    """ResNet-50, batch 8."""
    config = transformers.ResNetConfig(num_labels=1000)
    return transformers.ResNetForImageClassification(config).eval(), (torch.randn(8, 3, 224, 224),)


def vit_s() -> Made:
    """ViT-S/16, batch 8."""
    sizes: dict[str, Any] = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    config = transformers.ViTConfig(**sizes, num_labels=1000)
    return transformers.ViTForImageClassification(config).eval(), (torch.randn(8, 3, 224, 224),)


def bert_base() -> Made:
    """BERT-base, batch 8 of 128 tokens."""
    return transformers.BertModel(transformers.BertConfig()).eval(), (torch.randint(0, 30000, (8, 128)),)


def llama_1b() -> Made:
    """A Llama of 1.24 billion parameters (the sizes of Llama 3.2 1B) in bfloat16, 512 tokens."""
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, use_cache=False)
    return transformers.LlamaForCausalLM(config).eval().to(torch.bfloat16), (torch.randint(0, 128256, (1, 512)),)
