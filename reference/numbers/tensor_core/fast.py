"""Whole GEMMs on all cores: `gemm_words` gives the words of `model.gemm_words`, some thousand times faster.

The compiled tiles (`simd`) multiply finite numbers and read NaN and infinity as zeros. The words that depend on one
are corrected afterwards: what an infinity does to a sum does not depend on the finite terms.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from reference.numbers.tensor_core import model
from reference.support.notice import announced
from reference.support.workers import each

Codes = NDArray[np.unsignedinteger]
_ROWS = 1024  # rows of C in a task: 64 columns of them fill 256 KB of its core's cache
_SMALL = 1 << 20  # products; below this, starting other threads costs more than it saves
_compiling = threading.RLock()


@functools.cache
def _tables(fmt: model.FloatFormat) -> tuple[NDArray[np.floating], NDArray[np.signedinteger]]:
    """Value and exponent of every code, as `simd` reads them."""
    from reference.numbers.tensor_core import simd

    bits = 1 + fmt.exponent_bits + fmt.fraction_bits
    number = model.decode(np.arange(1 << bits, dtype=np.uint32), fmt)
    value = np.ldexp(number.significand.astype(np.float32), number.exponent - fmt.fraction_bits)
    value = np.where(number.negative & (value != 0), -value, value)
    nothing = simd.FP8_NO_TERM if bits == 8 else simd.HALF_NO_TERM
    exponent = np.where(number.significand != 0, number.exponent, nothing)
    return value, exponent.astype(np.int8 if bits == 8 else np.int16)


@functools.cache
def _compiled(half: bool) -> tuple[Any, Any, int]:
    """(pack, tiles, columns of a tile) for FP8 or 16-bit operands, compiled by a GEMM of one word."""
    text = "preparing the tensor-core model for this CPU (compiled once, then cached) ..."
    with _compiling, announced(text):
        from reference.numbers.tensor_core import simd

        fmt, width = (model.BF16, simd.HALF_WIDTH) if half else (model.E4M3, simd.FP8_WIDTH)
        compiled = simd.pack, simd.tiles, width
        codes = np.zeros((1, 1, 1), np.uint16 if half else np.uint8)
        instruction = model.HALF_STEP if half else model.FP8_STEP
        _finite(model.Operands(codes, fmt, codes, fmt, instruction), 0, compiled)
        return compiled


def _each(function: Callable[..., None], tasks: Sequence[tuple[Any, ...]], small: bool) -> None:
    """Call `function` with every task. Tasks write disjoint words."""
    if small:
        for task in tasks:
            function(*task)
    else:
        each(function, tasks)


def _ranges(count: int, parts: int, multiple: int) -> list[tuple[int, int]]:
    """[0, count) in about `parts` pieces, each but the last a multiple of `multiple` long."""
    length = max(1, -(-count // (parts * multiple))) * multiple
    return [(first, min(first + length, count)) for first in range(0, count, length)]


def _finite(
    operands: model.Operands, split_steps: int, compiled: tuple[Any, Any, int], c: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """a · bᵀ (+ c) of `[H, M, K]` and `[H, N, K]` by the compiled tiles.

    NaN and infinity in a and b count as zeros.
    """
    pack, tiles, width = compiled
    a, a_format, b, b_format, instruction = operands
    (matrices, m, depth), n, step_k = a.shape, b.shape[1], instruction.k
    # Tiles are as wide as the registers: the side that needs fewer tiles becomes the columns.
    if -(-m // width) * n < -(-n // width) * m:
        swapped = model.Operands(b, b_format, a, a_format, instruction)
        start = None if c is None else c.transpose(0, 2, 1)
        return np.ascontiguousarray(_finite(swapped, split_steps, compiled, start).transpose(0, 2, 1))
    out = np.zeros((matrices, m, n), np.float32) if c is None else np.array(c, order="C")
    if out.size == 0 or depth == 0:
        return out
    # The code is compiled for one memory layout: contiguous and writable.
    a, b = np.require(a, requirements=["C", "W"]), np.require(b, requirements=["C", "W"])
    (a_values, a_exponents), (b_values, b_exponents) = _tables(a_format), _tables(b_format)
    size = matrices * -(-depth // step_k) * step_k * m
    packed = np.zeros(size, a_values.dtype), np.full(size, a_exponents[0])
    small = out.size * depth < _SMALL
    threads = 1 if small else torch.get_num_threads()
    _each(pack, [(a, a_values, a_exponents, *rows, step_k, *packed) for rows in _ranges(m, threads, 1)], small)
    # Matrices and columns are cut for the threads, rows for the cache; rows too where there are few columns.
    blocks, pieces = -(-m // _ROWS), -(-4 * threads // matrices) if threads > 1 else 1
    if pieces > 1 and -(-n // width) * blocks < 2 * threads:
        blocks = min(2 * threads, -(-m // 64))
    columns = _ranges(n, -(-pieces // blocks), width)
    tasks = [
        (*packed, b, b_values, b_exponents, some, rows, cut, split_steps, out)
        for some in _ranges(matrices, 4 * threads if threads > 1 else 1, 1)
        for rows, cut in itertools.product(_ranges(m, blocks, 1), columns)
    ]
    _each(tiles, tasks, small)
    return out


def gemm_words(
    operands: model.Operands, split_k: int | None = None, c: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """The words of `model.gemm_words` for the same arguments.

    a `[H, M, K]`, b `[H, N, K]` and c `[H, M, N]` are H products, which give `[H, M, N]`.
    """
    a, a_format, b, b_format, instruction = operands
    half = instruction is model.HALF_STEP
    if split_k is not None and (half or split_k % instruction.k):
        raise ValueError(f"split_k is {split_k}: a multiple of {instruction.k} is needed, with FP8 operands.")
    if a.ndim == 2:
        return gemm_words(operands._replace(a=a[None], b=b[None]), split_k, None if c is None else c[None])[0]
    split_steps = 0 if split_k is None else split_k // instruction.k
    words = _finite(operands, split_steps, _compiled(half), None if c is None else c.view(np.float32)).view(np.uint32)
    special = _special(a, a_format) | _special(b, b_format)
    if c is not None:
        special |= _special(c, model.FP32)
    for one in np.flatnonzero(special):  # nearly never
        start = None if c is None else c[one]
        words[one] = _corrected(words[one], operands._replace(a=a[one], b=b[one]), split_k, start)
    return words


def _corrected(
    finite: NDArray[np.uint32], operands: model.Operands, split_k: int | None, c: NDArray[np.uint32] | None
) -> NDArray[np.uint32]:
    """The words of a · bᵀ (+ c), from those with zeros in place of the NaN and infinities of a and b."""
    a, a_format, b, b_format, _ = operands
    a_inf, a_nan = _special_rows(a, a_format)
    b_inf, b_nan = _special_rows(b, b_format)
    if c is not None and (a_inf.size or b_inf.size or _special(c[None], model.FP32)[0]):
        return model.gemm_words(operands, split_k, c)  # which is rare
    words = finite.copy()
    others = np.setdiff1d(np.arange(a.shape[0]), a_inf)
    for rows, columns in ((a_inf, np.arange(b.shape[0])), (others, b_inf)):
        if rows.size and columns.size:
            block = np.ix_(rows, columns)
            words[block] = _with_infinities(words[block], operands._replace(a=a[rows], b=b[columns]))
    words[a_nan] = model.NAN_WORD
    words[:, b_nan] = model.NAN_WORD
    return words


def _infinity(fmt: model.FloatFormat) -> int:
    """The magnitude of infinity's code; what is above is NaN. Without an infinity, the largest finite code."""
    top = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits
    return top if fmt.has_infinity else top + (1 << fmt.fraction_bits) - 2


