//! Saved states are loaded unchanged.

use overdrive_checkpoint::{Checkpoint, CheckpointError, LeftOut, RngState, load};
use overdrive_core::{Entry, StateDict, StateError, Stateful};
use tch::{Device, Kind, Tensor};

use crate::{Plain, model, value};

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn entries(seed: i64) -> Plain {
    let at = Tensor::arange(12, (Kind::Float, Device::Cpu)) + seed;
    let tensor = |kind| Entry::Tensor(at.to_kind(kind).view([3, 4]));
    Plain::new([
        ("bool", Entry::Tensor(at.remainder(2.0).to_kind(Kind::Bool))),
        ("bytes", tensor(Kind::Uint8)),
        ("columns", Entry::Tensor(at.view([3, 4]).tr())),
        ("complex", tensor(Kind::ComplexFloat)),
        ("double", tensor(Kind::Double)),
        ("empty", Entry::Tensor(Tensor::zeros([0, 3], (Kind::Float, Device::Cpu)))),
        ("half", tensor(Kind::Half)),
        ("bfloat", tensor(Kind::BFloat16)),
        ("int", tensor(Kind::Int64)),
        ("large", Entry::Tensor(Tensor::ones([700, 999], (Kind::Float, Device::Cpu)) * seed)),
        ("scalar", Entry::Tensor(Tensor::from(seed))),
        ("best", Entry::Float(if seed == 1 { f64::INFINITY } else { -0.1 })),
        ("step", Entry::Int(i64::MAX - seed)),
        ("mode", Entry::Text(format!("min\n\"{seed}\""))),
        ("on", Entry::Bool(seed == 1)),
    ])
}

fn assert_same(one: &Plain, other: &Plain) {
    assert_eq!(one.0.len(), other.0.len());
    for ((key, one), (other_key, other)) in one.0.iter().zip(other.0.iter()) {
        assert_eq!(key, other_key);
        match (one, other) {
            (Entry::Tensor(one), Entry::Tensor(other)) => {
                assert_eq!((one.size(), one.kind()), (other.size(), other.kind()), "{key}");
                assert!(one.equal(other), "{key}");
            }
            (one, other) => assert_eq!(format!("{one:?}"), format!("{other:?}"), "{key}"),
        }
    }
}

#[test]
fn every_kind_of_entry_is_restored_with_and_without_the_background_copy() -> Outcome {
    for background in [true, false] {
        let folder = tempfile::tempdir()?;
        let (saved, plain) = (entries(1), Plain::new([("n", Entry::Int(5))]));
        let mut checkpoint = Checkpoint::builder(folder.path()).background(background).build()?;
        checkpoint.set("epoch", &3)?;
        checkpoint.save(7, &[("all", &saved), ("plain", &plain)])?;
        checkpoint.finish()?;

        let (mut all, mut plain) = (entries(2), Plain::new([("n", Entry::Int(0))]));
        let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
        let resumed = checkpoint.resume(&mut [("all", &mut all), ("plain", &mut plain)])?.ok_or("nothing")?;
        assert_eq!((resumed.step, resumed.skipped.len(), checkpoint.get::<u64>("epoch")?), (7, 0, Some(3)));
        assert_same(&all, &saved);
        assert_eq!(plain.0.int("n")?, 5);
        assert!(checkpoint.get::<String>("epoch").is_err());
        assert_eq!(checkpoint.get::<u64>("none")?, None);
    }
    Ok(())
}

#[test]
fn a_snapshot_has_the_values_at_the_time_of_save_and_the_newest_are_kept() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut vs = model(0.0);
    let mut checkpoint = Checkpoint::builder(folder.path()).every(2).keep(2).build()?;
    assert!(checkpoint.resume(&mut [("model", &mut vs)])?.is_none());
    for step in 0..=9 {
        tch::no_grad(|| vs.trainable_variables().iter_mut().for_each(|weight| drop(weight.fill_(step as f64))));
        assert_eq!(checkpoint.due(step)?, step > 0 && step % 2 == 0);
        if checkpoint.due(step)? {
            checkpoint.save(step, &[("model", &vs)])?;
        }
        assert!(!checkpoint.stop_requested());
    }
    checkpoint.wait()?;
    assert_eq!(checkpoint.steps()?, [6, 8]);
    for step in [6, 8] {
        checkpoint.load(step, &mut [("model", &mut vs)])?;
        assert_eq!(value(&vs), step as f64);
    }
    // Saving the same step again replaces it.
    checkpoint.save(6, &[("model", &model(66.0))])?;
    checkpoint.wait()?;
    load(checkpoint.path(6), &mut [("model", &mut vs)])?;
    assert_eq!(value(&vs), 66.0);
    Ok(())
}

