// Sampled picks of rows of logits: the token with the greatest sum of logit / temperature and noise, of equal ones that
// with the lowest id. The sums are those of the host's picks, bit by bit.
//
// Noise is drawn for chunks of 256 tokens first. With a chunk's greatest logit, that bounds the sums of its tokens, and
// only chunks whose bound reaches the best of the sums that are known by then are looked into.
//
// Both kernels have a grid of (parts, rows), a part being CHUNKS_PER_BLOCK chunks. Row r picks for position
// positions[r] + 1. `bounds` has an entry per chunk and row; `known` and `maxima` have one zero a row before the first
// kernel, and have it again after the second.

#include "common.cuh"
#include "keys.cuh"
#include "noise.cuh"

constexpr int WARPS = 8;
constexpr int CHUNKS_PER_WARP = 4;
// One lane of a warp draws for each chunk, and one thread of the block for each token of one.
constexpr int CHUNKS_PER_BLOCK = WARPS * CHUNKS_PER_WARP;
static_assert(CHUNKS_PER_BLOCK == 32 && CHUNK == 32 * WARPS);

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

__device__ __forceinline__ Sum none() { return {(double)NEG_INF, 0xffffffffu}; }

// The best of the warp's, for every lane.
__device__ Sum warp_best(Sum best) {
    for (int offset = 16; offset > 0; offset /= 2) {
        double sum = __shfl_xor_sync(FULL_WARP, best.sum, offset);
        uint32_t token = __shfl_xor_sync(FULL_WARP, best.token, offset);
        best.improve(sum, token);
    }
    return best;
}

// Bounds of all chunks, the best sum known of each row, and its greatest logit as a key.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    bound_draws(const float *logits, const uint32_t *positions, const Draws *draws, double *bounds,
                unsigned long long *known, unsigned *maxima, int size) {
    __shared__ uint64_t greatest[CHUNKS_PER_BLOCK];
    size_t row = blockIdx.y;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = (size + CHUNK - 1) / CHUNK;
    int first = blockIdx.x * CHUNKS_PER_BLOCK;
    logits += row * size;
#pragma unroll
    for (int j = warp; j < CHUNKS_PER_BLOCK; j += WARPS) {
        uint64_t best = 0;
#pragma unroll
        for (int i = 0; i < CHUNK; i += 32) {
            int token = (first + j) * CHUNK + i + lane;
            if (token < size)
                best = max(best, pack(order(logits[token]), token));
        }
        best = warp_greatest(best);
        if (lane == 0)
            greatest[j] = best;
    }
    __syncthreads();
    int chunk = first + lane;
    if (warp > 0 || chunk >= chunks)
        return;
    uint32_t token = ~(uint32_t)greatest[lane];
    float logit = logits[token], temperature = draws->scale;
    atomicMax(maxima + row, (uint32_t)(greatest[lane] >> 32));
    double bound = scaled(logit, temperature);
    if (logit > NEG_INF) {
        Noise noise = {draws->seed, (uint64_t)positions[row] + 1};
        ChunkNoise shared(noise, chunk);
        double sum = __dadd_rn(bound, shared.gumbel(noise, token));
        if (shared.winner < size && logits[shared.winner] > NEG_INF)
            sum = fmax(sum, __dadd_rn(scaled(logits[shared.winner], temperature), shared.bound()));
        atomicMax(known + row, order64(sum));
        bound = __dadd_rn(bound, __dadd_rn(shared.bound(), SLACK));
    }
    bounds[row * chunks + chunk] = bound;
}

// picks[row] = the row's greatest logit as a key, and the token picked, packed: what `argmax` gives with another token.
// `bests` has an entry per part and row, `counters` one zero a row, and has it again afterwards.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    draw(const float *logits, const uint32_t *positions, const Draws *draws, const double *bounds,
         unsigned long long *known, unsigned *maxima, Sum *bests, unsigned *counters, unsigned long long *picks,
         int size) {
    // What lanes found of the chunks that are looked into: their noise and the greatest of it.
    __shared__ ChunkNoise open_noise[CHUNKS_PER_BLOCK];
    __shared__ double open_most[CHUNKS_PER_BLOCK];
    __shared__ unsigned open_lanes;
    __shared__ Sum found[WARPS];
    size_t row = blockIdx.y;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, chunks = (size + CHUNK - 1) / CHUNK;
    int first = blockIdx.x * CHUNKS_PER_BLOCK;
    logits += row * size;
    const Noise noise = {draws->seed, (uint64_t)positions[row] + 1};
    const float temperature = draws->scale;
    if (warp == 0) {
        int chunk = first + lane;
        bool open = chunk < chunks && bounds[row * chunks + chunk] >= value64(__ldcg(known + row));
        if (open) {
            open_noise[lane] = ChunkNoise(noise, chunk);
            open_most[lane] = __dadd_rn(open_noise[lane].bound(), SLACK);
        }
        unsigned lanes = __ballot_sync(FULL_WARP, open);
        if (lane == 0)
            open_lanes = lanes;
    }
    __syncthreads();
    Sum best = none();
    for (unsigned lanes = open_lanes; lanes > 0; lanes &= lanes - 1) {
        int at = __ffs(lanes) - 1;
        uint32_t token = (first + at) * CHUNK + threadIdx.x;
        float logit = token < size ? logits[token] : NEG_INF;
        double own = scaled(logit, temperature);
        // Others may have found a better one meanwhile.
        double reached = value64(__ldcg(known + row));
        if (logit > NEG_INF && __dadd_rn(own, open_most[at]) >= reached) {
            double sum = __dadd_rn(own, open_noise[at].gumbel(noise, token));
            best.improve(sum, token);
            if (sum > reached)
                atomicMax(known + row, order64(sum));
        }
    }
    best = warp_best(best);
    if (lane == 0)
        found[warp] = best;
    __syncthreads();
    bests += row * gridDim.x;
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; ++i)
            best.improve(found[i].sum, found[i].token);
        bests[blockIdx.x] = best;
    }
    if (!last_block(counters + row, gridDim.x) || warp > 0)
        return;
    best = none();
    for (int part = lane; part < gridDim.x; part += 32)
        best.improve(__ldcg(&bests[part].sum), __ldcg(&bests[part].token));
    best = warp_best(best);
    if (lane == 0) {
        picks[row] = pack(maxima[row], best.token);
        known[row] = 0;
        maxima[row] = 0;
    }
}
