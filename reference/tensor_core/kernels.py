"""The tensor core's step on SIMD lanes: compiled, it computes what `model.step_words` computes, for whole tiles.

A tile is one row of A against WIDTH columns of B, four registers of lanes on any CPU. For each column of a step:

    emax  = max over k of (exponent of a[k] + exponent of b[k]), and of C      narrow integers
    scale = 2^(F - emax)
    sum   = trunc(c * scale) + sum over k of trunc(a[k] * b[k] * scale)        exact, in any order
    new c = sum, truncated, * 2^(emax - F)

Every operation is exact, so the lanes give the model's bits: a[k] * b[k] has at most 8 (FP8) or 22 (fp16)
significant bits, scale is a power of two, and sums of truncated terms are integers below 2^20 (FP8, in
fp32 and int32) or 2^33 (16 bits, in float64). A product that underflows would be truncated to zero anyway.
The vector code is LLVM IR because numba does not vectorise this loop by itself; without fast-math, LLVM neither
contracts nor reorders any of it.

Operands are tables of values and exponents. Zero, NaN and infinity have the exponent NO_TERM; `fast.gemm_words`
corrects the words of the latter two.
"""

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils

from reference.numba_jit import intrinsic, jit

_HOST = binding.get_host_cpu_features()
FLOAT_LANES = 16 if _HOST.get("avx512f") else 8 if _HOST.get("avx2") else 4
FP8_WIDTH = 4 * FLOAT_LANES  # columns of a tile; their int8 exponents fill one register
HALF_WIDTH = FP8_WIDTH // 2  # the same for float64 lanes and int16 exponents

FP8_K, HALF_K = 32, 16
FP8_NO_TERM = -64  # two of them are int8's -128; with any exponent of the other operand the sum is below _FP8_ANY_TERM
_FP8_ANY_TERM = -40  # the smallest product of FP8 codes has exponent -28
HALF_NO_TERM = -1000
_LOWEST = -133  # model.LOWEST_EXPONENT

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _F64 = ir.FloatType(), ir.DoubleType()


