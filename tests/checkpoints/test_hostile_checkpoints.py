"""A hostile or broken `_extra_state` is refused in one sentence, nothing of it is executed, and nothing changes."""

import copy
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from golden import record_transformer_engine_checkpoints as recorder
from hypothesis import given
from hypothesis import strategies as st
from shared.pickled_states import KEY, fresh_state, trained, written

import reference as te
from reference.checkpoints import pickled
from reference.checkpoints.pickled import Call, Global

GOLDEN = Path(__file__).parents[1] / "golden" / recorder.FILE
RECORDED: dict[str, Any] = torch.load(GOLDEN, weights_only=True)["older"]["forms"]


class Hostile:
    """Its pickle would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


def hostile(folder: Path) -> dict[str, Any]:
    one = Hostile(folder)
    pickles = {
        "alone": pickle.dumps(one),
        "protocol 0": pickle.dumps(one, 0),
        "a scale": pickle.dumps({**fresh_state(), "scale_fwd": one}),
        "beside": pickle.dumps({**fresh_state(), "extra_fp8_variables": {"num_gemms": one}}),
        "the recipe": pickle.dumps({**fresh_state(), "recipe": one}),
        "a key": pickle.dumps({**fresh_state(), (1, one): 1}),
        "a storage": pickled.dump(
            {
                **fresh_state(),
                "scale_fwd": Call(
                    Global("torch._utils", "_rebuild_tensor_v2"),
                    (
                        Call(Global("torch.storage", "_load_from_bytes"), (pickle.dumps(one) * 5,)),
                        *(0, (3,), (1,), False, {}),
                    ),
                ),
            }
        ),
    }
    found: dict[str, Any] = {key: torch.frombuffer(bytearray(data), dtype=torch.uint8) for key, data in pickles.items()}
    found["an io.BytesIO"] = io.BytesIO()
    torch.save({**fresh_state(), "scale_fwd": one}, found["an io.BytesIO"])
    return found


REFUSED = (
    r"^checkpoint: 2._extra_state is a pickle that names 'posix.mkdir', which was not executed; the FP8 state of a "
    r"layer of Transformer Engine is accepted: scale_fwd, amax_history_fwd, scale_bwd, amax_history_bwd, and a "
    r"recipe\.$"
)


def test_a_hostile_checkpoint_is_refused_in_a_sentence_and_changes_nothing(tmp_path: Path) -> None:
    model = torch.nn.Sequential(trained(), torch.nn.Linear(16, 32), trained())
    before = copy.deepcopy(model.state_dict())
    recipe = model[2].fp8_meta["recipe"]
    other = {key: value if key.endswith(KEY) else value + 1 for key, value in before.items()}
    state = before[f"0.{KEY}"].clone()
    state[1:] += 1  # other amaxes
    for name, value in hostile(tmp_path / "made").items():
        with pytest.raises(ValueError, match=REFUSED):
            model.load_state_dict({**other, f"2.{KEY}": value})
        with pytest.raises(ValueError, match=r"^checkpoint: Linear._extra_state is a pickle that names 'posix.mkdir'"):
            model[2].set_extra_state(value)
        with pytest.raises(ValueError, match=r"^checkpoint: 2._extra_state is a pickle that names 'posix.mkdir'"):
            te.load_fp8_state(model, {f"0.{KEY}": state, f"2.{KEY}": value})
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        assert model[2].fp8_meta["recipe"] is recipe
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match=r"^checkpoint: layernorm._extra_state is a pickle that names 'posix.mkdir'"):
        torch.nn.ModuleDict({"layernorm": te.LayerNorm(16)}).load_state_dict(
            {"layernorm.weight": torch.ones(16), f"layernorm.{KEY}": value}, strict=False
        )


def archive(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    found = io.BytesIO()
    with zipfile.ZipFile(found, "w", compression) as opened:
        for name, data in files.items():
            opened.writestr(name, data)
    return found


def tensor(*args: Any, storage: str = "FloatStorage") -> Call:
    """A record of a tensor over four numbers."""
    (data,) = torch.ones(4)._typed_storage().__reduce__()[1]
    data = data.replace(b"FloatStorage", storage.encode())
    return Call(
        Global("torch._utils", "_rebuild_tensor_v2"),
        (Call(Global("torch.storage", "_load_from_bytes"), (data,)), *args),
    )


NO_TENSOR = "is a pickle with a scale or an amax history that is no whole fp32 tensor; the FP8 state of a layer"
BROKEN = {
    "negative": (written({"scale_fwd": -torch.ones(3)}), r"\[scale_fwd\]=.*; finite scales > 0"),
    "NaN": (written({"amax_history_bwd": torch.full((4, 2), torch.nan)}), r"\[amax_history_bwd\] holds negative"),
    "columns": (written({}, columns=(6, 4)), r"\[scale_fwd\] is torch.float32 \[6\]; float32 \[3\] is accepted"),
    "rows": (written({"amax_history_bwd": torch.zeros(5, 2)}), r"histories of \[4, 5\] rows; one length is accepted"),
    "missing": (
        written({}, drop="scale_bwd"),
        "is a pickle with scale_fwd and amax_history_fwd and amax_history_bwd ",
    ),
    "no dictionary": (torch.frombuffer(bytearray(pickle.dumps([1])), dtype=torch.uint8), "is a pickled list; the FP8"),
    "another": (torch.frombuffer(bytearray(pickle.dumps({"a": 1})), dtype=torch.uint8), "is a pickle of 'a', without"),
    "no pickle": (torch.ones(99, dtype=torch.uint8), "is no whole pickle; the FP8 state of a layer"),
    "half": (written({})[:-200], "is no whole pickle"),
    "a list": (written({"scale_fwd": [1.0, 1.0, 1.0]}), NO_TENSOR),
    "fp16": (written({"scale_fwd": torch.ones(3, dtype=torch.float16)}), "is a pickle that names 'torch.HalfStorage'"),
    "beyond": (written({"scale_fwd": tensor(2, (3,), (1,))}), NO_TENSOR),
    "expanded": (written({"amax_history_fwd": tensor(0, (1 << 40, 3), (0, 1))}), NO_TENSOR),
    "huge": (written({"scale_fwd": tensor(0, (1 << 70,), (1,))}), NO_TENSOR),
    "below": (written({"scale_fwd": tensor(-1, (3,), (1,))}), NO_TENSOR),
    "half a storage": (written({"scale_fwd": tensor(0, (3,), (1,), storage="HalfStorage")}), "names 'torch.HalfStor"),
    "no archive": (io.BytesIO(pickle.dumps(None)), "is an io.BytesIO without a whole file of torch.save.s; the FP8"),
    "empty": (io.BytesIO(), "is an io.BytesIO without a whole file of"),
    "no pickle inside": (archive({"a/b": b""}), "is no whole pickle"),
    "compressed": (
        archive({"a/data.pkl": pickle.dumps([0] * 1000)}, zipfile.ZIP_DEFLATED),
        "is an io.BytesIO without a whole file of",
    ),
    "a storage short": (
        archive(
            {
                "a/data.pkl": b"}(X\x09\x00\x00\x00scale_fwdNX\x10\x00\x00\x00amax_history_fwdN"
                b"X\x09\x00\x00\x00scale_bwdNX\x10\x00\x00\x00amax_history_bwdNu."
            }
        ),
        NO_TENSOR,
    ),
}


@pytest.mark.parametrize(("value", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_broken_state_is_refused_before_anything_changes(value: Any, sentence: str) -> None:
    layer = trained()
    before = copy.deepcopy(layer.state_dict())
    with pytest.raises(ValueError, match=rf"^checkpoint: _extra_state ?.*{sentence}"):
        layer.load_state_dict({**{key: x + 1 for key, x in before.items()}, KEY: value})
    assert all(torch.equal(x, before[key]) for key, x in layer.state_dict().items())


@given(st.data())
def test_a_damaged_state_is_read_or_refused(draw: Any) -> None:
    """Any bytes of Transformer Engine's own changed, in both forms."""
    form = draw.draw(st.sampled_from(sorted(RECORDED)))
    data = bytearray(RECORDED[form].numpy().tobytes())
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    value = io.BytesIO(data) if form in ("1.0", "1.6") else torch.frombuffer(data, dtype=torch.uint8)
    layer = te.Linear(96, 16, **recorder.BF16)
    refused = None
    try:
        layer.set_extra_state(value)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert refused.startswith("checkpoint: Linear._extra_state")
        assert "scaling_fwd" not in layer.fp8_meta


