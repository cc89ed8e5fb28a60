//! NumPy's random numbers.

use crate::rng::unit;

const MULTIPLIER: u128 = 0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645;

/// The generator of `numpy.random.default_rng(seed)`.
///
/// # Source
/// O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number Generation"
/// (2014), as PCG XSL RR 128/64; NumPy's `SeedSequence` for its seed.
pub(super) struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    pub(super) fn default_rng(seed: u64) -> Self {
        let [state, stream] = seed_sequence(seed);
        let mut generator = Self { state: 0, increment: stream << 1 | 1 };
        generator.step();
        generator.state = generator.state.wrapping_add(state);
        generator.step();
        generator
    }

    fn step(&mut self) {
        self.state = self.state.wrapping_mul(MULTIPLIER).wrapping_add(self.increment);
    }

    /// A number from 0 up to, but not including, 1: that of `Generator.random()`.
    pub(super) fn random(&mut self) -> f64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        unit(folded.rotate_right((self.state >> 122) as u32))
    }
}

/// `SeedSequence(seed).generate_state(4, uint64)` as two numbers of 128 bits.
fn seed_sequence(seed: u64) -> [u128; 2] {
    let mut constant = 0x43b0_d7e5_u32;
    let mut hash = |value: u32| {
        let value = value ^ constant;
        constant = constant.wrapping_mul(0x931e_8875);
        let value = value.wrapping_mul(constant);
        value ^ value >> 16
    };
    let mut pool = [seed as u32, (seed >> 32) as u32, 0, 0].map(&mut hash);
    for from in 0..4 {
        for to in (0..4).filter(|&to| to != from) {
            let mixed = pool[to].wrapping_mul(0xca01_f9dd).wrapping_sub(hash(pool[from]).wrapping_mul(0x4973_f715));
            pool[to] = mixed ^ mixed >> 16;
        }
    }
    let mut constant = 0x8b51_f9dd_u32;
    let words: [u32; 8] = std::array::from_fn(|place| {
        let value = pool[place % 4] ^ constant;
        constant = constant.wrapping_mul(0x58f3_8ded);
        let value = value.wrapping_mul(constant);
        value ^ value >> 16
    });
    // The upper 64 bits come first, and of these the lower 32.
    [0, 4].map(|at| [1, 0, 3, 2].iter().fold(0, |number, place| number << 32 | u128::from(words[at + place])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_numpys() {
        // numpy.random.default_rng(seed).random(3)
        let drawn = |seed| {
            let mut generator = Pcg64::default_rng(seed);
            [0; 3].map(|_| generator.random())
        };
        assert_eq!(drawn(42), [0.7739560485559633, 0.4388784397520523, 0.8585979199113825]);
        assert_eq!(drawn(0), [0.6369616873214543, 0.2697867137638703, 0.04097352393619469]);
    }
}
