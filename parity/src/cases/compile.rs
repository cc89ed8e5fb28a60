//! Compiled training steps, beside Python's.

use anyhow::{Result, ensure};
use overdrive_compile::{self as compile, Options};
use overdrive_optim::AdamW;
use tch::Tensor;

use super::lr_finder::Net;
use crate::record::{Found, Given};

pub fn compiled_steps(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let weights = (0..3).map(|index| Ok(given.tensor(&format!("weight.{index}"))?.set_requires_grad(true)));
    let net = Net(weights.collect::<Result<_>>()?);
    let mut opt = AdamW::builder(&net.0).lr(1e-2).build()?;
    let mut step = compile::step(&net, |batch| {
        let hidden = batch[0].f_matmul(&net.0[0])?.f_gelu("none")?;
        let hidden = hidden.f_layer_norm([24], Some(&net.0[1]), None::<&Tensor>, 1e-5, false)?;
        let logits = hidden.f_matmul(&net.0[2])?;
        Ok(logits.f_cross_entropy_loss(&batch[1], None::<&Tensor>, tch::Reduction::Mean, -100, 0.0)?)
    })
    .options(Options { strict: true, ..Options::default() });
    for number in 0..given.value::<Vec<i64>>("sizes")?.len() {
        let batch = [given.tensor(&format!("x.{number}"))?, given.tensor(&format!("y.{number}"))?];
        found.insert(format!("loss.{number}"), &step.run(&mut opt, &batch)?);
    }
    ensure!(step.why_eager().is_none(), "not compiled: {:?}", step.why_eager());
    for (index, weight) in net.0.iter().enumerate() {
        found.insert(format!("weight.{index}"), weight);
    }
    Ok(found)
}
