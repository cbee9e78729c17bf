"""`FusedAdam`: its arguments, counts of steps, schedulers and scalers, copies, and masters."""

import copy
import inspect
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from shared.adam_parameters import BF16, RECIPE, FusedAdam, numbers, parameter
from shared.bits import assert_same_bits

import reference as te
from reference.ops.optimizers.adam import correction


def test_arguments_and_defaults_are_transformer_engines() -> None:
    found = inspect.signature(FusedAdam).parameters
    # Transformer Engine 2.20, pytorch/optimizers/fused_adam.py
    positional = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    keywords = {"bias_correction": True, "adam_w_mode": True, "capturable": False, "master_weights": False}
    keywords |= dict.fromkeys(("master_weight_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"), torch.float32)
    keywords |= {"use_decoupled_grad": False, "store_param_remainders": False, "set_grad_none": None}
    assert list(found) == ["params", *positional, *keywords]
    for name, default in (positional | keywords).items():
        assert found[name].default == default
        assert (found[name].kind is inspect.Parameter.KEYWORD_ONLY) == (name in keywords)
    assert list(inspect.signature(FusedAdam.step).parameters) == ["self", "closure", "grad_scaler"]
    assert list(inspect.signature(FusedAdam.zero_grad).parameters) == ["self", "set_to_none"]


def test_numbers_of_other_kinds_are_read_exactly() -> None:
    given = {"lr": np.float32(0.1), "eps": 0, "weight_decay": np.float64(0.25), "betas": [Fraction(1, 2), 0]}
    for optimizer in (FusedAdam([parameter()], **given), FusedAdam([{"params": parameter(), **given}])):
        group = optimizer.param_groups[0]
        assert (group["lr"], group["eps"], group["weight_decay"]) == (float(np.float32(0.1)), 0.0, 0.25)
        assert group["betas"] == (0.5, 0.0)
        assert {type(x) for x in (group["lr"], group["eps"], group["weight_decay"], *group["betas"])} == {float}


def test_a_gradient_of_another_dtype_is_widened_for_a_parameter_in_fp32() -> None:
    """The op takes it; torch's `grad_dtype` makes such pairs."""
    a, b = parameter(), parameter()
    grad = numbers(7, (4, 3), BF16)
    a.grad = grad.float()
    half = b.data
    b.grad = None
    b.data = half.to(BF16)
    b.grad = grad
    b.data = half
    for p in (a, b):
        FusedAdam([p], lr=0.1).step()
    assert_same_bits(a, b)


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7), torch.tensor([7.0]), np.int64(7)], ids=str)
def test_a_count_of_steps_of_any_kind_is_read_as_an_int(step: Any) -> None:
    ours, other = parameter(), parameter()
    optimizers = [FusedAdam([ours], lr=0.1), FusedAdam([other], lr=0.1)]
    for optimizer, start in zip(optimizers, (7, step), strict=True):
        optimizer.param_groups[0]["step"] = start
        for _ in range(3):
            optimizer.step()
    assert_same_bits(ours, other)
    assert optimizers[1].param_groups[0]["step"] == 10
    assert type(optimizers[1].param_groups[0]["step"]) is int
    assert not isinstance(step, torch.Tensor) or step.item() == 7, "a tensor of the caller's is read, not shifted"


def test_a_huge_count_of_steps_corrects_nothing() -> None:
    p, plain = parameter(), parameter()
    optimizer = FusedAdam([p], lr=0.1)
    optimizer.param_groups[0]["step"] = 10**30
    optimizer.step()
    FusedAdam([plain], lr=0.1, bias_correction=False).step()
    assert_same_bits(p, plain)
    assert optimizer.param_groups[0]["step"] == 10**30 + 1


@pytest.mark.parametrize("step", [-1, 2.0, True, torch.tensor(3), math.nan])
def test_the_correction_takes_whole_numbers(step: Any) -> None:
    with pytest.raises(ValueError, match=r"twin::adam: step=.*; an int >= 0 is accepted"):
        correction(0.9, step)


