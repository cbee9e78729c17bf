"""FP8 state follows its module: devices, dtypes, copies, checkpoints."""

import copy
import gc
import logging
import pickle

import pytest
import safetensors.torch
import torch

import reference as te
from reference.state import scaling

RECIPE = te.DelayedScaling(amax_history_len=4)
KEYS = ["scaling_fwd.scale", "scaling_fwd.amax_history", "scaling_bwd.scale", "scaling_bwd.amax_history"]


def trained(steps: int = 2) -> te.Linear:
    torch.manual_seed(steps)
    layer = te.Linear(32, 16, params_dtype=torch.bfloat16)
    step(layer, steps)
    return layer


def step(layer: te.Linear, steps: int = 1) -> torch.Tensor:
    for i in range(steps):
        x = ((torch.arange(8 * 32).reshape(8, 32) * 5).remainder(11 + i) - 4).to(torch.bfloat16)
        with te.autocast(recipe=RECIPE):
            y = layer(x)
        y.sum().backward()
    return y.detach()


def test_dtype_conversions_leave_scales_alone() -> None:
    layer = trained()
    scale = layer.fp8_meta["scaling_fwd"].scale.clone()
    for convert in (layer.half, layer.bfloat16, layer.float, lambda: layer.to(torch.float16)):
        convert()
        assert layer.fp8_meta["scaling_fwd"].scale.dtype == torch.float32
        assert torch.equal(layer.fp8_meta["scaling_fwd"].scale, scale)
    layer.to("meta")
    assert layer.fp8_meta["scaling_fwd"].scale.is_meta
    assert layer.fp8_meta["scaling_bwd"].amax_history.is_meta
    layer.to_empty(device="cpu")
    assert layer.fp8_meta["scaling_fwd"].scale.tolist() == [1, 1, 1], "there are no numbers to come back with"
    assert not layer.fp8_meta["scaling_bwd"].amax_history.any()


def test_state_is_neither_parameter_nor_buffer() -> None:
    layer = trained()
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert list(layer.buffers()) == []


def test_a_copy_lives_its_own_life() -> None:
    a = trained()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.weight.mul_(4.0)
    same = a.fp8_meta["scaling_fwd"].scale.clone()
    with te.autocast(recipe=RECIPE):
        b(torch.full((8, 32), 50.0, dtype=torch.bfloat16))
    assert torch.equal(a.fp8_meta["scaling_fwd"].scale, same)
    assert not torch.equal(b.fp8_meta["scaling_fwd"].scale, same)
    c = pickle.loads(pickle.dumps(a))
    assert torch.equal(step(a), step(c))


def test_the_registry_keeps_nothing_alive() -> None:
    gc.collect()
    before = len(scaling._MODULES)
    layers = [trained() for _ in range(3)]
    assert len(scaling._MODULES) == before + 3
    del layers
    gc.collect()
    assert len(scaling._MODULES) == before


def test_round_trip_continues_with_the_same_bits(tmp_path, same_bits) -> None:
    a = trained(3)
    torch.save(a.state_dict(), tmp_path / "model.pt")
    b = te.Linear(32, 16, params_dtype=torch.bfloat16)
    b.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True), strict=True)
    for _ in range(3):
        same_bits(step(a), step(b))
    for key in ("scaling_fwd", "scaling_bwd"):
        same_bits(a.fp8_meta[key].scale, b.fp8_meta[key].scale, key)
        same_bits(a.fp8_meta[key].amax_history, b.fp8_meta[key].amax_history, key)


@pytest.mark.parametrize("rows", [2, 6])
def test_a_history_of_another_length_is_loaded_and_then_fitted_to_the_recipe(rows: int) -> None:
    a, b = trained(), trained()
    with te.autocast(recipe=te.DelayedScaling(amax_history_len=rows)):
        a(torch.ones(8, 32, dtype=torch.bfloat16))
    b.load_state_dict(a.state_dict())
    assert b.fp8_meta["scaling_fwd"].amax_history.shape == (rows, 3)
    assert torch.equal(step(a), step(b))
    for key, columns in (("scaling_fwd", 3), ("scaling_bwd", 2)):
        assert b.fp8_meta[key].amax_history.shape == (4, columns)
        assert torch.equal(b.fp8_meta[key].amax_history, a.fp8_meta[key].amax_history)


def test_loaded_state_is_the_modules_own() -> None:
    """Training after a load leaves what was loaded as it was, and another module that loaded it too."""
    state = trained().state_dict()
    before = copy.deepcopy(state)
    one, other = (te.Linear(32, 16, params_dtype=torch.bfloat16) for _ in range(2))
    for layer in (one, other):
        layer.load_state_dict(state)
    step(one)
    for name, value in state.items():
        assert torch.equal(value, before[name]), name
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_safetensors_round_trip(tmp_path) -> None:
    a = trained()
    safetensors.torch.save_file(a.state_dict(), tmp_path / "model.safetensors")
    b = te.Linear(32, 16, params_dtype=torch.bfloat16)
    b.load_state_dict(safetensors.torch.load_file(tmp_path / "model.safetensors"))
    assert torch.equal(step(a), step(b))


