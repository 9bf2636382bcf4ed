#include "product.cuh"

PRODUCTS(f16)
