// Random weights, for measurements at a shape whose checkpoint is not at hand.

#include "common.cuh"

// out[i] is uniform in [-bound, bound), from a counter-based hash of `seed` and `i`.
template <typename T> __device__ void fill_random(T *out, size_t size, uint64_t seed, float bound) {
    size_t step = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += step) {
        uint64_t x = seed + i * 0x9e3779b97f4a7c15ull;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
        x ^= x >> 31;
        out[i] = from_f32<T>(((float)(x >> 40) * 0x1p-23f - 1.0f) * bound);
    }
}

#define KERNEL(T)                                                                                                      \
    extern "C" __global__ void fill_random_##T(T *out, size_t size, uint64_t seed, float bound) {                      \
        fill_random<T>(out, size, seed, bound);                                                                        \
    }

KERNEL(f32)
KERNEL(bf16)
KERNEL(f16)
