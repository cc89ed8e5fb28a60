//! Counter-based randomness: a draw is a function of its position, so that nothing depends on who draws first.

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
    /// The stream with number `stream` (an epoch, say) of `seed`.
    pub fn new(seed: u64, stream: u64) -> Self {
        Self { key: seed, stream }
    }

    /// The 64 random bits at `position`.
    pub fn at(&self, position: u64) -> u64 {
        let [low, high] = self.pair(position / 2);
        if position.is_multiple_of(2) { low } else { high }
    }

    /// The random bits at positions 0, 1, 2 and so on.
    pub fn iter(&self) -> impl Iterator<Item = u64> + use<> {
        let stream = *self;
        (0..).flat_map(move |block| stream.pair(block))
    }

    /// The bits at positions `2 * block` and `2 * block + 1`.
    fn pair(&self, block: u64) -> [u64; 2] {
        let words = |value: u64| [value as u32, (value >> 32) as u32];
        let ([b0, b1], [s0, s1]) = (words(block), words(self.stream));
        let [w0, w1, w2, w3] = philox4x32_10([b0, b1, s0, s1], words(self.key)).map(u64::from);
        [w0 | w1 << 32, w2 | w3 << 32]
    }
}

fn philox4x32_10(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [c0, c1, c2, c3] = counter;
        let (first, second) = (u64::from(c0) * 0xD251_1F53, u64::from(c2) * 0xCD9E_8D57);
        counter =
            [(second >> 32) as u32 ^ c1 ^ key[0], second as u32, (first >> 32) as u32 ^ c3 ^ key[1], first as u32];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
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
    fn a_position_is_what_the_stream_gives_there() {
        let philox = Philox::new(7, 3);
        assert!(philox.iter().take(9).enumerate().all(|(position, bits)| philox.at(position as u64) == bits));
        assert_ne!(philox.at(0), Philox::new(7, 4).at(0));
        assert_ne!(philox.at(0), Philox::new(8, 3).at(0));
    }
}
