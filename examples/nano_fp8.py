"""FP8 training in one file: a small GPT, forward, backward and AdamW, to the bit.

It needs NumPy alone, and prints losses and a SHA-256 of losses and weights: that of the
same model in Twin Engine's layers, on a CPU and on an H200. Arrays are fp32; a bf16 or
FP8 number is kept as the fp32 number that it equals. Each operation rounds once, to
nearest even, and each sum has an order, since other orders give other bits. Overflow,
NaN, and sums that are longer than this model's are left out.
"""

import hashlib

import numpy as np

F = np.float32
HIDDEN, HEADS, BYTES, SEQUENCE, ROWS, STEPS = 64, 2, 256, 64, 2, 20
HISTORY, RATE, BETAS, EPS, DECAY = 4, 4e-3, (0.9, 0.95), 1e-8, 0.1
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # mantissa bits, lowest exponent, most


# ---- 1. Numbers ----
def bf16(x):
    """x in bf16: the upper half of its fp32 word, rounded."""
    word = np.asarray(x, F).view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).view(F)


def power(x, lowest):
    """2^e, e the exponent of x, at least `lowest`: that of subnormal numbers."""
    return np.ldexp(x.dtype.type(1), np.maximum(np.frexp(x)[1] - 1, lowest))


def cast(x, scale, bits, lowest, most):
    """x · scale in FP8: rounded to a multiple of its last mantissa bit, within ±most."""
    unit = power(x * scale, lowest) * F(2.0**-bits)
    return np.clip(np.rint(x * scale / unit) * unit, -most, most)


def fma(a, b, c):
    """a · b + c, rounded once. In float64 the product is exact, and the sum is rounded
    to odd: where something is left, its last bit is 1, so fp32 sees no false tie."""
    product = np.float64(a) * np.float64(b)
    total = product + c
    added = total - product
    left = (product - (total - added)) + (c - added)
    odd = np.nextafter(total, np.copysign(np.inf, left))
    return F(np.where((left != 0) & (total.view(np.int64) & 1 == 0), odd, total))


def tree(x, near=False):
    """The sum of the last axis: x[j] + x[j + n/2] and so on, or neighbours first."""
    while (n := x.shape[-1]) > 1:
        x = x[..., ::2] + x[..., 1::2] if near else x[..., : n // 2] + x[..., n // 2 :]
    return x[..., 0]


# ---- 2. Tensor core ----
def tensor_core(a, b, lowest=(-126, -126), products=16, term_bits=25, result_bits=23):
    """a [.., M, K] · b [.., N, K]ᵀ: a chain of instructions in order of K, in fp32.

    An instruction aligns its products and c, the sum so far, to the largest exponent
    among them (a product's is the sum of two), cuts off what is more than `term_bits`
    below, adds the rest exactly, and cuts the sum. `lowest`: exponents of subnormals.
    """
    a, b = np.float64(a)[..., :, None, :], np.float64(b)[..., None, :, :]
    of_a, of_b = power(a, lowest[0]) * (a != 0), power(b, lowest[1]) * (b != 0)
    c = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1])
    for k in range(0, a.shape[-1], products):
        now = np.s_[..., k : k + products]
        top = np.maximum((of_a[now] * of_b[now]).max(-1), power(c, -126) * (c != 0))
        unit = np.maximum(top, 2.0**-133) * 2.0**-term_bits
        terms = np.trunc(a[now] * b[now] / unit[..., None])
        c = (terms.sum(-1) + np.trunc(c / unit)) * unit
        unit = power(c, -126) * 2.0**-result_bits
        c = np.trunc(c / unit) * unit + 0.0  # no -0
    return F(c)


def gemm_fp8(a, b, scale_inv, formats, chain):
    """a · bᵀ in bf16: chains along K, each of `chain`, added in fp32; times scale_inv."""
    total, lowest = F(0), [fmt[1] for fmt in formats]
    for k in range(0, a.shape[1], chain):
        x, y = a[:, k : k + chain], b[:, k : k + chain]
        total = total + tensor_core(x, y, lowest, products=32, term_bits=13, result_bits=13)
    return bf16(total * scale_inv)


