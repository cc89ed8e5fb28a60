//! Attention.

use overdrive_core::{Module as _, ModuleState};
use overdrive_nn_macros::Module;
use tch::{Device, Kind, TchError, Tensor};

use crate::error::NnError;
use crate::init;
use crate::layer::{at_least, empty, run};
use crate::linear::Linear;
use crate::tensors::Parameter;

/// Attention with several heads.
///
/// # Source
/// `torch.nn.MultiheadAttention`; Vaswani et al., "Attention Is All You Need", 2017.
#[derive(Debug, Module)]
#[module(describe)]
pub struct MultiheadAttention {
    /// `[embed_dim, embed_dim]`; absent where queries, keys and values have the same size.
    pub q_proj_weight: Option<Parameter>,
    /// `[embed_dim, kdim]`; absent where queries, keys and values have the same size.
    pub k_proj_weight: Option<Parameter>,
    /// `[embed_dim, vdim]`; absent where queries, keys and values have the same size.
    pub v_proj_weight: Option<Parameter>,
    /// `[3 * embed_dim, embed_dim]`; absent where keys or values have another size.
    pub in_proj_weight: Option<Parameter>,
    /// `[3 * embed_dim]`.
    pub in_proj_bias: Option<Parameter>,
    /// The last projection.
    pub out_proj: Linear,
    /// `[1, 1, embed_dim]`, added to the keys as one more place.
    pub bias_k: Option<Parameter>,
    /// `[1, 1, embed_dim]`, added to the values as one more place.
    pub bias_v: Option<Parameter>,
    state: ModuleState,
    #[module(skip)]
    options: MultiheadAttentionBuilder,
}

/// Options of a [`MultiheadAttention`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct MultiheadAttentionBuilder {
    embed_dim: i64,
    num_heads: i64,
    dropout: f64,
    bias: bool,
    add_bias_kv: bool,
    add_zero_attn: bool,
    kdim: Option<i64>,
    vdim: Option<i64>,
    batch_first: bool,
}

impl MultiheadAttentionBuilder {
    /// The probability that an attention weight is dropped in training; default 0.
    pub fn dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Whether the projections have biases; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// Whether a learned key and value are added to each sequence; default false.
    pub fn add_bias_kv(mut self, add: bool) -> Self {
        self.add_bias_kv = add;
        self
    }

    /// Whether a key and a value of zeros are added to each sequence; default false.
    pub fn add_zero_attn(mut self, add: bool) -> Self {
        self.add_zero_attn = add;
        self
    }

    /// The size of the keys; default `embed_dim`.
    pub fn kdim(mut self, kdim: i64) -> Self {
        self.kdim = Some(kdim);
        self
    }

    /// The size of the values; default `embed_dim`.
    pub fn vdim(mut self, vdim: i64) -> Self {
        self.vdim = Some(vdim);
        self
    }

    /// Whether inputs are `[batch, length, size]` in place of `[length, batch, size]`; default false.
    pub fn batch_first(mut self, batch_first: bool) -> Self {
        self.batch_first = batch_first;
        self
    }

    /// The layer with new weights.
    ///
    /// # Errors
    /// When `num_heads` does not divide `embed_dim`, an option is out of its range, or memory runs out.
    pub fn build(self) -> Result<MultiheadAttention, NnError> {
        const LAYER: &str = "MultiheadAttention";
        let Self { embed_dim, num_heads, .. } = self;
        at_least(LAYER, "embed_dim", embed_dim, 1)?;
        at_least(LAYER, "num_heads", num_heads, 1)?;
        let (kdim, vdim) = (self.kdim.unwrap_or(embed_dim), self.vdim.unwrap_or(embed_dim));
        at_least(LAYER, "kdim", kdim, 1)?;
        at_least(LAYER, "vdim", vdim, 1)?;
        let invalid = |option, found: String, expected: String| {
            Err(NnError::InvalidOption { layer: LAYER, option, found, expected })
        };
        if embed_dim % num_heads != 0 {
            return invalid("embed_dim", embed_dim.to_string(), format!("divisible by the {num_heads} heads"));
        }
        if !(0.0..=1.0).contains(&self.dropout) {
            return invalid("dropout", self.dropout.to_string(), "at least 0 and at most 1".to_owned());
        }
        let is_packed = kdim == embed_dim && vdim == embed_dim;
        let packed = is_packed.then(|| empty(&[3 * embed_dim, embed_dim])).transpose()?;
        let separate = |size: i64| (!is_packed).then(|| empty(&[embed_dim, size])).transpose();
        let (q, k, v) = (separate(embed_dim)?, separate(kdim)?, separate(vdim)?);
        // PyTorch draws the last projection first.
        let out_proj = Linear::builder(embed_dim, embed_dim).bias(self.bias).build()?;
        let (bias_k, bias_v) = match self.add_bias_kv {
            true => (Some(empty(&[1, 1, embed_dim])?), Some(empty(&[1, 1, embed_dim])?)),
            false => (None, None),
        };
        for weight in [&packed, &q, &k, &v].into_iter().flatten() {
            init::xavier_uniform_(weight, 1.0)?;
        }
        let in_proj_bias = self.bias.then(|| empty(&[3 * embed_dim])).transpose()?;
        if let (Some(bias), Some(out)) = (&in_proj_bias, &out_proj.bias) {
            init::zeros_(bias)?;
            init::zeros_(out)?;
        }
        for bias in [&bias_k, &bias_v].into_iter().flatten() {
            init::xavier_normal_(bias, 1.0)?;
        }
        let parameter = |tensor: Option<Tensor>| tensor.as_ref().map(Parameter::new).transpose();
        Ok(MultiheadAttention {
            q_proj_weight: parameter(q)?,
            k_proj_weight: parameter(k)?,
            v_proj_weight: parameter(v)?,
            in_proj_weight: parameter(packed)?,
            in_proj_bias: parameter(in_proj_bias)?,
            out_proj,
            bias_k: parameter(bias_k)?,
            bias_v: parameter(bias_v)?,
            state: ModuleState::default(),
            options: self,
        })
    }
}

/// How [`MultiheadAttention::attend`] attends. The default is PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct Attend<'a> {
    /// Keys to ignore, `[batch, keys]`: true, or added to the scores.
    pub key_padding_mask: Option<&'a Tensor>,
    /// Whether the weights are returned; without them the fast kernels are used. Default true.
    pub need_weights: bool,
    /// Places not to attend to, `[queries, keys]` or `[batch * heads, queries, keys]`: true, or added to the scores.
    pub attn_mask: Option<&'a Tensor>,
    /// Whether the weights are averaged over the heads; default true.
    pub average_attn_weights: bool,
    /// Whether `attn_mask` is the causal one; default false.
    pub is_causal: bool,
}

impl Default for Attend<'_> {
    fn default() -> Self {
        Self {
            key_padding_mask: None,
            need_weights: true,
            attn_mask: None,
            average_attn_weights: true,
            is_causal: false,
        }
    }
}
