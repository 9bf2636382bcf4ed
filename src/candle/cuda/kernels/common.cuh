// What all kernels share: element types, warp and block reductions.
//
// Kernels compute in f32 whatever the element type. Names end in the element type: f32, bf16, f16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

using f32 = float;
using bf16 = __nv_bfloat16;
using f16 = __half;

constexpr float NEG_INF = -__builtin_huge_valf();
constexpr unsigned FULL_WARP = 0xffffffffu;

__device__ __forceinline__ float to_f32(f32 x) { return x; }
__device__ __forceinline__ float to_f32(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_f32(f16 x) { return __half2float(x); }

template <typename T> __device__ __forceinline__ T from_f32(float x);
template <> __device__ __forceinline__ f32 from_f32<f32>(float x) { return x; }
// By conversions of two: those of one take several times as long.
template <> __device__ __forceinline__ bf16 from_f32<bf16>(float x) { return __floats2bfloat162_rn(x, 0.0f).x; }
template <> __device__ __forceinline__ f16 from_f32<f16>(float x) { return __floats2half2_rn(x, 0.0f).x; }

// N neighbouring elements, moved at once.
template <typename T, int N> struct alignas(N * sizeof(T)) Vec {
    T v[N];
};
template <int N> struct Floats {
    float v[N];
};

template <int N, typename T> __device__ __forceinline__ Floats<N> load(const T *p) {
    Vec<T, N> x = *reinterpret_cast<const Vec<T, N> *>(p);
    Floats<N> y;
#pragma unroll
    for (int n = 0; n < N; ++n)
        y.v[n] = to_f32(x.v[n]);
    return y;
}

template <typename T, int N> __device__ __forceinline__ void store(T *p, Floats<N> x) {
    Vec<T, N> y;
#pragma unroll
    for (int n = 0; n < N; ++n)
        y.v[n] = from_f32<T>(x.v[n]);
    *reinterpret_cast<Vec<T, N> *>(p) = y;
}

template <typename T> __device__ __forceinline__ float4 load4(const T *p) {
    Floats<4> x = load<4>(p);
    return make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

template <typename T> __device__ __forceinline__ void store4(T *p, float4 x) {
    store(p, Floats<4>{{x.x, x.y, x.z, x.w}});
}

// Eight neighbouring elements: as wide as a load can be in 16-bit types.
template <typename T> struct alignas(16) Vec8 {
    T v[8];
};

template <typename T> __device__ __forceinline__ Vec8<T> load8(const T *p) {
    return *reinterpret_cast<const Vec8<T> *>(p);
}

constexpr float LOG2_E = 1.4426950408889634f;

// 2^x, to two units in the last place; 0 for -inf.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x, to one unit in the last place, without a branch; 0 for inf.
__device__ __forceinline__ float inverse(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// x / y for small x, by the inverse of y.
__device__ __forceinline__ int divided(int x, float inverse) { return (int)((x + 0.5f) * inverse); }

// silu(gate) * up.
template <typename T> __device__ __forceinline__ T silu_mul(T gate, T up) {
    float x = to_f32(gate);
    return from_f32<T>(x * inverse(1.0f + power_of_two(-LOG2_E * x)) * to_f32(up));
}

__device__ __forceinline__ unsigned shared_address(const void *p) { return (unsigned)__cvta_generic_to_shared(p); }

// Of the whole warp, or of each LANES lanes that lie together.
template <int LANES = 32> __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        x += __shfl_xor_sync(FULL_WARP, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset /= 2)
        x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, offset));
    return x;
}

// Sum over the block, whose size is a multiple of 32. Every thread gets it.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float parts[32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? parts[threadIdx.x % 32] : 0.0f;
    x = warp_sum(x);
    __syncthreads();
    return x;
}

// Lets the next kernel start, if it is one that waits here itself (`inputs_ready`).
__device__ __forceinline__ void dependents_may_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits for what the kernels before this one write. To be called by every thread before it reads what they write, or
// writes: a kernel counts as done when its blocks are, and those that follow rely on that.
__device__ __forceinline__ void await_inputs() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start, and waits.
__device__ __forceinline__ void inputs_ready() {
    dependents_may_start();
    await_inputs();
}

// Whether this block is the last of `blocks` to get here. What the others wrote to global memory before is
// visible to the last one. The counter is 0 again afterwards, so a graph can be replayed.
__device__ __forceinline__ bool last_block(unsigned *counter, unsigned blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        last = atomicInc(counter, blocks - 1) == blocks - 1;
    __syncthreads();
    __threadfence();
    return last;
}
