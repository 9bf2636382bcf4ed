// Instructions of compute capability 9.0 that C++ has no words for: barriers in shared memory, copies of whole tiles, and
// products of a warpgroup (four warps, the first of which has a number divisible by four).
#pragma once

#include "../common.cuh"

#include <cuda.h>

// ---- barriers ----

__device__ __forceinline__ void barrier_init(uint64_t *barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes barriers known to the copy engine; before the block's threads meet.
__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and says how many bytes the copies bring that this phase waits for.
__device__ __forceinline__ void barrier_expect(uint64_t *barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint64_t *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Waits until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint64_t *barrier, unsigned parity) {
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
}

// Lets the copy engine and the tensor cores see what this thread wrote to shared memory.
__device__ __forceinline__ void async_may_read() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters ----

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
// Waits until all threads of the cluster have arrived.
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

// Stores to the same place of block `rank` of the cluster. The bytes count at that block's barrier.
__device__ __forceinline__ void send(uint4 *p, uint64_t *barrier, unsigned rank, uint4 x) {
    asm volatile("{\n.reg .b32 remote, counted;\n"
                 "mapa.shared::cluster.u32 remote, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [remote], {%3, %4, %5, %6}, [counted];\n"
                 "}" ::"r"(shared_address(p)),
                 "r"(shared_address(barrier)), "r"(rank), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w)
                 : "memory");
}
__device__ __forceinline__ void send(float2 *p, uint64_t *barrier, unsigned rank, float2 x) {
    asm volatile("{\n.reg .b32 remote, counted;\n"
                 "mapa.shared::cluster.u32 remote, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [remote], {%3, %4}, [counted];\n}" ::"r"(
                     shared_address(p)),
                 "r"(shared_address(barrier)), "r"(rank), "f"(x.x), "f"(x.y)
                 : "memory");
}

__device__ __forceinline__ void send(float4 *p, uint64_t *barrier, unsigned rank, float4 x) {
    send(reinterpret_cast<uint4 *>(p), barrier, rank,
         make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)));
}

// Sends what is in shared memory, a multiple of 16 bytes that has to stay until it has arrived.
__device__ __forceinline__ void send(void *p, uint64_t *barrier, unsigned rank, const void *from, unsigned bytes) {
    asm volatile("{\n.reg .b32 remote, counted;\n"
                 "mapa.shared::cluster.u32 remote, %0, %2;\n"
                 "mapa.shared::cluster.u32 counted, %1, %2;\n"
                 "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote], [%3], %4, [counted];\n"
                 "}" ::"r"(shared_address(p)),
                 "r"(shared_address(barrier)), "r"(rank), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}

// ---- tiles ----

// How long the L2 cache should keep what a copy reads.
constexpr uint64_t READ_ONCE = 0x12f0000000000000;
constexpr uint64_t READ_AGAIN = 0x14f0000000000000;

// Copies the tile at (column, row) of a matrix; elements outside of the matrix are zero. Its bytes count at the barrier.
__device__ __forceinline__ void copy_tile(void *to, const CUtensorMap *matrix, uint64_t *barrier, int column, int row,
                                          uint64_t keep) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
                 "[%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)),
                 "l"(matrix), "r"(shared_address(barrier)), "r"(column), "r"(row), "l"(keep)
                 : "memory");
}

// The same of a tile of several planes.
__device__ __forceinline__ void copy_planes(void *to, const CUtensorMap *matrix, uint64_t *barrier, int column,
                                            int row, int plane) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], "
                 "[%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
                 "l"(matrix), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(plane)
                 : "memory");
}

// ---- products ----

// A tile of rows of 128 bytes as the copy engine leaves it with a swizzle of 128 bytes; it starts at a multiple of 1,024
// bytes. Adding `n / 16` to it skips `n` bytes of each row. For an operand that is transposed, adding `8 n` skips `n`
// rows, and columns go on `next` bytes later, in another tile.
__device__ __forceinline__ uint64_t tile_descriptor(const void *tile, unsigned next = 16) {
    constexpr uint64_t SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = (1024ull >> 4) << 32;
    return SWIZZLE_128 | EIGHT_ROWS | (uint64_t)(next >> 4) << 16 | (shared_address(tile) & 0x3ffff) >> 4;
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `PENDING` of the groups committed last are not done.
template <int PENDING> __device__ __forceinline__ void products_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
