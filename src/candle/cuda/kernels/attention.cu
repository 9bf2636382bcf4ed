// Tree attention: the rows of a pass attend to the committed prefix and, among themselves, to what a bit mask says.
//
// Row `r` of the pass is in cache row `*prefix + r`, so keys are cache rows `0..*prefix + width`. Bit `j % 64` of word
// `j / 64` of mask row `i` says whether row `i` sees row `j` of the pass; each row has to see itself. The length of
// the prefix is read from the device, so that one captured launch serves every length.
//
// Cache rows are `kv_heads * D` elements. Query rows are `q_stride` elements, output rows `kv_heads * group * D`.

#include "common.cuh"

constexpr float LOG2_E = 1.4426950408889634f;

// ---- bf16 and f16: tensor cores, keys in splits ----

constexpr int WARPS = 4;
constexpr int TILE_ROWS = 16 * WARPS;

template <int D> constexpr int KEYS_PER_TILE = D <= 128 ? 64 : 32;

// Splits that have keys, and the tiles that each of them takes.
__device__ __forceinline__ int active_splits(int keys, int tile, int splits, int &per_split) {
    int tiles = (keys + tile - 1) / tile;
    per_split = (tiles + splits - 1) / splits;
    return (tiles + per_split - 1) / per_split;
}

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Copies 16 bytes to shared memory in the background, or zeroes them.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0));
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;\n" ::"n"(N)); }

template <bool TRANSPOSED> __device__ __forceinline__ void load_matrices(unsigned (&r)[4], const void *p) {
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(p)));
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"(shared_address(p)));
}

// c += a b for a 16x16 `a` and a 16x8 `b`.
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, bf16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, f16) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};\n"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ unsigned pair(float a, float b, bf16) {
    __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<unsigned *>(&x);
}
__device__ __forceinline__ unsigned pair(float a, float b, f16) {
    __half2 x = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned *>(&x);
}

// 2^x, to two units in the last place; 0 for -inf.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// The 64 bits of a mask row from row `first` of the pass on. Rows before the pass are committed: all see them.
__device__ __forceinline__ uint64_t tile_mask(const uint64_t *row, int words, int first) {
    if (first < 0)
        return row[0] << -first | ((1ull << -first) - 1);
    int word = first / 64, bit = first % 64;
    uint64_t low = word < words ? row[word] >> bit : 0;
    return bit && word + 1 < words ? low | row[word + 1] << (64 - bit) : low;
}

