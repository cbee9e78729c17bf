"""`MXFP8BlockScaling` and `NVFP4BlockScaling`: layers written out by hand, refusals, repetition."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import reference as te
from reference.numbers import block_formats, formats, philox
from reference.ops import library
from reference.recipe import Float8CurrentScaling, Format, MXFP8BlockScaling, NVFP4BlockScaling, by_layer

BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin
RECIPES: dict[str, Any] = {
    "MXFP8": MXFP8BlockScaling(),
    "MXFP8, hybrid and square": MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
    "NVFP4": NVFP4BlockScaling(),
    "NVFP4, plain": NVFP4BlockScaling(True, True, True),
}
Cast = tuple[torch.Tensor, ...]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def cast_of(recipe: Any, tensor: str, x: torch.Tensor, state: torch.Tensor | None, transposed: bool) -> Cast:
    """What a GEMM reads, by the recipe's description."""
    x = x.t().contiguous() if transposed else x
    if recipe.mxfp8():
        e5m2 = recipe.fp8_format is Format.HYBRID and tensor == "grad"
        found: Cast = twin.cast_mxfp8(x, E5M2 if e5m2 else E4M3, recipe.enable_2d_quantization and tensor == "weight")
        return found
    if transposed and tensor != "weight" and not recipe.disable_rht:
        x = twin.hadamard(x)
    square = tensor == "weight" and not recipe.disable_2d_quantization
    by_chance = tensor == "grad" and not recipe.disable_stochastic_rounding
    found = twin.cast_nvfp4(x, square, state if by_chance else None)
    return found


def product(recipe: Any, a: Cast, b: Cast, bias: torch.Tensor | None) -> torch.Tensor:
    multiply = twin.gemm_mxfp8 if recipe.mxfp8() else twin.gemm_nvfp4
    found: torch.Tensor = multiply(*[x for both in zip(a, b, strict=True) for x in both], bias, BF16)
    return found


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("tokens", [21, 32])
def test_linear_is_what_the_ops_say(tokens: int, recipe: Any) -> None:
    torch.manual_seed(0)
    layer = te.Linear(48, 80, params_dtype=BF16)
    x, g = numbers(1, tokens, 48).requires_grad_(), numbers(2, tokens, 80) * 1e-3
    with te.autocast(recipe=recipe):
        y = layer(x)
    torch.manual_seed(7)
    y.backward(g)
    w, inp = layer.weight.detach(), x.detach()
    torch.manual_seed(7)
    state = philox.new_state()
    of_g, of_g_t = (cast_of(recipe, "grad", g, state, way) for way in (False, True))
    of_x, of_x_t = (cast_of(recipe, "input", inp, None, way) for way in (False, True))
    of_w, of_w_t = (cast_of(recipe, "weight", w, None, way) for way in (False, True))
    assert_same_bits(y, product(recipe, of_x, of_w, layer.bias.detach()))
    assert_same_bits(x.grad, product(recipe, of_g, of_w_t, None))
    assert_same_bits(layer.weight.grad, product(recipe, of_g_t, of_x_t, None))
    assert_same_bits(layer.bias.grad, twin.dbias(g))
    assert "scaling_fwd" not in layer.fp8_meta, "there is no state between steps"


LAYERS: dict[str, Callable[[], Any]] = {
    "LayerNormLinear": lambda: te.LayerNormLinear(48, 64, params_dtype=BF16),
    "LayerNormMLP": lambda: te.LayerNormMLP(48, 96, params_dtype=BF16),
    "LayerNormMLP, swiglu": lambda: te.LayerNormMLP(
        48, 96, activation="swiglu", normalization="RMSNorm", bias=False, params_dtype=BF16
    ),
    "MultiheadAttention": lambda: te.MultiheadAttention(48, 3, input_layernorm=True, params_dtype=BF16),
    "TransformerLayer": lambda: te.TransformerLayer(48, 96, 3, params_dtype=BF16),
    "Linear in fp32": lambda: te.Linear(48, 64),
    "Linear of parts": lambda: te.Linear(48, 64, parameters_split=("a", "b"), params_dtype=BF16),
}


