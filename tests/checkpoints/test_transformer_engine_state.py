"""Runs move between Transformer Engine and this project, both ways; a hostile checkpoint changes nothing.

tests/golden/record_transformer_engine_checkpoints.py recorded what Transformer Engine saves, and how it goes on.
"""

import collections
import copy
import enum
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from golden import record_transformer_engine_checkpoints as recorder
from shared.bits import assert_same_bits
from shared.pickled_states import KEY, trained, written

import reference as te
from optimized.compare import differing, fp8_state
from optimized.recordings.transformer_engine_cases import Run, inputs
from reference.checkpoints import transformer_engine_state
from reference.checkpoints.pickled import Call, Global

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed")
BF16 = torch.bfloat16
GOLDEN = Path(__file__).parents[1] / "golden" / recorder.FILE
RECORDED: dict[str, Any] = torch.load(GOLDEN, weights_only=True)
FORMAT = Global("transformer_engine.common.recipe", "Format")


# --- Transformer Engine's classes, as far as its pickles name them --------------------------------------------


class Format(enum.Enum):
    E4M3 = (448, 448)
    HYBRID = (448, 57344)


class Recipe:
    pass


class Unpickler(pickle.Unpickler):
    """Reads our own recordings as Transformer Engine does."""

    def find_class(self, module: str, name: str) -> Any:
        own = {"DelayedScaling": Recipe, "Format": Format, "_FormatHelper": collections.namedtuple("Helper", "fwd bwd")}
        return own[name] if module == "transformer_engine.common.recipe" else super().find_class(module, name)


def unpickled(value: torch.Tensor) -> dict[str, Any]:
    found = Unpickler(io.BytesIO(value.numpy().tobytes())).load()
    assert isinstance(found, dict)
    return found


