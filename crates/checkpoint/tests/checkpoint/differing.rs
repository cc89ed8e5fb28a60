//! State that differs by rank though the part does not say so, and checkpoints of other runs.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{
    Checkpoint, CheckpointBuilder, CheckpointError, Resumed, Writers, consolidate, consolidate_from_rank_0,
};
use overdrive_core::{Entry, RankGroup};
use tch::Tensor;

use crate::Plain;
use crate::group::{Rank, run};
use crate::shards::step;

/// A module with statistics of its own rank: a tensor, or a plain value.
fn statistics(mean: f32, count: i64) -> Plain {
    let mean = Entry::Tensor(Tensor::from_slice(&[mean, 1.0]));
    Plain::new([
        ("weight", Entry::Tensor(Tensor::from_slice(&[5.0f32; 3]))),
        ("mean", mean),
        ("count", Entry::Int(count)),
    ])
}

fn save(folder: &Path, ranks: usize, of: impl Fn(usize) -> Plain + Sync) {
    run(Rank::group(ranks, &[]), |rank| {
        let part = of(rank.rank());
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.save(1, &[("model", &part)]).unwrap();
        checkpoint.finish().unwrap();
    });
}

type Found = (usize, Result<Option<Resumed>, CheckpointError>, Plain);
type Case = (&'static str, fn(usize) -> Plain);

fn resume(folder: &Path, ranks: usize, options: fn(CheckpointBuilder) -> CheckpointBuilder) -> Vec<Found> {
    run(Rank::group(ranks, &[]), |rank| {
        let (number, mut part) = (rank.rank(), statistics(-1.0, -1));
        let mut checkpoint = options(Checkpoint::builder(folder)).ranks(rank, Writers::Each).build().unwrap();
        let resumed = checkpoint.resume(&mut [("model", &mut part)]);
        (number, resumed, part)
    })
}

fn mean(part: &Plain) -> f64 {
    part.0.tensor("mean", &[2], tch::Kind::Float).unwrap().double_value(&[0])
}

#[test]
fn state_that_differs_unsaid_is_each_ranks_own() {
    let cases: [Case; 2] =
        [("mean", |rank| statistics(rank as f32, 7)), ("count", |rank| statistics(3.0, 10 * rank as i64))];
    for (entry, of) in cases {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, of);
        // As many load their own.
        for (number, resumed, part) in resume(folder.path(), 2, |builder| builder) {
            assert!(resumed.unwrap().is_some_and(|resumed| resumed.left_out.is_empty()));
            let expected = of(number);
            assert_eq!(
                (mean(&part), part.0.int("count").unwrap()),
                (mean(&expected), expected.0.int("count").unwrap())
            );
        }
        for ranks in [1, 3] {
            for (_, told, part) in resume(folder.path(), ranks, |builder| builder) {
                let told = told.unwrap_err();
                let is_it = |told: &CheckpointError| matches!(told, CheckpointError::RanksDiffer { part, entry: found, saved: 2 } if part == "model" && found == entry);
                assert!(is_it(&told) && mean(&part) == -1.0, "unchanged: {told}");
                assert!(told.to_string().contains("`from_rank_0`") && told.to_string().contains("2 ranks"), "{told}");
            }
            // What the run may say.
            for (_, resumed, part) in resume(folder.path(), ranks, |builder| builder.begin_anew(["model"])) {
                assert_eq!(resumed.unwrap().unwrap().left_out, ["model"]);
                assert_eq!((mean(&part), part.0.int("count").unwrap()), (-1.0, -1));
            }
            for (_, resumed, part) in resume(folder.path(), ranks, |builder| builder.from_rank_0(["model"])) {
                assert!(resumed.unwrap().unwrap().left_out.is_empty());
                assert_eq!((mean(&part), part.0.int("count").unwrap()), (mean(&of(0)), of(0).0.int("count").unwrap()));
            }
        }
        let file = folder.path().join("whole.safetensors");
        let told = consolidate(folder.path(), None, "model", &file).unwrap_err();
        assert!(matches!(told, CheckpointError::RanksDiffer { .. }) && !file.exists(), "{told}");
        assert_eq!(consolidate_from_rank_0(folder.path(), None, "model", &file).unwrap(), 1);
        assert_eq!(fs::read(&file).unwrap().len() % 8, 4, "a header, and 5 numbers");
    }
    // The same on all.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, |_| statistics(2.0, 2));
    assert!(
        resume(folder.path(), 3, |builder| builder)
            .iter()
            .all(|(_, resumed, part)| resumed.is_ok() && mean(part) == 2.0)
    );
}

/// Other names on another rank.
#[test]
fn parts_of_other_names_and_shapes_differ() {
    let others: [fn() -> Plain; 3] = [
        || Plain::new([("weight", Entry::Int(1))]),
        || Plain::new([("weight", Entry::Tensor(Tensor::from_slice(&[5.0f32; 4])))]),
        || Plain::new([("other", Entry::Tensor(Tensor::from_slice(&[5.0f32; 3])))]),
    ];
    for other in others {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, |rank| match rank {
            0 => Plain::new([("weight", Entry::Tensor(Tensor::from_slice(&[5.0f32; 3])))]),
            _ => other(),
        });
        for (_, told, _) in resume(folder.path(), 3, |builder| builder) {
            let told = told.unwrap_err();
            assert!(matches!(told, CheckpointError::RanksDiffer { .. }), "{told}");
        }
    }
}

fn copy(from: &Path, to: &Path) {
    fs::remove_dir_all(to).unwrap();
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Two runs that differ on one rank alone, whichever it is.
#[test]
fn the_common_number_depends_on_every_rank() {
    let plain = |value: i64| Plain::new([("drawn", Entry::Int(value))]);
    for other in 0..3 {
        for number in 0..4 {
            let (folder, another) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
            save(folder.path(), 3, |rank| plain(rank as i64));
            save(another.path(), 3, |rank| plain(if rank == other { 100 + number } else { rank as i64 }));
            copy(&step(another.path(), other, 1), &step(folder.path(), other, 1));
            let found = run(Rank::group(3, &[]), |rank| {
                let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build()?;
                checkpoint.resume(&mut [("model", &mut plain(-1))])
            });
            for told in found {
                assert!(matches!(told, Err(CheckpointError::OtherRun { step: 1, .. })), "rank {other}: {told:?}");
            }
        }
    }
}

/// Of ranks that load what one process has saved, each has to have the same.
#[test]
fn ranks_with_checkpoints_of_several_single_processes_are_told() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (number, folder) in folders.iter().enumerate() {
        let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
        checkpoint.save(1, &[("model", &statistics(number as f32, 1))]).unwrap();
        checkpoint.finish().unwrap();
    }
    for writers in [Writers::First, Writers::Each] {
        let found = run(Rank::group(2, &[]), |rank| {
            let mut part = statistics(-1.0, -1);
            let folder = &folders[rank.rank()];
            let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, writers).build().unwrap();
            (checkpoint.resume(&mut [("model", &mut part)]), mean(&part))
        });
        for (told, mean) in found {
            assert!(matches!(told, Err(CheckpointError::OtherRun { .. })) && mean == -1.0, "{told:?}");
        }
    }
}
