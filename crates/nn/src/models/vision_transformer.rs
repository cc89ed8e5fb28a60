//! Vision transformers.

use overdrive_core::{Module, ModuleState, Visitor};
use overdrive_nn_macros::Module;
use tch::{Device, Kind, TchError, Tensor};

use super::blocks::builder;
use crate::layer::{at_least, empty, named};
use crate::{
    Attend, Conv2d, Dropout, Gelu, LayerNorm, Linear, MultiheadAttention, NnError, Parameter, Sequential, init,
    sequential,
};

/// The `eps` of torchvision's layer normalizations.
const EPS: f64 = 1e-6;

/// A transformer that sees an image as a sequence of patches; parameters have torchvision's names.
///
/// # Source
/// `torchvision.models.VisionTransformer` of torchvision 0.26; Dosovitskiy et al., "An Image is Worth 16x16 Words",
/// 2021.
#[derive(Debug, Module)]
#[doc(alias = "vit")]
pub struct VisionTransformer {
    /// `[1, 1, hidden_dim]`: a learned first position, whose output the head classifies.
    pub class_token: Parameter,
    /// The projection of each patch to a vector.
    pub conv_proj: Conv2d,
    encoder: Encoder,
    /// What follows the encoder.
    pub heads: VisionHeads,
    state: ModuleState,
    image_size: i64,
}

/// What follows the encoder of a [`VisionTransformer`].
#[derive(Debug, Module)]
pub struct VisionHeads {
    /// The head: replace it to train for other classes.
    pub head: Linear,
}

builder! {
    VisionTransformer => VisionTransformerBuilder {
        /// The height and width of the images; default 224.
        image_size: i64 = 224,
        /// The height and width of a patch; default 16.
        patch_size: i64 = 16,
        /// The number of layers; default 12.
        num_layers: usize = 12,
        /// The number of heads of each attention; default 12.
        num_heads: i64 = 12,
        /// The size of the embeddings and hidden states; default 768.
        hidden_dim: i64 = 768,
        /// The hidden size of the MLPs; default 3072.
        mlp_dim: i64 = 3072,
        /// The probability of dropout; default 0.
        dropout: f64 = 0.0,
        /// The probability that an attention weight is dropped in training; default 0.
        attention_dropout: f64 = 0.0,
        /// The number of classes; default 1000.
        num_classes: i64 = 1000,
    }
}

/// The base size with patches of 16 by 16, with its defaults: images of 224 by 224 and 1000 classes.
///
/// # Errors
/// When memory runs out.
///
/// # Source
/// `torchvision.models.vit_b_16`
pub fn vit_b_16() -> Result<VisionTransformer, NnError> {
    VisionTransformer::builder().build()
}

impl VisionTransformerBuilder {
    /// The model with new weights; those of the head are 0.
    ///
    /// # Errors
    /// When `patch_size` does not divide `image_size`, or `num_heads` `hidden_dim`, another option is out of its range,
    /// or memory runs out.
    pub fn build(self) -> Result<VisionTransformer, NnError> {
        const MODEL: &str = "VisionTransformer";
        let Self { image_size, patch_size, hidden_dim, num_classes, .. } = self;
        at_least(MODEL, "patch_size", patch_size, 1)?;
        at_least(MODEL, "image_size", image_size, 1)?;
        at_least(MODEL, "hidden_dim", hidden_dim, 1)?;
        if image_size % patch_size != 0 {
            let (found, expected) = (image_size.to_string(), format!("divisible by the patches' size, {patch_size}"));
            return Err(NnError::InvalidOption { layer: MODEL, option: "image_size", found, expected });
        }
        let conv_proj = Conv2d::builder(3, hidden_dim, patch_size).stride(patch_size).build()?;
        let class_token = Tensor::f_zeros([1, 1, hidden_dim], (Kind::Float, Device::Cpu))?;
        let encoder = Encoder::new(self)?;
        let head = Linear::new(hidden_dim, num_classes)?;
        let fan_in = (3 * patch_size * patch_size) as f64;
        init::trunc_normal_(&conv_proj.weight, 0.0, (1.0 / fan_in).sqrt(), -2.0, 2.0)?;
        for zeroed in [conv_proj.bias.as_deref(), Some(&*head.weight), head.bias.as_deref()].into_iter().flatten() {
            init::zeros_(zeroed)?;
        }
        Ok(VisionTransformer {
            class_token: Parameter::new(&class_token)?,
            conv_proj,
            encoder,
            heads: VisionHeads { head },
            state: ModuleState::default(),
            image_size,
        })
    }
}

