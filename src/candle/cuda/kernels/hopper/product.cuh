// Products of few rows with a large weight: y = x w^T, or y += x w^T, where `x` is [rows, inputs], `w` [outputs, inputs] and `y`
// [rows, outputs]. The weight is read once and sets the time, so everything here serves to keep its copies going.
//
// A block has 64 * WARPGROUPS outputs and N rows, as a tile of y^T: a warpgroup multiplies 64 rows of `w` with N rows of `x`,
// those beyond `rows` being zero. One more warp asks for the tiles. Parts of the inputs are shared out over the blocks of a
// cluster, which send each other their sums; each adds up those of some rows, in order. A weight so small that its outputs
// leave the GPU idle is read by several blocks, for N rows each.
//
// The weight's first tiles are asked for before the kernels ahead are done.
//
// Loops that nothing waits for are not unrolled: kernels that follow each other share the cache of instructions. For eight
// rows that was measured to be slower where weights are large.
#pragma once

#include "../keys.cuh"
#include "../summary.cuh"
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
    MULTIPLY(T, 16, "%0, %1, %2, %3, %4, %5, %6, %7", D4(0) COMMA D4(4), 8, 9, 10)                                      \
    MULTIPLY(T, 24, R0 ", %10, %11", D4(0) COMMA D4(4) COMMA D4(8), 12, 13, 14)                                        \
    MULTIPLY(T, 40, R0 ", " R10(1), D16(0) COMMA D4(16), 20, 21, 22)                                                   \
    MULTIPLY(T, 64, R0 ", " R10(1) ", " R10(2) ", %30, %31", D16(0) COMMA D16(16), 32, 33, 34)                           \
    MULTIPLY(T, 72, R0 ", " R10(1) ", " R10(2) ", %30, %31, %32, %33, %34, %35", D16(0) COMMA D16(16) COMMA D4(32),    \
             36, 37, 38)                                                                                               \
    MULTIPLY(T, 128,                                                                                                   \
             R0 ", " R10(1) ", " R10(2) ", " R10(3) ", " R10(4) ", " R10(5) ", %60, %61, %62, %63", D64(0), 64, 65, 66)  \
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

// What becomes of the sums.
enum class Output {
    // `y` is [rows, outputs] of elements, of f32, of f32 that are added to.
    Elements,
    Floats,
    Added,
    // Outputs are eight gates, eight ups and so on; `y` is [rows, outputs / 2] of silu(gate) * up, both rounded before as if
    // they had been written.
    Gated,
    // Without splits: `y` is [rows, blocks of outputs] of the greatest packed sum.
    Greatest,
    // Without splits: floats, and `summaries` is [rows, outputs / 64, rounded up] of theirs.
    Summarized,
};
static_assert(SUMMARIZED == 64, "those of a warpgroup");

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

// Up to so many rows, threads send their sums to other splits, 16 bytes at a time, each of which takes the receiver time.
// More are sent in one piece.
constexpr int SENT_ROWS = 24;

template <typename T> __device__ __forceinline__ float gated(float gate, float up) {
    return to_f32(silu_mul(from_f32<T>(gate), from_f32<T>(up)));
}
template <typename T> __device__ __forceinline__ float4 gated(float4 gate, float4 up) {
    return make_float4(gated<T>(gate.x, up.x), gated<T>(gate.y, up.y), gated<T>(gate.z, up.z), gated<T>(gate.w, up.w));
}

template <typename T> __device__ __forceinline__ void store(T *p, float x) { *p = from_f32<T>(x); }
template <typename T> __device__ __forceinline__ void store(T *p, float4 x) { store4(p, x); }

