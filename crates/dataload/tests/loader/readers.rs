//! Threads that read samples ahead of the workers.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use overdrive_core::Stateful as _;
use overdrive_dataload::{DataError, DataLoader, Dataset, FnDataset, OnDevice, OnError, RandomSampler, Stack};
use tch::{Device, Tensor};

use super::{WORKERS, alone, listed, loader_threads, wait_until};

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
fn readers_that_cannot_be_are_refused() {
    let samples = || DataLoader::builder(FnDataset::new(4, |index| Ok(Tensor::from(index as i64))));
    let error = samples().readers(1025).collate(Stack).build().map(drop).unwrap_err().to_string();
    assert!(error.contains("readers") && error.contains("1024"), "{error}");
    let kept = samples().readers(2).collate(Stack).cache(OnDevice(Device::Cpu)).unwrap();
    let error = kept.build().map(drop).unwrap_err().to_string();
    assert!(error.contains("readers") && error.contains("OnDevice"), "{error}");
}
