"""`Float8CurrentScaling`, written out by hand, on both devices; and recipes by layer."""

import copy
import itertools
from typing import Any

import pytest
import torch
from shared.recipe_steps import Recomputed, layer_of, numbers, step

import optimized
import reference as te
from reference.numbers import formats
from reference.ops.activations import activation
from reference.ops.casts.cat_cast_transpose import side_by_side
from reference.recipe import AUTOCAST, DelayedScaling, Float8CurrentScaling, Format, MMParams, QParams, by_layer
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import Accumulation, Quantized, dgrad
from reference.recipes.quantizer import ActivationPlan

CURRENT = Float8CurrentScaling()
PLAIN, POWERS, LEAST = QParams(), QParams(power_2_scale=True), QParams(amax_epsilon=5.0)
DELAYED = DelayedScaling(amax_history_len=4)
BF16 = torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
twin = torch.ops.twin


def scaled(
    x: torch.Tensor, fp8: torch.dtype, how: QParams = PLAIN, wide: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes, transposed codes and scale_inv, by the formula; the amax is that of `wide` if given."""
    amax = (x if wide is None else wide).float().abs().nan_to_num(0.0, float("inf")).max().clamp(min=how.amax_epsilon)
    largest = torch.tensor(448.0 if fp8 == E4M3 else 57344.0)
    scale = largest / amax if 0 < amax < float("inf") else torch.tensor(1.0)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)[None]
    if how.power_2_scale:
        scale = scale.log2().floor().exp2()
    q, q_t, scale_inv = twin.cast_transpose(x, scale, None, 0, fp8)
    assert scale_inv == 1 / scale
    return q, q_t, scale_inv


@pytest.mark.parametrize(
    ("recipe", "of_x", "of_w", "of_g"),
    [
        (Float8CurrentScaling(), PLAIN, PLAIN, PLAIN),
        (Float8CurrentScaling(fp8_format=Format.E4M3), PLAIN, PLAIN, PLAIN),
        (Float8CurrentScaling(use_power_2_scales=True), POWERS, POWERS, POWERS),
        (Float8CurrentScaling(fp8_quant_fwd_inp=LEAST), LEAST, PLAIN, PLAIN),
        (Float8CurrentScaling(fp8_quant_fwd_weight=QParams(True, 5.0)), PLAIN, QParams(True, 5.0), PLAIN),
        (Float8CurrentScaling(fp8_quant_bwd_grad=POWERS), PLAIN, PLAIN, POWERS),
    ],
)
def test_linear_is_what_the_formulas_say(
    recipe: Float8CurrentScaling, of_x: QParams, of_w: QParams, of_g: QParams, same_bits
) -> None:
    layer = te.Linear(32, 48, params_dtype=BF16)
    x, g = numbers(1, 21, 32).requires_grad_(), numbers(2, 21, 48) * 1e-3
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    (qx, qx_t, sx), (qw, qw_t, sw) = scaled(x.detach(), E4M3, of_x), scaled(layer.weight.detach(), E4M3, of_w)
    qg, qg_t, sg = scaled(g, E5M2 if recipe.fp8_format is Format.HYBRID else E4M3, of_g)
    same_bits(y, twin.gemm_fp8(qx, qw, sx, sw, layer.bias.detach(), BF16, "fast"))
    same_bits(x.grad, twin.gemm_fp8(qg, qw_t, sg, sw, None, BF16, "split"))
    same_bits(layer.weight.grad, twin.gemm_fp8(qg_t, qx_t, sg, sx, None, BF16, "split"))
    same_bits(layer.bias.grad, twin.dbias(g))
    assert "scaling_fwd" not in layer.fp8_meta, "there is no state between steps"


@pytest.mark.parametrize(
    "values", [[0.0, 0.0], [1.0, float("inf")], [float("nan"), 3.0], [1e-44, 0.0], [1e-40, 1e-42], [6e4, -6.4e4]]
)
def test_the_scale_of_special_tensors(values: list[float], same_bits) -> None:
    """Of zeros and of infinities it is 1, NaN is passed over, a tiny amax does not make it infinite."""
    x = torch.tensor(values * 8)[None].expand(16, -1).contiguous()
    layer = te.Linear(16, 16, bias=False, params_dtype=torch.float32)
    with te.autocast(recipe=CURRENT), torch.no_grad():
        y = layer(x)
    (q, _, s), (qw, _, sw) = scaled(x, E4M3), scaled(layer.weight.detach(), E4M3)
    same_bits(y, twin.gemm_fp8(q, qw, s, sw, None, torch.float32, "fast"))


def test_a_norm_passes_through_the_activation_dtype(same_bits) -> None:
    """Unlike delayed scaling, which casts from fp32: the scale needs the whole tensor first."""
    fused = te.LayerNormLinear(32, 48, params_dtype=BF16)
    norm, linear = te.LayerNorm(32, params_dtype=BF16), te.Linear(32, 48, params_dtype=BF16)
    with torch.no_grad():
        linear.weight.copy_(fused.weight)
    x = numbers(1, 21, 32)
    with te.autocast(recipe=CURRENT):
        same_bits(fused(x), linear(norm(x)))


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("override", [None, "high_precision"])
def test_an_activations_amax_is_taken_before_it_is_rounded(kind: str, override: str | None, same_bits) -> None:
    """And its rounded numbers are cast with that scale; the gradient of its input has the amax of rounded numbers."""
    layer = te.LayerNormMLP(32, 48, activation=kind, params_dtype=BF16)
    x, dy = numbers(1, 21, 32).requires_grad_(), numbers(2, 21, 32) * 1e-3
    recipe = Float8CurrentScaling(backward_override=override)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    with torch.no_grad():
        (qx, qx_t, sx), (q1, _, s1), (q2, q2_t, s2) = (
            scaled(one, E4M3)
            for one in (
                twin.norm(x, layer.layer_norm_weight, layer.layer_norm_bias, 1e-5, False, "layernorm", BF16)[0],
                layer.fc1_weight,
                layer.fc2_weight,
            )
        )
        h = twin.gemm_fp8(qx, q1, sx, s1, layer.fc1_bias, BF16, "fast")
        act, half = activation.FUNCTIONS[kind][0], activation.width(kind, h.shape[1])
        wide = act(h[:, :half].contiguous()) * (h[:, half:].float() if kind == "swiglu" else 1.0)
        a = wide.to(BF16)
        qa, qa_t, sa = scaled(a, E4M3, wide=wide)
        assert sa != scaled(a, E4M3)[2], "so the test can fail"
        same_bits(y, twin.gemm_fp8(qa, q2, sa, s2, layer.fc2_bias, BF16, "fast"))
        if override is None:
            qg, qg_t, sg = scaled(dy, E5M2)
            same_bits(layer.fc2_weight.grad, twin.gemm_fp8(qg_t, qa_t, sg, sa, None, BF16, "split"))
            dh = twin.activation_backward(twin.gemm_fp8(qg, q2_t, sg, s2, None, BF16, "split"), h, kind)
            _, qh_t, sh = scaled(dh, E5M2)
            same_bits(layer.fc1_weight.grad, twin.gemm_fp8(qh_t, qx_t, sh, sx, None, BF16, "split"))
            same_bits(layer.fc1_bias.grad, twin.dbias(dh))
        else:
            same_bits(layer.fc2_weight.grad, twin.gemm(dy.t(), a.t(), None, BF16))


def awkward(rows: int, cols: int, seed: int, special: float | None) -> torch.Tensor:
    """bf16 numbers, one of them `special` where that is given."""
    x = numbers(seed, rows, cols)
    if special is not None and x.numel():
        x[-1, -1] = special
    return x


def same_quantized(found: Quantized, expected: Quantized, same_bits) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            same_bits(one.codes, other.codes)
            same_bits(one.scales, other.scales)


SPECIAL = (None, 0.0, float("inf"), float("nan"), 1e-39)
QUANTIZERS = (Current(E4M3, False, 0.0), Current(E5M2, True, 5.0))


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize(("rows", "groups", "widths"), [(21, 1, (16, 8, 8)), (1, 3, (32, 16)), (0, 2, (8, 8))])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_parts_of_a_gradient_are_cast_as_the_matrix_they_make(
    quantizer: Current, rows: int, groups: int, widths: tuple[int, ...], special: float | None, same_bits
) -> None:
    parts = [awkward(rows, groups * width, width + i, special) for i, width in enumerate(widths)]
    whole = side_by_side(parts, groups)
    for transpose, dbias in itertools.product((False, True), repeat=2):
        found, db = quantizer.joined_grad(parts, groups, transpose, dbias)
        expected, its_db = quantizer.grad(whole, transpose or dbias, dbias)
        same_quantized(found, expected if transpose else expected._replace(column=None), same_bits)
        assert (db is None) == (its_db is None)
        if db is not None:
            same_bits(db, its_db)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_weights_together_are_each_as_alone(quantizer: Current, special: float | None, same_bits) -> None:
    xs = [awkward(rows, 32, rows, special if rows == 7 else None) for rows in (5, 7, 48)]
    for found, x in zip(quantizer.quantize_together([quantizer] * 2, xs), xs, strict=True):
        same_quantized(found, quantizer.quantize(x, True), same_bits)
    other = Current(E4M3, True, 0.0)
    for found, one, x in zip(quantizer.quantize_together([other], xs[1:]), (quantizer, other), xs[1:], strict=True):
        same_quantized(found, one.quantize(x, True), same_bits)


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_an_activations_gradient_is_cast_as_one_that_was_made_before(
    quantizer: Current, kind: str, special: float | None, same_bits
) -> None:
    g, w = (
        quantizer.quantize(awkward(21, 32, 1, special), True),
        Current(E4M3, False, 0.0).quantize(numbers(2, 32, 48), True),
    )
    h = awkward(21, 96 if kind == "swiglu" else 48, 3, special)
    plan = ActivationPlan(kind, BF16, Accumulation())
    for transpose, dbias in itertools.product((False, True), repeat=2):
        found, db = quantizer.activation_grad(g, w.column, h, plan, transpose, dbias)
        dh = twin.activation_backward(dgrad(g, w.column, BF16, plan.how), h, kind)
        expected, its_db = quantizer.grad(dh, transpose, dbias)
        same_quantized(found, expected, same_bits)
        assert (db is None) == (its_db is None)
        if db is not None:
            same_bits(db, its_db)


def test_a_checkpoint_of_a_layer_that_ran_in_it_loads() -> None:
    layer = layer_of()
    step(layer, CURRENT)
    other = layer_of()
    other.load_state_dict(layer.state_dict())
    assert "scaling_fwd" not in copy.deepcopy(layer.layernorm_mlp).fp8_meta


def test_recomputation_has_the_bits(same_bits) -> None:
    for a, b in zip(step(layer_of(), CURRENT), step(Recomputed(), CURRENT), strict=True):
        same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [{}, {"activation": "swiglu", "normalization": "RMSNorm", "bias": False}])
def test_training_has_the_bits_of_the_cpu(arguments: dict[str, Any], same_bits) -> None:
    pair = layer_of(**arguments), layer_of(optimized, **arguments).to("cuda")
    for layer in pair:
        by_layer(layer, {"*proj": DELAYED})
    for _ in range(3):
        for a, b in zip(step(pair[0], CURRENT), step(pair[1], CURRENT, "cuda"), strict=True):
            same_bits(a, b.cpu())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_bits(same_bits) -> None:
    layer, x = te.Linear(32, 48, params_dtype=BF16), numbers(1, 21, 32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with te.autocast(recipe=CURRENT):
        same_bits(compiled(x), layer(x))


@pytest.mark.parametrize(
    ("arguments", "error", "sentence"),
    [
        ({"use_power_2_scales": 1}, TypeError, "use_power_2_scales=1; True and False are accepted"),
        ({"fp8_gemm_fprop": MMParams()}, ValueError, r"fp8_gemm_fprop=.*; MMParams\(use_split_accumulator=False\) is"),
        (
            {"fp8_gemm_wgrad": MMParams(False)},
            ValueError,
            r"fp8_gemm_wgrad=.*; MMParams\(use_split_accumulator=True\) is",
        ),
        (
            {"fp8_quant_fwd_inp": QParams(1)},
            ValueError,
            r"fp8_quant_fwd_inp=.*; QParams\(power_2_scale, amax_epsilon\)",
        ),
        ({"fp8_quant_bwd_grad": QParams(stochastic_rounding=True)}, ValueError, "fp8_quant_bwd_grad=.*; QParams"),
        ({"fp8_quant_fwd_weight": None}, ValueError, "fp8_quant_fwd_weight=None; QParams"),
        ({"fp8_quant_fwd_inp": QParams(False, -1.0)}, ValueError, r"fp8_quant_fwd_inp: amax_epsilon=-1\.0; a finite"),
        ({"fp8_quant_fwd_inp": QParams(False, 1e39)}, ValueError, r"amax_epsilon=1e\+39; a finite number of fp32"),
        ({"fp8_quant_fwd_inp": QParams(False, "1")}, ValueError, "amax_epsilon='1'; a finite number"),
        ({"fp8_format": Format.E5M2}, ValueError, "Format.HYBRID and Format.E4M3 are accepted"),
        ({"fp8_dpa": True}, NotImplementedError, r"later tokens .*DelayedScaling\(fp8_dpa=True\)"),
        ({"fp8_mha": True}, NotImplementedError, "fp8_mha=True is not offered"),
        (
            {"backward_override": "dequantised"},
            ValueError,
            "backward_override='dequantised'; None, 'high_precision' and",
        ),
    ],
)
def test_what_is_not_offered_says_so(arguments: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^Float8CurrentScaling: .*{sentence}"):
        Float8CurrentScaling(**arguments)
    recipe = Float8CurrentScaling()
    ((name, value),) = arguments.items()
    with pytest.raises(error, match=f"^Float8CurrentScaling: .*{sentence}"):
        setattr(recipe, name, value)


def test_what_is_set_counts_from_the_next_autocast_on(same_bits) -> None:
    """As Transformer Engine's programs set it."""
    layer, x = te.Linear(32, 48, params_dtype=BF16), numbers(1, 21, 32)
    recipe = Float8CurrentScaling()
    with te.autocast(recipe=recipe):
        before = layer(x)
    recipe.fp8_quant_fwd_inp = QParams(power_2_scale=True, amax_epsilon=8.0)
    with te.autocast(recipe=recipe):
        after = layer(x)
    assert not torch.equal(before, after)
    with te.autocast(recipe=Float8CurrentScaling(fp8_quant_fwd_inp=QParams(True, 8.0))):
        same_bits(layer(x), after)


def test_it_answers_as_in_transformer_engine() -> None:
    assert CURRENT.float8_current_scaling()
    assert CURRENT.float8_per_tensor_scaling()
    assert not CURRENT.delayed()
    assert DELAYED.delayed()
    assert not DELAYED.mxfp8()


def test_a_weight_that_another_recipe_has_cast_is_cast_again(same_bits) -> None:
    layer, x = te.Linear(32, 48, params_dtype=BF16), numbers(1, 16, 32)
    with te.autocast(recipe=CURRENT):
        expected = layer(x)
    with te.autocast(recipe=DELAYED):
        first = layer(x, is_first_microbatch=True)
    with te.autocast(recipe=CURRENT):
        same_bits(layer(x, is_first_microbatch=False), expected)
    assert not torch.equal(first, expected)


# --- recipes by layer ------------------------------------------------------------------------------------


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(2)
    return torch.nn.Sequential(*(te.Linear(32, 32, params_dtype=BF16) for _ in range(3)))


def found(model: torch.nn.Module, recipe: Any) -> list[torch.Tensor]:
    model.zero_grad()
    x = numbers(1, 16, 32).requires_grad_()
    with te.autocast(recipe=recipe):
        y = model(x)
    y.backward(numbers(2, *y.shape))
    return [t.detach().clone() for t in (y, x.grad, *(p.grad for p in model.parameters()))]


def test_each_layer_runs_in_the_recipe_it_was_given(same_bits) -> None:
    mixed, model = model_of(), model_of()
    choices = by_layer(mixed, {"*": CURRENT, "1": None, mixed[2]: AUTOCAST})
    assert choices == {"0": CURRENT, "1": None, "2": AUTOCAST}
    for _ in range(3):
        x = numbers(1, 16, 32).requires_grad_()
        model.zero_grad()
        # The same by hand: each layer in an autocast of its own, so delayed scaling updates after the last.
        with te.autocast(recipe=CURRENT):
            y = model[0](x)
        y = model[1](y)
        with te.autocast(recipe=DELAYED):
            y = model[2](y)
        y.backward(numbers(2, *y.shape))
        expected = [y, x.grad, *(p.grad for p in model.parameters())]
        for a, b in zip(found(mixed, DELAYED), expected, strict=True):
            same_bits(a, b)
    for key in ("scaling_fwd", "scaling_bwd"):
        same_bits(
            mixed[2].fp8_meta[key].scale, model[2].fp8_meta[key].scale, "the second is updated, the first has none"
        )
        assert mixed[2].fp8_meta[key].scale[0] != 1


def test_a_transformer_layer_mixes(same_bits) -> None:
    """Its parts in other recipes than its whole: the bits of a layer whose parts are hooked, so run one by one."""
    found = []
    for hooked in (False, True):
        layer = layer_of()
        by_layer(layer, {"layernorm_mlp": CURRENT, "self_attention.proj": None})
        if hooked:
            for part in layer.modules():
                part.register_forward_hook(lambda *_: None)
        found.append([step(layer, DELAYED) for _ in range(2)])
    for one, other in zip(*found, strict=True):
        for a, b in zip(one, other, strict=True):
            same_bits(a, b)


def test_what_runs_in_16_bits_may_have_any_size() -> None:
    """Of a TransformerLayer, too, which looks at the sizes of its parts before the first of them runs."""
    torch.manual_seed(1)
    layer = te.TransformerLayer(64, 120, 4, params_dtype=BF16)
    with pytest.raises(ValueError, match="ffn_hidden_size=120 under FP8 autocast"):
        step(layer, CURRENT)
    by_layer(layer, {"layernorm_mlp": None})
    step(layer, CURRENT)
    assert (layer.layernorm_mlp.fp8, layer.self_attention.proj.fp8) == (False, True)


def test_a_choice_is_copied_and_taken_back(same_bits) -> None:
    model = model_of()
    by_layer(model, {"0": None})
    twin_model = copy.deepcopy(model)
    for a, b in zip(found(model, DELAYED), found(twin_model, DELAYED), strict=True):
        same_bits(a, b)
    assert "scaling_fwd" not in twin_model[0].fp8_meta
    assert by_layer(twin_model, {twin_model: AUTOCAST}) == {str(i): AUTOCAST for i in range(3)}
    found(twin_model, DELAYED)
    assert "scaling_fwd" in twin_model[0].fp8_meta


@pytest.mark.parametrize(
    ("choices", "error", "sentence"),
    [
        ({"4": None}, ValueError, "has '4', which is or holds no layer"),
        ({"0": "fp8"}, TypeError, "choice for '0' is 'fp8'; a recipe, None and"),
        ({7: None}, TypeError, "has the key 7; names, patterns and modules"),
    ],
)
def test_a_broken_choice_changes_nothing(choices: dict[Any, Any], error: type[Exception], sentence: str) -> None:
    model = model_of()
    with pytest.raises(error, match=sentence):
        by_layer(model, {"0": CURRENT} | choices if "0" not in choices else {"1": CURRENT} | choices)
    assert set(by_layer(model, {}).values()) == {AUTOCAST}


def test_the_amax_is_that_of_formats() -> None:
    x = numbers(3, 5, 16)
    history = torch.zeros(1, 1)
    twin.amax(x, history, 0)
    assert history[0, 0] == formats.amax(x)
