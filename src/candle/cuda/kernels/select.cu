// Picks and top-k of rows of f32 logits, without a copy of the logits to the host.

#include "common.cuh"
#include "keys.cuh"
#include "summary.cuh"

// Four entries of a row from `i`, a multiple of four, on; -inf beyond the row.
__device__ __forceinline__ Floats<4> load_within(const float *row, int i, int size) {
    // Rows of other sizes do not all begin where four can be loaded at once.
    if (size % 4 == 0 && i < size)
        return load<4>(row + i);
    Floats<4> x;
#pragma unroll
    for (int j = 0; j < 4; ++j)
        x.v[j] = i + j < size ? row[i + j] : NEG_INF;
    return x;
}

// best[row] = the greatest packed entry of the row, in memory of the host. `bests` has an entry per part and row,
// `counters` one zero a row, and has it again afterwards. Grid (parts, rows).
extern "C" __global__ void argmax(const float *logits, uint64_t *bests, unsigned *counters, uint64_t *best, int size) {
    __shared__ uint64_t found[32];
    size_t row = blockIdx.y;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    inputs_ready();
    logits += row * size;
    uint64_t mine = 0;
    for (int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x); i < size; i += 4 * gridDim.x * blockDim.x) {
        Floats<4> x = load_within(logits, i, size);
        // An entry beyond the row has a higher id than any of it, so it never wins.
#pragma unroll
        for (int j = 0; j < 4; ++j)
            mine = max(mine, pack(order(x.v[j]), i + j));
    }
    mine = warp_greatest(mine);
    if (lane == 0)
        found[warp] = mine;
    __syncthreads();
    bests += row * gridDim.x;
    if (warp == 0) {
        mine = warp_greatest(lane < blockDim.x / 32 ? found[lane] : uint64_t(0));
        if (lane == 0)
            bests[blockIdx.x] = mine;
    }
    if (!last_block(counters + row, gridDim.x) || warp > 0)
        return;
    mine = 0;
    for (int part = lane; part < gridDim.x; part += 32)
        mine = max(mine, (uint64_t)__ldcg(reinterpret_cast<unsigned long long *>(bests) + part));
    mine = warp_greatest(mine);
    if (lane == 0)
        best[row] = mine;
}

// best[row] = the greatest of the row's `parts` entries, in memory of the host. A block per row.
extern "C" __global__ void __launch_bounds__(256) greatest(const uint64_t *bests, uint64_t *best, int parts) {
    __shared__ uint64_t found[8];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    inputs_ready();
    uint64_t mine = 0;
    for (int part = threadIdx.x; part < parts; part += blockDim.x)
        mine = max(mine, bests[(size_t)blockIdx.x * parts + part]);
    mine = warp_greatest(mine);
    if (lane == 0)
        found[warp] = mine;
    __syncthreads();
    if (warp > 0)
        return;
    mine = warp_greatest(lane < blockDim.x / 32 ? found[lane] : uint64_t(0));
    if (lane == 0)
        best[blockIdx.x] = mine;
}

// Entries of a chunk, of which half a warp has four a lane.
constexpr int CHUNK = SUMMARIZED;

// The summary of each chunk of a row. Grid (parts, rows).
extern "C" __global__ void __launch_bounds__(256)
    summarize(const float *logits, float2 *summaries, int size, int chunks) {
    int lane = threadIdx.x % 16, at_once = blockDim.x / 16;
    size_t row = blockIdx.y;
    logits += row * size;
    inputs_ready();
    // The halves of a warp stay together.
    for (int first = blockIdx.x * at_once; first < chunks; first += gridDim.x * at_once) {
        int chunk = first + threadIdx.x / 16;
        Floats<4> x = load_within(logits, chunk * CHUNK + lane * 4, size);
        float2 found = summary<1, 16>(x.v);
        if (lane == 0 && chunk < chunks)
            summaries[row * chunks + chunk] = found;
    }
}

constexpr int THREADS = 512;
constexpr int MAX_K = 64;
// Chunks of a thread whose keys it keeps.
constexpr int AT_ONCE = 5;
// Entries that are sorted at most.
constexpr int SORTED = THREADS;

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

