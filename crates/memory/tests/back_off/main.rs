//! Batches that are parted where memory runs out. A process of its own: the limit is one of the whole process.

mod padded;

use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_core::{AVERAGED, Optimizer, OptimizerError, TchOptimizer};
use overdrive_ffi::host_memory;
use overdrive_memory::{AutoMicroBatch, MemoryError, find_batch_size};
use tch::nn::{Module, ModuleT, OptimizerConfig};
use tch::{Device, Kind, TchError, Tensor, nn};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

const NONE: u64 = u64::MAX >> 1;

/// Ends the limit, also where a test panics.
struct Limit {
    _alone: MutexGuard<'static, ()>,
}

impl Limit {
    /// Tensors may have so many bytes more.
    fn new(more: u64) -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        host_memory::count(usize::MAX).unwrap();
        Self::set(more);
        Self { _alone: alone }
    }

    fn set(more: u64) {
        let most = host_memory::stats().unwrap().allocated.saturating_add(more);
        host_memory::count(usize::try_from(most).unwrap()).unwrap();
    }

    fn none() -> Self {
        Self::new(NONE)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        host_memory::count(usize::MAX).unwrap();
    }
}

/// 1024 floats a sample and layer.
struct Model {
    layers: nn::Sequential,
    opt: TchOptimizer,
}

impl Model {
    fn new() -> Self {
        let vs = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(4);
        let layers =
            nn::seq().add(nn::linear(vs.root(), 8, 1024, Default::default())).add_fn(|x| x.tanh().dropout(0.1, true));
        let layers = layers.add(nn::linear(vs.root(), 1024, 1, Default::default()));
        Self { layers, opt: TchOptimizer::new(nn::Sgd::default().build(&vs, 0.05).unwrap()) }
    }

    fn weights(&self) -> Vec<Tensor> {
        self.opt.params().iter().map(|param| param.detach().copy()).collect()
    }

    fn train(&mut self, micro: &mut AutoMicroBatch, batches: &[Tensor]) -> Result<Vec<f64>, MemoryError> {
        let mut losses = Vec::new();
        for x in batches {
            let Self { layers, opt } = self;
            let loss = micro.backward(opt, &[x.shallow_clone()], |part| {
                Ok::<_, TchError>(layers.forward(&part[0]).square().mean(Kind::Float))
            })?;
            losses.push(loss.double_value(&[]));
            opt.step()?;
        }
        Ok(losses)
    }
}

fn batches(count: usize, samples: i64) -> Vec<Tensor> {
    (0..count).map(|_| Tensor::randn([samples, 8], FLOAT)).collect()
}

/// What a step over so many samples needs, in bytes.
fn needed(samples: i64) -> u64 {
    let batch = batches(1, samples);
    let mut model = Model::new();
    let before = host_memory::stats().unwrap().allocated;
    host_memory::reset_peak().unwrap();
    model.train(&mut AutoMicroBatch::new(1 << 20), &batch).unwrap();
    host_memory::stats().unwrap().peak - before
}

#[test]
fn a_run_under_a_limit_is_the_run_with_small_parts_to_the_bit() {
    let _limit = Limit::none();
    let batches = batches(5, 60);
    let mut expected = Model::new();
    let mut small = AutoMicroBatch::new(15);
    let losses = expected.train(&mut small, &batches).unwrap();

    let (of_15, of_30) = (needed(15), needed(30));
    let mut model = Model::new();
    let mut micro = AutoMicroBatch::new(1000);
    Limit::set((of_15 + of_30) / 2);
    let found = model.train(&mut micro, &batches).unwrap();
    Limit::set(NONE);
    assert_eq!((found, micro.size()), (losses, 15));
    assert_eq!(model.weights(), expected.weights());
}

