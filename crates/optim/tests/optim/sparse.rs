//! Steps with sparse gradients.

use overdrive_core::{Optimizer, OptimizerError, Stateful};
use overdrive_optim::{Adam, AdamW, Joint, LowPrecision, SparseAdam};
use tch::{Kind, Tensor};

use crate::state::{assert_same, copied};
use crate::{DOUBLE, assert_close, params, set_grads};

fn table() -> Tensor {
    (Tensor::arange(10, DOUBLE) * 0.7).sin().reshape([5, 2]).set_requires_grad(true)
}

/// A gradient in these rows, sparse or dense.
fn set_grad(table: &Tensor, rows: &[i64], sparse: bool) {
    let taken = Tensor::embedding(table, &Tensor::from_slice(rows), -1, false, sparse);
    (&taken * (taken.detach() * 3.0).cos()).sum(table.kind()).backward();
    assert_eq!(table.grad().is_sparse(), sparse);
}

#[test]
fn a_gradient_in_every_row_steps_as_adam_does() {
    for maximize in [false, true] {
        let (sparse, dense) = (table(), table());
        let mut sparse_opt = SparseAdam::builder([&sparse]).lr(0.1).eps(1e-3).maximize(maximize).build().unwrap();
        let mut dense_opt = Adam::builder([&dense]).lr(0.1).eps(0.0).maximize(maximize).build().unwrap();
        for step in 1..6 {
            // Adam adds eps after the bias correction, SparseAdam before.
            let eps = 1e-3 / (1.0 - 0.999f64.powi(step)).sqrt();
            dense_opt.group_mut(0).unwrap().eps(eps).apply().unwrap();
            // Row 2 occurs twice: its gradients are added up.
            set_grad(&sparse, &[4, 2, 0, 1, 2, 3], true);
            set_grad(&dense, &[4, 2, 0, 1, 2, 3], false);
            for opt in [&mut sparse_opt as &mut dyn Optimizer, &mut dense_opt] {
                opt.step().unwrap();
                opt.zero_grad().unwrap();
            }
            assert_close(&sparse, &dense, &format!("maximize {maximize}, step {step}"));
        }
    }
}

#[test]
fn rows_without_a_gradient_keep_their_values_and_averages() {
    let table = table();
    let start = table.detach().copy();
    let mut opt = SparseAdam::builder([&table]).lr(0.1).build().unwrap();
    let step = |opt: &mut SparseAdam, rows: &[i64]| {
        set_grad(&table, rows, true);
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        copied(&opt.state_dict().unwrap())
    };
    let first = step(&mut opt, &[1, 3]);
    let second = step(&mut opt, &[3]);
    let third = step(&mut opt, &[]);
    let names: Vec<_> = first.iter().map(|(name, _)| name).filter(|name| name.starts_with("state")).collect();
    assert_eq!(names, ["state.0.exp_avg", "state.0.exp_avg_sq", "state.0.step"], "PyTorch's names");
    for row in [0, 2, 4] {
        assert!(table.get(row).equal(&start.get(row)), "row {row}");
    }
    assert!(!table.get(1).equal(&start.get(1)) && !table.get(3).equal(&start.get(3)));
    for name in ["state.0.exp_avg", "state.0.exp_avg_sq"] {
        let [first, second, third] =
            [&first, &second, &third].map(|it| it.tensor(name, &[5, 2], Kind::Double).unwrap());
        assert!(first.get(1).equal(&second.get(1)) && !first.get(3).equal(&second.get(3)), "{name}");
        assert!(second.equal(third) && second.get(0).equal(&second.get(0).zeros_like()), "{name}");
    }
    assert_eq!(third.tensor("state.0.step", &[], Kind::Float).unwrap().double_value(&[]), 3.0, "every step counts");
}

