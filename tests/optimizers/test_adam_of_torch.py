"""State that torch's optimizers have saved, loaded by `FusedAdam`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared.adam_parameters import BF16, FusedAdam, groups, parameters, through_a_file, train
from shared.bits import assert_same_bits


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_state_of_torchs_adam_goes_on_here(dtype: torch.dtype, decoupled: bool) -> None:
    params = parameters(dtype)
    theirs = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(params), lr=0.1)
    train(params, theirs, range(3))
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = FusedAdam(groups(copies), lr=7.0, adam_w_mode=decoupled, master_weights=dtype == BF16)
    optimizer.load_state_dict(through_a_file(theirs.state_dict()))
    for group, betas in zip(optimizer.param_groups, ((0.9, 0.999), (0.8, 0.9)), strict=True):
        assert group["step"] == 3
        assert group["bias_correction"] is True
        assert (group["lr"], group["betas"]) == (0.1, betas)
        assert not group.keys() & {"amsgrad", "maximize", "foreach", "fused", "decoupled_weight_decay"}
    for p, q in zip(params, copies, strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(optimizer.state[q][name], theirs.state[p][name].float(), name)
    before = [p.detach().float() for p in copies]
    if dtype == torch.float32:
        train(params, theirs, range(3, 5))
    train(copies, optimizer, range(3, 5))
    for p, q, start in zip(params, copies, before, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)  # their sums are fused, ours are not
        else:
            master = optimizer.state[q]["master_param"]
            assert_same_bits(q, master.to(BF16))
            assert (master - start).abs().max() < 0.5, "it starts at the parameter"


def test_state_of_torchs_adam_without_decay_is_the_same_in_both_modes() -> None:
    params = parameters()
    theirs = torch.optim.Adam(params, lr=0.1)
    train(params, theirs, range(2))
    FusedAdam(parameters(), adam_w_mode=True).load_state_dict(theirs.state_dict())


def torchs(kind: Any = torch.optim.AdamW, **options: Any) -> dict[str, Any]:
    params = parameters()
    optimizer = kind(params, lr=0.1, **options)
    train(params, optimizer, range(2))
    return copy.deepcopy(optimizer.state_dict())


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: torchs(amsgrad=True), NotImplementedError, "amsgrad=True in .* is not offered; False"),
        (lambda: torchs(maximize=True), NotImplementedError, "maximize=True in .* is not offered; False"),
        (
            lambda: torchs(torch.optim.Adam, weight_decay=0.1),
            ValueError,
            r"decoupled_weight_decay=False in .* needs adam_w_mode=False",
        ),
        (
            lambda: torchs(torch.optim.SGD, momentum=0.9),
            ValueError,
            r"'betas' is missing in state_dict\['param_groups'",
        ),
        (lambda: torchs(torch.optim.RAdam), ValueError, "'bias_correction' is missing"),
        (lambda: torchs(torch.optim.Adamax), ValueError, "'bias_correction' is missing"),
    ],
)
def test_state_of_other_optimizers_is_refused(make: Callable[[], Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=f"FusedAdam: .*{sentence}"):
        FusedAdam(parameters()).load_state_dict(make())


def test_steps_of_torchs_adam_must_agree_in_a_group() -> None:
    state = torchs()
    state["state"][1]["step"] += 1
    with pytest.raises(
        ValueError, match=r"step=\[2, 3\] for the parameters in state_dict\['param_groups'\]\[0\]; one step"
    ):
        FusedAdam(parameters()).load_state_dict(state)
    del state["state"][1]["step"]
    with pytest.raises(ValueError, match=r"state_dict\['state'\]\[1\] has no 'step'"):
        FusedAdam(parameters()).load_state_dict(state)


LAYOUTS = {
    "fp32": (torch.float32, {}),
    "masters of fp32": (torch.float32, {"master_weights": True}),
    "moments in 16 and 8 bits": (torch.float32, {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16}),
    "capturable": (torch.float32, {"capturable": True}),
    "bf16": (BF16, {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}),
}


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_torch_goes_on_from_our_state(layout: str, decoupled: bool) -> None:
    """torch's optimizer takes every number as it is, and then steps as one that was given the same numbers by hand."""
    dtype, options = LAYOUTS[layout]
    params = parameters(dtype)
    optimizer = FusedAdam(groups(params), lr=0.1, adam_w_mode=decoupled, **options)
    train(params, optimizer, range(3))
    saved = through_a_file(optimizer.state_dict())
    # Either of torch's classes does what our mode says.
    classes = [torch.optim.Adam, *([torch.optim.AdamW] if decoupled else [])]
    for kind in classes:
        copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
        theirs = kind(groups(copies), lr=7.0)
        theirs.load_state_dict(copy.deepcopy(saved))
        by_hand = [torch.nn.Parameter(p.detach().clone()) for p in params]
        other = (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups(by_hand), lr=0.1, weight_decay=0.0)
        for p, q, r in zip(params, copies, by_hand, strict=True):
            other.state[r] = {"step": torch.tensor(3.0)}
            for name in ("exp_avg", "exp_avg_sq"):
                number = optimizer.get_unscaled_state(p, name)
                assert_same_bits(theirs.state[q][name].float(), number.float(), name)
                other.state[r][name] = number.clone().to(dtype)
        if not options.get("capturable"):
            train(copies, theirs, range(3, 5))
            train(by_hand, other, range(3, 5))
            for q, r in zip(copies, by_hand, strict=True):
                assert_same_bits(q, r, f"{layout}, {kind.__name__}")
    again = FusedAdam(groups(params), lr=0.1, adam_w_mode=decoupled, **options)
    again.load_state_dict(saved)
    assert not any({"capturable", "decoupled_weight_decay"} & group.keys() for group in again.param_groups)
    assert all("step" not in state for state in again.state.values())


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (BF16, {"master_weights": True}),
        (BF16, {}),
        (torch.float16, {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}),
        (torch.float32, {"bias_correction": False}),
    ],
)
def test_where_torch_would_go_on_with_other_numbers_it_does_not_load(dtype: torch.dtype, options: Any) -> None:
    params = parameters(dtype)
    optimizer = FusedAdam(params, lr=0.1, **options)
    train(params, optimizer, range(2))
    with pytest.raises(KeyError, match="step"):
        torch.optim.AdamW(params).load_state_dict(optimizer.state_dict())


def test_a_step_of_an_entry_that_is_not_its_groups_is_refused() -> None:
    params = parameters()
    optimizer = FusedAdam(params, lr=0.1)
    train(params, optimizer, range(2))
    saved = optimizer.state_dict()
    saved["state"][1]["step"] += 1
    with pytest.raises(ValueError, match=r"step=tensor\(3\.\) of state_dict\['state'\]\[1\]; 2 in state_dict"):
        optimizer.load_state_dict(saved)
