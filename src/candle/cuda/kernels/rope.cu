// Queries and keys on their way from the projection to attention: bias, norm per head, rotation, and the write of
// keys and values into the cache. One warp per row and head.

#include "common.cuh"

// `qkv` holds `q_heads + 2 * kv_heads` heads a row, or, with `q_heads` 0, keys and values only. Queries are rotated
// in place. Keys and values of row `r` go to cache row `*prefix + r`. `bias`, `q_norm` and `k_norm` may be null.
// `rope` is (cos, sin) pairs, `D / 2` a position.
template <typename T, int D>
__device__ void rope_store(T *qkv, const T *bias, const float *q_norm, const float *k_norm, float eps,
                           const float2 *rope, const uint32_t *positions, const uint32_t *prefix, T *k_cache,
                           T *v_cache, int q_heads, int kv_heads) {
    constexpr int N = D / 64;
    inputs_ready();
    int row = blockIdx.x;
    int head = blockIdx.y * blockDim.y + threadIdx.y;
    int heads = q_heads + 2 * kv_heads;
    if (head >= heads)
        return;
    int lane = threadIdx.x;
    T *from = qkv + ((size_t)row * heads + head) * D;
    float a[N], b[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
        int i = lane + 32 * n;
        a[n] = to_f32(from[i]);
        b[n] = to_f32(from[i + D / 2]);
        if (bias) {
            a[n] += to_f32(bias[head * D + i]);
            b[n] += to_f32(bias[head * D + i + D / 2]);
        }
    }
    bool is_query = head < q_heads;
    bool is_value = head >= q_heads + kv_heads;
    const float *norm = is_query ? q_norm : k_norm;
    if (norm && !is_value) {
        float squares = 0.0f;
#pragma unroll
        for (int n = 0; n < N; ++n)
            squares += a[n] * a[n] + b[n] * b[n];
        float scale = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            a[n] *= scale * norm[lane + 32 * n];
            b[n] *= scale * norm[lane + 32 * n + D / 2];
        }
    }
    T *to = from;
    if (!is_query) {
        size_t cache_row = (size_t)*prefix + row;
        int kv_head = (head - q_heads) % kv_heads;
        to = (is_value ? v_cache : k_cache) + (cache_row * kv_heads + kv_head) * D;
    }
    const float2 *angles = rope + (size_t)positions[row] * (D / 2);
#pragma unroll
    for (int n = 0; n < N; ++n) {
        int i = lane + 32 * n;
        float2 angle = is_value ? make_float2(1.0f, 0.0f) : angles[i];
        to[i] = from_f32<T>(a[n] * angle.x - b[n] * angle.y);
        to[i + D / 2] = from_f32<T>(b[n] * angle.x + a[n] * angle.y);
    }
}

#define KERNEL(T, D)                                                                                                   \
    extern "C" __global__ void rope_store_##D##_##T(                                                                   \
        T *qkv, const T *bias, const float *q_norm, const float *k_norm, float eps, const float2 *rope,                \
        const uint32_t *positions, const uint32_t *prefix, T *k_cache, T *v_cache, int q_heads, int kv_heads) {        \
        rope_store<T, D>(qkv, bias, q_norm, k_norm, eps, rope, positions, prefix, k_cache, v_cache, q_heads,           \
                         kv_heads);                                                                                    \
    }
#define KERNELS(T) KERNEL(T, 64) KERNEL(T, 128) KERNEL(T, 256)

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
