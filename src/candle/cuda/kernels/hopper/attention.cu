// What `../attention.cu` computes, with products by warpgroups.
//
// A warpgroup has ROWS query rows. It multiplies them with tiles of keys, and weights, which stay in registers, with
// tiles of values. The warpgroups of a block have different rows and share the tiles; while one computes weights,
// others, or those of another block, multiply.

#include "../attention.cuh"
#include "hopper.cuh"

constexpr int ROWS = 64, KEYS = 64;
constexpr int MAX_SPLITS = 8;
// Keys whose weights are multiplied at a time.
constexpr int STEP = 32;
// Bytes of a row in shared memory. Larger heads go on in further planes.
constexpr int LINE = 128, COLUMNS = 64;

#define R4(d, i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define R16(d, i) R4(d, i), R4(d, i + 1), R4(d, i + 2), R4(d, i + 3)
#define N32                                                                                                            \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "   \
    "%24, %25, %26, %27, %28, %29, %30, %31"
#define N64                                                                                                            \
    N32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, "  \
        "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// s = q k^T or s += q k^T for 16 columns, with a tile of rows of keys.
// o += p v for 16 keys, with a tile of rows of values.
#define MULTIPLY(T)                                                                                                    \
    __device__ __forceinline__ void multiply(float (&s)[8][4], const unsigned (&q)[4], uint64_t k, int add, T) {       \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." #T "." #T " {" N32 "}, {%32, %33, %34, %35}, %36, " \
                     "add, 1, 1, 0;\n}"                                                                                \
                     : R16(s, 0), R16(s, 4)                                                                            \
                     : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(k), "r"(add));                                  \
    }                                                                                                                  \
    __device__ __forceinline__ void multiply(float (&o)[8][4], const unsigned (&p)[4], uint64_t v, T) {                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." #T "." #T " {" N32 "}, {%32, %33, %34, %35}, %36, " \
                     "add, 1, 1, 1;\n}"                                                                                \
                     : R16(o, 0), R16(o, 4)                                                                            \
                     : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));                                            \
    }                                                                                                                  \
    __device__ __forceinline__ void multiply(float (&o)[16][4], const unsigned (&p)[4], uint64_t v, T) {               \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"                                                    \
                     "wgmma.mma_async.sync.aligned.m64n128k16.f32." #T "." #T " {" N64                                 \
                     "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"                                                  \
                     : R16(o, 0), R16(o, 4), R16(o, 8), R16(o, 12)                                                     \
                     : "r"(p[0]), "r"(p[1]), "r"(p[2]), "r"(p[3]), "l"(v));                                            \
    }
MULTIPLY(bf16)
MULTIPLY(f16)

// Keeps uses of registers on their side of asynchronous products.
template <int N> __device__ __forceinline__ void hold(float (&x)[N][4]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
        asm volatile("" : R4(x, n)::"memory");
}
__device__ __forceinline__ void hold(unsigned (&x)[4]) {
    asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
}

// Grid (splits of the keys, tiles of ROWS * blockDim.x / 128 query rows, KV heads), in clusters of a tile's splits.
// Two or more `stages` of KEYS keys and values fit into shared memory.
//
// Splits merge in two steps: they tell each other how their weights relate, and then send their share of each 16 rows
// to the split that writes these.
template <typename T, int D>
__device__ void attend(const CUtensorMap &k_cache, const CUtensorMap &v_cache, const T *q, int q_stride, T *out,
                            const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group,
                            float scale, int stages) {
    constexpr int UNITS = D / 8;                                              // of 16 bytes, of a row
    constexpr int TILE = KEYS * D * sizeof(T), Q_TILE = ROWS * D * sizeof(T); // bytes
    constexpr int PIECES = D / 16;                                            // that 16 rows are sent in
    extern __shared__ __align__(1024) unsigned char shared[];

    dependents_may_start();
    int before = *prefix, keys = before + width;
    int splits = gridDim.x, split = blockIdx.x, kv_heads = gridDim.z, kv_head = blockIdx.z;
    int warpgroups = blockDim.x / 128;
    int first_row = blockIdx.y * ROWS * warpgroups, rows = min(width * group - first_row, ROWS * warpgroups);
    int busy = (rows + ROWS - 1) / ROWS, rows16 = (rows + 15) / 16;
    float inverse_splits = __fdividef(1.0f, splits), inverse_group = __fdividef(1.0f, group);
    // 16 rows each are written by one split: these are this one's.
    int most16 = divided(warpgroups * 4 + splits - 1, inverse_splits);
    int own16 = divided(rows16 + splits - 1 - split, inverse_splits);

    unsigned char *q_tiles = shared + stages * 2 * TILE;
    uint4 *pieces = reinterpret_cast<uint4 *>(q_tiles); // in the place of queries
    float2 *norms = reinterpret_cast<float2 *>(q_tiles + max(warpgroups * Q_TILE, most16 * splits * PIECES * 512));
    uint64_t *masks = reinterpret_cast<uint64_t *>(norms + splits * warpgroups * ROWS);
    int first_slot = divided(first_row, inverse_group), end_slot = divided(first_row + rows - 1, inverse_group) + 1;
    uint64_t *landed = masks + (warpgroups * ROWS + 1) * mask_words, *freed = landed + 2 * stages;
    uint64_t *told = freed + stages, *sent = told + 1;

    // Keys and values of this split.
    int all = (keys + KEYS - 1) / KEYS, most = divided(all + splits - 1, inverse_splits);
    int first = split * most, tiles = max(min(most, all - first), 0), ahead = min(stages, tiles);
    auto load_tile = [&](int tile, int stage) {
        uint64_t *barrier = landed + 2 * stage;
        unsigned char *to = shared + 2 * stage * TILE;
        barrier_expect(barrier, TILE);
        copy_planes(to, &k_cache, barrier, 0, (first + tile) * KEYS, kv_head * (D / COLUMNS));
        barrier_expect(barrier + 1, TILE);
        copy_planes(to + TILE, &v_cache, barrier + 1, 0, (first + tile) * KEYS, kv_head * (D / COLUMNS));
    };
    int committed = min(ahead, max(before / KEYS - first, 0));
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int i = 0; i < 2 * stages; ++i)
            barrier_init(landed + i, 1);
#pragma unroll 1
        for (int i = 0; i < stages; ++i)
            barrier_init(freed + i, busy);
        barrier_init(told, 1);
        barrier_init(sent, 1 + own16);
        barriers_ready();
        // What is committed does not depend on the kernels before.
#pragma unroll 1
        for (int tile = 0; tile < committed; ++tile)
            load_tile(tile, tile);
        barrier_expect(told, splits * rows16 * 16 * sizeof(float2));
        barrier_expect(sent, (splits - 1) * own16 * PIECES * 512);
    }
    cluster_arrive();
    for (int i = threadIdx.x; i < (end_slot - first_slot) * mask_words; i += blockDim.x)
        masks[i] = mask[first_slot * mask_words + i];

    int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), thread = threadIdx.x % 128, warp = thread / 32;
    int lane = thread % 32, g = lane / 4, t = lane % 4;
    // Rows that fill up a tile repeat the last one.
    int column = thread % UNITS, copied_row = thread / UNITS;
    const T *from[UNITS / 2];
