"""`twin::attention_fp8`: softmax(q kᵀ · scale) v of FP8 codes: both products on FP8 tensor cores.

q `[b, h, sq, d]`, k `[b, hkv, skv, d]` and v, given transposed as v_t `[b, hkv, d, skv]`, are E4M3 codes; a code times
its tensor's scale_inv is the number. Blocks, masks, the window, dropout and G = 384 are those of
`reference.ops.attentions.attention`. For each head and each block of 128 queries, over its key blocks of 128 in order,
with c = fp32(fp32(scale · log2 e) · fp32(q_scale_inv · k_scale_inv)):

    S = q kᵀ                              one chain of FP8 steps (k = 32) over d, fp32; hidden pairs are -inf
    m' = max(m, G - fma(-max S, c, G + 8))    the largest exponent less 8, per query; m starts at -2^100
    alpha = 2^(((m - m') + G) - G)
    p = 2^(fma(S, c, G - m') - G)         the largest is 256
    P = cast(p)                           E4M3
    l = fma(l, alpha, Σ P)                Σ P = P 1: one chain of FP8 steps over the block's keys, from zero
    P = keep ? P : +0
    O = fma(O, alpha, P v)                P v: such a chain, too
    m = m'
    out = round(O · ((1 / l · keep_scale) · v_scale_inv))      each product one fp32 rounding; 1 / l as there

Why so:

* The scales of q, k and v are delayed: they come from steps before this one. So no later token changes what an earlier
  one sees, as an amax of this step would.
* P needs no scale and no history: its amax is known. m lies 8 below the largest exponent, so that a row's largest p is
  256, which E4M3 has. This costs nothing. (Transformer Engine keeps a delayed scale for P.) So E4M3 keeps four bits of
  a weight that is at least 2^-14 of a row's largest; a weight of at most 2^-18 of it becomes 0.
* l sums the rounded weights, which multiply v: a row of `out` is a mean of v's rows, with weights that add up to 1
  however P was rounded. l is one more column of P v, for which a kernel needs no additions; its steps keep as much.
* An FP8 step aligns its terms, the accumulator included, to the largest one and keeps 13 bits below that. A chain over
  all keys would lose what is less than 2^-13 of the sum so far; so P v starts from zero in each block and is added in
  fp32, as in the split accumulation of `twin::gemm_fp8`, at the same length. S has at most 8 steps and needs no such
  sums.

NaN codes make the rows that see them NaN; a NaN in v also reaches the rows of its key blocks that do not see it, whose
weight 0 it is multiplied by.

With lengths (`reference.ops.attentions.attention_lengths`) and starts (`reference.ops.attentions.attention_packed`) an
entry of the batch is attention of its own queries and keys alone, as there:

    attention of [t, h, d]   =   to_tokens(attention of to_sequences([t, h, d]) with the lengths)

bit by bit, where v_t is `[hkv, d, s]` and the places after a sequence's end have the code 0x00. So a sequence's words
are those that it has in a padded batch with a mask that hides all else, where v has no NaN: a NaN reaches the rows
whose blocks of keys a mask leaves to visit and lengths do not. (One more difference is the sign of a zero. A mask's
blocks add +0 to O after the sequence's own. Where an element of O has underflowed to -0, which needs a weight below
2^-120 for all that it sums, that makes it +0; with lengths it stays -0.)
"""

from typing import Any

import numpy as np
import torch

from reference.numbers import elementary, formats, tensor_core
from reference.ops.attentions.attention import (
    LOWEST,
    MAX_HEAD_DIM,
    blocks,
    check_mask,
    check_scale,
    check_window,
    factor,
    hidden_pairs,
    inverse,
    keep_pairs,
    limits,
    softmax_block,
    visited,
)
from reference.ops.attentions.attention_heads import Heads, together
from reference.ops.attentions.attention_lengths import check_lengths, entries
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import (
    by_heads,
    check_packed,
    check_places,
    gathered,
    scattered,
    sizes,
)
from reference.ops.library import define
from reference.ops.random.dropout import check_dropout, keep_scale, threshold
from reference.support.numba_jit import fma, jit
from reference.support.workers import each

CODES = torch.float8_e4m3fn
FP32_MAX = torch.finfo(torch.float32).max
HEADROOM = np.float32(8)
"""By how much m lies below the largest exponent: weights reach up to 2^8, of E4M3's 448."""


def by_columns(v_t: torch.Tensor) -> torch.Tensor:
    """v_t `[b, hkv, d, skv]` as it is; packed `[hkv, d, s]` as `[1, hkv, d, s]`."""
    return v_t if v_t.dim() == 4 else v_t.unsqueeze(0)


