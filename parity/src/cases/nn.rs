//! Layers and their initial values, compared with PyTorch's.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use overdrive_nn::init::{self, Fan, Nonlinearity};
use overdrive_nn::*;
use serde::Deserialize;
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

type Layer = Box<dyn Forward>;

/// What Python has written of a layer.
#[derive(Deserialize)]
pub(super) struct Theirs {
    /// Its text, as `print` shows it.
    text: String,
    /// The names of its state, in order.
    names: Vec<String>,
}

fn boxed(layer: impl Forward + 'static) -> Layer {
    Box::new(layer)
}

/// A new layer of this name, with new random weights.
fn layer(name: &str) -> Result<Layer> {
    Ok(match name {
        "linear" => boxed(Linear::new(5, 3)?),
        "linear_3d" => boxed(Linear::builder(5, 3).bias(false).build()?),
        "conv1d" => boxed(Conv1d::builder(4, 6, 3).stride(2).padding(1).groups(2).build()?),
        "conv2d" => boxed(Conv2d::new(3, 8, 3)?),
        "conv2d_options" => {
            let conv = Conv2d::builder(4, 8, [3, 5]).stride([2, 1]).padding([1, 2]).dilation(2);
            boxed(conv.groups(4).bias(false).build()?)
        }
        "conv2d_same" => boxed(Conv2d::builder(3, 4, 4).padding_same().dilation(2).build()?),
        "conv2d_reflect" => boxed(Conv2d::builder(3, 4, 3).padding(1).padding_mode(PaddingMode::Reflect).build()?),
        "conv2d_replicate" => {
            boxed(Conv2d::builder(3, 4, 3).padding([1, 2]).padding_mode(PaddingMode::Replicate).build()?)
        }
        "conv2d_circular_same" => {
            boxed(Conv2d::builder(3, 4, 4).padding_same().padding_mode(PaddingMode::Circular).build()?)
        }
        "conv3d" => boxed(Conv3d::builder(2, 4, 3).padding(1).build()?),
        "conv_transpose1d" => boxed(ConvTranspose1d::builder(4, 6, 3).stride(2).output_padding(1).build()?),
        "conv_transpose2d" => {
            boxed(ConvTranspose2d::builder(4, 6, 3).stride(2).padding(1).groups(2).bias(false).build()?)
        }
        "conv_transpose3d" => boxed(ConvTranspose3d::builder(2, 3, 2).dilation(2).build()?),
        "batch_norm1d" => boxed(BatchNorm1d::new(6)?),
        "batch_norm1d_3d" => boxed(BatchNorm1d::builder(6).momentum(None).build()?),
        "batch_norm2d" => boxed(BatchNorm2d::builder(4).eps(1e-3).momentum(0.2).build()?),
        "batch_norm2d_not_affine" => boxed(BatchNorm2d::builder(4).affine(false).build()?),
        "batch_norm2d_not_tracked" => boxed(BatchNorm2d::builder(4).track_running_stats(false).build()?),
        "batch_norm3d" => boxed(BatchNorm3d::new(2)?),
        "layer_norm" => boxed(LayerNorm::new(12)?),
        "layer_norm_2d" => boxed(LayerNorm::builder([4, 12]).eps(1e-6).build()?),
        "layer_norm_not_affine" => boxed(LayerNorm::builder(12).elementwise_affine(false).build()?),
        "layer_norm_without_bias" => boxed(LayerNorm::builder(12).bias(false).build()?),
        "rms_norm" => boxed(RmsNorm::new(12)?),
        "rms_norm_options" => boxed(RmsNorm::builder([4, 12]).eps(1e-6).elementwise_affine(false).build()?),
        "group_norm" => boxed(GroupNorm::new(3, 6)?),
        "group_norm_not_affine" => boxed(GroupNorm::builder(2, 6).eps(1e-3).affine(false).build()?),
        "dropout" => boxed(Dropout::new(0.3)?),
        "dropout1d" | "dropout1d_without_batch" => boxed(Dropout1d::new(0.3)?),
        "dropout2d" => boxed(Dropout2d::new(0.3)?),
        "dropout3d" | "dropout3d_without_batch" => boxed(Dropout3d::new(0.3)?),
        "alpha_dropout" => boxed(AlphaDropout::new(0.3)?),
        "relu" => boxed(Relu),
        "relu6" => boxed(Relu6),
        "gelu" => boxed(Gelu),
        "gelu_tanh" => boxed(GeluTanh),
        "silu" => boxed(Silu),
        "mish" => boxed(Mish),
        "tanh" => boxed(Tanh),
        "sigmoid" => boxed(Sigmoid),
        "log_sigmoid" => boxed(LogSigmoid),
        "selu" => boxed(Selu),
        "hardswish" => boxed(Hardswish),
        "hardsigmoid" => boxed(Hardsigmoid),
        "softplus" => boxed(Softplus),
        "identity" => boxed(Identity),
        "leaky_relu" => boxed(LeakyRelu(0.2)),
        "elu" => boxed(Elu(0.7)),
        "softmax" => boxed(Softmax(-1)),
        "log_softmax" => boxed(LogSoftmax(1)),
        "prelu" => boxed(Prelu::new(6, 0.25)?),
        "max_pool1d" => boxed(MaxPool1d::new(3).stride(2).padding(1)),
        "max_pool2d" => boxed(MaxPool2d::new([2, 3]).dilation(2).ceil_mode(true)),
        "max_pool3d" => boxed(MaxPool3d::new(2)),
        "avg_pool1d" => boxed(AvgPool1d::new(3).stride(2).padding(1)),
        "avg_pool2d" => boxed(AvgPool2d::new(3).stride(2).padding(1).count_include_pad(false)),
        "avg_pool3d" => boxed(AvgPool3d::new(2).ceil_mode(true)),
        "adaptive_avg_pool1d" => boxed(AdaptiveAvgPool1d::new(4)),
        "adaptive_avg_pool2d" => boxed(AdaptiveAvgPool2d::new([3, 2])),
        "adaptive_avg_pool3d" => boxed(AdaptiveAvgPool3d::new(2)),
        "flatten" => boxed(Flatten::new()),
        "flatten_dims" => boxed(Flatten::dims(0, 1)),
        "sequential" => boxed(sequential![Linear::new(5, 4)?, Relu, Dropout::new(0.5)?, Linear::new(4, 2)?]),
        _ => anyhow::bail!("there is no layer {name}"),
    })
}

