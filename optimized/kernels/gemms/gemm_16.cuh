// The types of gemm.cu, the 16-bit GEMM.
#pragma once

#include "gemm_mainloop.cuh"
#include "common/transpose.cuh"
#include "ptx/grid.cuh"

namespace twin {

// What follows from a configuration (gemm.cu): tiles, stages, and what each role of a block does.
template <class Config>
struct Gemm16 {
    using Format = typename Config::Format;
    using Out = typename Config::Out;
    static constexpr int kBlockM = 64 * Config::kWarpgroups;
    static constexpr int kBlockN = Config::kBlockN;
    static constexpr int kBlockK = 64;
    static constexpr int kNarrow = Config::kNarrow;
    static constexpr int kAcc = kBlockN / 2;
    static constexpr int kChunkBytes = 64 * kStageRowBytes;  // 64 rows of a K-major operand, or an MN-major chunk
    static constexpr bool kFP32 = same_type<Out, FP32>;
    using Map = SharedMap<Config::kWarpgroups, kBlockN, Config::kStages, Config::kCluster>;
    using Tiles = Schedule<kBlockM, kBlockN, Config::kCluster, kNarrow>;

    // One operand's part of a stage: `rows` rows of M or N from `row`, 64 values of K from `k`. kShared: for all blocks
    // of the cluster.
    template <bool kTransposed, bool kShared>
    static __device__ __forceinline__ void load_operand(unsigned destination, const CUtensorMap* map, unsigned full,
                                                        int row, int k, int rows) {
        for (int c = 0; c < (kTransposed ? rows / 64 : 1); c++) {
            const int x = kTransposed ? row + 64 * c : k, y = kTransposed ? k : row;
            if constexpr (kShared)
                tma_load_2d_multicast(destination + c * kChunkBytes, map, full, (1 << Config::kCluster) - 1, x, y);
            else
                tma_load_2d(destination + c * kChunkBytes, map, full, x, y);
        }
    }

    // kEarly: the first stages' B is copied before the grid before has ended; A's box has a_rows rows, those that exist.
    static __device__ __forceinline__ void produce(const CUtensorMap* a_map, const CUtensorMap* b_map, unsigned shared,
                                                   const Tiles& tiles, int k_blocks, int a_rows = kBlockM) {
        constexpr int kShare = kBlockN / Config::kCluster;  // rows of B that this block copies
        const int first = tiles.rank * kShare;
        typename Map::Ring ring(shared + Map::kBarriers);
        int ahead = 0;  // k-blocks whose B is on its way
        if constexpr (Config::kEarly) {
            static_assert(Config::kCluster == 1 && !Config::kTransposeA && !Config::kTransposeB, "few rows of A");
            const Tile tile = tiles[tiles.first()];
            tile_of_stage<Map>(shared, 0) = tile;
            for (; ahead < min(Map::kStages, k_blocks); ahead++) {
                mbarrier_arrive_expect_tx(ring.full(ahead), a_rows * kStageRowBytes + Map::kBBytes);
                load_operand<false, false>(shared + Map::kB + ahead * Map::kBBytes, b_map, ring.full(ahead),
                                           tile.column, ahead * kBlockK, kBlockN);
            }
            wait_for_grid_before();
        }
        for (int index = tiles.first(); index < tiles.count(); index = tiles.next(index)) {
            const Tile tile = tiles[index];
            for (int kb = 0; kb < k_blocks; kb++, ring.advance()) {
                const int stage = ring.stage.index;
                const unsigned full = ring.full();
                const unsigned a = shared + Map::kA + stage * Map::kABytes;
                const unsigned b = shared + Map::kB + stage * Map::kBBytes + first * kStageRowBytes;
                if constexpr (Config::kEarly) {
                    if (ahead > 0) {
                        load_operand<false, false>(a, a_map, full, tile.row, kb * kBlockK, kBlockM);
                        ahead--;
                        continue;
                    }
                }
                ring.wait_empty();
                if (kb == 0) tile_of_stage<Map>(shared, stage) = tile;
                ring.expect((Config::kEarly ? a_rows * kStageRowBytes : Map::kABytes) + Map::kBBytes);
                load_operand<Config::kTransposeA, false>(a, a_map, full, tile.row, kb * kBlockK, kBlockM);
                load_operand<Config::kTransposeB, (Config::kCluster > 1)>(b, b_map, full, tile.column + first,
                                                                          kb * kBlockK, kShare);
            }
        }
    }

    // The four wgmma of a k-block. Sixteen k are 32 bytes of a K-major row, or 16 rows of 128 bytes of a chunk.
    struct Issue {
        unsigned a_base, b_base;  // this warpgroup's rows of A, and B, in stage 0

        __device__ __forceinline__ explicit Issue(unsigned shared)
            : a_base(shared + Map::kA + warpgroup_index() * kChunkBytes), b_base(shared + Map::kB) {}

        template <int kCount>
        __device__ __forceinline__ void operator()(float (&acc)[kCount], int stage, bool first) const {
            const auto a = wgmma_descriptor(a_base + stage * Map::kABytes, kChunkBytes, 1024);
            const auto b = wgmma_descriptor(b_base + stage * Map::kBBytes, kChunkBytes, 1024);
#pragma unroll
            for (int k = 0; k < 4; k++)
                wgmma_k16<Format, Config::kTransposeA, Config::kTransposeB>(
                    acc, a + (Config::kTransposeA ? 128 : 2) * k, b + (Config::kTransposeB ? 128 : 2) * k,
                    !first || k > 0);
        }
    };

