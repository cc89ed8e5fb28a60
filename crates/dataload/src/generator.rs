//! PyTorch's random numbers on the CPU.

use std::fmt;
use std::sync::Arc;

use overdrive_ffi::rng;
use tch::{Device, Kind, Tensor};

use crate::DataError;

/// The numbers that MT19937 makes at once.
const NUMBERS: usize = 624;
/// How far apart the two numbers are that make a new one.
const SHIFT: usize = 397;
/// The bytes of a state as libtorch saves it: the seed, `left`, a flag, `next`, the numbers as 64 bits each, and
/// normally distributed numbers that were drawn in pairs.
pub(crate) const STATE_BYTES: usize = 5056;
const NUMBERS_AT: usize = 24;
const TAIL_AT: usize = NUMBERS_AT + 8 * NUMBERS;
/// From this length on, libtorch permutes in another way, because the remainder of 32 bits would be too uneven.
const LONG: usize = u32::MAX as usize / 20;

/// PyTorch's generator on the CPU, which gives the numbers that `torch.Generator` gives.
///
/// A loader draws its orders from one with [`DataLoaderBuilder::generator`](crate::DataLoaderBuilder::generator).
///
/// ```
/// use overdrive_dataload::Generator;
///
/// // torch.randperm(5, generator=torch.Generator().manual_seed(0))
/// assert_eq!(Generator::manual_seed(0).randperm(5), [4, 0, 1, 3, 2]);
/// ```
///
/// # Source
/// `torch.Generator`; Matsumoto and Nishimura, "Mersenne Twister" (1998).
#[derive(Clone)]
#[doc(alias = "torch.Generator")]
pub struct Generator {
    /// As libtorch saves it: here only the seed, the flag and the normal numbers are up to date.
    saved: Vec<u8>,
    numbers: [u32; NUMBERS],
    /// The draw that brings it to 0 makes new numbers first.
    left: usize,
    next: usize,
    is_default: bool,
}

impl Generator {
    /// A generator with this seed.
    ///
    /// # Source
    /// `torch.Generator().manual_seed(seed)`
    pub fn manual_seed(seed: u64) -> Self {
        let mut saved = vec![0; STATE_BYTES];
        saved[..8].copy_from_slice(&seed.to_ne_bytes());
        saved[12..16].copy_from_slice(&1i32.to_ne_bytes());
        // MT19937 has 32 bits of seed; libtorch ignores the others.
        let mut numbers = [seed as u32; NUMBERS];
        for place in 1..NUMBERS {
            let before = numbers[place - 1];
            numbers[place] = 1_812_433_253_u32.wrapping_mul(before ^ before >> 30).wrapping_add(place as u32);
        }
        Self { saved, numbers, left: 1, next: 0, is_default: false }
    }

    /// A copy of libtorch's default generator.
    pub(crate) fn of_torch() -> Result<Self, DataError> {
        let state = Vec::<u8>::try_from(&rng::state(Device::Cpu)?)?;
        Self::restored(&state, true).ok_or_else(|| DataError::other("libtorch's generator has an unknown state"))
    }

    /// Makes libtorch's default generator continue after this one's draws.
    pub(crate) fn continue_in_torch(&self) -> Result<(), DataError> {
        Ok(rng::set_state(Device::Cpu, &Tensor::f_from_slice(&self.state())?)?)
    }

