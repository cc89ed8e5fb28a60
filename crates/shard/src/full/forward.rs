//! A unit's forward: its whole parameters are here meanwhile, and again for its backward.

use std::fmt::Display;

use overdrive_ddp::Outputs;
use overdrive_ffi::autograd::{Backward, BoxError, Call, Pass};
use overdrive_ffi::context::grad_enabled;
use overdrive_ffi::record;
use tch::Tensor;

use super::Shared;
use super::meeting::Event;
use crate::error::ShardError;

/// A part of a model whose parameters are gathered and freed together. Made by
/// [`FullyShardedBuilder::unit`](super::FullyShardedBuilder::unit); clones are the same unit.
///
/// # Source
/// `torch.distributed.fsdp.fully_shard` of a module
#[doc(alias = "fully_shard")]
#[doc(alias = "FSDPModule")]
#[derive(Clone, Debug)]
pub struct ShardedUnit {
    pub(super) shared: Shared,
    /// `None` if all parameters belong to other units.
    pub(super) unit: Option<usize>,
}

impl ShardedUnit {
    /// Computes the unit: gathers its whole parameters, calls `forward` with the inputs, and frees the parameters unless
    /// `reshard_after_forward` is off. When the backward pass comes to the outputs, they are gathered again.
    ///
    /// Parameters are there for `forward` alone: use them for nothing but the outputs. Inputs and outputs cannot be
    /// changed in place, which autograd refuses. Every rank calls the units in the same order, and as often. Units may
    /// be called within others, which keep their parameters meanwhile, and several times in a pass. Under
    /// [`tch::no_grad`] too, all ranks call it. A `forward` that returns a `Result` goes to
    /// [`try_forward`](Self::try_forward), which tells the other ranks of its error.
    ///
    /// # Errors
    /// [`ShardError::OtherRank`] when another rank has failed since the last exchange, [`ShardError::RanksDisagree`] when
    /// it does something else next; then all ranks may go on with another pass. [`ShardError::Optimizer`] with the
    /// parameter that `forward` has written to. [`ShardError::Ddp`] when a rank has exited or does not call it within the
    /// group's timeout.
    ///
    /// # Panics
    /// With a panic of `forward`; the other ranks get an error before their next exchange.
    ///
    /// # Syncs
    /// Waits for all ranks: for what they say, and over Gloo for the parameters.
    pub fn forward<I: Outputs, O: Outputs>(&self, inputs: I, forward: impl FnOnce(I) -> O) -> Result<O, ShardError> {
        self.try_forward(inputs, |inputs| Ok::<O, ShardError>(forward(inputs)))
    }

    /// The same for a `forward` that may fail, because it calls other units for instance. The other ranks get an error
    /// before their next exchange.
    ///
    /// # Errors
    /// That of `forward`, and as [`forward`](Self::forward).
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    ///
    /// # Syncs
    /// As [`forward`](Self::forward).
    pub fn try_forward<I: Outputs, O: Outputs, E: From<ShardError> + Display>(
        &self,
        mut inputs: I,
        forward: impl FnOnce(I) -> Result<O, E>,
    ) -> Result<O, E> {
        record::refuse("a unit of a `FullyShardedDataParallel` gathers its parameters, which compiled code would not");
        let within = Within::enter(self)?;
        if let Err(error) = within.watch_inputs(inputs.tensors_mut()) {
            within.fail(&error.to_string());
            return Err(error.into());
        }
        match forward(inputs) {
            Ok(mut outputs) => {
                within.leave(outputs.tensors_mut())?;
                Ok(outputs)
            }
            Err(error) => {
                within.fail(&error.to_string());
                Err(error)
            }
        }
    }

    /// The name that it was given.
    pub fn name(&self) -> String {
        self.unit.map_or_else(String::new, |unit| self.shared.lock().units[unit].name.clone())
    }

    fn label(&self) -> String {
        format!("the forward of unit `{}`", self.name())
    }
}

/// A forward under way. Dropped by a panic, it tells the other ranks.
struct Within<'a> {
    of: &'a ShardedUnit,
    is_over: bool,
}

