//! Workers share the first batch of an epoch, and the last ones of a dataset.

use std::sync::{Condvar, Mutex};
use std::time::Duration;

use overdrive_core::Stateful;
use overdrive_dataload::{DataError, DataLoader, Dataset, FnStream, IterableDataset, OnError};

const WORKERS: usize = 4;
const PATIENCE: Duration = Duration::from_secs(120);

/// Samples of which `WORKERS` from some index on are given once all of them are being read.
struct Meeting {
    samples: usize,
    first: usize,
    arrived: Mutex<usize>,
    all: Condvar,
}

impl Dataset for Meeting {
    type Sample = usize;

    fn len(&self) -> usize {
        self.samples
    }

    fn get(&self, index: usize) -> Result<usize, DataError> {
        self.meet(index)
    }
}

impl Meeting {
    fn meet(&self, index: usize) -> Result<usize, DataError> {
        if (self.first..self.first + WORKERS).contains(&index) {
            let mut arrived = self.arrived.lock().unwrap();
            *arrived += 1;
            self.all.notify_all();
            let (_arrived, late) =
                self.all.wait_timeout_while(arrived, PATIENCE, |arrived| *arrived < WORKERS).unwrap();
            if late.timed_out() {
                return Err(DataError::other("the samples of the batch are not read together"));
            }
        }
        Ok(index)
    }
}

fn listed(samples: Vec<usize>) -> Result<Vec<usize>, DataError> {
    Ok(samples)
}

/// Workers that decode the first batch of a stream meet, also where it is the only batch.
#[test]
fn workers_decode_the_samples_of_a_streams_first_batch_together() -> Result<(), DataError> {
    for (batches, prefetch) in [(1, 2), (8, 1), (8, 2)] {
        for interleave in [1, 3] {
            let samples = batches * WORKERS;
            let meeting = Meeting { samples, first: 0, arrived: Mutex::default(), all: Condvar::new() };
            let stream = FnStream::new(1, move |_| Ok((0..samples).map(Ok))).map(move |index| meeting.meet(index));
            let builder = DataLoader::stream(stream).batch_size(WORKERS).interleave(interleave).num_workers(WORKERS);
            let loader = builder.prefetch_factor(prefetch).collate(listed).build()?;
            let read: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
            assert_eq!(read.concat(), (0..samples).collect::<Vec<_>>(), "{batches} batches");
        }
    }
    Ok(())
}

/// The batches of four workers, of which those with samples `first` to `first + WORKERS` are read together.
fn meeting(first: usize, batches: usize, prefetch: usize) -> Result<Vec<Vec<usize>>, DataError> {
    let meeting = Meeting { samples: batches * WORKERS, first, arrived: Mutex::default(), all: Condvar::new() };
    let builder = DataLoader::builder(meeting).batch_size(WORKERS);
    let loader = builder.collate(listed).num_workers(WORKERS).prefetch_factor(prefetch).build()?;
    loader.iter().collect()
}

#[test]
fn workers_read_the_samples_of_the_first_batch_together() -> Result<(), DataError> {
    for prefetch in [1, 2] {
        assert_eq!(meeting(0, 8, prefetch)?.concat(), (0..8 * WORKERS).collect::<Vec<_>>());
    }
    Ok(())
}

/// After the first batch each of four workers makes the same number alone; the rest is shared.
#[test]
fn workers_read_the_samples_of_the_last_batches_together() -> Result<(), DataError> {
    for prefetch in [1, 2] {
        for (batches, shared) in [(6, 5), (7, 5), (7, 6), (8, 5), (8, 7)] {
            let read = meeting(shared * WORKERS, batches, prefetch)?;
            assert_eq!(read.concat(), (0..batches * WORKERS).collect::<Vec<_>>());
        }
    }
    Ok(())
}

/// Sample 5 is bad.
struct Flawed;

impl Dataset for Flawed {
    type Sample = usize;

    fn len(&self) -> usize {
        40
    }

