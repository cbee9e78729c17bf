"""`twin::gemm_mxfp8`, `twin::gemm_nvfp4` and their `_accumulate`: GEMMs of operands whose blocks along K have scales.

    block b of K is 32 numbers (MXFP8) or 16 (NVFP4); sa[m, b] and sb[n, b] are its scales, as numbers

    p_b = fp32( Σ over k in b of a[m, k] · b[n, k] )        codes' numbers; exact, then rounded once
    acc = fp32( acc + fp32( p_b · fp32(sa[m, b] · sb[n, b]) ) )        b = 0, 1, ... in order, from +0

    MXFP8   t = acc
    NVFP4   t = acc · alpha,   alpha = fp32(a_amax · b_amax) / 7,225,344        the latter is 2688²

    out = round( t + bias )              one fp32 addition, one rounding to out_dtype; without a bias round(t)
    accumulate:  out = round( fp32(out) + t )

In NVFP4 everything of a block is exact: p_b has at most 12 bits, the product of the scales 8. So only the additions of
blocks round. In MXFP8 p_b is exact in float64 for two E4M3 operands. With an E5M2 operand its sum may take 55 bits:
there eight neighbouring products are summed exactly, and the four sums are added in order in float64.

**The order is this project's.** No Blackwell GPU was there to be recorded. For NVFP4 it is that of Transformer Engine
2.20's `NVFP4QuantizerRef.qgemm`, in every word; for MXFP8 there is no reference, and it is the same chain.
"""

from collections.abc import Callable

import torch

from reference.numbers import block_formats, formats
from reference.numbers.tensor_core.operands import FP8_DTYPES
from reference.ops.casts import cast_mxfp8, cast_nvfp4
from reference.ops.checks import check_like
from reference.ops.gemms.gemm_fp8 import check_accumulate, check_epilogue
from reference.ops.library import define

_EXACT = 8  # products of an E4M3 and an E5M2 number whose sum is exact in float64

Partial = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _chain(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, partial: Partial
) -> torch.Tensor:
    """acc `[M, N]` of a `[M, blocks, block]`, b `[N, blocks, block]` and fp32 scales `[M, blocks]`, `[N, blocks]`."""
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device="cpu")
    for block in range(a.shape[1]):
        acc += partial(a[:, block], b[:, block]) * torch.outer(a_scales[:, block], b_scales[:, block])
    return acc


def _at_once(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b.t()).float()


def _by_eights(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    pieces = [one @ two.t() for one, two in zip(a.split(_EXACT, 1), b.split(_EXACT, 1), strict=True)]
    total = pieces[0]
    for piece in pieces[1:]:
        total += piece
    return total.float()


def _product_mxfp8(a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor) -> torch.Tensor:
    x, y = (formats.decode(x).double().view(*s.shape, cast_mxfp8.BLOCK) for x, s in ((a, a_scales), (b, b_scales)))
    exact = a.dtype == b.dtype == formats.E4M3.dtype
    scales = (block_formats.decode_e8m0(a_scales), block_formats.decode_e8m0(b_scales))
    return _chain(x, y, *scales, _at_once if exact else _by_eights)


def _product_nvfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
) -> torch.Tensor:
    x, y = (
        block_formats.decode_e2m1(codes).view(*scales.shape, cast_nvfp4.BLOCK)
        for codes, scales in ((a, a_scales), (b, b_scales))
    )
    acc = _chain(x, y, formats.decode(a_scales), formats.decode(b_scales), _at_once)
    return acc * torch.div(a_amax * b_amax, torch.full((1,), cast_nvfp4.LARGEST**2, dtype=torch.float32, device="cpu"))


def _check(op: str, name: str, x: torch.Tensor, like: torch.Tensor) -> None:
    if x.dim() != 2 or not x.is_contiguous() or x.device != like.device:
        raise ValueError(
            f"{op}: {name} must be contiguous [rows, ...] codes on {like.device}; got shape {tuple(x.shape)}, strides "
            f"{x.stride()}, on {x.device}."
        )


