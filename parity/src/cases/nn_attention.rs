//! Attention and transformers, compared with PyTorch's.

use std::collections::BTreeMap;
use std::ops::Deref;

use anyhow::{Context, Result, bail};
use overdrive_nn::*;
use serde::Deserialize;
use tch::{Kind, Tensor};

use super::nn::{Theirs, form, grads, scored, zero_grad};
use crate::record::{Found, Given};

const MODES: [&str; 3] = ["train", "eval", "no_grad"];

/// One call of a module.
#[derive(Deserialize)]
struct Call {
    layer: String,
    /// Which inputs are the same tensor, or whether they have a batch dimension.
    inputs: String,
    name: String,
    has_attn_mask: bool,
    has_padding: bool,
    #[serde(default)]
    need_weights: bool,
    #[serde(default)]
    average_attn_weights: bool,
    is_causal: Option<bool>,
}

impl Call {
    /// The attention mask and the padding mask.
    fn masks(&self, given: &Given<'_>) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let mask = |has: bool, key: &str| has.then(|| given.tensor(&format!("{}.{key}", self.name))).transpose();
        Ok((mask(self.has_attn_mask, "attn_mask")?, mask(self.has_padding, "key_padding_mask")?))
    }
}

/// A new module of this name, with new random weights.
fn attention_layer(name: &str) -> Result<MultiheadAttention> {
    let two = MultiheadAttention::builder(8, 2);
    Ok(match name {
        "plain" => MultiheadAttention::new(8, 2)?,
        "batch_first" => MultiheadAttention::builder(8, 4).batch_first(true).build()?,
        "dropout" => two.dropout(0.3).batch_first(true).build()?,
        "without_bias" => two.bias(false).batch_first(true).build()?,
        "bias_kv" => two.add_bias_kv(true).build()?,
        "zero_attn" => two.add_zero_attn(true).batch_first(true).build()?,
        "odd_heads" => MultiheadAttention::builder(9, 3).batch_first(true).build()?,
        "kdim_vdim" => two.kdim(5).vdim(6).batch_first(true).build()?,
        "everything" => two.dropout(0.2).add_bias_kv(true).add_zero_attn(true).kdim(5).build()?,
        _ => bail!("there is no attention {name}"),
    })
}

pub fn attention(given: &Given<'_>) -> Result<Found> {
    let (mut found, mut modules) = (Found::default(), BTreeMap::new());
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("layers")? {
        tch::manual_seed(7);
        let module = attention_layer(&name)?;
        form(&mut found, &name, &module, &theirs)?;
        modules.insert(name, module);
    }
    for call in given.value::<Vec<Call>>("calls")? {
        let module = modules.get(&call.layer).with_context(|| format!("there is no attention {}", call.layer))?;
        attend(&mut found, module, &call, given).with_context(|| call.name.clone())?;
    }
    Ok(found)
}

fn attend(found: &mut Found, module: &MultiheadAttention, call: &Call, given: &Given<'_>) -> Result<()> {
    let (attn_mask, padding) = call.masks(given)?;
    for mode in MODES {
        let name = format!("{}.{mode}", call.name);
        let has_grad = begin(module, mode);
        let input = |key: &str| given.tensor(&format!("{}.{}.{key}", call.layer, call.inputs));
        let own = [input("q")?, input("k")?, input("v")?].map(|x| x.set_requires_grad(has_grad));
        let [q, k, v] = match call.inputs.as_str() {
            "self" => [&own[0], &own[0], &own[0]],
            "memory" => [&own[0], &own[1], &own[1]],
            _ => [&own[0], &own[1], &own[2]],
        };
        let how = Attend {
            key_padding_mask: padding.as_ref(),
            need_weights: call.need_weights,
            attn_mask: attn_mask.as_ref(),
            average_attn_weights: call.average_attn_weights,
            is_causal: call.is_causal == Some(true),
        };
        let (y, weights) = computed(has_grad, || module.attend(q, k, v, how))?;
        found.insert(&name, &y);
        if let Some(weights) = &weights {
            found.insert(format!("{name}.weights"), weights);
        }
        if has_grad {
            weights.map_or(scored(&y), |weights| scored(&y) + scored(&weights)).backward();
            for (key, x) in ["q", "k", "v"].into_iter().zip(&own) {
                if x.grad().defined() {
                    found.insert(format!("{name}.grad_of_{key}"), &x.grad());
                }
            }
            grads(found, &name, module);
        }
    }
    Ok(())
}

