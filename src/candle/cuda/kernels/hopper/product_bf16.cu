#include "product.cuh"

KERNELS(PRODUCT, bf16)
