"""`twin::rotary`: rotary position embedding, forward and backward.

x `[s, b, h, d]`; freqs `[positions, d2]`, fp32 angles in radians, positions >= s, d2 even and at most d. For j < d2:

    out[j] = round(x[j] · cos f[j] + turned[j] · sin f[j])
    turned = (-second half, first half)          interleaved: (-x[1], x[0], -x[3], x[2], ...)

and out[j] = x[j] for j >= d2. The backward is the transposed map, of the gradient:

    dx[j] = round(grad[j] · cos f[j] + back[j])    back = the inverse turn of grad[j] · sin f[j]

Products and sum are fp32 operations; one rounding to x's dtype follows. cos and sin of an fp32 angle are computed in
float64 (`sine_cosine`: additions, multiplications and one rounding to an integer, in the order of the code) and rounded
to fp32. They are accurate to half an ulp of fp32 for angles below 2^20, and NaN from 2^31 on.
"""

from math import factorial

import numpy as np
import torch

from reference.ops.checks import check_wide
from reference.ops.library import define
from reference.support.numba_jit import jit

OP = "twin::rotary"
TWO_OVER_PI = 0.63661977236758134308
# pi / 2 in two pieces. The first has 33 bits: its product with an integer below 2^20 is exact.
HALF_PI_HIGH = 1.57079632673412561417e00
HALF_PI_LOW = 6.07710050650619224932e-11
LIMIT = 2147483648.0
# Taylor coefficients, highest power first: those of sin after r itself, and those of cos.
SINE = tuple((-1) ** k / factorial(2 * k + 1) for k in range(6, 0, -1))
COSINE = tuple((-1) ** k / factorial(2 * k) for k in range(7, -1, -1))


@jit
def sine_cosine(angle: np.float32) -> tuple[np.float32, np.float32]:
    """(sin, cos) of an angle: Taylor polynomials on [-pi/4, pi/4], in float64."""
    x = np.float64(angle)
    if not abs(x) < LIMIT:
        return np.float32(np.nan), np.float32(np.nan)
    n = np.rint(x * TWO_OVER_PI)
    r = (x - n * HALF_PI_HIGH) - n * HALF_PI_LOW
    z = r * r
    sine = SINE[0]
    for coefficient in SINE[1:]:
        sine = sine * z + coefficient
    sine = (sine * z) * r + r
    cosine = COSINE[0]
    for coefficient in COSINE[1:]:
        cosine = cosine * z + coefficient
    quarter = np.int64(n) & np.int64(3)
    if quarter == 0:
        return np.float32(sine), np.float32(cosine)
    if quarter == 1:
        return np.float32(cosine), np.float32(-sine)
    if quarter == 2:
        return np.float32(-sine), np.float32(-cosine)
    return np.float32(-cosine), np.float32(sine)


@jit
def _tables(freqs: np.ndarray, sine: np.ndarray, cosine: np.ndarray) -> None:
    for i in range(freqs.size):
        sine[i], cosine[i] = sine_cosine(freqs[i])


def sine_cosine_tables(freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(sin, cos) of fp32 angles of any shape."""
    flat = freqs.contiguous().view(-1).numpy()
    sine, cosine = np.empty_like(flat), np.empty_like(flat)
    _tables(flat, sine, cosine)
    return torch.from_numpy(sine).view(freqs.shape), torch.from_numpy(cosine).view(freqs.shape)


def outputs(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """Check the arguments of `twin::rotary`, of which every flag is accepted, and allocate its result."""
    if x.dim() != 4 or (x.stride(3) != 1 and x.numel()):
        raise ValueError(
            f"{OP}: x must be 4-D, [s, b, h, d], and contiguous in d; got shape {list(x.shape)}, strides {x.stride()}."
        )
    check_wide(OP, "x", x.dtype)
    if freqs.dim() != 2 or freqs.dtype != torch.float32 or not freqs.is_contiguous():
        raise ValueError(
            f"{OP}: freqs must be contiguous torch.float32 [positions, dimensions]; "
            f"got {freqs.dtype} {list(freqs.shape)}."
        )
    if freqs.device != x.device:
        raise ValueError(f"{OP}: freqs is on {freqs.device}, x on {x.device}.")
    positions, d2 = freqs.shape
    if positions < x.shape[0] or d2 % 2 or d2 > x.shape[3]:
        raise ValueError(
            f"{OP}: freqs must have at least {x.shape[0]} positions and an even number of dimensions up to "
            f"{x.shape[3]}; got {list(freqs.shape)}."
        )
    return torch.empty_like(x)


def turn(t: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """(-second half, first half) of the last dimension, or of its pairs."""
    if interleaved:
        return torch.stack([-t[..., 1::2], t[..., ::2]], dim=-1).flatten(-2)
    first, second = t.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@define(outputs)
def rotary(x: torch.Tensor, freqs: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    """`x` `[s, b, h, d]` (any strides with d contiguous) -> the same shape, dtype and, where dense, strides.

    Args:
        x: activations, or with `backward` the gradient of rotary's output; fp32, bf16 or fp16.
        freqs: fp32 `[positions, d2]`, the angles of each position.
        interleaved: pair neighbours, instead of j with j + d2 / 2.
        backward: apply the transposed map.
    """
    out = outputs(x, freqs, interleaved, backward)
    s, d2 = x.shape[0], freqs.shape[1]
    sine, cosine = (table[:s, None, None, :] for table in sine_cosine_tables(freqs))
    wide = x[..., :d2].float()
    if backward:
        turned = -turn(wide * sine, interleaved)
    else:
        turned = turn(wide, interleaved) * sine
    out[..., :d2] = (wide * cosine + turned).to(x.dtype)
    out[..., d2:] = x[..., d2:]
    return out
