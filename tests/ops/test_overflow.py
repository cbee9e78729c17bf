"""An infinity or a NaN that enters a backward reaches a gradient that a scaler, a clip or a check looks at.

The casts to FP8 saturate what is finite. Were infinities among it, a step that overflowed in fp16 would be taken with
ordinary wrong gradients, and `torch.amp.GradScaler` would never lower its scale.
"""

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from reference.ops.activations.activation import KINDS

BF16, FP16 = torch.bfloat16, torch.float16
HYBRID, E4M3 = te.recipe.Format.HYBRID, te.recipe.Format.E4M3
DELAYED: dict[str, Any] = {"amax_history_len": 4}
RECIPES = {
    "hybrid": te.DelayedScaling(**DELAYED),
    "e4m3": te.DelayedScaling(fp8_format=E4M3, **DELAYED),
    "most_recent": te.DelayedScaling(amax_compute_algo="most_recent", **DELAYED),
    "fp8_dpa": te.DelayedScaling(fp8_dpa=True, **DELAYED),
    "current": te.recipe.Float8CurrentScaling(),
    "current, e4m3": te.recipe.Float8CurrentScaling(fp8_format=E4M3),
    "forward alone": te.DelayedScaling(backward_override="high_precision", **DELAYED),
    "current, forward alone": te.recipe.Float8CurrentScaling(backward_override="high_precision"),
    "rowwise": te.recipe.Float8RowwiseScaling(),
    "rowwise, wide gradient": te.recipe.Float8RowwiseScaling(weight_gradient="high_precision"),
    "current, dequantized": te.recipe.Float8CurrentScaling(backward_override="dequantized"),
}
BAD = (math.inf, -math.inf, math.nan)
ops = te.ops
PLAIN = {"hidden_dropout": 0, "attention_dropout": 0, "fuse_qkv_params": True}

# Without biases, whose gradients are sums in 16 bits.
LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(32, 48, bias=False, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, bias=False, normalization="RMSNorm", **kw),
    **{
        f"LayerNormMLP, {kind}": lambda kind=kind, **kw: te.LayerNormMLP(32, 64, bias=False, activation=kind, **kw)
        for kind in KINDS
    },
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(
        32, 2, bias=False, attention_dropout=0.1, fuse_qkv_params=True, **kw
    ),
    "TransformerLayer": lambda **kw: te.TransformerLayer(32, 64, 2, bias=False, **PLAIN, **kw),
    "TransformerLayer, dropout": lambda **kw: te.TransformerLayer(32, 64, 2, bias=False, fuse_qkv_params=True, **kw),
    "TransformerLayer, drop_path": lambda **kw: te.TransformerLayer(
        32, 64, 2, bias=False, drop_path_rate=0.5, **PLAIN, **kw
    ),
    "te.ops": lambda **kw: ops.Sequential(
        ops.RMSNorm(32, dtype=kw["params_dtype"]),
        ops.Linear(32, 64, bias=False, dtype=kw["params_dtype"]),
        ops.Quantize(backward=True),
        ops.SwiGLU(),
        ops.Dropout(0.1),
        ops.Linear(32, 32, bias=False, dtype=kw["params_dtype"]),
        ops.ReLU(),
    ),
}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
FEW = ("Linear", "LayerNormMLP, swiglu", "TransformerLayer, dropout")


def made(name: str, dtype: torch.dtype = FP16, **more: Any) -> Any:
    torch.manual_seed(0)
    return LAYERS[name](params_dtype=dtype, **more)


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradients(layer: Any, recipe: Any, bad: float | None, place: int = 0) -> list[torch.Tensor]:
    """The parameters' gradients of a step with `bad` at one place of dL/dy; all 0 before it."""
    layer.zero_grad()
    first = next(layer.parameters())
    dtype, device = first.dtype, first.device
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(numbers(1, 16, 2, 32).to(device, dtype))
    g = numbers(2, *y.shape).to(device, dtype) / 16
    if bad is not None:
        g.view(-1)[place % g.numel()] = bad
    y.backward(g)
    if getattr(layer, "need_backward_dw", bool)():
        layer.backward_dw()
    found = [p.main_grad if hasattr(p, "main_grad") else p.grad for p in layer.parameters()]
    return [x.clone() for x in found if x is not None]


def finite(tensors: list[torch.Tensor]) -> bool:
    return all(bool(x.isfinite().all()) for x in tensors)


def check(layer: Any, recipe: Any, places: tuple[int, ...] = (457,)) -> None:
    assert finite(gradients(layer, recipe, None))
    for bad, place in itertools.product(BAD, places):
        assert not finite(gradients(layer, recipe, bad, place)), f"{bad} at {place}"
    assert finite(gradients(layer, recipe, None)), "the next step is an ordinary one"


@pytest.mark.sample(24)
@DEVICES
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", FEW)
def test_every_recipe(name: str, recipe: str, device: str) -> None:
    check(made(name).to(device), RECIPES[recipe], (0, 1023))
    if name == "Linear":
        check(made(name, BF16).to(device), RECIPES[recipe], (0, 700, 1535))


