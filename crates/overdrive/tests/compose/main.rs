//! The crates together: accumulation, autocast, GradScaler, clipping and fused optimizers in one loop.

mod checkpointing;
mod eight_bit;
mod lr_finder;
mod offload;
mod pytorch;
mod resume;
mod rows;
mod sparse;
mod tracks;

use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive::prelude::*;
use tch::nn::{self, Module};

const CPU: Device = Device::Cpu;

/// The tests run one at a time, because they share the process's random generator.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Loop {
    vs: nn::VarStore,
    model: nn::Linear,
    opt: AdamW,
    scaler: GradScaler,
}

fn start(weights: &Tensor) -> anyhow::Result<Loop> {
    let vs = nn::VarStore::new(CPU);
    let model = nn::linear(vs.root(), 6, 4, nn::LinearConfig { bias: false, ..Default::default() });
    let mut weight = model.ws.shallow_clone();
    tch::no_grad(|| weight.copy_(weights));
    let opt = AdamW::builder(vs.trainable_variables()).lr(0.05).build()?;
    Ok(Loop { vs, model, opt, scaler: GradScaler::builder(CPU).init_scale(1024.0).build()? })
}

impl Loop {
    /// One epoch in windows of `steps` micro-batches of `size`.
    fn epoch(&mut self, data: &Tensor, size: i64, steps: usize, kind: Option<Kind>) -> anyhow::Result<Vec<f64>> {
        let mut norms = Vec::new();
        let mut accum = Accumulator::new(steps)?;
        for micro in accum.windows(data.split(size, 0)) {
            let inputs = micro.batch;
            let loss = || self.model.forward(&inputs).square().mean(Kind::Float);
            let loss = match kind {
                Some(kind) => autocast(CPU, kind, loss)?,
                None => loss(),
            };
            accum.backward(&self.opt, &self.scaler.scale(&loss)?, Samples(inputs.size()[0]), micro.closes)?;
            if micro.closes {
                self.scaler.unscale_(&mut self.opt)?;
                norms.push(clip_grad_norm_(self.opt.params(), 0.1)?.double_value(&[]));
                self.scaler.step(&mut self.opt)?;
                self.scaler.update()?;
                self.opt.zero_grad()?;
            }
        }
        Ok(norms)
    }
}

#[test]
fn micro_batches_and_large_batches_train_equally() -> anyhow::Result<()> {
    let _turn = turn();
    let (weights, data) = (Tensor::randn([4, 6], (Kind::Float, CPU)), Tensor::randn([26, 6], (Kind::Float, CPU)));
    for kind in [None, Some(Kind::BFloat16), Some(Kind::Half)] {
        let (mut large, mut micro) = (start(&weights)?, start(&weights)?);
        // Batches of 8, 8, 8 and 2; and the same windows in micro-batches of 2.
        let expected = large.epoch(&data, 8, 1, kind)?;
        let found = micro.epoch(&data, 2, 4, kind)?;
        assert_eq!((expected.len(), found.len()), (4, 4), "{kind:?}");
        // 16-bit gradients are rounded after each micro-batch.
        let tolerance = if kind.is_some() { 2e-2 } else { 1e-5 };
        for (expected, found) in expected.iter().zip(&found) {
            assert!((expected - found).abs() <= tolerance * expected, "{kind:?}: norms {expected} and {found}");
        }
        for (large, micro) in large.vs.trainable_variables().iter().zip(micro.vs.trainable_variables()) {
            assert!(large.allclose(&micro, tolerance, tolerance, false), "{kind:?}");
        }
    }
    Ok(())
}

