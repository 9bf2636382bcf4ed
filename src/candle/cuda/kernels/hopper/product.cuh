// Products of few rows with a large weight: y = x w^T, or y += x w^T, where `x` is [rows, inputs], `w` [outputs, inputs] and `y`
// [rows, outputs]. The weight is read once and sets the time, so everything here serves to keep its copies going.
//
// A block has 64 * WARPGROUPS outputs and N rows, as a tile of y^T: a warpgroup multiplies 64 rows of `w` with N rows of `x`,
// those beyond `rows` being zero. One more warp asks for the tiles. Parts of the inputs are shared out over the blocks of a
// cluster, each of which adds up the sums of some rows, in order. A weight so small that its outputs leave the GPU idle is
// read by several blocks, for N rows each.
//
// The weight's first tiles are asked for before the kernels ahead are done.
#pragma once

#include "hopper.cuh"

// Columns of a tile: 128 bytes.
constexpr int COLUMNS = 64;
constexpr int STEP = 16;

template <typename T, int N> struct Multiply;

#define D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)
#define R10(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7, %" #t "8, %" #t "9"
#define R0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9"

// d = x w^T or d += x w^T for 16 columns.
#define MULTIPLY(T, N, REGISTERS, OPERANDS, A, B, ADD)                                                                 \
    template <> struct Multiply<T, N> {                                                                                \
        static __device__ __forceinline__ void run(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {               \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #ADD ", 0;\n"                                            \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" REGISTERS "}, %" #A ", %" #B \
                         ", p, 1, 1, 0, 0;\n}"                                                                         \
                         : OPERANDS                                                                                    \
                         : "l"(a), "l"(b), "r"(add));                                                                  \
        }                                                                                                              \
    };
#define MULTIPLIES(T)                                                                                                  \
    MULTIPLY(T, 8, "%0, %1, %2, %3", D4(0), 4, 5, 6)                                                                   \
    MULTIPLY(T, 24, R0 ", %10, %11", D4(0) COMMA D4(4) COMMA D4(8), 12, 13, 14)                                        \
    MULTIPLY(T, 40, R0 ", " R10(1), D16(0) COMMA D4(16), 20, 21, 22)                                                   \
    MULTIPLY(T, 72, R0 ", " R10(1) ", " R10(2) ", %30, %31, %32, %33, %34, %35", D16(0) COMMA D16(16) COMMA D4(32),    \
             36, 37, 38)                                                                                               \
    MULTIPLY(T, 136,                                                                                                   \
             R0 ", " R10(1) ", " R10(2) ", " R10(3) ", " R10(4) ", " R10(5) ", %60, %61, %62, %63, %64, %65, %66, %67", \
             D64(0) COMMA D4(64), 68, 69, 70)                                                                          \
    MULTIPLY(T, 256,                                                                                                   \
             R0 ", " R10(1) ", " R10(2) ", " R10(3) ", " R10(4) ", " R10(5) ", " R10(6) ", " R10(7) ", " R10(8) ", " R10( \
                 9) ", " R10(10) ", " R10(11) ", %120, %121, %122, %123, %124, %125, %126, %127",                      \
             D64(0) COMMA D64(64), 128, 129, 130)
#define COMMA ,

MULTIPLIES(bf16)
MULTIPLIES(f16)

// What becomes of the sums. GATED: outputs are eight gates, eight ups and so on; `y` is [rows, outputs / 2] of silu(gate) * up,
// both rounded before as if they had been written.
enum Output { AS_ELEMENTS, AS_F32, ADDED_TO_F32, GATED };

__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Adds in the L2 cache, so that nothing waits for what was there. Each place is added to once.
__device__ __forceinline__ void add_to(float *p, float x) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
__device__ __forceinline__ void add_to(float *p, float4 x) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x.x), "f"(x.y), "f"(x.z),
                 "f"(x.w)
                 : "memory");
}

template <typename T> __device__ __forceinline__ float gated(float gate, float up) {
    return to_f32(silu_mul(from_f32<T>(gate), from_f32<T>(up)));
}

// Blocks of a cluster at most.
constexpr int MAX_SPLITS = 6;

// Adds up what the blocks of the cluster have in some places. All is on its way before the first is needed.
template <int COUNT>
__device__ __forceinline__ void add_up(float4 (&sums)[COUNT], const float *(&at)[COUNT], int splits) {
    float4 parts[MAX_SPLITS][COUNT];
#pragma unroll
    for (int split = 0; split < MAX_SPLITS; ++split)
        if (split < splits)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                parts[split][n] = load_remote(at[n], split);
#pragma unroll
    for (int split = 0; split < MAX_SPLITS; ++split)
        if (split < splits)
#pragma unroll
            for (int n = 0; n < COUNT; ++n)
                sums[n] = split == 0 ? parts[0][n] : sums[n] + parts[split][n];
}