    /// The generator of a saved state; `None` for one that is not valid.
    pub(crate) fn restored(state: &[u8], is_default: bool) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(state.get(at..at + 8)?.try_into().ok()?));
        if state.len() != STATE_BYTES {
            return None;
        }
        // `left` is an int; the other half of these eight bytes is a flag.
        let (left, next) = (word(8)? as u32 as usize, usize::try_from(word(16)?).ok()?);
        if left == 0 || next.saturating_add(left) > NUMBERS + 1 {
            return None;
        }
        let mut numbers = [0; NUMBERS];
        for (place, number) in numbers.iter_mut().enumerate() {
            *number = u32::try_from(word(NUMBERS_AT + 8 * place)?).ok()?;
        }
        Some(Self { saved: state.to_vec(), numbers, left, next, is_default })
    }

    /// The state as libtorch saves it.
    pub(crate) fn state(&self) -> Arc<[u8]> {
        let mut state = self.saved.clone();
        state[8..12].copy_from_slice(&(self.left as i32).to_ne_bytes());
        state[16..24].copy_from_slice(&(self.next as u64).to_ne_bytes());
        let places = state[NUMBERS_AT..TAIL_AT].chunks_exact_mut(8);
        places.zip(self.numbers).for_each(|(place, number)| place.copy_from_slice(&u64::from(number).to_ne_bytes()));
        state.into()
    }

    /// Whether it stands for libtorch's default generator, from which some of PyTorch's samplers draw only a seed.
    pub fn is_default(&self) -> bool {
        self.is_default
    }

    /// A number from 0 to 2^63 - 1.
    ///
    /// # Source
    /// `torch.empty((), dtype=torch.int64).random_(generator=g).item()`
    pub fn random(&mut self) -> u64 {
        self.draw_64() % (1 << 63)
    }

    /// A permutation of 0 to `len - 1`.
    ///
    /// # Source
    /// `torch.randperm(len, generator=g)`
    pub fn randperm(&mut self, len: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..len).collect();
        if len < LONG {
            for place in 0..len.saturating_sub(1) {
                let turn = self.draw() as usize % (len - place);
                order.swap(place, place + turn);
            }
        } else {
            for place in 0..len {
                let turn = (self.draw_64() % (place as u64 + 1)) as usize;
                order[place] = order[turn];
                order[turn] = place;
            }
        }
        order
    }

    /// `count` numbers below `high`; none if that is 0.
    ///
    /// # Source
    /// `torch.randint(high, (count,), generator=g)`
    pub fn randint(&mut self, high: usize, count: usize) -> Vec<usize> {
        let count = if high == 0 { 0 } else { count };
        let below = |_| match high < 1 << 28 {
            true => self.draw() as usize % high,
            false => (self.draw_64() % high as u64) as usize,
        };
        (0..count).map(below).collect()
    }

    /// `count` places of `weights`, each drawn in proportion to its weight.
    ///
    /// libtorch draws them with its default generator, which gets this one's state for the call: no other thread should
    /// draw numbers meanwhile.
    ///
    /// # Errors
    /// When a weight is negative or not finite, none is above 0, or there are too few weights for draws without
    /// replacement.
    ///
    /// # Source
    /// `torch.multinomial(weights, count, replacement, generator=g)`
    pub fn multinomial(&mut self, weights: &[f64], count: usize, replacement: bool) -> Result<Vec<usize>, DataError> {
        let weights = Tensor::f_from_slice(weights)?;
        let before = rng::state(Device::Cpu)?;
        self.continue_in_torch()?;
        let drawn = weights.f_multinomial(count as i64, replacement);
        let after = rng::state(Device::Cpu);
        rng::set_state(Device::Cpu, &before)?;
        let drawn = Vec::<i64>::try_from(&drawn?.f_to_kind(Kind::Int64)?)?;
        let state = Vec::<u8>::try_from(&after?)?;
        *self = Self::restored(&state, self.is_default)
            .ok_or_else(|| DataError::other("libtorch's generator has an unknown state"))?;
        Ok(drawn.into_iter().map(|place| place as usize).collect())
    }

    fn draw_64(&mut self) -> u64 {
        let upper = u64::from(self.draw());
        upper << 32 | u64::from(self.draw())
    }

    #[inline]
    fn draw(&mut self) -> u32 {
        self.left -= 1;
        if self.left == 0 {
            self.renew();
        }
        let mut bits = self.numbers[self.next];
        self.next += 1;
        bits ^= bits >> 11;
        bits ^= bits << 7 & 0x9d2c_5680;
        bits ^= bits << 15 & 0xefc6_0000;
        bits ^ bits >> 18
    }

    fn renew(&mut self) {
        (self.left, self.next) = (NUMBERS, 0);
        for place in 0..NUMBERS {
            let (upper, lower) = (self.numbers[place], self.numbers[(place + 1) % NUMBERS]);
            let mixed = upper & 0x8000_0000 | lower & 0x7fff_ffff;
            let odd = if lower & 1 == 1 { 0x9908_b0df } else { 0 };
            self.numbers[place] = self.numbers[(place + SHIFT) % NUMBERS] ^ mixed >> 1 ^ odd;
        }
    }
}

impl fmt::Debug for Generator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Generator").field("is_default", &self.is_default).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_known_sequence_of_mt19937() {
        // The 10000th number after the seed 5489, as the C++ standard states it.
        let mut generator = Generator::manual_seed(5489);
        let last = (0..10_000).map(|_| generator.draw()).last();
        assert_eq!(last, Some(4_123_659_995));
    }

    #[test]
    fn a_saved_state_continues_the_sequence() {
        let mut generator = Generator::manual_seed(1 << 40 | 7);
        for taken in [0, 1, 622, 1, 1, 1, 700] {
            generator.randint(100, taken);
            let mut again = Generator::restored(&generator.state(), false).unwrap();
            assert_eq!(again.randint(1000, 1300), generator.clone().randint(1000, 1300));
        }
        let mut state = generator.state().to_vec();
        assert!(Generator::restored(&state[1..], false).is_none());
        state[16] = 200;
        state[8..12].copy_from_slice(&600i32.to_ne_bytes());
        assert!(Generator::restored(&state, false).is_none());
        state[8..12].copy_from_slice(&0i32.to_ne_bytes());
        assert!(Generator::restored(&state, false).is_none());
    }

    #[test]
    fn bounds_of_draws() {
        let mut generator = Generator::manual_seed(3);
        assert!(generator.randperm(0).is_empty() && generator.randint(0, 5).is_empty());
        assert_eq!(generator.randperm(1), [0]);
        for high in [1, 7, (1 << 28) - 1, 1 << 28, 1 << 40] {
            let drawn = generator.randint(high, 1000);
            assert!(drawn.len() == 1000 && drawn.iter().all(|&number| number < high));
        }
        let mut order = generator.randperm(1001);
        assert_ne!(order, (0..1001).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..1001).collect::<Vec<_>>());
    }
}
