//! Saved tensors in fewer bits.

use std::sync::Arc;

use overdrive_ffi::SyncTensor;
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::Packed;
use tch::{Kind, TchError, Tensor};

use super::Store;
use crate::layout::dense_strides;

/// How floating-point tensors are rounded. Masks are kept exactly, in one bit an element: boolean tensors, those of two
/// values on a CPU, such as dropout's (0 and `1 / (1 - p)`), and what ReLU saves of its result, whether it is positive.
/// Integers, complex numbers and what has no fewer bits than before stay as they are.
///
/// No number becomes 0 that was not, so that the gradients of `log`, `div` and `sqrt` stay finite; of `BFloat16`, those
/// below 1e-40 do. But operators that look for a number in what they saved, such as `max`, `amax` and norms with infinity,
/// no longer find it: their gradients are 0 or NaN. Give such tensors to
/// [`leave_alone`](super::SavedTensors::leave_alone), or begin the hooks after them.
///
/// Of `Float8` and `Int8`, a CPU's tensor with an infinity or a NaN stays as it is. On a GPU the host would have to wait to know:
/// there all that shares a scale with it becomes NaN, and so do gradients. Use `BFloat16` where logits are masked with
/// infinities. A CPU's tensor with a number that is too large for bfloat16 stays as it is; on a GPU it becomes an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Compression {
    /// Not at all: masks alone are stored in another form, and gradients are the same to the bit.
    Masks,
    /// 8 bits of exponent and 7 of mantissa.
    BFloat16,
    /// 4 bits of exponent and 3 of mantissa; numbers are scaled so that the largest one of the tensor is 448.
    Float8,
    /// 8 bits, scaled by the largest number of each block of 256.
    Int8,
}

/// The largest float8 number (e4m3), and the least above 0.
const LARGEST_FLOAT8: f64 = 448.0;
const LEAST_FLOAT8: f64 = 1.0 / 512.0;
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
        if !tensor.is_floating_point() {
            return Ok(None);
        }
        // On a GPU the host would wait, and dropout saves boolean masks there.
        if !tensor.device().is_cuda()
            && let Some(mask) = TwoValues::pack(tensor)?
        {
            return Ok(Some(Arc::new(mask)));
        }
        let bytes = kind.elt_size_in_bytes();
        Ok(Some(match self {
            Self::BFloat16 if bytes > 2 => match Rounded::bfloat16(tensor)? {
                Some(rounded) => Arc::new(rounded),
                None => return Ok(None),
            },
            Self::Float8 if bytes > 1 && has_scale(tensor)? => Arc::new(Rounded::float8(tensor)?),
            Self::Int8 if bytes > 1 && has_scale(tensor)? => Arc::new(Blocks::pack(tensor)?),
            _ => return Ok(None),
        }))
    }

    fn store_relu(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        // ReLU's gradient is 0 where its result is not above 0; a NaN is neither.
        Ok(Some(Arc::new(Bits::pack(&tensor.f_le(0.0)?.f_logical_not()?, tensor.kind())?)))
    }
}

/// Whether its largest number is one: an infinity would be the scale of all. On a GPU, where looking would wait for it, all
/// become NaN.
fn has_scale(tensor: &Tensor) -> Result<bool, TchError> {
    let is_finite = || tensor.f_to_kind(Kind::Float)?.f_isfinite()?.f_all()?.f_double_value(&[]);
    Ok(tensor.device().is_cuda() || is_finite()? == 1.0)
}

/// A scale that makes the largest of these absolute values `to`; 1 where all are 0.
fn scale(largest: &Tensor, to: f64) -> Result<Tensor, TchError> {
    let scale = largest.f_to_kind(Kind::Float)? / to;
    scale.f_masked_fill(&scale.f_eq(0.0)?, 1.0)
}

/// `rounded`, with the least number of its kind, or its negative, where a number was rounded to 0.
fn not_to_zero(rounded: &Tensor, from: &Tensor, least: f64) -> Result<Tensor, TchError> {
    let lost = rounded.f_eq(0.0)?.f_to_kind(Kind::Float)? * least;
    rounded.f_add(&from.f_sign()?.f_mul(&lost)?)
}

/// One in another dtype.
struct Rounded {
    kind: Kind,
    rounded: SyncTensor,
    scale: Option<SyncTensor>,
}

impl Rounded {
    /// `None` where a finite number becomes infinite. On a GPU, where looking would wait for it, it does.
    fn bfloat16(tensor: &Tensor) -> Result<Option<Self>, TchError> {
        let rounded = tensor.f_to_kind(Kind::BFloat16)?;
        let as_infinite = || rounded.f_isinf()?.f_eq_tensor(&tensor.f_isinf()?)?.f_all()?.f_double_value(&[]);
        if !tensor.device().is_cuda() && as_infinite()? != 1.0 {
            return Ok(None);
        }
        Ok(Some(Self { kind: tensor.kind(), rounded: SyncTensor(rounded), scale: None }))
    }