// Queries of the heads that share a KV head are stacked: query row `r` of KV head `h` is head `h * group + r % group`
// of pass row `r / group`. Grid (tiles of TILE_ROWS query rows, KV heads, splits); 128 threads.
//
// A split takes a run of key tiles; splits beyond the keys there are do nothing. With more than one, each leaves its
// unnormalised sum in `partial` and (max, sum) in `norms` for `merge`.
template <typename T, int D>
__device__ void attend(const T *q, int q_stride, const T *k_cache, const T *v_cache, T *out, float *partial,
                       float2 *norms, const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group,
                       float scale) {
    constexpr int KEYS = KEYS_PER_TILE<D>;
    constexpr int STRIDE = D + 8; // rows start 16 bytes apart modulo 128: no bank conflicts
    __shared__ __align__(16) T k_tile[KEYS * STRIDE];
    __shared__ __align__(16) T v_tile[KEYS * STRIDE];

    inputs_ready();
    int kv_heads = gridDim.y, kv_head = blockIdx.y, splits = gridDim.z;
    int before = *prefix, keys = before + width;
    int tiles = (keys + KEYS - 1) / KEYS;
    int per_split, active = active_splits(keys, KEYS, splits, per_split);
    int split = blockIdx.z;
    if (split >= active)
        return;
    int first_tile = split * per_split, end_tile = min(first_tile + per_split, tiles);

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int g = lane / 4, t = lane % 4;
    int rows = width * group;
    int tile_row = blockIdx.x * TILE_ROWS;
    // The thread's two query rows. Those that fill up the tile repeat the last one and are not written.
    int row[2] = {tile_row + warp * 16 + g, tile_row + warp * 16 + g + 8};
    const T *q_row[2];
    const uint64_t *mask_row[2];
    for (int i = 0; i < 2; ++i) {
        int r = min(row[i], rows - 1);
        q_row[i] = q + (size_t)(r / group) * q_stride + (kv_head * group + r % group) * D;
        mask_row[i] = mask + (size_t)(r / group) * mask_words;
    }
    unsigned qf[D / 16][4];
#pragma unroll
    for (int s = 0; s < D / 16; ++s)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            qf[s][i] = *reinterpret_cast<const unsigned *>(q_row[i % 2] + 16 * s + 8 * (i / 2) + 2 * t);

    size_t key_stride = (size_t)kv_heads * D;
    auto load_tile = [&](T *to, const T *cache, int tile) {
#pragma unroll
        for (int i = threadIdx.x; i < KEYS * D / 8; i += 32 * WARPS) {
            int key = i / (D / 8), column = i % (D / 8) * 8;
            int at = tile * KEYS + key;
            bool valid = at < keys;
            copy_async(to + key * STRIDE + column, cache + (valid ? at : 0) * key_stride + kv_head * D + column, valid);
        }
    };

    // Warps without a row only help to load keys.
    bool idle = tile_row + warp * 16 >= rows;
    float o[D / 8][4] = {};
    float top[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};
    float scale2 = scale * LOG2_E;

    // Keys are loaded while values are used, and the other way round.
    load_tile(k_tile, k_cache, first_tile);
    commit_copies();
    for (int tile = first_tile; tile < end_tile; ++tile) {
        load_tile(v_tile, v_cache, tile);
        commit_copies();
        wait_copies<1>();
        __syncthreads();

        float s[KEYS / 8][4] = {};
        if (!idle) {
#pragma unroll
            for (int d = 0; d < D / 16; ++d) {
                // All loads before all products: their latencies overlap.
                unsigned b[KEYS / 16][4];
#pragma unroll
                for (int n = 0; n < KEYS / 16; ++n) {
                    int key = 16 * n + lane / 16 * 8 + lane % 8, column = 16 * d + lane / 8 % 2 * 8;
                    load_matrices<false>(b[n], k_tile + key * STRIDE + column);
                }
#pragma unroll
                for (int n = 0; n < KEYS / 16; ++n) {
                    multiply(s[2 * n], qf[d], b[n][0], b[n][1], T());
                    multiply(s[2 * n + 1], qf[d], b[n][2], b[n][3], T());
                }
            }
        }
        __syncthreads();
        if (tile + 1 < end_tile)
            load_tile(k_tile, k_cache, tile + 1);
        commit_copies();

        if (!idle) {
            // Bit `n` of a row says whether it sees key `n` of the tile.
            bool masked = (tile + 1) * KEYS > before;
            uint64_t seen[2];
            for (int i = 0; i < 2; ++i)
                seen[i] = masked ? tile_mask(mask_row[i], mask_words, tile * KEYS - before) : 0;
            float tile_top[2] = {NEG_INF, NEG_INF};
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    s[n][c] *= scale2;
                    if (masked && !(seen[c / 2] >> (8 * n + 2 * t + c % 2) & 1))
                        s[n][c] = NEG_INF;
                    tile_top[c / 2] = fmaxf(tile_top[c / 2], s[n][c]);
                }
            float shift[2];
            for (int i = 0; i < 2; ++i) {
                float now = fmaxf(top[i], quad_max(tile_top[i]));
                // Nothing seen yet: any finite value serves.
                shift[i] = now == NEG_INF ? 0.0f : now;
                float keep = power_of_two(top[i] - shift[i]);
                top[i] = now;
                sum[i] *= keep;
#pragma unroll
                for (int n = 0; n < D / 8; ++n) {
                    o[n][2 * i] *= keep;
                    o[n][2 * i + 1] *= keep;
                }
            }
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int c = 0; c < 4; ++c) {
                    s[n][c] = power_of_two(s[n][c] - shift[c / 2]);
                    sum[c / 2] += s[n][c];
                }
        }

        wait_copies<1>();
        __syncthreads();
        if (!idle) {
#pragma unroll
            for (int n = 0; n < KEYS / 16; ++n) {
                unsigned p[4] = {pair(s[2 * n][0], s[2 * n][1], T()), pair(s[2 * n][2], s[2 * n][3], T()),
                                 pair(s[2 * n + 1][0], s[2 * n + 1][1], T()), pair(s[2 * n + 1][2], s[2 * n + 1][3], T())};
#pragma unroll
                for (int part = 0; part < D / 64; ++part) {
                    unsigned b[4][4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        int key = 16 * n + lane % 16, column = 16 * (4 * part + i) + lane / 16 * 8;
                        load_matrices<true>(b[i], v_tile + key * STRIDE + column);
                    }
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        multiply(o[8 * part + 2 * i], p, b[i][0], b[i][1], T());
                        multiply(o[8 * part + 2 * i + 1], p, b[i][2], b[i][3], T());
                    }
                }
            }
        }
        __syncthreads();
    }
    wait_copies<0>();
    for (int i = 0; i < 2; ++i)
        sum[i] = quad_sum(sum[i]);

    if (active == 1) {
        for (int i = 0; i < 2; ++i) {
            if (row[i] >= rows)
                continue;
            T *to = out + ((size_t)(row[i] / group) * kv_heads * group + kv_head * group + row[i] % group) * D;
#pragma unroll
            for (int n = 0; n < D / 8; ++n)
                *reinterpret_cast<unsigned *>(to + 8 * n + 2 * t) =
                    pair(o[n][2 * i] / sum[i], o[n][2 * i + 1] / sum[i], T());
        }
        return;
    }

    int padded = gridDim.x * TILE_ROWS;
    auto at = [&](int s, int r) { return ((size_t)s * kv_heads + kv_head) * padded + r; };
    for (int i = 0; i < 2; ++i) {
        if (row[i] >= rows)
            continue;
        float *to = partial + at(split, row[i]) * D;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *reinterpret_cast<float2 *>(to + 8 * n + 2 * t) = make_float2(o[n][2 * i], o[n][2 * i + 1]);
        if (t == 0)
            norms[at(split, row[i])] = make_float2(top[i], sum[i]);
    }
}

