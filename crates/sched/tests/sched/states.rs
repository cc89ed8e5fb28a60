//! States are saved and loaded; broken states are refused and change nothing.

use overdrive_core::{Entry, StateDict, StateError, Stateful};
use overdrive_sched::{
    ChainedScheduler, CosineAnnealingLr, EarlyStopping, LinearLr, LrScheduler, MAX_SEEK, OneCycleLr, Plan,
    ReduceLrOnPlateau, ScheduleError, SequentialLr, StepLr,
};

use crate::attached::Rates;

fn plan() -> Plan {
    let chained = ChainedScheduler::new(CosineAnnealingLr::new(9)).and(StepLr::new(7).gamma(0.5));
    SequentialLr::new(LinearLr::new().start_factor(0.1))
        .then(5, chained)
        .then(30, OneCycleLr::new([1.0, 2.0], 40))
        .into()
}

/// A copy that has been nested in a checkpoint.
fn copy(state: &StateDict) -> StateDict {
    let (mut checkpoint, mut inner) = (StateDict::new(), StateDict::new());
    copy_entries(state).into_iter().for_each(|(key, entry)| inner.insert(key, entry));
    checkpoint.insert_nested("sched", inner);
    checkpoint.nested("sched")
}

#[test]
fn the_state_is_the_step_and_the_base_rates() -> Result<(), Box<dyn std::error::Error>> {
    for split in [0, 1, 4, 5, 6, 29, 30, 31, 50] {
        let mut opt = Rates::new(&[0.1, 0.2]);
        let mut sched = LrScheduler::new(&mut opt, plan())?;
        (0..split).try_for_each(|_| sched.step(&mut opt))?;
        let state = copy(&sched.state_dict()?);
        assert_eq!(state.iter().map(|(key, _)| key).collect::<Vec<_>>(), ["base_lrs.0", "base_lrs.1", "last_epoch"]);

        // Another process, whose optimizer was built with other rates.
        let mut other = Rates::new(&[7.0, 8.0]);
        let mut resumed = LrScheduler::new(&mut other, plan())?;
        resumed.load_state_dict(&state)?;
        resumed.apply(&mut other)?;
        for _ in split..60 {
            assert_eq!((opt.values(), sched.last_epoch()), (other.values(), resumed.last_epoch()), "from {split}");
            sched.step(&mut opt)?;
            resumed.step(&mut other)?;
        }
    }
    Ok(())
}

#[test]
fn a_resumed_scheduler_may_step_at_once() -> Result<(), Box<dyn std::error::Error>> {
    let mut opt = Rates::new(&[0.1]);
    let mut sched = LrScheduler::new(&mut opt, StepLr::new(2))?;
    let mut state = StateDict::new();
    state.insert("last_epoch", Entry::Int(3));
    state.insert("base_lrs.0", Entry::Float(1.0));
    sched.load_state_dict(&state)?;
    sched.step(&mut opt)?;
    assert!((opt.lrs[0] - 0.01).abs() < 1e-15);
    Ok(())
}

/// Loads a state with one entry changed or removed, and returns the error's key.
fn broken<S: Stateful>(target: &mut S, state: &StateDict, key: &str, entry: Option<Entry>) -> String {
    let mut changed = StateDict::new();
    for (name, entry) in copy_entries(state).into_iter().filter(|(name, _)| name != key) {
        changed.insert(name, entry);
    }
    if let Some(entry) = entry {
        changed.insert(key, entry);
    }
    match target.load_state_dict(&changed) {
        Err(StateError::Missing { key } | StateError::Unexpected { key } | StateError::Mismatch { key, .. }) => key,
        other => panic!("{key}: {other:?}"),
    }
}

fn copy_entries(state: &StateDict) -> Vec<(String, Entry)> {
    let entry = |entry: &Entry| match entry {
        Entry::Int(value) => Entry::Int(*value),
        Entry::Float(value) => Entry::Float(*value),
        other => panic!("{other:?}"),
    };
    state.iter().map(|(key, found)| (key.to_owned(), entry(found))).collect()
}

