//! Batches in parts that fit.

use std::panic::resume_unwind;

use overdrive_core::{
    AVERAGED, AveragedBy, GradientSync, IGNORED, Module, NOT_AVERAGED, Optimizer, OptimizerError, RankGroup,
    SingleProcess,
};
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::{Error as TorchError, SyncTensor};
use tch::Tensor;

use super::{Tried, or_out_of_memory};
use crate::checkpoint::Generators;
use crate::error::MemoryError;

/// The gradients of whole batches, computed in parts that fit into memory.
///
/// When memory runs out, the batch begins again with parts of half the size, and so do later ones. The gradient is that
/// of the whole batch where its loss is a mean of the samples' own losses: each part weighs as many samples as it has, or as
/// many tokens ([`backward_weighted`](Self::backward_weighted)). Batch norm and contrastive losses depend on which samples
/// are computed together: there it is that of the parts, as with any accumulation of gradients. The random numbers are those of a run that had the smaller
/// parts from the start, because the generators of the CPU, and of the devices of the batch and of the optimizer's
/// parameters, are set back.
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
    /// What is put back before a batch begins again.
    buffers: Vec<SyncTensor>,
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
        Self { size, sync: SingleProcess, ranks: SingleProcess, growth: None, buffers: Vec::new() }
    }
}

impl<S: GradientSync, G: RankGroup> AutoMicroBatch<S, G> {
    /// For data-parallel training: where one rank runs out of memory, all begin again with smaller parts, and all grow
    /// together. Gradients are averaged when every rank has its own, not during the backward pass: those of the mean over
    /// the samples of all ranks, whose batches may differ in size. All ranks make equally many calls, and `loss` does not
    /// communicate: ranks may have different numbers of parts.
    pub fn with_ranks<T: GradientSync, R: RankGroup>(self, sync: T, ranks: R) -> AutoMicroBatch<T, R> {
        AutoMicroBatch { size: self.size, sync, ranks, growth: self.growth, buffers: self.buffers }
    }

    /// Tries parts of twice the size after so many batches; each try that fails doubles that number. Default: never.
    /// Sums over parts of other sizes are rounded otherwise, and dropout draws other numbers.
    #[must_use]
    pub fn grow_after(mut self, batches: u32) -> Self {
        self.growth = Some(Growth { after: batches.max(1), fitted: 0 });
        self
    }

    /// Puts the buffers of this module back before a batch begins again, running statistics of batch norm among them: then
    /// they too are those of a run that had the smaller parts from the start. They are copied for each batch.
    #[must_use]
    pub fn restoring(mut self, module: &(impl Module + ?Sized)) -> Self {
        self.buffers.extend(Module::named_buffers(&module).into_iter().map(|(_, buffer)| SyncTensor(buffer)));
        self
    }

    /// The samples of a part now.
    pub fn size(&self) -> usize {
        usize::try_from(self.size).unwrap_or(usize::MAX)
    }

