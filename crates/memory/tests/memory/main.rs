//! Functions that run again in the backward pass, and hooks of saved tensors.

mod changes;
mod closures;
mod life;
mod masks;
mod saved;
mod selective;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_ffi::autocast::{Region, State};
use overdrive_ffi::autograd::{GradOptions, backward, grad};
use overdrive_memory::{ActivationCheckpoint, MemoryError, checkpoint, checkpoint_sequential};
use tch::{Device, Kind, TchError, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Tests share the generator of random numbers, which a second run sets and restores.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn leaf(size: &[i64]) -> Tensor {
    Tensor::randn(size, FLOAT).set_requires_grad(true)
}

/// The gradients of a loss, by these tensors.
fn grads(loss: &Tensor, by: &[&Tensor]) -> Vec<Tensor> {
    grad::<Tensor>(&[loss], by, &[], GradOptions::default()).unwrap()
}

/// A layer with dropout.
fn layer(x: &Tensor, weight: &Tensor) -> Result<Tensor, TchError> {
    x.f_matmul(weight)?.f_gelu("none")?.f_dropout(0.5, true)?.f_sin()
}

#[derive(Clone, Default)]
struct Calls(Arc<AtomicUsize>);

impl Calls {
    fn count(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }

    fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn gradients_and_random_numbers_are_those_of_a_plain_run() {
    let _alone = alone();
    let (x, weights) = (leaf(&[4, 8]), [leaf(&[8, 8]), leaf(&[8, 8]), leaf(&[8, 8])]);
    let all = [&x, &weights[0], &weights[1], &weights[2]];
    let run = |checkpointed: bool| {
        tch::manual_seed(3);
        let y = weights.iter().fold(x.shallow_clone(), |x, weight| {
            let weight = weight.shallow_clone();
            match checkpointed {
                true => checkpoint(move |[x]| layer(x, &weight), [&x]).unwrap(),
                false => layer(&x, &weight).unwrap(),
            }
        });
        let loss = y.square().sum(Kind::Float);
        (grads(&loss, &all), Tensor::rand([4], FLOAT))
    };
    let (plain, next) = run(false);
    let (found, next_again) = run(true);
    assert_eq!(plain, found);
    assert_eq!(next, next_again, "the generator has moved on");
}

#[test]
fn inputs_may_need_no_gradient_and_results_may_be_anything() {
    let _alone = alone();
    let (x, mask, weight) = (leaf(&[3, 3]), Tensor::ones([3, 3], FLOAT), leaf(&[3, 3]));
    let own = weight.shallow_clone();
    let factor = 3.0;
    let (y, [z], text) = checkpoint(
        move |[x, mask]| {
            let y = x.f_matmul(&own)?.f_mul(mask)?;
            let z = y.f_exp()? * factor;
            Ok::<_, TchError>((y, [z], "kept"))
        },
        [&x, &mask],
    )
    .unwrap();
    assert_eq!(text, "kept");
    let plain = x.matmul(&weight) * &mask;
    let expected = grads(&(&plain + plain.exp() * factor).sum(Kind::Float), &[&x, &weight]);
    assert_eq!(grads(&(y + z).sum(Kind::Float), &[&x, &weight]), expected);
}

#[test]
fn checkpoints_nest() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let calls = [Calls::default(), Calls::default()];
    let ([outer, inner], own) = (calls.clone(), weight.shallow_clone());
    let run = move |[x]: &[Tensor; 1]| {
        outer.count();
        let y = x.f_matmul(&own)?.f_sin()?;
        let (inner, own) = (inner.clone(), own.shallow_clone());
        let within = move |[y]: &[Tensor; 1]| {
            inner.count();
            y.f_matmul(&own)?.f_sin()?.f_exp()
        };
        checkpoint(within, [&y]).map(|z| z.sin())
    };
    let y = checkpoint(run, [&x]).unwrap();
    let expected = grads(&x.matmul(&weight).sin().matmul(&weight).sin().exp().sin().sum(Kind::Float), &[&x, &weight]);
    assert_eq!(grads(&y.sum(Kind::Float), &[&x, &weight]), expected);
    // The inner one runs in the first pass, in the outer one's second, and for itself.
    assert_eq!(calls.map(|calls| calls.get()), [2, 3]);
}

#[test]
fn gradients_can_be_differentiated() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let create = GradOptions { create_graph: true, retain_graph: true, ..GradOptions::default() };
    let second = |y: Tensor| {
        let first = grad::<Tensor>(&[&y.sum(Kind::Float)], &[&x], &[], create).unwrap();
        grads(&first[0].square().sum(Kind::Float), &[&x, &weight])
    };
    let own = weight.shallow_clone();
    let y = checkpoint(move |[x]| x.f_matmul(&own)?.f_sin()?.f_exp(), [&x]).unwrap();
    assert_eq!(second(y), second(x.matmul(&weight).sin().exp()));
}

