"""FP8 training in one file, NumPy only: a small GPT, forward, backward and Adam, bit for bit as on an H200.

    python nano_fp8.py

It prints the loss of each step, and a SHA-256 of all losses and trained weights. It is the hash that Twin
Engine's layers give for the same model on a CPU and on an H200. Read it from top to bottom:

    1. numbers         bf16, FP8, fused multiply-add
    2. tensor core     what one instruction adds, and what it cuts off
    3. functions       2^x as Hopper's special function unit computes it; exp, log, GELU
    4. FP8 layers      delayed scaling, a linear layer and its two backward products
    5. other layers    RMSNorm, causal attention, cross-entropy, each sum in a written order
    6. training        the model, Adam, the loop

Every array is fp32 unless a line says otherwise; a bf16 or FP8 number is kept as the fp32 number that it equals.
Every operation rounds once, to nearest even. NaN, infinities and overflow are left out.
"""

import hashlib
from typing import NamedTuple

import numpy as np

F = np.float32
LAYERS, HIDDEN, HEADS, BYTES, SEQUENCE, ROWS, STEPS = 2, 64, 2, 256, 64, 2, 12
HISTORY, RATE, BETAS, EPS, DECAY = 4, 4e-3, (0.9, 0.95), 1e-8, 0.1

# ---- 1. Numbers ----


def bf16(x):
    """x rounded to bf16: the upper 16 bits of its word, to nearest even."""
    word = np.asarray(x, F).view(np.uint32)
    return ((word + 0x7FFF + (word >> 16 & 1)) & 0xFFFF0000).view(F)


def power(x, lowest):
    """2^e, e the exponent of x, but at least `lowest`, the exponent of subnormals."""
    return np.ldexp(x.dtype.type(1), np.maximum(np.frexp(x)[1] - 1, lowest))


class Format(NamedTuple):
    """An FP8 format: bits of the mantissa, lowest exponent, largest number."""

    mantissa: int
    lowest: int
    largest: float


E4M3, E5M2 = Format(3, -6, 448.0), Format(2, -14, 57344.0)


def cast(x, scale, fmt):
    """x · scale to nearest even in the format; what is too large becomes ±largest."""
    x = x * scale
    unit = power(x, fmt.lowest) * F(2.0**-fmt.mantissa)
    return np.clip(np.rint(x / unit) * unit, -fmt.largest, fmt.largest)


def fma(a, b, c):
    """a · b + c with one rounding. In float64 the product is exact, and the sum is
    rounded to odd: a last bit of 1 says that there is more, so no tie is a false one."""
    product = np.float64(a) * np.float64(b)
    total = product + c
    seen = total - product
    rest = (product - (total - seen)) + (c - seen)  # what the addition rounded away
    even = total.view(np.int64) & 1 == 0
    odd = np.nextafter(total, np.copysign(np.inf, rest))
    return F(np.where((rest != 0) & even, odd, total))


def halves(x):
    """The sum over the last axis by a halving tree: x[j] + x[j + h], h = n/2, .. 2, 1."""
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x[..., 0]


# ---- 2. Tensor core ----

FP8_STEP = (32, 13, 13)  # products in an instruction, fraction bits of its terms, and of its result
BF16_STEP = (16, 25, 23)


def tensor_core(a, b, lowest, instruction, c=0.0):
    """a [.., M, K] · b [.., N, K]ᵀ + c: instruction after instruction, in order of K.

    One instruction aligns its terms, products and c, to the largest of their exponents,
    cuts off what is below the last fraction bit, adds the rest exactly, and cuts the sum.
    A product's exponent is the sum of its factors' exponents.
    """
    step, term_bits, result_bits = instruction
    a, b = a[..., :, None, :], b[..., None, :, :]
    of_a, of_b = (power(x, low) * (x != 0) for x, low in zip((a, b), lowest, strict=True))
    c = np.zeros(np.broadcast_shapes(a.shape, b.shape)[:-1], a.dtype) + c
    for k in range(0, a.shape[-1], step):
        now = np.s_[..., k : k + step]
        top = np.maximum((of_a[now] * of_b[now]).max(-1), power(c, -126) * (c != 0))
        unit = np.maximum(top, 2.0**-133) * 2.0**-term_bits
        terms = np.trunc(a[now] * b[now] / unit[..., None])
        c = (terms.sum(-1) + np.trunc(c / unit)) * unit
        unit = power(c, -126) * 2.0**-result_bits
        c = np.trunc(c / unit) * unit + 0.0  # no -0
    return c


