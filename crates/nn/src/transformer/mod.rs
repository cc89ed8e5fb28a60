//! Transformers.

mod encoder;

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{TchError, Tensor};

pub use encoder::{TransformerEncoder, TransformerEncoderBuilder};

use crate::attention::{Attend, Masks, MultiheadAttention, Shapes};
use crate::containers::forwards;
use crate::dropout::Dropout;
use crate::error::NnError;
use crate::layer::{is_autocast, named, needs_grad};
use crate::linear::Linear;
use crate::norm::LayerNorm;

/// Self-attention and two linear layers, each with a residual connection and a normalization.
///
/// # Source
/// `torch.nn.TransformerEncoderLayer`; Vaswani et al., "Attention Is All You Need", 2017.
#[derive(Debug, Module)]
pub struct TransformerEncoderLayer {
    /// The attention.
    pub self_attn: MultiheadAttention,
    /// To `dim_feedforward`.
    pub linear1: Linear,
    /// After the activation.
    pub dropout: Dropout,
    /// Back to `d_model`.
    pub linear2: Linear,
    /// Of the attention's part.
    pub norm1: LayerNorm,
    /// Of the linear layers' part.
    pub norm2: LayerNorm,
    /// After the attention.
    pub dropout1: Dropout,
    /// After the linear layers.
    pub dropout2: Dropout,
    state: ModuleState,
    #[module(skip)]
    options: TransformerEncoderLayerBuilder,
}

/// The function between a transformer's two linear layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransformerActivation {
    /// `max(x, 0)`
    #[default]
    Relu,
    /// `x * Phi(x)`
    Gelu,
}

/// Options of a [`TransformerEncoderLayer`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct TransformerEncoderLayerBuilder {
    d_model: i64,
    nhead: i64,
    dim_feedforward: i64,
    dropout: f64,
    activation: TransformerActivation,
    layer_norm_eps: f64,
    batch_first: bool,
    norm_first: bool,
    bias: bool,
}

impl TransformerEncoderLayerBuilder {
    /// The number of features between the linear layers; default 2048.
    pub fn dim_feedforward(mut self, dim_feedforward: i64) -> Self {
        self.dim_feedforward = dim_feedforward;
        self
    }

    /// The probability of all dropouts, that of the attention's weights too; default 0.1.
    pub fn dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// The function between the linear layers; default ReLU.
    pub fn activation(mut self, activation: TransformerActivation) -> Self {
        self.activation = activation;
        self
    }

    /// What the normalizations add to the variance; default 1e-5.
    pub fn layer_norm_eps(mut self, eps: f64) -> Self {
        self.layer_norm_eps = eps;
        self
    }

    /// Whether inputs are `[batch, length, d_model]` in place of `[length, batch, d_model]`; default false.
    pub fn batch_first(mut self, batch_first: bool) -> Self {
        self.batch_first = batch_first;
        self
    }

    /// Whether the normalizations come before attention and linear layers, not after them; default false.
    pub fn norm_first(mut self, norm_first: bool) -> Self {
        self.norm_first = norm_first;
        self
    }

    /// Whether linear layers, attention and normalizations have biases; default true.
    pub fn bias(mut self, bias: bool) -> Self {
        self.bias = bias;
        self
    }

    /// The layer with new weights.
    ///
    /// # Errors
    /// When `nhead` does not divide `d_model`, an option is out of its range, or memory runs out.
    pub fn build(self) -> Result<TransformerEncoderLayer, NnError> {
        let Self { d_model, dim_feedforward, dropout, layer_norm_eps, bias, .. } = self;
        let self_attn = MultiheadAttention::builder(d_model, self.nhead).dropout(dropout).bias(bias);
        let norm = || LayerNorm::builder(d_model).eps(layer_norm_eps).bias(bias).build();
        Ok(TransformerEncoderLayer {
            self_attn: self_attn.batch_first(self.batch_first).build()?,
            linear1: Linear::builder(d_model, dim_feedforward).bias(bias).build()?,
            dropout: Dropout::new(dropout)?,
            linear2: Linear::builder(dim_feedforward, d_model).bias(bias).build()?,
            norm1: norm()?,
            norm2: norm()?,
            dropout1: Dropout::new(dropout)?,
            dropout2: Dropout::new(dropout)?,
            state: ModuleState::default(),
            options: self,
        })
    }
}

/// How an encoder attends. The default is without masks.
#[derive(Clone, Copy, Debug, Default)]
pub struct Encode<'a> {
    /// Places not to attend to, `[length, length]` or `[batch * heads, length, length]`: true, or added to the scores.
    pub mask: Option<&'a Tensor>,
    /// Places to ignore, `[batch, length]`: true, or added to the scores.
    pub src_key_padding_mask: Option<&'a Tensor>,
    /// Whether `mask` is the causal one. None, as is PyTorch's default: a [`TransformerEncoder`] compares them, a single
    /// layer takes it for another.
    pub is_causal: Option<bool>,
}

