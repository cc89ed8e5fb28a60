//! Ranks that save, stop and resume at the same step, whichever of them fails or dies.

use std::fs;
use std::path::Path;

use overdrive_checkpoint::{Checkpoint, CheckpointBuilder, CheckpointError, Goal, RngState, Writers};
use overdrive_core::{Entry, RankGroup, Stateful};
use tch::Device;

use crate::group::{Rank, run};
use crate::{Plain, model, value};

const BOTH: [Writers; 2] = [Writers::First, Writers::Each];

fn builder(folder: &Path, rank: Rank, writers: Writers) -> CheckpointBuilder {
    Checkpoint::builder(folder).ranks(rank, writers)
}

/// The folder of a rank's step.
fn path(folder: &Path, writers: Writers, rank: usize, step: u64) -> std::path::PathBuf {
    let own = if writers == Writers::Each { folder.join(format!("rank-{rank}")) } else { folder.to_path_buf() };
    own.join(format!("step-{step:012}"))
}

/// Resumes, and returns the step and the weights' value.
fn resume(checkpoint: &mut Checkpoint) -> Result<Option<(u64, f64)>, CheckpointError> {
    let mut vs = model(0.0);
    let resumed = checkpoint.resume(&mut [("model", &mut vs)])?;
    Ok(resumed.map(|resumed| (resumed.step, value(&vs))))
}

/// Saves these steps, with the step number as the weights' value.
fn save(checkpoint: &mut Checkpoint, steps: impl IntoIterator<Item = u64>) -> Result<(), CheckpointError> {
    steps.into_iter().try_for_each(|step| checkpoint.save(step, &[("model", &model(step as f64))]))
}

#[test]
fn all_ranks_resume_from_what_rank_0_or_each_rank_has_written() {
    for writers in BOTH {
        for background in [true, false] {
            let folder = tempfile::tempdir().unwrap();
            let found = run(Rank::group(3, &[]), |rank| {
                let mut checkpoint = builder(folder.path(), rank, writers).keep(2).background(background).build()?;
                assert_eq!(resume(&mut checkpoint)?, None);
                save(&mut checkpoint, [10, 20, 30])?;
                checkpoint.finish()
            });
            found.into_iter().for_each(|found| found.unwrap());
            let written = |rank| path(folder.path(), writers, rank, 30).join("manifest.json").is_file();
            assert!((0..3).all(written));
            assert_eq!(folder.path().join("step-000000000030").is_dir(), writers == Writers::First);
            let found = run(Rank::group(3, &[]), |rank| {
                let mut checkpoint = builder(folder.path(), rank, writers).build()?;
                assert_eq!(checkpoint.steps()?, [20, 30]);
                let newest = resume(&mut checkpoint)?;
                checkpoint.load(20, &mut [("model", &mut model(0.0))])?;
                Ok::<_, CheckpointError>(newest)
            });
            assert!(found.into_iter().all(|found| found.unwrap() == Some((30, 30.0))));
        }
    }
}

#[test]
fn rank_0_refuses_to_write_state_that_differs_by_rank() {
    let folder = tempfile::tempdir().unwrap();
    let errors = run(Rank::group(2, &[]), |rank| {
        let mut checkpoint = builder(folder.path(), rank, Writers::First).build().unwrap();
        let error = checkpoint.save(1, &[("rng", &RngState::new(Device::Cpu))]).unwrap_err();
        assert!(matches!(error, CheckpointError::OwnOfRank { ref part } if part == "rng"), "{error}");
        checkpoint.save(2, &[("model", &model(1.0))]).unwrap();
        checkpoint.finish()
    });
    errors.into_iter().for_each(|ended| ended.unwrap());
}

#[test]
fn each_rank_gets_its_own_state_back() {
    let folder = tempfile::tempdir().unwrap();
    let own = |rank: usize| Plain::new([("drawn", Entry::Int(100 + rank as i64))]);
    run(Rank::group(2, &[]), |rank| {
        let part = own(rank.rank());
        let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
        checkpoint.save(1, &[("rng", &part)]).unwrap();
        checkpoint.finish().unwrap();
    });
    run(Rank::group(2, &[]), |rank| {
        let (number, mut part) = (rank.rank(), own(7));
        let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
        checkpoint.resume(&mut [("rng", &mut part)]).unwrap().unwrap();
        assert_eq!(part.0.int("drawn").unwrap(), 100 + number as i64);
    });
}

