//! Whole steps of models, compiled, beside the same steps uncompiled.

use overdrive::core::{Module, Optimizer};
use overdrive::nn::models::{Gpt2LmHeadModel, resnet18};
use overdrive::nn::{self as nn, Forward, sequential};
use overdrive::optim::{AdamW, Sgd};
use overdrive_compile as compile;
use overdrive_compile::Options;
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

/// Trains two models of the same initial values, one uncompiled; each loss has to be the same to 1e-5.
fn follows<M: Module + Forward, O: Optimizer>(
    model: impl Fn() -> M,
    optimizer: impl Fn(&M) -> O,
    batch: impl Fn() -> [Tensor; 2],
    steps: i64,
) {
    let make = || {
        tch::manual_seed(1);
        model()
    };
    let (plain, compiled) = (make(), make());
    let (mut plain_opt, mut opt) = (optimizer(&plain), optimizer(&compiled));
    let mut step = compile::step(&compiled, |batch| {
        Ok(compiled.forward(&batch[0])?.flatten(0, -2).cross_entropy_for_logits(&batch[1].flatten(0, -1)))
    })
    .options(Options { strict: true, ..Options::default() });
    for number in 0..steps {
        tch::manual_seed(1000 + number);
        let [x, y] = batch();
        tch::manual_seed(number);
        let loss = plain.forward(&x).unwrap().flatten(0, -2).cross_entropy_for_logits(&y.flatten(0, -1));
        loss.backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        tch::manual_seed(number);
        let found = step.run(&mut opt, &[x, y]).unwrap().double_value(&[]);
        let expected = loss.double_value(&[]);
        assert!((found - expected).abs() <= 1e-5 * expected.abs(), "step {number}: {found}, but {expected} uncompiled");
    }
    assert_eq!(step.why_eager(), None);
    for ((name, one), (_, other)) in plain.named_buffers().iter().zip(compiled.named_buffers()) {
        assert!(one.allclose(&other, 1e-4, 1e-5, false), "the buffer {name}");
    }
}

#[test]
fn a_network_with_a_frozen_convolution_batch_norm_and_dropout() {
    let Some(_alone) = crate::compiling() else { return };
    let model = || {
        let first = nn::Conv2d::new(1, 8, 3).unwrap();
        first.requires_grad_(false).unwrap();
        sequential![
            first,
            nn::BatchNorm2d::new(8).unwrap(),
            nn::Relu,
            nn::MaxPool2d::new(2),
            nn::Conv2d::new(8, 16, 3).unwrap(),
            nn::Relu,
            nn::MaxPool2d::new(2),
            nn::Flatten::new(),
            nn::Dropout::new(0.2).unwrap(),
            nn::Linear::new(400, 10).unwrap(),
        ]
    };
    let trained = |model: &nn::Sequential| {
        let params = model.named_parameters().into_iter().filter(|param| param.tensor().requires_grad());
        AdamW::builder(params.collect::<Vec<_>>()).build().unwrap()
    };
    let batch = || [Tensor::randn([16, 1, 28, 28], (Kind::Float, CPU)), Tensor::randint(10, [16], (Kind::Int64, CPU))];
    follows(model, trained, batch, 100);
}

#[test]
fn a_gpt_with_tied_weights_and_dropout() {
    let Some(_alone) = crate::compiling() else { return };
    let model = || {
        let builder = Gpt2LmHeadModel::builder().vocab_size(64).n_positions(16).n_embd(32).n_layer(2).n_head(2);
        builder.build().unwrap()
    };
    let batch = || {
        let tokens = Tensor::randint(64, [4, 17], (Kind::Int64, CPU));
        [tokens.narrow(1, 0, 16).contiguous(), tokens.narrow(1, 1, 16).contiguous()]
    };
    follows(model, |model| AdamW::builder(model).build().unwrap(), batch, 100);
}

#[test]
fn a_resnet18_with_sgd_and_momentum() {
    let Some(_alone) = crate::compiling() else { return };
    // In float64: normalization over a few values makes differences of the last bit large.
    let model = || {
        let model = resnet18().unwrap();
        model.to(Kind::Double).unwrap();
        model
    };
    let batch = || [Tensor::randn([4, 3, 32, 32], (Kind::Double, CPU)), Tensor::randint(1000, [4], (Kind::Int64, CPU))];
    let sgd = |model: &_| Sgd::builder(model).lr(1e-3).momentum(0.9).weight_decay(1e-4).build().unwrap();
    follows(model, sgd, batch, 10);
}
