//! How much memory a step will need.

use overdrive_ffi::allocations::Category;
use overdrive_ffi::autograd::BoxError;
use tch::Device;

use super::record::{Change, MemoryRecord, MemoryRecorder, Use};
use crate::error::MemoryError;

/// The memory that a step will need with any batch size, from runs with four small ones.
///
/// If the runs allocate and free in the same order, the bytes of each block follow from the batch size: a constant, a share
/// for each sample and, as for the products of all pairs of samples, a share for each pair. Three sizes tell them and the
/// fourth confirms them. So the use after each allocation is known for any batch size, and with it the peak, which may be at
/// another moment than with small batches.
///
/// The size may be any one that bytes follow from, with all others fixed: the length of sequences, whose pairs attention
/// multiplies, or the side of images. Give [`of_sizes`](Self::of_sizes) multiples of what the model divides sides by.
/// [`is_exact`](Self::is_exact) says whether bytes followed.
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

/// The bytes in use at a moment, by category.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Point {
    /// In the run with the largest batch, since it began.
    pub(super) nanoseconds: u64,
    bytes: [Bytes; Category::ALL.len()],
}

/// Bytes by batch size: `[constant, for each sample, for each sample's square]`.
#[derive(Clone, Copy, Debug, Default)]
struct Bytes([f64; 3]);

impl Bytes {
    fn at(&self, batch_size: f64) -> f64 {
        let [constant, linear, square] = self.0;
        constant + batch_size * (linear + batch_size * square)
    }

    fn add(&mut self, other: Self, sign: f64) {
        self.0.iter_mut().zip(other.0).for_each(|(own, other)| *own += sign * other);
    }

    /// Those that four batches had, and whether all four agree.
    fn of(sizes: Sizes, bytes: [u64; 4]) -> (Self, bool) {
        let ([x0, x1, x2, x3], [y0, y1, y2, y3]) = (sizes.map(|size| size as f64), bytes.map(|bytes| bytes as f64));
        let slope = (y3 - y0) / (x3 - x0);
        let linear = Self([y0 - slope * x0, slope, 0.0]);
        let fits = |found: &Self| sizes.iter().zip(bytes).all(|(&x, y)| (found.at(x as f64) - y as f64).abs() < 0.5);
        if fits(&linear) {
            return (linear, true);
        }
        // Newton's form of the parabola through the first three.
        let (first, second) = ((y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1));
        let square = (second - first) / (x2 - x0);
        let parabola = Self([y0 - first * x0 + square * x0 * x1, first - square * (x0 + x1), square]);
        if fits(&parabola) { (parabola, true) } else { (linear, false) }
    }
}

/// Four batch sizes, the smallest first.
type Sizes = [i64; 4];

impl Point {
    pub(super) fn bytes_of(&self, category: Category, batch_size: f64) -> f64 {
        self.bytes[category as usize].at(batch_size).max(0.0)
    }

    pub(super) fn at(&self, batch_size: f64) -> f64 {
        self.bytes.iter().map(|bytes| bytes.at(batch_size)).sum()
    }
}

impl Estimate {
    /// Runs a step with batches of 2, 4, 6 and 8; see [`of_sizes`](Self::of_sizes).
    ///
    /// # Errors
    /// As [`of_sizes`](Self::of_sizes).
    pub fn of<E: Into<BoxError>>(
        device: Device,
        step: impl FnMut(i64, &MemoryRecorder) -> Result<(), E>,
    ) -> Result<Self, MemoryError> {
        Self::of_sizes(device, [2, 4, 6, 8], step)
    }

    /// Runs a step three times with each size, of which the last counts: the first ones make an optimizer's state, and what
    /// is made once for a shape.
    ///
    /// # Errors
    /// When the step fails, for sizes that are not positive and growing, and when nothing was allocated on the device.
    pub fn of_sizes<E: Into<BoxError>>(
        device: Device,
        sizes: [i64; 4],
        mut step: impl FnMut(i64, &MemoryRecorder) -> Result<(), E>,
    ) -> Result<Self, MemoryError> {
        if sizes[0] < 1 || sizes.windows(2).any(|pair| pair[0] >= pair[1]) {
            return Err(MemoryError::Sizes { sizes });
        }
        let mut run = |size| {
            let recorder = MemoryRecorder::begin()?;
            step(size, &recorder)
                .map_err(|error| MemoryError::Function { scope: "estimate".to_owned(), source: error.into() })?;
            Ok::<_, MemoryError>(recorder.end())
        };
        let mut record_third = |size| (0..3).try_fold(None, |_, _| run(size).map(Some));
        let mut records = Vec::new();
        for size in sizes {
            records.extend(record_third(size)?);
        }
        let changes: Vec<_> = records.iter().map(|record| record.changes(device)).collect();
        let [one, two, three, four] = &changes[..] else { unreachable!("four sizes") };
        if four.is_empty() {
            return Err(MemoryError::NothingThere { device });
        }
        let aligned = Self::from_order(device, sizes, [one, two, three, four]);
        Ok(aligned.unwrap_or_else(|| Self::from_peaks(device, sizes, &records)))
    }

    /// Whether all runs allocated and freed in the same order, and each block's bytes follow from the batch size. If not, the
    /// estimate is a straight line through what was measured, and may be far off.
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
    fn from_order(device: Device, sizes: Sizes, changes: [&Vec<Change>; 4]) -> Option<Self> {
        let numbers = changes.map(|changes| numbered(changes));
        if numbers[1..].iter().any(|other| *other != numbers[0]) {
            return None;
        }
        let (mut now, mut points, mut is_exact) = (Point::default(), Vec::new(), true);
        for place in 0..changes[0].len() {
            let [.., largest] = changes.map(|changes| changes[place]);
            let (bytes, fits) = Bytes::of(sizes, changes.map(|changes| changes[place].bytes));
            is_exact &= fits;
            now.bytes[largest.category as usize].add(bytes, if largest.is_freed { -1.0 } else { 1.0 });
            now.nanoseconds = largest.at.nanoseconds;
            points.push(now);
        }
        Some(Self { device, points, is_exact })
    }

    fn from_peaks(device: Device, sizes: Sizes, records: &[MemoryRecord]) -> Self {
        let peaks: Vec<_> = records.iter().map(|record| record.peak(device)).collect();
        let mut point = Point::default();
        for category in Category::ALL {
            let [first, .., last] = &peaks[..] else { break };
            let (first, last) = (first.of(category) as f64, last.of(category) as f64);
            let slope = (last - first) / (sizes[3] - sizes[0]) as f64;
            point.bytes[category as usize] = Bytes([first - slope * sizes[0] as f64, slope, 0.0]);
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
