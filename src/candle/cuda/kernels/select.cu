// Picks and top-k of rows of logits, without a copy of the logits to the host.

#include "common.cuh"
#include "keys.cuh"

// best[row] = the greatest packed entry of the row; `best` is zero before. Grid (parts, rows).
template <typename T> __device__ void argmax(const T *logits, unsigned long long *best, int size) {
    size_t row = blockIdx.y;
    logits += row * size;
    uint64_t mine = 0;
    for (int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x); i < size; i += 4 * gridDim.x * blockDim.x) {
        float4 x;
        if (size % 4 == 0) {
            x = load4(logits + i);
        } else {
            auto at = [&](int j) { return j < size ? to_f32(logits[j]) : NEG_INF; };
            x = make_float4(at(i), at(i + 1), at(i + 2), at(i + 3));
        }
        // A padded entry has a higher id than any real one, so it never wins.
        mine = max(mine, pack(order(x.x), i));
        mine = max(mine, pack(order(x.y), i + 1));
        mine = max(mine, pack(order(x.z), i + 2));
        mine = max(mine, pack(order(x.w), i + 3));
    }
    for (int offset = 16; offset > 0; offset /= 2)
        mine = max(mine, __shfl_xor_sync(FULL_WARP, mine, offset));
    if (threadIdx.x % 32 == 0)
        atomicMax(best + row, (unsigned long long)mine);
}

constexpr int THREADS = 512;
constexpr int PER_THREAD = 16;
constexpr int SLICE = THREADS * PER_THREAD;
constexpr int MAX_CANDIDATES = 4096;

// The greatest digit at or above which there are at least `rank` counts, and how many lie above it. One warp.
__device__ void find_digit(const int *histogram, int rank, int *digit, int *above) {
    int lane = threadIdx.x, sum = 0;
    for (int i = 0; i < 8; ++i)
        sum += histogram[255 - (8 * lane + i)];
    int upto = sum;
    for (int offset = 1; offset < 32; offset *= 2) {
        int other = __shfl_up_sync(FULL_WARP, upto, offset);
        if (lane >= offset)
            upto += other;
    }
    int before = upto - sum;
    if (before < rank && rank <= upto) {
        int i = 0;
        while (before + histogram[255 - (8 * lane + i)] < rank)
            before += histogram[255 - (8 * lane + i++)];
        *digit = 255 - (8 * lane + i);
        *above = before;
    }
}

// The `rank`-th greatest of all threads' 48-bit keys `key(0)` to `key(N - 1)`, digit by digit.
template <int N, typename Key> __device__ uint64_t kth_greatest(Key key, int rank) {
    __shared__ int histogram[256];
    __shared__ int digit, above;
    int t = threadIdx.x;
    uint64_t found = 0;
    for (int shift = 40; shift >= 0; shift -= 8) {
        if (t < 256)
            histogram[t] = 0;
        __syncthreads();
#pragma unroll 1
        for (int j = 0; j < N; ++j) {
            bool match = (key(j) ^ found) >> (shift + 8) == 0;
            // The leading digits of logits are nearly all the same: one addition for the lanes that agree.
            unsigned bin = match ? (unsigned)(key(j) >> shift) & 255 : 256;
            unsigned peers = __match_any_sync(FULL_WARP, bin);
            if (match && t % 32 == __ffs(peers) - 1)
                atomicAdd(histogram + bin, __popc(peers));
        }
        __syncthreads();
        if (t < 32)
            find_digit(histogram, rank, &digit, &above);
        __syncthreads();
        found |= (uint64_t)digit << shift;
        rank -= above;
        __syncthreads();
    }
    return found;
}

