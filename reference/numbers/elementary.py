"""exp, rsqrt and the activations, which every layer consists of besides GEMMs, bit for bit.

    exp(x)         e^x, x <= 0                          fp32 -> fp32   softmax
    exp2_grid(y)   2^(y to the nearest 2^-15)           fp32 -> fp32   attention's inner loop
    rsqrt(x)       1 / sqrt(x), two roundings           fp32 -> fp32   LayerNorm, RMSNorm: once a row
    log(x)         ln x                                 fp32 -> fp32   cross-entropy: once a row
    gelu, silu     x sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3) or x      bf16, fp16, fp32 -> fp32
    dgelu, dsilu   their derivatives                                           bf16, fp16, fp32 -> fp32
    sigmoid, qgelu 1 / (1 + e^-x), x sigmoid(1.702 x); dsigmoid, dqgelu        bf16, fp16, fp32 -> fp32
    swish          x sigmoid(alpha x), alpha > 0; dswish                       bf16, fp16, fp32 -> fp32

There are two kinds of definition (docs/elementary.md says why, and gives errors and costs):

* A function of one 16-bit value has 65,536 results. They are what Hopper's special function unit gives in the
  fast form of optimized/kernels/common/elementary.cuh, recorded on an H200 (tables/) and looked up here.
* A function of an fp32 value (and sigmoid, qgelu and swish, which widen a 16-bit one) is a short chain of correctly
  rounded operations, including fma, and two instructions whose results are known: `ex2.approx` on multiples of 2^-15
  is an exact power of two times one of 2 · 32,768 recorded words (negative arguments have their own), and `rcp.approx`
  with one Newton step is the correctly rounded 1/d on [1, 2].

The functions of tensors take any shape on the CPU, in these dtypes. The `*_scalar` functions are for other numba
kernels; their argument `powers` is `powers_of_two()`.
"""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reference.numbers.denormals import check_denormals
from reference.support import files
from reference.support.numba_jit import fma, from_word, jit, word_of

TABLES = Path(__file__).parent / "tables" / "elementary_h200.npz"
ACTIVATIONS = ("gelu", "dgelu", "silu", "dsilu")

_F = np.float32
ZERO, ONE = _F(0.0), _F(1.0)
LOG2E = _F(1.44269502162933349609375)
LN2 = _F(0.693147182464599609375)
LN2_LOW = _F(-1.90465429995776788e-9)  # ln 2 - LN2
GRID11 = _F(6144.0)  # 1.5 · 2^12: adding it rounds to a multiple of 2^-11
GRID15 = _F(384.0)  # 1.5 · 2^8: to a multiple of 2^-15
STEPS15 = _F(32768.0)
EXP_LOWEST, EXP2_LOWEST = _F(-88.0), _F(-127.0)
OVERFLOW, UNDERFLOW = _F(128.0), _F(-126.0)
INFINITY = _F(np.inf)
# tanh-GELU is x sigmoid(z), z = 2 sqrt(2/pi) (x + 0.044715 x^3) = x (GELU1 + GELU3 x^2); z' = GELU1 + 3 GELU3 x^2.
GELU1 = _F(1.5957691216057308)
GELU_SLOPE = _F(0.21406444881780075)
GELU1_LOG2E = _F(2.302208198144325)
GELU3_LOG2E = _F(0.1029432395800235)
QGELU, QGELU_LOG2E = _F(1.702), _F(2.4554669595930155)  # of the sigmoid's argument; the same times log2 e
SQUARE_LIMIT = _F(128.0)  # of x^2 in dgelu: keeps z' finite where sigmoid's slope is 0
# ln(2^k m), sqrt(1/2) <= m < sqrt(2): m - 1 = f, s = f / (2 + f), ln m = 2 atanh(s); fdlibm's constants (e_logf.c).
SQRT_HALF_WORD, ONE_WORD, MANTISSA = np.int32(0x3F3504F3), np.int32(0x3F800000), np.int32(0x007FFFFF)
LOG_LN2, LOG_LN2_LOW = _F(6.9313812256e-01), _F(9.0580006145e-06)  # k times the first is exact
LOG1, LOG2, LOG3, LOG4 = _F(0.66666662693), _F(0.40000972152), _F(0.28498786688), _F(0.24279078841)
HALF, TWO, NAN = _F(0.5), _F(2.0), _F(np.nan)
SMALLEST_NORMAL, FROM_SUBNORMAL = _F(2.0**-126), _F(2.0**25)


