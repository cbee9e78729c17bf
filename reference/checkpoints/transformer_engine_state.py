"""A layer's FP8 state as Transformer Engine's checkpoints hold it, read without executing anything, and written.

Under `_extra_state` Transformer Engine puts

    an empty uint8 tensor                             no state: the layer never ran in FP8 (from 2.4 on), or its recipe
                                                      has none (from 2.18 on)
    a uint8 tensor, the bytes of a pickle             from 1.14 on; up to 0.11; and between them in ONNX exports
    an `io.BytesIO` of `torch.save`                   from 0.12 to 1.13

of None or of a dictionary: `scale_fwd`, `amax_history_fwd`, `scale_bwd` and `amax_history_bwd`, fp32 tensors whose
columns are those of `FP8TensorMeta`; from 2.0 on the `recipe`; and what the layer notes beside them. The recipe's
other kinds have none of the four tensors.

Source: Transformer Engine's `TransformerEngineBaseModule.get_extra_state` and `set_extra_state`, 0.6 to 2.20.
"""

import contextlib
import dataclasses
import io
import math
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from reference.checkpoints import pickled
from reference.checkpoints.pickled import Call, Global, Persistent, Refused
from reference.recipe import DelayedScaling, Format
from reference.state.scaling import FP8TensorMeta
from reference.support.notice import say_once

RECIPES = "transformer_engine.common.recipe"
PARTS = {  # ours → theirs
    "scaling_fwd.scale": "scale_fwd",
    "scaling_fwd.amax_history": "amax_history_fwd",
    "scaling_bwd.scale": "scale_bwd",
    "scaling_bwd.amax_history": "amax_history_bwd",
}
_FIELDS = [field.name for field in dataclasses.fields(DelayedScaling) if field.name != "override_linear_precision"]
_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_STORAGE = Global("torch.storage", "_load_from_bytes")
_FP32 = Global("torch", "FloatStorage")
_NAMES = {_TENSOR, _STORAGE, _FP32, Global("collections", "OrderedDict")}


def is_pickled(value: Any) -> bool:
    """Whether an `_extra_state` is Transformer Engine's; ours is fp32."""
    return value is None or isinstance(value, io.BytesIO) or getattr(value, "dtype", None) == torch.uint8


def read(name: str, value: Any) -> tuple[dict[str, torch.Tensor], DelayedScaling | None] | None:
    """The four tensors, on the CPU and unchecked, by the names in `PARTS`, and the recipe; None for no state.

    Args:
        name: of `value`, an `_extra_state` for which `is_pickled` holds.

    Raises:
        ValueError: it holds something else. Nothing of it was executed.
    """
    try:
        tree, stored = _tree(value)
        if tree is None or tree == {}:
            return None
        if not isinstance(tree, dict):
            raise Refused(f"is a pickled {type(tree).__name__}")
        found = [theirs for theirs in PARTS.values() if theirs in tree]
        if not found:
            if "recipe" not in tree:
                raise Refused(f"is a pickle of {', '.join(map(repr, tree))[:100]}, without scale_fwd")
            return None
        if len(found) < len(PARTS):
            raise Refused(f"is a pickle with {' and '.join(found)} alone")
        tensors = {ours: _tensor(tree[theirs], stored) for ours, theirs in PARTS.items()}
    except Refused as error:
        raise ValueError(
            f"checkpoint: {name} {error}; the FP8 state of a layer of Transformer Engine is accepted: "
            f"{', '.join(PARTS.values())}, and a recipe."
        ) from None
    return tensors, _recipe(name, tree.get("recipe"))


def _accepted(name: Global) -> bool:
    return name in _NAMES or (name.module == RECIPES and "." not in name.name)


def _tree(value: Any) -> tuple[Any, Callable[[str], bytes]]:
    """What was pickled, and a function that gives the bytes of a storage by its number."""
    if value is None:
        return None, _none_beside
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous().view(-1).numpy().tobytes()
        return pickled.load(data, _accepted) if data else None, _none_beside
    entries = _archive(value.getvalue())
    path = next((name for name in entries if name.endswith("/data.pkl")), "")
    root = path.removesuffix("data.pkl")
    return pickled.load(entries.get(path, b""), _accepted), lambda key: entries[f"{root}data/{key}"]


