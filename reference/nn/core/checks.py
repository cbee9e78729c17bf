"""Checks of forwards' arguments, made before anything changes: activations, masks, rotary angles.

A layer that is made of layers checks everything that its parts would refuse, so a refused call leaves every amax
history, random state and cached weight as it was.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.masked import MaskedTensor

from reference.arguments import MASK_TYPES, check_arguments, check_unread
from reference.nn.core.module import TransformerEngineBaseModule
from reference.nn.core.parameters import DeviceDefault, parameter_device
from reference.numbers.formats import WIDE_DTYPES
from reference.ops.attentions.attention import MAX_HEAD_DIM
from reference.state.autocast import current
from reference.support import transforms

MAX_ATTENTIONS = 65535  # batch times heads on a GPU, a dimension of the grid
CUDNN_MASK_TYPES = ("no_mask", "causal")
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Shape = tuple[int, ...]
Names = tuple[str, str, str]
"""An attention's arguments as its layer calls them: the mask's, the mask type's, the window's."""
MASK_NAMES = ("attention_mask", "attn_mask_type", "window_size")
Window = tuple[int, int] | None
NO_WINDOWS = ((-1, -1), (-1, 0))


def check_tensor(layer: str, name: str, x: Any) -> None:
    """Refuse all but dense fp32, bf16 and fp16 tensors."""
    if not isinstance(x, torch.Tensor):
        transforms.refuse(layer, x)
        raise TypeError(f"{layer}: {name}={x!r}; a tensor is accepted.")
    transforms.refuse(layer)
    if x.layout is not torch.strided or x.is_nested or isinstance(x, MaskedTensor):
        form = "nested" if x.is_nested else "masked" if isinstance(x, MaskedTensor) else f"of layout {x.layout}"
        raise TypeError(f"{layer}: {name} is a tensor that is {form}; a dense one is accepted.")
    if x.dtype not in WIDE_DTYPES:
        raise TypeError(f"{layer}: {name} has dtype {x.dtype}; float32, bfloat16 and float16 are accepted.")


def check_input(module: Any, x: Any, features: int, name: str = "inp", layer: str = "", packed: bool = False) -> None:
    """Refuse all but `[..., features]` on the device of `module`'s parameters.

    With `layer`, the layer of which `module` is a part and which errors name, only `[s, b, features]` and
    `[b, s, features]` are accepted; `packed`, `[t, features]`.
    """
    dimensions = 2 if packed else 3
    if (
        type(x) in _PLAIN
        and x.dtype in WIDE_DTYPES
        and x.layout is torch.strided
        and not x.is_nested
        and (x.dim() == dimensions if layer else x.dim() > 0)
        and x.shape[-1] == features
        and x.device == device_of(module)
        and not transforms.active()
    ):
        return
    speaker, accepted = type(module).__name__, f"[..., {features}]"
    if layer:
        speaker, accepted = layer, f"[sequence, batch, {features}], or batch first with 'bshd',"
        accepted = f"[tokens, {features}], with 'thd'," if packed else accepted
    check_tensor(speaker, name, x)
    if not (x.dim() == dimensions if layer else x.dim() > 0) or x.shape[-1] != features:
        raise ValueError(f"{speaker}: {name} has shape {list(x.shape)}; {accepted} is accepted.")
    device = device_of(module)
    if x.device != device and not (layer and (device is None or is_prepared(module))):
        raise RuntimeError(f"{speaker}: {name} is on {x.device}, the parameters on {device}; one device is accepted.")


def device_of(module: Any) -> torch.device | None:
    """The device of a layer's parameters; None for another module without parameters of its own."""
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter.device  # type: ignore[no-any-return]
    return parameter_device(module) if isinstance(module, DeviceDefault) else None


def is_prepared(module: torch.nn.Module) -> bool:
    """Whether something runs before a part's own forward; it may load the weights or change the input."""
    return "forward" in module.__dict__ or len(module._forward_pre_hooks) > 0


def activation_dtype(x: torch.Tensor) -> torch.dtype:
    """torch.autocast's dtype where that is on, otherwise x's."""
    side = x.device.type
    if side == "meta":  # which has no torch.autocast
        return x.dtype
    return torch.get_autocast_dtype(side) if torch.is_autocast_enabled(side) else x.dtype


