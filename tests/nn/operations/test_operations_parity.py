"""`te.ops` on a GPU: every bit of the CPU's, over training steps, in 16 bits and in FP8."""

from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.training_pairs import numbers, train_both

import optimized
import reference as te

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
RECIPES = {
    "16 bits": None,
    "delayed": te.DelayedScaling(amax_history_len=4),
    "current": te.recipe.Float8CurrentScaling(),
}
ACTIVATIONS = ("GELU", "GEGLU", "GLU", "QGELU", "QGEGLU", "ReLU", "ReGLU", "SReLU", "SReGLU", "SiLU", "SwiGLU")


def mlp(activation: str, dtype: torch.dtype) -> Any:
    ops = te.ops
    width = 48 if activation.endswith("GLU") else 96
    return ops.Sequential(
        ops.LayerNorm(64, dtype=dtype),
        ops.Linear(64, 96, dtype=dtype),
        getattr(ops, activation)(),
        ops.BasicLinear(width, 64, dtype=dtype),
        ops.Bias(64, dtype=dtype),
        ops.Dropout(0.1),
        ops.ConstantScale(0.7),
        ops.RMSNorm(64, dtype=dtype),
        ops.Reshape((-1, 32)),
    )


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_of_operations(activation: str, dtype: torch.dtype, recipe: Any, same_bits: Any) -> None:
    train_both(mlp(activation, dtype), (24, 2, 64), dtype, recipe, same_bits, steps=4)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scale", [0.7, -3.0, 1e-3])
def test_a_constant_scale_of_every_word(dtype: torch.dtype, scale: float) -> None:
    x = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    assert_same_bits(te.ops.ConstantScale(scale)(x), optimized.ops.ConstantScale(scale)(x.cuda()))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_operations_without_parameters(dtype: torch.dtype, recipe: Any, same_bits: Any) -> None:
    model = te.ops.Sequential(
        te.ops.Linear(64, 96, dtype=dtype),
        te.ops.Quantize(True, True),
        te.ops.ClampedSwiGLU(limit=1.5, glu_interleave_size=4),
        te.ops.L2Normalization(),
        te.ops.Quantize(False, True),
    )
    train_both(model, (24, 2, 64), dtype, recipe, same_bits, steps=4)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_in_fp32(activation: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        x = numbers(1, (33, 96), torch.float32).to(device).requires_grad_()
        y = getattr(te.ops, activation)()(x)
        y.backward(numbers(2, tuple(y.shape), torch.float32).to(device))
        results.append((y.detach(), x.grad))
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.simulated
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_extra_inputs_and_outputs(dtype: torch.dtype) -> None:
    results = []
    for device in ("cpu", "cuda"):
        model = te.ops.Sequential(te.ops.MakeExtraOutput(), te.ops.SiLU(), te.ops.AddExtraInput())
        x, other = (numbers(seed, (33, 40), dtype).to(device).requires_grad_() for seed in (1, 2))
        y, extra = model(x, other)
        torch.autograd.backward([y, extra], [numbers(seed, (33, 40), dtype).to(device) for seed in (3, 4)])
        results.append((y.detach(), extra.detach(), x.grad, other.grad))
    for one, other_side in zip(*results, strict=True):
        assert_same_bits(one, other_side)


def test_the_gpus_side_starts_with_the_same_numbers_on_cuda() -> None:
    models = []
    for side in (te, optimized):
        torch.manual_seed(3)
        models.append(side.ops.Sequential(side.ops.LayerNorm(32), side.ops.Linear(32, 48), side.ops.Bias(48)))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert other.is_cuda
        assert_same_bits(one.detach(), other.detach())
