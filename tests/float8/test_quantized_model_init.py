"""Layers that keep their weights in FP8 only: bits, memory, checkpoints, and what they refuse.

On an H200 they have the CPU's bits, in graphs too, and take less memory.
"""

import copy
import gc
import io
import logging
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import safetensors.torch
import torch
from shared.bits import assert_same_bits

import optimized
import reference as te
from reference.checkpoints.packed_state import PackedState
from reference.float8.float8_tensor import Float8Tensor

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
RATE = 0.03125

LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(32, 48, **kw),
    "LayerNormLinear": lambda **kw: te.LayerNormLinear(32, 48, normalization="RMSNorm", **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(32, 64, activation="swiglu", **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(
        32, 64, 2, fuse_qkv_params=True, hidden_dropout=0, attention_dropout=0, **kw
    ),
    "q, k, v": lambda **kw: te.TransformerLayer(
        32, 64, 2, num_gqa_groups=1, hidden_dropout=0, attention_dropout=0, **kw
    ),
}
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}
ODD_LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(80, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(80, 112, activation="geglu", **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(80, 112, 5, fuse_qkv_params=True, **kw),
    "q, k, v": lambda **kw: te.TransformerLayer(80, 112, 5, num_gqa_groups=1, **kw),
}


def made(name: str = "LayerNormMLP", dtype: torch.dtype = BF16, quantized: bool = True, **settings: Any) -> Any:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=RECIPE, **settings):
        return LAYERS[name](params_dtype=dtype)


def numbers(seed: int, shape: tuple[int, ...], scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(BF16)


def step(layer: torch.nn.Module, i: int = 0, fp8: bool = True, **kwargs: Any) -> list[torch.Tensor]:
    """Forward and backward on the i-th batch: the output and every gradient."""
    growth = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)[i % 8]
    x = numbers(2 * i, (8, 2, 32), growth).requires_grad_()
    layer.zero_grad(set_to_none=True)
    with te.autocast(enabled=fp8, recipe=RECIPE):
        y = layer(x, **kwargs)
    y.backward(numbers(2 * i + 1, tuple(y.shape), 1e-2 * growth))
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


def states(layer: torch.nn.Module) -> list[torch.Tensor]:
    found = [getattr(module, "fp8_meta", {}) for module in layer.modules()]
    metas = [meta[key] for meta in found if meta for key in ("scaling_fwd", "scaling_bwd")]
    return [t.clone() for meta in metas for t in (meta.scale, meta.amax_history)]


def weights(layer: torch.nn.Module) -> list[Float8Tensor]:
    return [p for p in layer.parameters() if isinstance(p, Float8Tensor)]


def compare(a: list[torch.Tensor], b: list[torch.Tensor], what: str) -> None:
    for position, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same_bits(x, y, f"{what}, tensor {position} of {len(a)}")


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("name", [name for name in LAYERS if name != "q, k, v"])
def test_with_master_weights_it_trains_with_the_bits_of_casting_each_step(name: str, dtype: torch.dtype) -> None:
    """The masters start as what the weights were drawn as, and are copied into them after each step."""
    plain, kept = made(name, dtype, quantized=False), made(name, dtype, preserve_high_precision_init_val=True)
    masters = [
        p.get_high_precision_init_val() if isinstance(p, Float8Tensor) else p.detach().clone()
        for p in kept.parameters()
    ]
    compare(masters, list(plain.parameters()), "what they were drawn as")
    for i in range(9):
        compare(step(plain, i), step(kept, i), f"step {i}")
        compare(states(plain), states(kept), f"step {i}, scales and histories")
        with torch.no_grad():
            for p, master, q in zip(plain.parameters(), masters, kept.parameters(), strict=True):
                p.copy_(p - (p.grad * RATE))
                master.copy_(master - (q.grad * RATE))
                q.copy_(master)


def test_weights_are_one_byte_each_and_transposed_only_for_gradients() -> None:
    layer = made("LayerNormMLP")
    assert [type(p) is Float8Tensor for p in layer.parameters()] == [False, False, True, False, True, False]
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        layer(numbers(0, (8, 2, 32)))
    for weight in weights(layer):
        assert (weight.codes.dtype, weight.codes_t) == (torch.float8_e4m3fn, None)
        assert weight.data_ptr() == 0, "no memory of its own"
    step(layer)
    assert all(weight.codes_t.shape == weight.t().shape for weight in weights(layer))
    for tensor in layer.fp8_meta["scaling_fwd"].amax_history[0, [1, 4]]:
        assert tensor == 0, "the amax of the first write is in the history"
    assert (layer.fp8_meta["scaling_fwd"].amax_history[-1, [1, 4]] > 0).all()


