//! Attention step by step, with gradients.
//!
//! # Source
//! `torch.nn.functional.multi_head_attention_forward`: the same operators in the same order.

use overdrive_ffi::{Arg, LazyOp, TensorId};
use tch::{TchError, Tensor};

use super::masks::{Masks, Shapes};
use super::{Attend, MultiheadAttention};
use crate::error::NnError;

// tch's forms of these panic when libtorch refuses.
static BADDBMM: LazyOp = LazyOp::new("aten::baddbmm", "");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

impl MultiheadAttention {
    pub(super) fn attend_in_steps(
        &self,
        inputs: [&Tensor; 3],
        mut masks: Masks,
        shapes: Shapes,
        how: Attend<'_>,
    ) -> Result<(Tensor, Option<Tensor>), NnError> {
        let is_causal = how.is_causal && masks.key_padding.is_none();
        if is_causal && !how.need_weights {
            masks.attn = None;
        }
        let [q, k, v] = self.projected(inputs, shapes)?;
        let (k, v) = self.with_biases(k, v, &mut masks, shapes)?;
        let by_head = |x: Tensor| x.f_view([x.size()[0], shapes.rows(), self.head_size()])?.f_transpose(0, 1);
        let (q, k, v) = (by_head(q)?, by_head(k)?, by_head(v)?);
        let (k, v) = self.with_zeros(k, v, &mut masks)?;
        let keys = k.size()[1];
        let mask = masks.by_head(shapes, keys)?;
        let dropout = if self.state.is_training() { self.options.dropout } else { 0.0 };
        let (output, weights) = match how.need_weights {
            true => weighted([&q, &k, &v], mask.as_ref(), dropout)?,
            false => (self.fast([&q, &k, &v], mask, dropout, is_causal, shapes)?, None),
        };
        let (sequences, embed_dim) = (shapes.sequences(), self.options.embed_dim);
        let output = output.f_contiguous()?.f_view([shapes.queries * sequences, embed_dim])?;
        let output = output.f_linear(&self.out_proj.weight, self.out_proj.bias.as_deref())?;
        let output = output.f_view([shapes.queries, sequences, output.size()[1]])?;
        let weights = weights.map(|weights| shown(&weights, shapes, keys, how)).transpose()?;
        let output = match (shapes.batch, shapes.batch_first) {
            (None, _) => output.f_squeeze_dim(1)?,
            (_, true) => output.f_transpose(1, 0)?,
            (_, false) => output,
        };
        Ok((output, weights))
    }

    /// The output without the weights, `[queries, batch, heads, size]`, by libtorch's fast kernels.
    fn fast(
        &self,
        inputs: [&Tensor; 3],
        mask: Option<Tensor>,
        dropout: f64,
        is_causal: bool,
        shapes: Shapes,
    ) -> Result<Tensor, TchError> {
        let [batch, heads] = [shapes.sequences(), shapes.heads];
        let mask = mask.map(|mask| match mask.size()[..] {
            [1, ..] => mask.f_unsqueeze(0),
            [_, queries, keys] => mask.f_view([batch, heads, queries, keys]),
            _ => Ok(mask),
        });
        let [q, k, v] = inputs.map(|x| x.f_view([batch, heads, x.size()[1], self.head_size()]));
        let mask = mask.transpose()?;
        let output = Tensor::f_scaled_dot_product_attention(&q?, &k?, &v?, mask, dropout, is_causal, None, false)?;
        output.f_permute([2, 0, 1, 3])
    }

    fn head_size(&self) -> i64 {
        self.options.embed_dim / self.options.num_heads
    }

    /// Queries, keys and values, `[length, batch, embed_dim]`.
    fn projected(&self, [query, key, value]: [&Tensor; 3], shapes: Shapes) -> Result<[Tensor; 3], TchError> {
        // Not without a batch: PyTorch adds a batch dimension to each input, and then no longer sees that they are one
        // tensor.
        let is_same = |a, b| shapes.batch.is_some() && TensorId::of(a) == TensorId::of(b);
        let is_kv = is_same(key, value);
        let is_self = is_kv && is_same(query, key);
        let length_first = |input: &Tensor| match (shapes.batch, shapes.batch_first) {
            (None, _) => input.f_unsqueeze(1),
            (_, true) => input.f_transpose(1, 0),
            (_, false) => Ok(input.shallow_clone()),
        };
        let query = length_first(query)?;
        let key = if is_self { query.shallow_clone() } else { length_first(key)? };
        let value = if is_kv { key.shallow_clone() } else { length_first(value)? };
        let (bias, size) = (self.in_proj_bias.as_deref(), self.options.embed_dim);
        let weights = match (&self.in_proj_weight, &self.q_proj_weight, &self.k_proj_weight, &self.v_proj_weight) {
            (Some(weight), ..) if is_self => {
                let all = stacked(&query.f_linear(weight, bias)?, 3, size)?;
                return Ok([all.f_select(0, 0)?, all.f_select(0, 1)?, all.f_select(0, 2)?]);
            }
            (Some(weight), ..) if is_kv => {
                let [first, rest] = first_and_rest(weight, size)?;
                let biases = bias.map(|bias| first_and_rest(bias, size)).transpose()?;
                let query = query.f_linear(&first, biases.as_ref().map(|it| &it[0]))?;
                let both = stacked(&key.f_linear(&rest, biases.as_ref().map(|it| &it[1]))?, 2, size)?;
                return Ok([query, both.f_select(0, 0)?, both.f_select(0, 1)?]);
            }
            (Some(weight), ..) => thirds(weight)?,
            (None, Some(q), Some(k), Some(v)) => [q, k, v].map(|weight| weight.shallow_clone()),
            _ => return Err(TchError::Shape("a weight of the queries, keys or values is missing".to_owned())),
        };
        let biases = bias.map(thirds).transpose()?;
        let project = |number: usize, input: &Tensor| {
            input.f_linear(&weights[number], biases.as_ref().map(|biases| &biases[number]))
        };
        Ok([project(0, &query)?, project(1, &key)?, project(2, &value)?])
    }

