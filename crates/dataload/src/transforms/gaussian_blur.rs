//! Blurring.

use std::ops::RangeInclusive;

use crate::{Canvas, DataError, Draws, PaddingMode, Size, Transform};

/// A larger kernel would take seconds for a photograph.
const MAX_KERNEL: usize = 1023;

/// Blurs with a Gaussian kernel of random width.
///
/// ```
/// use overdrive_dataload::{GaussianBlur, ImagePipeline, RandomResizedCrop};
///
/// let views = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(GaussianBlur::new([23, 23])?);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torchvision.transforms.GaussianBlur`; each value differs by at most 1 (of 255), because the two directions are
/// blurred one after the other.
#[derive(Clone, Debug)]
pub struct GaussianBlur {
    kernel_size: [usize; 2],
    sigma: RangeInclusive<f64>,
}

impl GaussianBlur {
    /// A kernel of this size in torchvision's order, `[columns, rows]`, both odd.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a side that is even, or above 1023.
    pub fn new(kernel_size: [usize; 2]) -> Result<Self, DataError> {
        if kernel_size.iter().any(|side| side.is_multiple_of(2) || *side > MAX_KERNEL) {
            let expected = format!("odd numbers up to {MAX_KERNEL}");
            return Err(DataError::option("kernel_size", expected, format!("{kernel_size:?}")));
        }
        Ok(Self { kernel_size, sigma: 0.1..=2.0 })
    }

    /// The standard deviation in pixels, drawn from this range; from 0.1 to 2 unless set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a range that is empty, infinite or not above 0.
    pub fn sigma(mut self, sigma: RangeInclusive<f64>) -> Result<Self, DataError> {
        if !(*sigma.start() > 0.0 && sigma.start() <= sigma.end() && sigma.end().is_finite()) {
            return Err(DataError::option("sigma", "a finite range above 0", format!("{sigma:?}")));
        }
        self.sigma = sigma;
        Ok(self)
    }
}

impl Transform for GaussianBlur {
    fn apply(&self, canvas: &mut Canvas<'_>, draws: &mut Draws) -> Result<(), DataError> {
        let sigma = draws.uniform(*self.sigma.start(), *self.sigma.end());
        let (height, width) = (canvas.height(), canvas.width());
        let [across, down] = self.kernel_size.map(|side| kernel(side, sigma as f32));
        canvas.redraw(Size { height, width }, |from, to| {
            let mut blurred = vec![[0.0; 3]; from.len()];
            let columns = sources(across.len(), width);
            for (to, from) in blurred.chunks_exact_mut(width).zip(from.chunks_exact(width)) {
                for (column, to) in to.iter_mut().enumerate() {
                    let weighted = across.iter().zip(&columns[column..]);
                    *to = weighted.fold(*to, |sum, (&weight, &column)| {
                        let [red, green, blue, _] = from[column].map(f32::from);
                        add(sum, weight, [red, green, blue])
                    });
                }
            }
            let rows = sources(down.len(), height);
            let mut sums = vec![[0.0; 3]; width];
            for (row, to) in to.chunks_exact_mut(width).enumerate() {
                sums.fill([0.0; 3]);
                for (&weight, &row) in down.iter().zip(&rows[row..]) {
                    let from = &blurred[row * width..][..width];
                    sums.iter_mut().zip(from).for_each(|(sum, &pixel)| *sum = add(*sum, weight, pixel));
                }
                for (to, sum) in to.iter_mut().zip(&sums) {
                    let [red, green, blue] = sum.map(|value| value.round_ties_even() as u8);
                    *to = [red, green, blue, 0];
                }
            }
        })
    }
}

fn add(sum: [f32; 3], weight: f32, pixel: [f32; 3]) -> [f32; 3] {
    std::array::from_fn(|channel| sum[channel] + weight * pixel[channel])
}

/// The weights of a kernel, 1 in total.
fn kernel(side: usize, sigma: f32) -> Vec<f32> {
    let middle = (side - 1) as f32 * 0.5;
    let density = |place: usize| (-0.5 * ((place as f32 - middle) / sigma).powi(2)).exp();
    let densities: Vec<f32> = (0..side).map(density).collect();
    let total: f32 = densities.iter().sum();
    densities.into_iter().map(|density| density / total).collect()
}

/// The positions below `len` that a kernel of `side` weights covers, from that of its first weight at position 0 on.
fn sources(side: usize, len: usize) -> Vec<usize> {
    let source = |at| PaddingMode::Reflect.source(at, side / 2, len).unwrap_or(0);
    (0..len + side - 1).map(source).collect()
}