impl<'a> Within<'a> {
    fn enter(of: &'a ShardedUnit) -> Result<Self, ShardError> {
        let mut engine = of.shared.lock();
        if engine.depth == 0 && engine.pass.is_none() {
            engine.is_known = false;
        }
        engine.depth += 1;
        let mut came = Ok(());
        if let Some(unit) = of.unit {
            let event = if engine.pass.is_some() { Event::Recompute(unit) } else { Event::Forward(unit) };
            engine.units[unit].depth += 1;
            if engine.units[unit].depth == 1 {
                came = engine.come_to(event, unit);
            }
        }
        drop(engine);
        let within = Self { of, is_over: false };
        match came {
            Ok(()) => Ok(within),
            Err(error) => {
                within.fail(&error.to_string());
                Err(error)
            }
        }
    }

    /// Where the unit has frozen parameters, the backward pass tells when it has left the unit.
    fn watch_inputs(&self, inputs: Vec<&mut Tensor>) -> Result<(), ShardError> {
        let Some(unit) = self.of.unit else { return Ok(()) };
        if self.of.shared.lock().units[unit].has_frozen() {
            let shared = self.of.shared.clone();
            record("FullyShardedInputs", inputs, move || shared.lock().after_backward(unit))?;
        }
        Ok(())
    }

    /// The forward is good.
    fn leave(mut self, outputs: Vec<&mut Tensor>) -> Result<(), ShardError> {
        let mut is_recorded = false;
        if let Some(unit) = self.of.unit {
            let shared = self.of.shared.clone();
            let versions = shared.lock().units[unit].versions.clone();
            let before = move || shared.lock().before_backward(unit, &versions);
            is_recorded = record("FullyShardedOutputs", outputs, before)?;
        }
        let left = self.end(|engine, unit| {
            let keeps = is_recorded && !engine.units[unit].reshard_after_forward;
            // Within a backward pass, it goes on to this unit.
            if keeps || engine.pass.is_some() { Ok(()) } else { engine.free(unit) }
        });
        if let Err(error) = left {
            self.of.shared.lock().fail_between(error.to_string());
            return Err(error);
        }
        Ok(())
    }

    fn fail(mut self, reason: &str) {
        self.end_failed(reason);
    }

    fn end_failed(&mut self, reason: &str) {
        // Whatever was done to them, the parameters are freed below.
        let _ = self.end(|_, _| Ok(()));
        self.of.shared.lock().fail_between(reason.to_owned());
    }

    fn end(
        &mut self,
        free: impl FnOnce(&mut super::engine::Engine, usize) -> Result<(), ShardError>,
    ) -> Result<(), ShardError> {
        self.is_over = true;
        let mut engine = self.of.shared.lock();
        engine.depth -= 1;
        let Some(unit) = self.of.unit else { return Ok(()) };
        engine.units[unit].depth -= 1;
        if engine.units[unit].depth == 0 { free(&mut engine, unit) } else { Ok(()) }
    }
}

impl Drop for Within<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.end_failed(&format!("{} has panicked", self.of.label()));
        }
    }
}

/// Puts a node into the graph between these tensors and what is computed from them. Returns whether one was needed: it
/// runs `when` before the nodes that have computed them.
fn record(
    name: &'static str,
    tensors: Vec<&mut Tensor>,
    when: impl Fn() -> Result<(), String> + Send + Sync + 'static,
) -> Result<bool, ShardError> {
    let mut tensors: Vec<&mut Tensor> = tensors.into_iter().filter(|it| it.defined() && it.requires_grad()).collect();
    if tensors.is_empty() || !grad_enabled() {
        return Ok(false);
    }
    let outputs: Vec<Tensor> = tensors.iter().map(|it| it.shallow_clone()).collect();
    let inputs: Vec<&Tensor> = outputs.iter().collect();
    let call = Call {
        name,
        materialize_grads: false,
        once_differentiable: false,
        inputs: &inputs,
        saved: &[],
        dirty: &[],
        non_differentiable: &[],
    };
    let recorded = call.record(&outputs, Box::new(Node(when)))?;
    tensors.iter_mut().zip(recorded).for_each(|(place, tensor)| **place = tensor);
    Ok(true)
}

/// Passes gradients on.
struct Node<F>(F);

impl<F: Fn() -> Result<(), String> + Send + Sync> Backward for Node<F> {
    fn backward(&self, _pass: &Pass<'_>, grads: Vec<Tensor>) -> Result<Vec<Tensor>, BoxError> {
        (self.0)()?;
        Ok(grads)
    }
}
