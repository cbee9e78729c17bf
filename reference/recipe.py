"""Recipes: which FP8 formats are used where, and how scales follow the data.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

__all__ = ["DelayedScaling", "Format"]


class FormatLimits(NamedTuple):
    """Largest finite magnitude of the forward and of the backward format."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    """Which FP8 format the tensors of a GEMM have.

    `E4M3`: every tensor; `HYBRID`: E4M3 in the forward pass, E5M2 for gradients.
    `E5M2` names the format alone: as a recipe it would leave the forward pass two bits of mantissa,
    which no recipe accepts (Transformer Engine refuses it too).
    """

    E4M3 = FormatLimits(max_fwd=448.0, max_bwd=448.0)
    E5M2 = FormatLimits(max_fwd=57344.0, max_bwd=57344.0)
    HYBRID = FormatLimits(max_fwd=448.0, max_bwd=57344.0)

    def dtype(self, forward: bool) -> torch.dtype:
        """The float8 dtype of the tensors cast in that direction."""
        if self is Format.E5M2 or (self is Format.HYBRID and not forward):
            return torch.float8_e5m2
        return torch.float8_e4m3fn

    def fp8_max(self, forward: bool) -> float:
        """The largest finite value of `dtype(forward)`."""
        return self.value.max_fwd if forward else self.value.max_bwd


@dataclass(frozen=True)
class DelayedScaling:
    """Scale step t's tensors by the amaxes of the steps before it.

    `scale = 2^-margin · fp8_max / amax`, where amax is the largest (`"max"`) or the last
    (`"most_recent"`) of the `amax_history_len` newest amaxes; `reference.ops.scale_update` writes the
    arithmetic out.

    Args:
        margin: powers of two kept free above the amax, an int >= 0.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: rows of the amax history, an int >= 1.
        amax_compute_algo: `"max"` or `"most_recent"`.
        scaling_factor_compute_algo: Transformer Engine's hook for an own formula; only None is offered.
        reduce_amax: take the maximum of each amax over autocast's `amax_reduction_group`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.margin, bool) or not isinstance(self.margin, int) or self.margin < 0:
            raise ValueError(f"DelayedScaling: margin={self.margin!r}; an int >= 0 is accepted.")
        if self.fp8_format not in (Format.HYBRID, Format.E4M3):
            raise ValueError(
                f"DelayedScaling: fp8_format={self.fp8_format!s}; Format.HYBRID and Format.E4M3 are accepted "
                f"(E5M2 in the forward pass has too few mantissa bits to train with)."
            )
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ValueError(f"DelayedScaling: amax_history_len={length!r}; an int >= 1 is accepted.")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling: amax_compute_algo={self.amax_compute_algo!r}; "
                f"'max' and 'most_recent' are accepted (no function: both sides must compute its bits)."
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}; "
                f"only None is accepted (both sides must compute its bits)."
            )
        if self.fp8_dpa or self.fp8_mha:
            raise ValueError(
                f"DelayedScaling: fp8_dpa={self.fp8_dpa}, fp8_mha={self.fp8_mha}; only False is accepted: "
                f"attention in FP8 is not offered."
            )

    def delayed(self) -> bool:
        """True: Transformer Engine's way to ask a recipe what it is."""
        return True


NOT_OFFERED = (
    "CustomRecipe",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "MXFP8BlockScaling",
    "NVFP4BlockScaling",
)


def __getattr__(name: str) -> Any:
    if name in NOT_OFFERED:
        raise AttributeError(f"recipe.{name} is not offered by Twin Engine; recipe.DelayedScaling is.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
