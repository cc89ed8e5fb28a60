//! First checkpoints that were never completed: the run begins anew then, and only then.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{Checkpoint, CheckpointError, Writers};
use overdrive_core::RankGroup;

use crate::group::{Rank, run};
use crate::model;
use crate::shards::{Sharded, resume, resumed_at, save, step};

/// A first save of so many ranks, of which one cannot write.
fn interrupted(folder: &Path, ranks: usize, lacking: usize, number: u64) {
    let own = folder.join(format!("rank-{lacking}"));
    fs::create_dir_all(&own).unwrap();
    let in_the_way = own.join(format!(".writing-step-{number:012}"));
    fs::write(&in_the_way, "").unwrap();
    run(Rank::group(ranks, &[]), |rank| {
        let this = rank.rank();
        let mut checkpoint = Checkpoint::builder(folder).ranks(rank, Writers::Each).build().unwrap();
        let (mut sharded, mut vs) = (Sharded::new(this, ranks, 0.0), model(0.0));
        assert!(checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().is_none());
        let parts = (Sharded::new(this, ranks, number as f64), model(number as f64));
        checkpoint.save(number, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
        checkpoint.finish().unwrap_err();
    });
    fs::remove_file(in_the_way).unwrap();
    assert!(note(folder, lacking).exists());
}

fn note(folder: &Path, rank: usize) -> std::path::PathBuf {
    folder.join(format!("rank-{rank}/.first-step"))
}

fn flip_last(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

fn alone(folder: &Path) -> Result<Option<u64>, CheckpointError> {
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    let mut checkpoint = Checkpoint::builder(folder).build()?;
    Ok(checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)])?.map(|resumed| resumed.step))
}

/// A note of ranks that are no more is not one of the ranks whose checkpoint is damaged or lost.
#[test]
fn a_note_of_an_earlier_attempt_never_hides_damage() {
    type Damage = fn(&Path);
    let damages: [Damage; 4] = [
        |folder| fs::remove_dir_all(folder.join("rank-1")).unwrap(),
        |folder| fs::remove_dir_all(step(folder, 1, 1)).unwrap(),
        |folder| flip_last(&step(folder, 1, 1).join("sharded.safetensors")),
        |folder| flip_last(&step(folder, 0, 1).join("manifest.json")),
    ];
    for damage in damages {
        // Also where the note is still there, of a crash before it was removed.
        for stays in [false, true] {
            let folder = tempfile::tempdir().unwrap();
            interrupted(folder.path(), 4, 3, 1);
            let text = fs::read(note(folder.path(), 3)).unwrap();
            assert_eq!(resumed_at(folder.path(), 2), None);
            save(folder.path(), 2, &[1]);
            assert!(!note(folder.path(), 3).exists(), "a step is complete");
            if stays {
                fs::write(note(folder.path(), 3), text).unwrap();
            }
            damage(folder.path());
            for ranks in [2, 4, 1, 2] {
                let found = resume(folder.path(), ranks);
                assert!(found.iter().all(Result::is_err), "{ranks} ranks: {found:?}");
            }
            assert!(alone(folder.path()).is_err());
        }
    }
}

#[test]
fn a_note_of_ranks_never_hides_damage_of_a_single_process() {
    for stays in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        interrupted(folder.path(), 2, 1, 1);
        let text = fs::read(note(folder.path(), 1)).unwrap();
        assert_eq!(alone(folder.path()).unwrap(), None);
        let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
        checkpoint.save(1, &[("sharded", &Sharded::new(0, 1, 1.0)), ("model", &model(1.0))]).unwrap();
        checkpoint.finish().unwrap();
        if stays {
            fs::write(note(folder.path(), 1), text).unwrap();
        }
        flip_last(&folder.path().join("step-000000000001/model.safetensors"));
        for _ in 0..3 {
            assert!(alone(folder.path()).unwrap_err().is_damage());
        }
        assert!(resume(folder.path(), 2).iter().all(Result::is_err));
    }
}

