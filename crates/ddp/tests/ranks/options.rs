//! `DistributedDataParallel` besides averaging: names, buffers, frozen parameters, outputs, refusals, logs.

use anyhow::{Context, Result, ensure};
use overdrive_core::{GradientSync, Optimizer, TchOptimizer};
use overdrive_ddp::{DdpBuilder, DdpError, DistributedDataParallel, ProcessGroup};
use overdrive_ffi::TensorList;
use tch::nn::{self, Module, OptimizerConfig};
use tch::{Device, Kind, Tensor};

use crate::collectives::any_group;
use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub fn scenario(_meeting: &Meeting) -> Result<()> {
    let group = any_group()?;
    names(&group).context("names")?;
    buffers(&group).context("buffers")?;
    unfrozen(&group).context("unfrozen")?;
    made_later(&group).context("made later")?;
    no_grad(&group).context("no_grad")?;
    several_outputs(&group).context("several outputs")?;
    refusals(&group).context("refusals")?;
    missing_gradients(&group).context("missing gradients")?;
    sparse_gradients(&group).context("sparse gradients")?;
    bucket_lists(&group).context("bucket lists")?;
    skipped(&group).context("skipped")?;
    log(&group).context("log")
}

/// The first bucket takes one parameter of a mebibyte, the next one the other three.
fn bucket_lists(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let params: Vec<Tensor> = (0..4).map(|i| vs.root().ones(&i.to_string(), &[1 << 18])).collect();
    let ddp = DistributedDataParallel::builder(group).bucket_cap_mb_list([1.0, 3.0]).build(&vs)?;
    for _ in 0..3 {
        let loss =
            ddp.forward(|| params.iter().map(|param| param.sum(Kind::Float)).fold(Tensor::from(0f32), |a, b| a + b))?;
        ddp.backward(&loss)?;
    }
    let log = ddp.logging_data()?;
    let sizes =
        log.iter().find(|(name, _)| name == "rebuilt_bucket_sizes").map(|(_, sizes)| sizes).context("no sizes")?;
    ensure!(sizes.replace(' ', "") == "1048576,3145728", "{sizes}");
    for wrong in [0.0, -1.0, f64::NAN] {
        let refused = DistributedDataParallel::builder(group).bucket_cap_mb_list([25.0, wrong]).build(&vs);
        ensure!(matches!(refused, Err(DdpError::InvalidOption { option: "bucket_cap_mb", .. })), "{wrong}");
    }
    Ok(())
}

/// Each parameter has a bucket of its own. A pass that is held back would leave a gradient local for ever.
fn skipped(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let (used, unused) = (vs.root().ones("used", &[2]), vs.root().ones("unused", &[2]));
    let builder = DistributedDataParallel::builder(group).find_unused_parameters(true).bucket_cap_mb(1e-6);
    let ddp = builder.skip_all_reduce_unused_params(true).build(&vs)?;
    let forward = |both: bool| {
        let sum = (&used * group.rank() as f64).sum(Kind::Float);
        ddp.forward(|| if both { sum + unused.sum(Kind::Float) } else { sum })
    };
    for _ in 0..3 {
        used.shallow_clone().zero_grad();
        ddp.backward(&forward(false)?)?;
        let mean = (group.size() - 1) as f64 / 2.0;
        ensure!(used.grad().double_value(&[1]) == mean && !unused.grad().defined(), "{}", used.grad());
    }
    let told = {
        let _local = ddp.no_sync();
        forward(true).map(drop)
    };
    ensure!(matches!(told, Err(DdpError::CannotHoldBack(_))), "{told:?}");
    ensure!(ddp.hold_back(true).is_err() && ddp.close_with_nothing().is_err() && ddp.join(false, || ()).is_err());
    // It goes on.
    ddp.backward(&forward(true)?)?;
    ensure!(unused.grad().double_value(&[0]) == 1.0, "{}", unused.grad());
    Ok(())
}

