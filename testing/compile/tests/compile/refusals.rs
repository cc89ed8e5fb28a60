//! Steps that cannot be compiled: they run uncompiled, and an error names the operator and the caller's line.

use overdrive::core::Optimizer;
use overdrive::memory::checkpoint;
use overdrive::nn::{self as nn, sequential};
use overdrive::optim::AdamW;
use overdrive_compile as compile;
use overdrive_compile::{CompileError, LossResult, Options};
use tch::{Device, Kind, Tensor};

/// Runs a loss three times, and returns why it is not compiled: the error of the run after the one that was recorded.
fn why(mut f: impl FnMut(&nn::Sequential, &[Tensor]) -> LossResult) -> CompileError {
    let _alone = crate::alone();
    let model = sequential![nn::Linear::new(4, 1).unwrap()];
    let mut loss_of = compile::loss(&model, |batch| f(&model, batch));
    loss_of = loss_of.options(Options { strict: true, verbose: false, ..Options::default() });
    let batch = || [Tensor::ones([3, 4], (Kind::Float, Device::Cpu))];
    let found = (0..3).find_map(|_| loss_of.run(&batch()).err());
    found.expect("the step should be refused")
}

/// Checks that the error names this file and a line near the operator.
fn is_named(error: &CompileError, operator: &str) {
    let text = error.to_string();
    assert!(text.contains(operator), "{text} does not name {operator}");
    assert!(text.contains("refusals.rs:"), "{text} does not name the line");
}

#[test]
fn a_number_that_is_read() {
    let error = why(|model, batch| {
        let loss = model.forward(&batch[0])?.mean(Kind::Float);
        if loss.double_value(&[]) > 1e9 {
            return Err("too large".into());
        }
        Ok(loss)
    });
    assert!(matches!(error, CompileError::NotRecordable { .. }), "{error:?}");
    is_named(&error, "aten::_local_scalar_dense");
}

#[test]
fn a_shape_that_depends_on_values() {
    let error = why(|model, batch| {
        let y = model.forward(&batch[0])?;
        Ok(y.masked_select(&y.gt(-1e9)).mean(Kind::Float))
    });
    is_named(&error, "aten::masked_select");
}

/// Compiled code would draw other numbers when it recomputes the function.
#[test]
fn a_checkpointed_function_that_draws() {
    let error = why(|model, batch| {
        let y = checkpoint(|[y]| y.f_dropout(0.5, true)?.f_sin(), [&model.forward(&batch[0])?])?;
        Ok(y.mean(Kind::Float))
    });
    assert!(error.to_string().contains("draws after the state of a generator was set"), "{error}");
}

/// Compiled code would leave no gradients in the parameters, which the recorded steps do.
#[test]
fn a_backward_pass_within_the_closure() {
    let error = why(|model, batch| {
        (model.forward(&batch[0])?.sum(Kind::Float) * 0.1).backward();
        Ok(model.forward(&batch[0])?.mean(Kind::Float))
    });
    assert!(error.to_string().contains("a backward pass within the closure"), "{error}");
}

/// libtorch's operators refuse probabilities above 1 and indices out of range; compiled code would not.
#[test]
fn operators_whose_checks_compiled_code_lacks() {
    let error = why(|model, batch| {
        let y = model.forward(&batch[0])?.sigmoid();
        Ok(y.binary_cross_entropy::<Tensor>(&y.ones_like(), None, tch::Reduction::Mean))
    });
    // The method is generic, so its own line is the caller's.
    assert!(error.to_string().contains("aten::binary_cross_entropy"), "{error}");
    let error = why(|model, batch| {
        let y = model.forward(&batch[0])?.view([1, 1, 3]);
        let (y, places) = (y.unsqueeze(-1), Tensor::zeros([1, 1, 3, 1], (Kind::Int64, Device::Cpu)));
        Ok(y.max_unpool2d(&places, [3, 1]).mean(Kind::Float))
    });
    is_named(&error, "aten::max_unpool2d");
    let error = why(|model, batch| {
        let [places, bags] = [3, 1].map(|count| Tensor::zeros([count], (Kind::Int64, Device::Cpu)));
        let rows = model.forward(&batch[0])?;
        let sums = Tensor::f_embedding_bag::<Tensor>(&rows, &places, &bags, false, 0, false, None, false)?;
        Ok(sums.0.mean(Kind::Float))
    });
    assert!(error.to_string().contains("aten::_embedding_bag"), "{error}");
    let error = why(|model, batch| {
        let y = model.forward(&batch[0])?;
        Ok(y.masked_scatter(&y.gt(0.0), &y.detach()).mean(Kind::Float))
    });
    is_named(&error, "aten::masked_scatter");
    let error = why(|model, batch| {
        let y = model.forward(&batch[0])?;
        let matrix = Tensor::eye(3, (Kind::Float, Device::Cpu)) * y.mean(Kind::Float).exp();
        Ok(matrix.inverse().mean(Kind::Float))
    });
    is_named(&error, "aten::_linalg_check_errors");
}

