//! Strict mode: a step that is not compiled as a whole is an error.

use std::cell::Cell;

use overdrive::core::{Module, Optimizer};
use overdrive::nn;
use overdrive::optim::{AdamW, Joint, Lookahead, Sgd};
use overdrive_compile as compile;
use overdrive_compile::{CompileError, LossResult, Options};
use tch::{Device, Kind, Tensor};

use crate::beside::{follows, strict};
use crate::losses::{batch, mlp};

fn values(model: &impl Module) -> Vec<Tensor> {
    model.named_parameters().into_iter().map(|it| it.tensor().detach().copy()).collect()
}

/// A caller that passes a batch again after an error trains on it once.
#[test]
fn an_error_comes_before_a_step_changes_anything_and_stays() {
    let _alone = crate::alone();
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let calls = Cell::new(0);
    let mut step = compile::step(&model, |batch| {
        calls.set(calls.get() + 1);
        let loss = model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]);
        if loss.double_value(&[]).is_nan() { Err("not a number".into()) } else { Ok(loss) }
    })
    .options(Options { verbose: false, ..strict() });
    let mut kinds = Vec::new();
    for number in 0..6 {
        let before = values(&model);
        let made = step.run(&mut opt, &batch(number));
        assert_eq!(values(&model) == before, made.is_err(), "step {number}");
        kinds.extend(made.err().map(|error| {
            assert!(error.to_string().contains("_local_scalar_dense"), "{error}");
            matches!(error, CompileError::NotRecordable { .. })
        }));
    }
    // The first step ran, and the one that was recorded.
    assert_eq!((kinds, calls.get()), (vec![true, false, false, false], 2));
}

/// Every k-th step of Lookahead does more than the others. A compiled step would not do that.
#[test]
fn an_optimizer_whose_steps_differ_is_not_half_compiled_unsaid() {
    let Some(_alone) = crate::compiling() else { return };
    let lookahead = |model: &nn::Sequential| Lookahead::new(AdamW::builder(model).build().unwrap(), 3, 0.5).unwrap();
    let followed =
        follows(mlp, lookahead, |step| batch(step as i64), 10, Options { verbose: false, ..Options::default() });
    let why = followed.why_eager.expect("only the loss is compiled");
    assert!(why.contains("its steps are not all the same") && why.contains("compile::loss"), "{why}");

    let model = mlp();
    let mut opt = lookahead(&model);
    let loss = |batch: &[Tensor]| -> LossResult { Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])) };
    let before = values(&model);
    let error = compile::step(&model, loss).options(strict()).run(&mut opt, &batch(0)).unwrap_err();
    assert!(matches!(error, CompileError::OtherOptimizer) && values(&model) == before, "{error}");
}

#[test]
fn two_optimizers_that_are_joined_are_compiled() {
    let Some(_alone) = crate::compiling() else { return };
    let joint = |model: &nn::Sequential| {
        let mut first = model.named_parameters();
        let second = first.split_off(2);
        let sgd = Sgd::builder(first).lr(0.1).momentum(0.9).fused(true).build().unwrap();
        Joint::new(sgd, AdamW::builder(second).lr(0.01).build().unwrap()).unwrap()
    };
    let followed = follows(mlp, joint, |step| batch(step as i64), 12, strict());
    assert_eq!((followed.calls, followed.why_eager), (3, None));
}

/// The groups of the second optimizer come after those of the first. So a group that is added to the first one is
/// numbered after them.
#[test]
fn a_joint_optimizer_tells_its_groups_as_long_as_they_are_in_the_order_of_the_parameters() {
    let weights = || [Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true)];
    let adamw = || AdamW::builder(weights()).build().unwrap();
    let mut opt = Joint::new(adamw(), adamw()).unwrap();
    let before = opt.revision();
    assert_eq!(opt.group_lens(), Some(vec![1, 1]));
    opt.optimizers_mut().0.add_param_group(AdamW::group(weights())).unwrap();
    assert_eq!((opt.group_lens(), opt.num_groups()), (None, 3));
    assert!(opt.revision() > before);
}