#[test]
fn a_dense_gradient_is_named_and_nothing_is_stepped() {
    let (first, second) = (table(), table());
    let named = vec![("words".to_owned(), first.shallow_clone()), ("bias".to_owned(), second.shallow_clone())];
    let mut opt = SparseAdam::builder(named).build().unwrap();
    set_grad(&first, &[1], true);
    set_grad(&second, &[1], false);
    let error = opt.step().unwrap_err();
    assert!(matches!(error, OptimizerError::InvalidParameter { .. }));
    let error = error.to_string();
    assert!(error.contains("bias") && error.contains("SparseAdam does not support dense gradients"), "{error}");
    assert!(first.equal(&table()), "no parameter may be stepped");
}

#[test]
fn a_run_with_sparse_gradients_resumes_bit_for_bit() {
    let train = |opt: &mut SparseAdam, table: &Tensor, steps: std::ops::Range<i64>| {
        for step in steps {
            set_grad(table, &[step % 5, 4, step * 3 % 5], true);
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    };
    let first = table();
    let mut unbroken = SparseAdam::builder([&first]).lr(0.1).betas(0.8, 0.9).build().unwrap();
    train(&mut unbroken, &first, 0..3);
    let second = first.detach().copy().set_requires_grad(true);
    let mut resumed = SparseAdam::builder([&second]).build().unwrap();
    resumed.load_state_dict(&copied(&unbroken.state_dict().unwrap())).unwrap();
    train(&mut unbroken, &first, 3..7);
    train(&mut resumed, &second, 3..7);
    assert!(first.equal(&second));
    assert_same(&unbroken.state_dict().unwrap(), &resumed.state_dict().unwrap(), "sparse");
}

#[test]
fn an_embedding_and_dense_layers_train_as_one() {
    let (table, dense) = (table(), params(2));
    let start = table.detach().copy();
    let sparse_opt = SparseAdam::builder([&table]).lr(0.1).build().unwrap();
    let mut opt = Joint::new(sparse_opt, AdamW::builder(&dense).lr(0.2).build().unwrap()).unwrap();
    assert_eq!((opt.lr(0), opt.lr(1), opt.momentum(0)), (Some(0.1), Some(0.2), Some(0.9)));
    opt.set_lr(0, 0.0).unwrap();
    for expected in [true, false] {
        set_grad(&table, &[1, 1], true);
        set_grads(&dense, 0);
        let before = dense[0].detach().copy();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        assert_eq!(table.equal(&start), expected);
        assert!(!dense[0].equal(&before));
        opt.set_lr(0, 0.1).unwrap();
    }
}

#[test]
fn low_precision_and_steps_in_backward_take_sparse_gradients() {
    for precision in [LowPrecision::Nearest, LowPrecision::StochasticRounding, LowPrecision::MasterCopy] {
        let low = table().detach().to_kind(Kind::BFloat16).set_requires_grad(true);
        let start = low.detach().copy();
        let mut opt = SparseAdam::builder([&low]).lr(0.1).low_precision(precision).build().unwrap();
        set_grad(&low, &[1, 3, 1], true);
        opt.step().unwrap();
        for row in 0..5 {
            assert_eq!(low.get(row).equal(&start.get(row)), row % 2 == 0, "{precision:?}, row {row}");
        }
    }
    let (inside, outside) = (table(), table());
    let mut opt = SparseAdam::builder([&inside]).lr(0.1).build_in_backward().unwrap();
    let mut plain = SparseAdam::builder([&outside]).lr(0.1).build().unwrap();
    for _ in 0..2 {
        let taken = Tensor::embedding(&inside, &Tensor::from_slice(&[1i64, 2]), -1, false, true);
        (&taken * (taken.detach() * 3.0).cos()).sum(Kind::Double).backward();
        assert!(!inside.grad().defined(), "freed in backward");
        set_grad(&outside, &[1, 2], true);
        opt.step().unwrap();
        plain.step().unwrap();
        plain.zero_grad().unwrap();
    }
    assert!(inside.equal(&outside));
}