// Grid (tiles of outputs; splits of the inputs; tiles of rows), in clusters of all splits of a tile.
// Shared memory: 1,024 bytes; `stages` tiles of `w` and `x`, in the place of which results are put together: if there are no
// splits, [N, outputs of the block + 8] elements, else, if N > SENT_ROWS, [N, outputs + 4] sums; and then what other splits
// send: [own pairs of rows, splits, outputs, 2] sums or, if N > SENT_ROWS, [splits - 1, own rows, outputs + 4].
template <Output OUTPUT, typename T, int N, int WARPGROUPS>
__device__ void product(const CUtensorMap &w, const CUtensorMap &x, void *y, float2 *summaries, int rows, int inputs,
                        int outputs, int stages) {
    // How far loops are unrolled that run once and that nothing waits for.
    constexpr int ONCE = N > 8 ? 1 : 4;
    constexpr bool WHOLE = OUTPUT == Output::Greatest || OUTPUT == Output::Summarized;
    constexpr bool ELEMENTS = OUTPUT == Output::Elements || OUTPUT == Output::Gated;
    constexpr int OUTPUTS = 64 * WARPGROUPS, UNITS = OUTPUTS / 2, STRIDE = OUTPUTS + 4, MAX_STAGES = 16;
    constexpr bool BY_THREADS = N <= SENT_ROWS;
    constexpr int W_BYTES = OUTPUTS * COLUMNS * sizeof(T), X_BYTES = N * COLUMNS * sizeof(T);
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t full[MAX_STAGES], empty[MAX_STAGES], received;
    uint8_t *tiles = memory + (1024 - shared_address(memory) % 1024) % 1024;
    auto w_tile = [&](int stage) { return tiles + stage * (W_BYTES + X_BYTES); };
    auto x_tile = [&](int stage) { return w_tile(stage) + W_BYTES; };

    int warp = __shfl_sync(FULL_WARP, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    int splits = WHOLE ? 1 : gridDim.y, split = WHOLE ? 0 : blockIdx.y, first_output = blockIdx.x * OUTPUTS;
    int all = (inputs + COLUMNS - 1) / COLUMNS;
    float per_split = inverse(splits);
    // What the first `split` splits have of `n`.
    auto share = [&](int n, int split) { return divided(n * split, per_split); };
    int begin = share(all, split), count = share(all, split + 1) - begin;
    int x_row = blockIdx.z * N;
    rows = min(rows - x_row, N);
    size_t row_bytes = OUTPUT == Output::Greatest ? gridDim.x * sizeof(uint64_t)
                       : OUTPUT == Output::Gated  ? outputs / 2 * sizeof(T)
                                                  : outputs * (ELEMENTS ? sizeof(T) : sizeof(float));
    y = static_cast<char *>(y) + x_row * row_bytes;

    // Each split adds up some rows: pairs of rows in turn if threads send them, else rows that lie together.
    int pairs = (rows + 1) / 2;
    int first_own = share(rows, split);
    int own = BY_THREADS ? divided(pairs + splits - 1 - split, per_split) : share(rows, split + 1) - first_own;

    if (threadIdx.x == 0) {
#pragma unroll(ONCE)
        for (int stage = 0; stage < stages; ++stage) {
            barrier_init(&full[stage], 1);
            barrier_init(&empty[stage], WARPGROUPS);
        }
        if (splits > 1)
            barrier_init(&received, 1);
        barriers_ready();
        if (splits > 1)
            barrier_expect(&received, own * (BY_THREADS ? splits * UNITS * sizeof(float4)
                                                        : (splits - 1) * STRIDE * sizeof(float)));
    }
    if (splits > 1)
        cluster_arrive();
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
#pragma unroll(ONCE)
            for (int i = 0; i < ahead; ++i)
                ask_w(i, i);
            await_inputs();
#pragma unroll(ONCE)
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
            cluster_wait();
            if (!BY_THREADS) {
                cluster_arrive();
                cluster_wait();
            }
        }
        return;
    }

    int group = warp / 4;
    // Of the sums `d[4 n + c]`: the output in the tile, and the row.
    int first_place = warp * 16 + lane / 4;
    auto of_output = [&](int c) { return first_place + c / 2 * 8; };
    auto of_row = [&](int n, int c) { return 8 * n + lane % 4 * 2 + c % 2; };
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
    dependents_may_start();

    auto warpgroups_meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(128 * WARPGROUPS) : "memory"); };
    // Writes sums of a row, if it and they exist: of output `place` of the tile, or of four from there on, and of what is
    // eight outputs on.
    auto write = [&](auto first, auto second, int row, int place) {
        int column = first_output + place;
        if (row >= rows || column >= outputs)
            return;
        size_t at = (size_t)row * outputs + column;
        if constexpr (ELEMENTS) {
            T *elements = static_cast<T *>(y);
            if constexpr (OUTPUT == Output::Elements) {
                store(elements + at, first);
                store(elements + at + 8, second);
            } else {
                store(elements + (at - place % 16) / 2 + place % 8, gated<T>(first, second));
            }
        } else {
            float *floats = static_cast<float *>(y) + at;
            if constexpr (OUTPUT == Output::Added) {
                add_to(floats, first);
                add_to(floats + 8, second);
            } else {
                store(floats, first);
                store(floats + 8, second);
            }
        }
    };
    // Of two rows.
    auto write_pair = [&](float4 sum, int row, int place) {
        write(sum.x, sum.z, row, place);
        write(sum.y, sum.w, row + 1, place);
    };
    auto sums = [&](int n) { return make_float4(d[4 * n], d[4 * n + 1], d[4 * n + 2], d[4 * n + 3]); };

    if (splits > 1 && BY_THREADS) {
        float4 *parts = reinterpret_cast<float4 *>(tiles + stages * (W_BYTES + X_BYTES));
        // The others' barriers are there.
        cluster_wait();
#pragma unroll
        for (int n = 0; n < N / 8; ++n) {
            int pair = 4 * n + lane % 4, index = divided(pair, per_split), to = pair - index * splits;
            if (pair < pairs)
                send(parts + (index * splits + split) * UNITS + warp * 8 + lane / 4, &received, to, sums(n));
        }
        barrier_wait(&received, 0);
        for (int i = threadIdx.x; i < own * UNITS; i += 128 * WARPGROUPS) {
            int index = i / UNITS, unit = i % UNITS;
            const float4 *part = parts + index * splits * UNITS + unit;
            float4 sum = part[0];
            for (int other = 1; other < splits; ++other)
                sum = sum + part[other * UNITS];
            write_pair(sum, 2 * (index * splits + split), unit / 8 * 16 + unit % 8);
        }
        return;
    }
    if (splits > 1) {
        // All warpgroups are done with the tiles.
        warpgroups_meet();
        float *whole = reinterpret_cast<float *>(tiles);
        float *parts = whole + max(stages * (W_BYTES + X_BYTES) / (int)sizeof(float), N * STRIDE);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                whole[of_row(n, c) * STRIDE + of_output(c)] = d[4 * n + c];
        async_may_read();
        warpgroups_meet();
        cluster_wait();
        if (threadIdx.x < splits && threadIdx.x != split) {
            int to = threadIdx.x, first = share(rows, to), theirs = share(rows, to + 1) - first;
            if (theirs > 0)
                send(parts + (split - (split > to)) * theirs * STRIDE, &received, to, whole + first * STRIDE,
                     theirs * STRIDE * sizeof(float));
        }
        __syncwarp();
        barrier_wait(&received, 0);
        cluster_arrive();
        constexpr int OCTETS = OUTPUTS / 8;
        for (int i = threadIdx.x; i < own * OCTETS; i += 128 * WARPGROUPS) {
            int row = i / OCTETS, place = i % OCTETS / 2 * 16 + i % 2 * 4;
            float4 first, second;
            for (int other = 0; other < splits; ++other) {
                const float *part = other == split ? whole + first_own * STRIDE
                                                   : parts + (other - (other > split)) * own * STRIDE;
                part += row * STRIDE + place;
                float4 a = *reinterpret_cast<const float4 *>(part), b = *reinterpret_cast<const float4 *>(part + 8);
                first = other == 0 ? a : first + a;
                second = other == 0 ? b : second + b;
            }
            write(first, second, first_own + row, place);
        }
        // What was sent is where it belongs.
        cluster_wait();
        return;
    }
    if constexpr (!ELEMENTS && OUTPUT != Output::Greatest)
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
            write_pair(sums(n), of_row(n, 0), first_place);
    if constexpr (!ELEMENTS && !WHOLE)
        return;
    // All warpgroups are done with the tiles, the place of which results take.
    warpgroups_meet();
    if constexpr (WHOLE) {
        constexpr int WARPS = 4 * WARPGROUPS;
        // The outputs of a warp exist or do not.
        int warp_output = first_output + warp * 16, first = warp_output + lane / 4;
        bool exist = warp_output < outputs;
        if constexpr (OUTPUT == Output::Greatest) {
            uint64_t *found = reinterpret_cast<uint64_t *>(tiles);
#pragma unroll
            for (int n = 0; n < N / 8; ++n)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    uint64_t mine = max(pack(order(d[4 * n + c]), first), pack(order(d[4 * n + c + 2]), first + 8));
#pragma unroll
                    for (int offset = 4; offset < 32; offset *= 2)
                        mine = max(mine, __shfl_xor_sync(FULL_WARP, mine, offset));
                    if (lane < 4)
                        found[of_row(n, c) * WARPS + warp] = exist ? mine : 0;
                }
            warpgroups_meet();
            for (int row = threadIdx.x; row < rows; row += 128 * WARPGROUPS) {
                uint64_t greatest = 0;
#pragma unroll
                for (int i = 0; i < WARPS; ++i)
                    greatest = max(greatest, found[row * WARPS + i]);
                static_cast<uint64_t *>(y)[(size_t)row * gridDim.x + blockIdx.x] = greatest;
            }
            return;
        }
        float2 *found = reinterpret_cast<float2 *>(tiles);