    /// The learned key and value, if there are any, after the others.
    fn with_biases(
        &self,
        k: Tensor,
        v: Tensor,
        masks: &mut Masks,
        shapes: Shapes,
    ) -> Result<(Tensor, Tensor), TchError> {
        let (Some(bias_k), Some(bias_v)) = (&self.bias_k, &self.bias_v) else { return Ok((k, v)) };
        let with = |x: &Tensor, bias: &Tensor| Tensor::f_cat(&[x, &bias.f_repeat([1, shapes.sequences(), 1])?], 0);
        let longer = (with(&k, bias_k)?, with(&v, bias_v)?);
        masks.add_key()?;
        Ok(longer)
    }

    /// A key and a value of zeros, if they are asked for, after the others.
    fn with_zeros(&self, k: Tensor, v: Tensor, masks: &mut Masks) -> Result<(Tensor, Tensor), TchError> {
        if !self.options.add_zero_attn {
            return Ok((k, v));
        }
        let with = |x: &Tensor| {
            let zeros = Tensor::f_zeros([x.size()[0], 1, self.head_size()], (x.f_kind()?, x.device()))?;
            Tensor::f_cat(&[x, &zeros], 1)
        };
        let longer = (with(&k)?, with(&v)?);
        masks.add_key()?;
        Ok(longer)
    }
}

/// The output, `[queries, batch * heads, size]`, and the weights.
fn weighted([q, k, v]: [&Tensor; 3], mask: Option<&Tensor>, dropout: f64) -> Result<(Tensor, Option<Tensor>), NnError> {
    let scale = (1.0 / q.size()[2] as f64).sqrt();
    let (q, k) = (MUL.tensor(&[Arg::Tensor(q), Arg::Double(scale)])?, k.f_transpose(-2, -1)?);
    let scores = match mask {
        Some(mask) => BADDBMM.tensor(&[Arg::Tensor(mask), Arg::Tensor(&q), Arg::Tensor(&k)])?,
        None => q.f_bmm(&k)?,
    };
    let weights = scores.f_softmax(-1, None)?;
    let weights = if dropout > 0.0 { weights.f_dropout(dropout, true)? } else { weights };
    Ok((weights.f_bmm(v)?.f_transpose(0, 1)?, Some(weights)))
}

/// The weights as they are returned.
fn shown(weights: &Tensor, shapes: Shapes, keys: i64, how: Attend<'_>) -> Result<Tensor, TchError> {
    let weights = weights.f_view([shapes.sequences(), shapes.heads, shapes.queries, keys])?;
    let weights = if how.average_attn_weights { weights.f_mean_dim([1].as_slice(), false, None)? } else { weights };
    if shapes.batch.is_none() { weights.f_squeeze_dim(0) } else { Ok(weights) }
}

/// `[.., parts * size]` as `[parts, .., size]`.
fn stacked(projected: &Tensor, parts: i64, size: i64) -> Result<Tensor, TchError> {
    projected.f_unflatten(-1, [parts, size])?.f_unsqueeze(0)?.f_transpose(0, -2)?.f_squeeze_dim(-2)?.f_contiguous()
}

fn thirds(packed: &Tensor) -> Result<[Tensor; 3], TchError> {
    packed.f_chunk(3, 0)?.try_into().map_err(|_| TchError::Shape(format!("{:?} is not 3 equal parts", packed.size())))
}

fn first_and_rest(packed: &Tensor, size: i64) -> Result<[Tensor; 2], TchError> {
    let parts = packed.f_split_with_sizes([size, 2 * size], 0)?;
    parts.try_into().map_err(|_| TchError::Shape(format!("{:?} is not 3 equal parts", packed.size())))
}
