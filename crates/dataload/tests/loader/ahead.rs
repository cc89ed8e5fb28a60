//! Batches that are taken ahead of their use, in the saved state.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

use overdrive_core::{Stateful, take_ahead};
use overdrive_dataload::{DataError, DataLoader, FnStream, OnError};

use crate::resume::{Numbers, rest, resumed, shards};
use crate::{alone, listed, uneven};

#[test]
fn batches_held_ahead_of_the_training_loop_are_not_lost() -> Result<(), DataError> {
    let _alone = alone();
    let build = || DataLoader::builder(uneven(23)).batch_size(4).num_workers(2).collate(listed).build();
    let all = rest(&build()?, 1);
    let loader = build()?;
    let mut epoch = loader.iter().map(Result::unwrap);
    let (mut batch, mut trained) = (epoch.next(), Vec::new());
    while let Some(now) = batch {
        // As in gradient accumulation, to know whether a batch is the last one.
        let (next_batch, held) = take_ahead(|| epoch.next());
        let last = next_batch.is_none();
        trained.push(now);
        let state = loader.state_dict().unwrap();
        let next = resumed(build()?, &state);
        assert_eq!(next.next_epoch(), u64::from(last));
        let expected = if last { &all } else { &all[trained.len()..] };
        assert_eq!(rest(&next, u64::from(last) + 1), expected);
        held.hand_out();
        batch = next_batch;
    }
    assert_eq!(trained, all);
    Ok(())
}

#[test]
fn several_batches_held_at_the_end_of_an_epoch_are_not_lost() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = || DataLoader::builder(uneven(23)).batch_size(4).collate(listed).build();
    let stream = || DataLoader::stream(shards()).batch_size(4).on_error(OnError::Skip).collate(listed).build();
    for build in [&dataset as &dyn Fn() -> Result<Numbers, DataError>, &stream] {
        let all = rest(&build()?, 2);
        let loader = build()?;
        let mut epoch = loader.iter().map(Result::unwrap);
        let epoch_len = rest(&build()?, 1).len();
        let mut held: VecDeque<_> = (0..=3).map(|_| take_ahead(|| epoch.next())).collect();
        for trained in 0..epoch_len {
            let next = resumed(build()?, &loader.state_dict().unwrap());
            assert_eq!(rest(&next, 2), all[trained..], "{trained} of {epoch_len}");
            held.pop_front().unwrap().1.hand_out();
            held.push_back(take_ahead(|| epoch.next()));
        }
        drop((epoch, held));
        assert_eq!(rest(&resumed(build()?, &loader.state_dict().unwrap()), 2), all[epoch_len..]);
        assert_eq!(rest(&loader, 2), all[epoch_len..]);
    }
    Ok(())
}

#[test]
fn batches_held_when_a_stream_breaks_off_are_trained_on_once() -> Result<(), DataError> {
    let _alone = alone();
    let bad = Arc::new(AtomicBool::new(true));
    let build = || {
        let bad = bad.clone();
        let items = move |i| match i == 25 && bad.load(SeqCst) {
            true => Err(DataError::other("bad item")),
            false => Ok(i),
        };
        let stream = FnStream::new(1, move |_| Ok((0..60).map(items.clone())));
        DataLoader::stream(stream).batch_size(10).batches_per_epoch(6).collate(listed).build()
    };
    let loader = build()?;
    let mut epoch = loader.iter();
    let mut held: Vec<_> = (0..2).map(|_| take_ahead(|| epoch.next().unwrap().unwrap())).collect();
    assert!(take_ahead(|| epoch.next().unwrap()).0.is_err());
    bad.store(false, SeqCst);
    for (number, (batch, held)) in held.drain(..).enumerate() {
        // Saved before the batch is used, so it is the next one after resuming.
        let next = resumed(build()?, &loader.state_dict().unwrap());
        assert_eq!(next.iter().next().unwrap()?, batch, "batch {number}");
        held.hand_out();
    }
    drop(epoch);
    let next = resumed(build()?, &loader.state_dict().unwrap());
    assert_eq!(next.iter().next().unwrap()?[0], loader.iter().next().unwrap()?[0]);
    assert!(loader.state_dict().is_ok());
    Ok(())
}