@cache
def _recorded() -> dict[str, np.ndarray]:
    found = files.arrays(TABLES, ": install the package anew, or `git checkout -- reference/numbers/tables`")
    return {name: np.ascontiguousarray(array) for name, array in found.items()}


def powers_of_two() -> np.ndarray:
    """int32 [65536]: the bits of ex2.approx(j / 32768), then those of 2 · ex2.approx(j / 32768 - 1)."""
    return _recorded()["exp2"].view(np.int32)


@jit
def power_on_grid(n: np.float32, powers: np.ndarray) -> np.float32:
    """`ex2.approx.ftz` of a multiple of 2^-15."""
    if n >= OVERFLOW:
        return INFINITY
    if n < UNDERFLOW:
        return ZERO
    if n != n:
        return n
    k = np.int32(n * STEPS15)
    row = np.int32(32768) if k < 0 else np.int32(0)
    return from_word(np.int32(powers[row + (k & np.int32(32767))] + ((k >> np.int32(15)) << np.int32(23))))


@jit
def exp_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """e^x for x <= 0; 0 below 2^-126; NaN where x is."""
    if x < EXP_LOWEST:
        x = EXP_LOWEST
    n = fma(x, LOG2E, GRID11) - GRID11  # x / ln 2 to a multiple of 2^-11
    power = power_on_grid(n, powers)
    f = fma(n, -LN2, x)
    f = fma(n, -LN2_LOW, f)  # x - n ln 2, |f| <= 1.7e-4
    return fma(power, f, power)  # 2^n (1 + f); f²/2 <= 1.5e-8 is left out


@jit
def exp2_grid_scalar(y: np.float32, powers: np.ndarray) -> np.float32:
    """2^y to a relative 1.06e-5; 0 below 2^-126, inf from 2^128 on, NaN where y is."""
    return power_on_grid((y + GRID15) - GRID15, powers)


@jit
def rsqrt_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """1 / sqrt(x), both correctly rounded."""
    return ONE / np.sqrt(x)


@jit
def log_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """ln x of any fp32 value; -inf of a zero, NaN below it. Each operation rounds once; none is an fma."""
    if not x > ZERO:
        return -INFINITY if x == ZERO else NAN
    if x == INFINITY:
        return x
    below = np.int32(127)
    if x < SMALLEST_NORMAL:
        x, below = x * FROM_SUBNORMAL, np.int32(152)
    word = np.int32(word_of(x) + (ONE_WORD - SQRT_HALF_WORD))
    k = np.float32(np.int32((word >> np.int32(23)) - below))
    f = from_word(np.int32((word & MANTISSA) + SQRT_HALF_WORD)) - ONE
    s = f / (TWO + f)
    z = s * s
    w = z * z
    r = z * (LOG1 + w * LOG3) + w * (LOG2 + w * LOG4)
    h = (HALF * f) * f
    return (((s * (h + r) + k * LOG_LN2_LOW) - h) + f) + k * LOG_LN2


@jit
def _exp2_nonpositive(y: np.float32, powers: np.ndarray) -> np.float32:
    """2^y for y <= 0, at least -127. NaN gives 2^-127, that is 0; the callers' last factor is x."""
    if not y > EXP2_LOWEST:
        y = EXP2_LOWEST
    n = (y + GRID11) - GRID11
    power = power_on_grid(n, powers)
    return fma(power, (y - n) * LN2, power)


