//! Loaders over streams: order, shuffling, ranks, faults.

use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex};

use overdrive_core::Stateful;
use overdrive_dataload::{DataError, DataLoader, FnStream, IterableDataset, OnError};

use crate::{HANG, WORKERS, alone, listed};

/// `shards` shards of `len` numbers each.
pub fn numbers(shards: usize, len: usize) -> impl IterableDataset<Sample = usize> + 'static {
    FnStream::new(shards, move |shard| Ok((0..len).map(move |i| Ok(shard * 1000 + i))))
}

#[test]
fn shards_take_turns_and_every_sample_is_read_once() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = DataLoader::stream(numbers(5, 6)).batch_size(4).interleave(2).num_workers(workers);
        let loader = builder.collate(listed).build()?;
        assert_eq!(loader.len(), None);
        let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches[..2], [[0, 1000, 1, 1001], [2, 1002, 3, 1003]]);
        assert_eq!((batches.len(), batches[7].len()), (8, 2));
        assert_eq!(batches.concat().iter().collect::<BTreeSet<_>>().len(), 30);
        let builder = DataLoader::stream(numbers(5, 6)).batch_size(4).drop_last(true).num_workers(workers);
        assert_eq!(builder.collate(listed).build()?.iter().count(), 7);
    }
    Ok(())
}

#[test]
fn shuffling_mixes_shards_and_windows_and_is_new_in_each_epoch() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers, seed| {
        let builder = DataLoader::stream(numbers(8, 50)).batch_size(10).interleave(4).num_workers(workers);
        builder.shuffle(true).shuffle_buffer(20).seed(seed).collate(listed).build()
    };
    let epoch = |workers, seed, epoch| -> Result<Vec<usize>, DataError> {
        let batches: Vec<Vec<usize>> = build(workers, seed)?.epoch(epoch).collect::<Result<_, _>>()?;
        Ok(batches.concat())
    };
    let expected = epoch(0, 1, 0)?;
    let mut sorted = expected.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..8).flat_map(|shard| (0..50).map(move |i| shard * 1000 + i)).collect::<Vec<_>>());
    for workers in WORKERS {
        assert_eq!(epoch(workers, 1, 0)?, expected);
    }
    assert_ne!(epoch(0, 1, 1)?, expected);
    assert_ne!(epoch(0, 2, 0)?, expected);
    let shards: BTreeSet<usize> = expected[..10].iter().map(|number| number / 1000).collect();
    assert_eq!(shards.len(), 4, "a batch is from four shards");
    let places: Vec<usize> =
        expected[..80].iter().filter(|n| *n / 1000 == expected[0] / 1000).map(|n| n % 1000).collect();
    assert!(places.iter().all(|&place| place < 20) && !places.is_sorted(), "the first window, mixed: {places:?}");
    Ok(())
}

#[test]
fn batches_per_epoch_starts_another_pass_where_the_stream_ends() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = DataLoader::stream(numbers(3, 4)).batch_size(4).interleave(1).num_workers(workers);
        let loader = builder.batches_per_epoch(7).collate(listed).build()?;
        assert_eq!(loader.len(), Some(7));
        let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches.len(), 7);
        assert_eq!(batches[3], [0, 1, 2, 3], "the second pass");
    }
    // No samples for another pass: an error for the first batch, and no endless loop.
    let empty = DataLoader::stream(numbers(3, 0)).batches_per_epoch(5).collate(listed).build()?;
    let outcomes: Vec<_> = empty.iter().collect();
    assert!(matches!(outcomes[..], [Err(DataError::StreamEnded { batch: 0, batches: 5 })]));
    // The same with shards of nothing but errors.
    let broken = FnStream::new(3, |_| Ok((0..4).map(|_| Err::<usize, _>(DataError::other("gone")))));
    let builder = DataLoader::stream(broken).batches_per_epoch(5).on_error(OnError::Skip);
    let outcomes: Vec<_> = builder.collate(listed).build()?.iter().collect();
    assert!(matches!(outcomes[..], [Err(DataError::StreamEnded { .. })]));
    Ok(())
}

