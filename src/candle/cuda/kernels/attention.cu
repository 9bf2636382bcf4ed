// Tree attention: the rows of a pass attend to the committed prefix and, among themselves, to what a bit mask says.
//
// Row `r` of the pass is in cache row `*prefix + r`, so keys are cache rows `0..*prefix + width`. Bit `j % 64` of word
// `j / 64` of mask row `i` says whether row `i` sees row `j` of the pass; each row has to see itself. The length of
// the prefix is read from the device, so that one captured launch serves every length.
//
// Cache rows are `kv_heads * D` elements. Query rows are `q_stride` elements, output rows `kv_heads * group * D`.

#include "attention.cuh"

// ---- bf16 and f16: tensor cores, keys in splits ----

// Warps of a block: as many as let two blocks have the registers of a multiprocessor.
template <int D> constexpr int WARPS = D <= 128 ? 6 : 4;
constexpr int MAX_SPLITS = 8;
// Keys that masks are taken for at a time.
constexpr int UNIT = 32;
// Rows of keys and values in shared memory start 16 bytes apart modulo 128: no bank conflicts.
template <int D> constexpr int STRIDE = D + 8;

// The bits of a mask row for the UNIT keys from row `first` of the pass on. Rows before the pass are committed: all see
// them.
__device__ __forceinline__ uint32_t unit_mask(const uint64_t *row, int words, int first) {
    if (first < 0)
        return (uint32_t)row[0] << -first | ((1u << -first) - 1);
    int word = first / 64, bit = first % 64;
    uint64_t bits = word < words ? row[word] >> bit : 0;
    if (bit > 32 && word + 1 < words)
        bits |= row[word + 1] << (64 - bit);
    return (uint32_t)bits;
}

// Copies 16 bytes to shared memory in the background, or zeroes them.
__device__ __forceinline__ void copy_async(unsigned to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(valid ? 16 : 0));
}

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

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;\n"); }
// Waits until at most `pending` of the groups committed last have not landed.
__device__ __forceinline__ void wait_copies(int pending) {
    switch (pending) {
    case 0: asm volatile("cp.async.wait_group 0;\n"); break;
    case 1: asm volatile("cp.async.wait_group 1;\n"); break;
    case 2: asm volatile("cp.async.wait_group 2;\n"); break;
    default: asm volatile("cp.async.wait_group 3;\n");
    }
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

// Warps merge: one leaves its sums and (top, sum) of its rows, another with the same rows adds them.
template <int N>
__device__ __forceinline__ void leave_sums(float4 *sums, float2 *norms, const float (&o)[N][4], const Weights &w) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < N; ++n)
        sums[32 * n + lane] = make_float4(o[n][0], o[n][1], o[n][2], o[n][3]);
    if (lane % 4 == 0)
        for (int i = 0; i < 2; ++i)
            norms[lane / 4 + 8 * i] = make_float2(w.top[i], w.sum[i]);
}
template <int N>
__device__ __forceinline__ void add_sums(const float4 *sums, const float2 *norms, float (&o)[N][4], Weights &w) {
    int lane = threadIdx.x % 32;
    float keep[2], weight[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float2 norm = norms[lane / 4 + 8 * i];
        float now = fmaxf(w.top[i], norm.x);
        keep[i] = power_of_two(w.top[i] - finite(now));
        weight[i] = power_of_two(norm.x - finite(now));
        w.top[i] = now;
        w.sum[i] = w.sum[i] * keep[i] + norm.y * weight[i];
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float4 x = sums[32 * n + lane];
        o[n][0] = o[n][0] * keep[0] + x.x * weight[0];
        o[n][1] = o[n][1] * keep[0] + x.y * weight[0];
        o[n][2] = o[n][2] * keep[1] + x.z * weight[1];
        o[n][3] = o[n][3] * keep[1] + x.w * weight[1];
    }
}

// Units of keys, shared out among the splits. The last ones may have none.
struct Share {
    int first, count, active_splits;
    __device__ Share(int keys, int splits, int split) {
        int units = (keys + UNIT - 1) / UNIT, most = (units + splits - 1) / splits;
        first = split * most;
        count = max(min(most, units - first), 0);
        active_splits = (units + most - 1) / most;
    }
};

// What is left of 16 rows: of row g = lane / 4 and of row g + 8 two elements each in D / 8 groups of four a lane, means
// of values weighted by powers of two; and for each row (greatest exponent, sum of weights), the weights being
// relative to the former.
template <int D> constexpr int PART = D / 8 * 32;

