"""`backward_override="high_precision"`: fprop in FP8, dgrad and wgrad in 16 bits; `auto_precision` chooses it."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from shared.recorded_steps import BF16

import optimized
import reference as te
from reference.state.scaling import FP8TensorMeta

DELAYED = te.DelayedScaling(amax_history_len=4, backward_override="high_precision")
CURRENT = te.recipe.Float8CurrentScaling(backward_override="high_precision")
RECIPES = {
    "delayed": (DELAYED, te.DelayedScaling(amax_history_len=4)),
    "current": (CURRENT, te.recipe.Float8CurrentScaling()),
}
DEQUANTIZED = {
    "delayed": te.DelayedScaling(amax_history_len=4, backward_override="dequantized"),
    "current": te.recipe.Float8CurrentScaling(backward_override="dequantized"),
    "block": te.recipe.Float8BlockScaling(backward_override="dequantized"),
    "block, fp32": te.recipe.Float8BlockScaling(use_f32_scales=True, backward_override="dequantized"),
    "rowwise": te.recipe.Float8RowwiseScaling(backward_override="dequantized"),
    "mxfp8": te.recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "nvfp4": te.recipe.NVFP4BlockScaling(backward_override="dequantized"),
}
LAYERS: dict[str, Any] = {
    "Linear": lambda **more: te.Linear(32, 48, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(32, 48, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(32, 64, activation="swiglu", **more),
    "TransformerLayer": lambda **more: te.TransformerLayer(
        32, 64, 2, hidden_dropout=0.1, attention_dropout=0.1, fuse_qkv_params=True, **more
    ),
}


def made(name: str, dtype: torch.dtype = BF16) -> torch.nn.Module:
    torch.manual_seed(5)
    return LAYERS[name](params_dtype=dtype)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def step(layer: Any, recipe: Any, device: str = "cpu", **more: Any) -> list[torch.Tensor]:
    """y, dx and the parameters' gradients of one step."""
    x = numbers(1, 16, 2, 32).to(device).requires_grad_()
    torch.manual_seed(6)  # of dropout
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **more)
    y.backward(numbers(2, *y.shape).to(device))
    grads = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    return [y.detach(), x.grad, *grads]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_layer_has_the_forward_of_the_recipe_and_the_backward_of_16_bits(recipe: str, same_bits) -> None:
    half, whole = RECIPES[recipe]
    layers = [made("Linear") for _ in range(3)]
    for _ in range(3):  # delayed scales move in the same way
        mixed, fp8, wide = (step(one, kind) for one, kind in zip(layers, (half, whole, None), strict=True))
        same_bits(mixed[0], fp8[0], "y")
        for one, two in zip(mixed[1:], wide[1:], strict=True):
            same_bits(one, two, "a gradient")
        assert not torch.equal(mixed[0], wide[0])
        assert not torch.equal(mixed[1], fp8[1])
    if recipe == "delayed":
        for key in ("scale", "amax_history"):
            one, two = (getattr(layer.fp8_meta["scaling_fwd"], key) for layer in layers[:2])
            same_bits(one, two, key)
        assert not layers[0].fp8_meta["scaling_bwd"].amax_history.any()


@pytest.mark.parametrize("name", LAYERS)
def test_with_current_scaling_every_layer_has_its_forward(name: str, same_bits) -> None:
    """Delayed scaling's norms cast from fp32 where they are fused, so its words are other ones there."""
    mixed, fp8 = step(made(name), CURRENT), step(made(name), RECIPES["current"][1])
    same_bits(mixed[0], fp8[0])
    assert not torch.equal(mixed[1], fp8[1])
    assert all(x.isfinite().all() for x in mixed)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_transformer_layer_module_by_module_has_the_same_bits(recipe: str, same_bits) -> None:
    fused, apart = made("TransformerLayer"), made("TransformerLayer")
    apart.self_attention.proj.register_forward_hook(lambda *_: None)
    for _ in range(2):
        for one, two in zip(step(fused, RECIPES[recipe][0]), step(apart, RECIPES[recipe][0]), strict=True):
            same_bits(one, two)


@pytest.mark.parametrize("recipe", RECIPES)
def test_microbatches_share_the_cast_and_recipes_do_not(recipe: str, same_bits) -> None:
    half, whole = RECIPES[recipe]
    for first in (half, whole):  # whose copy the second microbatch may use only if it fits
        layer, alone = made("LayerNormMLP"), made("LayerNormMLP")
        step(layer, first, is_first_microbatch=True)
        step(alone, first)
        if recipe == "current":
            for one, two in zip(step(layer, half, is_first_microbatch=False), step(alone, half), strict=True):
                same_bits(one, two)
        else:
            assert all(x.isfinite().all() for x in step(layer, half, is_first_microbatch=False))