    // In place: acc -> fp32(stored + acc), for kCount accumulators from `first`.
    template <int kCount>
    static __device__ __forceinline__ void add_stored_pairs(float (&acc)[kAcc], const Destination& to, int first) {
#pragma unroll
        for (int i = first; i < first + kCount; i++) {
            const int h = i / 2 % 2, c = i / 4 * 8 + i % 2;
            if (to.valid[h] && c < to.columns_left) acc[i] = __fadd_rn(stored<Out>(to.pointer[h], c), acc[i]);
        }
    }

    // The tile as words of two values; words[8 g + 4 h + s] is row half h, columns 32 g + 8 q + 2 s of lane q. wgmma
    // gives lane q columns 8 j + 2 q + e: the four lanes of a quad transpose four such blocks (8 shuffles for 16
    // words), so that each owns 8 consecutive columns, 16 bytes.
    static __device__ __forceinline__ void pack_transposed(unsigned (&words)[kAcc / 2], const float (&acc)[kAcc]) {
#pragma unroll
        for (int g = 0; g < kAcc / 16; g++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                unsigned* w = words + 8 * g + 4 * h;
#pragma unroll
                for (int j = 0; j < 4; j++)
                    w[j] = pack<Out>(acc[16 * g + 4 * j + 2 * h], acc[16 * g + 4 * j + 2 * h + 1]);
                transpose_lanes<1>(w[0], w[1], w[2], w[3]);
            }
    }

    // Store, value by value, a packed tile whose rows are no multiple of 16 bytes.
    static __device__ __forceinline__ void store_ragged(const unsigned (&words)[kAcc / 2], const Destination& to) {
#pragma unroll
        for (int i = 0; i < kAcc; i++) {
            const int g = i / 16, h = i / 8 % 2, c = 32 * g + i % 8;
            if (to.valid[h] && c < to.columns_left)
                reinterpret_cast<unsigned short*>(to.pointer[h])[c] =
                    static_cast<unsigned short>(words[i / 2] >> (i % 2 * 16));
        }
    }

    // In parts: accumulating, all loads at once and their guards would not fit the registers.
    static __device__ __forceinline__ void store_fp32_pairs(float (&acc)[kAcc], const Destination& to) {
        constexpr int kPart = 32;
#pragma unroll
        for (int first = 0; first < kAcc; first += kPart) {
            if constexpr (Config::kAccumulate) add_stored_pairs<kPart>(acc, to, first);
#pragma unroll
            for (int i = first; i < first + kPart; i++) {
                const int h = i / 2 % 2, c = i / 4 * 8 + i % 2;
                if (to.valid[h] && c < to.columns_left) reinterpret_cast<float*>(to.pointer[h])[c] = acc[i];
            }
        }
    }

    // Adds the bias, or what the output holds; rounds once; stores. A 16-bit tile waits in registers if its rows are
    // whole vectors.
    struct BiasStore {
        using Loaded = Bias<2, kAcc>;
        static constexpr int kSteps = kStoreSteps<8, kAcc>;

        void* out;
        const void* bias;
        int bias_type, m, n;
        int row, quad;  // the thread's row of a tile, its place in a quad
        Destination to;
        unsigned words[kAcc / 2];
        bool pending;

        __device__ __forceinline__ BiasStore(void* out, const void* bias, int bias_type, int m, int n)
            : out(out), bias(bias), bias_type(bias_type), m(m), n(n), pending(false) {
            const int lane = threadIdx.x % 32;
            quad = lane % 4;
            row = threadIdx.x / 32 * 16 + lane / 4;
        }

        __device__ __forceinline__ void load_ahead(Loaded& loaded, const Tile& tile) const {
            loaded.load(bias, bias_type, tile.column + 2 * quad, n);
        }
        __device__ __forceinline__ void step(int s) const { store_step<8>(words, s, to); }

        __device__ __forceinline__ void take(float (&acc)[kAcc], Loaded& loaded, const Tile& tile) {
            loaded.add(acc);
            to = destination<kFP32 ? 4 : 2>(out, tile.row + row, tile.column + 2 * quad, m, n, tile.end);
            if constexpr (kFP32) {
                store_fp32_pairs(acc, to);
            } else {
                if constexpr (Config::kAccumulate) add_stored_pairs<kAcc>(acc, to, 0);
                pack_transposed(words, acc);
                to = destination<2>(out, tile.row + row, tile.column + 8 * quad, m, n, tile.end);
                pending = n % 8 == 0;
                if (!pending) store_ragged(words, to);
            }
        }

        __device__ __forceinline__ void finish() const {
            if (pending) store_packed_tile<8>(words, to);
        }
    };

    // A persistent block.
    static __device__ __forceinline__ void run(unsigned shared, const CUtensorMap& a_map, const CUtensorMap& b_map,
                                               void* out, const void* bias, int bias_type, int m, int n, int k,
                                               int tile_count) {
        const Tiles tiles(m, n, tile_count);
        const int k_blocks = (k + kBlockK - 1) / kBlockK;
        if constexpr (Config::kEarly) let_next_grid_start();
        const auto producing = [&] { produce(&a_map, &b_map, shared, tiles, k_blocks, m); };
        const auto consuming = [&] {
            BiasStore epilogue(out, bias, bias_type, m, n);
            FastMainloop<Map, Issue, kNarrow> mainloop(shared, k_blocks);
            consume<kAcc>(mainloop, epilogue);
        };
        // Accumulating tiles do without elect_one: with it, ptxas lacks registers (C7511).
        run_block<Map, 232, 40, !Config::kAccumulate>(shared, a_map, b_map, producing, consuming);
    }
};

}  // namespace twin
