//! Runs of a single process and of ranks in one folder, one after another: no branch that was left is resumed again.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers, consolidate};
use overdrive_core::RankGroup;

use crate::group::{Rank, run};
use crate::shards::{Sharded, resume, resumed_at, save, step};
use crate::{model, value};

/// A single process that goes back to a step and saves another, with the step as value.
fn alone_from(folder: &Path, from: u64, to: u64) {
    let mut checkpoint = Checkpoint::builder(folder).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    checkpoint.load(from, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
    sharded.check(from as f64);
    checkpoint.set("ranks", &1).unwrap();
    checkpoint.save(to, &[("sharded", &Sharded::new(0, 1, to as f64)), ("model", &model(to as f64))]).unwrap();
    checkpoint.finish().unwrap();
}

/// Ranks that do.
fn ranks_from(folder: &Path, ranks: usize, from: u64, to: u64) {
    run(Rank::group(ranks, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
        checkpoint.load(from, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
        checkpoint.set("ranks", &ranks).unwrap();
        let parts = (Sharded::new(number, ranks, to as f64), model(to as f64));
        checkpoint.save(to, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
        checkpoint.finish().unwrap();
    });
}

/// Where a single process resumes.
fn alone_at(folder: &Path) -> Option<u64> {
    let mut checkpoint = Checkpoint::builder(folder).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap()?;
    sharded.check(resumed.step as f64);
    Some(resumed.step)
}

/// All resume at this step, and a file is made of it.
fn newest_is(folder: &Path, newest: u64) {
    assert_eq!(alone_at(folder), Some(newest), "a single process");
    for ranks in [4, 2, 3] {
        assert_eq!(resumed_at(folder, ranks), Some(newest), "{ranks} ranks");
    }
    let file = tempfile::tempdir().unwrap();
    assert_eq!(consolidate(folder, None, "sharded", file.path().join("whole.safetensors")).unwrap(), newest);
}

#[test]
fn a_single_process_sets_the_later_steps_of_ranks_aside() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 4, &[20, 30, 40]);
    alone_from(folder.path(), 20, 30);
    for rank in 0..4 {
        assert!(step(folder.path(), rank, 20).exists() && !step(folder.path(), rank, 40).exists());
        assert!(folder.path().join(format!("rank-{rank}/abandoned-step-000000000030")).exists());
    }
    newest_is(folder.path(), 30);
}

#[test]
fn ranks_set_the_later_steps_of_a_single_process_and_of_ranks_that_are_no_more_aside() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 4, &[10]);
    for number in [20, 30, 40] {
        alone_from(folder.path(), if number == 20 { 10 } else { number - 10 }, number);
    }
    ranks_from(folder.path(), 2, 20, 30);
    assert!(folder.path().join("abandoned-step-000000000040").exists());
    newest_is(folder.path(), 30);
    // Other ranks, which go back too.
    save_on(folder.path(), 4, &[40, 50]);
    ranks_from(folder.path(), 2, 40, 45);
    assert!(folder.path().join("rank-3/abandoned-step-000000000050").exists());
    newest_is(folder.path(), 45);
}

/// Resumes, and saves these steps.
fn save_on(folder: &Path, ranks: usize, steps: &[u64]) {
    let first = resumed_at(folder, ranks).unwrap();
    for (before, &to) in [first].iter().chain(steps).zip(steps) {
        ranks_from(folder, ranks, *before, to);
    }
}

/// A step again, which a single process may save in place of that of ranks.
#[test]
fn a_step_that_is_saved_again_in_another_way_counts() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1, 2]);
    let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    checkpoint.save(2, &[("sharded", &Sharded::new(0, 1, 7.0)), ("model", &model(7.0))]).unwrap();
    checkpoint.finish().unwrap();
    for ranks in [1, 2, 3] {
        run(Rank::group(ranks, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
            let (mut sharded, mut vs) = (Sharded::new(number, ranks, 0.0), model(0.0));
            checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
            assert_eq!(value(&vs), 7.0);
            sharded.check(7.0);
        });
    }
}

#[test]
fn where_the_newest_is_damaged_the_next_is_found_whoever_has_saved_it() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[10]);
    alone_from(folder.path(), 10, 15);
    save_on(folder.path(), 3, &[20]);
    alone_from(folder.path(), 20, 30);
    fs::write(folder.path().join("step-000000000030/model.safetensors"), "").unwrap();
    let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    let resumed = checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().unwrap();
    assert_eq!((resumed.step, resumed.skipped.len()), (20, 1), "not 15, which is in its own folder");
    assert!(folder.path().join("damaged-step-000000000030").exists());
    drop(checkpoint);
    newest_is(folder.path(), 20);
}

