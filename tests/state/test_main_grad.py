"""`fuse_wgrad_accumulation`: the gradient of a weight is added to `main_grad`."""

import pytest
import torch
from shared.linear_cases import RECIPES, numbers

import reference as te
from reference.numbers import formats, tensor_core
from reference.state.weight_store import grad_of_accumulated


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fp8", [True, False])
def test_fused_wgrad_accumulation(main_dtype: torch.dtype, fp8: bool, same_bits) -> None:
    """The fp32 product is added to what was there, with one rounding: nothing passes through 16 bits on the way."""
    layer = te.Linear(32, 16, fuse_wgrad_accumulation=True, bias=False, params_dtype=torch.bfloat16)
    start = numbers(16, 16, 32).to(main_dtype)
    layer.weight.main_grad = start.clone()
    x, g = numbers(17, 8, 32).to(torch.bfloat16), numbers(18, 8, 16).to(torch.bfloat16)
    with te.autocast(enabled=fp8, recipe=RECIPES[0]):
        y = layer(x)
    y.backward(g)
    assert layer.weight.grad is None
    if fp8:  # the first step's scales are 1
        codes = (
            formats.cast(t.t(), formats.format_of(d), 1.0)
            for t, d in ((g, torch.float8_e5m2), (x, torch.float8_e4m3fn))
        )
        dw = tensor_core.gemm(
            *(torch.nn.functional.pad(c.view(torch.uint8), (0, 8)).view(c.dtype) for c in codes), "split"
        )
    else:
        dw = tensor_core.gemm(g.t(), x.t())
    same_bits(layer.weight.main_grad, (start.float() + dw).to(main_dtype), "main_grad")
    del layer.weight.main_grad
    with te.autocast(enabled=fp8, recipe=RECIPES[0]):
        y = layer(x)
    with pytest.raises(RuntimeError, match="weight has no main_grad"):
        y.backward(g)


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
def test_in_fp32_too_the_product_is_added_to_main_grad(main_dtype: torch.dtype, same_bits) -> None:
    layer = te.Linear(32, 16, fuse_wgrad_accumulation=True)
    start = numbers(16, 16, 32).to(main_dtype)
    layer.weight.main_grad = start.clone()
    x, g = numbers(17, 8, 32), numbers(18, 8, 16)
    layer(x).backward(g)
    same_bits(layer.weight.main_grad, (start.float() + torch.nn.functional.linear(g.t(), x.t())).to(main_dtype))
    assert layer.weight.grad is None


def test_a_long_product_is_added_to_main_grad_in_chains_of_128() -> None:
    layer = te.Linear(32, 16, fuse_wgrad_accumulation=True, bias=False, params_dtype=torch.bfloat16)
    x, g = numbers(60, 150, 32).to(torch.bfloat16), numbers(61, 150, 16).to(torch.bfloat16)
    layer.weight.main_grad = numbers(62, 16, 32)
    start = layer.weight.main_grad.clone()
    with te.autocast(recipe=RECIPES[0]):
        y = layer(x)
    y.backward(g)
    codes = (
        formats.cast(t, formats.format_of(d), 1.0).view(torch.uint8).t().contiguous().view(d)
        for t, d in ((g, torch.float8_e5m2), (x, torch.float8_e4m3fn))
    )
    a, b = codes
    assert not torch.equal(tensor_core.gemm(a, b, "fast"), tensor_core.gemm(a, b, "split"))
    assert torch.equal(layer.weight.main_grad, start + tensor_core.gemm(a, b, "split"))


LAYERS = {
    "Linear": (lambda: te.Linear(32, 32, fuse_wgrad_accumulation=True), ("weight",)),
    "LayerNormLinear": (lambda: te.LayerNormLinear(32, 32, fuse_wgrad_accumulation=True), ("weight",)),
    "LayerNormMLP": (
        lambda: te.LayerNormMLP(32, 64, fuse_wgrad_accumulation=True),
        ("fc1_weight", "fc2_weight"),
    ),
    "TransformerLayer": (
        lambda: te.TransformerLayer(
            32, 64, 4, fuse_wgrad_accumulation=True, fuse_qkv_params=True, hidden_dropout=0.0, attention_dropout=0.0
        ),
        ("self_attention.layernorm_qkv.weight", "self_attention.proj.weight", "layernorm_mlp.fc1_weight",
         "layernorm_mlp.fc2_weight"),
    ),
}  # fmt: skip


def run(layer: torch.nn.Module, fp8: bool, **more: object) -> None:
    x, g = numbers(17, 8, 2, 32).to(torch.bfloat16), numbers(18, 8, 2, 32).to(torch.bfloat16)
    with te.autocast(enabled=fp8, recipe=RECIPES[0]):
        y = layer(x, **more)
    y.backward(g)


def made(name: str) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    torch.manual_seed(3)
    layer = LAYERS[name][0]().to(torch.bfloat16)
    weights = [layer.get_parameter(key) for key in LAYERS[name][1]]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    return layer, weights


@pytest.mark.parametrize("zero_out", [None, True, False])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_megatrons_convention(name: str, fp8: bool, zero_out: bool | None, same_bits) -> None:
    """`grad_added_to_main_grad` becomes True and `.grad` gets zeros, so that its hooks run, once for each weight."""
    plain, expected = made(name)
    run(plain, fp8)
    layer, weights = made(name)
    ran = []
    for weight in weights:
        weight.grad_added_to_main_grad = False
        if zero_out is not None:
            weight.zero_out_wgrad = zero_out
        weight.register_post_accumulate_grad_hook(lambda p: ran.append(p.grad_added_to_main_grad))
    run(layer, fp8)
    assert ran == [True] * len(weights)
    for weight, other in zip(weights, expected, strict=True):
        same_bits(weight.main_grad, other.main_grad)
        same_bits(weight.grad, torch.zeros_like(weight))
        assert other.grad is None


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_the_first_microbatch_overwrites_main_grad(name: str, fp8: bool, same_bits) -> None:
    """As in Transformer Engine: `is_first_microbatch=True`, or a weight's `overwrite_main_grad`, adds to nothing."""
    plain, expected = made(name)
    run(plain, fp8)
    for by_weight in (True, False):
        layer, weights = made(name)
        for weight in weights:
            weight.main_grad.fill_(torch.nan)
            weight.overwrite_main_grad = by_weight
        run(layer, fp8, is_first_microbatch=None if by_weight else True)
        for weight, other in zip(weights, expected, strict=True):
            same_bits(weight.main_grad, other.main_grad)
    for weight in weights:
        weight.main_grad.zero_()
    run(layer, fp8, is_first_microbatch=False)
    first = [weight.main_grad.clone() for weight in weights]
    run(layer, fp8, is_first_microbatch=False)
    assert not any(torch.equal(weight.main_grad, one) for weight, one in zip(weights, first, strict=True))


def test_megatrons_convention_is_refused_in_a_compiled_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad_added_to_main_grad = False
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(NotImplementedError, match=r"grad_added_to_main_grad under torch\.compile is not offered"):
        grad_of_accumulated(weight)
