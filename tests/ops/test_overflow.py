"""An infinity or a NaN that enters a backward reaches a gradient that a scaler, a clip or a check looks at.

The casts to FP8 saturate what is finite. Were infinities among it, a step that overflowed in fp16 would be taken with
ordinary wrong gradients, and `torch.amp.GradScaler` would never lower its scale.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

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
    "block": te.recipe.Float8BlockScaling(),
    "block, hybrid, fp32": te.recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=HYBRID),
    "block, square gradient": te.recipe.Float8BlockScaling(w_block_scaling_dim=1, grad_block_scaling_dim=2),
    "block, forward alone": te.recipe.Float8BlockScaling(backward_override="high_precision"),
    "mxfp8": te.recipe.MXFP8BlockScaling(),
    "mxfp8, square": te.recipe.MXFP8BlockScaling(fp8_format=HYBRID, enable_2d_quantization=True),
    "nvfp4": te.recipe.NVFP4BlockScaling(),
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
    "te.ops": lambda quantize=True, **kw: ops.Sequential(
        ops.RMSNorm(32, dtype=kw["params_dtype"]),
        ops.Linear(32, 64, bias=False, dtype=kw["params_dtype"]),
        *([ops.Quantize(backward=True)] if quantize else []),
        ops.SwiGLU(),
        ops.Dropout(0.1),
        ops.Linear(32, 32, bias=False, dtype=kw["params_dtype"]),
        ops.ReLU(),
    ),
    "te.ops, no Quantize": lambda **kw: LAYERS["te.ops"](quantize=False, **kw),
}
FEW = ("Linear", "LayerNormMLP, swiglu", "TransformerLayer, dropout")
SLOW = pytest.mark.slow


def on_devices(recipes: Iterable[str], fast: Collection[str] = tuple(RECIPES)) -> list[Any]:
    """Each recipe on a CPU, slow unless it is one of `fast`, and on a GPU if GPUs have it."""
    cases = [pytest.param(one, "cpu", marks=[] if one in fast else SLOW) for one in recipes]
    there = (one for one in recipes if not one.startswith(("mxfp8", "nvfp4")))
    return cases + [pytest.param(one, "cuda", marks=pytest.mark.gpu) for one in there]


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


@pytest.mark.sample(26)
@pytest.mark.parametrize(("recipe", "device"), on_devices(RECIPES))
@pytest.mark.parametrize("name", FEW)
def test_every_recipe(name: str, recipe: str, device: str) -> None:
    check(made(name).to(device), RECIPES[recipe], (0, 1023))
    if name == "Linear":
        check(made(name, BF16).to(device), RECIPES[recipe], (0, 700, 1535))


@pytest.mark.sample(36)
@pytest.mark.parametrize(("recipe", "device"), on_devices(("hybrid", "current, e4m3")))
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in FEW])
def test_every_layer(name: str, recipe: str, device: str) -> None:
    check(made(name).to(device), RECIPES[recipe])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("recipe", "device"), on_devices(("block", "rowwise", "mxfp8", "nvfp4")))
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in (*FEW, "te.ops")])  # Quantize has one scale
def test_every_layer_with_scales_of_parts(name: str, recipe: str, device: str) -> None:
    check(made(name).to(device), RECIPES[recipe])


@pytest.mark.parametrize("recipe", ["hybrid", pytest.param("block", marks=SLOW)])
@pytest.mark.parametrize("name", FEW)
def test_weights_in_fp8_gradients_added_to_main_grad_and_wgrad_apart(name: str, recipe: str) -> None:
    with te.quantized_model_init(recipe=RECIPES[recipe]):
        check(made(name, BF16), RECIPES[recipe])
    layer = made(name, BF16, fuse_wgrad_accumulation=True)
    for bad in BAD:
        for p in layer.parameters():
            p.main_grad = torch.zeros(p.shape)
        assert finite(gradients(layer, RECIPES[recipe], None))
        assert not finite(gradients(layer, RECIPES[recipe], bad, 99))
    if name != "TransformerLayer, dropout":
        check(made(name, delay_wgrad_compute=True), RECIPES[recipe])
    chosen = made(name)
    te.recipe.by_layer(chosen, {chosen: te.recipe.Float8CurrentScaling(fp8_format=E4M3)})
    check(chosen, RECIPES[recipe])


def linear_step(recipe: Any, device: str, bad: float | None = None, where: str = "") -> dict[str, torch.Tensor]:
    """y, dx and dw of a step of a fresh layer with `bad` in one place: token 5, input 9, output 7."""
    layer = made("Linear").to(device)
    x, g = numbers(1, 32, 32).to(device, FP16), numbers(2, 32, 48).to(device, FP16) / 16
    if bad is not None:
        with torch.no_grad():
            {"x": x[5, 9:], "w": layer.weight[7, 9:], "g": g[5, 7:]}[where][0] = bad
    x.requires_grad_()
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(g)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}


@pytest.mark.parametrize(("recipe", "device"), on_devices(RECIPES, ("hybrid", "e4m3", "current", "block", "nvfp4")))
def test_all_that_depends_on_it_is_no_ordinary_number(recipe: str, device: str) -> None:
    """And where a token's scales are its own, all else of y and dx keeps its bits."""
    depends: dict[str, dict[str, Any]] = {
        "x": {"y": (5,), "dw": (slice(None), 9)},
        "w": {"y": (slice(None), 7), "dx": (slice(None), 9)},
        "g": {"dx": (5,), "dw": (7,)},
    }
    one = RECIPES[recipe]
    clean = linear_step(one, device)
    assert finite(list(clean.values()))
    own = not one.sees_other_tokens and getattr(one, "grad_block_scaling_dim", 1) == 1
    for bad, (where, places) in itertools.product(BAD, depends.items()):
        found = linear_step(one, device, bad, where)
        for name, place in places.items():
            assert not found[name][place].isfinite().any(), f"{bad} in {where}: {name}"
            if own and place == (5,):
                for tensors in (found, clean):
                    tensors[name][place] = 0
                assert_same_bits(found[name], clean[name], f"{bad} in {where}: {name} of the other tokens")


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
    [
        *(("Linear", "hybrid"), ("Linear", "e4m3"), ("Linear", "current"), ("TransformerLayer, dropout", "fp8_dpa")),
        *(pytest.param("Linear", one, marks=SLOW) for one in ("block", "rowwise", "mxfp8", "nvfp4")),
        pytest.param("TransformerLayer, dropout", "block", marks=SLOW),
    ],
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