def step(layer: Any, recipe: Any, **context: Any) -> list[torch.Tensor]:
    torch.manual_seed(5)
    layer.zero_grad()
    x = numbers(1, 21, 2, 48).to(next(layer.parameters()).dtype).requires_grad_()
    with te.autocast(recipe=recipe, **context):
        y = layer(x)
    y.backward(numbers(2, *y.shape).to(y.dtype))
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in layer.parameters()))]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_each_layer_is_near_16_bits_and_repeats(make: Callable[[], Any], recipe: Any) -> None:
    """Rounding to eight or to four bits moves y, dx and the parameters' gradients by a part of their size."""
    torch.manual_seed(0)
    layer = make()
    plain, found = step(layer, None, enabled=False), step(layer, recipe)
    assert all(bool(one.isfinite().all()) for one in found)
    of_all = [[one[0], one[1], torch.cat([t.flatten() for t in one[2:]])] for one in (found, plain)]
    for a, b in zip(*of_all, strict=True):
        off = (a.float() - b.float()).norm() / b.float().norm()
        assert off < (0.15 if recipe.mxfp8() else 0.5), off
    assert not torch.equal(found[0], plain[0])
    for a, b in zip(step(layer, recipe), found, strict=True):
        assert_same_bits(a, b)


def test_a_norm_passes_through_the_activation_dtype() -> None:
    fused = te.LayerNormLinear(48, 64, params_dtype=BF16)
    norm, linear = te.LayerNorm(48, params_dtype=BF16), te.Linear(48, 64, params_dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(fused.weight)
    for recipe in RECIPES.values():
        for a, b in zip(step(fused, recipe)[:2], step(torch.nn.Sequential(norm, linear), recipe)[:2], strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_block_is_its_modules(recipe: Any) -> None:
    """A TransformerLayer's fused equation, and its parts run one by one."""
    found = []
    for hooked in (False, True):
        torch.manual_seed(0)
        layer = te.TransformerLayer(48, 96, 3, hidden_dropout=0.0, attention_dropout=0.0, params_dtype=BF16)
        if hooked:
            for part in layer.modules():
                part.register_forward_hook(lambda *_: None)
        found.append(step(layer, recipe))
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_a_layer_can_do_besides(recipe: Any) -> None:
    """Recomputation, kept weights of microbatches, main_grad, copies, recipes by layer."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(48, 96, 3, hidden_dropout=0.1, params_dtype=BF16)

    class Recomputed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te.checkpoint(self.layer, x)

    for a, b in zip(step(layer, recipe), step(Recomputed(), recipe), strict=True):
        assert_same_bits(a, b)

    linear, x = te.Linear(48, 64, params_dtype=BF16), numbers(3, 21, 48)
    with te.autocast(recipe=recipe):
        expected = linear(x)
        assert_same_bits(linear(x, is_first_microbatch=True), expected)
        assert_same_bits(linear(x, is_first_microbatch=False), expected)
    adds = te.Linear(48, 64, bias=False, fuse_wgrad_accumulation=True, params_dtype=BF16)
    adds.weight.main_grad = torch.ones(64, 48)
    with te.autocast(recipe=recipe):
        adds(x).sum().backward()
    assert bool((adds.weight.main_grad != 1).any())

    by_layer(layer, {"layernorm_mlp": Float8CurrentScaling(), "self_attention.proj": None})
    assert all(bool(one.isfinite().all()) for one in step(layer, recipe))


def test_square_blocks_act_on_rows_of_different_sizes() -> None:
    """In MXFP8 they change numbers that E4M3 cannot hold beside the largest of their block; all others keep theirs."""
    layer = te.Linear(32, 64, bias=False)
    rows, squares = MXFP8BlockScaling(), MXFP8BlockScaling(enable_2d_quantization=True)
    x = numbers(1, 16, 32).float()

    def found(recipe: Any) -> torch.Tensor:
        with te.autocast(recipe=recipe), torch.no_grad():
            y: torch.Tensor = layer(x)
        return y

    with torch.no_grad():
        layer.weight[::2] *= 2.0**-24
    of_rows, of_squares = found(rows), found(squares)
    assert bool(of_rows[:, ::2].any())
    assert not of_squares[:, ::2].any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_bits_follow_the_seed() -> None:
    """A compiled backward that rounds by chance draws in each run, as eager mode."""
    layer, x, g = te.Linear(48, 64, params_dtype=BF16), numbers(1, 21, 48).requires_grad_(), numbers(2, 21, 64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

    def dx(run: Any, seed: int) -> torch.Tensor:
        x.grad = None
        with te.autocast(recipe=NVFP4BlockScaling()):
            y = run(x)
        torch.manual_seed(seed)
        y.backward(g)
        assert x.grad is not None
        return x.grad

    for seed in (1, 2, 1):
        assert_same_bits(dx(compiled, seed), dx(layer, seed))
    assert not torch.equal(dx(compiled, 1), dx(compiled, 2))


def test_forward_alone_in_four_bits() -> None:
    """backward_override="high_precision" multiplies as 16 bits do, of the y that four bits gave."""
    layer = te.Linear(48, 64, bias=False, params_dtype=BF16)
    half, whole = step(layer, NVFP4BlockScaling(backward_override="high_precision")), step(layer, NVFP4BlockScaling())
    plain = step(layer, None, enabled=False)
    assert_same_bits(half[0], whole[0])
    for a, b in zip(half[1:], plain[1:], strict=True):
        assert_same_bits(a, b)


REFUSED = [
    (MXFP8BlockScaling, {"margin": 1}, "margin=1 is not offered; 0 is accepted"),
    (MXFP8BlockScaling, {"enable_2d_quantization": 1}, "enable_2d_quantization=1; True and False are accepted"),
    (MXFP8BlockScaling, {"fp8_format": Format.E5M2}, "Format.HYBRID and Format.E4M3 are accepted"),
    (NVFP4BlockScaling, {"disable_rht": "yes"}, "disable_rht='yes'; True and False are accepted"),
    (NVFP4BlockScaling, {"row_scaled_activation": True}, "row_scaled_activation=True is not offered; False is"),
    (NVFP4BlockScaling, {"nvfp4_4over6": "all"}, "nvfp4_4over6=all is not offered; none is accepted"),
    (NVFP4BlockScaling, {"fp4_format": Format.E4M3}, "fp4_format=Format.E4M3 is not offered; Format.E2M1 is"),
    (NVFP4BlockScaling, {"fp8_format": Format.HYBRID}, "fp8_format=Format.HYBRID is not offered; Format.E4M3 is"),
    *[
        (kind, given, sentence)
        for kind in (MXFP8BlockScaling, NVFP4BlockScaling)
        for given, sentence in (
            ({"fp8_dpa": True}, "fp8_dpa=True is not offered"),
            ({"fp8_mha": True}, "fp8_mha=True is not offered"),
            ({"backward_override": "dequantised"}, "backward_override='dequantised'; None, 'high_precision' and"),
        )
    ],
]


@pytest.mark.parametrize(("kind", "given", "sentence"), REFUSED)
def test_what_is_not_offered_says_so(kind: Any, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises((NotImplementedError, ValueError, TypeError), match=f"^{kind.__name__}: .*{sentence}"):
        kind(**given)


def test_the_parts_of_the_recipe_have_transformer_engines_names() -> None:
    recipe = NVFP4BlockScaling()
    assert [
        (one.random_hadamard_transform, one.stochastic_rounding, one.fp4_2d_quantization)
        for one in (recipe.fp4_quant_fwd_inp, recipe.fp4_quant_fwd_weight, recipe.fp4_quant_bwd_grad)
    ] == [(True, False, False), (False, False, True), (True, True, False)]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_needs_one_scale_is_refused(recipe: Any) -> None:
    with te.quantized_model_init():
        kept = te.Linear(48, 64, params_dtype=BF16)
    with (
        te.autocast(recipe=recipe),
        pytest.raises(
            NotImplementedError, match="per-tensor operands is not offered: a weight that quantized_model_init"
        ),
    ):
        kept(numbers(1, 16, 48))
    with te.autocast(recipe=recipe), pytest.raises(NotImplementedError, match=r"ops\.Quantize under a recipe of "):
        te.ops.Quantize()(numbers(1, 16, 48))


def test_a_gpu_is_refused_in_a_sentence() -> None:
    """Whichever op comes first."""
    for name in ("cast_mxfp8", "cast_nvfp4", "hadamard", "gemm_mxfp8", "gemm_nvfp4"):
        said = library.no_implementation(name, {torch.device("cuda", 0)})
        assert said == (
            f"twin::{name} got tensors on cuda:0; it runs on 'cpu' alone: MXFP8 and NVFP4 need Blackwell's tensor "
            f"cores, and the kernels here are for Hopper; the CPU computes both."
        )


# --- statistics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_statistics_compare_with_what_blocks_stand_for(name: str) -> None:
    """The noise of a cast is that of one scale for each block; NaN and infinities are counted."""
    layer, recipe = te.Linear(48, 64, params_dtype=BF16), RECIPES[name]
    x = numbers(1, 21, 48)
    x[0, :16] = 0
    with te.collect_stats(layer, every=1) as stats, te.autocast(recipe=recipe):
        layer(x)
    one, weight = stats.samples()
    assert (one.role, one.recipe, one.scale, one.format) == (
        "input",
        recipe,
        None,
        "E4M3" if name == "MXFP8" else "E2M1",
    )
    if name == "MXFP8":
        codes, scales = twin.cast_mxfp8(x, E4M3, False)
        wide = formats.decode(codes).double().view(21, 2, 32) * block_formats.decode_e8m0(scales).double()[..., None]
    else:
        codes, scales, amax = twin.cast_nvfp4(x, False, None)
        wide = block_formats.decode_e2m1(codes).double().view(21, 3, 16) * formats.decode(scales).double()[..., None]
        wide = wide * (amax.double() / 2688)
    found = wide.flatten(1)[:, :48]
    assert one.signal == pytest.approx(float(x.double().square().sum()), rel=1e-12)  # another order of additions
    assert one.noise == pytest.approx(float((x.double() - found).square().sum()), rel=1e-12)
    assert one.underflowed == int(((found == 0) & (x != 0)).sum())
    assert one.saturated == one.nan == one.inf == 0
    assert weight.sqnr is not None
    assert weight.sqnr > (30 if name == "MXFP8" else 17)


def test_measuring_beside_draws_nothing() -> None:
    """Gradients that are rounded by chance draw seeds; those of a recipe that did not run come back."""
    torch.manual_seed(0)
    layer = te.TransformerLayer(48, 96, 3, hidden_dropout=0.1, params_dtype=BF16)
    plain = step(layer, RECIPES["MXFP8"])
    with te.collect_stats(layer, every=1, recipes=[NVFP4BlockScaling()]) as stats:
        measured = step(layer, RECIPES["MXFP8"])
    for a, b in zip(plain, measured, strict=True):
        assert_same_bits(a, b)
    assert "(NVFP4BlockScaling)" in stats.table()
    plan = te.auto_precision(layer, lambda: [step(layer, RECIPES["NVFP4"])], recipes=[MXFP8BlockScaling()], first=0)
    assert {type(one.recipe) for one in plan.layers.values()} == {MXFP8BlockScaling}, str(plan)


# --- what the parts of NVFP4 are for (docs/four_bits.md) ---------------------------------------------------


def stands_for(codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    wide = (
        block_formats.decode_e2m1(codes).double().view(*scales.shape, 16) * formats.decode(scales).double()[..., None]
    )
    return wide.flatten(1) * (amax.double() / 2688)


def test_the_transform_keeps_an_outliers_neighbours() -> None:
    x = numbers(1, 64, 256).float()
    x[:, 3::16] *= 30
    zeros = [
        float((stands_for(*twin.cast_nvfp4(one, False, None)) == 0).double().mean()) for one in (x, twin.hadamard(x))
    ]
    assert zeros[0] > 4 * zeros[1]


def test_rounding_by_chance_is_right_on_average() -> None:
    """A mean of sixteen steps' dx is nearer to that of 16 bits than sixteen equal ones, rounded to nearest."""
    layer = te.Linear(64, 64, bias=False)
    x, g = numbers(1, 32, 64).float(), numbers(2, 32, 64).float()

    def dx(recipe: Any) -> torch.Tensor:
        inp = x.clone().requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(inp)
        y.backward(g)
        assert inp.grad is not None
        return inp.grad

    # The same weights on both sides, as 4 bits have them: what is left is the rounding of g.
    state = twin.cast_nvfp4(layer.weight.detach(), True, None)
    exact = g.double() @ stands_for(*state)
    torch.manual_seed(0)
    by_chance = sum(dx(NVFP4BlockScaling()) for _ in range(16)) / 16
    nearest = dx(NVFP4BlockScaling(disable_stochastic_rounding=True))
    assert (by_chance - exact).norm() < 0.6 * (nearest - exact).norm()


def test_squares_are_one_weight_in_both_directions() -> None:
    w = numbers(1, 64, 48).float()
    for square in (True, False):
        forward, backward = (stands_for(*twin.cast_nvfp4(one, square, None)) for one in (w, w.t().contiguous()))
        assert torch.equal(forward, backward.t()) is square