/// Its learning rate would be compiled in, and so never change.
#[test]
fn a_second_optimizer_that_steps_before_the_update() {
    let _alone = crate::alone();
    let (model, head) = (nn::Linear::new(4, 4).unwrap(), nn::Linear::new(4, 1).unwrap());
    let mut opt = AdamW::builder(&model).fused(true).build().unwrap();
    let mut other = AdamW::builder(&head).fused(true).build().unwrap();
    let mut step = compile::step(&model, |batch| Ok(head.forward(&model.forward(&batch[0])?)?.mean(Kind::Float)))
        .before_update(move |_| {
            other.step()?;
            Ok(other.zero_grad()?)
        })
        .options(Options { strict: true, verbose: false, ..Options::default() });
    let batch = || [Tensor::ones([3, 4], (Kind::Float, Device::Cpu))];
    let error = (0..4).find_map(|_| step.run(&mut opt, &batch()).err()).expect("the step should be refused");
    assert!(error.to_string().contains("no parameter of the optimizer"), "{error}");
}

#[test]
fn a_tensor_made_of_host_data() {
    let error = why(|model, batch| Ok((model.forward(&batch[0])? * Tensor::from_slice(&[2.0f32])).mean(Kind::Float)));
    is_named(&error, "filled within the step");
}

#[test]
fn a_number_that_changes() {
    let mut count = 0.0;
    let error = why(move |model, batch| {
        count += 1.0;
        Ok((model.forward(&batch[0])? * count).mean(Kind::Float))
    });
    assert!(matches!(error, CompileError::Changes { .. }), "{error:?}");
    is_named(&error, "aten::mul");
}

#[test]
fn a_branch_that_changes() {
    let mut count = 0;
    let error = why(move |model, batch| {
        count += 1;
        let y = model.forward(&batch[0])?;
        Ok(if count == 1 { y.relu() } else { y.sigmoid() }.mean(Kind::Float))
    });
    is_named(&error, "aten::sigmoid ran where aten::relu had run");
}

#[test]
fn a_tensor_from_outside_that_is_another_each_time() {
    let error = why(|model, batch| {
        let x = crate::outside();
        Ok((model.forward(&batch[0])? * x).mean(Kind::Float))
    });
    assert!(error.to_string().contains("neither in the batch nor the same object"), "{error}");
}

#[test]
fn two_views_of_one_memory_that_is_written() {
    let memory = Tensor::ones([8], (Kind::Float, Device::Cpu));
    let (mut left, all) = (memory.narrow(0, 0, 4), memory.narrow(0, 0, 8));
    let error = why(move |model, batch| {
        let _ = left.f_add_scalar_(1.0).unwrap();
        Ok(model.forward(&batch[0])?.mean(Kind::Float) + all.sum(Kind::Float))
    });
    assert!(error.to_string().contains("share memory"), "{error}");
    // No operator is to blame, so no line is named.
    assert!(matches!(error, CompileError::NotRecordable { caller: None, .. }), "{error}");
}

#[test]
fn a_refused_step_still_runs_and_says_why_once() {
    let _alone = crate::alone();
    let model = sequential![nn::Linear::new(4, 1).unwrap()];
    let mut loss_of = compile::loss(&model, |batch| {
        let loss = model.forward(&batch[0])?.mean(Kind::Float);
        let _ = loss.double_value(&[]);
        Ok(loss)
    });
    loss_of = loss_of.options(Options { verbose: false, ..Options::default() });
    let x = [Tensor::ones([3, 4], (Kind::Float, Device::Cpu))];
    let expected = model.forward(&x[0]).unwrap().mean(Kind::Float);
    for _ in 0..4 {
        assert_eq!(loss_of.run(&x).unwrap(), expected);
    }
    assert!(loss_of.why_eager().unwrap().contains("_local_scalar_dense"));
}
