//! Summaries of models, compared with torchinfo's tables.

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use overdrive_nn::*;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

#[derive(Debug, Deserialize)]
struct Row {
    class: String,
    depth: usize,
    output: Vec<i64>,
    params: usize,
    mult_adds: u64,
}

#[derive(Deserialize)]
struct Theirs {
    rows: Vec<Row>,
    shape: Vec<i64>,
    params: usize,
    trainable: usize,
    mult_adds: u64,
    output_bytes: usize,
    params_bytes: usize,
}

/// As in Python.
#[derive(Debug, Module)]
struct Block {
    conv: Conv2d,
    norm: BatchNorm2d,
    act: LeakyRelu,
}

impl Block {
    fn new(channels: i64) -> Result<Self> {
        let conv = Conv2d::builder(channels, channels, 3).padding(1).groups(2).bias(false).build()?;
        Ok(Self { conv, norm: BatchNorm2d::new(channels)?, act: LeakyRelu(0.01) })
    }
}

impl Forward for Block {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        Ok(x + self.act.forward(&self.norm.forward(&self.conv.forward(x)?)?)?)
    }
}

fn model(name: &str) -> Result<Sequential> {
    Ok(match name {
        "mlp" => {
            let last = Linear::builder(30, 5).bias(false).build()?;
            sequential![Linear::new(20, 30)?, Relu, Dropout::new(0.5)?, last]
        }
        "convs" => {
            let first = Conv2d::builder(3, 8, 3).stride(2).build()?;
            let convs = sequential![first, BatchNorm2d::new(8)?, Block::new(8)?, Block::new(8)?, MaxPool2d::new(2)];
            let norm = LayerNorm::new(8)?;
            sequential![convs, sequential![AdaptiveAvgPool2d::new(1), Flatten::new(), norm, Linear::new(8, 4)?]]
        }
        "frozen" => {
            let first = ConvTranspose2d::builder(2, 4, 2).stride(2).build()?;
            first.requires_grad_(false)?;
            sequential![first, GroupNorm::new(2, 4)?, Conv2d::new(4, 2, 1)?]
        }
        other => bail!("{other}?"),
    })
}

pub fn summaries(given: &Given<'_>) -> Result<Found> {
    let (mut found, mut rows) = (Found::default(), 0i64);
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("summaries")? {
        let x = Tensor::zeros(&theirs.shape, (Kind::Float, Device::Cpu));
        let own = summary(&model(&name)?, &x, Sequential::forward)?;
        ensure!(own.rows.len() == theirs.rows.len(), "{name}: {:?}", own.rows);
        for (own, theirs) in own.rows.iter().zip(&theirs.rows) {
            let is_same = own.class == theirs.class
                && own.depth == theirs.depth
                && own.output.as_ref() == Some(&theirs.output)
                && own.params == theirs.params
                && own.mult_adds == theirs.mult_adds;
            ensure!(is_same, "{name}: {own:?} and not {theirs:?}");
            rows += 1;
        }
        let totals = [own.total_params, own.trainable_params, own.forward_backward_bytes, own.params_bytes];
        let expected = [theirs.params, theirs.trainable, theirs.output_bytes, theirs.params_bytes];
        ensure!(totals == expected, "{name}: {totals:?} and not {expected:?}");
        ensure!(own.total_mult_adds == theirs.mult_adds, "{name}: {} mult-adds", own.total_mult_adds);
    }
    found.insert("rows", &Tensor::from(rows));
    Ok(found)
}
