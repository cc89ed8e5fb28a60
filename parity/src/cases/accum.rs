//! Gradients accumulated over micro-batches, compared with those of the large batch in Python.

use anyhow::{Context, Result};
use overdrive_accum::{Accumulator, GradientNoiseScale, Samples, Tokens};
use overdrive_optim::Sgd;
use tch::{Kind, Reduction, Tensor};

use crate::record::{Found, Given};

const IGNORED: i64 = -100;

fn mlp(x: &Tensor, weights: &[Tensor]) -> Tensor {
    let hidden = (x.matmul(&weights[0]) + &weights[1]).tanh();
    hidden.matmul(&weights[2]) + &weights[3]
}

pub fn accumulation_is_the_large_batch(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, kind) in [("float64", Kind::Double), ("float32", Kind::Float)] {
        let weights = (0..4).map(|index| Ok(given.tensor(&format!("{name}.weight.{index}"))?.set_requires_grad(true)));
        let mut weights = weights.collect::<Result<Vec<_>>>()?;
        for (number, sizes) in given.value::<Vec<Vec<i64>>>("windows")?.iter().enumerate() {
            let x = given.tensor(&format!("{name}.{number}.x"))?.split_with_sizes(sizes, 0);
            let targets = given.tensor(&format!("{name}.{number}.targets"))?.split_with_sizes(sizes, 0);
            for counted in ["samples", "tokens"] {
                let opt = Sgd::builder(&weights).build()?;
                let mut accum = Accumulator::new(sizes.len())?;
                for micro in accum.windows(x.iter().zip(&targets)) {
                    let (x, targets) = micro.batch;
                    let output = mlp(x, &weights);
                    let (loss, count) = if counted == "samples" {
                        (output.square().mean(kind), Samples(x.size()[0]))
                    } else {
                        let loss = output.cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, IGNORED, 0.0);
                        (loss, Tokens(targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])))
                    };
                    accum.backward(&opt, &loss, count, micro.closes)?;
                }
                for (index, weight) in weights.iter_mut().enumerate() {
                    found.insert(format!("{name}.{number}.{counted}.{index}"), &weight.grad());
                    weight.zero_grad();
                }
            }
        }
    }
    Ok(found)
}

pub fn gradient_noise_scale(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, kind) in [("float64", Kind::Double), ("float32", Kind::Float)] {
        let weights = (0..4).map(|index| Ok(given.tensor(&format!("{name}.weight.{index}"))?.set_requires_grad(true)));
        let mut weights = weights.collect::<Result<Vec<_>>>()?;
        let opt = Sgd::builder(&weights).build()?;
        let mut noise = GradientNoiseScale::new(given.value("decay")?)?;
        for (number, sizes) in given.value::<Vec<Vec<i64>>>("windows")?.iter().enumerate() {
            let x = given.tensor(&format!("{name}.{number}.x"))?.split_with_sizes(sizes, 0);
            let mut accum = Accumulator::new(sizes.len())?;
            for micro in accum.windows(&x) {
                let loss = mlp(micro.batch, &weights).square().mean(kind);
                let total = accum.backward(&opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
                noise.observe(&accum, &opt, total)?;
            }
            weights.iter_mut().for_each(Tensor::zero_grad);
            let scale = noise.simple_noise_scale()?.context("no estimate")?;
            found.insert(format!("{name}.{number}"), &Tensor::from(scale));
        }
    }
    Ok(found)
}
