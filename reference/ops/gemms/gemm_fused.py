"""FP8 GEMMs fused with what follows: an activation, its backward, or bias + dropout + residual.

Each has the bits of the named ops one after the other: the GEMM is rounded to the activation dtype T before the next
op reads it. Forward GEMMs accumulate fast, backward ones split. With s = a_scale_inv · b_scale_inv:

    gemm_fp8_activation             h = T( a·bᵀ · s + bias )          `twin::gemm_fp8`, fast; kept for the backward
                                    q, q_t, scale_inv, amax of act(h)   `twin::activation_cast_transpose`
    gemm_fp8_activation_backward    dact = T( a·bᵀ · s )              `twin::gemm_fp8`, split
                                    q, q_t, scale_inv, amax, dbias      `twin::activation_backward_cast_transpose_dbias`
                                    of dact · act'(h)
    gemm_fp8_bias_dropout_add       x = T( a·bᵀ · s )                 `twin::gemm_fp8`, fast
                                    T( T( dropout( T( x + bias ) ) ) + residual )   `twin::bias_dropout_add`
"""

import torch

from reference.ops.activations import activation
from reference.ops.casts.cast import Scaling, check_cast
from reference.ops.casts.cast_transpose import Four, cast_outputs
from reference.ops.gemms.gemm_fp8 import check_operands, gemm_fp8
from reference.ops.gemms.gemm_fp8 import outputs as gemm_fp8_outputs
from reference.ops.library import define
from reference.ops.random.dropout import bias_dropout_add, check_addends, check_dropout


def activation_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    *scaling: *Scaling,
) -> Four:
    h = gemm_fp8_outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, "fast")
    return h, *activation.forward_outputs("twin::gemm_fp8_activation", h, kind, *scaling)


def activation_backward_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    *scaling: *Scaling,
) -> Four:
    op = "twin::gemm_fp8_activation_backward"
    activation.check_activation(op, x, kind)
    check_operands(a, b, a_scale_inv, b_scale_inv)
    found, expected = (x.shape[0], activation.width(kind, x.shape[1])), (a.shape[0], b.shape[0])
    if found != expected:
        raise ValueError(
            f"{op}: x must be the pre-activation of the GEMM, whose shape is {expected}; "
            f"got {tuple(x.shape)}, of kind {kind!r}, whose activation is {found}."
        )
    check_cast(op, x, *scaling)
    return *cast_outputs(x, x.shape[1], scaling[3]), x.new_empty(x.shape[1])


def bias_dropout_add_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    op = "twin::gemm_fp8_bias_dropout_add"
    out = gemm_fp8_outputs(a, b, a_scale_inv, b_scale_inv, None, out_dtype, "fast")
    check_addends(op, out, bias, residual)
    check_dropout(op, "x", out, p, rng_state)
    return out


@define(activation_outputs, mutates=("amax_history",))
def gemm_fp8_activation(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """a `[M, K]`, b `[n, K]` float8 -> (h `[M, n]` of out_dtype, q `[M, m]`, q_t `[m, ceil16(M)]`, scale_inv `[1]`).

    m is n, or n/2 for the gated kinds. q and q_t are of `dtype`.
    """
    activation_outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, kind, scale, amax_history, column, dtype)
    h = gemm_fp8(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, "fast")
    return h, *activation.activation_cast_transpose(h, kind, scale, amax_history, column, dtype)


@define(activation_backward_outputs, mutates=("amax_history",))
def gemm_fp8_activation_backward(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    x: torch.Tensor,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Four:
    """a `[M, K]`, b `[m, K]` float8, x `[M, n]` -> (q `[M, n]`, q_t `[n, ceil16(M)]`, scale_inv `[1]`, dbias `[n]`).

    x is the pre-activation in the activation dtype, which dbias has too; n is m, or 2·m for the gated kinds.
    """
    activation_backward_outputs(a, b, a_scale_inv, b_scale_inv, x, kind, scale, amax_history, column, dtype)
    dact = gemm_fp8(a, b, a_scale_inv, b_scale_inv, None, x.dtype, "split")
    return activation.activation_backward_cast_transpose_dbias(dact, x, kind, scale, amax_history, column, dtype)


@define(bias_dropout_add_outputs, mutates=("rng_state",))
def gemm_fp8_bias_dropout_add(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, bias `[N]`, residual `[M, N]` of out_dtype -> `[M, N]` of out_dtype.

    p and rng_state as in `twin::bias_dropout_add`, which advances the state.
    """
    bias_dropout_add_outputs(a, b, a_scale_inv, b_scale_inv, bias, residual, out_dtype, p, rng_state)
    x = gemm_fp8(a, b, a_scale_inv, b_scale_inv, None, out_dtype, "fast")
    return bias_dropout_add(x, bias, residual, p, rng_state)
