"""Layers and recipes, and one step of them."""

from typing import Any

import torch

import reference as te

BF16 = torch.bfloat16
RECIPES = [te.DelayedScaling(amax_history_len=2), te.recipe.Float8CurrentScaling()]
LAYERS: dict[str, Any] = {  # of `reference` or `optimized`
    "Linear": lambda te: te.Linear(32, 48, params_dtype=BF16),
    "LayerNorm": lambda te: te.LayerNorm(32, params_dtype=BF16),
    "RMSNorm": lambda te: te.RMSNorm(32, params_dtype=BF16),
    "LayerNormLinear": lambda te: te.LayerNormLinear(32, 48, params_dtype=BF16, return_layernorm_output=True),
    "LayerNormMLP": lambda te: te.LayerNormMLP(32, 64, params_dtype=BF16),
    "MultiheadAttention": lambda te: te.MultiheadAttention(32, 2, params_dtype=BF16, input_layernorm=True),
    "TransformerLayer": lambda te: te.TransformerLayer(32, 64, 2, params_dtype=BF16),
    "decoder": lambda te: te.TransformerLayer(32, 64, 2, params_dtype=BF16, layer_type="decoder"),
}
# Other values of an attribute, by its name, or by the type of what it is.
BY_NAME: dict[str, list[Any]] = {
    "kind": ["layernorm", "rmsnorm"],
    "activation": ["gelu", "relu", "silu"],
    "attn_mask_type": ["no_mask", "causal", "causal_bottom_right"],
    "self_attn_mask_type": ["no_mask", "causal", "causal_bottom_right"],
    "enc_dec_attn_mask_type": ["no_mask", "causal", "causal_bottom_right"],
    "window_size": [None, (3, 0), (5, 2)],
    "enc_dec_window_size": [None, (3, 0), (5, 2)],
    "qkv_format": ["sbhd", "bshd"],
    "own_recipe": [None, *RECIPES],
    "eps": [1e-5, 1e-2, 1.0],
    "softmax_scale": [0.1, 0.25, 2.0],
}
BY_TYPE: dict[type, list[Any]] = {bool: [False, True], float: [0.0, 0.3, 1e-3], int: [1, 2, 16, 32]}


def attributes(layer: torch.nn.Module) -> list[tuple[str, str, list[Any]]]:
    """Module, attribute and values of every public attribute that is no tensor, no module and no function."""
    found = []
    for name, part in layer.named_modules():
        own = {key for key in vars(part) if not key.startswith("_")}
        own |= {"own_recipe", "in_high_precision"} if isinstance(part, te.Linear | te.LayerNormMLP) else set()
        for key in sorted(own):
            values = BY_NAME.get(key) or BY_TYPE.get(type(getattr(part, key)))
            if values:
                found.append((name, key, values))
    return found


def step(layer: Any, recipe: Any, seed: int) -> list[torch.Tensor]:
    """The output and the gradient of x of a training step that changes no state, so that equal steps are equal."""
    torch.manual_seed(seed)
    device = next(layer.parameters()).device
    x = torch.randn(16, 2, 32).to(device, BF16).requires_grad_()
    more = {"encoder_output": x.detach()} if getattr(layer, "layer_type", "") == "decoder" else {}
    scales = [t.clone() for m in layer.modules() for t in _state(m)]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = layer(x, **more)
    y = out[0] if isinstance(out, tuple) else out
    y.backward(torch.randn(*y.shape).to(device, y.dtype))
    for t, before in zip((t for m in layer.modules() for t in _state(m)), scales, strict=False):
        t.copy_(before)
    assert x.grad is not None
    return [y.detach(), x.grad]


def _state(module: Any) -> list[torch.Tensor]:
    metas = [meta for key, meta in getattr(module, "fp8_meta", {}).items() if key != "recipe"]
    return [t for meta in metas for t in (meta.scale, meta.amax_history)]
