"""`twin::gemm_fp8_blocks`, an FP8 GEMM of operands that have a scale for each block of 128 along K.

    acc = +0;  for each block k of 128, in order of K:
        p   = a[:, k] · b[:, k]ᵀ             one chain from zero, fp32 (`reference.numbers.tensor_core.gemm`)
        both of rows:                        p = p · s, rounded to fp32;  acc = fma(p, t, acc), rounded to fp32
        one of them square:                  f = s · t, rounded to fp32;  acc = fma(p, f, acc), rounded to fp32
    out = acc + bias                         rounded to fp32, where there is a bias
    out -> out_dtype                         rounded to nearest even

s, t: the scale_inv of a's row and of b's row, or of its block of 128 rows, where blocks are square. With scales that
are powers of two both orders give the same words, and so does an addition in place of the fma, as long as nothing
overflows or underflows.

`twin::gemm_fp8_blocks_accumulate` adds such a GEMM in fp32 to a gradient in place:

    out = round(fp32(out) + acc)             one fp32 addition, one rounding to out's dtype

`twin::gemm_fp8_blocks_bias_dropout_add` is such a GEMM without a bias, rounded to the activation dtype T, followed by
`twin::bias_dropout_add`:

    out = T( T( dropout( T( T(acc) + bias ) ) ) + residual )

Scales lie as `twin::cast_blocks` writes them. Square blocks on both sides are refused, as by cuBLASLt.

Source: cuBLASLt 13 (`torch._scaled_mm`), which Transformer Engine calls. On an H100, with scales that are no powers of
two and fp32 outputs, this gives each of 65,536 words in all three forms of blocks; tests/golden/scaled_products.npz has
such words of an H200. DeepGEMM multiplies the scales first, too. Transformer Engine's own reference
(`tests/pytorch/references/blockwise_fp8_gemm_reference.py`) has the order of rows for square blocks as well.
"""

import torch

from reference.numbers import tensor_core
from reference.ops.casts.cast_blocks import BLOCK, blocks_of, scale_shape
from reference.ops.gemms.gemm_fp8 import check_accumulate, check_epilogue, check_matrices
from reference.ops.library import define
from reference.ops.random.dropout import bias_dropout_add, check_addends, check_dropout
from reference.support.numba_jit import fma, jit


def check_operands(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
) -> None:
    """`check_matrices`, and refuse square blocks on both sides and scales that are not those of the blocks."""
    check_matrices("gemm_fp8_blocks", a, b)
    if a_square and b_square:
        raise ValueError("a_square and b_square are both True; square blocks on one side at most are accepted.")
    for name, matrix, scales, square in (("a", a, a_scale_inv, a_square), ("b", b, b_scale_inv, b_square)):
        shape = scale_shape(matrix.shape[0], matrix.shape[1], square)
        if scales.dtype != torch.float32 or tuple(scales.shape) != shape or not scales.is_contiguous():
            raise ValueError(
                f"{name}_scale_inv is {scales.dtype} {tuple(scales.shape)}, strides {scales.stride()}; contiguous "
                f"float32 {shape} is needed, as cast_blocks writes it."
            )


def outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    check_operands(a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    check_epilogue(b.shape[0], bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def accumulate_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    out: torch.Tensor,
) -> None:
    check_operands(a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    check_accumulate(a, b, out)


def bias_dropout_add_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    op = "twin::gemm_fp8_blocks_bias_dropout_add"
    out = outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, None, out_dtype)
    check_addends(op, out, bias, residual)
    check_dropout(op, "x", out, p, rng_state)
    return out


@jit
def _promote(acc, p, rows, columns, factors_first):  # type: ignore[no-untyped-def]
    """acc `[M, N]` = fma(p, rows · columns, acc) or fma(p · rows, columns, acc), of factors `[M]` and `[N]`."""
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            if factors_first:
                acc[i, j] = fma(p[i, j], rows[i] * columns[j], acc[i, j])
            else:
                acc[i, j] = fma(p[i, j] * rows[i], columns[j], acc[i, j])


def factors(scales: torch.Tensor, rows: int, square: bool) -> torch.Tensor:
    """fp32 `[blocks along K, rows]`: the scale of each row's block."""
    if square:
        return scales.t().repeat_interleave(BLOCK, 1)[:, :rows].contiguous()
    return scales[:, :rows].contiguous()


def accumulated(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """acc, fp32 `[M, N]`, from +0 or from `start`."""
    rows, columns = factors(a_scale_inv, len(a), a_square), factors(b_scale_inv, len(b), b_square)
    shape = (len(a), len(b))
    acc = torch.zeros(shape, dtype=torch.float32, device="cpu") if start is None else start.clone()
    for k in range(blocks_of(a.shape[1])):
        part = slice(BLOCK * k, BLOCK * (k + 1))
        p = tensor_core.gemm(a[:, part].contiguous(), b[:, part].contiguous())
        _promote(acc.numpy(), p.numpy(), rows[k].numpy(), columns[k].numpy(), a_square or b_square)
    return acc


@define(outputs)
def gemm_fp8_blocks(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a `[M, K]` and b `[N, K]` float8 with the scales of their blocks, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, bias, out_dtype)
    acc = accumulated(a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    return out.copy_(acc if bias is None else acc + bias.to(torch.float32))


@define(accumulate_outputs, mutates=("out",))
def gemm_fp8_blocks_accumulate(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    out: torch.Tensor,
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; the other arguments are those of `gemm_fp8_blocks`."""
    accumulate_outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, out)
    out.copy_(out.float() + accumulated(a, b, a_scale_inv, b_scale_inv, a_square, b_square))


@define(bias_dropout_add_outputs, mutates=("rng_state",))
def gemm_fp8_blocks_bias_dropout_add(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype,
    p: float,
    rng_state: torch.Tensor | None,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, bias `[N]`, residual `[M, N]` of out_dtype -> `[M, N]` of out_dtype.

    The scales are as in `gemm_fp8_blocks`; p and rng_state as in `twin::bias_dropout_add`, which advances the state.
    """
    operands = (a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    bias_dropout_add_outputs(*operands, bias, residual, out_dtype, p, rng_state)
    return bias_dropout_add(gemm_fp8_blocks(*operands, None, out_dtype), bias, residual, p, rng_state)