/// Nor does one hide that of the others, where the checkpoint was not complete.
#[test]
fn damage_beside_a_rank_that_lacks_the_first_is_an_error() {
    // Other numbers of ranks look for the files of all, and do not read any where a rank has none.
    for (file, numbers) in [("model.safetensors", &[2][..]), ("manifest.json", &[2, 1, 3])] {
        let folder = tempfile::tempdir().unwrap();
        interrupted(folder.path(), 2, 1, 1);
        flip_last(&step(folder.path(), 0, 1).join(file));
        for &ranks in numbers {
            let found = resume(folder.path(), ranks);
            assert!(found.iter().all(Result::is_err), "{file}, {ranks} ranks: {found:?}");
        }
    }
}

/// A note is removed when a step is complete, also where the ranks were ended before they could.
#[test]
fn resuming_removes_notes() {
    let folder = tempfile::tempdir().unwrap();
    save(folder.path(), 2, &[1]);
    fs::create_dir(folder.path().join("rank-3")).unwrap();
    for rank in [1, 3] {
        fs::write(note(folder.path(), rank), "1 2\n").unwrap();
    }
    assert_eq!(resumed_at(folder.path(), 2), Some(1));
    assert!(!note(folder.path(), 1).exists() && !note(folder.path(), 3).exists());
}

#[test]
fn several_first_saves_in_a_row_may_be_interrupted_at_any_steps() {
    // Ranks, the one that lacks its checkpoint, and the step.
    let attempts: [&[(usize, usize, u64)]; 6] = [
        &[(2, 1, 37), (2, 1, 52)],
        &[(2, 1, 52), (2, 1, 37)],
        &[(2, 0, 37), (2, 1, 52), (2, 0, 45)],
        &[(4, 2, 37), (3, 1, 52), (4, 0, 40)],
        &[(4, 1, 37), (2, 0, 37), (3, 2, 37)],
        &[(2, 0, 37), (3, 0, 52), (2, 1, 60)],
    ];
    for attempts in attempts {
        let folder = tempfile::tempdir().unwrap();
        for &(ranks, lacking, number) in attempts {
            interrupted(folder.path(), ranks, lacking, number);
            for others in [ranks, 1, 3] {
                assert_eq!(resumed_at(folder.path(), others), None, "{others} ranks after {attempts:?}");
            }
        }
        assert_eq!(resumed_at(folder.path(), 2), None);
        run(Rank::group(2, &[]), |rank| {
            let this = rank.rank();
            let mut checkpoint = Checkpoint::builder(folder.path()).ranks(rank, Writers::Each).build().unwrap();
            let (mut sharded, mut vs) = (Sharded::new(this, 2, 0.0), model(0.0));
            assert!(checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().is_none());
            let parts = (Sharded::new(this, 2, 90.0), model(90.0));
            checkpoint.set("ranks", &2).unwrap();
            checkpoint.save(90, &[("sharded", &parts.0), ("model", &parts.1)]).unwrap();
            checkpoint.finish().unwrap();
        });
        for ranks in [2, 3, 1] {
            assert_eq!(resumed_at(folder.path(), ranks), Some(90), "{attempts:?}");
        }
    }
}

/// What a single process does after ranks whose first save was interrupted.
#[test]
fn a_single_process_begins_anew_before_the_step_of_ranks_that_was_never_complete() {
    let folder = tempfile::tempdir().unwrap();
    interrupted(folder.path(), 2, 1, 37);
    let mut checkpoint = Checkpoint::builder(folder.path()).build().unwrap();
    let (mut sharded, mut vs) = (Sharded::new(0, 1, 0.0), model(0.0));
    assert!(checkpoint.resume(&mut [("sharded", &mut sharded), ("model", &mut vs)]).unwrap().is_none());
    checkpoint.set("ranks", &1).unwrap();
    checkpoint.save(52, &[("sharded", &Sharded::new(0, 1, 52.0)), ("model", &model(52.0))]).unwrap();
    checkpoint.finish().unwrap();
    assert!(folder.path().join("rank-0/abandoned-step-000000000037").exists());
    assert_eq!(resumed_at(folder.path(), 3), Some(52));
}
