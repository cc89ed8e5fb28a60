//! Times the waiting for batches.

use std::iter::FusedIterator;

use super::{Phase, StepTimer};

/// An iterator whose `next` counts as [`Phase::DataWait`]. Made by [`StepTimer::batches`].
#[must_use = "iterate it as the batches"]
#[derive(Debug)]
pub struct Batches<'timer, I> {
    timer: &'timer StepTimer,
    batches: I,
}

impl<'timer, I> Batches<'timer, I> {
    pub(super) fn new(timer: &'timer StepTimer, batches: impl IntoIterator<IntoIter = I>) -> Self {
        // A loader starts its threads here.
        let _waiting = timer.phase(Phase::DataWait);
        Self { timer, batches: batches.into_iter() }
    }
}

impl<I: Iterator> Iterator for Batches<'_, I> {
    type Item = I::Item;

    fn next(&mut self) -> Option<I::Item> {
        let _waiting = self.timer.phase(Phase::DataWait);
        self.batches.next()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.batches.size_hint()
    }
}

impl<I: ExactSizeIterator> ExactSizeIterator for Batches<'_, I> {}

impl<I: FusedIterator> FusedIterator for Batches<'_, I> {}
