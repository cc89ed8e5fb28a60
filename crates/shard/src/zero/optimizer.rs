//! The sharded optimizer as an optimizer.

use overdrive_core::{
    Activity, Behavior, Optimizer, OptimizerError, OptimizerId, Parameter, SkipAgreement, Stateful, SyncError, activity,
};
use tch::{Kind, Tensor};

use super::ZeroRedundancyOptimizer;
use crate::agree;
use crate::error::ShardError;
use crate::ownership::{Group, Own, PART};

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    /// The optimizer inside and its number of this group, if this rank has a part of the group.
    fn own_group(&mut self, group: usize) -> Option<(&mut O, usize)> {
        let own = self.own.as_mut()?;
        let number = own.groups.iter().position(|&of_all| of_all == group)?;
        Some((&mut own.inner, number))
    }

    fn group_at(&self, group: usize) -> Result<Group, OptimizerError> {
        let groups = self.ownership.groups.len();
        self.ownership.groups.get(group).copied().ok_or(OptimizerError::NoSuchGroup { group, groups })
    }
}

impl<O: Optimizer> Optimizer for ZeroRedundancyOptimizer<O> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    /// Those of all ranks.
    fn params(&self) -> Vec<Tensor> {
        self.ownership.params.iter().map(|param| param.tensor().shallow_clone()).collect()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.ownership.params.iter().map(Parameter::share).collect()
    }

    /// # Errors
    /// With several ranks, where float32 masters of 16-bit parameters are on other ranks.
    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        let mut trained = self.params();
        let is_16_bit = |param: &Tensor| matches!(param.kind(), Kind::Half | Kind::BFloat16);
        if self.group.size() > 1 && self.ownership.keeps_copies && trained.iter().any(is_16_bit) {
            let reason = "each of its float32 masters is on one rank alone, and what is around it would see the rounded \
                          parameters: wrap the optimizer within the closure, as \
                          `|params| Lookahead::new(AdamW::builder(params)..)`";
            return Err(OptimizerError::DoesNotFit { part: PART, reason });
        }
        if let Some(own) = &self.own {
            for (&index, tensor) in own.params.iter().zip(own.inner.trained()?) {
                trained[index] = tensor;
            }
        }
        Ok(trained)
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = Behavior::default();
        behavior.communicates = self.group.size() > 1;
        behavior.takes_averages = behavior.communicates;
        behavior.keeps_copies = self.ownership.keeps_copies;
        behavior
    }

    fn num_groups(&self) -> usize {
        self.ownership.groups.len()
    }

    fn group_lens(&self) -> Option<Vec<usize>> {
        let len = |group: usize| self.ownership.group_of.iter().filter(|of_param| **of_param == group).count();
        Some((0..self.ownership.groups.len()).map(len).collect())
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.ownership.groups.get(group)?.lr
    }

    /// Call it with the same rate on all ranks, as a schedule does.
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.group_at(group)?;
        OptimizerError::check_lr(lr)?;
        if let Some((inner, number)) = self.own_group(group) {
            inner.set_lr(number, lr)?;
        }
        // tch's optimizers do not tell their rates.
        self.ownership.groups[group].lr = self.ownership.groups[group].lr.map(|_| lr);
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        self.ownership.groups.get(group)?.momentum
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        if self.group_at(group)?.momentum.is_none() {
            return Err(OptimizerError::NoMomentum);
        }
        OptimizerError::check_range("momentum", momentum, 0.0..1.0, "at least 0 and below 1")?;
        if let Some((inner, number)) = self.own_group(group) {
            inner.set_momentum(number, momentum)?;
        }
        self.ownership.groups[group].momentum = Some(momentum);
        Ok(())
    }

    /// Steps this rank's parameters, and sends them to all ranks.
    ///
    /// # Errors
    /// Those of the optimizer inside, on the rank that has one: what it can check and its state's memory before
    /// anything changes on any rank; what fails within its step after the others have stepped and sent. The others get
    /// [`OptimizerError::Sync`] with [`ShardError::OtherRank`](crate::ShardError::OtherRank), which names the rank.
    /// [`OptimizerError::Sync`] when a rank has exited or does not take part within the group's timeout: parameters
    /// then differ between ranks.
    ///
    /// # Syncs
    /// Waits for all ranks, over NCCL not for their devices.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.begin_step()?;
        let stepped = self.own.as_mut().map_or(Ok(()), |own: &mut Own<O>| own.inner.step());
        self.end_step(stepped)
    }

    /// With several ranks nothing: the step itself checks, and agrees with the others, which would wait for a rank that
    /// has not come so far.
    fn check_step(&self) -> Result<(), OptimizerError> {
        if self.group.size() == 1 { self.check_own() } else { Ok(()) }
    }

    /// With several ranks nothing, as [`check_step`](Self::check_step): the step makes its state.
    fn make_state(&mut self) -> Result<(), OptimizerError> {
        match &mut self.own {
            Some(own) if self.group.size() == 1 => own.inner.make_state(),
            _ => Ok(()),
        }
    }

    fn skip_agreement(&self) -> Option<&dyn SkipAgreement> {
        Some(self)
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.own.as_mut().map_or(Ok(()), |own| own.inner.step_skipped())
    }

    fn gradients_used(&self) -> u64 {
        self.link.freed()
    }

    /// Frees the gradients of all parameters.
    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.link.free();
        if let Some(own) = &mut self.own {
            own.inner.zero_grad()?;
        }
        Ok(self.params.clear_grads()?)
    }

    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        self.own.as_mut().map_or(Ok(()), |own| own.inner.params_changed())
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}

impl<O: Optimizer> SkipAgreement for ZeroRedundancyOptimizer<O> {
    fn agree(&self, found_inf: &Tensor) -> Result<(), SyncError> {
        Ok(self.link.watch(agree::on_largest(&self.group, found_inf).map_err(ShardError::from))?)
    }
}