def gemm(a, b):
    """a · bᵀ of bf16 matrices: one chain of instructions, an fp32 result."""
    return F(tensor_core(np.float64(a), np.float64(b), (-126, -126), BF16_STEP))


class Codes(NamedTuple):
    """An FP8 matrix: its numbers, their lowest exponent, 1 / scale."""

    numbers: np.ndarray
    lowest: int
    inverse: np.float32

    @property
    def T(self):  # noqa: N802
        return self._replace(numbers=self.numbers.T)


def gemm_fp8(a, b, split):
    """bf16( a · bᵀ · (1/scale of a · 1/scale of b) ). With `split`, for gradients, chains
    of K = 128 are added in fp32; without, one chain takes all of K."""
    depth, total = a.numbers.shape[1], F(0)
    for k in range(0, depth, 128 if split else depth):
        x, y = (m.numbers[:, k : k + 128] if split else m.numbers for m in (a, b))
        total = total + tensor_core(x, y, (a.lowest, b.lowest), FP8_STEP)
    return bf16(total * (a.inverse * b.inverse))


# ---- 3. Functions ----

LOG2E, LN2 = F(np.log2(np.e)), F(np.log(2))
LN2_LOW = F(np.log(2) - np.float64(LN2))
# 2^x between s/64 and (s+1)/64 is c0 + c1 x + c2 x². The digits, found by fitting words that
# an H200 gave, are what c0 and c2 have more than the rounded formulas beside them.
C0 = "3242432344243344442324222223224323423343334333324334443444434444"
C2 = "1322311033243033331333112121224120312341342223224421422253142545"
S = 2.0 ** (np.arange(64) / 64)
C0 = np.int64(np.rint(2**25 * (S - 1))) + np.array([*C0]).astype(np.int64)
C1 = np.int64(np.rint(22712.8 * S))
C2 = np.int64(np.rint(493 * S)) + np.array([*C2]).astype(np.int64)


def exp2(n):
    """2^n as the instruction ex2.approx gives it, for multiples of 2^-15 below 128.

    x is n in units of 2^-23, less 1 if n is negative and no integer. Of the sum's bits
    those of the fp32 word stay. In x² of 17 bits, bit i and the bits below it make one
    row, each cut at 2^-15.
    """
    x = np.int64(n * 2.0**23)
    x -= (x < 0) & (x % 2**23 != 0)
    whole, s, x = x >> 23, x >> 17 & 63, x & 0x1FFFF
    bits = ((x >> 17 - i & 1, x & (1 << 17 - i) - 1, i) for i in range(1, 8))
    square = sum(bit * ((1 << 15 - 2 * i) + (rest >> i + 1)) for bit, rest, i in bits)
    word = (whole + 127 << 23) + (C0[s] * 2**13 + C1[s] * x + C2[s] * square + 6114 >> 15)
    return np.where(n < -126, F(0), np.int32(word).view(F))


def exp(x):
    """e^x for x <= 0: 2^n of x / ln 2 to a multiple of 2^-11, times 1 + what is left."""
    x = np.maximum(x, F(-88))
    n = fma(x, LOG2E, F(6144)) - F(6144)
    rest = fma(n, -LN2_LOW, fma(n, -LN2, x))
    return fma(exp2(n), rest, exp2(n))