/// Running statistics too, if they are put back before a batch begins again.
#[test]
fn buffers_are_those_of_the_run_with_small_parts() {
    let _limit = Limit::none();
    let batches = batches(3, 64);
    let train = |micro: AutoMicroBatch, is_restored: bool, limit: Option<u64>| {
        tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let norm = nn::batch_norm1d(vs.root() / "norm", 8, Default::default());
        let linear = nn::linear(vs.root() / "linear", 8, 1, Default::default());
        let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap());
        let mut micro = if is_restored { micro.restoring(&vs) } else { micro };
        if let Some(limit) = limit {
            Limit::set(limit);
        }
        for x in &batches {
            let loss = |part: &[Tensor]| {
                let x = norm.forward_t(&part[0], true);
                // Where memory runs out, the statistics have been updated.
                linear.forward(&x).f_repeat([1, 4000])?.f_tanh()?.f_square()?.f_mean(Kind::Float)
            };
            let _ = micro.backward(&mut opt, &[x.shallow_clone()], loss).unwrap();
            opt.step().unwrap();
        }
        Limit::set(NONE);
        let names = ["norm.running_mean", "norm.running_var", "linear.weight"];
        (micro.size(), names.map(|name| vs.variables()[name].detach().copy()))
    };
    // A tensor of 16 samples has 256,000 bytes.
    let expected = train(AutoMicroBatch::new(16), true, None);
    let (size, found) = train(AutoMicroBatch::new(64), true, Some(2_000_000));
    assert_eq!((size, &found), (expected.0, &expected.1));
    let (_, twice) = train(AutoMicroBatch::new(64), false, Some(2_000_000));
    assert!(twice[0] != expected.1[0], "the limit is reached after the statistics are updated");
}

#[test]
fn each_sample_counts_alike_and_parts_grow_again() {
    let _limit = Limit::none();
    let x = batches(1, 10).remove(0);
    let vs = nn::VarStore::new(Device::Cpu);
    let linear = nn::linear(vs.root(), 8, 1, Default::default());
    let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap());
    let whole = linear.forward(&x).square().mean(Kind::Float);
    whole.backward();
    let expected = linear.ws.grad().copy();

    let mut micro = AutoMicroBatch::new(4).grow_after(2);
    let mut sizes = Vec::new();
    for _ in 0..5 {
        let mut samples = 0;
        let loss = |part: &[Tensor]| {
            samples += part[0].size()[0];
            Ok::<_, TchError>(linear.forward(&part[0]).square().mean(Kind::Float))
        };
        let loss = micro.backward(&mut opt, &[x.shallow_clone()], loss).unwrap();
        assert_eq!(samples, 10);
        assert!(loss.allclose(&whole.detach(), 1e-6, 1e-6, false));
        assert!(linear.ws.grad().allclose(&expected, 1e-5, 1e-6, false));
        sizes.push(micro.size());
    }
    Limit::set(NONE);
    assert_eq!(sizes, [4, 4, 8, 8, 10]);
}

/// Memory runs out in some steps, and parts grow in others.
#[test]
fn with_growth_no_sample_is_lost_or_repeated_and_losses_are_those_of_whole_batches() {
    const SAMPLES: i64 = 60;
    let _limit = Limit::none();
    // Without dropout, whose numbers depend on the parts.
    let model = || {
        let vs = nn::VarStore::new(Device::Cpu);
        tch::manual_seed(4);
        let layers = nn::seq().add(nn::linear(vs.root(), 8, 1024, Default::default())).add_fn(|x| x.tanh());
        let layers = layers.add(nn::linear(vs.root(), 1024, 1, Default::default()));
        Model { layers, opt: TchOptimizer::new(nn::Sgd::default().build(&vs, 5e-4).unwrap()) }
    };
    let batches: Vec<Tensor> = batches(20, SAMPLES)
        .into_iter()
        .map(|x| Tensor::cat(&[(Tensor::arange(SAMPLES, FLOAT) / 64.0).unsqueeze(1), x.narrow(1, 0, 7)], 1))
        .collect();
    let whole = model().train(&mut AutoMicroBatch::new(1000), &batches).unwrap();

    let most = (needed(15) + needed(30)) / 2;
    let Model { layers, mut opt } = model();
    let mut micro = AutoMicroBatch::new(1000).grow_after(3);
    Limit::set(most);
    let refused = || host_memory::stats().unwrap().refused;
    let (before, mut sizes, mut losses) = (refused(), Vec::new(), Vec::new());
    for x in &batches {
        let mut ids: Vec<f32> = Vec::new();
        let loss = |part: &[Tensor]| {
            let of_part = Vec::<f32>::try_from(&part[0].select(1, 0).contiguous())?;
            if of_part[0] == 0.0 {
                // The batch begins again.
                ids.clear();
            }
            ids.extend(of_part);
            Ok::<_, TchError>(layers.forward(&part[0]).square().mean(Kind::Float))
        };
        losses.push(micro.backward(&mut opt, &[x.shallow_clone()], loss).unwrap().double_value(&[]));
        opt.step().unwrap();
        assert!(ids.iter().copied().eq((0..SAMPLES).map(|id| id as f32 / 64.0)), "{ids:?}");
        sizes.push(micro.size());
    }
    let times = refused() - before;
    Limit::set(NONE);
    // Two failures of the first batch, and one of each try to grow.
    assert!(times > 2 && sizes.iter().all(|&size| size == 15), "{times}, {sizes:?}");
    let relative = |(one, other): (&f64, &f64)| (one - other).abs() / other;
    let most = losses.iter().zip(&whole).map(relative).fold(0.0, f64::max);
    assert!(most < 1e-6, "{most}: {losses:?}, {whole:?}");
}

