"""Arguments of constructors that are accepted or refused."""

from typing import Any

import torch

import reference as te

META: dict[str, Any] = {"device": "meta"}
LAYERS: dict[str, tuple[type[torch.nn.Module], dict[str, Any]]] = {
    "Linear": (te.Linear, {"in_features": 32, "out_features": 32, **META}),
    "LayerNorm": (te.LayerNorm, {"normalized_shape": 32, **META}),
    "RMSNorm": (te.RMSNorm, {"normalized_shape": 32, **META}),
    "LayerNormLinear": (te.LayerNormLinear, {"in_features": 32, "out_features": 32, **META}),
    "LayerNormMLP": (te.LayerNormMLP, {"hidden_size": 32, "ffn_hidden_size": 32, **META}),
    "DotProductAttention": (te.DotProductAttention, {"num_attention_heads": 2, "kv_channels": 16}),
    "MultiheadAttention": (
        te.MultiheadAttention,
        {"hidden_size": 512, "num_attention_heads": 32, "fuse_qkv_params": True, **META},
    ),
    "TransformerLayer": (
        te.TransformerLayer,
        {"hidden_size": 512, "ffn_hidden_size": 32, "num_attention_heads": 32, "fuse_qkv_params": True, **META},
    ),
}
