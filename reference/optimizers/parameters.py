"""What all optimizers refuse of their arguments, parameters, gradients and state; `who` names the optimizer in errors.

Nothing here changes anything. A DTensor (FSDP2's `fully_shard`, `distribute_tensor`) is replaced by its local shard.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from reference.arguments import is_real
from reference.float8.float8_shard import rows_of
from reference.float8.kept_tensor import KeptTensor
from reference.numbers import formats
from reference.ops.library import no_implementation
from reference.support.dtensor import is_dtensor, placed, shard

PLAIN = (torch.Tensor, torch.nn.Parameter)
FLT_MAX = float(np.finfo(np.float32).max)
Where = tuple[int, int]  # the numbers of a group, and of a parameter in it


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch's optimizer that a compiler must not trace.

    Its wrapper loads torch's compiler, which takes seconds; where nobody has loaded it, nothing is traced.
    """
    if "torch._dynamo" in sys.modules:
        return method
    bound: Any = method
    return functools.partial(bound.__wrapped__, bound.__self__)


def check_device(who: str, op: str, what: str, device: torch.device) -> None:
    """Refuse a device without an implementation of `twin::<op>`; a `what` is on it."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{who}: a {what} is on {device}; {what}s on cpu and cuda are accepted.")
    if device.type == "cuda" and not torch._C._dispatch_has_kernel_for_dispatch_key(f"twin::{op}", "CUDA"):
        raise RuntimeError(no_implementation(op, {device}))


def span(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of a dense tensor's memory, and one past the last."""
    if not x.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_memory(who: str, spans: Iterable[tuple[int, int, Any]], named: Callable[[Any], str]) -> None:
    """Refuse tensors whose bytes (first, one past the last, which) overlap: one launch changes all at once."""
    end, last = 0, None
    for start, stop, where in sorted(spans):
        if start < end:
            raise ValueError(f"{who}: {named(last)} and {named(where)} share memory; separate memory is accepted.")
        if stop > start:
            end, last = stop, where


def named(where: Where | str) -> str:
    """A parameter, by the numbers of its group and of itself in the group."""
    return where if isinstance(where, str) else f"parameter {where[1]} of group {where[0]}"


