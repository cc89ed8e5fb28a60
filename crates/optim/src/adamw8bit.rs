//! AdamW with 8-bit moment averages.

mod by_operators;

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::adamw8bit::{self, BLOCK};
use tch::{Device, Kind, Tensor};

use self::by_operators::{Quantised, by_operators};
use crate::adam::AdamOptions;
use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::optimizer::GroupOptimizer;
use crate::options::OptionSet;

/// AdamW that keeps one byte per parameter for each of its two averages, instead of four: blocks of 256 numbers share a
/// float32 scale, 2.04 bytes per parameter in all. lr 1e-3.
///
/// The arithmetic is float32. A gradient of infinity or NaN spoils the averages of its whole block. On a CPU a kernel
/// does the step in one pass, on one thread; elsewhere libtorch operators do it for many parameters at once, with some
/// ten float32 copies of up to 2^24 numbers, or of the largest parameter.
///
/// # Source
/// `bitsandbytes.optim.AdamW8bit`; Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
#[doc(alias = "AdamW8bit")]
pub type AdamW8Bit = GroupOptimizer<AdamW8BitOptions>;

/// The options of an [`AdamW8Bit`].
pub type AdamW8BitBuilder = GroupBuilder<AdamW8BitOptions>;

/// The options of an [`AdamW8Bit`] group, except the learning rate.
#[derive(Clone, Debug)]
pub struct AdamW8BitOptions {
    adamw: AdamOptions<true>,
    min_8bit_size: i64,
}

impl Default for AdamW8BitOptions {
    fn default() -> Self {
        Self { adamw: AdamOptions::default(), min_8bit_size: 4096 }
    }
}

impl<Scope> Options<AdamW8BitOptions, Scope> {
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1); default (0.9, 0.999).
    pub fn betas(self, beta1: f64, beta2: f64) -> Self {
        self.with(move |options| options.adamw.betas = (beta1, beta2))
    }

    /// Added to the denominator; default 1e-8.
    pub fn eps(self, eps: f64) -> Self {
        self.with(move |options| options.adamw.eps = eps)
    }

    /// Decoupled weight decay: a step multiplies a parameter by 1 - lr * weight_decay; default 0.01.
    pub fn weight_decay(self, weight_decay: f64) -> Self {
        self.with(move |options| options.adamw.weight_decay = weight_decay)
    }

    /// Maximizes the objective instead of minimizing it; default false.
    pub fn maximize(self, maximize: bool) -> Self {
        self.with(move |options| options.adamw.maximize = maximize)
    }

    /// Parameters with fewer elements than this keep averages of their own dtype; default 4,096. These are biases and
    /// gains, which take little memory but are sensitive to rounding.
    pub fn min_8bit_size(self, size: i64) -> Self {
        self.with(move |options| options.min_8bit_size = size)
    }
}

/// How many numbers the operators update at once, which limits the memory for their float32 copies.
const AT_ONCE: usize = 1 << 24;

fn blocks(param: &Tensor) -> i64 {
    param.numel().div_ceil(BLOCK as usize) as i64
}

/// One byte per element of the parameter.
fn codes(name: &'static str) -> Slot {
    let fresh = |param: &Tensor, _| Ok(Tensor::f_zeros([param.numel() as i64], (Kind::Uint8, param.device()))?);
    Slot::made(name, fresh, 0.0)
}

/// One float32 per block of the parameter.
fn scales(name: &'static str) -> Slot {
    let fresh = |param: &Tensor, _| Ok(Tensor::f_zeros([blocks(param)], (Kind::Float, param.device()))?);
    Slot::made(name, fresh, 0.0)
}

impl OptionSet for AdamW8BitOptions {
    fn check_ranges(&self) -> Result<(), OptimizerError> {
        let (option, found) = ("min_8bit_size", self.min_8bit_size as f64);
        OptimizerError::check_range(option, found, 0.0..f64::INFINITY, "at least 0")?;
        self.adamw.check_ranges()
    }

    fn fields(&mut self) -> Vec<(String, Field<'_>)> {
        let AdamW8BitOptions { adamw, min_8bit_size } = self;
        let mut fields = adamw.fields();
        fields.retain(|(name, _)| name != "amsgrad");
        fields.push(("min_8bit_size".to_owned(), Field::Int(min_8bit_size)));
        fields
    }
}

impl Algorithm for AdamW8BitOptions {
    const LR: f64 = 1e-3;
    const COUNTS_STEPS: bool = true;
    const COUPLES_ELEMENTS: bool = true;

    fn refuses(&self, param: &Tensor) -> Option<String> {
        let double = param.kind() == Kind::Double && self.quantised(param);
        double.then(|| "it is float64, but 8-bit averages are for float32 and below: use AdamW for it".to_owned())
    }

    fn momentum(&mut self) -> Option<&mut f64> {
        self.adamw.momentum()
    }

    fn slots(&self, param: &Tensor) -> Vec<Slot> {
        match self.quantised(param) {
            true => vec![codes("state1"), scales("absmax1"), codes("state2"), scales("absmax2")],
            false => self.adamw.slots(param),
        }
    }

    fn step(&self, step: &Step<'_>) -> Result<(), TorchError> {
        let [codes1, scales1, codes2, scales2] = step.slots else { return self.adamw.step(step) };
        let counts = step.by_count(|count| count)?;
        let AdamOptions { betas, eps, weight_decay, maximize, .. } = self.adamw;
        let options =
            |step_count| adamw8bit::Options { lr: step.lr, betas, eps, weight_decay, step: step_count, maximize };
        let mut together: Vec<Quantised> = Vec::new();
        for (index, &count) in counts.iter().enumerate() {
            let lists = [step.params, step.grads, codes1, scales1, codes2, scales2];
            let [param, grad, codes1, scales1, codes2, scales2] = lists.map(|list| list.get(index));
            let averages = [(codes1?, scales1?), (codes2?, scales2?)];
            let one = Quantised { param: param?, grad: grad?, averages };
            if one.param.device() == Device::Cpu {
                adamw8bit::step(&one.param, &one.grad, one.state(), &options(count))?;
                continue;
            }
            together.push(one);
            let numbers: usize = together.iter().map(|one| one.param.numel()).sum();
            let next = counts.get(index + 1);
            let next_numbers = if next.is_some() { step.params.get(index + 1)?.numel() } else { 0 };
            if next != Some(&count) || numbers + next_numbers > AT_ONCE {
                by_operators(&together, &options(count))?;
                together.clear();
            }
        }
        Ok(())
    }
}

impl AdamW8BitOptions {
    fn quantised(&self, param: &Tensor) -> bool {
        param.numel() as i64 >= self.min_8bit_size
    }
}
