//! GPT-2.

use std::f64::consts::PI;

use overdrive_core::ModuleState;
use overdrive_ffi::{Arg, LazyOp};
use overdrive_nn_macros::Module;
use tch::{Device, Kind, TchError, Tensor};

use super::blocks::{builder, check_probability};
use crate::layer::{at_least, empty, named, run};
use crate::{Dropout, Embedding, LayerNorm, Linear, ModuleList, NnError, Parameter, init};

static POW: LazyOp = LazyOp::new("aten::pow", "Tensor_Scalar");

const MODEL: &str = "Gpt2LmHeadModel";

/// GPT-2 with its head for language modeling, whose weight is that of the token embedding; parameters have the names of
/// Hugging Face.
///
/// # Source
/// `transformers.GPT2LMHeadModel` of transformers 5.23 with `attn_implementation="sdpa"`; Radford et al., "Language
/// Models are Unsupervised Multitask Learners", 2019.
#[derive(Debug, Module)]
#[doc(alias = "GPT2LMHeadModel")]
pub struct Gpt2LmHeadModel {
    transformer: Transformer,
    /// The head.
    pub lm_head: Linear,
    state: ModuleState,
}

builder! {
    Gpt2LmHeadModel => Gpt2LmHeadModelBuilder {
        /// The number of tokens in the vocabulary; default 50257.
        vocab_size: i64 = 50257,
        /// The length of the longest sequence; default 1024.
        n_positions: i64 = 1024,
        /// The size of the embeddings and hidden states; default 768.
        n_embd: i64 = 768,
        /// The number of layers; default 12.
        n_layer: usize = 12,
        /// The number of heads of each attention; default 12.
        n_head: i64 = 12,
        /// The probability of dropout after each attention and MLP; default 0.1.
        resid_pdrop: f64 = 0.1,
        /// The probability of dropout after the embeddings; default 0.1.
        embd_pdrop: f64 = 0.1,
        /// The probability that an attention weight is dropped in training; default 0.1.
        attn_pdrop: f64 = 0.1,
        /// What is added to the variance in normalizations; default 1e-5.
        layer_norm_epsilon: f64 = 1e-5,
        /// The standard deviation of the initial weights; default 0.02.
        initializer_range: f64 = 0.02,
    }
}

/// The small GPT-2, with the defaults of `GPT2Config`.
///
/// # Errors
/// When memory runs out.
///
/// The hub's own files leave out the prefix `transformer.` and hold masks: load them by
/// `LoadStateDict::new(&state).rename(|name| format!("transformer.{name}")).strict(false)`.
///
/// # Source
/// `GPT2LMHeadModel(GPT2Config())`
#[doc(alias = "GPT2Config")]
pub fn gpt2() -> Result<Gpt2LmHeadModel, NnError> {
    Gpt2LmHeadModel::builder().build()
}

impl Gpt2LmHeadModelBuilder {
    /// The model with new weights.
    ///
    /// # Errors
    /// When `n_head` does not divide `n_embd`, another option is out of its range, or memory runs out.
    pub fn build(self) -> Result<Gpt2LmHeadModel, NnError> {
        let Self { vocab_size, n_positions, n_embd, n_head, attn_pdrop, initializer_range, .. } = self;
        let sizes = [("vocab_size", vocab_size), ("n_positions", n_positions), ("n_embd", n_embd), ("n_head", n_head)];
        sizes.into_iter().try_for_each(|(option, size)| at_least(MODEL, option, size, 1))?;
        check_probability(MODEL, "attn_pdrop", attn_pdrop)?;
        if n_embd % n_head != 0 {
            let (found, expected) = (n_embd.to_string(), format!("divisible by the {n_head} heads"));
            return Err(NnError::InvalidOption { layer: MODEL, option: "n_embd", found, expected });
        }
        let transformer = Transformer::new(self)?;
        let mut lm_head = Linear::builder(n_embd, vocab_size).bias(false).build()?;
        // As in Hugging Face, the head gets random weights of its own before it is tied to the embedding: without them,
        // the next random numbers would differ.
        init::normal_(&lm_head.weight, 0.0, initializer_range)?;
        lm_head.weight = transformer.wte.weight.tie();
        Ok(Gpt2LmHeadModel { transformer, lm_head, state: ModuleState::default() })
    }
}

