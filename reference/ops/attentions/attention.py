"""`twin::attention`: softmax(q kᵀ · scale) v, as a blocked online softmax, with masks, dropout and grouped heads.

q `[b, h, sq, d]`; k `[b, hkv, skv, d]`; v `[b, hkv, skv, e]`, e = d but in multi-head latent attention; head n reads
key head n // (h / hkv). For each head and each block of 128 queries, over its key blocks of 128 in order, with
c = fp32(scale · log2 e) and G = 384:

    S = q kᵀ                              tensor-core chain over d, fp32; hidden pairs are -inf
    m' = max(m, G - fma(-max S, c, G))    the largest exponent, per query; m starts at -2^100
    alpha = 2^(((m - m') + G) - G)        adding G rounds an exponent to a multiple of 2^-15
    p = 2^(fma(S, c, G - m') - G)         the largest is 1
    l = fma(l, alpha, Σ p)                fp32
    P = keep ? round(p) : +0              one rounding to q's dtype
    O = (O · alpha) + P v                 tensor-core chain over the block's keys that starts from O · alpha
    m = m'
    out = round(O · ((1 / l) · keep_scale))      l = 0, nothing visible: 1 / l counts as 0, out is +0

Where max S · c is within 128 of zero, m is a multiple of 2^-15, alpha's exponent is exact, and the p of the row's
largest score is 1. Beyond that, fp32 numbers near m may be further apart, and this p is 1 but for such a step.

The results are out, m and inv = 1 / l (0 where l = 0); the backward recomputes the weights from m and inv. Why
attention is defined so: docs/attention.md.

Σ p has the order of the tensor core's registers. Lane q = 0..3 owns columns 8 t + 2 q + e of a block. For each e it
adds them in order of t, from +0; then it adds the sums of e = 0 and e = 1, and one fma adds that to alpha · l of this
lane. After the last block l = (l_0 + l_1) + (l_2 + l_3).

The mask type and the window together limit the keys that a query sees. With shift = 0 for "causal", skv - sq otherwise,

    i + shift - left <= j <= i + shift + right        query i, key j; -1 is no limit; "causal*" sees as if right = 0

A query block visits the key blocks that hold a key which, by these limits, one of its queries sees; they are
neighbours. It does not visit the others. A block that is hidden altogether would change no bit, as long as v is finite:
its p are +0 and its alpha is 1. Where a query block visits nothing, l is 0.

With lengths, each entry of a batch has its own sq and skv: `reference.ops.attentions.attention_lengths`.

With `key_segment` this is done for each segment of so many keys by itself, and the segments are added:
`reference.ops.attentions.attention_segments`.

With sinks, 1 / l has one more term (`reference.ops.attentions.attention_sink`). With a bias, which is added to the
scores, S and c become what `reference.ops.attentions.attention_bias` says.

Scores up to 2^24 in magnitude (in units of 1 / c) cannot overflow. An infinite score, or a NaN, makes its row NaN.

Dropout. `keep` is u >= threshold, as in `reference.ops.random.dropout`, where u is 16 bits of Philox. One counter
serves the eight pairs (query i, key j) that a thread holds: with i = 16 I + 8 r + g, j = 16 J + 8 c + 2 q + e,

    counter = (low, high half of ((head · ⌈sq/16⌉ + I) · ⌈skv/16⌉ + J) · 32 + 4 g + q, offset's halves)
    u = half r (low, high) of word 2 e + c            head = batch · h + head

Where q has some of a tensor's heads, those that lie on this rank, three numbers follow seed and offset (`[5]`):
how many of each entry there are here, how many in the whole, and which of these is the first here. Then `head`
counts those of the whole. Where q and k have some of a sequence's tokens, four more follow (`[9]`): the first query
here, how many queries the whole has, the first key and how many keys. Then sq, skv, I and J are of the whole; the first
query and key are multiples of 16.
"""

import math
from typing import Any

import numpy as np
import torch

from reference.numbers import elementary, philox, tensor_core
from reference.numbers.elementary import GRID15, ZERO, exp2_grid_scalar
from reference.numbers.elementary import power_on_grid as power
from reference.ops.attentions.attention_bias import add_bias, bias_tile, check_bias
from reference.ops.attentions.attention_heads import Heads, together
from reference.ops.attentions.attention_lengths import check_lengths, entries
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import by_heads, check_packed, check_places, gathered, scattered, sizes
from reference.ops.attentions.attention_segments import check_key_segment, join, segments
from reference.ops.attentions.attention_sink_weights import check_sinks, sink_weights
from reference.ops.library import define
from reference.ops.random.dropout import check_dropout, keep_scale, state_values, threshold
from reference.support.numba_jit import fma, jit
from reference.support.workers import each

