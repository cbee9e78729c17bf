"""The tensor core's step on SIMD lanes: compiled, it computes what `model.step_words` computes, for whole tiles.

A tile is one row of A against WIDTH columns of B, four registers of lanes on any CPU (two of 16 bits). For each column
of a step:

    emax  = max over k of (exponent of a[k] + exponent of b[k]), and of C      narrow integers
    scale = 2^(F - emax)
    sum   = trunc(c * scale) + sum over k of trunc(a[k] * b[k] * scale)        exact, in any order
    new c = sum, truncated, * 2^(emax - F)

Every operation is exact, so the lanes give the model's bits: a[k] * b[k] has at most 8 (FP8) or 22 (fp16)
significant bits, scale is a power of two, and sums of truncated terms are integers below 2^20 (FP8) or 2^33 (16 bits:
two sums in int32, added in float64). A product that underflows would be truncated to zero anyway. Where the exponents
of 16-bit numbers leave fp32's range, float64 computes the step.
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

from reference.support.numba_jit import intrinsic, jit

_HOST = binding.get_host_cpu_features()
FLOAT_LANES = 16 if _HOST.get("avx512f") else 8 if _HOST.get("avx2") else 4
FP8_WIDTH = 4 * FLOAT_LANES  # columns of a tile; their int8 exponents fill one register
HALF_WIDTH = FP8_WIDTH // 2  # the same for int16 exponents

FP8_K, HALF_K = 32, 16
FP8_NO_TERM = -64  # two of them are int8's -128; with any exponent of the other operand the sum is below _FP8_ANY_TERM
_FP8_ANY_TERM = -40  # the smallest product of FP8 codes has exponent -28
HALF_NO_TERM = -1000
_HALF_ANY_TERM = -600  # the smallest product of bf16 codes has exponent -252, the largest exponent of one code is 127
_LOWEST = -133  # model.LOWEST_EXPONENT
_FLOAT_LOWEST, _FLOAT_HIGHEST = -100, 126  # with these largest exponents a 16-bit step is exact in fp32 and int32
_KEEP_24 = -1 << 29  # of a float64 word: sign, exponent and 23 fraction bits

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

    def piece(self, vector: Any, number: int) -> Any:
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
        context.make_array(numba_type)(context, builder, value).data if isinstance(numba_type, types.Array) else value
        for numba_type, value in zip(signature.args, args, strict=True)
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
        product = builder.sext(lanes.piece(largest, part), ir.VectorType(_I32, FLOAT_LANES))
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
    largest = _largest_exponent(builder, HALF_WIDTH, HALF_K, _I16, a_exponent, a_at, b_exponent)
    lanes, words, exponents, outside = _Lanes(builder, FLOAT_LANES), [], [], ir.Constant(ir.IntType(FLOAT_LANES), 0)
    for part in range(2):
        word = lanes.load(c, builder.add(c_at, ir.Constant(_I64, part * FLOAT_LANES)), _I32)
        no_c = builder.icmp_signed("==", builder.shl(word, lanes.constant(_I32, 1)), lanes.constant(_I32, 0))
        own = builder.select(no_c, lanes.constant(_I32, _LOWEST), _c_exponent(lanes, word))
        product = builder.sext(lanes.piece(largest, part), word.type)
        no_product = builder.icmp_signed("<", product, lanes.constant(_I32, _HALF_ANY_TERM))
        nothing = builder.and_(no_c, no_product)
        emax = builder.select(nothing, lanes.constant(_I32, 0), lanes.maximum(product, own))
        above = builder.sub(emax, lanes.constant(_I32, _FLOAT_LOWEST))
        far = builder.icmp_unsigned(">", above, lanes.constant(_I32, _FLOAT_HIGHEST - _FLOAT_LOWEST))
        outside = builder.or_(outside, builder.bitcast(far, outside.type))
        words.append(word)
        exponents.append(emax)
    with builder.if_else(builder.icmp_unsigned("!=", outside, ir.Constant(outside.type, 0)), likely=False) as (
        far,
        near,
    ):
        with far:
            _half_in_double(builder, a, a_at, b, c, c_at, words, exponents)
        with near:
            _half_in_float(builder, a, a_at, b, c, c_at, words, exponents)
    return context.get_dummy_value()


def _half_in_float(builder: Any, a: Any, a_at: Any, b: Any, c: Any, c_at: Any, words: Any, exponents: Any) -> None:
    """The step where scale and result are normal fp32 numbers. A product that fp32 rounds is truncated to 0 anyway."""
    lanes = _Lanes(builder, FLOAT_LANES)
    scales = [lanes.power_of_two(builder.sub(lanes.constant(_I32, 25), emax), _F32) for emax in exponents]
    olds = [builder.fmul(builder.bitcast(word, scale.type), scale) for word, scale in zip(words, scales, strict=True)]
    # A term is below 2^27: int32 has room for C and eight of them.
    sums = [[builder.fptosi(old, words[0].type), lanes.constant(_I32, 0)] for old in olds]
    for k in range(HALF_K):
        one = lanes.spread(builder.load(builder.gep(a, [builder.add(a_at, ir.Constant(_I64, k))])))
        for part, scale in enumerate(scales):
            other = lanes.load(b, ir.Constant(_I64, k * HALF_WIDTH + part * FLOAT_LANES), _F32)
            term = builder.fptosi(builder.fmul(builder.fmul(one, other), scale), words[0].type)
            sums[part][k % 2] = builder.add(sums[part][k % 2], term)
    doubles, longs = ir.VectorType(_F64, FLOAT_LANES), ir.VectorType(_I64, FLOAT_LANES)
    for part, emax in enumerate(exponents):
        total = builder.fadd(*(builder.sitofp(one, doubles) for one in sums[part]))
        bits = builder.and_(builder.bitcast(total, longs), lanes.constant(_I64, _KEEP_24))
        unit = lanes.power_of_two(builder.sub(emax, lanes.constant(_I32, 25)), _F32)
        result = builder.fmul(builder.fptrunc(builder.bitcast(bits, doubles), unit.type), unit)
        at = builder.add(c_at, ir.Constant(_I64, part * FLOAT_LANES))
        lanes.store(builder.bitcast(result, words[0].type), c, at)


def _half_in_double(builder: Any, a: Any, a_at: Any, b: Any, c: Any, c_at: Any, words: Any, exponents: Any) -> None:
    """The step for any exponents, fp32's subnormals and infinity among the results: rare."""
    lanes = _Lanes(builder, FLOAT_LANES)
    doubles, longs = ir.VectorType(_F64, FLOAT_LANES), ir.VectorType(_I64, FLOAT_LANES)
    floats = ir.VectorType(_F32, FLOAT_LANES)
    trunc = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(doubles, [doubles]), f"llvm.trunc.v{FLOAT_LANES}f64"
    )
    for part, word in enumerate(words):
        emax = builder.sext(lanes.maximum(exponents[part], lanes.constant(_I32, _LOWEST)), longs)
        scale = lanes.power_of_two(builder.sub(lanes.constant(_I64, 25), emax), _F64)
        old = builder.fpext(builder.bitcast(word, floats), doubles)
        # + 0.0 turns -0 into +0; a zero sum then stays +0 with the terms added below.
        total = builder.fadd(builder.call(trunc, [builder.fmul(old, scale)]), lanes.constant(_F64, 0.0))
        for k in range(HALF_K):
            one = lanes.spread(builder.load(builder.gep(a, [builder.add(a_at, ir.Constant(_I64, k))])))
            other = lanes.load(b, ir.Constant(_I64, k * HALF_WIDTH + part * FLOAT_LANES), _F32)
            product = builder.fmul(builder.fpext(one, doubles), builder.fpext(other, doubles))
            total = builder.fadd(total, builder.call(trunc, [builder.fmul(product, scale)]))
        bits = builder.and_(builder.bitcast(total, longs), lanes.constant(_I64, _KEEP_24))
        # In units of 2^-149, so that truncation puts results below 2^-126 on fp32's grid. The conversion is exact,
        # but a sum of 2^128 or more becomes an infinity. An infinite C passes through all of this unchanged.
        shift = lanes.power_of_two(builder.add(emax, lanes.constant(_I64, 149 - 25)), _F64)
        value = builder.call(trunc, [builder.fmul(builder.bitcast(bits, doubles), shift)])
        value = builder.fmul(builder.fadd(value, lanes.constant(_F64, 0.0)), lanes.constant(_F64, 2.0**-149))
        result = builder.bitcast(builder.fptrunc(value, floats), word.type)
        lanes.store(result, c, builder.add(c_at, ir.Constant(_I64, part * FLOAT_LANES)))


