"""`twin::sgd` and `FusedSGD`: each rounding, torch's SGD, state, copies, and what is refused.

On an H200 the op equals its CPU definition in every bit.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shared.adam_parameters import (
    BF16,
    assert_unchanged,
    awkward,
    everything,
    numbers,
    parameter,
    parameters,
    through_a_file,
    train,
)
from shared.bits import assert_same_bits
from torch.optim.optimizer import required

import optimized  # noqa: F401  (registers the CUDA kernels)
import reference as te
from optimized.ops.optimizers.sgd import CAPACITIES

twin = torch.ops.twin
FP16, FP32 = torch.float16, torch.float32
FusedSGD = te.optimizers.FusedSGD
KINDS = {"fp32": (FP32, FP32), "bf16": (BF16, BF16), "fp16": (FP16, FP16), "bf16, fp32 parameters": (BF16, FP32)}


def r(x: torch.Tensor) -> torch.Tensor:
    """float64 rounded to fp32 and back: an operation on fp32 numbers in float64, then this, is its fp32 rounding."""
    return x.float().double()


@pytest.mark.parametrize(("wide", "dtype"), [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32)])
@pytest.mark.parametrize(
    ("momentum", "nesterov", "first_run", "last", "weight_decay"),
    [
        *((0.9, *flags, 0.1) for flags in itertools.product((False, True), repeat=3)),
        *((0.0, False, first, last, 0.1) for first, last in itertools.product((False, True), repeat=2)),
        (0.9, False, False, True, 0.0),
    ],
)
def test_every_operation_is_rounded_once_in_the_order_that_is_written(
    wide: torch.dtype, dtype: torch.dtype, momentum: float, nesterov: bool, first_run: bool, last: bool,
    weight_decay: float,
) -> None:  # fmt: skip
    grads = [numbers(i, (33, 5), wide) for i in range(2)]
    params = [numbers(4 + i, (33, 5), dtype) for i in range(2)]
    buffers = [numbers(8 + i, (33, 5), dtype) for i in range(2)] if momentum else []
    before = copy.deepcopy((params, buffers))
    twin.sgd(grads, params, buffers, 1e-2, momentum, 0.3, weight_decay, nesterov, first_run, last)
    lr, mu, damping, decay = (torch.tensor(x).double() for x in (1e-2, momentum, 0.3, weight_decay))
    for i in range(2):
        g, p = grads[i].double(), before[0][i].double()
        if weight_decay and not last:
            g = r(g + r(decay * p))
        if momentum:
            b = g if first_run else r(r(before[1][i].double() * mu) + r(r(1 - damping) * g))
            assert_same_bits(buffers[i], b.float().to(dtype), "buffer")
            g = r(g + r(mu * b)) if nesterov else b
        if weight_decay and last:
            g = r(g + r(decay * p))
        assert_same_bits(params[i], r(p - r(lr * g)).float().to(dtype), "p")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_it_is_torchs_sgd_but_for_roundings(options: dict[str, Any]) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [FusedSGD(ours, 0.1, **options), torch.optim.SGD(theirs, 0.1, **options)]
    for step in range(6):
        train(ours, optimizers[0], range(step, step + 1))
        train(theirs, optimizers[1], range(step, step + 1))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # torch adds alpha times a tensor in one rounding


def test_a_step_by_powers_of_two_has_torchs_bits() -> None:
    """Then every product is exact, and a fused sum is an ordinary one."""
    ours, theirs = parameters(), parameters()
    options = {"momentum": 0.5, "dampening": 0.5, "weight_decay": 0.125}
    optimizers = [FusedSGD(ours, 0.25, **options), torch.optim.SGD(theirs, 0.25, **options)]
    for params, optimizer in zip((ours, theirs), optimizers, strict=True):
        train(params, optimizer, range(5))
    for a, b in zip(ours, theirs, strict=True):
        assert_same_bits(a, b)
        state = [optimizer.state[p]["momentum_buffer"] for optimizer, p in zip(optimizers, (a, b), strict=True)]
        assert_same_bits(*state)


def test_each_parameter_has_a_first_step_of_its_own() -> None:
    late, alone = parameter(seed=1), parameter(seed=1)
    grad, late.grad = late.grad, None
    early = parameter(seed=2)
    optimizer = FusedSGD([early, late], 0.1, momentum=0.9, dampening=0.5)
    optimizer.step()
    assert late not in optimizer.state
    late.grad = grad
    optimizer.step()
    FusedSGD([alone], 0.1, momentum=0.9, dampening=0.5).step()
    assert_same_bits(late, alone)


def test_arguments_and_defaults_are_transformer_engines() -> None:
    found = inspect.signature(FusedSGD).parameters
    # Transformer Engine 2.20, pytorch/optimizers/fused_sgd.py
    positional = {"lr": required, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    keywords = {"wd_after_momentum": False, "materialize_master_grads": True, "set_grad_none": None}
    assert list(found) == ["params", *positional, *keywords]
    for name, default in (positional | keywords).items():
        assert found[name].default == default
        assert (found[name].kind is inspect.Parameter.KEYWORD_ONLY) == (name in keywords)


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "weights_only file"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", [FusedSGD, torch.optim.SGD])
def test_state_keeps_every_bit(kind: Any, dtype: torch.dtype, way: Callable[[Any], Any]) -> None:
    params = parameters(dtype)
    optimizer = kind(params, lr=0.1, momentum=0.9)
    train(params, optimizer, range(3))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    saved = way(optimizer.state_dict())
    other = FusedSGD(copies, lr=7.0)
    other.load_state_dict(saved)
    for p, q in zip(params, copies, strict=True):
        assert_same_bits(other.state[q]["momentum_buffer"], optimizer.state[p]["momentum_buffer"])
    kept = [entry["momentum_buffer"].clone() for entry in saved["state"].values()]
    if kind is FusedSGD:
        for one, optim in ((params, optimizer), (copies, other)):
            train(one, optim, range(3, 5))
        for p, q in zip(params, copies, strict=True):
            assert_same_bits(p, q)
    for x, entry in zip(kept, saved["state"].values(), strict=True):
        assert_same_bits(x, entry["momentum_buffer"], "nothing is shared with what was loaded")
    assert not other.param_groups[0].keys() & {"maximize", "foreach", "differentiable", "fused"}


def test_set_grad_none_is_deprecated_and_obeyed() -> None:
    for kind in (FusedSGD, te.optimizers.FusedAdam):
        p = parameter()
        with pytest.warns(DeprecationWarning, match="set_grad_none is deprecated; set_to_none of zero_grad is"):
            optimizer = kind([p], lr=0.1, set_grad_none=False)
        optimizer.zero_grad()
        assert p.grad is not None
        assert not p.grad.any()
        with pytest.raises(ValueError, match="set_to_none=True with set_grad_none=False; the same is"):
            optimizer.zero_grad(True)
        optimizer.zero_grad(False)
        assert p.grad is not None


def test_memory_is_not_shared() -> None:
    whole = torch.zeros(10)
    a, b = (torch.nn.Parameter(whole[i : i + 6]) for i in (0, 4))
    a.grad, b.grad = torch.ones(6), torch.ones(6)
    with pytest.raises(ValueError, match="FusedSGD: parameter 0 of group 0 and parameter 1 of group 0 share memory"):
        FusedSGD([a, b], 0.1).step()
    assert_same_bits(whole, torch.zeros(10))


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"lr": required}, TypeError, "lr is missing in group 0; a number >= 0"),
        ({"lr": -1.0}, ValueError, "lr=-1.0; a number >= 0"),
        ({"lr": torch.ones(())}, TypeError, r"lr=tensor\(1.\); a number >= 0"),
        ({"momentum": math.nan}, ValueError, "momentum=nan; a number >= 0"),
        ({"dampening": "0"}, TypeError, "dampening='0'; a number >= 0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay=-0.1; a number >= 0"),
        ({"nesterov": True}, ValueError, "nesterov=True with momentum=0.0, dampening=0.0; a momentum above 0"),
        ({"nesterov": True, "momentum": 0.9, "dampening": 0.1}, ValueError, "nesterov=True with momentum=0.9, damp"),
        ({"nesterov": "yes"}, TypeError, "nesterov='yes'; True and False"),
        ({"wd_after_momentum": None}, TypeError, "wd_after_momentum=None; True and False"),
        ({"materialize_master_grads": False}, NotImplementedError, "materialize_master_grads=False is not offered; T"),
    ],
)
def test_arguments_that_are_refused(change: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"FusedSGD: .*{sentence}"):
        FusedSGD([parameter()], **{"lr": 0.1, **change})
    if not change.keys() & {"wd_after_momentum", "materialize_master_grads"}:
        optimizer = FusedSGD([parameter()], 0.1)
        before = everything(optimizer)
        optimizer.param_groups[0].update(change)
        with pytest.raises(error, match=f"FusedSGD: .*{sentence.partition(';')[0]}"):
            optimizer.step()
        optimizer.param_groups[0].update({"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0})
        optimizer.param_groups[0]["nesterov"] = False
        assert_unchanged(before, optimizer)


def saved() -> dict[str, Any]:
    params = parameters()
    optimizer = FusedSGD(params, 0.1, momentum=0.9)
    train(params, optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


def put(name: str, value: Any) -> Callable[[Any], None]:
    return lambda state: state["state"][1].__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (
            put("momentum_buffer", torch.ones(4)),
            ValueError,
            r"\[1\]\['momentum_buffer'\] is torch.float32 \[4\];",
        ),
        (put("momentum_buffer", torch.ones(5).double()), ValueError, r"is torch.float64 \[5\]; torch.float32 \[5\]"),
        (put("momentum_buffer", torch.full((5,), math.nan)), ValueError, "holds NaN or infinity; finite numbers"),
        (put("momentum_buffer", [1.0]), TypeError, "is a list; a dense tensor with numbers"),
        (put("exp_avg", torch.ones(5)), ValueError, r"\[1\] has \['momentum_buffer', 'exp_avg'\]; 'mome"),
        (lambda state: state["param_groups"][0].update(lr=-1), ValueError, "lr=-1 in state_dict.*; a number >= 0"),
        (
            lambda state: state["param_groups"][0].update(maximize=True),
            NotImplementedError,
            "maximize=True in .* is not",
        ),
        (lambda state: state["param_groups"][0].pop("momentum"), ValueError, "'momentum' is missing in state_dict"),
        (lambda state: state["param_groups"][0]["params"].pop(), ValueError, r"groups of \[2\] parameters; .* \[3\]"),
        (
            lambda state: state.pop("state"),
            TypeError,
            "state_dict must be a dict with 'state', a dict, and 'param_groups'",
        ),
        (lambda state: state["param_groups"].insert(0, 3), TypeError, "'param_groups', a list of dicts with 'params'"),
        (
            lambda state: state["state"].update({0: 3}),
            TypeError,
            r"state_dict\['state'\]\[0\] is a int; a dict is accepted",
        ),
    ],
)
def test_what_does_not_fit_is_not_loaded(change: Callable[[Any], None], error: type[Exception], sentence: str) -> None:
    given = saved()
    change(given)
    params = parameters()
    optimizer = FusedSGD(params, 0.1, momentum=0.9)
    train(params, optimizer, range(1))
    before = everything(optimizer)
    with pytest.raises(error, match=f"FusedSGD: .*{sentence}"):
        optimizer.load_state_dict(given)
    assert_unchanged(before, optimizer)


def ones(dtype: torch.dtype = FP32, shape: tuple[int, ...] = (4, 2)) -> list[torch.Tensor]:
    return [torch.ones(shape, dtype=dtype)]


@pytest.mark.parametrize(
    ("lists", "momentum", "error", "sentence"),
    [
        ((ones(), ones(), []), 0.9, ValueError, "momentum=0.9 with 0 buffers; buffers belong to a momentum"),
        ((ones(), ones(), ones()), 0.0, ValueError, "momentum=0.0 with 1 buffers"),
        ((ones(), [], ones()), 0.9, ValueError, "params must have 1 entries, one for each of grads; got 0"),
        ((ones(torch.float64), ones(), ones()), 0.9, TypeError, r"grads\[0\] is torch.float64; float32,"),
        ((ones(FP32), ones(BF16), ones()), 0.9, TypeError, r"params\[0\] is torch.bfloat16; torch.float32 and float32"),
        ((ones(BF16), ones(), ones(BF16)), 0.9, ValueError, r"buffers\[0\] must be contiguous torch.float32"),
        ((ones(), ones(shape=(2, 4)), ones()), 0.9, ValueError, r"params\[0\] must be .* \[4, 2\] on cpu"),
    ],
)
def test_refusals_of_the_op(lists: Any, momentum: float, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"twin::sgd: {sentence}"):
        twin.sgd(*lists, 0.1, momentum, 0.0, 0.0, False, False, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_torch_rounds_more_often(dtype: torch.dtype) -> None:
    """The difference that docs/optimizers.md states: with PyTorch's roundings put in, nearly all its words."""
    draw = torch.Generator().manual_seed(1)
    start, *grads = (torch.randn(500, generator=draw).to(dtype) for _ in range(3))
    ours, torchs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    a = te.optimizers.FusedSGD([ours], lr=0.1, momentum=0.9)
    b = torch.optim.SGD([torchs], lr=0.1, momentum=0.9, foreach=False)
    once, each = start.clone(), start.clone()
    kept = rounded = grads[0]
    for step, grad in enumerate(grads):
        ours.grad, torchs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
        wide = kept.float() * 0.9 + grad.float() if step else grad.float()
        once, kept = (once.float() - 0.1 * wide).to(dtype), wide.to(dtype)
        rounded = (rounded.float() * 0.9).to(dtype) + grad if step else grad
        rate = torch.tensor(0.1).to(dtype).float()
        each = (each.float() - rate * rounded.float()).to(dtype)
    assert torch.equal(ours, once)
    # PyTorch may fuse its last product and sum, by the machine: a few words differ in their last bit.
    assert (torchs == each).float().mean() > 0.97
    assert (ours == torchs).float().mean() < 0.95


