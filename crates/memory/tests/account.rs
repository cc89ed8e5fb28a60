//! What memory is used for, what is left behind, and how much a step will need. All memory of the process is watched, so
//! these tests run one at a time and in a program of their own.

use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_ffi::{TensorList, host_memory};
use overdrive_memory::account::{Category, MemoryRecord, MemoryRecorder, memory_stats, reset_peak_memory_stats};
use overdrive_memory::{ActivationCheckpoint, Budget, Estimate, LeakCheck, MemoryError, Policy, leak_check};
use tch::{Device, Kind, TchError, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn leaf(size: &[i64]) -> Tensor {
    Tensor::randn(size, FLOAT).set_requires_grad(true)
}

/// Two layers, of which the first saves `tanh`'s result.
fn loss(x: &Tensor, weights: &[Tensor; 2]) -> Tensor {
    x.matmul(&weights[0]).tanh().matmul(&weights[1]).square().sum(Kind::Float)
}

fn record_step(batch: i64, weights: &mut [Tensor; 2]) -> MemoryRecord {
    let recorder = MemoryRecorder::begin().unwrap();
    weights.iter_mut().for_each(Tensor::zero_grad);
    let x = Tensor::randn([batch, 100], FLOAT);
    recorder.tag(Category::Input, [&x]).unwrap();
    loss(&x, weights).backward();
    recorder.tag(Category::Parameter, &*weights).unwrap();
    recorder.end()
}

#[test]
fn memory_at_the_peak_is_known_by_what_it_is_used_for() {
    let _alone = alone();
    let mut weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let record = record_step(40, &mut weights);
    assert_eq!(record.devices(), [Device::Cpu]);
    let uses: Vec<_> = record.timeline(Device::Cpu).into_iter().map(|(_, it)| it).collect();
    let most = |category| uses.iter().map(|it| it.of(category)).max().unwrap();
    assert_eq!(most(Category::Parameter), 4 * (100 * 300 + 300 * 50));
    assert_eq!(most(Category::Input), 4 * 40 * 100);
    assert_eq!(most(Category::Gradient), 4 * (100 * 300 + 300 * 50));
    // What `tanh` and `square` save, the loss, and the loss's gradient.
    assert_eq!(most(Category::Activation), 4 * (40 * 300 + 40 * 50 + 2));
    let peak = record.peak(Device::Cpu);
    assert_eq!(peak.total(), uses.iter().map(|it| it.total()).max().unwrap());
    assert_eq!(Category::ALL.map(|category| peak.of(category)).iter().sum::<u64>(), peak.total());
}

#[test]
fn a_step_that_keeps_its_losses_is_named_by_line() {
    let _alone = alone();
    let (mut kept, w) = (Vec::new(), leaf(&[50, 7]));
    let line = line!() + 2;
    let step = || {
        kept.push(Tensor::randn([30, 50], FLOAT).matmul(&w));
        Ok::<_, TchError>(())
    };
    let error = leak_check(step).unwrap_err();
    let MemoryError::Leaked { leaks } = &error else { panic!("{error}") };
    // The product, and the batch that its graph keeps.
    let [leak] = &leaks[..] else { panic!("{error}") };
    assert_eq!((leak.bytes, leak.blocks, leak.device), (4 * 30 * (50 + 7), 2, Device::Cpu));
    let caller = leak.caller.as_deref().unwrap();
    assert!(caller.ends_with(&format!("account.rs:{line}")), "{caller}");
    assert!(error.to_string().contains(caller), "{error}");
}

#[test]
fn a_step_that_replaces_what_it_made_leaves_nothing_behind() {
    let _alone = alone();
    let (mut w, mut state, mut steps) = (leaf(&[50, 7]), None, 0);
    let mut recent = Vec::new();
    leak_check(|| {
        steps += 1;
        w.zero_grad();
        let loss = Tensor::randn([30, 50], FLOAT).f_matmul(&w)?.f_sum(Kind::Float)?;
        loss.f_backward()?;
        let momentum = state.get_or_insert_with(|| w.grad().zeros_like());
        let _ = momentum.f_add_(&w.grad())?;
        recent.push(loss);
        if recent.len() > 2 {
            drop(recent.remove(0));
        }
        Ok::<_, TchError>(())
    })
    .unwrap();
    assert_eq!(steps, 5);
}

#[test]
fn what_is_kept_longer_than_the_steps_after_it_is_a_leak() {
    let _alone = alone();
    let mut recent = std::collections::VecDeque::new();
    let mut step = || {
        recent.push_back(Tensor::zeros([100], FLOAT));
        if recent.len() > 3 {
            recent.pop_front();
        }
        Ok::<_, TchError>(())
    };
    assert!(matches!(leak_check(&mut step), Err(MemoryError::Leaked { .. })));
    LeakCheck::default().after(3).run(&mut step).unwrap();
}

#[test]
fn a_step_that_fails_ends_the_check_with_its_error() {
    let _alone = alone();
    let error = leak_check(|| Tensor::zeros([2], FLOAT).f_reshape([3]).map(drop)).unwrap_err();
    assert!(matches!(&error, MemoryError::Function { .. }), "{error}");
    assert!(error.to_string().contains("shape"), "{error}");
}

#[test]
fn the_peak_of_a_large_batch_is_known_from_two_small_ones() {
    let _alone = alone();
    let mut weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let estimate = Estimate::of(Device::Cpu, |batch, recorder| {
        weights.iter_mut().for_each(Tensor::zero_grad);
        let x = Tensor::f_randn([batch, 100], FLOAT)?;
        loss(&x, &weights).f_backward()?;
        recorder.tag(Category::Parameter, &weights).map_err(|_| TchError::Kind("tag".into()))
    })
    .unwrap();
    assert!(estimate.is_exact());
    for batch in [1, 16, 1000, 20_000] {
        let measured = record_step(batch, &mut weights).peak(Device::Cpu).total();
        assert_eq!(estimate.peak(batch).total(), measured, "{batch}");
    }
    let limit = estimate.peak(777).total();
    assert_eq!(estimate.largest_batch(limit), Some(777));
    assert_eq!(estimate.largest_batch(limit - 1), Some(776));
    assert_eq!(estimate.largest_batch(1000), None);
}

#[test]
fn memory_that_grows_with_the_square_of_the_batch_is_foreseen() {
    let _alone = alone();
    let w = leaf(&[10, 10]);
    let step = |batch: i64| {
        let x = Tensor::randn([batch, 10], FLOAT).matmul(&w);
        x.f_matmul(&x.tr())?.f_exp()?.f_sum(Kind::Float)?.f_backward()
    };
    let estimate = Estimate::of(Device::Cpu, |batch, _| step(batch)).unwrap();
    assert!(estimate.is_exact());
    let recorder = MemoryRecorder::begin().unwrap();
    step(700).unwrap();
    assert_eq!(estimate.peak(700).total(), recorder.end().peak(Device::Cpu).total());
}

#[test]
fn memory_that_follows_no_rule_is_said_to_be_inexact() {
    let _alone = alone();
    let step = |batch: i64, _: &MemoryRecorder| Tensor::f_zeros([batch * batch * batch], FLOAT).map(drop);
    assert!(!Estimate::of(Device::Cpu, step).unwrap().is_exact());
}

/// The last step's gradients are there until they are cleared.
#[test]
fn gradients_of_the_step_before_count() {
    let _alone = alone();
    let weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let mut step = |recorder: &MemoryRecorder| {
        let loss = loss(&Tensor::randn([8, 100], FLOAT), &weights);
        TensorList::new(&weights)?.clear_grads()?;
        loss.backward();
        recorder.tag(Category::Parameter, &weights)
    };
    let run = |step: &mut dyn FnMut(&MemoryRecorder) -> Result<(), MemoryError>| {
        let recorder = MemoryRecorder::begin().unwrap();
        step(&recorder).unwrap();
        recorder.end()
    };
    run(&mut step);
    let uses = run(&mut step).timeline(Device::Cpu);
    let of_weights = 4 * 45_000;
    let at_first = uses.iter().take_while(|it| it.0 == 0).last().unwrap().1;
    assert_eq!(at_first.total(), 2 * of_weights, "{at_first:?}");
}

#[test]
fn a_device_that_the_step_does_not_use_is_refused() {
    let _alone = alone();
    let step = |batch: i64, _: &MemoryRecorder| Tensor::f_zeros([batch], FLOAT).map(drop);
    assert!(matches!(Estimate::of(Device::Cuda(7), step), Err(MemoryError::NothingThere { .. })));
}

#[test]
fn runs_in_different_orders_are_prolonged_and_said_to_be_inexact() {
    let _alone = alone();
    let estimate = Estimate::of_sizes(Device::Cpu, [2, 4, 6, 8], |batch, _| {
        let parts: Vec<_> = (0..batch).map(|_| Tensor::zeros([1000], FLOAT)).collect();
        drop(parts);
        Ok::<_, TchError>(())
    })
    .unwrap();
    assert!(!estimate.is_exact());
    assert_eq!(estimate.peak(10).total(), 10 * 4000);
}

#[test]
fn a_forecast_names_what_would_make_a_batch_fit() {
    let _alone = alone();
    let weights = [leaf(&[100, 300]), leaf(&[300, 50])];
    let state = [Tensor::zeros([100, 300], FLOAT), Tensor::zeros([300, 50], FLOAT)];
    let estimate = Estimate::of(Device::Cpu, |batch, recorder| {
        TensorList::new(&weights)?.clear_grads()?;
        loss(&Tensor::randn([batch, 100], FLOAT), &weights).backward();
        recorder.tag(Category::OptimizerState, &state)?;
        recorder.tag(Category::Parameter, &weights)
    })
    .unwrap();
    let limit = estimate.peak(260).total();
    let forecast = estimate.forecast(1000, Some(limit));
    assert_eq!((forecast.peak_bytes, forecast.largest_batch), (estimate.peak(1000).total(), Some(260)));
    let at_peak = |name: &str| forecast.uses.iter().find(|it| it.name == name).map_or(0, |it| it.at_peak);
    assert_eq!(at_peak("optimizer state"), 4 * 45_000);
    assert_eq!(forecast.uses.iter().map(|it| it.at_peak).sum::<u64>(), forecast.peak_bytes);
    assert_eq!(forecast.uses.iter().map(|it| it.bytes.len()).max(), Some(forecast.seconds.len()));
    // In halves, the first size that fits: what a step with such parts needs. Inputs are not tagged here.
    let micro = forecast.techniques.iter().find(|it| it.name.starts_with("micro-batches of ")).unwrap();
    let size: i64 = micro.name.split([' ', ':']).nth(2).unwrap().parse().unwrap();
    TensorList::new(&weights).unwrap().clear_grads().unwrap();
    let recorder = MemoryRecorder::begin().unwrap();
    for _ in 0..1000 / size {
        loss(&Tensor::randn([size, 100], FLOAT), &weights).backward();
    }
    recorder.tag(Category::Parameter, &weights).unwrap();
    recorder.tag(Category::OptimizerState, &state).unwrap();
    assert_eq!((micro.peak_bytes, micro.is_rough), (recorder.end().peak(Device::Cpu).total(), false), "{size}");
    let eight_bit = forecast.techniques.iter().find(|it| it.name.contains("8-bit") && !it.name.contains("together"));
    let saved = forecast.peak_bytes - eight_bit.unwrap().peak_bytes;
    assert!((saved as f64 / (4.0 * 45_000.0) - 0.746).abs() < 0.001, "{saved}");
    // What fits comes first, and what saves nothing is left out.
    let fits: Vec<_> = forecast.techniques.iter().map(|it| it.peak_bytes <= limit).collect();
    assert!(fits.is_sorted_by(|one, other| one >= other) && fits[0], "{fits:?}");
    assert!(estimate.forecast(1000, None).largest_batch.is_none());
}

#[test]
fn sizes_that_show_nothing_are_refused() {
    for sizes in [[0, 4, 5, 6], [4, 4, 5, 6], [8, 4, 10, 12]] {
        let refused = Estimate::of_sizes(Device::Cpu, sizes, |_, _| Ok::<_, TchError>(()));
        assert!(matches!(refused, Err(MemoryError::Sizes { .. })), "{sizes:?}");
    }
}

#[test]
fn pytorchs_visualiser_reads_a_snapshot() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("snapshot.pickle");
    let recorder = MemoryRecorder::with_callers().unwrap();
    let kept = Tensor::zeros([3_000_000], FLOAT);
    drop(Tensor::zeros([1000], FLOAT));
    recorder.end().save_snapshot(&path).unwrap();
    drop(kept);
    let Some(python) = std::env::var_os("OVERDRIVE_PYTHON") else {
        println!("skipped: OVERDRIVE_PYTHON does not name a Python with torch");
        return;
    };
    // The visualiser's own reader, in a browser, takes no number of more than 8 bytes: LONG1 is a code, a length and these.
    let read = "import pickle, pickletools, sys; from torch.cuda import _memory_viz as viz; raw = open(sys.argv[1], 'rb').read(); \
                ops = list(pickletools.genops(raw)); \
                assert all(b[2] - a[2] <= 10 for a, b in zip(ops, ops[1:]) if a[0].name == 'LONG1'); \
                data = pickle.loads(raw); \
                print(viz.segsum(data), viz.trace(data)); assert len(viz.trace_plot(data)) > 1000";
    let output = std::process::Command::new(&python).args(["-c", read]).arg(&path).output().unwrap();
    let (seen, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{error}");
    assert!(seen.contains("total_reserved: 11.4MiB") && seen.contains("total_allocated: 11.4MiB"), "{seen}");
    // The tensor that is kept, and the one that was freed.
    for line in ["b = a[0:11.4MiB]", "d = c[0:3.9KiB]", "del d # 3.9KiB", "cudaFree(c) # 3.9KiB"] {
        assert!(seen.lines().any(|it| it.starts_with(line)), "{line}: {seen}");
    }
}

#[test]
fn a_snapshot_that_cannot_be_written_names_its_file() {
    let _alone = alone();
    let record = MemoryRecorder::begin().unwrap().end();
    let error = record.save_snapshot("/no/such/folder/snapshot.pickle").unwrap_err();
    assert!(error.to_string().contains("/no/such/folder/snapshot.pickle"), "{error}");
}

#[test]
fn statistics_of_the_host_are_those_that_are_counted() {
    let _alone = alone();
    host_memory::count(usize::MAX).unwrap();
    let before = memory_stats(Device::Cpu).unwrap();
    drop(Tensor::zeros([1 << 20], FLOAT));
    let after = memory_stats(Device::Cpu).unwrap();
    assert_eq!(after.allocated, before.allocated);
    assert!(after.allocated_peak >= before.allocated + (4 << 20));
    reset_peak_memory_stats(Device::Cpu).unwrap();
    assert_eq!(memory_stats(Device::Cpu).unwrap().allocated_peak, after.allocated);
    assert!(matches!(memory_stats(Device::Mps), Err(MemoryError::Device { .. })));
}

/// A function of products and cheap operators, as a layer is.
fn layer(x: &Tensor, weight: &Tensor) -> Result<Tensor, TchError> {
    let y = x.f_matmul(weight)?.f_tanh()?.f_matmul(weight)?.f_gelu("none")?;
    let y = y.f_layer_norm([64], None::<Tensor>, None::<Tensor>, 1e-5, false)?;
    y.f_matmul(weight)?.f_sigmoid()?.f_add(x)
}

/// Which results are kept depends on times, but never how many bytes and what gradients.
#[test]
fn a_budget_is_kept_and_gradients_are_those_without() {
    let _alone = alone();
    host_memory::count(usize::MAX).unwrap();
    let (x, weight) = (leaf(&[32, 64]), leaf(&[64, 64]));
    let graph_bytes = |run: &mut dyn FnMut() -> Tensor| {
        let before = host_memory::stats().unwrap().allocated;
        let y = run();
        let after = host_memory::stats().unwrap().allocated;
        (y, (after - before) as f64)
    };
    let gradients = |y: &Tensor| {
        let options = overdrive_ffi::autograd::GradOptions::default();
        overdrive_ffi::autograd::grad::<Tensor>(&[&y.sum(Kind::Float)], &[&x, &weight], &[], options).unwrap()
    };
    let (y, plain) = graph_bytes(&mut || layer(&x, &weight).unwrap());
    let expected = gradients(&y);
    let checkpointed = |options: &ActivationCheckpoint| {
        let (options, own) = (options.clone(), weight.shallow_clone());
        graph_bytes(&mut || {
            options
                .clone()
                .run(
                    {
                        let own = own.shallow_clone();
                        move |[x]| layer(x, &own)
                    },
                    [&x],
                )
                .unwrap()
        })
    };
    // The output, and the generator's state.
    let (_, nothing) = checkpointed(&ActivationCheckpoint::default());
    let (tensor, output) = (4.0 * 32.0 * 64.0, 4.0 * 32.0 * 64.0);
    for share in [0.0, 0.25, 0.5, 0.75, 1.0] {
        let options = ActivationCheckpoint::default().keep(Policy::Budget(Budget::new(share).unwrap()));
        for call in 0..4 {
            let (y, bytes) = checkpointed(&options);
            assert_eq!(gradients(&y), expected, "{share}, call {call}");
            // Two calls are measured. The input is a leaf, which takes no memory of the graph's.
            let room = if call < 2 { 0.0 } else { share * (plain - output) };
            let kept = bytes - nothing;
            assert!(
                kept <= room && kept >= room - 1.5 * tensor,
                "{share}, call {call}: {kept} of {plain}, room {room}"
            );
        }
    }
}

/// The bytes that a graph holds.
fn graph_bytes(run: &mut dyn FnMut() -> Tensor) -> f64 {
    let before = host_memory::stats().unwrap().allocated;
    let y = run();
    let after = host_memory::stats().unwrap().allocated;
    drop(y);
    (after - before) as f64
}

/// The bytes that a function's graph holds without checkpointing and with this budget, once it has a plan.
fn plain_and_planned<F>(share: f64, x: &Tensor, function: impl Fn() -> F) -> [f64; 2]
where
    F: Fn(&Tensor) -> Result<Tensor, TchError> + Send + 'static,
{
    host_memory::count(usize::MAX).unwrap();
    let plain = graph_bytes(&mut || function()(x).unwrap());
    let nothing = |function: F| ActivationCheckpoint::default().run(move |[x]| function(x), [x]).unwrap();
    let overhead =
        graph_bytes(&mut || nothing(function())) - graph_bytes(&mut || tch::no_grad(|| function()(x).unwrap()));
    let options = ActivationCheckpoint::default().keep(Policy::Budget(Budget::new(share).unwrap()));
    let mut planned = 0.0;
    for _ in 0..3 {
        let function = &function;
        planned = graph_bytes(&mut || {
            let function = function();
            options.clone().run(move |[x]| function(x), [x]).unwrap()
        });
    }
    [plain, planned - overhead]
}

/// Views of weights are saved, and take no memory; an input that two operators save is there once.
#[test]
fn a_budget_counts_neither_weights_nor_inputs_twice() {
    let _alone = alone();
    let (weight, others) = (leaf(&[256, 256]), [leaf(&[256, 8]), leaf(&[256, 8])]);
    let linear = || {
        let weight = weight.shallow_clone();
        move |x: &Tensor| x.f_linear(&weight, None::<Tensor>)?.f_tanh()?.f_linear(&weight, None::<Tensor>)?.f_sin()
    };
    let x = leaf(&[8, 256]);
    let [plain, planned] = plain_and_planned(0.5, &x, linear);
    assert!(planned <= 0.5 * plain + 9000.0, "{planned} of {plain}");
    let projections = || {
        let others = others.each_ref().map(Tensor::shallow_clone);
        move |x: &Tensor| {
            let [one, two] = others.each_ref().map(|weight| x.f_matmul(weight)?.f_tanh());
            one?.f_mul(&two?)?.f_sin()
        }
    };
    // No leaf: the graph keeps it for the function alone.
    let x = leaf(&[64, 256]) * 2.0;
    let [plain, planned] = plain_and_planned(0.9, &x, projections);
    assert!(planned <= 0.9 * plain, "{planned} of {plain}");
}

/// As autocast's casts, which run again: numbers of calls shift, those of each operator do not.
#[test]
fn a_result_is_used_again_for_its_own_call_alone() {
    let _alone = alone();
    let (x, weights) = (leaf(&[16, 16]), [leaf(&[16, 16]), leaf(&[16, 16]), leaf(&[16, 16])]);
    let is_first = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(true));
    let run = |x: &Tensor, weights: &[Tensor; 3]| {
        let [q, k, v] = weights.each_ref().map(|weight| x.f_matmul(weight));
        q?.f_sin()?.f_mul(&k?.f_cos()?)?.f_mul(&v?.f_tanh()?)
    };
    let gradients = |y: &Tensor| {
        let by: Vec<&Tensor> = std::iter::once(&x).chain(&weights).collect();
        let options = overdrive_ffi::autograd::GradOptions::default();
        overdrive_ffi::autograd::grad::<Tensor>(&[&y.sum(Kind::Float)], &by, &[], options).unwrap()
    };
    let expected = gradients(&run(&x, &weights).unwrap());
    let options = ActivationCheckpoint::default().keep(Policy::Budget(Budget::new(0.6).unwrap()));
    for call in 0..4 {
        is_first.store(true, std::sync::atomic::Ordering::SeqCst);
        let (own, is_first) = (weights.each_ref().map(Tensor::shallow_clone), is_first.clone());
        let y = options.clone().run(
            move |[x]| {
                if is_first.swap(false, std::sync::atomic::Ordering::SeqCst) {
                    // Nobody saves it, so that no check sees it.
                    tch::no_grad(|| x.f_exp().map(drop))?;
                }
                run(x, &own)
            },
            [&x],
        );
        assert_eq!(gradients(&y.unwrap()), expected, "call {call}");
    }
}

#[test]
fn a_sparse_input_is_no_error() {
    let _alone = alone();
    let (indices, values) = (Tensor::from_slice2(&[[0_i64, 1], [1, 2]]), Tensor::from_slice(&[1_f32, 2.0]));
    let sparse = Tensor::sparse_coo_tensor_indices_size(&indices, &values, [2, 3], FLOAT, false);
    let w = leaf(&[3, 4]);
    let options = ActivationCheckpoint::default().keep(Policy::Budget(Budget::new(0.5).unwrap()));
    for _ in 0..3 {
        let y = options.clone().run(|[x, w]| x.f_mm(w)?.f_sin(), [&sparse, &w]).unwrap();
        y.sum(Kind::Float).backward();
    }
}

#[test]
fn a_share_that_is_none_is_refused() {
    for share in [-0.1, 1.1, f64::NAN] {
        assert!(matches!(Budget::new(share), Err(MemoryError::Budget { .. })), "{share}");
    }
}