def check_encoder_output(layer: str, x: Any, hidden_states: torch.Tensor, module: Any, batch: int | None) -> None:
    """Refuse an encoder output that cross-attention cannot read; without a dimension of `batch` it is packed."""
    check_input(module, x, hidden_states.shape[-1], "encoder_output", layer, batch is None)
    if batch is not None and x.shape[batch] != hidden_states.shape[batch]:
        raise ValueError(
            f"{layer}: encoder_output has a batch of {x.shape[batch]} and hidden_states of "
            f"{hidden_states.shape[batch]}; equal ones are accepted."
        )
    if x.dtype != hidden_states.dtype and (x.is_meta or not torch.is_autocast_enabled(x.device.type)):
        raise TypeError(
            f"{layer}: encoder_output is {x.dtype} and hidden_states {hidden_states.dtype}; one dtype is accepted."
        )


def check_mask_type(layer: str, name: str, mask_type: Any) -> str:
    """A mask type, checked."""
    if not isinstance(mask_type, str) or mask_type not in MASK_TYPES:
        check_arguments(layer, {name: mask_type})
    return mask_type


def window_of(layer: str, names: Names, mask_type: str, window: Any) -> tuple[int, int]:
    """(left, right): what a mask type leaves of a window, which is checked; -1 is no limit.

    As in Transformer Engine, a causal type makes right 0; without one (-1, 0), too, is no window.
    """
    causal = MASK_TYPES[mask_type][0] != "none"
    if window is None or (type(window) is tuple and list(map(type, window)) == [int, int] and window in NO_WINDOWS):
        return NO_WINDOWS[int(causal)]  # torch 2.11 cannot compile an index that is a bool
    check_arguments(layer, {names[2]: window})
    left, right = map(int, window)
    if (left, right) not in NO_WINDOWS and (left < 0 or (right < 0 and not causal)):
        accepted = (
            "(-1, 0), or a pair that starts with 0 or more," if causal else "(-1, -1), or a pair of ints from 0 on,"
        )
        raise ValueError(f"{layer}: {names[2]}={window} with {names[1]}={mask_type!r}; {accepted} is accepted.")
    if left < 0:
        return NO_WINDOWS[int(causal)]
    return left, 0 if causal else right


def has_diagonals(mask_type: str, window: tuple[int, int], bias: Any) -> bool:
    """Whether each sequence has a diagonal of its own, which ends at its last query and key.

    `window`: what `window_of` leaves. `bias`: a bias's type.
    """
    rule, padded = MASK_TYPES[mask_type]
    if not padded or mask_type == "arbitrary" or rule == "causal":
        return False
    return rule == "causal_bottom_right" or window[0] >= 0 or bias == "alibi"


def check_mask(
    layer: str,
    names: Names,
    mask_type: str,
    mask: Any,
    window: tuple[int, int],
    shape: Shape,
    device: torch.device,
    bias: Any = "no_bias",
) -> None:
    """Refuse a mask that does not fit the others, or attention of `shape` [b, h, sq, skv]; some types read no mask."""
    name = names[0]
    if not MASK_TYPES[mask_type][1]:
        return
    if mask is None:
        raise ValueError(f"{layer}: {names[1]}={mask_type!r} needs {name}; got None.")
    batch, _, sq, skv = shape
    if mask_type == "arbitrary":
        if isinstance(mask, tuple):
            raise TypeError(f"{layer}: {name} is a tuple; one tensor goes with 'arbitrary'.")
        _check_one_mask(layer, name, mask, shape, mask_type, device)
        return
    pair = mask if isinstance(mask, tuple) else (mask, mask)
    if len(pair) != 2:
        raise ValueError(f"{layer}: {name} is a tuple of {len(pair)}; two, the queries' and the keys', are accepted.")
    for whose, part, length in (("queries", pair[0], sq), ("keys", pair[1], skv)):
        _check_one_mask(layer, f"{name} of the {whose}", part, (batch, 1, 1, length), mask_type, device)
    if pair[0] is pair[1] or not has_diagonals(mask_type, window, bias):
        return
    for whose, part in (("queries", pair[0]), ("keys", pair[1])):
        # Elsewhere the assertion that `lengths_of_masks` makes looks at the numbers.
        if has_numbers(part) and not bool(ends_once(part)):
            raise ValueError(
                f"{layer}: {name} of the {whose} hides elements before others that it shows; two masks that hide the "
                f"end of each sequence alone are accepted with {names[1]}={mask_type!r}, whose diagonal ends there, or "
                f"'arbitrary'."
            )


def is_fake(x: torch.Tensor) -> bool:
    """Whether x is of a fake mode (`FakeTensorMode`), where no tensor has numbers."""
    return isinstance(x, FakeTensor)


