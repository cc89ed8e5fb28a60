//! Threads that read samples ahead of the workers.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{current, sleep};
use std::time::Duration;

use overdrive_core::Stateful as _;
use overdrive_dataload::{
    BatchSamples, Collate, DataError, DataLoader, Dataset, FnDataset, OnDevice, OnError, RandomSampler, Stack,
    TensorDataset,
};
use tch::{Device, Tensor};

use super::{WORKERS, alone, listed, loader_threads, threads, wait_until};

const PATIENCE: Duration = Duration::from_secs(120);

/// Samples that are given once so many of them are being read.
struct Together {
    samples: usize,
    at_once: usize,
    reading: Mutex<usize>,
    changed: Condvar,
}

impl Dataset for Together {
    type Sample = usize;

    fn len(&self) -> usize {
        self.samples
    }

    fn get(&self, index: usize) -> Result<usize, DataError> {
        let mut reading = self.reading.lock().unwrap();
        *reading += 1;
        self.changed.notify_all();
        let (_reading, late) =
            self.changed.wait_timeout_while(reading, PATIENCE, |reading| *reading < self.at_once).unwrap();
        if late.timed_out() { Err(DataError::other("they are read one by one")) } else { Ok(index) }
    }
}

#[test]
fn more_samples_are_read_at_once_than_there_are_workers() {
    let _alone = alone();
    for workers in [0, 1, 2] {
        let together = Together { samples: 40, at_once: 8, reading: Mutex::default(), changed: Condvar::new() };
        let builder = DataLoader::builder(together).batch_size(4).readers(8).num_workers(workers);
        let batches: Vec<_> = builder.collate(listed).build().unwrap().iter().collect::<Result<_, _>>().unwrap();
        assert_eq!(batches.concat(), (0..40).collect::<Vec<_>>());
    }
    wait_until(|| loader_threads() == 0);
}

/// Sample 3 is bad, and sample 17 panics where it is told to.
fn flawed(panics: bool) -> impl Dataset<Sample = usize> {
    FnDataset::new(23, move |index| match index {
        3 => Err(DataError::other("torn")),
        17 if panics => panic!("burnt"),
        _ => Ok(index),
    })
}

#[test]
fn batches_faults_and_errors_are_those_of_workers_that_read_themselves() {
    let _alone = alone();
    let epochs = |readers: usize, workers: usize, on_error: OnError, panics: bool| {
        let builder = DataLoader::builder(flawed(panics)).batch_size(4).shuffle(true).seed(5).on_error(on_error);
        let loader = builder.readers(readers).num_workers(workers).collate(listed).build().unwrap();
        let epoch = || loader.iter().map(|batch| batch.map_err(|error| error.to_string())).collect::<Vec<_>>();
        let batches = [epoch(), epoch()];
        let mut faults: Vec<_> = loader.faults().into_iter().map(|it| (it.epoch, it.index, it.error)).collect();
        faults.sort();
        (batches, faults)
    };
    for on_error in [OnError::Skip, OnError::Replace] {
        let expected = epochs(0, 0, on_error, false);
        assert_eq!(expected.1.len(), 2);
        for workers in WORKERS {
            for readers in [1, 3, 30] {
                assert_eq!(epochs(readers, workers, on_error, false), expected, "{workers} workers, {readers} readers");
            }
        }
    }
    let expected = epochs(0, 0, OnError::Fail, true);
    for readers in [1, 3, 30] {
        assert_eq!(epochs(readers, 0, OnError::Fail, true), expected);
    }
    // Which of two bad batches is there first depends on the threads; a panic is one of the dataset's.
    let skipped = epochs(3, 2, OnError::Skip, true).0;
    let error = skipped.iter().flatten().find_map(|batch| batch.as_ref().err()).unwrap();
    assert!(error.contains("burnt"), "{error}");
}

#[test]
fn each_sample_is_read_once_and_few_are_held() {
    let _alone = alone();
    let (begun, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let most = Arc::new(AtomicUsize::new(0));
    let (counts, taken, held) = (begun.clone(), done.clone(), most.clone());
    let samples = FnDataset::new(400, move |index| {
        let ahead = counts.fetch_add(1, SeqCst) + 1 - taken.load(SeqCst);
        held.fetch_max(ahead, SeqCst);
        Ok(index)
    });
    let builder = DataLoader::builder(samples).batch_size(5).readers(6).num_workers(2).prefetch_factor(1);
    let collate = move |samples: Vec<usize>| {
        done.fetch_add(samples.len(), SeqCst);
        Ok(samples)
    };
    let loader = builder.collate(collate).build().unwrap();
    assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>().unwrap().concat(), (0..400).collect::<Vec<_>>());
    assert_eq!(begun.load(SeqCst), 400);
    // Two batches and one for each reader; and the batches that the workers are making of samples that they have taken.
    assert!(most.load(SeqCst) <= 2 * 5 + 6 + 2 * 5, "{most:?}");
}