BLOCK = 128
MASK_TYPES = ("none", "causal", "causal_bottom_right")
MAX_HEAD_DIM = 256

Limits = tuple[int, int]
"""Query i sees key j if i + lower <= j <= i + upper: (lower, upper)."""
NO_LIMIT = 1 << 30

LOWEST = np.float32(-(2.0**100))
_INFINITY = np.float32(np.inf)


def factor(scale: float) -> float:
    """c = scale · log2 e, an fp32 number."""
    return float(np.float32(scale * 1.4426950408889634))


def causal_shift(mask_type: str, sq: int, skv: int) -> int | None:
    """Query i sees key j if j <= i + shift; None where there is no causal rule."""
    return {"none": None, "causal": 0, "causal_bottom_right": skv - sq}[mask_type]


def blocks(length: int) -> list[slice]:
    """The blocks of `length` queries or keys."""
    return [slice(first, min(first + BLOCK, length)) for first in range(0, length, BLOCK)]


def limits(mask_type: str, left: int, right: int, sq: int, skv: int) -> Limits:
    """The limits of a mask type and a window; those that limit nothing are -NO_LIMIT and NO_LIMIT."""
    shift = causal_shift(mask_type, sq, skv)
    if shift is None:
        shift = skv - sq
    else:
        right = 0
    lower = -NO_LIMIT if left < 0 else max(shift - left, -NO_LIMIT)
    return lower, NO_LIMIT if right < 0 else min(shift + right, NO_LIMIT)


def visited(first: int, sq: int, skv: int, limits: Limits) -> list[slice]:
    """The key blocks that the query block which starts at `first` visits, in order."""
    lower, upper = limits
    start, end = first + lower, min(first + BLOCK, sq) + upper
    return [keys for keys in blocks(skv) if keys.stop > start and keys.start < end]


def check_mask(
    op: str, shape: tuple[int, ...], device: torch.device, mask_type: str, mask: torch.Tensor | None
) -> None:
    """Refuse an unknown mask type, and a mask that is not bool and broadcastable to `shape` [b, h, sq, skv]."""
    if mask_type not in MASK_TYPES:
        raise ValueError(f"{op}: mask_type must be one of {', '.join(MASK_TYPES)}; got {mask_type!r}.")
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"{op}: mask must be torch.bool, True where a pair is hidden; got {mask.dtype}.")
    if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
        raise ValueError(
            f"{op}: mask must be 4-D and broadcast to [b, h, sq, skv] = {list(shape)}; got shape {list(mask.shape)}."
        )
    if mask.device != device:
        raise ValueError(f"{op}: mask is on {mask.device}, the data on {device}.")


def check_window(op: str, left: int, right: int) -> None:
    """Refuse a window that is not a number of keys, or -1, on each side."""
    if left < -1 or right < -1:
        raise ValueError(
            f"{op}: left and right must each be -1 (no limit) or a number of keys; got {left} and {right}."
        )


def check_scale(op: str, scale: float) -> None:
    """Refuse a softmax scale that is not positive, or out of fp32's normal range."""
    if not (math.isfinite(scale) and 1e-30 < scale < 1e30):
        raise ValueError(f"{op}: scale must be a positive number between 1e-30 and 1e30; got {scale}.")


