//! One seed for everything that draws random numbers.

use std::sync::atomic::{AtomicU64, Ordering};

static BASE_SEED: AtomicU64 = AtomicU64::new(0);

/// Seeds libtorch's generators, those of the CPU and of every GPU, and the loaders and batch samplers that are built
/// from now on without a seed of their own. Returns the seed.
///
/// Call it first in the program, before the model draws its weights. Ranks of a distributed run that should draw
/// different dropout masks need different seeds, but loaders the same: call `tch::manual_seed(seed + rank)` afterwards.
///
/// It does not reach:
/// - seeds that are given: `DataLoaderBuilder::seed`, `RandomSampler::new(len, seed)`, `Generator::manual_seed(seed)`;
/// - loaders that were built before, and random numbers from elsewhere, such as the crate `rand`;
/// - operators whose result depends on the order in which threads add up, above all on GPUs
///   (`torch.use_deterministic_algorithms` in PyTorch).
///
/// No environment variable is read or set.
///
/// ```
/// use overdrive_core::seed_everything;
/// use tch::{Device, Kind, Tensor};
///
/// let seed = seed_everything(7);
/// let first = Tensor::rand([4], (Kind::Float, Device::Cpu));
/// seed_everything(seed);
/// assert_eq!(Tensor::rand([4], (Kind::Float, Device::Cpu)), first);
/// ```
///
/// # Syncs
/// No.
///
/// # Source
/// Lightning's `seed_everything`
pub fn seed_everything(seed: u64) -> u64 {
    // libtorch reads the bits as a whole number without a sign.
    tch::manual_seed(seed as i64);
    BASE_SEED.store(seed, Ordering::Relaxed);
    seed
}

/// The seed of parts that are given none: the last one of [`seed_everything`], or 0.
pub fn base_seed() -> u64 {
    BASE_SEED.load(Ordering::Relaxed)
}
