"""Matrices as operands of GEMMs, and the three GEMMs of a linear layer.

Shapes: x `[tokens, in]`, w `[out, in]`, g = dL/dy `[tokens, out]`; y = x·wᵀ + b, dx = g·w, dw = gᵀ·x. A GEMM reads both
operands along K, so a backward needs transposes: tensors of their own in FP8, views in 16 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from reference.ops.casts.cast_transpose import cast_outputs
from reference.ops.library import twin
from reference.ops.random.dropout import state_or_none

PLAIN = "plain"
"""Layout: numbers in 16 bits or in fp32, without scales."""
PER_TENSOR = "per-tensor"
"""Layout: FP8 codes with one scale for the tensor."""


class Operand(NamedTuple):
    """A matrix as a GEMM reads it, along its rows.

    Attributes:
        codes: `[rows, K]`, FP8 or plain numbers.
        scales: what the layout says: nothing, or the fp32 factor of a code `[1]`.
        layout: `PLAIN`, `PER_TENSOR`, or that of another recipe; with the other operand's it chooses the GEMM.
        amax: the second level of scales, if the layout has one.
    """

    codes: torch.Tensor
    scales: torch.Tensor | None = None
    layout: str = PLAIN
    amax: torch.Tensor | None = None


class Stacked(NamedTuple):
    """One half of a weight in several parts, each with scales of its own.

    y = the parts' y side by side                       the parts are rows of w, each a GEMM of its own
    dx = T( part 1 + part 2 + ... )                     each part split and in fp32; the sums are rounded to fp32
    """

    parts: tuple[Operand, ...]


class Quantized(NamedTuple):
    """A matrix `[rows, cols]` for GEMMs in both directions.

    Attributes:
        row: itself; a forward reads it along its columns.
        column: its transpose `[cols, rows]` (in FP8 padded with zeros to a multiple of 16 columns), which a backward
            reads. It may have another layout. None where no backward reads it.
    """

    row: Operand
    column: Operand | None


class Parts(NamedTuple):
    """A weight `[out, in]` that consists of several matrices, by rows; a transpose in 16 bits is one matrix."""

    row: Stacked
    column: Operand | Stacked | None


Weight = Quantized | Parts


def per_tensor(codes: torch.Tensor, codes_t: torch.Tensor | None, scale_inv: torch.Tensor) -> Quantized:
    """FP8 codes with one scale, and their transpose if there is one."""
    column = None if codes_t is None else Operand(codes_t, scale_inv, PER_TENSOR)
    return Quantized(Operand(codes, scale_inv, PER_TENSOR), column)


def cast_together(
    xs: list[torch.Tensor],
    scales: list[torch.Tensor],
    amax_histories: list[torch.Tensor],
    columns: list[int],
    dtype: torch.dtype,
) -> list[Quantized]:
    """`twin::multi_cast_transpose`, whose arguments these are, into new tensors."""
    found = [cast_outputs(x, x.shape[1], dtype) for x in xs]
    codes, codes_t, scale_inv = map(list, zip(*found, strict=True))
    twin.multi_cast_transpose(xs, scales, amax_histories, columns, codes, codes_t, scale_inv)
    return [per_tensor(*one) for one in found]


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
    """How each GEMM of a linear layer accumulates in FP8: "fast" or "split" (`reference.ops.gemms.gemm_fp8`).

    `shared`: which ranks have parts of the layer (`reference.parallel.tensor.Shared`); None where one has all of it.
    `tokens`: which ranks have some of the tokens each (`reference.parallel.tokens.Tokens`); None where one has all.
    """

    fprop: str = "fast"
    dgrad: str = "split"
    wgrad: str = "split"
    shared: Any = None
    tokens: Any = None


class Products(NamedTuple):
    """The GEMMs of two layouts: a·bᵀ for a `[m, K]` and b `[n, K]`.

    Attributes:
        multiply: (a, b, bias, out_dtype, accumulate) → T(a·bᵀ + bias) `[m, n]`.
        add: (a, b, out) → None, after out = round(fp32(out) + fp32 a·bᵀ).
        bias_of_fp32: the dtype to which a bias is rounded where the result is fp32.
        residual: None, or (a, b, bias, residual, out_dtype, p, rng_state) → residual + dropout(a·bᵀ + bias), with fast
            accumulation where `multiply` has a choice.
        part: None, or (a, b, accumulator, accumulate) → fp32 accumulators `[m, n]`, from zero or from `accumulator`.
        end: (accumulator, a, b, bias, out_dtype) → what `multiply` makes of the last part's accumulators.
        part_and_end: None, or (a, b, accumulator, bias, out_dtype, accumulate) → `end` of `part`, at once.
    """

    multiply: Callable[..., torch.Tensor]
    add: Callable[..., None]
    bias_of_fp32: torch.dtype
    residual: Callable[..., torch.Tensor] | None = None
    part: Callable[..., torch.Tensor] | None = None
    end: Callable[..., torch.Tensor] | None = None
    part_and_end: Callable[..., torch.Tensor] | None = None


def _multiply_plain(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    """`twin::gemm`; in fp32 PyTorch's own."""
    if a.codes.dtype == torch.float32:
        return torch.nn.functional.linear(a.codes, b.codes, bias)
    return twin.gemm(a.codes, b.codes, bias, out_dtype)


