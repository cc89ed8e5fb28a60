//! Which checkpoints are kept, removed, or cannot be removed.

use std::fs;
use std::time::Duration;

use overdrive_checkpoint::{Checkpoint, CheckpointError, Goal};

use crate::{model, value};

type Outcome = Result<(), Box<dyn std::error::Error>>;

#[test]
fn an_old_checkpoint_that_cannot_be_removed_is_only_a_warning() -> Outcome {
    for background in [true, false] {
        let folder = tempfile::tempdir()?;
        let mut checkpoint = Checkpoint::builder(folder.path()).keep(1).background(background).build()?;
        checkpoint.save(1, &[("model", &model(1.0))])?;
        checkpoint.wait()?;
        // A file blocks the name to which a checkpoint is renamed before its removal.
        let in_the_way = folder.path().join(".removed-step-000000000001");
        fs::write(&in_the_way, "")?;
        checkpoint.save(2, &[("model", &model(2.0))])?;
        checkpoint.wait()?;
        assert_eq!(checkpoint.steps()?, [1, 2]);
        let warnings = checkpoint.take_warnings();
        assert!(matches!(&warnings[..], [CheckpointError::NotRemoved { step: 2, .. }]), "{warnings:?}");
        let said = warnings[0].to_string();
        assert!(said.contains(".removed-step-000000000001") && said.ends_with("of step 2 is written"), "{said}");
        assert!(checkpoint.take_warnings().is_empty(), "each warning is returned once");
        let mut vs = model(0.0);
        assert_eq!(checkpoint.resume(&mut [("model", &mut vs)])?.ok_or("nothing")?.step, 2);
        assert_eq!(value(&vs), 2.0);
        // The removal succeeds when nothing blocks it any more.
        fs::remove_file(&in_the_way)?;
        checkpoint.save(3, &[("model", &model(3.0))])?;
        checkpoint.wait()?;
        assert_eq!(checkpoint.steps()?, [3]);
        assert!(checkpoint.take_warnings().is_empty());
    }
    Ok(())
}

#[test]
fn the_best_are_kept_in_addition_to_the_newest() -> Outcome {
    let metrics = [Some(0.5), Some(0.9), None, Some(0.9), Some(0.1), Some(0.7), Some(0.6)];
    for (goal, kept, best) in [(Goal::Max, [2, 4, 6, 7], 2), (Goal::Min, [1, 5, 6, 7], 5)] {
        let folder = tempfile::tempdir()?;
        let builder = || Checkpoint::builder(folder.path()).keep(2).keep_best(2, "metric", goal);
        let mut checkpoint = builder().build()?;
        for (step, metric) in (1..).zip(metrics) {
            checkpoint.set("metric", &metric)?;
            checkpoint.save(step, &[("model", &model(step as f64))])?;
        }
        checkpoint.finish()?;
        let mut checkpoint = builder().build()?;
        assert_eq!((checkpoint.steps()?, checkpoint.best()?), (kept.to_vec(), Some(best)));
        let mut vs = model(0.0);
        assert_eq!(checkpoint.resume(&mut [("model", &mut vs)])?.ok_or("nothing")?.step, 7, "the newest, not the best");
        // The resumed run saves a better one.
        checkpoint.set("metric", &if goal == Goal::Max { 1.0 } else { 0.0 })?;
        checkpoint.save(8, &[("model", &vs)])?;
        checkpoint.wait()?;
        assert_eq!(checkpoint.best()?, Some(8));
        // None of them has another metric.
        drop(checkpoint);
        let other = Checkpoint::builder(folder.path()).keep_best(1, "other", goal).build()?;
        assert_eq!(other.best()?, None);
    }
    Ok(())
}

#[test]
fn checkpoints_of_an_abandoned_branch_are_set_aside() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = Checkpoint::builder(folder.path()).keep(9).build()?;
    for step in [100, 200, 300] {
        checkpoint.save(step, &[("model", &model(step as f64))])?;
    }
    checkpoint.load(100, &mut [("model", &mut model(0.0))])?;
    checkpoint.save(250, &[("model", &model(250.0))])?;
    checkpoint.wait()?;
    assert_eq!(checkpoint.steps()?, [100, 250], "200 and 300 belong to the abandoned branch");
    Ok(())
}

#[test]
fn after_the_time_limit_the_next_step_is_due_and_the_run_stops() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut over = Checkpoint::builder(folder.path().join("over")).stop_after(Duration::ZERO).build()?;
    assert!(!over.stop_requested());
    assert!(over.due(1)? && over.stop_requested());
    for time in [Duration::from_secs(1_000_000), Duration::MAX] {
        let mut under_way = Checkpoint::builder(folder.path().join("way")).stop_after(time).build()?;
        assert!(!under_way.due(1)? && !under_way.stop_requested());
    }
    Ok(())
}
