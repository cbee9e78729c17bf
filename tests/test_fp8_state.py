"""FP8 state follows its module: devices, dtypes, copies, checkpoints."""

import copy
import gc
import logging
import pickle

import pytest
import safetensors.torch
import torch

import reference as te
from reference import scaling

RECIPE = te.DelayedScaling(amax_history_len=4)
KEYS = ["scaling_fwd.scale", "scaling_fwd.amax_history", "scaling_bwd.scale", "scaling_bwd.amax_history"]


def trained(steps: int = 2) -> te.Linear:
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


def test_keys_are_plain_tensors_inside_a_model() -> None:
    model = torch.nn.Sequential(trained(), torch.nn.ReLU(), te.Linear(16, 16))
    state = model.state_dict()
    assert [k for k in state if k.startswith("0.scaling")] == [f"0.{k}" for k in KEYS]
    assert not [k for k in state if k.startswith("2.scaling")], "never run in FP8: no state"
    assert all(isinstance(v, torch.Tensor) for v in state.values())


def test_a_plain_checkpoint_loads_strictly_with_one_notice(caplog, monkeypatch) -> None:
    monkeypatch.setattr("reference.notice._said", set())
    plain = torch.nn.Sequential(torch.nn.Linear(32, 16), torch.nn.Linear(16, 16)).bfloat16().state_dict()
    model = torch.nn.Sequential(trained(), te.Linear(16, 16, params_dtype=torch.bfloat16))
    with caplog.at_level(logging.WARNING):
        model.load_state_dict(plain, strict=True)
    assert [r.message for r in caplog.records if "no FP8 state" in r.message] == [
        "checkpoint: no FP8 state for '0': scales start at 1, as in a fresh module (said once)."
    ]
    assert model[0].fp8_meta == {}


def broken(change) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    state = trained().state_dict()
    change(state)
    return state


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        (broken(lambda s: s.pop(KEYS[1])), "partial FP8 state, scaling_fwd.amax_history missing beside"),
        (
            broken(lambda s: s.update({KEYS[0]: torch.ones(2)})),
            r"scaling_fwd.scale is torch.float32 \[2\]; float32 \[3\]",
        ),
        (broken(lambda s: s.update({KEYS[0]: torch.ones(3).half()})), "scaling_fwd.scale is torch.float16"),
        (broken(lambda s: s.update({KEYS[3]: torch.ones(0, 2)})), r"amax_history is torch.float32 \[0, 2\]"),
        (broken(lambda s: s.update({KEYS[2]: torch.tensor([0.0, 1.0])})), "finite scales > 0 are accepted"),
        (broken(lambda s: s.update({KEYS[2]: torch.tensor([float("inf"), 1.0])})), "finite scales > 0 are accepted"),
        (broken(lambda s: s.update({KEYS[1]: -torch.ones(4, 3)})), "amaxes >= 0 are accepted"),
        (broken(lambda s: s["weight"].fill_(float("nan"))), "weight holds 512 NaN; finite weights are accepted"),
    ],
)
def test_broken_checkpoints_are_refused_before_anything_changes(state: dict[str, torch.Tensor], sentence: str) -> None:
    layer = trained()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=sentence):
        layer.load_state_dict(state)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name
