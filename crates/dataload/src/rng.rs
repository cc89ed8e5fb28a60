//! Counter-based random numbers: each is a function of its position, so nothing depends on the order of draws between
//! threads.

/// Blocks that are computed together, so that the compiler uses vector instructions.
const LANES: usize = 16;

/// Philox4x32-10: a keyed function from a 128-bit counter to 128 random bits.
///
/// Here the key is the seed, and the counter is (stream, position), 64 bits each. Two streams of one seed never
/// overlap.
///
/// # Source
/// Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011); PyTorch uses the same function on CUDA.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: u64,
    stream: u64,
}

impl Philox {
    /// Stream number `stream` (for example, the epoch) of `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { key: seed, stream }
    }

    /// The 64 random bits at `position`.
    pub fn at(&self, position: u64) -> u64 {
        let words = |value: u64| [value as u32, (value >> 32) as u32];
        let ([b0, b1], [s0, s1]) = (words(position / 2), words(self.stream));
        let [w0, w1, w2, w3] = philox4x32_10([b0, b1, s0, s1], words(self.key)).map(u64::from);
        if position.is_multiple_of(2) { w0 | w1 << 32 } else { w2 | w3 << 32 }
    }

    /// The random bits at positions 0, 1, 2 and so on.
    pub fn iter(&self) -> impl Iterator<Item = u64> + use<> {
        let mut bits = self.bits();
        std::iter::from_fn(move || Some(bits.draw()))
    }

    /// The same as a type whose draws are not `Option`s.
    pub(crate) fn bits(&self) -> Bits {
        Bits { philox: *self, block: 0, ready: [[0; 2]; LANES], taken: 2 * LANES }
    }

    /// Block `first` and those after it; a block holds the bits at two positions.
    ///
    /// The 32-bit words are kept in 64 bits, whose upper halves may hold anything, so that the loop compiles to the
    /// vector instruction that multiplies the lower halves.
    fn blocks(&self, first: u64) -> [[u64; 2]; LANES] {
        const LOW: u64 = u32::MAX as u64;
        let mut c0: [u64; LANES] = std::array::from_fn(|lane| first.wrapping_add(lane as u64));
        let mut c1 = c0.map(|block| block >> 32);
        let (mut c2, mut c3) = ([self.stream; LANES], [self.stream >> 32; LANES]);
        let mut key = [self.key as u32, (self.key >> 32) as u32];
        for _ in 0..10 {
            let [k0, k1] = key.map(u64::from);
            for lane in 0..LANES {
                let (first, second) = ((c0[lane] & LOW) * 0xD251_1F53, (c2[lane] & LOW) * 0xCD9E_8D57);
                (c0[lane], c1[lane]) = ((second >> 32) ^ c1[lane] ^ k0, second);
                (c2[lane], c3[lane]) = ((first >> 32) ^ c3[lane] ^ k1, first);
            }
            key = next_key(key);
        }
        std::array::from_fn(|lane| [(c0[lane] & LOW) | c1[lane] << 32, (c2[lane] & LOW) | c3[lane] << 32])
    }
}

/// The bits of a [`Philox`] stream from position 0 on, computed many at a time.
#[derive(Clone, Debug)]
pub(crate) struct Bits {
    philox: Philox,
    /// The first block that is not in `ready`.
    block: u64,
    ready: [[u64; 2]; LANES],
    taken: usize,
}

impl Bits {
    /// The next 64 random bits.
    #[inline]
    pub(crate) fn draw(&mut self) -> u64 {
        if self.taken == 2 * LANES {
            self.ready = self.philox.blocks(self.block);
            self.block += LANES as u64;
            self.taken = 0;
        }
        let bits = self.ready.as_flattened()[self.taken];
        self.taken += 1;
        bits
    }
}

/// A number from 0 up to, but not including, 1, made of the upper 53 of 64 random bits.
pub(crate) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// An integer below `end` made of 64 random bits (0 where `end` is 0), and the remaining bits for another number.
///
/// The relative bias is at most `end / 2^64`; for both numbers together, with the second below `other`, at most `end *
/// other / 2^64`.
#[inline]
pub(crate) fn below(bits: u64, end: usize) -> (usize, u64) {
    let product = u128::from(bits) * end as u128;
    ((product >> 64) as usize, product as u64)
}

fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        let (first, second) = (u64::from(c0) * 0xD251_1F53, u64::from(c2) * 0xCD9E_8D57);
        counter =
            [(second >> 32) as u32 ^ c1 ^ key[0], second as u32, (first >> 32) as u32 ^ c3 ^ key[1], first as u32];
        key = next_key(key);
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers_of_random123() {
        assert_eq!(philox4x32_10([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32_10([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32_10([0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344], [0xa4093822, 0x299f31d0]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn random_access_agrees_with_the_stream() {
        for (seed, stream) in [(7, 3), (u64::MAX, 1 << 40 | 5), (0, u64::MAX), (1 << 63 | 9, 0)] {
            let philox = Philox::new(seed, stream);
            assert!(philox.iter().take(1001).enumerate().all(|(position, bits)| philox.at(position as u64) == bits));
        }
        assert_ne!(Philox::new(7, 3).at(0), Philox::new(7, 4).at(0));
        assert_ne!(Philox::new(7, 3).at(0), Philox::new(8, 3).at(0));
    }

    #[test]
    fn blocks_beyond_32_bits_are_those_of_their_positions() {
        let philox = Philox::new(3, 4);
        for first in [u64::from(u32::MAX) - 3, 1 << 40, u64::MAX / 2 - LANES as u64] {
            for (block, pair) in (first..).zip(philox.blocks(first)) {
                assert_eq!(pair, [philox.at(2 * block), philox.at(2 * block + 1)], "block {block}");
            }
        }
    }

    #[test]
    fn two_numbers_of_one_draw_are_digits_of_it() {
        // With bits = 2^64 * x these are the digits of x in the mixed radix (6, 5).
        for step in 0..30u64 {
            let (first, left) = below((u64::MAX / 30) * step + u64::MAX / 60, 6);
            assert_eq!((first as u64, below(left, 5).0 as u64), (step / 5, step % 5));
        }
        assert_eq!((below(u64::MAX, 0).0, below(u64::MAX, 1).0, below(u64::MAX, usize::MAX).0), (0, 0, usize::MAX - 1));
    }
}