#pragma unroll
    for (int i = 0; i < UNITS / 2; ++i) {
        int row = first_row + min(warpgroup * ROWS + copied_row + i * (128 / UNITS), rows - 1);
        int slot = divided(row, inverse_group);
        from[i] = q + (size_t)slot * q_stride + (kv_head * group + row - slot * group) * D + column * 8;
    }
    unsigned char *q_tile = q_tiles + warpgroup * Q_TILE;
    auto q_at = [&](int row, int unit) {
        return q_tile + unit / 8 * ROWS * LINE + row * LINE + (unit ^ row) % 8 * 16;
    };
    float o[D / 8][4] = {};
    Weights weights{scale * LOG2_E};
    inputs_ready();
    if (threadIdx.x == 0)
#pragma unroll 1
        for (int tile = committed; tile < ahead; ++tile)
            load_tile(tile, tile);
    uint4 copied[UNITS / 2];
#pragma unroll
    for (int i = 0; i < UNITS / 2; ++i)
        copied[i] = *reinterpret_cast<const uint4 *>(from[i]);
    // Rows in a step are a multiple of 8: they have the same swizzle.
#pragma unroll
    for (int i = 0; i < UNITS / 2; ++i)
        *reinterpret_cast<uint4 *>(q_at(copied_row, column) + i * (128 / UNITS) * LINE) = copied[i];
    __syncthreads();

    // Idle warps have no row, but a part in the products of their warpgroup.
    int place16 = warpgroup * 4 + warp;
    bool idle = place16 >= rows16, works = warpgroup < busy;
    const uint64_t *seen_by[2];
    for (int i = 0; i < 2; ++i) {
        int row = first_row + min(place16 * 16 + g + 8 * i, rows - 1);
        seen_by[i] = masks + (divided(row, inverse_group) - first_slot) * mask_words;
    }
    int stage = 0, parity = 0, last_stage = 0, last_parity = 0;
    // Tells the other splits how this one's weights relate to theirs.
    auto tell = [&]() {
        weights.finish();
        cluster_wait();
        if (!idle)
            for (int to = t; to < splits; to += 4)
                for (int i = 0; i < 2; ++i)
                    send(norms + split * warpgroups * ROWS + place16 * 16 + g + 8 * i, told, to,
                         make_float2(weights.top[i], weights.sum[i]));
    };
