//! AdamW with one byte per parameter for each of its two averages, on a CPU.

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// How many numbers share a scale.
pub const BLOCK: i64 = 256;

/// The averages of one parameter's gradient, in the order of its memory.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// The first average: for each number, its index in [`dynamic_map`]`(true)` as a byte.
    pub codes1: &'a Tensor,
    /// The factor of each block's numbers, float32.
    pub scales1: &'a Tensor,
    /// The average of squares: for each number, its index in [`dynamic_map`]`(false)` as a byte.
    pub codes2: &'a Tensor,
    /// As `scales1`.
    pub scales2: &'a Tensor,
}

/// The options of one step.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The learning rate.
    pub lr: f64,
    /// The decay rates of the two averages.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: the fraction of each weight, times the learning rate, that is subtracted.
    pub weight_decay: f64,
    /// The number of this step, from 1.
    pub step: f64,
    /// Whether to maximize the objective instead of minimizing it.
    pub maximize: bool,
}

/// The numbers that the 256 byte values represent, in rising order: from -1 (or 0) to 1, by decades from 1e-6, with
/// finer steps in the higher decades.
///
/// # Source
/// `bitsandbytes.functional.create_dynamic_map`
pub fn dynamic_map(signed: bool) -> [f32; 256] {
    let mut codes = [0.0; 256];
    // SAFETY: `codes` has room for 256 numbers.
    unsafe { raw::od_dynamic_map(i32::from(signed), codes.as_mut_ptr()) };
    codes
}

/// Steps a parameter and the averages of its gradient, in float32 arithmetic, in one pass on the calling thread.
///
/// # Errors
/// When a tensor is not on the CPU, has gaps, or has a wrong size or dtype; nothing has changed then.
///
/// # Source
/// Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
pub fn step(param: &Tensor, grad: &Tensor, state: State<'_>, options: &Options) -> Result<(), Error> {
    let (beta1, beta2) = options.betas;
    let Options { lr, eps, weight_decay, step, .. } = *options;
    let options = raw::AdamW { lr, beta1, beta2, eps, weight_decay, step, maximize: i32::from(options.maximize) };
    let [codes1, scales1, codes2, scales2] =
        [state.codes1, state.scales1, state.codes2, state.scales2].map(|tensor| tensor.as_ptr());
    // SAFETY: all tensors and the options live through the call, which checks sizes and dtypes before it touches memory.
    check(|err| unsafe {
        raw::od_adamw8bit(param.as_ptr(), grad.as_ptr(), codes1, scales1, codes2, scales2, &options, err)
    })
}