def has_numbers(x: torch.Tensor) -> bool:
    """Whether Python can look at x's numbers, and without waiting for a device."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not is_fake(x)


def ends_once(mask: torch.Tensor) -> torch.Tensor:
    """Whether all that a mask `[.., s]` hides is at the end."""
    return (mask[..., 1:] >= mask[..., :-1]).all()


def _check_one_mask(layer: str, name: str, mask: Any, shape: Shape, mask_type: str, device: torch.device) -> None:
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"{layer}: {name}={mask!r}; a bool tensor is accepted.")
    fits = mask.dtype == torch.bool and mask.layout is torch.strided and not mask.is_nested and mask.dim() == 4
    fits = fits and all(size in (1, full) for size, full in zip(mask.shape, shape, strict=True))
    if not fits or (mask_type != "arbitrary" and mask.shape[3] != shape[3]):
        raise ValueError(
            f"{layer}: {name} is {_shown(mask)}; bool {list(shape)} is accepted with {mask_type!r}, or 1 in the place "
            f"of the batch{' and of any other' if mask_type == 'arbitrary' else ''}."
        )
    if mask.device != device:
        raise RuntimeError(f"{layer}: {name} is on {mask.device}, the activations on {device}; one device is accepted.")


def _shown(x: torch.Tensor) -> str:
    return f"{x.dtype}, nested" if x.is_nested else f"{x.dtype} {list(x.shape)}"


def check_angles(layer: str, angles: Any, lengths: tuple[int, int], channels: int, device: torch.device) -> None:
    """Refuse rotary angles that are not fp32 `[positions, 1, 1, d2]`, or a pair of them, for queries and for keys."""
    pair = angles if isinstance(angles, tuple) else (angles, angles)
    if len(pair) != 2:
        raise ValueError(f"{layer}: rotary_pos_emb is a tuple of {len(pair)}; two, for queries and keys, are accepted.")
    for one, length in zip(pair, lengths, strict=True):
        if not isinstance(one, torch.Tensor):
            raise TypeError(f"{layer}: rotary_pos_emb={one!r}; a tensor or two are accepted.")
        plain = one.dtype == torch.float32 and one.layout is torch.strided and not one.is_nested
        positions, size = (one.shape[0], one.shape[1:].numel()) if plain and one.dim() > 0 else (0, -1)
        if positions < length or size % 2 or not 0 <= size <= channels:
            raise ValueError(
                f"{layer}: rotary_pos_emb is {_shown(one)}; float32 [positions, 1, 1, channels] is "
                f"accepted, with {length} positions or more and an even number of channels up to {channels}."
            )
        if one.device != device:
            raise RuntimeError(
                f"{layer}: rotary_pos_emb is on {one.device} and hidden_states on {device}; one device is accepted."
            )


def check_cudnn(
    dtype: torch.dtype,
    device: torch.device,
    lengths: tuple[int, int],
    mask_type: str,
    window: tuple[int, int],
    bias: Any = "no_bias",
) -> None:
    """Refuse what attention_backend="cudnn" does not offer."""
    name = "DotProductAttention: attention_backend='cudnn'"
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name} with {dtype}; bfloat16 and float16 are accepted.")
    if mask_type not in CUDNN_MASK_TYPES:
        raise ValueError(f"{name} with attn_mask_type={mask_type!r}; one of {CUDNN_MASK_TYPES} is accepted.")
    if window[0] >= 0:
        raise ValueError(f"{name} with a window of {window}; None is accepted, or attention_backend='exact'.")
    if bias != "no_bias":
        raise ValueError(
            f"{name} with core_attention_bias_type={bias!r}; 'no_bias' is accepted, or attention_backend='exact'."
        )
    if mask_type == "causal" and lengths[0] != lengths[1]:
        raise ValueError(
            f"{name} with {lengths[0]} queries and {lengths[1]} keys under a causal mask; as many keys are accepted."
        )
    if device.type != "cuda":
        raise RuntimeError(f"{name} on {device}; 'cuda' is accepted, or attention_backend='exact'.")


def check_equal_heads(of_keys: int, of_values: int) -> None:
    """Refuse attention_backend="cudnn" for a pair of sizes."""
    if of_keys != of_values:
        raise NotImplementedError(
            f"DotProductAttention: kv_channels={(of_keys, of_values)} with attention_backend='cudnn' is not offered; "
            f"'exact' is accepted."
        )


def check_no_segments(key_segment: int | None) -> None:
    """Refuse attention_backend="cudnn" with an order of its own."""
    if key_segment is not None:
        raise NotImplementedError(
            f"DotProductAttention: key_segment={key_segment} with attention_backend='cudnn' is not offered; 'exact' is "
            f"accepted."
        )


def check_qkv(core: Any, q: Any, k: Any, v: Any, sequence_first: bool) -> None:
    """Refuse queries, keys and values that are not `[s, b, h, d]` or `[b, s, h, d]`, or do not fit together."""
    heads, groups = core.num_attention_heads_per_partition, core.num_gqa_groups_per_partition
    channels, of_values = core.hidden_size_per_attention_head_k, core.hidden_size_per_attention_head_v
    batch = 1 if sequence_first else 0
    if (
        type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not (q.is_nested or k.is_nested or v.is_nested)  # nested tensors have no shape
        and q.dim() == 4
        and k.dim() == 4
    ):
        sizes, kv_sizes = q.shape, k.shape
        if (
            q.dtype in WIDE_DTYPES
            and k.dtype == q.dtype
            and v.dtype == q.dtype
            and q.device == k.device
            and q.device == v.device
            and sizes[2] == heads
            and sizes[3] == channels == kv_sizes[3]
            and kv_sizes[2] == groups
            and kv_sizes[batch] == sizes[batch]
            and v.shape == (kv_sizes if of_values == channels else (*kv_sizes[:3], of_values))
            and q.layout is k.layout is v.layout is torch.strided
        ):
            return
    layer = "DotProductAttention"
    order = "[s, b" if sequence_first else "[b, s"
    named = (("query_layer", q, heads, channels), ("key_layer", k, groups, channels))
    for name, x, count, size in (*named, ("value_layer", v, groups, of_values)):
        check_tensor(layer, name, x)
        if x.dim() != 4 or x.shape[2] != count or x.shape[3] != size:
            raise ValueError(f"{layer}: {name} has shape {list(x.shape)}; {order}, {count}, {size}] is accepted.")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(
                f"{layer}: {name} is {x.dtype} on {x.device} and query_layer {q.dtype} on {q.device}; one dtype and "
                f"one device are accepted."
            )
        if x.shape[batch] != q.shape[batch]:
            raise ValueError(
                f"{layer}: {name} has batch {x.shape[batch]}, query_layer {q.shape[batch]}; equal batches are accepted."
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"{layer}: key_layer is {list(k.shape)}, value_layer {list(v.shape)}; one length is accepted.")


def check_grid(layer: str, batch: int, heads: int, device: torch.device) -> None:
    """Refuse more heads than a launch on a GPU can have."""
    if batch * heads > MAX_ATTENTIONS:
        raise ValueError(
            f"{layer}: a batch of {batch} times num_attention_heads={heads}; a product of at most {MAX_ATTENTIONS} is "
            f"accepted on {device}."
        )


def has_run_in_fp8(last: Any) -> bool:
    """Whether a layer's last part ran its last forward in FP8: then each part has checked its sizes."""
    return not torch.compiler.is_compiling() and getattr(last, "fp8", False)  # a compiler would guard the attribute


