"""On an H200 layers that keep their weights in FP8 have the CPU's bits, in graphs too, and take less memory."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from shared.bits import assert_same_bits

import optimized
import reference as te
from reference.float8.float8_tensor import Float8Tensor

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
RATE = 0.03125
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}

LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **kw: te.Linear(80, 48, **kw),
    "LayerNormMLP": lambda **kw: te.LayerNormMLP(80, 112, activation="geglu", **kw),
    "TransformerLayer": lambda **kw: te.TransformerLayer(80, 112, 5, fuse_qkv_params=True, **kw),
    "q, k, v": lambda **kw: te.TransformerLayer(80, 112, 5, num_gqa_groups=1, **kw),
}


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float) -> torch.Tensor:
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
        layer = LAYERS[name](params_dtype=dtype)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    high = [[drawn(p) for p in module.parameters()] for module in pair]
    activations = BF16 if dtype == torch.float32 else dtype
    for i in range(9):
        growth = (1.0, 4.0, 0.25, 1.0, 16.0, 1.0, 1e-2, 1.0)[i % 8]
        x0, g0 = numbers(2 * i, (17, 2, 80), activations, growth), numbers(2 * i + 1, (17, 2, 80), activations, 1e-2)
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


def made(hidden: int, quantized: bool, fused: bool = True) -> tuple[torch.nn.Module, torch.Tensor, te.DelayedScaling]:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = optimized.TransformerLayer(
            hidden, 4 * hidden, 4, fuse_qkv_params=fused, hidden_dropout=0, attention_dropout=0, params_dtype=BF16
        )
    return layer, numbers(1, (64, 2, hidden), BF16, 1.0).cuda().requires_grad_(), recipe


def step(layer: Any, x: torch.Tensor, recipe: te.DelayedScaling) -> None:
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


@pytest.mark.parametrize("fused", [True, False], ids=["one weight", "q, k, v"])
def test_a_whole_step_replays_as_a_cuda_graph(fused: bool) -> None:
    """The writes of the weights too: codes, transposed codes and scales stay where they are."""
    layer, x, recipe = made(64, True, fused)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(layer, x, recipe)
    torch.cuda.current_stream().wait_stream(stream)
    before = snapshot(layer)
    eager = copy.deepcopy(layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, x, recipe)
    expected = []
    for _ in range(4):
        step(eager, x, recipe)
        expected.append(snapshot(eager))
    with torch.no_grad():
        for name, value in named(layer):
            value.copy_(before[name])
    for i in range(4):
        graph.replay()
        same(snapshot(layer), expected[i], f"replay {i}")


@pytest.mark.parametrize("fused", [True, False], ids=["one weight", "q, k, v"])
def test_graphed_callables_replay_the_bits_of_eager_mode(fused: bool) -> None:
    layer, x, recipe = made(64, True, fused)
    eager = copy.deepcopy(layer)
    optimized.make_graphed_callables(layer, (x,), enabled=True, recipe=recipe)
    for i in range(4):
        found = []
        for module in (layer, eager):
            step(module, x, recipe)
            found.append(snapshot(module))
        same(found[0], found[1], f"step {i}")


def test_a_step_takes_less_memory_than_with_16_bit_weights() -> None:
    """A byte less for each weight: one and not two at rest, two (codes, transposed codes) and not three in a step."""
    at_rest, peaks = [], []
    for quantized in (False, True, False, True):  # the first two allocate what a process keeps
        gc.collect()  # what other tests left is not freed in between
        before = torch.cuda.memory_allocated()
        layer, x, recipe = made(1024, quantized)
        with torch.no_grad(), te.autocast(recipe=recipe):
            layer(x)
        at_rest.append(torch.cuda.memory_allocated() - before)
        for _ in range(3):
            step(layer, x, recipe)
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
