//! A unit: parameters that are gathered and freed together.

use overdrive_core::OptimizerError;
use overdrive_ffi::TensorId;
use overdrive_ffi::saved_tensors::version;

use super::gather::{Gather, Packed, versions_of};
use super::home::Home;
use super::param::ShardedParam;
use super::ranks::Ranks;
use super::reduction::Reduction;
use crate::error::ShardError;

/// Where the whole parameters are.
pub(super) enum Whole {
    /// Each rank has its rows alone.
    Freed,
    /// They are on their way.
    Coming(Gather),
    Here,
}

pub(super) const CHANGED: &str = "its rows were changed after the forward, whose backward pass would use other values: run \
                                  backward first, or forward again";

pub(super) struct UnitState {
    pub(super) name: String,
    pub(super) params: Vec<ShardedParam>,
    pub(super) reductions: Vec<Reduction>,
    pub(super) reshard_after_forward: bool,
    pub(super) whole: Whole,
    /// Its rows on their way to the device, before they are sent.
    pub(super) packed: Option<Packed>,
    /// Of the shards, when they were last gathered.
    pub(super) versions: Vec<i64>,
    /// Forwards under way, one within the other.
    pub(super) depth: usize,
    /// Of the backward pass under way: parameters whose gradient is complete.
    pub(super) ready: Vec<bool>,
    /// Of these, those that have one on this rank.
    pub(super) has_grad: Vec<bool>,
    /// The means are on their way, or here.
    pub(super) is_sent: bool,
    /// How many calls the pass has come to, and how many it has left, where frozen parameters wait for it.
    pub(super) entered: usize,
    pub(super) left: usize,
}

impl UnitState {
    pub(super) fn new(
        name: String,
        params: Vec<ShardedParam>,
        reductions: Vec<Reduction>,
        reshard_after_forward: bool,
    ) -> Self {
        let count = params.len();
        Self {
            name,
            params,
            reductions,
            reshard_after_forward,
            whole: Whole::Freed,
            packed: None,
            versions: Vec::new(),
            depth: 0,
            ready: vec![false; count],
            has_grad: vec![false; count],
            is_sent: false,
            entered: 0,
            left: 0,
        }
    }

    /// This rank's rows, as they are sent.
    pub(super) fn pack(&mut self, home: &Home) -> Result<Packed, ShardError> {
        match self.packed.take().filter(|packed| packed.is_of(&self.params)) {
            Some(packed) => Ok(packed),
            None => Packed::new(&self.params, home),
        }
    }

    pub(super) fn is_trained(&self) -> bool {
        self.params.iter().any(|param| param.is_trained)
    }

    pub(super) fn has_frozen(&self) -> bool {
        self.params.iter().any(|param| !param.is_trained)
    }

    pub(super) fn is_lacking(&self) -> bool {
        matches!(self.whole, Whole::Freed)
    }

    /// Whether the shards were changed since they were last gathered.
    pub(super) fn is_changed(&self) -> bool {
        let made_of = match &self.whole {
            Whole::Coming(gather) => gather.versions(),
            Whole::Freed | Whole::Here => &self.versions,
        };
        !made_of.iter().copied().eq(self.params.iter().map(|param| version(param.shard.tensor())))
    }

    /// Whether the whole parameters are made of values that the shards had before.
    pub(super) fn is_stale(&self) -> bool {
        !self.is_lacking() && self.is_changed()
    }

    /// An error if shards were changed since they had these versions, when a forward used them.
    pub(super) fn check_versions(&self, versions: &[i64]) -> Result<(), ShardError> {
        let now = versions_of(&self.params);
        match now.iter().zip(versions).position(|(now, then)| now != then) {
            None => Ok(()),
            Some(index) => Err(OptimizerError::parameter(&self.params[index].shard, index, CHANGED).into()),
        }
    }

    /// Whether all gradients of the pass are complete.
    pub(super) fn is_ready(&self) -> bool {
        self.params.iter().zip(&self.ready).all(|(param, ready)| *ready || !param.is_trained)
    }

    /// Whether the pass under way will not use the whole parameters again: each graph node that has saved a trained one
    /// has run when its gradient is complete; frozen ones wait until the pass leaves the unit.
    pub(super) fn is_done(&self) -> bool {
        self.depth == 0 && self.is_ready() && (!self.has_frozen() || (self.entered > 0 && self.left >= self.entered))
    }