def _add_plain(a: Operand, b: Operand, out: torch.Tensor) -> None:
    if a.codes.dtype == torch.float32:
        out.copy_(out.float() + torch.nn.functional.linear(a.codes, b.codes))
    else:
        twin.gemm_accumulate(a.codes, b.codes, out)


def _multiply_fp8(
    a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    return twin.gemm_fp8(a.codes, b.codes, a.scales, b.scales, bias, out_dtype, accumulate)


def _add_fp8(a: Operand, b: Operand, out: torch.Tensor) -> None:
    twin.gemm_fp8_accumulate(a.codes, b.codes, a.scales, b.scales, out)


def _residual_fp8(a: Operand, b: Operand, *rest: Any) -> torch.Tensor:
    return twin.gemm_fp8_bias_dropout_add(a.codes, b.codes, a.scales, b.scales, *rest)


def _part_plain(a: Operand, b: Operand, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    if a.codes.dtype != torch.float32:
        return twin.gemm_part(a.codes, b.codes, accumulator)  # type: ignore[no-any-return]
    product = torch.nn.functional.linear(a.codes, b.codes)
    return product if accumulator is None else accumulator + product


def end_plain(
    accumulator: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`Products.end` where the accumulators have the scales in them, or there are none."""
    return twin.end_gemm(accumulator, None, None, bias, out_dtype)  # type: ignore[no-any-return]


def _part_fp8(a: Operand, b: Operand, accumulator: torch.Tensor | None, accumulate: str) -> torch.Tensor:
    return twin.gemm_fp8_part(a.codes, b.codes, accumulator, accumulate)  # type: ignore[no-any-return]


def _end_fp8(
    accumulator: torch.Tensor, a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    return twin.end_gemm(accumulator, a.scales, b.scales, bias, out_dtype)  # type: ignore[no-any-return]


def _part_and_end_fp8(
    a: Operand,
    b: Operand,
    accumulator: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    accumulate: str,
) -> torch.Tensor:
    rest = (bias, accumulator, out_dtype, accumulate)
    return twin.gemm_fp8_end(a.codes, b.codes, a.scales, b.scales, *rest)  # type: ignore[no-any-return]


PRODUCTS: dict[tuple[str, str], Products] = {
    (PLAIN, PLAIN): Products(_multiply_plain, _add_plain, torch.float32, None, _part_plain, end_plain),
    # cuBLAS takes no fp32 bias in FP8
    (PER_TENSOR, PER_TENSOR): Products(
        *(_multiply_fp8, _add_fp8, torch.bfloat16), _residual_fp8, _part_fp8, _end_fp8, _part_and_end_fp8
    ),
}
"""The GEMMs by the layouts of their operands; a recipe's file adds its own."""


NUMBERS: dict[str, Callable[[Operand], torch.Tensor]] = {}
"""What an operand's codes stand for, float64 `[rows, K]` on the CPU, by a layout whose scales are those of blocks."""
DEQUANTIZE: dict[str, Callable[[Operand, torch.dtype], torch.Tensor]] = {
    PER_TENSOR: lambda a, dtype: twin.dequantize(a.codes, a.scales, False, dtype)
}
"""The same in a dtype, `[rows, K]`, of layouts of FP8 codes on both sides."""


def dequantize(a: Operand, cols: int, dtype: torch.dtype) -> torch.Tensor:
    """What an operand's codes stand for, `[rows, cols]`, rounded to `dtype`."""
    if a.layout in NUMBERS:
        return NUMBERS[a.layout](a)[:, :cols].to(dtype)
    return DEQUANTIZE[a.layout](a, dtype)


class Keeping(NamedTuple):
    """How a weight is kept in a layout alone, without the numbers that were cast: its codes turned are those of wᵀ.

    Attributes:
        scales: shape of the codes `[rows, cols]` → shape of their scales.
        turned: (scales, that shape) → the scales of the transposed codes; None where they are the same tensor.
        used: (scales, that shape) → those of them that some code has; None where that is all.
    """

    scales: Callable[[torch.Size], tuple[int, ...]]
    turned: Callable[[torch.Tensor, torch.Size], torch.Tensor] | None = None
    used: Callable[[torch.Tensor, torch.Size], torch.Tensor] | None = None


KEEPING: dict[str, Keeping] = {PER_TENSOR: Keeping(lambda shape: (1,))}
"""The layouts in which `quantized_model_init` keeps weights; a recipe's file adds its own."""


Pieces = Callable[[Operand, list[int]], list[Operand]]
PIECES: dict[str, Pieces] = {}
"""An operand's columns in pieces of these sizes, by a layout whose scales are those of blocks."""


def pieces_of(a: Operand, sizes: list[int], apart: bool = False) -> list[Operand]:
    """The columns of an operand in pieces, each an operand.

    With `apart` rows of codes with one scale, or none, stay where they lie: `Products.part` takes them.
    """
    if a.layout in PIECES:
        return PIECES[a.layout](a, sizes)
    pieces = a.codes.split(sizes, 1)
    return [a._replace(codes=codes if apart else codes.contiguous()) for codes in pieces]


Rows = Callable[[Operand, int, int], torch.Tensor]
SCALES_OF_ROWS: dict[str, Rows] = {}
"""The scales of rows `first` to `end` - 1 of an operand, of layouts whose scales are those of blocks; `first` is a
multiple of 128."""


def rows_of_operand(a: Operand, first: int, end: int) -> Operand:
    """Rows `first` to `end` - 1 of an operand."""
    if (first, end) == (0, len(a.codes)):
        return a
    scales = SCALES_OF_ROWS[a.layout](a, first, end) if a.layout in SCALES_OF_ROWS else a.scales
    return a._replace(codes=a.codes[first:end], scales=scales)


def products(a: Operand, b: Operand) -> Products:
    """The GEMMs of two operands; a sentence where there are none."""
    found = PRODUCTS.get((a.layout, b.layout))
    if found is None:
        raise NotImplementedError(
            f"a GEMM of {a.layout} and {b.layout} operands is not offered: a weight that quantized_model_init keeps in "
            f"FP8 has the scales of the recipe that it was given; an autocast with that recipe is accepted, and where "
            f"that has one scale for a tensor, DelayedScaling or Float8CurrentScaling."
        )
    return found


def gemm(a: Operand, b: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str) -> torch.Tensor:
    """a·bᵀ + bias, by the operands' layouts."""
    return products(a, b).multiply(a, b, bias, out_dtype, accumulate)


def gemm_bias(x: Operand, w: Operand, bias: torch.Tensor | None, out_dtype: torch.dtype) -> torch.Tensor | None:
    """A bias in the dtype that the GEMM of x and w takes."""
    if bias is None:
        return None
    return as_dtype(bias, products(x, w).bias_of_fp32 if out_dtype == torch.float32 else out_dtype)


def fprop(
    x: Quantized, w: Weight, bias: torch.Tensor | None, out_dtype: torch.dtype, how: Accumulation
) -> torch.Tensor:
    """y `[tokens, out]`."""
    if not isinstance(w.row, Stacked):
        bias = gemm_bias(x.row, w.row, bias, out_dtype)
        if how.shared is not None and how.shared.splits_input:
            return how.shared.chain(x.row, w.row, bias, out_dtype, how.fprop)  # type: ignore[no-any-return]
        return gemm(x.row, w.row, bias, out_dtype, how.fprop)
    rows = [len(one.codes) for one in w.row.parts]
    biases = [None] * len(rows) if bias is None else bias.split(rows)
    parts = zip(w.row.parts, biases, strict=True)
    return stacked([fprop(x, Quantized(one, None), its_bias, out_dtype, how) for one, its_bias in parts], 1)


def send_ahead(w: Weight, tokens: int, how: Accumulation) -> None:
    """Let ranks that share a row-parallel map begin to send each other its weight, for the `fprop` of so many tokens.

    That `fprop` follows in the same call, and computes it without another of this weight before.
    """
    if how.shared is not None and how.shared.splits_input and not isinstance(w.row, Stacked):
        how.shared.send_ahead(w.row, tokens)


class Dropout(NamedTuple):
    """p, rng_state and kept of `twin::bias_dropout_add`."""

    p: float = 0.0
    state: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def fprop_residual(
    x: Quantized,
    w: Quantized,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    dropout: Dropout,
    out_dtype: torch.dtype,
    how: Accumulation,
) -> torch.Tensor:
    """residual + dropout(x·wᵀ + bias) `[tokens, out]`, rounded as by `twin::bias_dropout_add`."""
    rest = (dropout.p, state_or_none(dropout.state, residual))
    bias = None if bias is None else as_dtype(bias, out_dtype)
    fused = products(x.row, w.row).residual
    if fused is not None and how.fprop == "fast" and dropout.kept is None and how.shared is None:
        return fused(x.row, w.row, bias, residual, out_dtype, *rest)
    return twin.bias_dropout_add(fprop(x, w, None, out_dtype, how), bias, residual, *rest, dropout.kept)


def dgrad(
    g: Quantized,
    w: Operand | Stacked | None,
    out_dtype: torch.dtype,
    how: Accumulation,
    meanwhile: Callable[[], object] | None = None,
) -> torch.Tensor:
    """dx `[tokens, in]`; w is a weight's `column`.

    `meanwhile` is called, at most once, where this waits for other ranks.
    """
    assert w is not None
    if not isinstance(w, Stacked):
        if how.shared is not None and not how.shared.splits_input:
            return how.shared.chain(g.row, w, None, out_dtype, how.dgrad, meanwhile)  # type: ignore[no-any-return]
        return gemm(g.row, w, None, out_dtype, how.dgrad)
    rows = [one.codes.shape[1] for one in w.parts]
    first, *others = zip(pieces_of(g.row, rows), w.parts, strict=True)
    dx = gemm(*first, None, torch.float32, how.dgrad)
    for piece, one in others:
        products(piece, one).add(piece, one, dx)
    return as_dtype(dx, out_dtype)


def wgrad(
    g: Quantized, x: Operand | None, out_dtype: torch.dtype, how: Accumulation, main_grad: torch.Tensor | None
) -> torch.Tensor | None:
    """dw `[out, in]`; or None, after main_grad = round(fp32(main_grad) + fp32 dw); x is an input's `column`."""
    assert g.column is not None
    assert x is not None
    if how.tokens is not None:
        return how.tokens.wgrad(g.column, x, out_dtype, how, main_grad)  # type: ignore[no-any-return]
    if main_grad is None:
        return gemm(g.column, x, None, out_dtype, how.wgrad)
    products(g.column, x).add(g.column, x, main_grad)
    return None