def check_codes(
    op: str,
    v_name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    *scale_invs: torch.Tensor,
) -> None:
    """Refuse what are not codes of one attention, with their scale_invs; v may be "v" or, transposed, "v_t"."""
    check_packed(op, q, k, v, options)
    if options.packed:
        q, k, v = by_heads(q), by_heads(k), by_heads(v) if v_name == "v" else by_columns(v)
    for name, x in (("q", q), ("k", k), (v_name, v)):
        if x.dim() != 4:
            raise ValueError(f"{op}: {name} must be 4-D; got {list(x.shape)}.")
        if x.dtype != CODES:
            raise ValueError(f"{op}: {name} is {x.dtype}; q, k and {v_name} must be {CODES}.")
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}.")
        if x.stride(3) != 1 and x.shape[3] > 1 and x.numel():
            raise ValueError(f"{op}: {name} must be contiguous in its last dimension; got strides {x.stride()}.")
    (b, h, _, d), (_, heads, skv, _) = q.shape, k.shape
    if d % 16 or not 16 <= d <= MAX_HEAD_DIM:
        raise ValueError(f"{op}: head_dim must be a multiple of 16 from 16 to {MAX_HEAD_DIM}; got {d}.")
    if k.shape[0] != b or k.shape[3] != d:
        raise ValueError(
            f"{op}: k must be [batch, key heads, keys, head_dim] with q's batch {b} and head_dim {d}; got "
            f"{list(k.shape)}."
        )
    accepted = [b, heads, skv, d] if v_name == "v" else [b, heads, d, skv]
    if list(v.shape) != accepted:
        raise ValueError(f"{op}: {v_name} must be {accepted}, for k of {list(k.shape)}; got {list(v.shape)}.")
    if heads == 0 or h % heads:
        raise ValueError(f"{op}: q's {h} heads must be a multiple of k's heads; k has {heads}.")
    for name, x in zip(("q_scale_inv", "k_scale_inv", "v_scale_inv"), scale_invs, strict=True):
        if x.dtype != torch.float32 or x.shape != (1,) or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must be torch.float32 [1] on {q.device}; got {x.dtype} {list(x.shape)} on {x.device}."
            )


def check_options(
    op: str,
    q: torch.Tensor,
    k: torch.Tensor,
    options: Options,
) -> None:
    """Refuse what attention does not accept besides its tensors."""
    b, h, _, sq, skv = sizes(q, k, options)
    check_scale(op, options.scale)
    check_mask(op, (b, h, sq, skv), q.device, options.mask_type, options.mask)
    check_window(op, options.left, options.right)
    check_dropout(op, "q", q, options.dropout, options.rng_state, place=(3,))
    check_lengths(op, b, q.device, options.q_lengths, options.kv_lengths)


def outputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    *given: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op, (options, out_dtype) = "twin::attention_fp8", of_call(given)
    check_codes(op, "v_t", q, k, v_t, options, q_scale_inv, k_scale_inv, v_scale_inv)
    check_options(op, q, k, options)
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: out_dtype must be torch.bfloat16 or torch.float16; got {out_dtype}.")
    b, h, _, sq, _ = sizes(q, k, options)
    row = q.new_empty((b, h, sq), dtype=torch.float32)
    return torch.empty_like(q, dtype=out_dtype), row, torch.empty_like(row)


def of_call(given: tuple[Any, ...]) -> tuple[Options, torch.dtype]:
    """The options of a call, and the dtype of its result: what follows the scale_invs."""
    return Options.of_fp8(*given[:7], *given[8:]), given[7]


@jit
def add_product(total: np.ndarray, alpha: np.ndarray, product: np.ndarray) -> None:
    """total `[rows, d]` = fma(total, alpha `[rows]`, product), in place."""
    rows, d = total.shape
    for row in range(rows):
        for column in range(d):
            total[row, column] = fma(total[row, column], alpha[row], product[row, column])


def rounded_weights(p: torch.Tensor) -> torch.Tensor:
    """P before dropout, E4M3 codes."""
    # An infinite weight (m has left the grid) is the largest one: the kernel has the conversion alone.
    return formats.cast(p.clamp(max=FP32_MAX), formats.E4M3)


