//! Every rank makes the same number of steps despite bad samples on one of them: otherwise the other ranks would wait
//! forever.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::sleep;
use std::time::Duration;

use overdrive_dataload::{
    BatchSamples, Collate, DataError, DataLoader, DistributedBatches, DistributedSampler, FixedBatches, FnDataset,
    FnStream, IterableDataset, OnError, SequentialSampler,
};

use crate::{WORKERS, alone, listed, wait_until};

/// The bad samples, all of rank 1 of 3: a whole batch of four, one in the middle, and the whole last batch.
fn is_bad(index: usize) -> bool {
    index % 3 == 1 && matches!(index / 3, 4..8 | 10 | 16..)
}

fn readable(index: usize) -> Result<usize, DataError> {
    if is_bad(index) { Err(DataError::other("worn out")) } else { Ok(index) }
}

/// A collate function that rejects bad samples after reading them.
struct Picky;

impl Collate<usize> for Picky {
    type Batch = Vec<usize>;

    fn collate(&self, _: Vec<usize>) -> Result<Vec<usize>, DataError> {
        unreachable!("the loader calls the other form")
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, usize>) -> Result<Vec<usize>, DataError> {
        let mut good = Vec::new();
        while let Some(drawn) = samples.next()? {
            match readable(drawn.sample) {
                Ok(sample) => good.push(sample),
                Err(error) => samples.reject(error)?,
            }
        }
        if good.is_empty() { Err(DataError::EmptyBatch) } else { Ok(good) }
    }
}

/// The batches of each of three ranks over 54 samples.
fn ranks(policy: OnError, drop_last: bool, workers: usize, picky: bool) -> Result<Vec<Vec<Vec<usize>>>, DataError> {
    let rank = |rank| -> Result<Vec<Vec<usize>>, DataError> {
        let sampler = DistributedSampler::new(SequentialSampler::new(54), 3, rank)?;
        let get = if picky { Ok } else { readable };
        let builder = DataLoader::builder(FnDataset::new(54, get)).sampler(sampler).batch_size(4);
        let builder = builder.drop_last(drop_last).num_workers(workers).on_error(policy);
        let loader = if picky { builder.collate(Picky).build()? } else { builder.collate(listed).build()? };
        let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_eq!(Some(batches.len()), loader.len());
        Ok(batches)
    };
    (0..3).map(rank).collect()
}

#[test]
fn ranks_over_a_dataset_make_equal_steps_whatever_is_bad() -> Result<(), DataError> {
    let _alone = alone();
    for (policy, drop_last, picky) in [
        (OnError::Skip, false, false),
        (OnError::Skip, true, false),
        (OnError::Skip, false, true),
        (OnError::Skip, true, true),
        (OnError::Replace, false, false),
        (OnError::Replace, true, true),
    ] {
        let expected = ranks(policy, drop_last, 0, picky)?;
        let steps = if drop_last { 4 } else { 5 };
        for batches in &expected {
            assert_eq!(batches.len(), steps, "{policy:?} drop_last {drop_last} picky {picky}");
            assert!(batches.iter().all(|batch| !batch.is_empty() && batch.iter().all(|&index| !is_bad(index))));
        }
        if policy == OnError::Skip {
            // Bad samples make their batch smaller, but a batch that would be empty is filled up.
            let sizes: Vec<usize> = expected[1].iter().map(Vec::len).collect();
            assert_eq!(sizes, [4, 4, 3, 4, 2][..steps], "{:?}", expected[1]);
        }
        for workers in WORKERS {
            assert_eq!(ranks(policy, drop_last, workers, picky)?, expected, "{workers} workers");
        }
    }
    Ok(())
}

#[test]
fn distributed_batches_are_equally_many_on_each_rank() -> Result<(), DataError> {
    let _alone = alone();
    for split in [false, true] {
        let steps = |rank| -> Result<usize, DataError> {
            let dataset = FnDataset::new(40, |index| match index {
                4..8 => Err(DataError::other("worn out")),
                _ => Ok(index),
            });
            let batches = FixedBatches::new(SequentialSampler::new(40), 4, false)?;
            let batches = DistributedBatches::new(batches, 2, rank)?.split_batches(split);
            let builder = DataLoader::builder(dataset).batch_sampler(batches).on_error(OnError::Skip);
            builder.collate(listed).build()?.iter().try_fold(0, |steps, batch| batch.map(|_| steps + 1))
        };
        assert_eq!(steps(0)?, steps(1)?, "{split}");
    }
    Ok(())
}