class _Lanes:
    """Emits operations on vectors of `lanes` elements."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.lanes = lanes

    def constant(self, element: Any, value: float) -> Any:
        return ir.Constant(ir.VectorType(element, self.lanes), [value] * self.lanes)

    def load(self, base: Any, index: Any, element: Any) -> Any:
        """`lanes` consecutive elements from base[index] on."""
        pointer = self.builder.gep(base, [index])
        pointer = self.builder.bitcast(pointer, ir.VectorType(element, self.lanes).as_pointer())
        return self.builder.load(pointer, align=max(1, getattr(element, "width", 32) // 8))

    def store(self, value: Any, base: Any, index: Any) -> None:
        """The inverse of `load`, of 32-bit elements."""
        pointer = self.builder.bitcast(self.builder.gep(base, [index]), value.type.as_pointer())
        self.builder.store(value, pointer, align=4)

    def spread(self, scalar: Any) -> Any:
        """A vector of equal elements."""
        one = ir.VectorType(scalar.type, self.lanes)
        single = self.builder.insert_element(ir.Constant(one, ir.Undefined), scalar, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(single, ir.Constant(one, ir.Undefined), zeros)

    def quarter(self, vector: Any, number: int) -> Any:
        """Part `number` of a longer vector: `lanes` elements."""
        picks = [number * self.lanes + lane for lane in range(self.lanes)]
        mask = ir.Constant(ir.VectorType(_I32, self.lanes), picks)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)

    def maximum(self, left: Any, right: Any) -> Any:
        """The larger of signed integers."""
        return self.builder.select(self.builder.icmp_signed(">", left, right), left, right)

    def power_of_two(self, exponent: Any, element: Any) -> Any:
        """2^exponent, for integers as wide as `element` and exponents in the normal range."""
        bias, shift, integer = (127, 23, _I32) if element is _F32 else (1023, 52, _I64)
        field = self.builder.add(exponent, self.constant(integer, bias))
        bits = self.builder.shl(field, self.constant(integer, shift))
        return self.builder.bitcast(bits, ir.VectorType(element, self.lanes))


def _pointers(context: Any, builder: Any, signature: Any, args: Any) -> list[Any]:
    """Data pointers of array arguments; other arguments unchanged."""
    return [
        context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
        for kind, value in zip(signature.args, args, strict=True)
    ]


def _largest_exponent(builder: Any, width: int, depth: int, element: Any, base_a: Any, at: Any, base_b: Any) -> Any:
    """Max over k of exponent_a[at + k] + exponent_b[k * width + column], one lane a column."""
    row = _Lanes(builder, width)
    largest = None
    for k in range(depth):
        one = builder.load(builder.gep(base_a, [builder.add(at, ir.Constant(_I64, k))]))
        total = builder.add(row.spread(one), row.load(base_b, ir.Constant(_I64, k * width), element))
        largest = total if largest is None else row.maximum(largest, total)
    return largest


def _c_exponent(lanes: _Lanes, word: Any) -> Any:
    """The exponent of fp32 words (int32 lanes), -126 for subnormals and zeros."""
    builder = lanes.builder
    field = builder.lshr(builder.and_(word, lanes.constant(_I32, 0x7F800000)), lanes.constant(_I32, 23))
    return builder.sub(lanes.maximum(field, lanes.constant(_I32, 1)), lanes.constant(_I32, 127))


def _emit_fp8_step(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """One FP8 step of one row: c[c_at : c_at + FP8_WIDTH] += a[a_at : a_at + 32] * b[32, FP8_WIDTH]."""
    a, a_exponent, a_at, b, b_exponent, c, c_at = _pointers(context, builder, signature, args)
    lanes = _Lanes(builder, FLOAT_LANES)
    largest = _largest_exponent(builder, FP8_WIDTH, FP8_K, _I8, a_exponent, a_at, b_exponent)
    words, anything, units, scales, sums = [], [], [], [], []
    for part in range(4):
        word = lanes.load(c, builder.add(c_at, ir.Constant(_I64, part * FLOAT_LANES)), _I32)
        product = builder.sext(lanes.quarter(largest, part), ir.VectorType(_I32, FLOAT_LANES))
        anything.append(builder.icmp_signed(">", product, lanes.constant(_I32, _FP8_ANY_TERM)))
        # A zero C counts as exponent -126 here, which is below every product's.
        emax = lanes.maximum(lanes.maximum(product, _c_exponent(lanes, word)), lanes.constant(_I32, -64))
        scale = lanes.power_of_two(builder.sub(lanes.constant(_I32, 13), emax), _F32)
        old = builder.fmul(builder.bitcast(word, scale.type), scale)
        words.append(word)
        units.append(lanes.power_of_two(builder.sub(emax, lanes.constant(_I32, 13)), _F32))
        scales.append(scale)
        sums.append(builder.fptosi(old, word.type))
    for k in range(FP8_K):
        one = lanes.spread(builder.load(builder.gep(a, [builder.add(a_at, ir.Constant(_I64, k))])))
        for part in range(4):
            other = lanes.load(b, ir.Constant(_I64, k * FP8_WIDTH + part * FLOAT_LANES), _F32)
            term = builder.fmul(builder.fmul(one, other), scales[part])
            sums[part] = builder.add(sums[part], builder.fptosi(term, sums[part].type))
    keep = lanes.constant(_I32, 0xFFFFFC00)  # sign, exponent and 13 fraction bits
    zero = lanes.constant(_I32, 0)
    for part in range(4):
        total = builder.bitcast(builder.sitofp(sums[part], scales[part].type), sums[part].type)
        total = builder.bitcast(builder.and_(total, keep), scales[part].type)
        result = builder.bitcast(builder.fmul(total, units[part]), sums[part].type)
        # Without any product the result is C, however small it is, and a zero is +0.
        alone = builder.and_(words[part], keep)
        magnitude = builder.and_(alone, lanes.constant(_I32, 0x7FFFFFFF))
        alone = builder.select(builder.icmp_signed("==", magnitude, zero), zero, alone)
        result = builder.select(anything[part], result, alone)
        lanes.store(result, c, builder.add(c_at, ir.Constant(_I64, part * FLOAT_LANES)))
    return context.get_dummy_value()


def _emit_half_step(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """One 16-bit step of one row: c[c_at : c_at + HALF_WIDTH] += a[a_at : a_at + 16] * b[16, HALF_WIDTH]."""
    a, a_exponent, a_at, b, b_exponent, c, c_at = _pointers(context, builder, signature, args)
    count = FLOAT_LANES // 2
    lanes = _Lanes(builder, count)
    doubles, longs = ir.VectorType(_F64, count), ir.VectorType(_I64, count)
    trunc = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(doubles, [doubles]), f"llvm.trunc.v{count}f64"
    )
    largest = _largest_exponent(builder, HALF_WIDTH, HALF_K, _I16, a_exponent, a_at, b_exponent)
    exponents, scales, sums = [], [], []
    for part in range(4):
        word = lanes.load(c, builder.add(c_at, ir.Constant(_I64, part * count)), _I32)
        none = builder.icmp_signed("==", builder.shl(word, lanes.constant(_I32, 1)), lanes.constant(_I32, 0))
        own = builder.select(none, lanes.constant(_I32, _LOWEST), _c_exponent(lanes, word))
        product = builder.sext(lanes.quarter(largest, part), word.type)
        emax = lanes.maximum(lanes.maximum(product, own), lanes.constant(_I32, _LOWEST))
        emax = builder.sext(emax, longs)
        scale = lanes.power_of_two(builder.sub(lanes.constant(_I64, 25), emax), _F64)
        old = builder.fpext(builder.bitcast(word, ir.VectorType(_F32, count)), doubles)
        exponents.append(emax)
        scales.append(scale)
        # + 0.0 turns -0 into +0; a zero sum then stays +0 with the terms added below.
        old = builder.call(trunc, [builder.fmul(old, scale)])
        sums.append(builder.fadd(old, lanes.constant(_F64, 0.0)))
    for k in range(HALF_K):
        one = lanes.spread(builder.load(builder.gep(a, [builder.add(a_at, ir.Constant(_I64, k))])))
        for part in range(4):
            other = lanes.load(b, ir.Constant(_I64, k * HALF_WIDTH + part * count), _F64)
            term = builder.fmul(builder.fmul(one, other), scales[part])
            sums[part] = builder.fadd(sums[part], builder.call(trunc, [term]))
    for part in range(4):
        bits = builder.and_(builder.bitcast(sums[part], longs), lanes.constant(_I64, -1 << 29))  # 24 bits
        # In units of 2^-149, so that truncation puts results below 2^-126 on fp32's grid. The conversion is exact,
        # but a sum of 2^128 or more becomes an infinity. An infinite C passes through all of this unchanged.
        shift = lanes.power_of_two(builder.add(exponents[part], lanes.constant(_I64, 149 - 25)), _F64)
        value = builder.call(trunc, [builder.fmul(builder.bitcast(bits, doubles), shift)])
        value = builder.fmul(builder.fadd(value, lanes.constant(_F64, 0.0)), lanes.constant(_F64, 2.0**-149))
        result = builder.bitcast(builder.fptrunc(value, ir.VectorType(_F32, count)), ir.VectorType(_I32, count))
        lanes.store(result, c, builder.add(c_at, ir.Constant(_I64, part * count)))
    return context.get_dummy_value()


@intrinsic
def _step(typingctx, a, a_exponent, a_at, b, b_exponent, c, c_at):  # type: ignore[no-untyped-def]
    """The step of the operands' values: fp32 holds those of FP8, float64 those of 16 bits."""
    emit = _emit_fp8_step if a.dtype == types.float32 else _emit_half_step
    return types.void(a, a_exponent, a_at, b, b_exponent, c, c_at), emit


