//! Saving and loading a loader's state.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use overdrive_core::{Entry, Shard, ShardedBy, StateDict, Stateful};
use overdrive_dataload::{
    DataError, DataLoader, DataLoaderBuilder, DistributedSampler, FnDataset, FnStream, FromDataset, IterableDataset,
    OnError,
};

use crate::{WORKERS, alone, listed, uneven};

pub type Numbers = DataLoader<Vec<usize>>;

/// All batches of the remaining epochs, up to number `epochs`.
pub fn rest(loader: &Numbers, epochs: u64) -> Vec<Vec<usize>> {
    let mut batches = Vec::new();
    while loader.next_epoch() < epochs {
        batches.extend(loader.iter().map(Result::unwrap));
    }
    batches
}

/// The first batches, and the state after them, within an epoch or at its end.
pub fn stopped(loader: &Numbers, given: usize) -> (Vec<Vec<usize>>, StateDict) {
    let (mut seen, mut epoch) = (Vec::new(), loader.iter());
    while seen.len() < given {
        match epoch.next() {
            Some(batch) => seen.push(batch.unwrap()),
            None => epoch = loader.iter(),
        }
    }
    (seen, loader.state_dict().unwrap())
}

pub fn resumed(mut loader: Numbers, state: &StateDict) -> Numbers {
    loader.load_state_dict(state).unwrap();
    loader
}

fn copy(entry: &Entry) -> Entry {
    match entry {
        Entry::Int(number) => Entry::Int(*number),
        Entry::Text(text) => Entry::Text(text.clone()),
        other => panic!("a state has no {other:?}"),
    }
}

/// The bytes of the state as text.
fn bytes(state: &StateDict) -> usize {
    state.iter().map(|(key, entry)| key.len() + format!("{entry:?}").len()).sum()
}

#[test]
fn every_batch_is_a_place_to_resume_for_any_number_of_workers() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers| {
        let builder = DataLoader::builder(uneven(50)).batch_size(8).shuffle(true).seed(5).num_workers(workers);
        builder.collate(listed).build()
    };
    let all = rest(&build(0)?, 3);
    assert_eq!(all.len(), 21);
    for (workers, others) in [(0, 2), (2, 0), (4, 1)] {
        for given in 0..=all.len() {
            let loader = build(workers)?;
            let mut seen = Vec::new();
            while seen.len() < given {
                let left = given - seen.len();
                seen.extend(loader.iter().take(left).map(Result::unwrap));
            }
            let state = loader.state_dict().unwrap();
            assert!(bytes(&state) < 1000, "{} bytes", bytes(&state));
            seen.extend(rest(&resumed(build(others)?, &state), 3));
            assert_eq!(seen, all, "after {given} batches");
        }
    }
    Ok(())
}

#[test]
fn out_of_order_batches_are_neither_lost_nor_repeated() -> Result<(), DataError> {
    let _alone = alone();
    let build = || {
        let builder = DataLoader::builder(uneven(203)).batch_size(3).num_workers(4).in_order(false);
        builder.collate(listed).build()
    };
    for given in [1, 5, 20, 60] {
        let loader = build()?;
        let mut seen: Vec<Vec<usize>> = loader.iter().take(given).map(Result::unwrap).collect();
        let state = loader.state_dict().unwrap();
        let second = resumed(build()?, &state);
        seen.extend(second.iter().take(5).map(Result::unwrap));
        let state = second.state_dict().unwrap();
        seen.extend(rest(&resumed(build()?, &state), 1));
        let mut numbers = seen.concat();
        numbers.sort_unstable();
        assert_eq!(numbers, (0..203).collect::<Vec<_>>());
    }
    Ok(())
}

pub fn shards() -> impl IterableDataset<Sample = usize> + 'static {
    // Shards of different lengths: one empty, one with a bad item, one that cannot be opened.
    FnStream::new(11, |shard| match shard {
        4 => Err(DataError::other("no such shard")),
        _ => {
            let items = (0..(shard * 7) % 20).map(move |i| match (shard, i) {
                (2, 5) => Err(DataError::other("bad item")),
                _ => Ok(shard * 100 + i),
            });
            Ok(Box::new(items) as Box<dyn Iterator<Item = _> + Send>)
        }
    })
}

