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

// Entries of a chunk, of which a warp has four a lane.
constexpr int CHUNK = 128;

// The greatest key of each chunk of a row, and (max, sum of exponentials). Grid (parts, rows).
template <typename T>
__device__ void chunk_best(const T *logits, uint32_t *keys, float2 *norms, int size, int chunks) {
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    size_t row = blockIdx.y;
    logits += row * size;
    for (int chunk = blockIdx.x * warps + threadIdx.x / 32; chunk < chunks; chunk += gridDim.x * warps) {
        int first = chunk * CHUNK + lane * 4, real = min(max(size - first, 0), 4);
        float x[4] = {NEG_INF, NEG_INF, NEG_INF, NEG_INF};
        if (size % 4 == 0 && real == 4) {
            float4 y = load4(logits + first);
            x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < real)
                    x[i] = to_f32(logits[first + i]);
        }
        uint32_t key = 0;
        float greatest = NEG_INF, sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i < real)
                key = max(key, order(x[i]));
            greatest = fmaxf(greatest, x[i]);
        }
        key = __reduce_max_sync(FULL_WARP, key);
        greatest = warp_max(greatest);
        if (greatest > NEG_INF)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (i < real)
                    sum += __expf(x[i] - greatest);
        sum = warp_sum(sum);
        if (lane == 0) {
            keys[row * chunks + chunk] = key;
            norms[row * chunks + chunk] = make_float2(greatest, sum);
        }
    }
}

constexpr int THREADS = 512;
constexpr int MAX_K = 64;
// Entries that are sorted at most.
constexpr int SORTED = 1024;

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

// The `rank`-th greatest of all threads' 48-bit keys `key(0)` to `key(count - 1)`, digit by digit. `count` is the same for
// all threads.
template <typename Key> __device__ uint64_t kth_greatest(Key key, int count, int rank) {
    __shared__ int histogram[256];
    __shared__ int digit, above;
    int t = threadIdx.x;
    uint64_t found = 0;
    for (int shift = 40; shift >= 0; shift -= 8) {
        if (t < 256)
            histogram[t] = 0;
        __syncthreads();
#pragma unroll 1
        for (int j = 0; j < count; ++j) {
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

// Sum over the threads before this one.
__device__ __forceinline__ int sum_before(int x) {
    __shared__ int sums[THREADS / 32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, upto = x;
    for (int offset = 1; offset < 32; offset *= 2) {
        int other = __shfl_up_sync(FULL_WARP, upto, offset);
        if (lane >= offset)
            upto += other;
    }
    if (lane == 31)
        sums[warp] = upto;
    __syncthreads();
    int before = upto - x;
    for (int i = 0; i < warp; ++i)
        before += sums[i];
    return before;
}

// Log-probabilities and ids of the `k` best entries of each row, best first, from what `chunk_best` left. One block per row;
// there are fewer than 2^16 chunks.
//
// The k chunks with the greatest entries have the k best of all, and what is below the least of these k is not among them; with
// fewer chunks, everything may be.
template <typename T>
__device__ void top_k(const T *logits, const uint32_t *keys, const float2 *norms, uint32_t *ids, float *log_probs,
                      int size, int chunks, int k) {
    __shared__ int taken;
    __shared__ uint16_t chosen[MAX_K];
    __shared__ uint64_t sorted[SORTED];
    __shared__ float parts[THREADS / 32];
    inputs_ready();
    int row = blockIdx.x, t = threadIdx.x;
    logits += (size_t)row * size;
    keys += (size_t)row * chunks;
    norms += (size_t)row * chunks;

    // A thread has chunks that follow one another. Keys are unique: the value, then the index downwards.
    int per_thread = (chunks + THREADS - 1) / THREADS, wanted = min(k, chunks);
    auto chunk_key = [&](int j) {
        int chunk = t * per_thread + j;
        return chunk < chunks ? (uint64_t)keys[chunk] << 16 | (uint16_t)~chunk : 0;
    };
    uint64_t threshold = kth_greatest(chunk_key, per_thread, wanted);
    int count = 0;
    for (int j = 0; j < per_thread; ++j)
        count += t * per_thread + j < chunks && chunk_key(j) >= threshold;
    int at = sum_before(count);
    for (int j = 0; j < per_thread; ++j)
        if (t * per_thread + j < chunks && chunk_key(j) >= threshold)
            chosen[at++] = t * per_thread + j;
    if (t == 0)
        taken = 0;
    __syncthreads();

    // Entry e of those chosen; they are in the order of their ids.
    uint32_t bound = chunks < k ? 0 : threshold >> 16;
    int entries = wanted * CHUNK;
    auto index = [&](int e) { return chosen[e / CHUNK] * CHUNK + e % CHUNK; };
    for (int e = t; e < entries; e += THREADS) {
        int i = index(e);
        uint32_t key = i < size ? order(to_f32(logits[i])) : 0;
        if (i < size && key >= bound) {
            int to = atomicAdd(&taken, 1);
            if (to < SORTED)
                sorted[to] = pack(key, i);
        }
    }
    __syncthreads();
    int reached = taken;
    if (reached > SORTED) {
        auto entry_key = [&](int j) {
            int e = j * THREADS + t, i = e < entries ? index(e) : size;
            return i < size ? (uint64_t)order(to_f32(logits[i])) << 16 | (uint16_t)~e : 0;
        };
        int most = (entries + THREADS - 1) / THREADS;
        uint64_t least = kth_greatest(entry_key, most, k);
        if (t == 0)
            taken = 0;
        __syncthreads();
        for (int j = 0; j < most; ++j)
            if (j * THREADS + t < entries && entry_key(j) >= least)
                sorted[atomicAdd(&taken, 1)] = pack(entry_key(j) >> 16, index(j * THREADS + t));
        __syncthreads();
        reached = k;
    }

    float all = NEG_INF, total = 0.0f;
    for (int c = t; c < chunks; c += THREADS)
        all = fmaxf(all, norms[c].x);
    all = warp_max(all);
    if (t % 32 == 0)
        parts[t / 32] = all;
    __syncthreads();
    all = warp_max(t % 32 < THREADS / 32 ? parts[t % 32] : NEG_INF);
    for (int c = t; c < chunks; c += THREADS)
        if (norms[c].x > NEG_INF)
            total += norms[c].y * expf(norms[c].x - all);
    float log_sum = all + logf(block_sum(total));

    int padded = 1;
    while (padded < reached)
        padded *= 2;
    for (int i = reached + t; i < padded; i += THREADS)
        sorted[i] = 0;
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
    extern "C" __global__ void chunk_best_##T(const T *logits, uint32_t *keys, float2 *norms, int size, int chunks) {  \
        chunk_best<T>(logits, keys, norms, size, chunks);                                                              \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                              \
        top_k_##T(const T *logits, const uint32_t *keys, const float2 *norms, uint32_t *ids, float *log_probs,         \
                  int size, int chunks, int k) {                                                                       \
        top_k<T>(logits, keys, norms, ids, log_probs, size, chunks, k);                                                \
    }

KERNELS(f32)
KERNELS(bf16)
KERNELS(f16)