// Merges what the splits left, if there is more than one. One warp per query row; 128 threads a block.
template <typename T, int D>
__device__ void merge(const float *partial, const float2 *norms, T *out, const uint32_t *prefix, int width, int group,
                      int splits, int padded) {
    constexpr int N = D / 32;
    inputs_ready();
    int kv_heads = gridDim.y, kv_head = blockIdx.y, lane = threadIdx.x % 32;
    int per_split, active = active_splits(*prefix + width, KEYS_PER_TILE<D>, splits, per_split);
    int row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (active == 1 || row >= width * group)
        return;
    size_t step = (size_t)kv_heads * padded, first = (size_t)kv_head * padded + row;
    // Lane `s` knows split `s`: there are at most 32.
    float2 norm = lane < active ? norms[first + lane * step] : make_float2(NEG_INF, 0.0f);
    float weight = power_of_two(norm.x - warp_max(norm.x));
    weight /= warp_sum(weight * norm.y);
    partial += first * D + lane;
    float x[N] = {};
#pragma unroll 8
    for (int s = 0; s < active; ++s) {
        float w = __shfl_sync(FULL_WARP, weight, s);
#pragma unroll
        for (int n = 0; n < N; ++n)
            x[n] += w * partial[s * step * D + 32 * n];
    }
    T *to = out + ((size_t)(row / group) * kv_heads * group + kv_head * group + row % group) * D + lane;
#pragma unroll
    for (int n = 0; n < N; ++n)
        to[32 * n] = from_f32<T>(x[n]);
}