#[test]
fn streams_resume_at_every_batch() -> Result<(), DataError> {
    let _alone = alone();
    for (interleave, buffer, batches) in [(1, 1, None), (4, 1, None), (3, 5, None), (4, 6, Some(17)), (24, 4, None)] {
        let build = |workers| {
            let builder = DataLoader::stream(shards()).batch_size(4).shuffle(true).seed(9).num_workers(workers);
            let builder = builder.interleave(interleave).shuffle_buffer(buffer).on_error(OnError::Skip);
            let builder = match batches {
                Some(batches) => builder.batches_per_epoch(batches),
                None => builder,
            };
            builder.collate(listed).build()
        };
        let all = rest(&build(0)?, 2);
        assert_eq!(all, rest(&build(3)?, 2), "any number of workers");
        for given in 0..=all.len() {
            let loader = build(given % 3)?;
            let (mut seen, state) = stopped(&loader, given);
            assert!(bytes(&state) < 1000, "{} bytes", bytes(&state));
            seen.extend(rest(&resumed(build(2)?, &state), 2));
            assert_eq!(seen, all, "interleave {interleave}, buffer {buffer}, after {given} batches");
        }
    }
    Ok(())
}

#[test]
fn a_state_of_other_data_is_refused_and_changes_nothing() -> Result<(), DataError> {
    let _alone = alone();
    let builder = |len: usize, batch_size, seed| -> Result<Numbers, DataError> {
        let builder: DataLoaderBuilder<FromDataset<_>, _> = DataLoader::builder(FnDataset::new(len, Ok));
        builder.batch_size(batch_size).seed(seed).collate(listed).build()
    };
    let taken = builder(20, 4, 1)?;
    _ = taken.iter().nth(2);
    let state = taken.state_dict().unwrap();
    for (len, batch_size, seed, key) in [(21, 4, 1, "samples"), (20, 5, 1, "global_batch_size"), (20, 4, 2, "seed")] {
        let mut other = builder(len, batch_size, seed)?;
        let error = other.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
        assert_eq!(other.iter().count(), len.div_ceil(batch_size), "the epoch begins at its start");
    }
    let mut stream = DataLoader::stream(shards()).collate(listed).build()?;
    assert!(stream.load_state_dict(&state).is_err());
    let mut same = builder(20, 4, 1)?;
    let mut strange = StateDict::new();
    state.iter().for_each(|(key, entry)| strange.insert(key, copy(entry)));
    strange.insert("stranger", Entry::Bool(true));
    assert!(same.load_state_dict(&strange).unwrap_err().to_string().contains("stranger"));
    assert!(same.load_state_dict(&StateDict::new()).is_err());
    same.load_state_dict(&state).unwrap();
    assert_eq!(same.iter().count(), 2);
    Ok(())
}

#[test]
fn impossible_numbers_neither_overflow_nor_loop_forever() -> Result<(), DataError> {
    let _alone = alone();
    let build = || {
        let builder = DataLoader::stream(shards()).batch_size(2).interleave(2).batches_per_epoch(9);
        builder.shuffle_buffer(3).on_error(OnError::Skip).collate(listed).build()
    };
    let changed = |changes: &[(&str, Entry)]| -> Result<StateDict, DataError> {
        let taken = build()?;
        _ = taken.iter().nth(3);
        let mut state = taken.state_dict().unwrap();
        for (key, entry) in changes {
            state.insert(*key, copy(entry));
        }
        Ok(state)
    };
    let most = u64::MAX;
    for lane in [format!("{most} 0 0 0 1"), format!("0 0 0 {most} 1"), format!("0 {most} {most} 0 {most}")] {
        let state = changed(&[("lane.0", Entry::Text(lane.clone()))])?;
        let error = build()?.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains("lane.0") && error.contains(&lane), "{error}");
    }
    let most = i64::MAX;
    let far = format!("{most} {most} {most} {most} {most}");
    for (batch, batches) in [(8, 1), (9, 0)] {
        let mut loader = build()?;
        loader.load_state_dict(&changed(&[("batch", Entry::Int(batch))])?).unwrap();
        assert_eq!(loader.iter().count(), batches, "after batch {batch}");
    }
    let lanes = ["lane.0", "lane.1"].map(|lane| (lane, Entry::Text(far.clone())));
    assert!(build()?.load_state_dict(&changed(&lanes)?).is_err());
    for batch in [10, most] {
        assert!(build()?.load_state_dict(&changed(&[("batch", Entry::Int(batch))])?).is_err());
    }
    Ok(())
}

