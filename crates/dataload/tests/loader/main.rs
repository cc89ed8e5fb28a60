//! The loader through its public interface: order, epochs, errors, panics, and threads that end.

mod ahead;
mod budgets;
mod caches;
mod cancelled;
mod compose;
mod draws;
mod epochs;
mod faults;
mod images;
mod mixture;
mod options;
mod packing;
mod ranks;
mod readers;
mod resume;
mod shared;
mod steps;
mod stream_warnings;
mod streams;
mod torch_order;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use overdrive_dataload::{
    BatchPlan, BatchSampler, DataError, DataLoader, Dataset, FnDataset, Sampler, SequentialSampler,
};

const WORKERS: [usize; 4] = [0, 1, 2, 4];

/// Tests that start workers run one at a time, so that threads can be counted.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A collate function that returns the list of samples.
fn listed<S: Send>(samples: Vec<S>) -> Result<Vec<S>, DataError> {
    Ok(samples)
}

/// A dataset whose samples take unequal times, so that batches finish out of order.
fn uneven(len: usize) -> impl Dataset<Sample = usize> + 'static {
    FnDataset::new(len, |index| {
        if index % 7 == 0 {
            sleep(Duration::from_micros((index % 5) as u64 * 200));
        }
        Ok(index)
    })
}

/// How long a test waits for an event on a busy machine before it counts as a hang.
const HANG: Duration = Duration::from_secs(600);

fn wait_until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < HANG, "the condition never came true");
        sleep(Duration::from_millis(1));
    }
}

fn batches<B: Send + 'static>(loader: &DataLoader<B>, epoch: u64) -> Vec<B> {
    loader.epoch(epoch).collect::<Result<_, _>>().unwrap()
}

#[test]
fn the_order_is_the_same_for_any_number_of_workers() -> Result<(), DataError> {
    let _alone = alone();
    let loader = |workers| {
        DataLoader::builder(uneven(203))
            .batch_size(8)
            .shuffle(true)
            .seed(3)
            .num_workers(workers)
            .collate(listed)
            .build()
    };
    let expected = batches(&loader(0)?, 5);
    let mut seen: Vec<usize> = expected.concat();
    seen.sort_unstable();
    assert_eq!(seen, (0..203).collect::<Vec<_>>());
    for workers in WORKERS {
        assert_eq!(batches(&loader(workers)?, 5), expected, "{workers} workers");
        assert_ne!(batches(&loader(workers)?, 6), expected, "{workers} workers");
    }
    Ok(())
}

#[test]
fn each_iteration_is_a_new_epoch() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let mut loader =
            DataLoader::builder(uneven(50)).batch_size(4).shuffle(true).num_workers(workers).collate(listed).build()?;
        let first: Vec<_> = loader.iter().collect::<Result<_, _>>()?;
        let second: Vec<_> = (&loader).into_iter().collect::<Result<_, _>>()?;
        let third: Vec<_> = (&mut loader).into_iter().collect::<Result<_, _>>()?;
        assert_eq!([&first, &second, &third], [0, 1, 2].map(|epoch| batches(&loader, epoch)).each_ref());
        loader.set_epoch(1);
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?, second);
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?, third);
    }
    Ok(())
}

#[test]
fn incomplete_batches_are_kept_or_dropped() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        for (drop_last, sizes) in [(false, vec![4, 4, 2]), (true, vec![4, 4])] {
            let loader = DataLoader::builder(uneven(10))
                .batch_size(4)
                .num_workers(workers)
                .drop_last(drop_last)
                .collate(listed)
                .build()?;
            assert_eq!(loader.len(), Some(sizes.len()));
            assert_eq!(batches(&loader, 0).iter().map(Vec::len).collect::<Vec<_>>(), sizes);
        }
    }
    Ok(())
}

#[test]
fn an_error_takes_its_batchs_place_and_the_loader_stays_usable() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let broken = Arc::new(AtomicUsize::new(17));
        let seen = broken.clone();
        let dataset = FnDataset::new(40, move |index| match index == seen.load(SeqCst) {
            true => Err(DataError::other("cosmic ray")),
            false => Ok(index),
        });
        let loader = DataLoader::builder(dataset).batch_size(4).num_workers(workers).collate(listed).build()?;
        let mut epoch = loader.iter();
        for batch in 0..4 {
            assert_eq!(epoch.next().unwrap()?, (batch * 4..batch * 4 + 4).collect::<Vec<_>>());
        }
        let error = epoch.next().unwrap().unwrap_err();
        assert_eq!((error.index(), error.to_string().as_str()), (Some(17), "sample 17: cosmic ray"));
        assert!(matches!(error.innermost(), DataError::Other(_)));
        assert!(epoch.next().is_none() && epoch.next().is_none());
        broken.store(usize::MAX, SeqCst);
        assert_eq!(loader.iter().count(), 10, "{workers} workers");
    }
    Ok(())
}

#[test]
fn panics_become_errors_with_their_place() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let dataset = FnDataset::new(40, |index| match index {
            21 => panic!("sample {index} explodes"),
            _ => Ok(index),
        });
        let loader = DataLoader::builder(dataset).batch_size(4).num_workers(workers).collate(listed).build()?;
        let outcomes: Vec<_> = loader.iter().collect();
        assert_eq!(outcomes.len(), 6);
        assert!(matches!(
            &outcomes[5],
            Err(DataError::WorkerPanicked { index: 21, message, .. }) if message == "sample 21 explodes"
        ));

        let explode = |samples: Vec<usize>| match samples[0] {
            8 => std::panic::panic_any(samples),
            _ => Ok(samples),
        };
        let loader = DataLoader::builder(uneven(40)).batch_size(4).num_workers(workers).collate(explode).build()?;
        let outcomes: Vec<_> = loader.iter().collect();
        assert!(matches!(outcomes.last(), Some(Err(DataError::CollatePanicked { batch: 2, .. }))));
        assert_eq!(outcomes.len(), 3, "{workers} workers");
    }
    Ok(())
}