@intrinsic
def _step(typingctx, a, a_exponent, a_at, b, b_exponent, c, c_at):  # type: ignore[no-untyped-def]
    """The step of the operands: FP8's exponents are int8, those of 16 bits int16."""
    emit = _emit_fp8_step if a_exponent.dtype == types.int8 else _emit_half_step
    return types.void(a, a_exponent, a_at, b, b_exponent, c, c_at), emit


@intrinsic
def _constants(typingctx, exponents):  # type: ignore[no-untyped-def]
    """K of a step, columns of a tile and the exponent of no term, known at compile time so that loops unroll."""
    found = (FP8_K, FP8_WIDTH, FP8_NO_TERM) if exponents.dtype == types.int8 else (HALF_K, HALF_WIDTH, HALF_NO_TERM)
    numba_type = types.UniTuple(types.intp, 3)
    return numba_type(exponents), lambda context, builder, *_: context.get_constant_generic(builder, numba_type, found)


@jit
def pack(codes, values, exponents, first, last, step_k, to_values, to_exponents):  # type: ignore[no-untyped-def]
    """Rows `first` to `last` of codes [H, M, K] through the tables into [H, steps, M, step_k] (flat)."""
    matrices, rows, depth = codes.shape
    steps = (depth + step_k - 1) // step_k
    for matrix in range(matrices):
        for row in range(first, last):
            for step in range(steps):
                part = codes[matrix][row][step * step_k : (step + 1) * step_k]
                at = ((matrix * steps + step) * rows + row) * step_k
                into, into_exponents = to_values[at : at + step_k], to_exponents[at : at + step_k]
                for k in range(part.size):
                    into[k] = values[part[k]]
                    into_exponents[k] = exponents[part[k]]


