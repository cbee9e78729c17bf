"""LayerNorm and RMSNorm: `twin::norm`, `twin::norm_scale`, `twin::norm_cast_transpose`, `twin::norm_backward`.

x is `[rows, hidden]`; weight and bias `[hidden]`. Each operation is one of fp32 and rounds once; there is no fma. With
`n = fp32(hidden)`, `rowsum` as below, and gamma = weight, or weight + 1 where `zero_centered`:

    layernorm   mean = rowsum(x) / n              rmsnorm   (no mean, no bias)
                xc   = x - mean                             xc = x
                rstd = 1 / sqrt(rowsum(xc·xc) / n + eps)
                xhat = xc · rstd
                y    = xhat · gamma + bias                  y  = xhat · gamma

`norm` rounds y once to `out_dtype`; `norm_scale` also gives `twin::current_scale` of that y. `norm_cast_transpose`
casts the fp32 y, so FP8 codes do not pass through 16 bits, and records the amax of that y. Backward, where grad is the
gradient of y:

    g  = grad · gamma      c1 = rowsum(g) / n (0 for rmsnorm: not subtracted)      c2 = rowsum(g · xhat) / n
    dx = rstd · ((g - c1) - xhat · c2)                      rounded to x's dtype
    dx = dx + residual_grad, where there is one             rounded again, as two modules would
    dweight = colsum(grad · xhat)     dbias = colsum(grad)  rounded once, to weight's dtype

rowsum: the complete binary tree over neighbours. The row is padded with +0.0 to a power of two, at least 1024;
elements 2i and 2i + 1 are added, then the sums 2i and 2i + 1, and so on. A warp whose lanes hold 8 neighbours each
computes it with shuffles, and so does any number of warps.

colsum: all sums start from +0.0. Rows form blocks of `ceil(rows / 256)`, one for each block of threads, of which a
multiprocessor has two. In a block, rows k, k + P, k + 2P ... are chain k < P, added in order. P, the rows that a block
of threads holds at a time, is 4 for hidden <= 1024, 2 for <= 2048 and 1 beyond. The chains' sums are added in pairs,
(0 + 1) + (2 + 3). The blocks' sums are added in order within runs of 16 blocks, then the runs' in order.
"""

import ctypes
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.casts.cast import Scaling, cast_rows, check_cast
from reference.ops.casts.cast_transpose import Four, Three, cast_outputs, transpose_codes
from reference.ops.casts.current_scale import Scale, check_scale, scale_of
from reference.ops.checks import check_input, check_like, check_wide
from reference.ops.library import define

KINDS = ("layernorm", "rmsnorm")
MAX_HIDDEN = 1 << 21
ROW_BLOCKS = 256
RUN = 16

# Elements at a time: 4 MiB of fp32, which stays in a core's cache through the steps.
_CHUNK = 1 << 20
_ZERO, _ONE = np.float32(0), np.float32(1)

Five = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def chains(hidden: int) -> int:
    """P: the number of chains in which the rows of a block are added."""
    return 4 if hidden <= 1024 else 2 if hidden <= 2048 else 1


