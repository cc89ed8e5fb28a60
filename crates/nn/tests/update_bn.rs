//! Statistics of batch norm layers that are computed anew.

use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_nn::{
    BatchNorm, BatchNorm1d, BatchNorm2d, Dropout, Linear, Module, ModuleState, NnError, Visitor, update_bn,
};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

#[derive(Debug, Module)]
struct Net {
    linear: Linear,
    norm: BatchNorm1d,
    dropout: Dropout,
    /// Without running statistics.
    other: BatchNorm2d,
}

impl Net {
    fn new() -> Self {
        Self {
            linear: Linear::new(3, 2).unwrap(),
            norm: BatchNorm1d::builder(2).momentum(0.25).build().unwrap(),
            dropout: Dropout::new(0.5).unwrap(),
            other: BatchNorm2d::builder(2).track_running_stats(false).build().unwrap(),
        }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.dropout.forward(&self.norm.forward(&self.linear.forward(x)?)?)
    }

    /// As it was before: in evaluation mode, except for one layer.
    fn is_unchanged(&self) -> bool {
        let mut modes = Modes::default();
        self.visit(&mut modes);
        modes.0.iter().filter(|is_training| **is_training).count() == 1 && self.norm.momentum.get() == Some(0.25)
    }
}

/// Whether each layer is in training mode.
#[derive(Default)]
struct Modes(Vec<bool>);

impl<'a> Visitor<'a> for Modes {
    fn parameter(&mut self, _: &str, _: &Tensor) {}
    fn buffer(&mut self, _: &str, _: &Tensor, _: bool) {}
    fn module(&mut self, _: &str, module: &'a dyn Module) {
        module.visit(self);
    }
    fn state(&mut self, state: &'a ModuleState) {
        self.0.push(state.is_training());
    }
}

fn mean_of<const N: usize>(layer: &BatchNorm<N>) -> Tensor {
    layer.running_mean.as_ref().unwrap().copy()
}

/// Evaluation mode, except for the dropout.
fn net() -> Net {
    let net = Net::new();
    net.eval();
    net.dropout.train();
    net
}

fn batches() -> Vec<Tensor> {
    (0..3).map(|index| Tensor::arange(12, CPU).reshape([4, 3]).sin() * f64::from(index + 1)).collect()
}

#[test]
fn the_statistics_are_the_mean_over_the_batches() {
    let net = net();
    let _ = tch::no_grad(|| net.norm.running_mean.as_ref().unwrap().shallow_clone().fill_(9.0));
    update_bn(&batches(), &net, |net, batch| net.forward(batch)).unwrap();
    let hidden: Vec<_> = batches().iter().map(|batch| net.linear.forward(batch).unwrap()).collect();
    let means = Tensor::stack(&hidden, 0).mean_dim([0, 1].as_slice(), false, Kind::Float);
    assert!(mean_of(&net.norm).allclose(&means, 1e-5, 1e-6, false), "{} {means}", mean_of(&net.norm));
    let variances: Vec<_> = hidden.iter().map(|it| it.var_dim(0, true, false)).collect();
    let variance = Tensor::stack(&variances, 0).mean_dim(0, false, Kind::Float);
    assert!(net.norm.running_var.as_ref().unwrap().allclose(&variance, 1e-5, 1e-6, false));
    assert_eq!(net.norm.num_batches_tracked.as_ref().unwrap().int64_value(&[]), 3);
    assert!(net.is_unchanged());
    assert!(!net.linear.weight.grad().defined() && !mean_of(&net.norm).requires_grad());
}

#[test]
fn errors_and_panics_restore_modes_and_momenta() {
    let net = net();
    let batches = || {
        batches().into_iter().map(Ok).chain([Err(NnError::InvalidShape {
            function: "the loader",
            expected: "a sample".to_owned(),
            shape: Vec::new(),
        })])
    };
    let error = update_bn(batches(), &net, |net, batch| net.forward(&batch?)).unwrap_err();
    assert!(matches!(error, NnError::InvalidShape { .. }) && net.is_unchanged());
    let panics = || update_bn(batches(), &net, |_, batch| batch.map(|_| panic!("planted")));
    assert!(catch_unwind(AssertUnwindSafe(panics)).is_err() && net.is_unchanged());
}

#[test]
fn a_model_without_batch_norm_is_left_alone() {
    let linear = Linear::new(3, 2).unwrap();
    let none = update_bn(&batches(), &linear, |_, _| -> Result<(), NnError> { panic!("no layer needs a batch") });
    none.unwrap();
}

#[test]
fn layers_whose_statistics_cannot_be_computed_anew_are_refused() {
    let store = tch::nn::VarStore::new(Device::Cpu);
    let norm = tch::nn::batch_norm1d(store.root() / "bn", 2, tch::nn::BatchNormConfig::default());
    let batches = [Tensor::ones([4, 2], CPU)];
    let error = update_bn(batches, &store, |_, _| -> Result<(), NnError> { panic!("it is refused before") });
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("update_bn: `model` is bn.running_mean, but has to be of a `BatchNorm`"), "{error}");
    assert_eq!(norm.running_mean, Tensor::zeros([2], CPU));
}
