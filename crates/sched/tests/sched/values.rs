//! Values compared with closed formulas; the parity cases compare with PyTorch.

use std::f64::consts::PI;
use std::sync::Arc;

use overdrive_sched::{
    ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, CyclicLr, CyclicMode, DecayShape,
    ExponentialLr, FactorFn, InverseSqrtLr, LambdaLr, LinearLr, MultiStepLr, MultiplicativeLr, NoamLr, OneCycleLr,
    Plan, PolynomialLr, ScheduleError, Scheduler, SequentialLr, StepLr, SwaLr, WarmupCosineLr, WarmupStableDecayLr,
    layer_wise_lrs,
};

use crate::{near, rates};

fn check(schedule: impl Into<Plan>, expected: impl Fn(f64) -> f64) -> Result<(), ScheduleError> {
    let plan = schedule.into();
    let found = rates(plan.clone(), 0.05, 50)?;
    for (step, found) in found.into_iter().enumerate() {
        let expected = 0.05 * expected(step as f64);
        assert!((found - expected).abs() < 1e-14, "{plan:?} at {step}: {found:e}, not {expected:e}");
    }
    Ok(())
}

#[test]
fn recursively_computed_rates_equal_the_closed_forms() -> Result<(), ScheduleError> {
    check(StepLr::new(7).gamma(0.5), |step| 0.5f64.powf((step / 7.0).floor()))?;
    check(ExponentialLr::new(0.95), |step| 0.95f64.powf(step))?;
    check(MultiStepLr::new([3, 10, 10]), |step| {
        if step < 3.0 {
            1.0
        } else if step < 10.0 {
            0.1
        } else {
            1e-3
        }
    })?;
    check(ConstantLr::new().total_iters(4), |step| if step < 4.0 { 1.0 / 3.0 } else { 1.0 })?;
    check(LinearLr::new().start_factor(0.2).end_factor(0.7).total_iters(10), |step| 0.2 + 0.05 * step.min(10.0))?;
    check(PolynomialLr::new().total_iters(20).power(2.0), |step| (1.0 - step.min(20.0) / 20.0).powi(2))?;
    let swa = |step: f64| 0.3 + 0.7 * (0.5 + 0.5 * (PI * step.min(8.0) / 8.0).cos());
    check(SwaLr::new(0.3 * 0.05).anneal_epochs(8), swa)?;
    check(SwaLr::new(0.3 * 0.05).anneal_epochs(0), |_| 0.3)?;
    check(CosineAnnealingLr::new(12), |step| 0.5 + 0.5 * (PI * step / 12.0).cos())?;
    check(CosineAnnealingLr::new(20).eta_min(0.01), |step| 0.2 + 0.8 * (0.5 + 0.5 * (PI * step / 20.0).cos()))?;
    check(LambdaLr::new(|step| 1.0 / (1.0 + step as f64)), |step| 1.0 / (1.0 + step))?;
    check(MultiplicativeLr::new(|_| 0.9), |step| 0.9f64.powf(step))
}

#[test]
fn warm_restarts_repeat_in_longer_cycles() -> Result<(), ScheduleError> {
    let found = rates(CosineAnnealingWarmRestarts::new(4).t_mult(2), 1.0, 28)?;
    assert_eq!([found[0], found[4], found[12], found[28]], [1.0; 4]);
    near(found[8], 0.5);
    near(found[20], 0.5);
    let schedule = CosineAnnealingWarmRestarts::new(4).t_mult(2);
    near(schedule.lr_at(1.0, 8.0), 0.5);
    assert!(schedule.lr_at(1.0, 8.5) < 0.5);
    for wrong in [-1.0, f64::NAN, f64::INFINITY] {
        assert!(schedule.lr_at(1.0, wrong).is_nan());
    }
    Ok(())
}

