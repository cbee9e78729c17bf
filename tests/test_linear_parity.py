"""The claim: on an H200, `Linear` equals its deep copy on the CPU in every bit, over training steps."""

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import optimized
import reference as te

pytestmark = pytest.mark.gpu

STEPS = 8
LEARNING_RATE = 0.0625
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * scale).to(dtype)


def results(layer: te.Linear, x: torch.Tensor, y: torch.Tensor, fp8: bool) -> dict[str, torch.Tensor]:
    found = {"y": y, "dx": x.grad, "dw": layer.weight.grad}
    if layer.use_bias:
        found["db"] = layer.bias.grad
    if fp8:
        for key in ("scaling_fwd", "scaling_bwd"):
            found[key + ".scale"] = layer.fp8_meta[key].scale
            found[key + ".amax_history"] = layer.fp8_meta[key].amax_history
    return found


def train_both(
    layer: te.Linear,
    tokens: int,
    dtype: torch.dtype,
    recipe: te.DelayedScaling | None,
    same_bits,  # type: ignore[no-untyped-def]
    steps: int = STEPS,
    cached: bool = False,
) -> None:
    """Train a layer and its copy on the GPU side by side and compare everything they compute."""
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    for step in range(steps):
        growth = (1.0, 4.0, 0.25, 1.0, 100.0, 1.0, 1e-3, 1.0)[step % 8]
        x0 = numbers(2 * step, (tokens, layer.in_features), dtype, growth)
        g = numbers(2 * step + 1, (tokens, layer.out_features), dtype, 1e-2 * growth)
        first = step % 4 == 0 if cached else None
        both = []
        for module in pair:
            device = module.weight.device
            x = x0.to(device, copy=True).requires_grad_()
            module.zero_grad(set_to_none=True)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(x, is_first_microbatch=first)
            y.backward(g.to(device))
            both.append(results(module, x, y, recipe is not None))
            with torch.no_grad():
                for p in module.parameters():
                    p.copy_(p - (p.grad * LEARNING_RATE))
        for name, value in both[0].items():
            same_bits(value, both[1][name], f"step {step}, {name}, tokens={tokens}, {layer}")
        for a, b in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
            same_bits(a, b, f"step {step}, updated parameter")


CASES = list(itertools.product(DTYPES, FORMATS, ("max", "most_recent"), (True, False), (True, False)))


@pytest.mark.parametrize(("dtype", "fmt", "algorithm", "bias", "cached"), CASES)
def test_fp8_training(dtype: str, fmt: str, algorithm: str, bias: bool, cached: bool, same_bits) -> None:
    recipe = te.DelayedScaling(fp8_format=FORMATS[fmt], amax_history_len=4, amax_compute_algo=algorithm)
    layer = te.Linear(208, 112, bias=bias, params_dtype=DTYPES[dtype])
    train_both(layer, 77, DTYPES[dtype], recipe, same_bits, cached=cached)


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_activations_may_differ(dtype: str, params: torch.dtype, same_bits) -> None:
    layer = te.Linear(64, 48, params_dtype=params)
    train_both(layer, 33, DTYPES[dtype], te.DelayedScaling(margin=1), same_bits, steps=4)


SIZES = st.sampled_from([16, 32, 48, 80, 112, 128, 144, 272, 400, 528])


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 300]),
    in_features=SIZES,
    out_features=SIZES,
    dtype=st.sampled_from(list(DTYPES.values())),
    fmt=st.sampled_from(list(FORMATS.values())),
    bias=st.booleans(),
)
def test_random_shapes(
    tokens: int, in_features: int, out_features: int, dtype: torch.dtype, fmt: te.Format, bias: bool, same_bits
) -> None:
    layer = te.Linear(in_features, out_features, bias=bias, params_dtype=dtype)
    train_both(layer, tokens, dtype, te.DelayedScaling(fp8_format=fmt, amax_history_len=3), same_bits, steps=3)


