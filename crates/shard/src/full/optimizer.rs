//! The optimizer of this rank's rows.

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use overdrive_core::{
    Activity, Behavior, Optimizer, OptimizerError, OptimizerId, Parameter, SkipAgreement, Stateful, SyncError,
    TorchError, activity, check_averaged, check_not_stepped_in_backward,
};
use overdrive_ffi::saved_tensors::version;
use overdrive_ffi::{TensorId, bump_version};
use tch::Tensor;

use super::engine::LOCAL;
use super::meeting::Event;
use super::ranks::Ranks;
use super::{Running, Shared, shards};
use crate::agree;
use crate::error::ShardError;
use crate::ownership::{check_behavior, check_growth, options_of};

pub(super) const PART: &str = "FullyShardedOptimizer";
const BUILDING: &str = "building the optimizer";

/// Any optimizer that steps each element by itself, over this rank's rows of a [`FullyShardedDataParallel`]. Made by
/// [`FullyShardedDataParallel::optimizer`].
///
/// All ranks make the same calls: [`step`](Optimizer::step) waits for all, and fails on all before anything changes when
/// it cannot be made on one. Set rates and load states on all ranks. [`params`](Optimizer::params) are this rank's rows.
///
/// [`FullyShardedDataParallel`]: super::FullyShardedDataParallel
/// [`FullyShardedDataParallel::optimizer`]: super::FullyShardedDataParallel::optimizer
#[derive(Debug)]
pub struct FullyShardedOptimizer<O> {
    id: OptimizerId,
    pub(super) shared: Shared,
    pub(super) ranks: Ranks,
    pub(super) inner: O,
    /// How many parameters it was built with.
    count: usize,
}

