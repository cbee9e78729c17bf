"""Current scaling: each tensor is scaled by its own amax.

    amax  = max |x| over the x that are not NaN, of the tensor in the activation dtype
    scale = fp8_max / amax          one fp32 division; 1 where amax is 0 or infinite; at most the largest fp32 number
    q = cast(x · scale),  scale_inv = 1 / scale          as in `twin::cast`

There is no state between steps. The results of norms and activations are rounded to the activation dtype before they
are cast, because the scale depends on all of them; delayed scaling casts them from fp32. GEMMs are those of delayed
scaling.

Names, defaults and meaning are Transformer Engine's (`transformer_engine.common.recipe.Float8CurrentScaling`), whose y,
dx and dw of a `Linear`, recorded on an H200, agree in every bit.
"""

from dataclasses import dataclass
from typing import Any

import torch

from reference.ops.library import twin
from reference.recipes.base import Format, Recipe, check_recipe
from reference.recipes.quantized import Quantized, per_tensor
from reference.recipes.quantizer import Quantizer
from reference.recipes.roles import Role


@dataclass(unsafe_hash=True)
class Float8CurrentScaling(Recipe):
    """Scale each tensor by its own amax.

    Args:
        use_power_2_scales: scales that are powers of two; only False is offered.
        fp8_format: `Format.HYBRID` or `Format.E4M3`.
        fp8_dpa, fp8_mha: FP8 attention; only False is offered (`DelayedScaling` has fp8_dpa).
        backward_override: "high_precision" is FP8 in forward alone: backward multiplies in the activation dtype.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        if self.use_power_2_scales is not False:
            raise NotImplementedError(
                f"Float8CurrentScaling: use_power_2_scales={self.use_power_2_scales!r} is not offered; False is "
                f"accepted."
            )
        check_recipe(self)

    @property
    def sees_other_tokens(self) -> bool:
        return True

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    float8_per_tensor_scaling = float8_current_scaling

    def quantizer(self, role: Role, state: Any) -> "Current":
        return Current(*self.codes(role.is_forward))


def scale_of(x: torch.Tensor, fp8_max: float, epsilon: float = 0.0) -> torch.Tensor:
    """fp8_max / max(amax of x `[rows, cols]`, epsilon), fp32 `[1]`, with the exceptions above."""
    scale = torch.ones(1, dtype=torch.float32, device=x.device)
    amax = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
    twin.amax(x, amax, 0)
    if epsilon:
        amax.clamp_(min=epsilon)
    twin.scale_update([scale], [amax], fp8_max, 0, "most_recent")
    return scale


class Current(Quantizer):
    """Casts a tensor with the scale of its own amax, which becomes `fp8_max`; `dtype` is the codes'."""

    fp8 = True

    def __init__(self, dtype: torch.dtype, fp8_max: float) -> None:
        self.dtype, self.fp8_max = dtype, fp8_max
        self.key = ("current", dtype, fp8_max)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        return scale_of(x, self.fp8_max)

    def quantize(self, x: torch.Tensor, transpose: bool) -> Quantized:
        scale = self.scale(x)
        if transpose:
            return per_tensor(*twin.cast_transpose(x, scale, None, 0, self.dtype))
        q, scale_inv = twin.cast(x, scale, None, 0, self.dtype)
        return per_tensor(q, None, scale_inv)