/// Another process that is still there keeps its checkpoints.
#[test]
fn checkpoints_of_a_process_that_still_writes_are_not_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let mut living = Checkpoint::builder(folder.path()).build().unwrap();
    for number in [10, 20] {
        living
            .save(number, &[("sharded", &Sharded::new(0, 1, number as f64)), ("model", &model(number as f64))])
            .unwrap();
    }
    living.wait().unwrap();
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        let (mut sharded, mut vs) = (Sharded::new(number, 2, 0.0), model(0.0));
        checkpoint.load(10, &mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap();
        let told = checkpoint.save(15, &[("sharded", &sharded), ("model", &vs)]).unwrap_err();
        match number {
            0 => assert!(matches!(&told, CheckpointError::InUse { folder: used } if used == folder.path()), "{told}"),
            _ => assert!(matches!(told, CheckpointError::OtherRank { .. }), "{told}"),
        }
    });
    assert_eq!(living.steps().unwrap(), [10, 20]);
}

/// Rank 0 writes for all; before, each rank has written its own.
#[test]
fn ranks_of_which_one_writes_resume_what_each_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    run(Rank::group(3, &[]), |rank| {
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
        [1, 2].into_iter().for_each(|step| checkpoint.save(step, &[("model", &model(step as f64))]).unwrap());
        checkpoint.finish().unwrap();
    });
    run(Rank::group(2, &[]), |rank| {
        let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::First).build().unwrap();
        let mut vs = model(0.0);
        assert_eq!(checkpoint.resume(&mut [("model", &mut vs)]).unwrap().map(|resumed| resumed.step), Some(2));
        assert_eq!(value(&vs), 2.0);
        checkpoint.load(1, &mut [("model", &mut vs)]).unwrap();
        checkpoint.save(3, &[("model", &model(3.0))]).unwrap();
        checkpoint.finish().unwrap();
    });
    assert!(folder.path().join("rank-2/abandoned-step-000000000002").exists());
    assert!(resume_model(folder.path(), 3).into_iter().all(|found| found == 3.0));
}

fn resume_model(folder: &Path, ranks: usize) -> Vec<f64> {
    run(Rank::group(ranks, &[]), |rank| {
        let mut vs = model(0.0);
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        checkpoint.resume(&mut [("model", &mut vs)]).unwrap().unwrap();
        value(&vs)
    })
}

/// A rank's folder that is lost is never taken for one that has no checkpoint yet.
#[test]
fn a_lost_folder_is_an_error_each_time_or_an_older_step_is_resumed() {
    for (lost, ranks) in [(1, 3), (0, 3), (2, 3), (2, 2), (0, 2), (1, 4), (2, 1)] {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 3, &[1]);
        fs::remove_dir_all(folder.path().join(format!("rank-{lost}"))).unwrap();
        for attempt in 0..3 {
            let found = resume(folder.path(), ranks);
            assert!(found.iter().all(Result::is_err), "rank {lost}, {ranks} ranks, attempt {attempt}: {found:?}");
        }
        // Its checkpoint alone, without the folder.
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 3, &[1]);
        fs::remove_dir_all(step(folder.path(), lost, 1)).unwrap();
        assert!(resume(folder.path(), ranks).iter().all(Result::is_err), "rank {lost}, {ranks} ranks");
    }
    // An older one that a single process has saved.
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    alone_from(folder.path(), 1, 2);
    save_on(folder.path(), 3, &[3]);
    fs::remove_dir_all(folder.path().join("rank-1")).unwrap();
    for ranks in [3, 2] {
        assert_eq!(resumed_at(folder.path(), ranks), Some(2), "{ranks} ranks");
    }
}

/// Where no rank sees the folders of others.
#[test]
fn ranks_on_disks_of_their_own_know_a_lost_folder_from_one_that_never_had_a_checkpoint() {
    let disks = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let on_disks = |work: fn(&mut Checkpoint) -> Result<Option<u64>, CheckpointError>| {
        run(Rank::group(2, &[]), |rank| {
            let folder = disks[rank.rank()].path();
            let mut checkpoint = Checkpoint::builder(folder).background(false).ranks(rank, Writers::Each).build()?;
            work(&mut checkpoint)
        })
    };
    let saves = |checkpoint: &mut Checkpoint| checkpoint.save(1, &[("model", &model(1.0))]).map(|()| None);
    let resumes = |checkpoint: &mut Checkpoint| {
        Ok(checkpoint.resume(&mut [("model", &mut model(0.0))])?.map(|resumed| resumed.step))
    };
    let lost = disks[1].path().join("rank-1");
    let in_the_way = lost.join(".writing-step-000000000001");
    fs::create_dir(&lost).unwrap();
    fs::write(&in_the_way, "").unwrap();
    assert!(on_disks(saves).iter().all(Result::is_err));
    fs::remove_file(in_the_way).unwrap();
    assert!(disks[0].path().join("rank-0/step-000000000001").exists());
    for _ in 0..2 {
        assert!(on_disks(resumes).iter().all(|found| matches!(found, Ok(None))), "it was never complete");
    }
    assert!(on_disks(saves).iter().all(Result::is_ok));
    assert!(on_disks(resumes).iter().all(|found| matches!(found, Ok(Some(1)))));
    fs::remove_dir_all(&lost).unwrap();
    for attempt in 0..3 {
        let found = on_disks(resumes);
        assert!(found.iter().all(Result::is_err), "attempt {attempt}: {found:?}");
    }
}
