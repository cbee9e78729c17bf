"""`twin::gemm_fp8`, an FP8 GEMM with its scales and bias.

    acc = a · bᵀ                           tensor-core steps, fp32 (`reference.numbers.tensor_core.gemm`)
    scale = a_scale_inv · b_scale_inv      rounded to fp32
    out = acc · scale                      rounded to fp32
    out = out + bias                       rounded to fp32, where there is a bias
    out -> out_dtype                       rounded to nearest even

With `accumulate` "fast" (fprop) acc is one chain over K; with "split" (dgrad and wgrad) it consists of chains of
K = 128, added in fp32 in order of K.

`twin::gemm_fp8_accumulate` adds such a GEMM, split and in fp32, to a gradient in place:

    out = round(fp32(out) + fp32 a · bᵀ)   one fp32 addition, one rounding to out's dtype
"""

import torch

from reference.numbers import tensor_core
from reference.numbers.tensor_core.operands import FP8_DTYPES, check_depth
from reference.ops.library import define

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_matrices(op: str, a: torch.Tensor, b: torch.Tensor, apart: bool = False) -> None:
    """Refuse all but contiguous FP8 `[M, K]` and `[N, K]`, K and N multiples of 16.

    With `apart` rows may begin at any multiple of 16 bytes from each other, as those of some columns of a matrix do.
    """
    for name, matrix in (("a", a), ("b", b)):
        if matrix.dtype not in FP8_DTYPES:
            raise TypeError(f"{name} is {matrix.dtype}; {op} takes float8_e4m3fn or float8_e5m2.")
        if matrix.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(matrix.shape)}; a matrix [rows, K] is needed.")
        if not (matrix.is_contiguous() or (apart and matrix.stride(1) == 1 and matrix.stride(0) % 16 == 0)):
            begins = ", which begin multiples of 16 bytes apart" if apart else ""
            raise ValueError(f"{name} has strides {matrix.stride()}; {op} takes contiguous rows{begins}.")
    check_depth(a, b)
    if a.shape[1] % 16:
        raise ValueError(f"a has K = {a.shape[1]}; FP8 GEMMs need a K that is a multiple of 16.")
    if b.shape[0] % 16:
        raise ValueError(f"b has N = {b.shape[0]} rows; FP8 GEMMs need an N that is a multiple of 16.")


def check_operands(a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor) -> None:
    """`check_matrices`, and refuse scales that are not one fp32 number."""
    check_matrices("gemm_fp8", a, b)
    for name, scale in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        if scale.dtype != torch.float32 or scale.numel() != 1:
            raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}; one float32 number is needed.")


def check_epilogue(columns: int, bias: torch.Tensor | None, out_dtype: torch.dtype) -> None:
    """Refuse an output dtype or a bias that no GEMM accepts."""
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype is {out_dtype}; bfloat16, float16 or float32 is accepted.")
    if bias is None:
        return
    if bias.dtype not in OUT_DTYPES:
        raise TypeError(f"bias is {bias.dtype}; bfloat16, float16 or float32 is accepted.")
    if tuple(bias.shape) != (columns,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; one number per output column, ({columns},).")


def check_accumulation(accumulate: str) -> None:
    """Refuse all but "fast" and "split"."""
    if accumulate not in ("fast", "split"):
        raise ValueError(f"accumulate is {accumulate!r}; 'fast' or 'split' is accepted.")


def check_accumulate(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Refuse a gradient to which a·bᵀ cannot be added."""
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"out is {out.dtype}; bfloat16, float16 or float32 is accepted.")
    if tuple(out.shape) != (a.shape[0], b.shape[0]):
        raise ValueError(f"out has shape {tuple(out.shape)}; that of a * b^T, {(a.shape[0], b.shape[0])}.")


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
def gemm_fp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8, scales fp32 `[1]`, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = outputs(a, b, a_scale_inv, b_scale_inv, bias, out_dtype, accumulate)
    acc = tensor_core.gemm(a, b, accumulate) * (a_scale_inv.reshape(()) * b_scale_inv.reshape(()))
    return out.copy_(acc if bias is None else acc + bias.to(torch.float32))


@define(accumulate_outputs, mutates=("out",))
def gemm_fp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scale_inv: torch.Tensor, b_scale_inv: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; a `[M, K]` and b `[N, K]` float8, scales fp32 `[1]`."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, out)
    out.copy_(out.float() + gemm_fp8(a, b, a_scale_inv, b_scale_inv, None, torch.float32, "split"))