def log(x):
    """ln x: x = 2^k (1 + f), s = f / (2 + f), a polynomial of s² (fdlibm's)."""
    word = x.view(np.int32) + (0x3F800000 - 0x3F3504F3)
    k = F((word >> 23) - 127)
    f = ((word & 0x7FFFFF) + 0x3F3504F3).view(F) - F(1)
    s = f / (F(2) + f)
    z, h = s * s, (F(0.5) * f) * f
    w = z * z
    r = z * (F(0.66666662693) + w * F(0.28498786688))
    r = r + w * (F(0.40000972152) + w * F(0.24279078841))
    return (((s * (h + r) + k * F(9.0580006145e-06)) - h) + f) + k * F(6.9313812256e-01)


def sigmoids(x):
    """r = 1 / (1 + e) and e r, where e = e^-|1.702 x|: sigmoids of ±|1.702 x|."""
    y = np.maximum(abs(x) * -F(1.702 * np.log2(np.e)), F(-127))
    n = (y + F(6144)) - F(6144)
    e = fma(exp2(n), (y - n) * LN2, exp2(n))
    return e, F(1) / (F(1) + e)


def gelu(x):
    """x · sigmoid(1.702 x), GELU's quick form, in fp32."""
    e, r = sigmoids(x)
    return (x * np.where(x < 0, e, F(1))) * r


def gelu_slope(x):
    """s + 1.702 x s (1 - s), s = sigmoid(1.702 x): the derivative of `gelu`."""
    e, r = sigmoids(x)
    h = e * r
    return fma((r * h) * F(1.702), x, np.where(x < 0, h, r))


# ---- 4. FP8 layers ----


class Weight:
    """An fp32 parameter, its gradient, and Adam's two moments."""

    def __init__(self, value):
        self.value, self.grad = value, None
        self.m = self.v = np.zeros_like(value)


class Delayed:
    """Delayed scaling: a cast whose scale comes from the amaxes of earlier steps."""

    def __init__(self, fmt):
        self.fmt, self.scale, self.amaxes = fmt, F(1), []

    def __call__(self, x):
        numbers, inverse = cast(x, self.scale, self.fmt), F(1) / self.scale
        if (amax := abs(x).max()) > 0:
            self.amaxes = [*self.amaxes, amax][-HISTORY:]
            self.scale = F(self.fmt.largest) / max(self.amaxes)  # of the next step
        return Codes(numbers, self.fmt.lowest, inverse)


class Linear:
    """y = x · wᵀ, dx = g · w, dw = gᵀ · x; x and w in E4M3, g in E5M2."""

    def __init__(self, weight):
        self.weight = weight
        self.cast_x, self.cast_w, self.cast_g = Delayed(E4M3), Delayed(E4M3), Delayed(E5M2)

    def forward(self, x):
        self.x, self.w = self.cast_x(x), self.cast_w(self.weight.value)
        return gemm_fp8(self.x, self.w, split=False)

    def backward(self, g):
        g = self.cast_g(g)
        self.weight.grad = gemm_fp8(g.T, self.x.T, split=True)
        return gemm_fp8(g, self.w.T, split=True)


# ---- 5. Other layers ----


