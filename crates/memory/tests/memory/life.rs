//! How long tensors live, and what threads and errors leave.

use std::sync::Arc;

use overdrive_ffi::autograd::{GradOptions, backward, grad};
use overdrive_ffi::{ErrorKind, host_memory, rng};
use overdrive_memory::{ActivationCheckpoint, DeterminismCheck, checkpoint};
use tch::{Device, Kind, TchError, Tensor};

use crate::{Calls, FLOAT, alone, grads, leaf};

/// A pass that needs some of the tensors computes all again.
#[test]
fn a_pass_leaves_nothing_of_what_it_did_not_use() {
    let _alone = alone();
    let x = leaf(&[1 << 10]);
    host_memory::count(usize::MAX).unwrap();
    let (one, two) = checkpoint(
        |[x]| {
            let y = x.f_sin()?;
            Ok::<_, TchError>((y.f_exp()?.f_sum(Kind::Float)?, y.f_cos()?.f_sum(Kind::Float)?))
        },
        [&x],
    )
    .unwrap();
    let keep = GradOptions { retain_graph: true, ..GradOptions::default() };
    let pass = |loss: &Tensor| drop(grad::<Tensor>(&[loss], &[&x], &[], keep).unwrap());
    let now = || host_memory::stats().unwrap().allocated;
    let before = now();
    pass(&one);
    assert_eq!(now(), before);
    pass(&two);
    assert_eq!(now(), before);
}

#[test]
fn a_pass_that_fails_leaves_nothing() {
    let _alone = alone();
    let x = leaf(&[1 << 10]);
    host_memory::count(usize::MAX).unwrap();
    let calls = Calls::default();
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        let y = x.f_sin()?.f_exp()?.f_sin()?;
        if calls.get() == 1 { y.f_exp() } else { y.f_view([7]) }
    };
    let y = checkpoint(run, [&x]).unwrap();
    let loss = y.sum(Kind::Float);
    let before = host_memory::stats().unwrap().allocated;
    assert!(loss.f_backward().is_err());
    assert_eq!(host_memory::stats().unwrap().allocated, before);
}

#[test]
fn memory_that_runs_out_in_the_second_run_is_an_error_of_that_kind() {
    let _alone = alone();
    let x = leaf(&[4]);
    host_memory::count(usize::MAX).unwrap();
    let calls = Calls::default();
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        if calls.get() > 1 {
            drop(Tensor::f_zeros([1 << 52], FLOAT)?);
        }
        x.f_sin()
    };
    let loss = checkpoint(run, [&x]).unwrap().sum(Kind::Float);
    let error = backward::<Tensor>(&[&loss], &[], GradOptions::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    assert!(error.to_string().contains("life.rs:"), "{error}");
}

/// Each thread's masks are those of its first run, whatever the others compute again meanwhile.
#[test]
fn passes_on_several_threads_draw_what_their_first_runs_drew() {
    let _alone = alone();
    let all = (0..4).map(|_| {
        let x = leaf(&[64]);
        let losses = (0..40).map(|_| {
            let dropped = checkpoint(|[x]| x.f_dropout(0.5, true)?.f_sin(), [&x]).unwrap();
            // The gradient of x.sin() * mask is zero where the mask is.
            let zeros = dropped.detach().eq(0.0);
            (dropped.sum(Kind::Float), zeros)
        });
        (x.shallow_clone(), losses.collect::<Vec<_>>())
    });
    let pass = |(x, losses): (Tensor, Vec<(Tensor, Tensor)>)| {
        let is_right = |(loss, zeros): (Tensor, Tensor)| grads(&loss, &[&x])[0].eq(0.0).equal(&zeros);
        losses.into_iter().all(is_right)
    };
    let threads = all.collect::<Vec<_>>();
    let state = rng::state(Device::Cpu).unwrap();
    let threads: Vec<_> = threads.into_iter().map(|one| std::thread::spawn(move || pass(one))).collect();
    assert!(threads.into_iter().all(|thread| thread.join().unwrap()));
    assert_eq!(rng::state(Device::Cpu).unwrap(), state, "the generator has moved on");
}

/// It would wait for the function's first run, which waits for the pass.
#[test]
fn a_pass_within_the_function_on_another_thread_is_an_error() {
    let _alone = alone();
    let run = |[x]: &[Tensor; 1]| -> Result<Tensor, TchError> {
        let y = x.f_sin()?.f_exp()?;
        let loss = y.f_sum(Kind::Float)?;
        std::thread::spawn(move || loss.f_backward()).join().unwrap()?;
        Ok(y)
    };
    let error = checkpoint(run, [&leaf(&[4])]).unwrap_err().to_string();
    assert!(error.contains("cannot run it again on another thread"), "{error}");
}

/// As without a checkpoint, where libtorch finds it. The operator behind it makes the second run get there.
#[test]
fn a_saved_tensor_that_the_function_changes_in_place_is_an_error() {
    let _alone = alone();
    let x = leaf(&[4]);
    let run = |[x]: &[Tensor; 1]| x.f_sigmoid()?.f_mul_(&Tensor::from(2f32))?.f_exp();
    for check in [DeterminismCheck::Default, DeterminismCheck::None] {
        let y = ActivationCheckpoint::default().determinism_check(check).run(run, [&x]).unwrap();
        let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
        assert!(error.contains("saved tensor 0 was changed in place afterwards"), "{error}");
    }
}

/// A function may change its input in place; then the graph of the input has what the function saved.
#[test]
fn a_function_is_dropped_with_an_input_that_it_changed() {
    let _alone = alone();
    let (x, held) = (leaf(&[4]), Arc::new(()));
    let own = Arc::clone(&held);
    let run = move |[x]: &[Tensor; 1]| {
        let _ = &own;
        x.shallow_clone().f_relu_()
    };
    drop(checkpoint(run, [&x.sin()]).unwrap());
    assert_eq!(Arc::strong_count(&held), 1);
}
