"""One solution of each puzzle of puzzles.ipynb. Short and readable rather than fast."""

import math

import numpy as np
import puzzles
import torch

from reference import formats, philox, tensor_core
from reference.numbers import elementary


def decode(code):
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if sign else value


def encode(x):
    if not math.isfinite(x):
        return 0x7F
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    x = min(abs(x), 448.0)
    exponent = max(math.frexp(x)[1] - 1, -6) if x else -6  # below 2^-6 the spacing no longer shrinks
    units = round(x / 2.0 ** (exponent - 3))  # Python rounds halves to even; the division is exact
    return sign + ((exponent + 6) << 3) + units  # units carry the leading 1 into the exponent field


def quantise(x, scale):
    v = (x * scale).clamp(-57344, 57344)  # one fp32 rounding; clamp keeps NaN
    codes = v.to(torch.float8_e5m2).view(torch.uint8)
    return torch.where(v.isnan() | x.isinf(), torch.tensor(0x7F, dtype=torch.uint8), codes)


def scale_update(scale, history, fp8_max):
    last = history[0].clone()
    if last == 0:
        return scale, history
    history = torch.cat([history[1:], last[None]])
    amax = torch.where(history.isfinite(), history, 0.0).max()
    history[0] = 0
    if amax.isfinite() and amax > 0:
        scale = torch.clamp(torch.tensor(fp8_max) / amax, max=torch.finfo(torch.float32).max)
    return scale, history


def bias_gradient(g):
    rows, columns = g.shape
    g = torch.cat([g, torch.zeros(-rows % 64, columns)])
    total = None
    for block in g.view(-1, 4, 16, columns):
        for h in (8, 4, 2, 1):
            block = block[:, :h] + block[:, h : 2 * h]
        runs = block[:, 0]
        sums = (runs[0] + runs[2]) + (runs[1] + runs[3])
        total = sums if total is None else total + sums
    return total


def term(a, b):
    def parts(code):
        exponent = code >> 3 & 15
        return (-1) ** (code >> 7) * (8 * (exponent > 0) + (code & 7)), max(exponent, 1) - 7

    (left, i), (right, j) = parts(a), parts(b)
    return [left * right, i + j]


def instruction(a, b, c):
    terms = []  # (integer, power of its last bit, exponent)
    for left, right in zip(a, b, strict=True):
        integer, exponent = term(left, right)
        terms.append((integer, exponent - 6, exponent))
    fraction, exponent = math.frexp(c)
    terms.append((int(fraction * 2**24), exponent - 24, exponent - 1))
    unit = max((exponent for integer, _, exponent in terms if integer), default=0) - 13
    total = 0
    for integer, power, _ in terms:
        kept = abs(integer) << max(power - unit, 0) >> max(unit - power, 0)
        total += kept if integer > 0 else -kept
    lost = max(abs(total).bit_length() - 14, 0)
    kept = abs(total) >> lost << lost
    return (kept if total > 0 else -kept) * 2.0**unit


def fast(a, b):
    c = torch.zeros(a.shape[0], b.shape[0])
    for k in range(0, a.shape[1], 32):
        c = tensor_core.step(a[:, k : k + 32], b[:, k : k + 32], c)
    return c


def split(a, b):
    total = torch.zeros(a.shape[0], b.shape[0])
    for k in range(0, a.shape[1], 128):
        total = total + fast(a[:, k : k + 128], b[:, k : k + 128])
    return total


def slices(a, b):
    # 5504 is the smallest multiple of 128 of which three reach 16,384.
    total = torch.zeros(a.shape[0], b.shape[0])
    for left, right in zip(a.split(5504, 1), b.split(5504, 1), strict=True):
        total = total + tensor_core.gemm(left, right, "fast")
    return total


def linear_forward(x, w, bias, x_scale, w_scale):
    acc = tensor_core.gemm(
        formats.cast(x, formats.E4M3, x_scale), formats.cast(w, formats.E4M3, w_scale), accumulate="fast"
    )
    return (acc * ((1 / x_scale) * (1 / w_scale)) + bias.float()).bfloat16()


def linear_backward(g, x, g_scale, x_scale):
    left, right = formats.cast(g, formats.E5M2, g_scale), formats.cast(x, formats.E4M3, x_scale)
    acc = tensor_core.gemm(left.t().contiguous(), right.t().contiguous(), accumulate="split")
    return (acc * ((1 / g_scale) * (1 / x_scale))).bfloat16()


def _fma(x, y, z):
    return (x.double() * y.double() + z.double()).float()  # float64 holds the product, and enough of the sum


def softmax_step(m, l, o, s, v, c):  # noqa: E741
    new = torch.maximum(m, 384 - _fma(-s.amax(1), c, torch.tensor(384.0)))
    alpha = elementary.exp2_grid(m - new)
    p, sums = puzzles.weights(s, new, c)
    o = tensor_core.gemm(p.bfloat16(), v.t(), c=o * alpha[:, None])
    return new, _fma(l, alpha[:, None], sums), o


def rms_norm(x, weight, eps):
    x = x.float()
    total = x * x
    while total.shape[1] > 1:  # neighbours; 4096 is a power of two
        total = total[:, ::2] + total[:, 1::2]
    mean = total.numpy() / np.float32(x.shape[1])
    rstd = np.float32(1) / np.sqrt(mean + np.float32(eps))  # NumPy's fp32 sqrt is the nearest; torch's may not be
    return ((x * torch.from_numpy(rstd)) * weight.float()).bfloat16()


def dropout(x, p, seed, offset):
    threshold = round(p * 65536)
    words = np.stack(philox.element_words(seed, 0, -(-x.numel() // 8), offset), axis=1)  # [counters, 4]
    u = np.stack([words & 0xFFFF, words >> np.uint64(16)], axis=2).reshape(-1)[: x.numel()].astype(np.int64)
    keep = torch.from_numpy(u >= threshold).view(x.shape)
    scale = torch.tensor(65536 / (65536 - threshold), dtype=torch.float32)
    return torch.where(keep, (x.float() * scale).bfloat16(), torch.zeros((), dtype=torch.bfloat16))


SOLUTIONS = {
    "1 decode": decode,
    "2 encode": encode,
    "3 quantise": quantise,
    "4 scale_update": scale_update,
    "5 bias_gradient": bias_gradient,
    "6 term": term,
    "7 instruction": instruction,
    "8 fast": fast,
    "9 split": split,
    "10 slices": slices,
    "11 linear_forward": linear_forward,
    "12 linear_backward": linear_backward,
    "13 softmax_step": softmax_step,
    "14 rms_norm": rms_norm,
    "15 dropout": dropout,
}