def unwrapped(who: str, where: Where, p: Any, grad: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The local shards of a parameter and its gradient, whose kinds are checked."""
    if placed(p) != placed(grad):
        raise TypeError(
            f"{who}: {named(where)} is {placement(p)} and its gradient {placement(grad)}; the same mesh and placements "
            f"are accepted."
        )
    local, local_grad = rows_of(p), shard(grad)
    for name, x in ((named(where), local), (f"the gradient of {named(where)}", local_grad)):
        plain = type(x) in PLAIN or type(x).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        if not plain and not (isinstance(x, KeptTensor) and x is local):
            raise TypeError(
                f"{who}: {name} is a {type(x).__name__}; plain tensors, DTensors of them, and as parameters "
                f"weights that are kept in FP8 are accepted."
            )
    return local, local_grad


def placement(x: Any) -> str:
    """Mesh and placements of a DTensor, as text."""
    return f"a DTensor {list(x.placements)} on {x.device_mesh}" if is_dtensor(x) else "no DTensor"


def check_parameter(
    who: str, where: Where, p: torch.Tensor, grad: torch.Tensor, fp8: bool, instead: str, any_dtype: bool = False
) -> None:
    """Refuse a parameter or a gradient (local shards) that the ops do not accept.

    `fp8`: whether a weight that is kept in FP8 is accepted; otherwise the error says what is, `instead`. `any_dtype`:
    whether the gradient of a parameter in 16 bits may have another dtype.
    """
    dtype, shape, device = p.dtype, p.shape, p.device
    plain = dtype in formats.WIDE_DTYPES and not isinstance(p, KeptTensor)
    fits = grad.dtype is dtype and grad.shape == shape and grad.device == device and grad.layout is torch.strided
    if plain and fits and p.is_contiguous():
        return
    if isinstance(p, KeptTensor) and not fp8:
        raise ValueError(f"{who}: {named(where)} is kept in FP8; {instead} accepted.")
    if dtype not in formats.WIDE_DTYPES:
        raise TypeError(f"{who}: {named(where)} is {dtype}; float32, bfloat16 and float16 are accepted.")
    if p.layout is not torch.strided or not p.is_contiguous():
        raise ValueError(f"{who}: {named(where)} is not contiguous; contiguous parameters are accepted.")
    if grad.layout is not torch.strided:
        raise TypeError(f"{who}: {named(where)}, its gradient is sparse; dense gradients are accepted.")
    wide = any_dtype or dtype is torch.float32 or isinstance(p, KeptTensor)
    if grad.dtype is not dtype and not (wide and grad.dtype in formats.WIDE_DTYPES):
        accepted = "float32, bfloat16 and float16 are" if wide else f"{dtype} is"
        raise TypeError(f"{who}: {named(where)}, its gradient is {grad.dtype}; {accepted} accepted.")
    if grad.shape != shape or grad.device != device:
        raise ValueError(
            f"{who}: {named(where)}, its gradient is {list(grad.shape)} on {grad.device}; {list(shape)} on "
            f"{device} is accepted."
        )


def check_part(
    who: str, where: Where | str, name: str, x: Any, dtype: torch.dtype, shape: torch.Size, device: torch.device
) -> torch.Tensor:
    """The local shard of a part of the state, checked."""
    x = x if type(x) is torch.Tensor else shard(x)
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        raise TypeError(f"{who}: {named(where)}, its {name} is {described(x)}; a dense tensor is accepted.")
    if x.dtype is not dtype or x.shape != shape or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{who}: {named(where)}, its {name} is {x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}; "
            f"contiguous {dtype} {list(shape)} on {device} is accepted."
        )
    return x


def described(x: Any) -> str:
    """What was given in the place of a dense tensor."""
    return f"{x.layout}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def flag(who: str, name: str, value: Any, where: str = "") -> bool:
    """A switch, checked; Transformer Engine passes some as 0 and 1."""
    if not isinstance(value, int) or value not in (0, 1):
        raise TypeError(f"{who}: {name}={value!r}{where}; True and False are accepted.")
    return bool(value)


def real(who: str, name: str, value: Any, where: str = "") -> float:
    """A number >= 0, checked."""
    if not is_real(value):
        raise TypeError(f"{who}: {name}={value!r}{where}; a number >= 0 is accepted.")
    if not 0 <= value <= FLT_MAX:
        raise ValueError(f"{who}: {name}={value!r}{where}; a number >= 0 that fp32 holds is accepted.")
    return float(value)


def check_common(who: str, group: dict[str, Any], where: str, own: dict[str, Any]) -> None:
    """Refuse another value in a new group for what an optimizer has once for all groups, `own`."""
    for name, value in own.items():
        given = group.get(name, value)
        if given is not value and (type(given) is not type(value) or given != value):
            raise ValueError(
                f"{who}: {name}={given!r}{where}; {value!r} is accepted, because it is the same for all groups."
            )


def saved_parts(
    who: str, state_dict: Any, groups: Sequence[Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """The groups and the parameters' entries of a state dict; refuse one that does not have the form of `groups`."""
    saved = state_dict.get("param_groups") if isinstance(state_dict, dict) else None
    entries = state_dict.get("state") if isinstance(state_dict, dict) else None
    grouped = isinstance(saved, (list, tuple)) and all(
        isinstance(one, dict) and isinstance(one.get("params"), (list, tuple)) for one in saved
    )
    if not grouped or not isinstance(entries, dict):
        raise TypeError(
            f"{who}: state_dict must be a dict with 'state', a dict, and 'param_groups', a list of dicts with "
            f"'params'; got {type(state_dict).__name__}" + (f" of {list(state_dict)}." if state_dict else ".")
        )
    for number, entry in entries.items():
        if not isinstance(entry, dict):
            raise TypeError(f"{who}: state_dict['state'][{number!r}] is {described(entry)}; a dict is accepted.")
    assert isinstance(saved, (list, tuple))
    sizes = [[len(one["params"]) for one in part] for part in (saved, groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"{who}: state_dict has groups of {sizes[0]} parameters; the optimizer has {sizes[1]}.")
    return list(saved), entries


def checked_grad_none(who: str, set_grad_none: Any) -> bool | None:
    """The deprecated argument of Transformer Engine's constructors; a warning if it is given."""
    if set_grad_none is None:
        return None
    warnings.warn(
        f"{who}: set_grad_none is deprecated; set_to_none of zero_grad is accepted.", DeprecationWarning, stacklevel=3
    )
    return flag(who, "set_grad_none", set_grad_none)


def to_none(who: str, set_to_none: bool | None, set_grad_none: bool | None) -> bool:
    """Whether `zero_grad` drops the gradients: None is what the constructor was given, or True."""
    if set_to_none is not None and set_grad_none not in (None, set_to_none):
        raise ValueError(f"{who}: set_to_none={set_to_none!r} with set_grad_none={set_grad_none!r}; the same is.")
    chosen = set_grad_none if set_to_none is None else set_to_none
    return chosen is None or bool(chosen)
