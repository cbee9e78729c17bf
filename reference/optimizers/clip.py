"""Gradient clipping with PyTorch's names and meanings; the sums have a written order (`twin::grad_norm`).

The norm and the coefficient stay on the gradients' device: nothing waits for the GPU, unless `error_if_nonfinite` asks.
What differs from `torch.nn.utils`: the norm is fp32 for gradients of any dtype, its order of summation is the same on
every machine, the coefficient is not rounded to 16 bits, and only the norms 2 and infinity are offered.
"""

import math
import types
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from reference.arguments import is_real
from reference.numbers import formats
from reference.ops.library import twin
from reference.optimizers.parameters import PLAIN, check_device, check_memory, span
from reference.optimizers.sharded_norm import sharded_norm
from reference.support.dtensor import is_dtensor, placed, shard

Tensors = torch.Tensor | Iterable[torch.Tensor]


@torch.no_grad()
def get_total_norm(
    tensors: Tensors, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> torch.Tensor:
    """The norm of all numbers of the tensors, fp32 `[]` on their device; +0 on the CPU if there are none.

    Args:
        tensors: fp32, bf16 and fp16 tensors on one device, or one of them.
        norm_type: 2, or infinity (`float("inf")`, "inf"): the largest magnitude.
        error_if_nonfinite: raise a RuntimeError if the norm is NaN or infinite, which waits for the GPU.
        foreach: PyTorch's choice of a loop; each value gives the same launch.

    Source: `torch.nn.utils.get_total_norm`.
    """
    kind = _checked("get_total_norm", norm_type, error_if_nonfinite, foreach)
    found = _listed("get_total_norm", "tensors", tensors)
    _check_each("get_total_norm", "tensor", list(enumerate(found)))
    return _norm("get_total_norm", found, kind, norm_type, error_if_nonfinite)


@torch.no_grad()
def clip_grads_with_norm_(
    parameters: Tensors, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
) -> None:
    """Multiply each gradient by min(max_norm / (total_norm + 1e-6), 1), in place (`twin::clip_grads`).

    Args:
        parameters: parameters, of which some may have no gradient, or one of them.
        max_norm: a number >= 0.
        total_norm: fp32 `[]` on the gradients' device, as `get_total_norm` gives it.
        foreach: PyTorch's choice of a loop; each value gives the same launch.

    Source: `torch.nn.utils.clip_grads_with_norm_`.
    """
    who = "clip_grads_with_norm_"
    _checked(who, 2.0, False, foreach)
    most = _number(who, max_norm)
    grads = _grads(who, parameters)
    device = grads[0].device if grads else None
    if not isinstance(total_norm, torch.Tensor) or total_norm.dtype != torch.float32 or total_norm.numel() != 1:
        shown = f"{total_norm.dtype} {list(total_norm.shape)}" if isinstance(total_norm, torch.Tensor) else total_norm
        raise TypeError(f"{who}: total_norm={shown}; a tensor of one number in float32 is accepted.")
    if device not in (None, total_norm.device):
        raise ValueError(f"{who}: total_norm is on {total_norm.device}, the gradients on {device}; one is accepted.")
    _clip(grads, total_norm, most)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; the norm before that, fp32 `[]`.

    Arguments as those of `get_total_norm` and `clip_grads_with_norm_`. A NaN norm makes all gradients NaN, an infinite
    one makes finite gradients 0, as in PyTorch.

    Source: `torch.nn.utils.clip_grad_norm_`.
    """
    who = "clip_grad_norm_"
    kind = _checked(who, norm_type, error_if_nonfinite, foreach)
    most = _number(who, max_norm)
    if isinstance(parameters, types.GeneratorType):
        parameters = _listed(who, "parameters", parameters)
        if not parameters:
            warnings.warn(f"{who}: parameters is an empty generator; no gradient is clipped.", stacklevel=3)
    grads = _grads(who, parameters)
    norm = _norm(who, grads, kind, norm_type, error_if_nonfinite)
    _clip(grads, norm, most)
    return norm


def _norm(who: str, found: list[torch.Tensor], kind: str, norm_type: Any, error_if_nonfinite: bool) -> torch.Tensor:
    if not found:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    norm: torch.Tensor = (
        sharded_norm(found, kind)
        if is_dtensor(found[0])
        else twin.grad_norm([x.detach().contiguous() for x in found], kind)
    )
    if error_if_nonfinite and not math.isfinite(value := norm.item()):
        raise RuntimeError(
            f"{who}: the norm of order {norm_type} is {value}; a finite one is accepted with error_if_nonfinite=True."
        )
    return norm


def _clip(grads: list[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    if grads:
        local = [shard(grad).detach() for grad in grads]
        dense = [grad.contiguous() for grad in local]
        twin.clip_grads(dense, norm.detach().reshape(()), max_norm)
        for grad, copied in zip(local, dense, strict=True):
            if not grad.is_contiguous():
                grad.copy_(copied)


# --- what is refused -------------------------------------------------------------------------------------


def _checked(who: str, norm_type: Any, error_if_nonfinite: Any, foreach: Any) -> str:
    """The op's kind of norm."""
    for name, value, accepted in (
        ("error_if_nonfinite", error_if_nonfinite, (True, False)),
        ("foreach", foreach, (None, True, False)),
    ):
        if not any(value is one for one in accepted):
            raise TypeError(f"{who}: {name}={value!r}; one of {accepted} is accepted.")
    kinds = {2.0: "l2", math.inf: "max"}
    try:
        return kinds[float(norm_type)]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{who}: norm_type={norm_type!r}; 2 and infinity are accepted.") from None


def _number(who: str, max_norm: Any) -> float:
    if not is_real(max_norm):
        raise TypeError(f"{who}: max_norm={max_norm!r}; a number >= 0 is accepted.")
    if not max_norm >= 0:
        raise ValueError(f"{who}: max_norm={max_norm!r}; a number >= 0 is accepted.")
    return float(max_norm)


def _grads(who: str, parameters: Tensors) -> list[torch.Tensor]:
    """The gradients that there are, checked."""
    listed = _listed(who, "parameters", parameters)
    for i, p in enumerate(listed):
        if not isinstance(p, torch.Tensor):
            raise TypeError(f"{who}: parameter {i} is a {type(p).__name__}; tensors are accepted.")
    found = [(i, p.grad) for i, p in enumerate(listed) if p.grad is not None]
    what = "the gradient of parameter"
    _check_each(who, what, found)
    for i, grad in found:
        local = shard(grad)
        if any(size > 1 and not stride for size, stride in zip(local.shape, local.stride(), strict=True)):
            raise ValueError(
                f"{who}: {what} {i} is expanded ({list(grad.shape)} with strides {list(grad.stride())}), so numbers "
                f"share memory; separate memory is accepted."
            )
    check_memory(who, [(*span(shard(grad)), i) for i, grad in found], lambda i: f"{what} {i}")
    return [grad for _, grad in found]


def _listed(who: str, name: str, given: Any) -> list[Any]:
    """One tensor or many, as a list."""
    if isinstance(given, torch.Tensor):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, (str, Mapping)):
        raise TypeError(f"{who}: {name} is a {type(given).__name__}; a tensor or an iterable of tensors is accepted.")
    return list(given)


