// One tensor-core step at a time, for recording: D = A * B^T + C with raw wgmma, chained over K.
//
//   a [T, 64, depth] codes   b [T, 8, depth] codes   c, d [T, 64, 8] fp32
//   grid T, block 128 (one warpgroup). depth is a multiple of the instruction's K.
//
// Both operands come from shared memory in the layout without swizzle: core matrices of 8 rows by 16
// bytes, 128 bytes each. zero_first = 1 runs the first step with scale-d = 0 (C not read).

using uint8_t = unsigned char;  // NVRTC has no <cstdint> of its own
using uint64_t = unsigned long long;

constexpr int kRows = 64, kColumns = 8, kStepBytes = 32;

__device__ uint64_t descriptor(const void* shared, int leading_bytes, int stride_bytes) {
  const uint64_t address = static_cast<uint64_t>(__cvta_generic_to_shared(shared));
  return ((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<uint64_t>(stride_bytes >> 4) << 32);
}

#define WGMMA(shape, tail)                                                                       \
  asm volatile(                                                                                  \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %6, 0;\n"                                                \
      "wgmma.mma_async.sync.aligned." shape " {%0, %1, %2, %3}, %4, %5, p, 1, 1" tail ";\n}\n"   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                           \
      : "l"(a), "l"(b), "r"(keep))

template <int kKind>
__device__ void multiply(float (&d)[4], uint64_t a, uint64_t b, int keep) {
  if constexpr (kKind == 0) WGMMA("m64n8k32.f32.e4m3.e4m3", "");
  if constexpr (kKind == 1) WGMMA("m64n8k32.f32.e5m2.e4m3", "");
  if constexpr (kKind == 2) WGMMA("m64n8k32.f32.e4m3.e5m2", "");
  if constexpr (kKind == 3) WGMMA("m64n8k32.f32.e5m2.e5m2", "");
  if constexpr (kKind == 4) WGMMA("m64n8k16.f32.f16.f16", ", 0, 0");
  if constexpr (kKind == 5) WGMMA("m64n8k16.f32.bf16.bf16", ", 0, 0");
}

template <int kKind>
__device__ void run(const uint8_t* a, const uint8_t* b, const float* c, float* d, int depth_bytes, int zero_first) {
  __shared__ alignas(128) uint4 a_tile[2 * kRows];     // [k half][row], 16 bytes each
  __shared__ alignas(128) uint4 b_tile[2 * kColumns];  // [k half][column]
  const int thread = threadIdx.x, tile = blockIdx.x;
  a += static_cast<size_t>(tile) * kRows * depth_bytes;
  b += static_cast<size_t>(tile) * kColumns * depth_bytes;
  const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
  float sum[4];
  for (int i = 0; i < 4; ++i)
    sum[i] = c[tile * kRows * kColumns + (row + i / 2 * 8) * kColumns + column + i % 2];

  for (int step = 0; step * kStepBytes < depth_bytes; ++step) {
    {
      const int half = thread / kRows, r = thread % kRows;
      a_tile[thread] = *reinterpret_cast<const uint4*>(a + static_cast<size_t>(r) * depth_bytes +
                                                       step * kStepBytes + half * 16);
    }
    if (thread < 2 * kColumns) {
      const int half = thread / kColumns, n = thread % kColumns;
      b_tile[thread] = *reinterpret_cast<const uint4*>(b + static_cast<size_t>(n) * depth_bytes +
                                                       step * kStepBytes + half * 16);
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint64_t a_descriptor = descriptor(a_tile, kRows * 16, 128);
    const uint64_t b_descriptor = descriptor(b_tile, kColumns * 16, 128);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply<kKind>(sum, a_descriptor, b_descriptor, !(zero_first && step == 0));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])::"memory");
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i)
    d[tile * kRows * kColumns + (row + i / 2 * 8) * kColumns + column + i % 2] = sum[i];
}

#define KERNEL(name, kind)                                                                                     \
  extern "C" __global__ void __launch_bounds__(128)                                                            \
      name(const uint8_t* a, const uint8_t* b, const float* c, float* d, int depth_bytes, int zero_first) {    \
    run<kind>(a, b, c, d, depth_bytes, zero_first);                                                            \
  }

KERNEL(step_e4m3_e4m3, 0)
KERNEL(step_e5m2_e4m3, 1)
KERNEL(step_e4m3_e5m2, 2)
KERNEL(step_e5m2_e5m2, 3)
KERNEL(step_fp16_fp16, 4)
KERNEL(step_bf16_bf16, 5)