// Grid (tiles of outputs; splits of the inputs; tiles of rows), in clusters of all splits of a tile.
// Shared memory: 1,024 bytes, and `stages` tiles of `w` and `x` or, if that is more, [N, 64 * WARPGROUPS + 4] floats.
template <typename T, int N, int WARPGROUPS>
__device__ void product(const CUtensorMap &w, const CUtensorMap &x, void *y, int rows, int inputs, int outputs,
                        int stages, int output) {
    constexpr int OUTPUTS = 64 * WARPGROUPS, MAX_STAGES = 16;
    constexpr int W_BYTES = OUTPUTS * COLUMNS * sizeof(T), X_BYTES = N * COLUMNS * sizeof(T);
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES];
    uint8_t *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
    auto w_tile = [&](int stage) { return tiles + stage * (W_BYTES + X_BYTES); };
    auto x_tile = [&](int stage) { return w_tile(stage) + W_BYTES; };

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int splits = gridDim.y, split = blockIdx.y, first_output = blockIdx.x * OUTPUTS;
    int all = (inputs + COLUMNS - 1) / COLUMNS;
    int begin = all * split / splits, count = all * (split + 1) / splits - begin;
    int x_row = blockIdx.z * N;
    bool is_f32 = output == AS_F32 || output == ADDED_TO_F32;
    rows = min(rows - x_row, N);
    y = static_cast<char *>(y) +
        (size_t)x_row * (output == GATED ? outputs / 2 : outputs) * (is_f32 ? sizeof(float) : sizeof(T));

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], WARPGROUPS);
        }
        barriers_ready();
    }
    __syncthreads();

    if (warp == 4 * WARPGROUPS) {
        if (lane == 0) {
            auto ask_w = [&](int i, int stage) {
                barrier_expect(&full[stage], W_BYTES + X_BYTES);
                copy_tile(w_tile(stage), &w, &full[stage], (begin + i) * COLUMNS, first_output, READ_ONCE);
            };
            auto ask_x = [&](int i, int stage) {
                copy_tile(x_tile(stage), &x, &full[stage], (begin + i) * COLUMNS, x_row, READ_AGAIN);
            };
            int ahead = min(stages, count);
            for (int i = 0; i < ahead; ++i)
                ask_w(i, i);
            await_inputs();
            for (int i = 0; i < ahead; ++i)
                ask_x(i, i);
            int stage = 0, parity = 0;
            for (int i = ahead; i < count; ++i) {
                barrier_wait(&empty[stage], parity);
                ask_w(i, stage);
                ask_x(i, stage);
                if (++stage == stages)
                    stage = 0, parity ^= 1;
            }
        }
        __syncwarp();
        // Not before: their blocks would take what this grid needs.
        dependents_may_start();
        if (splits > 1) {
            cluster_barrier();
            cluster_arrive();
            cluster_wait();
        }
        return;
    }

    int group = warp / 4;
    // Of the sums `d[4 n + c]`: the output in the tile, and the row.
    auto of_output = [&](int c) { return group * 64 + warp % 4 * 16 + lane / 4 + c / 2 * 8; };
    auto of_row = [&](int n, int c) { return 8 * n + lane % 4 * 2 + c % 2; };
    float d[N / 2];
    // In `y`, where it is f32; null outside.
    auto in_y = [&](int n, int c) {
        int row = of_row(n, c), column = first_output + of_output(c);
        return row < rows && column < outputs ? static_cast<float *>(y) + (size_t)row * outputs + column : nullptr;
    };
    await_inputs();
    int stage = 0, parity = 0, last = 0;
    for (int i = 0; i < count; ++i) {
        barrier_wait(&full[stage], parity);
        uint64_t a = tile_descriptor(w_tile(stage) + group * (W_BYTES / WARPGROUPS));
        uint64_t b = tile_descriptor(x_tile(stage));
        products_begin();
#pragma unroll
        for (int step = 0; step < COLUMNS / STEP; ++step)
            Multiply<T, N>::run(d, a + step * (STEP * sizeof(T) / 16), b + step * (STEP * sizeof(T) / 16),
                                i + step > 0);
        products_commit();
        products_wait<1>();
        // Products with the tiles before are done.
        if (i > 0 && threadIdx.x % 128 == 0)
            barrier_arrive(&empty[last]);
        last = stage;
        if (++stage == stages)
            stage = 0, parity ^= 1;
    }
    products_wait<0>();
    dependents_may_start();

    auto warpgroups_meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(128 * WARPGROUPS) : "memory"); };
    if (splits == 1 && is_f32) {
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                if (float *to = in_y(n, c)) {
                    if (output == ADDED_TO_F32)
                        add_to(to, d[4 * n + c]);
                    else
                        *to = d[4 * n + c];
                }
        return;
    }
    // What follows takes the place of the tiles: all warpgroups are done with them.
    warpgroups_meet();
    if (splits == 1) {
        // Elements, by rows: a gate and its up are sums of one thread.
        bool pairs = output == GATED;
        int tile_elements = pairs ? OUTPUTS / 2 : OUTPUTS, stride = tile_elements + 8;
        int first = pairs ? first_output / 2 : first_output, size = pairs ? outputs / 2 : outputs;
        T *elements = reinterpret_cast<T *>(tiles);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                int at = of_row(n, c) * stride;
                if (!pairs)
                    elements[at + of_output(c)] = from_f32<T>(d[4 * n + c]);
                else if (c < 2)
                    elements[at + (of_output(c) - lane / 4) / 2 + lane / 4] =
                        from_f32<T>(gated<T>(d[4 * n + c], d[4 * n + c + 2]));
            }
        warpgroups_meet();
        int units = tile_elements / 8;
        for (int i = threadIdx.x; i < rows * units; i += 128 * WARPGROUPS) {
            int row = i / units, column = i % units * 8;
            if (first + column < size)
                *reinterpret_cast<Vec8<T> *>(static_cast<T *>(y) + (size_t)row * size + first + column) =
                    load8(elements + row * stride + column);
        }
        return;
    }

    constexpr int STRIDE = OUTPUTS + 4;
    float *sums = reinterpret_cast<float *>(tiles);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            sums[of_row(n, c) * STRIDE + of_output(c)] = d[4 * n + c];
    cluster_barrier();
    int first_row = rows * split / splits, own_rows = rows * (split + 1) / splits - first_row;
    const float *own = sums + first_row * STRIDE;
    if (output == GATED) {
        constexpr int UNITS = OUTPUTS / 8;
        for (int i = threadIdx.x; i < own_rows * UNITS; i += 128 * WARPGROUPS) {
            int row = i / UNITS, unit = i % UNITS, column = unit / 2 * 16 + unit % 2 * 4;
            if (first_output + column >= outputs)
                continue;
            const float *gate[1] = {own + row * STRIDE + column}, *up[1] = {gate[0] + 8};
            float4 g[1], u[1];
            add_up(g, gate, splits);
            add_up(u, up, splits);
            g[0] = make_float4(gated<T>(g[0].x, u[0].x), gated<T>(g[0].y, u[0].y), gated<T>(g[0].z, u[0].z),
                               gated<T>(g[0].w, u[0].w));
            store4(static_cast<T *>(y) + ((size_t)(first_row + row) * outputs + first_output) / 2 + unit * 4, g[0]);
        }
    } else {
        // As many at once as leave registers to the kernels around.
        constexpr int UNITS = OUTPUTS / 4, BATCH = WARPGROUPS < 3 ? 2 : 1;
        for (int start = threadIdx.x; start < own_rows * UNITS; start += BATCH * 128 * WARPGROUPS) {
            const float *at[BATCH];
            size_t to[BATCH];
            bool valid[BATCH];
            float4 sum[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                int i = start + b * 128 * WARPGROUPS, row = i / UNITS, column = i % UNITS * 4;
                valid[b] = row < own_rows && first_output + column < outputs;
                at[b] = valid[b] ? own + row * STRIDE + column : own;
                to[b] = (size_t)(first_row + row) * outputs + first_output + column;
            }
            add_up(sum, at, splits);
#pragma unroll
            for (int b = 0; b < BATCH; ++b)
                if (valid[b] && output == AS_ELEMENTS)
                    store4(static_cast<T *>(y) + to[b], sum[b]);
                else if (valid[b] && output == ADDED_TO_F32)
                    add_to(static_cast<float *>(y) + to[b], sum[b]);
                else if (valid[b])
                    store4(static_cast<float *>(y) + to[b], sum[b]);
        }
    }
    // Others may still read here.
    cluster_arrive();
    cluster_wait();
}

