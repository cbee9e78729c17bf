"""`twin::gemm`, a 16-bit GEMM with a bias.

    acc = a · bᵀ          bf16 or fp16 tensor-core steps in one chain over K, fp32
    (`reference.numbers.tensor_core.gemm`) out = acc + bias      rounded to fp32, where there is a bias
    out -> out_dtype      rounded to nearest even

`twin::gemm_accumulate` adds a·bᵀ in fp32 to a gradient in place, as `twin::gemm_fp8_accumulate` does.
"""

import torch

from reference.numbers import tensor_core
from reference.numbers.tensor_core.operands import check_depth
from reference.ops.gemms.gemm_fp8 import check_accumulate, check_epilogue
from reference.ops.library import define


def check_operands(a: torch.Tensor, b: torch.Tensor) -> None:
    """Refuse matrices that are not 16-bit `[M, K]` and `[N, K]`, each row-major or a transposed view."""
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dtype not in (torch.bfloat16, torch.float16):
            raise TypeError(f"{name} is {matrix.dtype}; gemm takes bfloat16 or float16.")
        if matrix.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(matrix.shape)}; a matrix [rows, K] is needed.")
        rows, depth = matrix.shape
        row_major = matrix.stride(1) == 1 or depth <= 1
        if matrix.numel() and not row_major and not (matrix.stride(0) == 1 or rows <= 1):
            raise ValueError(
                f"{name} has strides {matrix.stride()}; gemm takes a row-major matrix or a transposed view "
                f"of one (a stride of 1 in either dimension)."
            )
    if a.dtype != b.dtype:
        raise TypeError(f"a is {a.dtype} and b is {b.dtype}; gemm takes two matrices of one dtype.")
    check_depth(a, b)


def outputs(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    check_operands(a, b)
    check_epilogue(b.shape[0], bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def accumulate_outputs(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    check_operands(a, b)
    check_accumulate(a, b, out)


@define(outputs)
def gemm(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]`, both bf16 or both fp16, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = outputs(a, b, bias, out_dtype)
    acc = tensor_core.gemm(a, b)
    return out.copy_(acc if bias is None else acc + bias.to(torch.float32))


@define(accumulate_outputs, mutates=("out",))
def gemm_accumulate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; a `[M, K]` and b `[N, K]`, both bf16 or both fp16."""
    accumulate_outputs(a, b, out)
    out.copy_(out.float() + tensor_core.gemm(a, b))
