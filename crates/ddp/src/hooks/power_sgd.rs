//! PowerSGD: gradients sent as products of two thin matrices.

use std::collections::HashMap;

use overdrive_core::{StateDict, StateError};
use overdrive_ffi::c10d::{GradBucket, ReduceOp};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use super::warm_up::{Steps, mean};
use super::{CommHook, state};
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;

static DIV: LazyOp = LazyOp::new("aten::div_", "Scalar");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");

/// Options of [`PowerSgd`]. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug)]
pub struct PowerSgdOptions {
    /// The rank of the low-rank approximation of a gradient.
    pub matrix_approximation_rank: usize,
    /// How many steps send whole gradients before compression starts.
    pub start_power_sgd_iter: u64,
    /// A gradient is compressed only if that makes it smaller by more than this factor.
    pub min_compression_rate: f64,
    /// Add the compression error to the next step's gradients.
    pub use_error_feedback: bool,
    /// Start each step's power iteration from the last step's matrices.
    pub warm_start: bool,
    /// The seed of the first matrices, the same on all ranks.
    pub random_seed: u64,
}

impl Default for PowerSgdOptions {
    fn default() -> Self {
        Self {
            matrix_approximation_rank: 1,
            start_power_sgd_iter: 1000,
            min_compression_rate: 2.0,
            use_error_feedback: true,
            warm_start: true,
            random_seed: 0,
        }
    }
}

/// Sends each gradient matrix as two thin ones, found by one step of power iteration.
///
/// The first, `n x r`, is sent while backward runs; the second, `m x r`, after it. Vectors, and matrices that are too
/// small for compression to pay, are sent whole.
///
/// An infinity or NaN reaches all ranks in its step, and no later one: errors begin anew after it.
///
/// # Source
/// `powerSGD_hook.powerSGD_hook`; Vogels et al. 2019, arXiv:1905.13727
#[doc(alias = "powerSGD_hook")]
#[derive(Debug)]
pub struct PowerSgd {
    group: ProcessGroup,
    options: PowerSgdOptions,
    steps: Steps,
    /// By bucket.
    memory: HashMap<usize, Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    error: Option<Tensor>,
    /// The right factors, one for each compressed gradient.
    qs: Vec<Tensor>,
}

impl Memory {
    /// On this device: a loaded state may be on another one.
    fn on(self, device: Device) -> Result<Self, DdpError> {
        let error = self.error.map(|error| error.f_to_device(device)).transpose()?;
        Ok(Self { error, qs: self.qs.iter().map(|q| q.f_to_device(device)).collect::<Result<_, _>>()? })
    }
}

/// A bucket's communication under way.
#[derive(Debug)]
pub enum PowerSgdInFlight {
    /// The plain mean of an early step.
    Mean(Work<Tensor>),
    /// The sums of the gradients that are sent whole, and of the left factors.
    Factors(Factors),
}

/// A bucket's gradients, split into those sent whole and those compressed, and the sums under way.
#[derive(Debug)]
pub struct Factors {
    whole: Vec<Tensor>,
    matrices: Vec<Tensor>,
    whole_sum: Option<Work<Tensor>>,
    ps_sum: Option<Work<Tensor>>,
}

impl PowerSgd {
    /// A hook with these options.
    ///
    /// # Errors
    /// When an option is outside its range.
    pub fn new(group: &ProcessGroup, options: PowerSgdOptions) -> Result<Self, DdpError> {
        let wrong = |option, found: String, expected| Err(DdpError::InvalidOption { option, found, expected });
        if options.matrix_approximation_rank == 0 {
            return wrong("matrix_approximation_rank", "0".to_owned(), "at least 1");
        }
        if !(options.min_compression_rate > 0.0 && options.min_compression_rate.is_finite()) {
            return wrong("min_compression_rate", options.min_compression_rate.to_string(), "above 0 and finite");
        }
        // Buckets are rebuilt after the first step: errors and matrices from before would belong to other gradients.
        if options.start_power_sgd_iter < 2 && (options.use_error_feedback || options.warm_start) {
            let expected =
                "at least 2 with error feedback or a warm start, because buckets change after the first step";
            return wrong("start_power_sgd_iter", options.start_power_sgd_iter.to_string(), expected);
        }
        Ok(Self { group: group.clone(), options, steps: Steps::default(), memory: HashMap::new() })
    }

