"""Codes for attention in FP8, of the cases of `attention_cases`; and its contract, one scalar at a time."""

import math

import numpy as np
import torch
from hypothesis import strategies as st
from shared.attention_cases import DRAWN, Case, hidden_pairs, inputs, kept_pairs

from reference.numbers import elementary, formats, tensor_core
from reference.ops.random.dropout import keep_scale

FP8 = torch.float8_e4m3fn
F = np.float32

CASES = st.builds(Case, d=st.integers(1, 16).map(lambda n: 16 * n), **DRAWN)


def cast(x: torch.Tensor, headroom: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x with its strides, and their scale_inv; the largest number is `headroom` times what E4M3 holds."""
    scale = torch.tensor([448 * headroom]) / x.float().abs().max().clamp(min=1e-3)
    codes = torch.empty_like(x, dtype=FP8).copy_(formats.cast(x.float(), formats.E4M3, scale))
    return codes, torch.ones(1) / scale


def transposed(codes: torch.Tensor) -> torch.Tensor:
    """`[b, h, s, d]` codes as `[b, h, d, s]`, contiguous."""
    return codes.view(torch.uint8).transpose(2, 3).contiguous().view(FP8)


def arguments(case: Case, headroom: float = 1.0) -> tuple:
    """Arguments of `twin::attention_fp8`."""
    given = inputs(case)
    (q, q_inv), (k, k_inv), (v, v_inv) = (cast(given[name], headroom) for name in ("q", "k", "v"))
    options = (case.softmax_scale, case.mask_type, *case.window, given["mask"], case.dropout, given["rng_state"])
    return q, k, transposed(v), q_inv, k_inv, v_inv, *options, case.dtype


def _power(n: np.ndarray) -> np.ndarray:
    return elementary.exp2_grid(torch.from_numpy(np.asarray(n, F))).numpy()  # n is on the grid already


def _fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x y + z with one rounding: float64 holds the product, and its sum rounds to odd where it is not exact."""
    product, z = np.asarray(x, np.float64) * y, np.asarray(z, np.float64)
    total = product + z
    back = total - product
    lost = (product - (total - back)) + (z - back)
    even = (total.view(np.int64) & 1) == 0
    total = np.where((lost != 0) & np.isfinite(lost) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return total.astype(F)


def _chain(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """a [1, K] · b [N, K]ᵀ by single steps of 32 from zero: fp32 [N]."""
    c = torch.zeros(1, b.shape[0])
    for k in range(0, a.shape[1], 32):
        c = tensor_core.step(a[:, k : k + 32], b[:, k : k + 32], c)
    return c[0].numpy()


def _row(q: torch.Tensor, k: torch.Tensor, v_t: torch.Tensor, c: F, hidden: np.ndarray, keep: np.ndarray) -> tuple:
    """(O [d], m, 1 / l) of one query q [1, d], over every block of keys."""
    total, m, sum_ = np.zeros(q.shape[1], F), F(-(2.0**100)), np.zeros(1, F)
    for first in range(0, k.shape[0], 128):
        keys = slice(first, min(first + 128, k.shape[0]))
        s = np.where(hidden[keys], F(-np.inf), _chain(q, k[keys]))
        top = max((x for x in s if x > -np.inf), default=F(-np.inf))  # a NaN is not greater
        raised = F(384) - _fma(-top, c, F(384 + 8))
        new = raised if raised > m else m
        alpha = _power(np.array([m - new]))[0]
        exponents = _fma(s, c, F(384) - new) - F(384)
        p = np.where(hidden[keys], F(0), _power(np.where(hidden[keys], F(0), exponents)))
        codes = formats.encode_by_integers(torch.from_numpy(p), formats.E4M3).numpy().astype(np.uint8)
        ones = torch.full((1, len(p)), 0x38, dtype=torch.uint8).view(FP8)
        sum_ = _fma(sum_, alpha, _chain(torch.from_numpy(codes)[None].view(FP8), ones))
        weights = torch.from_numpy(codes * keep[keys].astype(np.uint8))[None].view(FP8)
        total = _fma(total, alpha, _chain(weights, v_t[:, keys]))
        m = new
    return total, m, F(0) if sum_[0] == 0 else F(1) / sum_[0]


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def in_the_written_order(case: Case, given: tuple) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out, m, inv) of `arguments(case)`, as the op's docstring says it; no block of keys is left out."""
    q, k, v_t, q_inv, k_inv, v_inv, scale, _, _, _, mask, _, state, dtype = given
    hidden, keep = hidden_pairs(case, mask).numpy(), kept_pairs(case, state).numpy()
    c = (torch.tensor(F(scale * math.log2(math.e))) * (q_inv * k_inv)).numpy()[0]
    of_values = F(v_inv.item())
    out = torch.empty(q.shape, dtype=dtype)
    m, inv = torch.empty(q.shape[:3]), torch.empty(q.shape[:3])
    for b, h, i in np.ndindex(*q.shape[:3]):
        heads = k[b, h // case.group], v_t[b, h // case.group]
        total, top, one = _row(q[b, h, i][None], *heads, c, hidden[b, h, i], keep[b, h, i])
        m[b, h, i], inv[b, h, i] = float(top), float(one)
        out[b, h, i] = torch.from_numpy(total * (one * F(keep_scale(case.dropout)) * of_values)).to(dtype)
    return out, m, inv
