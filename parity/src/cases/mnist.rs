//! Trains the technique benchmark's CNN for digits from the initial weights and in the order of samples that Python
//! recorded. Every loss and the final weights are compared with Python's.
//!
//! The Python half is `parity/cases/mnist.py`: [`Given`] has its inputs, [`Found`] our results.

use anyhow::Result;
use overdrive_benches::model::{Cnn, cross_entropy};
use overdrive_core::Optimizer;
use overdrive_dataload::Mnist;
use overdrive_optim::Sgd;
use tch::{Device, Kind, Tensor, nn};

use crate::record::{Found, Given};

pub fn mnist_cnn_losses(given: &Given<'_>) -> Result<Found> {
    let (mean, std): (f64, f64) = (given.value("mean")?, given.value("std")?);
    let train = Mnist::open(given.mnist())?.train;
    let images = Tensor::from_slice(train.images()).reshape([-1, 1, 28, 28]);
    let labels = Tensor::from_slice(train.labels()).to_kind(Kind::Int64);

    let vs = nn::VarStore::new(Device::Cpu);
    let model = Cnn::new(&vs.root());
    for (name, mut variable) in vs.variables() {
        let start = given.tensor(&name)?;
        tch::no_grad(|| variable.copy_(&start));
    }
    // As in the Python half.
    let mut opt = Sgd::builder(vs.trainable_variables()).lr(0.05).momentum(0.9).build()?;
    let mut losses = Vec::new();
    for indices in given.tensor("order")?.split(given.value("batch")?, 0) {
        let x = (images.index_select(0, &indices).to_kind(Kind::Float) / 255.0 - mean) / std;
        let loss = cross_entropy(&model.forward(&x), &labels.index_select(0, &indices));
        opt.zero_grad()?;
        loss.backward();
        opt.step()?;
        losses.push(loss.detach());
    }
    let mut found = Found::default();
    found.insert("losses", &Tensor::stack(&losses, 0));
    for (name, variable) in vs.variables() {
        found.insert(format!("after.{name}"), &variable);
    }
    Ok(found)
}
