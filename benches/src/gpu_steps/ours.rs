//! Our side of the steps.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use anyhow::{Result, bail};
use overdrive::dataload::ToFloat;
use overdrive::ffi;
use overdrive::nn::Forward;
use overdrive::nn::metrics::AverageMeter;
use overdrive::prelude::*;
use overdrive::sched::StepLr;
use tch::Reduction;

use super::optimizers::optimizer;
use super::{Recipe, loops, models};
use crate::gpt::Gpt;

/// A training step.
pub struct Step {
    /// Trains one, and returns its loss on the device.
    pub train: Box<dyn FnMut() -> Result<Tensor>>,
    /// The scaler's scale now, 1 without one. Waits for the device.
    pub scale: Box<dyn Fn() -> Result<f64>>,
    /// How far the weights are from where they began. Waits for the device.
    pub distance: Box<dyn Fn() -> Result<f64>>,
    /// What else the steps change: how far the average of the weights is from them, the average of the losses, and the
    /// norm of the buffers; 0 for what a recipe lacks. Waits for the device.
    pub kept: Box<dyn Fn() -> Result<Kept>>,
    /// A fault that a test plants.
    pub fault: Rc<Cell<Fault>>,
}

/// See [`Step::kept`].
pub type Kept = [f64; 3];

/// What a step does wrong.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// Nothing.
    None,
    /// Multiplies the learning rate.
    Rate(f64),
    /// Leaves the average of the weights as it is.
    NoAverage,
    /// Leaves the loss out of the average of losses.
    NoMeter,
    /// Changes the buffers once more.
    Statistics,
}

/// Makes a step. Model and batch are the same for each device.
pub fn step(recipe: &Recipe, device: Device) -> Result<Step> {
    manual_seed(1);
    match recipe.model {
        "mlp" if loops::are_for(recipe.optimizer) => loops::step(recipe, device, models::mlp()?),
        "mlp" => train(recipe, device, models::mlp()?),
        "cnn" => train(recipe, device, models::cnn()?),
        "gpt" => train(recipe, device, Gpt::new()?),
        "lookup" => train(recipe, device, models::Lookup::new()?),
        other => bail!("there is no model {other}"),
    }
}

/// On the host, in float64.
fn there(tensor: &Tensor) -> Tensor {
    tensor.detach().to_device(Device::Cpu).to_kind(Kind::Double)
}

