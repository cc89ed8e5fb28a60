//! A progress bar around an epoch.

use std::iter::FusedIterator;
use std::sync::Arc;
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use crate::loader::stats::Counters;
use crate::{DataError, Epoch};

/// An [`Epoch`] that draws a progress bar on the terminal: batches, samples per second, and the share of time that the
/// training loop waits for data. Made by [`Epoch::progress`].
#[must_use = "iterate it as the epoch"]
#[derive(Debug)]
pub struct Progress<B> {
    epoch: Epoch<B>,
    bar: ProgressBar,
    counters: Arc<Counters>,
    begun: Instant,
    /// Samples and waiting time of the loader when the epoch began.
    samples_before: u64,
    waited_before: f64,
}

impl<B: Send + 'static> Epoch<B> {
    /// Shows this epoch's progress on standard error, where that is a terminal.
    ///
    /// ```
    /// # use overdrive_dataload::{DataLoader, FnDataset};
    /// # let loader = DataLoader::builder(FnDataset::new(10, Ok)).collate(|samples: Vec<usize>| Ok(samples)).build()?;
    /// for batch in loader.iter().progress() {
    ///     let batch = batch?;
    /// }
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn progress(self) -> Progress<B> {
        let (bar, form) = match self.size_hint().1 {
            Some(batches) => (ProgressBar::new(batches as u64), "{bar:30} {pos}/{len} batches, {msg}, {eta} left"),
            None => (ProgressBar::no_length(), "{spinner} {pos} batches, {msg}"),
        };
        if let Ok(style) = ProgressStyle::with_template(form) {
            bar.set_style(style);
        }
        let counters = self.counters().clone();
        let stats = counters.snapshot();
        Progress {
            epoch: self,
            bar,
            counters,
            begun: Instant::now(),
            samples_before: stats.samples,
            waited_before: stats.wait_seconds,
        }
    }
}

impl<B> Progress<B> {
    fn message(&self) -> String {
        let stats = self.counters.snapshot();
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-9);
        let rate = stats.samples.saturating_sub(self.samples_before) as f64 / seconds;
        // The loader's statistics may have been reset meanwhile.
        let waited = (stats.wait_seconds - self.waited_before).max(0.0) / seconds;
        format!("{rate:.0} samples/s, {:.0}% waiting for data", 100.0 * waited)
    }
}

impl<B: Send + 'static> Iterator for Progress<B> {
    type Item = Result<B, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batch = self.epoch.next();
        match &batch {
            Some(Ok(_)) => {
                self.bar.inc(1);
                if !self.bar.is_hidden() {
                    self.bar.set_message(self.message());
                }
            }
            Some(Err(_)) => self.bar.abandon(),
            None => self.bar.finish(),
        }
        batch
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.epoch.size_hint()
    }
}

impl<B: Send + 'static> FusedIterator for Progress<B> {}

#[cfg(test)]
mod tests {
    use crate::{DataLoader, FnDataset};

    #[test]
    fn it_passes_the_epoch_on_and_counts_it() {
        let loader = DataLoader::builder(FnDataset::new(10, Ok)).batch_size(4).collate(|all: Vec<usize>| Ok(all));
        let loader = loader.build().unwrap();
        let mut progress = loader.iter().progress();
        assert_eq!(progress.size_hint(), (0, Some(3)));
        assert_eq!(progress.by_ref().map(Result::unwrap).collect::<Vec<_>>().concat(), (0..10).collect::<Vec<_>>());
        assert_eq!((progress.bar.position(), progress.bar.length()), (3, Some(3)));
        assert!(progress.message().contains("samples/s") && progress.bar.is_finished());
    }
}
