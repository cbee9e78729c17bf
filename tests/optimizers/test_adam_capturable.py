"""`FusedAdam(capturable=True)`, `twin::adam_control`, `twin::adam_capturable`, and how they take a scaler's scale."""

import copy
import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shared.adam_parameters import (
    BF16,
    FusedAdam,
    assert_unchanged,
    everything,
    numbers,
    parameter,
    parameters,
    through_a_file,
    train,
)
from shared.bits import assert_same_bits

import reference as te
from reference.ops.optimizers.adam import correction

twin = torch.ops.twin
FP16, FP32 = torch.float16, torch.float32
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    "masters": {"master_weights": True, "weight_decay": 0.1},
    "bf16, masters, L2": {
        **{"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weights": True},
        **{"adam_w_mode": False, "weight_decay": 0.1, "bias_correction": False},
    },
}


def one(value: float, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.tensor([value], dtype=dtype)


@pytest.mark.parametrize("scale", [None, 1.0, 3.0, 65536.0, 0.1])
@pytest.mark.parametrize("found_inf", [None, 0.0, 1.0, 2.0])
def test_a_control_has_the_numbers_of_a_step(scale: float | None, found_inf: float | None) -> None:
    step = torch.tensor([6], dtype=torch.int32)
    given = [None if x is None else one(x) for x in (scale, found_inf)]
    control = twin.adam_control(step, one(0.3).reshape(()), *given, 0.9, 0.999, True)
    skip = bool(found_inf)
    assert step.item() == 6 + (not skip)
    inverse = np.float32(1 / float(np.float32(scale))) if scale else 1
    expected = [np.float32(0.3), correction(0.9, int(step)), correction(0.999, int(step)), inverse, skip]
    assert_same_bits(control, torch.tensor(np.array(expected, np.float32)))
    assert_same_bits(twin.adam_control(step, one(0.3), *given, 0.9, 0.999, False)[1:3], torch.ones(2))


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_trains_with_the_bits_of_numbers_on_the_host(name: str, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizers = [FusedAdam(ours, 0.1, capturable=True, **OPTIONS[name]), FusedAdam(theirs, 0.1, **OPTIONS[name])]
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in optimizers]
    for step in range(4):
        for params, optimizer, scheduler in zip((ours, theirs), optimizers, schedulers, strict=True):
            train(params, optimizer, range(step, step + 1))
            scheduler.step()
    for p, q in zip(ours, theirs, strict=True):
        assert_same_bits(p, q)
        for part, x in optimizers[1].state[q].items():
            assert_same_bits(optimizers[0].state[p][part], x, part)
    group = optimizers[0].param_groups[0]
    assert (group["step"].dtype, group["step"].item()) == (torch.int32, 4)
    assert (group["lr"].dtype, group["lr"].shape) == (FP32, ())
    assert group["lr"].item() == np.float32(0.1) * 0.5**4


def test_a_rate_that_is_a_tensor_is_read_in_each_step() -> None:
    ours, theirs = parameter(), parameter()
    rate = torch.tensor(0.1)
    optimizers = [FusedAdam([ours], rate, capturable=True), FusedAdam([theirs], 0.1)]  # type: ignore[arg-type]
    for value in (0.1, 0.7):
        rate.fill_(value)
        optimizers[1].param_groups[0]["lr"] = value
        for optimizer in optimizers:
            optimizer.step()
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "weights_only file"])
@pytest.mark.parametrize("name", OPTIONS)
def test_state_keeps_every_bit(name: str, way: Callable[[Any], Any]) -> None:
    params = parameters(BF16)
    optimizer = FusedAdam(params, 0.1, capturable=True, **OPTIONS[name])
    train(params, optimizer, range(3))
    saved = way(optimizer.state_dict())
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdam(copies, 7.0, capturable=True, **OPTIONS[name])
    other.load_state_dict(saved)
    rate, step = (saved["param_groups"][0][key].clone() for key in ("lr", "step"))
    for one_, optim in ((params, optimizer), (copies, other)):
        train(one_, optim, range(3, 5))
    for p, q in zip(params, copies, strict=True):
        assert_same_bits(p, q)
    assert_same_bits(saved["param_groups"][0]["lr"], rate)
    assert_same_bits(saved["param_groups"][0]["step"], step, "nothing is shared with what was loaded")
    host = FusedAdam(parameters(BF16), 0.1, **OPTIONS[name])
    train(host.param_groups[0]["params"], host, range(1))
    other.load_state_dict(host.state_dict())
    assert_same_bits(other.param_groups[0]["step"], torch.tensor([1], dtype=torch.int32))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(copied: Callable[[Any], Any]) -> None:
    optimizer = FusedAdam([parameter()], 0.1, capturable=True)
    optimizer.step()
    other = copied(optimizer)
    p, q = (x.param_groups[0]["params"][0] for x in (optimizer, other))
    q.grad = p.grad.clone()
    for x in (optimizer, other):
        x.step()
    assert_same_bits(p, q)
    assert other._step_supports_amp_scaling


