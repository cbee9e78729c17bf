"""`Float8RowwiseScaling`, written out by hand, beside torchao's definition, on both devices."""

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.recipe_steps import Recomputed, assert_refused, layer_of, numbers, step

import optimized
import reference as te
from reference.inspect.recorded_step import file
from reference.inspect.recorded_step.replay import replay
from reference.inspect.recorded_step.statistics import Statistics
from reference.numbers import tensor_core
from reference.recipe import DelayedScaling, Float8CurrentScaling, Float8RowwiseScaling, Format, by_layer

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin
FP8, WIDE = Float8RowwiseScaling(), Float8RowwiseScaling(weight_gradient="high_precision")
RECIPES = {"rowwise": FP8, "rowwise_with_gw_hp": WIDE}
SIZES = [(21, 144, 272), (256, 256, 128), (1, 16, 16)]
LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda te, **more: te.Linear(64, 48, **more),
    "LayerNormLinear": lambda te, **more: te.LayerNormLinear(64, 48, normalization="RMSNorm", **more),
    "LayerNormMLP": lambda te, **more: te.LayerNormMLP(64, 96, activation="swiglu", **more),
    "operations": lambda te, **more: te.ops.Sequential(
        te.ops.Linear(64, 96, dtype=BF16, **more), te.ops.GELU(), te.ops.Linear(96, 48, dtype=BF16, **more)
    ),
}


def run(layer: Any, recipe: Any, x: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, dx and dw."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


# --- the arithmetic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_linear_is_what_the_formulas_say(tokens: int, inputs: int, outputs: int, hybrid: bool) -> None:
    layer = te.Linear(inputs, outputs, params_dtype=BF16)
    x, g = numbers(1, tokens, inputs), numbers(2, tokens, outputs) * 1e-3
    recipe = dataclasses.replace(FP8, fp8_format=Format.HYBRID) if hybrid else FP8
    y, dx, dw = run(layer, recipe, x, g)
    how = (True, 1e-12)
    qx, qx_t, sx, sx_t = twin.cast_rowwise_transpose(x, E4M3, *how)
    qw, qw_t, sw, sw_t = twin.cast_rowwise_transpose(layer.weight.detach(), E4M3, *how)
    qg, qg_t, sg, sg_t = twin.cast_rowwise_transpose(g, E5M2 if hybrid else E4M3, *how)
    assert_same_bits(y, twin.gemm_fp8_rowwise(qx, qw, sx, sw, layer.bias.detach(), BF16, "fast"))
    assert_same_bits(dx, twin.gemm_fp8_rowwise(qg, qw_t, sg, sw_t, None, BF16, "split"))
    assert_same_bits(dw, twin.gemm_fp8_rowwise(qg_t, qx_t, sg_t, sx_t, None, BF16, "split"))
    assert_same_bits(layer.bias.grad, twin.dbias(g))
    assert "scaling_fwd" not in layer.fp8_meta, "there is no state between steps"


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), SIZES)
def test_a_weights_gradient_in_high_precision(tokens: int, inputs: int, outputs: int) -> None:
    layer, plain = (te.Linear(inputs, outputs, params_dtype=BF16) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    x, g = numbers(1, tokens, inputs), numbers(2, tokens, outputs) * 1e-3
    y, dx, dw = run(layer, WIDE, x, g)
    w = layer.weight.detach()
    _, w_t, scale_inv = twin.cast_transpose(w, twin.current_scale(w, E4M3, True, 1e-12), None, 0, E4M3)
    qg, sg = twin.cast_rowwise(g, E4M3, True, 1e-12)
    assert_same_bits(y, run(layer, FP8, x, g)[0])
    assert_same_bits(dx, twin.gemm_fp8_rowwise(qg, w_t, sg, scale_inv, None, BF16, "split"))
    plain(x).backward(g)
    assert_same_bits(dw, plain.weight.grad, "that of 16 bits")


def cast(x: torch.Tensor, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's codes and inverse scales, along `dim` or of the whole tensor: from its definition, in plain PyTorch."""
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2((448.0 / amax.double().clamp(min=1e-12)).float())))
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


