"""State that torch's optimizers have saved, loaded by `FusedAdam`."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from adams import BF16, FusedAdam, groups, parameters, through_a_file, train
from conftest import assert_same_bits


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
