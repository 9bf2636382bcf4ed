// After the walk: the accepted rows become the committed ones.

#include "common.cuh"

// Accepted slots, ascending. By value: a launch needs no copy of it to the device.
struct Path {
    uint32_t len;
    uint8_t slots[252];
};

// Moves row `start + slots[i]` to row `start + i` in every plane of the cache (keys and values of each layer, each
// `plane` 16-byte units). One thread owns a 16-byte column of a plane and walks up; as slots[i] >= i, it never
// overwrites a row that is still needed.
extern "C" __global__ void compact(uint4 *cache, size_t plane, int row_units, uint32_t start, Path path) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= row_units)
        return;
    uint4 *rows = cache + blockIdx.y * plane + (size_t)start * row_units + column;
    for (uint32_t i = 0; i < path.len; ++i)
        if (path.slots[i] != i)
            rows[(size_t)i * row_units] = rows[(size_t)path.slots[i] * row_units];
}

// out[i] = rows[slots[i]], rows of `row_units` 8-byte units.
extern "C" __global__ void gather(const uint2 *rows, uint2 *out, int row_units, Path path) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    uint32_t i = blockIdx.y;
    if (column < row_units && i < path.len)
        out[(size_t)i * row_units + column] = rows[(size_t)path.slots[i] * row_units + column];
}