/// Parameters without elements keep their names, although they have no memory address to distinguish them.
fn names(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let root = vs.root();
    let _variables = [("b", 0), ("c", 2), ("a", 0)].map(|(name, size)| root.zeros(name, &[size]));
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let names: Vec<_> = ddp.parameters().iter().map(|(name, _)| name.as_str()).collect();
    ensure!(names == ["b", "c", "a"], "{names:?}");
    Ok(())
}

/// A parameter that is unfrozen later is refused: its gradient is in no bucket, and would not be averaged.
fn unfrozen(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 2, 1, Default::default());
    let frozen = vs.root().ones("frozen", &[2]).set_requires_grad(false);
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let forward = |ddp: &DistributedDataParallel| ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT)));
    let pass = |ddp: &DistributedDataParallel| -> Result<()> { Ok(ddp.backward(&forward(ddp)?.sum(Kind::Float))?) };
    pass(&ddp)?;
    let _ = frozen.set_requires_grad(true);
    let told = forward(&ddp).map(drop);
    ensure!(matches!(&told, Err(DdpError::Unfrozen { name }) if name == "frozen"), "{told:?}");
    // A new wrapper averages it.
    drop(ddp);
    let ddp = DistributedDataParallel::builder(group).find_unused_parameters(true).build(&vs)?;
    ensure!(ddp.parameters().len() == 3);
    pass(&ddp)
}

/// So is a layer that was made later.
fn made_later(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root() / "first", 2, 2, Default::default());
    let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let head = nn::linear(vs.root() / "head", 2, 1, Default::default());
    opt.step()?; // tch's optimizer picks up the new variables
    let pass = |ddp: &DistributedDataParallel| -> Result<()> {
        let outputs = ddp.forward(|| head.forward(&model.forward(&Tensor::ones([1, 2], FLOAT))))?;
        Ok(ddp.backward(&outputs.sum(Kind::Float))?)
    };
    pass(&ddp)?;
    let told = opt.step().err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(told.starts_with("parameter number 2: its gradient is not averaged over the ranks"), "{told}");
    opt.zero_grad()?;
    drop(ddp);
    pass(&DistributedDataParallel::new(&vs, group)?)?;
    opt.step()?;
    opt.zero_grad()?;
    // Unless they are ignored.
    let _ = tch::no_grad(|| head.ws.shallow_clone().fill_(group.rank() as i64));
    let builder = DistributedDataParallel::builder(group).ignore(["head.weight", "head.bias"]);
    let ddp = builder.clone().build(&vs)?;
    ensure!(head.ws.double_value(&[0, 0]) == group.rank() as f64, "it was sent");
    ensure!(ddp.parameters().len() == 2);
    pass(&ddp)?;
    opt.step()?;
    let told = builder.ignore(["haed"]).build(&vs).map(drop);
    ensure!(matches!(&told, Err(DdpError::InvalidOption { option: "ignore", .. })), "{told:?}");
    Ok(())
}

/// Buffers are overwritten with rank 0's before a forward pass that follows a synchronised backward, and not within a
/// window.
fn buffers(group: &ProcessGroup) -> Result<()> {
    for broadcast in [true, false] {
        let vs = nn::VarStore::new(Device::Cpu);
        let model = nn::linear(vs.root(), 2, 1, Default::default());
        let mut buffer = vs.root().zeros_no_train("seen", &[3]);
        let frozen = vs.root().ones("frozen", &[2]).set_requires_grad(false);
        let _ = buffer.fill_(group.rank() as i64);
        let _ = frozen.shallow_clone().fill_(group.rank() as i64 + 5);
        let ddp = DistributedDataParallel::builder(group).broadcast_buffers(broadcast).build(&vs)?;
        ensure!(buffer.sum(Kind::Float).double_value(&[]) == 0.0, "the start takes rank 0's buffers");
        ensure!(frozen.sum(Kind::Float).double_value(&[]) == 10.0, "and rank 0's frozen parameters");
        ensure!(ddp.parameters().len() == 2);
        let mut pass = |sync: bool| -> Result<f64> {
            let _ = buffer.fill_(group.rank() as i64 + 1);
            let _guard = (!sync).then(|| ddp.no_sync());
            let loss = ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT)))?.sum(Kind::Float);
            let seen = buffer.sum(Kind::Float).double_value(&[]);
            ddp.backward(&loss)?;
            Ok(seen)
        };
        let own = 3.0 * (group.rank() as f64 + 1.0);
        let behind_sync = if broadcast { 3.0 } else { own };
        ensure!(pass(true)? == behind_sync, "the first pass");
        ensure!(pass(false)? == behind_sync, "a window's first pass, after a synchronised backward");
        ensure!(pass(false)? == own, "within a window nothing is sent");
        ensure!(pass(true)? == own, "nor before its last");
        ensure!(pass(true)? == behind_sync, "the next window");
        // Before an evaluation.
        let _ = buffer.shallow_clone().fill_(group.rank() as i64 + 1);
        ddp.sync_buffers()?;
        let _ = tch::no_grad(|| ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT))))?;
        ensure!(buffer.sum(Kind::Float).double_value(&[]) == behind_sync, "sync_buffers sends them");
    }
    Ok(())
}