@intrinsic
def _constants(typingctx, values):  # type: ignore[no-untyped-def]
    """K of a step, columns of a tile and the exponent of no term, known at compile time so that loops unroll."""
    found = (FP8_K, FP8_WIDTH, FP8_NO_TERM) if values.dtype == types.float32 else (HALF_K, HALF_WIDTH, HALF_NO_TERM)
    kind = types.UniTuple(types.intp, 3)
    return kind(values), lambda context, builder, *_: context.get_constant_generic(builder, kind, found)


@jit
def pack(codes, values, exponents, first, last, step_k, to_values, to_exponents):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of codes [M, K] through the tables into [steps, M, step_k] (flat)."""
    rows, depth = codes.shape
    for row in range(first, last):
        for step in range((depth + step_k - 1) // step_k):
            at = (step * rows + row) * step_k
            for k in range(min(step_k, depth - step * step_k)):
                code = codes[row, step * step_k + k]
                to_values[at + k] = values[code]
                to_exponents[at + k] = exponents[code]


@jit
def tiles(a, a_exponent, codes, values, exponents, rows, columns, split_steps, out):  # type: ignore[no-untyped-def]
    """Add packed a (see `pack`) times codes [N, K] to out[rows, columns]; rows, columns: (first, last).

    The chain starts from what `out` holds. split_steps > 0 (FP8, `out` zero): after so many steps the chain is added
    to the output and starts again from zero.
    """
    step_k, width, no_term = _constants(values)
    depth = codes.shape[1]
    steps = (depth + step_k - 1) // step_k
    height = rows[1] - rows[0]
    b = np.empty(step_k * width, values.dtype)
    b_exponent = np.empty(step_k * width, exponents.dtype)
    c = np.empty(height * width, np.int32)
    chain = c.view(np.float32)
    total = np.empty(height * width if split_steps > 0 else 0, np.float32)
    for left in range(columns[0], columns[1], width):
        used = min(width, columns[1] - left)
        c[:] = 0
        total[:] = 0
        for row in range(height):
            for column in range(used):
                chain[row * width + column] = out[rows[0] + row, left + column]
        for step in range(steps):
            b[:] = 0
            b_exponent[:] = no_term
            for column in range(used):
                for k in range(min(step_k, depth - step * step_k)):
                    code = codes[left + column, step * step_k + k]
                    b[k * width + column] = values[code]
                    b_exponent[k * width + column] = exponents[code]
            base = (step * out.shape[0] + rows[0]) * step_k
            for row in range(height):
                _step(a, a_exponent, base + row * step_k, b, b_exponent, c, row * width)
            if split_steps > 0 and (step % split_steps == split_steps - 1 or step == steps - 1):
                total += chain
                c[:] = 0
        result = total if split_steps > 0 else chain
        for row in range(height):
            for column in range(used):
                out[rows[0] + row, left + column] = result[row * width + column]
