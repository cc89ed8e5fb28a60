//! A training, as a rank runs it.

use crate::error::ShardError;

/// A training. Bytes and seconds are those of one rank, with its part of the batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Elements of each unit's parameters.
    pub(super) units: Vec<f64>,
    /// Of the largest parameter, where it is known.
    pub(super) largest_parameter: Option<f64>,
    /// Of the optimizer's state, for each element.
    pub(super) state_bytes: f64,
    pub(super) is_mixed: bool,
    pub(super) kept: f64,
    pub(super) recomputed: f64,
    pub(super) forward: f64,
    pub(super) backward: f64,
    pub(super) micro_batches: usize,
}

/// Bytes of an element of parameters and gradients, which are of float32.
pub(super) const ELEMENT: f64 = 4.0;

impl Workload {
    /// Units with so many elements of parameters each, in float32 with Adam or AdamW; the passes of a batch take a second and
    /// two. Set what is otherwise.
    pub fn new(units: impl IntoIterator<Item = usize>) -> Self {
        Self {
            units: units.into_iter().map(|elements| elements as f64).collect(),
            largest_parameter: None,
            state_bytes: 8.0,
            is_mixed: false,
            kept: 0.0,
            recomputed: 0.0,
            forward: 1.0,
            backward: 2.0,
            micro_batches: 1,
        }
    }

    /// Elements of the largest parameter; that of a unit has them all unless set.
    #[must_use]
    pub fn largest_parameter(mut self, elements: usize) -> Self {
        self.largest_parameter = Some(elements as f64);
        self
    }

    /// Bytes of the optimizer's state for each element of a parameter: 8 for Adam's, 4 for SGD with momentum.
    #[must_use]
    pub fn state_bytes(mut self, bytes: f64) -> Self {
        self.state_bytes = bytes;
        self
    }

    /// With stage 3, the whole parameters that are gathered are of 16 bits.
    #[must_use]
    pub fn mixed_precision(mut self) -> Self {
        self.is_mixed = true;
        self
    }

    /// Bytes of activations that a micro-batch's forward pass keeps for its backward pass, and those if each unit runs again.
    /// An `Estimate` of `overdrive-memory` tells both: the activations at its peak, of the plain step and of one with
    /// `checkpoint`.
    #[must_use]
    pub fn activations(mut self, kept: f64, recomputed: f64) -> Self {
        (self.kept, self.recomputed) = (kept, recomputed);
        self
    }

    /// Seconds of a micro-batch's forward and backward pass.
    #[must_use]
    pub fn seconds(mut self, forward: f64, backward: f64) -> Self {
        (self.forward, self.backward) = (forward, backward);
        self
    }

    /// How many micro-batches a step has: an `Accumulator` keeps whole gradients until the last one.
    #[must_use]
    pub fn gradient_accumulation_steps(mut self, steps: usize) -> Self {
        self.micro_batches = steps;
        self
    }

    pub(super) fn elements(&self) -> f64 {
        self.units.iter().fold(0.0, |all, unit| all + unit)
    }

    /// Elements of the largest unit.
    pub(super) fn largest(&self) -> f64 {
        self.units.iter().copied().fold(0.0, f64::max)
    }

    /// Bytes of the largest gradient.
    pub(super) fn largest_gradient(&self) -> f64 {
        ELEMENT * self.largest_parameter.unwrap_or_else(|| self.largest())
    }

    /// Bytes of an element of whole parameters with stage 3.
    pub(super) fn whole(&self) -> f64 {
        if self.is_mixed { 2.0 } else { ELEMENT }
    }

    pub(super) fn check(&self) -> Result<(), ShardError> {
        positive("elements of all units", self.elements())?;
        let fits = |found| {
            let holds = found > 0.0 && found <= self.largest();
            check("elements of the largest parameter", found, holds, "above 0, and at most those of the largest unit")
        };
        self.largest_parameter.map_or(Ok(()), fits)?;
        not_negative("state_bytes", self.state_bytes)?;
        not_negative("activations that are kept", self.kept)?;
        not_negative("activations that are kept where units run again", self.recomputed)?;
        positive("seconds of the forward pass", self.forward)?;
        positive("seconds of the backward pass", self.backward)?;
        positive("gradient_accumulation_steps", self.micro_batches as f64)
    }
}

pub(super) fn positive(name: &'static str, found: f64) -> Result<(), ShardError> {
    check(name, found, found > 0.0, "a number above 0")
}

pub(super) fn not_negative(name: &'static str, found: f64) -> Result<(), ShardError> {
    check(name, found, found >= 0.0, "a number, 0 or more")
}

fn check(name: &'static str, found: f64, holds: bool, expected: &'static str) -> Result<(), ShardError> {
    if holds && found.is_finite() { Ok(()) } else { Err(ShardError::Figure { name, found, expected }) }
}
