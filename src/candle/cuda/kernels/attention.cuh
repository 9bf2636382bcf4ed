// What the attention kernels for bf16 and f16 share: masks, conversions and weights.
#pragma once

#include "common.cuh"

// How far the exponent of a weight may exceed that of the greatest when sums were last scaled: f16 holds 2^SLACK.
constexpr float SLACK = 8.0f;

__device__ __forceinline__ unsigned pair(float a, float b, bf16) {
    __nv_bfloat162 x = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<unsigned *>(&x);
}
__device__ __forceinline__ unsigned pair(float a, float b, f16) {
    __half2 x = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned *>(&x);
}

__device__ __forceinline__ float2 unpaired(unsigned x, bf16) {
    return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162 *>(&x));
}
__device__ __forceinline__ float2 unpaired(unsigned x, f16) { return __half22float2(*reinterpret_cast<__half2 *>(&x)); }

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Hides what is not seen of a warp's scores for 8 N keys: row g = lane / 4 has s[n][0..2], row g + 8 s[n][2..4], for
// keys 8 n + lane % 4 * 2 and the one after. Bits 0 and 1 of `seen` are those keys' for n = 0.
template <int N, typename Bits> __device__ __forceinline__ void hide(float (&s)[N][4], const Bits (&seen)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (!(seen[c / 2] >> (8 * n + c % 2) & 1))
                s[n][c] = NEG_INF;
}

__device__ __forceinline__ float finite(float top) { return top == NEG_INF ? 0.0f : top; }

// What sums of rows g and g + 8 are weighted by: 2^(scale * (score - top)). `top` is the greatest score when they were
// last scaled, `sum` this lane's part of the weights' sum.
struct Weights {
    float scale, top[2] = {NEG_INF, NEG_INF}, sum[2] = {0.0f, 0.0f};

    // Takes the greatest of new scores into account. Returns whether the warp has to scale its sums by `keep`: weights
    // may exceed one a bit, so that most scores leave sums as they are.
    template <int N> __device__ __forceinline__ bool raise(const float (&s)[N][4], float (&keep)[2]) {
        float now[2];
        bool grown = false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            now[i] = top[i];
#pragma unroll
            for (int n = 0; n < N; ++n)
                now[i] = fmaxf(now[i], fmaxf(s[n][2 * i], s[n][2 * i + 1]));
            now[i] = quad_max(now[i]);
            grown |= now[i] * scale > top[i] * scale + SLACK;
        }
        if (!__any_sync(FULL_WARP, grown))
            return false;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            keep[i] = power_of_two((top[i] - finite(now[i])) * scale);
            top[i] = now[i];
            sum[i] *= keep[i];
        }
        return true;
    }

    // Turns scores into weights.
    template <int N> __device__ __forceinline__ void weigh(float (*s)[4]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float shift = finite(top[i]) * scale;
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int c = 2 * i; c < 2 * i + 2; ++c) {
                    s[n][c] = power_of_two(s[n][c] * scale - shift);
                    sum[i] += s[n][c];
                }
        }
    }

    // When all keys are done: makes `sum` whole and `top` an exponent.
    __device__ __forceinline__ void finish() {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = quad_sum(sum[i]);
            top[i] *= scale;
        }
    }
};

template <int N> __device__ __forceinline__ void scale_rows(float (&o)[N][4], const float (&by)[2]) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            o[n][c] *= by[c / 2];
}