    /// The approximation rank of a gradient; `None` when it is sent whole.
    fn rank_of(&self, gradient: &Tensor) -> Option<i64> {
        let rows = *gradient.size().first()?;
        // A gradient that is not contiguous cannot be written to as a matrix.
        if gradient.dim() < 2 || gradient.numel() == 0 || !gradient.is_contiguous() {
            return None;
        }
        let columns = gradient.numel() as i64 / rows;
        let rank = i64::try_from(self.options.matrix_approximation_rank).unwrap_or(i64::MAX).min(rows).min(columns);
        let (sent, whole) = ((rows + columns) * rank, rows * columns);
        ((sent as f64) * self.options.min_compression_rate < whole as f64).then_some(rank)
    }
}

impl CommHook for PowerSgd {
    type InFlight = PowerSgdInFlight;

    fn start(&mut self, bucket: &GradBucket) -> Result<PowerSgdInFlight, DdpError> {
        if self.steps.done() < self.options.start_power_sgd_iter {
            return Ok(PowerSgdInFlight::Mean(mean(&self.group, bucket)?));
        }
        let mut memory = self.memory.remove(&bucket.index).unwrap_or_default().on(bucket.buffer.device())?;
        // Another bucket's, of a loaded state.
        memory.error =
            memory.error.filter(|error| (error.numel(), error.kind()) == (bucket.buffer.numel(), bucket.buffer.kind()));
        if let Some(error) = &memory.error {
            let _changed = bucket.buffer.shallow_clone().f_add_(error)?;
        }
        let (mut whole, mut matrices, mut ranks) = (Vec::new(), Vec::new(), Vec::new());
        for gradient in &bucket.gradients {
            match self.rank_of(gradient) {
                Some(rank) => {
                    matrices.push(gradient.f_reshape([gradient.size()[0], -1])?);
                    ranks.push(rank);
                }
                None => whole.push(gradient.shallow_clone()),
            }
        }
        let of_matrix = |((q, matrix), rank): ((&Tensor, &Tensor), &i64)| {
            q.size() == [matrix.size()[1], *rank] && q.kind() == matrix.kind()
        };
        let fits = memory.qs.len() == matrices.len() && memory.qs.iter().zip(&matrices).zip(&ranks).all(of_matrix);
        if !(self.options.warm_start && fits) {
            let seed = self.options.random_seed ^ (self.steps.done() << 20) ^ bucket.index as u64;
            let fresh = |(index, (matrix, &rank)): (usize, (&Tensor, &i64))| {
                random(matrix, matrix.size()[1], rank, seed.wrapping_add((index as u64) << 40))
            };
            memory.qs = matrices.iter().zip(&ranks).enumerate().map(fresh).collect::<Result<_, _>>()?;
        }
        let mut ps = Vec::new();
        for (matrix, q) in matrices.iter().zip(&mut memory.qs) {
            *q = orthogonal(q)?;
            // Column-major: MKL is several times slower with thin row-major matrices.
            ps.push(matrix.f_matmul(&q.f_tr()?.f_contiguous()?.f_tr()?)?);
        }
        let whole_sum = self.sum(&whole)?;
        let ps_sum = self.sum(&ps)?;
        self.memory.insert(bucket.index, memory);
        Ok(PowerSgdInFlight::Factors(Factors { whole, matrices, whole_sum, ps_sum }))
    }

