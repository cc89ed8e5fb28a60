//! One bit a gradient, with the error of both roundings remembered.

use std::collections::HashMap;

use overdrive_ffi::c10d::GradBucket;
use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor};

use super::CommHook;
use super::warm_up::{Steps, mean};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static GE: LazyOp = LazyOp::new("aten::ge", "Scalar");
static NE: LazyOp = LazyOp::new("aten::ne", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");
static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static NORM: LazyOp = LazyOp::new("aten::linalg_vector_norm", "");
static PAD: LazyOp = LazyOp::new("aten::constant_pad_nd", "");

/// The compression of 1-bit Adam: each gradient becomes its sign, each rank's bucket one scale, and what the rounding loses
/// is added to the next step's (error feedback), on the rank that sends and again on the one that averages.
///
/// It compresses gradients. 1-bit Adam itself sends momentum behind a warm-up with the variance frozen; with Adam,
/// give this hook a warm-up long enough for the second moments to settle.
///
/// # Source
/// Tang et al. 2021, arXiv:2102.02888 (1-bit Adam), algorithm 1's compressed all-reduce
#[doc(alias = "OneBitAdam")]
#[derive(Debug)]
pub struct OneBit {
    group: ProcessGroup,
    warm_up_steps: u64,
    steps: Steps,
    /// By bucket: what this rank's signs have lost, and what the signs of its part of the mean have.
    errors: HashMap<usize, (Tensor, Tensor)>,
}

/// What a bucket has under way.
#[derive(Debug)]
pub enum OneBitInFlight {
    /// The plain mean of a warm-up step.
    Mean(Work<Tensor>),
    /// Every rank's signs of this rank's part, and their scales.
    Signs(Work<Tensor>, Work<Vec<Tensor>>),
}

impl OneBit {
    /// Sends signs, after `warm_up_steps` that send all; the first always does, because buckets are put in order behind it.
    pub fn new(group: &ProcessGroup, warm_up_steps: u64) -> Self {
        Self {
            group: group.clone(),
            warm_up_steps: warm_up_steps.max(1),
            steps: Steps::default(),
            errors: HashMap::new(),
        }
    }
}

impl CommHook for OneBit {
    type InFlight = OneBitInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<OneBitInFlight, DdpError> {
        if self.steps.done() < self.warm_up_steps {
            return Ok(OneBitInFlight::Mean(mean(&self.group, bucket)?));
        }
        let ranks = self.group.size() as i64;
        let count = bucket.buffer.numel() as i64;
        // Whole bytes for every rank's part.
        let unit = 8 * ranks;
        let padded = (count + unit - 1) / unit * unit;
        let grads = pad(&bucket.buffer.f_detach()?, padded)?;
        let fits = |(own, _): &&(Tensor, Tensor)| own.numel() as i64 == padded;
        let grads = match self.errors.get(&bucket.index).filter(fits) {
            Some((own, _)) => grads.f_add(own)?,
            None => grads,
        };
        let (signs, scale, error) = compress(&grads, count)?;
        // The padding is no gradient, and has no error.
        let error = pad(&error.f_narrow(0, 0, count)?, padded)?;
        let mean_error = match self.errors.remove(&bucket.index).filter(|(own, _)| own.numel() as i64 == padded) {
            Some((_, mean_error)) => mean_error,
            None => grads.f_narrow(0, 0, padded / ranks)?.f_zeros_like()?,
        };
        self.errors.insert(bucket.index, (error, mean_error));
        let mut received = signs.f_empty_like()?;
        let work = self.group.all_to_all_single_async(&mut received, &signs, None)?;
        let signs = work.and_then(move |()| Ok(received));
        let scales = self.group.all_gather_async(&scale)?;
        Ok(OneBitInFlight::Signs(signs, scales))
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: OneBitInFlight) -> Result<Tensor, DdpError> {
        let mean = match in_flight {
            OneBitInFlight::Mean(mean) => mean.wait()?,
            OneBitInFlight::Signs(signs, scales) => self.average(bucket, &signs.wait()?, &scales.wait()?)?,
        };
        self.steps.count(bucket);
        Ok(mean)
    }
}

impl OneBit {
    /// Averages this rank's part, and gathers all parts as signs again.
    fn average(&mut self, bucket: &GradBucket, signs: &Tensor, scales: &[Tensor]) -> Result<Tensor, DdpError> {
        let ranks = self.group.size() as i64;
        let count = bucket.buffer.numel() as i64;
        let like = &bucket.buffer;
        let mut sum: Option<Tensor> = None;
        for (signs, scale) in signs.f_chunk(ranks, 0)?.iter().zip(scales) {
            let part = decompress(signs, scale, like)?;
            sum = Some(match sum {
                Some(sum) => sum.f_add(&part)?,
                None => part,
            });
        }
        let sum = sum.ok_or(DdpError::NoParameters)?;
        let mut part = DIV.tensor(&[Arg::Tensor(&sum), Arg::Double(ranks as f64)])?;
        let (own, error) = self.errors.remove(&bucket.index).ok_or(DdpError::NoParameters)?;
        part = part.f_add(&error)?;
        // How much of this part is gradients and not padding.
        let size = part.numel() as i64;
        let real = (count - size * self.group.rank() as i64).clamp(0, size);
        let (signs, scale, error) = compress(&part, real)?;
        self.errors.insert(bucket.index, (own, pad(&error.f_narrow(0, 0, real)?, size)?));
        let signs = self.group.all_gather_async(&signs)?;
        let scales = self.group.all_gather(&scale)?;
        let parts = signs.wait()?;
        let whole = parts
            .iter()
            .zip(&scales)
            .map(|(signs, scale)| decompress(signs, scale, like))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&whole, 0)?.f_narrow(0, 0, count)?.f_contiguous()?)
    }
}