def four(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of an unpickled state, by our names."""
    return {ours: state[theirs].cpu() for ours, theirs in transformer_engine_state.PARTS.items()}


def assert_state(layer: torch.nn.Module, state: dict[str, torch.Tensor]) -> int:
    """Every layer inside has the scales and histories of a checkpoint; how many have any."""
    count = 0
    for name, module in layer.named_modules():
        packed = state.get(f"{name}.{KEY}" if name else KEY)
        if packed is not None and packed.numel() and fp8_state(module):
            for part, tensor in four(unpickled(packed)).items():
                assert_same_bits(fp8_state(module)[part], tensor, f"{name} {part}")
            count += 1
    return count


# Words of the fourth step, wherever it started, in which the libraries differ, because of norms and activations
# (docs/results/transformer_engine.json). All others are the same: y, dx, gradients, scales and histories.
DIFFERENT = {
    "LayerNormLinear, bf16": {"scaling_fwd.amax_history": 1},
    "LayerNormMLP, gelu, bf16": {"scaling_fwd.scale": 1, "scaling_fwd.amax_history": 1},
    "TransformerLayer, bf16": {
        "y": 5,
        "self_attention.layernorm_qkv.scaling_fwd.amax_history": 1,
        "layernorm_mlp.scaling_fwd.amax_history": 1,
        "layernorm_mlp.scaling_bwd.scale": 1,
        "layernorm_mlp.scaling_bwd.amax_history": 1,
    },
}


def different(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> dict[str, int]:
    """How many words of each result differ, where any does."""
    assert ours.keys() == theirs.keys()
    return {key: count for key, value in theirs.items() if (count := differing(ours[key], value))}


# --- from Transformer Engine ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorder.STATELESS)
def test_a_checkpoint_of_a_recipe_without_state_loads_and_goes_on(name: str) -> None:
    """Every key is known, and the next step has the library's words."""
    recorded = RECORDED["stateless"][name]
    run = Run(name, te, te.recipe, "cpu")
    run.layer.load_state_dict(recorded["state"], strict=True)
    assert not different(run.step(*inputs(name, recorder.DONE)), recorded["next"])


@pytest.mark.parametrize("name", recorder.NAMES)
def test_a_checkpoint_of_transformer_engines_loads_and_goes_on(name: str) -> None:
    """Every key is known, scales and histories are its own, and the next step has its bits (see `DIFFERENT`)."""
    recorded = RECORDED["theirs"][name]
    run = Run(name, te, te.recipe, "cpu")
    run.layer.load_state_dict(recorded["state"], strict=True)
    assert assert_state(run.layer, recorded["state"]) == len(run.parts())
    for part in run.parts().values():
        assert part.fp8_meta["recipe"] == run.recipe
    assert different(run.step(*inputs(name, recorder.DONE)), recorded["next"]) == DIFFERENT.get(name, {})


def test_names_and_shapes_are_transformer_engines() -> None:
    """`te.transformer_engine_state_dict` has its keys, and its state dict loads with strict=True."""
    for name, (kind, sizes, arguments) in recorder.LAYERS.items():
        on = {} if kind == "DotProductAttention" else recorder.BF16
        layer = getattr(te, kind)(*sizes, **on, **arguments)
        ours = [(key, list(value.shape)) for key, value in te.transformer_engine_state_dict(layer).items()]
        assert sorted(ours) == sorted((key, shape) for key, shape in RECORDED["keys"][name]), name
        layer.load_state_dict(
            {
                key: torch.ones(shape, dtype=torch.uint8 if KEY in key else BF16)
                for key, shape in RECORDED["keys"][name]
            },
            strict=True,
        )


def test_the_forms_of_older_releases_hold_the_same_state() -> None:
    recorded = RECORDED["older"]
    run = Run(recorder.NAMES[0], te, te.recipe, "cpu")
    expected = four(unpickled(recorded["state"][KEY]))
    for release, data in recorded["forms"].items():
        value = data if "ONNX" in release or release == "1.14" else io.BytesIO(data.numpy().tobytes())
        run.layer.load_state_dict({**recorded["state"], KEY: value})
        for part, tensor in expected.items():
            assert_same_bits(fp8_state(run.layer)[part], tensor, f"{release} {part}")
        run.layer.fp8_meta["scaling_fwd"].reset()


@pytest.mark.parametrize("release", [*RECORDED["older"]["none"], "None", "2.18", "1.6 as bytes"])
def test_no_state_starts_fresh(release: str) -> None:
    value: Any = {"None": None, "2.18": torch.empty(0, dtype=torch.uint8)}.get(release)
    if release in RECORDED["older"]["none"]:
        value = RECORDED["older"]["none"][release]
        value = io.BytesIO(value.numpy().tobytes()) if release.startswith("1.6") else value
    layer = trained()
    layer.load_state_dict({**layer.state_dict(), KEY: value})
    assert fp8_state(layer)["scaling_fwd.scale"].tolist() == [1, 1, 1]
    assert not fp8_state(layer)["scaling_bwd.amax_history"].any()


def test_attention_that_ran_in_16_bits_is_accepted_and_in_fp8_refused() -> None:
    state = RECORDED["attention"]["16 bits"]
    key = f"self_attention.core_attention.{KEY}"
    assert state[key].numel() > 1000
    layer = te.TransformerLayer(128, 128, 2, **recorder.BF16)
    whole = {**te.transformer_engine_state_dict(layer), **state}
    layer.load_state_dict(whole, strict=True)
    assert assert_state(layer, state) == 3
    older = {name.replace("core_attention.", "core_attention.fused_attention."): x for name, x in whole.items()}
    layer.load_state_dict(older, strict=True)
    used = written({"scale_fwd": torch.full((9,), 2.0)}, columns=(9, 6))
    before = copy.deepcopy(layer.state_dict())
    sentence = (
        rf"^checkpoint: {key} holds FP8 state that this module has no use for \(a norm has none, and Transformer "
        r"Engine's attention has one scale for q, k and v\); a checkpoint without this entry is accepted\.$"
    )
    with pytest.raises(ValueError, match=sentence):
        layer.load_state_dict({**whole, key: used, "layernorm_mlp.fc1_bias": torch.ones(128)})
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


# --- to Transformer Engine, and back --------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorder.NAMES)
def test_transformer_engine_went_on_from_our_checkpoint(name: str) -> None:
    """What it saves after the load is our state, and its next step has our bits (see `DIFFERENT`)."""
    recorded = RECORDED["ours"][name]
    run = recorder.trained(name, te, te.recipe, "cpu")
    assert assert_state(run.layer, recorded["state"]) == len(run.parts())
    for key, value in run.layer.named_parameters():
        assert_same_bits(value.detach(), recorded["state"][key], key)
    assert different(run.step(*inputs(name, recorder.DONE)), recorded["next"]) == DIFFERENT.get(name, {})


@pytest.mark.parametrize("name", recorder.NAMES)
def test_there_and_back_the_bits_are_those_of_a_run_that_never_stopped(name: str) -> None:
    run, other = recorder.trained(name, te, te.recipe, "cpu"), Run(name, te, te.recipe, "cpu")
    state = te.transformer_engine_state_dict(run.layer)
    assert {value.dtype for key, value in state.items() if KEY in key} == {torch.uint8}
    other.layer.load_state_dict(state, strict=True)
    step = inputs(name, recorder.DONE)
    expected, found = run.step(*step), other.step(*step)
    for key, value in expected.items():
        assert_same_bits(found[key], value, key)


def test_the_recipe_goes_with_the_state() -> None:
    recipe = te.DelayedScaling(2, te.Format.E4M3, 5, "most_recent", reduce_amax=False)
    state = unpickled(te.transformer_engine_state_dict(trained(recipe))[KEY])
    theirs = vars(state["recipe"])
    assert (theirs["margin"], theirs["fp8_format"], theirs["amax_history_len"]) == (2, Format.E4M3, 5)
    assert (theirs["amax_compute_algo"], theirs["reduce_amax"], theirs["backward_override"]) == (
        "most_recent",
        False,
        None,
    )
    noted = {"fp8_checkpoint": True, "num_gemms": 1, "fp8_max_fwd": 448, "fp8_max_bwd": 448}
    assert state["extra_fp8_variables"] == noted
    layer = te.Linear(32, 16, **recorder.BF16)
    layer.load_state_dict(te.transformer_engine_state_dict(trained(recipe)))
    assert layer.fp8_meta["recipe"] == recipe


def test_the_recipe_that_is_written_has_the_histories_length() -> None:
    """Transformer Engine makes a history of the recipe's length and copies into it."""
    layer = trained()
    layer.load_state_dict(trained(te.DelayedScaling(amax_history_len=7)).state_dict())
    state = unpickled(te.transformer_engine_state_dict(layer)[KEY])
    assert (state["recipe"].amax_history_len, len(state["amax_history_fwd"])) == (7, 7)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"fp8_mha": True}, "fp8_mha=True is not offered"),
        ({"margin": 99}, "an int from 0 to 18 is accepted"),
        (
            {"fp8_format": Call(Global("transformer_engine.common.recipe", "Format"), ((1, 2),))},
            "is not a valid Format",
        ),
        ({"fp8_format": 5}, "has no attribute 'args'"),
    ],
)
def test_a_recipe_that_is_not_ours_is_left_out_with_a_notice(
    change: dict[str, Any], why: str, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("reference.support.notice._said", set())
    layer = te.Linear(32, 16, **recorder.BF16)
    recipe = Call(Global("transformer_engine.common.recipe", "DelayedScaling"), (), {"margin": 1, **change})
    layer.load_state_dict({**layer.state_dict(), KEY: written({"recipe": recipe})})
    assert "recipe" not in layer.fp8_meta
    assert f"checkpoint: {KEY} has a recipe that is not offered, and autocast's counts (" in caplog.text
    assert why in caplog.text


def test_weights_in_fp8_are_written_as_numbers() -> None:
    with te.quantized_model_init():
        layer = trained()
    state = te.transformer_engine_state_dict(layer)
    assert sorted(state) == [KEY, "bias", "weight"]
    assert state["weight"].dtype == BF16
    assert_same_bits(state["weight"], layer.weight.dequantize())
    assert sorted(layer.state_dict()) == [KEY, "bias", "weight", "weight_scale_inv"]


def test_a_layer_without_state_is_written_as_transformer_engine_writes_it() -> None:
    model = torch.nn.Sequential(te.Linear(16, 16), te.LayerNorm(16), torch.nn.Linear(16, 16))
    state = te.transformer_engine_state_dict(model)
    assert [key for key in state if KEY in key] == [f"0.{KEY}", f"1.{KEY}"]
    assert all(not state[key].numel() and state[key].dtype == torch.uint8 for key in state if KEY in key)


def test_writing_ends_with_the_call() -> None:
    layer = trained()

    def fail(*_: Any) -> None:
        raise KeyError

    handle = layer._register_state_dict_hook(fail)
    with pytest.raises(KeyError):
        te.transformer_engine_state_dict(layer)
    handle.remove()
    assert layer.state_dict()[KEY].dtype == torch.float32
    with pytest.raises(TypeError, match=r"^transformer_engine_state_dict: model=3; a torch.nn.Module is accepted.$"):
        te.transformer_engine_state_dict(3)  # type: ignore[arg-type]


def test_a_layer_on_the_meta_device_takes_the_state() -> None:
    layer = trained()
    state = te.transformer_engine_state_dict(layer)
    with torch.device("meta"):
        one, other = (te.Linear(32, 16, **recorder.BF16) for _ in range(2))
    one.load_state_dict(state, assign=True)
    other.set_extra_state(state[KEY])
    for empty in (one, other):
        for part, tensor in fp8_state(layer).items():
            assert_same_bits(fp8_state(empty)[part], tensor, part)


# --- files ----------------------------------------------------------------------------------------------------


def test_files_of_every_kind_bring_the_state(tmp_path: Path) -> None:
    layer = trained()
    state = te.transformer_engine_state_dict(layer)
    torch.save(state, tmp_path / "model.pt")
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    dcp.save(state, checkpoint_id=tmp_path / "distributed")
    file = io.BytesIO()
    torch.save({transformer_engine_state.PARTS[k]: x for k, x in four(unpickled(state[KEY])).items()}, file)
    torch.save({**state, KEY: file}, tmp_path / "older.pt")
    for name in ("model.pt", "model.safetensors", "distributed", "older.pt"):
        fresh = te.Linear(32, 16, **recorder.BF16)
        te.load_fp8_state(fresh, tmp_path / name)
        assert all(torch.equal(x, fp8_state(layer)[part]) for part, x in fp8_state(fresh).items()), name
    with torch.serialization.safe_globals([io.BytesIO]):  # as docs/checkpoints.md says
        whole = torch.load(tmp_path / "older.pt", weights_only=True)
    fresh.load_state_dict(whole, strict=True)
    none = {KEY: torch.empty(0, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"^load_fp8_state: source has no FP8 state for the module; every layer"):
        te.load_fp8_state(fresh, none)
    assert all(torch.equal(x, fp8_state(layer)[part]) for part, x in fp8_state(fresh).items())
