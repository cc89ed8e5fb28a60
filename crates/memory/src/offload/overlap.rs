//! Copies of new parameters beside the forward pass.

use std::collections::HashSet;

use overdrive_core::TorchError;
use overdrive_ffi::{Arrivals, Transfer};

/// In which order parameters are copied to the device, and which copies may be under way.
#[derive(Debug)]
pub(super) struct Overlap {
    /// That in which the program used them the last time, and then the others.
    order: Vec<usize>,
    under_way: Option<Arrivals>,
}

impl Overlap {
    /// For so many parameters, in their order at first.
    pub(super) fn new(len: usize) -> Self {
        Self { order: (0..len).collect(), under_way: None }
    }

    pub(super) fn order(&self) -> &[usize] {
        &self.order
    }

    /// These copies, in that order, hold up what uses the parameters.
    pub(super) fn begin(&mut self, transfers: Vec<Transfer>) -> Result<(), TorchError> {
        self.under_way = Some(Arrivals::new(transfers)?);
        Ok(())
    }

    /// What the device is given from now on waits for all copies.
    pub(super) fn end(&mut self) -> Result<(), TorchError> {
        let Some(arrivals) = self.under_way.take() else { return Ok(()) };
        let used = arrivals.finish()?;
        let is_used: HashSet<usize> = used.iter().copied().collect();
        let others = (0..self.order.len()).filter(|at| !is_used.contains(at));
        self.order = used.iter().copied().chain(others).map(|at| self.order[at]).collect();
        Ok(())
    }
}