#[test]
fn rates_cycle_up_and_down_and_the_momentum_inversely() -> Result<(), ScheduleError> {
    let cyclic = CyclicLr::new(0.1, 0.5).step_size_up(4).step_size_down(2);
    let mut sched = Scheduler::new(&[9.0], cyclic.clone())?;
    let mut seen = Vec::new();
    for _ in 0..=6 {
        seen.push(((sched.last_lr()[0] * 100.0).round(), (sched.momentum(0).unwrap_or(0.0) * 1000.0).round()));
        sched.step()?;
    }
    let expected =
        [(10.0, 900.0), (20.0, 875.0), (30.0, 850.0), (40.0, 825.0), (50.0, 800.0), (30.0, 850.0), (10.0, 900.0)];
    assert_eq!(seen, expected);
    near(rates(cyclic.clone().mode(CyclicMode::Triangular2), 9.0, 10)?[10], 0.3);
    near(rates(cyclic.clone().mode(CyclicMode::ExpRange).gamma(0.5), 9.0, 2)?[2], 0.1 + 0.2 * 0.25);
    let third: FactorFn = Arc::new(|cycle| 1.0 / cycle as f64);
    near(rates(cyclic.mode(CyclicMode::ByCycle(third)), 9.0, 16)?[16], 0.1 + 0.4 / 3.0);
    assert_eq!(Scheduler::new(&[9.0], CyclicLr::new(0.1, 0.5).cycle_momentum(false))?.momentum(0), None);
    Ok(())
}

#[test]
fn one_cycle_has_a_value_after_its_last_step_and_then_ends() -> Result<(), ScheduleError> {
    for linear in [false, true] {
        let strategy = if linear { overdrive_sched::AnnealStrategy::Linear } else { Default::default() };
        let one_cycle = OneCycleLr::new(1.0, 100).anneal_strategy(strategy);
        let mut sched = Scheduler::new(&[9.0], one_cycle)?;
        near(sched.last_lr()[0], 0.04);
        near(sched.seek(29)?[0], 1.0);
        near(sched.momentum(0).unwrap_or(0.0), 0.85);
        // An absolute tolerance, because a line from 1 to 4e-6 loses digits to rounding.
        assert!((sched.seek(99)?[0] - 4e-6).abs() < 1e-15);
        sched.step()?;
        assert!(matches!(sched.step(), Err(ScheduleError::Finished { last: 100, step: 101, .. })));
        assert_eq!(sched.last_epoch(), 100);
    }
    let three = rates(OneCycleLr::new(1.0, 100).three_phase(true).pct_start(0.4), 9.0, 99)?;
    near(three[39], 1.0);
    near(three[78], 0.04);
    // A rise of 0 steps starts at the highest rate.
    near(rates(OneCycleLr::new(1.0, 10).pct_start(0.1), 9.0, 10)?[0], 1.0);
    Ok(())
}

#[test]
fn the_examples_of_pytorchs_documentation() -> Result<(), ScheduleError> {
    let constant = ConstantLr::new().factor(0.1).total_iters(20);
    let sequential = rates(SequentialLr::new(constant.clone()).then(20, ExponentialLr::new(0.9)), 0.05, 22)?;
    for (step, expected) in [(0, 0.005), (19, 0.005), (20, 0.05), (21, 0.045), (22, 0.0405)] {
        near(sequential[step], expected);
    }
    let chained = rates(ChainedScheduler::new(constant).and(ExponentialLr::new(0.9)), 0.05, 21)?;
    for (step, factor) in [(0, 0.1), (1, 0.09), (19, 0.1 * 0.9f64.powi(19)), (20, 0.9f64.powi(20))] {
        near(chained[step], 0.05 * factor);
    }
    Ok(())
}

/// Where PyTorch 2.11 raises `NotImplementedError`.
#[test]
fn a_joined_part_starts_at_its_milestone_as_on_its_own() -> Result<(), ScheduleError> {
    let chained = || ChainedScheduler::new(ConstantLr::new().total_iters(3)).and(ExponentialLr::new(0.8));
    let inner = || SequentialLr::new(LinearLr::new().total_iters(4)).then(4, chained());
    let alone = [rates(chained(), 0.1, 12)?, rates(inner(), 0.1, 12)?];
    let within = [
        rates(SequentialLr::new(StepLr::new(2)).then(5, chained()), 0.1, 17)?,
        rates(SequentialLr::new(StepLr::new(2)).then(5, inner()), 0.1, 17)?,
    ];
    for (alone, within) in alone.iter().zip(&within) {
        assert_eq!(alone[..], within[5..]);
    }
    Ok(())
}