impl<O: Optimizer> FullyShardedOptimizer<O> {
    pub(super) fn new(
        shared: &Shared,
        ranks: &Ranks,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Self, ShardError> {
        let given = shards(shared);
        let own = given.iter().map(Parameter::share).collect();
        let built = match catch_unwind(AssertUnwindSafe(|| build(own))) {
            Ok(built) => built,
            Err(panicked) => {
                // The other ranks wait for it.
                let _ = agree::built(&ranks.all, BUILDING, refuse::<O>("the closure has panicked"), describe);
                resume_unwind(panicked)
            }
        };
        let built = built.and_then(|inner| {
            check(&inner)?;
            let ids = |params: &[Tensor]| params.iter().map(TensorId::of).collect::<HashSet<_>>();
            let own: Vec<Tensor> = given.iter().map(|param| param.tensor().shallow_clone()).collect();
            if ids(&inner.params()) != ids(&own) {
                return refuse("it has other parameters than it was given: build it over all that the closure gets");
            }
            if inner.group_lens().is_none() {
                return refuse("it does not tell which parameters its groups have");
            }
            Ok(inner)
        });
        let (inner, all) = agree::built(&ranks.all, BUILDING, built, describe)?;
        agree::on_lines("the parameters and groups", &all)?;
        let (shared, ranks) = (shared.clone(), ranks.clone());
        Ok(Self { id: OptimizerId::new(), shared, ranks, inner, count: given.len() })
    }

    /// The optimizer inside.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The optimizer inside, to change its options, on all ranks. Call `step` and load states on the
    /// `FullyShardedOptimizer`, not on it; add no parameters.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }

    /// What is known to be wrong before a step on this rank.
    fn check_own(&self) -> Result<(), OptimizerError> {
        check_averaged(self)?;
        check_not_stepped_in_backward(self)?;
        if self.shared.lock().link.is_local() {
            return not_now(LOCAL);
        }
        check_growth(&self.shared.lock().growth)?;
        // Options may have been changed, or loaded.
        check(&self.inner)?;
        if self.inner.params().len() != self.count {
            return not_now(
                "parameters were added to the optimizer inside after they were sharded, which other ranks would not get: \
                 shard the model anew with them",
            );
        }
        self.inner.check_step()
    }

    /// What `work` makes is kept where the rows are.
    pub(super) fn kept<T, E: From<TorchError>>(&mut self, work: impl FnOnce(&mut O) -> Result<T, E>) -> Result<T, E> {
        let engine = self.shared.lock();
        engine.home.make(|| work(&mut self.inner))?
    }

    fn begin_step(&mut self) -> Result<(), ShardError> {
        let made = self.check_own().and_then(|()| self.kept(Optimizer::make_state));
        let mut engine = self.shared.lock();
        if engine.depth > 0 || engine.pass.is_some() {
            return Ok(not_now("a forward or backward pass is under way: step after it")?);
        }
        // What was gathered has the old values.
        engine.order.cut();
        let freed = engine.free_all();
        engine.agree_on(Event::Step, made.map_err(ShardError::from).and(freed), rates(&self.inner))
    }
}

/// What steps depend on and programs change.
fn rates(inner: &impl Optimizer) -> String {
    let line = |name: &str, group: usize, value: Option<f64>| match value {
        Some(value) => format!("the {name} of group {group} = {value:?}\n"),
        None => String::new(),
    };
    let of_group = |group| line("rate", group, inner.lr(group)) + &line("momentum", group, inner.momentum(group));
    (0..inner.num_groups()).map(of_group).collect()
}

fn check(inner: &impl Optimizer) -> Result<(), OptimizerError> {
    check_behavior(PART, inner)?;
    if inner.behavior().couples_elements {
        return refuse(
            "its step of an element depends on others of its parameter (Muon, Adafactor, LAMB, LARS, 8-bit AdamW), and each \
             rank steps some rows: use an optimizer that steps each element by itself, or a `ZeroRedundancyOptimizer`, \
             which does not part parameters",
        );
    }
    Ok(())
}

fn refuse<T>(reason: &'static str) -> Result<T, OptimizerError> {
    Err(OptimizerError::DoesNotFit { part: PART, reason })
}

fn not_now<T>(reason: &'static str) -> Result<T, OptimizerError> {
    Err(OptimizerError::NotNow { part: PART, reason })
}

/// What has to be the same on all ranks.
fn describe<O: Optimizer>(inner: &O) -> Vec<(String, String)> {
    let lens = inner.group_lens().unwrap_or_default();
    let params = inner.parameters();
    let mut lines = Vec::new();
    let mut first = 0;
    for (group, len) in lens.into_iter().enumerate() {
        for (index, param) in params.iter().enumerate().skip(first).take(len) {
            lines.push((format!("parameter {}", param.label(index)), format!("in group {group}")));
        }
        first += len;
    }
    let rates = (0..inner.num_groups()).map(|group| (format!("group {group}"), format!("rate {:?}", inner.lr(group))));
    lines.extend(rates);
    lines.extend(options_of(inner));
    lines
}

impl<O: Optimizer> Optimizer for FullyShardedOptimizer<O> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    /// This rank's rows.
    fn params(&self) -> Vec<Tensor> {
        self.inner.params()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.inner.parameters()
    }

    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        self.inner.trained()
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = Behavior::default();
        behavior.communicates = self.ranks.all.size() > 1;
        behavior.takes_averages = behavior.communicates;
        behavior.keeps_copies = self.inner.behavior().keeps_copies;
        behavior
    }

    fn num_groups(&self) -> usize {
        self.inner.num_groups()
    }

    fn group_lens(&self) -> Option<Vec<usize>> {
        self.inner.group_lens()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.inner.lr(group)
    }

    /// Call it with the same rate on all ranks, as a schedule does.
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.inner.set_lr(group, lr)
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        self.inner.momentum(group)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        self.inner.set_momentum(group, momentum)
    }

    /// Steps this rank's rows; the next forward gathers them.
    ///
    /// # Errors
    /// Those of the optimizer inside, on the rank that has one: what it can check and its state's memory before anything
    /// changes on any rank; what fails within its step after the others have stepped. The others get
    /// [`OptimizerError::Sync`] with [`ShardError::OtherRank`], which names the rank. On all ranks
    /// [`OptimizerError::Sync`]: with [`ShardError::RanksDisagree`] when rates or momenta differ, with [`ShardError::Ddp`]
    /// when a rank has exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for what all ranks say.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        let shared = self.shared.clone();
        let running = Running::new(&shared, "the optimizer's step has panicked");
        let begun = self.begin_step();
        let before: Vec<i64> = shards(&shared).iter().map(|shard| version(shard.tensor())).collect();
        let stepped = begun.is_ok().then(|| self.inner.step());
        running.ends();
        begun?;
        let stepped = stepped.unwrap_or(Ok(()));
        let mut engine = self.shared.lock();
        // A graph that is kept over a step has saved the old values: its backward pass is an error. Fused kernels do not
        // count as changes in place by themselves; one that was counted is not counted twice, which would tell an optimizer
        // on the host that somebody else has written.
        for (param, before) in engine.params().zip(before).filter(|(param, _)| param.is_trained) {
            bump_version(param.whole());
            if version(param.shard.tensor()) == before {
                bump_version(param.shard.tensor());
            }
        }
        Ok(engine.agree(Event::Stepped, stepped.map_err(ShardError::from))?)
    }

    /// With several ranks nothing: the step itself checks, and agrees with the others, which would wait for a rank that
    /// has not come so far.
    fn check_step(&self) -> Result<(), OptimizerError> {
        if self.ranks.all.size() == 1 { self.check_own() } else { Ok(()) }
    }

    /// With several ranks nothing, as [`check_step`](Self::check_step): the step makes its state.
    fn make_state(&mut self) -> Result<(), OptimizerError> {
        if self.ranks.all.size() == 1 { self.kept(Optimizer::make_state) } else { Ok(()) }
    }

    fn skip_agreement(&self) -> Option<&dyn SkipAgreement> {
        Some(self)
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.inner.step_skipped()
    }

    fn gradients_used(&self) -> u64 {
        self.shared.lock().link.freed()
    }

    /// Frees the gradients of this rank's rows, and whole ones that `no_sync` has left.
    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.inner.zero_grad()?;
        Ok(self.shared.lock().clear_grads()?)
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        self.inner.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}

impl<O: Optimizer> SkipAgreement for FullyShardedOptimizer<O> {
    fn agree(&self, found_inf: &Tensor) -> Result<(), SyncError> {
        let mut engine = self.shared.lock();
        engine.agree(Event::Skip, Ok(()))?;
        Ok(engine.link.watch(agree::on_largest(&self.ranks.all, found_inf).map_err(ShardError::from))?)
    }
}