def _check_mxfp8(op: str, a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor) -> None:
    for name, x, scales in (("a", a, a_scales), ("b", b, b_scales)):
        _check(op, name, x, a)
        if x.dtype not in FP8_DTYPES:
            raise TypeError(f"{op}: {name} is {x.dtype}; float8_e4m3fn or float8_e5m2 is accepted.")
        if x.shape[1] != a.shape[1] or x.shape[1] % cast_mxfp8.BLOCK:
            raise ValueError(
                f"{op}: {name} has K = {x.shape[1]}, and a K = {a.shape[1]}; one K, a multiple of 32, is accepted."
            )
        shape = (x.shape[0], x.shape[1] // cast_mxfp8.BLOCK)
        check_like(op, f"{name}_scales", scales, torch.uint8, shape, a.device)


def _check_nvfp4(
    op: str,
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
) -> None:
    for name, x, scales, amax in (("a", a, a_scales, a_amax), ("b", b, b_scales, b_amax)):
        _check(op, name, x, a)
        if x.dtype != torch.uint8:
            raise TypeError(f"{op}: {name} is {x.dtype}; uint8, two E2M1 codes a byte, is accepted.")
        if x.shape[1] != a.shape[1] or x.shape[1] % 8:
            raise ValueError(
                f"{op}: {name} has {x.shape[1]} bytes a row, and a {a.shape[1]}; the same number, a multiple of 8, is "
                f"accepted."
            )
        check_like(op, f"{name}_scales", scales, cast_nvfp4.SCALE_DTYPE, (x.shape[0], x.shape[1] // 8), a.device)
        check_like(op, f"{name}_amax", amax, torch.float32, (1,), a.device)


def mxfp8_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check_mxfp8("twin::gemm_mxfp8", a, b, a_scales, b_scales)
    check_epilogue(b.shape[0], bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def mxfp8_accumulate_outputs(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor
) -> None:
    _check_mxfp8("twin::gemm_mxfp8_accumulate", a, b, a_scales, b_scales)
    check_accumulate(a, b, out)


def nvfp4_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check_nvfp4("twin::gemm_nvfp4", a, b, a_scales, b_scales, a_amax, b_amax)
    check_epilogue(b.shape[0], bias, out_dtype)
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def nvfp4_accumulate_outputs(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
    out: torch.Tensor,
) -> None:
    _check_nvfp4("twin::gemm_nvfp4_accumulate", a, b, a_scales, b_scales, a_amax, b_amax)
    check_accumulate(a, b, out)


@define(mxfp8_outputs, cpu_only=block_formats.CPU_ONLY)
def gemm_mxfp8(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a `[M, K]`, b `[N, K]` float8, scales uint8 `[M, K / 32]`, `[N, K / 32]`, bias `[N]` or None -> `[M, N]`."""
    out = mxfp8_outputs(a, b, a_scales, b_scales, bias, out_dtype)
    total = _product_mxfp8(a, b, a_scales, b_scales)
    return out.copy_(total if bias is None else total + bias.float())


@define(mxfp8_accumulate_outputs, mutates=("out",), cpu_only=block_formats.CPU_ONLY)
def gemm_mxfp8_accumulate(
    a: torch.Tensor, b: torch.Tensor, a_scales: torch.Tensor, b_scales: torch.Tensor, out: torch.Tensor
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; operands as of `gemm_mxfp8`."""
    mxfp8_accumulate_outputs(a, b, a_scales, b_scales, out)
    out.copy_(out.float() + _product_mxfp8(a, b, a_scales, b_scales))


@define(nvfp4_outputs, cpu_only=block_formats.CPU_ONLY)
def gemm_nvfp4(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """a `[M, K / 2]`, b `[N, K / 2]` uint8, scales E4M3 `[M, K / 16]`, `[N, K / 16]`, amaxes `[1]` -> `[M, N]`."""
    out = nvfp4_outputs(a, b, a_scales, b_scales, a_amax, b_amax, bias, out_dtype)
    total = _product_nvfp4(a, b, a_scales, b_scales, a_amax, b_amax)
    return out.copy_(total if bias is None else total + bias.float())


@define(nvfp4_accumulate_outputs, mutates=("out",), cpu_only=block_formats.CPU_ONLY)
def gemm_nvfp4_accumulate(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scales: torch.Tensor,
    b_scales: torch.Tensor,
    a_amax: torch.Tensor,
    b_amax: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Add a·bᵀ to out `[M, N]`, fp32, bf16 or fp16; operands as of `gemm_nvfp4`."""
    nvfp4_accumulate_outputs(a, b, a_scales, b_scales, a_amax, b_amax, out)
    out.copy_(out.float() + _product_nvfp4(a, b, a_scales, b_scales, a_amax, b_amax))