    fn get(&self, index: usize) -> Result<usize, DataError> {
        match index {
            5 => Err(DataError::other("planted")),
            index => Ok(index),
        }
    }
}

#[test]
fn faults_of_a_shared_batch_are_those_of_one_worker() -> Result<(), DataError> {
    for policy in [OnError::Skip, OnError::Replace] {
        let run = |workers| {
            let builder = DataLoader::builder(Flawed).batch_size(10).seed(3).shuffle(true).on_error(policy);
            let loader = builder.collate(listed).num_workers(workers).build()?;
            let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
            let faults: Vec<u64> = loader.faults().iter().map(|fault| fault.index).collect();
            Ok::<_, DataError>((batches, faults))
        };
        let alone = run(1)?;
        assert_eq!(alone.1, [5]);
        for workers in [2, 4] {
            assert_eq!(run(workers)?, alone, "{policy:?}, {workers} workers");
        }
    }
    let loader = DataLoader::builder(Flawed).batch_size(10).collate(listed).num_workers(4).build()?;
    let error = loader.iter().next().unwrap().unwrap_err();
    assert_eq!(error.index(), Some(5), "{error}");
    Ok(())
}

/// A panic in another worker is that of the sample.
#[test]
fn a_panic_in_a_shared_batch_names_the_sample() -> Result<(), DataError> {
    let panicking = Flawed.map(|index| if index == 7 { panic!("planted") } else { Ok(index) });
    let loader = DataLoader::builder(panicking).batch_size(10).on_error(OnError::Skip);
    let loader = loader.collate(listed).num_workers(4).build()?;
    let error = loader.iter().next().unwrap().unwrap_err();
    assert!(matches!(&error, DataError::WorkerPanicked { index: 7, message, .. } if message == "planted"), "{error}");
    Ok(())
}

/// A stream whose samples 5 and 7 are bad and panics, each where it is decoded.
fn flawed(panics: bool) -> impl IterableDataset<Sample = usize> + 'static {
    FnStream::new(4, |shard| Ok((0..10).map(move |item| Ok(4 * item + shard)))).map(move |index| match index {
        5 => Err(DataError::other("planted")),
        7 if panics => panic!("planted"),
        index => Ok(index),
    })
}

#[test]
fn a_streams_shared_batch_is_that_of_one_worker() -> Result<(), DataError> {
    let build = |workers, on_error, panics| {
        let builder = DataLoader::stream(flawed(panics)).batch_size(10).on_error(on_error).num_workers(workers);
        builder.collate(listed).build()
    };
    let run = |workers| {
        let loader = build(workers, OnError::Skip, false)?;
        let mut epoch = loader.iter();
        let first = epoch.next().unwrap()?;
        let state = loader.state_dict().unwrap();
        let left: Vec<Vec<usize>> = epoch.collect::<Result<_, _>>()?;
        let mut resumed = build(workers, OnError::Skip, false)?;
        resumed.load_state_dict(&state).unwrap();
        assert_eq!(resumed.iter().collect::<Result<Vec<_>, _>>()?, left, "{workers} workers");
        let faults: Vec<_> = loader.faults().iter().map(|fault| (fault.index, fault.error.clone())).collect();
        let stats = loader.stats();
        Ok::<_, DataError>((first, left, faults, stats.samples, stats.batches, stats.faults))
    };
    let alone = run(1)?;
    assert_eq!((alone.0.len(), alone.2.len()), (9, 1));
    for workers in [2, 4] {
        assert_eq!(run(workers)?, alone, "{workers} workers");
    }
    for (on_error, panics, name) in
        [(OnError::Fail, false, "shard 1, item 1"), (OnError::Skip, true, "shard 3, item 1")]
    {
        let texts = [1, 4].map(|workers| {
            let loader = build(workers, on_error, panics).unwrap();
            loader.iter().next().unwrap().unwrap_err().to_string()
        });
        assert!(texts[0] == texts[1] && texts[0].contains(name) && texts[0].contains("planted"), "{texts:?}");
    }
    Ok(())
}
