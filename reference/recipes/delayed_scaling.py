"""Delayed scaling: step t's tensors are scaled by the amaxes of the steps before it.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.DelayedScaling`).
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from reference.ops.library import twin
from reference.recipes.base import Format, Recipe, check_recipe
from reference.recipes.quantized import PER_TENSOR, Operand, Quantized, cast_together, gemm_bias, per_tensor
from reference.recipes.quantizer import ActivationPlan, NormPlan, Produced, Quantizer
from reference.recipes.roles import Role
from reference.support import groups

MAX_MARGIN = 18
_POWERS = tuple(2.0**-margin for margin in range(MAX_MARGIN + 1))  # torch 2.11's compiler keeps a power symbolic
SCALED_MAX = tuple(fp8_max * power for fp8_max in (448.0, 57344.0) for power in _POWERS)
"""448 · 2^-18 rounds to E4M3's smallest number; 448 · 2^-19 rounds to 0, and so would all values."""
MAX_HISTORY = 1 << 20
"""Rows of an amax history: a million steps, 12 MiB for a linear layer and direction."""


@dataclass(unsafe_hash=True)
class DelayedScaling(Recipe):
    """Scale step t's tensors by the amaxes of the steps before it.

    `scale = 2^-margin · fp8_max / amax`, where amax is the largest (`"max"`) or the last (`"most_recent"`) of the
    `amax_history_len` newest amaxes. Arithmetic: `reference.ops.casts.scale_update`.

    Args:
        margin: powers of two kept free above the amax, an int from 0 to 18.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        amax_history_len: rows of the amax history, an int from 1 to 2^20.
        amax_compute_algo: `"max"` or `"most_recent"`.
        scaling_factor_compute_algo: Transformer Engine's hook for other formulas; only None is offered.
        reduce_amax: take the maximum of each amax over autocast's `amax_reduction_group`.
        fp8_dpa: attention's forward in FP8, too (`reference.nn.attentions.attention_fp8`); its backward stays in 16
        bits. fp8_mha: attention's input and output in FP8; only False is offered.
        backward_override: FP8 in forward alone; backward multiplies in the activation dtype, with "high_precision" what
            the forward has cast, with "dequantized" what its codes stand for.
        override_linear_precision: older Transformer Engine's switches for GEMMs in 16 bits (fprop, dgrad, wgrad); only
            False three times is offered.
        params_dtype, device: accepted without effect, as in Transformer Engine: Megatron-Core gives them.
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
    params_dtype: InitVar[Any] = field(default=None, kw_only=True)
    device: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, params_dtype: Any, device: Any) -> None:
        self.check()

    def check(self) -> None:
        too_far = " (from 19 on, E4M3 rounds a tensor's largest number to 0)"
        for name, least, most, why in (("margin", 0, MAX_MARGIN, too_far), ("amax_history_len", 1, MAX_HISTORY, "")):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"DelayedScaling: {name}={value!r}; an int from {least} to {most} is accepted{why}.")
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
        check_recipe(self)
        linear = self.override_linear_precision
        if not isinstance(linear, tuple) or len(linear) != 3 or any(one is not False for one in linear):
            raise NotImplementedError(
                f"DelayedScaling: override_linear_precision={linear!r} is not offered; (False, False, False) is "
                f"accepted."
            )

    @classmethod
    def delayed(cls) -> bool:
        return True

    float8_per_tensor_scaling = delayed

    @property
    def history_rows(self) -> int:  # type: ignore[override]
        return self.amax_history_len

    def scaled_max(self, forward: bool) -> float:
        return self.codes(forward)[1] * _POWERS[self.margin]

    def quantizer(self, role: Role, state: Any) -> "Delayed":
        return Delayed(state, role.column, self.codes(role.is_forward)[0], self.scaled_max(role.is_forward))

    def update(self, forward: bool, metas: list[Any], group: Any) -> None:
        """One op call (on a GPU one launch) for all states; amaxes are reduced over the process group."""
        _, fp8_max = self.codes(forward)
        its_max = fp8_max * _POWERS[self.margin]
        for meta in metas:
            if meta.scaled_max != its_max:  # a load may have come between a forward and this
                meta.fit(its_max)
        histories = [meta.amax_history for meta in metas]
        if self.reduce_amax and dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
            reduce_amaxes(histories, group)
        twin.scale_update([meta.scale for meta in metas], histories, fp8_max, self.margin, self.amax_compute_algo)


def reduce_amaxes(histories: list[torch.Tensor], group: Any) -> None:
    """Take the maximum of every row 0 over the process group, in one collective."""
    groups.largest_together([history[0] for history in histories], group)


class Delayed(Quantizer):
    """Casts with the scale in a column of a layer's state and records the amax there, fused with the op before it.

    Args:
        meta: `scale` and `amax_history`, which is None where amaxes must not be recorded a second time.
        column: of both.
        dtype: float8_e4m3fn or float8_e5m2.
        scaled_max: of the recipe. A backward may run when its layer has gone on to another one: its casts have the
            scale that belongs to their own format and margin all the same.
    """

    fp8 = True

    def __init__(self, meta: Any, column: int, dtype: torch.dtype, scaled_max: float) -> None:
        self.meta, self.column, self.dtype, self.scaled_max = meta, column, dtype, scaled_max
        self.key = ("delayed", column, dtype, meta.amax_history is None)

    @property
    def kept_key(self) -> Hashable:  # a new scale does not reach a kept cast, and a new margin drops it (`fp8_state`)
        return "delayed", self.dtype

    def tensors(self) -> tuple[torch.Tensor, ...]:
        meta = self.meta
        history = meta.amax_history
        scale = meta.scale if meta.scaled_max == self.scaled_max else meta.scale_for(self.scaled_max)
        return (scale,) if history is None else (scale, history)

    def changes(self) -> tuple[torch.Tensor, ...]:
        history = self.meta.amax_history
        return () if history is None else (history,)

    def _scale(self) -> torch.Tensor:
        meta = self.meta
        scale: torch.Tensor = meta.scale if meta.scaled_max == self.scaled_max else meta.scale_for(self.scaled_max)
        return scale

    def _state(self) -> tuple[torch.Tensor, torch.Tensor | None, int, torch.dtype]:
        return self._scale(), self.meta.amax_history, self.column, self.dtype

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        found = self._scale()[self.column : self.column + 1]
        return found.clone()  # it is updated in place after the step

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        if transpose:
            return per_tensor(*twin.cast_transpose(x, *self._state()))
        q, scale_inv = twin.cast(x, *self._state())
        return per_tensor(q, None, scale_inv)

    def quantize_packed(
        self, x: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor, transpose: bool
    ) -> Quantized:
        if transpose:
            return per_tensor(*twin.cast_transpose(x, *self._state(), lengths, starts))
        q, scale_inv = twin.cast(x, *self._state(), lengths, starts)
        return per_tensor(q, None, scale_inv)

    def quantize_together(self, others: Sequence[Quantizer], xs: list[torch.Tensor]) -> list[Quantized]:
        every: Any = (self, *others)
        if not all(type(one) is Delayed and one.dtype is self.dtype for one in others):
            return super().quantize_together(others, xs)
        histories = [one.meta.amax_history for one in every if one.meta.amax_history is not None]
        return cast_together(xs, [one._scale() for one in every], histories, [one.column for one in every], self.dtype)

    def norm(
        self,
        x: torch.Tensor,
        gamma: torch.Tensor,
        beta: torch.Tensor | None,
        plan: NormPlan,
        dtype: torch.dtype,
        transpose: bool,
    ) -> tuple[Quantized, torch.Tensor, torch.Tensor]:
        if not transpose:
            q, scale_inv, mean, rstd = twin.norm_cast(x, gamma, beta, *plan, *self._state())
            return per_tensor(q, None, scale_inv), mean, rstd
        *cast, mean, rstd = twin.norm_cast_transpose(x, gamma, beta, *plan, *self._state())
        return per_tensor(*cast), mean, rstd

    def activation(
        self, x: Quantized, w: Quantized, bias: torch.Tensor | None, plan: ActivationPlan, transpose: bool
    ) -> tuple[torch.Tensor, Quantized]:
        if not x.row.layout == w.row.layout == PER_TENSOR:
            return super().activation(x, w, bias, plan, transpose)
        operands = (x.row.codes, w.row.codes, x.row.scales, w.row.scales, gemm_bias(x.row, w.row, bias, plan.dtype))
        h, *cast = twin.gemm_fp8_activation(*operands, plan.dtype, plan.kind, *self._state())
        return h, _without_transpose(cast, transpose)

    def grad(self, g: torch.Tensor, transpose: bool, dbias: bool) -> Produced:
        if not dbias:
            return self.quantize(g, transpose), None
        *cast, db = twin.cast_transpose_dbias(g, *self._state())
        return per_tensor(*cast), db

    def joined_grad(self, parts: list[torch.Tensor], groups: int, transpose: bool, dbias: bool) -> Produced:
        if not (transpose or dbias):
            return super().joined_grad(parts, groups, transpose, dbias)
        # Without a bias, too: sums that nobody reads cost less than a copy of the parts.
        parts = [part.contiguous() for part in parts]
        *cast, db = twin.cat_cast_transpose_dbias(parts, groups, *self._state())
        return _without_transpose(cast, transpose), db if dbias else None

    def activation_grad(
        self, g: Quantized, w: Operand, h: torch.Tensor, plan: ActivationPlan, transpose: bool, dbias: bool
    ) -> Produced:
        if not g.row.layout == w.layout == PER_TENSOR:
            return super().activation_grad(g, w, h, plan, transpose, dbias)
        operands = (g.row.codes, w.codes, g.row.scales, w.scales)
        *cast, db = twin.gemm_fp8_activation_backward(*operands, h, plan.kind, *self._state())
        return _without_transpose(cast, transpose), db if dbias else None


def _without_transpose(cast: Sequence[torch.Tensor], transpose: bool) -> Quantized:
    """The result of a cast with transpose; the transpose is dropped if no backward will read it."""
    q, q_t, scale_inv = cast
    return per_tensor(q, q_t if transpose else None, scale_inv)
