//! Noise that is a function of seed, position and token, and of nothing else.

/// Gumbel noise for the token id `token` at the absolute position `position` (0 is the first token
/// of the prompt).
///
/// Adding independent Gumbel noise to `logit / T` and taking the greatest sum draws from
/// `softmax(logit / T)` (the Gumbel-max trick). All arguments and results are the same on every
/// platform, so that a kernel that picks on a device can compute the same numbers; this function is
/// there to test one against.
///
/// # Definition
///
/// Words come from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror and Shaw,
/// *Parallel random numbers: as easy as 1, 2, 3*, 2011). Its key is the seed, low half first; its
/// counter is `[index, stream, position low half, position high half]`. Two words make a uniform
/// number `(((second << 32 | first) >> 12) + 1/2) / 2^52`, and `-ln` of that an exponential one.
///
/// Tokens are drawn in chunks of 256 consecutive ids:
///
/// * `index = token / 256, stream = 0` gives an exponential number `E` (words 0 and 1) and a place
///   in the chunk (the top eight bits of word 2). `E / 256` is the smallest of the chunk's 256
///   exponential numbers, and belongs to the token at that place.
/// * `index = token / 2, stream = 1` gives what every other token's number exceeds that smallest
///   one by, from words 0 and 1 for even tokens, 2 and 3 for odd ones.
///
/// A token's noise is `-ln` of its number. The least of n exponential numbers is exponential with
/// rate n, falls on each of them with equal probability, and is exceeded by the others by
/// independent exponential amounts: all numbers are independent and exponential, as if each had
/// been drawn on its own. What the detour buys is that one draw bounds the noise of a whole chunk,
/// so that picking from a large vocabulary takes one draw per chunk and a handful per token, not
/// one per token.
///
/// Everything is integer arithmetic and f64 `+ - * /`, each rounded once (no fused multiply-add).
/// The logarithm is made of these: for `x = 2^n m` with `1/sqrt(2) < m <= sqrt(2)`, and
/// `s = (m - 1) / (m + 1)`, it is `n ln(2) + (2 s + 2 s s^2 p)`, where p is the polynomial
/// `1/3 + s^2/5 + s^4/7 + ... + s^20/23`, evaluated from its last term on.
pub fn gumbel(seed: u64, position: usize, token: u32) -> f64 {
    Noise::new(seed, position).gumbel(token)
}

/// Token ids that share the draw of their smallest number.
pub(super) const CHUNK: usize = 256;

/// The noise of one position.
#[derive(Clone, Copy, Debug)]
pub(super) struct Noise {
    seed: u64,
    position: u64,
}

/// The draw that the tokens of one chunk share.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkNoise {
    chunk: u32,
    /// The smallest of the chunk's exponential numbers.
    least: f64,
    /// The token that has it; the vocabulary may end before that.
    winner: u32,
}

impl ChunkNoise {
    pub(super) fn chunk(&self) -> u32 {
        self.chunk
    }

    /// What no token's noise in this chunk exceeds, give or take the rounding of [`ln`].
    pub(super) fn bound(&self) -> f64 {
        -ln(self.least)
    }
}

impl Noise {
    /// The noise for the token at the absolute position `position`.
    pub(super) fn new(seed: u64, position: usize) -> Self {
        Self { seed, position: position as u64 }
    }

    /// The shared draw of the tokens from `chunk * CHUNK` on.
    pub(super) fn chunk(&self, chunk: u32) -> ChunkNoise {
        let words = self.words(chunk, 0);
        ChunkNoise {
            chunk,
            least: exponential(words[0], words[1]) / CHUNK as f64,
            winner: chunk * CHUNK as u32 + (words[2] >> 24),
        }
    }

    /// Gumbel noise of a token of a chunk.
    pub(super) fn in_chunk(&self, chunk: &ChunkNoise, token: u32) -> f64 {
        debug_assert_eq!(token / CHUNK as u32, chunk.chunk);
        if token == chunk.winner {
            return chunk.bound();
        }
        let words = self.words(token / 2, 1);
        let own = 2 * (token % 2) as usize;
        -ln(chunk.least + exponential(words[own], words[own + 1]))
    }

    /// Gumbel noise of a token.
    pub(super) fn gumbel(&self, token: u32) -> f64 {
        self.in_chunk(&self.chunk(token / CHUNK as u32), token)
    }

    fn words(&self, index: u32, stream: u32) -> [u32; 4] {
        let counter = [index, stream, self.position as u32, (self.position >> 32) as u32];
        philox(counter, [self.seed as u32, (self.seed >> 32) as u32])
    }
}