#[test]
fn samples_that_are_drawn_twice_and_epochs_that_go_on_are_right() {
    let _alone = alone();
    let loader = |readers: usize| {
        let order = RandomSampler::new(10, 3).replacement(true).num_samples(60).unwrap();
        let builder = DataLoader::builder(FnDataset::new(10, Ok)).batch_size(7).sampler(order);
        builder.readers(readers).num_workers(2).collate(listed).build().unwrap()
    };
    let whole: Vec<Vec<usize>> = loader(0).iter().collect::<Result<_, _>>().unwrap();
    let first = loader(5);
    let mut batches: Vec<_> = first.iter().take(3).collect::<Result<_, _>>().unwrap();
    let mut second = loader(4);
    second.load_state_dict(&first.state_dict().unwrap()).unwrap();
    batches.extend(second.iter().collect::<Result<Vec<_>, _>>().unwrap());
    assert_eq!(batches, whole);
    wait_until(|| loader_threads() == 0);
}

#[test]
fn a_sample_that_workers_wait_for_at_the_same_time_is_read_once_for_each() {
    let _alone = alone();
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = reads.clone();
    let one = FnDataset::new(1, move |index| {
        counted.fetch_add(1, SeqCst);
        sleep(Duration::from_millis(2));
        Ok(index)
    });
    let order = RandomSampler::new(1, 0).replacement(true).num_samples(200).unwrap();
    let loader = DataLoader::builder(one).sampler(order).readers(1).num_workers(4).collate(listed).build().unwrap();
    let epoch = loader.iter();
    assert_eq!(epoch.map(|batch| batch.unwrap().len()).sum::<usize>(), 200);
    wait_until(|| loader_threads() == 0);
    assert_eq!(reads.load(SeqCst), 200);
}

fn is_reader(number: &str) -> bool {
    current().name().is_some_and(|name| name.starts_with("dataload-reader-") && name.ends_with(number))
}

#[test]
fn a_reader_that_does_not_come_back_keeps_no_other_thread() {
    let _alone = alone();
    let (is_stuck, is_open) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (stuck, open) = (is_stuck.clone(), is_open.clone());
    let samples = FnDataset::new(12, move |index| {
        if is_reader("-0") {
            stuck.store(1, SeqCst);
            wait_until(|| open.load(SeqCst) == 1);
        }
        wait_until(|| stuck.load(SeqCst) == 1);
        Ok(index)
    });
    let builder = DataLoader::builder(samples).batch_size(4).readers(3).num_workers(2);
    let loader = builder.collate(listed).build().unwrap();
    let epoch = loader.iter();
    // One of the three batches waits for the sample that the reader does not give.
    wait_until(|| is_stuck.load(SeqCst) == 1 && epoch.ready() == 2);
    drop(epoch);
    wait_until(|| loader_threads() == 1);
    assert_eq!(loader.stats().detached, 1);
    is_open.store(1, SeqCst);
    wait_until(|| loader_threads() == 0);
}

/// Takes only the first sample of each batch.
struct First;

impl Collate<usize> for First {
    type Batch = usize;

    fn collate(&self, samples: Vec<usize>) -> Result<usize, DataError> {
        samples.first().copied().ok_or(DataError::EmptyBatch)
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, usize>) -> Result<usize, DataError> {
        Ok(samples.next()?.ok_or(DataError::EmptyBatch)?.sample)
    }
}

#[test]
fn samples_that_the_collate_function_leaves_do_not_fill_the_readers() {
    let _alone = alone();
    let begun = Arc::new(AtomicUsize::new(0));
    let counted = begun.clone();
    let samples = FnDataset::new(200, move |index| {
        match is_reader("") {
            true => _ = counted.fetch_add(1, SeqCst),
            // Only once the readers have read as many as they may hold.
            false => wait_until(|| counted.load(SeqCst) >= 2 * 2 + 3),
        }
        Ok(index)
    });
    let builder = DataLoader::builder(samples).batch_size(2).readers(3).num_workers(1);
    let loader = builder.collate(First).build().unwrap();
    let mut epoch = loader.iter();
    let taken: Vec<_> = epoch.by_ref().take(100).collect::<Result<_, _>>().unwrap();
    assert_eq!(taken, (0..200).step_by(2).collect::<Vec<_>>());
    // The epoch is not over yet for its owner, and the readers have nothing left to do.
    wait_until(|| loader_threads() == 0);
    assert!(epoch.next().is_none());
}

