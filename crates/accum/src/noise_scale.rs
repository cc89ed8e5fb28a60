//! The gradient noise scale: how large a batch is worth its samples.

use overdrive_core::{AveragedBy, GradientSync, Optimizer, OptimizerError, SHARDED_GRADIENTS, TorchError};
use overdrive_ffi::{Arg, LazyOp, TensorList, Value};
use tch::{Kind, Tensor};

use crate::accumulator::{AccumError, Accumulator};

static NORMS: LazyOp = LazyOp::new("aten::_foreach_norm", "Scalar");

/// libtorch's numbers of float32 and float64.
const FLOAT: i64 = 6;
const DOUBLE: i64 = 7;

/// Estimates the simple noise scale: the batch size, in samples or tokens, at which the noise of the gradient is as
/// large as the gradient itself. Larger batches bring ever less per sample.
///
/// It compares the gradient of a window's first micro-batch with that of the whole window. Both estimates are noisy, so
/// each is averaged over many windows before they are divided.
///
/// ```
/// use overdrive_accum::{Accumulator, GradientNoiseScale, Samples};
/// use overdrive_core::{Optimizer, TchOptimizer};
/// use tch::nn::{Module, OptimizerConfig};
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vs = nn::VarStore::new(Device::Cpu);
/// # let model = nn::linear(vs.root(), 4, 1, Default::default());
/// # let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
/// # let data = Tensor::randn([64, 4], (Kind::Float, Device::Cpu));
/// let mut accum = Accumulator::new(4)?;
/// let mut noise = GradientNoiseScale::new(0.95)?;
/// for micro in accum.windows(data.split(4, 0)) {
///     let loss = model.forward(&micro.batch).square().mean(Kind::Float);
///     let total = accum.backward(&opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
///     noise.observe(&accum, &opt, total)?; // before clipping, and before the step
///     if micro.closes {
///         opt.step()?;
///         opt.zero_grad()?;
///     }
/// }
/// println!("a batch of about {:?} samples", noise.simple_noise_scale()?);
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix A.1
#[derive(Debug)]
pub struct GradientNoiseScale {
    decay: f64,
    /// The first micro-batch's squared norm, and its count.
    small: Option<(Tensor, f64)>,
    /// The averages of the noise and of the squared norm of the true gradient, in this order.
    averages: Option<(Tensor, Tensor)>,
}

impl GradientNoiseScale {
    /// An estimate that keeps the share `decay` of its averages at each window.
    ///
    /// # Errors
    /// When `decay` is not at least 0 and below 1.
    pub fn new(decay: f64) -> Result<Self, AccumError> {
        if !(0.0..1.0).contains(&decay) {
            return Err(invalid("decay", decay, "at least 0 and below 1"));
        }
        Ok(Self { decay, small: None, averages: None })
    }