#[test]
fn broken_states_of_a_scheduler_change_nothing() -> Result<(), Box<dyn std::error::Error>> {
    let mut opt = Rates::new(&[0.1, 0.2]);
    let mut sched = LrScheduler::new(&mut opt, OneCycleLr::new(1.0, 40))?;
    (0..7).try_for_each(|_| sched.step(&mut opt))?;
    let (state, before) = (sched.state_dict()?, format!("{sched:?}"));
    let beyond = i64::try_from(MAX_SEEK)? + 1;
    for wrong in [-1, 41, beyond, i64::MIN, i64::MAX] {
        assert_eq!(broken(&mut sched, &state, "last_epoch", Some(Entry::Int(wrong))), "last_epoch");
    }
    for wrong in [-0.1, f64::NAN, f64::INFINITY] {
        assert_eq!(broken(&mut sched, &state, "base_lrs.1", Some(Entry::Float(wrong))), "base_lrs.1");
    }
    assert_eq!(broken(&mut sched, &state, "last_epoch", Some(Entry::Float(3.0))), "last_epoch");
    assert_eq!(broken(&mut sched, &state, "last_epoch", None), "last_epoch");
    assert_eq!(broken(&mut sched, &state, "base_lrs.0", None), "base_lrs.0");
    // A state of an optimizer with more groups.
    assert_eq!(broken(&mut sched, &state, "base_lrs.2", Some(Entry::Float(0.1))), "base_lrs");
    assert_eq!(broken(&mut sched, &state, "T_max", Some(Entry::Int(3))), "T_max");
    assert_eq!(format!("{sched:?}"), before);
    sched.load_state_dict(&state)?;
    sched.step(&mut opt)?;
    Ok(())
}

#[test]
fn a_plateau_resumes_from_its_state_dict_and_refuses_broken_ones() -> Result<(), Box<dyn std::error::Error>> {
    let mut opt = Rates::new(&[0.1]);
    let attach = |opt: &Rates| ReduceLrOnPlateau::builder().patience(1).attach(opt);
    let mut plateau = attach(&opt)?;
    for loss in [f64::NAN, 1.0, 2.0, 2.0, 2.0] {
        plateau.step(loss, &mut opt)?;
    }
    let mut other = Rates::new(&[5.0]);
    let mut resumed = attach(&other)?;
    resumed.load_state_dict(&copy(&plateau.state_dict()?))?;
    assert_eq!((resumed.last_lr(), resumed.state()), (plateau.last_lr(), plateau.state()));
    resumed.apply(&mut other)?;
    assert_eq!(other.values(), opt.values());

    let state = plateau.state_dict()?;
    for (key, wrong) in [
        ("best", Entry::Float(f64::NAN)),
        ("lrs.0", Entry::Float(-1.0)),
        ("lrs.1", Entry::Float(1.0)),
        ("num_bad_epochs", Entry::Int(-1)),
        ("cooldown_counter", Entry::Text("none".to_owned())),
    ] {
        assert_eq!(broken(&mut resumed, &state, key, Some(wrong)), key);
    }
    assert_eq!((resumed.last_lr(), resumed.state()), (plateau.last_lr(), plateau.state()));
    Ok(())
}

#[test]
fn early_stopping_resumes_from_its_state_dict_and_refuses_broken_ones() -> Result<(), Box<dyn std::error::Error>> {
    let mut stopping = EarlyStopping::new(3);
    for loss in [1.0, 0.5, 0.6] {
        stopping.step(loss, || ())?;
    }
    let mut resumed = EarlyStopping::<()>::new(3);
    resumed.load_state_dict(&copy(&stopping.state_dict()?))?;
    assert_eq!(resumed.state(), stopping.state());
    let state = stopping.state_dict()?;
    assert_eq!(broken(&mut resumed, &state, "best", Some(Entry::Float(f64::NAN))), "best");
    assert_eq!(broken(&mut resumed, &state, "num_bad_epochs", Some(Entry::Int(-3))), "num_bad_epochs");
    assert_eq!(broken(&mut resumed, &state, "last_epoch", Some(Entry::Int(3))), "last_epoch");
    assert_eq!(resumed.state(), stopping.state());
    Ok(())
}

/// A step after the schedule's last belongs to a longer run.
#[test]
fn a_state_after_the_schedules_end_is_refused() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1]);
    let mut sched = LrScheduler::new(&mut opt, OneCycleLr::new(1.0, 40))?;
    let mut state = StateDict::new();
    state.insert("last_epoch", Entry::Int(41));
    state.insert("base_lrs.0", Entry::Float(0.1));
    let message = sched.load_state_dict(&state).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(message.contains("ends with step 40"), "{message}");
    Ok(())
}
