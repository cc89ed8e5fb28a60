//! Schedules that set an optimizer's rates.

use overdrive_core::{Optimizer, OptimizerError, OptimizerId, Stateful, TchOptimizer};
use overdrive_sched::{
    CosineAnnealingLr, CyclicLr, ExponentialLr, LrScheduler, OneCycleLr, ReduceLrOnPlateau, ScheduleError, Scheduler,
    StepLr, layer_wise_lrs,
};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

/// An optimizer that only has rates and momenta, and may refuse a rate.
#[derive(Clone, Debug, PartialEq)]
pub struct Rates {
    id: OptimizerId,
    pub lrs: Vec<f64>,
    pub momenta: Vec<Option<f64>>,
    /// A group that refuses every rate.
    pub broken: Option<usize>,
}

impl Rates {
    pub fn new(lrs: &[f64]) -> Self {
        Self { id: OptimizerId::new(), lrs: lrs.to_vec(), momenta: vec![Some(0.9); lrs.len()], broken: None }
    }

    pub fn values(&self) -> (&[f64], &[Option<f64>]) {
        (&self.lrs, &self.momenta)
    }
}

impl Optimizer for Rates {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        Vec::new()
    }

    fn num_groups(&self) -> usize {
        self.lrs.len()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.lrs.get(group).copied()
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        if self.broken == Some(group) {
            return Err(OptimizerError::NoSuchGroup { group, groups: group });
        }
        OptimizerError::check_lr(lr)?;
        self.lrs[group] = lr;
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        self.momenta[group]
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        self.momenta[group] = Some(momentum);
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }
}

#[test]
fn an_optimizer_has_the_rates_of_the_plain_scheduler() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1, 0.02]);
    let mut plain = Scheduler::new(&[0.1, 0.02], CyclicLr::new([0.1, 0.2], 1.0).step_size_up(3))?;
    let mut sched = LrScheduler::new(&mut opt, CyclicLr::new([0.1, 0.2], 1.0).step_size_up(3))?;
    for step in 0..20 {
        assert_eq!((opt.lrs.as_slice(), sched.last_epoch()), (plain.last_lr(), step));
        assert_eq!(opt.momenta, [plain.momentum(0), plain.momentum(1)]);
        assert_eq!(sched.last_lr(), opt.lrs);
        sched.step(&mut opt)?;
        plain.step()?;
    }
    assert_eq!(sched.base_lrs(), [0.1, 0.02]);
    Ok(())
}

#[test]
fn a_refused_schedule_sets_nothing() {
    let before = Rates { momenta: vec![Some(0.9), None], ..Rates::new(&[0.1, 0.2]) };
    let mut opt = before.clone();
    let error = LrScheduler::new(&mut opt, OneCycleLr::new(1.0, 10));
    assert!(matches!(error, Err(ScheduleError::Optimizer(OptimizerError::NoMomentum))), "{error:?}");
    assert!(LrScheduler::new(&mut opt, StepLr::new(0)).is_err());
    let error = LrScheduler::with_base_lrs(&mut opt, StepLr::new(1), &[0.1]).map_err(|error| error.to_string());
    let expected = "`base_lrs` should be one rate for each of the optimizer's 2 groups, but is 1";
    assert!(error.is_err_and(|error| error.ends_with(expected)));
    assert_eq!(opt, before);
    assert!(LrScheduler::new(&mut opt, OneCycleLr::new(1.0, 10).cycle_momentum(false)).is_ok());
}