    /// Takes the gradients after a backward pass of `accum`, which returned `total`. Call it after every pass.
    ///
    /// A window of one micro-batch adds nothing: it has no small batch to compare with. With a `GradScaler`, call it
    /// before `unscale_`: the scale cancels out. A window with an infinite gradient adds nothing.
    ///
    /// With several ranks, the first micro-batch is this rank's own, and the window that of all ranks. Each rank then
    /// has an estimate of its own: [`over_ranks`](Self::over_ranks) joins them.
    ///
    /// # Errors
    /// When the optimizer averages over ranks in its step, so that the window's gradient is not known here, and when
    /// libtorch fails: for sparse gradients, say.
    ///
    /// # Syncs
    /// No.
    pub fn observe<S: GradientSync, O: Optimizer + ?Sized>(
        &mut self,
        accum: &Accumulator<S>,
        opt: &O,
        total: Option<f64>,
    ) -> Result<(), AccumError> {
        if accum.sync.averaged_by() == AveragedBy::Optimizer {
            let reason = "it averages over ranks in its step: the gradients seen here are those of one rank";
            return Err(OptimizerError::DoesNotFit { part: "GradientNoiseScale", reason }.into());
        }
        if SHARDED_GRADIENTS.position(&opt.params()).is_some() {
            let reason = "its averaged gradients are on one rank each: the norm seen here would be that of a part";
            return Err(OptimizerError::DoesNotFit { part: "GradientNoiseScale", reason }.into());
        }
        match (total, accum.open()) {
            (None, Some((counted, reference))) if counted > 0.0 && self.small.is_none() => {
                let norm = squared_norm(opt)?;
                self.small = norm.map(|norm| (norm * (reference / counted).powi(2), counted));
            }
            (Some(total), _) => {
                let small = self.small.take().filter(|(_, counted)| *counted < total);
                if let (Some((small, counted)), Some(big)) = (small, squared_norm(opt)?) {
                    self.update((&small, counted), (&big, total))?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Forgets the open window, after [`Accumulator::abandon`].
    pub fn abandon(&mut self) {
        self.small = None;
    }

    /// Takes the squared 2-norms of a small and a large batch's mean gradients, each with the batch's size: for
    /// gradients that are not accumulated here.
    ///
    /// # Shapes
    /// Each norm: one number.
    ///
    /// # Errors
    /// When a norm is not one number, or the sizes are not above 0 and rising.
    ///
    /// # Syncs
    /// No.
    pub fn update(&mut self, small: (&Tensor, f64), big: (&Tensor, f64)) -> Result<(), AccumError> {
        if !(small.1 > 0.0 && small.1 < big.1 && big.1.is_finite()) {
            let found = format!("{} and {}", small.1, big.1);
            return Err(invalid("the pair of batch sizes", found, "above 0 and rising"));
        }
        let _no_grad = tch::no_grad_guard();
        let (small, big) = ((number(small.0)?, small.1), (number(big.0)?, big.1));
        let gradient = (&big.0 * big.1 - &small.0 * small.1) / (big.1 - small.1);
        let noise = (small.0 - big.0) / (1.0 / small.1 - 1.0 / big.1);
        let (old_noise, old_gradient) = match self.averages.take() {
            Some(averages) => averages,
            None => (noise.f_zeros_like()?, noise.f_zeros_like()?),
        };
        let finite = noise.f_isfinite()?.f_logical_and(&gradient.f_isfinite()?)?;
        let average =
            |new: Tensor, old: &Tensor| (old * self.decay + new * (1.0 - self.decay)).f_where_self(&finite, old);
        self.averages = Some((average(noise, &old_noise)?, average(gradient, &old_gradient)?));
        Ok(())
    }

    /// The simple noise scale so far, a scalar on the gradients' device: NaN before the first usable window, and below
    /// 0 while the estimate is still too noisy. `None` before the first window.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    pub fn tensor(&self) -> Result<Option<Tensor>, AccumError> {
        let divided = self.averages.as_ref().map(|(noise, gradient)| noise.f_div(gradient)).transpose();
        Ok(divided.map_err(TorchError::from)?)
    }

    /// The simple noise scale so far, in samples or tokens; `None` before the first usable window. It is below 0 while
    /// the estimate is still too noisy.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Waits for the device.
    pub fn simple_noise_scale(&self) -> Result<Option<f64>, AccumError> {
        self.over_ranks(&overdrive_core::SingleProcess)
    }

    /// The same from the estimates of all ranks.
    ///
    /// # Errors
    /// When libtorch or a rank fails.
    ///
    /// # Syncs
    /// Waits for the device, and for all ranks.
    pub fn over_ranks(&self, ranks: &impl GradientSync) -> Result<Option<f64>, AccumError> {
        let read = |average: &Tensor| average.f_double_value(&[]).map_err(TorchError::from);
        let (noise, gradient) = match &self.averages {
            Some((noise, gradient)) => (read(noise)?, read(gradient)?),
            None => (0.0, 0.0),
        };
        let scale = ranks.sum(noise)? / ranks.sum(gradient)?;
        Ok(Some(scale).filter(|scale| scale.is_finite()))
    }
}

fn invalid(what: &'static str, found: impl ToString, expected: &str) -> AccumError {
    AccumError::NoiseScale { what, found: found.to_string(), expected: expected.to_owned() }
}

/// A float64 scalar.
fn number(norm: &Tensor) -> Result<Tensor, AccumError> {
    if !norm.defined() || norm.numel() != 1 {
        let found = if norm.defined() { format!("of shape {:?}", norm.size()) } else { "undefined".to_owned() };
        return Err(invalid("a squared norm", found, "one number"));
    }
    Ok(norm.f_detach()?.f_reshape([0i64; 0])?.f_to_kind(Kind::Double)?)
}

/// The sum of the squares of all gradients; `None` if there are none.
fn squared_norm<O: Optimizer + ?Sized>(opt: &O) -> Result<Option<Tensor>, AccumError> {
    let _no_grad = tch::no_grad_guard();
    let grads = TensorList::new(&opt.params())?.grads()?;
    if grads.list.is_empty() {
        return Ok(None);
    }
    // Squares of float16 gradients would overflow.
    let is_double = grads.list.to_vec()?.iter().any(|grad| grad.kind() == Kind::Double);
    let kind = if is_double { DOUBLE } else { FLOAT };
    let norms = NORMS.call(&[Arg::TensorList(&grads.list), Arg::Double(2.0), Arg::Int(kind)])?;
    let Some(Value::TensorList(norms)) = norms.into_iter().next() else { return Ok(None) };
    let norms = norms.to_vec()?;
    let device = norms[0].device();
    let norms = norms.iter().map(|norm| norm.f_to_device(device)).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(Tensor::f_stack(&norms, 0)?.f_to_kind(Kind::Double)?.f_square()?.f_sum(Kind::Double)?))
}
