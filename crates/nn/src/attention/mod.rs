//! Attention.

mod masks;
mod steps;

use overdrive_core::ModuleState;
use overdrive_ffi::TensorId;
use overdrive_nn_macros::Module;
use tch::{TchError, Tensor};

pub use masks::generate_square_subsequent_mask;
pub(crate) use masks::{Masks, Shapes};

use crate::error::NnError;
use crate::init;
use crate::layer::{at_least, empty, is_autocast, named, needs_grad};
use crate::linear::Linear;
use crate::tensors::Parameter;

/// Attention with several heads.
///
/// # Source
/// `torch.nn.MultiheadAttention`; Vaswani et al., "Attention Is All You Need", 2017.
#[derive(Debug, Module)]
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
    /// The output projection.
    pub out_proj: Linear,
    /// `[1, 1, embed_dim]`, appended to the keys as one more position.
    pub bias_k: Option<Parameter>,
    /// `[1, 1, embed_dim]`, appended to the values as one more position.
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
        // First, as in PyTorch: layers draw random numbers for their weights in the order in which they are made.
        let out_proj = Linear::builder(embed_dim, embed_dim).bias(self.bias);
        let out_proj = out_proj.name("NonDynamicallyQuantizableLinear").build()?;
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
    /// Keys to ignore, `[batch, keys]`, or `[keys]` without a batch. A bool mask is true where a key is ignored;
    /// another mask is added to the scores.
    pub key_padding_mask: Option<&'a Tensor>,
    /// Whether the weights are returned; without them the fast kernels are used. Default true.
    pub need_weights: bool,
    /// Positions not to attend to, `[queries, keys]` or `[batch * heads, queries, keys]`. A bool mask is true where a
    /// query must not attend; another mask is added to the scores.
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

