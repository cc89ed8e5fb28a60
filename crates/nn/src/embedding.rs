//! Embeddings.

use overdrive_core::ModuleState;
use overdrive_nn_macros::Module;
use tch::{TchError, Tensor};

use crate::error::NnError;
use crate::init;
use crate::layer::{at_least, empty, run};
use crate::tensors::Parameter;

/// A table of vectors, looked up by index.
///
/// # Source
/// `torch.nn.Embedding`
#[derive(Debug, Module)]
#[module(describe)]
pub struct Embedding {
    /// `[num_embeddings, embedding_dim]`.
    pub weight: Parameter,
    state: ModuleState,
    #[module(skip)]
    options: EmbeddingBuilder,
}

/// Options of an [`Embedding`].
#[derive(Clone, Copy, Debug)]
#[must_use = "options do nothing until `build`"]
pub struct EmbeddingBuilder {
    num_embeddings: i64,
    embedding_dim: i64,
    padding_idx: Option<i64>,
    scale_grad_by_freq: bool,
    sparse: bool,
}

impl EmbeddingBuilder {
    /// The index of a vector that is 0 at first and gets no gradient; a negative one counts from the end. Default none.
    pub fn padding_idx(mut self, padding_idx: i64) -> Self {
        self.padding_idx = Some(padding_idx);
        self
    }

    /// Whether gradients are divided by how often an index is in the batch; default false.
    pub fn scale_grad_by_freq(mut self, scale: bool) -> Self {
        self.scale_grad_by_freq = scale;
        self
    }

    /// Whether the gradient is a sparse tensor; default false.
    pub fn sparse(mut self, sparse: bool) -> Self {
        self.sparse = sparse;
        self
    }

    /// The layer with new weights.
    ///
    /// # Errors
    /// When a number is negative, `padding_idx` is not within the table, or memory runs out.
    pub fn build(mut self) -> Result<Embedding, NnError> {
        let Self { num_embeddings, embedding_dim, .. } = self;
        at_least("Embedding", "num_embeddings", num_embeddings, 0)?;
        at_least("Embedding", "embedding_dim", embedding_dim, 0)?;
        if let Some(index) = self.padding_idx {
            if !(-num_embeddings..num_embeddings).contains(&index) {
                let (found, expected) = (index.to_string(), format!("within {num_embeddings} embeddings"));
                return Err(NnError::InvalidOption { layer: "Embedding", option: "padding_idx", found, expected });
            }
            self.padding_idx = Some(index.rem_euclid(num_embeddings));
        }
        let weight = empty(&[num_embeddings, embedding_dim])?;
        init::normal_(&weight, 0.0, 1.0)?;
        if let Some(index) = self.padding_idx {
            init::zeros_(&weight.f_select(0, index)?)?;
        }
        Ok(Embedding { weight: Parameter::new(&weight)?, state: ModuleState::default(), options: self })
    }
}

impl Embedding {
    /// A table with PyTorch's defaults.
    ///
    /// # Errors
    /// When a number is negative, or memory runs out.
    pub fn new(num_embeddings: i64, embedding_dim: i64) -> Result<Self, NnError> {
        Self::builder(num_embeddings, embedding_dim).build()
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(num_embeddings: i64, embedding_dim: i64) -> EmbeddingBuilder {
        let (padding_idx, scale_grad_by_freq, sparse) = (None, false, false);
        EmbeddingBuilder { num_embeddings, embedding_dim, padding_idx, scale_grad_by_freq, sparse }
    }

    /// # Shapes
    /// `[..]`, int32 or int64, to `[.., embedding_dim]`.
    ///
    /// # Errors
    /// When an index is outside the table (on a CPU), or the dtype or device is wrong.
    pub fn forward(&self, input: &Tensor) -> Result<Tensor, NnError> {
        let EmbeddingBuilder { padding_idx, scale_grad_by_freq, sparse, .. } = self.options;
        let look_up = || -> Result<Tensor, TchError> {
            Tensor::f_embedding(&self.weight, input, padding_idx.unwrap_or(-1), scale_grad_by_freq, sparse)
        };
        run(self, &self.state, look_up)
    }

    fn describe(&self) -> String {
        let EmbeddingBuilder { num_embeddings, embedding_dim, padding_idx, scale_grad_by_freq, sparse } = self.options;
        let mut text = format!("Embedding({num_embeddings}, {embedding_dim}");
        if let Some(index) = padding_idx {
            text += &format!(", padding_idx={index}");
        }
        if scale_grad_by_freq {
            text += ", scale_grad_by_freq=True";
        }
        if sparse {
            text += ", sparse=True";
        }
        text + ")"
    }
}
