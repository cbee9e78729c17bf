"""`twin::cast_stats` and `twin::cast_stats_blocks`: what a cast to FP8 lost: counts, sums for its SQNR, and the amax.

x is `[rows, cols]`, q its codes, x' = q · scale_inv what they stand for. fp32(x) and x' are exact in float64, the
difference x - x' rounds once there, each square once. F is q's format, `limit = F.largest + F.spacing(F.largest) / 2`
(464 in E4M3, 61,440 in E5M2): beyond it the clamp costs more than rounding could.

    counts   saturated     finite x with |x| > limit · scale_inv
             underflowed   finite x that are not 0 and whose code is ±0
             nan, inf      x that are NaN, that are infinite
    sums     signal = total(x²), noise = total((x - x')²), both over finite x;    amax = max |x| over x that are not NaN

scale_inv is one number, that of the element's row, or with blocks that of its block, laid out as `twin::cast_blocks`
writes it.

SQNR = 10 · log10(signal / noise) dB. Without q and scale_inv only nan, inf, signal and amax are computed; the others
are 0.

total, in float64: the elements in row-major order, padded with +0 to whole pieces of 4096. In a piece, chain j < 256
adds elements j, j + 256, ..., j + 3840 in order; a halving tree adds the chains (for h = 128, 64, ..., 1: chain j +=
chain j + h, j < h). The pieces' sums are added likewise: chain j adds pieces j, j + 256, ... in order, starting from
+0; then the tree.
"""

from typing import Any

import numpy as np
import torch

from reference.numbers import formats
from reference.ops.casts.cast_blocks import of_each, scale_shape
from reference.ops.checks import check_fp8, check_input, check_like, check_scale_inv
from reference.ops.library import define

CHAINS = 256
PIECE = 16 * CHAINS
_AT_ONCE = 256 * PIECE  # elements: 8 MiB in float64

Two = tuple[torch.Tensor, torch.Tensor]


def limit(dtype: torch.dtype) -> float:
    """The magnitude of x / scale_inv beyond which x counts as saturated, of an FP8 dtype."""
    fmt = formats.format_of(dtype)
    return fmt.largest + fmt.spacing(fmt.largest) / 2


def _results(op: str, x: torch.Tensor, q: torch.Tensor | None) -> Two:
    check_input(op, "x", x)
    if q is not None:
        check_fp8(op, "q", q.dtype)
        check_like(op, "q", q, q.dtype, x.shape, x.device)
    return x.new_empty(4, dtype=torch.int64), x.new_empty(3, dtype=torch.float64)


def outputs(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> Two:
    op = "twin::cast_stats"
    if (q is None) != (scale_inv is None):
        given, other = ("scale_inv", "q") if q is None else ("q", "scale_inv")
        raise ValueError(f"{op}: {given} is a tensor and {other} None; both or neither are accepted.")
    found = _results(op, x, q)
    if scale_inv is not None:
        check_scale_inv(op, scale_inv, len(x), x.device)
    return found


def blocks_outputs(x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, square: bool) -> Two:
    op = "twin::cast_stats_blocks"
    found = _results(op, x, q)
    check_like(op, "scale_inv", scale_inv, torch.float32, scale_shape(x.shape[0], x.shape[1], square), x.device)
    return found


def _tree(chains: np.ndarray) -> np.ndarray:
    """The halving tree over the last axis, 256 long."""
    while chains.shape[-1] > 1:
        half = chains.shape[-1] // 2
        chains = chains[..., :half] + chains[..., half:]
    return chains[..., 0]


def _piece_sums(values: np.ndarray) -> np.ndarray:
    """The sum of each piece of float64 values."""
    rows = np.pad(values, (0, -len(values) % PIECE)).reshape(-1, PIECE // CHAINS, CHAINS)
    chains = rows[:, 0]
    for k in range(1, rows.shape[1]):
        chains = chains + rows[:, k]
    return _tree(chains)


def _total(pieces: np.ndarray) -> float:
    """The sum of the pieces' sums."""
    rows = np.pad(pieces, (0, -len(pieces) % CHAINS)).reshape(-1, CHAINS)
    chains = np.zeros(CHAINS)
    for row in rows:
        chains = chains + row
    return float(_tree(chains))


@np.errstate(all="ignore")
def add_lost(counts: torch.Tensor, sums: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
    """Underflows and noise of x, by the numbers (float64) that codes of blocks stand for; such do not saturate.

    `counts` and `sums` are those of the op without q.
    """
    v, stands_for = formats.widen(x.detach()).double().numpy().ravel(), numbers.numpy().ravel()
    finite = np.isfinite(v)
    counts[1] = int((finite & (v != 0) & (stands_for == 0)).sum())
    sums[1] = _total(_piece_sums(np.where(finite, (v - stands_for) ** 2, 0.0)))


@np.errstate(all="ignore")
def _measure(counts: torch.Tensor, sums: torch.Tensor, x: torch.Tensor, q: torch.Tensor | None, factors: Any) -> None:
    """Write counts and sums; `factors`: scale_inv of all elements, one or each its own, fp32."""
    found, signal, noise = np.zeros(4, np.int64), [np.zeros(0)], [np.zeros(0)]
    for first in range(0, x.numel(), _AT_ONCE):
        piece = slice(first, first + _AT_ONCE)
        v = formats.widen(x.detach().reshape(-1)[piece]).numpy().astype(np.float64)
        finite = np.isfinite(v)
        found[2:] += np.isnan(v).sum(), np.isinf(v).sum()
        signal.append(_piece_sums(np.where(finite, v * v, 0.0)))
        if q is None:
            continue
        factor = factors.reshape(-1)[piece if factors.numel() > 1 else slice(1)].numpy().astype(np.float64)
        stands_for = formats.decode(q.reshape(-1)[piece]).numpy().astype(np.float64) * factor
        zero = q.reshape(-1)[piece].view(torch.uint8).numpy() & 0x7F == 0
        found[0] += (finite & (np.abs(v) > limit(q.dtype) * factor)).sum()
        found[1] += (finite & (v != 0) & zero).sum()
        error = v - stands_for
        noise.append(_piece_sums(np.where(finite, error * error, 0.0)))
    counts.copy_(torch.from_numpy(found))
    amax = float(formats.amax(x))
    sums.copy_(
        torch.tensor(
            [*(_total(np.concatenate(one)) for one in (signal, noise)), amax], dtype=torch.float64, device="cpu"
        )
    )


@define(outputs)
def cast_stats(x: torch.Tensor, q: torch.Tensor | None, scale_inv: torch.Tensor | None) -> Two:
    """`x` `[rows, cols]` fp32, bf16 or fp16; `q` its codes, `scale_inv` fp32 `[1]` or `[rows]`, or both None.

    Returns:
        int64 `[4]`: saturated, underflowed, nan, inf; float64 `[3]`: signal, noise, amax.
    """
    counts, sums = outputs(x, q, scale_inv)
    of_rows = scale_inv is not None and len(scale_inv) > 1
    _measure(counts, sums, x, q, scale_inv[:, None].expand(x.shape) if of_rows else scale_inv)  # type: ignore[index]
    return counts, sums


@define(blocks_outputs)
def cast_stats_blocks(x: torch.Tensor, q: torch.Tensor, scale_inv: torch.Tensor, square: bool) -> Two:
    """`cast_stats` of what `twin::cast_blocks` made; scale_inv has its layout."""
    counts, sums = blocks_outputs(x, q, scale_inv, square)
    _measure(counts, sums, x, q, of_each(scale_inv, x.shape[0], x.shape[1], square))
    return counts, sums
