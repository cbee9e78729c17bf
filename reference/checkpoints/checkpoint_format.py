"""FP8 state in checkpoints: one plain tensor a layer, under the key `_extra_state`.

`_extra_state` is fp32 `[1 + amax_history_len, columns]`: the scales, and below them the rows of the amax history, row 0
first. Columns are `input, weight, output` of each GEMM, then `grad_output, grad_input` of each. The key exists from a
layer's construction on, because some loaders only fill what a model already has (torch.distributed.checkpoint, Hugging
Face's `from_pretrained`); before the first run in FP8 it holds scales of 1 and no amax. The scale of an `output` is
always 1, because it is never cast: where a weight is kept in FP8, its scale_inv stands there instead, so that a loader
that has read codes as numbers is found out. Nor is a `grad_input` cast: in place of the first one's scale stands what
the scales are for, 2^(1 + margin) in HYBRID, 2^-(1 + margin) in E4M3, or 1 where nobody has said, as in checkpoints of
earlier versions; such scales are taken to be for the recipe of the next run. Checkpoints with the four older
tensors `scaling_fwd.scale`, `scaling_fwd.amax_history`, `scaling_bwd.scale` and `scaling_bwd.amax_history` load, too,
and so do Transformer Engine's (`reference.checkpoints.transformer_engine_state`).

A load checks every layer's entries before it changes the first layer.
"""

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from reference.checkpoints import transformer_engine_state
from reference.checkpoints.packed_state import PackedState
from reference.float8.kept_tensor import FP8, KeptTensor
from reference.numbers.formats import WIDE_DTYPES
from reference.recipes.base import Format
from reference.recipes.delayed_scaling import MAX_MARGIN
from reference.recipes.quantized import KEEPING, Operand, dequantize
from reference.state.scaling import KEYS, FP8TensorMeta, columns_of

STATE = "_extra_state"
PARTS = tuple((key, part) for key in KEYS for part in ("scale", "amax_history"))
# What scales are for: the number in a checkpoint → key → `FP8TensorMeta.scaled_max`.
_SETTINGS = {
    2.0 ** (sign * (1 + margin)): {key: one.fp8_max(key == KEYS[0]) * 2.0**-margin for key in KEYS}
    for sign, one in ((1, Format.HYBRID), (-1, Format.E4M3))
    for margin in range(MAX_MARGIN + 1)
}
State = dict[str, Any]  # FP8TensorMeta by key, and "recipe" where the checkpoint has one


