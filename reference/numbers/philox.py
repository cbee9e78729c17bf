"""Random numbers that are the same on every machine: Philox4x32-10, and distributions made from its words.

Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11) has no running state: ten rounds of
multiplication under a 64-bit key turn a 128-bit counter into four 32-bit words. So any thread can draw element i of a
tensor alone, on either device:

    key = (low, high) half of the seed         counter = (low, high) half of i, (low, high) half of offset
    words[0..3](i) = philox4x32(counter, key)

`uniform` and `normal` compute with those words by additions, multiplications, divisions and square roots in float64,
each correctly rounded, and by integer operations; one rounding to fp32 comes last. They use no library's logarithm or
cosine, which differ from machine to machine.

The seed of a tensor is drawn from torch's default CPU generator, so `torch.manual_seed` fixes it on either device, and
every tensor gets its own. `offset` is for generators that draw many times from one seed.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from reference.numbers.denormals import check_denormals
from reference.support import workers

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_ROUND_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

# Elements drawn at a time: 64 KiB an array, so that the rounds stay in the cache.
_CHUNK = 1 << 13


def philox4x32(counter: Sequence[npt.ArrayLike], key: tuple[Any, Any], rounds: int = 10) -> list[Words]:
    """The four words of each counter: four uint64 arrays that hold 32-bit words.

    counter: four arrays (broadcast against each other) of 32-bit words; key: two 32-bit words, or two such arrays.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    k0, k1 = key
    for _ in range(rounds):
        p0 = c0 * _ROUND_MULTIPLIERS[0]
        p1 = c2 * _ROUND_MULTIPLIERS[1]
        c0 = (p1 >> _32) ^ c1 ^ np.uint64(k0)
        c1 = p1 & _LOW
        c2 = (p0 >> _32) ^ c3 ^ np.uint64(k1)
        c3 = p0 & _LOW
        k0 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF
        k1 = (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def element_words(seed: int, start: int, count: int, offset: int = 0) -> list[Words]:
    """The four words of the elements start .. start + count - 1: four uint64 arrays `[count]`."""
    for name, value in (("seed", seed), ("start", start), ("offset", offset)):
        if not 0 <= value < 1 << 64:
            raise ValueError(f"{name} must be from 0 to 2^64 - 1; got {value}.")
    element = np.arange(count, dtype=np.uint64) + np.uint64(start)
    counter = (element & _LOW, element >> _32, offset & 0xFFFFFFFF, offset >> 32)
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))


def draw_seed() -> int:
    """A seed from torch's default CPU generator, which `torch.manual_seed` sets: 0 .. 2^63 - 2.

    In a fake mode (`FakeTensorMode`), where no tensor has numbers, it is 0, and nothing is drawn.
    """
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu")
    return int(seed) if type(seed) is torch.Tensor else 0


def draw_seeds(out: torch.Tensor) -> None:
    """Fill `out`, int64 [n] on the CPU, with what n calls of `draw_seed` would return."""
    torch.randint(2**63 - 1, out.shape, out=out)


def new_state(device: torch.device | str = "cpu") -> torch.Tensor:
    """A generator's state: int64 `[2]`, (seed, offset 0), with a newly drawn seed; without one on the meta device.

    Ops with dropout advance the offset; a clone replays the mask.
    """
    with torch.inference_mode(False):  # tensors of inference mode cannot be advanced outside of it
        state = torch.empty(2, dtype=torch.int64, device=device)
        return state if state.is_meta else reseed(state)


def reseed(state: torch.Tensor) -> torch.Tensor:
    """Give a state a newly drawn seed, and offset 0, in place."""
    return state.copy_(torch.tensor([draw_seed(), 0], dtype=torch.int64, device="cpu"))


# Wichura, "Algorithm AS241: the percentage points of the normal distribution" (Applied Statistics 37, 1988),
# PPND16: numerator and denominator, highest power first, of the three pieces of the quantile.
_CENTRE = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_TAIL = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR_TAIL = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip
_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951
# ln((1 + s) / (1 - s)) = 2 s (1 + s²/3 + s⁴/5 + ...); |s| < 0.172 there, so twelve terms reach 2^-64.
_LOG_SERIES = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))