/// Compares the text of a new module and the names of its state with Python's, and adds its initial values to `found`.
pub(super) fn form<M: Module>(found: &mut Found, name: &str, module: &M, theirs: &Theirs) -> Result<()> {
    ensure!(repr(module) == theirs.text, "{name} is printed as\n{}\nand not\n{}", repr(module), theirs.text);
    let names: Vec<String> = module_entries(module).into_iter().map(|(name, _)| name).collect();
    ensure!(names == theirs.names, "{name} has {names:?} and not {:?}", theirs.names);
    for (key, value) in module_entries(module) {
        found.insert(format!("{name}.init.{key}"), &value);
    }
    Ok(())
}

/// A sum with a different weight for each element, so that a gradient in the wrong place is found.
pub(super) fn scored(y: &Tensor) -> Tensor {
    let count = y.numel() as i64;
    let weights = Tensor::arange(count, (y.kind(), Device::Cpu)).reshape(y.size()) / count as f64;
    (y * weights).sum(y.kind())
}

pub(super) fn zero_grad<M: Module>(module: &M) {
    for parameter in module.named_parameters() {
        parameter.tensor().shallow_clone().zero_grad();
    }
}

pub(super) fn grads<M: Module>(found: &mut Found, name: &str, module: &M) {
    for parameter in module.named_parameters() {
        let grad = parameter.tensor().grad();
        if grad.defined() {
            found.insert(format!("{name}.grad.{}", parameter.name().unwrap_or_default()), &grad);
        }
    }
}

/// Forward and backward passes, first in training mode, then in evaluation mode.
fn passes(found: &mut Found, name: &str, module: &Layer, x: &Tensor) -> Result<()> {
    for mode in ["train", "eval"] {
        module.set_training(mode == "train");
        zero_grad(module);
        let own = x.copy().set_requires_grad(true);
        tch::manual_seed(11);
        let y = module.as_ref().forward(&own)?;
        found.insert(format!("{name}.{mode}"), &y);
        if y.requires_grad() {
            scored(&y).backward();
            found.insert(format!("{name}.{mode}.grad"), &own.grad());
        }
        grads(found, &format!("{name}.{mode}"), module);
    }
    for (key, buffer) in module.named_buffers() {
        found.insert(format!("{name}.after.{key}"), &buffer);
    }
    Ok(())
}

pub fn layers(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("layers")? {
        let name = name.as_str();
        tch::manual_seed(7);
        let module = layer(name)?;
        form(&mut found, name, &module, &theirs)?;
        let x = given.tensor(&format!("{name}.x")).with_context(|| name.to_owned())?;
        passes(&mut found, name, &module, &x)?;
    }
    Ok(found)
}

pub fn init(_: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let shapes: [&[i64]; 4] = [&[7, 5], &[3, 8], &[4, 2, 3, 3], &[6, 2, 3]];
    for (number, shape) in shapes.into_iter().enumerate() {
        let mut draw = |name: &str, function: &dyn Fn(&Tensor) -> Result<(), NnError>| -> Result<()> {
            tch::manual_seed(5);
            let tensor = Tensor::empty(shape, (Kind::Float, Device::Cpu));
            function(&tensor)?;
            found.insert(format!("{name}.{number}"), &tensor);
            Ok(())
        };
        draw("uniform", &|w| init::uniform_(w, -0.3, 0.7))?;
        draw("normal", &|w| init::normal_(w, 0.1, 2.0))?;
        draw("trunc_normal", &|w| init::trunc_normal_(w, 0.0, 0.02, -2.0, 2.0))?;
        draw("trunc_normal_shifted", &|w| init::trunc_normal_(w, 0.5, 1.0, -0.2, 0.9))?;
        draw("constant", &|w| init::constant_(w, 0.3))?;
        draw("ones", &init::ones_)?;
        draw("zeros", &init::zeros_)?;
        draw("xavier_uniform", &|w| init::xavier_uniform_(w, init::calculate_gain(Nonlinearity::Tanh, 0.0)))?;
        draw("xavier_normal", &|w| init::xavier_normal_(w, 1.0))?;
        draw("kaiming_uniform", &|w| init::kaiming_uniform_(w, 0.2, Fan::In, Nonlinearity::LeakyRelu))?;
        draw("kaiming_normal", &|w| init::kaiming_normal_(w, 0.0, Fan::Out, Nonlinearity::Relu))?;
        draw("orthogonal", &|w| init::orthogonal_(w, 1.5))?;
        if shape.len() == 2 {
            draw("eye", &init::eye_)?;
            draw("sparse", &|w| init::sparse_(w, 0.3, 0.01))?;
        } else {
            draw("dirac", &|w| init::dirac_(w, 2))?;
        }
    }
    Ok(found)
}