    fn float8(tensor: &Tensor) -> Result<Self, TchError> {
        let scale = scale(&tensor.f_abs()?.f_max()?, LARGEST_FLOAT8)?;
        let scaled = tensor.f_to_kind(Kind::Float)?.f_div(&scale)?;
        let rounded = scaled.f_to_kind(Kind::Float8e4m3fn)?.f_to_kind(Kind::Float)?;
        let rounded = not_to_zero(&rounded, &scaled, LEAST_FLOAT8)?.f_to_kind(Kind::Float8e4m3fn)?;
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
    layout: Layout,
    blocks: SyncTensor,
    scales: SyncTensor,
}

impl Blocks {
    fn pack(tensor: &Tensor) -> Result<Self, TchError> {
        let layout = Layout::of(tensor);
        let blocks = layout.in_rows(&tensor.f_to_kind(Kind::Float)?, BLOCK)?;
        let scales = scale(&blocks.f_abs()?.f_amax([1].as_slice(), true)?, 127.0)?;
        let scaled = blocks.f_div(&scales)?;
        let blocks = not_to_zero(&scaled.f_round()?, &scaled, 1.0)?.f_to_kind(Kind::Int8)?;
        Ok(Self { kind: tensor.kind(), layout, blocks: SyncTensor(blocks), scales: SyncTensor(scales) })
    }
}

impl Packed for Blocks {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let numbers = self.blocks.f_to_kind(Kind::Float)?.f_mul(&self.scales)?;
        Ok(self.layout.of_rows(&numbers)?.f_to_kind(self.kind)?)
    }
}

/// A mask with eight elements a byte, and the dtype in which it is zeros and ones.
struct Bits {
    kind: Kind,
    layout: Layout,
    bytes: SyncTensor,
}

/// What each element of eight stands for. Made on the device, for which the host would wait otherwise.
fn bit_values(of: &Tensor) -> Result<Tensor, TchError> {
    let ones = Tensor::f_ones([8], (Kind::Uint8, of.device()))?;
    ones.f_bitwise_left_shift(&ones.f_cumsum(0, Kind::Uint8)?.f_sub(&ones)?)
}

impl Bits {
    fn pack(tensor: &Tensor, kind: Kind) -> Result<Self, TchError> {
        let layout = Layout::of(tensor);
        let rows = layout.in_rows(&tensor.f_to_kind(Kind::Uint8)?, 8)?;
        let bytes = rows.f_mul(&bit_values(tensor)?)?.f_sum_dim_intlist([1].as_slice(), false, Kind::Uint8)?;
        Ok(Self { kind, layout, bytes: SyncTensor(bytes) })
    }
}

impl Packed for Bits {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let bits = self.bytes.f_unsqueeze(1)?.f_bitwise_and_tensor(&bit_values(&self.bytes)?)?;
        Ok(self.layout.of_rows(&bits.f_ne(0)?)?.f_to_kind(self.kind)?)
    }
}

/// A mask of a floating-point dtype: two values, and which one each element has.
struct TwoValues {
    kind: Kind,
    /// As integers, of which two are equal only if all of their bits are.
    values: [SyncTensor; 2],
    is_second: Bits,
}

impl TwoValues {
    /// Looked at first: among this many elements, most tensors already have a third value.
    const FIRST: i64 = 64;

    /// `None` for a tensor of more values.
    fn pack(tensor: &Tensor) -> Result<Option<Self>, TchError> {
        let kind = tensor.kind();
        let integers = match kind.elt_size_in_bytes() {
            1 => Kind::Int8,
            2 => Kind::Int16,
            4 => Kind::Int,
            _ => Kind::Int64,
        };
        let numbers = tensor.f_detach()?.f_resolve_neg()?.f_view_dtype(integers)?;
        let size = tensor.size();
        let last = size.len().saturating_sub(1);
        let first = (0..last).try_fold(numbers.shallow_clone(), |numbers, _| numbers.f_select(0, 0))?;
        let first = first.f_reshape([-1])?.f_narrow(0, 0, size.last().copied().unwrap_or(1).min(Self::FIRST))?;
        if Self::ends(&first)?.is_none() {
            return Ok(None);
        }
        let Some([one, other]) = Self::ends(&numbers)? else { return Ok(None) };
        let is_second = Bits::pack(&numbers.f_eq_tensor(&other)?, Kind::Bool)?;
        Ok(Some(Self { kind, values: [SyncTensor(one), SyncTensor(other)], is_second }))
    }

