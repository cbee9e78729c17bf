// Normal numbers from a seed. Definition: reference/ops/random/normal.py, reference/numbers/philox.py.
//
//     values[i] = fp32(mean + std * quantile(52 bits of philox(i, seed)))
//
// values [count] fp32; mean and std arrive as the words of float64. Every operation is one of float64, rounded once.
#include "common/philox.cuh"

using namespace twin;

constexpr int kThreads = 256;
constexpr int kElements = 8;  // of a thread

// AS241, PPND16: numerator and denominator of the quantile's three pieces, highest power first.
__constant__ double kCentre[2][8] = {
    {2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0},
    {5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0}};
__constant__ double kTail[2][8] = {
    {7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0},
    {1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0}};
__constant__ double kFarTail[2][8] = {
    {2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0},
    {2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0}};

__device__ __forceinline__ double ratio(const double (&piece)[2][8], double x) {
    double above = piece[0][0], below = piece[1][0];
#pragma unroll
    for (int i = 1; i < 8; i++) {
        above = above * x + piece[0][i];
        below = below * x + piece[1][i];
    }
    return above / below;
}

// The natural logarithm of a positive normal number.
__device__ __forceinline__ double logarithm(double x) {
    const long long word = __double_as_longlong(x);
    double mantissa = __longlong_as_double((word & 0xFFFFFFFFFFFFFll) | 0x3FF0000000000000ll);
    const bool large = mantissa > 1.4142135623730951;
    if (large) mantissa *= 0.5;
    const double s = (mantissa - 1.0) / (mantissa + 1.0), square = s * s;
    double series = 1.0 / 23.0;
#pragma unroll
    for (int k = 10; k >= 0; k--) series = series * square + 1.0 / (2 * k + 1);
    const double exponent = static_cast<double>((word >> 52) - 1023 + large);
    return exponent * 0.6931471805599453 + 2.0 * (s * series);
}

__device__ __forceinline__ double quantile(double p) {
    const double q = p - 0.5;
    if (fabs(q) <= 0.425) return q * ratio(kCentre, 0.180625 - q * q);
    const double distance = sqrt(-logarithm(fmin(p, 1.0 - p)));
    const double tail = distance > 5.0 ? ratio(kFarTail, distance - 5.0) : ratio(kTail, distance - 1.6);
    return q < 0.0 ? -tail : tail;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    normal(float* values, long long count, unsigned long long seed, long long mean_word, long long std_word) {
    const Generator generator{{static_cast<unsigned>(seed), static_cast<unsigned>(seed >> 32)}, {0, 0}};
    const double mean = __longlong_as_double(mean_word), std = __longlong_as_double(std_word);
    const long long first = static_cast<long long>(blockIdx.x) * kThreads * kElements + threadIdx.x;
#pragma unroll 1
    for (long long i = first; i < first + kThreads * kElements && i < count; i += kThreads) {
        unsigned words[4];
        philox(words, generator, i);
        const unsigned long long bits = static_cast<unsigned long long>(words[0]) << 20 | words[1] >> 12;
        values[i] = static_cast<float>(mean + std * quantile((static_cast<double>(bits) + 0.5) * 0x1p-52));
    }
}