// Merges the parts of 16 rows and writes, from the `first` on, every `step`-th 8 elements of them. `x_at(p)` and
// `norm_at(p)` point to part `p`; `row` is the first of the rows, of which `rows` are real.
template <typename T, int D, typename XAt, typename NormAt>
__device__ __forceinline__ void merge_parts(int parts, XAt x_at, NormAt norm_at, int first, int step, T *out, int row,
                                            int rows, int kv_head, int kv_heads, int group, float inverse_group) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    // Loads before what needs others: they may be far.
    const uint2 *from[MAX_SPLITS];
    float2 norm[2][MAX_SPLITS];
    uint2 x[MAX_SPLITS];
    auto load_parts = [&](int n) {
#pragma unroll
        for (int p = 0; p < MAX_SPLITS; ++p)
            if (p < parts)
                x[p] = from[p][32 * n];
    };
#pragma unroll
    for (int p = 0; p < MAX_SPLITS; ++p) {
        from[p] = x_at(p) + lane;
        for (int i = 0; i < 2; ++i)
            norm[i][p] = p < parts ? norm_at(p)[g + 8 * i] : make_float2(NEG_INF, 0.0f);
    }
    if (first < D / 8)
        load_parts(first);
    float weight[2][MAX_SPLITS];
    T *to[2];
    for (int i = 0; i < 2; ++i) {
        float top = NEG_INF, sum = 0.0f;
#pragma unroll
        for (int p = 0; p < MAX_SPLITS; ++p)
            top = fmaxf(top, norm[i][p].x);
#pragma unroll
        for (int p = 0; p < MAX_SPLITS; ++p) {
            weight[i][p] = power_of_two(norm[i][p].x - finite(top)) * norm[i][p].y;
            sum += weight[i][p];
        }
        float inverse = __fdividef(1.0f, sum);
#pragma unroll
        for (int p = 0; p < MAX_SPLITS; ++p)
            weight[i][p] *= inverse;
        int r = row + g + 8 * i, slot = divided(r, inverse_group);
        to[i] = out + ((size_t)(slot * kv_heads + kv_head) * group + r - slot * group) * D + 2 * t;
    }
    for (int n = first; n < D / 8; n += step) {
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int p = 0; p < MAX_SPLITS; ++p)
            if (p < parts) {
                float2 a = unpaired(x[p].x, T()), b = unpaired(x[p].y, T());
                y.x += weight[0][p] * a.x;
                y.y += weight[0][p] * a.y;
                y.z += weight[1][p] * b.x;
                y.w += weight[1][p] * b.y;
            }
        if (n + step < D / 8)
            load_parts(n + step);
        if (g < rows)
            *reinterpret_cast<unsigned *>(to[0] + 8 * n) = pair(y.x, y.y, T());
        if (g + 8 < rows)
            *reinterpret_cast<unsigned *>(to[1] + 8 * n) = pair(y.z, y.w, T());
    }
}

