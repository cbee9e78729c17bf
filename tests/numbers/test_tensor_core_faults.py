"""Faults inside the tensor core's model: without one the words are the model's, and each stage has its bits."""

import math

import numpy as np
import pytest

from reference.numbers.tensor_core import faults, model
from reference.numbers.tensor_core.faults import STAGES, StepFault, bits_of, gemm_word, steps_of
from reference.numbers.tensor_core.model import Operands

PAIRS = {
    "e4m3": (model.E4M3, model.FP8_STEP),
    "e5m2": (model.E5M2, model.FP8_STEP),
    "bf16": (model.BF16, model.HALF_STEP),
    "fp16": (model.FP16, model.HALF_STEP),
}


def operands(kind: str, depth: int, seed: int = 0) -> Operands:
    """One row of each, finite, of every exponent."""
    fmt, instruction = PAIRS[kind]
    draw = np.random.default_rng(seed)
    bits = 1 + fmt.exponent_bits + fmt.fraction_bits
    codes = np.arange(1 << bits, dtype=np.uint8 if bits == 8 else np.uint16)
    number = model.decode(codes, fmt)
    middle = codes[~(number.nan | number.inf) & (abs(number.exponent) < 30)]
    a, b = (draw.choice(middle, (1, depth)) for _ in range(2))
    return Operands(a, fmt, b, fmt, instruction)


@pytest.mark.parametrize("split", [None, 128])
@pytest.mark.parametrize("kind", PAIRS)
def test_without_a_fault_a_word_is_the_models(kind: str, split: int | None) -> None:
    for seed, depth in enumerate((1, 16, 40, 128, 300)):
        x = operands(kind, depth, seed)
        c = np.random.default_rng(seed).standard_normal((1, 1)).astype(np.float32).view(np.uint32)
        for start in (None, c):
            assert gemm_word(x, split, start, None) == model.gemm_words(x, split, start)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", PAIRS)
def test_a_fault_in_the_last_step_is_one_bit_of_its_stage(kind: str, stage: str) -> None:
    """High bits change the word, and a step that is not there changes nothing."""
    x = operands(kind, 64)
    clean = gemm_word(x, None, None, None)
    last = steps_of(x) - 1
    terms = range(x.instruction.k if stage == "product" else 1)  # of a small one nothing may be kept
    flips = [StepFault(last, stage, term, bit) for term in terms for bit in range(bits_of(x, stage))]
    words = [gemm_word(x, None, None, one) for one in flips]
    assert any(word != clean for word in words)
    if stage == "accumulator":
        assert [int((word ^ clean)[0, 0]) for word in words] == [1 << bit for bit in range(32)]
    assert gemm_word(x, None, None, StepFault(last + 1, stage, 3, 0)) == clean


def test_a_flipped_product_is_another_product() -> None:
    """1·1 with its highest bit flipped is 3·1, and with its lowest one, 2^-6 more."""
    one = np.array([[0x38]], np.uint8)  # 1.0 in E4M3, whose significand is 8: a product is 64 of 2^-6
    x = Operands(one, model.E4M3, one, model.E4M3, model.FP8_STEP)
    for bit, value in ((7, 3.0), (0, 1.0 + 2.0**-6), (6, 0.0)):
        word = faults.step_word(x, np.zeros((1, 1), np.uint32), StepFault(0, "product", 0, bit))
        assert word.view(np.float32) == value
    word = faults.step_word(x, np.zeros((1, 1), np.uint32), StepFault(0, "aligned sum", 0, 13))
    assert word.view(np.float32) == 0.0  # the sum is 2^13 units


@pytest.mark.parametrize(("code", "value"), [(0x38, 1.0), (0xB8, -1.0)])
def test_a_flipped_sign_of_a_sum_is_that_of_twos_complement(code: int, value: float) -> None:
    """The highest bit of a register counts as minus its power of two, so a flip takes that away or adds it."""
    x = Operands(np.array([[code]], np.uint8), model.E4M3, np.array([[0x38]], np.uint8), model.E4M3, model.FP8_STEP)
    highest = bits_of(x, "aligned sum") - 1
    word = faults.step_word(x, np.zeros((1, 1), np.uint32), StepFault(0, "aligned sum", 0, highest))
    assert word.view(np.float32) == value - math.copysign(2.0 ** (highest - 13), value)  # 1 is 2^13 units
