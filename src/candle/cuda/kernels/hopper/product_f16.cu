#include "product.cuh"

KERNELS(PRODUCT, f16)
