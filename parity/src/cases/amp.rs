//! Autocast's dtypes for the operators in PyTorch's own lists, and runs of GradScaler.

use anyhow::{Context, Result, bail};
use overdrive_amp::{GradScaler, autocast};
use overdrive_core::Optimizer;
use overdrive_ffi::{Arg, TensorList, Value, test_find};
use overdrive_optim::Sgd;
use serde::Deserialize;
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

use crate::record::{Found, Given};

#[derive(Deserialize)]
struct Call {
    name: String,
    overload: String,
    args: Vec<Encoded>,
    results: Vec<Expected>,
}

#[derive(Deserialize)]
struct Expected {
    kind: String,
    label: String,
    refused: Option<String>,
}

/// One argument as Python has written it.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoded {
    None,
    Tensor(String),
    Tensors(Vec<String>),
    Ints(Vec<i64>),
    Int(i64),
    Float(f64),
    Bool(bool),
}

/// The tensors of an argument, kept alive for the call.
enum Held {
    Tensor(Tensor),
    Tensors(TensorList),
    Plain,
}

pub fn autocast_dtypes(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for call in given.value::<Vec<Call>>("calls")? {
        let held = call.args.iter().map(|arg| hold(given, arg)).collect::<Result<Vec<_>>>()?;
        let args: Vec<Arg<'_>> = call.args.iter().zip(&held).map(argument).collect();
        let op = test_find(&call.name, &call.overload)?;
        for expected in &call.results {
            let kind = if expected.kind == "float16" { Kind::Half } else { Kind::BFloat16 };
            let result = autocast(Device::Cpu, kind, || op.call(&args))?;
            let kind = match (result, &expected.refused) {
                (Err(_), Some(_)) => Kind::Bool,
                (Ok(_), Some(why)) => bail!("{} works here, but Python refuses it: {why}", expected.label),
                (Err(error), None) => return Err(error).context(expected.label.clone()),
                (Ok(values), None) => first_tensor_kind(&values).context(expected.label.clone())?,
            };
            found.insert(&expected.label, &Tensor::empty([0], (kind, Device::Cpu)));
        }
    }
    Ok(found)
}

fn hold(given: &Given<'_>, arg: &Encoded) -> Result<Held> {
    Ok(match arg {
        Encoded::Tensor(name) => Held::Tensor(given.tensor(name)?),
        Encoded::Tensors(names) => {
            let tensors = names.iter().map(|name| given.tensor(name)).collect::<Result<Vec<_>>>()?;
            Held::Tensors(TensorList::new(&tensors)?)
        }
        _ => Held::Plain,
    })
}

fn argument<'a>((arg, held): (&'a Encoded, &'a Held)) -> Arg<'a> {
    match (arg, held) {
        (_, Held::Tensor(tensor)) => Arg::Tensor(tensor),
        (_, Held::Tensors(list)) => Arg::TensorList(list),
        (Encoded::Ints(ints), Held::Plain) => Arg::IntList(ints),
        (Encoded::Int(value), Held::Plain) => Arg::Int(*value),
        (Encoded::Float(value), Held::Plain) => Arg::Double(*value),
        (Encoded::Bool(value), Held::Plain) => Arg::Bool(*value),
        (_, Held::Plain) => Arg::None,
    }
}

fn first_tensor_kind(values: &[Value]) -> Option<Kind> {
    values.iter().find_map(|value| match value {
        Value::Tensor(tensor) => Some(tensor.kind()),
        _ => None,
    })
}

#[derive(Deserialize)]
struct History {
    init_scale: f64,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: i64,
    fused: bool,
    lr: f64,
    momentum: f64,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
struct Step {
    plant: String,
    planted: [bool; 2],
    unscale: bool,
    new_scale: Option<f64>,
}

/// One parameter and its optimizer. The fused optimizer reads the scale on the device; with tch's, the scaler waits for
/// the device.
struct Trained {
    param: Tensor,
    opt: Box<dyn Optimizer>,
}

impl Trained {
    fn new(start: &Tensor, history: &History) -> Result<Self> {
        if history.fused {
            let param = start.copy().set_requires_grad(true);
            let opt = Sgd::builder(vec![param.shallow_clone()]).lr(history.lr).momentum(history.momentum).build()?;
            return Ok(Self { param, opt: Box::new(opt) });
        }
        let vs = nn::VarStore::new(Device::Cpu);
        let param = vs.root().var_copy("param", start);
        let opt = nn::sgd(history.momentum, 0.0, 0.0, false).build(&vs, history.lr)?;
        Ok(Self { param, opt: Box::new(overdrive_core::TchOptimizer::new(opt)) })
    }
}

pub fn grad_scaler_histories(given: &Given<'_>) -> Result<Found> {
    let (start, grads) = (given.tensor("start")?, given.tensor("grads")?);
    let mut found = Found::default();
    for (index, history) in given.value::<Vec<History>>("histories")?.iter().enumerate() {
        let mut scaler = GradScaler::builder(Device::Cpu)
            .init_scale(history.init_scale)
            .growth_factor(history.growth_factor)
            .backoff_factor(history.backoff_factor)
            .growth_interval(history.growth_interval)
            .build()?;
        let mut trained = [Trained::new(&start.get(0), history)?, Trained::new(&start.get(1), history)?];
        let (mut rows, mut params) = (Vec::new(), Vec::new());
        for (number, step) in history.steps.iter().enumerate() {
            let mut skipped = Vec::new();
            for (which, Trained { param, opt }) in trained.iter_mut().enumerate() {
                let grad = grads.get(number as i64).get(which as i64).copy();
                if step.planted[which] {
                    let _ = grad.get((number % 6) as i64).fill_(step.plant.parse::<f64>()?);
                }
                scaler.scale(&(&*param * grad).sum(Kind::Float))?.backward();
                if step.unscale {
                    scaler.unscale_(opt.as_mut())?;
                }
                skipped.push(f64::from(u8::from(scaler.step(opt.as_mut())?.skipped()?)));
                opt.zero_grad()?;
            }
            match step.new_scale {
                Some(new_scale) => scaler.update_to(new_scale)?,
                None => scaler.update()?,
            }
            rows.extend([scaler.scale_value()?, scaler.growth_tracker()? as f64]);
            rows.extend(skipped);
            params.push(Tensor::stack(&[&trained[0].param, &trained[1].param], 0).detach());
        }
        let rows = Tensor::from_slice(&rows).reshape([-1, 4]);
        found.insert(format!("{index}.scale_tracker_skipped"), &rows);
        found.insert(format!("{index}.params"), &Tensor::stack(&params, 0));
    }
    Ok(found)
}
