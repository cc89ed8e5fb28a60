//! Batches in parts that fit.

use overdrive_core::{AVERAGED, AveragedBy, GradientSync, Optimizer, OptimizerError, RankGroup, SingleProcess};
use overdrive_ffi::autograd::BoxError;
use tch::Tensor;

use super::{Tried, or_out_of_memory};
use crate::checkpoint::Generators;
use crate::error::MemoryError;

/// The gradients of whole batches, computed in parts that fit into memory.
///
/// When memory runs out, the batch begins again with parts of half the size, and so do later ones. The gradient is that
/// of the whole batch: each part counts by its samples. The random numbers are those of a run that had the smaller
/// parts from the start, because the generators are set back.
///
/// ```
/// use overdrive_core::{Optimizer, TchOptimizer};
/// use overdrive_memory::AutoMicroBatch;
/// use tch::nn::{Module, OptimizerConfig};
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
///
/// let mut micro = AutoMicroBatch::new(64);                    // samples at once, to begin with
/// let batch = [Tensor::rand([256, 4], (Kind::Float, Device::Cpu))];
/// let loss = micro.backward(&mut opt, &batch, |part| Ok::<_, tch::TchError>(model.forward(&part[0]).mean(Kind::Float)))?;
/// opt.step()?;
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// PyTorch has no counterpart; Composer's `device_train_microbatch_size="auto"`.
#[derive(Debug)]
pub struct AutoMicroBatch<S: GradientSync = SingleProcess, G: RankGroup = SingleProcess> {
    size: i64,
    sync: S,
    ranks: G,
    growth: Option<Growth>,
}

/// When larger parts are tried again.
#[derive(Clone, Copy, Debug)]
struct Growth {
    /// After so many batches.
    after: u32,
    /// How many batches fitted since.
    fitted: u32,
}

impl AutoMicroBatch {
    /// Begins with parts of `size` samples; 0 counts as 1.
    pub fn new(size: usize) -> Self {
        let size = i64::try_from(size).unwrap_or(i64::MAX).max(1);
        Self { size, sync: SingleProcess, ranks: SingleProcess, growth: None }
    }
}

impl<S: GradientSync, G: RankGroup> AutoMicroBatch<S, G> {
    /// For data-parallel training: where one rank runs out of memory, all begin again with smaller parts. Gradients are
    /// averaged when every rank has its own, not during the backward pass.
    pub fn with_ranks<T: GradientSync, R: RankGroup>(self, sync: T, ranks: R) -> AutoMicroBatch<T, R> {
        AutoMicroBatch { size: self.size, sync, ranks, growth: self.growth }
    }

    /// Tries parts of twice the size after so many batches; each try that fails doubles that number. Default: never.
    /// Sums over parts of other sizes are rounded otherwise, and dropout draws other numbers.
    #[must_use]
    pub fn grow_after(mut self, batches: u32) -> Self {
        self.growth = Some(Growth { after: batches.max(1), fitted: 0 });
        self
    }