#[test]
fn a_graph_that_is_kept_can_be_run_again() {
    let _alone = alone();
    let x = leaf(&[4]);
    let calls = Calls::default();
    let own = calls.clone();
    let count = move |[x]: &[Tensor; 1]| {
        own.count();
        x.f_sin()?.f_exp()
    };
    let loss = checkpoint(count, [&x]).unwrap().sum(Kind::Float);
    let keep = GradOptions { retain_graph: true, ..GradOptions::default() };
    let first = grad::<Tensor>(&[&loss], &[&x], &[], keep).unwrap();
    assert_eq!(first, grads(&loss, &[&x]));
    assert_eq!(calls.get(), 3);
    assert!(grad::<Tensor>(&[&loss], &[&x], &[], keep).is_err(), "the graph was freed");
}

#[test]
fn a_backward_pass_within_the_function_is_right_too() {
    let _alone = alone();
    let x = leaf(&[4]);
    let inside = |x: &Tensor| -> Result<Tensor, overdrive_ffi::Error> {
        let y = x.f_sin()?.f_exp()?;
        let keep = GradOptions { retain_graph: true, ..GradOptions::default() };
        let dx = grad::<Tensor>(&[&y.sum(Kind::Float)], &[x], &[], keep)?;
        Ok(y.f_mul(&dx[0])?.f_cos()?)
    };
    let expected = grads(&inside(&x).unwrap().sum(Kind::Float), &[&x]);
    for early_stop in [true, false] {
        let options = ActivationCheckpoint::default().early_stop(early_stop);
        let y = options.run(move |[x]| inside(x), [&x]).unwrap();
        assert_eq!(grads(&y.sum(Kind::Float), &[&x]), expected, "early stop {early_stop}");
    }
}

#[test]
fn autocast_is_as_it_was() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    let own = weight.shallow_clone();
    let product = move |[x]: &[Tensor; 1]| x.f_matmul(&own)?.f_sin();
    let (y, expected) = {
        let _region = Region::enter(Device::Cpu, on).unwrap();
        (checkpoint(product, [&x]).unwrap(), x.matmul(&weight).sin())
    };
    assert_eq!(y.kind(), Kind::BFloat16);
    // The backward pass runs outside of the region.
    let [found, expected] = [y, expected].map(|y| grads(&y.sum(Kind::Float), &[&x, &weight]));
    assert_eq!(found, expected);
    assert_eq!(Tensor::ones([2, 2], FLOAT).matmul(&Tensor::ones([2, 2], FLOAT)).kind(), Kind::Float);
}

#[test]
fn the_second_run_ends_with_the_last_tensor_that_is_needed() {
    let _alone = alone();
    let x = leaf(&[4]);
    for (early_stop, ends) in [(true, 1), (false, 2)] {
        let reached = Calls::default();
        let own = reached.clone();
        let run = move |[x]: &[Tensor; 1]| {
            // tch panics where an operator fails.
            let y = x.sin().exp();
            own.count();
            Ok::<_, TchError>(y + 1.0)
        };
        let y = ActivationCheckpoint::default().early_stop(early_stop).run(run, [&x]).unwrap();
        assert_eq!(grads(&y.sum(Kind::Float), &[&x]), grads(&x.sin().exp().sum(Kind::Float), &[&x]));
        assert_eq!(reached.get(), ends, "early stop {early_stop}");
    }
}

