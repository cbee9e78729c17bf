"""One step of Hopper's tensor core, written to be read.

A `wgmma.mma_async` instruction of FP8 operands multiplies 32 pairs and adds them to the accumulator C (16 pairs for
fp16 and bf16). The hardware does not add them one after another: it aligns all products and C to the largest exponent
among them, drops what falls below a fixed number of fraction bits, and adds the rest exactly. Everything here is an
integer, so nothing rounds unless it says so.

    1. A term's exponent is the sum of the two exponent *fields* (subnormals have the smallest one), and
       its significand, in [0, 4), is not renormalised. C's is its own, with a significand in [0, 2).
    2. emax = the largest exponent among the nonzero terms, C included, and never below -133. (Only bf16
       has products so small: 2^-158 is the finest bit that is ever kept.)
    3. Each term is truncated toward zero (in magnitude) to F fraction bits below 2^emax.
    4. The truncated terms are added exactly; the order inside a step does not matter.
    5. The sum is truncated toward zero: to F = 13 fraction bits for FP8 (an E8M13 number in an fp32
       word, its low 10 bits zero), to fp32 for fp16 and bf16 (F = 25). A zero sum is +0. Results below
       2^-126 keep their place on the grid of fp32's subnormals; nothing is flushed. Only bf16 can leave
       the range: a sum of 2^128 or more becomes infinity, but terms far beyond it that cancel do no harm.
    6. A NaN operand, inf * 0 and inf - inf give 0x7FFFFFFF; otherwise an infinity wins.

Source: recorded on H200s, see optimized/recordings/data/README.md; every recorded word is reproduced.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

NAN_WORD = 0x7FFFFFFF
INF_WORD = 0x7F800000
LOWEST_EXPONENT = -133


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format: sign, exponent field, fraction field."""

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool  # False: only the all-ones code is special, and it is NaN (E4M3)

    @property
    def bias(self) -> int:
        """The offset of the exponent field."""
        return (1 << (self.exponent_bits - 1)) - 1


E4M3 = FloatFormat("e4m3", 4, 3, has_infinity=False)
E5M2 = FloatFormat("e5m2", 5, 2, has_infinity=True)
FP16 = FloatFormat("fp16", 5, 10, has_infinity=True)
BF16 = FloatFormat("bf16", 8, 7, has_infinity=True)
FP32 = FloatFormat("fp32", 8, 23, has_infinity=True)


@dataclass(frozen=True)
class Instruction:
    """The shape of one step: products per step, aligned fraction bits, fraction bits of the result."""

    k: int
    aligned_fraction_bits: int
    result_fraction_bits: int


FP8_STEP = Instruction(k=32, aligned_fraction_bits=13, result_fraction_bits=13)
HALF_STEP = Instruction(k=16, aligned_fraction_bits=25, result_fraction_bits=23)


class Operands(NamedTuple):
    """a `[M, K]` and b `[N, K]` as unsigned codes, their formats, and the instruction that multiplies them."""

    a: NDArray[np.unsignedinteger]
    a_format: FloatFormat
    b: NDArray[np.unsignedinteger]
    b_format: FloatFormat
    instruction: Instruction


class Numbers(NamedTuple):
    """Decoded codes: value = (-1)^negative * significand * 2^(exponent - fraction_bits)."""

    negative: NDArray[np.bool_]
    exponent: NDArray[np.int64]
    significand: NDArray[np.int64]  # 0 for zero, NaN and infinity
    nan: NDArray[np.bool_]
    inf: NDArray[np.bool_]

    def zero(self) -> NDArray[np.bool_]:
        """Where the number is +0 or -0."""
        return (self.significand == 0) & ~self.nan & ~self.inf


def decode(codes: NDArray[np.unsignedinteger], fmt: FloatFormat) -> Numbers:
    """Split codes (any shape, unsigned integers) into sign, exponent and integer significand."""
    word = codes.astype(np.int64)
    fraction = word & ((1 << fmt.fraction_bits) - 1)
    field = (word >> fmt.fraction_bits) & ((1 << fmt.exponent_bits) - 1)
    negative = (word >> (fmt.fraction_bits + fmt.exponent_bits)) == 1
    top = field == (1 << fmt.exponent_bits) - 1
    if fmt.has_infinity:
        nan, inf = top & (fraction != 0), top & (fraction == 0)
    else:
        nan = top & (fraction == (1 << fmt.fraction_bits) - 1)
        inf = np.zeros_like(nan)
    hidden = np.where(field > 0, 1 << fmt.fraction_bits, 0)
    significand = np.where(nan | inf, 0, hidden + fraction)
    return Numbers(negative, np.maximum(field, 1) - fmt.bias, significand, nan, inf)