def test_state_is_one_plain_tensor_a_layer_from_construction_on() -> None:
    model = torch.nn.Sequential(
        trained(), torch.nn.ReLU(), te.Linear(16, 16), te.LayerNormMLP(16, 32), te.LayerNorm(16)
    )
    state = model.state_dict()
    assert {k: list(v.shape) for k, v in state.items() if "state" in k} == {
        "0._extra_state": [1 + 4, 3 + 2],
        "2._extra_state": [1 + 1024, 3 + 2],
        "3._extra_state": [1 + 1024, 6 + 4],
    }
    assert {type(v) for k, v in state.items() if "state" not in k} == {torch.Tensor}
    assert {type(v) for v in copy.deepcopy(state).values()} == {torch.Tensor}  # and pickles: test_packed_state.py
    fresh = state["2._extra_state"]
    assert bool((fresh[0] == 1).all())
    assert not bool(fresh[1:].any())
    forward, backward = (model[0].fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd"))
    said = torch.tensor([backward.scale[0], 2.0])  # in place of grad_input's scale of 1: HYBRID with margin 0
    assert torch.equal(state["0._extra_state"][0], torch.cat([forward.scale, said]))
    assert torch.equal(state["0._extra_state"][1:, :3], forward.amax_history)
    assert torch.equal(state["0._extra_state"][1:, 3:], backward.amax_history)


def older(state: dict[str, torch.Tensor], columns: int = 3) -> dict[str, torch.Tensor]:
    """A layer's checkpoint with its state as four tensors."""
    state = dict(state)
    packed = state.pop("_extra_state")
    halves = (packed[:, :columns], packed[:, columns:])
    parts = [part for half in halves for part in (half[0].clone(), half[1:].clone())]
    return {**state, **dict(zip(KEYS, parts, strict=True))}


def test_four_tensors_load_as_well(same_bits) -> None:
    a, b = trained(3), te.Linear(32, 16, params_dtype=torch.bfloat16)
    b.load_state_dict(older(a.state_dict()), strict=True)
    for _ in range(3):
        same_bits(step(a), step(b))


def test_a_plain_checkpoint_loads_strictly_with_one_notice(caplog, monkeypatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    plain = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 16), torch.nn.Linear(16, 16)).bfloat16()
    model = torch.nn.Sequential(
        te.LayerNorm(32, params_dtype=torch.bfloat16), trained(), te.Linear(16, 16, params_dtype=torch.bfloat16)
    )
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(plain.state_dict(), strict=True)
    assert [r.message for r in caplog.records if "no FP8 state" in r.message] == [
        "checkpoint: no FP8 state for '1': scales start at 1, as in a fresh module (said once)."
    ]
    for meta in (model[1].fp8_meta[key] for key in ("scaling_fwd", "scaling_bwd")):
        assert bool((meta.scale == 1).all())
        assert not bool(meta.amax_history.any())


def test_a_checkpoint_of_a_layer_that_never_ran_in_fp8_is_noticed_too(caplog, monkeypatch) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    with caplog.at_level(logging.WARNING):
        trained().load_state_dict(te.Linear(32, 16, params_dtype=torch.bfloat16).state_dict())
    assert "no FP8 state for 'the module'" in caplog.text


def test_a_part_of_a_checkpoint_leaves_other_layers_state_alone() -> None:
    model = torch.nn.Sequential(trained(), torch.nn.Linear(16, 16))
    scale = model[0].fp8_meta["scaling_fwd"].scale.clone()
    model.load_state_dict({"1.bias": torch.zeros(16)}, strict=False)
    assert torch.equal(model[0].fp8_meta["scaling_fwd"].scale, scale)


def test_loading_keeps_the_memory_that_a_cuda_graph_reads() -> None:
    layer = trained()
    meta = layer.fp8_meta["scaling_fwd"]
    scale, history = meta.scale, meta.amax_history
    layer.load_state_dict(trained(4).state_dict())
    assert layer.fp8_meta["scaling_fwd"].scale is scale
    assert layer.fp8_meta["scaling_fwd"].amax_history is history