#[test]
fn an_epoch_that_ends_before_its_last_batch_is_an_error() -> Result<(), DataError> {
    let _alone = alone();
    for (workers, drop_last) in WORKERS.into_iter().flat_map(|workers| [(workers, false), (workers, true)]) {
        // The shuffled passes give the only shard with items to one lane after the other, and no lane has two.
        let one = FnStream::new(4, |shard| Ok((0..usize::from(shard == 1)).map(Ok)));
        let builder = DataLoader::stream(one).interleave(4).shuffle(true).batch_size(16).drop_last(drop_last);
        let loader = builder.batches_per_epoch(2).num_workers(workers).collate(listed).build()?;
        let outcomes: Vec<_> = loader.iter().collect();
        let ended = matches!(outcomes.last(), Some(Err(DataError::StreamEnded { batches: 2, .. })));
        assert!(ended && outcomes.len() == if drop_last { 1 } else { 2 }, "{workers} workers: {outcomes:?}");
    }
    Ok(())
}

#[test]
fn global_batches_are_the_same_for_any_number_of_ranks() -> Result<(), DataError> {
    let _alone = alone();
    let global = |world_size: usize| -> Result<Vec<BTreeSet<usize>>, DataError> {
        let mut batches = vec![BTreeSet::new(); 10];
        for rank in 0..world_size {
            let builder = DataLoader::stream(numbers(9, 30)).batch_size(8 / world_size).interleave(4).shuffle(true);
            let builder = builder.shuffle_buffer(7).rank(rank, world_size).batches_per_epoch(10);
            for (global, batch) in batches.iter_mut().zip(builder.collate(listed).build()?.iter()) {
                global.extend(batch?);
            }
        }
        assert!(batches.iter().all(|batch| batch.len() == 8));
        Ok(batches)
    };
    let one = global(1)?;
    assert_eq!(global(2)?, one);
    assert_eq!(global(4)?, one);
    Ok(())
}

#[test]
fn faults_of_a_stream_fail_or_are_skipped() -> Result<(), DataError> {
    let _alone = alone();
    let bumpy = || {
        FnStream::new(3, |shard| match shard {
            1 => Err(DataError::other("no shard 1")),
            _ => Ok((0..4).map(move |i| match (shard, i) {
                (2, 1) => Err(DataError::other("bad")),
                _ => Ok(shard * 10 + i),
            })),
        })
    };
    for workers in WORKERS {
        let builder = || DataLoader::stream(bumpy()).batch_size(3).interleave(1).num_workers(workers);
        let loader = builder().on_error(OnError::Skip).collate(listed).build()?;
        let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches, [vec![0, 1, 2], vec![3, 20, 22], vec![23]]);
        let faults: Vec<String> = loader.faults().into_iter().map(|fault| fault.error).collect();
        assert_eq!(faults, ["shard 1, item 0: no shard 1", "shard 2, item 1: bad"]);
        let outcomes: Vec<_> = builder().collate(listed).build()?.iter().collect();
        assert_eq!(outcomes.len(), 2);
        assert_eq!(outcomes[1].as_ref().unwrap_err().to_string(), "shard 1, item 0: no shard 1");
    }
    Ok(())
}

#[test]
fn a_stream_that_panics_is_an_error() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let stream = FnStream::new(1, |_| Ok((0..9).map(|i| if i == 5 { panic!("torn") } else { Ok(i) })));
        let outcomes: Vec<_> =
            DataLoader::stream(stream).batch_size(2).num_workers(workers).collate(listed).build()?.iter().collect();
        assert_eq!(outcomes.len(), 3);
        let error = outcomes[2].as_ref().unwrap_err();
        let inside = error.innermost();
        assert!(matches!(inside, DataError::StreamPanicked { batch: 2, message } if message == "torn"), "{error}");
        assert_eq!(error.to_string(), "shard 0, item 5: batch 2: the stream panicked: torn");
    }
    Ok(())
}

#[test]
fn stream_options_are_checked() {
    let builder = || DataLoader::stream(numbers(4, 4)).collate(listed::<usize>);
    let option = |result: Result<DataLoader<_>, DataError>| match result {
        Err(DataError::InvalidOption { option, .. }) => option,
        other => panic!("expected an invalid option, got {other:?}"),
    };
    assert_eq!(option(builder().batch_size(0).build()), "batch_size");
    assert_eq!(option(builder().shuffle_buffer(0).build()), "shuffle_buffer");
    assert_eq!(option(builder().interleave(0).build()), "interleave");
    assert_eq!(option(builder().interleave(25).build()), "interleave");
    assert_eq!(option(builder().rank(2, 2).build()), "rank");
    assert_eq!(option(builder().rank(0, 3).build()), "interleave");
    assert_eq!(option(builder().rank(0, 2).interleave(6).batch_size(6).build()), "shards");
    assert_eq!(option(builder().rank(0, 2).batch_size(3).build()), "interleave");
    assert_eq!(option(builder().on_error(OnError::Replace).build()), "on_error");
}