@given(st.data())
def test_a_malformed_state_of_ours_is_named_and_changes_nothing(draw: Any) -> None:
    """Tensors of any dtype, shape, layout and device; what is accepted is a state."""
    shape = draw.draw(st.sampled_from([(), (0,), (5,), (0, 5), (1, 5), (4, 5), (4, 0), (0, 0), (4, 4), (2, 2, 5)]))
    dtype = draw.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]))
    value: Any = torch.ones(shape, dtype=dtype)
    if value.numel() and dtype.is_floating_point:
        number = draw.draw(st.sampled_from([1.0, 0.0, -1.0, float("nan"), float("inf"), 1e-45]))
        value.view(-1)[draw.draw(st.integers(0, value.numel() - 1))] = number
    value = draw.draw(st.sampled_from([value, value, value, value.to("meta"), value.to_sparse(), [1.0], None, "text"]))
    layer = trained()
    before = copy.deepcopy(layer.state_dict())
    for load in (layer.set_extra_state, lambda x: layer.load_state_dict({**before, KEY: x})):
        try:
            load(value)
        except (TypeError, ValueError) as error:
            assert str(error).startswith("checkpoint: ")  # noqa: PT017
            assert KEY in str(error)  # noqa: PT017
            assert all(torch.equal(x, before[key]) for key, x in layer.state_dict().items())
        else:
            assert value is None or tuple(value.shape) == (0,) or (value.dim() == 2 and value.shape[0] >= 2)
            layer.load_state_dict(before)


def test_a_state_without_rows_is_refused_by_name() -> None:
    layer = trained()
    for shape in ((0, 5), (4, 0)):
        with pytest.raises(ValueError, match=rf"^checkpoint: _extra_state is torch.float32 \[{shape[0]}, {shape[1]}\]"):
            layer.load_state_dict({**layer.state_dict(), KEY: torch.zeros(shape)})
        with pytest.raises(ValueError, match=r"^checkpoint: _extra_state is torch.float32 \["):
            te.load_fp8_state(layer, {KEY: torch.zeros(shape)})
