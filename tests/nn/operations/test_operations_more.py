"""`te.ops.ClampedSwiGLU`, interleaved halves, `L2Normalization` and `Quantize`."""

import copy
import pickle
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.operation_cases import BF16, CLAMP, FP16, RECIPES, numbers, run, same

import reference as te
from reference.nn.layers import layernorm
from reference.ops.activations.activation import Clamp
from reference.ops.library import twin


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("given", [{}, CLAMP])
def test_clamped_swiglu_is_the_op_with_its_parameters(given: dict[str, float], dtype: torch.dtype) -> None:
    x = numbers(1, (3, 5, 32), dtype)
    y, dx = run(te.ops.ClampedSwiGLU(**given), x)
    flat, kind = x.view(-1, 32), Clamp(**given).kind
    assert_same_bits(y.view(-1, 16), twin.activation(flat, kind))
    grad = numbers(100, (3, 5, 16), dtype).view(-1, 16)
    assert_same_bits(dx.view(-1, 32), twin.activation_backward(grad, flat, kind))


@pytest.mark.parametrize("size", [1, 2, 8, 16])
@pytest.mark.parametrize("make", [te.ops.SwiGLU, te.ops.ClampedSwiGLU])
def test_interleaved_halves(make: Any, size: int) -> None:
    """n channels of x1, n of x2, and so on: the bits of the same channels in two halves."""
    x = numbers(1, (3, 5, 32))
    order = torch.arange(32).view(-1, 2, size).transpose(0, 1).flatten()  # of the halves in the interleaved x
    y, dx = run(make(glu_interleave_size=size), x)
    apart, dapart = run(make(), x[..., order])
    same([y, dx[..., order]], [apart, dapart])


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("n", [1, 24, 128])
def test_l2_normalization_is_that_of_heads(n: int, dtype: torch.dtype) -> None:
    """Of any size; its length is 1, and its gradient that of float64."""
    x = numbers(1, (7, 3, n), dtype)
    module = te.ops.L2Normalization(eps=1e-5)
    y, dx = run(module, x)
    same([y, dx], run(layernorm.L2Normalization(n, 1e-5), x))
    wide = x.double().requires_grad_()
    exact = wide / (wide.square().sum(-1, keepdim=True) + 1e-5).sqrt()
    exact.backward(numbers(100, tuple(x.shape), dtype).double())
    unit = {BF16: 2**-8, FP16: 2**-11, torch.float32: 2**-21}[dtype]
    assert (y.double() - exact).norm() <= unit * exact.norm()
    assert (dx.double() - wide.grad).norm() <= 4 * unit * wide.grad.norm() + 1e-3 * (n == 1)
    same(run(module, numbers(2, (4, 40), dtype)), run(layernorm.L2Normalization(40, 1e-5), numbers(2, (4, 40), dtype)))


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True), (False, False)])
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_quantize_gives_what_fp8_holds(recipe: Any, ways: tuple[bool, bool], dtype: torch.dtype) -> None:
    """x, or its gradient, through codes and scale_inv; the scale of a step comes from the steps before, or from x."""
    module = te.ops.Quantize(*ways)
    scales, largest, formats = [1.0, 1.0], [torch.zeros(()), torch.zeros(())], (torch.float8_e4m3fn, torch.float8_e5m2)
    for step in range(3):
        x, grad = numbers(step, (4, 3, 32), dtype), numbers(100, (4, 3, 32), dtype)
        found = run(module, x, recipe=recipe)
        for way, (given, fp8) in enumerate(zip((x, grad), formats, strict=True)):
            top = torch.finfo(fp8).max
            amax = given.float().abs().max()
            scale = torch.tensor(scales[way]) if recipe.delayed() else torch.tensor(top) / amax  # one rounding
            codes = saturated(given.float() * scale, fp8)
            held = (codes.float() * (1 / scale)).to(dtype)
            assert_same_bits(found[way], held if ways[way] else given, f"way {way} of step {step}")
            largest[way] = torch.maximum(largest[way], amax)
            scales[way] = (torch.tensor(top) / largest[way]).item()
    assert module.eval()(x) is x