#[test]
fn an_overflow_in_one_micro_batch_skips_the_window_and_the_next_one_trains() -> anyhow::Result<()> {
    let _turn = turn();
    let weights = Tensor::randn([4, 6], (Kind::Float, CPU));
    let mut run = start(&weights)?;
    let data = Tensor::randn([8, 6], (Kind::Float, CPU));
    let bad = data.copy();
    let _ = bad.get(5).fill_(f64::INFINITY);
    run.epoch(&bad, 2, 4, None)?;
    assert!(run.vs.trainable_variables()[0].equal(&weights), "nothing changed");
    assert_eq!(run.scaler.scale_value()?, 512.0);
    run.epoch(&data, 2, 4, None)?;
    assert!(!run.vs.trainable_variables()[0].equal(&weights));
    Ok(())
}

#[test]
fn new_gradients_after_zero_grad_are_unscaled_again() -> anyhow::Result<()> {
    let _turn = turn();
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let mut opt = Sgd::builder([&weight]).lr(1.0).build()?;
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build()?;
    for _ in 0..2 {
        scaler.scale(&weight.sum(Kind::Float))?.backward();
        scaler.unscale_(&mut opt)?;
        // The step is abandoned, and its gradients with it.
        opt.zero_grad()?;
        scaler.scale(&weight.sum(Kind::Float))?.backward();
        let before = weight.double_value(&[0]);
        scaler.step(&mut opt)?;
        assert_eq!(weight.double_value(&[0]), before - 1.0);
        scaler.update()?;
        opt.zero_grad()?;
    }
    Ok(())
}

#[test]
fn adding_scaled_gradients_to_unscaled_ones_is_an_error() -> anyhow::Result<()> {
    let _turn = turn();
    let weights = [1.0, 2.0].map(|value| Tensor::from(value).set_requires_grad(true));
    let loss = || weights[0].square() + weights[1].square();
    let mut opt = Sgd::builder([&weights[0]]).lr(1.0).build()?;
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build()?;
    let mut accum = Accumulator::new(2)?;
    accum.backward(&opt, &scaler.scale(&loss())?, Samples(1), false)?;
    scaler.unscale_(&mut opt)?;
    let said = accum.backward(&opt, &scaler.scale(&loss())?, Samples(1), true).unwrap_err().to_string();
    assert!(said.contains("call `unscale_` after the window has closed"), "{said}");
    accum.abandon()?;
    opt.zero_grad()?;

    scaler.scale(&loss())?.backward();
    scaler.unscale_(&mut opt)?;
    opt.add_param_group(Sgd::group([&weights[1]]))?;
    let said = scaler.step(&mut opt).unwrap_err().to_string();
    assert!(said.contains("whose gradients are still scaled"), "{said}");
    opt.zero_grad()?;

    // The previous window was abandoned after `unscale_`: its mark must not affect this one.
    accum.backward(&opt, &scaler.scale(&loss())?, Samples(1), false)?;
    scaler.unscale_(&mut opt)?;
    assert!(accum.backward(&opt, &scaler.scale(&loss())?, Samples(1), true).is_err());
    accum.abandon()?;
    opt.zero_grad()?;

    // A parameter without a gradient may be added at any time.
    let later = Tensor::from(1f32).set_requires_grad(true);
    scaler.scale(&loss())?.backward();
    scaler.unscale_(&mut opt)?;
    opt.add_param_group(Sgd::group([&later]))?;
    scaler.step(&mut opt)?;
    scaler.update()?;
    opt.zero_grad()?;
    assert_eq!(weights.each_ref().map(|weight| weight.double_value(&[])), [-1.0, -2.0]);
    scaler.scale(&loss())?.backward();
    scaler.step(&mut opt)?;
    assert_eq!(weights.each_ref().map(|weight| weight.double_value(&[])), [1.0, 2.0]);
    Ok(())
}

