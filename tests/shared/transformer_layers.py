"""Transformer layers for tests."""

from typing import Any

import numpy as np
import torch

import reference as te

RECIPE = te.DelayedScaling(amax_history_len=4)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def layer_of(**arguments: Any) -> te.TransformerLayer:
    torch.manual_seed(1)
    settings: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    layer = te.TransformerLayer(64, 128, 4, **(settings | arguments))
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_((numbers(i, *p.shape) * 0.05).to(p.dtype))
    return layer


VARIANTS: dict[str, dict[str, Any]] = {
    "gqa, swiglu, rmsnorm, no bias": {
        "num_gqa_groups": 2, "activation": "swiglu", "normalization": "RMSNorm", "bias": False,
    },
    "one qkv parameter, batch first": {"fuse_qkv_params": True, "attn_input_format": "bshd"},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "output norm": {"output_layernorm": True, "zero_centered_gamma": True},
    "decoder": {"layer_type": "decoder"},
    "dropout": {"hidden_dropout": 0.2, "attention_dropout": 0.2},
    "parallel halves": {"parallel_attention_mlp": True, "hidden_dropout": 0.2},
    "stochastic depth": {"drop_path_rate": 0.3, "hidden_dropout": 0.2, "attn_input_format": "bshd"},
}  # fmt: skip