/// An exponential number from 64 random bits.
fn exponential(low: u32, high: u32) -> f64 {
    let bits = (u64::from(high) << 32 | u64::from(low)) >> 12;
    // Exact, and neither 0 nor 1.
    -ln((bits as f64 + 0.5) * (1.0 / (1u64 << 52) as f64))
}

/// Philox4x32 with ten rounds.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The natural logarithm of a positive normal number, to within 4e-16 relative to the larger of 1
/// and the result.
///
/// `x = 2^n m` with m between `1/sqrt(2)` and `sqrt(2)`, and `ln m` is the series of `2 artanh((m -
/// 1) / (m + 1))`. The standard library's logarithm may differ between platforms in the last bit.
pub(super) fn ln(x: f64) -> f64 {
    const MANTISSA: u64 = (1 << 52) - 1;
    let bits = x.to_bits();
    let mut exponent = (bits >> 52) as i64 - 1023;
    let mut m = f64::from_bits(bits & MANTISSA | 1023 << 52);
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let mut series = 1.0 / 23.0;
    for odd in [21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = series * s2 + 1.0 / odd;
    }
    exponent as f64 * std::f64::consts::LN_2 + (2.0 * s + 2.0 * s * s2 * series)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_words() {
        // Known answers of the authors' library, Random123.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox(
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0]
            ),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn the_logarithm_is_that_of_the_standard_library() {
        let mut x = 1e-300;
        while x < 1e300 {
            let (found, expected) = (ln(x), f64::ln(x));
            assert!((found - expected).abs() <= 4e-16 * expected.abs().max(1.0), "ln({x})");
            x *= 1.000_73;
        }
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn fixed_values() {
        // These may never change: the text of a seed would, and kernels compute the same. They come
        // from a transcription of the definition into another language.
        let noise = Noise::new(0x0123_4567_89ab_cdef, 77);
        let values = [0, 1, 255, 256, 151_935].map(|token| noise.gumbel(token).to_bits());
        let expected = [
            0x3ff0_e561_c635_f438,
            0xbfee_5234_7b46_2ee8,
            0xbfdd_39c7_9be5_4c1b,
            0xbfee_3b34_990c_16ea,
            0x3fe6_6e07_5317_3303,
        ];
        assert_eq!(values, expected);
    }

    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn a_chunk_bounds_the_noise_of_its_tokens_and_gives_it_to_one() {
        for position in 0..50 {
            let noise = Noise::new(9, position);
            let chunk = noise.chunk(3);
            let values: Vec<f64> = (768..1024).map(|token| noise.in_chunk(&chunk, token)).collect();
            assert!(values.iter().all(|&g| g <= chunk.bound()));
            assert_eq!(values.iter().filter(|&&g| g == chunk.bound()).count(), 1);
            assert_eq!(values[7], noise.gumbel(775));
        }
    }

    /// Kolmogorov-Smirnov: tokens of different chunks, of one chunk, and the largest of a chunk
    /// follow the law of independent Gumbel variables.
    #[test]
    #[cfg_attr(miri, ignore = "too much arithmetic")]
    fn noise_is_gumbel() {
        let n = 20_000;
        // With so many draws, a distance above this has probability 1e-6.
        let limit = 2.7 / f64::from(n).sqrt();
        let law = |x: f64| (-(-x).exp()).exp();
        let distance = |mut values: Vec<f64>, law: &dyn Fn(f64) -> f64| {
            values.sort_by(f64::total_cmp);
            let n = values.len() as f64;
            values.iter().enumerate().fold(0f64, |worst, (i, &x)| {
                worst.max((law(x) - i as f64 / n).abs()).max((law(x) - (i + 1) as f64 / n).abs())
            })
        };
        let positions = |token: u32| (0..n as usize).map(move |p| Noise::new(1, p).gumbel(token));
        assert!(distance(positions(5).collect(), &law) < limit);
        assert!(
            distance((0..n as u32).map(|t| Noise::new(2, 3).gumbel(t)).collect(), &law) < limit
        );
        // The difference of two of one chunk is logistic if they are independent.
        let differences = positions(6).zip(positions(7)).map(|(a, b)| a - b).collect();
        assert!(distance(differences, &|x| 1.0 / (1.0 + (-x).exp())) < limit);
        let largest = |p| {
            let noise = Noise::new(4, p);
            (0..8).map(|t| noise.gumbel(t)).fold(f64::MIN, f64::max) - 8f64.ln()
        };
        assert!(distance((0..n as usize).map(largest).collect(), &law) < limit);
    }
}
