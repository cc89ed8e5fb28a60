//! Stacks of encoder layers.

use overdrive_core::ModuleState;
use overdrive_ffi::{Arg, LazyOp, Value};
use overdrive_nn_macros::Module;
use tch::Tensor;

use super::{Encode, TransformerEncoderLayer};
use crate::attention::Masks;
use crate::containers::{ModuleList, forwards};
use crate::error::NnError;
use crate::layer::{at_least, named};
use crate::norm::LayerNorm;

// tch lacks these.
static NESTED: LazyOp = LazyOp::new("aten::_nested_tensor_from_mask", "");
static IS_LEFT_ALIGNED: LazyOp = LazyOp::new("aten::_nested_tensor_from_mask_left_aligned", "");

/// Encoder layers one after the other.
///
/// # Source
/// `torch.nn.TransformerEncoder`
#[derive(Debug, Module)]
pub struct TransformerEncoder {
    /// The layers; at first they have the same values.
    pub layers: ModuleList<TransformerEncoderLayer>,
    /// After the last layer.
    pub norm: Option<LayerNorm>,
    state: ModuleState,
    enable_nested_tensor: bool,
}

/// Options of a [`TransformerEncoder`].
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct TransformerEncoderBuilder<'a> {
    encoder_layer: &'a TransformerEncoderLayer,
    num_layers: i64,
    norm: Option<LayerNorm>,
    enable_nested_tensor: bool,
}

impl TransformerEncoderBuilder<'_> {
    /// A normalization after the last layer; default none.
    pub fn norm(mut self, norm: LayerNorm) -> Self {
        self.norm = Some(norm);
        self
    }

    /// Whether padded places are left out of the computation where PyTorch can do so: in evaluation mode, without
    /// gradients, when all padding is at the ends. The output is 0 there (before `norm`). Default true.
    pub fn enable_nested_tensor(mut self, enable: bool) -> Self {
        self.enable_nested_tensor = enable;
        self
    }

    /// The encoder, whose layers are copies of the one given; nothing is drawn.
    ///
    /// # Errors
    /// When there is no layer, or memory runs out.
    pub fn build(self) -> Result<TransformerEncoder, NnError> {
        at_least("TransformerEncoder", "num_layers", self.num_layers, 1)?;
        let layers = (0..self.num_layers).map(|_| self.encoder_layer.copied()).collect::<Result<_, _>>()?;
        let (state, enable_nested_tensor) = (ModuleState::default(), self.enable_nested_tensor);
        Ok(TransformerEncoder { layers, norm: self.norm, state, enable_nested_tensor })
    }
}

impl TransformerEncoder {
    /// An encoder of `num_layers` copies of a layer, which all have its values.
    ///
    /// # Errors
    /// When `num_layers` is less than 1, or memory runs out.
    pub fn new(encoder_layer: &TransformerEncoderLayer, num_layers: i64) -> Result<Self, NnError> {
        Self::builder(encoder_layer, num_layers).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(encoder_layer: &TransformerEncoderLayer, num_layers: i64) -> TransformerEncoderBuilder<'_> {
        TransformerEncoderBuilder { encoder_layer, num_layers, norm: None, enable_nested_tensor: true }
    }

    /// Encodes without masks.
    ///
    /// # Shapes
    /// As [`TransformerEncoderLayer::encode`].
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn forward(&self, src: &Tensor) -> Result<Tensor, NnError> {
        self.encode(src, Encode::default())
    }

    /// Encodes. In evaluation mode without gradients it takes PyTorch's fused operators wherever PyTorch does.
    ///
    /// # Shapes
    /// As [`TransformerEncoderLayer::encode`].
    ///
    /// # Errors
    /// When a shape, dtype or device does not fit, or `is_causal` comes without `mask`.
    ///
    /// # Syncs
    /// With a mask and without `is_causal`, and with a padding mask in evaluation mode without gradients.
    pub fn encode(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError> {
        self.encoded(src, how).map_err(|error| named(self, &self.state, error))
    }

    fn encoded(&self, src: &Tensor, how: Encode<'_>) -> Result<Tensor, NnError> {
        let Some(first) = self.layers.first() else { return Ok(src.shallow_clone()) };
        let (masks, shapes) = first.masks(src, how)?;
        let is_causal = how.is_causal.map_or_else(|| masks.are_causal(shapes), Ok)?;
        let nested = self.nested(src, &masks)?;
        let masks = if nested.is_some() { Masks::default() } else { masks };
        let mut output = nested.as_ref().unwrap_or(src).shallow_clone();
        for layer in self.layers.iter() {
            output = layer.encode_with(&output, &masks, shapes, is_causal)?;
        }
        if nested.is_some() {
            output = output.f_to_padded_tensor(0.0, src.size())?;
        }
        self.norm.as_ref().map_or(Ok(output.shallow_clone()), |norm| norm.forward(&output))
    }

    /// The sequences without their padding, where PyTorch leaves it out.
    fn nested(&self, src: &Tensor, masks: &Masks) -> Result<Option<Tensor>, NnError> {
        let Masks { key_padding: Some(padding), attn: None } = masks else { return Ok(None) };
        for layer in self.layers.iter() {
            if !self.enable_nested_tensor || layer.options.norm_first || layer.fused_weights(src)?.is_none() {
                return Ok(None);
            }
        }
        let kept = padding.f_logical_not()?;
        match IS_LEFT_ALIGNED.call(&[Arg::Tensor(src), Arg::Tensor(&kept)])?[..] {
            [Value::Bool(true)] => {
                Ok(Some(NESTED.tensor(&[Arg::Tensor(src), Arg::Tensor(&kept), Arg::Bool(false)])?))
            }
            _ => Ok(None),
        }
    }
}

forwards!(TransformerEncoder);