def block_rows(rows: int) -> int:
    """The number of rows in a block of the column sums."""
    return max(1, -(-rows // ROW_BLOCKS))


def row_sums(v: np.ndarray) -> np.ndarray:
    """The sum of each row of fp32 `v` `[rows, hidden]` by the tree above: `[rows, 1]`."""
    rows, hidden = v.shape
    while v.shape[1] > 1:
        if v.shape[1] % 2:
            # One +0.0 at each level has the effect of all the padding: sums of padding alone are +0.0 too.
            v = np.concatenate([v, np.zeros((rows, 1), np.float32)], axis=1)
        v = v[:, 0::2] + v[:, 1::2]
    # The padding's only visible effect where no level was odd: a sum of -0.0 becomes +0.0.
    return v + _ZERO if hidden < 1024 else v


def sums_of_blocks(pieces: Iterable[np.ndarray], count: int, hidden: int) -> np.ndarray:
    """The sum of each block of `count` rows in the order above: fp32 `[blocks, hidden]`.

    `pieces` are fp32 `[whole blocks of rows, hidden]`, in order, as `_pieces` cuts them.
    """
    blocks = [np.zeros((0, hidden), np.float32), *(_block_sums(piece, count, chains(hidden)) for piece in pieces)]
    return np.concatenate(blocks)


def sum_of_blocks(blocks: np.ndarray) -> np.ndarray:
    """The sum over all blocks `[blocks, hidden]` in the order above: fp32 `[hidden]`."""
    # A sum that started from +0.0 is never -0.0, so that +0.0 for a row or a block that does not exist changes no word.
    total = np.zeros(blocks.shape[1], np.float32)
    for run in _in_order(_grouped(blocks, RUN)):
        total = total + run
    return total


def _grouped(rows: np.ndarray, count: int) -> np.ndarray:
    """`[groups, count, hidden]`, with rows of +0.0 at the end where the last group is not full."""
    missing = -len(rows) % count
    if missing:
        rows = np.concatenate([rows, np.zeros((missing, rows.shape[1]), np.float32)])
    return rows.reshape(-1, count, rows.shape[1])


def _in_order(groups: np.ndarray, first: int = 0, step: int = 1) -> np.ndarray:
    """The sums of `[groups, count, hidden]` over every `step`-th of the second dimension, one after the other."""
    total = np.zeros((len(groups), groups.shape[2]), np.float32)
    for k in range(first, groups.shape[1], step):
        total += groups[:, k]
    return total


def _block_sums(piece: np.ndarray, count: int, parallel: int) -> np.ndarray:
    """The sum of each block of `count` rows: `[blocks, hidden]`."""
    blocks = _grouped(piece, count)
    sums = [_in_order(blocks, chain, parallel) for chain in range(parallel)]
    while len(sums) > 1:
        sums = [a + b for a, b in zip(sums[0::2], sums[1::2], strict=True)]
    return sums[0]


def check_norm(
    op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, kind: str
) -> None:
    """Refuse what the norms do not accept; `op` names the caller in the error."""
    check_input(op, "x", x)
    if kind not in KINDS:
        raise ValueError(f"{op}: kind must be 'layernorm' or 'rmsnorm'; got {kind!r}.")
    hidden = x.shape[1]
    if not 1 <= hidden <= MAX_HIDDEN:
        raise ValueError(f"{op}: x must have 1 to {MAX_HIDDEN} columns; got shape {tuple(x.shape)}.")
    if not 0 < ctypes.c_float(eps).value < float("inf"):
        raise ValueError(f"{op}: eps must be a positive finite number in fp32; got {eps}.")
    check_wide(op, "weight", weight.dtype)
    check_like(op, "weight", weight, weight.dtype, x.shape[1:], x.device)
    if bias is not None:
        if kind == "rmsnorm":
            raise ValueError(f"{op}: bias must be None for kind 'rmsnorm'; got a tensor.")
        check_like(op, "bias", bias, weight.dtype, x.shape[1:], x.device)


def new_statistics(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate (mean fp32 `[rows]` (rmsnorm: `[0]`), rstd fp32 `[rows]`)."""
    rows = x.shape[0]
    mean = x.new_empty(rows if kind == "layernorm" else 0, dtype=torch.float32)
    return mean, x.new_empty(rows, dtype=torch.float32)


def norm_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
) -> Three:
    check_norm("twin::norm", x, weight, bias, eps, kind)
    check_wide("twin::norm", "out_dtype", out_dtype)
    return x.new_empty(x.shape, dtype=out_dtype), *new_statistics(x, kind)


def norm_scale_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
    *scale: *Scale,
) -> Four:
    check_norm("twin::norm_scale", x, weight, bias, eps, kind)
    check_wide("twin::norm_scale", "out_dtype", out_dtype)
    check_scale("twin::norm_scale", *scale)
    return x.new_empty(x.shape, dtype=out_dtype), *new_statistics(x, kind), x.new_empty(1, dtype=torch.float32)


def norm_cast_transpose_outputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    *scaling: *Scaling,
) -> Five:
    check_norm("twin::norm_cast_transpose", x, weight, bias, eps, kind)
    check_cast("twin::norm_cast_transpose", x, *scaling)
    return *cast_outputs(x, x.shape[1], scaling[3]), *new_statistics(x, kind)


def norm_backward_outputs(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
) -> Three:
    op = "twin::norm_backward"
    check_norm(op, x, weight, None, 1.0, kind)
    for name, tensor in (("grad", grad), ("residual_grad", residual_grad)):
        if tensor is not None:
            check_like(op, name, tensor, x.dtype, x.shape, x.device)
    check_like(op, "mean", mean, torch.float32, (x.shape[0] if kind == "layernorm" else 0,), x.device)
    check_like(op, "rstd", rstd, torch.float32, x.shape[:1], x.device)
    return torch.empty_like(x), torch.empty_like(weight), weight.new_empty(x.shape[1] if kind == "layernorm" else 0)


def _gamma(weight: torch.Tensor, zero_centered: bool) -> np.ndarray:
    gamma = _fp32(weight)
    return gamma + _ONE if zero_centered else gamma


def _fp32(tensor: torch.Tensor) -> np.ndarray:
    """Widened exactly, as NumPy: its strided additions are a hundred times as fast as torch's."""
    return np.from_dlpack(tensor.detach().float())


def _pieces(rows: int, hidden: int, count: int = 0) -> Iterator[slice]:
    """Rows that are computed at a time: whole blocks of the column sums, of `count` rows or as many as usual."""
    count = count or block_rows(rows)
    step = max(1, _CHUNK // (count * hidden)) * count
    return (slice(start, start + step) for start in range(0, rows, step))


@np.errstate(all="ignore")
def normalize(
    out: Three,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
) -> None:
    """The norm, without checks, into (y `[rows, hidden]`, mean, rstd)."""
    rows, hidden = x.shape
    y, mean, rstd = out
    gamma, n, small = _gamma(weight, zero_centered), np.float32(hidden), np.float32(eps)
    for piece in _pieces(rows, hidden):
        v = _fp32(x[piece])
        if kind == "layernorm":
            center = row_sums(v) / n
            mean[piece] = torch.from_numpy(center[:, 0])
            v = v - center
        inverse = _ONE / np.sqrt(row_sums(v * v) / n + small)
        rstd[piece] = torch.from_numpy(inverse[:, 0])
        v = (v * inverse) * gamma
        if bias is not None:
            v = v + _fp32(bias)
        y[piece] = torch.from_numpy(v)


@define(norm_outputs)
def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
) -> Three:
    """`x` `[rows, hidden]` -> (y of `out_dtype`, mean fp32 `[rows]` (rmsnorm: `[0]`), rstd fp32 `[rows]`)."""
    out = norm_outputs(x, weight, bias, eps, zero_centered, kind, out_dtype)
    normalize(out, x, weight, bias, eps, zero_centered, kind)
    return out


@define(norm_scale_outputs)
def norm_scale(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    out_dtype: torch.dtype,
    dtype: torch.dtype,
    power_of_two: bool,
    epsilon: float,
) -> Four:
    """`x` `[rows, hidden]` -> (y, mean, rstd as in `norm`, the scale for a cast of y to `dtype`, fp32 `[1]`)."""
    how = (dtype, power_of_two, epsilon)
    y, mean, rstd, scale = norm_scale_outputs(x, weight, bias, eps, zero_centered, kind, out_dtype, *how)
    normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
    scale.copy_(scale_of(formats.amax(y), *how))
    return y, mean, rstd, scale


@define(norm_cast_transpose_outputs, mutates=("amax_history",))
def norm_cast_transpose(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    zero_centered: bool,
    kind: str,
    scale: torch.Tensor,
    amax_history: torch.Tensor | None,
    column: int,
    dtype: torch.dtype,
) -> Five:
    """`x` `[rows, hidden]` -> (q, q_t `[hidden, ceil16(rows)]`, scale_inv fp32 `[1]`, mean, rstd).

    hidden is a multiple of 16; scale, amax_history, column and dtype as in `twin::cast_transpose`.
    """
    out = norm_cast_transpose_outputs(x, weight, bias, eps, zero_centered, kind, scale, amax_history, column, dtype)
    q, q_t, scale_inv, mean, rstd = out
    y = torch.empty(x.shape, dtype=torch.float32, device="cpu")
    normalize((y, mean, rstd), x, weight, bias, eps, zero_centered, kind)
    cast_rows(y, scale, amax_history, column, q, scale_inv)
    transpose_codes(q, q_t)
    return out


@define(norm_backward_outputs)
@np.errstate(all="ignore")
def norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
) -> Three:
    """`grad`, `x` `[rows, hidden]` of one dtype -> (dx, dweight, dbias `[hidden]` (rmsnorm: `[0]`)).

    dx has x's dtype, dweight and dbias weight's. `residual_grad`, like x, is the gradient that reaches x past the norm.
    """
    out = norm_backward_outputs(grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    dx, *of_parameters = out
    given = (grad, x, weight, mean, rstd, zero_centered, kind, residual_grad)
    for one, sums in zip(of_parameters, backward_sums(dx, *given, block_rows(len(x))), strict=False):
        one.copy_(torch.from_numpy(sum_of_blocks(sums)))
    return out


@np.errstate(all="ignore")
def backward_sums(
    dx: torch.Tensor,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    zero_centered: bool,
    kind: str,
    residual_grad: torch.Tensor | None,
    count: int,
) -> Iterator[np.ndarray]:
    """Write dx, and give the sums of blocks of `count` rows, for dweight and, of layernorm, for dbias."""
    layernorm = kind == "layernorm"
    rows, hidden = x.shape
    gamma, n = _gamma(weight, zero_centered), np.float32(hidden)

    def scaled_gradients() -> Iterator[np.ndarray]:
        for piece in _pieces(rows, hidden, count):
            incoming, inverse, xhat = _fp32(grad[piece]), _fp32(rstd[piece, None]), _fp32(x[piece])
            if layernorm:
                xhat = xhat - _fp32(mean[piece, None])
            xhat = xhat * inverse
            g = incoming * gamma
            c2 = row_sums(g * xhat) / n
            if layernorm:
                g = g - row_sums(g) / n
            dx[piece] = torch.from_numpy(inverse * (g - xhat * c2))
            if residual_grad is not None:
                dx[piece] = dx[piece].float() + residual_grad[piece].float()
            yield incoming * xhat

    yield sums_of_blocks(scaled_gradients(), count, hidden)
    if layernorm:
        yield sums_of_blocks((_fp32(grad[piece]) for piece in _pieces(rows, hidden, count)), count, hidden)
