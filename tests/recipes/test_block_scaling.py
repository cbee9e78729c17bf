"""`Float8BlockScaling`, written out by hand, on both devices."""

import math
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.recipe_steps import Recomputed, assert_refused, layer_of, numbers, step

import optimized
import reference as te
from reference.recipe import DelayedScaling, Float8BlockScaling, Format, MMParams, QParams, by_layer
from reference.recipes import block_scaling, quantized
from reference.recipes.block_scaling import InBlocks
from reference.recipes.quantizer import Quantizer

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


@pytest.mark.parametrize(
    ("recipe", "squares", "grad"),
    [
        (Float8BlockScaling(), (False, True, False), E4M3),
        (Float8BlockScaling(fp8_format=Format.HYBRID, use_f32_scales=True), (False, True, False), E5M2),
        (Float8BlockScaling(w_block_scaling_dim=1), (False, False, False), E4M3),
        (Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1), (True, False, False), E4M3),
        (Float8BlockScaling(grad_block_scaling_dim=2, w_block_scaling_dim=1), (False, False, True), E4M3),
    ],
)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(21, 144, 272), (256, 256, 128), (1, 16, 16)])
def test_linear_is_what_the_formulas_say(
    recipe: Float8BlockScaling, squares: tuple[bool, ...], grad: torch.dtype, tokens: int, inputs: int, outputs: int
) -> None:
    layer = te.Linear(inputs, outputs, params_dtype=BF16)
    x, g = numbers(1, tokens, inputs).requires_grad_(), numbers(2, tokens, outputs) * 1e-3
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    dialect = "fp32" if recipe.use_f32_scales else "power_of_two"
    of_x, of_w, of_g = squares
    qx, qx_t, sx, sx_t = twin.cast_blocks_transpose(x.detach(), E4M3, of_x, dialect, 0.0)
    qw, qw_t, sw, sw_t = twin.cast_blocks_transpose(layer.weight.detach(), E4M3, of_w, dialect, 0.0)
    qg, qg_t, sg, sg_t = twin.cast_blocks_transpose(g, grad, of_g, dialect, 0.0)
    assert_same_bits(y, twin.gemm_fp8_blocks(qx, qw, sx, sw, of_x, of_w, layer.bias.detach(), BF16))
    assert_same_bits(x.grad, twin.gemm_fp8_blocks(qg, qw_t, sg, sw_t, of_g, of_w, None, BF16))
    assert_same_bits(layer.weight.grad, twin.gemm_fp8_blocks(qg_t, qx_t, sg_t, sx_t, of_g, of_x, None, BF16))
    assert_same_bits(layer.bias.grad, twin.dbias(g))
    assert "scaling_fwd" not in layer.fp8_meta, "there is no state between steps"


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"activation": "swiglu", "normalization": "RMSNorm", "bias": False},
        {"fuse_qkv_params": False, "num_gqa_groups": 2, "activation": "srelu"},
    ],
)
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8BlockScaling(fp8_format=Format.HYBRID)])
def test_fused_casts_have_the_words_of_ops_one_by_one(
    recipe: Float8BlockScaling, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = step(layer_of(**arguments), recipe)
    for name in ("norm", "activation", "grad", "joined_grad", "activation_grad"):
        monkeypatch.setattr(InBlocks, name, getattr(Quantizer, name))
    for a, b in zip(fused, step(layer_of(**arguments), recipe), strict=True):
        assert_same_bits(a, b)


def test_a_tokens_words_do_not_depend_on_the_batch() -> None:
    layer, x = te.LayerNormMLP(64, 128, params_dtype=BF16), numbers(1, 40, 64)
    with te.autocast(recipe=Float8BlockScaling()), torch.no_grad():
        whole = layer(x)
        assert_same_bits(layer(torch.cat([x[7:9] * 1000, x[7:8]]))[2:], whole[7:8])


def test_recomputation_has_the_bits() -> None:
    recipe = Float8BlockScaling()
    for a, b in zip(step(layer_of(), recipe), step(Recomputed(), recipe), strict=True):
        assert_same_bits(a, b)


def test_what_follows_a_product_is_fused_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The residual's half of a layer is one op, with the words of two."""
    recipe, fused = Float8BlockScaling(), []
    for layouts, found in quantized.PRODUCTS.items():
        if block_scaling.ROWS in layouts:
            noted = found._replace(residual=lambda *given, op=found.residual: fused.append(1) or op(*given))
            monkeypatch.setitem(quantized.PRODUCTS, layouts, noted)
    together = step(layer_of(), recipe)
    assert len(fused) == 2, "attention's projection and fc2"
    for layouts, found in quantized.PRODUCTS.items():
        monkeypatch.setitem(quantized.PRODUCTS, layouts, found._replace(residual=None))
    for a, b in zip(together, step(layer_of(), recipe), strict=True):
        assert_same_bits(a, b)
    assert len(fused) == 2


def test_microbatches_share_a_weights_cast() -> None:
    recipe, layer = Float8BlockScaling(), te.Linear(32, 48, params_dtype=BF16)
    x = numbers(3, 8, 32)
    with te.autocast(recipe=recipe), torch.no_grad():
        first = layer(x, is_first_microbatch=True)
        layer.weight.zero_()
        assert_same_bits(layer(x, is_first_microbatch=False), first)
        assert not layer(x, is_first_microbatch=True).equal(first)


def test_a_backward_in_high_precision() -> None:
    layer, plain = te.Linear(32, 48, params_dtype=BF16), te.Linear(32, 48, params_dtype=BF16)
    plain.load_state_dict(layer.state_dict())
    x, g = numbers(1, 24, 32), numbers(2, 24, 48)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    with te.autocast(recipe=Float8BlockScaling(backward_override="high_precision")):
        layer(inputs[0]).backward(g)
    plain(inputs[1]).backward(g)
    assert_same_bits(inputs[0].grad, inputs[1].grad)
    assert_same_bits(layer.weight.grad, plain.weight.grad)


def test_a_gradient_is_added_to_main_grad() -> None:
    layers = [te.Linear(32, 48, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=fuse) for fuse in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].weight.main_grad = torch.zeros(48, 32)
    for layer in layers:
        with te.autocast(recipe=Float8BlockScaling()):
            layer(numbers(1, 24, 32)).backward(numbers(2, 24, 48))
    assert_same_bits(layers[1].weight.main_grad.to(BF16), layers[0].weight.grad)


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(("first", "end"), [(0, 128), (128, 256), (128, 300), (256, 300), (0, 300)])
def test_rows_of_an_operand_have_their_own_scales(square: bool, first: int, end: int) -> None:
    whole = InBlocks(E4M3, square, "fp32").quantize(numbers(7, 300, 272), False).row
    part = quantized.rows_of_operand(whole, first, end)
    expected = quantized.dequantize(whole, 272, torch.float32)[first:end]
    assert_same_bits(quantized.dequantize(part, 272, torch.float32), expected)


def test_statistics_measure_each_blocks_cast() -> None:
    layer = te.Linear(144, 48, params_dtype=BF16)
    x = numbers(3, 20, 144)
    beside = [Float8BlockScaling(use_f32_scales=True)]
    with te.collect_stats(layer, recipes=beside) as stats, te.autocast(recipe=Float8BlockScaling()):
        layer(x).backward(numbers(4, 20, 48))
    for recipe, dialect in ((Float8BlockScaling(), "power_of_two"), (Float8BlockScaling(use_f32_scales=True), "fp32")):
        (found,) = [one for one in stats.samples() if one.role == "input" and one.recipe == recipe]
        q, scale_inv = twin.cast_blocks(x, E4M3, False, dialect, 0.0)
        values = q.float() * scale_inv.t()[:20].repeat_interleave(128, 1)[:, :144]
        noise = (x.double() - values.double()).square().sum()
        assert found.sqnr == pytest.approx(10 * math.log10(x.double().square().sum() / noise))


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{}, {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}])
@pytest.mark.parametrize("recipe", [Float8BlockScaling(), Float8BlockScaling(use_f32_scales=True)])
def test_training_has_the_bits_of_the_cpu(recipe: Float8BlockScaling, arguments: dict[str, Any]) -> None:
    """With another recipe in a part of the layer."""
    pair = layer_of(**arguments), layer_of(optimized, **arguments).to("cuda")
    for layer in pair:
        by_layer(layer, {"*proj": DelayedScaling(amax_history_len=4)})
    for _ in range(3):
        for a, b in zip(step(pair[0], recipe), step(pair[1], recipe, "cuda"), strict=True):
            assert_same_bits(a, b.cpu())