def check_attention(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
) -> None:
    """Refuse what attention does not accept, on either device."""
    check_packed(op, q, k, v, options)
    if options.packed:
        batch, _, _, sq, skv = sizes(q, k, options)
        q, k, v = by_heads(q), by_heads(k), by_heads(v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be 4-D, [batch, heads, sequence, head_dim]; got {list(x.shape)}.")
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"{op}: {name} is {x.dtype}; q, k and v must all be torch.bfloat16 or torch.float16 "
                f"(torch.autocast casts to them)."
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{op}: {name} is {x.dtype} and q {q.dtype}; q, k and v must have one dtype.")
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}.")
        if x.stride(3) != 1 and x.numel():
            raise ValueError(f"{op}: {name} must be contiguous in its last dimension; got strides {x.stride()}.")
    b, h, _, d = q.shape
    for whose, channels in (("", d), ("v's ", v.shape[3])):
        if channels % 8 or not 8 <= channels <= MAX_HEAD_DIM:
            raise ValueError(f"{op}: {whose}head_dim must be a multiple of 8 from 8 to {MAX_HEAD_DIM}; got {channels}.")
    if k.shape[:3] != v.shape[:3] or k.shape[0] != b or k.shape[3] != d:
        raise ValueError(
            f"{op}: k and v must be [batch, key heads, keys, head_dim] with q's batch {b}, and k with q's head_dim "
            f"{d}; got {list(k.shape)} and {list(v.shape)}."
        )
    if k.shape[1] == 0 or h % k.shape[1]:
        raise ValueError(f"{op}: q's {h} heads must be a multiple of k's heads; k has {k.shape[1]}.")
    shape = (batch, h, sq, skv) if options.packed else (b, h, q.shape[2], k.shape[2])
    check_scale(op, options.scale)
    check_mask(op, shape, q.device, options.mask_type, options.mask)
    check_window(op, options.left, options.right)
    check_bias(op, q, shape, options.bias, options.slopes)
    check_sinks(op, q, options.sinks, options.biased)
    check_dropout(op, "q", q, options.dropout, options.rng_state, place=(3, 7))
    check_lengths(op, shape[0], q.device, options.q_lengths, options.kv_lengths)
    check_key_segment(op, options.key_segment)


def hidden_pairs(heads: Heads, limits: Limits, rows: slice, keys: slice) -> np.ndarray:
    """Which pairs of a tile are hidden: bool `[rows, keys]`, or with a mask `[heads · rows, keys]`."""
    i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(keys.start, keys.stop)[None, :]
    hidden = (j < i + limits[0]) | (j > i + limits[1])
    if heads.entry.mask is None:
        return hidden
    return (hidden | heads.tile(heads.entry.mask, rows, keys).numpy()).reshape(-1, hidden.shape[1])


