"""`fuse_wgrad_accumulation`: the gradient of a weight is added to `main_grad`."""

import pytest
import torch
from linears import RECIPES, numbers

import reference as te
from reference import formats, tensor_core


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