#if __CUDA_ARCH__ >= 900
// All threads of a cluster arrive, and then wait for each other. If RELEASE, what they wrote to shared memory before is
// visible after.
template <bool RELEASE> __device__ __forceinline__ void cluster_arrive() {
    if (RELEASE)
        asm volatile("barrier.cluster.arrive.release.aligned;\n" ::: "memory");
    else
        asm volatile("barrier.cluster.arrive.relaxed.aligned;\n" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;\n" ::: "memory"); }

// Where `p`, in this block's shared memory, is in that of block `rank` of the cluster.
template <typename P> __device__ __forceinline__ const P *in_block(const P *p, int rank) {
    uint64_t at;
    asm("mapa.u64 %0, %1, %2;\n" : "=l"(at) : "l"(p), "r"(rank));
    return reinterpret_cast<const P *>(at);
}
#endif

// Queries of the heads that share a KV head are stacked: query row `r` of KV head `h` is head `h * group + r % group`
// of pass row `r / group`. Grid (splits, tiles of 16 * row_warps query rows, KV heads).
//
// A split takes a run of units of keys. Its block has `key_warps` warps for each 16 of its rows, which take turns with
// the units. A step is a unit for each of them; `stages` steps, 2 to 4, fit into shared memory.
//
// Parts that warps leave are merged within the block. Those of blocks are merged by the splits of a tile
// together, where blocks can read each other's shared memory; elsewhere they go to `partial` and `norms`, for `merge`.
template <typename T, int D>
__device__ void attend(const T *q, int q_stride, const T *k_cache, const T *v_cache, T *out, uint2 *partial,
                       float2 *norms, const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group,
                       float scale, int row_warps, int key_warps, int stages) {
    constexpr int THREADS = 32 * WARPS<D>;
    constexpr int UNIT_SIZE = UNIT * STRIDE<D>;
    constexpr int PER_ROW = D / 8; // copies of 16 bytes
    static_assert(THREADS % PER_ROW == 0, "a thread copies the same columns of all rows");
    extern __shared__ __align__(16) unsigned char shared[];

    dependents_may_start();
    int splits = gridDim.x, split = blockIdx.x, kv_heads = gridDim.z, kv_head = blockIdx.z;
    int before = *prefix, keys = before + width;
    Share share(keys, splits, split);

    // Copies a step, the keys of its units and then their values: the next one to the next stage.
    T *ring = reinterpret_cast<T *>(shared);
    int values_at = key_warps * UNIT_SIZE, stage_size = 2 * values_at;
    constexpr int ROWS_AT_ONCE = THREADS / PER_ROW;
    int copied_row = threadIdx.x / PER_ROW, column = threadIdx.x % PER_ROW * 8;
    int key_stride = kv_heads * D;
    size_t copied_at = ((size_t)share.first * UNIT + copied_row) * key_stride + kv_head * D + column;
    const T *k = k_cache + copied_at, *v = v_cache + copied_at;
    int loaded = 0, to_stage = 0, in_flight = 0;
    auto load_step = [&]() {
        unsigned to = shared_address(ring + to_stage * stage_size + copied_row * STRIDE<D> + column);
        int count = min(key_warps, share.count - loaded) * UNIT, end = keys - (share.first + loaded) * UNIT;
        const T *from_k = k, *from_v = v;
        for (int key = copied_row; key < count; key += ROWS_AT_ONCE) {
            copy_async(to, from_k, key < end);
            copy_async(to + values_at * sizeof(T), from_v, key < end);
            to += ROWS_AT_ONCE * STRIDE<D> * sizeof(T);
            from_k += ROWS_AT_ONCE * key_stride;
            from_v += ROWS_AT_ONCE * key_stride;
        }
        commit_copies();
        k += key_warps * UNIT * key_stride;
        v += key_warps * UNIT * key_stride;
        loaded += key_warps;
        to_stage = to_stage + 1 == stages ? 0 : to_stage + 1;
        ++in_flight;
    };
    // What is committed does not depend on the kernels before.
    while (in_flight < stages && loaded < share.count &&
           (share.first + min(loaded + key_warps, share.count)) * UNIT <= before)
        load_step();
    await_inputs();

    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int key_warp = 0, row_warp = warp;
    while (row_warp >= row_warps) {
        row_warp -= row_warps;
        ++key_warp;
    }
    int g = lane / 4, t = lane % 4;
    int tile = blockIdx.y * 16 * row_warps, rows = min(width * group - tile, 16 * row_warps);
    // Warps without a row only help to load keys. Rows that fill up a warp's 16 repeat the last one.
    bool idle = row_warp * 16 >= rows;
    float inverse_group = 1.0f / group;
    T *q_tile = ring + stages * stage_size;
    for (int r = copied_row; r < (rows + 15) / 16 * 16; r += ROWS_AT_ONCE) {
        int row = tile + min(r, rows - 1), slot = divided(row, inverse_group);
        const T *from = q + (size_t)slot * q_stride + (kv_head * group + row - slot * group) * D + column;
        copy_async(shared_address(q_tile + r * STRIDE<D> + column), from, true);
    }
    commit_copies();
    int after = in_flight ? 0 : -1;
    for (; in_flight < stages && loaded < share.count; ++after)
        load_step();
    wait_copies(max(after, 0));
    __syncthreads();
    unsigned qf[D / 16][4];
    if (!idle)
#pragma unroll
        for (int d = 0; d < D / 16; ++d)
            load_matrices<false>(qf[d],
                                 q_tile + (row_warp * 16 + lane % 16) * STRIDE<D> + 16 * d + lane / 16 * 8);
    const uint64_t *mask_row[2];
    for (int i = 0; i < 2; ++i) {
        int row = tile + min(row_warp * 16 + g + 8 * i, rows - 1);
        mask_row[i] = mask + divided(row, inverse_group) * mask_words;
    }

    float o[D / 8][4] = {};
    Weights weights{scale * LOG2_E};
    int stage = 0;
    for (int unit = key_warp; unit - key_warp < share.count; unit += key_warps) {
        wait_copies(in_flight - 1);
        __syncthreads();
        // All are done with the step before.
        if (in_flight < stages && loaded < share.count)
            load_step();
        if (!idle && unit < share.count) {
            const T *k_unit = ring + stage * stage_size + key_warp * UNIT_SIZE;
            const T *v_unit = k_unit + values_at;
            float s[UNIT / 8][4] = {};
#pragma unroll
            for (int d = 0; d < D / 16; d += 2) {
                // Loads before products, here and below: their latencies overlap.
                unsigned b[UNIT / 8][4];
#pragma unroll
                for (int n = 0; n < UNIT / 8; ++n) {
                    int key = n % 2 * 16 + lane / 16 * 8 + lane % 8, at = 16 * (d + n / 2) + lane / 8 % 2 * 8;
                    load_matrices<false>(b[n], k_unit + key * STRIDE<D> + at);
                }
#pragma unroll
                for (int n = 0; n < UNIT / 8; ++n) {
                    multiply(s[n % 2 * 2], qf[d + n / 2], b[n][0], b[n][1], T());
                    multiply(s[n % 2 * 2 + 1], qf[d + n / 2], b[n][2], b[n][3], T());
                }
            }

            int first = (share.first + unit) * UNIT - before;
            if (first + UNIT > 0) {
                uint32_t seen[2];
                for (int i = 0; i < 2; ++i)
                    seen[i] = unit_mask(mask_row[i], mask_words, first) >> 2 * t;
                hide(s, seen);
            }
            float keep[2];
            if (weights.raise(s, keep))
                scale_rows(o, keep);
            weights.weigh<UNIT / 8>(s);
#pragma unroll
            for (int n = 0; n < UNIT / 16; ++n) {
                unsigned p[4] = {pair(s[2 * n][0], s[2 * n][1], T()), pair(s[2 * n][2], s[2 * n][3], T()),
                                 pair(s[2 * n + 1][0], s[2 * n + 1][1], T()), pair(s[2 * n + 1][2], s[2 * n + 1][3], T())};
#pragma unroll
                for (int d = 0; d < D / 16; d += 4) {
                    unsigned b[4][4];
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        load_matrices<true>(b[i], v_unit + (16 * n + lane % 16) * STRIDE<D> + 16 * (d + i) +
                                                      lane / 16 * 8);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        multiply(o[2 * (d + i)], p, b[i][0], b[i][1], T());
                        multiply(o[2 * (d + i) + 1], p, b[i][2], b[i][3], T());
                    }
                }
            }
        }
        --in_flight;
        stage = stage + 1 == stages ? 0 : stage + 1;
    }
    weights.finish();

    // Sums of warps take the place of keys. Half of the warps leave theirs to the others until one has all.
    float4 *sums = reinterpret_cast<float4 *>(shared);
    float2 *sum_norms = reinterpret_cast<float2 *>(sums + WARPS<D> * PART<D>);
    __syncthreads();
    for (int left = key_warps; left > 1;) {
        int half = (left + 1) / 2;
        if (!idle && key_warp >= half && key_warp < left)
            leave_sums(sums + warp * PART<D>, sum_norms + warp * 16, o, weights);
        __syncthreads();
        if (!idle && key_warp < left - half) {
            int other = warp + half * row_warps;
            add_sums(sums + other * PART<D>, sum_norms + other * 16, o, weights);
        }
        left = half;
    }

    auto leave = [&](uint2 *at, float2 *norms_at) {
        float mean[2];
        for (int i = 0; i < 2; ++i)
            mean[i] = weights.sum[i] > 0.0f ? __fdividef(1.0f, weights.sum[i]) : 0.0f;
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            at[32 * n + lane] = make_uint2(pair(o[n][0] * mean[0], o[n][1] * mean[0], T()),
                                           pair(o[n][2] * mean[1], o[n][3] * mean[1], T()));
        if (t == 0)
            for (int i = 0; i < 2; ++i)
                norms_at[g + 8 * i] = make_float2(weights.top[i], weights.sum[i]);
    };
#if __CUDA_ARCH__ >= 900
    // In the place of sums that nobody left.
    uint2 *parts = reinterpret_cast<uint2 *>(shared);
    if (!idle && key_warp == 0)
        leave(parts + row_warp * PART<D>, sum_norms + row_warp * 16);
    cluster_arrive<true>();
    cluster_wait();
    if (!idle)
        merge_parts<T, D>(
            share.active_splits, [&](int p) { return in_block(parts + row_warp * PART<D>, p); },
            [&](int p) { return in_block(sum_norms + row_warp * 16, p); }, split * key_warps + key_warp,
            splits * key_warps, out, tile + row_warp * 16, rows - row_warp * 16, kv_head, kv_heads, group,
            inverse_group);
    // The others may still read here.
    cluster_arrive<false>();
    cluster_wait();
#else
    size_t at = (((size_t)split * kv_heads + kv_head) * gridDim.y + blockIdx.y) * row_warps + row_warp;
    if (!idle && key_warp == 0)
        leave(partial + at * PART<D>, norms + at * 16);
#endif
}

// Merges what the splits left. Grid (16 rows each, KV heads).
template <typename T, int D>
__device__ void merge(const uint2 *partial, const float2 *norms, T *out, const uint32_t *prefix, int width, int group,
                      int splits) {
    int kv_heads = gridDim.y, kv_head = blockIdx.y, row = blockIdx.x * 16;
    if (row >= width * group)
        return;
    Share share(*prefix + width, splits, 0);
    auto at = [&](int p) { return ((size_t)p * kv_heads + kv_head) * gridDim.x + blockIdx.x; };
    merge_parts<T, D>(
        share.active_splits, [&](int p) { return partial + at(p) * PART<D>; },
        [&](int p) { return norms + at(p) * 16; }, threadIdx.x / 32, blockDim.x / 32, out, row, width * group - row,
        kv_head, kv_heads, group, 1.0f / group);
}

// ---- f32: one block per row and head, for exact comparison ----

constexpr int F32_WARPS = 4;

template <int D>
__device__ void attend_f32(const float *q, int q_stride, const float *k_cache, const float *v_cache, float *out,
                           const uint32_t *prefix, const uint64_t *mask, int mask_words, int group, float scale) {
    constexpr int N = D / 32;
    __shared__ float parts[F32_WARPS][D];
    __shared__ float2 norms[F32_WARPS];
    inputs_ready();
    int width = gridDim.x, slot = blockIdx.x, head = blockIdx.y, kv_heads = gridDim.y / group;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int before = *prefix, keys = before + width;
    const float *from = q + (size_t)slot * q_stride + head * D;
    float x[N], o[N] = {}, top = NEG_INF, sum = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n)
        x[n] = from[lane + 32 * n] * scale;
    for (int key = warp; key < keys; key += F32_WARPS) {
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
    for (int w = 0; w < F32_WARPS; ++w)
        all = fmaxf(all, norms[w].x);
    for (int w = 0; w < F32_WARPS; ++w)
        total += norms[w].y * expf(norms[w].x - all);
    for (int d = threadIdx.x; d < D; d += 32 * F32_WARPS) {
        float y = 0.0f;
        for (int w = 0; w < F32_WARPS; ++w)
            y += parts[w][d] * expf(norms[w].x - all);
        out[((size_t)slot * gridDim.y + head) * D + d] = y / total;
    }
}

#define KERNEL(T, D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(32 * WARPS<D>, 2) attend_##D##_##T(                                   \
        const T *q, int q_stride, const T *k_cache, const T *v_cache, T *out, uint2 *partial, float2 *norms,           \
        const uint32_t *prefix, const uint64_t *mask, int mask_words, int width, int group, float scale,               \
        int row_warps, int key_warps, int stages) {                                                                    \
        attend<T, D>(q, q_stride, k_cache, v_cache, out, partial, norms, prefix, mask, mask_words, width, group,       \
                     scale, row_warps, key_warps, stages);                                                             \
    }                                                                                                                  \
    extern "C" __global__ void merge_##D##_##T(const uint2 *partial, const float2 *norms, T *out,                      \
                                               const uint32_t *prefix, int width, int group, int splits) {             \
        merge<T, D>(partial, norms, out, prefix, width, group, splits);                                                \
    }
#define KERNEL_F32(D)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(32 * F32_WARPS)                                                           \
        attend_##D##_f32(const float *q, int q_stride, const float *k_cache, const float *v_cache, float *out,         \
                         const uint32_t *prefix, const uint64_t *mask, int mask_words, int group, float scale) {       \
        attend_f32<D>(q, q_stride, k_cache, v_cache, out, prefix, mask, mask_words, group, scale);                     \
    }

KERNEL(bf16, 64) KERNEL(bf16, 128) KERNEL(bf16, 256)
KERNEL(f16, 64) KERNEL(f16, 128) KERNEL(f16, 256)
KERNEL_F32(64) KERNEL_F32(128) KERNEL_F32(256)