#[test]
fn the_newest_step_that_all_ranks_have_undamaged_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let saved = || {
        run(Rank::group(2, &[]), |rank| {
            let mut checkpoint = builder(folder.path(), rank, Writers::Each).keep(9).build().unwrap();
            resume(&mut checkpoint).unwrap();
            save(&mut checkpoint, [10, 20, 30, 40, 50].into_iter().filter(|step| !path_of(&folder, *step))).unwrap();
            checkpoint.finish().unwrap();
        })
    };
    fn path_of(folder: &tempfile::TempDir, step: u64) -> bool {
        path(folder.path(), Writers::Each, 1, step).exists() && path(folder.path(), Writers::Each, 0, step).exists()
    }
    let resumed = || {
        run(Rank::group(2, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
            let resumed = resume(&mut checkpoint).unwrap();
            (number, resumed, checkpoint.steps().unwrap())
        })
    };
    saved();
    // Rank 1 lacks 50, rank 0 lacks 40, and rank 1's 30 is truncated.
    fs::remove_dir_all(path(folder.path(), Writers::Each, 1, 50)).unwrap();
    fs::remove_dir_all(path(folder.path(), Writers::Each, 0, 40)).unwrap();
    fs::write(path(folder.path(), Writers::Each, 1, 30).join("model.safetensors"), "").unwrap();
    for (rank, resumed, steps) in resumed() {
        assert_eq!((resumed, steps), (Some((20, 20.0)), vec![10, 20]), "rank {rank}");
    }
    assert!(folder.path().join("rank-1/damaged-step-000000000030").is_dir());
    assert!(folder.path().join("rank-0/abandoned-step-000000000030").is_dir());
    saved();
    assert!(resumed().iter().all(|(_, resumed, _)| *resumed == Some((50, 50.0))));
}

#[test]
fn a_failure_on_one_rank_is_an_error_on_all_and_changes_nothing() {
    for writers in BOTH {
        let folder = tempfile::tempdir().unwrap();
        run(Rank::group(2, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint = builder(folder.path(), rank, writers).build().unwrap();
            save(&mut checkpoint, [1, 2]).unwrap();
            checkpoint.wait().unwrap();
            // Rank 1 has another model.
            let (mut own, mut other) = (model(7.0), Plain::new([("other", Entry::Int(1))]));
            let part: &mut dyn Stateful = if number == 0 { &mut own } else { &mut other };
            let error = checkpoint.resume(&mut [("model", part)]).unwrap_err();
            let others = matches!(&error, CheckpointError::OtherRank { action } if action.contains("of step 2"));
            assert_eq!(others, number == 0, "{error}");
            assert_eq!(value(&own), 7.0, "unchanged");
            // If one rank cannot save, none does; afterwards all can continue.
            let names = if number == 0 { ["a", "b"] } else { ["a", "a"] };
            let parts = names.map(|name| (name, &own as &dyn Stateful));
            let error = checkpoint.save(3, &parts).unwrap_err();
            assert_eq!(matches!(error, CheckpointError::OtherRank { .. }), number == 0, "{error}");
            checkpoint.wait().unwrap();
            assert_eq!(checkpoint.steps().unwrap(), [1, 2]);
            save(&mut checkpoint, [3]).unwrap();
            let error = save(&mut checkpoint, [3]).unwrap_err();
            assert!(matches!(error, CheckpointError::StepOrder { step: 3, last: 3 }), "{error}");
            checkpoint.finish().unwrap();
        });
    }
}

