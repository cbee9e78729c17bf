"""One word of a GEMM whose tensor core had a fault: a bit flips inside one step (`model`), and the chain goes on.

    product        a product of two significands, as the multiplier gives it, before it is aligned
    aligned sum    the exact sum of the aligned terms, in two's complement, before it is rounded
    accumulator    the fp32 word that the step leaves

Operands are finite. Without a fault, the word is `model.gemm_words`'.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from reference.numbers.tensor_core import model
from reference.numbers.tensor_core.model import FP32, LOWEST_EXPONENT, Operands

STAGES = ("product", "aligned sum", "accumulator")


class StepFault(NamedTuple):
    """A bit that flips: in which step of the word's chains, counted over K; where; of which product; which bit."""

    step: int
    stage: str
    term: int
    bit: int


def bits_of(operands: Operands, stage: str) -> int:
    """How many bits there are to flip in a stage."""
    if stage == "product":
        return operands.a_format.fraction_bits + operands.b_format.fraction_bits + 2
    if stage == "aligned sum":  # a sign, terms below 4, and as many of them as a step has, and C
        return operands.instruction.aligned_fraction_bits + 2 + operands.instruction.k.bit_length() + 1
    return 32


def step_word(operands: Operands, c: NDArray[np.uint32], fault: StepFault | None) -> NDArray[np.uint32]:
    """One step with a fault: a `[1, K]`, b `[1, K]`, c `[1, 1]`, and the word `[1, 1]`; see `model.step_words`."""
    a, a_format, b, b_format, instruction = operands
    stage = None if fault is None else fault.stage
    left, right, old = model.decode(a, a_format), model.decode(b, b_format), model.decode(c, FP32)
    if old.nan.any() or old.inf.any():
        return model.step_words(operands, c)  # nothing that happens to a finite term changes the word
    significand = left.significand * right.significand
    if fault is not None and stage == "product":
        significand[0, fault.term % significand.shape[1]] ^= 1 << fault.bit
    exponent = left.exponent + right.exponent
    emax = np.where(significand != 0, exponent, LOWEST_EXPONENT).max(axis=1, initial=LOWEST_EXPONENT)
    emax = np.maximum(emax, np.where(old.significand != 0, old.exponent, LOWEST_EXPONENT)[0])
    unit = emax - instruction.aligned_fraction_bits
    fraction_bits = a_format.fraction_bits + b_format.fraction_bits
    terms = model._aligned(left.negative ^ right.negative, significand, exponent - fraction_bits - unit)
    total = terms.sum(axis=1) + model._aligned(old.negative, old.significand, old.exponent - 23 - unit)[0]
    if fault is not None and stage == "aligned sum":
        total = total ^ (1 << fault.bit)
        if fault.bit == bits_of(operands, stage) - 1:  # the sign: as in a register of so many bits
            total = np.where(total >= 1 << fault.bit, total - (1 << fault.bit + 1), total)
            total = np.where(total < -(1 << fault.bit), total + (1 << fault.bit + 1), total)
    words = model._word(total, unit, instruction.result_fraction_bits)[None]
    return words ^ np.uint32(1 << fault.bit) if fault is not None and stage == "accumulator" else words


def gemm_word(
    operands: Operands, split_k: int | None, c: NDArray[np.uint32] | None, fault: StepFault | None
) -> NDArray[np.uint32]:
    """A word `[1, 1]` of a GEMM with a fault: a `[1, K]`, b `[1, K]`; see `model.gemm_words`."""
    a, a_format, b, b_format, instruction = operands
    depth, number = a.shape[1], 0
    total = np.zeros((1, 1), np.float32) if c is None else c.view(np.float32)
    for first in range(0, depth, split_k or max(depth, 1)):
        words = np.zeros((1, 1), np.uint32) if c is None or split_k is not None else c
        for k in range(first, min(depth, first + (split_k or depth)), instruction.k):
            stop = min(k + instruction.k, depth)
            part = Operands(a[:, k:stop], a_format, b[:, k:stop], b_format, instruction)
            words = step_word(part, words, fault if fault is not None and fault.step == number else None)
            number += 1
        if split_k is None:
            return words
        with np.errstate(over="ignore", invalid="ignore"):
            total = total + words.view(np.float32)
    return np.where(np.isnan(total), np.uint32(model.NAN_WORD), total.view(np.uint32))


def steps_of(operands: Operands) -> int:
    """How many steps a word of a GEMM takes. A chain of split accumulation is a whole number of them."""
    return -(-operands.a.shape[1] // operands.instruction.k)
