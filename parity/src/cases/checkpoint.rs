//! PyTorch's `.pt` files, exported by `docs/export_pt.py` and loaded here.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use overdrive_checkpoint::load;
use overdrive_core::{Optimizer, Stateful};
use overdrive_optim::{Adadelta, Adafactor, Adagrad, Adam, AdamW, Adamax, Asgd, NAdam, RAdam, RmsProp, Rprop, Sgd};
use tch::{Device, Tensor, nn};

use crate::record::{Found, Given};

trait Saved: Optimizer + Stateful {}
impl<O: Optimizer + Stateful> Saved for O {}

/// An optimizer with the parameter groups that Python's has. All other options have our defaults, so that loading the
/// state has to set them.
fn make(name: &str, params: &[Tensor]) -> Result<Box<dyn Saved>> {
    let (a, b) = params.split_at(2);
    Ok(match name {
        "sgd" => Box::new(Sgd::builder(a).add_param_group(Sgd::group(b)).build()?),
        "adam" => Box::new(Adam::builder(params).build()?),
        "adamw" => Box::new(AdamW::builder(a).add_param_group(AdamW::group(b)).build()?),
        "rmsprop" => Box::new(RmsProp::builder(params).build()?),
        "adagrad" => Box::new(Adagrad::builder(params).build()?),
        "adafactor" => Box::new(Adafactor::builder(params).build()?),
        "adadelta" => Box::new(Adadelta::builder(params).build()?),
        "adamax" => Box::new(Adamax::builder(params).build()?),
        "asgd" => Box::new(Asgd::builder(params).build()?),
        "nadam" => Box::new(NAdam::builder(params).build()?),
        "radam" => Box::new(RAdam::builder(params).build()?),
        "rprop" => Box::new(Rprop::builder(params).build()?),
        _ => bail!("no optimizer of the name {name}"),
    })
}

pub fn export_pt(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, folder) in given.value::<BTreeMap<String, PathBuf>>("folders")? {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let _model = nn::seq_t()
            .add(nn::linear(vs.root() / "0", 6, 8, Default::default()))
            .add(nn::batch_norm1d(vs.root() / "1", 8, Default::default()))
            .add(nn::linear(vs.root() / "2", 8, 8, Default::default()));
        let loaded = load(&folder, &mut [("model", &mut vs)])?;
        ensure!(loaded.step == 4, "step {}", loaded.step);
        let variables = vs.variables();
        let names: Vec<String> = loaded.get("model_names")?.context("no model_names")?;
        let params: Vec<Tensor> = names.iter().map(|name| variables[name].shallow_clone()).collect();
        let params: Vec<Tensor> = params.into_iter().filter(Tensor::requires_grad).collect();
        let mut opt = make(&name, &params)?;
        load(&folder, &mut [("optimizer", &mut *opt)])?;
        for step in 4..24 {
            opt.zero_grad()?;
            for param in &params {
                let grad = (param.detach() * 3.0 + step).sin();
                (param * grad).sum(param.kind()).backward();
            }
            opt.step()?;
        }
        for (key, value) in &variables {
            found.insert(format!("{name}.{key}"), value);
        }
    }
    Ok(found)
}
