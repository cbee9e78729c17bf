"""`twin::adam` and `FusedAdam`: each rounding, master weights, weights in FP8, state, and what is refused.

On an H200 the op equals its CPU definition in every bit, and so does training with `FusedAdam`.
"""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import awkward
from shared.bits import assert_same_bits

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from optimized.ops.optimizers.adam import CAPACITIES
from reference.float8.float8_tensor import Float8Tensor
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
KINDS = {
    "fp32": (torch.float32, torch.float32, False),
    "bf16": (BF16, BF16, False),
    "fp16": (torch.float16, torch.float16, False),
    "bf16, masters": (BF16, torch.float32, False),
    "bf16, masters and copies": (BF16, torch.float32, True),
    "fp16, masters and copies": (torch.float16, torch.float32, True),
}


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def r(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded to fp32 and back: an operation on fp32 numbers in float64, then this, is its fp32 rounding."""
    return x.float().double()


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize(
    ("wide", "master"), [(torch.float32, False), (BF16, False), (BF16, True), (torch.float16, True)]
)
def test_every_operation_is_rounded_once_in_the_order_that_is_written(
    wide: torch.dtype, master: bool, decoupled: bool
) -> None:
    lr, b1, b2, eps, decay = (torch.tensor(x).double() for x in (1e-2, 0.9, 0.999, 1e-8, 0.1))
    grads = [numbers(i, (33, 5), wide) for i in range(2)]
    params = [numbers(4 + i, (33, 5), torch.float32 if master else wide) for i in range(2)]
    moments = [[numbers(8, (33, 5)) / 8] * 2, [numbers(9, (33, 5)).abs() / 8] * 2]
    moments = [[x.clone() for x in part] for part in moments]
    rounded = [torch.zeros(33, 5, dtype=wide) for _ in range(2)] if master else []
    before = copy.deepcopy((grads, params, moments))
    c1, c2 = correction(0.9, 3), correction(0.999, 3)
    twin.adam(grads, params, *moments, rounded, 1e-2, 0.9, 0.999, 1e-8, 0.1, c1, c2, decoupled)
    d1, d2 = (torch.tensor(c).double() for c in (c1, c2))
    for i in range(2):
        g, p, m, v = (x.double() for x in (before[0][i], before[1][i], before[2][0][i], before[2][1][i]))
        g = g if decoupled else r(g + r(decay * p))
        m = r(r(b1 * m) + r(r(1 - b1) * g))
        v = r(r(b2 * v) + r(r(r(1 - b2) * g) * g))
        u = r(r(m / d1) / r(r(torch.sqrt(r(v / d2))) + eps))
        u = r(u + r(decay * p)) if decoupled else u
        p = r(p - r(lr * u)).float()
        assert_same_bits(moments[0][i], m.float(), "m")
        assert_same_bits(moments[1][i], v.float(), "v")
        assert_same_bits(params[i], p if master else p.to(wide), "p")
        if master:
            assert_same_bits(rounded[i], p.to(wide), "the rounded copy")


def test_corrections() -> None:
    for beta in (0.0, 0.5, 0.9, 0.999):
        for step in (1, 2, 3, 7, 1000, 12345):
            assert correction(beta, step) == pytest.approx(1 - beta**step, rel=1e-12)
    assert correction(0.5, 3) == 0.875


@pytest.mark.parametrize("adamw", [False, True])
def test_it_is_torchs_adam_but_for_roundings(adamw: bool) -> None:
    kind = torch.optim.AdamW if adamw else torch.optim.Adam
    ours, theirs = (torch.nn.Parameter(numbers(1, (40, 16))) for _ in range(2))
    optimizers = [
        te.optimizers.FusedAdam([ours], lr=1e-2, weight_decay=0.1, adam_w_mode=adamw),
        kind([theirs], lr=1e-2, weight_decay=0.1),
    ]
    for step in range(20):
        for p, optimizer in zip((ours, theirs), optimizers, strict=True):
            p.grad = numbers(2 + step, (40, 16))
            assert optimizer.step(lambda: 3.5) == 3.5
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def layer(quantized: bool, preserve: bool = True) -> Any:
    torch.manual_seed(0)
    with te.quantized_model_init(
        enabled=quantized, recipe=RECIPE, preserve_high_precision_init_val=quantized and preserve
    ):
        return te.LayerNormMLP(32, 64, params_dtype=BF16)


def step(module: Any, optimizer: torch.optim.Optimizer, i: int) -> torch.Tensor:
    optimizer.zero_grad()
    with te.autocast(recipe=RECIPE):
        y = module(numbers(i, (24, 32), BF16))
    y.backward(numbers(100 + i, (24, 32), BF16, 0.1))
    optimizer.step()
    return y.detach()


def test_weights_in_fp8_are_the_casts_of_their_masters() -> None:
    module = layer(quantized=True)
    optimizer = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
    drawn = module.fc1_weight.get_high_precision_init_val().float()
    for i in range(4):
        step(module, optimizer, i)
        for p in module.parameters():
            master = optimizer.state[p]["master_param"]
            assert master.dtype == torch.float32
            if not isinstance(p, Float8Tensor):
                assert_same_bits(p, master.to(BF16))
                continue
            state = p._kept.state()
            scales = state.scale.clone()
            codes, transposed, inverse = twin.cast_transpose(master, scales, None, p._kept.column, torch.float8_e4m3fn)
            for a, b in ((p.codes, codes), (p.codes_t, transposed), (p._scale_inv, inverse)):
                assert_same_bits(a, b, f"step {i}")
            assert state.amax_history[0, p._kept.column] == master.abs().max()
        if i == 0:
            moved = (optimizer.state[module.fc1_weight]["master_param"] - drawn).abs().max()
            assert 0 < moved < 0.011, "the master starts as what was drawn"
    other = layer(quantized=True, preserve=False)
    optimizer = te.optimizers.FusedAdam(other.parameters(), lr=0.0, master_weights=True)
    before = other.fc1_weight.dequantize(dtype=torch.float32)
    step(other, optimizer, 0)
    assert torch.equal(optimizer.state[other.fc1_weight]["master_param"], before), "as the weight reads"


def test_it_trains_with_the_bits_of_fp32_weights_that_are_cast_in_each_forward() -> None:
    torch.manual_seed(0)
    plain = te.LayerNormMLP(32, 64)
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=True):
        kept = te.LayerNormMLP(32, 64)
    optimizers = [te.optimizers.FusedAdam(m.parameters(), lr=1e-2, master_weights=True) for m in (plain, kept)]
    for i in range(9):
        a, b = (step(m, o, i) for m, o in zip((plain, kept), optimizers, strict=True))
        assert_same_bits(a, b, f"step {i}")


@pytest.mark.parametrize("quantized", [False, True])
def test_state_goes_through_a_checkpoint(quantized: bool) -> None:
    one = layer(quantized)
    optimizer = te.optimizers.FusedAdam(one.parameters(), lr=1e-2, master_weights=True)
    for i in range(3):
        step(one, optimizer, i)
    buffer = io.BytesIO()
    torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    other = layer(quantized)
    other.load_state_dict(found["model"])
    resumed = te.optimizers.FusedAdam(other.parameters(), lr=1.0, master_weights=True)
    resumed.load_state_dict(found["optimizer"])
    assert {x.dtype for state in resumed.state.values() for x in state.values()} == {torch.float32}
    for i in range(3, 6):
        assert_same_bits(step(one, optimizer, i), step(other, resumed, i), f"step {i}")


def test_what_has_no_gradient_is_left_alone() -> None:
    a, b = (torch.nn.Parameter(numbers(i, (4, 4), BF16)) for i in range(2))
    before = b.detach().clone()
    a.grad = numbers(3, (4, 4), BF16).t()
    te.optimizers.FusedAdam([{"params": [a], "lr": 0.5}, {"params": [b]}]).step()
    assert torch.equal(b, before)
    assert (a.detach() - numbers(0, (4, 4), BF16)).abs().max() > 0.1, "the group's own rate"


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"amsgrad": True}, NotImplementedError, "FusedAdam: amsgrad=True is not offered; False is accepted"),
        ({"lr": -1.0}, ValueError, "lr=-1.0; a number >= 0"),
        ({"lr": torch.ones(1)}, TypeError, r"lr=tensor\(\[1.\]\); a number"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas=\(0.9, 1.0\); two numbers, 0 <= beta < 1"),
    ],
)
def test_refusals(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        te.optimizers.FusedAdam([torch.nn.Parameter(torch.ones(2))], **change)


def test_fp8_without_masters_and_sparse_gradients_are_refused() -> None:
    module = layer(quantized=True)
    optimizer = te.optimizers.FusedAdam(module.parameters())
    with pytest.raises(ValueError, match="parameter 2 of group 0 is kept in FP8; master_weights=True is accepted"):
        step(module, optimizer, 0)
    whole, sparse = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    whole.grad, sparse.grad = torch.ones(3, 2), torch.ones(3, 2).to_sparse()
    optimizer = te.optimizers.FusedAdam([{"params": [whole]}, {"params": [sparse]}])
    with pytest.raises(TypeError, match="gradient is sparse; dense"):
        optimizer.step()
    assert torch.equal(whole, torch.ones(3, 2))
    assert not optimizer.state
    assert all("step" not in group for group in optimizer.param_groups)


def ones(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 2)) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype)]


@pytest.mark.parametrize(
    ("lists", "error", "sentence"),
    [
        ((ones(), [], ones(), ones(), []), ValueError, "params must have 1 entries, one for each of grads; got 0"),
        ((ones(torch.float64), ones(), ones(), ones(), []), TypeError, r"grads\[0\] is torch.float64; float32,"),
        ((ones(BF16), ones(torch.float16), ones(), ones(), []), TypeError, "torch.bfloat16 and float32 are accepted"),
        ((ones(BF16), ones(BF16), ones(), ones(), ones(BF16)), TypeError, "masters in float32 are accepted"),
        ((ones(BF16), ones(), ones(BF16), ones(), []), ValueError, r"exp_avgs\[0\] must be contiguous torch.float32"),
        ((ones(), ones(), ones(), ones(shape=(2, 4)), []), ValueError, r"exp_avg_sqs\[0\] must be .* \[4, 2\] on cpu"),
        ((ones(), ones(), ones(), [torch.ones(2, 4).t()], []), ValueError, r"strides \(1, 4\)"),
    ],
)
def test_refusals_of_the_op(lists: Callable[..., Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        twin.adam(*lists, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 1.0, True)


def compare(
    sizes: list[int], kind: str, decoupled: bool, offset: int = 0, special: bool = False, seed: int = 0
) -> None:
    """Three steps of tensors that begin `offset` elements after a multiple of 16 bytes."""
    wide, param, copies = KINDS[kind]
    sides = []
    for device in ("cpu", "cuda"):
        lists: list[list[torch.Tensor]] = [[], [], [], [], []]
        for i, size in enumerate(sizes):
            for j, dtype in enumerate((wide, param, torch.float32, torch.float32, wide)):
                x = awkward(seed + 5 * i + j, size, dtype, special and j < 2)
                room = torch.zeros(size + offset, dtype=dtype, device=device)[offset:]
                lists[j].append(room.copy_(x.abs() if j == 3 else x))
        grads, params, first, second, rounded = lists
        for step in (1, 2, 3):
            scalars = (1e-2, 0.9, 0.999, 1e-8, 0.1, correction(0.9, step), correction(0.999, step))
            twin.adam(grads, params, first, second, rounded if copies else [], *scalars, decoupled)
        sides.append([x for part in lists for x in part])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"{kind}, tensor {i % len(sizes)} of list {i // len(sizes)}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, decoupled: bool) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 70001], kind, decoupled)
    compare([2049, 3], kind, decoupled, special=True)


@pytest.mark.gpu
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    kind=st.sampled_from(list(KINDS)),
    decoupled=st.booleans(),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], kind: str, decoupled: bool, offset: int, seed: int) -> None:
    compare(sizes, kind, decoupled, offset, True, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], "bf16, masters and copies", True)


@pytest.mark.gpu
@pytest.mark.parametrize("quantized", [False, True], ids=["16-bit weights", "FP8 weights"])
def test_training_has_the_bits_of_a_cpu(quantized: bool) -> None:
    recipe = te.DelayedScaling(amax_history_len=4)
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        layer = te.TransformerLayer(64, 128, 4, fuse_qkv_params=True, params_dtype=BF16)
    pair = (layer, copy.deepcopy(layer).to("cuda"))
    optimizers = [te.optimizers.FusedAdam(m.parameters(), 1e-2, weight_decay=0.1, master_weights=True) for m in pair]
    for step in range(9):
        x0 = awkward(step, 33 * 2 * 64, BF16, False).view(33, 2, 64)
        seen = []
        for module, optimizer in zip(pair, optimizers, strict=True):
            x = x0.to(next(module.parameters()).device)
            optimizer.zero_grad()
            torch.manual_seed(step)  # of the masks
            with te.autocast(recipe=recipe):
                y = module(x)
            y.backward(torch.full_like(y, 0.01))
            optimizer.step()
            found = {"y": y}
            for name, p in module.named_parameters():
                parts = (p.codes, p.codes_t, p._scale_inv) if isinstance(p, Float8Tensor) else (p,)
                found |= {f"{name}.{i}": part.detach().clone() for i, part in enumerate(parts)}
                found |= {f"{name}.{key}": value.clone() for key, value in optimizer.state[p].items()}
            seen.append(found)
        for name, value in seen[0].items():
            assert_same_bits(value, seen[1][name], f"step {step}, {name}")
