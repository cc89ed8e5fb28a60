//! Backward passes.

use overdrive_core::OptimizerError;

use super::engine::{Engine, PART, Pass};
use super::meeting::Event;
use super::param::ShardedParam;
use super::unit::UnitState;
use crate::error::ShardError;

impl Engine {
    pub(super) fn begin_pass(&mut self) -> Result<(), ShardError> {
        self.link.check(PART)?;
        if self.depth > 0 || self.pass.is_some() {
            let reason = "a forward or backward pass is under way: run backward after it";
            return Err(OptimizerError::NotNow { part: PART, reason }.into());
        }
        self.is_known = false;
        self.log.clear();
        let refused = self.units.iter().find_map(|unit| unit.check_frozen().err());
        self.pass = Some(Pass { refused, ..Pass::default() });
        Ok(())
    }

    /// The pass comes to a unit, whose forward had shards of these versions. An error ends the pass, which reports it.
    pub(super) fn before_backward(&mut self, unit: usize, versions: &[i64]) -> Result<(), String> {
        let Some(pass) = &mut self.pass else {
            let reason = "gradients are averaged and freed by its passes: call `backward` of the \
                          `FullyShardedDataParallel`, or give it to an accumulator, instead of `loss.backward()`";
            return Err(OptimizerError::NotNow { part: PART, reason }.to_string());
        };
        let event = Event::Backward(unit);
        let own = pass.refused.take().map_or_else(|| self.units[unit].check_versions(versions), Err);
        let came = match own {
            // The other ranks hear of it now.
            Err(refused) => self.meet(event, Err(refused)).map(drop),
            Ok(()) => self.come_to(event, unit),
        };
        self.units[unit].entered += 1;
        came.map_err(|error| self.refuse(error))
    }

    /// Remembers the first error of a pass.
    fn refuse(&mut self, error: ShardError) -> String {
        let text = error.to_string();
        if let Some(pass) = &mut self.pass {
            pass.refused.get_or_insert(error);
        }
        text
    }

    /// The pass has left a unit that has frozen parameters.
    pub(super) fn after_backward(&mut self, unit: usize) -> Result<(), String> {
        if self.pass.is_none() {
            return Ok(());
        }
        self.units[unit].left += 1;
        let freed = if self.units[unit].is_done() { self.free(unit) } else { Ok(()) };
        freed.map_err(|error| self.refuse(error))
    }

    /// A parameter's gradient is complete.
    pub(super) fn ready(&mut self, unit: usize, index: usize) {
        if self.pass.is_none() {
            self.link.set_local(true);
            return;
        }
        let taken = match !self.held || self.units[unit].is_widened(index) {
            true => {
                let _no_grad = tch::no_grad_guard();
                self.units[unit].take(index)
            }
            false => Ok(()),
        };
        self.units[unit].ready[index] = true;
        let done = match self.units[unit].is_done() {
            true => taken.and_then(|()| self.free(unit)),
            false => taken,
        };
        if let Err(error) = done {
            self.refuse(error);
        }
    }

    /// Ends a pass: with the other ranks, unless they know already that it has failed.
    pub(super) fn end_pass(&mut self, ran: Result<(), ShardError>) -> Result<(), ShardError> {
        let refused = self.pass.as_mut().and_then(|pass| pass.refused.take());
        let own = match (refused, ran) {
            // What a node of the graph has met comes out of the pass as libtorch's error.
            (Some(refused), _) if self.is_known => return self.fail(refused),
            (None, Err(error)) if self.is_known => return self.fail(error),
            (Some(refused), _) => Err(refused),
            (None, ran) => ran,
        };
        let own = own.and_then(|()| self.take_rest()).and_then(|()| self.check_written());
        let event = if self.held { Event::EndHeld } else { Event::End };
        let ended = self.meet(event, own).and_then(|agreed| self.finish(&agreed.grads));
        self.ended(ended)
    }

    fn ended(&mut self, ended: Result<(), ShardError>) -> Result<(), ShardError> {
        match ended {
            Ok(()) => Ok(()),
            Err(error) => {
                // What has failed after the last exchange.
                self.tell(error.to_string());
                self.fail(error)
            }
        }
    }

    /// Takes part in the others' pass, with what earlier passes have left.
    pub(super) fn follow(&mut self) -> Result<(), ShardError> {
        let own = self.pass.as_mut().and_then(|pass| pass.refused.take()).map_or(Ok(()), Err);
        let own = own.and_then(|()| self.take_rest()).and_then(|()| self.check_written());
        let ended = self.take_part(own);
        self.ended(ended)
    }

    /// An error if a whole parameter was written to, before it is freed at the end of a pass.
    fn check_written(&self) -> Result<(), ShardError> {
        self.units.iter().flat_map(|unit| &unit.params).try_for_each(ShardedParam::check_written)
    }

    fn take_part(&mut self, mut own: Result<(), ShardError>) -> Result<(), ShardError> {
        loop {
            let agreed = self.meet(Event::Follow, own)?;
            own = Ok(());
            match agreed.event {
                Event::Backward(unit) | Event::Recompute(unit) => self.come_along(&agreed, unit)?,
                Event::End | Event::EndHeld | Event::Follow => return self.finish(&agreed.grads),
                _ => {
                    let reason = "the other ranks do something else than a backward pass: each has to close its window";
                    self.link.breaks();
                    return Err(OptimizerError::NotNow { part: PART, reason }.into());
                }
            }
        }
    }

    /// Ends a pass that has panicked.
    pub(super) fn give_up(&mut self, reason: &str) {
        self.tell(reason.to_owned());
        self.is_known = false;
        self.reset();
    }

    fn fail(&mut self, error: ShardError) -> Result<(), ShardError> {
        self.is_known = false;
        self.reset();
        self.clear_grads()?;
        Err(error)
    }

    /// Takes the gradients that earlier passes have left.
    fn take_rest(&mut self) -> Result<(), ShardError> {
        if self.held {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        self.units.iter_mut().try_for_each(UnitState::take_rest)
    }

    /// Averages what is left, and gives the shards their means. `grads`: for each parameter, whether some rank has used
    /// it.
    fn finish(&mut self, grads: &[bool]) -> Result<(), ShardError> {
        let mut first = 0;
        let mut is_used = Vec::with_capacity(self.units.len());
        for unit in &self.units {
            is_used.push(grads[first..first + unit.params.len()].to_vec());
            first += unit.params.len();
        }
        if !self.held {
            for (unit, is_used) in is_used.iter().enumerate() {
                if !self.units[unit].is_sent && is_used.contains(&true) {
                    self.send(unit)?;
                }
            }
            // Whatever fails on this rank then, others do not wait for it.
            self.wait_for_means()?;
            self.units.iter_mut().try_for_each(|unit| unit.take_home(&mut self.home))?;
            self.home.synchronize()?;
            for (unit, is_used) in self.units.iter_mut().zip(&is_used) {
                let given = unit.give(is_used, &self.home);
                self.link.watch(given)?;
            }
        }
        let is_local = self.held;
        self.window = if is_local { self.window + 1 } else { 0 };
        self.pass = None;
        self.order.cut();
        let freed = self.free_all();
        self.units.iter_mut().for_each(|unit| unit.end_pass(is_local));
        self.link.set_local(is_local);
        freed
    }

    pub(super) fn clear_grads(&mut self) -> Result<(), ShardError> {
        self.link.free();
        self.window = 0;
        self.units.iter_mut().try_for_each(UnitState::clear_grads)
    }
}