#pragma unroll 1
    for (int tile = 0; works && tile < tiles; ++tile) {
        // Anew for each tile: ptxas 13.0 lets others have the registers of operands that stay for several.
        unsigned queries[D / 16][4];
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            load_matrices<false>(queries[d], q_at(warp * 16 + lane % 16, 2 * d + lane / 16));
        unsigned char *stage_keys = shared + 2 * stage * TILE, *stage_values = stage_keys + TILE;
        float s[KEYS / 8][4];
        barrier_wait(landed + 2 * stage, parity);
        uint64_t k_tile = tile_descriptor(stage_keys);
        hold(s);
        products_begin();
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            multiply(s, queries[d], k_tile + (d / 4 * KEYS * LINE + d % 4 * 32) / 16, d > 0, T());
        products_commit();
        // The tile before is done with in all warpgroups, or soon. One that is still to come takes its place.
        if (threadIdx.x == 0 && tile > 0 && tile - 1 + stages < tiles) {
            barrier_wait(freed + last_stage, last_parity);
            load_tile(tile - 1 + stages, last_stage);
        }
        products_wait<0>();
        hold(s);
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            hold(queries[d]);

        int at = (first + tile) * KEYS - before;
        if (at + KEYS > 0)
#pragma unroll
            for (int unit = 0; unit < KEYS / UNIT; ++unit, at += UNIT) {
                uint32_t seen[2];
                for (int i = 0; i < 2; ++i)
                    seen[i] = (at <= -UNIT ? ~0u : unit_mask(seen_by[i], mask_words, at)) >> 2 * t;
                hide(s + unit * (UNIT / 8), seen);
            }
        unsigned p[KEYS / 16][4];
        float keep[2];
        if (weights.raise(s, keep))
            scale_rows(o, keep);

        barrier_wait(landed + 2 * stage + 1, parity);
        // Nobody knows what is behind the pass's rows. Weights are zero there; values may be no numbers.
        int real = keys - (first + tile) * KEYS;
        if (real < KEYS) {
#pragma unroll 1
            for (int i = real * 8 + thread; i < KEYS * 8; i += 128)
#pragma unroll
                for (int plane = 0; plane < D / COLUMNS; ++plane)
                    *reinterpret_cast<uint4 *>(stage_values + plane * KEYS * LINE + i * 16) = make_uint4(0, 0, 0, 0);
            async_may_read();
            asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
        }
        uint64_t v_tile = tile_descriptor(stage_values, KEYS * LINE);
        hold(o);
#pragma unroll
        for (int key = 0; key < KEYS; key += STEP) {
            weights.weigh<STEP / 8>(s + key / 8);
#pragma unroll
            for (int n = key / 16; n < (key + STEP) / 16; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c)
                    p[n][c] = pair(s[2 * n + c / 2][c % 2 * 2], s[2 * n + c / 2][c % 2 * 2 + 1], T());
#pragma unroll
            for (int n = key / 16; n < (key + STEP) / 16; ++n)
                hold(p[n]);
            products_begin();
#pragma unroll
            for (int n = key / 16; n < (key + STEP) / 16; ++n)
                multiply(o, p[n], v_tile + n * 16 * LINE / 16, T());
        }
        products_commit();
        if (tile + 1 == tiles)
            tell();
        products_wait<0>();
        hold(o);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
            hold(p[n]);
        if (thread == 0)
            barrier_arrive(freed + stage);
        last_stage = stage;
        last_parity = parity;
        if (++stage == stages)
            stage = 0, parity ^= 1;
    }

    if (!works || tiles == 0)
        tell();
    barrier_wait(told, 0);
    if (!idle) {
        float by[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float2 *norm = norms + place16 * 16 + g + 8 * i;
            float top[MAX_SPLITS], greatest = NEG_INF, sum = 0.0f;
#pragma unroll
            for (int part = 0; part < MAX_SPLITS; ++part) {
                top[part] = part < splits ? norm[part * warpgroups * ROWS].x : NEG_INF;
                greatest = fmaxf(greatest, top[part]);
            }
#pragma unroll
            for (int part = 0; part < MAX_SPLITS; ++part)
                if (part < splits)
                    sum += power_of_two(top[part] - greatest) * norm[part * warpgroups * ROWS].y;
            by[i] = __fdividef(power_of_two(weights.top[i] - greatest), sum);
        }
        scale_rows(o, by);
        int place = divided(place16, inverse_splits), to = place16 - place * splits;
        uint4 piece[PIECES], *at = pieces + (place * splits + split) * PIECES * 32 + lane;
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const float(&a)[4] = o[2 * n], (&b)[4] = o[2 * n + 1];
            piece[n] = make_uint4(pair(a[0], a[1], T()), pair(b[0], b[1], T()), pair(a[2], a[3], T()),
                                  pair(b[2], b[3], T()));
        }
        if (to == split)
