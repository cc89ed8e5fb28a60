//! A loop whose optimizer updates one tensor after the other.

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunProfile, record_function};
use tch::nn::{self, OptimizerConfig, VarStore};

use super::training::{batch, start_timer};
use super::{Form, Plan};
use crate::model::{Mlp, cross_entropy};

/// The number of parameters with `PIECE` elements each. Concatenated, they are the weight of one layer.
const PIECES: i64 = 1024;
const PIECE: i64 = 64;
const WIDTH: i64 = 256;

/// tch's AdamW over 1,024 small tensors, with about ten operators for each. Remedied: fused AdamW.
pub fn tensor_by_tensor(form: Form, plan: &Plan) -> Result<RunProfile> {
    let vs = VarStore::new(Device::Cpu);
    let body = Mlp::new(&(vs.root() / "body"), &[512, 512, WIDTH]);
    let piece = |number: i64| vs.root().randn(&format!("piece{number}"), &[PIECE], 0.0, 0.05);
    let pieces: Vec<Tensor> = (0..PIECES).map(piece).collect();
    let mut optimize = optimizer(form, &vs)?;
    let (inputs, targets) = batch(64, &[512]);
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            let weight = Tensor::cat(&pieces, 0).view([WIDTH, WIDTH]);
            cross_entropy(&body.forward(&inputs).matmul(&weight), &targets)
        };
        {
            let _phase = timer.phase(Phase::Backward);
            loss.f_backward()?;
        }
        {
            let _phase = timer.phase(Phase::Optimizer);
            let _scope = record_function("update");
            optimize()?;
        }
        timer.step(inputs.size()[0] as u64);
    }
    Ok(timer.finish()?)
}

/// A function with the optimizer's step and `zero_grad`.
fn optimizer(form: Form, vs: &VarStore) -> Result<Box<dyn FnMut() -> Result<()>>> {
    Ok(match form {
        Form::Planted => {
            let mut opt = nn::AdamW::default().build(vs, 1e-3)?;
            Box::new(move || {
                opt.step();
                opt.zero_grad();
                Ok(())
            })
        }
        Form::Remedied => {
            let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
            Box::new(move || {
                opt.step()?;
                Ok(opt.zero_grad()?)
            })
        }
    })
}
