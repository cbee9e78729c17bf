"""`FusedAdam`: its arguments, and steps that are refused, which leave every tensor and every count as it was."""

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
from conftest import assert_same_bits

import reference as te
from reference.nn.float8_tensor import Float8Tensor
from reference.ops.adam import correction

BF16 = torch.bfloat16
RECIPE = te.DelayedScaling(amax_history_len=4)
FusedAdam = te.optimizers.FusedAdam


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(shape: tuple[int, ...] = (4, 3), dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    p = torch.nn.Parameter(numbers(seed, shape, dtype))
    p.grad = numbers(seed + 100, shape, dtype)
    return p


def everything(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Copies of all that a step may change."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        found.append({name: copy.deepcopy(value) for name, value in group.items() if name != "params"})
        for p in group["params"]:
            data = p._data.view(torch.uint8) if isinstance(p, Float8Tensor) else p.detach()
            state = optimizer.state.get(p, {})
            found += [
                data if data.is_meta or data.is_sparse else data.clone(),
                {k: v.clone() for k, v in state.items()},
            ]
    return found


def assert_unchanged(before: list[Any], optimizer: torch.optim.Optimizer) -> None:
    for a, b in zip(before, everything(optimizer), strict=True):
        pairs = [(a, b)] if isinstance(a, torch.Tensor) else [(a[k], b[k]) for k in a.keys() | b.keys()]
        for one, other in pairs:
            if isinstance(one, torch.Tensor):
                assert one.is_meta or torch.equal(one, other)
            else:
                assert one == other


# --- arguments -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"lr": math.nan}, ValueError, "lr=nan; a number >= 0"),
        ({"lr": math.inf}, ValueError, "lr=inf; a number >= 0 that fp32 holds"),
        ({"lr": 1e39}, ValueError, r"lr=1e\+39; a number >= 0 that fp32 holds"),
        ({"lr": "1e-3"}, TypeError, "lr='1e-3'; a number"),
        ({"lr": True}, TypeError, "lr=True; a number"),
        ({"lr": torch.tensor(1e-3)}, TypeError, r"lr=tensor\(0.0010\); a number"),
        ({"lr": np.ones(1)}, TypeError, r"lr=array\(\[1.\]\); a number"),
        ({"eps": -1e-8}, ValueError, "eps=-1e-08; a number >= 0"),
        ({"eps": None}, TypeError, "eps=None; a number >= 0"),
        ({"weight_decay": math.nan}, ValueError, "weight_decay=nan; a number >= 0"),
        ({"weight_decay": torch.ones(())}, TypeError, r"weight_decay=tensor\(1.\); a number"),
        ({"betas": 0.9}, TypeError, "betas=0.9; two numbers"),
        ({"betas": (0.9,)}, TypeError, r"betas=\(0.9,\); two numbers"),
        ({"betas": ("0.9", "0.99")}, TypeError, "two numbers"),
        ({"betas": torch.tensor([0.9, 0.99])}, TypeError, "two numbers"),
        ({"betas": (0.9, torch.tensor(0.99))}, TypeError, "two numbers"),
        ({"betas": (-0.1, 0.9)}, ValueError, r"betas=\(-0.1, 0.9\); two numbers, 0 <= beta < 1"),
        ({"betas": (math.nan, 0.9)}, ValueError, r"betas=\(nan, 0.9\); two numbers, 0 <= beta < 1"),
        ({"betas": (0.9, 0.99999999)}, ValueError, "0 <= beta < 1 in fp32"),
        ({"bias_correction": "no"}, TypeError, "bias_correction='no'; True and False"),
        ({"adam_w_mode": 2}, TypeError, "adam_w_mode=2; True and False"),
        ({"master_weights": None}, TypeError, "master_weights=None; True and False"),
        ({"use_decoupled_grad": True}, NotImplementedError, "use_decoupled_grad=True is not offered; False"),
        ({"set_grad_none": False}, NotImplementedError, "set_grad_none=False is not offered; None"),
        ({"master_weight_dtype": torch.float16}, NotImplementedError, "master_weight_dtype=torch.float16"),
        ({"exp_avg_sq_dtype": torch.uint8}, NotImplementedError, "exp_avg_sq_dtype=torch.uint8"),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"FusedAdam: .*{sentence}"):
        FusedAdam([parameter()], **change)
    if not change.keys() & {"adam_w_mode", "master_weights"} and error is not NotImplementedError:
        with pytest.raises(error, match=f"FusedAdam: .*{sentence}".replace(";", " in group 0;")):
            FusedAdam([{"params": [parameter()], **change}])
        optimizer = FusedAdam([parameter()])
        with pytest.raises(error, match=f"FusedAdam: .*{sentence}".replace(";", " in group 1;")):
            optimizer.add_param_group({"params": [parameter()], **change})
        assert len(optimizer.param_groups) == 1


def test_numbers_of_other_kinds_are_read_exactly() -> None:
    given = {"lr": np.float32(0.1), "eps": 0, "weight_decay": np.float64(0.25), "betas": [Fraction(1, 2), 0]}
    for optimizer in (FusedAdam([parameter()], **given), FusedAdam([{"params": parameter(), **given}])):
        group = optimizer.param_groups[0]
        assert (group["lr"], group["eps"], group["weight_decay"]) == (float(np.float32(0.1)), 0.0, 0.25)
        assert group["betas"] == (0.5, 0.0)
        assert {type(x) for x in (group["lr"], group["eps"], group["weight_decay"], *group["betas"])} == {float}


@pytest.mark.parametrize("given", [[1], None, {"lr": 0.1}])
def test_groups_are_dicts_with_parameters(given: Any) -> None:
    with pytest.raises(TypeError, match=r"FusedAdam: param_group=.*; a dict with 'params' is accepted"):
        FusedAdam([parameter()]).add_param_group(given)


def test_a_parameter_is_listed_once() -> None:
    a, b = parameter(), parameter(seed=1)
    with pytest.raises(ValueError, match="parameter 2 in group 0 is listed a second time"):
        FusedAdam([a, b, a])
    with pytest.raises(ValueError, match="parameter 1 in group 0 is listed a second time"):
        FusedAdam([("a", a), ("b", a)])
    optimizer = FusedAdam(iter([a]))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": (b, a)})
    assert len(optimizer.param_groups) == 1


# --- steps that are refused ------------------------------------------------------------------------------


def fp8_weight() -> torch.nn.Parameter:
    with te.quantized_model_init(recipe=RECIPE):
        weight = te.Linear(16, 16, params_dtype=BF16).weight
    weight.grad = numbers(3, (16, 16), BF16)
    return weight


def sparse() -> torch.nn.Parameter:
    p = parameter()
    p.grad = p.grad.to_sparse()
    return p


def moved_under_its_gradient(data: torch.Tensor) -> torch.nn.Parameter:
    """A parameter with a gradient that torch would not let it have."""
    p = parameter()
    p.data = data
    return p


def on_meta() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.empty(4, 3, device="meta"))
    p.grad = torch.empty(4, 3, device="meta")
    return p


