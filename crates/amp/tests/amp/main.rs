//! Autocast regions, and GradScaler's order of calls, skipped steps and state, on a CPU.

mod optimizers;

use overdrive_amp::{AmpError, Autocast, AutocastGuard, GradScaler, autocast, autocast_state};
use overdrive_core::{Behavior, GradScale, Optimizer, OptimizerError, OptimizerId, StateDict, Stateful};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const FLOAT: (Kind, Device) = (Kind::Float, CPU);

/// An optimizer over given parameters that counts its steps.
struct Counting {
    id: OptimizerId,
    params: Vec<Tensor>,
    steps: usize,
    fused: Option<Vec<f64>>,
    behavior: Behavior,
    skipped: usize,
    gradients_used: u64,
}

impl Counting {
    fn new(params: Vec<Tensor>) -> Self {
        let (id, behavior) = (OptimizerId::new(), Behavior::default());
        Self { id, params, steps: 0, fused: None, behavior, skipped: 0, gradients_used: 0 }
    }

    /// Records what the scaler hands to a fused step.
    fn fused(params: Vec<Tensor>) -> Self {
        Self { fused: Some(Vec::new()), ..Self::new(params) }
    }
}

impl Optimizer for Counting {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.iter().map(Tensor::shallow_clone).collect()
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, _group: usize) -> Option<f64> {
        None
    }

    fn set_lr(&mut self, _group: usize, _lr: f64) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        self.steps += 1;
        Ok(())
    }

    fn takes_grad_scale(&self) -> bool {
        self.fused.is_some()
    }

    fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
        let seen = [scale.scale.map_or(0.0, |scale| scale.double_value(&[])), scale.found_inf.double_value(&[])];
        self.fused.as_mut().ok_or(OptimizerError::TakesNoGradScale)?.extend(seen);
        Ok(())
    }

    fn behavior(&self) -> Behavior {
        self.behavior
    }

    fn gradients_used(&self) -> u64 {
        self.gradients_used
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.skipped += 1;
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        for param in &mut self.params {
            param.zero_grad();
        }
        Ok(())
    }
}

fn param() -> Tensor {
    Tensor::ones([2], FLOAT).set_requires_grad(true)
}

/// Runs backward so that each gradient is `value` times the scale.
fn backward(scaler: &mut GradScaler, param: &Tensor, value: f64) {
    scaler.scale(&(param * value).sum(Kind::Float)).unwrap().backward();
}

#[test]
fn autocast_casts_what_pytorch_casts() {
    let x = Tensor::rand([4, 4], FLOAT);
    for kind in [Kind::BFloat16, Kind::Half] {
        let (product, softmax) = autocast(CPU, kind, || {
            let product = x.matmul(&x);
            let softmax = product.mse_loss(&product, tch::Reduction::Mean);
            (product, softmax)
        })
        .unwrap();
        assert_eq!(product.kind(), kind);
        assert_eq!(softmax.kind(), Kind::Float, "losses stay in float32");
    }
    assert_eq!(x.matmul(&x).kind(), Kind::Float);
}

#[test]
fn regions_nest_and_a_disabled_one_inside_casts_nothing() {
    let x = Tensor::rand([4, 4], FLOAT);
    let outer = AutocastGuard::new(CPU, Kind::BFloat16).unwrap();
    Autocast::new(CPU).enabled(false).run(|| assert_eq!(x.matmul(&x).kind(), Kind::Float)).unwrap();
    autocast(CPU, Kind::Half, || assert_eq!(x.matmul(&x).kind(), Kind::Half)).unwrap();
    assert_eq!(x.matmul(&x).kind(), Kind::BFloat16);
    drop(outer);
    assert!(!autocast_state(CPU).unwrap().enabled);
}

#[test]
fn the_state_is_restored_after_a_panic() {
    let before = autocast_state(CPU).unwrap();
    let options = Autocast::new(CPU).kind(Kind::Half).cache_enabled(false);
    let result = std::panic::catch_unwind(|| options.run(|| panic!("planted")));
    assert!(result.is_err());
    assert_eq!(autocast_state(CPU).unwrap(), before);
}

