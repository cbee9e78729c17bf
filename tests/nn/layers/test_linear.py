"""`Linear` against the same steps written out with the readable model, and what a user may ask of it.

On an H200 it equals its deep copy on the CPU in every bit, over training steps.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared import training_pairs, unfused_step
from shared.linear_cases import DTYPES, RECIPES, numbers
from shared.training_pairs import train_both

import optimized
import reference as te
from reference.numbers import formats, tensor_core

GROWTH = (1.0, 4.0, 0.25, 1.0, 100.0, 1.0, 1e-3, 1.0)
DTYPE_NAMES = ("bf16", "fp16", "fp32")
FORMATS = {"hybrid": te.Format.HYBRID, "e4m3": te.Format.E4M3}

# With a bias and nothing cached, these are cases of `twin parity` (tests/recordings/test_parity.py).
OPTIONS = ((True, True), (False, True), (False, False))


class WrittenOut:
    """The FP8 layer with nothing but decode tables and single tensor-core steps."""

    def __init__(self, recipe: te.DelayedScaling, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype
        self.scale = {"x": 1.0, "w": 1.0, "g": 1.0}
        self.history: dict[str, list[float]] = {name: [] for name in self.scale}

    def cast(self, name: str, t: torch.Tensor) -> tuple[torch.Tensor, np.float32]:
        scale = np.float32(self.scale[name])
        fmt = formats.format_of(self.recipe.fp8_format.dtype(name != "g"))
        self.history[name].append(float(t.float().abs().max()))
        return formats.cast(t, fmt, float(scale)), np.float32(1) / scale

    def product(self, a: torch.Tensor, b: torch.Tensor, inv: np.float32, split: bool) -> torch.Tensor:
        """a · bᵀ, one instruction at a time."""
        total = torch.zeros(a.shape[0], b.shape[0])
        chain = None
        for k in range(0, a.shape[1], 32):
            if split and k % 128 == 0 and chain is not None:
                total, chain = total + chain, None
            chain = tensor_core.step(a[:, k : k + 32], b[:, k : k + 32], chain)
        assert chain is not None
        return (total + chain if split else chain) * torch.tensor(inv)

    def update(self, names: str) -> None:
        for name in names:
            window = self.history[name][-max(self.recipe.amax_history_len, 1) :]
            amax = max(window) if self.recipe.amax_compute_algo == "max" else window[-1]
            limit = self.recipe.fp8_format.fp8_max(name != "g") * 2.0**-self.recipe.margin
            if amax > 0:
                self.scale[name] = float(np.float32(limit) / np.float32(amax))

    def step(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (xq, xi), (wq, wi) = self.cast("x", x), self.cast("w", w)
        bias = b.to(torch.bfloat16 if self.dtype == torch.float32 else self.dtype).float()
        y = (self.product(xq, wq, np.float32(wi * xi), split=False) + bias).to(self.dtype)
        self.update("xw")
        gq, gi = self.cast("g", g)
        dx = self.product(gq, wq.t(), np.float32(gi * wi), split=True).to(self.dtype)
        dw = self.product(gq.t(), xq.t(), np.float32(gi * xi), split=True).to(self.dtype)
        self.update("g")
        return y, dx, dw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=["hybrid-max", "e4m3-recent"])
def test_fp8_training_steps_written_out(dtype: torch.dtype, recipe: te.DelayedScaling, same_bits) -> None:
    torch.manual_seed(1)
    layer = te.Linear(160, 48, params_dtype=torch.bfloat16)
    torch.nn.init.constant_(layer.bias, 0.37)
    written = WrittenOut(recipe, dtype)
    for step in range(4):
        x = (numbers(step, 21, 160) * (1 + step)).to(dtype).requires_grad_()
        g = (numbers(100 + step, 21, 48) * 10.0**-step).to(dtype)
        layer.zero_grad()
        with te.autocast(recipe=recipe):
            y = layer(x)
        y.backward(g)
        expected = written.step(x.detach(), layer.weight.detach(), layer.bias.detach(), g)
        same_bits(y, expected[0], f"y, step {step}")
        same_bits(x.grad, expected[1], f"dx, step {step}")
        same_bits(layer.weight.grad, expected[2].to(layer.weight.dtype), f"dw, step {step}")
        assert layer.fp8_meta["scaling_fwd"].scale[:2].tolist() == [written.scale["x"], written.scale["w"]]
        assert layer.fp8_meta["scaling_bwd"].scale[0].item() == written.scale["g"]
        with torch.no_grad():
            layer.weight.copy_(layer.weight - (layer.weight.grad * 0.01))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_16_bits(dtype: torch.dtype, bias: bool, same_bits) -> None:
    """Each result is one chain of k=16 steps, rounded once; against float64 it errs by an ulp of its size."""
    torch.manual_seed(2)
    layer = te.Linear(40, 24, bias=bias, params_dtype=torch.float32)
    if bias:
        torch.nn.init.normal_(layer.bias)
    x = numbers(3, 2, 5, 40).to(dtype).requires_grad_()
    g = numbers(4, 2, 5, 24).to(dtype)
    y = layer(x)
    y.backward(g)
    w, b = layer.weight.detach().to(dtype), layer.bias.detach().to(dtype) if bias else None
    rows, grads = x.detach().reshape(10, 40), g.reshape(10, 24)
    acc = tensor_core.gemm(rows, w)
    same_bits(y.reshape(10, 24), (acc + b.float() if b is not None else acc).to(dtype), "y")
    same_bits(x.grad.reshape(10, 40), tensor_core.gemm(grads, w.t().contiguous()).to(dtype), "dx")
    dw = tensor_core.gemm(grads.t().contiguous(), rows.t().contiguous()).to(dtype)
    same_bits(layer.weight.grad, dw.float(), "dw")
    exact = torch.nn.functional.linear(rows.double(), w.double(), None if b is None else b.double())
    # Rounding y costs half an ulp; 40 terms cut off at 2^-25 of the largest cost less than another 2^-18 of it.
    size = rows.double().abs() @ w.double().abs().t() + 1
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + size * 2.0**-18
    assert bool(((y.reshape(10, 24).double() - exact).abs() <= bound).all())


def test_fp32_outside_fp8_is_pytorchs_own_product() -> None:
    layer = te.Linear(24, 8)
    x = numbers(5, 3, 24).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert layer.weight.grad is not None


@settings(max_examples=20, deadline=None)
@given(
    tokens=st.sampled_from([0, 1, 7, 15, 16, 17, 33]),
    in_features=st.sampled_from([16, 48, 144]),
    out_features=st.sampled_from([16, 80]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_token_count(tokens: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
    """Padding tokens with zeros changes no bit of what the real tokens give."""
    layer = te.Linear(in_features, out_features, params_dtype=dtype)
    padded = te.Linear(in_features, out_features, params_dtype=dtype)
    padded.load_state_dict(layer.state_dict())
    rows = 48
    x, g = numbers(6, tokens, in_features).to(dtype), numbers(7, tokens, out_features).to(dtype)
    x_padded = torch.cat([x, x.new_zeros(rows - tokens, in_features)])
    g_padded = torch.cat([g, g.new_zeros(rows - tokens, out_features)])
    results = []
    for module, inp, grad in ((layer, x, g), (padded, x_padded, g_padded)):
        inp = inp.clone().requires_grad_()
        with te.autocast(recipe=RECIPES[0]):
            y = module(inp)
        y.backward(grad)
        results.append((y[:tokens], inp.grad[:tokens], module.weight.grad, module.bias.grad))
    for short, long in zip(*results, strict=True):
        assert torch.equal(short, long)


def test_shapes_and_strides() -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = numbers(8, 4, 6, 32).to(torch.bfloat16)
    for context in (te.autocast(enabled=False), te.autocast(recipe=RECIPES[0])):
        with context, torch.no_grad():
            y = layer(x)
            assert y.shape == (4, 6, 16)
            assert torch.equal(layer(x.transpose(0, 1)), y.transpose(0, 1))
            assert torch.equal(layer(x[1, 2]), y[1, 2])
            assert layer(x[:0]).shape == (0, 6, 16)


def test_only_what_is_needed_is_computed() -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    x = numbers(13, 8, 32).to(torch.bfloat16)
    for fp8 in (True, False):
        layer.weight.requires_grad_(False)
        layer.bias.requires_grad_(False)
        inp = x.clone().requires_grad_()
        with te.autocast(enabled=fp8, recipe=RECIPES[0]):
            layer(inp).sum().backward()
        assert inp.grad is not None
        assert layer.weight.grad is None
        layer.weight.requires_grad_(True)
        with te.autocast(enabled=fp8, recipe=RECIPES[0]):
            layer(x).sum().backward()
        assert layer.weight.grad is not None
        layer.weight.grad = None


def test_split_parameters_are_one_layer(same_bits) -> None:
    torch.manual_seed(4)
    split = te.Linear(32, 48, parameters_split={"query_": 16, "key": 32}, params_dtype=torch.bfloat16)
    assert [name for name, _ in split.named_parameters()] == ["query_weight", "key_weight", "query_bias", "key_bias"]
    whole = te.Linear(32, 48, params_dtype=torch.bfloat16)
    with torch.no_grad():
        whole.weight.copy_(torch.cat([split.query_weight, split.key_weight]))
        whole.bias.copy_(torch.cat([split.query_bias, split.key_bias]))
    x = numbers(14, 8, 32).to(torch.bfloat16)
    for layer in (split, whole):
        with te.autocast(recipe=RECIPES[0]):
            layer(x).sum().backward()
    same_bits(torch.cat([split.query_weight.grad, split.key_weight.grad]), whole.weight.grad)
    even = te.Linear(32, 48, parameters_split=("q", "k", "v"), bias=False)
    assert [tuple(p.shape) for p in even.parameters()] == [(16, 32)] * 3


def test_return_bias(same_bits) -> None:
    layer = te.Linear(32, 16, return_bias=True, params_dtype=torch.bfloat16)
    torch.nn.init.constant_(layer.bias, 2.0)
    x = numbers(15, 8, 32).to(torch.bfloat16)
    y, bias = layer(x)
    same_bits(y, tensor_core.gemm(x, layer.weight.detach()).to(torch.bfloat16))
    same_bits(bias, layer.bias)


def test_torch_autocast_decides_the_activation_dtype() -> None:
    layer = te.Linear(32, 16)
    x = numbers(19, 8, 32).requires_grad_()
    for fp8 in (False, True):
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=fp8, recipe=RECIPES[0]):
            y = layer(x)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert x.grad.dtype == torch.float32
        assert torch.equal(x.grad, x.grad.bfloat16().float()), "dx is a bf16 number, widened"


def test_initialisation_is_reproducible_and_transformer_engines() -> None:
    torch.manual_seed(5)
    a = te.Linear(256, 128)
    torch.manual_seed(5)
    b = te.Linear(256, 128)
    assert torch.equal(a.weight, b.weight)
    assert not torch.equal(a.weight, te.Linear(256, 128).weight)
    assert a.weight.std().item() == pytest.approx(0.023, rel=0.05)
    assert abs(a.weight.mean().item()) < 0.001
    assert not a.bias.any()
    c = te.Linear(16, 16, init_method=torch.nn.init.ones_, params_dtype=torch.float16)
    assert c.weight.dtype == torch.float16
    assert bool((c.weight == 1).all())
    d = te.Linear(16, 16, device="meta")
    assert d.weight.is_meta
    d.reset_parameters()
    assert d.weight.device.type == "cpu"


def test_a_tracker_forks_the_state_of_its_name() -> None:
    forked: list[str] = []

    class Tracker:
        @contextlib.contextmanager
        def fork(self, name: str = "its own") -> Iterator[None]:
            forked.append(name)
            yield

    te.Linear(16, 16, get_rng_state_tracker=Tracker)
    te.Linear(16, 16, get_rng_state_tracker=Tracker, rng_tracker_name="another", parameters_split=("a", "b"))
    assert forked == ["its own", "another", "another"]


def test_nan_and_inf_reach_the_output() -> None:
    layer = te.Linear(32, 16, bias=False, params_dtype=torch.bfloat16)
    x = numbers(20, 4, 32).to(torch.bfloat16)
    x[1, 3], x[2, 4] = float("nan"), float("inf")
    with torch.no_grad(), te.autocast(recipe=RECIPES[0]):
        y = layer(x)
    assert y[[1, 2]].isnan().all(), "a cast makes NaN of an infinity"
    assert y[[0, 3]].isfinite().all()
    assert layer.fp8_meta["scaling_fwd"].amax_history[0, 0] == float("inf"), "and is the amax"


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: te.Linear(0, 16), ValueError, "in_features=0; an int from 1"),
        (lambda: te.Linear(16, 16, params_dtype=torch.int8), TypeError, "params_dtype=torch.int8; float32"),
        (lambda: te.Linear(16, 16, tp_size=0), ValueError, "tp_size=0; an int from 1"),
        (lambda: te.Linear(16, 16, ub_overlap_ag=True), NotImplementedError, "ub_overlap_ag=True is not offered"),
        (lambda: te.Linear(16, 16, delay_wgrad_compute=1), TypeError, "delay_wgrad_compute=1; True and False are"),
        (
            lambda: te.Linear(16, 16, parallel_mode="both"),
            ValueError,
            "parallel_mode='both'; None or one of .'row', 'column'.",
        ),
        (lambda: te.Linear(16, 16, parameters_split={"q": 8}), ValueError, "sizes add up to out_features"),
        (lambda: te.Linear(16, 16, parameters_split=("q", "k", "v")), ValueError, "parameters_split="),
        (lambda: te.Linear(16, 16, parameters_split=()), ValueError, r"parameters_split=\(\)"),
    ],
)
def test_constructor_refusals(make: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        make()


@pytest.mark.parametrize(
    ("sizes", "x", "fp8", "error", "sentence"),
    [
        ((24, 16), torch.ones(2, 24), True, ValueError, "in_features=24 under FP8 autocast; a multiple of 16"),
        ((16, 24), torch.ones(2, 16), True, ValueError, "out_features=24 under FP8 autocast; a multiple of 16"),
        ((16, 16), torch.ones(2, 17), False, ValueError, r"inp has shape \[2, 17\]; \[..., 16\] is accepted"),
        ((16, 16), torch.tensor(1.0), False, ValueError, r"inp has shape \[\]"),
        ((16, 16), torch.ones(2, 16).double(), True, TypeError, "inp has dtype torch.float64; float32, bfloat16"),
        (
            (16, 16),
            torch.ones(2, 16, device="meta"),
            True,
            RuntimeError,
            "inp is on meta, the parameters on cpu",
        ),
        ((16, 16), [1.0] * 16, False, TypeError, "a tensor is accepted"),
    ],
)
def test_forward_refusals(sizes: tuple[int, int], x: Any, fp8: bool, error: type[Exception], sentence: str) -> None:
    layer = te.Linear(*sizes)
    with pytest.raises(error, match=sentence), te.autocast(enabled=fp8, recipe=RECIPES[0]):
        layer(x)


def test_fp8_results_are_not_offered() -> None:
    with pytest.raises(NotImplementedError, match="fp8_output=True is not offered; False and None are accepted"):
        te.Linear(16, 16)(torch.ones(2, 16), fp8_output=True)


def test_ops_refuse_to_record_gradients() -> None:
    x = torch.ones(2, 16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"twin::cast has no derivative of its own"):
        torch.ops.twin.cast(x, torch.ones(1), None, 0, torch.float8_e4m3fn)


SECOND: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "of a product": lambda f, x: torch.autograd.grad(f(x).pow(2).sum(), x, create_graph=True),
    "of a sum, whose gradient needs none": lambda f, x: torch.autograd.grad(f(x).sum(), x, create_graph=True),
    "backward": lambda f, x: f(x).sum().backward(create_graph=True),
    "hessian": lambda f, x: torch.autograd.functional.hessian(lambda t: f(t).sum(), x),
    "product with a hessian": lambda f, x: torch.autograd.functional.hvp(lambda t: f(t).sum(), x, x),
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_are_refused(how: str, fp8: bool) -> None:
    layer = te.Linear(16, 16, params_dtype=torch.bfloat16)
    x = torch.ones(2, 16, dtype=torch.bfloat16, requires_grad=True)
    with (
        te.autocast(enabled=fp8),
        pytest.raises(RuntimeError, match="create_graph=True: layers have no second derivative"),
    ):
        SECOND[how](layer, x)
    if fp8:
        assert not layer.fp8_meta["scaling_bwd"].amax_history.any(), "no amax was taken"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_long_products_accumulate_as_they_are_to(dtype: torch.dtype) -> None:
    """y in one chain; dx and dw in chains of 128, which no product of the tests above is longer than."""
    torch.manual_seed(6)
    layer = te.Linear(160, 176, params_dtype=dtype)
    torch.nn.init.normal_(layer.bias)
    for i in range(2):
        x, g = (numbers(40 + i, 150, 160) * 3).to(dtype), (numbers(50 + i, 150, 176) / 100).to(dtype)
        if i == 0:
            unfused_step.run(layer, x, g)
    step = unfused_step.Step(layer, dtype)
    xq, wq, gq = step.cast(x, 0), step.cast(layer.weight.detach(), 1), step.grad(g, 0)
    step.check(
        unfused_step.run(layer, x, g),
        {
            "output 0": step.product(xq, wq, "fast", layer.bias.detach()),
            "dx": step.product(gq, wq.t(), "split"),
            "dweight": step.product(gq.t(), xq.t(), "split"),
            "dbias": unfused_step.twin.dbias(g),
        },
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("bias", "cached"), OPTIONS)
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
def test_fp8_training(dtype: torch.dtype, fmt: str, algorithm: str, bias: bool, cached: bool, same_bits) -> None:
    recipe = te.DelayedScaling(fp8_format=FORMATS[fmt], amax_history_len=4, amax_compute_algo=algorithm)
    layer = te.Linear(208, 112, bias=bias, params_dtype=dtype)
    train_both(layer, (77, 208), dtype, recipe, same_bits, growth=GROWTH, cached=cached)


@pytest.mark.gpu
@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES)
def test_parameters_and_activations_may_differ(dtype: torch.dtype, params: torch.dtype, same_bits) -> None:
    layer = te.Linear(64, 48, params_dtype=params)
    train_both(layer, (33, 64), dtype, te.DelayedScaling(margin=1), same_bits, steps=4)


SIZES = st.sampled_from([16, 32, 48, 80, 112, 128, 144, 272, 400, 528])


@pytest.mark.gpu
@settings(max_examples=40, deadline=None)
@given(
    tokens=st.sampled_from([1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 127, 129, 300]),
    in_features=SIZES,
    out_features=SIZES,
    dtype=st.sampled_from(DTYPES),
    fmt=st.sampled_from(list(FORMATS.values())),
    bias=st.booleans(),
)
def test_random_shapes(
    tokens: int, in_features: int, out_features: int, dtype: torch.dtype, fmt: te.Format, bias: bool, same_bits
) -> None:
    layer = te.Linear(in_features, out_features, bias=bias, params_dtype=dtype)
    recipe = te.DelayedScaling(fp8_format=fmt, amax_history_len=3)
    train_both(layer, (tokens, in_features), dtype, recipe, same_bits, steps=3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"),
    [(1, 16, 16), (7, 16, 4096), (2048, 16, 48), (5, 4096, 16), (1024, 256, 512)],
)
def test_tall_and_wide(tokens: int, in_features: int, out_features: int, same_bits) -> None:
    layer = te.Linear(in_features, out_features, params_dtype=torch.bfloat16)
    train_both(layer, (tokens, in_features), torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


@pytest.mark.gpu
@settings(max_examples=30, deadline=None)
@given(
    tokens=st.sampled_from([1, 7, 16, 33, 130]),
    in_features=st.sampled_from([1, 8, 24, 64, 100, 264]),
    out_features=st.sampled_from([1, 8, 40, 77, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    bias=st.booleans(),
)
@pytest.mark.filterwarnings("ignore:twin..gemm.*:UserWarning")
def test_random_shapes_in_16_bits(
    tokens: int, in_features: int, out_features: int, dtype: torch.dtype, bias: bool, same_bits
) -> None:
    layer = te.Linear(in_features, out_features, bias=bias, params_dtype=dtype)
    train_both(layer, (tokens, in_features), dtype, None, same_bits, steps=2)


@pytest.mark.gpu
def test_no_tokens_at_all(same_bits) -> None:
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    train_both(layer, (0, 32), torch.bfloat16, te.DelayedScaling(), same_bits, steps=2)


@pytest.mark.gpu
def test_special_values(same_bits) -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    other = copy.deepcopy(layer).to("cuda")
    x = training_pairs.numbers(5, (16, 64), torch.bfloat16)
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


@pytest.mark.gpu
def test_two_streams_and_two_runs_give_the_same_bits(same_bits) -> None:
    layer = te.Linear(256, 512, params_dtype=torch.bfloat16).to("cuda")
    x = training_pairs.numbers(1, (200, 256), torch.bfloat16).to("cuda")
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


@pytest.mark.gpu
def test_initial_parameters_do_not_depend_on_the_device(same_bits) -> None:
    torch.manual_seed(11)
    cpu = te.Linear(64, 48)
    torch.manual_seed(11)
    gpu = optimized.Linear(64, 48)
    assert gpu.weight.device.type == "cuda"
    same_bits(cpu.weight, gpu.weight)


@pytest.mark.gpu
def test_checkpoints_are_interchangeable(same_bits) -> None:
    gpu = optimized.Linear(64, 48, params_dtype=torch.bfloat16)
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
        gpu(training_pairs.numbers(3, (16, 64), torch.bfloat16).to("cuda"))
    cpu = te.Linear(64, 48, params_dtype=torch.bfloat16)
    cpu.load_state_dict(gpu.state_dict())
    x = training_pairs.numbers(4, (16, 64), torch.bfloat16)
    with torch.no_grad(), te.autocast(recipe=te.DelayedScaling(amax_history_len=4)):
        same_bits(cpu(x), gpu(x.to("cuda")))


@pytest.mark.gpu
def test_mixed_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="inp is on cpu, the parameters on cuda:0; one device"):
        optimized.Linear(16, 16)(torch.ones(2, 16))
