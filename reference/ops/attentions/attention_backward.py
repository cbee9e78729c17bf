"""`twin::attention_backward`: the gradients of q, k and v; the scores are computed again.

c, G, the key blocks and `keep` are those of `reference.ops.attentions.attention`; m and inv are its results. For each
tile of 128 queries by 128 keys that the forward visits (the others, which would add zeros, are not visited):

    S  = q kᵀ,  dP = grad vᵀ                       tensor-core chains over d and e, fp32
    D  = Σ_e grad · out                            per query, in the order below
    a  = 2^(fma(S, c, G - m) - G) · inv            the weights; +0 where a pair is hidden
    ds = a · fma(keep ? dP : 0, keep_scale, -D)    +0 where a pair is hidden
    P  = keep ? round(a) : +0,  dS = round(ds)     to q's dtype

    dv = round(keep_scale · Σ Pᵀ grad)             one tensor-core chain: heads of the group, then queries, in order
    dk = round(scale · Σ dSᵀ q)                    the same
    dq = round(scale · Σ_j dS_j k_j)               a chain from zero for each key block, added in fp32 from the last
                                                   visited block to the first

dq's shares are what lets one kernel compute all three gradients: a block of threads that holds a key block waits for
another to add, not to multiply. They are added from the last block to the first, because under a causal rule the last
key block that a query sees is the first to reach it. The first share is taken as it is. The query blocks that visit a
key block are neighbours too, and are added to dk and dv in order. Where nothing is visited, gradients are zeros.

D: lane l = 0..31 owns elements 8 l .. 8 l + 7 of e (missing ones are 0). It computes t = fma(grad, out, t) from +0, in
order. Then a halving tree adds the lanes, for h in (16, 8, 4, 2, 1): t[l] = t[l] + t[l + h], l < h.
"""

from typing import Any

import numpy as np
import torch

from reference.numbers import elementary, tensor_core
from reference.numbers.elementary import GRID15, ZERO
from reference.numbers.elementary import power_on_grid as power
from reference.ops.attentions import attention
from reference.ops.attentions.attention_bias import add_bias, bias_tile
from reference.ops.attentions.attention_heads import Heads, together
from reference.ops.attentions.attention_lengths import entries
from reference.ops.attentions.attention_options import Options
from reference.ops.attentions.attention_packed import check_places, gathered, scattered, sizes
from reference.ops.checks import check_like
from reference.ops.library import define
from reference.ops.random.dropout import keep_scale
from reference.support.numba_jit import fma, jit
from reference.support.workers import each


