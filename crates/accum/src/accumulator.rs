//! Backward passes over micro-batches that add up to the large batch's gradient.

use overdrive_core::{
    AVERAGED, Activity, AveragedBy, Behavior, Entry, GradientSync, IGNORED, Optimizer, OptimizerError, SingleProcess,
    StateDict, StateError, Stateful, SyncError, TorchError, UNSCALED, activity,
};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::Tensor;

use crate::count::{Count, Unit};
use crate::windows::Windows;

static FOREACH_MUL: LazyOp = LazyOp::new("aten::_foreach_mul_", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// Why accumulation refused or failed. The gradients of an open window are then unusable: zero them and call
/// [`Accumulator::abandon`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccumError {
    /// A window of 0 micro-batches.
    #[error("a window of {found} micro-batches was asked for, but it should have at least 1")]
    Steps {
        /// The number given.
        found: usize,
    },
    /// A negative count of samples or tokens.
    #[error("a micro-batch counts {found} samples or tokens, but should count at least 0")]
    Count {
        /// The number given.
        found: i64,
    },
    /// Samples in one micro-batch, tokens in another.
    #[error(
        "this micro-batch counts {found}, but earlier ones counted {expected}: count the same unit for every \
         micro-batch"
    )]
    Unit {
        /// The unit of earlier micro-batches.
        expected: &'static str,
        /// The unit of this one.
        found: &'static str,
    },
    /// `GradScaler::unscale_` in an open window.
    #[error(
        "the gradients of the open window have been unscaled, and this pass would add scaled ones: call `unscale_` \
         after the window has closed"
    )]
    Unscaled,
    /// The loss is an undefined tensor.
    #[error("the loss is an undefined tensor, but should be the mean over the micro-batch: one number")]
    UndefinedLoss,
    /// A loss that is not one number.
    #[error("the loss has shape {shape:?}, but should be the mean over the micro-batch: one number")]
    LossShape {
        /// The loss's shape.
        shape: Vec<i64>,
    },
    /// An optimizer that does not work with accumulation.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Communication between ranks failed.
    #[error(transparent)]
    Sync(#[from] SyncError),
    /// An option or an argument of a [`GradientNoiseScale`](crate::GradientNoiseScale) outside its range.
    #[error("{what} is {found}, but should be {expected}")]
    NoiseScale {
        /// Which one.
        what: &'static str,
        /// What was given.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for AccumError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

/// Accumulates the gradients of several micro-batches into the gradient of one large batch.
///
/// With `n_i` samples and mean loss `L_i`, a window's gradient is that of `sum(n_i * L_i) / sum(n_i)`, the sums over
/// all ranks. Each backward pass runs on `L_i * n_i / reference`, where the reference is the largest window's total so
/// far (for the first window: the first micro-batch's count times the window's length), so that float16 activations'
/// gradients stay in the range of the large batch's. When the window closes, the gradients are multiplied once by
/// `reference / total`, unless that is 1. Clip and step after that.
///
/// # Source
/// Defined by the large batch. PyTorch has no counterpart; its recipes divide by a fixed number of micro-batches.
#[derive(Debug)]
pub struct Accumulator<S: GradientSync = SingleProcess> {
    steps: usize,
    pub(crate) sync: S,
    /// The divisor of counts, the same on all ranks; none while every rank has counted 0.
    reference: Option<f64>,
    /// Samples or tokens; none before the first micro-batch.
    unit: Option<Unit>,
    /// None when no window is open.
    window: Option<Window>,
}

/// The state of an open window.
#[derive(Clone, Copy, Debug)]
struct Window {
    /// The samples or tokens counted on this rank so far.
    counted: i64,
    /// The number of `UNSCALED` marks when the window opened: older ones belong to gradients that are gone (SAM's
    /// first).
    unscaled: u64,
}

impl Accumulator {
    /// Accumulates over windows of `steps` micro-batches, in one process.
    ///
    /// # Errors
    /// When `steps` is 0.
    pub fn new(steps: usize) -> Result<Self, AccumError> {
        if steps == 0 {
            return Err(AccumError::Steps { found: steps });
        }
        Ok(Self { steps, sync: SingleProcess, reference: None, unit: None, window: None })
    }
}

impl<S: GradientSync> Accumulator<S> {
    /// The same over ranks. `sync` averages the gradients: a `DistributedDataParallel`, say, whose synchronisation is
    /// held back until a window's last backward pass. With an optimizer that averages in its step (`OneBitAdam`), pass
    /// its process group.
    pub fn with_sync<T: GradientSync>(self, sync: T) -> Accumulator<T> {
        Accumulator { steps: self.steps, sync, reference: None, unit: None, window: None }
    }

    /// The batches, each with whether it closes its window. Looks one batch ahead.
    pub fn windows<I: IntoIterator>(&self, batches: I) -> Windows<I::IntoIter> {
        Windows::new(batches.into_iter(), self.steps)
    }

    /// Runs backward on a micro-batch's mean loss, weighted by the samples or tokens it averages over.
    ///
    /// `closes` means that the window ends here: after it, the gradients of all of `opt`'s parameters, including groups
    /// added since the window opened, are those of the large batch. With a `GradScaler`, pass the loss that
    /// `GradScaler::scale` returns. A micro-batch that counts 0 (every token masked, and so a loss of NaN) adds
    /// nothing.
    ///
    /// Returns the window's total over all ranks when it closes. If that is 0, there are no gradients to step with.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// When the count is negative or of another unit than before, the loss is not one number, the open window's
    /// gradients have been unscaled, or backward or a rank fails. When the optimizer steps during the backward pass and
    /// no `DistributedDataParallel` holds that back, when it and `sync` do not agree on who averages over ranks, or
    /// when it has a parameter that `sync` does not average.
    ///
    /// # Panics
    /// Resumes a panic of DDP's communication hook.
    ///
    /// # Syncs
    /// Not with the device. Waits for all ranks when a window closes, and in the first window at each micro-batch until
    /// one counts more than 0.
    pub fn backward<O: Optimizer + ?Sized>(
        &mut self,
        opt: &O,
        loss: &Tensor,
        count: Count,
        closes: bool,
    ) -> Result<Option<f64>, AccumError> {
        let _backward = activity(|| Activity::Backward);
        check_fit(opt.behavior(), self.sync.averaged_by())?;
        let (unit, count) = count.parts();
        if count < 0 {
            return Err(AccumError::Count { found: count });
        }
        if let Some(expected) = self.unit.filter(|expected| *expected != unit) {
            return Err(AccumError::Unit { expected: expected.name(), found: unit.name() });
        }
        if !loss.defined() {
            return Err(AccumError::UndefinedLoss);
        }
        if loss.numel() != 1 {
            return Err(AccumError::LossShape { shape: loss.size() });
        }
        let steps_in_backward = opt.behavior().steps_in_backward;
        if let Some(window) = self.window
            && !UNSCALED.is_empty()
            && UNSCALED.position_since(&opt.params(), window.unscaled).is_some()
        {
            return Err(AccumError::Unscaled);
        }
        // Checking once per window is enough, unless the optimizer steps in the backward pass, before the window
        // closes.
        if closes || steps_in_backward {
            self.check_parameters(opt)?;
        }
        self.unit = Some(unit);
        let reference = self.reference(count, closes)?;
        let mut weight = count as f64 / reference;
        let counted = self.window.map_or(0, |window| window.counted).saturating_add(count);
        let mut total = None;
        if closes && steps_in_backward {
            // This pass itself steps, so gradients cannot be multiplied after it: multiply those accumulated so far,
            // and this pass's weight, before it.
            let (window, factor) = self.total(self.sync.sum(counted as f64)?, reference);
            multiply(opt, factor)?;
            weight *= factor;
            total = Some(window);
        }
        if self.window.is_none() || closes {
            self.sync.hold_back(!closes)?;
        }
        // Open from here on, so that `abandon` resumes synchronisation even if this backward pass fails.
        let unscaled = self.window.map_or_else(|| UNSCALED.made(), |window| window.unscaled);
        self.window = Some(Window { counted, unscaled });
        // Summed while backward runs.
        let sum = (closes && total.is_none()).then(|| self.sync.start_sum(counted as f64)).transpose()?;
        if count > 0 {
            self.sync.backward(&weighted(loss, weight)?).map_err(of_backward)?;
        } else if closes && total != Some(0.0) {
            // The other ranks wait for this one's gradients, even when they are all zero. They cannot be made by
            // backward: the loss is a mean over no samples, whose gradient is NaN.
            self.sync.close_with_nothing()?;
        }
        if !closes {
            return Ok(None);
        }
        self.window = None;
        if let Some(sum) = sum {
            let (window, factor) = self.total(sum()?, reference);
            multiply(opt, factor)?;
            total = Some(window);
        }
        Ok(total)
    }

    /// Forgets an open window, after an error say. The caller zeroes the gradients.
    ///
    /// # Errors
    /// When synchronisation cannot be resumed.
    pub fn abandon(&mut self) -> Result<(), AccumError> {
        if self.window.take().is_some() {
            self.sync.hold_back(false)?;
        }
        Ok(())
    }

    /// The samples or tokens counted on this rank in the open window, and how many the gradients are divided by so far.
    pub(crate) fn open(&self) -> Option<(f64, f64)> {
        self.window.map(|window| window.counted as f64).zip(self.reference)
    }

    /// The divisor of counts. All ranks agree on the first one: the average over ranks of the first nonzero count times
    /// the window's length.
    ///
    /// Ranks may have different numbers of micro-batches: a rank that closes while all counts are 0 keeps answering the
    /// others' sums until one of them counts more than 0 or all close.
    fn reference(&mut self, count: i64, closes: bool) -> Result<f64, AccumError> {
        while self.reference.is_none() {
            let over_ranks = self.sync.sum(count as f64 * self.steps as f64)?;
            if over_ranks > 0.0 {
                self.reference = Some(over_ranks / self.sync.world_size() as f64);
                break;
            }
            let still_open = self.sync.sum(if closes { 0.0 } else { 1.0 })?;
            if !closes || still_open == 0.0 {
                break;
            }
        }
        // When all counts are 0, the value does not matter.
        Ok(self.reference.unwrap_or(1.0))
    }

    /// The window's count over all ranks, `total`, and the factor that makes its gradients those of the large batch.
    fn total(&mut self, total: f64, reference: f64) -> (f64, f64) {
        // Ranks average their gradients; the large batch's gradient is their sum.
        let ranks = self.sync.world_size() as f64;
        // A short window at the end of an epoch must not lower the reference: the next full window's gradients would be
        // larger than the first's.
        self.reference = self.reference.map(|reference| reference.max(total / ranks));
        (total, if total > 0.0 { ranks * reference / total } else { 1.0 })
    }

    /// Refuses a parameter that `sync` should average but does not, or that a DDP averages without `sync`.
    fn check_parameters<O: Optimizer + ?Sized>(&self, opt: &O) -> Result<(), OptimizerError> {
        let is_left_out =
            |param: &Tensor| param.requires_grad() && !self.sync.averages(param) && !IGNORED.contains(param);
        let (found, reason) = match self.sync.averaged_by() {
            AveragedBy::Backward => (
                opt.params().iter().position(is_left_out),
                "its gradient is not averaged over the ranks, so each rank would train its own copy: rebuild the \
                 `DistributedDataParallel` with this parameter, or name the parameter in `ignore`",
            ),
            AveragedBy::Nobody => (
                AVERAGED.position(&opt.params()),
                "a `DistributedDataParallel` averages its gradient, so the window's counts must be summed over the \
                 ranks too: call `with_sync(&ddp)`",
            ),
            _ => return Ok(()),
        };
        match found {
            Some(index) => Err(OptimizerError::parameter(&opt.parameters()[index], index, reason)),
            None => Ok(()),
        }
    }
}

/// Refuses an optimizer that would step or average at the wrong time.
fn check_fit(behavior: Behavior, averaged_by: AveragedBy) -> Result<(), OptimizerError> {
    let refuse = |reason| Err(OptimizerError::DoesNotFit { part: "Accumulator", reason });
    if behavior.steps_in_backward && averaged_by != AveragedBy::Backward {
        return refuse(
            "it steps at each backward pass, before the window closes, unless a `DistributedDataParallel` holds the \
             step back; build it with `build`",
        );
    }
    match averaged_by {
        AveragedBy::Nobody | AveragedBy::Optimizer if behavior.takes_averages => refuse(
            "its steps take gradients that are averaged over the ranks, and nothing here averages them: call \
             `with_sync(&ddp)`, with a `DistributedDataParallel` or a `ShardedDataParallel`",
        ),
        AveragedBy::Nobody if behavior.communicates => refuse(
            "it averages over ranks in its steps, so the window's counts must be summed over the ranks too: call \
             `with_sync(&group)`",
        ),
        AveragedBy::Optimizer if !behavior.communicates => refuse(
            "it does not average over ranks, so each rank would train on its own: wrap the model in a \
             `DistributedDataParallel`, and call `with_sync(&ddp)`",
        ),
        _ => Ok(()),
    }
}

fn multiply<O: Optimizer + ?Sized>(opt: &O, factor: f64) -> Result<(), TorchError> {
    if factor == 1.0 {
        return Ok(());
    }
    let grads = TensorList::new(&opt.params())?.grads()?;
    if !grads.list.is_empty() {
        let _no_grad = tch::no_grad_guard();
        FOREACH_MUL.call(&[Arg::TensorList(&grads.list), Arg::Double(factor)])?;
    }
    Ok(())
}

/// The entry `reference`, once a window has counted more than 0: with it, a resumed run rounds like an uninterrupted
/// one. Save between windows; inside an open one it is an error ([`StateError::NotSaved`]), because the window's
/// gradients would be lost.
impl<S: GradientSync> Stateful for Accumulator<S> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        if self.window.is_some() {
            let reason = "a window is open, whose gradients would be lost: save after it has closed";
            return Err(StateError::NotSaved { reason });
        }
        let mut state = StateDict::new();
        if let Some(reference) = self.reference {
            state.insert("reference", Entry::Float(reference));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        if self.window.is_some() {
            let reason = "a window is open, whose counts would be added to the next one's: call `abandon` first";
            return Err(StateError::NotSaved { reason });
        }
        let reference = match state.get("reference") {
            Ok(_) => Some(state.float("reference")?),
            Err(_) => None,
        };
        if let Some(found) = reference.filter(|found| !(*found > 0.0 && found.is_finite())) {
            let (key, expected) = ("reference".to_owned(), "a count, finite and above 0".to_owned());
            return Err(StateError::Mismatch { key, expected, found: found.to_string() });
        }
        state.refuse_unknown(&["reference"])?;
        self.reference = reference;
        Ok(())
    }
}

/// A failure of backward itself is [`AccumError::Torch`], not a failure between ranks.
fn of_backward(error: SyncError) -> AccumError {
    match error.0.downcast::<TorchError>() {
        Ok(own) => AccumError::Torch(*own),
        Err(between) => AccumError::Sync(SyncError(between)),
    }
}

fn weighted(loss: &Tensor, weight: f64) -> Result<Tensor, AccumError> {
    if weight == 1.0 { Ok(loss.shallow_clone()) } else { Ok(MUL.tensor(&[Arg::Tensor(loss), Arg::Double(weight)])?) }
}