    /// The samples of a part now.
    pub fn size(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// Sets the gradients to those of the mean loss over a batch, and returns that. `loss` gets a part of each tensor of
    /// the batch, along the first dimension, and returns the mean over the part.
    ///
    /// `loss` is called again for the same samples when memory has run out: running statistics that it updates then
    /// count them twice.
    ///
    /// # Errors
    /// When the optimizer steps in the backward pass, or its gradients are averaged over ranks that this does not know of; and
    /// when one sample alone does not fit, the tensors of the batch differ in their first dimension, and any error of
    /// `loss`. The gradients are zero then.
    ///
    /// # Syncs
    /// With ranks, waits for all of them.
    pub fn backward<E: Into<BoxError>>(
        &mut self,
        opt: &mut impl Optimizer,
        batch: &[Tensor],
        mut loss: impl FnMut(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<Tensor, MemoryError> {
        self.check(opt)?;
        let samples = match samples_of(batch) {
            Ok(samples) => samples,
            Err(error) => {
                // The other ranks would wait for this one.
                self.ranks.max(FAILED)?;
                opt.zero_grad()?;
                return Err(error);
            }
        };
        self.grow(samples);
        loop {
            let generators = Generators::of(batch.iter().chain(&opt.params()))?;
            opt.zero_grad()?;
            let tried = or_out_of_memory(|| self.parts(batch, samples, &mut loss));
            // A part larger than the batch is as large as the batch.
            let is_last_try = self.size.min(samples) <= 1;
            let outcome = match &tried {
                Tried::Fits(_) => FITS,
                Tried::OutOfMemory(_) if !is_last_try => TOO_LARGE,
                Tried::OutOfMemory(_) | Tried::Failed(_) => FAILED,
            };
            let error = match (self.ranks.max(outcome)?, tried) {
                (FITS, Tried::Fits(total)) => {
                    if self.sync.averaged_by() == AveragedBy::Backward {
                        self.sync.close_with_nothing()?;
                    }
                    return Ok(total);
                }
                (FAILED, Tried::Failed(source)) => {
                    MemoryError::Function { scope: format!("a part of {} samples", self.size.min(samples)), source }
                }
                (FAILED, Tried::OutOfMemory(source)) if is_last_try => MemoryError::TooLarge { source },
                (FAILED, _) => MemoryError::OtherRank,
                _ => {
                    self.halve(samples)?;
                    generators.set()?;
                    continue;
                }
            };
            opt.zero_grad()?;
            return Err(error);
        }
    }

    /// Refuses what would step or average at the wrong time. All ranks do, as they run the same program.
    fn check(&self, opt: &impl Optimizer) -> Result<(), MemoryError> {
        let refuse = |reason| Err(OptimizerError::DoesNotFit { part: "AutoMicroBatch", reason }.into());
        if opt.behavior().steps_in_backward {
            return refuse(
                "it steps or frees gradients at each part, and a batch that begins again would find other weights: use \
                 one that steps in `step` alone",
            );
        }
        if self.sync.averaged_by() == AveragedBy::Nobody && AVERAGED.position(&opt.params()).is_some() {
            return refuse(
                "a `DistributedDataParallel` averages its gradients, and ranks that halve their parts alone would wait for \
                 each other: call `with_ranks(&ddp, &group)`",
            );
        }
        Ok(())
    }

    fn parts<E: Into<BoxError>>(
        &self,
        batch: &[Tensor],
        samples: i64,
        loss: &mut impl FnMut(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<Tensor, BoxError> {
        let _held = Held::new(&self.sync)?;
        let mut total = None;
        for start in (0..samples).step_by(usize::try_from(self.size)?) {
            let length = self.size.min(samples - start);
            let part = batch.iter().map(|tensor| tensor.f_narrow(0, start, length)).collect::<Result<Vec<_>, _>>()?;
            let loss = loss(&part).map_err(Into::into)? * (length as f64 / samples as f64);
            self.sync.backward(&loss)?;
            let loss = loss.f_detach()?;
            total = Some(match total {
                None => loss,
                Some(total) => loss.f_add(&total)?,
            });
        }
        total.ok_or_else(|| "a batch without samples has no loss".into())
    }

    fn halve(&mut self, samples: i64) -> Result<(), MemoryError> {
        let most = self.ranks.max(samples)?;
        self.size = (self.size.min(most) / 2).max(1);
        if let Some(growth) = &mut self.growth {
            *growth = Growth { after: growth.after.saturating_mul(2), fitted: 0 };
        }
        Ok(())
    }

    fn grow(&mut self, samples: i64) {
        let Some(growth) = &mut self.growth else { return };
        if growth.fitted >= growth.after && self.size < samples {
            growth.fitted = 0;
            self.size = (self.size * 2).min(samples);
        }
        growth.fitted += 1;
    }
}

/// What ranks tell each other of a try; the worst one counts.
const FITS: i64 = 0;
const TOO_LARGE: i64 = 1;
const FAILED: i64 = 2;

/// The first dimension of a batch.
fn samples_of(batch: &[Tensor]) -> Result<i64, MemoryError> {
    let sizes: Vec<i64> = batch.iter().map(|tensor| tensor.size().first().copied().unwrap_or(0)).collect();
    match sizes.first() {
        Some(&samples) if samples > 0 && sizes.iter().all(|&size| size == samples) => Ok(samples),
        _ => Err(MemoryError::Batch { sizes }),
    }
}

/// Holds back the exchange of gradients until it is dropped.
struct Held<'s, S: GradientSync>(&'s S);

impl<'s, S: GradientSync> Held<'s, S> {
    fn new(sync: &'s S) -> Result<Self, BoxError> {
        sync.hold_back(true)?;
        Ok(Self(sync))
    }
}

impl<S: GradientSync> Drop for Held<'_, S> {
    fn drop(&mut self) {
        // It is refused only within a backward pass, and none is under way.
        let released = self.0.hold_back(false);
        debug_assert!(released.is_ok(), "gradients are still held back: {released:?}");
    }
}
