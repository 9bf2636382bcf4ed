// What is left of SUMMARIZED entries of a row of logits, so that the best of the row and the sum of all exponentials are
// found without reading them again: the greatest, and the sum of exponentials of what the others are below it.
#pragma once

#include "common.cuh"

constexpr int SUMMARIZED = 64;

// NaN if one of them is.
__device__ __forceinline__ float greater(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// exp(x - greatest), where `x` is not greater; 0 where both are -inf.
__device__ __forceinline__ float share_of(float x, float greatest) {
    return greatest == NEG_INF ? 0.0f : __expf(x - greatest);
}

// Of `x` of those lanes of which all numbers differ in bits from `FIRST` to below `END` alone. Every lane gets it.
template <int FIRST, int END, int N> __device__ __forceinline__ float2 summary(const float (&x)[N]) {
    float greatest = x[0], sum = 0.0f;
#pragma unroll
    for (int i = 1; i < N; ++i)
        greatest = greater(greatest, x[i]);
#pragma unroll
    for (int offset = FIRST; offset < END; offset *= 2)
        greatest = greater(greatest, __shfl_xor_sync(FULL_WARP, greatest, offset));
#pragma unroll
    for (int i = 0; i < N; ++i)
        sum += share_of(x[i], greatest);
#pragma unroll
    for (int offset = FIRST; offset < END; offset *= 2)
        sum += __shfl_xor_sync(FULL_WARP, sum, offset);
    return make_float2(greatest, sum);
}
