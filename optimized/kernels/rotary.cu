// Rotary position embedding, forward and backward. Definition: reference/ops/rotary.py.
//
// x, out [s, b, h, d], any strides with d contiguous; freqs [positions, d2] fp32. A block does one position: it computes
// the sines and cosines of its angles once, in float64, and turns every head with them.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), VECTOR (1: heads, halves and lines at multiples of 16 bytes).
#include "wide.cuh"
#include "wide_store.cuh"

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

// kRun elements of a line from j on, of which those before `end` exist.
template <int kRun>
__device__ __forceinline__ void load_run(float (&v)[kRun], const wide_t* line, int j, int end) {
#if VECTOR
    const uint4 words = *reinterpret_cast<const uint4*>(line + j);
    const Vector<LANES> vector{{words.x, words.y, words.z, words.w}};
#pragma unroll
    for (int i = 0; i < kRun; i++) v[i] = widen(vector, i);
#else
#pragma unroll
    for (int i = 0; i < kRun; i++) v[i] = j + i < end ? widen(line[j + i]) : 0.0f;
#endif
}

template <int kRun>
__device__ __forceinline__ void store_run(wide_t* line, const float (&v)[kRun], int j, int end) {
#if VECTOR
    store_vector(line + j, v);
#else
#pragma unroll
    for (int i = 0; i < kRun; i++)
        if (j + i < end) line[j + i] = narrow(v[i]);
#endif
}

struct Strides {
    long long s, b, h;  // in elements
};

// Elements from j on of a head, turned: out[j] = x[j] cos f[j] + other[j] sin f[partner]. `sign` is that of the sine.
__device__ __forceinline__ float turned(float own, float other, float cosine, float sine, bool minus) {
    const float product = __fmul_rn(other, sine);
    return minus ? __fmul_rn(own, cosine) - product : __fmul_rn(own, cosine) + product;
}

// The first block of threads fills the table of the position's sines and cosines; then each thread takes runs of kRun
// elements of a head, with the run of their partners.
extern "C" __global__ void __launch_bounds__(256)
    rotary(const wide_t* x, wide_t* out, const float* freqs, const __grid_constant__ Strides from,
           const __grid_constant__ Strides to, int heads, int matrices, int d, int d2, int interleaved, int backward) {
    extern __shared__ SineCosine table[];
    const int position = blockIdx.x, half = d2 / 2;
    for (int j = threadIdx.x; j < d2; j += blockDim.x)
        table[j] = sine_cosine(freqs[static_cast<long long>(position) * d2 + j]);
    __syncthreads();
    x += position * from.s;
    out += position * to.s;

    // Runs of a head: those that are turned (without interleaving, of the lower half, which does the upper, too), then
    // those that are copied. VECTOR 1: all of them whole, and aligned.
    constexpr int kRun = VECTOR ? LANES : 2;
    const int low_runs = interleaved ? (d2 + kRun - 1) / kRun : (half + kRun - 1) / kRun;
    const int runs = low_runs + (d - d2 + kRun - 1) / kRun;
    for (int n = threadIdx.x; n < runs * matrices; n += blockDim.x) {
        const int matrix = n / runs, run = n % runs;
        const wide_t* source = x + matrix / heads * from.b + matrix % heads * from.h;
        wide_t* target = out + matrix / heads * to.b + matrix % heads * to.h;
        float a[kRun], b[kRun];
        if (run >= low_runs) {
            const int j = d2 + (run - low_runs) * kRun;
            load_run(a, source, j, d);
            store_run(target, a, j, d);
            continue;
        }
        const int j = run * kRun;
        if (interleaved) {
            load_run(a, source, j, d2);
#pragma unroll
            for (int i = 0; i < kRun; i++) {
                const SineCosine own = table[j + i < d2 ? j + i : 0], other = table[j + i < d2 ? (j + i) ^ 1 : 0];
                b[i] = turned(a[i], a[i ^ 1], own.cosine, (backward ? other : own).sine, (i % 2 == 0) != backward);
            }
            store_run(target, b, j, d2);
            continue;
        }
        load_run(a, source, j, half);
        load_run(b, source + half, j, half);
#pragma unroll
        for (int i = 0; i < kRun; i++) {
            const int at = j + i < half ? j + i : 0;
            const SineCosine low = table[at], high = table[at + half];
            const float first = turned(a[i], b[i], low.cosine, (backward ? high : low).sine, !backward);
            b[i] = turned(b[i], a[i], high.cosine, (backward ? low : high).sine, backward);
            a[i] = first;
        }
        store_run(target, a, j, half);
        store_run(target + half, b, j, half);
    }
}
