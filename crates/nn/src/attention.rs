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

    /// Attends; returns the output, and the weights if asked for. In evaluation mode without gradients, where PyTorch
    /// takes its fused operator, so does this; it is not differentiable.
    ///
    /// # Shapes
    /// `query` `[queries, batch, embed_dim]`, `key` `[keys, batch, kdim]`, `value` `[keys, batch, vdim]`, or with
    /// `batch_first` the batch before; also without a batch. The output has `query`'s shape; the weights are
    /// `[batch, queries, keys]`, or not averaged `[batch, heads, queries, keys]`.
    ///
    /// # Errors
    /// When a shape, dtype or device does not fit, or `is_causal` comes without `attn_mask`.
    pub fn attend(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        how: Attend<'_>,
    ) -> Result<(Tensor, Option<Tensor>), NnError> {
        run(self, &self.state, || {
            let kind = query.kind();
            let masks = Masks {
                key_padding: how.key_padding_mask.map(|mask| added(mask, kind)).transpose()?,
                attn: how.attn_mask.map(|mask| added(mask, kind)).transpose()?,
            };
            // The fused operator is given one mask; PyTorch refuses it for masks that are floating-point.
            let is_float = |mask: Option<&Tensor>| mask.is_some_and(Tensor::is_floating_point);
            let takes_masks = !is_float(how.attn_mask) && !is_float(how.key_padding_mask);
            match takes_masks && self.may_be_fused(query, key, value) {
                true => self.fused(query, &masks, how),
                false => self.attend_in_steps(query, key, value, masks, how),
            }
        })
    }

    /// Whether PyTorch would take its fused operator.
    fn may_be_fused(&self, query: &Tensor, key: &Tensor, value: &Tensor) -> bool {
        let MultiheadAttentionBuilder { num_heads, add_zero_attn, batch_first, .. } = self.options;
        let (Some(weight), Some(bias), Some(out_bias)) =
            (&self.in_proj_weight, &self.in_proj_bias, &self.out_proj.bias)
        else {
            return false;
        };
        let tensors: [&Tensor; 5] = [query, weight, bias, &self.out_proj.weight, out_bias];
        let is_same = query.is_same_tensor(key) && key.is_same_tensor(value);
        let has_options = self.bias_k.is_some() || add_zero_attn || !batch_first || num_heads % 2 != 0;
        let kinds_fit = query.kind() == weight.kind() && query.kind() == bias.kind();
        let is_autocast = overdrive_ffi::autocast::state(query.device()).is_ok_and(|state| state.enabled);
        let needs_grad = tch::autograd_enabled() && tensors.iter().any(|tensor| tensor.requires_grad());
        let is_batch = query.dim() == 3;
        is_batch && is_same && kinds_fit && !has_options && !is_autocast && !needs_grad && !self.state.is_training()
    }

    fn fused(
        &self,
        query: &Tensor,
        masks: &Masks,
        how: Attend<'_>,
    ) -> Result<(Tensor, Option<Tensor>), TchError> {
        let (Some(weight), Some(bias), Some(out_bias)) =
            (&self.in_proj_weight, &self.in_proj_bias, &self.out_proj.bias)
        else {
            return Err(TchError::Convert("the fused operator needs packed weights and biases".to_owned()));
        };
        let (mask, kind) = masks.merged(query, self.options.num_heads)?;
        let (output, weights) = Tensor::f_internal_native_multi_head_attention(
            query,
            query,
            query,
            self.options.embed_dim,
            self.options.num_heads,
            weight,
            bias,
            &self.out_proj.weight,
            out_bias,
            mask.as_ref(),
            how.need_weights,
            how.average_attn_weights,
            kind,
        )?;
        Ok((output, how.need_weights.then_some(weights)))
    }
}