    fn finish(&mut self, bucket: &GradBucket, in_flight: PowerSgdInFlight) -> Result<Tensor, DdpError> {
        let mean = match in_flight {
            PowerSgdInFlight::Mean(mean) => mean.wait()?,
            PowerSgdInFlight::Factors(factors) => self.multiply(bucket, factors)?,
        };
        self.steps.count(bucket);
        Ok(mean)
    }

    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = state::of(&self.steps);
        for (bucket, memory) in &self.memory {
            memory.error.iter().for_each(|error| state::insert(&mut state, "error", &[*bucket], error));
            for (number, q) in memory.qs.iter().enumerate() {
                state::insert(&mut state, "q", &[*bucket, number], q);
            }
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let (steps, [errors, qs]) = state::read(state, [("error", 1), ("q", 2)])?;
        let mut memory: HashMap<usize, Memory> = HashMap::new();
        for (numbers, error) in errors {
            memory.entry(numbers[0]).or_default().error = Some(error);
        }
        // In the order of their numbers.
        for (numbers, q) in qs {
            memory.entry(numbers[0]).or_default().qs.push(q);
        }
        (self.steps, self.memory) = (steps, memory);
        Ok(())
    }

    fn differs_by_rank(&self) -> bool {
        self.options.use_error_feedback
    }

    fn buckets_rebuilt(&mut self) {
        self.memory.clear();
    }
}

impl PowerSgd {
    /// Writes the mean into the bucket's buffer.
    fn multiply(&mut self, bucket: &GradBucket, factors: Factors) -> Result<Tensor, DdpError> {
        let ranks = self.group.size() as f64;
        let mut whole_is_finite = None;
        if let Some(sum) = factors.whole_sum {
            let sum = sum.wait()?;
            whole_is_finite = Some(is_finite(&sum)?);
            DIV.call(&[Arg::Tensor(&sum), Arg::Double(ranks)])?;
            for (gradient, mean) in factors.whole.iter().zip(parts(&sum, &factors.whole)?) {
                gradient.shallow_clone().f_copy_(&mean)?;
            }
        }
        let memory = self.memory.entry(bucket.index).or_default();
        if let Some(sum) = factors.ps_sum {
            let like: Vec<Tensor> = factors
                .matrices
                .iter()
                .zip(&memory.qs)
                .map(|(matrix, q)| {
                    matrix.f_new_empty([matrix.size()[0], q.size()[1]], (matrix.kind(), matrix.device()))
                })
                .collect::<Result<_, _>>()?;
            let ps = parts(&sum.wait()?, &like)?.iter().map(orthogonal).collect::<Result<Vec<_>, _>>()?;
            // As (P^T M)^T, which MKL does twenty times faster than M^T P.
            let product = |(matrix, p): (&Tensor, &Tensor)| p.f_tr()?.f_matmul(matrix)?.f_tr();
            let qs = factors.matrices.iter().zip(&ps).map(product).collect::<Result<Vec<_>, _>>()?;
            let mut sum = flatten(&qs)?;
            self.group.all_reduce(&mut sum, ReduceOp::Sum)?;
            DIV.call(&[Arg::Tensor(&sum), Arg::Double(ranks)])?;
            let qs = parts(&sum, &qs)?;
            let mut error =
                self.options.use_error_feedback.then(|| copied(memory.error.take(), &bucket.buffer)).transpose()?;
            for ((matrix, p), q) in factors.matrices.iter().zip(&ps).zip(&qs) {
                let _written = p.f_mm_out(matrix, &q.f_tr()?)?;
            }
            // An infinity or NaN belongs to this step only; kept in the error or the factors, it would spoil every
            // later step. All ranks see it, because they have the same sums, and none waits for its device.
            let finite = [Some(is_finite(&sum)?), whole_is_finite].into_iter().flatten();
            let lost = Tensor::f_stack(&finite.collect::<Vec<_>>(), 0)?.f_all()?.f_logical_not()?;
            if let Some(error) = &mut error {
                clear(&error.f_sub_(&bucket.buffer)?, &lost)?;
            }
            memory.error = error;
            memory.qs = parts(&flatten(&memory.qs)?.f_where_self(&lost, &sum)?, &qs)?;
        } else {
            // All were sent whole: nothing is left for the next step.
            *memory = Memory::default();
        }
        Ok(bucket.buffer.shallow_clone())
    }