/// Switches a module to a mode. Returns whether to compute gradients in it.
fn begin<M: Module>(module: &M, mode: &str) -> bool {
    module.set_training(mode == "train");
    zero_grad(module);
    mode != "no_grad"
}

fn computed<T>(has_grad: bool, compute: impl FnOnce() -> Result<T, NnError>) -> Result<T> {
    tch::manual_seed(11);
    let _no_grad = (!has_grad).then(tch::no_grad_guard);
    Ok(compute()?)
}

/// A transformer layer or a stack of them.
trait Encoder: Module {
    fn encoded(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError>;
}

impl Encoder for TransformerEncoderLayer {
    fn encoded(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError> {
        self.encode(src, how)
    }
}

impl Encoder for TransformerEncoder {
    fn encoded(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError> {
        self.encode(src, how)
    }
}

/// A new module of this name, with new random weights.
fn encoder(name: &str) -> Result<Box<dyn Encoder>> {
    let layer = TransformerEncoderLayer::builder(8, 2).dim_feedforward(12);
    let (batch_first, gelu) = (layer.batch_first(true), TransformerActivation::Gelu);
    Ok(match name {
        "layer" => Box::new(layer.build()?),
        "layer_batch_first" => Box::new(batch_first.build()?),
        "layer_gelu" => Box::new(batch_first.activation(gelu).layer_norm_eps(1e-3).dropout(0.0).build()?),
        "layer_norm_first" => Box::new(batch_first.norm_first(true).activation(gelu).build()?),
        "layer_without_bias" => Box::new(batch_first.bias(false).build()?),
        "layer_one_head" => {
            Box::new(TransformerEncoderLayer::builder(8, 1).dim_feedforward(12).batch_first(true).build()?)
        }
        "layer_defaults" => Box::new(TransformerEncoderLayer::new(8, 2)?),
        "encoder" => Box::new(TransformerEncoder::new(&batch_first.build()?, 2)?),
        "encoder_norm" => {
            Box::new(TransformerEncoder::builder(&batch_first.build()?, 3).norm(LayerNorm::new(8)?).build()?)
        }
        "encoder_not_nested" => {
            Box::new(TransformerEncoder::builder(&batch_first.build()?, 2).enable_nested_tensor(false).build()?)
        }
        "encoder_norm_first" => {
            let layer = batch_first.norm_first(true).build()?;
            Box::new(TransformerEncoder::builder(&layer, 2).norm(LayerNorm::new(8)?).build()?)
        }
        "encoder_length_first" => Box::new(TransformerEncoder::new(&layer.build()?, 2)?),
        _ => bail!("there is no transformer {name}"),
    })
}

pub fn transformer(given: &Given<'_>) -> Result<Found> {
    let (mut found, mut modules) = (Found::default(), BTreeMap::new());
    for (name, theirs) in given.value::<BTreeMap<String, Theirs>>("layers")? {
        tch::manual_seed(7);
        let module = encoder(&name)?;
        found.insert(format!("{name}.drawn_after"), &Tensor::rand([3], (Kind::Float, tch::Device::Cpu)));
        form(&mut found, &name, &module, &theirs)?;
        modules.insert(name, module);
    }
    for call in given.value::<Vec<Call>>("calls")? {
        let module = modules.get(&call.layer).with_context(|| format!("there is no transformer {}", call.layer))?;
        encode(&mut found, module, &call, given).with_context(|| call.name.clone())?;
    }
    Ok(found)
}

fn encode<M: Module + Deref<Target = dyn Encoder>>(
    found: &mut Found,
    module: &M,
    call: &Call,
    given: &Given<'_>,
) -> Result<()> {
    let (mask, padding) = call.masks(given)?;
    for mode in MODES {
        let name = format!("{}.{mode}", call.name);
        let has_grad = begin(module, mode);
        let x = given.tensor(&format!("{}.{}", call.layer, call.inputs))?.set_requires_grad(has_grad);
        let how = Encode { mask: mask.as_ref(), src_key_padding_mask: padding.as_ref(), is_causal: call.is_causal };
        let y = computed(has_grad, || module.encoded(&x, how))?;
        found.insert(&name, &y);
        if has_grad {
            scored(&y).backward();
            found.insert(format!("{name}.grad_of_x"), &x.grad());
            grads(found, &name, module);
        }
    }
    Ok(())
}