// Blocks that registers have to suffice for: the next product's come in while this one's finish.
constexpr int blocks_at_once(int n, int warpgroups) { return n * warpgroups > 272 ? 1 : warpgroups == 1 ? 4 : 2; }

#define PRODUCT(T, N, WARPGROUPS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS + 32, blocks_at_once(N, WARPGROUPS))                 \
        product_##N##_##WARPGROUPS##_##T(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, \
                                         void *y, int rows, int inputs, int outputs, int stages, int output) {         \
        product<T, N, WARPGROUPS>(w, x, y, rows, inputs, outputs, stages, output);                                     \
    }
#define PRODUCTS(T)                                                                                                    \
    PRODUCT(T, 8, 1)                                                                                                   \
    PRODUCT(T, 8, 2)                                                                                                   \
    PRODUCT(T, 8, 3)                                                                                                   \
    PRODUCT(T, 24, 1)                                                                                                  \
    PRODUCT(T, 24, 2)                                                                                                  \
    PRODUCT(T, 24, 3)                                                                                                  \
    PRODUCT(T, 40, 1)                                                                                                  \
    PRODUCT(T, 40, 2)                                                                                                  \
    PRODUCT(T, 40, 3)                                                                                                  \
    PRODUCT(T, 72, 1)                                                                                                  \
    PRODUCT(T, 72, 2)                                                                                                  \
    PRODUCT(T, 72, 3)                                                                                                  \
    PRODUCT(T, 136, 2)                                                                                                 \
    PRODUCT(T, 136, 3)                                                                                                 \
    PRODUCT(T, 256, 2)