#pragma unroll
        for (int n = 0; n < N / 8; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float two[] = {d[4 * n + c], d[4 * n + c + 2]};
                float2 mine = summary<4, 32>(two);
                if (lane < 4)
                    found[of_row(n, c) * WARPS + warp] = exist ? mine : make_float2(NEG_INF, 0.0f);
            }
        warpgroups_meet();
        int chunks = (outputs + SUMMARIZED - 1) / SUMMARIZED;
        for (int i = threadIdx.x; i < rows * WARPGROUPS; i += 128 * WARPGROUPS) {
            int row = i / WARPGROUPS, chunk = blockIdx.x * WARPGROUPS + i % WARPGROUPS;
            const float2 *parts = found + i * 4;
            float greatest = greater(greater(parts[0].x, parts[1].x), greater(parts[2].x, parts[3].x)), sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                sum += parts[j].y * share_of(parts[j].x, greatest);
            if (chunk < chunks)
                summaries[(size_t)(x_row + row) * chunks + chunk] = make_float2(greatest, sum);
        }
        return;
    }
    // Elements, by rows. A gate and its up are sums of one thread.
    constexpr bool pairs_up = OUTPUT == Output::Gated;
    int tile_elements = pairs_up ? OUTPUTS / 2 : OUTPUTS, stride = tile_elements + 8;
    int first = pairs_up ? first_output / 2 : first_output, size = pairs_up ? outputs / 2 : outputs;
    T *elements = reinterpret_cast<T *>(tiles);
#pragma unroll
    for (int n = 0; n < N / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            int at = of_row(n, c) * stride;
            if (!pairs_up)
                elements[at + of_output(c)] = from_f32<T>(d[4 * n + c]);
            else if (c < 2)
                elements[at + (of_output(c) - lane / 4) / 2 + lane / 4] =
                    from_f32<T>(gated<T>(d[4 * n + c], d[4 * n + c + 2]));
        }
    warpgroups_meet();
    int units = tile_elements / 8;
    for (int i = threadIdx.x; i < rows * units; i += 128 * WARPGROUPS) {
        // By a constant in either case.
        int row = pairs_up ? i / (OUTPUTS / 16) : i / (OUTPUTS / 8), column = (i - row * units) * 8;
        if (first + column < size)
            *reinterpret_cast<Vec8<T> *>(static_cast<T *>(y) + (size_t)row * size + first + column) =
                load8(elements + row * stride + column);
    }
}

// Blocks that registers have to suffice for: the next product's come in while this one's finish.
constexpr int blocks_at_once(int n, int warpgroups) { return n * warpgroups > 272 ? 1 : warpgroups == 1 ? 4 : 2; }