// Log-probabilities and ids of the `k` best entries of each row, best first. Grid (slices, rows); a slice is SLICE
// entries, and slices * k is at most MAX_CANDIDATES. `candidates` has slices * k entries a row, `norms` one (max, sum
// of exponentials) a slice, `counters` one zero a row.
template <typename T>
__device__ void top_k(const T *logits, uint64_t *candidates, float2 *norms, unsigned *counters, uint32_t *ids,
                      float *log_probs, int size, int k) {
    __shared__ int taken;
    __shared__ uint64_t sorted[MAX_CANDIDATES];
    __shared__ float parts[THREADS / 32];
    int row = blockIdx.y, slices = gridDim.x, t = threadIdx.x;
    int first = blockIdx.x * SLICE;
    logits += (size_t)row * size;

    // Entry j of the thread has local index j * THREADS + t.
    uint32_t keys[PER_THREAD];
    float greatest = NEG_INF;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j) {
        int i = first + j * THREADS + t;
        float x = i < size ? to_f32(logits[i]) : NEG_INF;
        keys[j] = i < size ? order(x) : 0;
        greatest = fmaxf(greatest, x);
    }
    greatest = warp_max(greatest);
    if (t % 32 == 0)
        parts[t / 32] = greatest;
    __syncthreads();
    greatest = warp_max(t % 32 < THREADS / 32 ? parts[t % 32] : NEG_INF);
    float sum = 0.0f;
    if (greatest > NEG_INF) {
#pragma unroll
        for (int j = 0; j < PER_THREAD; ++j)
            if (first + j * THREADS + t < size)
                sum += __expf(value(keys[j]) - greatest);
    }
    sum = block_sum(sum);
    if (t == 0)
        norms[row * slices + blockIdx.x] = make_float2(greatest, sum);

    // Unique 48-bit keys: the value, then the local index downwards.
    auto full = [&](int j) { return (uint64_t)keys[j] << 16 | (uint16_t)~(j * THREADS + t); };
    uint64_t best = 0;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j)
        best = max(best, full(j));
    // At least k entries reach the k-th greatest of the threads' best: few more, as a rule.
    uint64_t threshold = kth_greatest<1>([&](int) { return best; }, k);
    if (t == 0)
        taken = 0;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j)
        if (full(j) >= threshold) {
            int at = atomicAdd(&taken, 1);
            if (at < THREADS)
                sorted[at] = full(j);
        }
    __syncthreads();
    int reached = taken;
    if (reached <= THREADS) {
        uint64_t one = t < reached ? sorted[t] : 0;
        threshold = kth_greatest<1>([&](int) { return one; }, k);
    } else {
        // Read again: registers for a rare case would halve the blocks that run at once.
        auto again = [&](int j) {
            int at = j * THREADS + t;
            uint64_t key = first + at < size ? order(to_f32(logits[first + at])) : 0;
            return key << 16 | (uint16_t)~at;
        };
        threshold = kth_greatest<PER_THREAD>(again, k);
    }
    if (t == 0)
        taken = 0;
    __syncthreads();
    uint64_t *mine = candidates + ((size_t)row * slices + blockIdx.x) * k;
#pragma unroll
    for (int j = 0; j < PER_THREAD; ++j)
        if (full(j) >= threshold)
            mine[atomicAdd(&taken, 1)] = pack(keys[j], first + j * THREADS + t);

    if (!last_block(counters + row, slices))
        return;

    // Merge: sort the candidates of all slices, greatest first.
    int count = slices * k, padded = 1;
    while (padded < count)
        padded *= 2;
    for (int i = t; i < padded; i += THREADS)
        sorted[i] = i < count ? __ldcg(candidates + (size_t)row * count + i) : 0;
    float all = NEG_INF, total = 0.0f;
    for (int s = t % 32; s < slices; s += 32)
        all = fmaxf(all, __ldcg(norms + row * slices + s).x);
    all = warp_max(all);
    for (int s = t % 32; s < slices; s += 32) {
        float2 norm = __ldcg(norms + row * slices + s);
        if (norm.x > NEG_INF)
            total += norm.y * expf(norm.x - all);
    }
    total = warp_sum(total);
    float log_sum = all + logf(total);
    for (int block = 2; block <= padded; block *= 2)
        for (int stride = block / 2; stride > 0; stride /= 2) {
            __syncthreads();
            for (int i = t; i < padded / 2; i += THREADS) {
                int low = i + (i & -stride), high = low + stride;
                uint64_t a = sorted[low], b = sorted[high];
                if ((a < b) == ((low & block) == 0)) {
                    sorted[low] = b;
                    sorted[high] = a;
                }
            }
        }
    __syncthreads();
    if (t < k) {
        uint64_t entry = sorted[t];
        ids[row * k + t] = ~(uint32_t)entry;
        // NaN stays NaN: its key maps back to one.
        log_probs[row * k + t] = value(entry >> 32) - log_sum;
    }
}

#define KERNELS(T)                                                                                                     \
    extern "C" __global__ void argmax_##T(const T *logits, unsigned long long *best, int size) {                       \
        argmax<T>(logits, best, size);                                                                                 \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                           \
        top_k_##T(const T *logits, uint64_t *candidates, float2 *norms, unsigned *counters, uint32_t *ids,             \
                  float *log_probs, int size, int k) {                                                                 \
        top_k<T>(logits, candidates, norms, counters, ids, log_probs, size, k);                                        \
    }

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
