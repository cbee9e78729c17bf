"""Weights that `quantized_model_init` keeps in FP8 under every recipe: bits, checkpoints, names, and what is refused.

A layer that keeps its weights trains with the bits of one that casts them in each forward, from fp32 weights which are
the first one's masters. (tests/float8/test_quantized_model_init.py has delayed scaling's own rules.)
"""

import copy
import dataclasses
import io
import logging
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits
from shared.dry_gpu import DryGpu
from simulator import Simulator

import optimized
import reference as te
from optimized.tapes import call_groups
from reference.float8.kept_tensor import KeptTensor
from reference.recipes.current_scaling import Current
from reference.recipes.quantized import (
    DEQUANTIZE,
    KEEPING,
    PER_TENSOR,
    PRODUCTS,
    Operand,
    Products,
    Quantized,
    dequantize,
)
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Role

BF16 = torch.bfloat16
QParams = te.recipe.QParams
RECIPES: dict[str, Any] = {
    "delayed": te.DelayedScaling(amax_history_len=3),
    "current": te.recipe.Float8CurrentScaling(),
    "powers of two, epsilon": te.recipe.Float8CurrentScaling(
        fp8_quant_fwd_weight=QParams(power_2_scale=True, amax_epsilon=0.25), fp8_format=te.Format.E4M3
    ),
    "blocks": te.recipe.Float8BlockScaling(),
    "blocks, fp32 scales": te.recipe.Float8BlockScaling(use_f32_scales=True, fp8_format=te.Format.HYBRID),
}
STATELESS = [name for name in RECIPES if name != "delayed"]
WIDE = 160  # more than a block of 128, and no multiple of one
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0, "attention_dropout": 0}
LAYERS: dict[str, Callable[..., Any]] = {
    "Linear": lambda **kw: te.Linear(WIDE, 144, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(WIDE, 48, normalization="RMSNorm", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(WIDE, 272, activation="swiglu", **kw),
    "MultiheadAttention": lambda **kw: te.MultiheadAttention(WIDE, 5, fuse_qkv_params=True, attention_dropout=0, **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(WIDE, 256, 5, fuse_qkv_params=True, **NO_DROPOUT, **kw),
    "operations": lambda **kw: torch.nn.Sequential(
        te.ops.Linear(WIDE, 256, dtype=kw["params_dtype"]),
        te.ops.GELU(),
        te.ops.Linear(256, WIDE, dtype=kw["params_dtype"]),
    ),
}
IN_PARTS = lambda **kw: te.TransformerLayer(256, 128, 2, num_gqa_groups=1, **NO_DROPOUT, **kw)  # noqa: E731


def made(name: str, recipe: Any, quantized: bool = True, dtype: torch.dtype = BF16, preserve: bool = False) -> Any:
    torch.manual_seed(0)
    with te.quantized_model_init(quantized, recipe=recipe, preserve_high_precision_init_val=preserve):
        return LAYERS[name](params_dtype=dtype)


def numbers(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def step(layer: Any, recipe: Any, i: int = 0, wide: int = WIDE, **kwargs: Any) -> list[torch.Tensor]:
    """Forward and backward on the i-th batch: the output and every gradient."""
    growth = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)[i % 8]
    x = numbers(2 * i, (9, 2, wide), growth).requires_grad_()
    layer.zero_grad(set_to_none=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(x, **kwargs)
    y.backward(numbers(2 * i + 1, tuple(y.shape), 1e-2 * growth))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


def weights(layer: torch.nn.Module) -> list[KeptTensor]:
    return [p for p in layer.parameters() if isinstance(p, KeptTensor)]


def optimizer_of(layer: torch.nn.Module) -> Any:
    return te.optimizers.FusedAdam(layer.parameters(), lr=3e-3, weight_decay=0.1, master_weights=True)


def train(layer: Any, optimizer: Any, recipe: Any, steps: range) -> list[torch.Tensor]:
    """All that the steps compute, and the weights at the end: codes, scales, their transposes."""
    seen = []
    for i in steps:
        seen += step(layer, recipe, i)
        optimizer.step()
    for p in layer.parameters():
        seen += [x.clone() for x in inner(p)] if isinstance(p, KeptTensor) else [p.detach().clone()]
    return seen


def inner(weight: KeptTensor) -> list[torch.Tensor]:
    kept = weight._kept
    found = (kept.codes.view(torch.uint8), kept.scale_inv, kept.transposed, kept.scale_inv_t)
    return [x if x.dtype != torch.float8_e4m3fn else x.view(torch.uint8) for x in found if x is not None]


def compare(a: list[torch.Tensor], b: list[torch.Tensor], what: str) -> None:
    for position, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same_bits(x, y, f"{what}, tensor {position} of {len(a)}")


def quantizer_of(layer: Any, weight: KeptTensor, recipe: Any) -> Any:
    role = next(one.weight for one in layer.roles.gemms if one.weight.column == weight._kept.column)
    return recipe.quantizer(role, layer.fp8_meta.get("scaling_fwd"))


# --- (a) bits --------------------------------------------------------------------------------------------


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("kind", RECIPES)
def test_it_trains_with_the_bits_of_casting_fp32_weights_in_each_step(kind: str, name: str) -> None:
    recipe = RECIPES[kind]
    kept, plain = (made(name, recipe, one, torch.float32, preserve=True) for one in (True, False))
    assert weights(kept)
    optimizers = optimizer_of(kept), optimizer_of(plain)
    for i in range(8):
        compare(step(kept, recipe, i), step(plain, recipe, i), f"step {i}")
        for one in optimizers:
            one.step()
    masters = [optimizers[0].state[p].get("master_param", p) for p in kept.parameters()]
    compare(masters, list(plain.parameters()), "masters")


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("kind", RECIPES)
def test_after_a_step_a_16_bit_weight_is_the_cast_of_its_fp32_master(kind: str, dtype: torch.dtype) -> None:
    """Scales are those of the masters, not of their rounding to 16 bits."""
    recipe = RECIPES[kind]
    layer = made("LayerNormMLP", recipe, dtype=dtype)
    optimizer = optimizer_of(layer)
    for i in range(3):
        step(layer, recipe, i)
        written = {w: quantizer_of(layer, w, recipe) for w in weights(layer)}
        optimizer.step()
        for weight, quantizer in written.items():
            (row, column), kept = quantizer.quantize(optimizer.state[weight]["master_param"], True), weight._kept
            compare(
                [kept.codes, kept.scale_inv, kept.transposed],
                [row.codes, row.scales, column.codes],
                "the cast of the master",
            )
            if kept.scale_inv_t is not None:
                assert_same_bits(kept.scale_inv_t, column.scales)
            assert weight.grad.dtype == weight.dtype == dtype


@pytest.mark.parametrize("kind", STATELESS)
def test_a_weight_is_drawn_and_cast_as_a_16_bit_weight_is(kind: str) -> None:
    recipe = RECIPES[kind]
    kept, plain = made("TransformerLayer", recipe), made("TransformerLayer", recipe, False)
    compare(step(kept, recipe), step(plain, recipe), "the first step")


@pytest.mark.parametrize("kind", RECIPES)
def test_several_parameters_of_one_weight(kind: str) -> None:
    """Blocks of each part are those of the whole; where there is one scale, each part has its own."""
    recipe = RECIPES[kind]
    layers = []
    for quantized in (True, False):
        torch.manual_seed(0)
        with te.quantized_model_init(quantized, recipe=recipe):
            layers.append(IN_PARTS(params_dtype=torch.float32))
    assert len(weights(layers[0])) == 6
    found, expected = (step(one, recipe, wide=256) for one in layers)
    if "blocks" in kind:
        compare(found[:1], expected[:1], "y")
    rounding = 2 * (found[0].float() - expected[0].float()).abs().max() / expected[0].float().abs().max()
    assert rounding < 0.1, "a scale of E4M3 more or less: half an ulp of 4 bits for each number of a sum"
    assert len(found) == len(expected)


@pytest.mark.parametrize("kind", RECIPES)
def test_recomputation_microbatches_and_main_grad(kind: str, same_bits: Any) -> None:
    recipe = RECIPES[kind]
    first, second, third = (made("LayerNormMLP", recipe) for _ in range(3))
    expected = step(first, recipe)
    compare(step(second, recipe, is_first_microbatch=True), expected, "cached")
    compare(step(second, recipe, 0, is_first_microbatch=False)[:1], step(first, recipe)[:1], "from the cache")
    x = numbers(0, (9, 2, WIDE)).requires_grad_()
    with te.autocast(recipe=recipe):
        y = te.checkpoint(third, x)
    y.backward(numbers(1, tuple(y.shape), 1e-2))
    compare([y.detach(), x.grad, *(p.grad for p in third.parameters())], expected, "recomputed")
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(WIDE, 48, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(48, WIDE)
    copied = copy.deepcopy(layer)
    copied.fuse_wgrad_accumulation = False
    step(layer, recipe)
    same_bits(layer.weight.main_grad.bfloat16(), step(copied, recipe)[-1])


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("kind", STATELESS)
def test_a_backward_in_16_bits_reads_what_the_codes_stand_for(kind: str, override: str) -> None:
    kept, plain = made("LayerNormMLP", RECIPES[kind]), made("LayerNormMLP", RECIPES[kind], False)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), kept.parameters(), strict=True):
            p.copy_(q)
    recipe = dataclasses.replace(RECIPES[kind], backward_override=override)
    found, expected = step(kept, recipe), step(plain, recipe)
    compare(found, expected, "codes are the cast of what they stand for")


@pytest.mark.parametrize("kind", STATELESS)
def test_outside_of_autocast_the_weights_are_dequantized(kind: str) -> None:
    kept, plain = made("LayerNormMLP", RECIPES[kind]), made("LayerNormMLP", RECIPES[kind], False)
    plain.load_state_dict(kept.state_dict())
    compare(step(kept, None), step(plain, None), "16 bits")


@pytest.mark.parametrize("kind", STATELESS)
def test_torch_optimizers_train(kind: str) -> None:
    layer = made("TransformerLayer", RECIPES[kind])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
    x, target = numbers(5, (9, 2, WIDE)), numbers(6, (9, 2, WIDE))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        with te.autocast(recipe=RECIPES[kind]):
            loss = torch.nn.functional.mse_loss(layer(x).float(), target.float())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    assert len(weights(layer)) == 4


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.sample(2)
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", STATELESS)
def test_compiled_it_has_the_bits_of_eager_mode(kind: str, enabled: bool) -> None:
    torch._dynamo.reset()
    eager = made("LayerNormMLP", RECIPES[kind])
    other = copy.deepcopy(eager)
    graph = torch.compile(other, backend="aot_eager", fullgraph=True)
    optimizers = optimizer_of(eager), optimizer_of(other)
    recipe = RECIPES[kind] if enabled else None
    for i in range(3):
        x = [numbers(2 * i, (9, 2, WIDE)).requires_grad_() for _ in range(2)]
        outs = []
        for module, inp, optimizer in zip((eager, graph), x, optimizers, strict=True):
            optimizer.zero_grad()
            with te.autocast(enabled=enabled, recipe=recipe):
                outs.append(module(inp))
            outs[-1].backward(numbers(7, tuple(outs[-1].shape), 1e-2))
            optimizer.step()
        compare([outs[0], x[0].grad, *eager.parameters()], [outs[1], x[1].grad, *other.parameters()], f"step {i}")  # type: ignore[list-item]


@pytest.mark.parametrize("kind", STATELESS)
def test_it_is_played_from_tapes_and_casts_no_weight(kind: str) -> None:
    lines = []
    for tapes in (False, True):
        call_groups._groups.clear()
        with DryGpu() as gpu, te.quantized_model_init(recipe=RECIPES[kind]):
            if tapes:
                gpu.tapes()
            layer = optimized.LayerNormMLP(256, 512, params_dtype=BF16, activation="swiglu")
            x = torch.empty(40, 2, 256, dtype=BF16, device="cuda").requires_grad_()
            for _ in range(6):
                gpu.lines.clear()
                with te.autocast(recipe=RECIPES[kind]):
                    y = layer(x)
                y.backward(torch.empty_like(y))
                layer.zero_grad(set_to_none=True)
                x.grad = y = None
            lines.append([found[2] for line in gpu.lines if (found := re.match(r"(again )?(\w+)\.\w+ \[", line))])
            if tapes:
                assert call_groups._groups
                assert all(group.usable and group.hits for group in call_groups._groups.values())
    call_groups._groups.clear()
    assert lines[0] == lines[1]
    casts = [name for name in lines[0] if "cast" in name and "kept" not in name]
    assert len(casts) == 4, "two inputs and two gradients"


class Own(Quantizer):
    """Half of current scaling's scale, in a layout of its own."""

    fp8, layout = True, "a test's"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.key = dtype, ("own", dtype)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        scale = Current(self.dtype, False, 0.0).scale(x) / 2
        codes, codes_t, scale_inv = torch.ops.twin.cast_transpose(x, scale, None, 0, self.dtype)
        return Quantized(Operand(codes, scale_inv, Own.layout), Operand(codes_t, scale_inv, Own.layout))


@dataclasses.dataclass(unsafe_hash=True)
class OwnRecipe(te.recipe.Recipe):  # type: ignore[name-defined, misc]
    fp8_format: te.Format = te.Format.HYBRID

    def quantizer(self, role: Role, state: Any) -> Own:
        return Own(self.codes(role.is_forward)[0])


@pytest.mark.parametrize("name", ["Linear", "TransformerLayer"])
def test_a_recipe_of_ones_own_needs_no_word_of_the_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layout has an entry in each table, as a recipe's file adds them."""
    recipe, own = OwnRecipe(), Own.layout
    with pytest.raises(NotImplementedError, match=r"^quantized_model_init: recipe=OwnRecipe\(.*\) is not offered"):
        te.quantized_model_init(recipe=recipe)

    def as_one_scale(a: Operand) -> Operand:
        return a._replace(layout=PER_TENSOR)

    theirs = PRODUCTS[PER_TENSOR, PER_TENSOR]
    monkeypatch.setitem(KEEPING, own, KEEPING[PER_TENSOR])
    monkeypatch.setitem(DEQUANTIZE, own, lambda a, dtype: dequantize(as_one_scale(a), a.codes.shape[1], dtype))
    monkeypatch.setitem(
        PRODUCTS,
        (own, own),
        Products(
            lambda a, b, *rest: theirs.multiply(as_one_scale(a), as_one_scale(b), *rest),
            lambda a, b, out: theirs.add(as_one_scale(a), as_one_scale(b), out),
            torch.bfloat16,
        ),
    )
    kept, plain = (made(name, recipe, one, torch.float32) for one in (True, False))
    assert {type(w) for w in weights(kept)} == {KeptTensor}
    optimizers = optimizer_of(kept), optimizer_of(plain)
    with torch.no_grad():
        for p, q in zip(kept.parameters(), plain.parameters(), strict=True):
            optimizers[0].initialize_state(p)
            if isinstance(p, KeptTensor):
                optimizers[0].set_scaled_state(p, "master_param", q.detach().clone())
    for i in range(3):
        compare(step(kept, recipe, i), step(plain, recipe, i), f"step {i}")
        for one in optimizers:
            one.step()
    loaded = made(name, recipe, dtype=torch.float32)
    loaded.load_state_dict(kept.state_dict(), strict=True)
    compare(step(loaded, recipe), step(copy.deepcopy(kept), recipe), "from its checkpoint")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("delayed", ["multi_cast_transpose"]),
        ("current", ["multi_current_scale", "current_scale", "multi_cast_transpose"]),
        ("blocks", ["cast_blocks", "cast_blocks"]),
    ],
)
def test_weights_with_one_scale_are_written_in_one_launch(kind: str, expected: list[str]) -> None:
    with DryGpu() as gpu, te.quantized_model_init(recipe=RECIPES[kind]):
        layer = optimized.LayerNormMLP(256, 512, params_dtype=BF16)
        optimizer = optimizer_of(layer)
        x = torch.empty(40, 2, 256, dtype=BF16, device="cuda").requires_grad_()
        for _ in range(2):
            with te.autocast(recipe=RECIPES[kind]):
                y = layer(x)
            y.backward(torch.empty_like(y))
            gpu.lines.clear()
            optimizer.step()
        launched = [found[1] for line in gpu.lines if (found := re.match(r"(\w+)\.\w+ \[", line))]
    assert [name for name in launched if name != "adam"] == expected


# --- (b) checkpoints -------------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.parametrize("how", ["load", "assign", "deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "TransformerLayer", "operations"])
@pytest.mark.parametrize("kind", RECIPES)
def test_what_was_saved_goes_on_with_the_same_bits(kind: str, name: str, how: str) -> None:
    recipe = RECIPES[kind]
    layer = made(name, recipe)
    optimizer = optimizer_of(layer)
    train(layer, optimizer, recipe, range(3))
    buffer = io.BytesIO()
    torch.save([layer.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    state, of_optimizer = torch.load(buffer, weights_only=True)
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(layer))
    elif how == "torch.save":
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        other = torch.load(buffer, weights_only=False)
    else:
        with torch.device("meta" if how == "assign" else "cpu"):
            other = made(name, recipe)
        other.load_state_dict(state, strict=True, assign=how == "assign")
    again = optimizer_of(other)
    again.load_state_dict(of_optimizer)
    compare(train(layer, optimizer, recipe, range(3, 6)), train(other, again, recipe, range(3, 6)), how)
    assert {type(w) for w in weights(other)} == {type(w) for w in weights(layer)}


@pytest.mark.parametrize("there", RECIPES)
@pytest.mark.parametrize("here", RECIPES)
def test_a_checkpoint_of_another_recipe_is_read_and_cast_anew(here: str, there: str) -> None:
    source, target = made("LayerNormMLP", RECIPES[there]), made("LayerNormMLP", RECIPES[here])
    state = source.state_dict()
    for assign in (False, True):
        target.load_state_dict(copy.deepcopy(state), strict=True, assign=assign)
        for mine, theirs in zip(weights(target), weights(source), strict=True):
            if mine._kept.layout == theirs._kept.layout:
                compare(inner(mine)[:2], inner(theirs)[:2], "codes and scales as they are")
                continue
            quantizer = RECIPES[here].quantizer(
                target.roles.of_weight("fc1_weight"), target.fp8_meta.get("scaling_fwd")
            )
            if here != "delayed":
                row, _ = quantizer.quantize(theirs.numbers(torch.float32), False)
                compare(inner(mine)[:2], [row.codes.view(torch.uint8), row.scales], "cast from fp32")
            assert mine.dtype == theirs.dtype
        assert all(x.isfinite().all() for x in step(target, RECIPES[here]))


@pytest.mark.parametrize("kind", STATELESS)
def test_checkpoints_go_between_16_bits_and_fp8(kind: str, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    recipe = RECIPES[kind]
    plain, kept = made("LayerNormMLP", recipe, False), made("LayerNormMLP", recipe)
    with torch.no_grad():
        plain.fc1_weight.mul_(3)
    with caplog.at_level(logging.WARNING):
        kept.load_state_dict(plain.state_dict(), strict=True)
    assert not caplog.records, "no scale starts at 1"
    compare(step(kept, recipe), step(plain, recipe), "16 bits to FP8")
    plain.load_state_dict(kept.state_dict(), strict=True)
    assert_same_bits(plain.fc1_weight, kept.fc1_weight.dequantize())
    theirs = te.transformer_engine_state_dict(kept)
    assert_same_bits(theirs["fc1_weight"], kept.fc1_weight.dequantize())
    assert not [name for name in theirs if name.endswith("scale_inv")]
    made("LayerNormMLP", recipe).load_state_dict(theirs, strict=True)


@pytest.mark.parametrize("quantized", [False, True])
def test_scales_of_squares_load_without_what_fills_a_row_up(quantized: bool) -> None:
    """So DeepSeek's files have them: `weight_scale_inv [ceil(out / 128), ceil(in / 128)]`."""
    recipe = RECIPES["blocks"]
    source = made("Linear", recipe)
    with torch.no_grad():
        source.weight.mul_(3)
    state = source.state_dict()
    expected, found = made("Linear", recipe, quantized), made("Linear", recipe, quantized)
    expected.load_state_dict(state)
    cols = state["weight"].shape[1]
    few = state["weight_scale_inv"][:, : -(-cols // 128)].clone()
    assert few.shape != state["weight_scale_inv"].shape
    found.load_state_dict({**state, "weight_scale_inv": few})
    for name, x in expected.state_dict().items():
        assert_same_bits(found.state_dict()[name], x, name)
    assert_same_bits(found.weight.dequantize(), expected.weight.dequantize())


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("fc1_weight_scale_inv"), "float8_e4m3fn and no fc1_weight_scale_inv; torch.float"),
        (lambda s: s.update(fc1_weight_scale_inv=torch.ones(5, 3)), r"\[5, 3\]; float32 \[1\] is accepted, or \[5, 4"),
        (lambda s: s["fc1_weight_scale_inv"].fill_(-1), "fc1_weight_scale_inv=-1.0; a finite number > 0 is accepted"),
        (lambda s: s["fc1_weight_scale_inv"][0].fill_(torch.inf), "fc1_weight_scale_inv=inf; a finite number > 0"),
        (lambda s: s["fc1_weight"].view(torch.uint8)[3].fill_(0x7F), "fc1_weight holds 160 NaN and 0 infinities"),
        (lambda s: s.update(fc1_weight=s["fc1_weight"].float()), "it was kept in FP8 with scale_inv="),
    ],
)  # fmt: skip
def test_broken_checkpoints_are_refused(quantized: bool, change: Callable[..., Any], sentence: str) -> None:
    recipe = RECIPES["blocks"]
    state = copy.deepcopy(made("LayerNormMLP", recipe).state_dict())
    change(state)
    layer = made("LayerNormMLP", recipe, quantized)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=sentence):
        layer.load_state_dict(state)
    assert all(torch.equal(value.float(), before[name].float()) for name, value in layer.state_dict().items())


# --- (c) names and behaviour -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", RECIPES)
def test_a_weight_reads_and_is_written_as_a_tensor_of_its_dtype(kind: str) -> None:
    recipe = RECIPES[kind]
    layer = made("Linear", recipe, preserve=True)
    weight = layer.weight
    plain = made("Linear", recipe, False).weight
    assert isinstance(weight, te.QuantizedTensor)
    assert isinstance(weight, te.Float8BlockwiseQTensor if "blocks" in kind else te.Float8Tensor)
    assert_same_bits(weight.get_high_precision_init_val(), plain)
    assert layer.primary_weights_in_fp8
    assert (weight.dtype, weight.shape, weight.device.type, weight.data_ptr()) == (BF16, plain.shape, "cpu", 0)
    kept = weight._kept
    wide = dequantize(Operand(kept.codes, kept.scale_inv, kept.layout), WIDE, torch.float32)
    assert_same_bits(weight.dequantize(dtype=torch.float32), wide)
    assert_same_bits(weight.dequantize(), wide.bfloat16())
    step(layer, recipe)
    column = dequantize(kept.quantized().column, 144, torch.float32)
    assert_same_bits(column, wide.t().contiguous())
    assert_same_bits(weight[3:40, 1], wide.bfloat16()[3:40, 1].contiguous())
    assert_same_bits(weight.view(-1)[5:] * 2, wide.bfloat16().view(-1)[5:] * 2)
    with torch.no_grad():
        weight.mul_(2)
    written = inner(weight)
    again = copy.deepcopy(layer).weight
    again.quantize_(wide.bfloat16() * 2)
    compare(inner(again)[:2], written[:2], "an op is a write of its result in T")
    cloned = weight.detach().clone()
    cloned.zero_()
    compare(inner(weight), written, "a clone has memory of its own")
    rows = weight.detach()[130:]
    with torch.no_grad():
        rows.zero_()
    assert not weight.dequantize()[130:].any()
    assert weight.dequantize()[:130].any()


def test_names_of_transformer_engine() -> None:
    assert optimized.Float8BlockwiseQTensor is te.Float8BlockwiseQTensor
    with pytest.raises(NotImplementedError, match=r"Float8BlockwiseQTensor\(...\) is not offered; a weight made in"):
        te.Float8BlockwiseQTensor((128, 128), BF16, rowwise_data=None)
    layer = made("Linear", RECIPES["blocks"])
    weight: Any = layer.weight
    assert weight._rowwise_data.dtype == torch.uint8
    assert (weight._rowwise_data.shape, weight._rowwise_scale_inv.shape) == ((144, WIDE), (2, 4))
    assert weight._columnwise_data is weight._columnwise_scale_inv is None
    assert weight._is_2D_scaled
    with pytest.raises(AttributeError, match=r"te\.Float8BlockQuantizer is not offered; quantize_"):
        weight._quantizer  # noqa: B018
    assert weight._fp8_dtype == te.DType.kFloat8E4M3
    assert weight.get_usages() == {"rowwise": True, "columnwise": False}
    weight.update_usage(columnwise_usage=True)
    assert (weight._columnwise_data.shape, weight._columnwise_scale_inv.shape) == ((WIDE, 144), (2, 4))
    weight.update_usage(columnwise_usage=False)
    assert weight._columnwise_data is None
    current = made("Linear", RECIPES["powers of two, epsilon"]).weight._quantizer
    assert isinstance(current, te.Float8CurrentScalingQuantizer)
    assert (current.force_pow_2_scales, current.amax_epsilon, current.dtype) == (True, 0.25, te.DType.kFloat8E4M3)


@pytest.mark.parametrize("kind", STATELESS)
def test_from_meta_conversions_and_pickles_of_a_weight(kind: str) -> None:
    recipe = RECIPES[kind]
    with torch.device("meta"):
        layer = made("LayerNormMLP", recipe)
    assert [w.is_meta for w in weights(layer)] == [True, True]
    torch.manual_seed(0)
    layer.reset_parameters()
    compare(step(layer, recipe), step(made("LayerNormMLP", recipe), recipe), "as if it had been made on the CPU")
    before = [part for w in weights(layer) for part in inner(w)[:2]]
    layer.half()
    assert {w.dtype for w in weights(layer)} == {torch.float16}
    compare([part for w in weights(layer) for part in inner(w)[:2]], before, "codes stay")
    buffer = io.BytesIO()
    torch.save(layer.fc1_weight, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    assert type(loaded) is type(layer.fc1_weight)
    compare(inner(loaded)[:2], inner(layer.fc1_weight)[:2], "a weight in a file")
    with torch.no_grad():
        loaded.copy_(layer.fc1_weight * 3)
        layer.fc1_weight.mul_(3)
    compare(inner(loaded)[:2], inner(layer.fc1_weight)[:2], "it is written by the same cast")


@pytest.mark.parametrize("kind", STATELESS)
def test_a_converted_model_keeps_its_weights(kind: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDE, 48))
    values = model[0].weight.detach().clone()
    with te.quantized_model_init(recipe=RECIPES[kind]):
        te.convert(model)
    (weight,) = weights(model)
    row, _ = RECIPES[kind].quantizer(model[0].roles.gemms[0].weight, None).quantize(values, False)
    compare(inner(weight)[:2], [row.codes.view(torch.uint8), row.scales], "its cast")


@pytest.mark.parametrize("kind", STATELESS)
def test_layers_of_a_block_may_run_in_other_precisions(kind: str) -> None:
    """Each module of a block says how its own weights are read."""
    recipe = RECIPES[kind]
    kept, plain = made("TransformerLayer", recipe), made("TransformerLayer", recipe, False)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), kept.parameters(), strict=True):
            p.copy_(q)
    layers = (kept, copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)), plain)
    for layer in layers:
        te.recipe.by_layer(layer, {"*qkv": None, "layernorm_mlp": None})
        for part in layer.modules():
            assert all(
                part.says_scales(w) for w in getattr(part, "_parameters", {}).values() if isinstance(w, KeptTensor)
            )
    found = [step(layer, recipe)[:1] for layer in layers]
    for one in found[:-1]:
        compare(one, found[-1], "attention's projection alone in FP8")


