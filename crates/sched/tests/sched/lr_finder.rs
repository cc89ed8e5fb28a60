//! Sweeps over learning rates: which rates, when they stop, and that nothing else changes.

use overdrive_core::{
    Entry, Optimizer, OptimizerError, OptimizerId, StateDict, StateError, Stateful, TchOptimizer, TorchError,
};
use overdrive_sched::{LrFinder, ScheduleError, Sweep};
use tch::nn::{self, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};

use crate::near;

/// SGD with momentum, whose state is a buffer for each parameter and the number of steps.
struct Momentum {
    id: OptimizerId,
    params: Vec<Tensor>,
    buffers: Vec<Tensor>,
    steps: i64,
    lrs: Vec<f64>,
}

impl Momentum {
    fn new(vs: &VarStore) -> Self {
        let params = vs.trainable_variables();
        let buffers = params.iter().map(|param| tch::no_grad(|| param.zeros_like())).collect();
        Self { id: OptimizerId::new(), params, buffers, steps: 0, lrs: vec![0.3, 0.7] }
    }
}

impl Stateful for Momentum {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("steps", Entry::Int(self.steps));
        for (number, buffer) in self.buffers.iter().enumerate() {
            state.insert(format!("buffer.{number}"), Entry::Tensor(buffer.shallow_clone()));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        self.steps = state.int("steps")?;
        for (number, buffer) in self.buffers.iter_mut().enumerate() {
            let saved = state.tensor(&format!("buffer.{number}"), &buffer.size(), buffer.kind())?;
            buffer.copy_(saved);
        }
        Ok(())
    }
}

impl Optimizer for Momentum {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.iter().map(Tensor::shallow_clone).collect()
    }

    fn num_groups(&self) -> usize {
        self.lrs.len()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.lrs.get(group).copied()
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.lrs[group] = lr;
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        self.steps += 1;
        tch::no_grad(|| {
            for (param, buffer) in self.params.iter_mut().zip(&mut self.buffers) {
                *buffer = &*buffer * 0.9 + param.grad();
                *param -= &*buffer * self.lrs[0];
            }
        });
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.params.iter_mut().for_each(Tensor::zero_grad);
        Ok(())
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}

struct Run {
    vs: VarStore,
    mean: Tensor,
    model: nn::Linear,
    opt: Momentum,
}

fn run() -> Result<Run, ScheduleError> {
    let vs = VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 4, 1, Default::default());
    let mean = vs.root().zeros_no_train("mean", &[4]);
    let opt = Momentum::new(&vs);
    let mut run = Run { vs, mean, model, opt };
    // So that the optimizer's state is not zero.
    for _ in 0..3 {
        let _ = run.step_of()(&mut run.opt)?;
    }
    Ok(run)
}

/// Everything that a sweep could leave changed: variables, buffers, the number of steps, rates.
type All = (Vec<(String, Tensor)>, Vec<Tensor>, i64, Vec<f64>);

impl Run {
    /// A training step that also moves a buffer of the model.
    fn step_of(&self) -> impl FnMut(&mut Momentum) -> Result<Tensor, ScheduleError> + use<> {
        let (ws, bs) = (self.model.ws.shallow_clone(), self.model.bs.as_ref().map(Tensor::shallow_clone));
        let mut mean = self.mean.shallow_clone();
        move |opt| {
            let x = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
            let _ = tch::no_grad(|| mean.g_add_scalar_(1.0));
            let loss = x.linear(&ws, bs.as_ref()).square().mean(Kind::Float) + 1.0;
            loss.f_backward().map_err(TorchError::from)?;
            opt.step()?;
            opt.zero_grad()?;
            Ok(loss)
        }
    }

    fn all(&self) -> All {
        let mut variables: Vec<_> =
            self.vs.variables().into_iter().map(|(name, it)| (name, it.detach().copy())).collect();
        variables.sort_by(|one, other| one.0.cmp(&other.0));
        let buffers = self.opt.buffers.iter().map(Tensor::copy).collect();
        (variables, buffers, self.opt.steps, self.opt.lrs.clone())
    }
}