def _archive(data: bytes) -> dict[str, bytes]:
    """The entries of a file of `torch.save`, which compresses nothing."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        if sum(entry.file_size for entry in archive.infolist()) > len(data):  # compressed, or one in another
            raise zipfile.BadZipFile
        return {name: archive.read(name) for name in archive.namelist()}
    except Exception:  # zipfile raises what a damaged archive happens to cause
        raise Refused("is an io.BytesIO without a whole file of torch.save's") from None


def _none_beside(key: str) -> bytes:
    raise LookupError


def _tensor(value: Any, stored: Callable[[str], bytes]) -> torch.Tensor:
    """The fp32 tensor of its record; `stored` gives the bytes of a storage that lies beside the pickle."""
    try:
        storage, offset, size, strides = value.args[:4]
        data = None
        if isinstance(storage, Call) and storage.of == _STORAGE:
            stream = io.BytesIO(*storage.args)
            _, _, _, storage, _ = (pickled.load(stream, _accepted) for _ in range(5))
            stream.seek(8, io.SEEK_CUR)  # past the count
            data = stream.read()
        if value.of == _TENSOR and isinstance(storage, Persistent) and storage.id[:2] == ("storage", _FP32):
            data = stored(storage.id[2]) if data is None else data
            numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)
            if math.prod(size) <= numbers.numel():  # an expanded tensor could be larger than all memory
                return numbers.as_strided(size, strides, offset).clone(memory_format=torch.contiguous_format)
    except Refused:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError):
        pass
    raise Refused("is a pickle with a scale or an amax history that is no whole fp32 tensor")


# --- the recipe ------------------------------------------------------------------------------------------


def _recipe(name: str, value: Any) -> DelayedScaling | None:
    """The recipe of its record; None, said once, if it is none of ours. What a layer runs in is autocast's."""
    if value is None:
        return None
    try:
        if value.of != Global(RECIPES, "DelayedScaling"):
            raise ValueError(f"it is a {value.of.name}")
        fields = {key: value.state[key] for key in _FIELDS if key in value.state}
        if "fp8_format" in fields:
            limits = fields["fp8_format"].args[0]
            limits = limits.args if isinstance(limits, Call) else limits
            fields["fp8_format"] = Format(tuple(limits))
        return DelayedScaling(**fields)
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        say_once("recipe", f"checkpoint: {name} has a recipe that is not offered, and autocast's counts ({error})")
        return None


def _recipe_call(recipe: DelayedScaling) -> Call:
    limits = tuple(map(int, recipe.fp8_format.value))
    fields = {key: getattr(recipe, key) for key in _FIELDS}
    return Call(
        Global(RECIPES, "DelayedScaling"), (), {**fields, "fp8_format": Call(Global(RECIPES, "Format"), (limits,))}
    )


# --- writing ---------------------------------------------------------------------------------------------


class _Writing(threading.local):
    on = False


_writing = _Writing()


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """Let `state_dict` in this thread write what Transformer Engine reads."""
    before, _writing.on = _writing.on, True
    try:
        yield
    finally:
        _writing.on = before


def is_writing() -> bool:
    """Whether `writing` is open in this thread."""
    return _writing.on


def nothing() -> torch.Tensor:
    """The `_extra_state` of a module without state."""
    return torch.empty(0, dtype=torch.uint8, device="cpu")


def write(state: Mapping[str, Any], gemms: int) -> torch.Tensor:
    """The `_extra_state` of a layer with `gemms` GEMMs; `state` is its `fp8_meta`."""
    if "scaling_fwd" not in state:
        return nothing()
    forward, backward = (state[key] for key in ("scaling_fwd", "scaling_bwd"))
    recipe = state.get("recipe")
    recipe = recipe if isinstance(recipe, DelayedScaling) else DelayedScaling()
    recipe = dataclasses.replace(recipe, amax_history_len=forward.amax_history.shape[0], **_setting(forward, backward))
    tensors = [tensor for meta in (forward, backward) for tensor in _parts(meta)]
    noted = {
        "fp8_checkpoint": True,
        "num_gemms": gemms,
        "fp8_max_fwd": int(recipe.fp8_format.value.max_fwd),
        "fp8_max_bwd": int(recipe.fp8_format.value.max_bwd),
    }
    tree = {"recipe": _recipe_call(recipe), **dict(zip(PARTS.values(), tensors, strict=True))}
    data = pickled.dump({**tree, "extra_fp8_variables": noted})
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _setting(forward: FP8TensorMeta, backward: FP8TensorMeta) -> dict[str, Any]:
    """The fields of a recipe that say what the scales are for; none where nobody has said."""
    if forward.scaled_max is None or backward.scaled_max is None:
        return {}
    margin = round(math.log2(Format.HYBRID.fp8_max(True) / forward.scaled_max))
    hybrid = backward.scaled_max != forward.scaled_max
    return {"margin": margin, "fp8_format": Format.HYBRID if hybrid else Format.E4M3}


def _parts(meta: FP8TensorMeta) -> list[torch.Tensor]:
    return [x.detach().cpu().clone() for x in (meta.scale, meta.amax_history)]