#[test]
fn a_folder_that_rank_0_cannot_open_is_an_error_on_all() {
    let folder = tempfile::tempdir().unwrap();
    let another = Checkpoint::builder(folder.path()).build().unwrap();
    let opened = |writers| {
        run(Rank::group(2, &[]), |rank| {
            builder(folder.path(), rank, writers).build().map(drop).map_err(|it| it.to_string())
        })
    };
    let errors: Vec<String> = opened(Writers::First).into_iter().map(Result::unwrap_err).collect();
    assert!(errors[0].contains("another process writes") && errors[0].contains("call `ranks`"), "{errors:?}");
    assert!(errors[1].starts_with("another rank could not open its folder"), "{errors:?}");
    drop(another);
    opened(Writers::First).into_iter().for_each(|opened| opened.unwrap());
}

#[test]
fn a_write_that_fails_on_one_rank_keeps_the_steps_that_all_have() {
    for background in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        run(Rank::group(2, &[]), |rank| {
            let number = rank.rank();
            let mut checkpoint =
                builder(folder.path(), rank, Writers::Each).keep(1).background(background).build().unwrap();
            save(&mut checkpoint, [10]).unwrap();
            checkpoint.wait().unwrap();
            // A file blocks the folder that rank 1 would write to.
            let in_the_way = folder.path().join("rank-1/.writing-step-000000000020");
            if number == 1 {
                fs::write(&in_the_way, "").unwrap();
            }
            let error = save(&mut checkpoint, [20]).and_then(|()| checkpoint.wait()).unwrap_err();
            assert_eq!(matches!(error, CheckpointError::OtherRank { .. }), number == 0, "{error}");
            let steps = if number == 0 { vec![10, 20] } else { vec![10] };
            assert_eq!(checkpoint.steps().unwrap(), steps, "the step that all have is kept");
            if number == 1 {
                fs::remove_file(&in_the_way).unwrap();
            }
            save(&mut checkpoint, [30]).unwrap();
            assert!(checkpoint.path(10).exists() || !background, "kept until all ranks have the next");
            checkpoint.finish().unwrap();
        });
        run(Rank::group(2, &[]), |rank| {
            let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
            assert_eq!(checkpoint.steps().unwrap(), [30]);
            assert_eq!(resume(&mut checkpoint).unwrap(), Some((30, 30.0)));
        });
    }
}

/// Otherwise, if a rank dies, its old step could be taken for a match of the other rank's new one.
#[test]
fn old_steps_are_set_aside_on_all_ranks_before_any_rank_writes_a_new_one() {
    let folder = tempfile::tempdir().unwrap();
    run(Rank::group(2, &[]), |rank| {
        let number = rank.rank();
        let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
        save(&mut checkpoint, [10, 20, 30]).unwrap();
        checkpoint.load(10, &mut [("model", &mut model(0.0))]).unwrap();
        // Rank 1 refuses, so that nothing is written.
        let vs = model(0.0);
        let parts: &[(&str, &dyn Stateful)] =
            if number == 0 { &[("model", &vs)] } else { &[("model", &vs), ("", &vs)] };
        checkpoint.save(20, parts).unwrap_err();
        assert_eq!(checkpoint.steps().unwrap(), if number == 0 { vec![10] } else { vec![10, 20, 30] });
    });
}

#[test]
fn all_ranks_stop_at_the_same_step_whichever_is_asked() {
    for (agree_every, stopped) in [(1, 1), (4, 4)] {
        let folder = tempfile::tempdir().unwrap();
        let found = run(Rank::group(3, &[]), |rank| {
            let time = if rank.rank() == 2 { 0 } else { 1_000_000 };
            let mut checkpoint = builder(folder.path(), rank, Writers::First)
                .stop_after(std::time::Duration::from_secs(time))
                .agree_every(agree_every)
                .build()
                .unwrap();
            (1..9).find(|&step| checkpoint.due(step).unwrap() && checkpoint.stop_requested())
        });
        assert_eq!(found, [Some(stopped); 3]);
    }
}

#[test]
fn rank_0s_metric_decides_the_best_on_all_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let found = run(Rank::group(2, &[]), |rank| {
        let sign = if rank.rank() == 0 { -1.0 } else { 1.0 };
        let mut checkpoint =
            builder(folder.path(), rank, Writers::Each).keep(1).keep_best(1, "loss", Goal::Min).build().unwrap();
        for step in 1..=4 {
            checkpoint.set("loss", &(sign * f64::from(step % 3))).unwrap();
            save(&mut checkpoint, [u64::from(step as u32)]).unwrap();
        }
        checkpoint.wait().unwrap();
        (checkpoint.steps().unwrap(), checkpoint.best().unwrap())
    });
    assert_eq!(found, vec![(vec![2, 4], Some(2)); 2]);
}