#[test]
fn an_epoch_that_has_ended_resumes_at_the_next_one() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let build = || DataLoader::builder(FnDataset::new(8, Ok)).batch_size(4).num_workers(workers).collate(listed);
        let loader = build().build()?;
        let mut epoch = loader.iter();
        assert_eq!(epoch.by_ref().take(2).count(), 2);
        // The training loop has had every batch, but has not yet seen that there are no more.
        assert_eq!(resumed(build().build()?, &loader.state_dict().unwrap()).iter().count(), 0);
        assert!(epoch.next().is_none());
        let next = resumed(build().build()?, &loader.state_dict().unwrap());
        assert_eq!((next.next_epoch(), next.iter().count()), (1, 2));
    }
    Ok(())
}

#[test]
fn a_state_of_another_order_is_refused() -> Result<(), DataError> {
    let _alone = alone();
    let build = |interleave, buffer, shuffle| {
        let builder = DataLoader::stream(shards()).batch_size(2).interleave(interleave).shuffle_buffer(buffer);
        builder.shuffle(shuffle).on_error(OnError::Skip).collate(listed).build()
    };
    let taken = build(4, 3, true)?;
    _ = taken.iter().nth(3);
    let state = taken.state_dict().unwrap();
    for (interleave, buffer, shuffle, key) in
        [(8, 3, true, "interleave"), (4, 4, true, "shuffle_buffer"), (4, 3, false, "shuffle")]
    {
        let error = build(interleave, buffer, shuffle)?.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains(key), "{error}");
    }
    assert!(build(4, 3, true)?.load_state_dict(&state).is_ok());
    Ok(())
}

#[test]
fn starting_another_epoch_discards_the_loaded_position() -> Result<(), DataError> {
    let _alone = alone();
    let build = || DataLoader::builder(FnDataset::new(8, Ok)).batch_size(2).collate(listed).build();
    let mut loader = build()?;
    loader.set_epoch(5);
    assert_eq!(resumed(build()?, &loader.state_dict().unwrap()).next_epoch(), 5, "nothing has begun yet");
    _ = loader.iter().nth(1);
    let state = loader.state_dict().unwrap();
    loader.load_state_dict(&state).unwrap();
    loader.set_epoch(7);
    assert_eq!(loader.iter().take(3).count(), 3);
    let later = resumed(build()?, &loader.state_dict().unwrap());
    assert_eq!((later.next_epoch(), later.iter().count()), (7, 1));
    Ok(())
}

#[test]
fn a_stream_that_has_only_given_later_batches_resumes_from_its_start() -> Result<(), DataError> {
    let _alone = alone();
    let build = |open: &Arc<AtomicBool>| {
        let stream = FnStream::new(2, |shard| Ok((0..40).map(move |i| Ok(shard * 1000 + i))));
        let open = open.clone();
        let collate = move |samples: Vec<usize>| {
            while samples.contains(&0) && !open.load(SeqCst) {
                std::thread::yield_now();
            }
            Ok(samples)
        };
        DataLoader::stream(stream).batch_size(8).num_workers(2).in_order(false).collate(collate).build()
    };
    let open = Arc::new(AtomicBool::new(true));
    let mut expected: Vec<Vec<usize>> = build(&open)?.iter().collect::<Result<_, _>>()?;
    let closed = Arc::new(AtomicBool::new(false));
    let first = build(&closed)?;
    let mut epoch = first.iter();
    let mut seen = vec![epoch.next().unwrap()?];
    assert_ne!(seen[0][0], 0, "the first batch is held up");
    let state = first.state_dict().unwrap();
    closed.store(true, SeqCst);
    drop(epoch);
    let second = resumed(build(&open)?, &state);
    seen.extend(second.iter().collect::<Result<Vec<_>, _>>()?);
    seen.sort_unstable();
    expected.sort_unstable();
    assert_eq!(seen, expected);
    Ok(())
}

