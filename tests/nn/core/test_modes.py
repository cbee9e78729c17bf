"""Modes of torch's around a layer: inference mode, another default dtype or device. None changes a bit or stays on."""

import ast
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te

ROOT = Path(__file__).parents[3]
BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: te.Linear(32, 32, params_dtype=BF16),
    "LayerNorm": lambda: te.LayerNorm(32, params_dtype=BF16),
    "RMSNorm": lambda: te.RMSNorm(32, params_dtype=BF16),
    "LayerNormLinear": lambda: te.LayerNormLinear(32, 32, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(32, 64, params_dtype=BF16, activation="swiglu"),
    "TransformerLayer": lambda: te.TransformerLayer(32, 64, 2, params_dtype=BF16),
    "rotary": lambda: Rotary(),
}


class Rotary(torch.nn.Module):
    """With grouped heads, padding, and without the fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = te.TransformerLayer(32, 64, 2, num_gqa_groups=1, params_dtype=BF16, normalization="RMSNorm")
        self.padding = (torch.arange(6, device="cpu") > 4).view(1, 1, 1, 6).expand(2, 1, 1, 6)
        self.angles = torch.ones(6, 1, 1, 16, dtype=torch.float32, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(
            x, attention_mask=self.padding, self_attn_mask_type="padding_causal", rotary_pos_emb=self.angles
        )
        return out


def data(i: int = 0) -> torch.Tensor:
    numbers = torch.randn(6, 2, 32, generator=torch.Generator("cpu").manual_seed(i), dtype=torch.float32, device="cpu")
    return numbers.to(BF16)


def step(module: torch.nn.Module, i: int = 0) -> list[torch.Tensor]:
    x = data(i).requires_grad_()
    module.zero_grad(set_to_none=True)
    torch.manual_seed(i)
    with te.autocast(recipe=RECIPE):
        y = module(x)
    y.backward(data(i + 10))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(1)
    return LAYERS[name]()


CREATION = {"arange", "as_tensor", "empty", "full", "ones", "tensor", "zeros"}


@pytest.mark.parametrize("folder", ["reference", "optimized/ops"])
def test_no_tensor_has_the_defaults_of_the_moment(folder: str) -> None:
    """Every creation names its device, and its dtype where it is no integer's."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in {f"torch.{name}" for name in CREATION}:
                given = {keyword.arg for keyword in node.keywords}
                if not {"device", "dtype"} <= given | ({"dtype"} if "arange" in ast.unparse(node.func) else set()):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float64])
def test_another_default_dtype_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    module = made(name)
    other = copy.deepcopy(module)
    outer = torch.get_default_dtype()
    for i in range(3):
        expected = step(module, i)
        torch.set_default_dtype(dtype)
        try:
            actual = step(other, i)
        finally:
            torch.set_default_dtype(outer)
        for a, b in zip(expected, actual, strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_another_default_device_changes_no_bit(name: str) -> None:
    module = made(name)
    other = copy.deepcopy(module)
    expected = [step(module, i) for i in range(2)]
    with torch.device("meta"):
        actual = [step(other, i) for i in range(2)]
    for i in range(2):
        for a, b in zip(expected[i], actual[i], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("name", LAYERS)
def test_inference_mode_leaves_training_alone(name: str) -> None:
    """Its tensors can be updated nowhere else, and autograd saves none of them."""
    module, other = made(name), made("Linear")

    def run(module: torch.nn.Module, mode: Callable[[], Any]) -> list[torch.Tensor]:
        seen = []
        for i in range(3):
            with mode(), te.autocast(recipe=te.DelayedScaling(amax_history_len=4 + i % 2)):
                module.eval()(data(i))
            seen += step(module.train(), i)
            step(other, i)
        return seen

    expected = run(copy.deepcopy(module), torch.no_grad)
    for a, b in zip(expected, run(module, torch.inference_mode), strict=True):
        assert_same_bits(a, b)
    with torch.inference_mode():
        module.load_state_dict(module.state_dict())
    step(module)


def test_weights_that_inference_mode_has_cached_are_cast_anew_for_training() -> None:
    module = made("LayerNormMLP")
    with torch.inference_mode(), te.autocast(recipe=RECIPE):
        module(data(), is_first_microbatch=True)
    x = data().requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = module(x, is_first_microbatch=False)
    y.sum().backward()
    assert x.grad is not None


def test_a_layer_made_in_inference_mode_has_state_that_is_updated() -> None:
    """Its parameters are inference tensors, as any module's; its FP8 state and random state are not."""
    with torch.inference_mode():
        module = made("TransformerLayer")
        with te.autocast(recipe=RECIPE):
            module(data())
    for part in module.modules():
        meta: Any = getattr(part, "fp8_meta", {})
        assert not any(meta[key].scale.is_inference() for key in ("scaling_fwd", "scaling_bwd") if key in meta)
    step(made("Linear"))


@pytest.mark.parametrize("name", ["Linear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "TransformerLayer"])
def test_the_default_device_is_where_layers_are_made(name: str) -> None:
    """As torch's own modules; Hugging Face's `from_pretrained` builds a model so."""
    with torch.device("meta"):
        module = made(name)
    assert {p.device.type for p in module.parameters()} == {"meta"}
    with torch.device("meta"), te.quantized_model_init(recipe=RECIPE):
        assert te.Linear(32, 16).weight.is_meta
    with torch.device("meta"):
        assert te.Linear(32, 16, device="cpu").weight.device.type == "cpu"
    torch.manual_seed(1)
    module.to_empty(device="cpu")
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    step(module)