fn pad(tensor: &Tensor, size: i64) -> Result<Tensor, DdpError> {
    let missing = size - tensor.numel() as i64;
    Ok(PAD.tensor(&[Arg::Tensor(tensor), Arg::IntList(&[0, missing]), Arg::Double(0.0)])?)
}

/// Packed signs, the scale of the first `count`, and what they lose.
fn compress(tensor: &Tensor, count: i64) -> Result<(Tensor, Tensor, Tensor), DdpError> {
    let norm = NORM.tensor(&[Arg::Tensor(&tensor.f_narrow(0, 0, count)?), Arg::Double(2.0)])?;
    let scale = DIV.tensor(&[Arg::Tensor(&norm), Arg::Double((count.max(1) as f64).sqrt())])?;
    let positive = GE.tensor(&[Arg::Tensor(tensor), Arg::Double(0.0)])?;
    let eights = positive.f_view([-1, 8])?.f_to_kind(Kind::Uint8)?;
    let packed = eights.f_mul(&bits(tensor)?)?.f_sum_dim_intlist(1, false, Kind::Uint8)?;
    let error = tensor.f_sub(&signed(&positive, &scale, tensor)?)?;
    Ok((packed, scale.f_view([1])?, error))
}

/// Packed signs times their scale.
fn decompress(packed: &Tensor, scale: &Tensor, like: &Tensor) -> Result<Tensor, DdpError> {
    let eights = packed.f_unsqueeze(1)?.f_bitwise_and_tensor(&bits(like)?)?;
    let positive = NE.tensor(&[Arg::Tensor(&eights), Arg::Int(0)])?.f_view([-1])?;
    signed(&positive, &scale.f_squeeze()?, like)
}

/// The scale where `positive`, and its negative elsewhere.
fn signed(positive: &Tensor, scale: &Tensor, like: &Tensor) -> Result<Tensor, DdpError> {
    let twice = MUL.tensor(&[Arg::Tensor(&positive.f_to_kind(like.kind())?), Arg::Double(2.0)])?;
    Ok(ADD.tensor(&[Arg::Tensor(&twice), Arg::Double(-1.0)])?.f_mul(scale)?)
}

/// The bit of each of eight signs in a byte.
fn bits(like: &Tensor) -> Result<Tensor, DdpError> {
    Ok(Tensor::f_from_slice(&[128u8, 64, 32, 16, 8, 4, 2, 1])?.f_to_device(like.device())?)
}
