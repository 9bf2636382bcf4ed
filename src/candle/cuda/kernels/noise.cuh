// Noise that is a function of seed, position and token: `gumbel` of the crate, number for number. Its definition is
// there. Sums and products are rounded one by one, as fused ones round otherwise.
#pragma once

#include <cstdint>

constexpr int CHUNK = 256;

__device__ __forceinline__ double logarithm(double x) {
    uint64_t bits = __double_as_longlong(x);
    int exponent = (int)(bits >> 52) - 1023;
    double m = __longlong_as_double((bits & 0xfffffffffffffull) | 1023ull << 52);
    if (m > 1.4142135623730951) {
        m = __dmul_rn(m, 0.5);
        exponent += 1;
    }
    double s = __ddiv_rn(__dadd_rn(m, -1.0), __dadd_rn(m, 1.0));
    double s2 = __dmul_rn(s, s), twice = __dmul_rn(2.0, s);
    double series = 1.0 / 23.0;
#pragma unroll
    for (int odd = 21; odd >= 3; odd -= 2)
        series = __dadd_rn(__dmul_rn(series, s2), 1.0 / odd);
    double rest = __dadd_rn(twice, __dmul_rn(__dmul_rn(twice, s2), series));
    return __dadd_rn(__dmul_rn((double)exponent, 0.6931471805599453), rest);
}

// Philox4x32-10.
__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        uint64_t a = (uint64_t)counter.x * 0xD2511F53u, b = (uint64_t)counter.z * 0xCD9E8D57u;
        counter = make_uint4((uint32_t)(b >> 32) ^ counter.y ^ key.x, (uint32_t)b,
                             (uint32_t)(a >> 32) ^ counter.w ^ key.y, (uint32_t)a);
        key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
    }
    return counter;
}

__device__ __forceinline__ double exponential(uint32_t low, uint32_t high) {
    uint64_t bits = ((uint64_t)high << 32 | low) >> 12;
    return -logarithm(__dmul_rn(__dadd_rn((double)bits, 0.5), 0x1p-52));
}

// What the host says of the noise of a pass.
struct Draws {
    // The temperature of draws; what noise is multiplied with in drafts.
    float scale;
    uint32_t unused;
    uint64_t seed;
};

// The noise of one position.
struct Noise {
    uint64_t seed, position;

    __device__ uint4 words(uint32_t index, uint32_t stream) const {
        uint4 counter = make_uint4(index, stream, (uint32_t)position, (uint32_t)(position >> 32));
        return philox(counter, make_uint2((uint32_t)seed, (uint32_t)(seed >> 32)));
    }
};

// The draw that the tokens of a chunk share.
struct ChunkNoise {
    double least;
    uint32_t winner;

    ChunkNoise() = default;

    __device__ ChunkNoise(const Noise &noise, uint32_t chunk) {
        uint4 words = noise.words(chunk, 0);
        least = __dmul_rn(exponential(words.x, words.y), 1.0 / CHUNK);
        winner = chunk * CHUNK + (words.z >> 24);
    }

    // What no token's noise in the chunk exceeds, give or take rounding.
    __device__ double bound() const { return -logarithm(least); }

    // Of a token, from its own words.
    __device__ double gumbel(uint32_t token, uint32_t low, uint32_t high) const {
        return token == winner ? bound() : -logarithm(__dadd_rn(least, exponential(low, high)));
    }

    __device__ double gumbel(const Noise &noise, uint32_t token) const {
        uint4 words = noise.words(token / 2, 1);
        return token % 2 ? gumbel(token, words.z, words.w) : gumbel(token, words.x, words.y);
    }
};