/// Ranks that halve alone would exchange gradients at different times.
#[test]
fn gradients_that_are_averaged_over_unknown_ranks_are_refused() {
    let _limit = Limit::none();
    let mut model = Model::new();
    let _marked = AVERAGED.mark(model.opt.params());
    let error = model.train(&mut AutoMicroBatch::new(4), &batches(1, 4)).unwrap_err().to_string();
    assert!(error.contains("with_ranks(&ddp, &group)"), "{error}");
}

#[test]
fn a_try_that_fails_waits_twice_as_long_for_the_next() {
    let _limit = Limit::none();
    let (batches, most) = (batches(7, 16), (needed(8) + needed(16)) / 2);
    let mut model = Model::new();
    let mut micro = AutoMicroBatch::new(8).grow_after(1);
    Limit::set(most);
    let sizes: Vec<usize> = batches
        .chunks(1)
        .map(|batch| {
            model.train(&mut micro, batch).unwrap();
            micro.size()
        })
        .collect();
    let refused = host_memory::stats().unwrap().refused;
    Limit::set(NONE);
    assert_eq!(sizes, [8; 7]);
    assert!(refused > 0);
}

fn is_zero(param: &Tensor) -> bool {
    !param.grad().defined() || param.grad().count_nonzero(None).int64_value(&[]) == 0
}

#[test]
fn errors_leave_no_gradients_and_say_what_failed() {
    let _limit = Limit::none();
    let mut model = Model::new();
    let batch = batches(1, 4);
    let mut micro = AutoMicroBatch::new(4);
    let error = micro
        .backward(&mut model.opt, &batch, |part| {
            model.layers.forward(&part[0]).sum(Kind::Float).f_backward()?;
            part[0].f_view([7])
        })
        .unwrap_err();
    assert!(matches!(&error, MemoryError::Function { scope, .. } if scope == "a part of 4 samples"), "{error}");
    assert!(model.opt.params().iter().all(is_zero));

    Limit::set(10_000);
    let error = model.train(&mut micro, &batch).unwrap_err();
    Limit::set(NONE);
    assert!(
        matches!(error, MemoryError::TooLarge { .. }) && error.to_string().contains("CPU out of memory"),
        "{error}"
    );

    let pair = [Tensor::ones([3, 2], FLOAT), Tensor::ones([4], FLOAT)];
    let error = micro.backward(&mut model.opt, &pair, |_| Ok::<_, TchError>(Tensor::from(0f32))).unwrap_err();
    assert!(error.to_string().contains("[3, 4]"), "{error}");
    assert!(micro.backward(&mut model.opt, &[], |_| Ok::<_, TchError>(Tensor::from(0f32))).is_err());
}

/// tch's operators panic.
#[test]
fn a_size_that_fits_is_found() {
    let _limit = Limit::new(10_000 * 4);
    let mut tried = Vec::new();
    let (size, bytes) = find_batch_size(70_000, |size| {
        tried.push(size);
        Ok::<_, OptimizerError>(Tensor::ones([size as i64], FLOAT).numel())
    })
    .unwrap();
    assert_eq!((size, bytes), (8750, 8750));
    assert_eq!(tried, [70_000, 35_000, 17_500, 8750]);
    Limit::set(0);
    let error = find_batch_size(4, |size| Tensor::f_ones([size as i64], FLOAT)).unwrap_err();
    assert!(matches!(error, MemoryError::TooLarge { .. }), "{error}");
    Limit::set(NONE);
    let other = find_batch_size(4, |_| Tensor::f_ones([2], FLOAT)?.f_view([7])).unwrap_err();
    assert!(other.to_string().starts_with("a batch of 4: "), "{other}");
    let panic = std::panic::catch_unwind(|| find_batch_size(4, |_| -> Result<(), TchError> { panic!("a bug") }));
    assert_eq!(panic.unwrap_err().downcast_ref::<&str>(), Some(&"a bug"));
}