def test_gradients_have_the_dtype_of_the_parameter_and_torch_optimizers_train() -> None:
    for dtype in (torch.float32, BF16):
        layer = made("TransformerLayer", dtype)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-3)
        x, target = numbers(5, (8, 2, 32)), numbers(6, (8, 2, 32))
        losses = []
        for _ in range(30):
            optimizer.zero_grad()
            with te.autocast(recipe=RECIPE):
                loss = torch.nn.functional.mse_loss(layer(x).float(), target.float())
            loss.backward()
            assert {p.grad.dtype for p in layer.parameters()} == {dtype}
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2, losses
        assert len(weights(layer)) == 4


def test_outside_of_autocast_the_weights_are_dequantized(caplog, monkeypatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    kept, plain = made(), made(quantized=False)
    plain.load_state_dict(kept.state_dict())
    with caplog.at_level(logging.WARNING):
        compare(step(kept, fp8=False), step(plain, fp8=False), "16 bits")
        step(kept, fp8=False)
    assert [r.message for r in caplog.records if "kept in FP8" in r.message] == [
        "a weight that is kept in FP8 is used outside of FP8 autocast: it is dequantized (said once)."
    ]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_outside_of_autocast_a_trained_weight_is_read_with_one_rounding(dtype: torch.dtype) -> None:
    kept, plain = trained().to(dtype), made(quantized=False).to(dtype)
    with torch.no_grad():
        for p, q in zip(plain.parameters(), kept.parameters(), strict=True):
            whole = isinstance(q, Float8Tensor)
            p.copy_((q.codes.float() * q._scale_inv).to(dtype) if whole else q)
    x = numbers(0, (8, 2, 32)).to(dtype)
    with torch.no_grad():
        assert_same_bits(kept(x), plain(x))


def test_microbatches_recomputation_and_main_grad(same_bits) -> None:
    first, second, third = (made() for _ in range(3))
    expected = step(first)
    compare(step(second, is_first_microbatch=True), expected, "cached")
    compare(step(second, is_first_microbatch=False)[:1], step(first)[:1], "from the cache")
    x = numbers(0, (8, 2, 32)).requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = te.checkpoint(third, x)
    y.backward(numbers(1, tuple(y.shape), 1e-2))
    compare([y.detach(), x.grad, *(p.grad for p in third.parameters())], expected, "recomputed")
    with te.quantized_model_init(recipe=RECIPE):
        layer = te.Linear(32, 48, bias=False, params_dtype=BF16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(48, 32)
    copied = copy.deepcopy(layer).to(torch.float16).to(BF16)
    copied.fuse_wgrad_accumulation = False
    step(layer)
    same_bits(layer.weight.main_grad.bfloat16(), step(copied)[-1])
    assert hasattr(copied.weight, "main_grad"), "a module's `to` keeps attributes"


def test_a_weight_written_between_forward_and_backward_is_noticed() -> None:
    layer = made()
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            y = layer(numbers(0, (8, 2, 32)).requires_grad_())
        with torch.no_grad():
            layer.fc2_weight.mul_(0.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def trained() -> Any:
    layer = made()
    for i in range(3):
        step(layer, i)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(p - (p.grad * RATE))
    return layer


def test_copies_conversions_and_devices() -> None:
    layer = trained()
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)]
    expected = step(layer)
    for other in copies:
        compare(step(other), expected, "a copy")
        assert all(w._kept.scales is other.fp8_meta["scaling_fwd"] for w in weights(other))
    codes, before = layer.fc1_weight.codes.clone(), layer.fc1_weight
    layer.half()
    assert layer.fc1_weight is before
    assert (before.dtype, before.grad.dtype, len(weights(layer))) == (torch.float16, torch.float16, 2)
    assert_same_bits(before.codes, codes)
    layer.zero_grad()
    layer.to("meta")
    assert before.is_meta
    assert before.codes.is_meta
    assert layer.fp8_meta["scaling_fwd"].scale is before._kept.scales.scale


def test_a_weight_may_be_shared() -> None:
    with te.quantized_model_init(recipe=RECIPE):
        mlp, linear = (te.LayerNormMLP(32, 32, params_dtype=BF16), te.Linear(32, 32, params_dtype=BF16))
    plain = te.Linear(32, 32, params_dtype=BF16)
    plain.weight = linear.weight = mlp.fc2_weight
    model = torch.nn.Sequential(mlp, linear, plain)
    copied = copy.deepcopy(model)
    assert copied[0].fc2_weight is copied[1].weight is copied[2].weight
    assert copied[1].weight._kept.scales is copied[0].fp8_meta["scaling_fwd"]
    compare(step(model), step(copied), "a copy")
    copied.load_state_dict(model.state_dict())
    assert len(weights(model)) == 2
    with torch.no_grad():
        model[2].weight.mul_(0.5)
    assert mlp.fp8_meta["scaling_fwd"].amax_history[0].count_nonzero() == 1


def test_a_layer_from_the_meta_device() -> None:
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPE):
        layer = te.LayerNormMLP(32, 64, activation="swiglu", params_dtype=BF16, device="meta")
    assert [w.is_meta for w in weights(layer)] == [True, True]
    layer.reset_parameters()
    compare(step(layer), step(made()), "as if it had been made on the CPU")
    torch.manual_seed(0)
    layer.reset_parameters()
    assert len(weights(layer)) == 2


