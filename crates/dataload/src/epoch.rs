//! One pass over the data.

use std::iter::FusedIterator;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::pipeline::Pipeline;
use crate::stats::Counters;
use crate::worker::Workers;
use crate::{Collate, DataError, Dataset};

/// The batches of one epoch, in order; made by [`DataLoader::iter`](crate::DataLoader::iter) and
/// [`DataLoader::epoch`](crate::DataLoader::epoch).
///
/// Workers begin when it is made, not when the first batch is asked for: an epoch that is made before a pause (an
/// evaluation, say) has its first batches ready afterwards. An error ends the epoch; the loader can be used again.
/// Dropping it stops the workers after the samples that they are reading, and joins them.
#[must_use = "workers have begun to load; an epoch that is not iterated only wastes their work"]
pub struct Epoch<D: Dataset, C: Collate<D::Sample>> {
    source: Source<D, C>,
    batches: usize,
    taken: usize,
    counters: Arc<Counters>,
}

/// Where batches come from.
enum Source<D: Dataset, C: Collate<D::Sample>> {
    CallingThread(Pipeline<D, C>),
    Workers(Workers<C::Batch>),
    Failed(DataError),
    Ended,
}

impl<D, C> Epoch<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    pub(crate) fn start(pipeline: Pipeline<D, C>, workers: usize, in_flight: usize, counters: Arc<Counters>) -> Self {
        let batches = pipeline.plan.len();
        tracing::debug!(batches, workers, in_flight, "epoch starts");
        let source = if workers == 0 || batches == 0 {
            Source::CallingThread(pipeline)
        } else {
            let assemble = Arc::new(move |number, cancelled: &AtomicBool| pipeline.assemble(number, cancelled));
            match Workers::spawn(workers, in_flight, batches, assemble) {
                Ok(workers) => Source::Workers(workers),
                Err(error) => Source::Failed(error),
            }
        };
        Self { source, batches, taken: 0, counters }
    }

    fn take(&mut self) -> Option<Result<C::Batch, DataError>> {
        if let Source::Failed(_) = self.source {
            return match std::mem::replace(&mut self.source, Source::Ended) {
                Source::Failed(error) => Some(Err(error)),
                _ => None,
            };
        }
        if self.taken == self.batches {
            self.source = Source::Ended;
        }
        match &mut self.source {
            Source::CallingThread(pipeline) => pipeline.assemble(self.taken, &AtomicBool::new(false)),
            Source::Workers(workers) => Some(workers.receive()),
            Source::Failed(_) | Source::Ended => None,
        }
    }
}

impl<D, C> Iterator for Epoch<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    type Item = Result<C::Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let asked = Instant::now();
        let batch = self.take();
        match &batch {
            Some(Ok(_)) => {
                self.taken += 1;
                self.counters.delivered();
            }
            Some(Err(error)) => {
                tracing::debug!(batch = self.taken, %error, "epoch ends early");
                self.source = Source::Ended;
            }
            None => {}
        }
        self.counters.waited(asked.elapsed());
        batch
    }

    /// At most the batches that are left: an error may end the epoch before.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.batches - self.taken))
    }
}

impl<D, C> FusedIterator for Epoch<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
}
