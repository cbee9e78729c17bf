"""Lesson 3's laboratory: `ask` gives what a tensor core gives, and each hypothesis is a function of the same inputs.

An instruction is a list of pairs (a, b), at most 32, of E4M3 numbers, and C, an fp32 number.
"""

import functools
import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch

from optimized.recordings import arrays
from reference import formats, tensor_core

Pairs = Sequence[tuple[float, float]]
Hypothesis = Callable[[Pairs, float], float]


def ask(pairs: Pairs, c: float = 0.0) -> float:
    """What an H200's instruction gives, by the model that `recorded` is compared with."""
    a, b = torch.tensor(list(pairs), dtype=torch.float32).reshape(-1, 2).t()
    for x in (a, b):
        cast = formats.decode(formats.cast(x, formats.E4M3))
        if not torch.equal(cast, x):
            wrong = x[cast != x][0].item()
            raise ValueError(f"ask: {wrong:g} is no E4M3 number; the nearest is {cast[cast != x][0].item():g}.")
    if len(a) > 32:
        raise ValueError(f"ask: {len(a)} pairs; an instruction takes at most 32.")
    left, right = (formats.cast(x, formats.E4M3)[None] for x in (a, b))
    return tensor_core.step(left, right, torch.tensor([[c]], dtype=torch.float32)).item()


def _round(number: Fraction, unit: Fraction, rounding: str) -> Fraction:
    """A multiple of `unit`: "nearest", "down", or "toward zero"."""
    units = number / unit
    if rounding == "nearest":
        return round(units) * unit
    return (math.floor(units) if rounding == "down" else int(units)) * unit


def _exponent(number: Fraction) -> int:
    return math.frexp(float(number))[1] - 1


def _of_code(number: float) -> int:
    return max(_exponent(Fraction(number)), 1 - formats.E4M3.bias)


def one_by_one(pairs: Pairs, c: float = 0.0, bits: int = 23, rounding: str = "toward zero") -> float:
    """C, then one product after another; each sum keeps `bits` bits below its leading one."""
    total = Fraction(c)
    for a, b in pairs:
        total += Fraction(a) * Fraction(b)
        if total:
            total = _round(total, Fraction(2) ** (_exponent(total) - bits), rounding)
    return float(total)


def at_once(pairs: Pairs, c: float = 0.0, bits: int = 23, rounding: str = "toward zero") -> float:
    """All terms together: each keeps what is at most `bits` bits below the largest exponent. Their sum, cut likewise.

    A product's exponent is the sum of both codes' exponents; a subnormal code has that of the smallest normal one.
    """
    terms = [(Fraction(a) * Fraction(b), _of_code(a) + _of_code(b)) for a, b in pairs if a and b]
    terms += [(Fraction(c), _exponent(Fraction(c)))] if c else []
    if not terms:
        return 0.0
    unit = Fraction(2) ** (max(exponent for _, exponent in terms) - bits)
    total = sum(_round(number, unit, rounding) for number, _ in terms)
    if not total:
        return 0.0
    return float(_round(total, max(unit, Fraction(2) ** (_exponent(total) - bits)), "toward zero"))


def compare(pairs: Pairs, c: float = 0.0, **hypotheses: Hypothesis) -> bool:
    """Print what each hypothesis says and what the tensor core gives; True if no two of them say the same."""
    truth, said = ask(pairs, c), {}
    for name, hypothesis in hypotheses.items():
        said[name] = hypothesis(pairs, c)
        verdict = "refuted" if said[name] != truth else "agrees"
        print(f"{name.replace('_', ' '):15} {said[name]:>12g}   {verdict}")
    print(f"{'tensor core':15} {truth:>12g}")
    separated = len(set(said.values())) == len(said)
    if len(said) > 1:
        print("This instruction separates them." if separated else "This instruction does not separate them.")
    return separated


@functools.cache
def recorded(count: int = 512) -> list[tuple[Pairs, float, float]]:
    """Some of the 6,144 words that an H200 computed: (pairs, c, the answer)."""
    a, b, c, d = (arrays("wgmma_h200")[f"e4m3.e4m3.k32.{name}"] for name in "ABCD")
    values = formats.decode_table(formats.E4M3).double().numpy()
    chosen = np.random.Generator(np.random.Philox(0)).permutation(d.size)[:count]
    found = []
    for place in chosen:
        tile, row, column = np.unravel_index(place, d.shape)
        pairs = list(zip(values[a[tile, row]].tolist(), values[b[tile, column]].tolist(), strict=True))
        found.append((pairs, float(c[tile, row, column]), float(d[tile, row, column])))
    return found


def wrong(hypothesis: Hypothesis) -> int:
    """How many of the recorded words a hypothesis gets wrong."""
    return sum(hypothesis(pairs, c) != d for pairs, c, d in recorded())


def model_is_the_h200() -> bool:
    """Whether `ask`'s model gives each of the 6,144 recorded words."""
    a, b, c, d = (arrays("wgmma_h200")[f"e4m3.e4m3.k32.{name}"] for name in "ABCD")
    for tile in range(len(d)):
        left, right = (torch.from_numpy(x[tile]).view(torch.float8_e4m3fn) for x in (a, b))
        got = tensor_core.step(left, right, torch.from_numpy(c[tile]))
        if not np.array_equal(got.numpy().view(np.uint32), d[tile].view(np.uint32)):
            return False
    return True
