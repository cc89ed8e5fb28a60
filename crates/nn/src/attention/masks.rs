//! Shapes and masks of attention.

use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, TchError, Tensor};

use crate::error::NnError;

static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");

/// The sizes of one call of attention: the number of sequences, their lengths, and the number of heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shapes {
    /// None without a batch dimension.
    pub(super) batch: Option<i64>,
    pub(super) queries: i64,
    pub(super) keys: i64,
    pub(super) heads: i64,
    pub(super) batch_first: bool,
}

impl Shapes {
    /// The sizes of these inputs, whose vectors should have the lengths `sizes`; an error if the shapes do not fit.
    pub(super) fn of(
        [query, key, value]: [&Tensor; 3],
        sizes: [i64; 3],
        heads: i64,
        batch_first: bool,
    ) -> Result<Self, TchError> {
        let found = [query.size(), key.size(), value.size()];
        let (batch, queries) = match (&found[0][..], batch_first) {
            (&[queries, _], _) => (None, queries),
            (&[batch, queries, _], true) | (&[queries, batch, _], false) => (Some(batch), queries),
            _ => return Err(wrong("the query", &found[0], "of 2 dimensions, or of 3 with a batch")),
        };
        let place = usize::from(batch.is_some() && batch_first);
        let keys = found[1].get(place).copied().unwrap_or_default();
        let shapes = Self { batch, queries, keys, heads, batch_first };
        let lengths = [queries, keys, keys];
        for (number, name) in ["the query", "the key", "the value"].into_iter().enumerate() {
            let expected = shapes.input(lengths[number], sizes[number]);
            if found[number] != expected {
                return Err(wrong(name, &found[number], &format!("{expected:?}")));
            }
        }
        Ok(shapes)
    }

    fn input(self, length: i64, size: i64) -> Vec<i64> {
        match self.batch {
            None => vec![length, size],
            Some(batch) if self.batch_first => vec![batch, length, size],
            Some(batch) => vec![length, batch, size],
        }
    }

    /// The number of sequences, 1 without a batch dimension.
    pub(super) fn sequences(self) -> i64 {
        self.batch.unwrap_or(1)
    }

    /// The number of sequences times the number of heads.
    pub(super) fn rows(self) -> i64 {
        self.sequences() * self.heads
    }
}

fn wrong(what: &str, found: &[i64], expected: &str) -> TchError {
    TchError::Shape(format!("{what} is {found:?}, but has to be {expected}"))
}

/// Masks that are added to the scores.
#[derive(Debug, Default)]
pub(crate) struct Masks {
    /// `[batch, keys]`, or `[keys]` without a batch.
    pub(crate) key_padding: Option<Tensor>,
    /// `[queries, keys]` or `[batch * heads, queries, keys]`.
    pub(crate) attn: Option<Tensor>,
}

impl Masks {
    /// Checks the masks' shapes, and converts bool masks to `kind`, the dtype of the scores.
    pub(crate) fn new(
        attn: Option<&Tensor>,
        key_padding: Option<&Tensor>,
        is_causal: bool,
        shapes: Shapes,
        kind: Kind,
    ) -> Result<Self, NnError> {
        if is_causal && attn.is_none() {
            let (found, expected) =
                ("true without a mask".to_owned(), "given together with the causal mask".to_owned());
            return Err(NnError::InvalidOption { layer: "MultiheadAttention", option: "is_causal", found, expected });
        }
        let Shapes { batch, queries, keys, .. } = shapes;
        if let Some(mask) = key_padding {
            let expected = batch.map_or(vec![keys], |batch| vec![batch, keys]);
            if mask.size() != expected {
                return Err(wrong("the key padding mask", &mask.size(), &format!("{expected:?}")).into());
            }
        }
        if let Some(mask) = attn {
            let (plain, each) = ([queries, keys], [shapes.rows(), queries, keys]);
            if mask.size() != plain && mask.size() != each {
                return Err(wrong("the attention mask", &mask.size(), &format!("{plain:?} or {each:?}")).into());
            }
        }
        Ok(Self {
            key_padding: key_padding.map(|mask| added(mask, kind)).transpose()?,
            attn: attn.map(|mask| added(mask, kind)).transpose()?,
        })
    }