#pragma unroll
            for (int n = 0; n < PIECES; ++n)
                at[32 * n] = piece[n];
        else
#pragma unroll
            for (int n = 0; n < PIECES; ++n)
                send(at + 32 * n, sent, to, piece[n]);
        __syncwarp();
        if (to == split && lane == 0)
            barrier_arrive(sent);
    }

    // A warp writes half of the columns of 16 rows.
    constexpr int AT_ONCE = PIECES / 2;
    int parts = 2 * own16, warps = blockDim.x / 32;
    for (int i = threadIdx.x / 32; i < parts; i += warps) {
        int place = i / 2, n = i % 2 * AT_ONCE, row = first_row + (place * splits + split) * 16 + g;
        T *to[2];
        for (int j = 0; j < 2; ++j) {
            int slot = divided(row + 8 * j, inverse_group);
            size_t at = (size_t)(slot * kv_heads + kv_head) * group + row + 8 * j - slot * group;
            to[j] = out + at * D + 16 * n + 2 * t;
        }
        const uint4 *x = pieces + (place * splits * PIECES + n) * 32 + lane;
        float2 y[AT_ONCE][4] = {};
        barrier_wait(sent, 0);
#pragma unroll 1
        for (int part = 0; part < splits; ++part, x += PIECES * 32)
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                uint4 z = x[32 * k];
                unsigned pairs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float2 w = unpaired(pairs[c], T());
                    y[k][c].x += w.x;
                    y[k][c].y += w.y;
                }
            }
#pragma unroll
        for (int j = 0; j < 2; ++j)
            if (row + 8 * j < first_row + rows)
#pragma unroll
                for (int k = 0; k < AT_ONCE; ++k)
#pragma unroll
                    for (int c = 0; c < 2; ++c)
                        *reinterpret_cast<unsigned *>(to[j] + 16 * k + 8 * c) =
                            pair(y[k][2 * j + c].x, y[k][2 * j + c].y, T());
    }
}

#define KERNEL(T, D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(384, 1) attend_##D##_##T(                                        \
        const __grid_constant__ CUtensorMap k_cache, const __grid_constant__ CUtensorMap v_cache, const T *q,          \
        int q_stride, T *out, const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group,      \
        float scale, int stages) {                                                                                     \
        attend<T, D>(k_cache, v_cache, q, q_stride, out, prefix, mask, mask_words, width, group, scale, stages);  \
    }
KERNEL(bf16, 64) KERNEL(bf16, 128)
KERNEL(f16, 64) KERNEL(f16, 128)