# --- scalers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [4.0, 3.0, 65536.0, 0.7])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_torchs_unscaling_is_one_rounding(dtype: torch.dtype, scale: float) -> None:
    """So what a scaler hands to an optimizer that it unscales for has defined bits."""
    p = parameter((40, 30), dtype)
    grad = p.grad.clone()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    if dtype == FP16:
        with pytest.raises(ValueError, match="FP16"):  # torch wants fp32 gradients there
            scaler.unscale_(FusedAdam([p]))
        return
    scaler.unscale_(FusedAdam([p]))
    inverse = np.float32(1 / float(np.float32(scale)))
    assert_same_bits(p.grad, torch.from_numpy(grad.float().numpy() * inverse).to(dtype))


def scaled_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """A scaler's step. torch warns that one day it will hand its scale over in another way."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)
        scaler.step(optimizer)


@pytest.mark.parametrize("scale", [4.0, 3.0])
@pytest.mark.parametrize("clipped", [False, True])
def test_fp32_gradients_are_unscaled_with_torchs_bits(clipped: bool, scale: float) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [FusedAdam(ours, 0.1, capturable=True), FusedAdam(theirs, 0.1)]
    for params, optimizer in zip((ours, theirs), optimizers, strict=True):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        scaler.scale(torch.ones(()))
        for step in range(5):
            for i, p in enumerate(params):
                p.grad = numbers(10 * step + i, tuple(p.shape)) * scaler.get_scale()
            if step == 2:
                params[1].grad[0] = math.inf
            if clipped:
                scaler.unscale_(optimizer)
                te.optimizers.clip_grad_norm_(params, 0.5)
            scaled_step(scaler, optimizer)
            scaler.update()
        assert scaler.get_scale() == scale * 2 * 0.5 * 2
    for p, q in zip(ours, theirs, strict=True):
        assert_same_bits(p, q)
        assert_same_bits(p.grad, q.grad, "they are unscaled in memory, too")
    assert optimizers[0].param_groups[0]["step"].item() == optimizers[1].param_groups[0]["step"] == 4


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_16_bit_gradients_are_unscaled_in_fp32(dtype: torch.dtype) -> None:
    ours, theirs = parameter(dtype=dtype), parameter(dtype=FP32)
    theirs.data = ours.detach().float()
    grad = ours.grad.clone()
    inverse = np.float32(1 / 3.0)
    theirs.grad = torch.from_numpy(grad.float().numpy() * inverse)
    optimizer = FusedAdam([ours], 0.1, capturable=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=3.0)
    scaler.scale(torch.ones(()))
    scaled_step(scaler, optimizer)
    FusedAdam([theirs], 0.1).step()
    assert_same_bits(ours, theirs.detach().to(dtype))
    assert_same_bits(ours.grad, theirs.grad.to(dtype))


def test_a_skipped_step_changes_nothing() -> None:
    p = parameter()
    optimizer = FusedAdam([p], 0.1, capturable=True)
    optimizer.step()
    before, grad = everything(optimizer), p.grad.clone()
    optimizer.found_inf, optimizer.grad_scale = one(1.0), one(2.0)  # as torch.optim's fused optimizers are told
    optimizer.step()
    assert_unchanged(before, optimizer)
    assert_same_bits(p.grad, grad)
    optimizer.found_inf = one(0.0)
    optimizer.step()
    assert_same_bits(p.grad, grad / 2)
    assert optimizer.param_groups[0]["step"].item() == 2


def test_a_gradient_that_is_not_contiguous_is_unscaled_where_it_lies() -> None:
    p = parameter()
    grad = p.grad.clone()
    p.grad = grad.t().contiguous().t()
    optimizer = FusedAdam([p], 0.1, capturable=True)
    optimizer.grad_scale = one(4.0)
    optimizer.step()
    assert_same_bits(p.grad.contiguous(), grad / 4)


def fp8_weight() -> torch.nn.Parameter:
    with te.quantized_model_init(recipe=te.DelayedScaling()):
        weight: Any = te.Linear(16, 16, params_dtype=BF16).weight
    weight.grad = numbers(3, (16, 16), BF16)
    return weight  # type: ignore[no-any-return]


def test_what_cannot_be_captured_is_refused() -> None:
    optimizer = FusedAdam([{"params": [parameter()]}, {"params": [fp8_weight()]}], capturable=True, master_weights=True)
    before = everything(optimizer)
    with pytest.raises(NotImplementedError, match="parameter 0 of group 1 is kept in FP8; with capturable=True one in"):
        optimizer.step()
    assert_unchanged(before, optimizer)
    for options in ({}, {"capturable": True, "use_decoupled_grad": True}):
        optimizer = FusedAdam([parameter()], **options)  # type: ignore[arg-type]
        with pytest.raises(NotImplementedError, match=r"grad_scaler=.* is not offered; None is accepted"):
            optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    shared = torch.ones(2, 12)
    a, b = (torch.nn.Parameter(torch.zeros(12)) for _ in range(2))
    a.grad = b.grad = shared[0]
    with pytest.raises(ValueError, match="the gradient of parameter 0 of group 0 and the gradient of parameter 1 of"):
        FusedAdam([a, b], capturable=True).step()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lr": 0.1}, "lr=0.1 in group 0; with capturable=True a tensor of one number in torch.float32 is accepted"),
        ({"lr": torch.ones(2)}, r"lr=torch.float32 \[2\] in group 0; with capturable=True"),
        ({"lr": torch.ones((), dtype=torch.float64)}, r"lr=torch.float64 \[\] in group 0"),
        ({"step": 3}, "step=3 in group 0; with capturable=True a tensor of one number in torch.int32"),
        ({"step": torch.ones(1)}, r"step=torch.float32 \[1\] in group 0"),
    ],
)
def test_numbers_that_were_changed_are_checked_before_a_step(change: dict[str, Any], sentence: str) -> None:
    optimizer = FusedAdam([parameter()], capturable=True)
    before = optimizer.param_groups[0]["params"][0].detach().clone()
    optimizer.param_groups[0].update(change)
    with pytest.raises(TypeError, match=f"FusedAdam: {sentence}"):
        optimizer.step()
    assert_same_bits(optimizer.param_groups[0]["params"][0], before)
    assert not optimizer.state


def ones(dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [torch.ones(4, dtype=dtype)]


@pytest.mark.parametrize(
    ("lists", "error", "sentence"),
    [
        ((ones(torch.float64), ones(), ones(), ones(), []), TypeError, r"grads\[0\] is torch.float64; float32,"),
        ((ones(), [], ones(), ones(), []), ValueError, "params must have 1 entries"),
        ((ones(), ones(), ones(FP16), ones(), []), TypeError, r"exp_avgs\[0\] is torch.float16; float32 and bfloat16"),
        ((ones(), ones(), ones(), ones(BF16), []), ValueError, r"exp_avg_sqs\[0\] must be contiguous torch.float32"),
        ((ones(BF16), ones(BF16), ones(), ones(), ones(BF16)), TypeError, "masters in float32 are accepted"),
    ],
)
def test_refusals_of_the_ops(lists: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"twin::adam_capturable: {sentence}|masters in float32"):
        twin.adam_capturable(*lists, torch.zeros(5), 0.9, 0.999, 1e-8, 0.0, True, False)
    with pytest.raises(ValueError, match=r"control is torch.float32 \[4\] on cpu; float32 \[5\] on cpu is accepted"):
        twin.adam_capturable(ones(), ones(), ones(), ones(), [], torch.zeros(4), 0.9, 0.999, 1e-8, 0.0, True, False)
    step = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"twin::adam_control: lr is torch.float32 \[2\] on cpu; one number of torch."):
        twin.adam_control(step, torch.ones(2), None, None, 0.9, 0.999, True)
    with pytest.raises(ValueError, match=r"step is torch.float32 \[1\] on cpu; one number of torch.int32 on cpu"):
        twin.adam_control(torch.ones(1), torch.ones(1), None, None, 0.9, 0.999, True)


# --- layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedAdam, capturable", "FusedSGD"])
def test_a_layer_in_fp16_trains_under_a_scaler(kind: str) -> None:
    """A scale that overflows is halved until nothing does, and only then parameters move."""
    torch.manual_seed(0)
    layer: Any = te.LayerNormMLP(32, 64, params_dtype=FP32)
    start = copy.deepcopy(layer.state_dict())
    make: Callable[[Any], torch.optim.Optimizer] = {
        "FusedAdam": lambda p: FusedAdam(p, 0.01),
        "FusedAdam, capturable": lambda p: FusedAdam(p, 0.01, capturable=True),
        "FusedSGD": lambda p: te.optimizers.FusedSGD(p, 0.01, momentum=0.9),
    }[kind]
    optimizer = make(layer.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15)
    skipped = 0
    for step in range(6):
        optimizer.zero_grad()
        before = [p.detach().clone() for p in layer.parameters()]
        with torch.autocast("cpu", FP16), te.autocast(recipe=te.DelayedScaling()):
            y = layer(numbers(step, (16, 32)))
        scaler.scale(y.float()).backward(numbers(50 + step, (16, 32)))
        finite = all(bool(p.grad.isfinite().all()) for p in layer.parameters())
        was = scaler.get_scale()
        scaled_step(scaler, optimizer)
        scaler.update()
        assert scaler.get_scale() == (was if finite else was / 2)
        same = [torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True)]
        assert all(same) != finite, "a step that overflowed moves nothing, any other one everything"
        skipped += not finite
    assert 0 < skipped < 6
    assert any(not torch.equal(x, start[name]) for name, x in layer.state_dict().items() if isinstance(x, torch.Tensor))
