"""`twin::gemm_fp8_rowwise`, an FP8 GEMM whose operands have a scale for each row.

    acc = a · bᵀ                           as in `twin::gemm_fp8`: one chain over K ("fast"), or chains of 128 ("split")
    out = acc · t                          rounded to fp32; t is the scale_inv of b's row, a column of the output
    out = out · s                          rounded to fp32; s is that of a's row
    out = out + bias                       rounded to fp32, where there is a bias
    out -> out_dtype                       rounded to nearest even

An operand may also have one scale for all of its rows. With scales that are powers of two the order of the
multiplications does not matter, as long as nothing overflows or underflows on the way.

`twin::gemm_fp8_rowwise_accumulate` adds such a GEMM, split and in fp32, to a gradient in place:

    out = round(fp32(out) + fp32 a · bᵀ)   one fp32 addition, one rounding to out's dtype

Source: `torch._scaled_mm` with a scale for each row; on an H200, at K = 128 and with scales that are no powers of two,
b's scale comes first (docs/log/recipes.md). torchao calls it for an output, with fast accumulation. For gradients it
multiplies codes without scales, split, rounds to bf16, and multiplies by s · t afterwards
(`torchao/float8/float8_ops.py`, 36027d8): with powers of two that is the same word of bf16. fp16 and fp32 it reaches by
way of bf16, and a bias it adds after that, in the output's dtype; here there is one rounding. To bf16 without a bias no
word of torchao's linear map differed on an H200 (docs/results/rowwise_torchao.json).
"""

import torch

from reference.numbers import tensor_core
from reference.ops.gemms.gemm_fp8 import check_accumulate, check_accumulation, check_epilogue, check_matrices
from reference.ops.library import define


def check_operands(a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor) -> None:
    """`check_matrices`, and refuse scales that are neither one fp32 number nor one for each row."""
    check_matrices("gemm_fp8_rowwise", a, b)
    for name, matrix, scale in (("a", a, a_scale_inv), ("b", b, b_scale_inv)):
        fits = scale.dim() == 1 and len(scale) in (1, len(matrix)) and scale.is_contiguous()
        if scale.dtype != torch.float32 or not fits:
            raise ValueError(
                f"{name}_scale_inv is {scale.dtype} {tuple(scale.shape)}, strides {scale.stride()}; contiguous float32 "
                f"({len(matrix)},), a number for each row of {name}, or (1,) is needed."
            )


def outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    check_operands(a, b, a_scale_inv, b_scale_inv)
    check_epilogue(b.shape[0], bias, out_dtype)
    check_accumulation(accumulate)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def accumulate_outputs(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    check_operands(a, b, a_scale_inv, b_scale_inv)
    check_accumulate(a, b, out)


@define(outputs)
def gemm_fp8_rowwise(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8, K and N multiples of 16 -> `[M, N]` of out_dtype.

    a_scale_inv fp32 `[M]` or `[1]`, b_scale_inv `[N]` or `[1]`, bias `[N]` or None, accumulate "fast" or "split".
    """
    out = outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate)
    acc = tensor_core.gemm(a, b, accumulate) * b_scale_inv * a_scale_inv[:, None]
    return out.copy_(acc if bias is None else acc + bias.to(torch.float32))


@define(accumulate_outputs, mutates=("out",))
def gemm_fp8_rowwise_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; the other arguments are those of `gemm_fp8_rowwise`."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, out)
    out.copy_(out.float() + gemm_fp8_rowwise(a, b, a_scale_inv, b_scale_inv, None, torch.float32, "split"))