#[test]
fn a_skipped_first_step_does_not_change_dampening() -> anyhow::Result<()> {
    let _turn = turn();
    let weight = Tensor::from(8f32).set_requires_grad(true);
    let mut opt = Sgd::builder([&weight]).lr(1.0).momentum(0.5).dampening(0.5).fused(true).build()?;
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build()?;
    for (factor, expected) in [(f64::INFINITY, 8.0), (1.0, 7.0), (1.0, 6.0)] {
        scaler.scale(&(&weight * factor))?.backward();
        scaler.step(&mut opt)?;
        scaler.update()?;
        opt.zero_grad()?;
        // The first step taken is not dampened, as in PyTorch: steps of 1, then 0.5 + 0.5.
        assert_eq!(weight.double_value(&[]), expected);
    }
    Ok(())
}

#[test]
fn an_accumulator_without_sync_refuses_ddps_parameters() -> anyhow::Result<()> {
    let _turn = turn();
    use overdrive_ddp::{Backend, InitMethod};
    let folder = tempfile::tempdir()?;
    let method = InitMethod::File { path: folder.path().join("meet"), rank: 0, world_size: 1 };
    let group = ProcessGroup::builder(Backend::Gloo).init(&method)?;
    let vs = nn::VarStore::new(CPU);
    let model = nn::linear(vs.root(), 2, 1, Default::default());
    let opt = Sgd::builder(&vs).build()?;
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let x = Tensor::ones([1, 2], (Kind::Float, CPU));
    let loss = || -> anyhow::Result<Tensor> { Ok(ddp.forward(|| model.forward(&x))?.sum(Kind::Float)) };
    // If the model is not called through `ddp.forward`, gradients would not be averaged.
    let mut accum = Accumulator::new(1)?.with_sync(&ddp);
    let error = accum.backward(&opt, &model.forward(&x).sum(Kind::Float), Samples(1), true).unwrap_err();
    assert!(error.to_string().contains("was not called through `ddp.forward`"), "{error}");
    accum.abandon()?;
    accum.backward(&opt, &loss()?, Samples(1), true)?;
    let mut alone = Accumulator::new(1)?;
    let error = alone.backward(&opt, &loss()?, Samples(1), true).unwrap_err();
    assert!(error.to_string().contains("call `with_sync(&ddp)`"), "{error}");
    drop(ddp);
    alone.backward(&opt, &model.forward(&x).sum(Kind::Float), Samples(1), true)?;
    Ok(())
}

#[test]
fn any_optimizer_works_in_the_loop() -> anyhow::Result<()> {
    let _turn = turn();
    use tch::nn::OptimizerConfig;
    let vs = nn::VarStore::new(CPU);
    let model = nn::linear(vs.root(), 6, 4, Default::default());
    let mut scaler = GradScaler::new(CPU);
    let optimizers: Vec<Box<dyn Optimizer>> = vec![
        Box::new(TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?)),
        Box::new(Sgd::builder(vs.trainable_variables()).lr(0.1).momentum(0.9).build()?),
        Box::new(AdamW::builder(vs.trainable_variables()).build()?),
    ];
    for mut opt in optimizers {
        let before = model.ws.copy();
        let loss = model.forward(&Tensor::randn([8, 6], (Kind::Float, CPU))).square().mean(Kind::Float);
        scaler.scale(&loss)?.backward();
        assert!(!scaler.step(opt.as_mut())?.skipped()?);
        scaler.update()?;
        opt.zero_grad()?;
        assert!(!before.equal(&model.ws));
    }
    Ok(())
}