    /// Sets the gradients to those of the mean loss over a batch, and returns that (with ranks, this one's). `loss` gets a
    /// part of each tensor of the batch, along the first dimension, and returns the mean over the part.
    ///
    /// `loss` is called again for the same samples when memory has run out: running statistics that it updates then
    /// count them twice, unless they are given to [`restoring`](Self::restoring). Parameters that it uses have to be the
    /// optimizer's, or gradients of the failed try stay on the others: join several optimizers into one (`Joint` of
    /// overdrive-optim).
    ///
    /// # Errors
    /// When the optimizer steps in the backward pass, or its gradients are averaged over ranks that this does not know of,
    /// or have to be and are not; and when one sample alone does not fit, the tensors of the batch differ in their first dimension, and any error of
    /// `loss`. The gradients are zero then.
    ///
    /// # Syncs
    /// With ranks, waits for all of them.
    pub fn backward<E: Into<BoxError>>(
        &mut self,
        opt: &mut impl Optimizer,
        batch: &[Tensor],
        loss: impl FnMut(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<Tensor, MemoryError> {
        self.backward_weighted(opt, batch, |part| Ok(first_dimension(&part[0])), loss)
    }

    /// The same for a loss that is the mean over something else than samples, such as tokens that are not padded: `weight`
    /// returns how many of them a part has, or the whole batch. It may be 0, and such a part is not computed. Where this
    /// rank's batch weighs 0, the loss is NaN.
    ///
    /// # Errors
    /// As for [`backward`](Self::backward); any error of `weight`; when it is negative, does not add up over parts, or is 0
    /// for the batches of all ranks.
    ///
    /// # Syncs
    /// As for `backward`; and what `weight` does, for the batch and for each part.
    pub fn backward_weighted<E: Into<BoxError>>(
        &mut self,
        opt: &mut impl Optimizer,
        batch: &[Tensor],
        mut weight: impl FnMut(&[Tensor]) -> Result<i64, E>,
        mut loss: impl FnMut(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<Tensor, MemoryError> {
        self.check(opt)?;
        let begun = Begun::new(opt, batch, &self.buffers, &mut weight);
        // The other ranks would wait for one that has no batch: this tells them.
        let most = self.ranks.max(begun.as_ref().map_or(i64::MAX, |begun| begun.samples))?;
        let begun = match begun {
            Ok(begun) if most < i64::MAX => begun,
            other => {
                opt.zero_grad()?;
                return Err(other.err().unwrap_or(MemoryError::OtherRank));
            }
        };
        let total = self.sync.sum(begun.weight as f64)?;
        if total <= 0.0 {
            opt.zero_grad()?;
            return Err(MemoryError::Weight { found: 0 });
        }
        // Ranks average their gradients, and the batch's gradient is their sum.
        let divisor = total / self.sync.world_size() as f64;
        self.grow(most);
        let mut is_again = false;
        loop {
            let tried = or_out_of_memory(|| {
                if is_again {
                    begun.generators.set()?;
                    begun.put_back(&self.buffers)?;
                }
                opt.zero_grad()?;
                self.parts(batch, &begun, divisor, &mut weight, &mut loss)
            });
            is_again = true;
            // A part larger than the batch is as large as the batch.
            let is_last_try = self.size.min(begun.samples) <= 1;
            let outcome = match &tried {
                Tried::Fits(_) => FITS,
                Tried::OutOfMemory(_) if !is_last_try => TOO_LARGE,
                Tried::OutOfMemory(_) | Tried::Failed(_) | Tried::Panicked(_) => FAILED,
            };
            let error = match (self.ranks.max(outcome)?, tried) {
                (FITS, Tried::Fits(total)) => {
                    if self.sync.averaged_by() == AveragedBy::Backward {
                        self.sync.close_with_nothing()?;
                    }
                    return Ok(total);
                }
                (FAILED, Tried::Failed(source)) => {
                    let scope = format!("a part of {} samples", self.size.min(begun.samples));
                    MemoryError::Function { scope, source }
                }
                (FAILED, Tried::OutOfMemory(source)) if is_last_try => MemoryError::TooLarge { source },
                // The other ranks know now, and do not wait for this one.
                (FAILED, Tried::Panicked(panic)) => {
                    opt.zero_grad()?;
                    resume_unwind(panic)
                }
                (FAILED, _) => MemoryError::OtherRank,
                _ => {
                    self.halve(most);
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
        let not_now = |reason| Err(OptimizerError::NotNow { part: "AutoMicroBatch", reason }.into());
        let behavior = opt.behavior();
        if behavior.steps_in_backward {
            return refuse(
                "it steps or frees gradients at each part, and a batch that begins again would find other weights: use \
                 one that steps in `step` alone",
            );
        }
        if self.sync.world_size() != self.ranks.world_size() {
            return not_now(
                "gradients are averaged over more or fewer ranks than those that agree: call `with_ranks(&ddp, &group)` with \
                 the group of the `DistributedDataParallel`",
            );
        }
        if self.sync.counts_passes() {
            return not_now(
                "ranks wait for each other in each pass of a `FullyShardedDataParallel`, and would not after one rank has run \
                 out of memory: use an `Accumulator` with parts that fit",
            );
        }
        let is_left_out =
            |param: &Tensor| param.requires_grad() && !self.sync.averages(param) && !IGNORED.contains(param);
        match self.sync.averaged_by() {
            AveragedBy::Backward => match opt.params().iter().position(is_left_out) {
                Some(index) => Err(OptimizerError::parameter(&opt.parameters()[index], index, NOT_AVERAGED).into()),
                None => Ok(()),
            },
            AveragedBy::Nobody if AVERAGED.position(&opt.params()).is_some() => refuse(
                "a `DistributedDataParallel` averages its gradients, and ranks that halve their parts alone would wait for \
                 each other: call `with_ranks(&ddp, &group)`",
            ),
            AveragedBy::Nobody | AveragedBy::Optimizer if behavior.takes_averages => refuse(
                "its steps take gradients that are averaged over the ranks, and nothing here averages them: call \
                 `with_ranks(&ddp, &group)`, with a `DistributedDataParallel` or a `ShardedDataParallel`",
            ),
            AveragedBy::Nobody if behavior.communicates => refuse(
                "it averages over ranks in its steps, and batches of ranks would count alike whatever their sizes: call \
                 `with_ranks(&group, &group)`",
            ),
            AveragedBy::Optimizer if !behavior.communicates => refuse(
                "it does not average over ranks, so each rank would train on its own: wrap the model in a \
                 `DistributedDataParallel`, and call `with_ranks(&ddp, &group)`",
            ),
            _ => Ok(()),
        }
    }

    /// The gradients of all parts, added up, and the mean loss of this rank's batch.
    fn parts<E: Into<BoxError>>(
        &self,
        batch: &[Tensor],
        begun: &Begun,
        divisor: f64,
        weight: &mut impl FnMut(&[Tensor]) -> Result<i64, E>,
        loss: &mut impl FnMut(&[Tensor]) -> Result<Tensor, E>,
    ) -> Result<Tensor, BoxError> {
        let _held = Held::new(&self.sync)?;
        let (mut total, mut weights) = (None, 0_i64);
        for start in (0..begun.samples).step_by(usize::try_from(self.size)?) {
            let length = self.size.min(begun.samples - start);
            let part = batch.iter().map(|tensor| tensor.f_narrow(0, start, length)).collect::<Result<Vec<_>, _>>()?;
            let of_part = weigh(&part, weight)?;
            weights = weights.saturating_add(of_part);
            if of_part == 0 {
                continue;
            }
            let loss = loss(&part).map_err(Into::into)?;
            if !loss.defined() || loss.numel() != 1 {
                return Err("the loss should be the mean over the part: one number".into());
            }
            let loss = loss * (of_part as f64 / divisor);
            self.sync.backward(&loss)?;
            let loss = loss.f_detach()?;
            total = Some(match total {
                None => loss,
                Some(total) => loss.f_add(&total)?,
            });
        }
        if weights != begun.weight {
            return Err(MemoryError::Weights { batch: begun.weight, parts: weights }.into());
        }
        let of_all = total.unwrap_or_else(|| Tensor::from(f32::NAN));
        let own = begun.weight as f64;
        Ok(if divisor == own || own == 0.0 { of_all } else { of_all * (divisor / own) })
    }

    fn halve(&mut self, largest_batch: i64) {
        self.size = (self.size.min(largest_batch) / 2).max(1);
        if let Some(growth) = &mut self.growth {
            *growth = Growth { after: growth.after.saturating_mul(2), fitted: 0 };
        }
    }

    /// `largest_batch`: the samples of the rank that has the most, so that all ranks agree.
    fn grow(&mut self, largest_batch: i64) {
        let Some(growth) = &mut self.growth else { return };
        if growth.fitted >= growth.after && self.size < largest_batch {
            growth.fitted = 0;
            self.size = (self.size * 2).min(largest_batch);
        }
        growth.fitted += 1;
    }
}

/// What is known of a rank's batch before it is computed.
struct Begun {
    samples: i64,
    weight: i64,
    generators: Generators,
    /// Copies of the buffers.
    buffers: Vec<Tensor>,
}

impl Begun {
    fn new<E: Into<BoxError>>(
        opt: &impl Optimizer,
        batch: &[Tensor],
        buffers: &[SyncTensor],
        weight: &mut impl FnMut(&[Tensor]) -> Result<i64, E>,
    ) -> Result<Self, MemoryError> {
        let samples = samples_of(batch)?;
        let weight = weigh(batch, weight)?;
        let generators = Generators::of(batch.iter().chain(&opt.params()))?;
        let copies = buffers.iter().map(|buffer| buffer.f_detach_copy());
        let buffers = copies.collect::<Result<_, _>>().map_err(TorchError::from)?;
        Ok(Self { samples, weight, generators, buffers })
    }

    fn put_back(&self, buffers: &[SyncTensor]) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        for (own, copy) in buffers.iter().zip(&self.buffers) {
            own.f_detach()?.f_copy_(copy)?;
        }
        Ok(())
    }
}

fn weigh<E: Into<BoxError>>(
    part: &[Tensor],
    weight: &mut impl FnMut(&[Tensor]) -> Result<i64, E>,
) -> Result<i64, MemoryError> {
    let failed = |source| MemoryError::Function { scope: "the weight of a batch".to_owned(), source };
    let found = weight(part).map_err(|error| failed(error.into()))?;
    if found < 0 { Err(MemoryError::Weight { found }) } else { Ok(found) }
}

/// What ranks tell each other of a try; the worst one counts.
const FITS: i64 = 0;
const TOO_LARGE: i64 = 1;
const FAILED: i64 = 2;

fn first_dimension(tensor: &Tensor) -> i64 {
    tensor.size().first().copied().unwrap_or(0)
}

/// The first dimension of a batch.
fn samples_of(batch: &[Tensor]) -> Result<i64, MemoryError> {
    let sizes: Vec<i64> = batch.iter().map(first_dimension).collect();
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