@pytest.mark.sample(36)
@DEVICES
@pytest.mark.parametrize("recipe", ["hybrid", "current, e4m3"])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in FEW])
def test_every_layer(name: str, recipe: str, device: str) -> None:
    check(made(name).to(device), RECIPES[recipe])


@pytest.mark.parametrize("name", FEW)
def test_weights_in_fp8_gradients_added_to_main_grad_and_wgrad_apart(name: str) -> None:
    with te.quantized_model_init():
        check(made(name, BF16), RECIPES["hybrid"])
    layer = made(name, BF16, fuse_wgrad_accumulation=True)
    for bad in BAD:
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape)
        assert finite(gradients(layer, RECIPES["hybrid"], None))
        assert not finite(gradients(layer, RECIPES["hybrid"], bad, 99))
    if name != "TransformerLayer, dropout":
        check(made(name, delay_wgrad_compute=True), RECIPES["hybrid"])
    chosen = made(name)
    te.recipe.by_layer(chosen, {chosen: te.recipe.Float8CurrentScaling(fp8_format=E4M3)})
    check(chosen, RECIPES["hybrid"])


@pytest.mark.parametrize("recipe", ["hybrid", "e4m3", "current"])
def test_an_infinity_in_the_forward_is_no_ordinary_number_either(recipe: str) -> None:
    for place in ("x", "w"):
        layer, x = made("Linear"), numbers(1, 16, 32).half()
        with torch.no_grad():
            (x if place == "x" else layer.weight).view(-1)[37] = math.inf
        with te.autocast(recipe=RECIPES[recipe]):
            y = layer(x)
        assert not y[1 if place == "x" else slice(None)].isfinite().all(), place


@pytest.mark.parametrize("length", [1, 4, 1024])
@pytest.mark.parametrize("format", [HYBRID, E4M3])
def test_a_run_that_overflows_at_first_recovers_at_once(format: Any, length: int) -> None:
    """Gradients are right two steps later: their scale does not wait until the history has forgotten the infinity."""
    recipe, layer = te.DelayedScaling(amax_history_len=length, fp8_format=format), made("Linear", BF16)
    x = numbers(1, 32, 32).bfloat16()
    for step in range(4):
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            y = layer(x)
        g = 5000 * numbers(step, *y.shape).bfloat16()
        if step == 0:
            g[0, 0] = math.inf
        y.backward(g)
    exact = g.double().t() @ x.double()
    assert (layer.weight.grad - exact).norm() < 0.1 * exact.norm()


def scaled_step(scaler: Any, optimizer: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
        scaler.step(optimizer)


@pytest.mark.parametrize("parameters", [FP16, torch.float32])
@pytest.mark.parametrize(
    ("name", "recipe"),
    [("Linear", "hybrid"), ("Linear", "e4m3"), ("Linear", "current"), ("TransformerLayer, dropout", "fp8_dpa")],
)
def test_a_scaler_lowers_its_scale_until_a_step_is_finite(name: str, parameters: torch.dtype, recipe: str) -> None:
    """No biases: every gradient that the scaler looks at comes out of a product of codes, or of a norm.

    With parameters in fp16 the scaler refuses to unscale; FusedAdam(capturable=True) does, and clipping takes the
    scaled gradients.
    """
    layer = made(name, parameters)
    optimizer = te.optimizers.FusedAdam(layer.parameters(), 0.01, capturable=True, master_weights=parameters == FP16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)  # beyond fp16: dL/dy is infinite
    taken = []
    for step in range(12):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in layer.parameters()]
        with torch.autocast("cpu", FP16), te.autocast(recipe=RECIPES[recipe]):
            y = layer(numbers(step, 16, 2, 32))
        scaler.scale((y.float() * numbers(50 + step, *y.shape)).sum()).backward()
        was = scaler.get_scale()
        if parameters == torch.float32:
            scaler.unscale_(optimizer)
        te.optimizers.clip_grad_norm_(layer.parameters(), was if parameters == FP16 else 1.0)
        scaled_step(scaler, optimizer)
        scaler.update()
        if parameters == FP16 and scaler.get_scale() == was:  # the step has unscaled what was clipped
            assert te.optimizers.get_total_norm([p.grad for p in layer.parameters()]) < 1.01
        moved = any(not torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True))
        assert moved == (scaler.get_scale() == was)
        assert finite(list(layer.parameters()))
        taken.append(moved)
    assert not any(taken[:2])
    assert all(taken[-2:])


def test_a_clip_an_anomaly_check_and_a_loss_see_it() -> None:
    layer = made("Linear")
    gradients(layer, RECIPES["hybrid"], math.inf)
    assert not te.optimizers.get_total_norm([p.grad for p in layer.parameters()]).isfinite()
    with pytest.raises(FloatingPointError, match="twin::cast"), te.detect_anomaly(layer):
        gradients(layer, RECIPES["hybrid"], math.inf)
    logits = numbers(3, 8, 64).half().requires_grad_()
    loss = te.parallel_cross_entropy(logits.view(8, 1, 64), torch.zeros(8, 1, dtype=torch.long))
    loss.backward(torch.full_like(loss, math.inf))
    assert not logits.grad.isfinite().any()
