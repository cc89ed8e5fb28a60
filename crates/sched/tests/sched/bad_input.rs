//! Bad options are refused by name, and errors change nothing.

use overdrive_sched::{
    ChainedScheduler, ConstantLr, CosineAnnealingLr, CosineAnnealingWarmRestarts, CyclicLr, EarlyStopping,
    ExponentialLr, InverseSqrtLr, LambdaLr, LinearLr, MAX_SEEK, MultiStepLr, MultiplicativeLr, NoamLr, OneCycleLr,
    Plan, PolynomialLr, ReduceLrOnPlateau, ScheduleError, Scheduler, SequentialLr, StepLr, SwaLr, WarmupCosineLr,
    WarmupStableDecayLr, layer_wise_lrs,
};

const NOT_FACTORS: [f64; 4] = [-0.1, f64::NAN, f64::INFINITY, f64::NEG_INFINITY];

/// Asserts that a plan over two groups is refused with this option's name.
fn refused(name: &str, plan: impl Into<Plan>) {
    let plan = plan.into();
    match Scheduler::new(&[0.1, 0.2], plan.clone()) {
        Err(ScheduleError::InvalidOption { option, .. }) => assert_eq!(option, name, "{plan:?}"),
        other => panic!("{name} of {plan:?}: {other:?}"),
    }
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    for bad in NOT_FACTORS {
        refused("gamma", StepLr::new(1).gamma(bad));
        refused("gamma", MultiStepLr::new([1]).gamma(bad));
        refused("gamma", ExponentialLr::new(bad));
        refused("factor", ConstantLr::new().factor(bad));
        refused("start_factor", LinearLr::new().start_factor(bad));
        refused("end_factor", LinearLr::new().end_factor(bad));
        refused("power", PolynomialLr::new().power(bad));
        refused("swa_lr", SwaLr::new(bad));
        refused("eta_min", CosineAnnealingLr::new(1).eta_min(bad));
        refused("eta_min", CosineAnnealingWarmRestarts::new(1).eta_min(bad));
        refused("base_lr", CyclicLr::new(bad, 1.0));
        refused("max_lr", CyclicLr::new(1.0, [0.1, bad]));
        refused("base_momentum", CyclicLr::new(0.1, 1.0).base_momentum(bad));
        refused("max_momentum", CyclicLr::new(0.1, 1.0).max_momentum(bad));
        refused("max_lr", OneCycleLr::new(bad, 9));
        refused("pct_start", OneCycleLr::new(1.0, 9).pct_start(bad));
        refused("div_factor", OneCycleLr::new(1.0, 9).div_factor(bad));
        refused("final_div_factor", OneCycleLr::new(1.0, 9).final_div_factor(bad));
        refused("max_momentum", OneCycleLr::new(1.0, 9).max_momentum(bad));
        refused("start_factor", WarmupCosineLr::new(1, 2).start_factor(bad));
        refused("end_factor", WarmupStableDecayLr::new(1, 1, 1).end_factor(bad));
    }
    refused("factor", ConstantLr::new().factor(0.0));
    refused("start_factor", LinearLr::new().start_factor(0.0));
    refused("start_factor", LinearLr::new().start_factor(1.1));
    refused("max_momentum", OneCycleLr::new(1.0, 9).max_momentum(1.0));
}

#[test]
fn impossible_steps_are_refused_by_name() {
    refused("step_size", StepLr::new(0));
    refused("t_max", CosineAnnealingLr::new(0));
    refused("t_0", CosineAnnealingWarmRestarts::new(0));
    refused("t_mult", CosineAnnealingWarmRestarts::new(1).t_mult(0));
    refused("step_size_up", CyclicLr::new(0.1, 1.0).step_size_up(0));
    refused("total_steps", OneCycleLr::new(1.0, 0));
    refused("total_steps", WarmupCosineLr::new(5, 5));
    refused("decay_steps", WarmupStableDecayLr::new(1, 1, 0));
    refused("warmup_steps", InverseSqrtLr::new(0));
    refused("d_model", NoamLr::new(0, 1));
    refused("warmup_steps", NoamLr::new(1, 0));
    refused("milestones", MultiStepLr::new([5, 3]));
    refused("milestones", SequentialLr::new(StepLr::new(1)).then(0, StepLr::new(1)));
    refused("milestones", SequentialLr::new(StepLr::new(1)).then(5, StepLr::new(1)).then(5, StepLr::new(1)));
    refused("milestones", SequentialLr::new(StepLr::new(1)).then(5, StepLr::new(1)).then(4, StepLr::new(1)));
}

#[test]
fn values_for_another_number_of_groups_are_refused() {
    refused("max_lr", OneCycleLr::new([1.0], 9));
    refused("base_lr", CyclicLr::new([1.0, 1.0, 1.0], 1.0));
    refused("lr_lambda", LambdaLr::per_group([]));
    refused("lr_lambda", MultiplicativeLr::per_group([]));
}