#[test]
fn a_map_runs_in_all_workers_at_once() -> Result<(), DataError> {
    let _alone = alone();
    let meeting = Meeting::default();
    let seen = meeting.clone();
    let mapped = numbers(2, 20).map(move |number| {
        seen.attend();
        Ok(number * 2)
    });
    let loader = DataLoader::stream(mapped).batch_size(5).interleave(1).num_workers(2).collate(listed).build()?;
    let all: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
    assert_eq!(all.concat(), (0..20).chain(1000..1020).map(|number| number * 2).collect::<Vec<_>>());
    assert_eq!(meeting.most(), 2);
    Ok(())
}

/// Counts the threads that are in a place at once.
#[derive(Clone, Default)]
struct Meeting(Arc<(Mutex<Attendance>, Condvar)>);

#[derive(Default)]
struct Attendance {
    now: usize,
    most: usize,
    gave_up: bool,
}

impl Meeting {
    /// Waits until two threads have been here at the same time.
    fn attend(&self) {
        let (counts, changed) = &*self.0;
        let mut guard = counts.lock().unwrap();
        guard.now += 1;
        guard.most = guard.most.max(guard.now);
        changed.notify_all();
        let alone = |seen: &mut Attendance| seen.most < 2 && !seen.gave_up;
        let (mut guard, waited) = changed.wait_timeout_while(guard, HANG, alone).unwrap();
        guard.now -= 1;
        guard.gave_up |= waited.timed_out();
    }

    fn most(&self) -> usize {
        self.0.0.lock().unwrap().most
    }
}

#[test]
fn workers_read_from_several_shards_at_once() -> Result<(), DataError> {
    let _alone = alone();
    let meeting = Meeting::default();
    let seen = meeting.clone();
    let stream = FnStream::new(2, move |shard| {
        let seen = seen.clone();
        Ok((0..20).map(move |i| {
            seen.attend();
            Ok(shard * 1000 + i)
        }))
    });
    let loader = DataLoader::stream(stream).batch_size(8).interleave(2).num_workers(2).collate(listed).build()?;
    let all: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
    assert_eq!(all.concat(), (0..20).flat_map(|i| [i, 1000 + i]).collect::<Vec<_>>());
    assert_eq!(meeting.most(), 2, "one thread alone never meets another");
    Ok(())
}

#[test]
fn an_error_of_a_map_is_a_bad_sample_with_its_place() -> Result<(), DataError> {
    let _alone = alone();
    let loader = |workers, policy, panics| {
        let mapped = numbers(2, 10).map(move |number| match number {
            1004 if panics => panic!("boom"),
            1004 => Err(DataError::other("no good")),
            number => Ok(number),
        });
        let stream = DataLoader::stream(mapped).interleave(1).batch_size(10).on_error(policy);
        stream.num_workers(workers).collate(listed).build()
    };
    for workers in WORKERS {
        let skipping = loader(workers, OnError::Skip, false)?;
        let batches: Vec<Vec<usize>> = skipping.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches[1], [1000, 1001, 1002, 1003, 1005, 1006, 1007, 1008, 1009]);
        assert_eq!(skipping.faults()[0].error, "shard 1, item 4: no good");
        assert_eq!(skipping.stats().samples, 19);
        for (panics, message) in [(false, "shard 1, item 4: no good"), (true, "shard 1, item 4: panicked: boom")] {
            let error = loader(workers, OnError::Fail, panics)?.iter().nth(1).unwrap().unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
    Ok(())
}

#[test]
fn errors_and_faults_show_the_names_of_shards() -> Result<(), DataError> {
    let _alone = alone();
    let stream = |panics: bool| {
        let open = move |shard: usize| match shard {
            0 => Err(DataError::other("torn off")),
            _ => Ok((0..4).map(move |i| if panics && i == 2 { panic!("boom") } else { Ok(shard * 10 + i) })),
        };
        // The third shard has no name.
        FnStream::new(3, open).shard_names(["a.jsonl", "b.jsonl"])
    };
    for workers in WORKERS {
        let build = |panics, on_error| {
            let mapped = stream(panics).map(|number| match number {
                11 | 21 => Err(DataError::other("no good")),
                number => Ok(number),
            });
            let builder = DataLoader::stream(mapped).interleave(1).num_workers(workers).on_error(on_error);
            builder.collate(listed).build()
        };
        let loader = build(false, OnError::Skip)?;
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?.concat(), [10, 12, 13, 20, 22, 23]);
        let mut faults: Vec<_> = loader.faults().into_iter().map(|fault| (fault.error, fault.key)).collect();
        // With workers, the order of faults depends on timing.
        faults.sort_unstable();
        let named = |name: &str| Some(name.to_owned());
        let expected = [
            ("shard 0, item 0 (a.jsonl): torn off".to_owned(), named("a.jsonl")),
            ("shard 1, item 1 (b.jsonl): no good".to_owned(), named("b.jsonl")),
            ("shard 2, item 1: no good".to_owned(), None),
        ];
        assert_eq!(faults, expected);
        let error = build(true, OnError::Skip)?.iter().find_map(Result::err).unwrap();
        let message = "shard 1, item 2 (b.jsonl): batch 1: the stream panicked: boom";
        assert_eq!(error.to_string().replace("batch 2", "batch 1"), message);
    }
    Ok(())
}

