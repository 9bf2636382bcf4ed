// Drafts that use the noise of the draws.

#include "common.cuh"
#include "noise.cuh"

// logits += scale * noise, where row r is about the token at position *root + 1 + r. Grid (chunks, rows) of CHUNK / 2
// threads, one for two tokens, whose noise comes from the same words.
extern "C" __global__ void __launch_bounds__(CHUNK / 2)
    couple(float *logits, const uint32_t *root, const Draws *draws, int size) {
    __shared__ ChunkNoise chunk;
    const Noise noise = {draws->seed, (uint64_t)*root + 1 + blockIdx.y};
    const double scale = (double)draws->scale;
    if (threadIdx.x == 0)
        chunk = ChunkNoise(noise, blockIdx.x);
    __syncthreads();
    uint32_t token = blockIdx.x * CHUNK + 2 * threadIdx.x;
    logits += (size_t)blockIdx.y * size;
    uint4 words = noise.words(token / 2, 1);
    auto add = [&](uint32_t token, uint32_t low, uint32_t high) {
        if (token < size)
            logits[token] = (float)__dadd_rn((double)logits[token], __dmul_rn(scale, chunk.gumbel(token, low, high)));
    };
    add(token, words.x, words.y);
    add(token + 1, words.z, words.w);
}
