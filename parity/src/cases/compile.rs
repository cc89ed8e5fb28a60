//! Compiled training steps, compared with Python's.

use anyhow::{Result, ensure};
use overdrive_compile::{self as compile, BoxError, Options};
use overdrive_core::Optimizer;
use overdrive_nn::{self as nn, Forward, Module, NnError, sequential};
use overdrive_optim::{AdamW, Sgd};
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

/// Trains a model from the given state by the given batches, compiled: the losses, and the state at the end.
fn trained<M: Module + Forward, O: Optimizer>(
    given: &Given<'_>,
    model: &M,
    optimizer: impl FnOnce(&M) -> Result<O>,
    steps: usize,
) -> Result<Found> {
    let mut found = Found::default();
    let mut state: Vec<(String, Tensor)> = model.named_buffers();
    let params = model.named_parameters();
    state.extend(params.iter().map(|it| (it.name().unwrap_or_default().to_owned(), it.tensor().shallow_clone())));
    for (name, value) in &state {
        let begin = given.tensor(&format!("state.{name}"))?;
        tch::no_grad(|| value.shallow_clone().f_copy_(&begin))?;
    }
    let mut opt = optimizer(model)?;
    let mut step = compile::step(model, |batch| -> Result<Tensor, BoxError> {
        let logits = model.forward(&batch[0])?.f_flatten(0, -2)?;
        let targets = batch[1].f_flatten(0, -1)?;
        Ok(logits.f_cross_entropy_loss(&targets, None::<&Tensor>, tch::Reduction::Mean, -100, 0.0)?)
    })
    .options(Options { strict: true, ..Options::default() });
    for number in 0..steps {
        let batch = [given.tensor(&format!("x.{number}"))?, given.tensor(&format!("y.{number}"))?];
        found.insert(format!("loss.{number}"), &step.run(&mut opt, &batch)?);
    }
    ensure!(step.why_eager().is_none(), "not compiled: {:?}", step.why_eager());
    state.iter().for_each(|(name, value)| found.insert(format!("state.{name}"), value));
    Ok(found)
}

pub fn compiled_cnn(given: &Given<'_>) -> Result<Found> {
    let first = nn::Conv2d::new(1, 4, 3)?;
    first.requires_grad_(false)?;
    let model = sequential![
        first,
        nn::BatchNorm2d::new(4)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Conv2d::new(4, 8, 3)?,
        nn::Relu,
        nn::Flatten::new(),
        nn::Linear::new(8 * 3 * 3, 5)?,
    ];
    let sgd = |model: &nn::Sequential| {
        let params = model.named_parameters().into_iter().filter(|param| param.tensor().requires_grad());
        Ok(Sgd::builder(params.collect::<Vec<_>>()).lr(0.05).momentum(0.9).build()?)
    };
    trained(given, &model, sgd, 20)
}

#[derive(Module)]
struct Gpt {
    embedding: nn::Embedding,
    norm: nn::LayerNorm,
    attention: nn::Linear,
    project: nn::Linear,
}

impl Forward for Gpt {
    fn forward(&self, tokens: &Tensor) -> Result<Tensor, NnError> {
        let x = self.embedding.forward(tokens)?;
        let all = self.attention.forward(&self.norm.forward(&x)?)?;
        let all = all.f_unflatten(-1, [3, 2, 4])?.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        let heads =
            Tensor::f_scaled_dot_product_attention(&all[0], &all[1], &all[2], None::<&Tensor>, 0.0, true, None, false)?;
        let x = x + self.project.forward(&heads.f_transpose(1, 2)?.f_flatten(2, -1)?)?;
        Ok(x.f_matmul(&self.embedding.weight.f_tr()?)?)
    }
}

pub fn compiled_gpt(given: &Given<'_>) -> Result<Found> {
    let (embedding, norm) = (nn::Embedding::new(16, 8)?, nn::LayerNorm::new(8)?);
    let attention = nn::Linear::builder(8, 24).bias(false).build()?;
    let model = Gpt { embedding, norm, attention, project: nn::Linear::new(8, 8)? };
    trained(given, &model, |model| Ok(AdamW::builder(model).lr(1e-2).build()?), 20)
}