// Calls `take(j, place)` for the `wanted` greatest of all threads' keys `key(0)` to `key(count - 1)`, of which there are
// more; of equal ones, for those of earlier threads, and earlier ones of a thread. Places are in that order, too.
// `count` is the same for all threads; keys that are no one's are zero. Returns a bound that no key taken is below.
template <typename Key, typename Take>
__device__ uint32_t select(Key key, int count, int wanted, Take take) {
    uint32_t bound = 0;
    int reached = 0;
    for (uint32_t bit = 1u << 31; bit > 0 && reached != wanted; bit /= 2) {
        int above = 0;
        for (int j = 0; j < count; ++j)
            above += __syncthreads_count(key(j) >= (bound | bit));
        if (above >= wanted)
            bound |= bit, reached = above;
    }
    int greater = 0, equal = 0, equal_left = wanted;
    for (int j = 0; j < count; ++j) {
        greater += key(j) > bound;
        equal += key(j) == bound;
    }
    equal_left -= sum_before(equal);
    for (int j = 0; j < count; ++j)
        equal_left -= __syncthreads_count(key(j) > bound);
    equal_left = max(equal_left, 0);
    int place = sum_before(greater + min(equal, equal_left));
    for (int j = 0; j < count; ++j)
        if (key(j) > bound || (key(j) == bound && equal_left-- > 0))
            take(j, place++);
    __syncthreads();
    return bound;
}

// Log-probabilities and ids of the `k` best entries of each row, best first, in memory of the host, from summaries of
// chunks; and then a one at done[row]. One block per row; there are fewer than 2^16 chunks.
//
// The k chunks with the greatest entries have the k best of all, and what is below the least of these k is not among
// them; with fewer chunks, everything may be.
extern "C" __global__ void __launch_bounds__(THREADS)
    top_k(const float *logits, const float2 *summaries, uint32_t *ids, float *log_probs, uint64_t *done, int size,
          int chunks, int k) {
    __shared__ int taken;
    __shared__ uint16_t chosen[MAX_K];
    __shared__ uint64_t found[SORTED];
    __shared__ float parts[THREADS / 32];
    int row = blockIdx.x, t = threadIdx.x;
    if (t == 0)
        taken = 0;
    inputs_ready();
    logits += (size_t)row * size;
    summaries += (size_t)row * chunks;

    // A thread has chunks that follow one another.
    int wanted = min(k, chunks);
    uint32_t bound = 0;
    if (chunks > k) {
        int count = (chunks + THREADS - 1) / THREADS;
        uint32_t first_keys[AT_ONCE];
        auto load_key = [&](int j) {
            int chunk = t * count + j;
            return j < count && chunk < chunks ? order(summaries[chunk].x) : 0;
        };
#pragma unroll
        for (int j = 0; j < AT_ONCE; ++j)
            first_keys[j] = load_key(j);
        auto key = [&](int j) {
            uint32_t x = 0;
#pragma unroll
            for (int i = 0; i < AT_ONCE; ++i)
                x = i == j ? first_keys[i] : x;
            return j < AT_ONCE ? x : load_key(j);
        };
        bound = select(key, count, k, [&](int j, int place) { chosen[place] = t * count + j; });
    } else {
        if (t < chunks)
            chosen[t] = t;
        __syncthreads();
    }

    // Entry e of those chosen; they are in the order of their ids.
    int entries = wanted * CHUNK;
    auto index = [&](int e) { return chosen[e / CHUNK] * CHUNK + e % CHUNK; };
#pragma unroll 4
    for (int e = 4 * t; e < entries; e += 4 * THREADS) {
        int first = index(e);
        Floats<4> x = load_within(logits, first, size);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t key = order(x.v[j]);
            if (first + j < size && key >= bound) {
                int to = atomicAdd(&taken, 1);
                if (to < SORTED)
                    found[to] = pack(key, first + j);
            }
        }
    }
    __syncthreads();
    int reached = taken;
    if (reached > SORTED) {
        int count = (entries + THREADS - 1) / THREADS;
        auto key = [&](int j) {
            int e = t * count + j, i = e < entries ? index(e) : size;
            return i < size ? order(logits[i]) : 0;
        };
        select(key, count, k, [&](int j, int place) { found[place] = pack(key(j), index(t * count + j)); });
        reached = k;
    }

    float all = NEG_INF, total = 0.0f;
    for (int c = t; c < chunks; c += THREADS)
        all = fmaxf(all, summaries[c].x);
    all = warp_max(all);
    if (t % 32 == 0)
        parts[t / 32] = all;
    __syncthreads();
    all = warp_max(t % 32 < THREADS / 32 ? parts[t % 32] : NEG_INF);
    for (int c = t; c < chunks; c += THREADS)
        if (summaries[c].x != NEG_INF)
            total += summaries[c].y * expf(summaries[c].x - all);
    float log_sum = all + logf(block_sum(total));

    // No two are the same.
    if (t < reached) {
        uint64_t entry = found[t];
        int rank = 0;
        for (int i = 0; i < reached; ++i)
            rank += found[i] > entry;
        if (rank < k) {
            ids[row * k + rank] = ~(uint32_t)entry;
            // NaN stays NaN: its key maps back to one.
            log_probs[row * k + rank] = value(entry >> 32) - log_sum;
        }
    }
    // The host waits for this alone.
    __syncthreads();
    if (t == 0) {
        __threadfence_system();
        *const_cast<volatile uint64_t *>(done + row) = 1;
    }
}