#[test]
fn libtorch_operators_stay_on_the_readers_threads() {
    let _alone = alone();
    let before = tch::get_num_threads();
    tch::set_num_threads(2);
    let together = Together { samples: 16, at_once: 4, reading: Mutex::default(), changed: Condvar::new() };
    let threads = together.map(|_| Ok(tch::get_num_threads()));
    let loader = DataLoader::builder(threads).batch_size(4).readers(4).num_workers(1).collate(listed).build().unwrap();
    let threads = loader.iter().collect::<Result<Vec<_>, _>>().unwrap().concat();
    tch::set_num_threads(before);
    assert_eq!(threads, [1; 16]);
}

#[test]
fn readers_that_cannot_be_are_refused() {
    let samples = || DataLoader::builder(FnDataset::new(4, |index| Ok(Tensor::from(index as i64))));
    let error = samples().readers(1025).collate(Stack).build().map(drop).unwrap_err().to_string();
    assert!(error.contains("readers") && error.contains("1024"), "{error}");
    let kept = samples().readers(2).collate(Stack).cache(OnDevice(Device::Cpu)).unwrap();
    let error = kept.build().map(drop).unwrap_err().to_string();
    assert!(error.contains("readers") && error.contains("OnDevice"), "{error}");
    let rows = TensorDataset::new(Tensor::from_slice(&[1, 2, 3])).unwrap().loader().readers(2);
    let error = rows.build().map(drop).unwrap_err().to_string();
    assert!(error.contains("readers") && error.contains("TensorDataset::loader"), "{error}");
}

#[test]
fn a_sample_that_the_collate_function_leaves_is_not_waited_for() {
    let _alone = alone();
    let (is_stuck, is_open) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (stuck, open) = (is_stuck.clone(), is_open.clone());
    let samples = FnDataset::new(8, move |index| {
        if index == 1 {
            stuck.store(1, SeqCst);
            wait_until(|| open.load(SeqCst) == 1);
        }
        // A reader has begun the one that is left.
        wait_until(|| stuck.load(SeqCst) == 1);
        Ok(index)
    });
    let builder = DataLoader::builder(samples).batch_size(2).readers(3).num_workers(1).timeout(Duration::from_secs(20));
    let loader = builder.collate(First).build().unwrap();
    let mut epoch = loader.iter();
    assert_eq!(epoch.by_ref().take(4).collect::<Result<Vec<_>, _>>().unwrap(), [0, 2, 4, 6]);
    is_open.store(1, SeqCst);
    drop(epoch);
    wait_until(|| loader_threads() == 0);
}

fn reader_threads() -> usize {
    // The kernel keeps fifteen characters of a name.
    threads("dataload-reader")
}

/// A sample that is counted as long as it is held.
type Counted = Arc<()>;

/// So many samples, the first of each two but 0 bad, and how many are held.
fn every_other_is_bad(samples: usize, good: std::ops::Range<usize>) -> (impl Dataset<Sample = Counted>, Counted) {
    let counter = Counted::default();
    let held = counter.clone();
    let samples = FnDataset::new(samples, move |index| match index % 2 == 0 && !good.contains(&index) {
        true => Err(DataError::other("torn")),
        false => Ok(held.clone()),
    });
    (samples, counter)
}

#[test]
fn batches_that_failed_hold_no_samples() {
    let _alone = alone();
    // One worker shares no batch, three share the first and the last one.
    for workers in [1, 3] {
        let (samples, counter) = every_other_is_bad(82, 0..2);
        // All batches may be made before one is taken.
        let builder = DataLoader::builder(samples).batch_size(2).readers(3).num_workers(workers).prefetch_factor(41);
        let loader = builder.collate(|samples: Vec<Counted>| Ok(samples.len())).build().unwrap();
        let mut epoch = loader.iter();
        // The readers do not stop because they hold the rests of batches that failed, and nothing is left of these.
        wait_until(|| epoch.ready() == 41 && reader_threads() == 0);
        // One is in the dataset.
        assert_eq!(Arc::strong_count(&counter), 2, "{workers} workers");
        assert_eq!(epoch.next().unwrap().unwrap(), 2);
        assert!(epoch.next().unwrap().unwrap_err().to_string().contains("torn"));
    }
}