@jit
def _product(x: np.float32, y: np.float32, powers: np.ndarray) -> np.float32:
    """x sigmoid(z), given y = -|z| / ln 2 and that z has the sign of x."""
    e = _exp2_nonpositive(y, powers)
    r = ONE / (ONE + e)
    return (x * (e if x < ZERO else ONE)) * r


@jit
def _derivative(x: np.float32, y: np.float32, slope: np.float32, powers: np.ndarray) -> np.float32:
    """s + x s (1 - s) z', s = sigmoid(z): s is r or h by the sign of x, and 1 - s is the other one."""
    e = _exp2_nonpositive(y, powers)
    r = ONE / (ONE + e)
    h = e * r
    return fma((r * h) * slope, x, h if x < ZERO else r)


@jit
def gelu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """GELU (tanh form) of an fp32 value."""
    return _product(x, -abs(x) * fma(x * x, GELU3_LOG2E, GELU1_LOG2E), powers)


@jit
def dgelu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """Derivative of GELU (tanh form) at an fp32 value."""
    square = x * x
    if not square < SQUARE_LIMIT:
        square = SQUARE_LIMIT
    y = -abs(x) * fma(square, GELU3_LOG2E, GELU1_LOG2E)
    return _derivative(x, y, fma(square, GELU_SLOPE, GELU1), powers)


@jit
def silu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """SiLU of an fp32 value."""
    return _product(x, abs(x) * -LOG2E, powers)


@jit
def dsilu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """Derivative of SiLU at an fp32 value."""
    return _derivative(x, abs(x) * -LOG2E, ONE, powers)


@jit
def qgelu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """x sigmoid(1.702 x) of an fp32 value."""
    return _product(x, abs(x) * -QGELU_LOG2E, powers)


@jit
def dqgelu_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """Derivative of `qgelu_scalar`."""
    return _derivative(x, abs(x) * -QGELU_LOG2E, QGELU, powers)


@jit
def sigmoid_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """1 / (1 + e^-x) of an fp32 value."""
    if x != x:
        return x
    e = _exp2_nonpositive(abs(x) * -LOG2E, powers)
    r = ONE / (ONE + e)
    return e * r if x < ZERO else r


@jit
def dsigmoid_scalar(x: np.float32, powers: np.ndarray) -> np.float32:
    """s (1 - s) of s = sigmoid(x)."""
    if x != x:
        return x
    e = _exp2_nonpositive(abs(x) * -LOG2E, powers)
    r = ONE / (ONE + e)
    return r * (e * r)


SCALARS: dict[str, Any] = {
    "exp": exp_scalar,
    "exp2_grid": exp2_grid_scalar,
    "rsqrt": rsqrt_scalar,
    "log": log_scalar,
    "gelu": gelu_scalar,
    "dgelu": dgelu_scalar,
    "silu": silu_scalar,
    "dsilu": dsilu_scalar,
}


# Without fast forms of a 16-bit value, and without a recording: their operations are those of gelu's and silu's.
SIGMOIDS: dict[str, Any] = {
    "sigmoid": sigmoid_scalar,
    "dsigmoid": dsigmoid_scalar,
    "qgelu": qgelu_scalar,
    "dqgelu": dqgelu_scalar,
}


@cache
def _loop(name: str) -> Callable[[np.ndarray, np.ndarray, np.ndarray], None]:
    scalar = SCALARS.get(name) or SIGMOIDS[name]

    @jit
    def loop(x: np.ndarray, out: np.ndarray, powers: np.ndarray) -> None:
        for i in range(x.size):
            out[i] = scalar(x[i], powers)

    return loop


@jit
def _swish_loop(
    x: np.ndarray, out: np.ndarray, alpha: np.float32, in_powers: np.float32, slope: bool, powers: np.ndarray
) -> None:
    for i in range(x.size):
        y = abs(x[i]) * -in_powers
        out[i] = _derivative(x[i], y, alpha, powers) if slope else _product(x[i], y, powers)