    /// Whether a parameter's gradients add up in a wider dtype than its own.
    pub(super) fn is_widened(&self, index: usize) -> bool {
        self.reductions.iter().any(|it| it.has(index) && it.is_wider(self.params[index].kind))
    }

    /// A parameter's gradient is complete.
    pub(super) fn take(&mut self, index: usize) -> Result<(), ShardError> {
        let param = &self.params[index];
        if self.is_sent {
            let reason = "it got a gradient twice in one backward pass, the second after the first was sent: run no \
                          backward pass within the pass, or hold it back by `no_sync`";
            return Err(OptimizerError::parameter(&param.shard, index, reason).into());
        }
        let Some(reduction) = self.reductions.iter_mut().find(|it| it.has(index)) else { return Ok(()) };
        if reduction.take(index, param, self.has_grad[index])? {
            self.has_grad[index] = true;
        }
        Ok(())
    }

    /// Takes what earlier passes have left in parameters that this one has not come to.
    pub(super) fn take_rest(&mut self) -> Result<(), ShardError> {
        let rest = if self.is_sent { 0 } else { self.params.len() };
        (0..rest).try_for_each(|index| self.take(index))
    }

    pub(super) fn send(&mut self, ranks: &Ranks) -> Result<(), ShardError> {
        self.is_sent = true;
        self.reductions.iter_mut().try_for_each(|it| it.send(ranks))
    }

    pub(super) fn wait_for_parts(&mut self) -> Result<(), ShardError> {
        self.reductions.iter_mut().try_for_each(Reduction::wait_for_parts)
    }

    pub(super) fn wait(&mut self, home: &mut Home) -> Result<(), ShardError> {
        self.reductions.iter_mut().try_for_each(|it| it.wait(home))
    }

    pub(super) fn take_home(&mut self, home: &mut Home) -> Result<(), ShardError> {
        self.reductions.iter_mut().try_for_each(|it| it.take_home(home))
    }

    /// Gives the shards the means, of those parameters that some rank has used.
    pub(super) fn give(&mut self, is_used: &[bool], home: &Home) -> Result<(), ShardError> {
        let Self { reductions, params, .. } = self;
        reductions.iter_mut().try_for_each(|it| it.give(params, |index| is_used[index], home))
    }

    /// Frees the whole parameters.
    pub(super) fn free(&mut self) -> Result<(), ShardError> {
        self.whole = Whole::Freed;
        let mut freed = Ok(());
        for param in &mut self.params {
            freed = freed.and(param.free());
        }
        freed
    }

    /// Frees them whatever was done to them, and forgets the pass.
    pub(super) fn reset(&mut self) {
        (self.whole, self.packed) = (Whole::Freed, None);
        self.params.iter_mut().for_each(ShardedParam::drop_whole);
        self.end_pass(false);
    }

    /// Forgets the pass. `is_local`: but not the gradients that it has left local.
    pub(super) fn end_pass(&mut self, is_local: bool) {
        self.ready.fill(false);
        if !is_local {
            self.has_grad.fill(false);
            self.reductions.iter_mut().for_each(Reduction::clear);
        }
        (self.is_sent, self.entered, self.left) = (false, 0, 0);
    }

    pub(super) fn clear_grads(&mut self) -> Result<(), ShardError> {
        self.has_grad.fill(false);
        self.reductions.iter_mut().for_each(Reduction::clear_grads);
        Ok(self.params.iter().try_for_each(ShardedParam::clear_grads)?)
    }

    /// A parameter that requires a gradient now and did not before, or the other way round.
    pub(super) fn check_frozen(&self) -> Result<(), ShardError> {
        let is_other = |param: &ShardedParam| param.whole().requires_grad() != param.is_trained;
        match self.params.iter().position(is_other) {
            None => Ok(()),
            Some(index) => {
                let reason = "it was frozen or unfrozen after it was sharded: set `requires_grad` before";
                Err(OptimizerError::parameter(&self.params[index].shard, index, reason).into())
            }
        }
    }

    /// The index of a parameter, given its whole or its shard.
    pub(super) fn position(&self, id: TensorId) -> Option<usize> {
        let is_it =
            |param: &ShardedParam| TensorId::of(param.whole()) == id || TensorId::of(param.shard.tensor()) == id;
        self.params.iter().position(is_it)
    }
}
