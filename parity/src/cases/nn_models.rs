//! torchvision's and Hugging Face's models.

use std::fmt::Debug;

use anyhow::{Result, ensure};
use overdrive_core::Entry;
use overdrive_nn::models::*;
use overdrive_nn::*;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::record::{Found, Given};

/// Of larger tensors, a digest is compared, as in Python.
const WHOLE: usize = 64;

/// A tensor itself if it is small, otherwise a sum over the bits of all elements, each weighted by its index.
fn digest(tensor: &Tensor) -> Tensor {
    let tensor = tensor.detach();
    if tensor.numel() <= WHOLE {
        return tensor;
    }
    let bits = tensor.contiguous().view_dtype(Kind::Int).flatten(0, -1).to_kind(Kind::Int64);
    let places = Tensor::arange(bits.numel() as i64, (Kind::Int64, Device::Cpu)).remainder(251) + 1;
    let total = (bits * places).sum(Kind::Int64).int64_value(&[]);
    Tensor::from_slice(&[total >> 32, total & 0xFFFF_FFFF])
}

/// Changes all parameters a little, so that none is 0 or 1 and every gradient matters.
fn draw<M: Module>(module: &M, seed: i64) {
    tch::manual_seed(seed);
    let _no_grad = tch::no_grad_guard();
    for parameter in module.named_parameters() {
        let mut parameter = parameter.tensor().shallow_clone();
        parameter += parameter.randn_like() * 0.01;
    }
}

/// Everything that is compared of one model. `call` runs it; with `load`, it loads Python's state dict at the end.
fn model<M: Module>(
    (given, found): (&Given<'_>, &mut Found),
    name: &str,
    make: impl FnOnce() -> Result<M, NnError>,
    call: impl Fn(&M, &Tensor) -> Result<Tensor, NnError>,
    load: bool,
) -> Result<()> {
    let x = given.tensor(&format!("{name}.x"))?;
    tch::manual_seed(7);
    let module = make()?;
    found.insert(format!("{name}.drawn"), &Tensor::rand([4], (Kind::Float, Device::Cpu)));
    let entries = module_entries(&module);
    let (names, theirs) = (entries.iter().map(|(name, _)| name), given.value::<Vec<String>>(&format!("{name}.names"))?);
    ensure!(names.eq(&theirs), "{name} has other names than {theirs:?}");
    for (key, value) in &entries {
        found.insert(format!("{name}.init.{key}"), &digest(value));
    }
    draw(&module, 3);
    for mode in ["train", "eval"] {
        module.set_training(mode == "train");
        for parameter in module.named_parameters() {
            parameter.tensor().shallow_clone().zero_grad();
        }
        tch::manual_seed(11);
        let y = call(&module, &x)?;
        found.insert(format!("{name}.{mode}"), &y);
        let count = y.numel() as i64;
        let weights = Tensor::arange(count, (Kind::Int64, Device::Cpu)).reshape(y.size()) / count;
        (&y * weights).sum(y.kind()).backward();
        for parameter in module.named_parameters() {
            let key = parameter.name().unwrap_or_default();
            found.insert(format!("{name}.{mode}.grad.{key}"), &digest(&parameter.tensor().grad()));
        }
    }
    for (key, buffer) in module.named_buffers() {
        found.insert(format!("{name}.after.{key}"), &digest(&buffer));
    }
    if load {
        let mut state = StateDict::new();
        for key in theirs {
            let tensor = given.tensor(&format!("{name}.state.{key}"))?;
            state.insert(key, Entry::Tensor(tensor));
        }
        LoadStateDict::new(&state).into(&module)?;
    }
    found.insert(format!("{name}.loaded"), &tch::no_grad(|| call(&module, &x))?);
    Ok(())
}

/// Compares the options of a new builder, in the order in which it shows them, with Python's.
fn check_defaults(given: &Given<'_>, builder: &dyn Debug) -> Result<()> {
    let shown = |value: &Value| match value.as_i64() {
        Some(value) => format!("{value}"),
        None => format!("{:?}", value.as_f64().unwrap_or(f64::NAN)),
    };
    let theirs = given.value::<Vec<(String, Value)>>("defaults")?;
    let theirs: Vec<_> = theirs.iter().map(|(name, value)| format!("{name}: {}", shown(value))).collect();
    let theirs = theirs.join(", ");
    let ours = format!("{builder:?}");
    ensure!(ours.ends_with(&format!("{{ {theirs} }}")), "the defaults are {ours} and not {theirs}");
    Ok(())
}

pub fn resnet(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let small = |block, layers| move || Resnet::builder(block, layers).num_classes(10).build();
    let of_18 = small(ResnetBlock::Basic, [2, 2, 2, 2]);
    model((given, &mut found), "resnet18", of_18, Resnet::forward, true)?;
    let of_34 = small(ResnetBlock::Basic, [3, 4, 6, 3]);
    model((given, &mut found), "resnet34", of_34, Resnet::forward, false)?;
    let of_50 = small(ResnetBlock::Bottleneck, [3, 4, 6, 3]);
    model((given, &mut found), "resnet50", of_50, Resnet::forward, false)?;
    Ok(found)
}

pub fn mobilenet_v2(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let narrow = || MobilenetV2::builder().num_classes(10).width_mult(0.35).dropout(0.3).build();
    model((given, &mut found), "narrow", narrow, MobilenetV2::forward, true)?;
    let wide = || MobilenetV2::builder().num_classes(10).width_mult(1.1).build();
    model((given, &mut found), "wide", wide, MobilenetV2::forward, false)?;
    Ok(found)
}

pub fn efficientnet_b0(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    model((given, &mut found), "default", overdrive_nn::models::efficientnet_b0, Efficientnet::forward, false)?;
    let deep = || Efficientnet::builder().num_classes(10).dropout(0.4).stochastic_depth_prob(0.6).build();
    model((given, &mut found), "deep", deep, Efficientnet::forward, true)?;
    Ok(found)
}

pub fn vit_b_16(given: &Given<'_>) -> Result<Found> {
    check_defaults(given, &VisionTransformer::builder())?;
    let mut found = Found::default();
    let small = || {
        let sizes = VisionTransformer::builder().image_size(32).patch_size(8).num_layers(3).num_heads(4);
        sizes.hidden_dim(24).mlp_dim(40).num_classes(10)
    };
    model((given, &mut found), "small", || small().build(), VisionTransformer::forward, true)?;
    let dropout = || small().dropout(0.1).attention_dropout(0.2).build();
    model((given, &mut found), "dropout", dropout, VisionTransformer::forward, false)?;
    Ok(found)
}

pub fn gpt2(given: &Given<'_>) -> Result<Found> {
    check_defaults(given, &Gpt2LmHeadModel::builder())?;
    let mut found = Found::default();
    let small = || Gpt2LmHeadModel::builder().vocab_size(97).n_positions(32).n_embd(24).n_layer(3).n_head(4);
    model((given, &mut found), "default", || small().build(), Gpt2LmHeadModel::forward, true)?;
    let options = || {
        let dropout = small().resid_pdrop(0.2).embd_pdrop(0.3).attn_pdrop(0.4);
        dropout.layer_norm_epsilon(1e-4).initializer_range(0.1).build()
    };
    model((given, &mut found), "options", options, Gpt2LmHeadModel::forward, true)?;
    let no_dropout = || small().resid_pdrop(0.0).embd_pdrop(0.0).attn_pdrop(0.0).build();
    model((given, &mut found), "no_dropout", no_dropout, Gpt2LmHeadModel::forward, false)?;
    Ok(found)
}