def test_the_fields_are_transformer_engines() -> None:
    recipe = Float8BlockScaling()
    questions = (recipe.delayed, recipe.float8_current_scaling, recipe.float8_per_tensor_scaling, recipe.mxfp8)
    assert recipe.float8_block_scaling()
    assert not any(question() for question in questions)
    assert recipe.fp8_quant_fwd_inp == recipe.fp8_quant_fwd_weight == recipe.fp8_quant_bwd_grad
    assert recipe.fp8_quant_fwd_inp == QParams(power_2_scale=True, amax_epsilon=0.0)
    assert recipe == Float8BlockScaling() != Float8BlockScaling(use_f32_scales=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"use_f32_scales": 1}, "use_f32_scales=1; True and False are accepted"),
        ({"x_block_scaling_dim": 3}, "x_block_scaling_dim=3; 1 and 2 are accepted"),
        ({"x_block_scaling_dim": 2}, "x_block_scaling_dim=2, w_block_scaling_dim=2, .* 2 is accepted for one of them"),
        ({"fp8_gemm_dgrad": MMParams(False)}, r"fp8_gemm_dgrad=.*; MMParams\(use_split_accumulator=True\) is accepted"),
        ({"fp8_format": Format.E5M2}, "Format.HYBRID and Format.E4M3 are accepted"),
        ({"fp8_dpa": True}, "fp8_dpa=True is not offered"),
        ({"fp8_mha": True}, "fp8_mha=True is not offered"),
        ({"backward_override": "dequantised"}, "backward_override='dequantised'; None, 'high_precision' and"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    assert_refused(Float8BlockScaling, arguments, sentence)