#[test]
fn a_state_of_another_sampler_is_refused() -> Result<(), Box<dyn std::error::Error>> {
    let build = |seed, world_size| {
        let sampler = DistributedSampler::shuffled(40, world_size, 0, seed)?;
        let builder = DataLoader::builder(FnDataset::new(40, Ok)).sampler(sampler).batch_size(8 / world_size);
        builder.collate(listed::<usize>).build()
    };
    let loader = build(1, 1)?;
    loader.iter().take(2).try_for_each(|batch| batch.map(drop))?;
    let state = loader.state_dict()?;
    build(1, 1)?.load_state_dict(&state)?;
    build(1, 2)?.load_state_dict(&state)?;
    let error = build(2, 1)?.load_state_dict(&state).unwrap_err().to_string();
    assert!(error.contains("`order` should be"), "{error}");
    Ok(())
}

#[test]
fn a_damaged_state_is_refused_before_anything_changes() -> Result<(), Box<dyn std::error::Error>> {
    let _alone = alone();
    let stream = || {
        let stream = FnStream::new(4, |shard| Ok((0..40).map(move |i| Ok(shard * 1000 + i))));
        let builder = DataLoader::stream(stream).interleave(2).shuffle_buffer(5).batch_size(4);
        builder.collate(listed::<usize>).build()
    };
    let loader = stream()?;
    let mut epoch = loader.iter();
    epoch.by_ref().take(3).try_for_each(|batch| batch.map(drop))?;
    for (key, value) in [
        ("lane.0", "0 99 0 0 0"),
        ("lane.0", "0 0 0 0 99"),
        ("lane.0", "1 0 0 0 0"),
        ("lane.0", "0 0 0 9223372036854775807 5"),
        ("lane.7", "0 0 0 0 0"),
        ("lane.x", "0 0 0 0 0"),
        ("ahead", "0-2"),
    ] {
        let mut state = loader.state_dict()?;
        state.insert(key, Entry::Text(value.to_owned()));
        assert!(stream()?.load_state_dict(&state).is_err(), "{key} {value}");
    }
    for extra in [-1, 4, i64::MAX] {
        let mut state = loader.state_dict()?;
        state.insert("extra", Entry::Int(extra));
        assert!(stream()?.load_state_dict(&state).is_err(), "{extra}");
    }

    let dataset = || DataLoader::builder(FnDataset::new(40, Ok)).batch_size(4).collate(listed::<usize>).build();
    for (key, value) in [
        ("batch", Entry::Int(11)),
        ("ahead", Entry::Text("3-10".to_owned())),
        ("turn", Entry::Int(0)),
        ("lane.0", Entry::Text("0 0 0 0 0".to_owned())),
    ] {
        let mut state = dataset()?.state_dict()?;
        state.insert(key, value);
        assert!(dataset()?.load_state_dict(&state).is_err(), "{key}");
    }
    Ok(())
}

#[test]
fn a_state_of_another_rank_is_refused_at_once() -> Result<(), Box<dyn std::error::Error>> {
    let _alone = alone();
    let rank = |rank, of: usize| {
        let stream = FnStream::new(4, |shard| Ok((0..40).map(move |i| Ok(shard * 1000 + i))));
        DataLoader::stream(stream).batch_size(8 / of).rank(rank, of).collate(listed::<usize>).build()
    };
    let two = [rank(0, 2)?, rank(1, 2)?];
    let expected: Vec<Vec<usize>> = rank(0, 1)?.iter().collect::<Result<_, _>>()?;
    let mut states = Vec::new();
    for rank in &two {
        rank.iter().take(3).try_for_each(|batch| batch.map(drop))?;
        states.push(rank.state_dict()?);
    }
    assert!(rank(1, 2)?.load_state_dict(&states[0]).unwrap_err().to_string().contains("lane.1"));
    // They say that they are parts of one state, so that a checkpoint can put them together.
    let shard = |rank| Some(Shard { rank, ranks: 2, by: ShardedBy::Tensors });
    assert!(two[1].differs_by_rank() && states[0].shard() == shard(0) && states[1].shard() == shard(1));
    let merged = DataLoader::merge_states(&states)?;
    assert!(!rank(0, 1)?.differs_by_rank() && merged.shard().is_none());
    let one = resumed(rank(0, 1)?, &merged);
    let rest: Vec<Vec<usize>> = one.iter().collect::<Result<_, _>>()?;
    assert_eq!(rest, expected[3..]);
    assert!(DataLoader::merge_states(&[]).is_err());
    Ok(())
}