def test_a_scaler_steps_by_itself() -> None:
    optimizer = FusedAdam([parameter()], lr=0.1)
    with pytest.raises(NotImplementedError, match=r"grad_scaler=.* is not offered; None is accepted"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    assert not optimizer.state


def test_schedulers_change_the_rate() -> None:
    ours, other = parameter(), parameter()
    optimizer = FusedAdam([ours], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: np.float64(0.5) ** i)
    expected = FusedAdam([other], lr=0.1)
    for i in range(3):
        expected.param_groups[0]["lr"] = 0.1 * 0.5**i
        for one in (optimizer, expected):
            one.step()
        scheduler.step()
    assert_same_bits(ours, other)


def test_gradients_are_dropped_by_default_as_transformer_engine_does() -> None:
    p = parameter()
    optimizer = FusedAdam([p])
    optimizer.zero_grad(False)
    assert p.grad is not None
    assert not p.grad.any()
    optimizer.zero_grad(None)
    assert p.grad is None
    p.grad = torch.ones(4, 3)
    optimizer.zero_grad()
    assert p.grad is None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_a_copy_steps_as_the_original(copied: Callable[[Any], Any]) -> None:
    optimizer = FusedAdam([parameter(dtype=BF16)], lr=0.1, weight_decay=0.5, adam_w_mode=False, master_weights=True)
    optimizer.step()
    other = copied(optimizer)
    before = other.param_groups[0]["params"][0].detach().clone()
    optimizer.step()
    assert_same_bits(other.param_groups[0]["params"][0], before, "the copy's parameter is its own")
    mine = other.param_groups[0]["params"][0]
    mine.grad = optimizer.param_groups[0]["params"][0].grad
    other.step()
    for name in ("exp_avg", "exp_avg_sq", "master_param"):
        assert_same_bits(other.state[mine][name], optimizer.state[optimizer.param_groups[0]["params"][0]][name], name)


@pytest.mark.parametrize("preserve", [False, True])
def test_a_weight_in_fp8_that_was_loaded_is_where_its_master_starts(preserve: bool) -> None:
    """And not what was drawn before the load, however well that was preserved."""
    torch.manual_seed(0)
    with te.quantized_model_init(recipe=RECIPE, preserve_high_precision_init_val=preserve):
        trained, fresh = (te.Linear(32, 16, params_dtype=BF16) for _ in range(2))
    fresh.load_state_dict(trained.state_dict())
    optimizer = FusedAdam(fresh.parameters(), lr=0.0, master_weights=True)
    reads = fresh.weight.dequantize()
    fresh.weight.grad = torch.zeros(16, 32, dtype=BF16)
    optimizer.step()
    assert_same_bits(optimizer.state[fresh.weight]["master_param"], reads.float())
    assert_same_bits(fresh.weight.dequantize(), reads)
    if preserve:
        optimizer = FusedAdam(trained.parameters(), lr=0.0, master_weights=True)
        optimizer.initialize_state(trained.weight)
        drawn = trained.weight.get_high_precision_init_val().float()
        assert_same_bits(optimizer.get_unscaled_state(trained.weight, "master_param"), drawn)


def test_a_parameter_that_is_rounded_later_gets_a_master_then() -> None:
    module = te.Linear(16, 16, params_dtype=torch.float32)
    optimizer = FusedAdam(module.parameters(), lr=1e-4, master_weights=True)
    for dtype in (torch.float32, BF16):
        module.to(dtype)
        for p in module.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    for p in module.parameters():
        master = optimizer.state[p]["master_param"]
        assert master.dtype == torch.float32
        assert_same_bits(p, master.to(BF16))
    assert not torch.equal(optimizer.state[module.weight]["master_param"].to(BF16).float(), master), "finer than bf16"


def test_transformer_engines_way_to_write_state() -> None:
    p = parameter(dtype=BF16)
    optimizer = FusedAdam([p], lr=0.1, master_weights=True)
    with pytest.raises(ValueError, match="state_name='exp_avg'; a parameter that has made a step is accepted"):
        optimizer.get_unscaled_state(p, "exp_avg")
    with pytest.raises(ValueError, match=r"store_param_remainders=True for a parameter in torch.bfloat16; False, as"):
        optimizer.initialize_state(p, store_param_remainders=True)
    assert not optimizer.state
    optimizer.initialize_state(p, store_param_remainders=False)
    assert_same_bits(optimizer.get_unscaled_state(p, "master_param"), p.detach().float())
    finer = numbers(9, (4, 3))
    optimizer.set_scaled_state(p, "master_param", finer)
    assert_same_bits(optimizer.get_unscaled_state(p, "master_param"), finer)
    optimizer.set_scaled_state(p, "exp_avg", finer.clone().requires_grad_())
    assert not optimizer.state[p]["exp_avg"].requires_grad
    with pytest.raises(ValueError, match="state_name='momentum'; exp_avg, exp_avg_sq, master_param are accepted"):
        optimizer.set_scaled_state(p, "momentum", finer)
    with pytest.raises(ValueError, match=r"its unscaled_state is torch.bfloat16 \[4, 3\]"):
        optimizer.set_scaled_state(p, "exp_avg", finer.to(BF16))
    other = parameter(dtype=BF16)
    FusedAdam([other], master_weights=True).set_scaled_state(other, "exp_avg", finer)