@pytest.mark.parametrize("how", ["torch.save", "safetensors", "assign"])
def test_a_checkpoint_goes_on_with_the_same_bits(how: str, tmp_path) -> None:
    layer = trained()
    state = layer.state_dict()
    assert state["fc1_weight"].dtype == torch.float8_e4m3fn
    assert [k for k in state if k.endswith("scale_inv")] == ["fc1_weight_scale_inv", "fc2_weight_scale_inv"]
    assert {type(v) for v in state.values()} == {torch.Tensor, PackedState}
    if how == "safetensors":
        safetensors.torch.save_file(state, tmp_path / "model.safetensors")
        state = safetensors.torch.load_file(tmp_path / "model.safetensors")
    else:
        torch.save(state, tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt", weights_only=True)
    if how == "assign":
        with te.quantized_model_init(recipe=RECIPE), torch.device("meta"):
            other = te.LayerNormMLP(32, 64, activation="swiglu", params_dtype=BF16, device="meta")
    else:
        other = made()
        step(other)
    other.load_state_dict(state, strict=True, assign=how == "assign")
    for i in range(3):
        compare(step(layer, i), step(other, i), f"step {i}")
        compare(states(layer), states(other), f"step {i}, state")
        with torch.no_grad():
            for p in (*layer.parameters(), *other.parameters()):
                p.copy_(p - (p.grad * RATE))
    assert "fc1_weight" in layer.state_dict(keep_vars=True)
    assert layer.state_dict(keep_vars=True)["fc1_weight"] is layer.fc1_weight


def test_checkpoints_go_between_16_bits_and_fp8() -> None:
    """Cast with the scales that come with it, a 16-bit checkpoint gives the 16-bit layer's own next step."""
    plain = made(quantized=False)
    for i in range(3):
        step(plain, i)
    kept = made()
    kept.load_state_dict(plain.state_dict(), strict=True)
    assert len(weights(kept)) == 2
    compare(step(plain), step(kept), "16 bits to FP8")
    back = made(quantized=False)
    kept = trained()
    back.load_state_dict(kept.state_dict(), strict=True)
    assert not weights(back)
    assert_same_bits(back.fc1_weight, kept.fc1_weight.dequantize())
    compare(step(kept), step(back), "FP8 to 16 bits: its cast gives the codes again")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda s: s.pop("fc1_weight_scale_inv"), "float8_e4m3fn and no fc1_weight_scale_inv; torch.float"),
        (lambda s: s.update(fc1_weight=s["fc1_weight"].view(torch.float8_e5m2)), "is torch.float8_e5m2 beside"),
        (lambda s: s.update(fc2_weight_scale_inv=torch.ones(2)), r"torch.float32 \[2\]; float32 \[1\] is accepted"),
        (lambda s: s["fc2_weight"].view(torch.uint8).fill_(0x7F), "fc2_weight holds 2048 NaN"),
        (lambda s: s.update(fc1_weight_scale_inv=torch.tensor([-1.0])), "fc1_weight_scale_inv=-1.0; a finite number"),
        (lambda s: s.update(fc1_weight_scale_inv=torch.tensor([0.0])), "fc1_weight_scale_inv=0.0; a finite number"),
        (lambda s: s.update(fc1_weight_scale_inv=torch.tensor([torch.inf])), "scale_inv=inf; a finite number > 0"),
        (lambda s: s.update(fc1_weight_scale_inv=[1.0]), "fc1_weight_scale_inv is a list; a tensor is accepted"),
    ],
)  # fmt: skip
def test_broken_checkpoints_are_refused(quantized: bool, change: Callable[..., Any], sentence: str) -> None:
    state = copy.deepcopy(trained().state_dict())
    change(state)
    layer = made(quantized=quantized)
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises((ValueError, TypeError), match=sentence):
        layer.load_state_dict(state)
    assert all(torch.equal(value.float(), before[name].float()) for name, value in layer.state_dict().items())