# ---- 3. Functions ----
# 2^x from s/64 to (s+1)/64 is c0 + c1 x + c2 x². The digits say by how much Hopper's c0
# and c2 exceed a rounded formula. They were fitted to the words that an H200 gave.
D0 = np.array([*"3242432344243344442324222223224323423343334333324334443444434444"], float)
D2 = np.array([*"1322311033243033331333112121224120312341342223224421422253142545"], float)
S = 2.0 ** (np.arange(64) / 64)
C0, C1, C2 = np.rint(2**25 * (S - 1)) + D0, np.rint(22712.8 * S), np.rint(493 * S) + D2
LOG2E, LN2, LN2_LOW = F(np.log2(np.e)), F(np.log(2)), F(-1.9046543e-9)
GRID11, GRID15 = F(6144), F(384)  # adding one rounds to a multiple of 2^-11, 2^-15


def exp2(n):
    """2^n as Hopper's ex2.approx gives it, n a multiple of 2^-15; 0 below 2^-126.

    x is n in units of 2^-23, less 1 where n is negative and not whole. x² is the sum
    over its bits of bit · (bit + 2 · what is below), each cut at 2^-15.
    """
    x = np.int64(np.maximum(n, F(-127)) * 2.0**23)
    x -= (x < 0) & (x % 2**23 != 0)
    whole, s, x, square = x >> 23, x >> 17 & 63, x & 0x1FFFF, 0
    for i in range(1, 8):
        bit, below = x >> 17 - i & 1, x & (1 << 17 - i) - 1
        square += bit * ((1 << 15 - 2 * i) + (below >> i + 1))
    word = np.floor((C0[s] * 2**13 + C1[s] * x + C2[s] * square + 6114) / 2**15)
    return np.where(n < -126, F(0), np.int32((whole + 127 << 23) + word).view(F))


def exp(x):
    """e^x, x <= 0: 2^n, n = x / ln 2 to a multiple of 2^-11, times 1 + the rest."""
    n = fma(x, LOG2E, GRID11) - GRID11
    rest = fma(n, -LN2_LOW, fma(n, -LN2, x))
    return fma(exp2(n), rest, exp2(n))


def log(x):
    """ln x: with x = 2^k (1 + f) and s = f / (2 + f), a polynomial of s² (fdlibm's)."""
    word = x.view(np.int32) + (0x3F800000 - 0x3F3504F3)
    k, f = F((word >> 23) - 127), ((word & 0x7FFFFF) + 0x3F3504F3).view(F) - F(1)
    s, h = f / (F(2) + f), (F(0.5) * f) * f
    z, w = s * s, (s * s) * (s * s)
    odd, even = F(0.66666663) + w * F(0.28498787), F(0.40000972) + w * F(0.24279079)
    tail = s * (h + (z * odd + w * even)) + k * F(9.0580006e-06)
    return ((tail - h) + f) + k * F(0.69313812)


def gelu(x):
    """x · s, s = sigmoid(1.702 x), the quick GELU; its slope s + 1.702 x s (1 - s)."""
    y = abs(x) * -F(1.702 * np.log2(np.e))
    n = (y + GRID11) - GRID11
    e = fma(exp2(n), (y - n) * LN2, exp2(n))  # e^-|1.702 x|
    r = F(1) / (F(1) + e)
    slope = fma((r * (e * r)) * F(1.702), x, np.where(x < 0, e * r, r))
    return (x * np.where(x < 0, e, F(1))) * r, slope


# ---- 4. FP8 layers: a function of x gives y, and the function that makes dx of dy ----
class Delayed:
    """Delayed scaling: a cast whose scale comes from the largest numbers before it."""

    def __init__(self, to):
        self.to, self.scale, self.amax_history = to, F(1), []

    def __call__(self, x):
        found = cast(x, self.scale, *self.to), F(1) / self.scale
        if (amax := abs(x).max()) > 0:
            self.amax_history = [*self.amax_history, amax][-HISTORY:]
            self.scale = F(self.to[2]) / max(self.amax_history)  # the next step's
        return found