#[test]
fn two_schedulers_on_one_optimizer_are_refused_when_the_second_is_made() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1]);
    let mut first = LrScheduler::new(&mut opt, ExponentialLr::new(0.5))?;
    first.step(&mut opt)?;
    let second = LrScheduler::new(&mut opt, StepLr::new(1));
    assert!(matches!(second, Err(ScheduleError::AlreadyScheduled)), "{second:?}");
    let plateau = ReduceLrOnPlateau::builder().attach(&opt);
    assert!(matches!(plateau, Err(ScheduleError::AlreadyScheduled)), "{plateau:?}");
    let mut plateau = ReduceLrOnPlateau::builder().build(&[0.1])?;
    assert!(matches!(plateau.step(1.0, &mut opt), Err(ScheduleError::AlreadyScheduled)));
    assert_eq!(opt.lrs, [0.05], "the refused schedules set nothing");
    let copy = first.clone();
    drop(first);
    assert!(LrScheduler::new(&mut opt, StepLr::new(1)).is_err(), "the copy still holds the claim");
    drop(copy);
    LrScheduler::new(&mut opt, StepLr::new(1))?;
    Ok(())
}

#[test]
fn a_schedule_is_stepped_with_its_own_optimizer() -> Result<(), ScheduleError> {
    let (mut own, mut other) = (Rates::new(&[0.1]), Rates::new(&[0.1]));
    let mut sched = LrScheduler::new(&mut own, ExponentialLr::new(0.5))?;
    assert!(matches!(sched.step(&mut other), Err(ScheduleError::OtherOptimizer)));
    assert!(matches!(sched.apply(&mut other), Err(ScheduleError::OtherOptimizer)));
    let mut plateau = ReduceLrOnPlateau::builder().attach(&other)?;
    assert!(matches!(plateau.step(1.0, &mut own), Err(ScheduleError::OtherOptimizer)));
    assert_eq!((own.lrs[0], other.lrs[0], sched.last_epoch()), (0.1, 0.1, 0));
    sched.step(&mut own)?;
    assert_eq!(own.lrs, [0.05]);
    Ok(())
}

#[test]
fn a_rate_that_other_code_has_set_is_an_error() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1]);
    let mut sched = LrScheduler::new(&mut opt, ExponentialLr::new(0.5))?;
    opt.lrs[0] = 0.3;
    let error = sched.step(&mut opt);
    assert!(matches!(error, Err(ScheduleError::ChangedElsewhere { group: 0, .. })), "{error:?}");
    sched.apply(&mut opt)?;
    sched.step(&mut opt)?;
    assert_eq!(opt.lrs, sched.last_lr());
    Ok(())
}

#[test]
fn a_step_that_the_optimizer_refuses_can_be_repeated() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1, 0.2]);
    let mut sched = LrScheduler::new(&mut opt, ExponentialLr::new(0.5))?;
    opt.broken = Some(1);
    assert!(sched.step(&mut opt).is_err());
    assert_eq!((sched.last_epoch(), sched.last_lr()), (0, [0.1, 0.2].as_slice()));
    opt.broken = None;
    sched.step(&mut opt)?;
    assert_eq!(opt.lrs, [0.05, 0.1]);
    let mut other = Rates::new(&[0.1]);
    assert!(sched.step(&mut other).is_err() && sched.apply(&mut other).is_err());
    Ok(())
}

#[test]
fn a_plateau_lowers_the_optimizers_present_rates() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[0.1, 0.2]);
    let mut plateau = ReduceLrOnPlateau::builder().factor(0.5).patience(0).attach(&opt)?;
    plateau.step(1.0, &mut opt)?;
    opt.lrs[1] = 1.0; // as other code might
    plateau.step(1.0, &mut opt)?;
    assert_eq!(opt.lrs, [0.05, 0.5]);
    opt.broken = Some(1);
    assert!(plateau.step(1.0, &mut opt).is_err());
    assert_eq!(plateau.state().last_epoch, 2, "the metric is not counted");
    Ok(())
}

fn sgd() -> Result<(nn::VarStore, Tensor, TchOptimizer), tch::TchError> {
    let vs = nn::VarStore::new(Device::Cpu);
    let weight = vs.root().zeros("weight", &[3]);
    let opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 9.0)?);
    Ok((vs, weight, opt))
}

