"""What `FusedAdam` refuses of its arguments and in a step, which leaves every tensor and every count as it was."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from shared.adam_parameters import BF16, RECIPE, FusedAdam, assert_unchanged, everything, numbers, parameter
from shared.bits import assert_same_bits

import reference as te


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
        ({"use_decoupled_grad": 2}, TypeError, "use_decoupled_grad=2; True and False"),
        ({"capturable": None}, TypeError, "capturable=None; True and False"),
        ({"exp_avg_dtype": torch.float64}, NotImplementedError, "exp_avg_dtype=torch.float64 is not offered; float32"),
        ({"exp_avg_sq_dtype": torch.int8}, NotImplementedError, "exp_avg_sq_dtype=torch.int8 is not offered; float32"),
        ({"exp_avg_sq_dtype": None}, NotImplementedError, "exp_avg_sq_dtype=None is not offered; float32 and bfloat16"),
        ({"master_weight_dtype": BF16}, NotImplementedError, "=torch.bfloat16 is not offered; float32 and float16 are"),
        (
            {"capturable": True, "exp_avg_dtype": BF16},
            NotImplementedError,
            "capturable=True with exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.float32 is not offered; both",
        ),
        (
            {"capturable": True, "master_weights": True, "master_weight_dtype": torch.float16},
            NotImplementedError,
            "capturable=True with master_weight_dtype=torch.float16 is not offered; masters in float32",
        ),
        (
            {"capturable": True, "master_weights": True, "store_param_remainders": True},
            NotImplementedError,
            "capturable=True with store_param_remainders=True is not offered; masters",
        ),
        (
            {"store_param_remainders": True},
            ValueError,
            "store_param_remainders=True with master_weights=False, .*; master_weights=True and float32 are accepted",
        ),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"FusedAdam: .*{sentence}"):
        FusedAdam([parameter()], **change)
    modes = {"adam_w_mode", "master_weights", "use_decoupled_grad", "capturable", "store_param_remainders"}
    if not change.keys() & modes and error is not NotImplementedError:
        with pytest.raises(error, match=f"FusedAdam: .*{sentence}".replace(";", " in group 0;")):
            FusedAdam([{"params": [parameter()], **change}])
        optimizer = FusedAdam([parameter()])
        with pytest.raises(error, match=f"FusedAdam: .*{sentence}".replace(";", " in group 1;")):
            optimizer.add_param_group({"params": [parameter()], **change})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("given", [[1], None, {"lr": 0.1}])
def test_groups_are_dicts_with_parameters(given: Any) -> None:
    with pytest.raises(TypeError, match=r"FusedAdam: param_group=.*; a dict with 'params' is accepted"):
        FusedAdam([parameter()]).add_param_group(given)


def test_a_parameter_is_listed_once() -> None:
    a, b = parameter(), parameter(seed=1)
    with pytest.raises(ValueError, match="parameter 2 in group 0 is listed twice"):
        FusedAdam([a, b, a])
    with pytest.raises(ValueError, match="parameter 1 in group 0 is listed twice"):
        FusedAdam([("a", a), ("b", a)])
    optimizer = FusedAdam(iter([a]))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": (b, a)})
    assert len(optimizer.param_groups) == 1


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
    "FP8": (fp8_weight, ValueError, "is kept in FP8; master_weights=True is accepted"),
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


def test_parameters_that_overlap_in_memory_are_refused() -> None:
    whole = numbers(0, (30,))
    a, b, c = (torch.nn.Parameter(whole[i : i + 10]) for i in (0, 9, 20))
    for p in (a, b, c):
        p.grad = torch.ones(10)
    optimizer = FusedAdam([{"params": [c, b]}, {"params": [a]}])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 and parameter 1 of group 0 share memory"):
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
