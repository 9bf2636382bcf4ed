// The residual stream, and the norms that read it. The stream is f32 in every model: outlier channels of real
// checkpoints exceed what f16 holds, and a bf16 sum loses what small updates add. Matrix products add to it themselves.
//
// One block per row; `size` is a multiple of 4 and at most 16 * blockDim.x.

#include "common.cuh"

constexpr int MAX_CHUNKS = 4;

// Normalises a row held by the block's threads and writes it.
template <typename T>
__device__ void finish(const float4 (&x)[MAX_CHUNKS], const float *weight, float eps, T *out, int size) {
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c)
        squares += x[c].x * x[c].x + x[c].y * x[c].y + x[c].z * x[c].z + x[c].w * x[c].w;
    float scale = rsqrtf(block_sum(squares) / size + eps);
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        int i = 4 * (c * blockDim.x + threadIdx.x);
        if (i < size) {
            float4 w = load4(weight + i);
            store4(out + i, make_float4(x[c].x * scale * w.x, x[c].y * scale * w.y, x[c].z * scale * w.z,
                                        x[c].w * scale * w.w));
        }
    }
}

// Starts a pass: residual = embedding of the row's token, out = its norm.
template <typename T>
__device__ void embed_norm(const uint32_t *tokens, const T *table, float *residual, const float *weight, float eps,
                           T *out, int size) {
    size_t row = blockIdx.x;
    const T *from = table + (size_t)tokens[row] * size;
    float4 x[MAX_CHUNKS];
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        int i = 4 * (c * blockDim.x + threadIdx.x);
        x[c] = make_float4(0, 0, 0, 0);
        if (i < size) {
            x[c] = load4(from + i);
            store4(residual + row * size + i, x[c]);
        }
    }
    finish(x, weight, eps, out + row * size, size);
}

// out = norm of the row. `tap`, unless null, gets the row as it is: row `r` of it starts at `tap + r * tap_stride`.
template <typename T>
__device__ void norm(const float *rows, const float *weight, float eps, T *out, T *tap, int tap_stride, int size) {
    inputs_ready();
    size_t row = blockIdx.x;
    float4 x[MAX_CHUNKS];
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        int i = 4 * (c * blockDim.x + threadIdx.x);
        x[c] = make_float4(0, 0, 0, 0);
        if (i < size) {
            x[c] = load4(rows + row * size + i);
            if (tap)
                store4(tap + row * tap_stride + i, x[c]);
        }
    }
    finish(x, weight, eps, out + row * size, size);
}

// out = silu(gate) * up; a row of `gate_up` is `size` gates and then `size` ups.
template <typename T> __device__ void silu_mul(const T *gate_up, T *out, int size) {
    inputs_ready();
    size_t row = blockIdx.y;
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= size)
        return;
    float4 g = load4(gate_up + row * 2 * size + i);
    float4 u = load4(gate_up + row * 2 * size + size + i);
    auto silu = [](float x) { return x / (1.0f + __expf(-x)); };
    store4(out + row * size + i,
           make_float4(silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z, silu(g.w) * u.w));
}

#define KERNELS(T)                                                                                                     \
    extern "C" __global__ void embed_norm_##T(const uint32_t *tokens, const T *table, float *residual,                 \
                                              const float *weight, float eps, T *out, int size) {                      \
        embed_norm<T>(tokens, table, residual, weight, eps, out, size);                                                \
    }                                                                                                                  \
    extern "C" __global__ void norm_##T(const float *rows, const float *weight, float eps, T *out, T *tap,             \
                                        int tap_stride, int size) {                                                    \
        norm<T>(rows, weight, eps, out, tap, tap_stride, size);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void silu_mul_##T(const T *gate_up, T *out, int size) { silu_mul<T>(gate_up, out, size); }

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
