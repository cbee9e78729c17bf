"""A GEMM in parts along K: `twin::gemm_part`, `twin::gemm_fp8_part`, `twin::gemm_fp8_blocks_part`, `twin::end_gemm` and
`twin::gemm_fp8_end`.

All GEMMs add in order of K, and between two steps their state is one fp32 word an output. So K may be cut, and the
first part's accumulators are what the second starts from:

    acc = +0, or `accumulator`
    16 bits              acc = the chain of a · bᵀ that starts from acc      (`reference.numbers.tensor_core.gemm`)
    FP8, "fast"          the same
    FP8, "split"         for each 128 of K: acc = acc + p, rounded to fp32; p is a chain from zero
    FP8 blocks           for each 128 of K: acc = fma(p, its scales, acc), as in `twin::gemm_fp8_blocks`

and `twin::end_gemm` is what follows K, once:

    out = acc · (a_scale_inv · b_scale_inv)      two roundings to fp32, where there are scales (`twin::gemm_fp8`)
    out = out + bias                             rounded to fp32, where there is a bias
    out -> out_dtype                             rounded to nearest even

`twin::gemm_fp8_end` is `gemm_fp8_part` and then `end_gemm`, for the last part.

Parts of one K, in order, and then the end, give the words of the whole GEMM if every part but the last has a K that is
a multiple of `CUTS`. The accumulators may come from another process: that is how ranks share a sum over K
(`reference.parallel.ordered_reduce`), with the words of one process.
"""

import torch

from reference.numbers import tensor_core
from reference.numbers.tensor_core import model
from reference.ops.gemms import gemm as gemm_16
from reference.ops.gemms import gemm_fp8, gemm_fp8_blocks
from reference.ops.library import define

CUTS = {"16 bits": model.HALF_STEP.k, "fast": model.FP8_STEP.k, "split": tensor_core.SPLIT_K, "blocks": 128}
"""Where K may be cut: at multiples of these."""


def check_accumulator(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None) -> None:
    """Refuse accumulators that are not contiguous fp32 `[M, N]`."""
    shape = (a.shape[0], b.shape[0])
    if accumulator is None:
        return
    if accumulator.dtype != torch.float32 or tuple(accumulator.shape) != shape or not accumulator.is_contiguous():
        raise ValueError(
            f"accumulator is {accumulator.dtype} {tuple(accumulator.shape)}, strides {accumulator.stride()}; "
            f"contiguous float32 {shape} is needed."
        )


def check_end(
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    columns: int,
) -> None:
    """Refuse what cannot follow K: scales that are not one fp32 number each, a bias or an output of another kind."""
    if (a_scale_inv is None) is not (b_scale_inv is None):
        raise ValueError("one of a_scale_inv and b_scale_inv is None; both or neither is accepted.")
    for name, scale in (("a_scale_inv", a_scale_inv), ("b_scale_inv", b_scale_inv)):
        if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
            raise ValueError(f"{name} is {scale.dtype} {tuple(scale.shape)}; one float32 number is needed.")
    gemm_fp8.check_epilogue(columns, bias, out_dtype)


def _empty(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=dtype)


def part_outputs(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
    gemm_16.check_operands(a, b)
    check_accumulator(a, b, accumulator)
    return _empty(a, b)


def fp8_part_outputs(
    a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, accumulate: str
) -> torch.Tensor:
    gemm_fp8.check_matrices("gemm_fp8_part", a, b, apart=True)
    gemm_fp8.check_accumulation(accumulate)
    check_accumulator(a, b, accumulator)
    return _empty(a, b)


def blocks_part_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    accumulator: torch.Tensor | None,
) -> torch.Tensor:
    gemm_fp8_blocks.check_operands(a, b, a_scale_inv, b_scale_inv, a_square, b_square)
    check_accumulator(a, b, accumulator)
    return _empty(a, b)


def end_outputs(
    accumulator: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    if accumulator.dtype != torch.float32 or accumulator.dim() != 2:
        raise ValueError(f"accumulator is {accumulator.dtype} {tuple(accumulator.shape)}; float32 [M, N] is needed.")
    check_end(a_scale_inv, b_scale_inv, bias, out_dtype, accumulator.shape[1])
    return torch.empty_like(accumulator, dtype=out_dtype)


def fp8_end_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    gemm_fp8.check_matrices("gemm_fp8_end", a, b, apart=True)
    gemm_fp8.check_accumulation(accumulate)
    check_accumulator(a, b, accumulator)
    check_end(a_scale_inv, b_scale_inv, bias, out_dtype, b.shape[0])
    return _empty(a, b, out_dtype)


@define(part_outputs)
def gemm_part(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]`, both bf16 or both fp16, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    part_outputs(a, b, accumulator)
    return tensor_core.gemm(a, b, c=accumulator)


@define(fp8_part_outputs)
def gemm_fp8_part(a: torch.Tensor, b: torch.Tensor, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, accumulator fp32 `[M, N]` or None, accumulate "fast" or "split" -> `[M, N]`.

    Rows of a and of b are contiguous and begin multiples of 16 bytes apart: columns of a larger matrix are read where
    they lie.
    """
    fp8_part_outputs(a, b, accumulator, accumulate)
    return tensor_core.gemm(a.contiguous(), b.contiguous(), accumulate, accumulator)


@define(blocks_part_outputs)
def gemm_fp8_blocks_part(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    a_square: bool,
    b_square: bool,
    accumulator: torch.Tensor | None,
) -> torch.Tensor:
    """Operands as of `gemm_fp8_blocks`, accumulator fp32 `[M, N]` or None -> fp32 `[M, N]`."""
    blocks_part_outputs(a, b, a_scale_inv, b_scale_inv, a_square, b_square, accumulator)
    return gemm_fp8_blocks.accumulated(a, b, a_scale_inv, b_scale_inv, a_square, b_square, accumulator)


@define(end_outputs)
def end_gemm(
    accumulator: torch.Tensor,
    a_scale_inv: torch.Tensor | None,
    b_scale_inv: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """accumulator fp32 `[M, N]`, scales fp32 `[1]` or None, bias `[N]` or None -> `[M, N]` of out_dtype."""
    out = end_outputs(accumulator, a_scale_inv, b_scale_inv, bias, out_dtype)
    acc = accumulator
    if a_scale_inv is not None and b_scale_inv is not None:
        acc = acc * (a_scale_inv.reshape(()) * b_scale_inv.reshape(()))
    return out.copy_(acc if bias is None else acc + bias.to(torch.float32))


@define(fp8_end_outputs)
def gemm_fp8_end(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale_inv: torch.Tensor,
    b_scale_inv: torch.Tensor,
    bias: torch.Tensor | None,
    accumulator: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """The last part, as by `gemm_fp8_part`, and the end, as by `end_gemm` -> `[M, N]` of out_dtype.

    Args:
        a: `[M, K]` float8.
        b: `[N, K]` float8.
        a_scale_inv: fp32 `[1]`.
        b_scale_inv: fp32 `[1]`.
        bias: `[N]`, bf16, fp16 or fp32, or None.
        accumulator: fp32 `[M, N]`, of the parts before, or None.
        out_dtype: bf16, fp16 or fp32.
        accumulate: "fast" or "split".
    """
    fp8_end_outputs(a, b, a_scale_inv, b_scale_inv, bias, accumulator, out_dtype, accumulate)
    sums = gemm_fp8_part(a, b, accumulator, accumulate)
    return end_gemm(sums, a_scale_inv, b_scale_inv, bias, out_dtype)
