"""`twin::cast_blocks` and `twin::cast_blocks_transpose`: the FP8 cast with a scale for each block of 128.

A block is 128 columns of one row, or with `square` 128 rows of 128 columns; the last one may be shorter. Of each block

    amax      = max(max |x| over the x that are not NaN, epsilon)                fp32
    scale     = s(448 or 57,344 / amax)                     one IEEE division; s and exceptions by the dialect, below
    q         = satfinite_rne(fp32(x) · scale)              as in `twin::cast`; infinite x: NaN
    scale_inv = 1 / scale                                   IEEE division

The transpose has the same blocks where they are square. Otherwise x is cast anew, in blocks of 128 rows of one column:
a code of q_t is another than that of q.

    dialect            scale                                                    where it comes from
    power_of_two       448 / amax, its mantissa cleared; 1 where amax is 0 or   Transformer Engine's Float8BlockScaling
                       infinite; where the quotient is infinite, the largest
                       number of x's dtype, its mantissa cleared
    fp32               the same without clearing                                the same with fp32 scales
    deep_gemm          1 / (amax / 448)            scale_inv = amax / 448       DeepGEMM, fp32 scales; epsilon 1e-4
    deep_gemm_ue8m0    1 / (amax / 448, up to the next power of two)            DeepGEMM, UE8M0 scales; epsilon 1e-4

In the last two, too, an amax of 0 or an infinite one gives 1, and amax / 448 is at least 2^-126: DeepGEMM, which has an
epsilon, says nothing of these.

`scale_inv` lies as cuBLASLt's and Transformer Engine's GEMMs read it, fp32, filled up with zeros:

                       blocks of a row                     square
    of q               [ceil(cols / 128), ceil4(rows)]     [ceil(rows / 128), ceil4(ceil(cols / 128))]
    of q_t             [ceil(rows / 128), ceil4(cols)]     [ceil(cols / 128), ceil4(ceil(rows / 128))]

Sources: Transformer Engine 2.20, `common/recipe/recipe_common.cuh`,
`common/transpose/quantize_transpose_{square,vector}_blockwise.cu` and
`tests/pytorch/references/blockwise_quantizer_reference.py`; DeepGEMM, `deep_gemm/utils/math.py`.
"""

import torch

from reference.numbers import formats
from reference.ops.casts.cast_transpose import ceil16, transpose_codes
from reference.ops.checks import check_columns, check_fp8, check_input
from reference.ops.library import define

BLOCK = 128
DIALECTS = ("power_of_two", "fp32", "deep_gemm", "deep_gemm_ue8m0")

Two = tuple[torch.Tensor, torch.Tensor]
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Blocks = tuple[torch.dtype, bool, str, float]
"""The last arguments of both ops: dtype, square, dialect, epsilon."""