@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"),
    [(1, 16, 16), (7, 16, 4096), (2048, 16, 48), (5, 4096, 16), (1024, 256, 512)],
)
def test_tall_and_wide(tokens: int, in_features: int, out_features: int, same_bits) -> None:
    layer = te.Linear(in_features, out_features, params_dtype=torch.bfloat16)
    train_both(layer, tokens, torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 16, 33, 130]),
    in_features=st.sampled_from([1, 8, 24, 64, 100, 264]),
    out_features=st.sampled_from([1, 8, 40, 77, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:twin..gemm.*:UserWarning")
def test_16_bits(tokens: int, in_features: int, out_features: int, dtype: torch.dtype, bias: bool, same_bits) -> None:
    layer = te.Linear(in_features, out_features, bias=bias, params_dtype=dtype)
    train_both(layer, tokens, dtype, None, same_bits, steps=2)


def test_no_tokens_at_all(same_bits) -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    train_both(layer, 0, torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


def test_special_values(same_bits) -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    other = copy.deepcopy(layer).to("cuda")
    x = numbers(5, (16, 64), torch.bfloat16)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3], x[4] = float("nan"), float("inf"), -float("inf"), -0.0, 1e-40
    outputs = []
    for module in (layer, other):
        inp = x.to(module.weight.device, copy=True).requires_grad_()
        with te.autocast(recipe=te.DelayedScaling()):
            y = module(inp)
        y.backward(torch.ones_like(y))
        outputs.append((y, inp.grad, module.weight.grad, module.fp8_meta["scaling_fwd"].amax_history))
    for a, b in zip(*outputs, strict=True):
        same_bits(a, b)


def test_checkpoint_changes_no_bit_on_the_gpu(same_bits) -> None:
    layer = te.Linear(64, 32, params_dtype=torch.bfloat16).to("cuda")
    other = copy.deepcopy(layer)
    for step in range(3):
        found = []
        for module, run in ((layer, lambda f, x: f(x)), (other, te.checkpoint)):
            x = numbers(step, (24, 64), torch.bfloat16, 1.0 + step).to("cuda").requires_grad_()
            with te.autocast(recipe=te.DelayedScaling()):
                y = run(module, x)
            y.backward(torch.ones_like(y))
            found.append((y, x.grad, module.weight.grad, module.fp8_meta["scaling_fwd"].amax_history))
        for a, b in zip(*found, strict=True):
            same_bits(a, b)


def test_a_training_step_replays_as_a_cuda_graph(same_bits) -> None:
    """Forward, backward and both scale updates are captured; replays equal eager steps on the CPU."""
    layer = te.Linear(64, 32, params_dtype=torch.bfloat16)
    gpu = copy.deepcopy(layer).to("cuda")
    recipe = te.DelayedScaling(amax_history_len=4)
    x, g = torch.zeros(24, 64, dtype=torch.bfloat16), torch.zeros(24, 32, dtype=torch.bfloat16)
    static_x, static_g = x.cuda().requires_grad_(), g.cuda()

    def step(module: te.Linear, inp: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=recipe):
            y = module(inp)
        y.backward(grad)
        return y

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(gpu, static_x, static_g)
            step(layer, x.requires_grad_(), g)  # the weight's scale has moved on both sides
    torch.cuda.current_stream().wait_stream(stream)
    gpu.zero_grad(set_to_none=True)
    static_x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_y = step(gpu, static_x, static_g)
    for i in range(4):
        x, g = numbers(i, (24, 64), torch.bfloat16, 1.0 + i), numbers(9 + i, (24, 32), torch.bfloat16, 0.1)
        layer.zero_grad(set_to_none=True)
        inp = x.clone().requires_grad_()
        y = step(layer, inp, g)
        with torch.no_grad():
            static_x.copy_(x)
            static_g.copy_(g)
            gpu.weight.grad.zero_()
            gpu.bias.grad.zero_()
            static_x.grad.zero_()
        graph.replay()
        same_bits(y, static_y, f"y, replay {i}")
        same_bits(inp.grad, static_x.grad, f"dx, replay {i}")
        same_bits(layer.weight.grad, gpu.weight.grad, f"dw, replay {i}")
        for key in ("scaling_fwd", "scaling_bwd"):
            same_bits(layer.fp8_meta[key].scale, gpu.fp8_meta[key].scale, f"{key}, replay {i}")
            same_bits(layer.fp8_meta[key].amax_history, gpu.fp8_meta[key].amax_history, f"{key}, replay {i}")


def test_two_streams_and_two_runs_give_the_same_bits(same_bits) -> None:
    layer = te.Linear(256, 512, params_dtype=torch.bfloat16).to("cuda")
    x = numbers(1, (200, 256), torch.bfloat16).to("cuda")
    runs = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()):
        module = copy.deepcopy(layer)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            inp = x.clone().requires_grad_()
            with te.autocast(recipe=te.DelayedScaling()):
                y = module(inp)
            y.backward(torch.ones_like(y))
        torch.cuda.synchronize()
        runs.append((y, inp.grad, module.weight.grad, module.bias.grad))
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            same_bits(a, b)


def test_initial_parameters_do_not_depend_on_the_device(same_bits) -> None:
    torch.manual_seed(11)
    cpu = te.Linear(64, 48)
    torch.manual_seed(11)
    gpu = optimized.Linear(64, 48)
    assert gpu.weight.device.type == "cuda"
    same_bits(cpu.weight, gpu.weight)


def test_checkpoints_are_interchangeable(same_bits) -> None:
    gpu = optimized.Linear(64, 48, params_dtype=torch.bfloat16)
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
        gpu(numbers(3, (16, 64), torch.bfloat16).to("cuda"))
    cpu = te.Linear(64, 48, params_dtype=torch.bfloat16)
    cpu.load_state_dict(gpu.state_dict())
    x = numbers(4, (16, 64), torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
        same_bits(cpu(x), gpu(x.to("cuda")))


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="inp is on cpu and the parameters are on cuda:0; one device"):
        optimized.Linear(16, 16)(torch.ones(2, 16))