#[test]
fn the_cache_keeps_one_casted_copy_of_a_weight_until_the_outermost_region_ends() {
    let weight = Tensor::rand([4, 4], FLOAT).set_requires_grad(true);
    let x = Tensor::rand([4, 4], FLOAT);
    let stale = |cache: bool| {
        let region = Autocast::new(CPU).kind(Kind::BFloat16).cache_enabled(cache).enter().unwrap();
        let before = x.matmul(&weight);
        tch::no_grad(|| weight.shallow_clone().copy_(&(&weight * 2.0)));
        let after = x.matmul(&weight);
        drop(region);
        before.allclose(&after, 1e-5, 1e-8, false)
    };
    assert!(stale(true), "the cached copy is used, as in PyTorch");
    assert!(!stale(false), "without the cache the weight is cast again");
    let fresh = autocast(CPU, Kind::BFloat16, || x.matmul(&weight)).unwrap();
    let cast_again = x.to_kind(Kind::BFloat16).matmul(&weight.to_kind(Kind::BFloat16));
    assert!(fresh.allclose(&cast_again, 1e-5, 1e-8, false), "the cache is dropped when the outermost region ends");
}

#[test]
fn wrong_devices_and_dtypes_are_refused_before_the_body_runs() {
    let refused = |device, kind| autocast(device, kind, || panic!("must not run")).unwrap_err();
    assert!(matches!(refused(CPU, Kind::Float), AmpError::UnsupportedKind { kind: Kind::Float }));
    assert!(matches!(refused(CPU, Kind::Int64), AmpError::UnsupportedKind { .. }));
    assert!(matches!(refused(Device::Vulkan, Kind::Half), AmpError::UnsupportedDevice { .. }));
    assert!(matches!(refused(Device::Cuda(99), Kind::Half), AmpError::MissingDevice { .. }));
    assert!(refused(CPU, Kind::Float).to_string().contains("Half or BFloat16"));
}

#[test]
fn scaler_options_are_checked() {
    let option = |result: Result<GradScaler, AmpError>| match result {
        Err(AmpError::InvalidOption { option, .. }) => option,
        other => panic!("{other:?}"),
    };
    let builder = || GradScaler::builder(CPU);
    assert_eq!(option(builder().init_scale(f64::INFINITY).build()), "init_scale");
    assert_eq!(option(builder().init_scale(1e39).build()), "init_scale");
    assert_eq!(option(builder().init_scale(1e-60).build()), "init_scale");
    assert_eq!(option(builder().growth_factor(1.0).build()), "growth_factor");
    assert_eq!(option(builder().backoff_factor(1.0).build()), "backoff_factor");
    assert_eq!(option(builder().backoff_factor(f64::NAN).build()), "backoff_factor");
    assert_eq!(option(builder().growth_interval(0).build()), "growth_interval");
    assert!(builder().growth_factor(0.5).enabled(false).build().is_ok());
}

#[test]
fn calls_out_of_order_are_refused() {
    let mut scaler = GradScaler::new(CPU);
    let mut opt = Counting::new(vec![param()]);
    assert!(matches!(scaler.unscale_(&mut opt), Err(AmpError::NotScaled { call: "unscale_" })));
    assert!(matches!(scaler.step(&mut opt), Err(AmpError::NotScaled { call: "step" })));
    assert!(matches!(scaler.update(), Err(AmpError::NotScaled { call: "update" })));
    assert!(matches!(scaler.scale(&Tensor::new()), Err(AmpError::UndefinedOutput)));

    backward(&mut scaler, &opt.params[0], 1.0);
    assert!(matches!(scaler.update(), Err(AmpError::NoGradients { call: "update" })));
    scaler.unscale_(&mut opt).unwrap();
    assert!(matches!(scaler.unscale_(&mut opt), Err(AmpError::AlreadyUnscaled)));
    scaler.step(&mut opt).unwrap();
    assert!(matches!(scaler.step(&mut opt), Err(AmpError::AlreadyStepped)));
    assert!(matches!(scaler.unscale_(&mut opt), Err(AmpError::UnscaledAfterStep)));
    scaler.update().unwrap();
    assert_eq!(opt.steps, 1);

    let mut without_grads = Counting::new(vec![param()]);
    assert!(matches!(scaler.step(&mut without_grads), Err(AmpError::NoGradients { call: "step" })));
    // A fused optimizer without gradients has nothing to do; only `update` needs gradients. PyTorch does the same.
    let mut fused_without = Counting::fused(vec![param()]);
    assert!(!scaler.step(&mut fused_without).unwrap().skipped().unwrap());
    assert!(matches!(scaler.update(), Err(AmpError::NoGradients { call: "update" })));
}

