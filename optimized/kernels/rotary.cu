// Rotary position embedding, forward and backward. Definition: reference/ops/rotary.py.
//
// x, out [s, b, h, d], any strides with d contiguous; freqs [positions, d2] fp32. A thread computes sine and cosine of
// the two angles of one pair of dimensions at one position, in float64, and applies them to a run of heads.
// grid: (s, runs of heads).
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16).
#include "wide.cuh"

struct SineCosine {
    float sine, cosine;
};

// Taylor polynomials on [-pi/4, pi/4]. Every operation is one of float64, rounded once, as the reference has them.
__device__ __forceinline__ SineCosine sine_cosine(float angle) {
    const double x = angle;
    if (!(fabs(x) < 2147483648.0)) return {__int_as_float(0x7FFFFFFF), __int_as_float(0x7FFFFFFF)};
    const double n = rint(x * 0.63661977236758134308);
    const double r = (x - n * 1.57079632673412561417e00) - n * 6.07710050650619224932e-11;
    const double z = r * r;
    double sine = 1.0 / 6227020800.0;
    sine = sine * z + -1.0 / 39916800.0;
    sine = sine * z + 1.0 / 362880.0;
    sine = sine * z + -1.0 / 5040.0;
    sine = sine * z + 1.0 / 120.0;
    sine = sine * z + -1.0 / 6.0;
    sine = (sine * z) * r + r;
    double cosine = -1.0 / 87178291200.0;
    cosine = cosine * z + 1.0 / 479001600.0;
    cosine = cosine * z + -1.0 / 3628800.0;
    cosine = cosine * z + 1.0 / 40320.0;
    cosine = cosine * z + -1.0 / 720.0;
    cosine = cosine * z + 1.0 / 24.0;
    cosine = cosine * z + -0.5;
    cosine = cosine * z + 1.0;
    const int quarter = static_cast<int>(static_cast<long long>(n) & 3);
    const double s = quarter % 2 ? cosine : sine, c = quarter % 2 ? sine : cosine;
    return {static_cast<float>(quarter >= 2 ? -s : s), static_cast<float>(quarter == 1 || quarter == 2 ? -c : c)};
}

struct Strides {
    long long s, b, h;  // in elements
};

// Threads beyond the d2 / 2 pairs copy the d - d2 elements that are not turned.
extern "C" __global__ void __launch_bounds__(128)
    rotary(const wide_t* x, wide_t* out, const float* freqs, const __grid_constant__ Strides from,
           const __grid_constant__ Strides to, int heads, int matrices, int d, int d2, int interleaved, int backward,
           int run) {
    const int position = blockIdx.x;
    const int begin = blockIdx.y * run, end = min(begin + run, matrices);
    x += position * from.s;
    out += position * to.s;
    for (int thread = threadIdx.x; thread < d2 / 2 + (d - d2); thread += blockDim.x) {
        if (thread >= d2 / 2) {
            const int j = thread - d2 / 2 + d2;
            for (int n = begin; n < end; n++)
                out[n / heads * to.b + n % heads * to.h + j] = x[n / heads * from.b + n % heads * from.h + j];
            continue;
        }
        const int low = interleaved ? 2 * thread : thread, high = interleaved ? low + 1 : low + d2 / 2;
        const float* angles = freqs + static_cast<long long>(position) * d2;
        SineCosine first = sine_cosine(angles[low]), second = sine_cosine(angles[high]);
        if (backward) {  // the transposed map: sines change their sign and their place
            const float sine = -first.sine;
            first.sine = -second.sine;
            second.sine = sine;
        }
        for (int n = begin; n < end; n++) {
            const wide_t* source = x + n / heads * from.b + n % heads * from.h;
            wide_t* target = out + n / heads * to.b + n % heads * to.h;
            const float a = widen(source[low]), b = widen(source[high]);
            target[low] = narrow(__fmul_rn(a, first.cosine) - __fmul_rn(b, first.sine));
            target[high] = narrow(__fmul_rn(b, second.cosine) + __fmul_rn(a, second.sine));
        }
    }
}