def test_a_weight_may_be_shared_with_a_layer_of_another_recipe() -> None:
    with te.quantized_model_init(recipe=RECIPES["blocks"]):
        first = te.Linear(WIDE, WIDE, params_dtype=BF16)
    with te.quantized_model_init(recipe=RECIPES["current"]):
        second = te.Linear(WIDE, WIDE, params_dtype=BF16)
    second.weight = first.weight
    model = copy.deepcopy(torch.nn.Sequential(first, second))
    assert model[0].weight is model[1].weight
    optimizer = optimizer_of(model)
    train(model, optimizer, RECIPES["blocks"], range(2))
    (row, _), kept = (
        RECIPES["blocks"]
        .quantizer(first.roles.gemms[0].weight, None)
        .quantize(optimizer.state[model[0].weight]["master_param"], False),
        model[0].weight._kept,
    )
    compare([kept.codes, kept.scale_inv], [row.codes, row.scales], "the first layer's cast")


# --- (d) refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "error", "sentence"),
    [
        (te.recipe.MXFP8BlockScaling(), NotImplementedError, r"recipe=MXFP8BlockScaling\(.*\) is not offered; Delayed"),
        (te.recipe.NVFP4BlockScaling(), NotImplementedError, r"recipe=NVFP4BlockScaling\(.*\) is not offered; Delayed"),
        (
            te.recipe.Float8BlockScaling(w_block_scaling_dim=1),
            NotImplementedError,
            "recipe=.*w_block_scaling_dim=1.* is not offered; .* and Float8BlockScaling with w_block_scaling_dim=2 are",
        ),
        (te.recipe.Float8CurrentScaling, TypeError, "recipe=<class .*; a recipe of te.recipe or None is accepted"),
        (4, TypeError, "recipe=4; a recipe of te.recipe or None is accepted"),
    ],
)
def test_recipes_that_keep_no_weights_are_refused(recipe: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"^quantized_model_init: {sentence}"):
        te.quantized_model_init(recipe=recipe)
    with te.quantized_model_init(enabled=False, recipe=recipe):
        assert not weights(te.Linear(16, 16))


