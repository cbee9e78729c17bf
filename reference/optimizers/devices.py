"""What all optimizers refuse of the devices and the memory of their tensors; `who` names the caller in errors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reference.ops.library import no_implementation


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
    for start, stop, where in sorted(spans, key=lambda one: one[:2]):
        if start < end:
            raise ValueError(f"{who}: {named(last)} and {named(where)} share memory; separate memory is accepted.")
        if stop > start:
            end, last = stop, where
