"""Matrices as operands of GEMMs, and the three GEMMs of a linear layer.

Shapes: x `[tokens, in]`, w `[out, in]`, g = dL/dy `[tokens, out]`; y = x·wᵀ + b, dx = g·w, dw = gᵀ·x. A GEMM reads both
operands along K, so a backward needs transposes: tensors of their own in FP8, views in 16 bits.
"""

from typing import NamedTuple

import torch

from reference.ops.dropout import state_or_none
from reference.ops.library import twin

PER_TENSOR = "per-tensor"
"""Layout: FP8 codes with one scale for the tensor."""


class Quantized(NamedTuple):
    """A matrix as an operand of GEMMs.

    Attributes:
        codes: `[rows, cols]`, FP8, or plain numbers (then layout is None).
        codes_t: the transpose (in FP8 padded with zeros to a multiple of 16 columns); None where no backward reads it.
        scales: fp32 `[1]`, the factor of a code; None for plain numbers.
        layout: `PER_TENSOR`, or None for plain numbers.
    """

    codes: torch.Tensor
    codes_t: torch.Tensor | None
    scales: torch.Tensor | None
    layout: str | None = PER_TENSOR

    @property
    def saved(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """What a backward reads of it, for `save_for_backward`; nothing without a transpose."""
        return (None, None) if self.codes_t is None else (self.codes_t, self.scales)


class Transposed(NamedTuple):
    """What a backward reads of a `Quantized`: `Transposed(*quantized.saved)`."""

    codes_t: torch.Tensor | None
    scales: torch.Tensor | None


class Parts(NamedTuple):
    """A weight `[out, in]` that consists of several matrices, by rows, each with a scale of its own.

        y = the parts' y side by side                       each part as a GEMM of its own
        dx = T( part 1 + part 2 + ... )                     each part split and in fp32; the sums are rounded to fp32

    Outside of FP8's backward (a transpose in 16 bits) the transpose is one matrix, that of the first part.
    """

    parts: tuple[Quantized, ...]

    @property
    def saved(self) -> tuple[torch.Tensor | None, ...]:
        """The parts' `saved`, one after the other."""
        return tuple([t for one in self.parts for t in one.saved])


Weight = Quantized | Parts


def transposed(saved: "tuple[torch.Tensor | None, ...]") -> "Transposed | tuple[Transposed, ...]":
    """What a backward reads of a `Quantized` or of `Parts`: `transposed(weight.saved)`."""
    if len(saved) == 2 or saved[2] is None:
        return Transposed(*saved[:2])
    return tuple([Transposed(*saved[i : i + 2]) for i in range(0, len(saved), 2)])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """`[..., features]` as contiguous `[tokens, features]`."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x in `dtype`; x itself if it has that dtype, so that a compiler sees one tensor."""
    return x if x.dtype == dtype else x.to(dtype)


def stacked(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """`torch.cat` of parts of one dtype, whatever it is: under torch.autocast torch refuses some."""
    side = parts[0].device.type
    if side != "meta" and torch.is_autocast_enabled(side):
        with torch.autocast(side, enabled=False):
            return torch.cat(parts, dim)
    return torch.cat(parts, dim)


class Accumulation(NamedTuple):
    """How each GEMM of a linear layer accumulates in FP8: "fast" or "split" (`reference.ops.gemm_fp8`)."""

    fprop: str = "fast"
    dgrad: str = "split"
    wgrad: str = "split"


def gemm(
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    """a·bᵀ + bias: `twin::gemm_fp8` where there are scales, else `twin::gemm`; in fp32 PyTorch's own."""
    assert a is not None
    assert b is not None
    if a.dtype == torch.float32:
        return torch.nn.functional.linear(a, b, bias)
    if scales[0] is None or scales[1] is None:
        return twin.gemm(a, b, bias, out_dtype)
    return twin.gemm_fp8(a, b, *scales, bias, out_dtype, accumulate)


def gemm_bias(x: Quantized, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor | None:
    """A bias in the dtype that the GEMM of x takes: in FP8 bf16 instead of fp32, because cuBLAS takes no fp32 bias."""
    if bias is None:
        return None
    return as_dtype(bias, torch.bfloat16 if x.layout is not None and out_dtype == torch.float32 else out_dtype)


def fprop(
    x: Quantized, w: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, how: Accumulation
) -> torch.Tensor:
    """y `[tokens, out]`."""
    if isinstance(w, Parts):
        rows = [len(one.codes) for one in w.parts]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        parts = zip(w.parts, biases, strict=True)
        return stacked([fprop(x, one, its_bias, out_dtype, how) for one, its_bias in parts], 1)
    return gemm(x.codes, w.codes, (x.scales, w.scales), gemm_bias(x, bias, out_dtype), out_dtype, how.fprop)


def fprop_residual(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    dropout: tuple[float, torch.Tensor | None],
    out_dtype: torch.dtype,
    how: Accumulation,
) -> torch.Tensor:
    """residual + dropout(x·wᵀ + bias) `[tokens, out]`, rounded as by `twin::bias_dropout_add`.

    `dropout` is (p, rng_state).
    """
    bias = gemm_bias(x, bias, out_dtype)
    rest = (dropout[0], state_or_none(dropout[1], residual))
    if x.layout == PER_TENSOR and how.fprop == "fast":
        operands = (x.codes, w.codes, x.scales, w.scales)
        return twin.gemm_fp8_bias_dropout_add(*operands, bias, residual, out_dtype, *rest)
    return twin.bias_dropout_add(fprop(x, w, None, out_dtype, how), bias, residual, *rest)


def dgrad(
    g: Quantized, w: Transposed | tuple[Transposed, ...], out_dtype: torch.dtype, how: Accumulation
) -> torch.Tensor:
    """dx `[tokens, in]`."""
    if not isinstance(w, Transposed):
        return _dgrad_of_parts(g, w, out_dtype, how)
    return gemm(g.codes, w.codes_t, (g.scales, w.scales), None, out_dtype, how.dgrad)


def _dgrad_of_parts(g: Quantized, w: tuple[Transposed, ...], out_dtype: torch.dtype, how: Accumulation) -> torch.Tensor:
    """dx of a weight with several scales: see `Parts`."""
    rows = [one.codes_t.shape[1] for one in w if one.codes_t is not None]
    pairs = zip(g.codes.split(rows, 1), w, strict=True)
    first, *others = [(Quantized(codes.contiguous(), None, g.scales), one) for codes, one in pairs]
    dx = dgrad(*first, torch.float32, how)
    for part, one in others:
        assert one.codes_t is not None
        twin.gemm_fp8_accumulate(part.codes, one.codes_t, part.scales, one.scales, dx)
    return as_dtype(dx, out_dtype)


def wgrad(
    g: Quantized, x: Transposed, out_dtype: torch.dtype, how: Accumulation, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """dw `[out, in]`; or None, after main_grad = round(fp32(main_grad) + fp32 dw)."""
    if main_grad is None:
        return gemm(g.codes_t, x.codes_t, (g.scales, x.scales), None, out_dtype, how.wgrad)
    assert g.codes_t is not None
    assert x.codes_t is not None
    if g.codes_t.dtype == torch.float32:
        main_grad.copy_(main_grad.float() + torch.nn.functional.linear(g.codes_t, x.codes_t))
    elif g.scales is None:
        twin.gemm_accumulate(g.codes_t, x.codes_t, main_grad)
    else:
        twin.gemm_fp8_accumulate(g.codes_t, x.codes_t, g.scales, x.scales, main_grad)
    return None
