// One wgmma instruction for the 16 rows of a warp. Arithmetic: reference/numbers/tensor_core/model.py, whose numbered steps are
// these; every operation on doubles below is exact.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine.h"

namespace simulator {

constexpr int kNoTerm = -100000;     // the exponent of a factor that is zero, NaN or infinity
constexpr int kLowestExponent = -133;

struct Code {
    double value;  // 0 for NaN and infinity
    int exponent;
    signed char infinite;  // its sign, or 0
    bool nan, zero;
};

inline std::vector<Code> decoded(int exponent_bits, int fraction_bits, bool has_infinity) {
    const int bits = 1 + exponent_bits + fraction_bits, bias = (1 << (exponent_bits - 1)) - 1;
    std::vector<Code> codes(size_t{1} << bits);
    for (unsigned word = 0; word < codes.size(); word++) {
        const int fraction = word & ((1 << fraction_bits) - 1);
        const int field = word >> fraction_bits & ((1 << exponent_bits) - 1);
        const bool negative = word >> (bits - 1), top = field == (1 << exponent_bits) - 1;
        const bool nan = top && (has_infinity ? fraction != 0 : fraction == (1 << fraction_bits) - 1);
        const bool infinite = has_infinity && top && fraction == 0;
        const int significand = nan || infinite ? 0 : (field > 0 ? 1 << fraction_bits : 0) + fraction;
        const int exponent = std::max(field, 1) - bias;
        const double value = std::ldexp(significand, exponent - fraction_bits);
        codes[word] = {negative ? -value : value, significand != 0 ? exponent : kNoTerm,
                       static_cast<signed char>(infinite ? (negative ? -1 : 1) : 0), nan,
                       significand == 0 && !nan && !infinite};
    }
    return codes;
}

inline const std::vector<Code>& codes_of(Format format) {
    static const std::vector<Code> all[4] = {decoded(4, 3, false), decoded(5, 2, true), decoded(8, 7, true),
                                             decoded(5, 10, true)};
    return all[format];
}

inline double power_of_two(int exponent) {
    const uint64_t word = static_cast<uint64_t>(exponent + 1023) << 52;
    double value;
    memcpy(&value, &word, sizeof value);
    return value;
}

// 5. total * 2^unit, truncated toward zero.
inline float truncated(double total, int unit, int fraction_bits) {
    double value = total * power_of_two(unit);
    if (value == 0) return 0.0f;
    const double smallest = power_of_two(126 + fraction_bits);
    if (std::fabs(value) < power_of_two(-126)) value = std::trunc(value * smallest) / smallest;
    else {
        uint64_t word;
        memcpy(&word, &value, sizeof word);
        word &= ~((uint64_t{1} << (52 - fraction_bits)) - 1);
        memcpy(&value, &word, sizeof value);
    }
    return value == 0 ? 0.0f : static_cast<float>(value);  // beyond fp32's range: infinity
}

struct Matrix {  // rows x k
    int rows, k;
    std::vector<const Code*> codes;
    const Code& at(int row, int i) const { return *codes[row * k + i]; }
};

// d[row][column] += a[row] b[column], row by row of 16.
inline void multiply_rows(const Matrix& a, const Matrix& b, bool half, float (*d)[256]) {
    const int n = b.rows, k = a.k, kept = half ? 25 : 13, result = half ? 23 : 13;
    static thread_local double values[32][256], scale[256], total[256];
    static thread_local int exponents[32][256], largest[256];
    bool special_b = false;
    for (int i = 0; i < k; i++)
        for (int column = 0; column < n; column++) {
            const Code& code = b.at(column, i);
            values[i][column] = code.value;
            exponents[i][column] = code.exponent;
            special_b |= code.nan || code.infinite;
        }
    for (int row = 0; row < 16; row++) {
        bool special = special_b;
        for (int column = 0; column < n; column++) {  // 2.
            const float c = d[row][column];
            special |= !std::isfinite(c);
            largest[column] = c == 0 || !std::isfinite(c) ? kLowestExponent : std::max(std::ilogb(c), -126);
        }
        for (int i = 0; i < k; i++) {
            const Code& code = a.at(row, i);
            special |= code.nan || code.infinite;
            const int exponent = code.exponent;
            if (exponent == kNoTerm) continue;
            for (int column = 0; column < n; column++) {
                const int sum = exponent + exponents[i][column];
                largest[column] = sum > largest[column] ? sum : largest[column];
            }
        }
        for (int column = 0; column < n; column++) {  // 3. and 4.
            if (largest[column] < kLowestExponent) largest[column] = kLowestExponent;
            scale[column] = power_of_two(kept - largest[column]);
            const double c = std::isfinite(d[row][column]) ? d[row][column] : 0.0;
            total[column] = std::trunc(c * scale[column]);
        }
        for (int i = 0; i < k; i++) {
            const double value = a.at(row, i).value;
            if (value == 0) continue;
            for (int column = 0; column < n; column++)
                total[column] += std::trunc(value * values[i][column] * scale[column]);
        }
        for (int column = 0; column < n; column++) {
            const float c = d[row][column];
            float word = truncated(total[column], largest[column] - kept, result);
            if (special) {  // 6.
                bool nan = std::isnan(c), plus = std::isinf(c) && c > 0, minus = std::isinf(c) && c < 0;
                for (int i = 0; i < k; i++) {
                    const Code &x = a.at(row, i), &y = b.at(column, i);
                    nan |= x.nan || y.nan || (x.infinite && y.zero) || (y.infinite && x.zero);
                    if (!x.infinite && !y.infinite) continue;
                    const int sign = (x.infinite ? x.infinite : x.value < 0 ? -1 : 1) *
                                     (y.infinite ? y.infinite : y.value < 0 ? -1 : 1);
                    (sign > 0 ? plus : minus) = true;
                }
                if (plus) word = INFINITY;
                if (minus) word = -INFINITY;
                if (nan || (plus && minus)) {
                    const uint32_t bits = 0x7FFFFFFF;
                    memcpy(&word, &bits, sizeof word);
                }
            }
            d[row][column] = word;
        }
    }
}

}  // namespace simulator