@jit
def tiles(a, a_exponent, codes, values, exponents, matrices, rows, columns, split_steps, out):  # type: ignore[no-untyped-def]
    """Add packed a (see `pack`) times codes [H, N, K] to out[matrices, rows, columns]; each of these is (first, last).

    The chain starts from what `out` holds. split_steps > 0 (FP8): it starts from zero; after so many steps the chain is
    added to the output and starts again from zero.
    """
    step_k, width, no_term = _constants(exponents)
    depth = codes.shape[2]
    steps = (depth + step_k - 1) // step_k
    height = rows[1] - rows[0]
    b = np.empty((step_k, width), values.dtype)
    b_exponent = np.empty((step_k, width), exponents.dtype)
    chain = np.empty((height, width), np.float32)
    c = chain.view(np.int32)
    lefts = (columns[1] - columns[0] + width - 1) // width
    for tile in range(matrices[0] * lefts, matrices[1] * lefts):
        matrix, left = tile // lefts, columns[0] + tile % lefts * width
        used = min(width, columns[1] - left)
        chain[:] = np.float32(0)
        if split_steps == 0:
            for row in range(height):
                start, to = out[matrix][rows[0] + row][left : left + used], chain[row]
                for column in range(used):
                    to[column] = start[column]
        for step in range(steps):
            b[:] = 0
            b_exponent[:] = no_term
            for column in range(used):
                part = codes[matrix][left + column][step * step_k : (step + 1) * step_k]
                for k in range(part.size):
                    b[k, column] = values[part[k]]
                    b_exponent[k, column] = exponents[part[k]]
            base = ((matrix * steps + step) * out.shape[1] + rows[0]) * step_k
            for row in range(height):
                _step(a, a_exponent, base + row * step_k, b, b_exponent, c, row * width)
            ends = step == steps - 1 or (split_steps > 0 and step % split_steps == split_steps - 1)
            if ends:
                for row in range(height):
                    to, found = out[matrix][rows[0] + row][left : left + used], chain[row]
                    for column in range(used):
                        to[column] = to[column] + found[column] if split_steps > 0 else found[column]
                chain[:] = np.float32(0)
