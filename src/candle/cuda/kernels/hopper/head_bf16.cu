#include "product.cuh"

KERNELS(HEAD, bf16)
