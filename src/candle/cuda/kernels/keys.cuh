// Values as integer keys that order as they do: NaN above everything, -0 equal to +0. With the token id below, keys are
// unique, the lower id the greater, so that ties go to the lowest id.
#pragma once

#include <cstdint>

__device__ __forceinline__ uint32_t order(float x) {
    if (x != x)
        return 0xffffffffu;
    uint32_t bits = __float_as_uint(x + 0.0f);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float value(uint32_t key) {
    return __uint_as_float(key ^ (key >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ uint64_t pack(uint32_t key, uint32_t id) { return (uint64_t)key << 32 | (uint32_t)~id; }

__device__ __forceinline__ uint64_t warp_greatest(uint64_t x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}