@pytest.mark.parametrize(
    ("kept", "run"), [("blocks", "current"), ("blocks", "delayed"), ("current", "blocks"), ("delayed", "blocks")]
)
@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_a_recipe_that_cannot_read_the_weights_is_refused(name: str, kept: str, run: str) -> None:
    layer = made(name, RECIPES[kept])
    with pytest.raises(NotImplementedError, match="operands is not offered: a weight that quantized_model_init keeps"):
        step(layer, RECIPES[run])


def test_recipes_of_one_scale_read_each_others_weights() -> None:
    for kept, run in (("current", "delayed"), ("delayed", "current")):
        layer = made("LayerNormMLP", RECIPES[kept])
        optimizer = optimizer_of(layer)
        train(layer, optimizer, RECIPES[run], range(2))
        assert layer.says_scales(layer.fc1_weight)


def test_parts_that_share_a_block_are_refused() -> None:
    with (
        te.quantized_model_init(recipe=RECIPES["blocks"]),
        pytest.raises(
            ValueError, match=r"gives 'a' 160 rows in quantized_model_init; a multiple of 128 is accepted \("
        ),
    ):
        te.Linear(32, 256, parameters_split={"a": 160, "b": 96})


def test_other_optimizers_refuse_it_as_before() -> None:
    layer = made("Linear", RECIPES["blocks"])
    step(layer, RECIPES["blocks"])
    for make in (te.optimizers.FusedSGD, te.optimizers.FusedAdam):
        with pytest.raises(ValueError, match=r"is kept in FP8; .* accepted"):
            make(layer.parameters(), lr=0.1).step()
    weight: Any = layer.weight
    with pytest.raises(NotImplementedError, match="a layer's weight has the scales of its layer"):
        weight.update_quantizer(te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, "cpu"))
    with pytest.raises(ValueError, match=r"data has shape \[9\]; \[rows, a multiple of 16\] is accepted"):
        weight.data = torch.ones(9)