#[test]
fn dropping_an_epoch_joins_its_threads_at_once() -> Result<(), DataError> {
    let _alone = alone();
    // A worker would need five minutes or more for a batch.
    const BATCH: usize = 300_000;
    let (reads, made) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (counter, finished) = (reads.clone(), made.clone());
    let slow = Arc::new(FnDataset::new(3 * BATCH, move |index| {
        counter.fetch_add(1, SeqCst);
        sleep(Duration::from_millis(1));
        Ok(index)
    }));
    let collate = move |samples: Vec<usize>| {
        finished.fetch_add(1, SeqCst);
        Ok(samples)
    };
    let loader = DataLoader::builder(slow.clone()).batch_size(BATCH).num_workers(3).collate(collate).build()?;
    for _ in 0..10 {
        let epoch = loader.iter();
        let before = reads.load(SeqCst);
        // A thread has its name only once it runs.
        wait_until(|| loader_threads() == 3 && reads.load(SeqCst) > before);
        drop(epoch);
        assert_eq!(made.load(SeqCst), 0, "a worker finished its batch before it stopped");
    }
    // The kernel may list a joined thread for a moment longer.
    wait_until(|| loader_threads() == 0);
    drop(loader);
    assert_eq!(Arc::strong_count(&slow), 1);
    Ok(())
}

fn loader_threads() -> usize {
    threads("dataload-")
}

/// How many threads of this process have names that begin so.
#[cfg(target_os = "linux")]
fn threads(name: &str) -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok())
        .filter(|found| found.starts_with(name))
        .count()
}

#[test]
fn an_epoch_outlives_its_loader_and_begins_before_it_is_asked() -> Result<(), DataError> {
    let _alone = alone();
    // Counts of samples read and of batches asked for, and the most samples that were read ahead.
    let (reads, asked, ahead) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(0));
    let counts = Arc::new((reads, asked, ahead));
    let seen = counts.clone();
    let dataset = FnDataset::new(1000, move |index| {
        let (reads, asked, ahead) = &*seen;
        let read = reads.fetch_add(1, SeqCst) + 1;
        ahead.fetch_max(read.saturating_sub(asked.load(SeqCst) * 10), SeqCst);
        Ok(index)
    });
    let loader =
        DataLoader::builder(dataset).batch_size(10).num_workers(2).prefetch_factor(3).collate(listed).build()?;
    let mut epoch = loader.iter();
    // A worker counts what it has read before it sees how far ahead it is.
    wait_until(|| counts.2.load(SeqCst) >= 60);
    drop(loader);
    assert_eq!(epoch.size_hint(), (0, Some(100)));
    let mut samples = 0;
    loop {
        counts.1.fetch_add(1, SeqCst);
        let Some(batch) = epoch.next() else { break };
        samples += batch?.len();
    }
    assert_eq!(samples, 1000);
    assert_eq!(counts.2.load(SeqCst), 60, "num_workers * prefetch_factor batches ahead, and no more");
    Ok(())
}

#[test]
fn empty_datasets_and_bad_options() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = || DataLoader::builder(uneven(0)).batch_size(4).num_workers(workers);
        let loader = builder().shuffle(true).collate(listed).build()?;
        assert!(loader.is_empty() && loader.iter().next().is_none());
    }
    let refused = |result: Result<DataLoader<_>, DataError>| match result {
        Err(DataError::InvalidOption { option, .. }) => option,
        other => panic!("expected an invalid option, got {other:?}"),
    };
    let builder = || DataLoader::builder(FnDataset::new(9, Ok)).collate(listed::<usize>);
    assert_eq!(refused(builder().batch_size(0).build()), "batch_size");
    assert_eq!(refused(builder().num_workers(usize::MAX).build()), "num_workers");
    assert_eq!(refused(builder().prefetch_factor(0).build()), "prefetch_factor");
    assert_eq!(refused(builder().shuffle(true).sampler(SequentialSampler::new(9)).build()), "sampler");
    assert_eq!(refused(builder().batch_size(2).batch_sampler(Fixed).build()), "batch_sampler");
    let absurd = builder().num_workers(2).prefetch_factor(usize::MAX).build()?;
    assert_eq!(absurd.iter().count(), 9);
    Ok(())
}

struct Fixed;

impl BatchSampler for Fixed {
    fn len(&self) -> usize {
        2
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        [vec![epoch as usize], vec![1, 1, 2]].into_iter().collect()
    }
}

struct Far;

impl Sampler for Far {
    fn len(&self) -> usize {
        3
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        vec![0, 99, 1]
    }
}

#[test]
fn custom_samplers_are_followed_and_checked() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = || DataLoader::builder(uneven(9)).num_workers(workers).collate(listed);
        assert_eq!(batches(&builder().batch_sampler(Fixed).build()?, 4), [vec![4], vec![1, 1, 2]]);
        let outcomes: Vec<_> = builder().sampler(Far).build()?.iter().collect();
        assert_eq!(outcomes.len(), 2);
        let error = outcomes[1].as_ref().unwrap_err();
        assert!(matches!(error.innermost(), DataError::IndexOutOfRange { index: 99, len: 9 }), "{error}");
    }
    Ok(())
}