#[test]
fn samples_that_do_not_fit_their_batch_are_named_too() -> Result<(), DataError> {
    let _alone = alone();
    let lists = FnStream::new(1, |_| {
        Ok((0..6).map(|i| Ok(tch::Tensor::zeros([if i == 4 { 3 } else { 2 }], (tch::Kind::Float, tch::Device::Cpu)))))
    });
    let stream = std::sync::Arc::new(lists.shard_names(["a.bin"]));
    for workers in WORKERS {
        let loader = DataLoader::stream(stream.clone()).batch_size(6).num_workers(workers).build()?;
        let error = loader.iter().next().unwrap().unwrap_err().to_string();
        let message = "shard 0, item 4 (a.bin): shape mismatch at position 4 of the batch: expected [2], found [3]: \
                       resize or pad samples to one shape";
        assert_eq!(error, message);
    }
    Ok(())
}

#[test]
fn a_resumed_window_is_read_by_a_worker() -> Result<(), DataError> {
    let _alone = alone();
    let readers = Arc::new(Mutex::new(BTreeSet::new()));
    let build = || {
        let readers = readers.clone();
        let stream = FnStream::new(4, move |shard| {
            let readers = readers.clone();
            Ok((0..50).map(move |i| {
                readers.lock().unwrap().insert(std::thread::current().name().unwrap_or_default().to_owned());
                Ok(shard * 1000 + i)
            }))
        });
        DataLoader::stream(stream).batch_size(8).shuffle_buffer(30).num_workers(2).collate(listed).build()
    };
    let expected: Vec<Vec<usize>> = build()?.iter().collect::<Result<_, _>>()?;
    let first = build()?;
    assert_eq!(first.iter().take(5).collect::<Result<Vec<_>, _>>()?, expected[..5]);
    let mut second = build()?;
    second.load_state_dict(&first.state_dict().unwrap()).unwrap();
    assert_eq!(second.iter().collect::<Result<Vec<_>, _>>()?, expected[5..]);
    let readers = readers.lock().unwrap();
    assert!(readers.iter().all(|name| name.starts_with("dataload-")), "{readers:?}");
    Ok(())
}

#[test]
fn a_state_of_other_shards_is_refused_in_any_folder() -> Result<(), Box<dyn std::error::Error>> {
    let loader = |names: [&'static str; 2]| {
        let stream = FnStream::new(2, |shard| Ok((0..9).map(move |item| Ok(shard * 10 + item)))).shard_names(names);
        DataLoader::stream(stream).batch_size(4).collate(|samples: Vec<usize>| Ok(samples)).build()
    };
    let first = loader(["data/a.tar", "data/b.tar"])?;
    let batches: Vec<_> = first.iter().collect::<Result<_, _>>()?;
    let mut epoch = first.iter();
    epoch.next().transpose()?;
    let state = first.state_dict()?;
    let mut moved = loader(["elsewhere/a.tar", "elsewhere/b.tar"])?;
    moved.load_state_dict(&state)?;
    assert_eq!(moved.iter().collect::<Result<Vec<_>, _>>()?, batches[1..]);
    for others in [["data/a.tar", "data/c.tar"], ["data/b.tar", "data/a.tar"]] {
        let error = loader(others)?.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains("names"), "{error}");
    }
    Ok(())
}