# --- kernels ---------------------------------------------------------------------------------------------


@pytest.mark.simulated
@pytest.mark.parametrize("kind", STATELESS)
def test_the_kernels_have_the_same_bits(kind: str) -> None:
    found = []
    for simulated in (True, False):
        layer = made("Linear", RECIPES[kind])
        if simulated:
            with Simulator() as gpu:
                found.append(train(layer, optimizer_of(layer), RECIPES[kind], range(2)))
            assert gpu.launches
        else:
            found.append(train(layer, optimizer_of(layer), RECIPES[kind], range(2)))
    compare(*found, "kernels")  # type: ignore[call-arg]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["LayerNormMLP", "TransformerLayer"])
@pytest.mark.parametrize("kind", STATELESS)
def test_training_has_the_bits_of_a_cpu(kind: str, name: str) -> None:
    recipe = RECIPES[kind]
    layer = made(name, recipe, preserve=True)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    optimizers = [optimizer_of(one) for one in pair]
    for i in range(6):
        seen: list[list[torch.Tensor]] = []
        for module, optimizer in zip(pair, optimizers, strict=True):
            device = next(module.parameters()).device
            x = numbers(2 * i, (17, 2, WIDE)).to(device).requires_grad_()
            module.zero_grad(set_to_none=True)
            with te.autocast(recipe=recipe):
                y = module(x)
            y.backward(numbers(2 * i + 1, tuple(y.shape), 1e-2).to(device))
            grads = [p.grad for p in module.parameters()]
            optimizer.step()
            parts = [t for w in weights(module) for t in inner(w)]
            seen.append([t.detach().cpu().clone() for t in (y, x.grad, *grads, *parts)])  # type: ignore[union-attr]
        compare(*seen, f"step {i}")  # type: ignore[call-arg]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STATELESS)
def test_a_whole_step_replays_as_a_cuda_graph(kind: str) -> None:
    """Codes, scales and what is turned stay where they are."""
    recipe = RECIPES[kind]
    layer = made("LayerNormMLP", recipe).to("cuda")
    x = numbers(1, (16, 2, WIDE)).cuda().requires_grad_()

    def sgd(module: Any) -> None:
        module.zero_grad(set_to_none=True)
        with te.autocast(recipe=recipe):
            y = module(x)
        y.backward(torch.ones_like(y))
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(p - p.grad * 0.03125)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            sgd(layer)
    torch.cuda.current_stream().wait_stream(stream)
    eager = copy.deepcopy(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgd(layer)
    with torch.no_grad():
        for p, q in zip(layer.parameters(), eager.parameters(), strict=True):
            p.copy_(q)
    for i in range(4):
        graph.replay()
        sgd(eager)
        found = [[t for w in weights(one) for t in inner(w)] for one in (layer, eager)]
        compare(*found, f"replay {i}")  # type: ignore[call-arg]
