//! Epochs of a stream that end early: the next one continues there, and a resumed run equals the uninterrupted one.

use std::collections::BTreeSet;

use overdrive_core::{Entry, StateDict, StateError, Stateful, take_ahead};
use overdrive_dataload::{BatchSamples, Collate, DataError, DataLoader, FnStream, IterableDataset, OnError};

use crate::{WORKERS, alone, listed};

/// Shards of different lengths, 74 samples in total.
fn shards() -> impl IterableDataset<Sample = usize> + 'static {
    FnStream::new(6, |shard| Ok((0..7 + shard * 3 % 10 + shard).map(move |i| Ok(shard * 100 + i))))
}

fn samples() -> Vec<usize> {
    shards().stream(0..6).collect::<Result<_, _>>().unwrap()
}

fn sorted(batches: &[Vec<usize>]) -> Vec<usize> {
    let mut all = batches.concat();
    all.sort_unstable();
    all
}

#[derive(Clone, Copy, Debug)]
struct Options {
    batches: Option<usize>,
    take: usize,
    workers: usize,
    shuffle: bool,
    drop_last: bool,
}

impl Options {
    /// A loader whose batches record their epoch, number and draws.
    fn build(self) -> Result<DataLoader<Seen>, DataError> {
        let builder = DataLoader::stream(shards()).batch_size(4).interleave(3).shuffle(self.shuffle).seed(5);
        let builder = builder.shuffle_buffer(if self.shuffle { 3 } else { 1 }).num_workers(self.workers);
        let builder = builder.drop_last(self.drop_last);
        let builder = match self.batches {
            Some(batches) => builder.batches_per_epoch(batches),
            None => builder,
        };
        builder.collate(Recorded).build()
    }
}

/// The epoch, the batch's number, and each sample with its draw.
type Seen = (u64, usize, Vec<(usize, u64)>);

struct Recorded;

impl Collate<usize> for Recorded {
    type Batch = Seen;

    fn collate(&self, _: Vec<usize>) -> Result<Seen, DataError> {
        unreachable!("the loader calls the other form")
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, usize>) -> Result<Seen, DataError> {
        let (epoch, batch, mut all) = (samples.epoch(), samples.batch(), Vec::new());
        while let Some(drawn) = samples.next()? {
            all.push((drawn.sample, drawn.draw()));
        }
        Ok((epoch, batch, all))
    }
}

#[test]
fn short_epochs_reach_the_end_of_every_shard() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        for fixed in [true, false] {
            let builder = DataLoader::stream(shards()).batch_size(2).interleave(3).num_workers(workers);
            let builder = if fixed { builder.batches_per_epoch(3) } else { builder };
            let loader = builder.collate(listed).build()?;
            let mut batches: Vec<Vec<usize>> = Vec::new();
            while batches.len() < samples().len() / 2 {
                let take = if fixed { usize::MAX } else { 3 };
                let epoch: Vec<Vec<usize>> = loader.iter().take(take).collect::<Result<_, _>>()?;
                assert!(!epoch.is_empty() && epoch.len() <= 3);
                batches.extend(epoch);
            }
            batches.truncate(samples().len() / 2);
            let seen: BTreeSet<usize> = batches.concat().into_iter().collect();
            // Lanes of different lengths start their next pass at different times.
            assert!(seen.len() >= if fixed { 70 } else { 74 }, "{fixed}: {seen:?}");
        }
    }
    Ok(())
}

#[test]
fn an_epoch_that_ends_early_leaves_its_rest_to_the_next_one() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let build = || DataLoader::stream(shards()).batch_size(4).interleave(3).shuffle(true).num_workers(workers);
        let whole: Vec<Vec<usize>> = build().collate(listed).build()?.iter().collect::<Result<_, _>>()?;
        let loader = build().collate(listed).build()?;
        let mut seen: Vec<Vec<usize>> = loader.iter().take(5).collect::<Result<_, _>>()?;
        seen.extend(loader.iter().take(2).collect::<Result<Vec<_>, _>>()?);
        // An epoch from which no batch is taken changes nothing.
        drop(loader.iter());
        seen.extend(loader.iter().collect::<Result<Vec<_>, _>>()?);
        assert_eq!(seen, whole);
        // After the end, a new pass begins, in another order.
        assert_eq!(loader.next_epoch(), 4);
        let next: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_ne!(next, whole);
        assert_eq!(sorted(&next), sorted(&whole));
        assert_eq!(next, build().collate(listed).build()?.epoch(4).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(())
}

#[test]
fn an_epoch_dropped_after_its_last_batch_leaves_nothing() -> Result<(), DataError> {
    let _alone = alone();
    for drop_last in [false, true] {
        let builder = DataLoader::stream(shards()).batch_size(4).interleave(3).drop_last(drop_last);
        let loader = builder.collate(listed).build()?;
        let whole = loader.epoch(0).count();
        assert_eq!(whole, samples().len().div_ceil(4) - usize::from(drop_last));
        for epoch in 0..4 {
            // All batches are taken, but not the `None` at the end.
            assert_eq!(loader.epoch(epoch).take(whole).count(), whole, "epoch {epoch}");
        }
    }
    Ok(())
}