def test_parameters_in_fp32_under_autocast_and_gradients_that_are_added(same_bits) -> None:
    layer = made("Linear", torch.float32)
    wide = copy.deepcopy(layer)
    with torch.autocast("cpu", BF16):
        mixed, plain = step(layer, CURRENT), step(wide, None)
    for one, two in zip(mixed[1:], plain[1:], strict=True):
        same_bits(one, two)
    accumulating = [te.Linear(32, 48, params_dtype=BF16, fuse_wgrad_accumulation=True) for _ in range(2)]
    accumulating[1].load_state_dict(accumulating[0].state_dict())
    for one, recipe in zip(accumulating, (CURRENT, None), strict=True):
        one.weight.main_grad = torch.ones(48, 32)
        step(one, recipe)
    same_bits(accumulating[0].weight.main_grad, accumulating[1].weight.main_grad)


@pytest.mark.parametrize("recipe", [DELAYED, DEQUANTIZED["delayed"]], ids=lambda one: one.backward_override)
def test_weights_kept_in_fp8(recipe: Any, same_bits) -> None:
    torch.manual_seed(5)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(32, 48, params_dtype=BF16)
    wide = te.Linear(32, 48, params_dtype=BF16)
    with torch.no_grad():
        wide.weight.copy_(layer.weight.dequantize())
        wide.bias.copy_(layer.bias)
    same_bits(step(layer, recipe)[1], step(wide, None)[1], "dx")


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("half", [*(one for one, _ in RECIPES.values()), DEQUANTIZED["current"]])
def test_recomputed_and_compiled(half: Any, same_bits) -> None:
    layer = made("TransformerLayer")
    expected = step(layer, half)
    again = made("TransformerLayer")
    for one, two in zip(step(Recomputed(again), half), expected, strict=True):
        same_bits(one, two)
    fresh = made("LayerNormMLP")
    compiled = torch.compile(made("LayerNormMLP"), backend="aot_eager", fullgraph=True)
    for one, two in zip(step(compiled, half), step(fresh, half), strict=True):
        same_bits(one, two)


class Recomputed(torch.nn.Module):
    """A layer that is recomputed in backward."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return te.checkpoint(self.layer, x)


@pytest.mark.parametrize("recipe", DEQUANTIZED)
def test_a_dequantized_backward_multiplies_what_the_codes_stand_for(recipe: str, same_bits) -> None:
    """Of layers whose weights and inputs are those numbers, a backward in 16 bits gives the same."""
    kind = DEQUANTIZED[recipe]
    layer, forward, wide = made("Linear"), made("Linear"), made("Linear")
    x, g = numbers(1, 16, 32), numbers(2, 16, 48)
    state = FP8TensorMeta.fresh(3, 4, torch.device("cpu")) if recipe == "delayed" else None  # of a first step
    if state is not None:
        state.scaled_max = kind.scaled_max(True)
    quantizers = kind.quantizers(layer.roles, state, state, BF16)
    with torch.no_grad():
        codes = [quantizers["input"].quantize(x, True), quantizers["weight"].quantize(layer.weight, True)]
        stand_for = [one.column.codes.t().contiguous() for one in codes]
        assert all(one.row.codes.dtype != BF16 for one in codes)
        wide.weight.copy_(stand_for[1])
    here, there = x.clone().requires_grad_(), stand_for[0].clone().requires_grad_()
    with te.autocast(recipe=kind):
        y = layer(here)
    y.backward(g)
    with te.autocast(recipe=dataclasses.replace(kind, backward_override=None)):
        same_bits(y, forward(x), "y")
    wide(there).backward(g)
    same_bits(here.grad, there.grad, "dx")
    same_bits(layer.weight.grad, wide.weight.grad, "dw")
    same_bits(layer.bias.grad, wide.bias.grad, "db")
    assert not torch.equal(stand_for[0], x)
    assert float((stand_for[0] - x).float().norm() / x.float().norm()) < (0.15 if recipe == "nvfp4" else 0.05)


@pytest.mark.parametrize("recipe", DEQUANTIZED)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_has_a_dequantized_backward(name: str, recipe: str, same_bits) -> None:
    kind = DEQUANTIZED[recipe]
    layers = [made(name) for _ in range(2)]
    found = [step(layer, kind) for layer in layers]
    for one, two in zip(*found, strict=True):
        same_bits(one, two)
        assert one.isfinite().all()
    half = step(made(name), dataclasses.replace(kind, backward_override="high_precision"))
    same_bits(found[0][0], half[0], "the forward is that of high_precision")
    assert not torch.equal(found[0][1], half[1])


@pytest.mark.parametrize("recipe", ["current", "block"])
def test_microbatches_and_recomputation_of_a_dequantized_backward(recipe: str, same_bits) -> None:
    kind, layer = DEQUANTIZED[recipe], made("LayerNormMLP")
    expected = step(made("LayerNormMLP"), kind)
    for more in ({"is_first_microbatch": True}, {"is_first_microbatch": False}):
        for one, two in zip(step(layer, kind, **more), expected, strict=True):
            same_bits(one, two)
    whole = step(made("TransformerLayer"), kind)
    for one, two in zip(step(Recomputed(made("TransformerLayer")), kind), whole, strict=True):
        same_bits(one, two)


ON_BOTH = [one for one, _ in RECIPES.values()] + [DEQUANTIZED[name] for name in ("delayed", "current", "block")]


@pytest.mark.sample(2)
@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("recipe", ON_BOTH, ids=lambda one: f"{type(one).__name__}, {one.backward_override}")
@pytest.mark.parametrize("name", LAYERS)
def test_a_gpu_has_the_same_bits(name: str, recipe: Any, same_bits) -> None:
    assert optimized.TransformerLayer
    here = made(name)
    there = copy.deepcopy(here).cuda()
    for _ in range(3):  # the third step plays its launches
        for one, two in zip(step(here, recipe), step(there, recipe, "cuda"), strict=True):
            same_bits(one, two.cpu())


def test_what_it_does_not_go_with() -> None:
    with pytest.raises(NotImplementedError, match="backward_override='high_precision' with fp8_dpa=True is not"):
        te.DelayedScaling(fp8_dpa=True, backward_override="high_precision")


# --- statistics and choice ---------------------------------------------------------------------------------


class Model(torch.nn.Module):
    """Two layers; the loss gives the second one's output a gradient that no scale serves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = (te.Linear(32, 32, params_dtype=BF16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.first(x)
        return y, self.second(y.detach())