impl TransformerEncoderLayer {
    /// A layer with PyTorch's defaults.
    ///
    /// # Errors
    /// When `nhead` does not divide `d_model`, or memory runs out.
    pub fn new(d_model: i64, nhead: i64) -> Result<Self, NnError> {
        Self::builder(d_model, nhead).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(d_model: i64, nhead: i64) -> TransformerEncoderLayerBuilder {
        TransformerEncoderLayerBuilder {
            d_model,
            nhead,
            dim_feedforward: 2048,
            dropout: 0.1,
            activation: TransformerActivation::Relu,
            layer_norm_eps: 1e-5,
            batch_first: false,
            norm_first: false,
            bias: true,
        }
    }

    /// Encodes without masks.
    ///
    /// # Shapes
    /// As [`encode`](Self::encode).
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn forward(&self, src: &Tensor) -> Result<Tensor, NnError> {
        self.encode(src, Encode::default())
    }

    /// Encodes. In evaluation mode without gradients it takes PyTorch's fused operator wherever PyTorch does.
    ///
    /// # Shapes
    /// `[length, batch, d_model]`, or with `batch_first` the batch before, or without a batch; to the same.
    ///
    /// # Errors
    /// When a shape, dtype or device does not fit, or `is_causal` comes without `mask`.
    pub fn encode(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError> {
        let (masks, shapes) = self.masks(src, how).map_err(|error| named(self, &self.state, error))?;
        self.encode_with(src, &masks, shapes, how.is_causal == Some(true))
    }

    /// The masks for an input, and its shape, checked.
    fn masks(&self, src: &Tensor, how: Encode<'_>) -> Result<(Masks, Shapes), NnError> {
        let shapes = self.self_attn.shapes([src, src, src])?;
        let is_causal = how.is_causal == Some(true);
        Ok((Masks::new(how.mask, how.src_key_padding_mask, is_causal, shapes, src.f_kind()?)?, shapes))
    }

    fn encode_with(&self, src: &Tensor, masks: &Masks, shapes: Shapes, is_causal: bool) -> Result<Tensor, NnError> {
        let encode = || match self.fused_weights(src)? {
            Some(weights) => Ok(self.fused(src, weights, masks, shapes)?),
            None => self.encode_in_steps(src, masks, is_causal),
        };
        encode().map_err(|error| named(self, &self.state, error))
    }

    fn encode_in_steps(&self, src: &Tensor, masks: &Masks, is_causal: bool) -> Result<Tensor, NnError> {
        if self.options.norm_first {
            let x = src.f_add(&self.attended(&self.norm1.forward(src)?, masks, is_causal)?)?;
            return Ok(x.f_add(&self.fed_forward(&self.norm2.forward(&x)?)?)?);
        }
        let x = self.norm1.forward(&src.f_add(&self.attended(src, masks, is_causal)?)?)?;
        self.norm2.forward(&x.f_add(&self.fed_forward(&x)?)?)
    }

    fn attended(&self, x: &Tensor, masks: &Masks, is_causal: bool) -> Result<Tensor, NnError> {
        let (attn_mask, key_padding_mask) = (masks.attn.as_ref(), masks.key_padding.as_ref());
        let how = Attend { attn_mask, key_padding_mask, need_weights: false, is_causal, ..Attend::default() };
        self.dropout1.forward(&self.self_attn.attend(x, x, x, how)?.0)
    }

    fn fed_forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let x = self.linear1.forward(x)?;
        let x = match self.options.activation {
            TransformerActivation::Relu => x.f_relu()?,
            TransformerActivation::Gelu => x.f_gelu("none")?,
        };
        self.dropout2.forward(&self.linear2.forward(&self.dropout.forward(&x)?)?)
    }

    /// The tensors that PyTorch's fused operator takes, in its order, if PyTorch would take it for this input.
    fn fused_weights(&self, src: &Tensor) -> Result<Option<[&Tensor; 12]>, TchError> {
        let weights = || {
            let [in_weight, in_bias, out_weight, out_bias] = self.self_attn.packed_weights()?;
            Some([
                in_weight,
                in_bias,
                out_weight,
                out_bias,
                self.norm1.weight.as_deref()?,
                self.norm1.bias.as_deref()?,
                self.norm2.weight.as_deref()?,
                self.norm2.bias.as_deref()?,
                &self.linear1.weight,
                self.linear1.bias.as_deref()?,
                &self.linear2.weight,
                self.linear2.bias.as_deref()?,
            ])
        };
        let Some(weights) = weights() else { return Ok(None) };
        let fits = src.dim() == 3
            && !self.state.is_training()
            && self.norm1.eps == self.norm2.eps
            && !is_autocast()
            && !needs_grad(weights.into_iter().chain([src]));
        Ok(fits.then_some(weights))
    }

    fn fused(&self, src: &Tensor, weights: [&Tensor; 12], masks: &Masks, shapes: Shapes) -> Result<Tensor, TchError> {
        let (mask, mask_type) = masks.merged(shapes)?;
        Tensor::f_internal_transformer_encoder_layer_fwd(
            src,
            self.options.d_model,
            self.options.nhead,
            weights[0],
            weights[1],
            weights[2],
            weights[3],
            self.options.activation == TransformerActivation::Gelu,
            self.options.norm_first,
            self.norm1.eps,
            weights[4],
            weights[5],
            weights[6],
            weights[7],
            weights[8],
            weights[9],
            weights[10],
            weights[11],
            mask,
            mask_type,
        )
    }

    /// Another layer with the same values.
    fn copied(&self) -> Result<Self, NnError> {
        Ok(Self {
            self_attn: self.self_attn.copied()?,
            linear1: self.linear1.copied()?,
            dropout: self.dropout.clone(),
            linear2: self.linear2.copied()?,
            norm1: self.norm1.copied()?,
            norm2: self.norm2.copied()?,
            dropout1: self.dropout1.clone(),
            dropout2: self.dropout2.clone(),
            state: self.state.clone(),
            options: self.options,
        })
    }
}

forwards!(TransformerEncoderLayer);
