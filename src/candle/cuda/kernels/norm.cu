// The residual stream, and the norms that read it. The stream is f32 in every model: outlier channels of real
// checkpoints exceed what f16 holds, and a bf16 sum loses what small updates add. Matrix products add to it themselves.
//
// One block per row; `size` is a multiple of 8 and at most 16 * blockDim.x.

#include "common.cuh"

constexpr int MAX_CHUNKS = 4;

// What a thread has of a row: four elements each in MAX_CHUNKS places, zero beyond the row.
struct Chunks {
    float4 c[MAX_CHUNKS];
};

template <typename F> __device__ __forceinline__ void each_chunk(int size, F f) {
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c) {
        int i = 4 * (c * blockDim.x + threadIdx.x);
        if (i < size)
            f(c, i);
    }
}

template <typename T> __device__ __forceinline__ Chunks load_row(const T *from, int size) {
    Chunks x = {};
    each_chunk(size, [&](int c, int i) { x.c[c] = load4(from + i); });
    return x;
}

template <typename T> __device__ __forceinline__ void store_row(T *to, const Chunks &x, int size) {
    each_chunk(size, [&](int c, int i) { store4(to + i, x.c[c]); });
}

// Writes the norm of a row that the block's threads hold.
template <typename T>
__device__ void finish(const Chunks &x, const Chunks &weight, float eps, T *out, int size) {
    float squares = 0.0f;
#pragma unroll
    for (int c = 0; c < MAX_CHUNKS; ++c)
        squares += x.c[c].x * x.c[c].x + x.c[c].y * x.c[c].y + x.c[c].z * x.c[c].z + x.c[c].w * x.c[c].w;
    float scale = rsqrtf(__fdividef(block_sum(squares), size) + eps);
    each_chunk(size, [&](int c, int i) {
        float4 v = x.c[c], w = weight.c[c];
        store4(out + i, make_float4(v.x * scale * w.x, v.y * scale * w.y, v.z * scale * w.z, v.w * scale * w.w));
    });
}

// Starts a pass: residual = embedding of the row's token, out = its norm.
template <typename T>
__device__ void embed_norm(const uint32_t *tokens, const T *table, float *residual, const float *weight, float eps,
                           T *out, int size) {
    size_t row = blockIdx.x;
    Chunks x = load_row(table + (size_t)tokens[row] * size, size);
    store_row(residual + row * size, x, size);
    finish(x, load_row(weight, size), eps, out + row * size, size);
}

// out = norm of the row. `tap`, unless null, gets the row as it is: row `r` of it starts at `tap + r * tap_stride`.
template <typename T>
__device__ void norm(const float *rows, const float *weight, float eps, T *out, T *tap, int tap_stride, int size) {
    // Weights are there already.
    Chunks w = load_row(weight, size);
    inputs_ready();
    size_t row = blockIdx.x;
    Chunks x = load_row(rows + row * size, size);
    if (tap)
        store_row(tap + row * tap_stride, x, size);
    finish(x, w, eps, out + row * size, size);
}

// out = silu(gate) * up; a row of `gate_up` is eight gates, the eight ups of the same elements, and so on.
template <typename T> __device__ void silu_mul_rows(const T *gate_up, T *out, int units) {
    inputs_ready();
#pragma unroll 2
    for (int unit = blockIdx.x * blockDim.x + threadIdx.x; unit < units; unit += gridDim.x * blockDim.x) {
        const T *gate = gate_up + (size_t)unit * 16;
        Vec8<T> g = load8(gate), u = load8(gate + 8);
#pragma unroll
        for (int n = 0; n < 8; ++n)
            g.v[n] = silu_mul(g.v[n], u.v[n]);
        *reinterpret_cast<Vec8<T> *>(out + (size_t)unit * 8) = g;
    }
}

#define KERNELS(T)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(1024) embed_norm_##T(const uint32_t *tokens, const T *table, float *residual,                 \
                                              const float *weight, float eps, T *out, int size) {                      \
        embed_norm<T>(tokens, table, residual, weight, eps, out, size);                                                \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(1024)                                                                 \
        norm_##T(const float *rows, const float *weight, float eps, T *out, T *tap, int tap_stride, int size) {        \
        norm<T>(rows, weight, eps, out, tap, tap_stride, size);                                                        \
    }                                                                                                                  \
    extern "C" __global__ void silu_mul_##T(const T *gate_up, T *out, int units) {                                     \
        silu_mul_rows<T>(gate_up, out, units);                                                                         \
    }

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
