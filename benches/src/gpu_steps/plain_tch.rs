//! The same steps by what tch has: its modules and libtorch's C++ optimizers, which go tensor by tensor.

use std::cell::Cell;
use std::rc::Rc;

use anyhow::{Result, bail};
use overdrive::tch;
use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Reduction};

use super::Recipe;
use super::models;
use super::ours::{Fault, Step, distance, pinned};

/// Whether tch can train so.
pub fn has(recipe: &Recipe) -> bool {
    let optimizer = ["AdamW", "Adam", "SGD", "RMSprop"].contains(&recipe.optimizer);
    let model = ["mlp", "cnn"].contains(&recipe.model);
    optimizer && model && recipe.autocast.is_none() && !recipe.ema && !recipe.schedule && !recipe.meter
}

fn model(name: &str, path: &nn::Path<'_>) -> nn::SequentialT {
    let linear = |name, inputs, outputs| nn::linear(path / name, inputs, outputs, Default::default());
    let conv = |name, inputs, outputs, bias| {
        nn::conv2d(path / name, inputs, outputs, 3, nn::ConvConfig { padding: 1, bias, ..Default::default() })
    };
    match name {
        "mlp" => nn::seq_t()
            .add(linear("0", 64, 128))
            .add_fn(|x| x.relu())
            .add(linear("2", 128, 128))
            .add_fn(|x| x.relu())
            .add(linear("4", 128, models::CLASSES)),
        _ => nn::seq_t()
            .add(conv("0", 3, 16, false))
            .add(nn::batch_norm2d(path / "1", 16, Default::default()))
            .add_fn(|x| x.relu().max_pool2d(2, 2, 0, 1, false))
            .add(conv("4", 16, 32, true))
            .add_fn(|x| x.relu().adaptive_avg_pool2d([1, 1]).flatten(1, -1))
            .add(linear("8", 32, models::CLASSES)),
    }
}

fn optimizer(name: &str, vs: &VarStore) -> Result<nn::Optimizer> {
    Ok(match name {
        "AdamW" => nn::AdamW::default().build(vs, 1e-3)?,
        "Adam" => nn::Adam::default().build(vs, 1e-3)?,
        "SGD" => nn::Sgd { momentum: 0.9, ..Default::default() }.build(vs, 0.01)?,
        "RMSprop" => nn::RmsProp::default().build(vs, 1e-3)?,
        other => bail!("tch has no {other}"),
    })
}

/// Makes a step that [`has`] says it can make.
pub fn step(recipe: &Recipe, device: Device) -> Result<Step> {
    tch::manual_seed(1);
    let recipe = recipe.clone();
    let vs = VarStore::new(device);
    let model = model(recipe.model, &vs.root());
    let mut opt = optimizer(recipe.optimizer, &vs)?;
    let distance = distance(&vs.trainable_variables());
    let (inputs, targets) = models::batch(&recipe);
    let on_device = (inputs.to_device(device), targets.to_device(device));
    let on_host = if recipe.upload { Some((pinned(&inputs)?, pinned(&targets)?)) } else { None };
    let train = Box::new(move || {
        let (inputs, targets) = match &on_host {
            Some((inputs, targets)) => {
                let upload = |batch: &tch::Tensor| batch.to_device_(device, batch.kind(), true, false);
                (upload(inputs), upload(targets))
            }
            None => (on_device.0.shallow_clone(), on_device.1.shallow_clone()),
        };
        let inputs = if inputs.kind() == Kind::Uint8 { inputs.to_kind(Kind::Float) / 255.0 } else { inputs };
        let parts = recipe.accumulate as i64;
        opt.zero_grad();
        let mut latest = None;
        for (inputs, targets) in inputs.chunk(parts, 0).iter().zip(targets.chunk(parts, 0)) {
            let outputs = model.forward_t(inputs, true);
            let loss = outputs.cross_entropy_loss(&targets, None::<&tch::Tensor>, Reduction::Mean, -100, 0.0);
            if parts > 1 {
                (&loss / parts as f64).backward()
            } else {
                loss.backward()
            }
            latest = Some(loss.detach());
        }
        if recipe.clip {
            opt.clip_grad_norm(0.1);
        }
        opt.step();
        match latest {
            Some(loss) => Ok(loss),
            None => bail!("a batch without samples"),
        }
    });
    Ok(Step {
        train,
        scale: Box::new(|| Ok(1.0)),
        distance,
        kept: Box::new(|| Ok([0.0; 3])),
        fault: Rc::new(Cell::new(Fault::None)),
    })
}
