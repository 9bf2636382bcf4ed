// Queries and keys on their way from the projection to attention: bias, norm per head, rotation, and the write of
// keys and values into the cache. Half a warp per row and head.

#include "common.cuh"

// A row of `qkv` holds `q_heads + 2 * kv_heads` heads of each of `layers` layers, or, with `q_heads` 0, keys and values
// only, and so does `bias`; norms have a row a layer. Queries are rotated in place. Keys and values of row `r` go to
// cache row `*prefix + r`; those of the next layer are `layer_stride` elements on. `bias`, `q_norm` and `k_norm` may
// be null. `rope` is (cos, sin) pairs, `D / 2` a position.
template <typename T, int D>
__device__ void rope_store(T *qkv, const T *bias, const float *q_norm, const float *k_norm, float eps,
                           const float2 *rope, const uint32_t *positions, const uint32_t *prefix, T *k_cache,
                           T *v_cache, int rows, int layers, int q_heads, int kv_heads, size_t layer_stride) {
    // A lane has N neighbours in each half of the head.
    constexpr int LANES = 16, N = D / 2 / LANES;
    dependents_may_start();
    int heads = q_heads + 2 * kv_heads, row_heads = layers * heads, units = rows * row_heads;
    int unit = (blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    bool exists = unit < units;
    // Lanes without a head go along with the last one.
    unit = min(unit, units - 1);
    int row = unit / row_heads, row_head = unit % row_heads, layer = row_head / heads, head = row_head % heads;
    int i = N * (threadIdx.x % LANES);
    bool is_query = head < q_heads, is_value = head >= q_heads + kv_heads;
    // Weights, positions and the prefix are there already.
    const float *norm = is_value ? nullptr : is_query ? q_norm : k_norm;
    Floats<N> a_norm = {}, b_norm = {}, a_bias = {}, b_bias = {};
    if (norm) {
        a_norm = load<N>(norm + layer * D + i);
        b_norm = load<N>(norm + layer * D + i + D / 2);
    }
    if (bias) {
        a_bias = load<N>(bias + row_head * D + i);
        b_bias = load<N>(bias + row_head * D + i + D / 2);
    }
    float2 angle[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
        angle[n] = is_value ? make_float2(1.0f, 0.0f) : rope[(size_t)positions[row] * (D / 2) + i + n];
    T *from = qkv + (size_t)unit * D + i, *to = from;
    if (!is_query) {
        size_t cache_row = (size_t)*prefix + row;
        int kv_head = (head - q_heads) % kv_heads;
        to = (is_value ? v_cache : k_cache) + layer * layer_stride + (cache_row * kv_heads + kv_head) * D + i;
    }

    await_inputs();
    Floats<N> a = load<N>(from), b = load<N>(from + D / 2);
    float squares = 0.0f;
#pragma unroll
    for (int n = 0; n < N; ++n) {
        a.v[n] += a_bias.v[n];
        b.v[n] += b_bias.v[n];
        squares += a.v[n] * a.v[n] + b.v[n] * b.v[n];
    }
    squares = warp_sum<LANES>(squares);
    if (norm) {
        float scale = rsqrtf(squares / D + eps);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            a.v[n] *= scale * a_norm.v[n];
            b.v[n] *= scale * b_norm.v[n];
        }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
        float x = a.v[n], y = b.v[n];
        a.v[n] = x * angle[n].x - y * angle[n].y;
        b.v[n] = y * angle[n].x + x * angle[n].y;
    }
    if (exists) {
        store(to, a);
        store(to + D / 2, b);
    }
}

#define KERNEL(T, D)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(1024) rope_store_##D##_##T(                                           \
        T *qkv, const T *bias, const float *q_norm, const float *k_norm, float eps, const float2 *rope,                \
        const uint32_t *positions, const uint32_t *prefix, T *k_cache, T *v_cache, int rows, int layers, int q_heads,  \
        int kv_heads, size_t layer_stride) {                                                                           \
        rope_store<T, D>(qkv, bias, q_norm, k_norm, eps, rope, positions, prefix, k_cache, v_cache, rows, layers,      \
                         q_heads, kv_heads, layer_stride);                                                             \
    }
#define KERNELS(T) KERNEL(T, 64) KERNEL(T, 128) KERNEL(T, 256)

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