#[test]
fn tchs_optimizer_steps_by_the_schedules_rate() -> Result<(), Box<dyn std::error::Error>> {
    let (_vs, weight, mut opt) = sgd()?;
    assert!(matches!(LrScheduler::new(&mut opt, StepLr::new(1)), Err(ScheduleError::UnknownLr { group: 0 })));
    assert!(ReduceLrOnPlateau::builder().attach(&opt).is_err());
    let mut sched = LrScheduler::with_base_lrs(&mut opt, CosineAnnealingLr::new(4), &[0.5])?;
    let (_other_vs, _other_weight, mut other) = sgd()?;
    let mut plateau = ReduceLrOnPlateau::builder().patience(0).build(&[0.5])?;
    for _ in 0..4 {
        let before = weight.detach().copy();
        weight.sum(Kind::Float).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        let moved = (before - weight.detach()).double_value(&[0]);
        assert!((moved - sched.last_lr()[0]).abs() < 1e-6, "{moved}, not {:?}", sched.last_lr());
        sched.step(&mut opt)?;
        plateau.step(1.0, &mut other)?;
        sched.apply(&mut opt)?;
    }
    assert!(plateau.last_lr()[0] < 0.5);
    Ok(())
}

#[test]
fn tchs_optimizer_takes_the_momentum_too() -> Result<(), Box<dyn std::error::Error>> {
    let (_vs, _weight, mut opt) = sgd()?;
    let mut sched = LrScheduler::with_base_lrs(&mut opt, OneCycleLr::new(0.1, 4), &[0.1])?;
    (0..4).try_for_each(|_| sched.step(&mut opt))?;
    assert!(matches!(sched.step(&mut opt), Err(ScheduleError::Finished { .. })));
    Ok(())
}

#[test]
fn layer_wise_rates_keep_their_ratios() -> Result<(), ScheduleError> {
    let mut opt = Rates::new(&[9.0; 3]);
    let lrs = layer_wise_lrs(0.4, 0.5, 3)?;
    let mut sched = LrScheduler::with_base_lrs(&mut opt, CosineAnnealingLr::new(10), &lrs)?;
    for _ in 0..8 {
        assert!((opt.lrs[2] - 2.0 * opt.lrs[1]).abs() < 1e-15 && (opt.lrs[1] - 2.0 * opt.lrs[0]).abs() < 1e-15);
        sched.step(&mut opt)?;
    }
    Ok(())
}

#[test]
fn a_group_added_later_is_scheduled_as_if_it_had_always_been_there() -> Result<(), ScheduleError> {
    let mut all = Rates::new(&[1.0, 0.5]);
    let mut expected = LrScheduler::new(&mut all, ExponentialLr::new(0.5))?;
    let mut opt = Rates::new(&[1.0]);
    let mut sched = LrScheduler::new(&mut opt, ExponentialLr::new(0.5))?;
    for _ in 0..2 {
        expected.step(&mut all)?;
        sched.step(&mut opt)?;
    }
    for by_step in [false, true] {
        let mut opt = Rates { id: OptimizerId::new(), ..opt.clone() };
        let mut own = LrScheduler::with_base_lrs(&mut opt, ExponentialLr::new(0.5), &[1.0])?;
        own.load_state_dict(&sched.state_dict().unwrap()).unwrap();
        own.apply(&mut opt)?;
        opt.lrs.push(0.5);
        opt.momenta.push(None);
        match by_step {
            true => own.step(&mut opt)?,
            false => own.apply(&mut opt)?,
        }
        let steps = if by_step { 3 } else { 2 };
        assert_eq!(opt.lrs, [0.5f64.powi(steps), 0.5 * 0.5f64.powi(steps)]);
        assert_eq!(own.base_lrs(), [1.0, 0.5]);
        // Fewer groups than before are an error.
        opt.lrs.pop();
        assert!(own.step(&mut opt).is_err());
    }
    assert_eq!(all.lrs, [0.25, 0.125]);
    Ok(())
}
