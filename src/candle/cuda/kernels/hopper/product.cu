// Products of one PRODUCT_OUTPUT and PRODUCT_TYPE, from the compiler's arguments, by rows and warpgroups. What a kernel could do
// besides makes it slower.
#include "product.cuh"

#define PRODUCT(N, WARPGROUPS)                                                                                         \
    extern "C" __global__ void __launch_bounds__(128 * WARPGROUPS + 32, blocks_at_once(N, WARPGROUPS))                 \
        product_##N##_##WARPGROUPS(const __grid_constant__ CUtensorMap w, const __grid_constant__ CUtensorMap x,       \
                                   void *y, float2 *summaries, int rows, int inputs, int outputs, int stages) {        \
        product<PRODUCT_OUTPUT, PRODUCT_TYPE, N, WARPGROUPS>(w, x, y, summaries, rows, inputs, outputs, stages);                       \
    }

PRODUCT(8, 1)
PRODUCT(8, 2)
PRODUCT(8, 3)
PRODUCT(16, 1)
PRODUCT(16, 2)
PRODUCT(16, 3)
PRODUCT(24, 1)
PRODUCT(24, 2)
PRODUCT(24, 3)
PRODUCT(40, 1)
PRODUCT(40, 2)
PRODUCT(40, 3)
PRODUCT(64, 1)
PRODUCT(64, 2)
PRODUCT(64, 3)
PRODUCT(72, 1)
PRODUCT(72, 2)
PRODUCT(72, 3)
PRODUCT(128, 2)
PRODUCT(128, 3)
PRODUCT(136, 2)
PRODUCT(136, 3)
PRODUCT(256, 2)