def test_a_checkpoint_without_state_is_cast_with_scale_1() -> None:
    plain, kept = made(quantized=False), trained()
    kept.load_state_dict(plain.state_dict(), strict=True)
    compare(step(kept), step(plain), "as a fresh layer")


def test_what_was_preserved() -> None:
    kept = made(preserve_high_precision_init_val=True)
    value = kept.fc1_weight.get_high_precision_init_val()
    assert_same_bits(value, made(quantized=False).fc1_weight)
    assert (value.device.type, copy.deepcopy(kept).fc1_weight.get_high_precision_init_val().dtype) == ("cpu", BF16)
    kept.fc1_weight.clear_high_precision_init_val()
    assert kept.fc1_weight.get_high_precision_init_val() is None
    assert not hasattr(made().fc1_weight, "get_high_precision_init_val")
    assert not hasattr(made().fc1_weight, "clear_high_precision_init_val")


def test_contexts_nest_and_end() -> None:
    assert te.fp8_model_init is te.quantized_model_init
    with te.quantized_model_init():
        assert weights(te.Linear(32, 16))
        with te.quantized_model_init(enabled=False):
            assert not weights(te.Linear(32, 16))
        layer = te.Linear(32, 16)
        assert layer.fp8_meta["scaling_fwd"].amax_history.shape == (1024, 3)
        assert not weights(te.LayerNorm(32))
    assert not weights(te.Linear(32, 16))
    with pytest.raises(KeyError), te.quantized_model_init():
        raise KeyError
    assert not weights(te.Linear(32, 16))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: te.Linear(24, 16), ValueError, "Linear: in_features=24 in quantized_model_init; a multiple of 16"),
        (lambda: te.LayerNormMLP(32, 40), ValueError, "ffn_hidden_size=40 in quantized_model_init; a multiple of 16"),
        (
            lambda: te.Linear(32, 48, parameters_split={"a": 40, "b": 8}),
            ValueError,
            "Linear: parameters_split gives 'a' 40 rows in quantized_model_init; a multiple of 16 is accepted",
        ),
    ],
)
def test_refusals(make: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with te.quantized_model_init(), pytest.raises(error, match=sentence):
        make()


def test_other_recipes_are_refused() -> None:
    recipe: Any = "MXFP8BlockScaling"
    with (
        pytest.raises(TypeError, match="quantized_model_init: recipe='MXFP8BlockScaling'; a "),
        te.quantized_model_init(recipe=recipe),
    ):
        pass


def drawn_numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Everything that a step may change: codes, transposed codes, scales, histories, random states."""
    for name, p in module.named_parameters():
        if isinstance(p, Float8Tensor):
            yield from ((f"{name}{part}", getattr(p, part)) for part in ("_data", "_scale_inv", "_transpose"))
        else:
            yield name, p
    for name, part in module.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            if key in getattr(part, "fp8_meta", {}):
                yield f"{name}.{key}.scale", part.fp8_meta[key].scale
                yield f"{name}.{key}.amax_history", part.fp8_meta[key].amax_history
        if hasattr(part, "generator"):
            yield f"{name}.generator", part.generator.state


@pytest.mark.gpu
@pytest.mark.parametrize("masters", [False, True], ids=["in place", "masters"])
@pytest.mark.parametrize(
    ("name", "dtype", "fmt"),
    [
        ("Linear", torch.float16, "e4m3"),
        ("LayerNormMLP", torch.float32, "hybrid"),
        ("TransformerLayer", BF16, "hybrid"),
        ("TransformerLayer", torch.float16, "e4m3"),
        ("q, k, v", BF16, "hybrid"),
        ("q, k, v", torch.float32, "e4m3"),
    ],
)
def test_training_has_the_bits_of_a_cpu(name: str, dtype: torch.dtype, fmt: str, masters: bool) -> None:
    recipe = te.DelayedScaling(fp8_format=FORMATS[fmt], amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = ODD_LAYERS[name](params_dtype=dtype)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    high = [[drawn(p) for p in module.parameters()] for module in pair]
    activations = BF16 if dtype == torch.float32 else dtype
    for i in range(9):
        growth = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)[i % 8]
        x0, g0 = (
            drawn_numbers(2 * i, (17, 2, 80), activations, growth),
            drawn_numbers(2 * i + 1, (17, 2, 80), activations, 1e-2),
        )
        seen: list[dict[str, torch.Tensor]] = []
        for module, master in zip(pair, high, strict=True):
            device = next(module.parameters()).device
            x = x0.to(device, copy=True).requires_grad_()
            module.zero_grad(set_to_none=True)
            torch.manual_seed(i)  # of the masks
            with te.autocast(recipe=recipe):
                y = module(x)
            y.backward(g0.to(device)[..., : y.shape[-1]])
            found = {"y": y, "dx": x.grad} | {f"d {n}": p.grad for n, p in module.named_parameters()}
            with torch.no_grad():
                for j, p in enumerate(module.parameters()):
                    master[j] = (master[j] if masters else p) - (p.grad * RATE)
                    p.copy_(master[j])
            seen.append(found | snapshot(module))
        assert seen[0].keys() == seen[1].keys()
        for what, value in seen[0].items():
            assert_same_bits(value, seen[1][what], f"step {i}, {what}")


def drawn(p: torch.Tensor) -> torch.Tensor:
    """An fp32 master of a parameter."""
    found = p.get_high_precision_init_val() if isinstance(p, Float8Tensor) else p.detach()
    assert found is not None
    return found.to(p.device, torch.float32)


def snapshot(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Taken before another module's autocast ends, which updates the scales of every module."""
    return {name: value.detach().clone() for name, value in named(module)}


def made_on_cuda(
    hidden: int, quantized: bool, fused: bool = True
) -> tuple[torch.nn.Module, torch.Tensor, te.DelayedScaling]:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = optimized.TransformerLayer(
            hidden, 4 * hidden, 4, fuse_qkv_params=fused, hidden_dropout=0, attention_dropout=0, params_dtype=BF16
        )
    return layer, drawn_numbers(1, (64, 2, hidden), BF16, 1.0).cuda().requires_grad_(), recipe


def sgd_step(layer: Any, x: torch.Tensor, recipe: te.DelayedScaling) -> None:
    layer.zero_grad(set_to_none=True)
    with te.autocast(recipe=recipe):
        y = layer(x)
    y.backward(torch.ones_like(y))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(p - p.grad * RATE)


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_same_bits(value, expected[name], f"{what}, {name}")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["one weight", "q, k, v"])
def test_a_whole_step_replays_as_a_cuda_graph(fused: bool) -> None:
    """The writes of the weights too: codes, transposed codes and scales stay where they are."""
    layer, x, recipe = made_on_cuda(64, True, fused)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            sgd_step(layer, x, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    before = snapshot(layer)
    eager = copy.deepcopy(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sgd_step(layer, x, recipe)
    expected = []
    for _ in range(4):
        sgd_step(eager, x, recipe)
        expected.append(snapshot(eager))
    with torch.no_grad():
        for name, value in named(layer):
            value.copy_(before[name])
    for i in range(4):
        graph.replay()
        same(snapshot(layer), expected[i], f"replay {i}")


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [True, False], ids=["one weight", "q, k, v"])
def test_graphed_callables_replay_the_bits_of_eager_mode(fused: bool) -> None:
    layer, x, recipe = made_on_cuda(64, True, fused)
    eager = copy.deepcopy(layer)
    optimized.make_graphed_callables(layer, (x,), enabled=True, recipe=recipe)
    for i in range(4):
        found = []
        for module in (layer, eager):
            sgd_step(module, x, recipe)
            found.append(snapshot(module))
        same(found[0], found[1], f"step {i}")


@pytest.mark.gpu
def test_a_step_takes_less_memory_than_with_16_bit_weights() -> None:
    """A byte less for each weight: one and not two at rest, two (codes, transposed codes) and not three in a step."""
    at_rest, peaks = [], []
    for quantized in (False, True, False, True):  # the first two allocate what a process keeps
        gc.collect()  # what other tests left is not freed in between
        before = torch.cuda.memory_allocated()
        layer, x, recipe = made_on_cuda(1024, quantized)
        with torch.no_grad(), te.autocast(recipe=recipe):
            layer(x)
        at_rest.append(torch.cuda.memory_allocated() - before)
        for _ in range(3):
            sgd_step(layer, x, recipe)
            layer.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            with te.autocast(recipe=recipe):
                y = layer(x)
            y.backward(torch.ones_like(y))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del layer, x, y
    weights = 12 * 1024**2  # numbers in the four weights
    assert abs(at_rest[2] - at_rest[3] - weights) < weights / 16, at_rest
    assert peaks[2] - peaks[3] > weights * 15 / 16, peaks