def saturated(x: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """x rounded to an FP8 format, saturating."""
    top = torch.finfo(fp8).max
    return x.clamp(-top, top).to(fp8)


def test_quantize_in_a_model() -> None:
    """Its state is in checkpoints and follows the module; amaxes are calibrated; a recomputation has the same bits."""
    recipe = te.DelayedScaling(amax_history_len=3)
    torch.manual_seed(1)
    whole = te.ops.Sequential(te.ops.Quantize(True, True), te.ops.Linear(32, 32, dtype=BF16), te.ops.Quantize())
    x = numbers(1, (16, 32))
    with te.autocast(enabled=False, calibrating=True, recipe=recipe):
        whole(x)
    assert whole[0].fp8_meta["scaling_fwd"].amax_history[0, 0] == x.abs().max()
    for _ in range(2):
        run(whole, x, recipe=recipe)
    other = te.ops.Sequential(te.ops.Quantize(True, True), te.ops.Linear(32, 32, dtype=BF16), te.ops.Quantize())
    other.load_state_dict(whole.state_dict(), strict=True)
    copies = [other, copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))]

    class Again(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whole = copy.deepcopy(whole)

        def forward(self, x: torch.Tensor) -> Any:
            return te.checkpoint(self.whole, x)

    expected = run(whole, x, recipe=recipe)
    for one in (*copies, Again()):
        same(run(one, x, recipe=recipe), expected)
    meta = whole.to("meta")[0]
    assert meta.fp8_meta["scaling_fwd"].scale.is_meta
    with pytest.raises(
        NotImplementedError, match=r"^transformer_engine_state_dict: model has '0', a te.ops.Quantize, w"
    ):
        te.transformer_engine_state_dict(other)


@pytest.mark.parametrize("ways", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("recipe", RECIPES[1:])
def test_quantize_gives_tensors_in_fp8(recipe: Any, ways: tuple[bool, bool]) -> None:
    """Of the input, and of its gradient; outside of autocast plain ones. Layers before and after it read them."""
    module = te.ops.Quantize(*ways)
    x = numbers(1, (4, 32)).requires_grad_()
    with te.autocast(recipe=recipe):
        y = module(x)
    y.backward(numbers(2, (4, 32)))
    assert [isinstance(t, te.Float8Tensor) for t in (y, x.grad)] == list(ways)
    assert y._data.dtype == torch.uint8 if ways[0] else y.dtype == BF16
    assert type(module(numbers(1, (4, 32)))) is torch.Tensor
    torch.manual_seed(0)
    whole = te.ops.Sequential(
        te.ops.Linear(32, 32, dtype=BF16), te.ops.GELU(), module, te.ops.Bias(32, dtype=BF16), te.ops.Quantize(*ways)
    )
    assert all(torch.isfinite(t).all() for t in run(whole, numbers(3, (4, 32)), recipe=recipe))


@pytest.mark.parametrize("moved", [torch.float16, torch.float32, BF16])
@pytest.mark.parametrize("given", [torch.float16, torch.float32, BF16])
@pytest.mark.parametrize(
    "make",
    [
        lambda: te.ops.Linear(32, 48, dtype=BF16),
        lambda: te.ops.BasicLinear(32, 48, dtype=BF16),
        lambda: te.ops.LayerNorm(32, dtype=BF16),
        lambda: te.ops.RMSNorm(32, dtype=BF16),
        lambda: te.ops.Bias(32, dtype=BF16),
        lambda: te.ops.Sequential(te.ops.RMSNorm(32, dtype=BF16), te.ops.Linear(32, 48, dtype=BF16), te.ops.GELU()),
    ],
)
def test_results_have_the_dtype_of_the_parameters(make: Any, given: torch.dtype, moved: torch.dtype) -> None:
    """As those of an input that was cast before; gradients have their tensor's dtype; torch.autocast decides alone."""
    torch.manual_seed(0)
    module, x = make().to(moved), numbers(1, (4, 32), given)
    dtype = torch.promote_types(given, moved) if isinstance(module, te.ops.Bias) else moved
    y, dx, *grads = run(module, x)
    assert (y.dtype, dx.dtype, {g.dtype for g in grads}) == (dtype, given, {moved})
    expected = run(module, x.to(dtype))
    assert_same_bits(y, expected[0])
    assert_same_bits(dx, expected[1].to(given))
    with torch.autocast("cpu", dtype=BF16):
        assert module(x).dtype == BF16


def test_an_extra_input_is_added_in_its_memory() -> None:
    for leaf in (True, False):
        x, other = numbers(1, (4, 32)).requires_grad_(), numbers(2, (4, 32)).requires_grad_()
        expected = (x + other).detach()
        extra = other if leaf else other * 1
        address = extra.data_ptr()
        y = te.ops.AddExtraInput(in_place=True)(x, extra)
        assert y.data_ptr() == address
        assert_same_bits(y.detach(), expected)
        assert_same_bits(extra.detach(), expected)
        y.backward(grad := numbers(3, (4, 32)))
        same([x.grad, other.grad], [grad, grad])
    squared = other.square()
    te.ops.AddExtraInput(in_place=True)(x, other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_extra_output_s_gradient_is_added(in_place: bool) -> None:
    x = numbers(1, (4, 32)).requires_grad_()
    y, extra = te.ops.MakeExtraOutput(in_place=in_place)(x)
    (y * 2 + extra * 3).sum().backward()
    assert x.grad.unique().tolist() == [5.0]
    y, _ = te.ops.MakeExtraOutput(in_place=in_place)(x)
    x.grad = None
    (y * 2).sum().backward()
    assert x.grad.unique().tolist() == [2.0]


def test_a_layer_reads_a_quantized_gradient() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E5M2, device="cpu")
    torch.manual_seed(0)
    layer, x, found = te.Linear(32, 48, params_dtype=BF16), numbers(1, (16, 32)).requires_grad_(), []
    grad = quantizer(numbers(2, (16, 48)))
    for one in (grad, grad.dequantize()):
        x.grad = layer.weight.grad = None
        layer(x).backward(one)
        found.append([x.grad, layer.weight.grad])
    same(*found)


READERS: dict[str, Any] = {
    "Linear": lambda: te.Linear(64, 32, params_dtype=BF16),
    "LayerNorm": lambda: te.LayerNorm(64, params_dtype=BF16),
    "Bias": lambda: te.ops.Bias(64, dtype=BF16),
    "L2Normalization": te.ops.L2Normalization,
    "ConstantScale": lambda: te.ops.ConstantScale(3.0),
    "attention": lambda: lambda x: te.DotProductAttention(4, 16, qkv_format="bshd")(*[x.view(2, 8, 4, 16)] * 3),
    "rotary": lambda: (
        lambda x: te.apply_rotary_pos_emb(x.view(8, 2, 4, 16), te.RotaryPositionEmbedding(16)(8), fused=True)
    ),
    "cross entropy": lambda: lambda x: te.parallel_cross_entropy(x.view(2, 8, 64), torch.arange(16).view(2, 8)),
    "fused head": lambda: lambda x: te.fused_linear_cross_entropy(x, numbers(4, (48, 64)), torch.arange(16)),
    **{name: getattr(te.ops, name) for name in dir(te.ops) if name.endswith(("LU", "GLU"))},
}


@pytest.mark.parametrize("name", READERS)
def test_what_follows_reads_a_quantized_input(name: str) -> None:
    """Forward and backward have the bits of its numbers in a plain tensor."""
    reader, results = READERS[name](), []
    with te.autocast(recipe=te.recipe.Float8CurrentScaling()):
        quantized = te.ops.Quantize()(numbers(1, (16, 64)))
    for x in (quantized.detach(), quantized.dequantize()):
        assert isinstance(x, te.Float8Tensor) == (not results)
        x.requires_grad_()
        y = reader(x)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad))
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)