#[test]
fn messages_say_what_was_expected_and_what_was_found() {
    let message = |plan: Plan| Scheduler::new(&[0.1], plan).err().map(|error| error.to_string()).unwrap_or_default();
    let found = message(SequentialLr::new(StepLr::new(1)).then(9, StepLr::new(1)).then(4, StepLr::new(1)).into());
    assert_eq!(
        found,
        "SequentialLr: `milestones` should be steps of at least 1, each above the one before, but is [9, 4]"
    );
    let within = ChainedScheduler::new(StepLr::new(1)).and(SequentialLr::new(LinearLr::new().end_factor(2.0)));
    assert_eq!(
        message(within.into()),
        "part 1 of ChainedScheduler: part 0 of SequentialLr: LinearLr: `end_factor` should be from 0 to 1, but is 2"
    );
    let error = Scheduler::new(&[0.1, f64::NAN], StepLr::new(1)).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("the base rates: `base_lrs` should be finite and at least 0, but is NaN"));
}

#[test]
fn base_rates_out_of_range_are_refused() {
    for bad in NOT_FACTORS {
        assert!(Scheduler::new(&[0.1, bad], StepLr::new(1)).is_err());
        assert!(ReduceLrOnPlateau::builder().build(&[bad]).is_err());
        assert!(layer_wise_lrs(bad, 0.5, 2).is_err() && layer_wise_lrs(0.1, bad, 2).is_err());
    }
    assert!(Scheduler::new(&[], StepLr::new(1)).is_err());
    assert!(layer_wise_lrs(0.1, 0.5, 0).is_err());
}

#[test]
fn an_invalid_rate_is_an_error_and_the_scheduler_does_not_advance() -> Result<(), ScheduleError> {
    for bad in NOT_FACTORS {
        let mut sched = Scheduler::new(&[1.0, 1.0], LambdaLr::new(move |step| if step < 2 { 0.5 } else { bad }))?;
        sched.step()?;
        for _ in 0..2 {
            let error = sched.step().map(<[f64]>::to_vec);
            let at = matches!(error, Err(ScheduleError::InvalidValue { step: 2, group: 0, what: "learning rate", .. }));
            assert!(at, "{error:?}");
            assert_eq!((sched.last_epoch(), sched.last_lr()), (1, [0.5, 0.5].as_slice()));
        }
        assert!(sched.seek(7).is_err() && sched.last_epoch() == 1);
        assert!(Scheduler::new(&[1.0], LambdaLr::new(move |_| bad)).is_err());
    }
    Ok(())
}

#[test]
fn a_jump_too_far_is_refused_at_once() -> Result<(), ScheduleError> {
    let mut sched = Scheduler::new(&[0.1], StepLr::new(1))?;
    for step in [MAX_SEEK + 1, u64::MAX] {
        assert!(matches!(sched.seek(step), Err(ScheduleError::TooFar { .. })));
    }
    Ok(())
}

#[test]
fn the_largest_numbers_of_steps_do_not_overflow() -> Result<(), ScheduleError> {
    const MAX: u64 = u64::MAX;
    let plans: [Plan; 7] = [
        StepLr::new(MAX).into(),
        CosineAnnealingLr::new(MAX).into(),
        CosineAnnealingWarmRestarts::new(1).t_mult(MAX).into(),
        CyclicLr::new(0.1, 1.0).step_size_up(MAX).step_size_down(MAX).into(),
        OneCycleLr::new(1.0, MAX).into(),
        WarmupStableDecayLr::new(MAX, MAX, MAX).into(),
        SequentialLr::new(LinearLr::new().total_iters(MAX)).then(MAX, NoamLr::new(MAX, MAX)).into(),
    ];
    for plan in plans {
        assert!(Scheduler::new(&[0.1], plan)?.seek(9)?[0] >= 0.0);
    }
    Ok(())
}

#[test]
fn metrics_options_out_of_range_are_refused_by_name() {
    let name = |builder: overdrive_sched::ReduceLrOnPlateauBuilder| match builder.build(&[0.1, 0.2]) {
        Err(ScheduleError::InvalidOption { option, .. }) => option,
        other => panic!("{other:?}"),
    };
    let options = ReduceLrOnPlateau::builder;
    for bad in NOT_FACTORS {
        assert_eq!(name(options().factor(bad)), "factor");
        assert_eq!(name(options().threshold(bad)), "threshold");
        assert_eq!(name(options().min_lr(bad)), "min_lr");
        assert_eq!(name(options().eps(bad)), "eps");
        assert!(EarlyStopping::new(1).min_delta(bad).step(1.0, || ()).is_err());
    }
    assert_eq!(name(options().factor(1.0)), "factor");
    assert_eq!(name(options().min_lr([0.1])), "min_lr");
}
