#include "product.cuh"

PRODUCTS(bf16)
