//! Epochs that are dropped, or time out, while they seek to the position where they resume, or in a sample that never
//! ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;

use overdrive_core::Stateful;
use overdrive_dataload::{DataError, DataLoader, FnDataset, FnStream};

use crate::{alone, listed, loader_threads, wait_until};

/// Items before the saved position, at a millisecond each: five minutes.
const FAR: usize = 300_000;

/// Longer than any batch takes without seeking, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(600);

type Numbers = DataLoader<Vec<usize>>;

/// A loader of an endless stream, and a count of items drawn.
fn loader(pause: Duration, timeout: Duration) -> Result<(Numbers, Arc<AtomicUsize>), DataError> {
    let drawn = Arc::new(AtomicUsize::new(0));
    let counter = drawn.clone();
    let stream = FnStream::new(1, move |_| {
        let counter = counter.clone();
        Ok((0..).map(move |i| {
            counter.fetch_add(1, SeqCst);
            if !pause.is_zero() {
                sleep(pause);
            }
            Ok(i)
        }))
    });
    let builder = DataLoader::stream(stream).batch_size(FAR / 4).num_workers(2).timeout(timeout);
    Ok((builder.collate(listed).build()?, drawn))
}

/// The same, far into the stream, with items that take a millisecond each.
fn resumed(timeout: Duration) -> Result<(Numbers, Arc<AtomicUsize>), Box<dyn std::error::Error>> {
    let (before, _) = loader(Duration::ZERO, PATIENCE)?;
    assert_eq!(before.iter().take(4).map(|batch| batch.unwrap().len()).sum::<usize>(), FAR);
    let (mut after, drawn) = loader(Duration::from_millis(1), timeout)?;
    after.load_state_dict(&before.state_dict()?)?;
    Ok((after, drawn))
}

#[test]
fn dropping_an_epoch_that_seeks_joins_its_threads() -> Result<(), Box<dyn std::error::Error>> {
    let _alone = alone();
    let (loader, drawn) = resumed(PATIENCE)?;
    let epoch = loader.iter();
    wait_until(|| drawn.load(SeqCst) > 10);
    drop(epoch);
    let then = drawn.load(SeqCst);
    assert!(then < FAR, "seeking was not cancelled");
    wait_until(|| loader_threads() == 0);
    assert_eq!(drawn.load(SeqCst), then, "a thread was left behind");
    Ok(())
}

#[test]
fn a_timeout_while_seeking_stops_the_thread() -> Result<(), Box<dyn std::error::Error>> {
    let _alone = alone();
    let (loader, drawn) = resumed(Duration::from_millis(50))?;
    let mut epoch = loader.iter();
    let error = epoch.next().unwrap().unwrap_err();
    assert!(matches!(error, DataError::Timeout { batch: 0, .. }), "{error}");
    wait_until(|| loader_threads() == 0);
    assert!(drawn.load(SeqCst) < FAR, "seeking was not cancelled");
    Ok(())
}

#[test]
fn dropping_an_epoch_gives_up_a_worker_in_a_sample_that_never_ends() -> Result<(), DataError> {
    let _alone = alone();
    let flags = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
    let seen = flags.clone();
    let dataset = FnDataset::new(8, move |index| {
        let (entered, released) = &*seen;
        entered.fetch_or(index == 5, SeqCst);
        while index == 5 && !released.load(SeqCst) {
            sleep(Duration::from_millis(1));
        }
        Ok(index)
    });
    let loader =
        DataLoader::builder(dataset).batch_size(2).num_workers(1).prefetch_factor(4).collate(listed).build()?;
    let epoch = loader.iter();
    wait_until(|| flags.0.load(SeqCst));
    // On a thread of its own, so that a drop that never returns fails this test in the end.
    let dropping = std::thread::spawn(move || drop(epoch));
    wait_until(|| dropping.is_finished());
    let stats = loader.stats();
    assert_eq!((stats.detached, loader_threads()), (1, 1));
    assert!(stats.to_string().contains("did not stop with their epoch: 1"), "{stats}");
    flags.1.store(true, SeqCst);
    assert_eq!(loader.iter().count(), 4, "the loader stays usable");
    wait_until(|| loader_threads() == 0);
    loader.reset_stats();
    assert_eq!(loader.stats().detached, 0);
    Ok(())
}