    /// The least and the largest number, if there is none between.
    fn ends(numbers: &Tensor) -> Result<Option<[Tensor; 2]>, TchError> {
        let (least, largest) = numbers.f_aminmax(None, false)?;
        let is_end = numbers.f_eq_tensor(&least)?.f_logical_or(&numbers.f_eq_tensor(&largest)?)?;
        Ok((is_end.f_all()?.f_double_value(&[])? == 1.0).then_some([least, largest]))
    }
}

impl Packed for TwoValues {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let [one, other] = &self.values;
        Ok(other.f_where_self(&self.is_second.unpack()?, one)?.f_view_dtype(self.kind)?)
    }
}

/// A tensor's shape, and the order of its elements in memory: another one may have kernels that round otherwise.
struct Layout {
    shape: Vec<i64>,
    stride: Vec<i64>,
}

impl Layout {
    fn of(tensor: &Tensor) -> Self {
        Self { shape: tensor.size(), stride: dense_strides(tensor) }
    }

    /// All elements of a tensor in rows of this length, the last one filled up with zeros.
    fn in_rows(&self, tensor: &Tensor, length: i64) -> Result<Tensor, TchError> {
        let mut dense = tensor.shallow_clone();
        if tensor.stride() != self.stride {
            dense = Tensor::f_empty_strided(&self.shape, &self.stride, (tensor.kind(), tensor.device()))?;
            dense.f_copy_(tensor)?;
        }
        let flat = dense.f_as_strided([dense.numel() as i64], [1], None)?;
        let missing = (length - flat.size()[0] % length) % length;
        flat.f_constant_pad_nd([0, missing])?.f_view([-1, length])
    }

    /// The elements as they were before [`in_rows`](Self::in_rows).
    fn of_rows(&self, rows: &Tensor) -> Result<Tensor, TchError> {
        rows.f_as_strided(&self.shape, &self.stride, None)
    }
}

#[cfg(test)]
mod tests {
    use tch::Device;

    use super::*;

    const ALL: [Compression; 4] = [Compression::Masks, Compression::BFloat16, Compression::Float8, Compression::Int8];

    /// The bits of the numbers, in which NaN equals itself, and 0 does not equal -0.
    fn bits(tensor: &Tensor) -> Tensor {
        tensor.view_dtype(match tensor.kind() {
            Kind::Double => Kind::Int64,
            Kind::Float => Kind::Int,
            _ => Kind::Int16,
        })
    }

    #[test]
    fn tensors_of_two_values_come_back_to_the_bit() {
        let choice = Tensor::rand([9, 13], (Kind::Float, Device::Cpu)).gt(0.4);
        let (inf, nan) = (f64::INFINITY, f64::NAN);
        let pairs = [[0.0, 1.0 / 0.9], [0.0, -0.0], [nan, 0.0], [-inf, 0.0], [inf, -inf], [7.3, 7.3], [-3.1, 1e-30]];
        for ([one, other], kind) in pairs
            .iter()
            .flat_map(|&pair| [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half].map(|kind| (pair, kind)))
        {
            let full = |value| Tensor::full([9, 13], value, (kind, Device::Cpu));
            let mask = full(one).where_self(&choice, &full(other));
            let views = [mask.tr(), mask.narrow(1, 2, 5), mask.narrow(0, 1, 1), mask.get(0), mask.get(0).get(0)];
            for (tensor, compression) in
                views.iter().chain([&mask]).flat_map(|tensor| ALL.map(|compression| (tensor, compression)))
            {
                let found = compression.store(tensor).unwrap().unwrap().unpack().unwrap();
                assert_eq!((found.kind(), found.size()), (kind, tensor.size()));
                assert_eq!(bits(&found), bits(tensor), "{one} and {other}, {kind:?}, {compression:?}");
                assert_eq!(found.stride(), dense_strides(tensor));
            }
        }
    }

    /// Another NaN and another zero are other values.
    #[test]
    fn tensors_of_three_values_are_no_masks() {
        for (third, place) in
            [-0.0, 2.0, f32::NAN, -1e-40].into_iter().flat_map(|third| [0, 70, 4999].map(|place| (third, place)))
        {
            let mut values: Vec<f32> = (0..5000).map(|at| [0.0, 1.5][at * 7 / 3 % 2]).collect();
            assert!(TwoValues::pack(&Tensor::from_slice(&values)).unwrap().is_some());
            values[place] = third;
            assert!(Compression::Masks.store(&Tensor::from_slice(&values)).unwrap().is_none(), "{third} at {place}");
        }
        let nans = [0x7fc0_0000, 0x7fc0_0001, 0].map(f32::from_bits);
        assert!(Compression::Masks.store(&Tensor::from_slice(&nans)).unwrap().is_none());
    }
}
