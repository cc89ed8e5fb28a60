//! Groups a stream of batches into windows, looking one batch ahead.

use std::iter::Peekable;

/// One batch of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch<B> {
    /// The batch.
    pub batch: B,
    /// Whether the window ends with it, because it is full or because the stream ends: backward, then step.
    pub closes: bool,
}

/// Batches, each with whether it closes its window. Made by [`Accumulator::windows`](crate::Accumulator::windows).
///
/// It takes the next batch from the stream before it hands one out, because data-parallel training has to know that a
/// backward pass is the window's last before it starts.
pub struct Windows<I: Iterator> {
    batches: Peekable<I>,
    steps: usize,
    taken: usize,
}

impl<I: Iterator> Windows<I> {
    pub(crate) fn new(batches: I, steps: usize) -> Self {
        Self { batches: batches.peekable(), steps, taken: 0 }
    }
}

impl<I: Iterator> Iterator for Windows<I> {
    type Item = MicroBatch<I::Item>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.batches.next()?;
        self.taken += 1;
        let closes = self.taken == self.steps || self.batches.peek().is_none();
        if closes {
            self.taken = 0;
        }
        Some(MicroBatch { batch, closes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn closes(len: usize, steps: usize) -> Vec<bool> {
        Windows::new(0..len, steps).map(|micro| micro.closes).collect()
    }

    #[test]
    fn a_window_closes_when_full_and_at_the_end() {
        assert_eq!(closes(5, 2), [false, true, false, true, true]);
        assert_eq!(closes(4, 2), [false, true, false, true]);
        assert_eq!(closes(1, 3), [true]);
        assert!(closes(0, 3).is_empty());
        assert_eq!(closes(3, 1), [true, true, true]);
    }
}
