//! Steps that are passed over, and those that are kept, where others have saved them.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{Checkpoint, CheckpointError, Goal, Writers};
use overdrive_core::{RankGroup, RowsToLoad, Shapes, StateDict, StateError, Stateful};

use crate::group::{Rank, run};
use crate::shards::{Sharded, save, step};
use crate::{model, value};

/// Saves steps, each filled with its number, with their losses.
fn save_with_losses(checkpoint: &mut Checkpoint, number: usize, ranks: usize, losses: &[(u64, f64)]) {
    for &(step, loss) in losses {
        checkpoint.set("loss", &loss).unwrap();
        let parts = (Sharded::new(number, ranks, step as f64), model(step as f64));
        checkpoint.save(step, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
    }
    checkpoint.wait().unwrap();
}

fn flip_last(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

/// The fields of a step by which a run builds its parts: `resume` loads the same step.
#[test]
fn fields_are_those_of_the_step_that_is_resumed_where_newer_ones_are_damaged() {
    for ranks in [1, 2, 3] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 2, &[1, 2, 3]);
        // In the rows of one rank alone, which only some ranks read.
        let damaged = step(folder.path(), 1, 3).join("sharded.safetensors");
        flip_last(&damaged);
        run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
            assert_eq!(checkpoint.read_fields().unwrap(), Some(2), "{ranks} ranks");
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
            assert_eq!((resumed.step, resumed.skipped.len(), value(&vs)), (2, 1, 2.0), "{ranks} ranks");
        });
        // Rank 1's is renamed by rank 1.
        let renamed = folder.path().join("rank-1/damaged-step-000000000003").exists();
        assert!(renamed == (ranks > 1) && renamed != damaged.exists());
    }
    // Whatever comes in between.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1, 2]);
    let damaged = step(folder.path(), 0, 2).join("sharded.safetensors");
    flip_last(&damaged);
    let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
    assert_eq!(checkpoint.read_fields().unwrap(), Some(1));
    flip_last(&damaged);
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    assert_eq!((resumed.step, resumed.skipped.len()), (1, 1));
    // And it is looked for anew afterwards.
    let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    assert_eq!(resumed.step, 2);
}

/// A part that asks for what is not there.
struct Asks(&'static str, std::ops::Range<i64>);

impl Stateful for Asks {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(StateDict::new())
    }

    fn load_state_dict(&mut self, _: &StateDict) -> Result<(), StateError> {
        panic!("loaded without what it asked for")
    }

    fn rows_to_load(&self, _: &StateDict, _: &Shapes) -> Result<RowsToLoad, StateError> {
        Ok([(self.0.to_owned(), self.1.clone())].into())
    }
}

#[test]
fn rows_that_are_not_there_are_named() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    for (name, rows) in [("none", 0..1), ("few", 0..3), ("few", -1..1), ("few", 3..4), ("large", 0..i64::MAX)] {
        let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
        let mut part = Asks(name, rows);
        let told = checkpoint.resume(&mut [("sharded", &mut part), ("model", &mut model(0.0))]).unwrap_err();
        assert!(matches!(&told, CheckpointError::Part { part, .. } if part == "sharded"), "{told}");
        assert!(told.to_string().contains(&format!("`{name}`")), "{told}");
    }
}

/// The best that other ranks have saved stays the best, for all ranks alike.
#[test]
fn the_best_of_before_a_resume_stays_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let saves = |ranks: usize, losses: &[(u64, f64)]| {
        run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder.path())
                .ranks(rank, Writers::Each)
                .keep(1)
                .keep_best(1, "loss", Goal::Min)
                .build()
                .unwrap();
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
            save_with_losses(&mut checkpoint, number, ranks, losses);
            let best = checkpoint.best().unwrap().unwrap();
            checkpoint.load(best, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
            sharded.check(best as f64);
            (best, checkpoint.steps().unwrap())
        })
    };
    assert_eq!(saves(2, &[(1, 0.1), (2, 0.5)]), vec![(1, vec![1, 2]); 2]);
    let found = saves(3, &[(3, 0.9), (4, 0.3), (5, 0.8)]);
    assert_eq!(found, [(1, vec![1, 5]), (1, vec![1, 5]), (1, vec![5])], "4 is not the best of all");
    // A single process.
    let mut checkpoint = Checkpoint::builder(folder.path()).keep(1).keep_best(1, "loss", Goal::Min).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    for (step, loss) in [(6, 0.2), (7, 0.7)] {
        checkpoint.set("loss", &loss).unwrap();
        checkpoint.save(step, &[("sharded", &sharded), ("model", &vs)]).unwrap();
        checkpoint.wait().unwrap();
    }
    assert_eq!((checkpoint.best().unwrap(), checkpoint.steps().unwrap()), (Some(1), vec![7]));
}

/// What the ranks that are left have removed is not complete: it is not the best, though others still have their parts.
#[test]
fn the_best_is_one_that_is_complete() {
    let folder = tempfile::tempdir().unwrap();
    let saves = |ranks: usize, from: Option<u64>, losses: &[(u64, f64)]| {
        run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let builder = Checkpoint::builder(folder.path()).keep(2).keep_best(1, "loss", Goal::Min);
            let mut checkpoint = builder.ranks(rank, Writers::Each).build().unwrap();
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            if let Some(from) = from {
                checkpoint.load(from, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
            }
            save_with_losses(&mut checkpoint, number, ranks, losses);
            let best = checkpoint.best().unwrap().unwrap();
            let steps = checkpoint.steps().unwrap();
            checkpoint.load(best, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
            sharded.check(best as f64);
            (best, steps)
        })
    };
    assert_eq!(saves(4, None, &[(100, 0.1), (200, 0.9)]), vec![(100, vec![100, 200]); 4]);
    assert_eq!(saves(2, Some(200), &[(300, 0.05)]), vec![(300, vec![200, 300]); 2]);
    assert!(step(folder.path(), 3, 100).exists(), "of a rank that is no more");
    let losses = [(400, 0.3), (500, 0.2), (600, 0.4), (700, 0.5)];
    assert_eq!(saves(2, Some(200), &losses), vec![(500, vec![500, 600, 700]); 2]);
}

/// A manifest that cannot be read for a moment: nothing is removed, because it may be the best.
#[test]
fn where_a_metric_cannot_be_read_nothing_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let builder = Checkpoint::builder(folder.path()).keep(1).keep_best(1, "loss", Goal::Min).background(false);
    let mut checkpoint = builder.build().unwrap();
    let save = |checkpoint: &mut Checkpoint, step: u64| {
        checkpoint.set("loss", &(step as f64)).unwrap();
        checkpoint.save(step, &[("model", &model(0.0))]).unwrap();
    };
    save(&mut checkpoint, 1);
    let (manifest, moved) = (folder.path().join("step-000000000001/manifest.json"), folder.path().join("moved"));
    fs::rename(&manifest, &moved).unwrap();
    fs::create_dir(&manifest).unwrap();
    save(&mut checkpoint, 2);
    save(&mut checkpoint, 3);
    assert!(matches!(checkpoint.best(), Err(CheckpointError::Io { .. })));
    let told = checkpoint.take_warnings();
    assert!(told.iter().all(|told| matches!(told, CheckpointError::NotRemoved { .. })) && told.len() == 2, "{told:?}");
    fs::remove_dir(&manifest).unwrap();
    fs::rename(&moved, &manifest).unwrap();
    save(&mut checkpoint, 4);
    assert_eq!((checkpoint.best().unwrap(), checkpoint.steps().unwrap()), (Some(1), vec![1, 4]));
}
