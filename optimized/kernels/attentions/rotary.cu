// Rotary position embedding, forward and backward. Definition: reference/ops/attentions/rotary.py.
//
// x, out [s, b, h, d], any strides with d contiguous; freqs [positions, d2] fp32. A block takes one position: it
// computes the sines and cosines of its angles once, in float64, and rotates every head by them.
//
// Defines: WIDE (0 fp32, 1 bf16, 2 fp16), VECTOR (1: heads, halves and lines at multiples of 16 bytes), INTERLEAVED.
#include "common/wide.cuh"
#include "common/wide_store.cuh"
#include "rotary_angle.cuh"

using namespace twin;

constexpr int kThreads = 256;
constexpr int kAhead = 4;                  // heads whose loads are in flight
constexpr int kRun = VECTOR ? kLanes : 2;  // elements of a thread

// kRun elements of a line from j on, of which those before `end` exist.
__device__ __forceinline__ Vector<kRun> load_run(const wide_t* line, int j, int end) {
#if VECTOR
    return load_once<kRun>(line + j);
#else
    return load_elements<kRun>(line + j, end - j);
#endif
}

__device__ __forceinline__ void store_run(wide_t* line, const float (&v)[kRun], int j, int end) {
#if VECTOR
    store_vector(line + j, v);
#else
    store_elements(line + j, v, end - j);
#endif
}

struct Strides {
    long long s, b, h;  // in elements
};

// The block fills the table of its position's sines and cosines. Then a thread takes one run of kRun elements, and the
// run of their partners, of every step-th head: their sines and cosines stay in registers. The loads of kAhead heads
// are in flight at a time.
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    rotary(const wide_t* x, wide_t* out, const float* freqs, const __grid_constant__ Strides from,
           const __grid_constant__ Strides to, int heads, int matrices, int d, int d2, int backward) {
    extern __shared__ SineCosine table[];
    const int position = blockIdx.x, half = d2 / 2;
    for (int j = threadIdx.x; j < d2; j += kThreads)
        table[j] = sine_cosine(freqs[static_cast<long long>(position) * d2 + j]);
    __syncthreads();
    x += position * from.s;
    out += position * to.s;

    // A head's runs: first those that are rotated (without interleaving, those of the lower half, each with its
    // partners in the upper half), then those that are copied. VECTOR 1: all are whole and aligned.
    const int low_runs = ((INTERLEAVED ? d2 : half) + kRun - 1) / kRun;
    const int runs = low_runs + (d - d2 + kRun - 1) / kRun;
    const int across = min(runs, kThreads), step = kThreads / across;
    const int start = threadIdx.x / across;
    if (start >= step) return;
    for (int run = threadIdx.x % across; run < runs; run += across) {
        const bool turning = run < low_runs;
        const int j = turning ? run * kRun : d2 + (run - low_runs) * kRun;
        const int end = !turning ? d : INTERLEAVED ? d2 : half;
        // Index 0: the run; 1: its partners, if not interleaved. The backward takes the partner's sine.
        float cosine[2][kRun], sine[2][kRun];
        if (turning) {
#pragma unroll
            for (int i = 0; i < kRun; i++) {
                const int at = j + i < end ? j + i : 0;
                const SineCosine own = table[at], other = table[INTERLEAVED ? at ^ 1 : at + half];
                const bool minus = (INTERLEAVED && i % 2 == 1) == (backward != 0);
                cosine[0][i] = own.cosine, cosine[1][i] = other.cosine;
                sine[0][i] = backward ? other.sine : own.sine;
                sine[1][i] = backward ? -own.sine : other.sine;
                if (minus) sine[0][i] = -sine[0][i];
            }
        }
        int batch = start / heads, head = start % heads;
        for (int first = start; first < matrices; first += kAhead * step) {
            Vector<kRun> a[kAhead], b[kAhead];
            wide_t* target[kAhead];
#pragma unroll
            for (int n = 0; n < kAhead; n++) {
                if (first + n * step >= matrices) break;
                const wide_t* source = x + batch * from.b + head * from.h;
                target[n] = out + batch * to.b + head * to.h;
                a[n] = load_run(source, j, end);
                if (turning && !INTERLEAVED) b[n] = load_run(source + half, j, end);
                for (head += step; head >= heads; head -= heads) batch++;
            }
#pragma unroll
            for (int n = 0; n < kAhead; n++) {
                if (first + n * step >= matrices) break;
                float v[kRun];
#pragma unroll
                for (int i = 0; i < kRun; i++) {
                    const float own = widen(a[n], i), other = INTERLEAVED ? widen(a[n], i ^ 1) : widen(b[n], i);
                    v[i] = turning ? turned(own, other, cosine[0][i], sine[0][i]) : own;
                }
                store_run(target[n], v, j, end);
                if (turning && !INTERLEAVED) {
#pragma unroll
                    for (int i = 0; i < kRun; i++)
                        v[i] = turned(widen(b[n], i), widen(a[n], i), cosine[1][i], sine[1][i]);
                    store_run(target[n] + half, v, j, end);
                }
            }
        }
    }
}
