//! Memory bounded by bytes: the windows of a stream, and the batches that are made ahead.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use overdrive_core::Stateful;
use overdrive_dataload::{Cancellation, DataError, DataLoader, Deferred, FnDataset, IterableDataset, Samples};
use tch::Tensor;

use crate::{WORKERS, alone, listed, wait_until};

/// The bytes of each sample of [`Heavy`], and how many of them a window may take.
const BYTES: usize = 100;
const FIT: usize = 7;

/// Shards of 40 numbers; counts the numbers that were read.
#[derive(Clone, Default)]
struct Heavy(Arc<AtomicUsize>);

impl IterableDataset for Heavy {
    type Sample = usize;

    fn shards(&self) -> usize {
        4
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<usize>, DataError> {
        let read = self.0.clone();
        Ok(Box::new((position as usize..40).map(move |i| {
            read.fetch_add(1, SeqCst);
            Ok(shard * 1000 + i)
        })))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        _: &Cancellation,
    ) -> Result<Samples<Deferred<usize>>, DataError> {
        Ok(Box::new(self.open_shard(shard, position)?.map(|sample| Ok(Deferred::ready(sample?).of_bytes(BYTES)))))
    }
}

fn windows(heavy: Heavy, workers: usize, bytes: usize) -> Result<DataLoader<Vec<usize>>, DataError> {
    let builder = DataLoader::stream(heavy).batch_size(FIT).interleave(1).shuffle_buffer(30).seed(3);
    builder.shuffle_buffer_bytes(bytes).num_workers(workers).collate(listed).build()
}

#[test]
fn a_window_of_large_samples_ends_at_its_bytes() -> Result<(), Box<dyn std::error::Error>> {
    let _alone = alone();
    let heavy = Heavy::default();
    let loader = windows(heavy.clone(), 0, FIT * BYTES)?;
    let mut epoch = loader.iter();
    let first: BTreeSet<usize> = epoch.next().unwrap()?.into_iter().collect();
    assert_eq!((first, heavy.0.load(SeqCst)), ((0..FIT).collect(), FIT), "one window, and no sample of the next");
    let all: Vec<Vec<usize>> = windows(Heavy::default(), 0, FIT * BYTES)?.iter().collect::<Result<_, _>>()?;
    assert!(all.iter().any(|batch| !batch.is_sorted()));
    assert_eq!(all.concat().iter().collect::<BTreeSet<_>>().len(), 160);
    for workers in WORKERS {
        let loader = windows(Heavy::default(), workers, FIT * BYTES)?;
        let mut found: Vec<Vec<usize>> = loader.iter().take(9).collect::<Result<_, _>>()?;
        let mut rest = windows(Heavy::default(), workers, FIT * BYTES)?;
        rest.load_state_dict(&loader.state_dict()?)?;
        found.extend(rest.iter().collect::<Result<Vec<_>, _>>()?);
        assert_eq!(found, all, "{workers} workers");
        let error = windows(Heavy::default(), workers, BYTES)?.load_state_dict(&loader.state_dict()?).unwrap_err();
        assert!(error.to_string().contains("window_bytes"), "{error}");
    }
    // A window has one sample at least.
    let one_by_one: Vec<Vec<usize>> = windows(Heavy::default(), 2, 1)?.iter().collect::<Result<_, _>>()?;
    assert!(one_by_one.concat().is_sorted() && one_by_one.concat().len() == 160);
    Ok(())
}

/// Batches of four float64 numbers: 32 bytes each.
fn numbers(workers: usize, budget: usize) -> Result<DataLoader<Tensor>, DataError> {
    let builder = DataLoader::builder(FnDataset::new(80, |i| Ok(i as f64))).batch_size(4).num_workers(workers);
    let collate = |samples: Vec<f64>| Ok(Tensor::from_slice(&samples));
    builder.prefetch_factor(8).memory_budget(budget).collate(collate).build()
}

/// The most batches that were begun before they were asked for, where there is room for three of 32 bytes; `make` makes
/// such a batch.
fn most_ahead<B: Send + 'static>(make: impl Fn(Vec<f64>) -> B + Send + Sync + 'static) -> Result<usize, DataError> {
    // Batches begun, batches asked for, and the most.
    let counts = Arc::new([0; 3].map(AtomicUsize::new));
    let seen = counts.clone();
    let collate = move |samples: Vec<f64>| {
        let [begun, asked, most] = &*seen;
        let begun = begun.fetch_add(1, SeqCst) + 1;
        most.fetch_max(begun.saturating_sub(asked.load(SeqCst)), SeqCst);
        Ok(make(samples))
    };
    let builder = DataLoader::builder(FnDataset::new(80, |i| Ok(i as f64))).batch_size(4).num_workers(2);
    let loader = builder.prefetch_factor(8).memory_budget(3 * 32).collate(collate).build()?;
    let mut epoch = loader.iter();
    for number in 0..20_usize {
        wait_until(|| epoch.ready() >= 3.min(20 - number));
        counts[1].fetch_add(1, SeqCst);
        epoch.next().unwrap()?;
    }
    assert!(epoch.next().is_none());
    Ok(counts[2].load(SeqCst))
}