    /// Both masks as one, and PyTorch's `mask_type` for its fused operators: 1 for key padding alone, 2 with an
    /// attention mask.
    pub(crate) fn merged(&self, shapes: Shapes) -> Result<(Option<Tensor>, Option<i64>), TchError> {
        let (batch, heads, length) = (shapes.sequences(), shapes.heads, shapes.queries);
        let Some(attn) = &self.attn else {
            let mask = self.key_padding.as_ref().map(Tensor::shallow_clone);
            return Ok((mask, self.key_padding.is_some().then_some(1)));
        };
        let attn = match attn.dim() {
            3 => attn.f_view([batch, -1, length, length])?,
            _ => attn.f_view([1, 1, length, length])?.f_expand([batch, heads, -1, -1], false)?,
        };
        let mask = match &self.key_padding {
            Some(padding) => {
                attn.f_add(&padding.f_view([batch, 1, 1, length])?.f_expand([-1, heads, -1, -1], false)?)?
            }
            None => attn,
        };
        Ok((Some(mask), Some(2)))
    }

    /// Extends the masks by one more key, to which every position may attend.
    pub(super) fn add_key(&mut self) -> Result<(), TchError> {
        for mask in [&mut self.attn, &mut self.key_padding].into_iter().flatten() {
            *mask = mask.f_pad([0, 1], "constant", None)?;
        }
        Ok(())
    }

    /// Both masks as one that broadcasts to `[rows, queries, keys]`; `keys` includes the keys that were added.
    pub(super) fn by_head(self, shapes: Shapes, keys: i64) -> Result<Option<Tensor>, TchError> {
        let attn = match self.attn {
            Some(mask) if mask.dim() == 2 => Some(mask.f_unsqueeze(0)?),
            mask => mask,
        };
        let Some(padding) = self.key_padding else { return Ok(attn) };
        let padding = padding.f_view([shapes.sequences(), 1, 1, keys])?.f_expand([-1, shapes.heads, -1, -1], false)?;
        let padding = padding.f_reshape([shapes.rows(), 1, keys])?;
        attn.map_or(Ok(padding.shallow_clone()), |attn| attn.f_add(&padding)).map(Some)
    }

    /// Whether the attention mask equals that of [`generate_square_subsequent_mask`].
    pub(crate) fn are_causal(&self, shapes: Shapes) -> Result<bool, NnError> {
        let length = shapes.queries;
        match &self.attn {
            Some(mask) if mask.size() == [length, length] => {
                Ok(mask.f_equal(&generate_square_subsequent_mask(length, (mask.f_kind()?, mask.device()))?)?)
            }
            _ => Ok(false),
        }
    }
}

/// A mask to add to the scores. In a bool mask, true becomes minus infinity and false 0; other masks stay as they are.
fn added(mask: &Tensor, kind: Kind) -> Result<Tensor, NnError> {
    if mask.f_is_floating_point()? {
        return Ok(mask.shallow_clone());
    }
    let found = mask.f_kind()?;
    if found != Kind::Bool {
        return Err(TchError::Kind(format!("a mask is {found:?}, but has to be Bool or floating-point")).into());
    }
    let zeros = Tensor::f_zeros(mask.size(), (kind, mask.device()))?;
    Ok(MASKED_FILL.tensor(&[Arg::Tensor(&zeros), Arg::Tensor(mask), Arg::Double(f64::NEG_INFINITY)])?)
}

/// The causal mask: each position attends to itself and those before it. Minus infinity above the diagonal, else 0.
///
/// # Errors
/// When `size` is negative, the dtype is not floating-point, or memory runs out.
///
/// # Source
/// `torch.nn.Transformer.generate_square_subsequent_mask`
pub fn generate_square_subsequent_mask(size: i64, options: (Kind, Device)) -> Result<Tensor, NnError> {
    let (kind, device) = options;
    added(&Tensor::f_ones([size, size], (Kind::Bool, device))?.f_triu(1)?, kind)
}
