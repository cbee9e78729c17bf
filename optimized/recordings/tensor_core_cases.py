"""The inputs of `tensor_core_h200.npz`. They are made again from seeds, so that only the outputs are stored.

The bits come from NumPy's Philox *bit generator* (`random_raw`), whose stream NumPy promises to keep; the file has a
checksum of every input. Names are `<a format>.<b format>.<case>`.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from reference.numbers.tensor_core import model

KINDS = {
    "e4m3.e4m3": (model.E4M3, model.E4M3, model.FP8_STEP),
    "e5m2.e4m3": (model.E5M2, model.E4M3, model.FP8_STEP),
    "e4m3.e5m2": (model.E4M3, model.E5M2, model.FP8_STEP),
    "e5m2.e5m2": (model.E5M2, model.E5M2, model.FP8_STEP),
    "fp16.fp16": (model.FP16, model.FP16, model.HALF_STEP),
    "bf16.bf16": (model.BF16, model.BF16, model.HALF_STEP),
}
ROWS, COLUMNS = 64, 8  # of one m64n8 instruction


@dataclass(frozen=True)
class Case:
    """T independent tiles: a [T, 64, K], b [T, 8, K] codes, c [T, 64, 8] fp32 words."""

    name: str
    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def checksum(self) -> int:
        """CRC-32 of the three inputs."""
        crc = 0
        for array in (self.a, self.b, self.c):
            crc = zlib.crc32(np.ascontiguousarray(array).tobytes(), crc)
        return crc


class Bits:
    """A named stream of random bits."""

    def __init__(self, name: str) -> None:
        self.generator = np.random.Philox(key=zlib.crc32(name.encode()))

    def below(self, limit: int, shape: tuple[int, ...]) -> np.ndarray:
        """Integers in [0, limit), int64."""
        count = int(np.prod(shape))
        return (self.generator.random_raw(count) >> np.uint64(32)).astype(np.int64).reshape(shape) % limit

    def codes(
        self, fmt: model.FloatFormat, shape: tuple[int, ...], fields: tuple[int, int], zeros: int = 0, specials: int = 0
    ) -> np.ndarray:
        """Finite codes with exponent fields in `fields` (inclusive); on average, `zeros` of 64 codes are signed zeros.

        Another `specials` of 64 are NaN or infinity.
        """
        low, high = fields
        sign = self.below(2, shape)
        field = low + self.below(high - low + 1, shape)
        fraction = self.below(1 << fmt.fraction_bits, shape)
        top = (1 << fmt.exponent_bits) - 1
        if not fmt.has_infinity:  # E4M3: the last code is NaN
            fraction = np.where((field == top) & (fraction == 7), 6, fraction)
        lot = self.below(64, shape)
        field, fraction = np.where(lot < zeros, 0, field), np.where(lot < zeros, 0, fraction)
        special = lot >= 64 - specials
        field = np.where(special, top, field)
        if fmt.has_infinity:  # one in four of the specials is a NaN
            nan = (1 << fmt.fraction_bits) - 1
            fraction = np.where(special, np.where(self.below(4, shape) == 0, nan, 0), fraction)
        else:
            fraction = np.where(special, 7, fraction)
        word = (((sign << fmt.exponent_bits) | field) << fmt.fraction_bits) | fraction
        return word.astype({8: np.uint8, 16: np.uint16, 32: np.uint32}[1 + fmt.exponent_bits + fmt.fraction_bits])


# Exponent fields of a and of b, zeros and specials in 64 codes of either; fields, zeros and specials of c.
Recipe = tuple[tuple[int, int], tuple[int, int], int, int, tuple[int, int], int, int]


def _top(fmt: model.FloatFormat) -> int:
    return (1 << fmt.exponent_bits) - (2 if fmt.has_infinity else 1)


def recipes(a: model.FloatFormat, b: model.FloatFormat) -> dict[str, Recipe]:
    """The one-step cases for two formats, by name."""
    all_a, all_b = (0, _top(a)), (0, _top(b))
    near = (max(0, a.bias - 2), a.bias + 2), (max(0, b.bias - 2), b.bias + 2)
    found: dict[str, Recipe] = {
        "plain": (*near, 0, 0, (122, 134), 0, 0),
        "no_c": (*near, 0, 0, (0, 0), 64, 0),
        "uniform": (all_a, all_b, 0, 0, (97, 157), 4, 0),
        "sparse": (all_a, all_b, 52, 0, (97, 157), 32, 0),
        "subnormal": ((0, 1), (0, 1), 8, 0, (85, 120), 32, 0),
        "tiny_c": (all_a, all_b, 62, 0, (0, 40), 0, 0),
        "subnormal_c": (all_a, all_b, 63, 0, (0, 1), 0, 0),
        "huge_c": (all_a, all_b, 0, 0, (200, 254), 0, 0),
        "zeros": (all_a, all_b, 60, 0, (0, 0), 64, 0),
        "special": (all_a, all_b, 8, 1, (97, 157), 4, 0),
        "special_c": (all_a, all_b, 8, 0, (0, 254), 4, 12),
    }
    if a is model.BF16:
        found |= {
            "overflow": ((184, 191), (184, 191), 8, 0, (245, 254), 16, 0),
            "underflow": ((50, 75), (50, 75), 8, 0, (0, 30), 32, 0),
            "underflow_sparse": ((40, 80), (40, 80), 56, 0, (0, 20), 16, 0),
            "far_high": ((225, 254), (225, 254), 40, 0, (97, 254), 16, 0),
            "far_low": ((0, 20), (0, 20), 8, 0, (0, 20), 32, 0),
            "all": ((0, 254), (0, 254), 32, 0, (0, 254), 32, 0),
            "balanced": ((1, 254), (1, 254), 58, 0, (0, 254), 32, 0),
        }
    return found


def _one_step(kind: str, name: str, tiles: int, recipe: Recipe, seed: str) -> Case:
    a_format, b_format, instruction = KINDS[kind]
    bits = Bits(f"{kind}.{name}.{seed}")
    fields_a, fields_b, zeros, specials, fields_c, zeros_c, specials_c = recipe
    a = bits.codes(a_format, (tiles, ROWS, instruction.k), fields_a, zeros, specials)
    b = bits.codes(b_format, (tiles, COLUMNS, instruction.k), fields_b, zeros, specials)
    c = bits.codes(model.FP32, (tiles, ROWS, COLUMNS), fields_c, zeros_c, specials_c)
    return Case(f"{kind}.{name}", a, b, c)


def _cancelling(kind: str, tiles: int, seed: str) -> Case:
    """Products that cancel in pairs, except for a few flipped fraction bits, with a small C."""
    a_format, b_format, instruction = KINDS[kind]
    bits = Bits(f"{kind}.cancel.{seed}")
    half = instruction.k // 2
    a = bits.codes(a_format, (tiles, ROWS, half), (0, _top(a_format)))
    b = bits.codes(b_format, (tiles, COLUMNS, half), (0, _top(b_format)))
    minus = b ^ b.dtype.type(1 << (b_format.exponent_bits + b_format.fraction_bits))
    flip = (bits.below(64, a.shape) == 0) & (a & 1 == 1)  # an odd fraction made even: never a new NaN
    a = np.concatenate([a, np.where(flip, a - a.dtype.type(1), a)], axis=2)
    b = np.concatenate([b, minus], axis=2)
    c = bits.codes(model.FP32, (tiles, ROWS, COLUMNS), (90, 130), 32)
    return Case(f"{kind}.cancel", a, b, c)


def _chain(kind: str, depth: int, tiles: int, seed: str) -> Case:
    """`depth` products in a row with C = 0 and exponents around 1, so that the sum grows past its terms."""
    a_format, b_format, _ = KINDS[kind]
    bits = Bits(f"{kind}.chain{depth}.{seed}")
    a = bits.codes(a_format, (tiles, ROWS, depth), (max(0, a_format.bias - 6), a_format.bias + 2), 4)
    b = bits.codes(b_format, (tiles, COLUMNS, depth), (max(0, b_format.bias - 6), b_format.bias + 2), 4)
    return Case(f"{kind}.chain{depth}", a, b, np.zeros((tiles, ROWS, COLUMNS), np.uint32))


def _low_edge(tiles: int, seed: str) -> Case:
    """bf16: a power of two among fp32's subnormals, plus a far smaller product of the other sign; C = 0.

    Whether the small product borrows from the large one shows where terms are cut off.
    """
    kind = "bf16.bf16"
    bits = Bits(f"{kind}.low_edge.{seed}")
    a = np.zeros((tiles, ROWS, 16), np.uint16)
    b = np.zeros((tiles, COLUMNS, 16), np.uint16)
    a[:, :, 0] = bits.codes(model.BF16, a.shape[:2], (52, 67)) & 0x7F80
    b[:, :, 0] = bits.codes(model.BF16, b.shape[:2], (53, 62)) & 0x7F80
    a[:, :, 1] = bits.codes(model.BF16, a.shape[:2], (42, 54)) | 0x8000
    b[:, :, 1] = bits.codes(model.BF16, b.shape[:2], (42, 54)) & 0x7FFF
    return Case(f"{kind}.low_edge", a, b, np.zeros((tiles, ROWS, COLUMNS), np.uint32))


def cases(tiles: int = 3, seed: str = "committed") -> Iterator[Case]:
    """Every case of every kind, each with `tiles` tiles."""
    for kind, (a_format, b_format, instruction) in KINDS.items():
        for name, recipe in recipes(a_format, b_format).items():
            yield _one_step(kind, name, tiles, recipe, seed)
        yield _cancelling(kind, tiles, seed)
        for depth in (4 * instruction.k, 64 * instruction.k, 16384):
            yield _chain(kind, depth, 1, seed)
        if kind == "bf16.bf16":  # a chain whose sum leaves fp32's range
            bits = Bits(f"{kind}.chain_extreme.{seed}")
            a = bits.codes(a_format, (tiles, ROWS, 64), (0, 254), 40)
            b = bits.codes(b_format, (tiles, COLUMNS, 64), (0, 254), 40)
            yield _low_edge(2 * tiles, seed)
            yield Case(f"{kind}.chain_extreme", a, b, np.zeros((tiles, ROWS, COLUMNS), np.uint32))
    yield _chain("e4m3.e4m3", 65536, 1, seed)


# The GEMMs of cuBLASLt, through torch._scaled_mm: formats, M, N, K.
PRODUCTS = [
    ("e4m3.e4m3", 64, 64, 16),
    ("e4m3.e4m3", 64, 64, 48),
    ("e4m3.e4m3", 96, 80, 528),
    ("e4m3.e4m3", 1, 64, 1024),
    ("e4m3.e4m3", 7, 48, 4112),
    ("e4m3.e4m3", 512, 512, 4096),
    ("e4m3.e4m3", 2048, 2048, 8192),
    ("e4m3.e4m3", 2048, 2048, 16384),
    ("e4m3.e4m3", 2048, 1024, 32768),
    ("e4m3.e4m3", 256, 256, 16384),
    ("e4m3.e4m3", 64, 64, 65536),
    ("e5m2.e4m3", 512, 512, 2048),
    ("e5m2.e4m3", 2048, 2048, 16384),
    ("e4m3.e5m2", 512, 512, 2048),
    ("e4m3.e5m2", 1024, 2048, 16384),
]
CORNER = (24, 16)  # the rows and columns of a GEMM that are stored


def product_inputs(index: int, corner: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Finite codes a [M, K] and b [N, K] of PRODUCTS[index]; with `corner` only the rows that are stored."""
    kind, m, n, depth = PRODUCTS[index]
    drawn = []
    for side, fmt, count in (("a", KINDS[kind][0], m), ("b", KINDS[kind][1], n)):
        rows = min(count, CORNER[side == "b"]) if corner else count
        raw = Bits(f"product{index}.{side}").generator.random_raw(rows * depth // 8).view(np.uint8)
        magnitude = raw & 0x7F
        finite = magnitude < (0x7C if fmt.has_infinity else 0x7F)
        drawn.append(np.where(finite, raw, raw & 0xBF).reshape(rows, depth))
    return drawn[0], drawn[1]
