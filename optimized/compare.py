"""The comparison of two sides, bit by bit."""

from dataclasses import dataclass
from typing import Any

import torch

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many words differ between two tensors of one shape and dtype, on any devices.

    FP8 codes and integers are compared exactly. In 16 and 32 bits NaN equals NaN, because torch, x86 and CUDA make
    different NaN words and the contract (docs/numerics.md) does not say which.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        raise ValueError(
            f"one is {one.dtype} {list(one.shape)} and other is {other.dtype} {list(other.shape)}; "
            f"tensors of the same dtype and shape are accepted."
        )
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    words = INTEGERS[one.element_size()]
    unequal = one.view(words) != other.view(words)
    if one.dtype.is_floating_point and one.dtype not in FLOAT8:
        unequal &= ~(torch.isnan(one) & torch.isnan(other))
    return int(unequal.sum())


def fp8_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The scales and amax histories of one module, by names as "scaling_fwd.scale"; empty if it has no FP8 state."""
    meta: Any = getattr(module, "fp8_meta", {})
    keys = [key for key in ("scaling_fwd", "scaling_bwd") if key in meta]
    return {f"{key}.{part}": getattr(meta[key], part) for key in keys for part in ("scale", "amax_history")}


@dataclass
class Tally:
    """How many words were compared, and how many of them differed."""

    compared: int = 0
    different: int = 0

    def add(self, one: torch.Tensor, other: torch.Tensor) -> int:
        """Compare two tensors, count, and return how many of their words differ."""
        different = differing(one, other)
        self.compared += one.numel()
        self.different += different
        return different

    def merge(self, other: "Tally") -> None:
        """Add another tally's counts."""
        self.compared += other.compared
        self.different += other.different

    @property
    def equal(self) -> bool:
        """Something was compared and nothing differed."""
        return self.compared > 0 and self.different == 0

    def __str__(self) -> str:
        return f"{self.compared:,} words compared, {self.different:,} different"