#[test]
fn a_sweep_changes_nothing_for_good() -> Result<(), ScheduleError> {
    let mut run = run()?;
    let before = run.all();
    let mut step = run.step_of();
    let mut seen = Vec::new();
    let found = LrFinder::new().num_training(20).max_lr(1e-2).run(&run.vs, &mut run.opt, |opt| {
        seen.push(opt.lrs.clone());
        step(opt)
    })?;
    assert_eq!(run.all(), before);
    assert!(!found.diverged() && found.suggestion().is_some());
    assert_eq!((found.lrs().len(), found.losses().len(), seen.len()), (20, 20, 20));
    assert!(seen.iter().zip(found.lrs()).all(|(groups, lr)| groups == &[*lr, *lr]));

    let step = run.step_of();
    let diverged = LrFinder::new().num_training(50).max_lr(1e8).run(&run.vs, &mut run.opt, step)?;
    assert!(diverged.diverged() && diverged.lrs().len() < 50, "{diverged:?}");
    assert!(diverged.losses().iter().all(|loss| loss.is_finite()));
    assert_eq!(run.all(), before);

    let mut step = run.step_of();
    let mut count = 0;
    let failed = LrFinder::new().max_lr(0.1).run(&run.vs, &mut run.opt, |opt| {
        count += 1;
        let loss = step(opt)?;
        if count == 7 { Err(ScheduleError::OtherOptimizer) } else { Ok(loss) }
    });
    assert!(matches!(failed, Err(ScheduleError::OtherOptimizer)) && count == 7);
    assert_eq!(run.all(), before);
    let failed =
        LrFinder::new().run(&run.vs, &mut run.opt, |_| Ok::<_, ScheduleError>(Tensor::from_slice(&[1.0, 2.0])));
    assert!(failed.unwrap_err().to_string().contains("`loss` should be one number, but is a tensor of shape [2]"));
    assert_eq!(run.all(), before);
    Ok(())
}

#[test]
fn rates_losses_and_the_stop_follow_their_formulas() -> Result<(), ScheduleError> {
    let mut run = run()?;
    let mut losses = [1.0, 2.0, 3.0, 40.0, 50.0].into_iter();
    let finder = LrFinder::new().min_lr(0.1).max_lr(1.6).num_training(4).sweep(Sweep::Linear);
    let found = finder.run(&run.vs, &mut run.opt, |_| Ok::<_, ScheduleError>(Tensor::from(losses.next().unwrap())))?;
    [0.1, 0.85, 1.225, 1.6].iter().zip(found.lrs()).for_each(|(expected, lr)| near(*lr, *expected));
    let smoothed = [1.0, 1.0 + 0.02 / 0.0396, (0.98 * (0.0196 + 0.04) + 0.06) / (1.0 - 0.98f64.powi(3))];
    assert!(found.losses().iter().zip(smoothed).all(|(one, other)| (one - other).abs() < 1e-9), "{:?}", found.losses());
    assert!(found.diverged() && found.lrs().len() == 4, "the fourth loss is above 4 times the lowest");

    let mut losses = [1.0, 40.0, f64::NAN].into_iter();
    let finder = LrFinder::new().min_lr(1e-3).num_training(3).early_stop_threshold(None);
    let found = finder.run(&run.vs, &mut run.opt, |_| Ok::<_, ScheduleError>(Tensor::from(losses.next().unwrap())))?;
    assert!(found.diverged());
    [1e-3, 1e-1].iter().zip(found.lrs()).for_each(|(expected, lr)| near(*lr, *expected));
    assert_eq!(found.lrs().len(), 2);
    Ok(())
}

#[test]
fn what_cannot_work_is_refused() -> Result<(), Box<dyn std::error::Error>> {
    let mut run = run()?;
    for finder in [
        LrFinder::new().min_lr(0.0),
        LrFinder::new().min_lr(1.0),
        LrFinder::new().max_lr(f64::INFINITY),
        LrFinder::new().num_training(1),
        LrFinder::new().early_stop_threshold(0.0),
    ] {
        let refused = finder.run(&run.vs, &mut run.opt, |_| -> Result<Tensor, ScheduleError> { unreachable!() });
        assert!(matches!(refused, Err(ScheduleError::InvalidOption { schedule: "LrFinder", .. })), "{finder:?}");
    }
    let mut opt = TchOptimizer::new(nn::Sgd::default().build(&run.vs, 0.1)?);
    let refused = LrFinder::new().run(&run.vs, &mut opt, |_| -> Result<Tensor, ScheduleError> { unreachable!() });
    assert!(refused.unwrap_err().to_string().contains("use an optimizer of overdrive-optim"));
    Ok(())
}

#[test]
fn a_panic_restores_what_was_before() {
    let vs = VarStore::new(Device::Cpu);
    let weight = vs.root().ones("weight", &[2]);
    let mut opt = Momentum::new(&vs);
    let mut steps = 0;
    let panics = || {
        LrFinder::new().min_lr(0.1).run(&vs, &mut opt, |opt| -> Result<Tensor, ScheduleError> {
            let loss = weight.square().sum(Kind::Float);
            loss.backward();
            opt.step()?;
            opt.zero_grad()?;
            steps += 1;
            assert!(steps < 3, "planted");
            Ok(loss)
        })
    };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
    assert!(caught.is_err());
    assert_eq!(Vec::<f32>::try_from(weight.detach()).unwrap(), [1.0; 2]);
    assert_eq!((opt.lrs, opt.steps), (vec![0.3, 0.7], 0));
}