#[test]
fn unscaled_gradients_are_the_plain_ones() {
    let mut scaler = GradScaler::new(CPU);
    let mut opt = Counting::new(vec![param()]);
    backward(&mut scaler, &opt.params[0], 3.0);
    assert_eq!(opt.params[0].grad().double_value(&[0]), 3.0 * 65536.0);
    scaler.unscale_(&mut opt).unwrap();
    assert_eq!(opt.params[0].grad().double_value(&[0]), 3.0);
}

#[test]
fn an_infinity_skips_the_step_and_backs_the_scale_off() {
    for value in [f64::INFINITY, f64::NAN] {
        let mut scaler = GradScaler::builder(CPU).growth_interval(1).build().unwrap();
        let mut opt = Counting::new(vec![param()]);
        backward(&mut scaler, &opt.params[0], value);
        assert!(scaler.step(&mut opt).unwrap().skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!((opt.steps, scaler.scale_value().unwrap()), (0, 32768.0));
        opt.zero_grad().unwrap();
        backward(&mut scaler, &opt.params[0], 1.0);
        assert!(!scaler.step(&mut opt).unwrap().skipped().unwrap());
        scaler.update().unwrap();
        assert_eq!((opt.steps, scaler.scale_value().unwrap()), (1, 65536.0));
    }
}

#[test]
fn two_optimizers_share_a_scaler_and_skip_independently() {
    let mut scaler = GradScaler::new(CPU);
    let (mut good, mut bad) = (Counting::new(vec![param()]), Counting::new(vec![param()]));
    backward(&mut scaler, &good.params[0], 1.0);
    backward(&mut scaler, &bad.params[0], f64::INFINITY);
    assert!(!scaler.step(&mut good).unwrap().skipped().unwrap());
    assert!(scaler.step(&mut bad).unwrap().skipped().unwrap());
    scaler.update().unwrap();
    assert_eq!((good.steps, bad.steps, scaler.scale_value().unwrap()), (1, 0, 32768.0));
}

#[test]
fn a_fused_optimizer_gets_the_scale_and_the_flag_and_gradients_are_unscaled_once() {
    let mut scaler = GradScaler::new(CPU);
    let mut opt = Counting::fused(vec![param()]);
    backward(&mut scaler, &opt.params[0], 1.0);
    let outcome = scaler.step(&mut opt).unwrap();
    assert!(!outcome.skipped().unwrap());
    assert_eq!(opt.params[0].grad().double_value(&[0]), 65536.0, "the kernel unscales");
    scaler.update().unwrap();

    scaler.unscale_(&mut opt).unwrap();
    scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    assert_eq!(opt.fused.unwrap(), [65536.0, 0.0, 0.0, 0.0], "scaled once, then unscaled by hand");
}

#[test]
fn half_gradients_are_refused_and_left_as_they_are() {
    let mut scaler = GradScaler::new(CPU);
    let half = Tensor::ones([2], (Kind::Half, CPU)).set_requires_grad(true);
    let mut opt = Counting::new(vec![param(), half]);
    backward(&mut scaler, &opt.params[0], 1.0);
    opt.params[1].sum(Kind::Float).backward();
    let error = scaler.step(&mut opt).unwrap_err();
    assert!(matches!(error, AmpError::HalfGradient { ref parameter } if parameter == "number 1"), "{error}");
    assert_eq!(opt.params[0].grad().double_value(&[0]), 65536.0);
}

#[test]
fn a_disabled_scaler_does_nothing() {
    let mut scaler = GradScaler::builder(CPU).enabled(false).build().unwrap();
    let mut opt = Counting::new(vec![param()]);
    backward(&mut scaler, &opt.params[0], 2.0);
    scaler.unscale_(&mut opt).unwrap();
    assert!(!scaler.step(&mut opt).unwrap().skipped().unwrap());
    scaler.update().unwrap();
    assert_eq!((opt.steps, scaler.scale_value().unwrap(), opt.params[0].grad().double_value(&[0])), (1, 1.0, 2.0));
    assert!(scaler.state_dict().unwrap().is_empty());
}

#[test]
fn the_scale_can_be_set() {
    let mut scaler = GradScaler::new(CPU);
    assert!(matches!(scaler.update_to(8.0), Err(AmpError::NotScaled { .. })));
    let _ = scaler.scale(&Tensor::from(1f32)).unwrap();
    scaler.update_to(8.0).unwrap();
    assert_eq!(scaler.scale_value().unwrap(), 8.0);
    assert!(scaler.update_to(f64::NAN).unwrap_err().to_string().contains("new scale"));
    assert!(scaler.update_to(1e-60).is_err(), "0 in float32");
    assert_eq!(scaler.scale_value().unwrap(), 8.0);
}

#[test]
fn several_outputs_and_new_factors() {
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build().unwrap();
    let scaled = scaler.scale_all(&[Tensor::from(1f32), Tensor::from(2f32)]).unwrap();
    assert_eq!((scaled[0].double_value(&[]), scaled[1].double_value(&[])), (4.0, 8.0));
    scaler.set_factors(3.0, 0.25, 1).unwrap();
    assert!(scaler.set_factors(1.0, 0.25, 1).is_err());
    assert_eq!((scaler.growth_factor(), scaler.backoff_factor(), scaler.growth_interval()), (3.0, 0.25, 1));
    let mut opt = Counting::new(vec![param()]);
    backward(&mut scaler, &opt.params[0], 1.0);
    scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    assert_eq!(scaler.scale_value().unwrap(), 12.0);
}

#[test]
fn a_scale_that_was_backed_off_to_zero_can_be_loaded() {
    let mut state = GradScaler::new(CPU).state_dict().unwrap();
    state.insert("scale", overdrive_core::Entry::Float(0.0));
    let mut scaler = GradScaler::new(CPU);
    scaler.load_state_dict(&state).unwrap();
    assert_eq!(scaler.scale_value().unwrap(), 0.0);
}

#[test]
fn guards_dropped_in_any_order_switch_autocast_off() {
    let guards = vec![AutocastGuard::new(CPU, Kind::BFloat16).unwrap(), AutocastGuard::new(CPU, Kind::Half).unwrap()];
    drop(guards);
    assert!(!autocast_state(CPU).unwrap().enabled);
}

#[test]
fn a_saved_state_loads_into_another_scaler() {
    let mut scaler = GradScaler::builder(CPU).init_scale(1024.0).growth_interval(7).build().unwrap();
    let mut opt = Counting::new(vec![param()]);
    backward(&mut scaler, &opt.params[0], 1.0);
    scaler.step(&mut opt).unwrap();
    scaler.update().unwrap();
    let state = scaler.state_dict().unwrap();

    let mut resumed = GradScaler::new(CPU);
    resumed.load_state_dict(&state).unwrap();
    assert_eq!((resumed.scale_value().unwrap(), resumed.growth_tracker().unwrap()), (1024.0, 1));
    assert_eq!(format!("{:?}", resumed.state_dict().unwrap()), format!("{state:?}"));
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build().unwrap();
    assert!(scaler.load_state_dict(&StateDict::new()).is_err(), "a disabled scaler's state");
    for (key, entry) in [
        ("scale", overdrive_core::Entry::Text("big".to_owned())),
        ("scale", overdrive_core::Entry::Float(-1.0)),
        ("_growth_tracker", overdrive_core::Entry::Int(-1)),
        ("momentum", overdrive_core::Entry::Float(0.9)),
    ] {
        let mut state = GradScaler::new(CPU).state_dict().unwrap();
        state.insert(key, entry);
        assert!(scaler.load_state_dict(&state).is_err(), "{key}");
        assert_eq!(scaler.scale_value().unwrap(), 4.0);
    }
}

/// This test program calls no CUDA function, and the linker drops unused libraries: it must keep libtorch_cuda.
#[cfg(target_os = "linux")]
#[test]
fn a_program_that_only_casts_still_has_libtorch_cuda() {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libtorch = maps.lines().find_map(|line| Some(&line[line.find('/')?..line.rfind("/libtorch_cpu.so")?]));
    let cuda = std::path::Path::new(libtorch.unwrap()).join("libtorch_cuda.so");
    assert_eq!(maps.contains("libtorch_cuda.so"), cuda.exists());
}
