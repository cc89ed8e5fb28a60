//! Options and parameters that optimizers refuse, and the options that schedules change.

use overdrive_core::{Optimizer, OptimizerError};
use overdrive_optim::{
    Adadelta, Adafactor, AdafactorForm, Adagrad, Adam, AdamW, AdamWScheduleFree, Adamax, Asgd, Lamb, Lars, Lion, Muon,
    NAdam, Prodigy, RAdam, RmsProp, Rprop, Sgd, SgdScheduleFree, SparseAdam,
};
use tch::{Kind, Tensor};

use crate::{CPU, DOUBLE};

#[test]
fn options_and_parameters_are_checked() {
    let param = || Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let option = |result: Result<AdamW, OptimizerError>| match result {
        Err(OptimizerError::InvalidOption { option, .. }) => option,
        other => panic!("{other:?}"),
    };
    assert_eq!(option(AdamW::builder(vec![param()]).lr(-1.0).build()), "lr");
    assert_eq!(option(AdamW::builder(vec![param()]).betas(1.0, 0.9).build()), "beta1");
    assert_eq!(option(AdamW::builder(vec![param()]).betas(0.9, f64::NAN).build()), "beta2");
    assert_eq!(option(AdamW::builder(vec![param()]).eps(-1e-8).build()), "eps");
    assert!(Sgd::builder(vec![param()]).nesterov(true).build().is_err());
    assert!(Sgd::builder(vec![param()]).nesterov(true).momentum(0.9).dampening(0.1).build().is_err());
    assert!(matches!(Sgd::builder(Vec::<Tensor>::new()).build(), Err(OptimizerError::NoParameters)));

    let refused = |params: Vec<Tensor>| Sgd::builder(params).build().unwrap_err().to_string();
    assert!(
        refused(vec![param(), Tensor::ones([2], (Kind::Int64, CPU))])
            .starts_with("parameter number 1: its dtype is Int64")
    );
    assert!(refused(vec![param() * 2.0]).contains("not a leaf"));
    assert!(refused(vec![Tensor::new()]).contains("undefined"));
    let base = Tensor::ones([4, 2], DOUBLE);
    assert!(refused(vec![base.select(1, 0).set_requires_grad(true)]).contains("gaps or overlaps in memory"));
    assert!(refused(vec![param().detach().select(0, 0).expand([8], false)]).contains("gaps or overlaps in memory"));
    let sparse = base.to_sparse_sparse_dim(2).set_requires_grad(true);
    assert!(refused(vec![sparse]).contains("sparse"));
    let transposed = base.transpose(0, 1).set_requires_grad(true);
    assert!(Sgd::builder(vec![transposed, Tensor::zeros([0, 3], DOUBLE)]).build().is_ok());
    let twice = param();
    assert!(refused(vec![twice.shallow_clone(), twice.shallow_clone()]).contains("given twice"));
    let across = Sgd::builder([&twice]).add_param_group(Sgd::group([&twice])).build();
    assert!(across.unwrap_err().to_string().contains("given twice"));
}