class Weight:
    """A parameter, its gradient and Adam's moments; the casts of a linear layer."""

    def __init__(self, value):
        self.value, self.grad, self.m, self.v = F(value), None, F(0), F(0)
        self.casts = Delayed(E4M3), Delayed(E4M3), Delayed(E5M2)

    def adam(self, step):
        """p -= rate · (m/c1 / (sqrt(v/c2) + eps) + decay · p), c = 1 - beta^step."""
        g, b1, b2 = self.grad, *map(F, BETAS)
        self.m = b1 * self.m + (F(1) - b1) * g
        self.v = b2 * self.v + ((F(1) - b2) * g) * g
        c1, c2 = (F(1 - beta**step) for beta in BETAS)
        update = (self.m / c1) / (np.sqrt(self.v / c2) + F(EPS))
        self.value = self.value - F(RATE) * (update + F(DECAY) * self.value)


def linear(x, weight):
    """y = x · wᵀ, dx = g · w, dw = gᵀ · x; x and w in E4M3, g in E5M2."""
    cast_x, cast_w, cast_g = weight.casts
    (x, x_inv), (w, w_inv) = cast_x(x), cast_w(weight.value)

    def backward(g):
        g, g_inv = cast_g(g)
        weight.grad = gemm_fp8(g.T, x.T, g_inv * x_inv, (E5M2, E4M3), chain=128)
        return gemm_fp8(g, w.T, g_inv * w_inv, (E5M2, E4M3), chain=128)

    return gemm_fp8(x, w, x_inv * w_inv, (E4M3, E4M3), chain=x.shape[1]), backward


# ---- 5. The other layers ----
def rms_norm(x, weight):
    """y = n · γ, n = x / sqrt(mean(x²) + eps); dx = (g - n · mean(g n)) / sqrt(..)."""
    gamma, mean = bf16(weight.value), tree(x * x, near=True)[:, None] / F(HIDDEN)
    rstd = F(1) / np.sqrt(mean + F(1e-5))
    normed = x * rstd

    def backward(g):
        runs = (g * normed).reshape(-1, 16, HIDDEN).swapaxes(0, 1)  # up to 256 rows
        weight.grad = bf16(sum(sum(runs, F(0)), F(0)))
        g = g * gamma
        mean = tree(g * normed, near=True)[:, None] / F(HIDDEN)
        return bf16(rstd * (g - normed * mean))

    return normed * gamma, backward


def attention(q, k, v):
    """softmax(q kᵀ / sqrt(channels)) v, causal, of at most 128 keys.

    A weight is p = 2^(c · score - m), m the row's largest exponent. Every eighth p is
    in one chain, since a thread holds two neighbours of eight. Backward: a = p / Σ p,
    ds = a · (g vᵀ - Σ g · out).
    """
    scale = q.shape[-1] ** -0.5
    later, c = np.triu(np.ones((SEQUENCE, SEQUENCE), bool), 1), F(scale * np.log2(np.e))
    scores = np.where(later, F(-(2.0**100)), tensor_core(q, k))
    m = GRID15 - fma(-scores.max(-1, keepdims=True), c, GRID15)
    p = exp2(fma(scores, c, GRID15 - m) - GRID15)
    chains = sum((p[..., i : i + 8] for i in range(0, SEQUENCE, 8)), F(0))
    inverse = F(1) / tree(chains, near=True)[..., None]
    out = bf16(tensor_core(bf16(p), v.mT) * inverse)

    def backward(g):
        a, lanes = p * inverse, F(0)
        for i in range(8):
            lanes = fma(g[..., i::8], out[..., i::8], lanes)
        ds = bf16(a * (tensor_core(g, v) - tree(lanes)[..., None]))
        dq, dk = tensor_core(ds, k.mT) * F(scale), tensor_core(ds.mT, q.mT) * F(scale)
        return bf16(dq), bf16(dk), bf16(tensor_core(bf16(a).mT, g.mT))

    return out, backward


