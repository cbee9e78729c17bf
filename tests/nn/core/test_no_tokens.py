"""Every layer takes a batch of no tokens, forward and backward: its shape comes out, and every gradient is zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import reference as te

RECIPES: dict[str, te.recipe.Recipe | None] = {
    "16 bits": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
    "rowwise": te.recipe.Float8RowwiseScaling(),
    "block": te.recipe.Float8BlockScaling(),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "nvfp4": te.recipe.NVFP4BlockScaling(),
}
ON_A_GPU = [name for name in RECIPES if name not in ("mxfp8", "nvfp4")]
EMPTY = ((6, 0, 32), (0, 2, 32), (0, 0, 32))
Make = Callable[..., torch.nn.Module]
LAYERS: dict[str, tuple[Make, dict[str, Any]]] = {
    "Linear": (lambda te, **more: te.Linear(32, 48, **more), {}),
    "LayerNorm": (lambda te, **more: te.LayerNorm(32, **more), {}),
    "RMSNorm": (lambda te, **more: te.RMSNorm(32, **more), {}),
    "LayerNormLinear": (lambda te, **more: te.LayerNormLinear(32, 48, **more), {}),
    "LayerNormMLP": (lambda te, **more: te.LayerNormMLP(32, 64, activation="swiglu", **more), {}),
    "MultiheadAttention": (lambda te, **more: te.MultiheadAttention(32, 2, **more), {}),
    "MultiheadAttention, fused": (
        lambda te, **more: te.MultiheadAttention(32, 2, num_gqa_groups=1, fuse_qkv_params=True, **more),
        {"rotary_pos_emb": torch.zeros(6, 1, 1, 16)},
    ),
    "TransformerLayer": (lambda te, **more: te.TransformerLayer(32, 64, 2, **more), {}),
    "TransformerLayer, post-norm": (
        lambda te, **more: te.TransformerLayer(
            32, 64, 2, output_layernorm=True, apply_residual_connection_post_layernorm=True, **more
        ),
        {"checkpoint_core_attention": True},
    ),
}


def run(name: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: str, side: Any, device: str) -> None:
    make, more = LAYERS[name]
    layer = make(side, params_dtype=dtype)
    more = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in more.items()}
    x = torch.zeros(shape, dtype=dtype, device=device, requires_grad=True)
    for wrapped in (False, True):
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            y = te.checkpoint(layer, x, **more) if wrapped else layer(x, **more)
        assert y.dtype == dtype
        assert y.shape[:-1] == x.shape[:-1]
        assert y.shape[-1] == (48 if name in ("Linear", "LayerNormLinear") else 32)
        y.sum().backward()
    assert x.grad.shape == x.shape
    for parameter in layer.parameters():
        assert parameter.grad.shape == parameter.shape
        assert not parameter.grad.any()


@pytest.mark.sample(38)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens(name: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: str) -> None:
    run(name, shape, dtype, recipe, te, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ON_A_GPU)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", EMPTY)
@pytest.mark.parametrize("name", LAYERS)
def test_no_tokens_on_a_gpu(name: str, shape: tuple[int, ...], dtype: torch.dtype, recipe: str) -> None:
    import optimized

    run(name, shape, dtype, recipe, optimized, "cuda")


@pytest.mark.sample(17)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(6, 5, 0), (0, 5, 2), (6, 0, 2), (0, 0, 2)])
def test_a_decoder_without_tokens(queries: int, keys: int, batch: int, dtype: torch.dtype, recipe: str) -> None:
    """Where there are queries and no keys, attention adds nothing but its projection's bias."""
    layer = te.TransformerLayer(
        32, 64, 2, layer_type="decoder", params_dtype=dtype, hidden_dropout=0.0, enc_dec_attn_mask_type="padding"
    )
    x = torch.ones(queries, batch, 32, dtype=dtype, requires_grad=True)
    other = torch.ones(keys, batch, 32, dtype=dtype, requires_grad=True)
    mask = torch.zeros(batch, 1, 1, queries, dtype=torch.bool), torch.zeros(batch, 1, 1, keys, dtype=torch.bool)
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        y = layer(x, encoder_output=other, enc_dec_attn_mask=mask)
    assert y.shape == x.shape
    y.sum().backward()
    assert bool(y.isfinite().all())
    assert bool(x.grad.isfinite().all())
    assert other.grad is None or not other.grad.any()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)