impl MultiheadAttention {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When `num_heads` does not divide `embed_dim`, or memory runs out.
    pub fn new(embed_dim: i64, num_heads: i64) -> Result<Self, NnError> {
        Self::builder(embed_dim, num_heads).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(embed_dim: i64, num_heads: i64) -> MultiheadAttentionBuilder {
        MultiheadAttentionBuilder {
            embed_dim,
            num_heads,
            dropout: 0.0,
            bias: true,
            add_bias_kv: false,
            add_zero_attn: false,
            kdim: None,
            vdim: None,
            batch_first: false,
        }
    }

    /// Attends with PyTorch's defaults; returns the output and the weights.
    ///
    /// # Shapes
    /// As [`attend`](Self::attend).
    ///
    /// # Errors
    /// As [`attend`](Self::attend).
    pub fn forward(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> Result<(Tensor, Option<Tensor>), NnError> {
        self.attend(query, key, value, Attend::default())
    }

    /// Attends; returns the output, and the weights if asked for. In evaluation mode without gradients it takes
    /// PyTorch's fused operator wherever PyTorch does.
    ///
    /// # Shapes
    /// `query` `[queries, batch, embed_dim]`, `key` `[keys, batch, kdim]`, `value` `[keys, batch, vdim]`, or with
    /// `batch_first` the batch before; also without a batch. The output has `query`'s shape; the weights are
    /// `[batch, queries, keys]`, or not averaged `[batch, heads, queries, keys]`.
    ///
    /// # Errors
    /// When a shape, dtype or device does not fit, or `is_causal` comes without `attn_mask` (PyTorch's fused operator
    /// would ignore it).
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        how: Attend<'_>,
    ) -> Result<(Tensor, Option<Tensor>), NnError> {
        self.attended([query, key, value], how).map_err(|error| named(self, &self.state, error))
    }

    fn attended(&self, inputs: [&Tensor; 3], how: Attend<'_>) -> Result<(Tensor, Option<Tensor>), NnError> {
        let shapes = self.shapes(inputs)?;
        let masks = Masks::new(how.attn_mask, how.key_padding_mask, how.is_causal, shapes, inputs[0].f_kind()?)?;
        // PyTorch does not give floating-point masks to its fused operator.
        let is_bool = |mask: Option<&Tensor>| mask.is_none_or(|mask| !mask.is_floating_point());
        if is_bool(how.attn_mask)
            && is_bool(how.key_padding_mask)
            && let Some(weights) = self.fused_weights(inputs, shapes)?
        {
            return self.fused(inputs[0], weights, &masks, shapes, how);
        }
        self.attend_in_steps(inputs, masks, shapes, how)
    }

    /// The sizes of these inputs; an error if their shapes do not fit the layer.
    pub(crate) fn shapes(&self, inputs: [&Tensor; 3]) -> Result<Shapes, TchError> {
        let MultiheadAttentionBuilder { embed_dim, num_heads, kdim, vdim, batch_first, .. } = self.options;
        let sizes = [embed_dim, kdim.unwrap_or(embed_dim), vdim.unwrap_or(embed_dim)];
        Shapes::of(inputs, sizes, num_heads, batch_first)
    }

    /// The tensors that PyTorch's fused operators take, in their order, if the layer's options allow those.
    pub(crate) fn packed_weights(&self) -> Option<[&Tensor; 4]> {
        let MultiheadAttentionBuilder { num_heads, batch_first, .. } = self.options;
        let weights = [
            self.in_proj_weight.as_deref()?,
            self.in_proj_bias.as_deref()?,
            &self.out_proj.weight,
            self.out_proj.bias.as_deref()?,
        ];
        (batch_first && num_heads % 2 == 0).then_some(weights)
    }

    /// The same if PyTorch would take its fused operator for these inputs.
    fn fused_weights(
        &self,
        [query, key, value]: [&Tensor; 3],
        shapes: Shapes,
    ) -> Result<Option<[&Tensor; 4]>, NnError> {
        let Some(weights) = self.packed_weights() else { return Ok(None) };
        let [is_self, is_self_too] = [key, value].map(|input| TensorId::of(input) == TensorId::of(query));
        let kind = query.f_kind()?;
        let fits = is_self
            && is_self_too
            && shapes.batch.is_some()
            && !self.state.is_training()
            && self.bias_k.is_none()
            && !self.options.add_zero_attn
            && weights[..2].iter().all(|weight| weight.kind() == kind)
            && !is_autocast()
            && !needs_grad(weights.into_iter().chain([query]));
        Ok(fits.then_some(weights))
    }

    fn fused(
        &self,
        input: &Tensor,
        [in_weight, in_bias, out_weight, out_bias]: [&Tensor; 4],
        masks: &Masks,
        shapes: Shapes,
        how: Attend<'_>,
    ) -> Result<(Tensor, Option<Tensor>), NnError> {
        let (mask, mask_type) = masks.merged(shapes)?;
        let (output, weights) = Tensor::f_internal_native_multi_head_attention(
            input,
            input,
            input,
            self.options.embed_dim,
            self.options.num_heads,
            in_weight,
            in_bias,
            out_weight,
            out_bias,
            mask,
            how.need_weights,
            how.average_attn_weights,
            mask_type,
        )?;
        Ok((output, how.need_weights.then_some(weights)))
    }

    /// Another layer with the same values.
    pub(crate) fn copied(&self) -> Result<Self, NnError> {
        let copied = |parameter: &Option<Parameter>| parameter.as_ref().map(Parameter::copied).transpose();
        Ok(Self {
            q_proj_weight: copied(&self.q_proj_weight)?,
            k_proj_weight: copied(&self.k_proj_weight)?,
            v_proj_weight: copied(&self.v_proj_weight)?,
            in_proj_weight: copied(&self.in_proj_weight)?,
            in_proj_bias: copied(&self.in_proj_bias)?,
            out_proj: self.out_proj.copied()?,
            bias_k: copied(&self.bias_k)?,
            bias_v: copied(&self.bias_v)?,
            state: self.state.clone(),
            options: self.options,
        })
    }
}