fn norm(tensors: impl Iterator<Item = Tensor>) -> f64 {
    tensors.map(|tensor| tensor.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt()
}

/// See [`Step::distance`].
pub fn distance(params: &[Tensor]) -> Box<dyn Fn() -> Result<f64>> {
    let params: Vec<Tensor> = params.iter().map(Tensor::shallow_clone).collect();
    let start: Vec<Tensor> = params.iter().map(|param| there(param).copy()).collect();
    Box::new(move || Ok(norm(params.iter().zip(&start).map(|(now, start)| there(now) - start))))
}

/// See [`Step::kept`].
fn kept(
    model: &impl Forward,
    averages: &Rc<RefCell<Option<AveragedModel>>>,
    meter: &Rc<RefCell<AverageMeter>>,
    has_meter: bool,
) -> Box<dyn Fn() -> Result<Kept>> {
    let (params, buffers) = (model.named_parameters(), model.named_buffers());
    let (averages, meter) = (Rc::clone(averages), Rc::clone(meter));
    Box::new(move || {
        let averages = averages.borrow().as_ref().map(AveragedModel::averages).transpose()?.unwrap_or_default();
        let apart = averages.iter().filter_map(|average| {
            let now = params.iter().find(|param| param.name() == average.name())?;
            Some(there(average.tensor()) - there(now.tensor()))
        });
        let losses = if has_meter { meter.borrow().avg()? } else { 0.0 };
        Ok([norm(apart), losses, norm(buffers.iter().map(|(_, buffer)| there(buffer)))])
    })
}

/// A copy in pinned memory.
pub fn pinned(batch: &Tensor) -> Result<Tensor> {
    let mut pinned = ffi::empty_pinned(&batch.size(), batch.kind())?;
    pinned.copy_(batch);
    Ok(pinned)
}

fn train(recipe: &Recipe, device: Device, model: impl Forward + 'static) -> Result<Step> {
    let recipe = recipe.clone();
    let (inputs, targets) = models::batch(&recipe);
    let to_float = ToFloat::unit();
    model.to(device)?;
    if let Some(kind) = recipe.weights() {
        model.to(kind)?;
    }
    let params: Vec<Tensor> = model.named_parameters().iter().map(|it| it.tensor().shallow_clone()).collect();
    let (distance, fault) = (distance(&params), Rc::new(Cell::new(Fault::None)));
    let mut opt = optimizer(recipe.optimizer, params)?;
    let scaler = GradScaler::builder(device).enabled(recipe.autocast == Some("float16")).build()?;
    let scaler = Rc::new(RefCell::new(scaler));
    let scale = {
        let scaler = Rc::clone(&scaler);
        Box::new(move || Ok(scaler.borrow().scale_value()?))
    };
    let mut accum = Accumulator::new(recipe.accumulate)?;
    let averages = match recipe.ema {
        true => Some(AveragedModel::new(&model, Averaging::Ema { decay: 0.999 })?),
        false => None,
    };
    let mut schedule = match recipe.schedule {
        true => Some(LrScheduler::new(&mut opt, StepLr::new(1).gamma(0.99))?),
        false => None,
    };
    let (averages, meter) = (Rc::new(RefCell::new(averages)), Rc::new(RefCell::new(AverageMeter::new("loss"))));
    let kept = kept(&model, &averages, &meter, recipe.meter);
    let kind = recipe.autocast.map(|name| if name == "float16" { Kind::Half } else { Kind::BFloat16 });
    let on_device = (inputs.to_device(device), targets.to_device(device));
    let on_device =
        (recipe.weights().map_or(on_device.0.shallow_clone(), |kind| on_device.0.to_kind(kind)), on_device.1);
    let uploads = recipe.upload && device.is_cuda();
    let on_host = if uploads { Some((pinned(&inputs)?, pinned(&targets)?)) } else { None };

    let planted = Rc::clone(&fault);
    let train = Box::new(move || {
        let mut scaler = scaler.borrow_mut();
        let (inputs, targets) = match &on_host {
            Some((inputs, targets)) => {
                let upload = |batch: &Tensor| batch.to_device_(device, batch.kind(), true, false);
                (upload(inputs), upload(targets))
            }
            None => (on_device.0.shallow_clone(), on_device.1.shallow_clone()),
        };
        let inputs = if inputs.kind() == Kind::Uint8 { to_float.apply(&inputs)? } else { inputs };
        let parts = recipe.accumulate as i64;
        let micro_batches: Vec<_> = inputs.chunk(parts, 0).into_iter().zip(targets.chunk(parts, 0)).collect();
        let mut latest = None;
        for micro in accum.windows(micro_batches) {
            let (inputs, targets) = micro.batch;
            let loss = {
                let _autocast = kind.map(|kind| AutocastGuard::new(device, kind)).transpose()?;
                model.forward(&inputs)?.cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Mean, -100, 0.0)
            };
            accum.backward(&opt, &scaler.scale(&loss)?, Samples(targets.size()[0]), micro.closes)?;
            latest = Some(loss.detach());
            if !micro.closes {
                continue;
            }
            if recipe.clip {
                scaler.unscale_(&mut opt)?;
                clip_grad_norm_(&model, 0.1)?;
            }
            let rate = if let Fault::Rate(factor) = planted.get() { opt.lr(0).zip(Some(factor)) } else { None };
            rate.map(|(lr, factor)| opt.set_lr(0, factor * lr)).transpose()?;
            scaler.step(&mut opt)?;
            rate.map(|(lr, _)| opt.set_lr(0, lr)).transpose()?;
            scaler.update()?;
            opt.zero_grad()?;
        }
        if let Some(averages) = averages.borrow_mut().as_mut().filter(|_| planted.get() != Fault::NoAverage) {
            averages.update()?;
        }
        if planted.get() == Fault::Statistics {
            drop(model.forward(&inputs)?);
        }
        if let Some(schedule) = &mut schedule {
            schedule.step(&mut opt)?;
        }
        let Some(loss) = latest else { bail!("a batch without samples") };
        if recipe.meter && planted.get() != Fault::NoMeter {
            meter.borrow_mut().update(&loss, targets.size()[0])?;
        }
        Ok(loss)
    });
    Ok(Step { train, scale, distance, kept, fault })
}
