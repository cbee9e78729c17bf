"""`twin::gemm_fp8_activation_scale`: an FP8 GEMM and an activation that is cast with the scale of its own amax.

    h                   T( a·bᵀ · a_scale_inv · b_scale_inv + bias )    `twin::gemm_fp8`, fast; kept for the backward
    q, q_t, scale_inv   of act(h)                                       `twin::activation_scale_cast_transpose`

T is the activation dtype. It is what current scaling makes of fc1, as `twin::gemm_fp8_activation` is what delayed
scaling makes of it. The amax follows from the largest h where act does not fall from there on, so that on a GPU h need
not be read for it.
"""

import torch

from reference.ops.activations import activation
from reference.ops.casts.cast_transpose import Four, cast_outputs
from reference.ops.casts.current_scale import Scale, check_scale
from reference.ops.checks import check_columns
from reference.ops.gemms.gemm_fp8 import gemm_fp8
from reference.ops.gemms.gemm_fp8 import outputs as gemm_fp8_outputs
from reference.ops.library import define

OP = "twin::gemm_fp8_activation_scale"


def outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    *scale: *Scale,
) -> Four:
    h = gemm_fp8_outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, "fast")
    activation.check_activation(OP, h, kind)
    columns = activation.width(kind, h.shape[1])
    check_columns(OP, "the activation", columns, f" (kind {kind!r}, h of shape {tuple(h.shape)})")
    check_scale(OP, *scale)
    return h, *cast_outputs(h, columns, scale[0])


@define(outputs)
def gemm_fp8_activation_scale(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
) -> Four:
    """a `[M, K]`, b `[n, K]` float8 -> (h `[M, n]` of out_dtype, q `[M, m]`, q_t `[m, ceil16(M)]`, scale_inv `[1]`).

    m is n, or n/2 for the gated kinds. q and q_t are of `dtype`; power_of_two and epsilon as in `twin::current_scale`.
    """
    outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, kind, dtype, power_of_two, epsilon)
    h = gemm_fp8(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, "fast")
    return h, *activation.activation_scale_cast_transpose(h, kind, dtype, power_of_two, epsilon)
