"""Whole GEMMs on all cores: `gemm_words` gives the words of `model.gemm_words`, some thousand times faster.

The compiled tiles (`kernels`) multiply finite numbers and read NaN and infinity as zeros. The words that depend on one
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

from reference.notice import announced
from reference.tensor_core import model
from reference.workers import each

Codes = NDArray[np.unsignedinteger]
_ROWS = 1024  # rows of C in a task: 64 columns of them fill 256 KB of its core's cache
_SMALL = 1 << 20  # products; below this, starting other threads costs more than it saves
_NONE = np.empty(0, np.intp)
_compiling = threading.RLock()


@functools.cache
def _tables(fmt: model.FloatFormat) -> tuple[NDArray[np.floating], NDArray[np.signedinteger]]:
    """Value and exponent of every code, as `kernels` reads them."""
    from reference.tensor_core import kernels

    bits = 1 + fmt.exponent_bits + fmt.fraction_bits
    number = model.decode(np.arange(1 << bits, dtype=np.uint32), fmt)
    value = np.ldexp(number.significand.astype(np.float32), number.exponent - fmt.fraction_bits)
    value = np.where(number.negative & (value != 0), -value, value)
    nothing = kernels.FP8_NO_TERM if bits == 8 else kernels.HALF_NO_TERM
    exponent = np.where(number.significand != 0, number.exponent, nothing)
    return value, exponent.astype(np.int8 if bits == 8 else np.int16)


@functools.cache
def _compiled(half: bool) -> tuple[Any, Any, int]:
    """(pack, tiles, columns of a tile) for FP8 or 16-bit operands, compiled by a GEMM of one word."""
    text = "preparing the tensor-core model for this CPU (compiled once, then cached) ..."
    with _compiling, announced(text):
        from reference.tensor_core import kernels

        fmt, width = (model.BF16, kernels.HALF_WIDTH) if half else (model.E4M3, kernels.FP8_WIDTH)
        compiled = kernels.pack, kernels.tiles, width
        codes = np.zeros((1, 1), np.uint16 if half else np.uint8)
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
    """a · bᵀ (+ c, of 16-bit operands) by the compiled tiles; NaN and infinity in a and b count as zeros."""
    pack, tiles, width = compiled
    a, a_format, b, b_format, instruction = operands
    (m, depth), n, step_k = a.shape, b.shape[0], instruction.k
    # Tiles are as wide as the registers: the side that needs fewer tiles becomes the columns.
    if -(-m // width) * n < -(-n // width) * m:
        swapped = model.Operands(b, b_format, a, a_format, instruction)
        return np.ascontiguousarray(_finite(swapped, split_steps, compiled, None if c is None else c.T).T)
    out = np.zeros((m, n), np.float32) if c is None else np.array(c, order="C")
    if out.size == 0 or depth == 0:
        return out
    # The code is compiled for one memory layout: contiguous and writable.
    a, b = np.require(a, requirements=["C", "W"]), np.require(b, requirements=["C", "W"])
    (a_values, a_exponents), (b_values, b_exponents) = _tables(a_format), _tables(b_format)
    size = -(-depth // step_k) * step_k * m
    packed = np.zeros(size, a_values.dtype), np.full(size, a_exponents[0])
    small = m * n * depth < _SMALL
    threads = 1 if small else torch.get_num_threads()
    _each(pack, [(a, a_values, a_exponents, *rows, step_k, *packed) for rows in _ranges(m, threads, 1)], small)
    # Rows are cut for the cache, columns for the threads; rows too where there are few columns.
    blocks, pieces = -(-m // _ROWS), 4 * threads if threads > 1 else 1
    if threads > 1 and -(-n // width) * blocks < 2 * threads:
        blocks = min(2 * threads, -(-m // 64))
    columns = _ranges(n, -(-pieces // blocks), width)
    tasks = [
        (*packed, b, b_values, b_exponents, rows, cut, split_steps, out)
        for rows, cut in itertools.product(_ranges(m, blocks, 1), columns)
    ]
    _each(tiles, tasks, small)
    return out


def gemm_words(
    operands: model.Operands, split_k: int | None = None, c: NDArray[np.uint32] | None = None
) -> NDArray[np.uint32]:
    """The words of `model.gemm_words` for the same arguments."""
    a, a_format, b, b_format, instruction = operands
    half = instruction is model.HALF_STEP
    if split_k is not None and (half or split_k % instruction.k):
        raise ValueError(f"split_k is {split_k}: a multiple of {instruction.k} is needed, with FP8 operands.")
    split_steps = 0 if split_k is None else split_k // instruction.k
    a_inf, a_nan = _special_rows(a, a_format)
    b_inf, b_nan = _special_rows(b, b_format)
    if c is not None:
        # With infinities and a start value, which is rare, the model computes everything.
        specials = a_inf.size or b_inf.size or ((c & np.uint32(model.INF_WORD)) == model.INF_WORD).any()
        if specials or not half:
            return model.gemm_words(operands, split_k, c)
    start = None if c is None else c.view(np.float32)
    words = _finite(operands, split_steps, _compiled(half), start).view(np.uint32)
    if a_inf.size or b_inf.size:
        others = np.setdiff1d(np.arange(a.shape[0]), a_inf)
        for rows, columns in ((a_inf, np.arange(b.shape[0])), (others, b_inf)):
            if rows.size and columns.size:
                block = np.ix_(rows, columns)
                words[block] = _with_infinities(words[block], operands._replace(a=a[rows], b=b[columns]))
    words[a_nan] = model.NAN_WORD
    words[:, b_nan] = model.NAN_WORD
    return words


def _special_rows(codes: Codes, fmt: model.FloatFormat) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The rows of codes `[rows, K]` with an infinity, and those with a NaN."""
    magnitude = codes & codes.dtype.type((1 << (fmt.exponent_bits + fmt.fraction_bits)) - 1)
    limit = ((1 << fmt.exponent_bits) - 1) << fmt.fraction_bits  # infinity; what is above is NaN
    if not fmt.has_infinity:
        limit += (1 << fmt.fraction_bits) - 2  # the largest finite code
    if magnitude.max(initial=0) < limit:  # nearly always
        return _NONE, _NONE
    highest = magnitude.max(axis=1, initial=0)
    nan = np.flatnonzero(highest > limit)
    if not fmt.has_infinity or not (highest >= limit).any():
        return _NONE, nan
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