def row_sums(x):
    """The sum of each row: neighbours, then neighbouring sums, and so on."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x + F(0)


def in_order(x):
    """The sum over the first axis, one after the other."""
    total = F(0)
    for one in x:
        total = total + one
    return total


class RMSNorm:
    """y = x / sqrt(mean(x²) + eps) · γ, fp32; γ is rounded to bf16."""

    def __init__(self, weight):
        self.weight = weight

    def forward(self, x):
        mean = row_sums(x * x) / F(HIDDEN)
        self.rstd, self.gamma = F(1) / np.sqrt(mean + F(1e-5)), bf16(self.weight.value)
        self.normed = x * self.rstd
        return self.normed * self.gamma

    def backward(self, grad):
        """dx = rstd · (g - normed · mean(g · normed)), g = grad · γ."""
        runs = (grad * self.normed).reshape(-1, 16, HIDDEN)  # of 16 rows, up to 256
        self.weight.grad = bf16(in_order(in_order(run) for run in runs))
        g = grad * self.gamma
        mean = row_sums(g * self.normed) / F(HIDDEN)
        return bf16(self.rstd * (g - self.normed * mean))


def swap(x):
    return x.swapaxes(-1, -2)


SCALE = 1 / (HIDDEN // HEADS) ** 0.5
IN_POWERS = F(SCALE * np.log2(np.e))
GRID = F(384)  # adding it rounds to a multiple of 2^-15
HIDDEN_PAIRS = np.triu(np.ones((SEQUENCE, SEQUENCE), bool), 1)  # later keys


def attention(q, k, v):
    """softmax(q kᵀ · SCALE) v of [.., sequence <= 128, channels], causal: one block of keys.

    A weight is 2^(score - m), m the row's largest score; weights are added in the order
    of the tensor core's registers: eight chains, whose sums are added as a tree.
    """
    scores = gemm(q, k)
    top = np.where(HIDDEN_PAIRS, F(-np.inf), scores).max(-1, keepdims=True)
    m = GRID - fma(-top, IN_POWERS, GRID)
    weights = attention_weights(scores, m)
    chains = in_order(np.moveaxis(weights.reshape(*weights.shape[:-1], -1, 4, 2), -3, 0))
    lanes = chains[..., 0] + chains[..., 1]
    total = (lanes[..., 0] + lanes[..., 1]) + (lanes[..., 2] + lanes[..., 3])
    inverse = F(1) / total[..., None]
    out = bf16(gemm(bf16(weights), swap(v)) * inverse)
    return out, (q, k, v, out, m, inverse)


def attention_weights(scores, m):
    """2^(scores · IN_POWERS - m), the exponent on a grid of 2^-15; 0 for later keys."""
    exponents = fma(scores, IN_POWERS, GRID - m) - GRID
    return np.where(HIDDEN_PAIRS, F(0), exp2(np.where(HIDDEN_PAIRS, F(-127), exponents)))


def attention_backward(grad, saved):
    """dq, dk, dv: weights a again, ds = a · (grad vᵀ - Σ grad · out)."""
    q, k, v, out, m, inverse = saved
    a = attention_weights(gemm(q, k), m) * inverse
    lanes = np.zeros((*grad.shape[:-1], grad.shape[-1] // 8), F)
    for i in range(8):
        lanes = fma(grad[..., i::8], out[..., i::8], lanes)
    ds = bf16(a * (gemm(grad, v) + -halves(lanes)[..., None]))
    dq, dk = gemm(ds, swap(k)) * F(SCALE), gemm(swap(ds), swap(q)) * F(SCALE)
    return bf16(dq), bf16(dk), bf16(gemm(swap(bf16(a)), swap(grad)))


def cross_entropy(x, target):
    """The mean loss of logits x [tokens, BYTES], and its gradient in bf16.

    Eight neighbours share a maximum; their sums are scaled to the row's and added.
    """
    tokens, groups = np.arange(len(x)), x.reshape(len(x), -1, 8)
    tops, top = groups.max(-1, keepdims=True), x.max(-1, keepdims=True)
    total = halves(halves(exp(groups - tops)) * exp(tops[..., 0] - top))[:, None]
    losses = (log(total) - (x[tokens, target][:, None] - top))[:, 0]
    mean = halves(halves(losses.reshape(-1, 32))) / F(len(x))
    p = exp(x - top) * (F(1) / total)
    p[tokens, target] -= F(1)
    return mean, bf16(F(1) / F(len(x)) * p)


# ---- 6. Training ----


class Block:
    """h = x + attention(norm(x)), y = h + mlp(norm(h)); each sum is rounded to bf16."""

    def __init__(self, new):
        self.norm1, self.qkv = RMSNorm(new()), Linear(new(3 * HIDDEN, HIDDEN))
        self.proj = Linear(new(HIDDEN, HIDDEN))
        self.norm2, self.fc1 = RMSNorm(new()), Linear(new(4 * HIDDEN, HIDDEN))
        self.fc2 = Linear(new(HIDDEN, 4 * HIDDEN))

    def forward(self, x):
        qkv = self.qkv.forward(self.norm1.forward(x))
        q, k, v = qkv.reshape(SEQUENCE, ROWS, HEADS, 3, -1).transpose(3, 1, 2, 0, 4)
        out, self.attended = attention(q, k, v)
        out = out.transpose(2, 0, 1, 3).reshape(-1, HIDDEN)
        h = bf16(x + self.proj.forward(out))
        self.a = self.fc1.forward(self.norm2.forward(h))
        return bf16(h + self.fc2.forward(gelu(self.a)))

    def backward(self, g):
        da = self.fc2.backward(g) * gelu_slope(self.a)
        dh = bf16(self.norm2.backward(self.fc1.backward(da)) + g)
        dout = self.proj.backward(dh)
        dout = dout.reshape(SEQUENCE, ROWS, HEADS, -1).transpose(1, 2, 0, 3)
        dqkv = np.stack(attention_backward(dout, self.attended))
        dqkv = dqkv.transpose(3, 1, 2, 0, 4).reshape(-1, 3 * HIDDEN)
        return bf16(self.norm1.backward(self.qkv.backward(dqkv)) + dh)


class GPT:
    def __init__(self):
        generator, self.weights = np.random.default_rng(0), []

        def new(*shape):
            value = F((generator.random(shape) - 0.5) * 0.2) if shape else np.ones(HIDDEN, F)
            self.weights.append(Weight(value))
            return self.weights[-1]

        self.bytes, self.places = new(BYTES, HIDDEN), new(SEQUENCE, HIDDEN)
        self.blocks = [Block(new) for _ in range(LAYERS)]
        self.norm, self.head = RMSNorm(new()), new(BYTES, HIDDEN)

    def train(self, text, after):
        """The loss of bytes [SEQUENCE, ROWS] and those after them; gradients to weights."""
        text, after = text.reshape(-1), after.reshape(-1)
        places = np.arange(SEQUENCE).repeat(ROWS)
        x = bf16(self.bytes.value[text] + self.places.value[places])
        for block in self.blocks:
            x = block.forward(x)
        x, head = bf16(self.norm.forward(x)), bf16(self.head.value)
        loss, g = cross_entropy(bf16(gemm(x, head)), after)
        self.head.grad = bf16(gemm(g.T, x.T))
        g = self.norm.backward(bf16(gemm(g, head.T)))
        for block in self.blocks[::-1]:
            g = block.backward(g)
        for weight, ids in ((self.bytes, text), (self.places, places)):
            weight.grad = np.zeros_like(weight.value)
            for chunk in range(0, len(ids), 64):  # sums of 64 terms in order
                part = np.zeros_like(weight.value)
                np.add.at(part, ids[chunk : chunk + 64], g[chunk : chunk + 64])
                weight.grad += part
        return loss


def adam(weight, step):
    """AdamW: p -= rate · (m/c1 / (sqrt(v/c2) + eps) + decay · p), c = 1 - beta^step."""
    g, p, (b1, b2) = weight.grad, weight.value, map(F, BETAS)
    weight.m = b1 * weight.m + (F(1) - b1) * g
    weight.v = b2 * weight.v + ((F(1) - b2) * g) * g
    c1, c2 = (F(1 - np.prod([beta] * step)) for beta in BETAS)
    update = (weight.m / c1) / (np.sqrt(weight.v / c2) + F(EPS))
    weight.value = p - F(RATE) * (update + F(DECAY) * p)


def batch(step):
    """Bytes [SEQUENCE + 1, ROWS] of a text."""
    text = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64)
    starts = (np.arange(ROWS) + ROWS * step) * 37 % (len(text) - SEQUENCE)
    return text[np.arange(SEQUENCE + 1)[:, None] + starts]


def digest(arrays):
    return hashlib.sha256(b"".join(x.tobytes() for x in arrays)).hexdigest()


TEXT = __doc__

if __name__ == "__main__":
    model, losses = GPT(), []
    for step in range(STEPS):
        bytes_ = batch(step)
        losses.append(model.train(bytes_[:-1], bytes_[1:]))
        print(f"step {step} loss {losses[-1]:.6f}", flush=True)
        for weight in model.weights:
            if step > 0:  # all scales are 1 in the first step, which only finds better ones
                adam(weight, step)
    found = [np.stack(losses), *(weight.value for weight in model.weights)]
    print(digest(found))