def _query_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    c: np.float32,
    seen: list[slice],
    hidden: list[np.ndarray],
    keep: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [heads, rows, d] against the blocks `seen` of k and v_t: (O, m, 1 / l), before the last rounding."""
    heads, rows, d = q.shape
    total, sums = np.zeros((heads * rows, d), np.float32), np.zeros((heads * rows, 1), np.float32)
    m = np.full(heads * rows, LOWEST)
    uncast = np.zeros((heads * rows, 4), np.float32)  # sums of p, which 16 bits have for l
    alpha = np.empty(heads * rows, np.float32)
    for keys, block in zip(seen, hidden, strict=True):
        s = tensor_core.gemm(q, k[:, keys]).flatten(0, 1).numpy()
        p = np.empty_like(s)
        softmax_block(s, block, c, m, uncast, alpha, p, elementary.powers_of_two(), HEADROOM)
        weights = rounded_weights(torch.from_numpy(p))
        ones = torch.ones(1, s.shape[1], dtype=torch.float32, device="cpu").to(CODES)
        add_product(sums, alpha, tensor_core.gemm(weights, ones).numpy())
        weights = weights.view(heads, rows, -1)
        if keep is not None:
            weights.view(torch.uint8)[~keep[:, :, keys]] = 0
        add_product(total, alpha, tensor_core.gemm(weights, v_t[:, :, keys]).flatten(0, 1).numpy())
    shape = (heads, rows)
    return (
        torch.from_numpy(total).view(*shape, d),
        torch.from_numpy(m).view(shape),
        inverse(torch.from_numpy(sums)).view(shape),
    )


@define(outputs, mutates=("rng_state",))
def attention_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v_t: torch.Tensor,
    q_scale_inv: torch.Tensor,
    k_scale_inv: torch.Tensor,
    v_scale_inv: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: torch.Tensor | None,
    dropout: float,
    rng_state: torch.Tensor | None,
    out_dtype: torch.dtype,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """softmax(q kᵀ · scale) v -> (out `[b, h, sq, d]` of out_dtype, m fp32 `[b, h, sq]`, inv fp32 `[b, h, sq]`).

    Args:
        q: `[b, h, sq, d]` float8_e4m3fn, any strides with d contiguous; d a multiple of 16, at most 256.
        k: `[b, hkv, skv, d]`, hkv dividing h.
        v_t: `[b, hkv, d, skv]`, the keys contiguous.
        q_scale_inv, k_scale_inv, v_scale_inv: fp32 `[1]`, what a code of each is multiplied by.
        scale, mask_type, left, right, mask, dropout, rng_state: as in `twin::attention`.
        out_dtype: bfloat16 or float16.
        q_lengths, kv_lengths, q_starts, kv_starts, longest_q, longest_kv: as in `twin::attention`. With starts q, k and
            out are packed, `[tokens, heads, d]`, and v_t is `[hkv, d, tokens]`.
    """
    of_pairs = (scale, mask_type, left, right, mask, dropout, rng_state)
    of_entries = (q_lengths, kv_lengths, q_starts, kv_starts, longest_q, longest_kv)
    scale_invs, options = (q_scale_inv, k_scale_inv, v_scale_inv), Options.of_fp8(*of_pairs, *of_entries)
    out, m, inv = outputs(q, k, v_t, *scale_invs, *of_pairs, out_dtype, *of_entries)
    if options.packed:
        check_places("twin::attention_fp8", options, (q.shape[0], k.shape[0]))
        padded, (q,), (k, v), (of_q, _) = gathered(options, (q,), (k, v_t.permute(2, 0, 1)))
        codes = (q, k, v.transpose(2, 3).contiguous())
        given: tuple[Any, ...] = (*padded.of_pairs, out_dtype, *padded.of_entries)
        in_sequences, m, inv = attention_fp8(*codes, *scale_invs, *given)
        return out.copy_(scattered(in_sequences, of_q)), m, inv
    b, h, sq, _ = q.shape
    skv, group = k.shape[2], h // k.shape[1]
    out.zero_(), m.fill_(float(LOWEST)), inv.zero_()  # of queries beyond a length
    of_scores, last = torch.tensor([factor(scale), keep_scale(dropout)], dtype=torch.float32, device="cpu")
    c = np.float32((of_scores * (q_scale_inv * k_scale_inv)).item())

    def of_heads(some: Heads) -> None:
        keep = keep_pairs(some.first, some.count, sq, skv, dropout, rng_state)
        of_keys, (queries, keys) = some.to_keys(group), some.shape[2:]
        tensors, seeing = (some.of(q), of_keys.of(k), of_keys.of(v_t)), limits(mask_type, left, right, queries, keys)
        for rows in blocks(queries):
            seen = visited(rows.start, queries, keys, seeing)
            hidden = [hidden_pairs(some, seeing, rows, block) for block in seen]
            of_rows = (tensors[0][:, rows], *tensors[1:], c, seen, hidden, None if keep is None else keep[:, rows])
            total, largest, inverses = _query_block(*of_rows)
            m[some.batch, some.head, rows], inv[some.batch, some.head, rows] = largest, inverses
            factors = (inverses * last) * v_scale_inv
            out[some.batch, some.head, rows] = (total * factors[..., None]).to(out_dtype)

    found = entries("twin::attention_fp8", (b, h, sq, skv), mask, None, q_lengths, kv_lengths)
    each(of_heads, [(some,) for some in together(found, h)])
    if threshold(dropout):
        assert rng_state is not None
        rng_state[1] += 1
    return out, m, inv