impl Gpt2LmHeadModel {
    /// The scores of each token as the next one.
    ///
    /// # Shapes
    /// Tokens, `[batch, length]`, int64, to `[batch, length, vocab_size]`.
    ///
    /// # Errors
    /// When sequences are longer than `n_positions`, a token is not in the vocabulary (on a CPU), or the shape, dtype
    /// or device is wrong.
    pub fn forward(&self, input_ids: &Tensor) -> Result<Tensor, NnError> {
        let (size, longest) = (input_ids.size(), self.transformer.wpe.weight.size()[0]);
        if !matches!(size[..], [_, length] if length <= longest) {
            let error = TchError::Shape(format!("expected [batch, length] of at most {longest}, got shape {size:?}"));
            return Err(named(self, &self.state, error.into()));
        }
        self.lm_head.forward(&self.transformer.forward(input_ids)?)
    }
}

#[derive(Debug, Module)]
struct Transformer {
    wte: Embedding,
    wpe: Embedding,
    drop: Dropout,
    h: ModuleList<Block>,
    ln_f: LayerNorm,
}

impl Transformer {
    fn new(options: Gpt2LmHeadModelBuilder) -> Result<Self, NnError> {
        let Gpt2LmHeadModelBuilder { n_embd, n_layer, initializer_range: std, .. } = options;
        let own = Self {
            wte: Embedding::new(options.vocab_size, n_embd)?,
            wpe: Embedding::new(options.n_positions, n_embd)?,
            drop: Dropout::new(options.embd_pdrop)?,
            h: (0..n_layer).map(|_| Block::new(options)).collect::<Result<_, _>>()?,
            ln_f: LayerNorm::builder(n_embd).eps(options.layer_norm_epsilon).build()?,
        };
        // As in Hugging Face, all weights are initialised again once the model is complete, and the output projections
        // of residual branches once more: one seed then gives the same weights.
        init::normal_(&own.wte.weight, 0.0, std)?;
        init::normal_(&own.wpe.weight, 0.0, std)?;
        let scaled = std / (2.0 * n_layer as f64).sqrt();
        for block in own.h.iter() {
            let Block { attn, mlp, .. } = block;
            for (first, projection) in [(&attn.c_attn, &attn.c_proj), (&mlp.c_fc, &mlp.c_proj)] {
                init::normal_(&first.weight, 0.0, std)?;
                init::normal_(&projection.weight, 0.0, std)?;
                init::normal_(&projection.weight, 0.0, scaled)?;
            }
        }
        Ok(own)
    }

    fn forward(&self, input_ids: &Tensor) -> Result<Tensor, NnError> {
        let positions = Tensor::arange(input_ids.size()[1], (Kind::Int64, input_ids.device())).f_unsqueeze(0)?;
        let x = self.wte.forward(input_ids)?.f_add(&self.wpe.forward(&positions)?)?;
        let x = self.h.iter().try_fold(self.drop.forward(&x)?, |x, block| block.forward(&x))?;
        self.ln_f.forward(&x)
    }
}

#[derive(Debug, Module)]
struct Block {
    ln_1: LayerNorm,
    attn: Attention,
    ln_2: LayerNorm,
    mlp: Perceptron,
}