#[test]
fn gradients_accumulate_and_the_function_is_dropped_with_the_graph() {
    let _alone = alone();
    let (x, weight) = (leaf(&[2, 2]), leaf(&[2, 2]));
    let held = Arc::new(());
    for number in 1..3 {
        let (own, held) = (weight.shallow_clone(), Arc::clone(&held));
        let product = move |[x]: &[Tensor; 1]| {
            let _ = &held;
            x.f_matmul(&own)?.f_sin()
        };
        let loss = checkpoint(product, [&x]).unwrap().sum(Kind::Float);
        backward::<Tensor>(&[&loss], &[], GradOptions::default()).unwrap();
        let once = grads(&x.matmul(&weight).sin().sum(Kind::Float), &[&weight]).remove(0);
        assert!(weight.grad().allclose(&(once * number), 1e-6, 1e-6, false));
    }
    assert_eq!(Arc::strong_count(&held), 1, "freed with the graph");
    let kept = Arc::clone(&held);
    let unused = checkpoint(
        move |[x]| {
            let _ = &kept;
            x.f_sin()
        },
        [&x],
    );
    drop(unused);
    assert_eq!(Arc::strong_count(&held), 1, "also without a backward pass");
}

#[test]
fn without_gradients_it_just_runs() {
    let _alone = alone();
    let (x, calls) = (leaf(&[2]), Calls::default());
    let own = calls.clone();
    let run = move |[x]: &[Tensor; 1]| {
        own.count();
        x.f_sin()
    };
    let y = tch::no_grad(|| checkpoint(run, [&x])).unwrap();
    assert!(!y.requires_grad());
    assert_eq!(calls.get(), 1);
}

#[test]
fn an_error_of_the_first_run_names_the_line() {
    let _alone = alone();
    let x = leaf(&[4]);
    let error = checkpoint(|[x]| x.f_view([7]), [&x]).unwrap_err();
    assert!(matches!(&error, MemoryError::Function { scope, .. } if scope.contains("main.rs:")), "{error}");
}

/// `backward` of ours hands on what a function panicked with, and where it was checkpointed.
#[test]
fn a_panic_of_the_second_run_is_resumed() {
    let _alone = alone();
    let (x, calls) = (leaf(&[4]), Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        assert!(calls.get() == 1, "not again");
        x.f_sin()
    };
    let loss = checkpoint(run, [&x]).unwrap().sum(Kind::Float);
    let pass = std::panic::AssertUnwindSafe(|| backward::<Tensor>(&[&loss], &[], GradOptions::default()));
    let panic = std::panic::catch_unwind(pass).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.ends_with(": not again") && text.contains("main.rs:"), "{text}");
}

#[test]
fn passes_may_run_on_several_threads() {
    let _alone = alone();
    let weight = leaf(&[8, 8]);
    let losses = (0..4).map(|_| {
        let own = weight.shallow_clone();
        checkpoint(move |[x]| x.f_matmul(&own)?.f_sin(), [&leaf(&[8, 8])]).unwrap().sum(Kind::Float)
    });
    let threads = losses.map(|loss| std::thread::spawn(move || loss.f_backward())).collect::<Vec<_>>();
    threads.into_iter().for_each(|thread| thread.join().unwrap().unwrap());
    assert!(weight.grad().defined());
}

#[test]
fn layers_are_checkpointed_in_segments() {
    let _alone = alone();
    let (x, weights) = (leaf(&[4, 4]), (0..5).map(|_| leaf(&[4, 4])).collect::<Vec<_>>());
    let calls = Calls::default();
    let layers = || {
        weights.iter().map(|weight| {
            let (weight, calls) = (weight.shallow_clone(), calls.clone());
            move |x: &Tensor| {
                calls.count();
                x.f_matmul(&weight)?.f_sin()
            }
        })
    };
    let plain = weights.iter().fold(x.shallow_clone(), |x, weight| x.matmul(weight).sin());
    let y = checkpoint_sequential(layers(), 2, &x).unwrap();
    assert_eq!(calls.get(), 5);
    assert_eq!(grads(&y.sum(Kind::Float), &[&x, &weights[0]]), grads(&plain.sum(Kind::Float), &[&x, &weights[0]]));
    // The first two run again; the last three are as they are.
    assert_eq!(calls.get(), 7);
    for segments in [0, 6] {
        let error = checkpoint_sequential(layers(), segments, &x).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("5 layers cannot be parted into {segments} segments: use at least one layer, and 1 to 5 segments")
        );
    }
}