def check_fp8_sizes(*parts: Any) -> None:
    """Refuse parts of sizes that FP8 does not accept, before the first of them runs under FP8 autocast."""
    for part in parts:
        casts = isinstance(part, TransformerEngineBaseModule) and part.own_settings(current()).enabled
        if casts and not is_prepared(part):
            part._check_fp8_sizes("under FP8 autocast")


def check_norms(layer: str, given: Mapping[str, Any], of_input: bool = True) -> None:
    """Refuse settings of norms that an attention with these arguments does not have."""
    if not of_input:
        defaults = {"return_layernorm_output": False, "layernorm_epsilon": 1e-5, "normalization": "LayerNorm"}
        defaults["zero_centered_gamma"] = False
        check_unread(layer, given, defaults, "input_layernorm=False", "input_layernorm=True")
    if given["qk_norm_type"] is None:
        check_unread(layer, given, {"qk_norm_before_rope": False}, "qk_norm_type=None", "a qk_norm_type")


def check_channels(layer: str, hidden_size: int, heads: int, kv_channels: int | None) -> int:
    """The size of a head, checked."""
    channels = int(hidden_size // heads if kv_channels is None else kv_channels)
    if kv_channels is None and (hidden_size % heads or channels % 8 or not 8 <= channels <= MAX_HEAD_DIM):
        raise ValueError(
            f"{layer}: hidden_size={hidden_size} with num_attention_heads={heads}; a quotient that is a multiple of 8 "
            f"from 8 to {MAX_HEAD_DIM} is accepted, or a kv_channels that is one."
        )
    return channels


def check_groups(layer: str, num_gqa_groups: int | None, heads: int) -> int:
    """The number of heads of keys and values, checked."""
    groups = heads if num_gqa_groups is None else int(num_gqa_groups)
    if heads % groups:
        raise ValueError(f"{layer}: num_gqa_groups={groups} with num_attention_heads={heads}; a divisor is accepted.")
    return groups
