//! Groups a stream of batches into windows, looking one batch ahead.

use overdrive_core::{HeldBatches, take_ahead};

/// One batch of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatch<B> {
    /// The batch.
    pub batch: B,
    /// Whether the window ends with this batch, because it is full or because the stream ends: step after its backward.
    pub closes: bool,
}

/// Batches, each with whether it closes its window. Made by [`Accumulator::windows`](crate::Accumulator::windows).
///
/// Within a window it takes the next batch from the stream before it hands one out, because data-parallel training has
/// to know, before a backward pass starts, whether it is the window's last. The loader counts a batch taken ahead as
/// trained on only when it is handed out. After a full window no batch is taken ahead.
pub struct Windows<I: Iterator> {
    batches: I,
    /// The batch that was taken ahead; the inner `Option` is none at the end of the stream.
    ahead: Option<(Option<I::Item>, HeldBatches)>,
    steps: usize,
    taken: usize,
}

impl<I: Iterator> Windows<I> {
    pub(crate) fn new(batches: I, steps: usize) -> Self {
        Self { batches, ahead: None, steps, taken: 0 }
    }

    fn is_last(&mut self) -> bool {
        let (next, _) = self.ahead.get_or_insert_with(|| take_ahead(|| self.batches.next()));
        next.is_none()
    }
}

impl<I: Iterator> Iterator for Windows<I> {
    type Item = MicroBatch<I::Item>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = match self.ahead.take() {
            Some((batch, held)) => {
                held.hand_out();
                batch?
            }
            None => self.batches.next()?,
        };
        self.taken += 1;
        let closes = self.taken == self.steps || self.is_last();
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
