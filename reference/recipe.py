"""Recipes: which FP8 formats are used where, and how scales follow the data.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from reference import not_offered

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


MAX_MARGIN = 18
"""448 · 2^-18 is E4M3's smallest number when it is rounded; 448 · 2^-19 is 0, and with it all that is cast."""
MAX_HISTORY = 1 << 20
"""Rows of an amax history: a million steps, 12 MiB a linear layer and direction."""


@dataclass(frozen=True)
class DelayedScaling:
    """Scale step t's tensors by the amaxes of the steps before it.

    `scale = 2^-margin · fp8_max / amax`, where amax is the largest (`"max"`) or the last
    (`"most_recent"`) of the `amax_history_len` newest amaxes; `reference.ops.scale_update` writes the
    arithmetic out.

    Args:
        margin: powers of two kept free above the amax, an int from 0 to 18.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: rows of the amax history, an int from 1 to 2^20.
        amax_compute_algo: `"max"` or `"most_recent"`.
        scaling_factor_compute_algo: Transformer Engine's hook for an own formula; only None is offered.
        reduce_amax: take the maximum of each amax over autocast's `amax_reduction_group`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered.
        backward_override: another precision in backward; only None is offered.
        override_linear_precision: an older Transformer Engine's switch for products in 16 bits, forward, dgrad and
            wgrad; only three times False is offered.
    """

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    override_linear_precision: tuple[bool, bool, bool] = field(default=(False, False, False), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        too_far = " (from 19 on, E4M3 rounds a tensor's largest number to 0)"
        for name, least, most, why in (("margin", 0, MAX_MARGIN, too_far), ("amax_history_len", 1, MAX_HISTORY, "")):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"DelayedScaling: {name}={value!r}; an int from {least} to {most} is accepted{why}.")
        if not isinstance(self.fp8_format, Format) or self.fp8_format is Format.E5M2:
            raise ValueError(
                f"DelayedScaling: fp8_format={self.fp8_format!s}; Format.HYBRID and Format.E4M3 are accepted "
                f"(E5M2 in the forward pass has too few mantissa bits to train with)."
            )
        if not isinstance(self.amax_compute_algo, str) or self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f"DelayedScaling: amax_compute_algo={self.amax_compute_algo!r}; "
                f"'max' and 'most_recent' are accepted (no function: both sides must compute its bits)."
            )
        if self.scaling_factor_compute_algo is not None:
            raise ValueError(
                f"DelayedScaling: scaling_factor_compute_algo={self.scaling_factor_compute_algo!r}; "
                f"only None is accepted (both sides must compute its bits)."
            )
        if not isinstance(self.reduce_amax, bool):
            raise TypeError(f"DelayedScaling: reduce_amax={self.reduce_amax!r}; True and False are accepted.")
        if self.fp8_dpa is not False or self.fp8_mha is not False:
            raise ValueError(
                f"DelayedScaling: fp8_dpa={self.fp8_dpa!r}, fp8_mha={self.fp8_mha!r}; only False is accepted: "
                f"attention in FP8 is not offered."
            )
        if self.backward_override is not None:
            raise NotImplementedError(
                f"DelayedScaling: backward_override={self.backward_override!r} is not offered; None is accepted."
            )
        linear = self.override_linear_precision
        if not isinstance(linear, tuple) or len(linear) != 3 or any(one is not False for one in linear):
            raise NotImplementedError(
                f"DelayedScaling: override_linear_precision={linear!r} is not offered; (False, False, False) is "
                f"accepted."
            )

    def delayed(self) -> bool:
        """True: Transformer Engine's way to ask a recipe what it is, as the next ones."""
        return True

    def float8_per_tensor_scaling(self) -> bool:
        """True."""
        return True

    def float8_current_scaling(self) -> bool:
        """False."""
        return False

    mxfp8 = nvfp4 = float8_block_scaling = custom = float8_current_scaling


__getattr__ = not_offered.explain(__name__)
