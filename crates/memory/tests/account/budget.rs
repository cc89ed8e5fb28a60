//! Results that are kept by a budget of memory.

use overdrive_ffi::host_memory;
use overdrive_memory::{ActivationCheckpoint, Budget, MemoryError, Policy};
use tch::{Kind, TchError, Tensor};

use crate::{FLOAT, alone, leaf};

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
