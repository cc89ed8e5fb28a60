//! AdamW with one byte a parameter for each of its two averages, on a CPU.

use tch::Tensor;

use crate::error::{Error, check};
use crate::raw;

/// How many numbers share a scale.
pub const BLOCK: i64 = 256;

/// The averages of one parameter's gradient, in the order of its memory.
#[derive(Clone, Copy, Debug)]
pub struct State<'a> {
    /// The first average: a byte a number, its place in [`dynamic_map`]`(true)`.
    pub codes1: &'a Tensor,
    /// What the numbers of each block of it are to be multiplied by, float32.
    pub scales1: &'a Tensor,
    /// The average of squares: a byte a number, its place in [`dynamic_map`]`(false)`.
    pub codes2: &'a Tensor,
    /// As `scales1`.
    pub scales2: &'a Tensor,
}

/// The options of one step.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The learning rate.
    pub lr: f64,
    /// How slowly the two averages move.
    pub betas: (f64, f64),
    /// Added to the denominator.
    pub eps: f64,
    /// The share of each weight, times the learning rate, taken off.
    pub weight_decay: f64,
    /// Which step this is, from 1.
    pub step: f64,
    /// Climbs where it would descend.
    pub maximize: bool,
}

/// The numbers that a byte stands for, in order: from -1 (or 0) to 1, by decades from 1e-6, the higher the finer.
///
/// # Source
/// `bitsandbytes.functional.create_dynamic_map`
pub fn dynamic_map(signed: bool) -> [f32; 256] {
    let mut codes = [0.0; 256];
    // SAFETY: there is room for 256 numbers.
    unsafe { raw::od_dynamic_map(i32::from(signed), codes.as_mut_ptr()) };
    codes
}

/// Steps a parameter and the averages of its gradient, in float32 arithmetic, in one pass on the calling thread.
///
/// # Errors
/// When a tensor is not on the CPU, has gaps, or has another size or dtype than it should; nothing is then changed.
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
