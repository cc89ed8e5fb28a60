//! A learning-rate finder around an optimizer that moves weights.

use overdrive::core::OptimizerError;
use overdrive::optim::Sam;
use overdrive::prelude::*;
use overdrive::sched::{LrFinder, ScheduleError};
use tch::nn::VarStore;

use crate::CPU;

#[test]
fn a_step_that_fails_after_sams_ascent_leaves_nothing_moved() -> anyhow::Result<()> {
    let vs = VarStore::new(CPU);
    let weight = vs.root().var("weight", &[2], tch::nn::Init::Const(1.0));
    let sgd = Sgd::builder(vs.trainable_variables()).lr(0.01).momentum(0.9).build()?;
    let mut opt = Sam::new(sgd, 0.05)?;
    let mut steps = 0;
    let swept = LrFinder::new().min_lr(0.01).run(&vs, &mut opt, |opt| -> Result<Tensor, ScheduleError> {
        weight.square().sum(Kind::Float).backward();
        opt.ascend()?;
        steps += 1;
        if steps == 3 {
            return Err(OptimizerError::NoMomentum.into());
        }
        let loss = weight.square().sum(Kind::Float);
        loss.backward();
        opt.step()?;
        opt.zero_grad()?;
        Ok(loss)
    });
    let error = swept.err().map(|error| error.to_string()).unwrap_or_default();
    assert_eq!(error, OptimizerError::NoMomentum.to_string(), "the step's own error");
    assert_eq!(opt.lr(0), Some(0.01));
    opt.step_skipped()?;
    drop(opt);
    assert_eq!(Vec::<f32>::try_from(weight.detach())?, [1.0; 2]);
    Ok(())
}
