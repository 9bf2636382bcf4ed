// Sampled picks of rows of logits: the token with the greatest sum of logit / temperature and noise, of equal ones that
// with the lowest id. The sums are those of the host's picks, bit by bit.
//
// Noise is drawn for chunks of 256 tokens first. With a chunk's greatest logit, that bounds the sums of its tokens, and
// only chunks whose bound reaches the best of the sums that are known by then are looked into.

#include "common.cuh"
#include "keys.cuh"
#include "noise.cuh"

constexpr int WARPS = 8;
// One lane draws for each chunk.
constexpr int CHUNKS_PER_WARP = 8;

// Margin for the rounding of logarithms where a bound on noise stands for the noise.
constexpr double SLACK = 1e-9;

__device__ __forceinline__ double scaled(float logit, float temperature) {
    return __ddiv_rn((double)logit, (double)temperature);
}

__device__ __forceinline__ unsigned long long order64(double x) {
    uint64_t bits = __double_as_longlong(x);
    return bits ^ (bits >> 63 ? ~0ull : 1ull << 63);
}

__device__ __forceinline__ double value64(uint64_t key) {
    return __longlong_as_double(key ^ (key >> 63 ? 1ull << 63 : ~0ull));
}

// A token and its sum. Tokens above all real ones stand for none.
struct Sum {
    double sum;
    uint32_t token;

    __device__ void improve(double other, uint32_t id) {
        if (other > sum || (other == sum && id < token)) {
            sum = other;
            token = id;
        }
    }
};

// The best of the warp's, for every lane.
__device__ Sum warp_best(Sum best) {
    for (int offset = 16; offset > 0; offset /= 2) {
        double sum = __shfl_xor_sync(FULL_WARP, best.sum, offset);
        uint32_t token = __shfl_xor_sync(FULL_WARP, best.token, offset);
        best.improve(sum, token);
    }
    return best;
}

// picks[row] = the row's greatest logit as a key, and the token picked, packed: what `argmax` gives with another token.
// Grid (parts, rows) of WARPS warps, a part being WARPS * CHUNKS_PER_WARP chunks. Row r picks for position
// positions[r] + 1. `bounds` has an entry per chunk and row; `known`, `maxima` and `counters` have one zero a row, and
// have it again afterwards.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draw(const float *logits, const uint32_t *positions, const Draws *draws, double *bounds, unsigned long long *known,
         unsigned *maxima, unsigned *counters, unsigned long long *picks, int size) {
    size_t row = blockIdx.y;
    int t = threadIdx.x, lane = t % 32;
    int chunks = (size + CHUNK - 1) / CHUNK;
    logits += row * size;
    bounds += row * chunks;
    const Noise noise = {draws->seed, (uint64_t)positions[row] + 1};
    const float temperature = draws->scale;

    int first = (blockIdx.x * WARPS + t / 32) * CHUNKS_PER_WARP;
    uint64_t mine = 0;
    for (int j = 0; j < CHUNKS_PER_WARP && first + j < chunks; ++j) {
        uint64_t best = 0;
        for (int i = (first + j) * CHUNK + lane; i < min(size, (first + j + 1) * CHUNK); i += 32)
            best = max(best, pack(order(logits[i]), i));
        for (int offset = 16; offset > 0; offset /= 2)
            best = max(best, __shfl_xor_sync(FULL_WARP, best, offset));
        if (lane == j)
            mine = best;
    }
    if (mine > 0) {
        uint32_t key = mine >> 32, token = ~(uint32_t)mine;
        float greatest = logits[token];
        atomicMax(maxima + row, key);
        double bound = scaled(greatest, temperature);
        if (greatest > NEG_INF) {
            ChunkNoise chunk(noise, first + lane);
            double sum = __dadd_rn(bound, chunk.gumbel(noise, token));
            if (chunk.winner < size && logits[chunk.winner] > NEG_INF)
                sum = fmax(sum, __dadd_rn(scaled(logits[chunk.winner], temperature), chunk.bound()));
            atomicMax(known + row, order64(sum));
            bound = __dadd_rn(bound, __dadd_rn(chunk.bound(), SLACK));
        }
        bounds[first + lane] = bound;
    }
    if (!last_block(counters + row, gridDim.x))
        return;

    __shared__ ChunkNoise open_noise[32 * WARPS];
    __shared__ int open_chunks[32 * WARPS];
    __shared__ int open;
    __shared__ Sum bests[WARPS];
    double reached = value64(__ldcg(known + row));
    Sum best = {(double)NEG_INF, 0xffffffffu};
    for (int base = 0; base < chunks; base += 32 * WARPS) {
        if (t == 0)
            open = 0;
        __syncthreads();
        if (base + t < chunks && __ldcg(bounds + base + t) >= reached) {
            int at = atomicAdd(&open, 1);
            open_chunks[at] = base + t;
            open_noise[at] = ChunkNoise(noise, base + t);
        }
        __syncthreads();
        for (int at = 0; at < open; ++at) {
            uint32_t token = open_chunks[at] * CHUNK + t;
            float logit = token < size ? logits[token] : NEG_INF;
            if (logit > NEG_INF) {
                double own = scaled(logit, temperature);
                if (__dadd_rn(own, __dadd_rn(open_noise[at].bound(), SLACK)) >= reached)
                    best.improve(__dadd_rn(own, open_noise[at].gumbel(noise, token)), token);
            }
        }
        __syncthreads();
    }
    best = warp_best(best);
    if (lane == 0)
        bests[t / 32] = best;
    __syncthreads();
    if (t == 0) {
        for (int i = 1; i < WARPS; ++i)
            best.improve(bests[i].sum, bests[i].token);
        picks[row] = pack(__ldcg(maxima + row), best.token);
        known[row] = 0;
        maxima[row] = 0;
    }
}