#[test]
fn batches_made_ahead_stay_within_their_bytes() -> Result<(), DataError> {
    let _alone = alone();
    assert_eq!(most_ahead(|samples| Tensor::from_slice(&samples))?, 3, "without the budget, 16 batches");
    Ok(())
}

#[test]
fn strings_count_as_tensors_do() -> Result<(), DataError> {
    let _alone = alone();
    let names = |samples: &[f64], bytes: usize| samples.iter().map(|_| "x".repeat(bytes)).collect::<Vec<_>>();
    assert_eq!(most_ahead(move |samples| names(&samples, 8))?, 3, "without the budget, 16 batches");
    let mixed = move |samples: Vec<f64>| (Tensor::from_slice(&[samples[0]]), names(&samples, 6));
    assert_eq!(most_ahead(mixed)?, 3);
    Ok(())
}

#[test]
fn a_budget_smaller_than_a_batch_delivers_all_the_same() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let batches: Vec<Tensor> = numbers(workers, 1)?.iter().collect::<Result<_, _>>()?;
        let firsts: Vec<f64> = batches.iter().map(|batch| batch.double_value(&[0])).collect();
        assert_eq!(firsts, (0..20).map(|number| 4.0 * f64::from(number)).collect::<Vec<_>>());
    }
    // A dropped epoch wakes the workers that wait for room.
    let epoch = numbers(4, 1)?.iter();
    wait_until(|| epoch.ready() > 0);
    drop(epoch);
    wait_until(|| crate::loader_threads() == 0);
    Ok(())
}

#[test]
fn a_batch_of_more_raw_bytes_than_the_budget_is_an_error() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let build = |budget| {
            let builder = DataLoader::stream(Heavy::default()).batch_size(8).interleave(1).num_workers(workers);
            builder.memory_budget(budget).collate(listed).build()
        };
        assert_eq!(build(8 * BYTES)?.iter().count(), 20);
        let outcomes: Vec<_> = build(8 * BYTES - 1)?.iter().collect();
        let message = "shard 0, item 7: memory_budget: expected room for a batch, at least 800 bytes for 8, found 799";
        assert!(outcomes.len() == 1 && outcomes[0].as_ref().is_err_and(|error| error.to_string() == message));
    }
    Ok(())
}

/// A sample of [`BYTES`] with its index; counted while it is in memory.
struct Counted {
    index: usize,
    alive: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.alive.fetch_sub(1, SeqCst);
    }
}

/// Batches of 8 samples in memory that is large enough for as many, and the most samples that were there at once when one
/// was collated, from the fourth on.
fn most_alive(
    workers: usize,
    readers: usize,
    fit: usize,
    collated: impl Fn(&[Counted], &AtomicUsize) + Send + Sync + 'static,
) -> Result<usize, DataError> {
    let (alive, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let read = alive.clone();
    let dataset = FnDataset::new(200, move |index| {
        read.fetch_add(1, SeqCst);
        Ok(Counted { index, alive: read.clone() })
    });
    let seen = most.clone();
    let collate = move |samples: Vec<Counted>| {
        collated(&samples, &alive);
        if samples[0].index >= 3 * 8 {
            seen.fetch_max(alive.load(SeqCst), SeqCst);
        }
        Ok(Tensor::from(samples[0].index as i64))
    };
    let builder = DataLoader::builder(dataset).batch_size(8).readers(readers).num_workers(workers);
    // With room for the batches themselves, of 8 bytes each.
    let loader = builder.sample_bytes(|_| BYTES).memory_budget(fit * BYTES + BYTES - 1).collate(collate).build()?;
    let batches: Vec<Tensor> = loader.iter().collect::<Result<_, _>>()?;
    let firsts: Vec<i64> = batches.iter().map(|batch| batch.int64_value(&[])).collect();
    assert_eq!(firsts, (0..200).step_by(8).collect::<Vec<_>>());
    Ok(most.load(SeqCst))
}

#[test]
fn readers_hold_no_more_bytes_than_the_budget() -> Result<(), DataError> {
    let _alone = alone();
    // Waits until the readers have no more room, while there is something left for them to read.
    let most = most_alive(1, 4, 6, |samples, alive| {
        let all = if samples[0].index < 180 { 8 + 6 } else { 0 };
        wait_until(|| alive.load(SeqCst) >= all);
    })?;
    assert_eq!(most, 8 + 6, "without the budget, 28");
    Ok(())
}

#[test]
fn workers_do_not_hold_samples_of_more_batches_than_the_budget_has_room_for() -> Result<(), DataError> {
    let _alone = alone();
    // Long enough for another worker to read its samples, if it may.
    let pause = |_: &[Counted], _: &AtomicUsize| std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(most_alive(3, 0, 8, pause)?, 8, "without the budget, 24");
    // With room for three, batches wait until one has met another's samples.
    let together = AtomicUsize::new(0);
    let meets = move |samples: &[Counted], alive: &AtomicUsize| {
        let all = if (24..100).contains(&samples[0].index) { 16 } else { 0 };
        wait_until(|| {
            together.fetch_max(alive.load(SeqCst), SeqCst);
            together.load(SeqCst) >= all
        });
    };
    assert!(most_alive(3, 0, 3 * 8, meets)? >= 16);
    Ok(())
}