def _aligned(
    negative: NDArray[np.bool_], significand: NDArray[np.int64], shift: NDArray[np.int64]
) -> NDArray[np.int64]:
    """(-1)^negative * significand * 2^shift, truncated toward zero to an integer."""
    left = significand << np.clip(shift, 0, 25)
    magnitude = left >> np.clip(-shift, 0, 62)
    return np.where(negative, -magnitude, magnitude)


def _word(total: NDArray[np.int64], unit: NDArray[np.int64], fraction_bits: int) -> NDArray[np.uint32]:
    """The fp32 word of total * 2^unit, truncated toward zero to `fraction_bits`; +0 for a zero total."""
    magnitude = np.abs(total)
    length = np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)  # exact: magnitude < 2^53
    exponent = unit + length - 1
    # The lowest bit kept is `fraction_bits` below the leading one, or below 2^-126 if that is higher.
    lowest = np.maximum(np.maximum(exponent, -126) - fraction_bits, unit)
    kept = magnitude >> np.minimum(lowest - unit, 62)
    # kept * 2^lowest has at most 24 bits and lies on fp32's grid, so every operation below is exact.
    with np.errstate(over="ignore"):
        value = np.ldexp(kept.astype(np.float64), lowest).astype(np.float32)
    value = np.where(total < 0, -value, value)
    return np.where(kept == 0, np.float32(0), value).astype(np.float32).view(np.uint32)


def step_words(operands: Operands, c: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """D = a · bᵀ + c, one instruction, fp32 words `[M, N]`; c likewise.

    K is at most the instruction's; a shorter one stands for zeros in the rest.
    """
    a, a_format, b, b_format, instruction = operands
    left = decode(a[:, None, :], a_format)
    right = decode(b[None, :, :], b_format)
    old = decode(c, FP32)
    kept_bits = instruction.aligned_fraction_bits

    # 1. Terms: [M, N, K] products, and C.
    significand = left.significand * right.significand
    exponent = left.exponent + right.exponent
    negative = left.negative ^ right.negative

    # 2. The largest exponent among nonzero terms.
    emax = np.where(significand != 0, exponent, LOWEST_EXPONENT).max(axis=2, initial=LOWEST_EXPONENT)
    emax = np.maximum(emax, np.where(old.significand != 0, old.exponent, LOWEST_EXPONENT))

    # 3. and 4. Terms in units of 2^(emax - F), truncated toward zero, then added exactly.
    unit = emax - kept_bits
    fraction_bits = a_format.fraction_bits + b_format.fraction_bits
    total = _aligned(negative, significand, exponent - fraction_bits - unit[:, :, None]).sum(axis=2)
    total += _aligned(old.negative, old.significand, old.exponent - FP32.fraction_bits - unit)

    # 5. The result.
    words = _word(total, unit, instruction.result_fraction_bits)

    # 6. Specials.
    infinite = left.inf | right.inf
    nan = (left.nan | right.nan | (infinite & (left.zero() | right.zero()))).any(axis=2) | old.nan
    plus = (infinite & ~negative).any(axis=2) | (old.inf & ~old.negative)
    minus = (infinite & negative).any(axis=2) | (old.inf & old.negative)
    words = np.where(plus, np.uint32(INF_WORD), words)
    words = np.where(minus, np.uint32(INF_WORD | 0x80000000), words)
    return np.where(nan | (plus & minus), np.uint32(NAN_WORD), words).astype(np.uint32)


def gemm_words(
    operands: Operands, split_k: int | None = None, c: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """a · bᵀ by chained steps: the slow definition of a whole GEMM, fp32 words [M, N].

    Without `split_k` ("fast" accumulation) it is one chain over all of K: C of one step is D of the step before, that
    of the first step `c`, or +0. Otherwise ("split") chains of `split_k` start from zero and are added in order of K,
    with ordinary fp32 additions, to an accumulator that starts at `c`, or +0.
    """
    a, a_format, b, b_format, instruction = operands
    depth = a.shape[1]
    if c is not None and depth == 0:
        return c.copy()
    total = np.zeros((a.shape[0], b.shape[0]), np.float32) if c is None else c.view(np.float32)
    for first in range(0, depth, split_k or max(depth, 1)):
        words = np.zeros(total.shape, np.uint32) if c is None or split_k is not None else c
        for k in range(first, min(depth, first + (split_k or depth)), instruction.k):
            stop = min(k + instruction.k, depth)
            words = step_words(Operands(a[:, k:stop], a_format, b[:, k:stop], b_format, instruction), words)
        if split_k is None:
            return words
        with np.errstate(over="ignore", invalid="ignore"):
            total = total + words.view(np.float32)
    nan = np.isnan(total)
    return np.where(nan, np.uint32(NAN_WORD), total.view(np.uint32))