#[test]
fn a_jump_equals_stepping_one_by_one() -> Result<(), ScheduleError> {
    let plans: [Plan; 4] = [
        CosineAnnealingLr::new(7).into(),
        MultiplicativeLr::new(|step| 1.0 + 0.1 * (step as f64).sin()).into(),
        ChainedScheduler::new(OneCycleLr::new([0.1, 0.2], 80)).and(StepLr::new(9).gamma(0.7)).into(),
        SequentialLr::new(LinearLr::new()).then(5, CosineAnnealingLr::new(20)).then(30, PolynomialLr::new()).into(),
    ];
    for plan in plans {
        let (mut stepped, mut jumped) =
            (Scheduler::new(&[0.1, 0.3], plan.clone())?, Scheduler::new(&[0.1, 0.3], plan.clone())?);
        for step in 0..60 {
            assert_eq!(jumped.seek(step)?, stepped.last_lr(), "{plan:?} at {step}");
            assert_eq!((jumped.momentum(1), jumped.last_epoch()), (stepped.momentum(1), step));
            stepped.step()?;
        }
    }
    Ok(())
}

#[test]
fn rounding_below_zero_gives_zero() -> Result<(), ScheduleError> {
    for total in 1..200 {
        let line = LinearLr::new().start_factor(0.1).end_factor(0.0).total_iters(total);
        let found = rates(line, 0.3, total + 3)?;
        assert!(found.iter().all(|lr| *lr >= 0.0) && found[total as usize] < 1e-15, "{total}: {found:?}");
    }
    Ok(())
}

#[test]
fn schedules_that_pytorch_lacks() -> Result<(), ScheduleError> {
    let cosine = |step: f64| 0.1 + 0.9 * (0.5 + 0.5 * (PI * step / 30.0).cos());
    check(WarmupCosineLr::new(10, 40).start_factor(0.5).end_factor(0.1), |step| {
        if step < 10.0 { 0.5 + 0.05 * step } else { cosine((step - 10.0).min(30.0)) }
    })?;
    check(WarmupCosineLr::new(0, 40), |step| 0.5 + 0.5 * (PI * step.min(40.0) / 40.0).cos())?;
    for (shape, left) in [
        (DecayShape::Linear, (|p| 1.0 - p) as fn(f64) -> f64),
        (DecayShape::Cosine, |p| 0.5 + 0.5 * (PI * p).cos()),
        (DecayShape::OneMinusSqrt, |p| 1.0 - p.sqrt()),
    ] {
        check(WarmupStableDecayLr::new(5, 20, 15).shape(shape).end_factor(0.2), |step| {
            if step < 25.0 { (step / 5.0).min(1.0) } else { 0.2 + 0.8 * left(((step - 25.0) / 15.0).min(1.0)) }
        })?;
    }
    check(InverseSqrtLr::new(9), |step| if step < 9.0 { step / 9.0 } else { 3.0 / step.sqrt() })?;
    check(NoamLr::new(512, 16), |step| {
        let n = step + 1.0;
        512f64.sqrt().recip() * if n < 16.0 { n / 64.0 } else { n.sqrt().recip() }
    })?;
    assert_eq!(layer_wise_lrs(1.0, 0.5, 3)?, [0.25, 0.5, 1.0]);
    Ok(())
}

#[test]
fn groups_have_their_own_base_rates_functions_and_peaks() -> Result<(), ScheduleError> {
    let mut sched = Scheduler::new(&[0.1, 0.01], ExponentialLr::new(0.5))?;
    assert_eq!(sched.step()?, [0.05, 0.005]);
    let lambdas: [FactorFn; 2] = [Arc::new(|step| step as f64), Arc::new(|_| 2.0)];
    let mut sched = Scheduler::new(&[0.5, 0.25], LambdaLr::per_group(lambdas))?;
    assert_eq!(sched.seek(3)?, [1.5, 0.5]);
    let mut sched = Scheduler::new(&[0.0, 0.0], OneCycleLr::new(vec![1.0, 2.0], 10).max_momentum([0.9, 0.95]))?;
    sched.seek(2)?;
    assert_eq!(sched.last_lr(), [1.0, 2.0]);
    assert_eq!(sched.base_lrs(), [0.0, 0.0]);
    Ok(())
}
