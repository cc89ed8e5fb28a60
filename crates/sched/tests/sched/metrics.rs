//! Early stopping, and rates that are lowered when a metric stops improving.

use overdrive_sched::{EarlyStopping, Mode, ReduceLrOnPlateau, ScheduleError, ThresholdMode, Verdict};

/// The verdicts on some metrics, and the index of the best.
fn verdicts(mut stopping: EarlyStopping<usize>, metrics: &[f64]) -> Result<(String, Option<usize>), ScheduleError> {
    let mut text = String::new();
    for (place, metric) in metrics.iter().enumerate() {
        text.push(match stopping.step(*metric, || place)? {
            Verdict::Improved => '+',
            Verdict::Waiting => '-',
            Verdict::Stop => '!',
        });
    }
    Ok((text, stopping.restore(|place| *place)))
}

#[test]
fn training_stops_when_patience_is_exhausted_and_the_best_is_restored() -> Result<(), ScheduleError> {
    let loss = [1.0, 0.8, 0.9, 0.85, 0.7, 0.75, 0.7, 0.71];
    assert_eq!(verdicts(EarlyStopping::new(3), &loss)?, ("++--+--!".to_owned(), Some(4)));
    assert_eq!(verdicts(EarlyStopping::new(1), &loss[..3])?, ("++!".to_owned(), Some(1)));
    assert_eq!(verdicts(EarlyStopping::new(0), &loss[..3])?, ("++!".to_owned(), Some(1)));
    let accuracy = loss.map(|loss| -loss);
    assert_eq!(verdicts(EarlyStopping::new(3).mode(Mode::Max), &accuracy)?, ("++--+--!".to_owned(), Some(4)));
    Ok(())
}

#[test]
fn small_improvements_and_nan_do_not_count() -> Result<(), ScheduleError> {
    let slow = [1.0, 0.95, 0.9, 0.85];
    assert_eq!(verdicts(EarlyStopping::new(2).min_delta(0.12), &slow)?, ("+-!+".to_owned(), Some(3)));
    let nan = [f64::NAN, f64::NAN, 1.0, f64::INFINITY];
    assert_eq!(verdicts(EarlyStopping::new(3), &nan)?, ("--+-".to_owned(), Some(2)));
    assert_eq!(verdicts(EarlyStopping::new(9), &[f64::INFINITY])?, ("-".to_owned(), None));
    Ok(())
}

#[test]
fn a_failed_copy_leaves_the_best_unchanged() -> Result<(), Box<dyn std::error::Error>> {
    let mut stopping = EarlyStopping::new(3);
    stopping.step(1.0, || "first")?;
    let failed: Result<_, Box<dyn std::error::Error>> = stopping.try_step(0.5, || Err("disk full".into()));
    assert_eq!(failed.map_err(|error| error.to_string()), Err("disk full".to_owned()));
    assert_eq!((stopping.best(), stopping.restore(|copy| *copy)), (1.0, Some("first")));
    assert_eq!(stopping.step(0.5, || "second")?, Verdict::Improved);
    assert_eq!((stopping.best(), stopping.restore(|copy| *copy)), (0.5, Some("second")));
    Ok(())
}

#[test]
fn early_stopping_resumes_from_its_state() -> Result<(), ScheduleError> {
    let mut first = EarlyStopping::new(3);
    for loss in [1.0, 0.5, 0.6, 0.7] {
        first.step(loss, || ())?;
    }
    let mut second = EarlyStopping::new(3);
    second.resume(first.state())?;
    assert_eq!(second.restore(|()| ()), None, "the weights are not in the state");
    assert_eq!((first.step(0.5, || ())?, second.step(0.5, || ())?), (Verdict::Stop, Verdict::Stop));
    let broken = overdrive_sched::StoppingState { best: f64::NAN, num_bad_epochs: 0 };
    assert!(second.resume(broken).is_err() && second.best() == 0.5);
    Ok(())
}

fn feed(plateau: &mut ReduceLrOnPlateau, metrics: &[f64]) {
    for metric in metrics {
        plateau.update(*metric);
    }
}

#[test]
fn rates_fall_to_their_bounds_with_cooldowns_in_between() -> Result<(), ScheduleError> {
    let builder = ReduceLrOnPlateau::builder().factor(0.5).patience(1).cooldown(2).min_lr([0.0, 0.3]);
    let mut plateau = builder.build(&[1.0, 0.5])?;
    let lowered: Vec<_> = (0..12).map(|_| plateau.update(1.0)).collect();
    // The first metric is the best; then two bad ones, two in the cooldown, two bad ones.
    let expected = [2, 6, 10];
    assert!(lowered.iter().enumerate().all(|(step, lowered)| *lowered == expected.contains(&step)), "{lowered:?}");
    assert_eq!(plateau.last_lr(), [0.125, 0.3]);
    Ok(())
}

#[test]
fn thresholds_are_relative_or_absolute() -> Result<(), ScheduleError> {
    let bad_after = |mode, threshold_mode, threshold, metrics: [f64; 2]| -> Result<u64, ScheduleError> {
        let builder = ReduceLrOnPlateau::builder().mode(mode).threshold_mode(threshold_mode).threshold(threshold);
        let mut plateau = builder.build(&[1.0])?;
        feed(&mut plateau, &metrics);
        Ok(plateau.state().num_bad_epochs)
    };
    use {Mode::*, ThresholdMode::*};
    assert_eq!(bad_after(Min, Rel, 0.1, [10.0, 9.5])?, 1);
    assert_eq!(bad_after(Min, Rel, 0.1, [10.0, 8.5])?, 0);
    assert_eq!(bad_after(Min, Abs, 0.1, [10.0, 9.5])?, 0);
    assert_eq!(bad_after(Max, Rel, 0.1, [10.0, 10.5])?, 1);
    assert_eq!(bad_after(Max, Abs, 0.1, [10.0, 10.5])?, 0);
    assert_eq!(bad_after(Max, Abs, 0.1, [10.0, f64::NAN])?, 1);
    Ok(())
}

#[test]
fn a_plateau_resumes_from_its_state() -> Result<(), ScheduleError> {
    let make = || ReduceLrOnPlateau::builder().patience(1).cooldown(1).build(&[1.0]);
    let (mut whole, mut first) = (make()?, make()?);
    let losses = [1.0, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.95, 0.2, 0.3, 0.3, 0.3];
    for split in 0..losses.len() {
        first = make()?;
        feed(&mut first, &losses[..split]);
        let mut second = make()?;
        second.resume(first.state(), first.last_lr())?;
        feed(&mut second, &losses[split..]);
        whole = make()?;
        feed(&mut whole, &losses);
        assert_eq!((second.last_lr(), second.state()), (whole.last_lr(), whole.state()));
    }
    assert!(first.resume(whole.state(), &[]).is_err() && first.resume(whole.state(), &[f64::NAN]).is_err());
    Ok(())
}
