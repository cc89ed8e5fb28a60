//! AdamW with 8-bit moment averages.

use std::sync::{Mutex, PoisonError};

use overdrive_core::{OptimizerError, TorchError};
use overdrive_ffi::adamw8bit::{self, BLOCK, dynamic_map};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use crate::adam::AdamOptions;
use crate::algorithm::{Algorithm, Field, Slot, Step};
use crate::builder::{GroupBuilder, Options};
use crate::optimizer::GroupOptimizer;
use crate::options::OptionSet;

static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static CLAMP_MIN: LazyOp = LazyOp::new("aten::clamp_min", "");
static BUCKETIZE: LazyOp = LazyOp::new("aten::bucketize", "Tensor");
static PAD: LazyOp = LazyOp::new("aten::constant_pad_nd", "");
static NAN_TO_NUM: LazyOp = LazyOp::new("aten::nan_to_num", "");

/// AdamW that keeps one byte per parameter for each of its two averages, instead of four: blocks of 256 numbers share a
/// float32 scale, 2.04 bytes per parameter in all. lr 1e-3.
///
/// The arithmetic is float32. A gradient of infinity or NaN spoils the averages of its whole block. On a CPU a kernel
/// does the step in one pass, on one thread; elsewhere libtorch operators do it, which make float32 copies of one
/// parameter's averages at a time.
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

fn blocks(param: &Tensor) -> i64 {
    param.numel().div_ceil(BLOCK as usize) as i64
}

/// One byte per element of the parameter.
fn codes(name: &'static str) -> Slot {
    let fresh = |param: &Tensor, _| Ok(Tensor::f_zeros([param.numel() as i64], (Kind::Uint8, param.device()))?);
    Slot { name, fresh, fill: 0.0 }
}

