//! Stochastic weight averaging (SWA), and `update_bn`, which computes the batch norm statistics of the averaged
//! weights.

use anyhow::{Result, ensure};
use overdrive_core::{Module, Optimizer, module_entries};
use overdrive_nn::{BatchNorm1d, BatchNorm2d, Conv2d, Flatten, Linear, NnError, Relu, sequential, update_bn};
use overdrive_optim::{AveragedModel, Averaging, Sgd};
use tch::{Kind, Tensor};

use crate::record::{Found, Given};

pub fn swa_update_bn(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    // As in Python, whose model draws the same initial weights.
    tch::manual_seed(7);
    let model = sequential![
        Conv2d::new(3, 4, 3)?,
        BatchNorm2d::builder(4).momentum(0.3).build()?,
        Relu,
        Flatten::new(),
        Linear::new(64, 5)?,
        BatchNorm1d::new(5)?
    ];
    let batches = (0..4).map(|index| given.tensor(&format!("batch.{index}"))).collect::<Result<Vec<Tensor>>>()?;
    let mut average = AveragedModel::new(&model, Averaging::Swa)?;
    // As in Python; the default, a fused kernel, rounds differently.
    let mut opt = Sgd::builder(&model).lr(0.1).foreach(true).build()?;
    for batch in &batches {
        model.forward(batch)?.square().mean(None::<Kind>).backward();
        opt.step()?;
        opt.zero_grad()?;
        average.update()?;
    }
    model.eval();
    // The outer result is of `apply`, the inner one of the closure.
    let (before, after) = average.apply(|| {
        let before = model.forward(&batches[0])?;
        update_bn(&batches, &model, |model, batch| model.forward(batch))?;
        Ok::<_, NnError>((before, model.forward(&batches[0])?))
    })??;
    found.insert("before", &before);
    found.insert("after", &after);
    for average in average.averages()? {
        found.insert(format!("average.{}", average.name().unwrap_or_default()), average.tensor());
    }
    for (key, value) in module_entries(&model) {
        found.insert(format!("model.{key}"), &value);
    }
    // `update_bn` sets each layer's momentum to none meanwhile.
    let model = overdrive_nn::repr(&model);
    let has_momenta = model.contains("momentum=0.3") && model.contains("momentum=0.1");
    ensure!(has_momenta, "update_bn did not restore the momenta of batch norm, 0.3 and 0.1: {model}");
    Ok(found)
}