def cross_entropy(x, target):
    """The mean over tokens of log Σ exp(x - max) - (x[target] - max), and dx."""
    rows, eights = np.arange(len(x)), x.reshape(len(x), -1, 8)
    tops, top = eights.max(-1, keepdims=True), x.max(-1, keepdims=True)
    total = tree(tree(exp(eights - tops)) * exp(tops[..., 0] - top))[:, None]
    losses = log(total) - (x[rows, target][:, None] - top)
    p = exp(x - top) * (F(1) / total)
    p[rows, target] -= F(1)
    return tree(tree(losses.reshape(-1, 32))) / F(len(x)), bf16(F(1) / F(len(x)) * p)


# ---- 6. Training ----
def new_weights():
    """Uniform numbers, and ones for norms."""
    n, draw = HIDDEN, np.random.default_rng(0).random
    layer = [(), (3 * n, n), (n, n), (), (4 * n, n), (n, 4 * n)]
    shapes = [(BYTES, n), (SEQUENCE, n), *layer, (), (BYTES, n)]
    return [Weight((draw(s) - 0.5) * 0.2 if s else np.ones(n)) for s in shapes]


def loss_and_gradients(weights, text, after):
    """The loss of bytes [SEQUENCE, ROWS] and those after them; gradients of weights."""
    table, places, norm1, qkv, proj, norm2, fc1, fc2, norm3, head = weights
    text, place = text.reshape(-1), np.arange(SEQUENCE).repeat(ROWS)
    x = bf16(table.value[text] + places.value[place])  # [SEQUENCE · ROWS, HIDDEN]
    normed, norm1_back = rms_norm(x, norm1)
    mixed, qkv_back = linear(normed, qkv)
    split = mixed.reshape(SEQUENCE, ROWS, HEADS, 3, -1).transpose(3, 1, 2, 0, 4)
    out, attention_back = attention(*split)
    out, proj_back = linear(out.transpose(2, 0, 1, 3).reshape(x.shape), proj)
    h = bf16(x + out)
    normed, norm2_back = rms_norm(h, norm2)
    wide, fc1_back = linear(normed, fc1)
    active, slope = gelu(wide)
    out, fc2_back = linear(active, fc2)
    normed, norm3_back = rms_norm(bf16(h + out), norm3)
    x, w = bf16(normed), bf16(head.value)
    loss, g = cross_entropy(bf16(tensor_core(x, w)), after.reshape(-1))

    head.grad = bf16(tensor_core(g.T, x.T))
    g = norm3_back(bf16(tensor_core(g, w.T)))
    g = bf16(norm2_back(fc1_back(fc2_back(g) * slope)) + g)
    dout = proj_back(g).reshape(SEQUENCE, ROWS, HEADS, -1).transpose(1, 2, 0, 3)
    dsplit = np.stack(attention_back(dout)).transpose(3, 1, 2, 0, 4)
    g = bf16(norm1_back(qkv_back(dsplit.reshape(len(g), -1))) + g)
    for weight, ids in ((table, text), (places, place)):
        weight.grad = np.zeros_like(weight.value)
        np.add.at(weight.grad, ids, g)  # in order; a byte occurs at most 64 times
    return loss


def batch(step):
    """Bytes [SEQUENCE, ROWS] of the text "0 1 2 3 ...", and the bytes after them."""
    text = np.array([*" ".join(map(str, range(1000))).encode()])
    at = np.arange(SEQUENCE)[:, None] + (np.arange(ROWS) + ROWS * step) * 97 % 3000
    return text[at], text[at + 1]


if __name__ == "__main__":
    weights, found = new_weights(), hashlib.sha256()
    for step in range(STEPS):
        loss = loss_and_gradients(weights, *batch(step))
        for weight in weights if step > 0 else []:  # step 0 only finds scales
            weight.adam(step)
        found.update(loss.tobytes())
        print(f"step {step} loss {loss:.6f}", flush=True)
    for weight in weights:
        found.update(weight.value.tobytes())
    print(found.hexdigest())