impl Block {
    fn new(options: Gpt2LmHeadModelBuilder) -> Result<Self, NnError> {
        let Gpt2LmHeadModelBuilder { n_embd, n_head, resid_pdrop, attn_pdrop, layer_norm_epsilon, .. } = options;
        let norm = || LayerNorm::builder(n_embd).eps(layer_norm_epsilon).build();
        Ok(Self {
            ln_1: norm()?,
            attn: Attention {
                c_attn: Conv1D::new(n_embd, 3 * n_embd)?,
                c_proj: Conv1D::new(n_embd, n_embd)?,
                resid_dropout: Dropout::new(resid_pdrop)?,
                state: ModuleState::default(),
                n_head,
                attn_pdrop,
            },
            ln_2: norm()?,
            mlp: Perceptron {
                c_fc: Conv1D::new(n_embd, 4 * n_embd)?,
                c_proj: Conv1D::new(4 * n_embd, n_embd)?,
                dropout: Dropout::new(resid_pdrop)?,
            },
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let x = self.attn.forward(&self.ln_1.forward(x)?)?.f_add(x)?;
        Ok(x.f_add(&self.mlp.forward(&self.ln_2.forward(&x)?)?)?)
    }
}

#[derive(Debug, Module)]
struct Attention {
    c_attn: Conv1D,
    c_proj: Conv1D,
    resid_dropout: Dropout,
    state: ModuleState,
    n_head: i64,
    attn_pdrop: f64,
}

impl Attention {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        let (all, n_embd) = (self.c_attn.forward(x)?, self.c_proj.weight.size()[0]);
        let attended = run(self, &self.state, || {
            let (size, head_size) = (x.size(), n_embd / self.n_head);
            let parts = all.f_split(n_embd, 2)?;
            let by_head = |part: usize| parts[part].f_view([size[0], size[1], -1, head_size])?.f_transpose(1, 2);
            // Contiguous, because Hugging Face's cache copies keys and values, and the operator sums contiguous ones in
            // another order.
            let (query, key, value) = (by_head(0)?, by_head(1)?.f_contiguous()?, by_head(2)?.f_contiguous()?);
            let dropout = if self.state.is_training() { self.attn_pdrop } else { 0.0 };
            let (is_causal, scale) = (size[1] > 1, (head_size as f64).powf(-0.5));
            let mask = None::<&Tensor>;
            Tensor::f_scaled_dot_product_attention(&query, &key, &value, mask, dropout, is_causal, scale, false)?
                .f_transpose(1, 2)?
                .f_reshape(&size)
        })?;
        self.resid_dropout.forward(&self.c_proj.forward(&attended)?)
    }
}

#[derive(Debug, Module)]
struct Perceptron {
    c_fc: Conv1D,
    c_proj: Conv1D,
    dropout: Dropout,
}

impl Perceptron {
    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.dropout.forward(&self.c_proj.forward(&gelu_new(&self.c_fc.forward(x)?)?)?)
    }
}

/// GELU, approximated with tanh. The operators and their order are Hugging Face's, because rounding depends on them.
///
/// # Source
/// `NewGELUActivation` of transformers
fn gelu_new(x: &Tensor) -> Result<Tensor, NnError> {
    let half = x * 0.5;
    let cube = POW.tensor(&[Arg::Tensor(x), Arg::Double(3.0)])?;
    let inner = x.f_add(&(cube * 0.044715))? * (2.0 / PI).sqrt();
    Ok(half.f_mul(&(inner.f_tanh()? + 1.0))?)
}

/// A linear layer whose weight is transposed.
///
/// # Source
/// `transformers.pytorch_utils.Conv1D`
#[derive(Debug, Module)]
struct Conv1D {
    weight: Parameter,
    bias: Parameter,
    state: ModuleState,
}

impl Conv1D {
    fn new(inputs: i64, outputs: i64) -> Result<Self, NnError> {
        let weight = empty(&[inputs, outputs])?;
        let bias = Tensor::f_zeros([outputs], (Kind::Float, Device::Cpu))?;
        init::normal_(&weight, 0.0, 0.02)?;
        Ok(Self { weight: Parameter::new(&weight)?, bias: Parameter::new(&bias)?, state: ModuleState::default() })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        run(self, &self.state, || {
            let weight = self.weight.size();
            let mut size = x.size();
            let rows = x.f_view([-1, weight[0]])?;
            size.truncate(size.len().saturating_sub(1));
            size.push(weight[1]);
            self.bias.f_addmm(&rows, &self.weight)?.f_view(&size[..])
        })
    }
}