def blocks_of(count: int) -> int:
    """How many blocks of 128 cover `count` numbers."""
    return -(-count // BLOCK)


def ceil4(count: int) -> int:
    """`count` rounded up to a multiple of 4: 16 bytes of fp32."""
    return (count + 3) // 4 * 4


def scale_shape(rows: int, cols: int, square: bool) -> tuple[int, int]:
    """The shape of the scales of `[rows, cols]`."""
    if square:
        return blocks_of(rows), ceil4(blocks_of(cols))
    return blocks_of(cols), ceil4(rows)


def of_each(scales: torch.Tensor, rows: int, cols: int, square: bool) -> torch.Tensor:
    """The number of each element's block, `[rows, cols]`, of scales as the ops write them."""
    if square:
        return scales.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return scales[:, :rows].t().repeat_interleave(BLOCK, 1)[:, :cols]


def check_blocks(op: str, x: torch.Tensor, dtype: torch.dtype, square: bool, dialect: str, epsilon: float) -> None:
    """Refuse what the casts in blocks do not accept; `op` names the caller in the error."""
    check_input(op, "x", x)
    check_cast_blocks(op, x.shape[1], dtype, dialect, epsilon)


def check_cast_blocks(op: str, cols: int, dtype: torch.dtype, dialect: str, epsilon: float) -> None:
    """The same for a matrix with `cols` columns that the op makes."""
    check_columns(op, "what is cast", cols)
    check_fp8(op, "dtype", dtype)
    if dialect not in DIALECTS:
        raise ValueError(f"{op}: dialect={dialect!r}; {', '.join(map(repr, DIALECTS))} are accepted.")
    if not 0 <= epsilon < float("inf"):
        raise ValueError(f"{op}: epsilon={epsilon!r}; a finite number from 0 on is accepted.")


def new_four(x: torch.Tensor, cols: int, dtype: torch.dtype, square: bool) -> Four:
    """Room for codes, transposed codes and both scales of `[rows of x, cols]`, on x's device."""
    rows = x.shape[0]
    return (
        x.new_empty((rows, cols), dtype=dtype),
        x.new_empty((cols, ceil16(rows)), dtype=dtype),
        x.new_empty(scale_shape(rows, cols, square), dtype=torch.float32),
        x.new_empty(scale_shape(cols, rows, square), dtype=torch.float32),
    )


def cleared(x: torch.Tensor) -> torch.Tensor:
    """fp32 numbers of 0 or more without their mantissa: the power of two below."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def scales_of(
    amax: torch.Tensor, wide: torch.dtype, dtype: torch.dtype, dialect: str, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, scale_inv) of blocks of dtype `wide` with these amaxes, fp32 of any shape, to be cast to `dtype`."""
    most = torch.tensor(formats.format_of(dtype).largest, dtype=torch.float32, device="cpu")
    one = torch.ones((), dtype=torch.float32, device="cpu")
    amax = torch.maximum(amax, torch.tensor(epsilon, dtype=torch.float32, device="cpu"))
    plain = (amax == 0) | torch.isinf(amax)
    if dialect in ("power_of_two", "fp32"):
        scale = most / amax
        scale = torch.where(torch.isinf(scale), torch.finfo(wide).max, scale)
        scale = torch.where(plain, one, cleared(scale) if dialect == "power_of_two" else scale)
        return scale, one / scale
    scale_inv = torch.maximum(
        amax / most, torch.tensor(torch.finfo(torch.float32).tiny, dtype=torch.float32, device="cpu")
    )
    if dialect == "deep_gemm_ue8m0":
        below = cleared(scale_inv)
        scale_inv = torch.where(below == scale_inv, below, 2 * below)
    scale_inv = torch.where(plain, one, scale_inv)
    return one / scale_inv, scale_inv


def _amaxes(tiles: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """max |x| over `dims`, of the x that are not NaN; 0 of none."""
    return torch.where(tiles.isnan(), 0, tiles).abs().amax(dims, keepdim=True)


def _cast(
    x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, square: bool, dialect: str, epsilon: float
) -> None:
    """x `[rows, cols]` into q and scale_inv, both without checks."""
    (rows, cols), down = x.shape, BLOCK if square else 1
    up, across = -(-rows // down), blocks_of(cols)
    scale_inv.zero_()
    if rows == 0 or cols == 0:
        return
    wide = torch.zeros(up * down, across * BLOCK, dtype=torch.float32, device="cpu")
    wide[:rows, :cols] = x
    amax = _amaxes(wide.view(up, down, across, BLOCK), (1, 3))
    scale, inverse = scales_of(amax, x.dtype, q.dtype, dialect, epsilon)
    each = scale.expand(up, down, across, BLOCK).reshape(wide.shape)[:rows, :cols]
    formats.cast_into(q, x, each)
    grid = inverse.view(up, across) if square else inverse.view(up, across).t()
    scale_inv[:, : grid.shape[1]] = grid


def outputs(x: torch.Tensor, *blocks: *Blocks) -> Two:
    check_blocks("twin::cast_blocks", x, *blocks)
    (rows, cols), (dtype, square, *_) = x.shape, blocks
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(scale_shape(rows, cols, square), dtype=torch.float32),
    )


def transpose_outputs(x: torch.Tensor, *blocks: *Blocks) -> Four:
    check_blocks("twin::cast_blocks_transpose", x, *blocks)
    return new_four(x, x.shape[1], *blocks[:2])


@define(outputs)
def cast_blocks(x: torch.Tensor, dtype: torch.dtype, square: bool, dialect: str, epsilon: float) -> Two:
    """x `[rows, cols]`, fp32, bf16 or fp16 -> (q `[rows, cols]` of `dtype`, scale_inv fp32)."""
    q, scale_inv = outputs(x, dtype, square, dialect, epsilon)
    _cast(x, q, scale_inv, square, dialect, epsilon)
    return q, scale_inv


@define(transpose_outputs)
def cast_blocks_transpose(x: torch.Tensor, dtype: torch.dtype, square: bool, dialect: str, epsilon: float) -> Four:
    """x `[rows, cols]` -> (q, q_t `[cols, ceil16(rows)]`, scale_inv, scale_inv_t); zero codes fill q_t up."""
    q, q_t, scale_inv, scale_inv_t = transpose_outputs(x, dtype, square, dialect, epsilon)
    _cast(x, q, scale_inv, square, dialect, epsilon)
    if square:
        transpose_codes(q, q_t)
        scale_inv_t.zero_()
        up, across = blocks_of(x.shape[0]), blocks_of(x.shape[1])
        scale_inv_t[:, :up] = scale_inv[:, :across].t()
    else:
        codes = torch.empty((x.shape[1], x.shape[0]), dtype=dtype, device="cpu")
        _cast(x.t().contiguous(), codes, scale_inv_t, False, dialect, epsilon)
        transpose_codes(codes.t(), q_t)
    return q, q_t, scale_inv, scale_inv_t