def pack(state: Mapping[str, FP8TensorMeta], kept: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """The state as one tensor; `kept` is the column of each weight that is kept in FP8 → its scale_inv."""
    halves = [torch.cat([state[key].scale[None], state[key].amax_history]) for key in KEYS]
    packed = torch.cat(halves, dim=1).detach()
    packed[0, state[KEYS[0]].scale.shape[0] + 1] = _setting([state[key].scaled_max for key in KEYS])
    for column, scale_inv in kept.items():
        # One that is not 1, if there is one; nor 0, which fills up the scales of blocks.
        scales = scale_inv.detach().flatten()
        packed[0, column + 1] = scales.take(((scales != 0) & (scales != 1)).int().argmax())
    return PackedState.of(packed)


def _setting(scaled_max: list[float | None]) -> float:
    """The number that says what scales are for."""
    return next((number for number, one in _SETTINGS.items() if [*one.values()] == scaled_max), 1.0)


def kept_weights(packed: Any, weights: Mapping[str, int]) -> dict[str, float]:
    """Name → scale_inv of the weights that a packed state says were kept in FP8; `weights` has their columns.

    A scale_inv of 1 is left out: codes are the numbers then.
    """
    if not isinstance(packed, torch.Tensor) or packed.is_meta or packed.dim() != 2 or not len(packed):
        return {}
    found = {name: float(packed[0, column + 1]) for name, column in weights.items() if column + 1 < packed.shape[1]}
    return {name: scale_inv for name, scale_inv in found.items() if scale_inv != 1}


def unpack(packed: torch.Tensor, columns: Mapping[str, int], device: torch.device) -> State:
    """The inverse of `pack`, in new memory on `device`; on the state's own device where `device` is meta."""
    device = packed.device if device.type == "meta" else device
    halves = packed.detach().to(device).split([columns[key] for key in KEYS], dim=1)
    state = {
        key: FP8TensorMeta(half[0].clone(), half[1:].clone(memory_format=torch.contiguous_format))
        for key, half in zip(KEYS, halves, strict=True)
    }
    state["scaling_fwd"].scale[2::3] = 1  # of outputs; see `pack`
    setting = state["scaling_bwd"].scale[1:2]
    for key, its_max in _SETTINGS.get(setting.item(), {}).items():
        state[key].scaled_max = its_max
        setting.fill_(1)
    return state


def is_ours(state: Any) -> bool:
    """Whether an `_extra_state` is a packed state, and not Transformer Engine's or empty."""
    return not transformer_engine_state.is_pickled(state) and not _is_none(state)


def _is_none(state: Any) -> bool:
    """Whether an `_extra_state` says that there is no state: the empty tensor, or a mark of PyTorch's.

    `set_model_state_dict` puts its `_EXTRA_STATE` where a model can have an entry and the checkpoint has none.
    """
    if isinstance(state, torch.Tensor):
        return state.shape == (0,)
    return type(state).__name__ == "_EXTRA_STATE"


def is_fresh(state: Mapping[str, Any]) -> bool:
    """Whether the state is that of a layer that never ran in FP8."""
    metas = [state[key] for key in KEYS]
    return all(bool((meta.scale == 1).all()) and not bool(meta.amax_history.any()) for meta in metas)


def read_pickled(name: str, value: Any, columns: Mapping[str, int], device: torch.device) -> State | None:
    """The state in an `_extra_state` of Transformer Engine's, in new memory; None for no state."""
    found = transformer_engine_state.read(name, value)
    if found is None:
        return None
    tensors, recipe = found
    theirs = transformer_engine_state.PARTS
    check_parts({f"{name}[{theirs[part]}]": tensor for part, tensor in tensors.items()}, columns)
    state = _joined(tensors.values(), torch.device("cpu") if device.type == "meta" else device)
    if recipe is None:
        return state
    for key in KEYS:
        state[key].scaled_max = recipe.scaled_max(key == KEYS[0])
    return {**state, "recipe": recipe}


def _joined(parts: Iterable[torch.Tensor], device: torch.device) -> State:
    """State of its four tensors, in the order of `PARTS`, in new memory."""
    parts = [part.detach().to(device, copy=True).contiguous() for part in parts]
    return {key: FP8TensorMeta(parts[2 * i], parts[2 * i + 1]) for i, key in enumerate(KEYS)}


def take(state_dict: dict[str, Any], prefix: str, columns: Mapping[str, int], device: torch.device) -> State | None:
    """Remove a layer's state, checked before, from `state_dict` and return it; None where there is none."""
    packed = state_dict.pop(prefix + STATE, None)
    parts = [state_dict.pop(name, None) for name in _part_names(prefix)]
    state = None
    if transformer_engine_state.is_pickled(packed):
        state = read_pickled(prefix + STATE, packed, columns, device)
    elif not _is_none(packed):
        state = unpack(packed, columns, device)
    if state is None and parts[0] is not None:
        state = _joined(parts, parts[0].device if device.type == "meta" else device)
    return state


def gemms_of(state_dict: Mapping[str, Any], prefix: str, accepted: Sequence[int]) -> int:
    """For how many GEMMs a layer's state was written, of those `accepted`; the first of them where it does not say."""
    packed, older = state_dict.get(prefix + STATE), state_dict.get(_part_names(prefix)[0])
    if packed is not None and transformer_engine_state.is_pickled(packed):
        return min(accepted)  # Transformer Engine splits no weight that is kept in FP8
    for gemms in accepted:
        columns = columns_of(gemms)
        if isinstance(packed, torch.Tensor) and packed.dim() == 2 and packed.shape[1] == sum(columns.values()):
            return gemms
        if isinstance(older, torch.Tensor) and older.shape == (columns[KEYS[0]],):
            return gemms
    return accepted[0]


def names(prefix: str) -> list[str]:
    """Every key that a layer's state may have in a checkpoint."""
    return [prefix + STATE, *_part_names(prefix)]


def _part_names(prefix: str) -> list[str]:
    return [f"{prefix}{key}.{part}" for key, part in PARTS]


# --- the checks ------------------------------------------------------------------------------------------


def check_present(state_dict: Mapping[str, Any], prefix: str, columns: Mapping[str, int]) -> None:
    """Refuse a layer's broken state, in either form; no state or an empty tensor is accepted."""
    packed, names = state_dict.get(prefix + STATE), _part_names(prefix)
    if not _is_none(packed):
        check_state(prefix + STATE, packed, columns)
    present = {name: state_dict[name] for name in names if name in state_dict}
    if present and len(present) < len(names):
        absent = [name for name in names if name not in state_dict]
        raise ValueError(
            f"checkpoint: partial FP8 state, {', '.join(absent)} missing beside {next(iter(present))}; all of "
            f"{', '.join(names)} or none of them is accepted."
        )
    if present:
        check_parts(present, columns)


def check_no_state(name: str, value: Any) -> None:
    """Refuse FP8 state of a norm, and Transformer Engine's of attention; state that was never used is accepted."""
    if _is_none(value):
        return
    found = transformer_engine_state.read(name, value) if transformer_engine_state.is_pickled(value) else ({}, None)
    for part, tensor in (
        {} if found is None else found[0] or {"": torch.ones(1, dtype=torch.float32, device="cpu")}
    ).items():
        if not bool((tensor == part.endswith(".scale")).all()):
            raise ValueError(
                f"checkpoint: {name} holds FP8 state that this module has no use for (a norm has none, and Transformer "
                f"Engine's attention has one scale for q, k and v); a checkpoint without this entry is accepted."
            )


def check_state(name: str, packed: Any, columns: Mapping[str, int]) -> None:
    """Refuse a broken `_extra_state`; None is accepted, as in Transformer Engine."""
    total = sum(columns.values())
    if isinstance(packed, torch.Tensor) or not transformer_engine_state.is_pickled(packed):
        _check_numbers(name, packed)
    if transformer_engine_state.is_pickled(packed):
        read_pickled(name, packed, columns, torch.device("cpu"))
        return
    if packed.dtype != torch.float32 or packed.dim() != 2 or packed.shape[0] < 2 or packed.shape[1] != total:
        raise ValueError(
            f"checkpoint: {name} is {packed.dtype} {list(packed.shape)}; float32 [1 + amax_history_len, {total}] is "
            f"accepted, and what Transformer Engine has pickled (uint8, or an io.BytesIO)."
        )
    _check_scale(f"{name}[0]", packed[0])
    _check_history(f"{name}[1:]", packed[1:])


def check_parts(parts: Mapping[str, Any], columns: Mapping[str, int]) -> None:
    """Refuse broken state in its older form; `parts` are the four tensors by full name, in the order of `PARTS`."""
    for (key, part), (name, value) in zip(PARTS, parts.items(), strict=True):
        _check_numbers(name, value)
        if part == "scale":
            fits, accepted = value.shape == (columns[key],), f"[{columns[key]}]"
        else:
            fits = value.dim() == 2 and value.shape[0] >= 1 and value.shape[1] == columns[key]
            accepted = f"[amax_history_len >= 1, {columns[key]}]"
        if value.dtype != torch.float32 or not fits:
            raise ValueError(
                f"checkpoint: {name} is {value.dtype} {list(value.shape)}; float32 {accepted} is accepted."
            )
        (_check_scale if part == "scale" else _check_history)(name, value)
    lengths = [value.shape[0] for (_, part), value in zip(PARTS, parts.values(), strict=True) if part != "scale"]
    if len(set(lengths)) > 1:
        raise ValueError(f"checkpoint: {', '.join(parts)} have histories of {lengths} rows; one length is accepted.")


def check_no_codes(state_dict: Mapping[str, Any], prefix: str, weights: Mapping[str, int]) -> None:
    """Refuse plain numbers beside a state which says that the weight was kept in FP8: they are its codes."""
    for name, scale_inv in kept_weights(state_dict.get(prefix + STATE), weights).items():
        value = state_dict.get(prefix + name)
        if isinstance(value, torch.Tensor) and not isinstance(value, KeptTensor) and value.dtype != FP8:
            raise ValueError(
                f"checkpoint: {prefix}{name} is {value.dtype}, and {prefix}{STATE} says that it was kept in FP8 with "
                f"scale_inv={scale_inv}: its codes may have been read as numbers; codes ({FP8}) beside their scale_inv "
                f"are accepted, or numbers without {prefix}{STATE}."
            )


def check_weight(name: str, value: Any, scale_inv: Any, parameter: torch.Tensor, assign: bool) -> None:
    """Refuse what parameter `name` cannot be loaded from: other shapes and dtypes, NaN, infinities."""
    _check_numbers(name, value)
    if value.shape != parameter.shape:
        raise ValueError(
            f"checkpoint: {name} has shape {list(value.shape)}; {list(parameter.shape)} is accepted (size mismatch)."
        )
    numbers = value.to_local() if hasattr(value, "to_local") else value
    if value.dtype.itemsize == 1:
        beside = f"{name}_scale_inv"
        if value.dtype != FP8 or scale_inv is None:
            how = f"and no {beside}" if scale_inv is None else f"beside {beside}"
            raise ValueError(f"checkpoint: {name} is {value.dtype} {how}; {FP8} with a scale_inv is accepted.")
        _check_numbers(beside, scale_inv)
        scale_inv = filled_up(scale_inv, value.shape)
        layout = layout_beside(scale_inv, value.shape)
        if scale_inv.dtype != torch.float32 or layout is None:
            others = [f"{list(one.scales(value.shape))} of {name}" for name, one in KEEPING.items()][1:]
            raise ValueError(
                f"checkpoint: {beside} is {scale_inv.dtype} {list(scale_inv.shape)}; float32 [1] is accepted, or "
                f"{', or '.join(others)}."
            )
        used = KEEPING[layout].used
        scales = (scale_inv if used is None else used(scale_inv, value.shape)).flatten()
        bad = scales[~(scales.isfinite() & (scales > 0))]
        if len(bad):
            raise ValueError(f"checkpoint: {beside}={bad[0].item()}; a finite number > 0 is accepted.")
        # A rank's rows have the scales of the whole weight, which are finite, as every number of a code is.
        rows = numbers is not value
        numbers = (
            numbers.float()
            if rows
            else dequantize(Operand(numbers, scale_inv, layout), numbers.shape[-1], torch.float32)
        )
    elif not value.is_floating_point():
        raise ValueError(f"checkpoint: {name} is {value.dtype}; a floating-point tensor is accepted.")
    elif assign and value.dtype not in WIDE_DTYPES:
        raise ValueError(
            f"checkpoint: {name} is {value.dtype}; float32, bfloat16 and float16 are accepted with assign=True."
        )
    if not bool(numbers.isfinite().all()):
        nan, infinite = int(numbers.isnan().sum()), int(numbers.isinf().sum())
        raise ValueError(f"checkpoint: {name} holds {nan} NaN and {infinite} infinities; finite weights are accepted.")


def filled_up(scale_inv: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The scales of codes of this shape, where they are those that some code has: with zeros where a layout has more.

    So lie those of DeepSeek's files, `[ceil(rows / 128), ceil(cols / 128)]`. Others are returned as they are.
    """
    for one in KEEPING.values():
        if one.used is not None and scale_inv.dim() == len(one.scales(shape)):
            whole = scale_inv.new_zeros(one.scales(shape))
            used = one.used(whole, shape)
            if used.shape == scale_inv.shape != whole.shape:
                used.copy_(scale_inv)
                return whole
    return scale_inv


def layout_beside(scale_inv: torch.Tensor, shape: torch.Size) -> str | None:
    """The layout of codes `[rows, cols]` that have these scales beside them, if there is one."""
    return next((name for name, one in KEEPING.items() if scale_inv.shape == one.scales(shape)), None)


def _check_numbers(name: str, value: Any) -> None:
    """Refuse all but dense tensors with numbers."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"checkpoint: {name} is a {type(value).__name__}; a tensor is accepted.")
    if value.is_meta or value.layout != torch.strided or value.is_nested:
        what = "on the meta device, without numbers" if value.is_meta else "sparse or nested"
        raise ValueError(f"checkpoint: {name} is {what}; a dense tensor is accepted.")


def _check_scale(name: str, scale: torch.Tensor) -> None:
    inverse = scale.reciprocal()  # what GEMMs multiply by
    if not bool((scale.isfinite() & (scale > 0) & inverse.isfinite()).all()):
        raise ValueError(f"checkpoint: {name}={scale.tolist()}; finite scales > 0 with finite inverses are accepted.")


def _check_history(name: str, history: torch.Tensor) -> None:
    if not bool((history >= 0).all()):
        raise ValueError(f"checkpoint: {name} holds negative numbers or NaN; amaxes >= 0 are accepted.")


# --- the whole model before its first layer --------------------------------------------------------------


class _Load(threading.local):
    """The last `load_state_dict` whose layers have been checked: its dictionary, and the layers by id."""

    state_dict: "weakref.ref[Any] | None" = None
    layers: frozenset[int] = frozenset()


_load = _Load()


def _under_way() -> tuple[torch.nn.Module, dict[str, Any]] | None:
    """The root and the dictionary of the running `Module.load_state_dict`, if there is one.

    torch gives a module only its own part of the dictionary, and has changed earlier modules by then.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is torch.nn.Module.load_state_dict.__code__:
            return frame.f_locals["self"], frame.f_locals["state_dict"]
        frame = frame.f_back  # type: ignore[assignment]
    return None


class Checked(Protocol):
    """What looks at its own entries before a load."""

    def check_checkpoint(self, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None: ...


def check_all(layer: Checked, state_dict: Mapping[str, Any], prefix: str, assign: bool) -> None:
    """Check what is about to be loaded; when the first layer is reached, check every layer of the model."""
    found = _under_way()
    if found is None:
        layer.check_checkpoint(state_dict, prefix, assign)
        return
    root, whole = found
    if _load.state_dict is None or _load.state_dict() is not whole:
        _load.layers, _load.state_dict = frozenset(), weakref.ref(whole)
        checked = set()
        for name, one in root.named_modules(remove_duplicate=False):
            if hasattr(one, "check_checkpoint"):
                one.check_checkpoint(whole, f"{name}." if name else "", assign)  # type: ignore[operator]
                checked.add(id(one))
        _load.layers = frozenset(checked)
    if id(layer) not in _load.layers:
        layer.check_checkpoint(state_dict, prefix, assign)