/// Without gradients nothing is sent, so one rank alone may evaluate.
fn no_grad(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 2, 1, Default::default());
    // A buffer, which rank 0 sends before each forward pass that trains.
    let mut buffer = vs.root().zeros_no_train("buffer", &[1]);
    let _ = buffer.fill_(group.rank() as i64);
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let _ = buffer.fill_(group.rank() as i64 + 5);
    if group.rank() == 1 {
        let outputs = tch::no_grad(|| ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT))))?;
        ensure!(!outputs.requires_grad());
        ensure!(buffer.double_value(&[0]) == 6.0, "rank 1's own buffer");
    }
    let loss = ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT)))?.sum(Kind::Float);
    ddp.backward(&loss)?;
    Ok(())
}

/// A loss that does not use all outputs; models that return tuples or lists, or fail.
fn several_outputs(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let one = nn::linear(vs.root() / "one", 2, 1, Default::default());
    let other = nn::linear(vs.root() / "other", 2, 1, Default::default());
    let ddp = DistributedDataParallel::builder(group).find_unused_parameters(true).build(&vs)?;
    let inputs = Tensor::full([1, 2], group.rank() as i64 + 1, FLOAT);
    for _ in 0..3 {
        let (used, _left_out) = ddp.forward(|| (one.forward(&inputs), other.forward(&inputs)))?;
        ddp.backward(&used.sum(Kind::Float))?;
        let grad = one.ws.grad().mean(Kind::Float).double_value(&[]);
        ensure!((grad - 1.5).abs() < 1e-6, "the mean over ranks of 1 and 2: {grad}");
        for mut param in vs.trainable_variables() {
            param.zero_grad();
        }
    }
    let failed: Result<Tensor, &str> = ddp.forward(|| Err("no model today"))?;
    ensure!(failed.is_err());
    let mut list: Vec<Option<Tensor>> = ddp.forward(|| vec![Some(one.forward(&inputs)), None])?;
    let loss = list.remove(0).context("the first output")?.sum(Kind::Float);
    ddp.backward(&loss)?;
    Ok(())
}

fn refusals(group: &ProcessGroup) -> Result<()> {
    let build = |params: Vec<(String, Tensor)>| DistributedDataParallel::builder(group).build_from(params, Vec::new());
    let param = || Tensor::ones([2], FLOAT).set_requires_grad(true);
    let named = |tensor: Tensor| vec![("w".to_owned(), tensor)];
    ensure!(matches!(build(Vec::new()), Err(DdpError::NoParameters)));
    ensure!(matches!(build(named(Tensor::ones([2], FLOAT))), Err(DdpError::NoParameters)));
    ensure!(matches!(build(named(Tensor::new())), Err(DdpError::InvalidParameter { .. })));
    ensure!(matches!(build(named(param() * 2)), Err(DdpError::InvalidParameter { .. })));
    let tied = param();
    let twice = vec![("a".to_owned(), tied.shallow_clone()), ("b".to_owned(), tied)];
    let error = build(twice).unwrap_err().to_string();
    ensure!(error.contains("the same tensor as \"a\""), "{error}");
    for mib in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let built = DistributedDataParallel::builder(group).bucket_cap_mb(mib).build_from(named(param()), Vec::new());
        ensure!(matches!(built, Err(DdpError::InvalidOption { option: "bucket_cap_mb", .. })), "{mib}");
    }
    let ddp = build(named(param()))?;
    let failed = ddp.backward(&Tensor::new());
    ensure!(matches!(failed, Err(DdpError::Torch(_))), "{failed:?}");
    ensure!(
        ddp.world_size() == 2 && (ddp.sum(group.rank() as f64 + 0.25).map_err(anyhow::Error::new)? - 1.5).abs() < 1e-12
    );
    Ok(())
}

