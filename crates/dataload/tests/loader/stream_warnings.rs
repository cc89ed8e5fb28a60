//! What streams warn of.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use overdrive_dataload::{DataError, DataLoader, IterableDataset};

use crate::streams::numbers;
use crate::{alone, listed};

/// Counts the warnings of a thread.
#[derive(Clone, Default)]
struct Warnings(Arc<AtomicUsize>);

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() == tracing::Level::WARN
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, SeqCst);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn an_epoch_without_a_batch_is_warned_of() -> Result<(), DataError> {
    let _alone = alone();
    for (kept, warnings) in [(0, 1), (1, 0)] {
        let seen = Warnings::default();
        let stream = numbers(2, 9).filter(move |number| Ok(*number < kept));
        let builder = DataLoader::stream(stream).batch_size(2).interleave(1).num_workers(0);
        let loader = builder.collate(listed).build()?;
        let batches = tracing::subscriber::with_default(seen.clone(), || loader.iter().count());
        assert_eq!((batches, seen.0.load(SeqCst)), (kept, warnings));
    }
    Ok(())
}