#[test]
fn a_batch_that_cannot_be_filled_is_an_error_not_a_missing_step() -> Result<(), DataError> {
    let _alone = alone();
    let sampler = DistributedSampler::new(SequentialSampler::new(40), 2, 0)?;
    let bad = FnDataset::new(40, |_| Err::<usize, _>(DataError::other("all bad")));
    let builder = DataLoader::builder(bad).sampler(sampler).batch_size(4).on_error(OnError::Skip);
    let outcomes: Vec<_> = builder.collate(listed).build()?.iter().collect();
    assert!(matches!(outcomes[..], [Err(DataError::Sample { .. })]), "{outcomes:?}");
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum Where {
    Read,
    Map,
    Collate,
}

/// For four shards of 20 items: in those of rank 1 of 2, items 5 to 12 and the last one are bad.
fn stream_is_bad(number: usize) -> bool {
    number / 100 % 2 == 1 && matches!(number % 100, 5..13 | 19)
}

fn stream_steps(rank: usize, at: Where, drop_last: bool, workers: usize) -> Result<Vec<Vec<Vec<usize>>>, DataError> {
    let refuse = |number: usize, here: bool| match here && stream_is_bad(number) {
        true => Err(DataError::other("worn out")),
        false => Ok(number),
    };
    let stream =
        FnStream::new(4, move |shard| Ok((0..20).map(move |i| refuse(shard * 100 + i, matches!(at, Where::Read)))));
    let stream = stream.map(move |number| refuse(number, matches!(at, Where::Map)));
    let collate = StreamPicky(matches!(at, Where::Collate));
    let builder = DataLoader::stream(stream).batch_size(4).interleave(2).rank(rank, 2).drop_last(drop_last);
    let builder = builder.batches_per_epoch(5).num_workers(workers).on_error(OnError::Skip);
    let loader = builder.collate(collate).build()?;
    (0..6).map(|_| loader.iter().collect()).collect()
}

struct StreamPicky(bool);

impl Collate<usize> for StreamPicky {
    type Batch = Vec<usize>;

    fn collate(&self, _: Vec<usize>) -> Result<Vec<usize>, DataError> {
        unreachable!("the loader calls the other form")
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, usize>) -> Result<Vec<usize>, DataError> {
        let mut good = Vec::new();
        while let Some(drawn) = samples.next()? {
            match self.0 && stream_is_bad(drawn.sample) {
                true => samples.reject(DataError::other("worn out"))?,
                false => good.push(drawn.sample),
            }
        }
        if good.is_empty() { Err(DataError::EmptyBatch) } else { Ok(good) }
    }
}

#[test]
fn ranks_over_a_stream_make_equal_steps_whatever_is_bad() -> Result<(), DataError> {
    let _alone = alone();
    for at in [Where::Read, Where::Map, Where::Collate] {
        for drop_last in [false, true] {
            for rank in 0..2 {
                let expected = stream_steps(rank, at, drop_last, 0)?;
                assert!(expected.iter().all(|epoch| epoch.len() == 5), "{at:?}, rank {rank}: {expected:?}");
                assert!(expected.iter().flatten().flatten().all(|&number| !stream_is_bad(number)));
                for workers in [1, 2, 4] {
                    assert_eq!(stream_steps(rank, at, drop_last, workers)?, expected, "{at:?}, {workers} workers");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_stream_whose_items_are_all_refused_is_an_error_not_a_loop() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let stream =
            FnStream::new(2, |_| Ok((0..20).map(Ok))).map(|_: usize| Err::<usize, _>(DataError::other("no good")));
        let builder = DataLoader::stream(stream).batch_size(4).batches_per_epoch(5).num_workers(workers);
        let outcomes: Vec<_> = builder.on_error(OnError::Skip).collate(listed).build()?.iter().collect();
        assert!(matches!(outcomes[..], [Err(DataError::StreamEnded { batches: 5, .. })]), "{outcomes:?}");
    }
    Ok(())
}

/// 200 items that are refused, a good one that takes as long as 56 of the 200 refused ones after it, and good ones.
#[test]
fn refused_items_before_and_after_a_slow_good_one_are_not_in_a_row() -> Result<(), DataError> {
    let _alone = alone();
    let refused = Arc::new(AtomicUsize::new(0));
    let stream = FnStream::new(1, |_| Ok((0..1000).map(Ok))).map(move |item: usize| {
        if item == 200 {
            wait_until(|| refused.load(SeqCst) >= 256);
            // So that the refused ones are done before it. The outcome is the same where they are not.
            sleep(Duration::from_millis(100));
        } else if item < 401 {
            refused.fetch_add(1, SeqCst);
            return Err(DataError::other("no good"));
        }
        Ok(item)
    });
    let builder = DataLoader::stream(stream).batches_per_epoch(300).num_workers(2).prefetch_factor(128);
    let loader = builder.on_error(OnError::Skip).collate(listed).build()?;
    let found = loader.iter().collect::<Result<Vec<_>, _>>()?.concat();
    assert_eq!(found, [200].into_iter().chain(401..700).collect::<Vec<_>>());
    Ok(())
}
