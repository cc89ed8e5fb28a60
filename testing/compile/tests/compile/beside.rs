//! A model that trains compiled, beside one that does not.

use std::cell::Cell;

use overdrive::core::{Module, Optimizer};
use overdrive::nn::Forward;
use overdrive_compile as compile;
use overdrive_compile::{LossResult, Options};
use tch::Tensor;

/// What a test learns of a compiled step that it has run.
pub struct Followed {
    /// How often its closure was called.
    pub calls: usize,
    pub why_eager: Option<String>,
}

/// An uncompiled step is an error.
pub fn strict() -> Options {
    Options { strict: true, ..Options::default() }
}

/// Trains two models with the same initial values, one of them compiled, and compares their losses to 1e-5. `batch`
/// makes the batch of a step from its number.
pub fn follows<M: Module + Forward, O: Optimizer>(
    model: impl Fn() -> M,
    optimizer: impl Fn(&M) -> O,
    batch: impl Fn(usize) -> [Tensor; 2],
    steps: usize,
    options: Options,
) -> Followed {
    follows_changes(model, optimizer, |_, _, _| (), batch, steps, options)
}

/// As [`follows`], and calls `change` with each model and its optimizer before each step.
pub fn follows_changes<M: Module + Forward, O: Optimizer>(
    model: impl Fn() -> M,
    optimizer: impl Fn(&M) -> O,
    change: impl Fn(&M, &mut O, usize),
    batch: impl Fn(usize) -> [Tensor; 2],
    steps: usize,
    options: Options,
) -> Followed {
    let make = || {
        tch::manual_seed(1);
        model()
    };
    let (plain, compiled) = (make(), make());
    let (mut plain_opt, mut opt) = (optimizer(&plain), optimizer(&compiled));
    let calls = Cell::new(0);
    let mut step = compile::step(&compiled, |batch| {
        calls.set(calls.get() + 1);
        loss(&compiled, batch)
    })
    .options(options);
    for number in 0..steps {
        change(&plain, &mut plain_opt, number);
        change(&compiled, &mut opt, number);
        tch::manual_seed(1000 + number as i64);
        let batch = batch(number);
        tch::manual_seed(number as i64);
        let expected = loss(&plain, &batch).unwrap();
        expected.backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        tch::manual_seed(number as i64);
        let found = step.run(&mut opt, &batch).unwrap().double_value(&[]);
        let expected = expected.double_value(&[]);
        let is_close = (found - expected).abs() <= 1e-5 * expected.abs();
        assert!(is_close, "step {number}: {found}, but {expected} uncompiled");
    }
    for ((name, one), (_, other)) in plain.named_buffers().iter().zip(compiled.named_buffers()) {
        assert!(one.allclose(&other, 1e-4, 1e-5, false), "the buffer {name}");
    }
    Followed { calls: calls.get(), why_eager: step.why_eager().map(str::to_owned) }
}

fn loss(model: &impl Forward, batch: &[Tensor]) -> LossResult {
    Ok(model.forward(&batch[0])?.flatten(0, -2).cross_entropy_for_logits(&batch[1].flatten(0, -1)))
}