def test_loading_without_state_between_forward_and_backward() -> None:
    layer = trained()
    x = torch.ones(8, 32, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        y = layer(x)
    plain = {name: value.clone() for name, value in layer.state_dict().items() if name in ("weight", "bias")}
    layer.load_state_dict(plain)
    y.sum().backward()
    assert layer.fp8_meta["scaling_bwd"].scale[0] == 57344.0


def broken(change, form=dict):  # type: ignore[no-untyped-def]
    state = form(trained().state_dict())
    change(state)
    return state


def put(key: str, at: tuple[int, int], value: float):  # type: ignore[no-untyped-def]
    return lambda state: state[key].__setitem__(at, value)


INF = float("inf")
BROKEN = [
    (broken(lambda s: s.pop(KEYS[1]), older), r"partial FP8 state, (2\.)?scaling_fwd.amax_history missing beside"),
    (broken(lambda s: s.update({KEYS[0]: torch.ones(2)}), older), r"scaling_fwd.scale is torch.float32 \[2\]; float32"),
    (broken(lambda s: s.update({KEYS[0]: torch.ones(3).half()}), older), "scaling_fwd.scale is torch.float16"),
    (broken(lambda s: s.update({KEYS[0]: [1.0, 1.0, 1.0]}), older), "scaling_fwd.scale is a list; a tensor is"),
    (broken(lambda s: s.update({KEYS[3]: torch.ones(0, 2)}), older), r"amax_history is torch.float32 \[0, 2\]"),
    (broken(lambda s: s.update({KEYS[3]: torch.ones(5, 2)}), older), r"histories of \[4, 5\] rows; one length"),
    (broken(lambda s: s.update({KEYS[2]: torch.tensor([0.0, 1.0])}), older), "finite scales > 0"),
    (broken(lambda s: s.update({KEYS[2]: torch.tensor([INF, 1.0])}), older), "finite scales > 0"),
    (broken(lambda s: s.update({KEYS[2]: torch.tensor([1e-44, 1.0])}), older), "with finite inverses are accepted"),
    (broken(lambda s: s.update({KEYS[1]: -torch.ones(4, 3)}), older), "amaxes >= 0 are accepted"),
    (broken(put("_extra_state", (0, 1), 1e-44)), r"_extra_state\[0\]=.*with finite inverses are accepted"),
    (broken(put("_extra_state", (0, 4), -1.0)), "finite scales > 0"),
    (broken(put("_extra_state", (2, 0), float("nan"))), r"_extra_state\[1:\] holds negative numbers or NaN"),
    (broken(lambda s: s.update(_extra_state=torch.ones(5, 4))), r"_extra_state is torch.float32 \[5, 4\]; float32 \[1"),
    (broken(lambda s: s.update(_extra_state=torch.ones(1, 5))), r"\[1, 5\]; float32 \[1 \+ amax_history_len, 5\]"),
    (broken(lambda s: s.update(_extra_state=torch.ones(99, dtype=torch.uint8))), "_extra_state is no whole pickle"),
    (broken(lambda s: s.update(_extra_state=torch.ones(5, 5, device="meta"))), "_extra_state is on the meta device"),
    (broken(lambda s: s.update(weight=torch.ones(16, 32, device="meta"))), "weight is on the meta device"),
    (broken(lambda s: s.update(weight=torch.ones(16, 32).to_sparse())), "weight is sparse or nested"),
    (broken(lambda s: s.update(weight=torch.ones(16, 31))), r"weight has shape \[16, 31\]; \[16, 32\] is accepted"),
    (broken(lambda s: s.update(bias=torch.ones(16, dtype=torch.int64))), "bias is torch.int64; a floating-point"),
    (broken(lambda s: s["weight"].fill_(float("nan"))), "weight holds 512 NaN and 0 infinities; finite weights"),
    (broken(put("weight", (3, 4), INF)), "weight holds 0 NaN and 1 infinities; finite weights are accepted"),
    (broken(lambda s: s["bias"].fill_(-INF)), "bias holds 0 NaN and 16 infinities; finite weights are accepted"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "sentence"), BROKEN)
def test_broken_checkpoints_are_refused_before_anything_changes(state: dict[str, torch.Tensor], sentence: str) -> None:
    layer = trained()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises((ValueError, TypeError), match=sentence):
        layer.load_state_dict(state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize(("state", "sentence"), BROKEN)
def test_a_broken_layer_keeps_the_whole_model_from_changing(state: dict[str, torch.Tensor], sentence: str) -> None:
    """The root is the user's own, and the layer before the broken one has a right checkpoint."""
    model = torch.nn.Sequential(trained(), torch.nn.Linear(16, 32), trained(3))
    before = copy.deepcopy(model.state_dict())
    whole = {**{f"0.{k}": v for k, v in trained(5).state_dict().items()}, **{f"2.{k}": v for k, v in state.items()}}
    whole |= {"1.weight": torch.zeros(32, 16), "1.bias": torch.zeros(32)}
    with pytest.raises((ValueError, TypeError), match=sentence):
        model.load_state_dict(whole)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    whole |= {f"2.{k}": v for k, v in trained().state_dict().items()}
    whole = {k: v for k, v in whole.items() if not k.startswith("2.scaling")}
    model.load_state_dict(whole)
    assert not torch.equal(model[0].weight, before["0.weight"]), "and a right one loads afterwards"


def test_assigned_weights_are_of_a_dtype_that_layers_compute_with() -> None:
    model = torch.nn.Sequential(te.LayerNorm(16), te.Linear(16, 16, params_dtype=torch.bfloat16))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    for name in ("0.weight", "1.bias"):
        wide = {**state, name: state[name].double() + 1}
        sentence = (
            f"^checkpoint: {name} is torch.float64; float32, bfloat16 and float16 are accepted with assign=True.$"
        )
        with pytest.raises(ValueError, match=sentence):
            model.load_state_dict(wide, assign=True)
        assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
        model.load_state_dict(wide)  # copied, which rounds
        assert model.state_dict()[name].dtype == state[name].dtype
        model.load_state_dict(state)