#[test]
fn random_numbers_continue_where_they_were() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut rng = RngState::new(Device::Cpu);
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    // The generator is the process's: other tests may draw in between, hence several trials.
    for trial in 1..50 {
        checkpoint.save(trial, &[("rng", &rng)])?;
        let draw = || Tensor::randn([8], (Kind::Float, Device::Cpu));
        let first = draw();
        checkpoint.load(trial, &mut [("rng", &mut rng)])?;
        if draw() == first {
            return Ok(());
        }
    }
    Err("never the same numbers".into())
}

/// Simulates a state saved on a machine with a GPU; the test machine may have none.
#[test]
fn the_state_of_a_gpu_is_left_out_on_a_machine_without_one() -> Outcome {
    let mut rng = RngState::new(Device::Cpu);
    let mut state = rng.state_dict()?;
    rng.load_state_dict(&state)?;
    assert_eq!(rng.left_out(), None);
    state.insert("cuda", Entry::Tensor(Tensor::zeros([16], (Kind::Uint8, Device::Cpu))));
    rng.load_state_dict(&state)?;
    assert_eq!(rng.left_out(), Some(LeftOut::NoGpuHere));
    assert!(rng.left_out().is_some_and(|left_out| left_out.to_string().contains("the GPU's generator was left out")));
    // The CPU's state is still checked.
    state.insert("cpu", Entry::Tensor(Tensor::zeros([16], (Kind::Uint8, Device::Cpu))));
    assert!(rng.load_state_dict(&state).is_err());
    state.insert("tpu", Entry::Int(1));
    assert!(matches!(rng.load_state_dict(&state), Err(StateError::Unexpected { .. })));
    assert!(matches!(rng.load_state_dict(&StateDict::new()), Err(StateError::Missing { .. })));
    Ok(())
}

#[test]
fn when_one_part_refuses_all_keep_their_state() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut checkpoint = Checkpoint::builder(folder.path()).build()?;
    checkpoint.set("epoch", &1)?;
    checkpoint.save(1, &[("a", &model(1.0)), ("b", &model(1.0))])?;
    checkpoint.wait()?;
    checkpoint.set("epoch", &2)?;
    let (mut a, mut b) = (model(2.0), Plain::new([("other", Entry::Int(1))]));
    let error = checkpoint.resume(&mut [("a", &mut a), ("b", &mut b)]).unwrap_err();
    let missing = matches!(&error, CheckpointError::Part { part, error: StateError::Missing { key } }
        if part == "b" && key == "other");
    assert!(missing, "{error}");
    assert_eq!((value(&a), checkpoint.get::<u64>("epoch")?), (2.0, Some(2)));
    // Too few parts, or others.
    assert!(matches!(checkpoint.resume(&mut [("a", &mut a)]), Err(CheckpointError::Parts { .. })));
    assert!(load(checkpoint.path(1), &mut [("c", &mut a)]).is_err());
    load(checkpoint.path(1), &mut [("a", &mut a)])?;
    assert_eq!(value(&a), 1.0);
    Ok(())
}

#[test]
fn a_run_that_goes_back_sets_its_later_checkpoints_aside() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoint = Checkpoint::builder(folder.path()).keep(2).build().unwrap();
    for step in [100, 200, 300] {
        checkpoint.save(step, &[("model", &crate::model(step as f64))]).unwrap();
    }
    let mut vs = crate::model(0.0);
    checkpoint.wait().unwrap();
    checkpoint.load(200, &mut [("model", &mut vs)]).unwrap();
    checkpoint.save(210, &[("model", &crate::model(210.0))]).unwrap();
    checkpoint.wait().unwrap();
    assert_eq!(checkpoint.steps().unwrap(), [200, 210]);
    assert!(folder.path().join("abandoned-step-000000000300").is_dir(), "kept for inspection");
    assert_eq!(checkpoint.resume(&mut [("model", &mut vs)]).unwrap().unwrap().step, 210);
}

#[test]
fn the_step_that_a_run_resumes_from_is_not_due_again() -> Outcome {
    let folder = tempfile::tempdir()?;
    let mut vs = model(1.0);
    let build = || Checkpoint::builder(folder.path()).every(2).build();
    let mut first = build()?;
    assert!(first.due(2)?);
    first.save(2, &[("model", &vs)])?;
    assert!(first.due(2)?, "a second training with the same object saves again");
    first.finish()?;
    let mut second = build()?;
    assert_eq!(second.resume(&mut [("model", &mut vs)])?.ok_or("nothing")?.step, 2);
    assert!(!second.due(2)? && !second.due(2)?);
    assert!(!second.due(3)? && second.due(4)? && second.due(2)?);
    Ok(())
}
