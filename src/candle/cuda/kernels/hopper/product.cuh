// Products of few rows with a large weight: y = x w^T, or y += x w^T, where `x` is [rows, inputs], `w` [outputs, inputs] and `y`
// [rows, outputs]. The weight is read once and sets the time, so everything here serves to keep its copies going.
//
// A block has 64 * WARPGROUPS outputs and all rows, as a tile of y^T: a warpgroup multiplies 64 rows of `w` with N rows of
// `x`, those beyond `rows` being zero. One more warp asks for the tiles. Parts of the inputs are shared out over the blocks
// of a cluster. Each sends its sums to the block that adds up their rows, which does so in order.
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

template <typename T> __device__ __forceinline__ float gated(float gate, float up) {
    return to_f32(silu_mul(from_f32<T>(gate), from_f32<T>(up)));
}

// Grid (tiles of outputs; splits of the inputs), in clusters of all splits of a tile.
// Shared memory: 1,024 bytes; `stages` tiles of `w` and `x` or, if that is more, sums, [N, 64 * WARPGROUPS + 4] floats; and
// what other blocks send, [splits - 1, rows / splits rounded up, 64 * WARPGROUPS + 4] floats.
template <typename T, int N, int WARPGROUPS>
__device__ void product(const CUtensorMap &w, const CUtensorMap &x, void *y, int rows, int inputs, int outputs,
                        int stages, int output) {
    constexpr int OUTPUTS = 64 * WARPGROUPS, STRIDE = OUTPUTS + 4, MAX_STAGES = 16;
    constexpr int W_BYTES = OUTPUTS * COLUMNS * sizeof(T), X_BYTES = N * COLUMNS * sizeof(T);
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES], received;
    uint8_t *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
    auto w_tile = [&](int stage) { return tiles + stage * (W_BYTES + X_BYTES); };
    auto x_tile = [&](int stage) { return w_tile(stage) + W_BYTES; };

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int splits = gridDim.y, split = blockIdx.y, first_output = blockIdx.x * OUTPUTS;
    int all = (inputs + COLUMNS - 1) / COLUMNS;
    int begin = all * split / splits, count = all * (split + 1) / splits - begin;
    auto first_row = [&](int split) { return rows * split / splits; };
    int own_row = first_row(split), own_rows = first_row(split + 1) - own_row;
    float *sums = reinterpret_cast<float *>(tiles);
    float *others = sums + max(stages * (W_BYTES + X_BYTES) / 4, N * STRIDE);
    int others_size = (rows + splits - 1) / splits * STRIDE;

    if (threadIdx.x == 0) {
        for (int stage = 0; stage < stages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], WARPGROUPS);
        }
        barrier_init(&received, 1);
        barriers_ready();
        barrier_expect(&received, (splits - 1) * own_rows * STRIDE * sizeof(float));
    }
    __syncthreads();
    cluster_arrive();

    if (warp == 4 * WARPGROUPS) {
        if (lane == 0) {
            auto ask_w = [&](int i, int stage) {
                barrier_expect(&full[stage], W_BYTES + X_BYTES);
                copy_tile(w_tile(stage), &w, &full[stage], (begin + i) * COLUMNS, first_output, READ_ONCE);
            };
            auto ask_x = [&](int i, int stage) {
                copy_tile(x_tile(stage), &x, &full[stage], (begin + i) * COLUMNS, 0, READ_AGAIN);
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
    } else {
        int group = warp / 4;
        float d[N / 2];
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
        // Where the tiles were: all warpgroups are done with them.
        asm volatile("bar.sync 1, %0;" ::"n"(128 * WARPGROUPS) : "memory");
        int row = group * 64 + warp % 4 * 16 + lane / 4;
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                sums[(8 * n + lane % 4 * 2 + c % 2) * STRIDE + row + c / 2 * 8] = d[4 * n + c];
        async_may_read();
    }

    // Not before: their blocks would take what this one needs.
    dependents_may_start();
    __syncthreads();
    // The others' barriers are there.
    cluster_wait();
    if (threadIdx.x < splits && threadIdx.x != split) {
        int to = threadIdx.x, row = first_row(to), bytes = (first_row(to + 1) - row) * STRIDE * sizeof(float);
        if (bytes > 0)
            send(others + (split < to ? split : split - 1) * others_size, sums + row * STRIDE, bytes, &received, to);
    }
    auto add_up = [&](int row, int column) {
        int at = row * STRIDE + column;
        float4 sum = {};
        for (int part = 0; part < splits; ++part) {
            const float *from = part == split ? sums + own_row * STRIDE : others + (part - (part > split)) * others_size;
            float4 next = load4(from + at);
            sum = part == 0 ? next : sum + next;
        }
        return sum;
    };
    if (output == GATED) {
        constexpr int UNITS = OUTPUTS / 8;
        barrier_wait(&received, 0);
        for (int i = threadIdx.x; i < own_rows * UNITS; i += blockDim.x) {
            int row = i / UNITS, unit = i % UNITS, column = unit / 2 * 16 + unit % 2 * 4;
            if (first_output + column >= outputs)
                continue;
            float4 gate = add_up(row, column), up = add_up(row, column + 8);
            float4 z = make_float4(gated<T>(gate.x, up.x), gated<T>(gate.y, up.y), gated<T>(gate.z, up.z),
                                   gated<T>(gate.w, up.w));
            store4(static_cast<T *>(y) + ((size_t)(own_row + row) * outputs + first_output) / 2 + unit * 4, z);
        }
    } else {
        constexpr int UNITS = OUTPUTS / 4, BATCH = 4;
        for (int start = threadIdx.x; start < own_rows * UNITS; start += BATCH * blockDim.x) {
            float4 old[BATCH];
            size_t at[BATCH];
            bool valid[BATCH];
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                int i = start + b * blockDim.x, row = i / UNITS, column = i % UNITS * 4;
                at[b] = (size_t)(own_row + row) * outputs + first_output + column;
                valid[b] = row < own_rows && first_output + column < outputs;
                if (valid[b] && output == ADDED_TO_F32)
                    old[b] = load4(static_cast<float *>(y) + at[b]);
            }
            barrier_wait(&received, 0);
#pragma unroll
            for (int b = 0; b < BATCH; ++b) {
                if (!valid[b])
                    continue;
                int i = start + b * blockDim.x;
                float4 sum = add_up(i / UNITS, i % UNITS * 4);
                if (output == AS_ELEMENTS)
                    store4(static_cast<T *>(y) + at[b], sum);
                else
                    store4(static_cast<float *>(y) + at[b], output == AS_F32 ? sum : old[b] + sum);
            }
        }
    }
    // What this block sent has arrived when all are here.
    cluster_arrive();
    cluster_wait();
}

#define PRODUCT(T, N, WARPGROUPS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS + 32, 1) product_##N##_##WARPGROUPS##_##T(           \
        const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x, void *y, int rows, int inputs,   \
        int outputs, int stages, int output) {                                                                         \
        product<T, N, WARPGROUPS>(w, x, y, rows, inputs, outputs, stages, output);                                     \
    }
#define PRODUCTS(T)                                                                                                    \
    PRODUCT(T, 8, 2)                                                                                                   \
    PRODUCT(T, 8, 3)                                                                                                   \
    PRODUCT(T, 24, 2)                                                                                                  \
    PRODUCT(T, 24, 3)                                                                                                  \
    PRODUCT(T, 40, 2)                                                                                                  \
    PRODUCT(T, 40, 3)                                                                                                  \
    PRODUCT(T, 72, 2)                                                                                                  \
    PRODUCT(T, 72, 3)                                                                                                  \
    PRODUCT(T, 136, 2)                                                                                                 \
    PRODUCT(T, 136, 3)                                                                                                 \
    PRODUCT(T, 256, 2)