/// One float32 per block of the parameter.
fn scales(name: &'static str) -> Slot {
    let fresh = |param: &Tensor, _| Ok(Tensor::f_zeros([blocks(param)], (Kind::Float, param.device()))?);
    Slot { name, fresh, fill: 0.0 }
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
        for (index, count) in counts.into_iter().enumerate() {
            let (param, grad) = (step.params.get(index)?, step.grads.get(index)?);
            let (codes1, scales1) = (codes1.get(index)?, scales1.get(index)?);
            let (codes2, scales2) = (codes2.get(index)?, scales2.get(index)?);
            let state = adamw8bit::State { codes1: &codes1, scales1: &scales1, codes2: &codes2, scales2: &scales2 };
            let AdamOptions { betas, eps, weight_decay, maximize, .. } = self.adamw;
            let options = adamw8bit::Options { lr: step.lr, betas, eps, weight_decay, step: count, maximize };
            match param.device() {
                Device::Cpu => adamw8bit::step(&param, &grad, state, &options)?,
                _ => by_operators(&param, &grad, state, &options)?,
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

/// The 256 numbers that the byte codes stand for, on one device, and the midpoints between them.
struct Map {
    codes: Tensor,
    middles: Tensor,
}

/// The maps of the first and the second average.
fn maps(device: Device) -> Result<[Map; 2], TorchError> {
    static MADE: Mutex<Vec<(Device, [Map; 2])>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let share = |maps: &[Map; 2]| {
        let share = |map: &Map| Map { codes: map.codes.shallow_clone(), middles: map.middles.shallow_clone() };
        [share(&maps[0]), share(&maps[1])]
    };
    if let Some((_, maps)) = made.iter().find(|(known, _)| *known == device) {
        return Ok(share(maps));
    }
    let make = |signed| {
        let codes = dynamic_map(signed);
        let middles: Vec<f32> = codes.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
        let here = |numbers: &[f32]| Ok::<_, TorchError>(Tensor::f_from_slice(numbers)?.f_to_device(device)?);
        Ok::<_, TorchError>(Map { codes: here(&codes)?, middles: here(&middles)? })
    };
    let maps = [make(true)?, make(false)?];
    let shared = share(&maps);
    made.push((device, maps));
    Ok(shared)
}

/// The kernel's computation in libtorch operators; the averages are equal bit for bit.
fn by_operators(
    param: &Tensor,
    grad: &Tensor,
    state: adamw8bit::State<'_>,
    o: &adamw8bit::Options,
) -> Result<(), TorchError> {
    let [map1, map2] = maps(param.device())?;
    let (n, blocks) = (param.numel() as i64, blocks(param));
    let scaled = |tensor: &Tensor, factor: f64| MUL.tensor(&[Arg::Tensor(tensor), Arg::Double(factor)]);
    // In memory order, one row per block.
    let flat = |tensor: &Tensor| tensor.f_detach()?.f_as_strided([n], [1], None::<i64>);
    let rows = |flat: &Tensor| {
        let padded = PAD.tensor(&[Arg::Tensor(flat), Arg::IntList(&[0, blocks * BLOCK - n]), Arg::Double(0.0)])?;
        Ok::<_, TorchError>(padded.f_view([blocks, BLOCK])?)
    };
    let average = |map: &Map, codes: &Tensor, scales: &Tensor| {
        let numbers = map.codes.f_index_select(0, &codes.f_to_kind(Kind::Int)?)?;
        Ok::<_, TorchError>(rows(&numbers)?.f_mul(&scales.f_unsqueeze(1)?)?)
    };
    let grad = rows(&flat(grad)?.f_to_kind(Kind::Float)?)?;
    let grad = if o.maximize { grad.f_neg()? } else { grad };
    let average1 = scaled(&average(&map1, state.codes1, state.scales1)?, o.betas.0)?;
    let average1 = average1.f_add(&scaled(&grad, 1.0 - o.betas.0)?)?;
    let average2 = scaled(&average(&map2, state.codes2, state.scales2)?, o.betas.1)?;
    let average2 = average2.f_add(&scaled(&grad, 1.0 - o.betas.1)?.f_mul(&grad)?)?;

    let root = (1.0 - o.betas.1.powf(o.step)).sqrt();
    let denominator = DIV.tensor(&[Arg::Tensor(&average2.f_sqrt()?), Arg::Double(root)])?;
    let update = average1.f_div(&ADD.tensor(&[Arg::Tensor(&denominator), Arg::Double(o.eps)])?)?;
    let update = scaled(&update, -o.lr / (1.0 - o.betas.0.powf(o.step)))?.f_view([-1])?.f_narrow(0, 0, n)?;
    let mut own = flat(param)?;
    let stepped = scaled(&own.f_to_kind(Kind::Float)?, 1.0 - o.lr * o.weight_decay)?.f_add(&update)?;
    own.f_copy_(&stepped)?;
    quantise(&average1, &map1, state.codes1, state.scales1)?;
    quantise(&average2, &map2, state.codes2, state.scales2)
}

/// Writes the nearest code of each element, and the largest absolute value of each row as its scale.
fn quantise(rows: &Tensor, map: &Map, codes: &Tensor, scales: &Tensor) -> Result<(), TorchError> {
    let largest = rows.f_abs()?.f_amax([1], true)?;
    // Infinity - infinity is NaN: values that are not finite have no code, so the scale marks the whole block as NaN.
    let scale = largest.f_add(&largest.f_sub(&largest)?)?;
    let divisor = CLAMP_MIN.tensor(&[Arg::Tensor(&largest), Arg::Double(f64::from(f32::MIN_POSITIVE))])?;
    let relative = rows.f_div(&divisor)?;
    let zero = [Arg::Tensor(&relative), Arg::Double(0.0), Arg::Double(0.0), Arg::Double(0.0)];
    let places =
        BUCKETIZE.tensor(&[Arg::Tensor(&NAN_TO_NUM.tensor(&zero)?), Arg::Tensor(&map.middles), Arg::Bool(true)])?;
    codes.shallow_clone().f_copy_(&places.f_view([-1])?.f_narrow(0, 0, codes.numel() as i64)?)?;
    Ok(scales.shallow_clone().f_copy_(&scale.f_view([-1])?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Eight steps with each, on parameters whose last block is often short.
    #[test]
    fn the_kernel_and_the_operators_compute_the_same() {
        for (kind, rounding) in [(Kind::Float, 1e-6), (Kind::BFloat16, 1e-2), (Kind::Half, 1e-3)] {
            for n in [1, 255, 256, 1000] {
                let start = (Tensor::arange(n, (Kind::Float, Device::Cpu)) * 0.37).sin().to_kind(kind);
                let (by_kernel, by_op) = (start.copy(), start.copy());
                let blocks = (n + BLOCK - 1) / BLOCK;
                let state = || {
                    let codes = || Tensor::zeros([n], (Kind::Uint8, Device::Cpu));
                    let scales = || Tensor::zeros([blocks], (Kind::Float, Device::Cpu));
                    [codes(), scales(), codes(), scales()]
                };
                let (one, other) = (state(), state());
                fn lent([codes1, scales1, codes2, scales2]: &[Tensor; 4]) -> adamw8bit::State<'_> {
                    adamw8bit::State { codes1, scales1, codes2, scales2 }
                }
                for step in 1..9 {
                    let grad = (Tensor::arange(n, (Kind::Float, Device::Cpu)) * f64::from(step)).cos();
                    let grad = grad.pow_tensor_scalar(5).to_kind(kind);
                    let (lr, betas, eps, weight_decay) = (0.01, (0.9, 0.99), 1e-8, 0.1);
                    let maximize = step == 5;
                    let options = adamw8bit::Options { lr, betas, eps, weight_decay, step: step.into(), maximize };
                    adamw8bit::step(&by_kernel, &grad, lent(&one), &options).unwrap();
                    by_operators(&by_op, &grad, lent(&other), &options).unwrap();
                    // libtorch's square root sometimes differs in the last bit.
                    let near =
                        by_kernel.to_kind(Kind::Float).allclose(&by_op.to_kind(Kind::Float), rounding, 1e-7, false);
                    assert!(near, "{kind:?}, {n} numbers, step {step}");
                    for (one, other) in one.iter().zip(&other) {
                        assert!(one.equal(other), "{kind:?}, {n} numbers, step {step}: {one} {other}");
                    }
                }
                // Then an infinite gradient turns its block into NaN in both.
                let grad = Tensor::ones([n], (kind, Device::Cpu));
                let _ = grad.get(0).fill_(f64::INFINITY);
                let (betas, eps) = ((0.9, 0.99), 1e-8);
                let options = adamw8bit::Options { lr: 0.0, betas, eps, weight_decay: 0.0, step: 9.0, maximize: false };
                adamw8bit::step(&by_kernel, &grad, lent(&one), &options).unwrap();
                by_operators(&by_op, &grad, lent(&other), &options).unwrap();
                for (one, other) in one.iter().zip(&other) {
                    assert!(
                        one.isnan().equal(&other.isnan())
                            && one.nan_to_num(0.0, 0.0, 0.0).equal(&other.nan_to_num(0.0, 0.0, 0.0))
                    );
                }
                assert!(one[1].get(0).double_value(&[]).is_nan());
            }
        }
    }
}