#[test]
fn a_schedule_counts_windows_and_sets_the_rate_that_the_step_uses() -> anyhow::Result<()> {
    let _turn = turn();
    let weights = Tensor::randn([4, 6], (Kind::Float, CPU));
    let mut run = start(&weights)?;
    let warm_up = LinearLr::new().start_factor(0.5).total_iters(2);
    let mut sched = LrScheduler::new(&mut run.opt, SequentialLr::new(warm_up).then(2, StepLr::new(1)))?;
    let data = Tensor::randn([10, 6], (Kind::Float, CPU));
    let mut seen = Vec::new();
    for epoch in data.split(4, 0).iter() {
        run.epoch(epoch, 2, 4, None)?; // one window, full or not
        seen.push(run.opt.lr(0).unwrap_or_default());
        sched.step(&mut run.opt)?;
    }
    let expected = [0.025, 0.0375, 0.05];
    assert!(seen.iter().zip(expected).all(|(seen, expected)| (seen - expected).abs() < 1e-15), "{seen:?}");

    let state = sched.state_dict()?;
    let mut other = start(&weights)?;
    let mut resumed = LrScheduler::new(&mut other.opt, StepLr::new(1))?;
    resumed.load_state_dict(&state)?;
    resumed.apply(&mut other.opt)?;
    assert!((other.opt.lr(0).unwrap_or_default() - 5e-5).abs() < 1e-18, "a saved state, loaded into another schedule");
    Ok(())
}

/// Two ranks as threads of this process, with different micro-batches, compared with one large batch.
#[test]
fn ranks_with_uneven_micro_batches_equal_the_large_batch() -> anyhow::Result<()> {
    let _turn = turn();
    use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup};

    const DOUBLE: (Kind, Device) = (Kind::Double, CPU);
    let sizes: [&[i64]; 2] = [&[4, 1], &[2, 3, 0, 2]];
    manual_seed(5);
    let weights = Tensor::randn([4, 6], DOUBLE);
    let data: Vec<Tensor> = sizes.iter().map(|sizes| Tensor::randn([sizes.iter().sum(), 6], DOUBLE)).collect();

    let parameter = weights.copy().set_requires_grad(true);
    let expected = {
        let whole = Tensor::cat(&data, 0);
        whole.matmul(&parameter.tr()).square().mean(Kind::Double).backward();
        clip_grad_norm_([parameter.shallow_clone()], 0.1)?;
        parameter.grad()
    };

    let folder = std::env::temp_dir().join(format!("overdrive-compose-{}", std::process::id()));
    let meet = |rank: usize| InitMethod::File { path: folder.clone(), rank, world_size: 2 };
    let rank = |rank: usize, own: Tensor, weights: Tensor, method: InitMethod| -> anyhow::Result<Tensor> {
        let group = ProcessGroup::builder(Backend::Gloo).timeout(std::time::Duration::from_secs(600)).init(&method)?;
        let parameter = weights.set_requires_grad(true);
        let named = vec![("weight".to_owned(), parameter.shallow_clone())];
        let ddp = DistributedDataParallel::builder(&group).build_from(named, Vec::new())?;
        let mut scaler = GradScaler::builder(CPU).init_scale(1024.0).build()?;
        let mut opt = overdrive::optim::Sgd::builder([parameter.shallow_clone()]).lr(0.0).build()?;
        let mut accum = Accumulator::new(sizes[rank].len())?.with_sync(&ddp);
        for micro in accum.windows(own.split_with_sizes(sizes[rank], 0)) {
            let outputs = ddp.forward(|| micro.batch.matmul(&parameter.tr()))?;
            let loss = scaler.scale(&outputs.square().mean(Kind::Double))?;
            accum.backward(&opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
        }
        scaler.unscale_(&mut opt)?;
        clip_grad_norm_([parameter.shallow_clone()], 0.1)?;
        Ok(parameter.grad())
    };
    let found: Vec<anyhow::Result<Tensor>> = std::thread::scope(|scope| {
        let ranks = data.iter().enumerate().map(|(index, own)| {
            let (own, weights, method, rank) = (own.copy(), weights.copy(), meet(index), &rank);
            scope.spawn(move || rank(index, own, weights, method))
        });
        let ranks: Vec<_> = ranks.collect();
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a rank panicked")))).collect()
    });
    let _ = std::fs::remove_file(&folder);
    for found in found {
        let found = found?;
        assert!(found.allclose(&expected, 1e-10, 1e-12, false), "{found} instead of {expected}");
    }
    Ok(())
}