#[test]
fn an_epoch_asked_for_by_its_number_is_always_the_same() -> Result<(), DataError> {
    let _alone = alone();
    let build =
        || DataLoader::stream(shards()).batch_size(4).shuffle(true).batches_per_epoch(3).collate(listed).build();
    let loader = build()?;
    let first: Vec<Vec<usize>> = loader.epoch(0).take(2).collect::<Result<_, _>>()?;
    let again: Vec<Vec<usize>> = loader.epoch(0).take(2).collect::<Result<_, _>>()?;
    assert_eq!(again, first);
    let fifth: Vec<Vec<usize>> = loader.epoch(5).collect::<Result<_, _>>()?;
    assert_eq!(build()?.epoch(5).collect::<Result<Vec<_>, _>>()?, fifth);
    Ok(())
}

/// The epochs of a run that takes some batches of each: the first `given` batches from one loader, the rest from
/// another.
fn run(options: Options, epochs: u64, given: usize, border: bool) -> Result<Vec<Seen>, DataError> {
    let first = options.build()?;
    let mut seen: Vec<Seen> = Vec::new();
    let mut state = None;
    while first.next_epoch() < epochs && state.is_none() {
        let mut left = options.take;
        let mut epoch = first.iter();
        while state.is_none() && left > 0 {
            if seen.len() == given && !border {
                state = Some((first.state_dict().unwrap(), left));
                break;
            }
            let Some(batch) = epoch.next() else { break };
            seen.push(batch?);
            left -= 1;
        }
        drop(epoch);
        if seen.len() >= given && border && state.is_none() {
            state = Some((first.state_dict().unwrap(), 0));
        }
    }
    let Some((state, mut left)) = state else { return Ok(seen) };
    let mut second = Options { workers: (options.workers + 1) % 3, ..options }.build()?;
    second.load_state_dict(&state).unwrap();
    if border {
        left = options.take;
    }
    while second.next_epoch() < epochs {
        for batch in second.iter().take(left) {
            seen.push(batch?);
        }
        left = options.take;
    }
    Ok(seen)
}