def multiplied(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...], fast: bool) -> torch.Tensor:
    """torchao's `a @ b`: fast with scales in the GEMM; otherwise a GEMM of codes to bf16, and the scales after it."""
    (a_codes, a_inv), (b_codes, b_inv) = a, b
    deep = -a_codes.shape[1] % 16
    codes = [torch.nn.functional.pad(one.float(), (0, deep)).to(E4M3) for one in (a_codes, b_codes.t())]
    acc = tensor_core.gemm(*codes, "fast" if fast else "split")
    return (acc * b_inv * a_inv).to(BF16) if fast else acc.to(BF16).mul_(a_inv * b_inv)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [*SIZES, (300, 528, 48)])
def test_linear_is_torchaos(tokens: int, inputs: int, outputs: int, recipe: Any) -> None:
    """Rows of different magnitudes, and a token of zeros."""
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=BF16)
    x, g = numbers(1, tokens, inputs), numbers(2, tokens, outputs)
    x *= torch.exp2(torch.arange(tokens) % 23 - 11.0).to(BF16)[:, None]
    g *= torch.exp2(-(torch.arange(tokens) % 19) - 8.0).to(BF16)[:, None]
    x[tokens // 2] = 0
    y, dx, dw = run(layer, recipe, x, g)
    w = layer.weight.detach()
    assert_same_bits(y, multiplied(cast(x, 1), cast(w.t(), 0), fast=True))
    of_w = cast(w, None if recipe is WIDE else 0)
    assert_same_bits(dx, multiplied(cast(g, 1), of_w, fast=False))
    if recipe is FP8:
        assert_same_bits(dw, multiplied(cast(g.t(), 1), cast(x, 0), fast=False))
    else:
        exact = g.double().t() @ x.double()
        assert (dw.double() - exact).abs().max() <= exact.abs().max() * 2**-8


def test_rows_are_nearer_than_one_scale_for_all() -> None:
    """A token a thousand times larger than the others takes no digits from them."""
    layer, x, g = te.Linear(64, 48, bias=False, params_dtype=BF16), numbers(1, 32, 64), numbers(2, 32, 48)
    x[3] *= 100000
    exact = (x.double() @ layer.weight.detach().double().t())[4:]
    off = [(run(layer, one, x, g)[0][4:] - exact).norm() / exact.norm() for one in (FP8, Float8CurrentScaling())]
    assert off[0] < 0.05 < off[1]


def test_an_infinity_reaches_its_token_alone() -> None:
    layer, x = te.Linear(64, 48, params_dtype=BF16), numbers(1, 8, 64)
    with te.autocast(recipe=FP8), torch.no_grad():
        whole = layer(x)
        x[2, 5], x[4, 7] = math.inf, math.nan
        y = layer(x)
    assert bool(y[[2, 4]].isnan().all())
    others = [0, 1, 3, 5, 6, 7]
    assert_same_bits(y[others], whole[others])


# --- what a layer can do -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("name", [*LAYERS, "TransformerLayer"])
def test_each_layer_is_near_16_bits_and_repeats(name: str, recipe: Any) -> None:
    torch.manual_seed(0)
    layer = layer_of() if name == "TransformerLayer" else LAYERS[name](te)
    layer = layer.to(BF16)
    found, again = step(layer, recipe), step(layer, recipe)
    by_layer(layer, {"*": None})  # 16 bits
    plain = step(layer, recipe)
    for a, b in zip(found, again, strict=True):
        assert_same_bits(a, b)
        assert bool(a.isfinite().all())
    for a, b in ((found[0], plain[0]), (found[1], plain[1])):
        assert 0 < (a - b).float().norm() / b.float().norm() < 0.15


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_block_is_its_modules(recipe: Any) -> None:
    """A TransformerLayer's fused equation, and its parts run one by one."""
    found = []
    for hooked in (False, True):
        layer = layer_of(hidden_dropout=0.0, attention_dropout=0.0)
        if hooked:
            for part in layer.modules():
                part.register_forward_hook(lambda *_: None)
        found.append(step(layer, recipe))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_tokens_words_do_not_depend_on_the_batch(recipe: Any) -> None:
    layer, x = te.LayerNormMLP(64, 128, params_dtype=BF16), numbers(1, 40, 64)
    assert recipe.sees_other_tokens is False
    with te.autocast(recipe=recipe), torch.no_grad():
        whole = layer(x)
        assert_same_bits(layer(torch.cat([x[7:9] * 1000, x[7:8]]))[2:], whole[7:8])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recomputation_has_the_bits(recipe: Any) -> None:
    for a, b in zip(step(layer_of(), recipe), step(Recomputed(), recipe), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_microbatches_share_a_weights_cast(recipe: Any) -> None:
    layer, x, g = te.Linear(32, 48, params_dtype=BF16), numbers(3, 8, 32), numbers(4, 8, 48)
    found = []
    for first in (None, True, False):
        inp = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(inp, is_first_microbatch=first)
        y.backward(g)
        found.append((y.detach(), inp.grad))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            assert_same_bits(a, b)
    with te.autocast(recipe=recipe), torch.no_grad():
        layer.weight.zero_()
        assert_same_bits(layer(x, is_first_microbatch=False), found[0][0])
        assert not layer(x, is_first_microbatch=True).equal(found[0][0])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_outside_of_fp8(recipe: Any, override: str) -> None:
    """Whatever the weight's gradient is otherwise."""
    layer = te.Linear(32, 48, bias=False, params_dtype=BF16)
    x, g = numbers(1, 24, 32), numbers(2, 24, 48)
    y, dx, dw = run(layer, dataclasses.replace(recipe, backward_override=override), x, g)
    w = layer.weight.detach()
    if override == "dequantized":
        (qx, sx), (qw, sw) = (twin.cast_rowwise(one, E4M3, True, 1e-12) for one in (x, w))
        x, w = (q.float().mul(s[:, None]).to(BF16) for q, s in ((qx, sx), (qw, sw)))
    assert_same_bits(y, run(layer, FP8, numbers(1, 24, 32), g)[0])
    assert_same_bits(dx, twin.gemm(g, w.t(), None, BF16))
    assert_same_bits(dw, twin.gemm(g.t(), x.t(), None, BF16))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_gradient_is_added_to_main_grad(recipe: Any) -> None:
    layers = [te.Linear(32, 48, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=fuse) for fuse in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].weight.main_grad = torch.zeros(48, 32)
    for layer in layers:
        with te.autocast(recipe=recipe):
            layer(numbers(1, 24, 32)).backward(numbers(2, 24, 48))
    assert_same_bits(layers[1].weight.main_grad.to(BF16), layers[0].weight.grad)


def test_the_activation_dtype_may_change_from_step_to_step() -> None:
    """The gradient in high precision has the dtype of its own forward."""
    layer, x, g = te.Linear(32, 48, bias=False), numbers(1, 24, 32).float(), numbers(2, 24, 48).float()
    for dtype in (BF16, torch.float16, None, BF16):
        layer.zero_grad()
        inp = x.clone()
        with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None), te.autocast(recipe=WIDE):
            y = layer(inp)
        y.backward(g.to(y.dtype))
        assert y.dtype == (dtype or torch.float32)
        wanted = g.t() @ x if dtype is None else twin.gemm(g.to(dtype).t(), x.to(dtype).t(), None, torch.float32)
        assert (layer.weight.grad - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_compiled_layer_has_the_bits(recipe: Any) -> None:
    layer = LAYERS["LayerNormMLP"](te).to(BF16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = step(layer, recipe)
    torch.manual_seed(5)
    layer.zero_grad()
    x = numbers(1, 24, 2, 64).requires_grad_()
    with te.autocast(recipe=recipe):
        y = compiled(x)
    y.backward(numbers(2, *y.shape))
    for a, b in zip(expected, (y, x.grad, *(p.grad for p in layer.parameters())), strict=True):
        assert_same_bits(b.detach(), a)


def test_recipes_by_layer_and_no_tokens() -> None:
    layer = layer_of()
    by_layer(layer, {"layernorm_mlp": FP8, "self_attention.proj": WIDE})
    assert all(bool(one.isfinite().all()) for one in step(layer, DelayedScaling(amax_history_len=4)))
    linear = te.Linear(32, 48, params_dtype=BF16)
    for recipe in RECIPES.values():
        linear.zero_grad()
        y, dx, dw = run(linear, recipe, numbers(1, 0, 32), numbers(1, 0, 48))
        assert (y.shape, dx.shape) == ((0, 48), (0, 32))
        assert not bool(dw.any())


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_statistics_measure_each_rows_cast(recipe: Any) -> None:
    layer, x = te.Linear(144, 48, params_dtype=BF16), numbers(3, 20, 144)
    x *= torch.exp2(torch.arange(20) - 10.0).to(BF16)[:, None]
    with te.collect_stats(layer, recipes=[Float8CurrentScaling()]) as stats, te.autocast(recipe=recipe):
        layer(x).backward(numbers(4, 20, 48))
    q, scale_inv = twin.cast_rowwise(x, E4M3, True, 1e-12)
    noise = (x.double() - q.double() * scale_inv.double()[:, None]).square().sum()
    (found,) = [one for one in stats.samples() if one.role == "input" and one.recipe == recipe]
    assert found.sqnr == pytest.approx(10 * math.log10(x.double().square().sum() / noise))
    assert {one.role for one in stats.samples() if one.recipe == recipe} == {"input", "weight", "grad_output"}
    assert ("high_precision_weight_gradient" in stats.table()) is (recipe is WIDE)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recorded_step_runs_again(recipe: Any, tmp_path: Path) -> None:
    layer = layer_of()
    with te.record(layer, tmp_path / "step"):
        step(layer, recipe)
    recording = file.read(tmp_path / "step")
    statistics = Statistics(recording)
    assert replay(recording, statistics).equal
    measured = {(row.name, row.tensor.split()[0]) for row in statistics.rows if row.sqnr is not None and row.sqnr > 15}
    cast = "cast_rowwise" if recipe is WIDE else "cast_rowwise_transpose"
    assert {("gemm_fp8_rowwise", "out"), (cast, "codes")} <= measured


# --- what is refused, and the fields -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_needs_one_scale_is_refused(recipe: Any) -> None:
    with te.quantized_model_init():
        kept = te.Linear(48, 64, params_dtype=BF16)
    sentence = "row-wise scaled and per-tensor operands is not offered: a weight that quantized_model_init"
    with te.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=sentence):
        kept(numbers(1, 16, 48))
    with te.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=r"ops\.Quantize under a recipe of "):
        te.ops.Quantize()(numbers(1, 16, 48))


def test_the_fields() -> None:
    assert FP8 == Float8RowwiseScaling("fp8", Format.E4M3) != WIDE
    assert not FP8.high_precision_weight_gradient
    assert WIDE.high_precision_weight_gradient
    questions = (FP8.delayed, FP8.float8_current_scaling, FP8.float8_per_tensor_scaling, FP8.mxfp8)
    assert not any(question() for question in (*questions, FP8.float8_block_scaling, FP8.nvfp4, FP8.custom))
    assert te.recipe.Float8RowwiseScaling is Float8RowwiseScaling
    assert te.quantization.get_align_size_for_quantization(FP8) == 16


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"weight_gradient": "bf16"}, r"weight_gradient='bf16'; 'fp8' and 'high_precision' \(torchao's rowwise and"),
        ({"weight_gradient": True}, r"weight_gradient=True; 'fp8' and"),
        ({"fp8_format": Format.E5M2}, "Format.HYBRID and Format.E4M3 are accepted"),
        ({"fp8_dpa": True}, "fp8_dpa=True is not offered"),
        ({"fp8_mha": True}, "fp8_mha=True is not offered"),
        ({"backward_override": "dequantised"}, "backward_override='dequantised'; None, 'high_precision' and"),
    ],
)
def test_refusals(arguments: dict[str, Any], sentence: str) -> None:
    assert_refused(Float8RowwiseScaling, arguments, sentence)


@pytest.mark.sample(2)
@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("recipe", [*RECIPES.values(), dataclasses.replace(FP8, backward_override="dequantized")])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_bits_of_the_cpu(name: str, recipe: Any) -> None:
    assert optimized.TransformerLayer
    here = LAYERS[name](te).to(BF16)
    there = copy.deepcopy(here).cuda()
    for _ in range(3):  # the third step plays its launches
        for a, b in zip(step(here, recipe), step(there, recipe, "cuda"), strict=True):
            assert_same_bits(a, b.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{}, {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_training_has_the_bits_of_the_cpu(recipe: Any, arguments: dict[str, Any]) -> None:
    """With another recipe in a part of the layer."""
    pair = layer_of(**arguments), layer_of(optimized, **arguments).to("cuda")
    for layer in pair:
        by_layer(layer, {"*proj": DelayedScaling(amax_history_len=4)})
    for _ in range(3):
        for a, b in zip(step(pair[0], recipe), step(pair[1], recipe, "cuda"), strict=True):
            assert_same_bits(a, b.cpu())