/// Parameters that backward does not reach, without `find_unused_parameters`: the next forward is an error.
fn missing_gradients(group: &ProcessGroup) -> Result<()> {
    let used = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let left_out = Tensor::ones([2], FLOAT).set_requires_grad(true);
    let params = vec![("used".to_owned(), used.shallow_clone()), ("left_out".to_owned(), left_out)];
    let ddp = DistributedDataParallel::builder(group).build_from(params, Vec::new())?;
    let loss = ddp.forward(|| &used * 2)?.sum(Kind::Float);
    ddp.backward(&loss)?;
    let error = ddp.forward(|| &used * 2).err().context("no error")?.to_string();
    ensure!(error.contains("find_unused_parameters"), "{error}");
    Ok(())
}

/// An embedding's sparse gradient is refused with the parameter's name, with every option of the reducer.
fn sparse_gradients(group: &ProcessGroup) -> Result<()> {
    type Options = fn(DdpBuilder) -> DdpBuilder;
    let ways: [Options; 4] = [
        |ddp| ddp,
        |ddp| ddp.find_unused_parameters(true),
        |ddp| ddp.static_graph(true),
        |ddp| ddp.gradient_as_bucket_view(true),
    ];
    let rows = Tensor::from_slice(&[1i64, 7]);
    for options in ways {
        let bias = Tensor::ones([4], FLOAT).set_requires_grad(true);
        let words = Tensor::ones([10, 4], FLOAT).set_requires_grad(true);
        let build = || {
            let params = [("bias", &bias), ("words", &words)].map(|(name, it)| (name.to_owned(), it.shallow_clone()));
            options(DistributedDataParallel::builder(group)).build_from(params.into(), Vec::new())
        };
        let pass = |ddp: &DistributedDataParallel, words: &Tensor, sparse| {
            let loss = ddp.forward(|| Tensor::embedding(words, &rows, -1, false, sparse) + &bias)?.sum(Kind::Float);
            ddp.backward(&loss)
        };
        let ddp = build()?;
        let told = pass(&ddp, &words, true);
        ensure!(matches!(&told, Err(DdpError::SparseGradient { name }) if name == "words"), "{told:?}");
        drop(ddp);
        // The group remains usable, and the parameter trains with a new wrapper.
        TensorList::new(&[&bias, &words])?.clear_grads()?;
        let ddp = build()?;
        pass(&ddp, &words, false)?;
        ensure!(words.grad().sum(Kind::Float).double_value(&[]) == 8.0, "{}", words.grad());
    }
    Ok(())
}

fn log(group: &ProcessGroup) -> Result<()> {
    let vs = nn::VarStore::new(Device::Cpu);
    let model = nn::linear(vs.root(), 2, 1, Default::default());
    let ddp = DistributedDataParallel::new(&vs, group)?;
    for _ in 0..3 {
        let loss = ddp.forward(|| model.forward(&Tensor::ones([1, 2], FLOAT)))?.sum(Kind::Float);
        ddp.backward(&loss)?;
    }
    let data = ddp.logging_data()?;
    let value = |key: &str| data.iter().find(|(name, _)| name == key).map(|(_, value)| value.as_str());
    ensure!(value("world_size") == Some("2"), "{data:?}");
    ensure!(value("num_parameter_tensors") == Some("2"), "{data:?}");
    ensure!(value("backend_name") == Some("gloo"), "{data:?}");
    Ok(())
}