    fn sum(&self, tensors: &[Tensor]) -> Result<Option<Work<Tensor>>, DdpError> {
        if tensors.is_empty() {
            return Ok(None);
        }
        let mut flat = flatten(tensors)?;
        let work = self.group.all_reduce_async(&mut flat, ReduceOp::Sum)?;
        Ok(Some(work.and_then(move |()| Ok(flat))))
    }
}

/// A copy of `from`, in the memory of `old` if the sizes match.
fn copied(old: Option<Tensor>, from: &Tensor) -> Result<Tensor, DdpError> {
    match old.filter(|old| old.numel() == from.numel()) {
        Some(mut old) => {
            old.f_copy_(from)?;
            Ok(old)
        }
        None => Ok(from.f_detach_copy()?),
    }
}

/// Whether all numbers are finite: a `bool` on their device.
fn is_finite(sum: &Tensor) -> Result<Tensor, DdpError> {
    Ok(sum.f_isfinite()?.f_all()?)
}

/// Writes zeros to a tensor if `all`, a `bool` on its device, is set.
fn clear(tensor: &Tensor, all: &Tensor) -> Result<(), DdpError> {
    // On the host its value is there, and almost always spares a pass over the tensor.
    if all.device() != Device::Cpu || all.f_int64_value(&[])? != 0 {
        MASKED_FILL.call(&[Arg::Tensor(tensor), Arg::Tensor(all), Arg::Double(0.0)])?;
    }
    Ok(())
}

fn flatten(tensors: &[Tensor]) -> Result<Tensor, DdpError> {
    let flat = tensors.iter().map(|tensor| tensor.f_reshape([-1])).collect::<Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&flat, 0)?)
}

/// Splits a flat tensor into views with the shapes of `like`.
fn parts(flat: &Tensor, like: &[Tensor]) -> Result<Vec<Tensor>, DdpError> {
    let sizes: Vec<i64> = like.iter().map(|tensor| tensor.numel() as i64).collect();
    let cut = flat.f_split_with_sizes(&sizes, 0)?;
    Ok(cut.iter().zip(like).map(|(part, like)| part.f_view(&like.size()[..])).collect::<Result<_, _>>()?)
}

/// A matrix with orthonormal columns that span the same space.
fn orthogonal(matrix: &Tensor) -> Result<Tensor, DdpError> {
    let wide = matches!(matrix.kind(), Kind::Half | Kind::BFloat16);
    let precise = if wide { matrix.f_to_kind(Kind::Float)? } else { matrix.shallow_clone() };
    let (q, _) = Tensor::f_linalg_qr(&precise, "reduced")?;
    Ok(q.f_to_kind(matrix.kind())?.f_contiguous()?)
}

/// Normally distributed numbers that depend only on the seed, and do not touch the program's generators.
fn random(like: &Tensor, rows: i64, columns: i64, seed: u64) -> Result<Tensor, DdpError> {
    let mut state = seed;
    let mut uniform = || {
        // SplitMix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        // In (0, 1], for the logarithm.
        ((mixed ^ (mixed >> 31)) >> 11).wrapping_add(1) as f64 / (1u64 << 53) as f64
    };
    let normal = |_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    let numbers: Vec<f64> = (0..rows * columns).map(normal).collect();
    let matrix = Tensor::f_from_slice(&numbers)?.f_view([rows, columns])?;
    Ok(overdrive_ffi::upload(&matrix.f_to_kind(like.kind())?, like.device())?)
}