#[test]
fn a_run_with_other_ranks_resumes_and_one_without_its_folders_does_not_start_over_silently() {
    let folder = tempfile::tempdir().unwrap();
    let resumed = |ranks| {
        run(Rank::group(ranks, &[]), |rank| {
            let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
            resume(&mut checkpoint).map_err(|error| error.to_string())
        })
    };
    run(Rank::group(2, &[]), |rank| {
        let mut checkpoint = builder(folder.path(), rank, Writers::Each).build().unwrap();
        save(&mut checkpoint, [1, 2]).unwrap();
        checkpoint.finish().unwrap();
    });
    for ranks in [1, 3] {
        assert_eq!(resumed(ranks), vec![Ok(Some((2, 2.0))); ranks]);
    }
    fs::remove_dir_all(folder.path().join("rank-1")).unwrap();
    let errors: Vec<String> = resumed(2).into_iter().map(Result::unwrap_err).collect();
    assert!(errors[0].contains("another rank could not read its checkpoint of step 2"), "{errors:?}");
    assert!(errors[1].contains("rank-1/step-000000000002"), "{errors:?}");
    for error in resumed(1) {
        assert!(error.unwrap_err().contains("rank-1/step-000000000002"));
    }
}

/// Saves up to step 4, and returns an error when it or another rank dies. The weights' value encodes step and attempt.
fn attempt(folder: &Path, rank: Rank, writers: Writers, attempt: u64) -> Result<(), CheckpointError> {
    let mut checkpoint = builder(folder, rank, writers).keep(1).build()?;
    let first = resume(&mut checkpoint)?.map_or(1, |(step, _)| step + 1);
    for step in first..=4 {
        checkpoint.save(step, &[("model", &model((100 * attempt + step) as f64))])?;
    }
    checkpoint.finish()
}

/// Tries every agreement of a run, either rank, and with or without the loss of the last write.
#[test]
fn a_rank_that_dies_at_any_moment_leaves_a_step_that_all_resume_at() {
    let mut moments = 0;
    for (writers, dying) in [(Writers::Each, 0), (Writers::Each, 1), (Writers::First, 0), (Writers::First, 1)] {
        for calls in 0.. {
            let folder = tempfile::tempdir().unwrap();
            let ended = run(Rank::group(2, &[(dying, calls)]), |rank| attempt(folder.path(), rank, writers, 1));
            if ended.iter().all(Result::is_ok) {
                break;
            }
            moments += 1;
            assert!(ended[dying].is_err());
            let own = path(folder.path(), writers, dying, 0);
            let own = own.parent().unwrap();
            if calls % 2 == 0 && (writers == Writers::Each || dying == 0) {
                // As if it had been killed during its last write, which no other rank relies on yet.
                lose_last_write(own);
            }
            // The second attempt dies too, a little later: its checkpoints must not mix with the first one's.
            let _ = run(Rank::group(2, &[(1 - dying, 9 + calls % 3)]), |rank| attempt(folder.path(), rank, writers, 2));
            let found = run(Rank::group(2, &[]), |rank| {
                let mut checkpoint = builder(folder.path(), rank, writers).build()?;
                resume(&mut checkpoint)
            });
            let found: Vec<_> = found.into_iter().map(|found| found.unwrap()).collect();
            assert_eq!(found[0], found[1], "{writers:?}, rank {dying} died at call {calls}");
        }
    }
    assert!(moments > 40, "{moments} moments");
}

/// If there are several steps, makes the newest look like an unfinished write.
fn lose_last_write(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut steps: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.starts_with("step-"))
        .collect();
    steps.sort();
    if let [_, .., last] = &steps[..] {
        let writing = folder.join(format!(".writing-{last}"));
        fs::rename(folder.join(last), &writing).unwrap();
        fs::remove_file(writing.join("manifest.json")).unwrap();
    }
}