def _check_each(who: str, what: str, found: list[tuple[int, Any]]) -> None:
    for i, x in found:
        if is_dtensor(x) or is_dtensor(found[0][1]):
            _check_sharded(who, what, i, x, found[0][1])
            x = shard(x)
        if type(x) not in PLAIN or x.layout is not torch.strided:
            form = x.layout if isinstance(x, torch.Tensor) and type(x) in PLAIN else type(x).__name__
            raise TypeError(f"{who}: {what} {i} is {form}; dense, plain tensors are accepted.")
        if x.dtype not in formats.WIDE_DTYPES:
            raise TypeError(f"{who}: {what} {i} is {x.dtype}; float32, bfloat16 and float16 are accepted.")
        if x.device != found[0][1].device:
            raise ValueError(f"{who}: {what} {i} is on {x.device}, the first on {found[0][1].device}; one is accepted.")
    if found:
        check_device(who, "grad_norm", "gradient" if "gradient" in what else what, found[0][1].device)


def _check_sharded(who: str, what: str, i: int, x: Any, first: Any) -> None:
    """Refuse DTensors beside other tensors, of several meshes, and what is not sharded by rows."""
    if not (is_dtensor(x) and is_dtensor(first)):
        raise NotImplementedError(
            f"{who}: some tensors are DTensors, and some are not ({what} {i}); tensors of one kind are accepted."
        )
    mesh, placements = placed(x)  # type: ignore[misc]
    if mesh != placed(first)[0]:  # type: ignore[index]
        raise NotImplementedError(f"{who}: {what} {i} is on {mesh}, the first on {placed(first)[0]}; one is accepted.")  # type: ignore[index]
    *others, last = placements
    if not last.is_shard(0) or not all(one.is_replicate() for one in others):
        raise NotImplementedError(
            f"{who}: {what} {i} is a DTensor {list(placements)}; [Shard(dim=0)], as of fully_shard, or [Replicate(), "
            f"Shard(dim=0)], is accepted."
        )
