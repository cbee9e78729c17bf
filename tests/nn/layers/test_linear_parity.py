"""The claim: on an H200, `Linear` equals its deep copy on the CPU in every bit, over training steps."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.training_pairs import numbers, train_both

import optimized
import reference as te

pytestmark = pytest.mark.gpu

GROWTH = (1.0, 4.0, 0.25, 1.0, 100.0, 1.0, 1e-3, 1.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}


# With a bias and nothing cached, these are cases of `twin parity` (tests/recordings/test_parity.py).
OPTIONS = ((True, True), (False, True), (False, False))


@pytest.mark.parametrize(("bias", "cached"), OPTIONS)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_training(dtype: str, fmt: str, algorithm: str, bias: bool, cached: bool, same_bits) -> None:
    recipe = te.DelayedScaling(fp8_format=FORMATS[fmt], amax_history_len=4, amax_compute_algo=algorithm)
    layer = te.Linear(208, 112, bias=bias, params_dtype=DTYPES[dtype])
    train_both(layer, (77, 208), DTYPES[dtype], recipe, same_bits, growth=GROWTH, cached=cached)


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_and_activations_may_differ(dtype: str, params: torch.dtype, same_bits) -> None:
    layer = te.Linear(64, 48, params_dtype=params)
    train_both(layer, (33, 64), DTYPES[dtype], te.DelayedScaling(margin=1), same_bits, steps=4)


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
    recipe = te.DelayedScaling(fp8_format=fmt, amax_history_len=3)
    train_both(layer, (tokens, in_features), dtype, recipe, same_bits, steps=3)


@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"),
    [(1, 16, 16), (7, 16, 4096), (2048, 16, 48), (5, 4096, 16), (1024, 256, 512)],
)
def test_tall_and_wide(tokens: int, in_features: int, out_features: int, same_bits) -> None:
    layer = te.Linear(in_features, out_features, params_dtype=torch.bfloat16)
    train_both(layer, (tokens, in_features), torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


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
    train_both(layer, (tokens, in_features), dtype, None, same_bits, steps=2)


def test_no_tokens_at_all(same_bits) -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    train_both(layer, (0, 32), torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


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
    with pytest.raises(RuntimeError, match="inp is on cpu, the parameters on cuda:0; one device"):
        optimized.Linear(16, 16)(torch.ones(2, 16))