#[test]
fn a_resumed_run_equals_the_uninterrupted_one_within_and_between_epochs() -> Result<(), DataError> {
    let _alone = alone();
    for (batches, take, drop_last) in [
        (Some(4), 9, false),
        (Some(4), 3, false),
        (Some(30), 30, true),
        (None, 5, false),
        (None, 5, true),
        (None, 99, false),
    ] {
        for shuffle in [false, true] {
            let options = Options { batches, take, workers: 1, shuffle, drop_last };
            let epochs = if take > 20 { 3 } else { 10 };
            let expected = run(options, epochs, usize::MAX, false)?;
            assert!(expected.len() > 20);
            for given in 0..expected.len() {
                assert_eq!(run(options, epochs, given, false)?, expected, "{options:?}, after {given}");
            }
            for given in (0..expected.len()).step_by(3) {
                assert_eq!(
                    run(options, epochs, given, true)?,
                    expected,
                    "{options:?}, after {given} and the epoch's end"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_state_counts_the_bad_batches_before_it() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers| {
        let stream = shards().map(|number| match number % 100 {
            2..6 => Err(DataError::other("worn out")),
            _ => Ok(number),
        });
        let builder = DataLoader::stream(stream).batch_size(2).interleave(2).batches_per_epoch(8).num_workers(workers);
        builder.on_error(OnError::Skip).collate(listed).build()
    };
    let loader = build(0)?;
    let expected: Vec<Vec<usize>> = (0..3).flat_map(|_| loader.iter()).collect::<Result<_, _>>()?;
    assert_eq!(expected.len(), 24);
    for given in 0..24 {
        let first = build(given % 3)?;
        let mut seen = Vec::new();
        while seen.len() < given {
            seen.extend(first.iter().take(given - seen.len()).collect::<Result<Vec<_>, _>>()?);
        }
        // The epoch is still running, or all its batches were taken.
        let state = first.state_dict().unwrap();
        let mut second = build(2)?;
        second.load_state_dict(&state).unwrap();
        while seen.len() < 24 {
            seen.extend(second.iter().collect::<Result<Vec<_>, _>>()?);
        }
        assert_eq!(seen[..24], expected, "after {given}");
    }
    Ok(())
}

#[test]
fn batches_held_ahead_are_left_to_the_next_epoch() -> Result<(), DataError> {
    let _alone = alone();
    let build = || DataLoader::stream(shards()).batch_size(4).interleave(3).num_workers(2).collate(listed).build();
    let whole: Vec<Vec<usize>> = build()?.iter().collect::<Result<_, _>>()?;
    let loader = build()?;
    // Five batches are taken, the last of them only ahead.
    let mut epoch = loader.iter();
    let mut seen: Vec<Vec<usize>> = epoch.by_ref().take(4).collect::<Result<_, _>>()?;
    drop(take_ahead(|| epoch.next()));
    drop(epoch);
    seen.extend(loader.iter().collect::<Result<Vec<_>, _>>()?);
    assert_eq!(seen, whole);
    Ok(())
}

#[test]
fn batches_out_of_order_are_neither_lost_nor_repeated_between_epochs() -> Result<(), DataError> {
    let _alone = alone();
    let build = || {
        let builder = DataLoader::stream(shards()).batch_size(1).interleave(1).num_workers(4).in_order(false);
        builder.batches_per_epoch(30).collate(listed).build()
    };
    for take in [1, 4, 17] {
        let loader = build()?;
        let mut seen: Vec<Vec<usize>> = loader.iter().take(take).collect::<Result<_, _>>()?;
        let mut second = build()?;
        second.load_state_dict(&loader.state_dict().unwrap()).unwrap();
        for loader in [&loader, &second] {
            let rest: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
            assert_eq!(rest.len(), 30, "every epoch has its number of batches");
            let together = [seen.clone(), rest].concat();
            assert_eq!(together.concat().iter().collect::<BTreeSet<_>>().len(), 30 + take);
        }
        seen.extend(second.iter().take(30 - take).collect::<Result<Vec<_>, _>>()?);
    }
    Ok(())
}

#[test]
fn an_error_ends_the_epoch_and_the_next_one_continues_there() -> Result<(), DataError> {
    let _alone = alone();
    let broken = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let seen = broken.clone();
    let stream = FnStream::new(1, move |_| {
        let seen = seen.clone();
        Ok((0..20).map(move |i| match i == 9 && seen.load(std::sync::atomic::Ordering::SeqCst) {
            true => Err(DataError::other("the disk is away")),
            false => Ok(i),
        }))
    });
    let loader = DataLoader::stream(stream).batch_size(4).interleave(1).collate(listed).build()?;
    let outcomes: Vec<_> = loader.iter().collect();
    assert!(outcomes.len() == 3 && outcomes[2].is_err());
    broken.store(false, std::sync::atomic::Ordering::SeqCst);
    let rest: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
    assert_eq!(rest, [vec![8, 9, 10, 11], vec![12, 13, 14, 15], vec![16, 17, 18, 19]]);
    Ok(())
}

#[test]
fn a_state_of_the_older_version_is_refused() -> Result<(), DataError> {
    let _alone = alone();
    let loader = DataLoader::stream(shards()).batch_size(4).collate(listed).build()?;
    _ = loader.iter().nth(2);
    let mut state: StateDict = loader.state_dict().unwrap();
    state.insert("version", Entry::Int(1));
    let mut other = DataLoader::stream(shards()).batch_size(4).collate(listed).build()?;
    let error = other.load_state_dict(&state).unwrap_err();
    assert!(matches!(&error, StateError::Mismatch { key, .. } if key == "version"), "{error}");
    Ok(())
}

#[test]
fn a_run_resumes_with_another_number_of_ranks_between_epochs() -> Result<(), DataError> {
    let _alone = alone();
    let ranks = |world_size: usize| -> Result<Vec<DataLoader<Vec<usize>>>, DataError> {
        let rank = |rank| {
            let stream = FnStream::new(8, |shard| Ok((0..30).map(move |i| Ok(shard * 100 + i))));
            let builder = DataLoader::stream(stream).batch_size(8 / world_size).interleave(4).shuffle(true);
            let builder = builder.shuffle_buffer(4).rank(rank, world_size).batches_per_epoch(3).num_workers(rank % 3);
            builder.collate(listed).build()
        };
        (0..world_size).map(rank).collect()
    };
    // One epoch of all ranks together, with each batch sorted.
    let epoch = |ranks: &[DataLoader<Vec<usize>>]| -> Result<Vec<Vec<usize>>, DataError> {
        let mut together = vec![Vec::new(); 3];
        for rank in ranks {
            let batches: Vec<Vec<usize>> = rank.iter().collect::<Result<_, _>>()?;
            assert_eq!(batches.len(), 3);
            together.iter_mut().zip(batches).for_each(|(all, batch)| all.extend(batch));
        }
        together.iter_mut().for_each(|batch| batch.sort_unstable());
        Ok(together)
    };
    let alone = ranks(1)?;
    let expected: Vec<_> = (0..10).map(|_| epoch(&alone)).collect::<Result<Vec<_>, _>>()?.concat();
    assert_eq!(expected.concat().into_iter().collect::<BTreeSet<_>>().len(), 240, "ten epochs are one pass");
    for (before, after) in [(2, 1), (1, 4), (4, 2)] {
        let first = ranks(before)?;
        let mut seen = (0..4).map(|_| epoch(&first)).collect::<Result<Vec<_>, _>>()?.concat();
        let states: Vec<StateDict> = first.iter().map(|rank| rank.state_dict().unwrap()).collect();
        let state = DataLoader::merge_states(&states).unwrap();
        let mut second = ranks(after)?;
        second.iter_mut().for_each(|rank| rank.load_state_dict(&state).unwrap());
        seen.extend((4..10).map(|_| epoch(&second)).collect::<Result<Vec<_>, _>>()?.concat());
        assert_eq!(seen, expected, "{before} ranks, then {after}");
    }
    Ok(())
}