def transposed() -> torch.nn.Parameter:
    p = torch.nn.Parameter(numbers(0, (4, 3)).t())
    p.grad = numbers(1, (3, 4))
    return p


def expanded() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(1, 3).expand(4, 3))
    p.grad = numbers(1, (4, 3))
    return p


def complex_() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    p.grad = torch.zeros(3, dtype=torch.complex64)
    return p


def integer() -> torch.Tensor:
    p = torch.zeros(3, dtype=torch.int32)
    p.grad = torch.zeros(3, dtype=torch.int32)
    return p


class Wrapper(torch.Tensor):
    """A tensor that wants to see every op."""

    @staticmethod
    def __new__(cls: Any, shape: tuple[int, ...]) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, shape)  # type: ignore[no-any-return, attr-defined]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].shape)
        raise AssertionError(f"{func} was called")


def wrapped() -> torch.Tensor:
    p = parameter()
    p.grad = Wrapper((4, 3))
    return p


BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "sparse": (sparse, TypeError, "its gradient is sparse; dense gradients are accepted"),
    "float64": (lambda: parameter(dtype=torch.float64), TypeError, "is torch.float64; float32, bfloat16 and float16"),
    "complex": (complex_, TypeError, "is torch.complex64; float32,"),
    "integer": (integer, TypeError, "is torch.int32; float32,"),
    "meta": (on_meta, ValueError, "is on meta; parameters on cpu and cuda are accepted"),
    "transposed": (transposed, ValueError, "is not contiguous; contiguous parameters are accepted"),
    "expanded": (expanded, ValueError, "is not contiguous; contiguous parameters are accepted"),
    "FP8": (fp8_weight, ValueError, "a parameter is kept in FP8; master_weights=True is accepted then"),
    "another shape": (
        lambda: moved_under_its_gradient(torch.zeros(3, 4)),
        ValueError,
        r"its gradient is \[4, 3\] on cpu; \[3, 4\] on cpu is accepted",
    ),
    "another dtype": (
        lambda: moved_under_its_gradient(torch.zeros(4, 3, dtype=BF16)),
        TypeError,
        "its gradient is torch.float32; torch.bfloat16 is accepted",
    ),
    "a wrapper": (wrapped, TypeError, "is a Wrapper; plain tensors, DTensors"),
}


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "third step"])
@pytest.mark.parametrize("name", BAD)
def test_one_bad_parameter_refuses_the_step_and_nothing_moves(name: str, steps: int) -> None:
    make, error, sentence = BAD[name]
    good = [parameter(seed=i) for i in range(4)]
    optimizer = FusedAdam([{"params": good[:2]}, {"params": [good[2]], "lr": 0.5}, {"params": [good[3]]}])
    for _ in range(steps):
        optimizer.step()
    optimizer.param_groups[1]["params"].append(make())
    before = everything(optimizer)
    with pytest.raises(error, match=f"FusedAdam: .*parameter 1 of group 1.*{sentence}" if name != "meta" else sentence):
        optimizer.step()
    assert_unchanged(before, optimizer)
    optimizer.param_groups[1]["params"].pop()
    optimizer.step()
    assert [group["step"] for group in optimizer.param_groups] == [steps + 1] * 3


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


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    whole = numbers(0, (30,))
    a, b, c = (torch.nn.Parameter(whole[i : i + 10]) for i in (0, 9, 20))
    for p in (a, b, c):
        p.grad = torch.ones(10)
    optimizer = FusedAdam([{"params": [c, b]}, {"params": [a]}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 and parameter 1 of group 0 overlap in memory"):
        optimizer.step()
    assert_same_bits(whole, numbers(0, (30,)))
    assert not optimizer.state
    b.data = whole[10:20]
    empty = torch.nn.Parameter(whole[5:5])
    empty.grad = torch.ones(0)
    optimizer.add_param_group({"params": [empty]})
    optimizer.step()
    assert bool((whole != numbers(0, (30,))).all()), "neighbours are no overlap, and nothing at all is none"


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"lr": torch.tensor(0.1)}, TypeError, r"lr=tensor\(0.1000\) in group 1; a number >= 0"),
        ({"lr": math.nan}, ValueError, "lr=nan in group 1; a number >= 0"),
        ({"lr": -1e-9}, ValueError, "lr=-1e-09 in group 1; a number >= 0"),
        ({"betas": (0.9, 1.5)}, ValueError, r"betas=\(0.9, 1.5\) in group 1"),
        ({"eps": "tiny"}, TypeError, "eps='tiny' in group 1"),
        ({"bias_correction": torch.tensor(True)}, TypeError, r"bias_correction=tensor\(True\) in group 1"),
        ({"step": -5}, ValueError, "step=-5 in group 1; a whole number >= 0 is accepted"),
        ({"step": 2.5}, ValueError, "step=2.5 in group 1; a whole number"),
        ({"step": True}, ValueError, "step=True in group 1; a whole number"),
        ({"step": math.nan}, ValueError, "step=nan in group 1; a whole number"),
        ({"step": math.inf}, ValueError, "step=inf in group 1; a whole number"),
        ({"step": "3"}, ValueError, "step='3' in group 1; a whole number"),
        ({"step": None}, ValueError, "step=None in group 1; a whole number"),
        ({"step": torch.tensor([1, 2])}, ValueError, r"step=tensor\(\[1, 2\]\) in group 1; a whole number"),
        ({"step": torch.tensor(True)}, ValueError, r"step=tensor\(True\) in group 1; a whole number"),
        ({"step": torch.tensor(1.5)}, ValueError, r"step=tensor\(1.5000\) in group 1; a whole number"),
        ({"step": torch.empty((), device="meta")}, ValueError, "step=tensor.*meta.* in group 1; a whole number"),
    ],
)
def test_numbers_that_were_changed_are_checked_before_a_step(
    change: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    optimizer = FusedAdam([{"params": [parameter(seed=i)]} for i in range(3)])
    optimizer.step()
    before = everything(optimizer)
    kept = {name: optimizer.param_groups[1][name] for name in change}
    optimizer.param_groups[1].update(change)
    with pytest.raises(error, match=f"FusedAdam: {sentence}"):
        optimizer.step()
    optimizer.param_groups[1].update(kept)
    assert_unchanged(before, optimizer)
    del optimizer.param_groups[1]["eps"]
    with pytest.raises(ValueError, match="'eps' is missing in group 1"):
        optimizer.step()
    optimizer.param_groups[1]["eps"] = 1e-8
    assert_unchanged(before, optimizer)


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


def test_state_that_no_longer_fits_is_refused() -> None:
    a, b = parameter(seed=0), parameter(seed=1)
    optimizer = FusedAdam([a, b], lr=0.1)
    optimizer.step()
    state = optimizer.state[b]
    whole = state["exp_avg"]
    for bad, sentence in (
        (whole.double(), r"its exp_avg is torch.float64 \[4, 3\] on cpu"),
        (whole.view(3, 4), r"its exp_avg is torch.float32 \[3, 4\] on cpu.*; contiguous torch.float32 \[4, 3\] on cpu"),
        (whole.t().contiguous().t(), r"its exp_avg is .*strides \(1, 4\); contiguous"),
        (whole.to("meta"), "its exp_avg is .* on meta.* on cpu is accepted"),
        (whole.to_sparse(), "its exp_avg is torch.sparse_coo; a dense tensor"),
        ([1.0], "its exp_avg is a list; a dense tensor"),
        (None, "its exp_avg is a NoneType; a dense tensor"),
    ):
        before = a.detach().clone()
        state["exp_avg"] = bad
        with pytest.raises((TypeError, ValueError), match=f"FusedAdam: parameter 1 of group 0, {sentence}"):
            optimizer.step()
        assert_same_bits(a, before)
        assert optimizer.param_groups[0]["step"] == 1


def test_a_closure_that_raises_changes_nothing() -> None:
    optimizer = FusedAdam([parameter()], lr=0.1)
    optimizer.step()
    before = everything(optimizer)

    def closure() -> float:
        raise ArithmeticError("the loss is no number")

    with pytest.raises(ArithmeticError):
        optimizer.step(closure)
    assert_unchanged(before, optimizer)


def test_a_scaler_steps_by_itself() -> None:
    optimizer = FusedAdam([parameter()], lr=0.1)
    with pytest.raises(NotImplementedError, match=r"grad_scaler=.* is not offered; None is accepted"):
        optimizer.step(grad_scaler=torch.amp.GradScaler("cpu"))
    assert not optimizer.state
    scaled, plain = parameter(), parameter()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = FusedAdam([scaled], lr=0.1)
    for overflow in (False, True):
        scaled.grad = plain.grad * 4
        scaler.scale(torch.ones(()))
        if overflow:
            scaled.grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
    FusedAdam([plain], lr=0.1).step()
    assert_same_bits(scaled, plain)
    assert optimizer.param_groups[0]["step"] == 1


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


# --- copies, masters -------------------------------------------------------------------------------------


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
    with pytest.raises(NotImplementedError, match="store_param_remainders=True is not offered"):
        optimizer.initialize_state(p, store_param_remainders=True)
    assert not optimizer.state
    optimizer.initialize_state(p, store_param_remainders=False)
    assert_same_bits(optimizer.get_unscaled_state(p, "master_param"), p.detach().float())
    finer = numbers(9, (4, 3))
    optimizer.set_scaled_state(p, "master_param", finer)
    assert_same_bits(optimizer.get_unscaled_state(p, "master_param"), finer)
    with pytest.raises(ValueError, match="state_name='momentum'; exp_avg, exp_avg_sq, master_param are accepted"):
        optimizer.set_scaled_state(p, "momentum", finer)
    with pytest.raises(ValueError, match=r"its unscaled_state is torch.bfloat16 \[4, 3\]"):
        optimizer.set_scaled_state(p, "exp_avg", finer.to(BF16))
    other = parameter(dtype=BF16)
    FusedAdam([other], master_weights=True).set_scaled_state(other, "exp_avg", finer)
