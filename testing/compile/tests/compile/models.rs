//! Whole steps of models, compiled, beside the same steps uncompiled.

use overdrive::core::Module;
use overdrive::nn::models::{Gpt2LmHeadModel, resnet18};
use overdrive::nn::{self as nn, sequential};
use overdrive::optim::{AdamW, Sgd};
use tch::{Device, Kind, Tensor};

use crate::beside::{follows, strict};
use crate::losses::{batch, mlp};

const CPU: Device = Device::Cpu;

pub fn gpt() -> Gpt2LmHeadModel {
    Gpt2LmHeadModel::builder().vocab_size(64).n_positions(16).n_embd(32).n_layer(2).n_head(2).build().unwrap()
}

pub fn tokens(size: i64) -> [Tensor; 2] {
    let tokens = Tensor::randint(64, [size, 17], (Kind::Int64, CPU));
    [tokens.narrow(1, 0, 16).contiguous(), tokens.narrow(1, 1, 16).contiguous()]
}

#[test]
fn an_mlp_with_dropout() {
    let Some(_alone) = crate::compiling() else { return };
    let followed =
        follows(mlp, |model| AdamW::builder(model).build().unwrap(), |step| batch(step as i64), 100, strict());
    assert_eq!((followed.calls, followed.why_eager), (3, None));
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
    let batch = |_| [Tensor::randn([16, 1, 28, 28], (Kind::Float, CPU)), Tensor::randint(10, [16], (Kind::Int64, CPU))];
    follows(model, trained, batch, 100, strict());
}

#[test]
fn a_gpt_with_tied_weights_and_dropout() {
    let Some(_alone) = crate::compiling() else { return };
    follows(gpt, |model| AdamW::builder(model).build().unwrap(), |_| tokens(4), 100, strict());
}

#[test]
fn a_resnet18_with_sgd_and_momentum() {
    let Some(_alone) = crate::compiling() else { return };
    // In float64, because normalization over a few values enlarges differences in the last bit.
    let model = || {
        let model = resnet18().unwrap();
        model.to(Kind::Double).unwrap();
        model
    };
    let batch =
        |_| [Tensor::randn([4, 3, 32, 32], (Kind::Double, CPU)), Tensor::randint(1000, [4], (Kind::Int64, CPU))];
    let sgd = |model: &_| Sgd::builder(model).lr(1e-3).momentum(0.9).weight_decay(1e-4).build().unwrap();
    follows(model, sgd, batch, 10, strict());
}
