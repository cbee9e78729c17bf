"""What `FusedAdam` saves and loads: every bit goes through, and what does not fit is refused before a change."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from shared.adam_parameters import BF16, SHAPES, FusedAdam, groups, parameters, through_a_file, train
from shared.bits import assert_same_bits
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import reference as te


def trained(master: bool, dtype: torch.dtype = BF16) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    params = parameters(dtype)
    optimizer = FusedAdam(groups(params), lr=0.1, master_weights=master)
    train(params, optimizer, range(3))
    return params, optimizer


def resumed(
    params: list[torch.nn.Parameter], state: dict[str, Any], master: bool
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Copies of the parameters, and an optimizer that has loaded the state."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = FusedAdam(groups(copies), lr=7.0, master_weights=master)
    optimizer.load_state_dict(state)
    return copies, optimizer


def assert_same_training(
    one: tuple[list[torch.nn.Parameter], torch.optim.Optimizer],
    other: tuple[list[torch.nn.Parameter], torch.optim.Optimizer],
) -> None:
    for params, optimizer in (one, other):
        train(params, optimizer, range(3, 6))
    for i, (a, b) in enumerate(zip(one[0], other[0], strict=True)):
        assert_same_bits(a, b, f"parameter {i}")
        assert one[1].state[a].keys() == other[1].state[b].keys()
        for name, value in one[1].state[a].items():
            assert_same_bits(value, other[1].state[b][name], f"{name} {i}")


@pytest.mark.parametrize("way", [copy.deepcopy, through_a_file], ids=["in memory", "weights_only file"])
@pytest.mark.parametrize("master", [False, True])
def test_state_keeps_every_bit(master: bool, way: Callable[[Any], Any]) -> None:
    params, optimizer = trained(master)
    optimizer.state[params[0]]["exp_avg"][0, 0] = -0.0
    optimizer.state[params[0]]["exp_avg"][0, 1] = 1e-45
    saved = way(optimizer.state_dict())
    again = resumed(params, saved, master)
    for i, one in again[1].state_dict()["state"].items():
        for name, value in one.items():
            assert_same_bits(value, saved["state"][i][name], f"{name} {i}")
    assert [type(group["step"]) for group in again[1].param_groups] == [int, int]
    assert again[1].state_dict()["param_groups"] == saved["param_groups"]
    assert_same_training((params, optimizer), again)


def test_loaded_state_shares_nothing_with_what_was_loaded() -> None:
    params, optimizer = trained(True)
    saved = optimizer.state_dict()
    copies, again = resumed(params, saved, True)
    for p, q in zip(params, copies, strict=True):
        for name, value in again.state[q].items():
            assert value.data_ptr() != optimizer.state[p][name].data_ptr(), name
    again.param_groups[0]["lr"] = 3.0
    assert saved["param_groups"][0]["lr"] == 0.1


def test_state_that_is_not_contiguous_is_loaded_so_that_a_step_takes_it() -> None:
    params, optimizer = trained(True)
    saved = copy.deepcopy(optimizer.state_dict())
    for name, value in saved["state"][0].items():
        saved["state"][0][name] = value.t().contiguous().t()
    assert_same_training((params, optimizer), resumed(params, saved, True))


def test_a_parameter_without_a_gradient_so_far_has_no_state_to_load() -> None:
    params = parameters()
    optimizer = FusedAdam(groups(params), lr=0.1)
    train(params[:1], optimizer, range(3))
    again = resumed(params, through_a_file(optimizer.state_dict()), False)
    assert len(again[1].state) == 1
    assert_same_training((params, optimizer), again)


def test_groups_keep_what_others_have_put_there() -> None:
    params, optimizer = trained(False)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5)
    again = resumed(params, through_a_file(optimizer.state_dict()), False)[1]
    assert [group["initial_lr"] for group in again.param_groups] == [0.1, 0.1]
    named = FusedAdam([("a", params[0])])
    state = FusedAdam([parameters()[0]]).state_dict()
    named.load_state_dict(state)
    assert named.param_groups[0]["param_names"] == ["a"]


def test_hooks_see_the_state() -> None:
    params, optimizer = trained(False)
    saved = optimizer.state_dict()
    other = FusedAdam(groups(parameters(BF16)))
    seen = []

    def before(one: Any, state: dict[str, Any]) -> dict[str, Any]:
        seen.append(one)
        return {**state, "param_groups": [{**group, "lr": 0.25} for group in state["param_groups"]]}

    other.register_load_state_dict_pre_hook(before)
    other.register_load_state_dict_post_hook(lambda one: seen.append(one.param_groups[0]["lr"]))
    other.load_state_dict({**saved, "param_groups": saved["param_groups"]})
    assert seen == [other, 0.25]
    assert saved["param_groups"][0]["lr"] == 0.1
    del params


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("master", [False, True])
def test_distributed_checkpoints_keep_every_bit(master: bool, flatten: bool, tmp_path: Any) -> None:
    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(te.Linear(32, 16, params_dtype=BF16), te.LayerNorm(16, params_dtype=BF16))

    options = dcp.state_dict.StateDictOptions(flatten_optimizer_state_dict=flatten)
    one, other = model(), model()
    optimizer, again = (FusedAdam(m.parameters(), lr=0.1, master_weights=master) for m in (one, other))
    train(list(one.parameters()), optimizer, range(3))
    state = {"optimizer": get_optimizer_state_dict(one, optimizer, options=options), "model": one.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    room = {"optimizer": get_optimizer_state_dict(other, again, options=options), "model": other.state_dict()}
    dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(room["model"])
    set_optimizer_state_dict(other, again, room["optimizer"], options=options)
    assert [group["step"] for group in again.param_groups] == [3]
    assert_same_training((list(one.parameters()), optimizer), (list(other.parameters()), again))


def put(number: Any, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        found = state["state"][number][name]
        state["state"][number][name] = value(found) if callable(value) else value

    return change


def with_number(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[-1] = value
        return x

    return change


def group(i: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["param_groups"][i].update(values)


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], type[Exception], str]] = {
    "no master": (
        lambda state: state["state"][1].pop("master_param"),
        ValueError,
        r"\['state'\]\[1\] has no 'master_param'; exp_avg, exp_avg_sq, master_param are .* master_weights=True",
    ),
    "no moment": (lambda state: state["state"][2].pop("exp_avg_sq"), ValueError, r"\[2\] has no 'exp_avg_sq'"),
    "another entry": (
        lambda state: state["state"][0].update(max_exp_avg_sq=torch.zeros(4, 3)),
        ValueError,
        r"\[0\] has 'max_exp_avg_sq'; exp_avg,",
    ),
    "an entry too many": (
        lambda state: state["state"].update({3: state["state"][0]}),
        ValueError,
        r"\['state'\]\[3\] belongs to no group",
    ),
    "an entry that is no dict": (
        lambda state: state["state"].update({2: [1]}),
        TypeError,
        r"\['state'\]\[2\] is a list; a dict",
    ),
    "a list": (put(1, "exp_avg", [0.0] * 5), TypeError, r"\[1\]\['exp_avg'\] is a list; a dense tensor"),
    "a number": (put(1, "exp_avg", 0.0), TypeError, r"\[1\]\['exp_avg'\] is a float; a dense tensor"),
    "None": (put(1, "master_param", None), TypeError, r"\[1\]\['master_param'\] is a NoneType; a dense tensor"),
    "sparse": (put(1, "exp_avg", torch.Tensor.to_sparse), TypeError, r"\['exp_avg'\] is torch.sparse_coo; a dense"),
    "meta": (put(1, "exp_avg", lambda x: x.to("meta")), TypeError, r"\['exp_avg'\] is on meta; a dense tensor"),
    "shape": (
        put(0, "exp_avg_sq", lambda x: x.view(3, 4)),
        ValueError,
        r"\[0\]\['exp_avg_sq'\] is torch.float32 \[3, 4\]; float32 and bfloat16 and float16 \[4, 3\] is accepted",
    ),
    "float64": (put(2, "exp_avg", torch.Tensor.double), ValueError, r"\[2\]\['exp_avg'\] is torch.float64"),
    "integers": (put(2, "exp_avg", torch.Tensor.int), ValueError, r"\[2\]\['exp_avg'\] is torch.int32"),
    "a rounded master": (
        put(2, "master_param", torch.Tensor.bfloat16),
        ValueError,
        r"\[2\]\['master_param'\] is torch.bfloat16 \[2, 2\]; float32 \[2, 2\]",
    ),
    "NaN": (put(0, "exp_avg", with_number(math.nan)), ValueError, r"\[0\]\['exp_avg'\] holds NaN or infinity"),
    "NaN square": (put(0, "exp_avg_sq", with_number(math.nan)), ValueError, "holds NaN or infinity; finite"),
    "infinity": (put(0, "master_param", with_number(-math.inf)), ValueError, r"\['master_param'\] holds NaN or inf"),
    "negative": (put(0, "exp_avg_sq", with_number(-1e-30)), ValueError, r"\['exp_avg_sq'\] holds negative numbers"),
    "a group less": (
        lambda state: state["param_groups"].pop(),
        ValueError,
        r"state_dict has groups of \[2\] parameters; the optimizer has \[2, 1\]",
    ),
    "a parameter less": (
        lambda state: state["param_groups"][0]["params"].pop(),
        ValueError,
        r"state_dict has groups of \[1, 1\] parameters; the optimizer has \[2, 1\]",
    ),
    "no groups": (
        lambda state: state.pop("param_groups"),
        TypeError,
        "must be a dict with 'state', a dict, and 'param_",
    ),
    "no state": (lambda state: state.pop("state"), TypeError, "must be a dict with 'state', a dict, and 'param_"),
    "no rate": (lambda state: state["param_groups"][1].pop("lr"), ValueError, r"'lr' is missing in .*\[1\]; groups of"),
    "rate": (group(1, lr=math.nan), ValueError, r"lr=nan in state_dict\['param_groups'\]\[1\]; a number >= 0"),
    "rate, a tensor": (group(0, lr=torch.ones(())), TypeError, r"lr=tensor\(1.\) in .*\[0\]; a number >= 0"),
    "betas": (group(0, betas=(0.9, 1.0)), ValueError, r"betas=\(0.9, 1.0\) in .*; two numbers"),
    "eps": (group(0, eps=None), TypeError, "eps=None in .*; a number"),
    "correction": (group(0, bias_correction=3), TypeError, "bias_correction=3 in .*; True and False"),
    "a negative step": (group(1, step=-5), ValueError, r"step=-5 in .*\[1\]; a whole number >= 0"),
    "half a step": (group(1, step=2.5), ValueError, r"step=2.5 in .*; a whole number"),
    "a step that is no number": (group(1, step=math.nan), ValueError, "step=nan in .*; a whole number"),
    "True steps": (group(1, step=True), ValueError, "step=True in .*; a whole number"),
    "steps of a tensor": (group(1, step=torch.ones(2)), ValueError, r"step=tensor\(\[1., 1.\]\) in .*; a whole"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(name: str) -> None:
    change, error, sentence = CHANGES[name]
    saved = copy.deepcopy(trained(True)[1].state_dict())
    change(saved)
    params, optimizer = trained(True)
    train(params, optimizer, range(3, 5))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(error, match=f"FusedAdam: .*{sentence}"):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for i, one in before["state"].items():
        for part, value in one.items():
            assert_same_bits(value, after["state"][i][part], f"{part} {i}")


@pytest.mark.parametrize("given", [None, [1], "state"])
def test_only_dicts_are_loaded(given: Any) -> None:
    with pytest.raises(TypeError, match="FusedAdam: state_dict must be a dict with 'state'"):
        FusedAdam(parameters()).load_state_dict(given)


def test_masters_are_refused_where_none_are_kept() -> None:
    saved = trained(True)[1].state_dict()
    with pytest.raises(ValueError, match=r"\[0\] has 'master_param'; exp_avg, exp_avg_sq are .*master_weights=False"):
        FusedAdam(groups(parameters(BF16))).load_state_dict(saved)


def test_a_master_of_a_parameter_in_fp32_must_be_the_parameter() -> None:
    """Transformer Engine saves one, which its steps do not move."""
    params, optimizer = trained(True, torch.float32)
    saved = copy.deepcopy(optimizer.state_dict())
    for i, p in enumerate(params):
        saved["state"][i]["master_param"] = p.detach().clone()
    again = resumed(params, saved, True)
    assert all("master_param" not in state for state in again[1].state.values())
    saved["state"][1]["master_param"][0] += 1
    with pytest.raises(ValueError, match=r"\[1\]\['master_param'\] differs from its parameter, which is in fp32"):
        resumed(params, saved, True)
    assert_same_training((params, optimizer), again)


def test_a_parameter_on_meta_takes_no_state() -> None:
    saved = trained(False)[1].state_dict()
    hollow = [torch.nn.Parameter(torch.empty(shape, dtype=BF16, device="meta")) for shape in SHAPES]
    with pytest.raises(ValueError, match=r"the parameter of state_dict\['state'\]\[0\] is on meta; one with numbers"):
        FusedAdam(groups(hollow)).load_state_dict(saved)


@pytest.mark.parametrize(
    "step", [3, 3.0, torch.tensor(3), torch.tensor([3], dtype=torch.int32), torch.tensor(3.0)], ids=str
)
def test_a_count_of_steps_of_any_kind_is_loaded_as_an_int(step: Any) -> None:
    params, optimizer = trained(True)
    saved = copy.deepcopy(optimizer.state_dict())
    for one in saved["param_groups"]:
        one["step"] = step
    again = resumed(params, saved, True)
    assert [(one["step"], type(one["step"])) for one in again[1].param_groups] == [(3, int)] * 2
    assert_same_training((params, optimizer), again)
