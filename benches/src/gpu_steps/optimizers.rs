//! The optimizers of the steps, by name.

use anyhow::{Result, bail};
use overdrive::optim::{
    Adadelta, Adafactor, AdafactorForm, Adagrad, AdamW8Bit, AdamWScheduleFree, Adamax, Asgd, Joint, Lamb, Lars, Lion,
    Lookahead, LowPrecision, Muon, NAdam, Prodigy, RAdam, RmsProp, Rprop, SgdScheduleFree, SparseAdam,
};
use overdrive::prelude::*;

/// Makes the optimizer of this name, of those that need no loop of their own.
pub fn optimizer(name: &str, params: Vec<Tensor>) -> Result<Box<dyn Optimizer>> {
    Ok(match name {
        "AdamW" => Box::new(AdamW::builder(params).lr(1e-3).build()?),
        "Adam" => Box::new(Adam::builder(params).lr(1e-3).build()?),
        "SGD" => Box::new(Sgd::builder(params).lr(0.01).momentum(0.9).build()?),
        "NAdam" => Box::new(NAdam::builder(params).build()?),
        "RAdam" => Box::new(RAdam::builder(params).build()?),
        "Adamax" => Box::new(Adamax::builder(params).build()?),
        "Adagrad" => Box::new(Adagrad::builder(params).build()?),
        "Adadelta" => Box::new(Adadelta::builder(params).build()?),
        "RMSprop" => Box::new(RmsProp::builder(params).lr(1e-3).build()?),
        "Rprop" => Box::new(Rprop::builder(params).build()?),
        "ASGD" => Box::new(Asgd::builder(params).build()?),
        "Adafactor" => Box::new(Adafactor::builder(params).build()?),
        "Muon" => Box::new(Muon::builder(matrices(params)).build()?),
        "SparseAdam" => Box::new(SparseAdam::builder(params).build()?),
        "Lion" => Box::new(Lion::builder(params).lr(1e-4).build()?),
        "LAMB" => Box::new(Lamb::builder(params).build()?),
        "LARS" => Box::new(Lars::builder(params).build()?),
        "AdamW8bit" => Box::new(AdamW8Bit::builder(params).build()?),
        "Prodigy" => Box::new(Prodigy::builder(params).build()?),
        "SGDScheduleFree" => Box::new(SgdScheduleFree::builder(params).lr(0.1).build()?),
        "AdamWScheduleFree" => Box::new(AdamWScheduleFree::builder(params).build()?),
        "T5Adafactor" => {
            let form = AdafactorForm::T5 { warmup_init: false };
            Box::new(Adafactor::builder(params).form(form).build()?)
        }
        "Lookahead" => Box::new(Lookahead::new(AdamW::builder(params).build()?, 2, 0.5)?),
        "Joint" => {
            let others: Vec<Tensor> =
                params.iter().filter(|param| param.dim() != 2).map(Tensor::shallow_clone).collect();
            Box::new(Joint::new(Muon::builder(matrices(params)).build()?, AdamW::builder(others).build()?)?)
        }
        "MasterCopy" => Box::new(AdamW::builder(params).low_precision(LowPrecision::MasterCopy).build()?),
        "StochasticRounding" => {
            Box::new(AdamW::builder(params).low_precision(LowPrecision::StochasticRounding).build()?)
        }
        other => bail!("there is no optimizer {other}"),
    })
}

/// Muon is for these alone.
fn matrices(params: Vec<Tensor>) -> Vec<Tensor> {
    params.into_iter().filter(|param| param.dim() == 2).collect()
}