def _magnitudes(codes: Codes, fmt: model.FloatFormat) -> Codes:
    return codes & codes.dtype.type((1 << (fmt.exponent_bits + fmt.fraction_bits)) - 1)


def _special(codes: Codes, fmt: model.FloatFormat) -> NDArray[np.bool_]:
    """Which of the matrices `[H, rows, K]` have an infinity or a NaN: `[H]`."""
    magnitude, first = _magnitudes(codes, fmt), _infinity(fmt) + (not fmt.has_infinity)
    if magnitude.max(initial=0) < first:
        return np.zeros(len(codes), np.bool_)
    return magnitude.max(axis=(1, 2), initial=0) >= first


def _special_rows(codes: Codes, fmt: model.FloatFormat) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows of codes `[rows, K]` with an infinity, and those with a NaN."""
    magnitude, limit = _magnitudes(codes, fmt), _infinity(fmt)
    nan = np.flatnonzero(magnitude.max(axis=1, initial=0) > limit)
    if not fmt.has_infinity:
        return np.empty(0, np.intp), nan
    return np.flatnonzero((magnitude == limit).any(axis=1)), nan


def _with_infinities(finite: NDArray[np.uint32], operands: model.Operands) -> NDArray[np.uint32]:
    """The words of a · bᵀ with its infinities, from `finite`, the words with zeros in their place.

    An infinite term decides the sum wherever it is; two of different signs, or one that is multiplied by a zero, give
    NaN. So it is enough to count them, by products of small integers, which are exact.
    """
    left, right = _signs(operands.a, operands.a_format), _signs(operands.b, operands.b_format)

    def count(which: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> NDArray[np.float64]:
        (sign_a, inf_a), (sign_b, inf_b) = map(which, left[:2]), map(which, right[:2])
        return inf_a @ sign_b.T + sign_a @ inf_b.T - inf_a @ inf_b.T

    number, balance = count(np.abs), count(lambda sign: sign)
    plus, minus = number + balance > 0, number - balance > 0
    invalid = np.abs(left[1]) @ right[2].T + left[2] @ np.abs(right[1]).T > 0
    words = np.where(plus, np.uint32(model.INF_WORD), finite)
    words = np.where(minus, np.uint32(model.INF_WORD | 0x80000000), words)
    nan = invalid | (plus & minus)
    # Finite bf16 terms can leave fp32's range too; then it matters which infinity came first.
    late = (plus ^ minus) & ~nan & (finite ^ words == 0x80000000)
    for row in np.flatnonzero(late.any(axis=1)):
        columns = np.flatnonzero(late[row])
        alone = operands._replace(a=operands.a[row : row + 1], b=operands.b[columns])
        words[row, columns] = model.gemm_words(alone)
    return np.where(nan, np.uint32(model.NAN_WORD), words)


def _signs(codes: Codes, fmt: model.FloatFormat) -> tuple[NDArray[np.float64], ...]:
    """Sign of each number (0 for zero and NaN), of each infinity (0 elsewhere), and 1 for each zero."""
    number = model.decode(codes, fmt)
    sign = np.where(number.negative, -1.0, 1.0)
    zero = number.zero()
    return np.where(zero | number.nan, 0.0, sign), np.where(number.inf, sign, 0.0), zero.astype(np.float64)