def _horner(coefficients: Sequence[float], x: Floats) -> Floats:
    """The polynomial at x, highest power first: one multiplication and one addition a step, never fused."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total


def _log(x: Floats) -> Floats:
    """The natural logarithm of positive normal float64, within 2 ulp or so, from + - * / alone."""
    word = x.view(np.int64)
    exponent = (word >> 52) - 1023
    mantissa = ((word & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).view(np.float64)
    large = mantissa > _SQRT2
    mantissa = np.where(large, mantissa * 0.5, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return (exponent + large).astype(np.float64) * _LN2 + 2.0 * (s * _horner(_LOG_SERIES, s * s))


def _ratio(piece: tuple[Sequence[float], Sequence[float]], x: Floats) -> Floats:
    return _horner(piece[0], x) / _horner(piece[1], x)


def normal_quantile(p: Floats) -> Floats:
    """The number that a standard normal variable stays below with probability p, 0 < p < 1; float64.

    AS241: relative error about 1e-15. Symmetric in every bit where 1 - p is exact.
    """
    p = np.asarray(p, dtype=np.float64)
    q = p - 0.5
    r = 0.180625 - q * q
    z = q * _ratio(_CENTRE, r)
    outside = np.flatnonzero(np.abs(q) > 0.425)
    if outside.size:
        nearer = np.minimum(p[outside], 1.0 - p[outside])
        distance = np.sqrt(-_log(nearer))
        tail = _ratio(_TAIL, distance - 1.6)
        far = np.flatnonzero(distance > 5.0)
        tail[far] = _ratio(_FAR_TAIL, distance[far] - 5.0)
        z[outside] = np.where(q[outside] < 0, -tail, tail)
    return z


def _unit_interval(seed: int, start: int, count: int) -> Floats:
    """52 random bits of each element, in the middle of their interval: never 0, never 1, exact in float64."""
    words = element_words(seed, start, count)
    bits = (words[0] << np.uint64(20)) | (words[1] >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def _draw(shape: Sequence[int], piece: Callable[[int, int], Floats]) -> torch.Tensor:
    """fp32 of `shape`; piece(start, count) gives its float64 values in row-major order.

    It uses as many threads as torch; their number cannot matter, because each element depends on its index alone.
    RuntimeError where subnormal numbers are flushed to zero.
    """
    check_denormals()
    if type(made := torch.empty(tuple(shape), dtype=torch.float32, device="cpu")) is not torch.Tensor:
        return made  # of a fake mode
    out = np.empty(prod(shape), dtype=np.float32)
    starts = range(0, out.size, _CHUNK)

    def fill(start: int) -> None:
        stop = min(start + _CHUNK, out.size)
        out[start:stop] = piece(start, stop - start)

    workers.each(fill, [(start,) for start in starts])
    return torch.from_numpy(out).reshape(tuple(shape))


def uniform(shape: Sequence[int], low: float = 0.0, high: float = 1.0, *, seed: int | None = None) -> torch.Tensor:
    """fp32 of `shape` on the CPU, uniform in [low, high): low + (high - low) · u, where u is 24 bits.

    u is the top 24 bits of word 0 over 2^24: with the default bounds the values are exact. Other bounds round once from
    float64, which can give `high`. `seed` None draws one from torch's CPU generator.
    """
    if not low <= high:
        raise ValueError(f"low must not be greater than high; got low={low}, high={high}.")
    seed = draw_seed() if seed is None else seed

    def piece(start: int, count: int) -> Floats:
        u = (element_words(seed, start, count)[0] >> np.uint64(8)).astype(np.float64) * 2.0**-24
        return low + (high - low) * u

    return _draw(shape, piece)


def normal(shape: Sequence[int], mean: float = 0.0, std: float = 1.0, *, seed: int | None = None) -> torch.Tensor:
    """fp32 of `shape` on the CPU, normal: mean + std · z in float64, rounded once.

    z is the normal quantile of 52 random bits, |z| < 8.3. `seed` None draws one from torch's CPU generator.
    """
    if not std >= 0:
        raise ValueError(f"std must not be negative; got {std}.")
    seed = draw_seed() if seed is None else seed
    return _draw(shape, lambda start, count: mean + std * normal_quantile(_unit_interval(seed, start, count)))