impl VisionTransformer {
    /// # Shapes
    /// `[batch, 3, image_size, image_size]` to `[batch, num_classes]`.
    ///
    /// # Errors
    /// When the input has another shape, dtype or device.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.check(x).map_err(|error| named(self, &self.state, error.into()))?;
        let patches = self.conv_proj.forward(x)?.f_flatten(2, -1)?.f_permute([0, 2, 1])?;
        let class = self.class_token.f_expand([patches.size()[0], -1, -1], false)?;
        let x = self.encoder.forward(&Tensor::f_cat(&[class, patches], 1)?)?;
        self.heads.head.forward(&x.f_select(1, 0)?)
    }

    fn check(&self, x: &Tensor) -> Result<(), TchError> {
        match x.size()[..] {
            [_, 3, height, width] if (height, width) == (self.image_size, self.image_size) => Ok(()),
            _ => {
                let (expected, found) = (self.image_size, x.size());
                Err(TchError::Shape(format!("expected [batch, 3, {expected}, {expected}], got shape {found:?}")))
            }
        }
    }
}

#[derive(Debug, Module)]
struct Encoder {
    pos_embedding: Parameter,
    dropout: Dropout,
    layers: EncoderLayers,
    ln: LayerNorm,
}

impl Encoder {
    fn new(options: VisionTransformerBuilder) -> Result<Self, NnError> {
        let VisionTransformerBuilder { image_size, patch_size, num_layers, hidden_dim, dropout, .. } = options;
        let rows = image_size / patch_size;
        let pos_embedding = empty(&[1, rows.saturating_mul(rows).saturating_add(1), hidden_dim])?;
        init::normal_(&pos_embedding, 0.0, 0.02)?;
        Ok(Self {
            pos_embedding: Parameter::new(&pos_embedding)?,
            dropout: Dropout::new(dropout)?,
            layers: EncoderLayers((0..num_layers).map(|_| EncoderBlock::new(options)).collect::<Result<_, _>>()?),
            ln: LayerNorm::builder(hidden_dim).eps(EPS).build()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let x = self.dropout.forward(&x.f_add(&self.pos_embedding)?)?;
        let x = self.layers.0.iter().try_fold(x, |x, layer| layer.forward(&x))?;
        self.ln.forward(&x)
    }
}

#[derive(Debug)]
struct EncoderLayers(Vec<EncoderBlock>);

impl Module for EncoderLayers {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        for (index, layer) in self.0.iter().enumerate() {
            visitor.module(&format!("encoder_layer_{index}"), layer);
        }
    }

    fn as_any(&self) -> Option<&dyn std::any::Any> {
        Some(self)
    }
}

#[derive(Debug, Module)]
struct EncoderBlock {
    ln_1: LayerNorm,
    self_attention: MultiheadAttention,
    dropout: Dropout,
    ln_2: LayerNorm,
    mlp: Sequential,
}

impl EncoderBlock {
    fn new(options: VisionTransformerBuilder) -> Result<Self, NnError> {
        let VisionTransformerBuilder { hidden_dim, num_heads, mlp_dim, dropout, attention_dropout, .. } = options;
        let attention = MultiheadAttention::builder(hidden_dim, num_heads).dropout(attention_dropout).batch_first(true);
        let norm = || LayerNorm::builder(hidden_dim).eps(EPS).build();
        Ok(Self {
            ln_1: norm()?,
            self_attention: attention.build()?,
            dropout: Dropout::new(dropout)?,
            ln_2: norm()?,
            mlp: perceptron(hidden_dim, mlp_dim, dropout)?,
        })
    }

    fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        let x = self.ln_1.forward(input)?;
        let how = Attend { need_weights: false, ..Attend::default() };
        let (x, _) = self.self_attention.attend(&x, &x, &x, how)?;
        let x = self.dropout.forward(&x)?.f_add(input)?;
        Ok(x.f_add(&self.mlp.forward(&self.ln_2.forward(&x)?)?)?)
    }
}

/// # Source
/// `MLPBlock` of torchvision
fn perceptron(hidden_dim: i64, mlp_dim: i64, dropout: f64) -> Result<Sequential, NnError> {
    let (first, last) = (Linear::new(hidden_dim, mlp_dim)?, Linear::new(mlp_dim, hidden_dim)?);
    for linear in [&first, &last] {
        init::xavier_uniform_(&linear.weight, 1.0)?;
        linear.bias.as_deref().map_or(Ok(()), |bias| init::normal_(bias, 0.0, 1e-6))?;
    }
    Ok(sequential![first, Gelu, Dropout::new(dropout)?, last, Dropout::new(dropout)?])
}
