// What `../attention.cu` computes, with products by warpgroups.
//
// A warpgroup has ROWS query rows. It multiplies them with tiles of keys, and weights, which stay in registers, with
// tiles of values. While it multiplies weights with values, it computes those of the next tile. The warpgroups of a block
// have different rows and share the tiles, which one more warp asks for.

#include "../attention.cuh"
#include "hopper.cuh"

constexpr int ROWS = 64, KEYS = 64;
constexpr int MAX_SPLITS = 8;
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

// s = q k^T or s += q k^T for 16 columns, with tiles of rows.
// o += p v for 16 keys, with a tile of rows of values.
#define MULTIPLY(T)                                                                                                    \
    __device__ __forceinline__ void multiply(float (&s)[8][4], uint64_t q, uint64_t k, int add, T) {                   \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"                                                  \
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32." #T "." #T " {" N32 "}, %32, %33, add, 1, 1, 0, 0;\n}" \
                     : R16(s, 0), R16(s, 4)                                                                            \
                     : "l"(q), "l"(k), "r"(add));                                                                      \
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

// Grid (splits of the keys, tiles of ROWS * (blockDim.x / 128) query rows, KV heads), in clusters of a tile's splits.
// Two or more `stages` of KEYS keys and values fit into shared memory.
//
// For each 16 rows there is a split that writes them. The others send it what they have, and how that is weighted.
template <typename T, int D>
__device__ void attend(const CUtensorMap &k_cache, const CUtensorMap &v_cache, const T *q, int q_stride, T *out,
                       const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group, float scale,
                       int stages) {
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
    float inverse_splits = inverse(splits), inverse_group = inverse(group);
    // 16 rows each are written by one split: these are this one's.
    int most16 = divided(warpgroups * 4 + splits - 1, inverse_splits);
    int own16 = divided(rows16 + splits - 1 - split, inverse_splits);

    unsigned char *q_tiles = shared + stages * 2 * TILE;
    uint4 *pieces = reinterpret_cast<uint4 *>(q_tiles + warpgroups * Q_TILE);
    float2 *norms = reinterpret_cast<float2 *>(pieces + most16 * splits * PIECES * 32);
    uint64_t *masks = reinterpret_cast<uint64_t *>(norms + most16 * splits * 16);
    int first_slot = divided(first_row, inverse_group), end_slot = divided(first_row + rows - 1, inverse_group) + 1;
    // Masks are moved so that a row has a word for each tile of keys from the pass's first row on.
    int words = mask_words + 1, pass_tile = before / KEYS, offset = before % KEYS;
    uint64_t *landed = masks + (warpgroups * ROWS + 1) * words, *freed = landed + 2 * stages;
    uint64_t *sent = freed + stages;

    // Keys and values of this split.
    int all = (keys + KEYS - 1) / KEYS, most = divided(all + splits - 1, inverse_splits);
    int first = split * most, tiles = max(min(most, all - first), 0);

    int warpgroup = __shfl_sync(FULL_WARP, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
    bool asks = threadIdx.x == 128 * warpgroups;
    auto load_tile = [&](int tile, int stage) {
        uint64_t *barrier = landed + 2 * stage;
        unsigned char *to = shared + 2 * stage * TILE;
        barrier_expect(barrier, TILE);
        copy_planes(to, &k_cache, barrier, 0, (first + tile) * KEYS, kv_head * (D / COLUMNS));
        barrier_expect(barrier + 1, TILE);
        copy_planes(to + TILE, &v_cache, barrier + 1, 0, (first + tile) * KEYS, kv_head * (D / COLUMNS));
    };
    int ahead = min(stages, tiles), committed = min(ahead, max(before / KEYS - first, 0));
    if (asks) {
#pragma unroll 1
        for (int i = 0; i < 2 * stages; ++i)
            barrier_init(landed + i, 1);
#pragma unroll 1
        for (int i = 0; i < stages; ++i)
            barrier_init(freed + i, busy);
        barrier_init(sent, 1);
        barriers_ready();
        // What is committed does not depend on the kernels before.
#pragma unroll 1
        for (int tile = 0; tile < committed; ++tile)
            load_tile(tile, tile);
        barrier_expect(sent, own16 * splits * (PIECES * 512 + 16 * sizeof(float2)));
    }
    cluster_arrive();
    // Rows before the pass are committed: all see them.
    float inverse_words = inverse(words);
    for (int i = threadIdx.x; i < (end_slot - first_slot) * words; i += blockDim.x) {
        int slot = divided(i, inverse_words), word = i - slot * words;
        const uint64_t *row = mask + (first_slot + slot) * mask_words + word;
        uint64_t low = word > 0 ? row[-1] : ~0ull, high = word < mask_words ? row[0] : 0;
        masks[i] = offset > 0 ? high << offset | low >> (KEYS - offset) : high;
    }
    __syncthreads();
    cluster_wait();
    await_inputs();

    if (warpgroup == warpgroups) {
        if (asks) {
#pragma unroll 1
            for (int tile = committed; tile < ahead; ++tile)
                load_tile(tile, tile);
            int stage = 0, parity = 0;
#pragma unroll 1
            for (int tile = ahead; tile < tiles; ++tile) {
                barrier_wait(freed + stage, parity);
                load_tile(tile, stage);
                if (++stage == stages)
                    stage = 0, parity ^= 1;
            }
        }
        return;
    }

    // Rows that fill up a tile repeat the last one. Rows in a step are a multiple of 8: they have the same swizzle.
    unsigned char *q_tile = q_tiles + warpgroup * Q_TILE;
    int column = thread % UNITS, copied_row = thread / UNITS;
    uint4 copied[UNITS / 2];
#pragma unroll
    for (int i = 0; i < UNITS / 2; ++i) {
        int row = first_row + min(warpgroup * ROWS + copied_row + i * (128 / UNITS), rows - 1);
        int slot = divided(row, inverse_group);
        copied[i] = *reinterpret_cast<const uint4 *>(q + (size_t)slot * q_stride +
                                                     (kv_head * group + row - slot * group) * D + column * 8);
    }
    unsigned char *q_at = q_tile + column / 8 * ROWS * LINE + copied_row * LINE + (column ^ copied_row) % 8 * 16;
#pragma unroll
    for (int i = 0; i < UNITS / 2; ++i)
        *reinterpret_cast<uint4 *>(q_at + i * (128 / UNITS) * LINE) = copied[i];
    async_may_read();
    auto warpgroup_meets = [&] { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); };
    warpgroup_meets();

    int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    // Idle warps have no row, but a part in the products of their warpgroup.
    int place16 = warpgroup * 4 + warp;
    bool idle = place16 >= rows16;
    const uint64_t *seen_by[2];
    for (int i = 0; i < 2; ++i) {
        int row = first_row + min(place16 * 16 + g + 8 * i, rows - 1);
        seen_by[i] = masks + (divided(row, inverse_group) - first_slot) * words;
    }
    float s[KEYS / 8][4], o[D / 8][4] = {};
    unsigned p[KEYS / 16][4];
    Weights weights{scale * LOG2_E};
    auto multiply_keys = [&](int stage, int parity) {
        barrier_wait(landed + 2 * stage, parity);
        uint64_t queries = tile_descriptor(q_tile), k_tile = tile_descriptor(shared + 2 * stage * TILE);
        hold(s);
        products_begin();
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            multiply(s, queries + (d / 4 * ROWS * LINE + d % 4 * 32) / 16,
                     k_tile + (d / 4 * KEYS * LINE + d % 4 * 32) / 16, d > 0, T());
        products_commit();
    };
    auto multiply_values = [&](int stage) {
        uint64_t v_tile = tile_descriptor(shared + (2 * stage + 1) * TILE, KEYS * LINE);
        hold(o);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
            hold(p[n]);
        products_begin();
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
            multiply(o, p[n], v_tile + n * 16 * LINE / 16, T());
        products_commit();
    };
    auto values_done = [&] {
        products_wait<0>();
        hold(o);
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
            hold(p[n]);
    };
    // Turns scores into weights. Returns whether sums have to be scaled by `keep`.
    auto weigh = [&](int tile, float(&keep)[2]) {
        hold(s);
        int word = first + tile - pass_tile;
        if (word >= 0) {
            uint64_t seen[2];
            for (int i = 0; i < 2; ++i)
                seen[i] = seen_by[i][word] >> 2 * t;
            hide(s, seen);
        }
        bool grown = weights.raise(s, keep);
        weights.weigh<KEYS / 8>(s);
        return grown;
    };
    auto pack = [&] {
#pragma unroll
        for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
            for (int c = 0; c < 4; ++c)
                p[n][c] = pair(s[2 * n + c / 2][c % 2 * 2], s[2 * n + c / 2][c % 2 * 2 + 1], T());
    };

    // Who writes these 16 rows, and where this split's share of them goes there.
    int turn = divided(place16, inverse_splits), to = place16 - turn * splits, piece16 = turn * splits + split;
    // When weights are known: what this split's share counts.
    auto tell = [&] {
        weights.finish();
        if (!idle && t < 2)
            send(norms + piece16 * 16 + g + 8 * t, sent, to,
                 t == 0 ? make_float2(weights.top[0], weights.sum[0]) : make_float2(weights.top[1], weights.sum[1]));
    };

    if (warpgroup < busy && tiles > 0) {
        int stage = 0, parity = 0;
        float keep[2];
        multiply_keys(stage, parity);
        products_wait<0>();
        weigh(0, keep);
        pack();
#pragma unroll 1
        for (int tile = 1; tile < tiles; ++tile) {
            int last = stage, last_parity = parity;
            if (++stage == stages)
                stage = 0, parity ^= 1;
            multiply_keys(stage, parity);
            barrier_wait(landed + 2 * last + 1, last_parity);
            multiply_values(last);
            products_wait<1>();
            bool grown = weigh(tile, keep);
            values_done();
            if (thread == 0)
                barrier_arrive(freed + last);
            if (grown)
                scale_rows(o, keep);
            pack();
        }
        barrier_wait(landed + 2 * stage + 1, parity);
        // Nobody knows what is behind the pass's rows. Weights are zero there; values may be no numbers.
        int real = keys - (first + tiles - 1) * KEYS;
        if (real < KEYS) {
            unsigned char *values = shared + (2 * stage + 1) * TILE;
#pragma unroll 1
            for (int i = real * 8 + thread; i < KEYS * 8; i += 128)
#pragma unroll
                for (int plane = 0; plane < D / COLUMNS; ++plane)
                    *reinterpret_cast<uint4 *>(values + plane * KEYS * LINE + i * 16) = make_uint4(0, 0, 0, 0);
            async_may_read();
            warpgroup_meets();
        }
        multiply_values(stage);
        tell();
        values_done();
    } else
        tell();

    if (!idle) {
        float by[2];
        for (int i = 0; i < 2; ++i)
            by[i] = weights.sum[i] > 0.0f ? inverse(weights.sum[i]) : 0.0f;
        scale_rows(o, by);
        uint4 *at = pieces + piece16 * PIECES * 32 + lane;
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const float(&a)[4] = o[2 * n], (&b)[4] = o[2 * n + 1];
            send(at + 32 * n, sent, to,
                 make_uint4(pair(a[0], a[1], T()), pair(b[0], b[1], T()), pair(a[2], a[3], T()),
                            pair(b[2], b[3], T())));
        }
    }

    // A warp writes a quarter of the columns of 16 rows.
    constexpr int AT_ONCE = PIECES / 4;
    for (int i = place16; i < 4 * own16; i += 4 * warpgroups) {
        int place = i / 4, n = i % 4 * AT_ONCE, row = first_row + (place * splits + split) * 16 + g;
        T *to[2];
        for (int j = 0; j < 2; ++j) {
            int slot = divided(row + 8 * j, inverse_group);
            size_t at = (size_t)(slot * kv_heads + kv_head) * group + row + 8 * j - slot * group;
            to[j] = out + at * D + 16 * n + 2 * t;
        }
        const uint4 *x = pieces + (place * splits * PIECES + n) * 32 + lane;
        float2 y[AT_ONCE][4] = {};
        barrier_wait(sent, 0);
        float by[2][MAX_SPLITS];
        for (int j = 0; j < 2; ++j) {
            float2 norm[MAX_SPLITS];
            float greatest = NEG_INF, sum = 0.0f;
#pragma unroll
            for (int part = 0; part < MAX_SPLITS; ++part) {
                norm[part] = part < splits ? norms[(place * splits + part) * 16 + g + 8 * j] : make_float2(NEG_INF, 0.0f);
                greatest = fmaxf(greatest, norm[part].x);
            }
#pragma unroll
            for (int part = 0; part < MAX_SPLITS; ++part)
                sum += by[j][part] = power_of_two(norm[part].x - greatest) * norm[part].y;
#pragma unroll
            for (int part = 0; part < MAX_SPLITS; ++part)
                by[j][part] *= inverse(sum);
        }
#pragma unroll
        for (int part = 0; part < MAX_SPLITS; ++part) {
            if (part >= splits)
                break;
#pragma unroll
            for (int k = 0; k < AT_ONCE; ++k) {
                uint4 z = x[32 * (part * PIECES + k)];
                unsigned pairs[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float2 w = unpaired(pairs[c], T());
                    y[k][c].x += by[c / 2][part] * w.x;
                    y[k][c].y += by[c / 2][part] * w.y;
                }
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
    extern "C" __global__ void __launch_bounds__(288, 1) attend_##D##_##T(                                             \
        const __grid_constant__ CUtensorMap k_cache, const __grid_constant__ CUtensorMap v_cache, const T *q,          \
        int q_stride, T *out, const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group,      \
        float scale, int stages) {                                                                                     \
        attend<T, D>(k_cache, v_cache, q, q_stride, out, prefix, mask, mask_words, width, group, scale, stages);       \
    }
KERNEL(bf16, 64) KERNEL(bf16, 128)
KERNEL(f16, 64) KERNEL(f16, 128)