#[test]
fn each_algorithm_refuses_options_outside_their_range() {
    let param = || vec![Tensor::ones([2, 2], DOUBLE).set_requires_grad(true)];
    fn said<T>(result: Result<T, OptimizerError>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }
    let nan = f64::NAN;
    assert_eq!(said(Adam::builder(param()).lr(nan).build()), "lr is NaN, but should be a finite number of at least 0");
    assert!(said(AdamW::builder(param()).weight_decay(f64::INFINITY).build()).starts_with("weight_decay is inf"));
    assert!(said(RmsProp::builder(param()).alpha(1.0).build()).starts_with("alpha is 1"));
    assert!(said(Adagrad::builder(param()).lr_decay(-0.1).build()).starts_with("lr_decay is -0.1"));
    assert!(said(Adafactor::builder(param()).beta2_decay(0.1).build()).starts_with("beta2_decay is 0.1"));
    assert!(said(Adafactor::builder(param()).d(0.5).build()).starts_with("d is 0.5"));
    assert!(said(Muon::builder(param()).ns_steps(100).build()).starts_with("ns_steps is 100"));
    assert!(said(Lion::builder(param()).betas(0.9, 1.0).build()).starts_with("beta2 is 1"));
    assert!(said(Lamb::builder(param()).eps(nan).build()).starts_with("eps is NaN"));
    assert!(said(Lars::builder(param()).momentum(1.5).build()).starts_with("momentum is 1.5"));
    assert!(said(Adadelta::builder(param()).rho(1.1).build()).starts_with("rho is 1.1"));
    assert!(Adadelta::builder(param()).rho(1.0).build().is_ok(), "as in PyTorch");
    assert!(said(Adamax::builder(param()).betas(0.9, 1.0).build()).starts_with("beta2 is 1"));
    assert!(said(Asgd::builder(param()).lambd(-1.0).build()).starts_with("lambd is -1"));
    assert!(said(NAdam::builder(param()).momentum_decay(-0.1).build()).starts_with("momentum_decay is -0.1"));
    assert!(said(RAdam::builder(param()).betas(1.0, 0.9).build()).starts_with("beta1 is 1"));
    assert!(said(Rprop::builder(param()).etas(0.0, 1.2).build()).starts_with("etaminus is 0"));
    assert!(said(Rprop::builder(param()).etas(0.5, 1.0).build()).starts_with("etaplus is 1"));
    assert!(said(Rprop::builder(param()).step_sizes(0.1, 0.01).build()).starts_with("step_size_max is 0.01"));
    assert!(said(SparseAdam::builder(param()).eps(0.0).build()).starts_with("eps is 0"));
    assert!(said(SgdScheduleFree::builder(param()).momentum(0.0).build()).starts_with("momentum is 0"));
    assert!(said(AdamWScheduleFree::builder(param()).betas(1.0, 0.9).build()).starts_with("beta1 is 1"));
    assert!(said(AdamWScheduleFree::builder(param()).warmup_steps(-1).build()).starts_with("warmup_steps is -1"));
    assert!(said(SgdScheduleFree::builder(param()).r(nan).build()).starts_with("r is NaN"));
    assert!(said(Prodigy::builder(param()).d0(0.0).build()).starts_with("d0 is 0"));
    assert!(said(Prodigy::builder(param()).beta3(1.0).build()).starts_with("beta3 is 1"));
    assert!(said(Prodigy::builder(param()).growth_rate(0.9).build()).starts_with("growth_rate is 0.9"));
    assert!(said(Prodigy::builder(param()).slice_p(0).build()).starts_with("slice_p is 0"));
    // All groups are checked, not only the last one.
    assert!(
        said(Sgd::builder(param()).add_param_group(Sgd::group(param()).lr(-1.0)).lr(1.0).build())
            .starts_with("lr is -1")
    );
    let vector = Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let refused = said(Muon::builder(param()).add_param_group(Muon::group([vector])).build());
    assert_eq!(refused, "parameter number 1: its shape is [2], but Muon is for matrices: use AdamW for it");
    let twice = param();
    let across = said(
        Sgd::builder(param()).add_param_group(Sgd::group(&twice)).add_param_group(Sgd::group([&twice[0]])).build(),
    );
    assert!(
        across.contains("number 2: it is given twice, as parameter 0 of group 1 and as parameter 0 of group 2"),
        "{across}"
    );
}

#[test]
fn momentum_is_the_option_that_a_cyclic_schedule_changes() {
    let param = || vec![Tensor::ones([2, 2], DOUBLE).set_requires_grad(true)];
    let mut adam =
        Adam::builder(param()).betas(0.8, 0.99).add_param_group(Adam::group(param()).betas(0.0, 0.99)).build().unwrap();
    assert_eq!((adam.momentum(0), adam.momentum(1), adam.momentum(2)), (Some(0.8), None, None));
    adam.set_momentum(0, 0.7).unwrap();
    assert_eq!(adam.momentum(0), Some(0.7));
    assert!(matches!(adam.set_momentum(1, 0.7), Err(OptimizerError::NoMomentum)));
    assert!(matches!(adam.set_momentum(2, 0.7), Err(OptimizerError::NoSuchGroup { group: 2, groups: 2 })));
    assert!(matches!(adam.set_momentum(0, 1.0), Err(OptimizerError::InvalidOption { option: "momentum", .. })));
    assert_eq!(Sgd::builder(param()).build().unwrap().momentum(0), None);

    // Down to 0 and up again, before and after the first step.
    for fused in [true, false] {
        let param = param();
        let mut sgd = Sgd::builder(&param).lr(0.5).momentum(0.9).fused(fused).build().unwrap();
        sgd.set_momentum(0, 0.0).unwrap();
        param[0].sum(Kind::Double).backward();
        sgd.step().unwrap();
        assert_eq!(param[0].double_value(&[0, 0]), 0.5);
        sgd.set_momentum(0, 0.5).unwrap();
        sgd.step().unwrap();
        sgd.step().unwrap();
        assert!(param[0].double_value(&[0, 0]) < -0.5, "momentum accumulates");
    }
    assert_eq!(Adagrad::builder(param()).build().unwrap().momentum(0), None);
}

#[test]
fn a_relative_step_takes_no_learning_rate() {
    let weight = Tensor::ones([3, 2], (Kind::Float, CPU)).set_requires_grad(true);
    let form = AdafactorForm::T5 { warmup_init: false };
    let mut opt = Adafactor::builder([&weight]).form(form).build().unwrap();
    assert_eq!(opt.lr(0), None);
    let error = opt.set_lr(0, 0.1).unwrap_err().to_string();
    assert!(error.starts_with("a learning rate cannot be used with this optimizer: T5's relative step"), "{error}");
    let mut other = Adafactor::builder([&weight]).lr(0.5).build().unwrap();
    other.set_lr(0, 0.1).unwrap();
    assert_eq!(other.lr(0), Some(0.1));
}