def compare(
    sizes: list[int],
    kind: str,
    momentum: float = 0.9,
    flags: tuple[bool, bool] = (False, False),
    decay: float = 0.1,
    offset: int = 0,
    special: bool = False,
    seed: int = 0,
) -> None:
    """Three steps of tensors that begin `offset` elements after a multiple of 16 bytes; `flags`: Nesterov's, last."""
    wide, dtype = KINDS[kind]
    sides = []
    for device in ("cpu", "cuda"):
        lists: list[list[torch.Tensor]] = [[], [], []]
        for (i, size), (j, one) in itertools.product(enumerate(sizes), enumerate((wide, dtype, dtype))):
            x = awkward(seed + 3 * i + j, size, one, special)
            lists[j].append(torch.zeros(size + offset, dtype=one, device=device)[offset:].copy_(x))
        for step in range(3):
            buffers = lists[2] if momentum else []
            twin.sgd(lists[0], lists[1], buffers, 1e-2, momentum, 0.3, decay, flags[0], step == 0, flags[1])
        sides.append([x for part in lists for x in part])
    for i, (a, b) in enumerate(zip(*sides, strict=True)):
        assert_same_bits(b, a, f"{kind}, tensor {i % len(sizes)} of list {i // len(sizes)}")


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.sample(6)
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=2)), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, flags: tuple[bool, bool]) -> None:
    compare([1, 7, 8, 9, 2047, 2048, 2049, 0, 70001], kind, flags=flags)
    compare([2049, 3], kind, flags=flags, special=True)
    compare([2049, 3], kind, 0.0, flags, 0.0, special=True)


@pytest.mark.gpu
@pytest.mark.simulated
@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=9),
    kind=st.sampled_from(list(KINDS)),
    momentum=st.sampled_from((0.0, 0.9)),
    offset=st.integers(0, 9),
    seed=st.integers(0, 2**20),
)
def test_any_list_at_any_address(sizes: list[int], kind: str, momentum: float, offset: int, seed: int) -> None:
    compare(sizes, kind, momentum, offset=offset, special=True, seed=seed)


@pytest.mark.gpu
@pytest.mark.simulated
@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [CAPACITIES[0], CAPACITIES[0] + 1, CAPACITIES[1] + 1])
def test_around_the_capacity_of_a_launch(count: int) -> None:
    compare([5 + i % 7 for i in range(count)], "bf16")
