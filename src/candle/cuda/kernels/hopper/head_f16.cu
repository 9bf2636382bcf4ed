#include "product.cuh"

KERNELS(HEAD, f16)