// ---- f32: one block per row and head, for exact comparison ----

template <int D>
__device__ void attend_f32(const float *q, int q_stride, const float *k_cache, const float *v_cache, float *out,
                           const uint32_t *prefix, const uint64_t *mask, int mask_words, int group, float scale) {
    constexpr int N = D / 32;
    __shared__ float parts[WARPS][D];
    __shared__ float2 norms[WARPS];
    inputs_ready();
    int width = gridDim.x, slot = blockIdx.x, head = blockIdx.y, kv_heads = gridDim.y / group;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int before = *prefix, keys = before + width;
    const float *from = q + (size_t)slot * q_stride + head * D;
    float x[N], o[N] = {}, top = NEG_INF, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n)
        x[n] = from[lane + 32 * n] * scale;
    for (int key = warp; key < keys; key += WARPS) {
        int j = key - before;
        if (j >= 0 && !(mask[(size_t)slot * mask_words + j / 64] >> (j % 64) & 1))
            continue;
        size_t at = ((size_t)key * kv_heads + head / group) * D + lane;
        float s = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n)
            s += x[n] * k_cache[at + 32 * n];
        s = warp_sum(s);
        float now = fmaxf(top, s), keep = expf(top - now), p = expf(s - now);
        top = now;
        sum = sum * keep + p;
#pragma unroll
        for (int n = 0; n < N; ++n)
            o[n] = o[n] * keep + p * v_cache[at + 32 * n];
    }
#pragma unroll
    for (int n = 0; n < N; ++n)
        parts[warp][lane + 32 * n] = o[n];
    if (lane == 0)
        norms[warp] = make_float2(top, sum);
    __syncthreads();
    float all = NEG_INF, total = 0.0f;
    for (int w = 0; w < WARPS; ++w)
        all = fmaxf(all, norms[w].x);
    for (int w = 0; w < WARPS; ++w)
        total += norms[w].y * expf(norms[w].x - all);
    for (int d = threadIdx.x; d < D; d += 32 * WARPS) {
        float y = 0.0f;
        for (int w = 0; w < WARPS; ++w)
            y += parts[w][d] * expf(norms[w].x - all);
        out[((size_t)slot * gridDim.y + head) * D + d] = y / total;
    }
}

#define KERNEL(T, D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, D <= 128 ? 3 : 1)                                         \
        attend_##D##_##T(const T *q, int q_stride, const T *k_cache, const T *v_cache, T *out, float *partial,         \
                         float2 *norms, const uint32_t *prefix, const uint64_t *mask, int mask_words, int width,       \
                         int group, float scale) {                                                                     \
        attend<T, D>(q, q_stride, k_cache, v_cache, out, partial, norms, prefix, mask, mask_words, width, group,       \
                     scale);                                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128)                                                                  \
        merge_##D##_##T(const float *partial, const float2 *norms, T *out, const uint32_t *prefix, int width,          \
                        int group, int splits, int padded) {                                                           \
        merge<T, D>(partial, norms, out, prefix, width, group, splits, padded);                                        \
    }
#define KERNEL_F32(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * WARPS)                                                           \
        attend_##D##_f32(const float *q, int q_stride, const float *k_cache, const float *v_cache, float *out,         \
                         const uint32_t *prefix, const uint64_t *mask, int mask_words, int group, float scale) {       \
        attend_f32<D>(q, q_stride, k_cache, v_cache, out, prefix, mask, mask_words, group, scale);                     \
    }

KERNEL(bf16, 64) KERNEL(bf16, 128) KERNEL(bf16, 256)
KERNEL(f16, 64) KERNEL(f16, 128) KERNEL(f16, 256)
KERNEL_F32(64) KERNEL_F32(128) KERNEL_F32(256)
