//! Saved tensors in fewer bits.

use std::sync::Arc;

use overdrive_ffi::SyncTensor;
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::Packed;
use tch::{Kind, TchError, Tensor};

use super::Store;

/// How floating-point tensors are rounded. Boolean ones, such as masks of dropout, are kept exactly, in one bit each, and so
/// is what ReLU saves of its result: whether it is positive. Integers, complex numbers and what has no fewer bits than
/// before stay as they are.
///
/// Of the last two, a CPU's tensor with an infinity or a NaN stays as it is. On a GPU the host would have to wait to know:
/// there all that shares a scale with it becomes NaN, and so do gradients. Use `BFloat16` where logits are masked with
/// infinities.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// 8 bits of exponent and 7 of mantissa.
    BFloat16,
    /// 4 bits of exponent and 3 of mantissa; numbers are scaled so that the largest one of the tensor is 448.
    Float8,
    /// 8 bits, scaled by the largest number of each block of 256.
    Int8,
}

/// The largest float8 number (e4m3).
const LARGEST_FLOAT8: f64 = 448.0;
/// Numbers that share a scale.
const BLOCK: i64 = 256;

impl Store for Compression {
    fn store(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        let kind = tensor.kind();
        if tensor.numel() == 0 {
            return Ok(None);
        }
        if kind == Kind::Bool {
            return Ok(Some(Arc::new(Bits::pack(tensor, kind)?)));
        }
        let bytes = if *self == Self::BFloat16 { 2 } else { 1 };
        if !tensor.is_floating_point() || kind.elt_size_in_bytes() <= bytes {
            return Ok(None);
        }
        // An infinity would be the scale of all. On a GPU, where looking would wait for it, all become NaN.
        let has_scale = *self != Self::BFloat16;
        let as_float = || tensor.f_to_kind(Kind::Float)?.f_isfinite()?.f_all()?.f_double_value(&[]);
        if has_scale && !tensor.device().is_cuda() && as_float()? != 1.0 {
            return Ok(None);
        }
        Ok(Some(match self {
            Self::BFloat16 => {
                Arc::new(Rounded { kind, rounded: SyncTensor(tensor.f_to_kind(Kind::BFloat16)?), scale: None })
            }
            Self::Float8 => Arc::new(Rounded::float8(tensor)?),
            Self::Int8 => Arc::new(Blocks::pack(tensor)?),
        }))
    }

    fn store_relu(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        // ReLU's gradient is 0 where its result is not above 0; a NaN is neither.
        Ok(Some(Arc::new(Bits::pack(&tensor.f_le(0.0)?.f_logical_not()?, tensor.kind())?)))
    }
}

/// A scale that makes the largest of these absolute values `to`; 1 where all are 0.
fn scale(largest: &Tensor, to: f64) -> Result<Tensor, TchError> {
    let scale = largest.f_to_kind(Kind::Float)? / to;
    scale.f_masked_fill(&scale.f_eq(0.0)?, 1.0)
}

/// One in another dtype.
struct Rounded {
    kind: Kind,
    rounded: SyncTensor,
    scale: Option<SyncTensor>,
}

impl Rounded {
    fn float8(tensor: &Tensor) -> Result<Self, TchError> {
        let scale = scale(&tensor.f_abs()?.f_max()?, LARGEST_FLOAT8)?;
        let rounded = tensor.f_to_kind(Kind::Float)?.f_div(&scale)?.f_to_kind(Kind::Float8e4m3fn)?;
        Ok(Self { kind: tensor.kind(), rounded: SyncTensor(rounded), scale: Some(SyncTensor(scale)) })
    }
}

impl Packed for Rounded {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        Ok(match &self.scale {
            None => self.rounded.f_to_kind(self.kind)?,
            Some(scale) => self.rounded.f_to_kind(Kind::Float)?.f_mul(scale)?.f_to_kind(self.kind)?,
        })
    }
}

/// One in 8 bits, with a scale a block.
struct Blocks {
    kind: Kind,
    shape: Vec<i64>,
    blocks: SyncTensor,
    scales: SyncTensor,
}

impl Blocks {
    fn pack(tensor: &Tensor) -> Result<Self, TchError> {
        let blocks = in_rows(&tensor.f_to_kind(Kind::Float)?, BLOCK)?;
        let scales = scale(&blocks.f_abs()?.f_amax([1].as_slice(), true)?, 127.0)?;
        let blocks = blocks.f_div(&scales)?.f_round()?.f_to_kind(Kind::Int8)?;
        Ok(Self { kind: tensor.kind(), shape: tensor.size(), blocks: SyncTensor(blocks), scales: SyncTensor(scales) })
    }
}

impl Packed for Blocks {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let numbers = self.blocks.f_to_kind(Kind::Float)?.f_mul(&self.scales)?;
        Ok(from_rows(&numbers, &self.shape)?.f_to_kind(self.kind)?)
    }
}

/// A mask with eight elements a byte, and the dtype in which it is zeros and ones.
struct Bits {
    kind: Kind,
    shape: Vec<i64>,
    bytes: SyncTensor,
}

/// What each element of eight stands for.
fn bit_values(of: &Tensor) -> Result<Tensor, TchError> {
    Tensor::f_from_slice(&[1u8, 2, 4, 8, 16, 32, 64, 128])?.f_to_device(of.device())
}

impl Bits {
    fn pack(tensor: &Tensor, kind: Kind) -> Result<Self, TchError> {
        let rows = in_rows(&tensor.f_to_kind(Kind::Uint8)?, 8)?;
        let bytes = rows.f_mul(&bit_values(tensor)?)?.f_sum_dim_intlist([1].as_slice(), false, Kind::Uint8)?;
        Ok(Self { kind, shape: tensor.size(), bytes: SyncTensor(bytes) })
    }
}

impl Packed for Bits {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let bits = self.bytes.f_unsqueeze(1)?.f_bitwise_and_tensor(&bit_values(&self.bytes)?)?;
        Ok(from_rows(&bits.f_ne(0)?, &self.shape)?.f_to_kind(self.kind)?)
    }
}

/// All elements in rows of this length, the last one filled up with zeros.
fn in_rows(tensor: &Tensor, length: i64) -> Result<Tensor, TchError> {
    let flat = tensor.f_reshape([-1])?;
    let missing = (length - flat.size()[0] % length) % length;
    flat.f_constant_pad_nd([0, missing])?.f_view([-1, length])
}

/// The elements as they were before [`in_rows`].
fn from_rows(rows: &Tensor, shape: &[i64]) -> Result<Tensor, TchError> {
    rows.f_reshape([-1])?.f_narrow(0, 0, shape.iter().product())?.f_view(shape)
}