@jit
def row_dots(grad: np.ndarray, out: np.ndarray, dots: np.ndarray) -> None:
    """dots[row] = Σ grad[row] · out[row] in the order of D; grad and out are fp32 `[rows, d]`."""
    rows, d = grad.shape
    lanes = np.zeros(32, np.float32)
    for row in range(rows):
        lanes[:] = ZERO
        for at in range(d):
            lanes[at // 8] = fma(grad[row, at], out[row, at], lanes[at // 8])
        h = 16
        while h > 0:
            for lane in range(h):
                lanes[lane] = lanes[lane] + lanes[lane + h]
            h //= 2
        dots[row] = lanes[0]


@jit
def softmax_backward_tile(
    s: np.ndarray,
    dp: np.ndarray,
    hidden: np.ndarray,
    keep: np.ndarray,
    c: np.float32,
    kept: np.float32,
    m: np.ndarray,
    inv: np.ndarray,
    dots: np.ndarray,
    powers: np.ndarray,
) -> None:
    """s `[rows, keys]` becomes a, dp becomes ds, in place.

    Rows of `hidden` and `keep` are used again from their first ones on if s has more.
    """
    rows, keys = s.shape
    for row in range(rows):
        base, unseen, kept_pairs = GRID15 - m[row], hidden[row % hidden.shape[0]], keep[row % keep.shape[0]]
        for j in range(keys):
            if unseen[j]:
                s[row, j] = dp[row, j] = ZERO
                continue
            a = power(fma(s[row, j], c, base) - GRID15, powers) * inv[row]
            passed = dp[row, j] if kept_pairs[j] else ZERO
            s[row, j] = a
            dp[row, j] = a * fma(passed, kept, -dots[row])


def check_results(
    op: str,
    q: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    grad: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    rows: tuple[int, int, int] | None = None,
) -> None:
    """Refuse what are not the results of a forward of q and v in `dtype`, and the gradient of its first.

    `rows`: [b, h, sq] of m and inv; None is that of q `[b, h, sq, d]`.
    """
    shape = (*q.shape[:-1], v.shape[-1])
    for name, x in (("grad", grad), ("out", out)):
        if x.shape != shape or x.dtype != dtype or x.device != q.device:
            raise ValueError(
                f"{op}: {name} must be {dtype} {list(shape)} on {q.device}, as the forward's out was; "
                f"got {x.dtype} {list(x.shape)} on {x.device}."
            )
        if x.stride(-1) != 1 and x.numel():
            raise ValueError(f"{op}: {name} must be contiguous in its last dimension; got strides {x.stride()}.")
    for name, x in (("m", m), ("inv", inv)):
        check_like(op, name, x, torch.float32, q.shape[:3] if rows is None else torch.Size(rows), q.device)


def outputs(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    op = "twin::attention_backward"
    found = Options(*options)
    attention.check_attention(op, q, k, v, found)
    b, h, _, sq, _ = sizes(q, k, found)
    check_results(op, q, v, q.dtype, grad, out, m, inv, (b, h, sq))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class Tiles:
    """The tiles of some heads; the tensors are grad, q, k, v, out, m and inv of each, `[heads, rows, ..]`."""

    def __init__(self, tensors: dict[str, torch.Tensor], c: float, dropout: float, keep: torch.Tensor | None) -> None:
        self.tensors = tensors
        self.c = np.float32(c)
        self.kept = np.float32(keep_scale(dropout))
        self.keep = keep
        grad, out = (tensors[name].float().flatten(0, 1).contiguous() for name in ("grad", "out"))
        self.dots = torch.empty(tensors["m"].shape, dtype=torch.float32, device="cpu")
        row_dots(grad.numpy(), out.numpy(), self.dots.view(-1).numpy())

    def gradients(
        self, rows: slice, keys: slice, hidden: np.ndarray, bias: np.ndarray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(a, ds), fp32 `[heads, rows, keys]`."""
        q, grad = self.tensors["q"][:, rows], self.tensors["grad"][:, rows]
        s = tensor_core.gemm(q, self.tensors["k"][:, keys])
        dp = tensor_core.gemm(grad, self.tensors["v"][:, keys])
        pairs = [x.flatten(0, 1).numpy() for x in (s, dp)]
        every = torch.ones(1, 1, s.shape[2], dtype=torch.bool, device="cpu")
        keep = every if self.keep is None else self.keep[:, rows, keys]
        stats = (self.tensors["m"], self.tensors["inv"], self.dots)
        per_row = [x[:, rows].reshape(-1).numpy() for x in stats]
        if bias is not None:
            add_bias(pairs[0], self.c, bias)
        c = self.c if bias is None else np.float32(1)
        of_keep = keep.flatten(0, 1).contiguous().numpy()
        softmax_backward_tile(*pairs, hidden, of_keep, c, self.kept, *per_row, elementary.powers_of_two())
        return s, dp

    def tile(
        self, rows: slice, keys: slice, hidden: np.ndarray, bias: np.ndarray | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(P, dS), 16-bit `[heads, rows, keys]`."""
        a, ds = self.gradients(rows, keys, hidden, bias)
        dtype = self.tensors["q"].dtype
        keep = None if self.keep is None else self.keep[:, rows, keys]
        return attention.rounded_weights(a, dtype, keep), ds.to(dtype)


def _of_heads(some: Heads, group: int, *tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """grad, q, k, v, out, m and inv of some heads, of which `group` read one of k and v."""
    named, of_keys = zip(("grad", "q", "k", "v", "out", "m", "inv"), tensors, strict=True), some.to_keys(group)
    return {name: (of_keys if name in ("k", "v") else some).of(x) for name, x in named}


@define(outputs)
def attention_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
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
    """-> (dq like q, dk like k, dv like v).

    Args:
        grad: the gradient of out, `[b, h, sq, e]` of q's dtype.
        q, k, v, scale, mask_type, left, right, mask, dropout, bias, slopes, sinks, q_lengths, kv_lengths, q_starts,
            kv_starts, longest_q, longest_kv, key_segment: those of the forward. Packed, grad is `[tokens, heads, e]`.
                The last one changes no word here.
        out, m, inv: the forward's results.
        rng_state: the state from before the forward; it is not advanced.
    """
    first = (scale, mask_type, left, right, mask, dropout, rng_state, bias, slopes, sinks, q_lengths, kv_lengths)
    options = Options(*first, q_starts, kv_starts, longest_q, longest_kv, key_segment)
    dq, dk, dv = outputs(grad, q, k, v, out, m, inv, *options)
    if options.packed:
        check_places("twin::attention_backward", options, (q.shape[0], k.shape[0]))
        padded, (grad, q, out), (k, v), (of_q, of_kv) = gathered(options, (grad, q, out), (k, v))
        grads = attention_backward(grad, q, k, v, out, m, inv, *padded)
        both = zip((dq, dk, dv), grads, (of_q, of_kv, of_kv), strict=True)
        dq, dk, dv = (to.copy_(scattered(found, maps)) for to, found, maps in both)
        return dq, dk, dv
    b, h, sq, d = q.shape
    heads, skv = k.shape[1], k.shape[2]
    found = entries("twin::attention_backward", (b, h, sq, skv), mask, bias, q_lengths, kv_lengths)
    softmax_scale = torch.tensor(scale, dtype=torch.float32, device="cpu")
    kept = torch.tensor(keep_scale(dropout), dtype=torch.float32, device="cpu")

    def of_key_heads(some: Heads) -> None:
        n, group, (queries, keys) = some.count, h // heads, some.shape[2:]
        sum_k, sum_v = (torch.zeros(n, skv, x, dtype=torch.float32, device="cpu") for x in (d, v.shape[3]))
        seeing = attention.limits(mask_type, left, right, queries, keys)
        keep = attention.keep_pairs(some.first * group, n * group, sq, skv, dropout, rng_state)
        for number in range(group):
            these = some.member(number, group)
            tensors = _of_heads(these, group, grad, q, k, v, out, m, inv)
            tiles = Tiles(tensors, attention.factor(scale), dropout, None if keep is None else keep[number::group])
            sum_q = torch.zeros(n, sq, d, dtype=torch.float32, device="cpu")
            for rows in attention.blocks(queries):
                of_q, of_grad = (tensors[name][:, rows].transpose(1, 2) for name in ("q", "grad"))
                seen = attention.visited(rows.start, queries, keys, seeing)
                for block in reversed(seen):
                    hidden = attention.hidden_pairs(these, seeing, rows, block)
                    p, ds = tiles.tile(rows, block, hidden, bias_tile(these, mask_type, slopes, rows, block))
                    of_keys = tensor_core.gemm(ds, tensors["k"][:, block].transpose(1, 2))
                    sum_q[:, rows] = of_keys if block is seen[-1] else sum_q[:, rows] + of_keys
                    sum_k[:, block] = tensor_core.gemm(ds.transpose(1, 2), of_q, c=sum_k[:, block])
                    sum_v[:, block] = tensor_core.gemm(p.transpose(1, 2), of_grad, c=sum_v[:, block])
            dq[these.batch, these.head] = (sum_q * softmax_scale).to(q.dtype)
        dk[some.batch, some.head] = (sum_k * softmax_scale).to(k.dtype)
        dv[some.batch, some.head] = (sum_v * kept).to(v.dtype)

    each(of_key_heads, [(some,) for some in together(found, heads)])
    return dq, dk, dv


def bias_outputs(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    outputs(grad, q, k, v, out, m, inv, *options)
    bias = Options(*options).bias
    if bias is None:
        raise ValueError("twin::attention_bias_backward: bias is None; a tensor is accepted.")
    return torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)


@define(bias_outputs)
def attention_bias_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    m: torch.Tensor,
    inv: torch.Tensor,
    scale: float,
    mask_type: str,
    left: int,
    right: int,
    mask: torch.Tensor | None,
    dropout: float,
    rng_state: torch.Tensor | None,
    bias: torch.Tensor | None,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    q_starts: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    longest_q: int | None = None,
    longest_kv: int | None = None,
    key_segment: int | None = None,
) -> torch.Tensor:
    """-> dbias, contiguous, of bias's shape and dtype: the sum of ds, in the order of
    `reference.ops.attentions.attention_bias`.

    Args: those of `twin::attention_backward`; bias is needed.
    """
    first = (scale, mask_type, left, right, mask, dropout, rng_state, bias, slopes, sinks, q_lengths, kv_lengths)
    options = Options(*first, q_starts, kv_starts, longest_q, longest_kv, key_segment)
    dbias = bias_outputs(grad, q, k, v, out, m, inv, *options)
    if options.packed:
        check_places("twin::attention_bias_backward", options, (q.shape[0], k.shape[0]))
        padded, (grad, q, out), (k, v), _ = gathered(options, (grad, q, out), (k, v))
        return attention_bias_backward(grad, q, k, v, out, m, inv, *padded)
    (b, h, sq, _), (_, heads, skv, _) = q.shape, k.shape
    found = entries("twin::attention_bias_backward", (b, h, sq, skv), mask, bias, q_lengths, kv_lengths)
    total = torch.zeros(*dbias.shape, dtype=torch.float32, device="cpu")
    every = total.expand(b, h, sq, skv)  # each pair of batch and head sees the matrix that it shares
    for some in together(found, h):
        keep = attention.keep_pairs(some.first, some.count, sq, skv, dropout, rng_state)
        of_heads = _of_heads(some, h // heads, grad, q, k, v, out, m, inv)
        tiles = Tiles(of_heads, attention.factor(scale), dropout, keep)
        seeing = attention.limits(mask_type, left, right, *some.shape[2:])
        for rows in attention.blocks(some.shape[2]):
            for keys in attention.visited(rows.start, *some.shape[2:], seeing):
                hidden = attention.hidden_pairs(some, seeing, rows, keys)
                _, ds = tiles.gradients(rows, keys, hidden, bias_tile(some, mask_type, slopes, rows, keys))
                for batch, head, share in zip(some.batch, some.head, ds, strict=True):
                    every[batch, head, rows, keys] += share
    return dbias.copy_(total)
