"""`FlopCounterMode` counts a model like the same model of PyTorch's own layers."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import reference as te
from reference.ops import library

BF16 = torch.bfloat16
ATTENTIONS = ("attention", "attention_backward", "attention_fp8", "attention_fp8_backward")
HIDDEN, FFN, HEADS, TOKENS, BATCH = 32, 64, 4, 16, 2


def sequential(*sizes: int, between: torch.nn.Module | None = None) -> torch.nn.Module:
    layers = [torch.nn.Linear(n, m, dtype=BF16) for n, m in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*(part for layer in layers for part in (layer, between or torch.nn.Identity())))


class PlainAttention(torch.nn.Module):
    """What a TransformerLayer does, of PyTorch's parts."""

    def __init__(self, groups: int = HEADS) -> None:
        super().__init__()
        self.groups, self.channels = groups, HIDDEN // HEADS
        self.qkv = torch.nn.Linear(HIDDEN, HIDDEN + 2 * groups * self.channels, dtype=BF16)
        self.proj = torch.nn.Linear(HIDDEN, HIDDEN, dtype=BF16)
        self.mlp = sequential(HIDDEN, FFN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s, b, _ = x.shape
        mixed = self.qkv(x).view(s, b, -1, self.channels).permute(1, 2, 0, 3)
        q, k, v = mixed.split([HEADS, self.groups, self.groups], dim=1)
        k, v = (t.repeat_interleave(HEADS // self.groups, dim=1) for t in (k, v))
        with sdpa_kernel(SDPBackend.MATH):  # the others are counted alike, on a GPU only
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return self.mlp(self.proj(out.permute(2, 0, 1, 3).reshape(s, b, HIDDEN)))


Pair = tuple[Callable[[], torch.nn.Module], Callable[[], torch.nn.Module]]
MODELS: dict[str, Pair] = {
    "Linear": (lambda: te.Linear(HIDDEN, 48, params_dtype=BF16), lambda: sequential(HIDDEN, 48)),
    "LayerNormLinear": (lambda: te.LayerNormLinear(HIDDEN, 48, params_dtype=BF16), lambda: sequential(HIDDEN, 48)),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(HIDDEN, FFN, params_dtype=BF16),
        lambda: sequential(HIDDEN, FFN, HIDDEN, between=torch.nn.GELU()),
    ),
    "TransformerLayer": (lambda: te.TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=BF16), PlainAttention),
    "grouped": (
        lambda: te.TransformerLayer(HIDDEN, FFN, HEADS, num_gqa_groups=2, params_dtype=BF16),
        lambda: PlainAttention(2),
    ),
}


def counted(model: torch.nn.Module, fp8: bool, device: str = "cpu", recipe: Any = None) -> tuple[int, int]:
    """Of forward, and of both directions."""
    x = torch.ones(TOKENS, BATCH, HIDDEN, dtype=BF16, device=device, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        with te.autocast(enabled=fp8, recipe=recipe):
            y = model(x)
        forward = counter.get_total_flops()
        y.sum().backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_counts_as_plain_pytorchs(name: str, fp8: bool) -> None:
    ours, plain = MODELS[name]
    forward, both = counted(plain(), False)
    if name not in ("Linear", "LayerNormLinear", "LayerNormMLP"):
        both += 2 * BATCH * TOKENS * TOKENS * HIDDEN  # PyTorch's formula of a fused backward: the scores once more
    assert forward > 0
    model = ours()
    for _ in range(2):
        assert counted(model, fp8) == (forward, both)
    assert counted(model.to("meta"), fp8, "meta") == (forward, both)


def test_attention_in_fp8_counts_as_in_16_bits() -> None:
    model = te.TransformerLayer(HIDDEN, FFN, 2, num_gqa_groups=1, params_dtype=BF16)
    expected = counted(model, True)
    assert counted(model, True, recipe=te.DelayedScaling(fp8_dpa=True)) == expected


@pytest.mark.parametrize("fp8", [False, True])
def test_gradients_that_are_added_to_main_grad_count_too(fp8: bool) -> None:
    layer = te.Linear(HIDDEN, 48, params_dtype=BF16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(48, HIDDEN)
    assert counted(layer, fp8) == counted(sequential(HIDDEN, 48), False)


def test_every_gemm_and_attention_is_counted() -> None:
    names = {name for name in vars(library.twin) if name.startswith("gemm") or name in ATTENTIONS}
    assert {name for name in names if getattr(torch.ops.twin, name) not in flop_registry} == set()


@pytest.mark.parametrize("name", [name for name in te.recipe.__all__ if name.endswith("Scaling")])
def test_a_layer_has_one_count_whatever_the_recipe(name: str) -> None:
    """Its backward included; tokens and features are whole blocks."""
    layer, x = te.Linear(128, 256, params_dtype=BF16), torch.randn(128, 128, dtype=BF16, requires_grad=True)
    with FlopCounterMode(display=False) as counted, te.autocast(recipe=getattr(te.recipe, name)()):
        layer(x).sum().backward()
    assert counted.get_total_flops() == 3 * 2 * 128 * 128 * 256