def keep_pairs(
    first: int, count: int, sq: int, skv: int, p: float, rng_state: torch.Tensor | None
) -> torch.Tensor | None:
    """Which pairs dropout keeps of `count` heads from number `first` (batch · h + head) on: bool `[count, sq, skv]`.

    None without dropout.
    """
    if not threshold(p):
        return None
    assert rng_state is not None
    tiles_i, tiles_j = -(-sq // 16), -(-skv // 16)
    counters = tiles_i * tiles_j * 32
    seed, offset = state_values(rng_state)
    if len(rng_state) == 2:
        drawn = philox.element_words(seed, first * counters, count * counters, offset)
    else:
        here, of_all, first_of_all, *of_tokens = rng_state[2:].tolist()
        places = [n // here * of_all + first_of_all + n % here for n in range(first, first + count)]
        starts = [place * counters for place in places]
        if of_tokens:
            query, all_i, key, all_j = (-(-one // 16) for one in of_tokens)
            starts = [((place * all_i + query + i) * all_j + key) * 32 for place in places for i in range(tiles_i)]
            counters = tiles_j * 32
        of_heads = [philox.element_words(seed, start, counters, offset) for start in starts]
        drawn = [np.concatenate(words) for words in zip(*of_heads, strict=True)]
    words = np.stack(drawn, axis=1).astype(np.uint32)
    u = np.stack([words & 0xFFFF, words >> 16], axis=2)
    u = u.reshape(count, tiles_i, tiles_j, 8, 4, 2, 2, 2)  # head, I, J, g, q, e, c, r
    u = u.transpose(0, 1, 7, 3, 2, 6, 4, 5)  # head, I, r, g, J, c, q, e
    return torch.from_numpy(u.reshape(count, tiles_i * 16, tiles_j * 16)[:, :sq, :skv] >= threshold(p))


@jit
def softmax_block(
    s: np.ndarray,
    hidden: np.ndarray,
    c: np.float32,
    m: np.ndarray,
    l: np.ndarray,  # noqa: E741  (its name everywhere)
    alpha: np.ndarray,
    p: np.ndarray,
    powers: np.ndarray,
    headroom: np.float32,
) -> None:
    """One key block: scores s `[rows, keys]` become weights p; updates m `[rows]`, l `[rows, 4]` and alpha `[rows]`.

    m stays `headroom` below the largest exponent: the largest weight is 2^headroom. Rows of `hidden` are used again
    from its first one on if s has more.
    """
    rows, keys = s.shape
    for row in range(rows):
        top, unseen = -_INFINITY, hidden[row % hidden.shape[0]]
        for j in range(keys):
            if not unseen[j] and s[row, j] > top:  # false for NaN
                top = s[row, j]
        new = GRID15 - fma(-top, c, GRID15 + headroom)
        if not new > m[row]:  # a NaN is not, either
            new = m[row]
        alpha[row] = exp2_grid_scalar(m[row] - new, powers)
        m[row] = new
        base = GRID15 - new
        for lane in range(4):
            sums = (ZERO, ZERO)
            for j in range(2 * lane, keys, 8):
                p[row, j] = ZERO if unseen[j] else power(fma(s[row, j], c, base) - GRID15, powers)
                sums = (sums[0] + p[row, j], sums[1])
                if j + 1 < keys:
                    p[row, j + 1] = ZERO if unseen[j + 1] else power(fma(s[row, j + 1], c, base) - GRID15, powers)
                    sums = (sums[0], sums[1] + p[row, j + 1])
            l[row, lane] = fma(l[row, lane], alpha[row], sums[0] + sums[1])


def rounded_weights(p: torch.Tensor, dtype: torch.dtype, keep: torch.Tensor | None) -> torch.Tensor:
    """keep ? round(p) : +0."""
    rounded = p.to(dtype)
    return rounded if keep is None else torch.where(keep, rounded, torch.zeros((), dtype=dtype, device="cpu"))


def inverse(total: torch.Tensor) -> torch.Tensor:
    """1 / total, and 0 where total is 0."""
    return torch.where(total == 0, total, torch.ones((), dtype=torch.float32, device="cpu") / total)


def _query_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    c: float,
    seen: list[slice],
    hidden: list[np.ndarray],
    biases: list[np.ndarray | None],
    keep: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_segment: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [heads, rows, d] against the blocks `seen` of k and v: (O, m, 1 / l), before the last rounding."""
    heads, rows, _ = q.shape
    found: tuple[torch.Tensor, np.ndarray, np.ndarray] | None = None
    for some in segments(seen, key_segment):
        own = _segment(q, k, v, c, seen[some], hidden[some], biases[some], keep)
        found = own if found is None else join(found, own)
    if found is None:
        nothing = torch.zeros(heads, rows, v.shape[2], dtype=torch.float32, device="cpu")
        found = nothing, np.full(heads * rows, LOWEST), np.zeros((heads * rows, 4), np.float32)
    total, m, l = found  # noqa: E741
    lanes, largest = torch.from_numpy(l).view(heads, rows, 4), torch.from_numpy(m).view(heads, rows)
    sums = (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    if sinks is not None:
        sums = sums + sink_weights(sinks[:, None], largest)
    return total, largest, inverse(sums)


def _segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    c: float,
    seen: list[slice],
    hidden: list[np.ndarray],
    biases: list[np.ndarray | None],
    keep: torch.Tensor | None,
) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """O [heads, rows, e], m [heads · rows] and l [heads · rows, 4] of the blocks `seen` of one segment."""
    heads, rows, _ = q.shape
    total = torch.zeros(heads, rows, v.shape[2], dtype=torch.float32, device="cpu")
    m = np.full(heads * rows, LOWEST)
    l = np.zeros((heads * rows, 4), np.float32)  # noqa: E741
    alpha = np.empty(heads * rows, np.float32)
    for keys, block, bias in zip(seen, hidden, biases, strict=True):
        s = tensor_core.gemm(q, k[:, keys]).flatten(0, 1).numpy()
        p = np.empty_like(s)
        if bias is not None:
            add_bias(s, np.float32(c), bias)
        of_scores = np.float32(c if bias is None else 1)
        softmax_block(s, block, of_scores, m, l, alpha, p, elementary.powers_of_two(), ZERO)
        of_heads = torch.from_numpy(p).view(heads, rows, -1)
        weights = rounded_weights(of_heads, q.dtype, None if keep is None else keep[:, :, keys])
        scaled = total * torch.from_numpy(alpha).view(heads, rows, 1)
        total = tensor_core.gemm(weights, v[:, keys].transpose(1, 2), c=scaled)
    return total, m, l


def with_channels(x: torch.Tensor, channels: int) -> torch.Tensor:
    """An empty tensor like `x` `[.., d]`, its dimensions in memory in the same order, of other `channels`."""
    if channels == x.shape[-1]:
        return torch.empty_like(x)
    dims = x.dim() - 1
    strides, step = [1] * (dims + 1), channels
    for n in sorted(range(dims), key=lambda n: (x.stride(n), -n)):
        strides[n] = step
        step = step * max(x.shape[n], 1)
    return x.new_empty_strided((*x.shape[:dims], channels), strides)


def outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_attention("twin::attention", q, k, v, found := Options(*options))
    b, h, _, sq, _ = sizes(q, k, found)
    row = q.new_empty((b, h, sq), dtype=torch.float32)
    return with_channels(q, v.shape[-1]), row, torch.empty_like(row)


@define(outputs, mutates=("rng_state",))
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: torch.Tensor | None,
    dropout: float,
    rng_state: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
    key_segment: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out `[b, h, sq, e]` of q's dtype, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`).

    Args:
        q: `[b, h, sq, d]` bf16 or fp16, any strides with d contiguous; d and e multiples of 8, at most 256.
        k, v: `[b, hkv, skv, d]` and `[b, hkv, skv, e]`, hkv dividing h.
        scale: of the scores, positive.
        mask_type: "none", "causal" (query i sees keys j <= i), "causal_bottom_right" (j <= i + skv - sq).
        left, right: the window, -1 on a side where it has no limit; (-1, -1) is no window.
        mask: bool, broadcastable to `[b, h, sq, skv]`, True where a pair is hidden in addition.
        dropout: probability of dropping a weight, rounded to a multiple of 2^-16.
        rng_state: int64 `[2]`, needed where dropout > 0, and advanced.
        bias: `[1 or b, 1 or h, sq, skv]` fp32 or q's dtype, added to the scaled scores; or
        slopes: fp32 `[h]` or `[b, h]`, ALiBi's. See `reference.ops.attentions.attention_bias`.
        sinks: fp32 `[h]`, see `reference.ops.attentions.attention_sink`; not with a bias or slopes.
        q_lengths, kv_lengths: int32 `[b]`, of each entry's queries and keys:
        `reference.ops.attentions.attention_lengths`. q_starts, kv_starts, longest_q, longest_kv: int32 `[b + 1]`, and
            ints. With them q, k, v and out are packed, `[tokens, heads, d]`, and sq, skv are the longest lengths:
            `reference.ops.attentions.attention_packed`.
        key_segment: 4096, or None: one chain along all keys. See `reference.ops.attentions.attention_segments`.
    """
    first = (scale, mask_type, left, right, mask, dropout, rng_state, bias, slopes, sinks, q_lengths, kv_lengths)
    options = Options(*first, q_starts, kv_starts, longest_q, longest_kv, key_segment)
    out, m, inv = outputs(q, k, v, *options)
    if options.packed:
        check_places("twin::attention", options, (q.shape[0], k.shape[0]))
        padded, (q,), (k, v), (of_q, _) = gathered(options, (q,), (k, v))
        in_sequences, m, inv = attention(q, k, v, *padded)
        return out.copy_(scattered(in_sequences, of_q)), m, inv
    (b, h, sq, _), (_, heads, skv, _) = q.shape, k.shape
    found = entries("twin::attention", (b, h, sq, skv), mask, bias, q_lengths, kv_lengths)
    out.zero_(), m.fill_(float(LOWEST)), inv.zero_()  # of queries beyond a length
    last = torch.tensor(keep_scale(dropout), dtype=torch.float32, device="cpu")

    def of_heads(some: Heads) -> None:
        keep = keep_pairs(some.first, some.count, sq, skv, dropout, rng_state)
        of_k, (queries, keys) = some.to_keys(h // heads), some.shape[2:]
        tensors, seeing = (some.of(q), of_k.of(k), of_k.of(v)), limits(mask_type, left, right, queries, keys)
        for rows in blocks(queries):
            seen = visited(rows.start, queries, keys, seeing)
            hidden = [hidden_pairs(some, seeing, rows, block) for block in seen]
            biases = [bias_tile(some, mask_type, slopes, rows, block) for block in seen]
            more = (None if keep is None else keep[:, rows], None if sinks is None else sinks[some.head])
            of_rows = (tensors[0][:, rows], *tensors[1:], factor(scale), seen, hidden, biases, *more, key_segment)
            total, largest, inverses = _query_block(*of_rows)
            m[some.batch, some.head, rows], inv[some.batch, some.head, rows] = largest, inverses
            out[some.batch, some.head, rows] = (total * (inverses * last)[..., None]).to(q.dtype)

    each(of_heads, [(some,) for some in together(found, h)])
    if threshold(dropout):
        assert rng_state is not None
        rng_state[1] += 1
    return out, m, inv