def train(model: Model, recipe: Any) -> None:
    weights = torch.ones(24, 32)
    weights[0, 0] = 2.0**40
    for seed in range(3):
        with te.autocast(recipe=recipe):
            y, z = model(numbers(seed, 24, 32))
        (y.float().sum() + (z.float() * weights).sum()).backward()


def test_a_layer_whose_gradients_do_not_fit_runs_in_fp8_forward_alone(tmp_path: Path) -> None:
    whole = te.DelayedScaling(amax_history_len=4)
    model = Model()
    plan = te.auto_precision(model, lambda: train(model, whole))
    assert plan.layers["first"].recipe == te.recipe.AUTOCAST
    assert plan.layers["second"].recipe == DELAYED
    why = plan.layers["second"].why
    assert "its grad_output, read by dgrad and wgrad: " in why
    assert why.endswith("Input and weight are within the limits, so fprop is in FP8, and dgrad and wgrad in 16 bits.")
    assert "DelayedScaling in forward alone" in str(plan)
    plan.save(tmp_path / "plan.json")
    plan = te.PrecisionPlan.load(tmp_path / "plan.json")
    assert plan.layers["second"].recipe == DELAYED
    plan.apply(model)
    with te.collect_stats(model, every=1, recipes=[CURRENT]) as stats:
        train(model, whole)
    found = {(one.layer, one.role): one.recipe for one in stats.summary(first=1) if one.ran}
    assert found["second", "input"] == found["second", "weight"] == DELAYED
    assert found["second", "grad_output"] is None  # 16 bits
    assert found["first", "grad_output"] == whole
    beside = {(one.layer, one.role) for one in stats.summary() if not one.ran}
    assert beside == {(layer, role) for layer in ("first", "second") for role in ("input", "weight")}
    again = te.auto_precision(model, stats)
    assert again.layers["second"].recipe == DELAYED


def test_input_or_weight_that_does_not_fit_means_16_bits() -> None:
    model = Model()
    with torch.no_grad():
        model.second.weight[0, 0] = 2.0**30
    plan = te.auto_precision(model, lambda: train(model, te.DelayedScaling(amax_history_len=4)))
    assert plan.layers["second"].recipe is None


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_later_microbatch_reads_the_weight_itself(recipe: str, dtype: torch.dtype, same_bits) -> None:
    """Its forward has the first one's cast, its backward the weight of now: in a copy of the layer, too."""
    half = RECIPES[recipe][0]
    layer = made("Linear", dtype)
    step(layer, half)  # its scales stay, because its input does
    y = step(layer, half, is_first_microbatch=True)[0]
    other = copy.deepcopy(layer)
    for one in (layer, other):
        one.weight.data.mul_(2)
        later, dx, *_ = step(one, half, is_first_microbatch=False)
        same_bits(later, y, "the cast weight")
        same_bits(dx, step(copy.deepcopy(one), None)[1], "dx")
    copy.deepcopy(layer)


def test_a_recomputed_microbatch_saves_what_its_first_run_did(same_bits) -> None:
    """Of a weight kept in FP8, where no gradient of the input is wanted."""
    with te.quantized_model_init(recipe=DELAYED):
        layer = made("Linear")
    other, x = copy.deepcopy(layer), numbers(1, 16, 32)
    for run in (te.checkpoint, lambda module, x, **more: module(x, **more)):
        with te.autocast(recipe=DELAYED):
            y = run(layer, x, is_first_microbatch=False)
        y.sum().backward()
        layer, other = other, layer
    same_bits(layer.bias.grad, other.bias.grad)
    same_bits(layer.weight.grad, other.weight.grad)