def alpha_log2e(alpha: float) -> np.float32:
    """alpha · log2 e, multiplied in float64 and rounded once."""
    return np.float32(alpha * math.log2(math.e))


def _swish(x: torch.Tensor, alpha: float, derivative: bool) -> torch.Tensor:
    check_denormals()
    flat = x.detach().float().contiguous().view(-1).numpy()
    out = np.empty_like(flat)
    _swish_loop(flat, out, np.float32(alpha), alpha_log2e(alpha), derivative, powers_of_two())
    return torch.from_numpy(out).view(x.shape)


def evaluate(name: str, x: np.ndarray) -> np.ndarray:
    """The fp32 form of function `name` (a key of `SCALARS` or `SIGMOIDS`), over a flat contiguous fp32 array.

    Raises:
        RuntimeError: subnormal numbers are flushed to zero.
    """
    check_denormals()
    out = np.empty_like(x)
    _loop(name)(x, out, powers_of_two())
    return out


def _fp32(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: x.dtype is {x.dtype}; the function is defined for torch.float32.")
    flat = x.detach().contiguous().view(-1).numpy()
    return torch.from_numpy(evaluate(name, flat)).view(x.shape)


def _activation(name: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return _fp32(name, x)
    kinds = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if x.dtype not in kinds:
        raise TypeError(f"{name}: x.dtype is {x.dtype}; the function is defined for bfloat16, float16 and float32.")
    table = _recorded()[f"{name}_{kinds[x.dtype]}"].view(np.float32)
    words = x.detach().contiguous().view(-1).view(torch.int16).numpy().view(np.uint16)
    return torch.from_numpy(table[words]).view(x.shape)


def exp(x: torch.Tensor) -> torch.Tensor:
    """e^x for x <= 0 (and up to 88): softmax's. At most 2.7 ulp; 0 below 2^-126; NaN where x is."""
    return _fp32("exp", x)


def exp2_grid(y: torch.Tensor) -> torch.Tensor:
    """2^y with y rounded to a multiple of 2^-15: a relative error of at most 1.07e-5, in three instructions.

    For probabilities that become bf16 or FP8 next. 0 below 2^-126, inf from 2^128 on, NaN where y is.
    """
    return _fp32("exp2_grid", y)


def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x): an IEEE square root and an IEEE division."""
    return _fp32("rsqrt", x)


def log(x: torch.Tensor) -> torch.Tensor:
    """The natural logarithm, to 0.9 ulp: -inf of a zero, NaN of what is below."""
    return _fp32("log", x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form, x / 2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x³))), in fp32, not rounded further."""
    return _activation("gelu", x)


def dgelu(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `gelu` at x, in fp32."""
    return _activation("dgelu", x)


def silu(x: torch.Tensor) -> torch.Tensor:
    """SiLU, x / (1 + e^-x), in fp32."""
    return _activation("silu", x)


def dsilu(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `silu` at x, in fp32."""
    return _activation("dsilu", x)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + e^-x), in fp32, of fp32, bf16 or fp16 x."""
    return _fp32("sigmoid", x.float())


def dsigmoid(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `sigmoid` at x, in fp32."""
    return _fp32("dsigmoid", x.float())


def qgelu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + e^(-1.702 x)), in fp32, of fp32, bf16 or fp16 x."""
    return _fp32("qgelu", x.float())


def dqgelu(x: torch.Tensor) -> torch.Tensor:
    """The derivative of `qgelu` at x, in fp32."""
    return _fp32("dqgelu", x.float())


def swish(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """x / (1 + e^(-alpha x)), alpha from 1e-30 to 1e30, in fp32, of fp32, bf16 or fp16 x; `qgelu` has alpha 1.702."""
    return _swish(x, alpha, derivative=False)


def dswish(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """The derivative of `swish` at x, in fp32."""
    return _swish(x, alpha, derivative=True)
