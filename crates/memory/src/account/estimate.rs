//! How much memory a step will need.

use overdrive_ffi::allocations::Category;
use overdrive_ffi::autograd::BoxError;
use tch::Device;

use super::record::{Change, MemoryRecord, MemoryRecorder, Use};
use crate::error::MemoryError;

/// The memory that a step will need with any batch size, from runs with two small ones.
///
/// The two runs allocate and free in the same order, and each block's bytes are a constant and a share that grows with
/// the batch. So the use after each allocation is known for any batch size, and its peak, wherever it is then.
///
/// The step is yours: model, optimizer, autocast, checkpointing and whatever else are estimated as they are. It is called
/// with a batch size and a recorder, to which it says what was there before it began:
///
/// ```
/// use overdrive_memory::account::{Category, Estimate};
/// # use tch::{Device, Kind, Tensor, TchError};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let options = (Kind::Float, Device::Cpu);
/// let w = Tensor::rand([64, 64], options).set_requires_grad(true);
/// let estimate = Estimate::of(Device::Cpu, |batch, recorder| {
///     let mut w = w.shallow_clone();
///     w.zero_grad();
///     Tensor::rand([batch, 64], options).f_matmul(&w)?.f_sin()?.f_sum(Kind::Float)?.f_backward()?;
///     recorder.tag(Category::Parameter, [&w])?;       // or `tag_module` and `tag_state`
///     Ok::<_, overdrive_memory::MemoryError>(())
/// })?;
/// let peak = estimate.peak(1000);
/// println!("{} bytes, {} of them activations", peak.total(), peak.of(Category::Activation));
/// println!("at most {:?} samples fit into a gigabyte", estimate.largest_batch(1 << 30));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Estimate {
    pub(super) device: Device,
    /// The moments after each allocation and each free.
    pub(super) points: Vec<Point>,
    is_exact: bool,
}

/// The bytes in use at a moment, by category: so many, and so many a sample.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Point {
    /// In the run with the larger batch, since it began.
    pub(super) nanoseconds: u64,
    constant: [f64; Category::ALL.len()],
    per_sample: [f64; Category::ALL.len()],
}

impl Point {
    pub(super) fn bytes_of(&self, category: Category, batch_size: f64) -> f64 {
        (self.constant[category as usize] + batch_size * self.per_sample[category as usize]).max(0.0)
    }

    pub(super) fn at(&self, batch_size: f64) -> f64 {
        self.constant.iter().sum::<f64>() + batch_size * self.per_sample.iter().sum::<f64>()
    }
}

impl Estimate {
    /// Runs a step with batches of 4 and 8; see [`of_sizes`](Self::of_sizes).
    ///
    /// # Errors
    /// As [`of_sizes`](Self::of_sizes).
    pub fn of<E: Into<BoxError>>(
        device: Device,
        step: impl FnMut(i64, &MemoryRecorder) -> Result<(), E>,
    ) -> Result<Self, MemoryError> {
        Self::of_sizes(device, [4, 8], step)
    }

    /// Runs a step twice to warm up, so that an optimizer's state is there, and then once with each size.
    ///
    /// # Errors
    /// When the step fails, and for sizes that are not positive or not different.
    pub fn of_sizes<E: Into<BoxError>>(
        device: Device,
        sizes: [i64; 2],
        mut step: impl FnMut(i64, &MemoryRecorder) -> Result<(), E>,
    ) -> Result<Self, MemoryError> {
        let [small, large] = sizes;
        if small < 1 || large <= small {
            return Err(MemoryError::Sizes { sizes });
        }
        let mut run = |size| {
            let recorder = MemoryRecorder::begin()?;
            step(size, &recorder)
                .map_err(|error| MemoryError::Function { scope: "estimate".to_owned(), source: error.into() })?;
            Ok::<_, MemoryError>(recorder.end())
        };
        (run(small)?, run(small)?);
        let records = [run(small)?, run(large)?];
        let aligned = Self::from_order(device, sizes, &records);
        Ok(aligned.unwrap_or_else(|| Self::from_peaks(device, sizes, &records)))
    }

    /// Whether both runs allocated and freed in the same order. If not, the peaks of both are prolonged as a straight
    /// line, which is only right if the peak's moment does not change with the batch size.
    pub fn is_exact(&self) -> bool {
        self.is_exact
    }

    /// The peak with a batch size, by what it is used for.
    pub fn peak(&self, batch_size: i64) -> Use {
        let size = batch_size as f64;
        let most = self.points.iter().copied().reduce(|most, it| if it.at(size) > most.at(size) { it } else { most });
        let most = most.unwrap_or_default();
        Use(Category::ALL.map(|category| most.bytes_of(category, size).round() as u64))
    }

    /// The largest batch whose peak is at most so many bytes; none if not even one sample fits.
    pub fn largest_batch(&self, bytes: u64) -> Option<i64> {
        let fits = |size: i64| self.peak(size).total() <= bytes;
        if !fits(1) {
            return None;
        }
        let (mut fitting, mut too_large) = (1, 2);
        while fits(too_large) {
            if too_large >= i64::MAX / 4 {
                return Some(i64::MAX);
            }
            (fitting, too_large) = (too_large, 2 * too_large);
        }
        while too_large - fitting > 1 {
            let middle = fitting + (too_large - fitting) / 2;
            if fits(middle) { fitting = middle } else { too_large = middle }
        }
        Some(fitting)
    }

    /// None if the runs allocated and freed in different orders.
    fn from_order(device: Device, sizes: [i64; 2], records: &[MemoryRecord; 2]) -> Option<Self> {
        let [small, large] = [0, 1].map(|run: usize| records[run].changes(device));
        let numbers = [numbered(&small), numbered(&large)];
        if numbers[0] != numbers[1] {
            return None;
        }
        let (mut now, mut points) = (Point::default(), Vec::new());
        for (one, other) in small.iter().zip(&large) {
            let (constant, per_sample) = affine(sizes, [one.bytes, other.bytes]);
            let (sign, category) = (if one.is_freed { -1.0 } else { 1.0 }, other.category as usize);
            now.constant[category] += sign * constant;
            now.per_sample[category] += sign * per_sample;
            now.nanoseconds = other.at.nanoseconds;
            points.push(now);
        }
        Some(Self { device, points, is_exact: true })
    }

    fn from_peaks(device: Device, sizes: [i64; 2], records: &[MemoryRecord; 2]) -> Self {
        let peaks = [records[0].peak(device), records[1].peak(device)];
        let mut point = Point::default();
        for category in Category::ALL {
            let place = category as usize;
            (point.constant[place], point.per_sample[place]) = affine(sizes, peaks.map(|peak| peak.of(category)));
        }
        Self { device, points: vec![point], is_exact: false }
    }
}

/// What is allocated or freed, by the order in which blocks were allocated.
fn numbered(changes: &[Change]) -> Vec<(usize, bool)> {
    let mut order = std::collections::HashMap::new();
    let number = |change: &Change| {
        let next = order.len();
        (*order.entry(change.block).or_insert(next), change.is_freed)
    };
    changes.iter().map(number).collect()
}

/// The constant and the share of a sample.
fn affine([small, large]: [i64; 2], bytes: [u64; 2]) -> (f64, f64) {
    let [one, other] = bytes.map(|bytes| bytes as f64);
    let per_sample = (other - one) / (large - small) as f64;
    (one - per_sample * small as f64, per_sample)
}
