// Which rows of x are tokens of packed sequences (reference/ops/casts/cast.py): sequence n has lengths[n] rows from
// starts[n] on. A start or a length outside of its range counts as the nearest number inside.
#pragma once

namespace twin {

struct Sequences {
    const int* lengths;
    const int* starts;
    int count;

    // A bit for each of 32 kWords rows from `first` on, of `rows` in all, by a block of threads; rows that do not exist
    // have none. Each thread asks where a sequence lies, so that one load of each is waited for, and no search.
    template <int kWords>
    __device__ __forceinline__ void mark(unsigned (&bits)[kWords], int first, int rows) const {
        for (int n = threadIdx.x; n < kWords; n += blockDim.x) bits[n] = 0;
        __syncthreads();
        for (int n = threadIdx.x; n < count; n += blockDim.x) {
            const int start = min(max(__ldg(starts + n), 0), rows);
            const int length = min(max(__ldg(lengths + n), 0), rows - start);
            const int from = max(start - first, 0), to = min(start + length - first, 32 * kWords);
            for (int word = from / 32; 32 * word < to; word++) {
                const int low = max(from - 32 * word, 0), high = min(to - 32 * word, 32);  // 0 <= low < high
                if (low < high) atomicOr(bits + word, (0xFFFFFFFFu << low) & (0xFFFFFFFFu >> (32 - high)));
            }
        }
        __syncthreads();
    }
};

}  // namespace twin
