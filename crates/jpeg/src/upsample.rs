//! Upsamples components to the size of the image, bit for bit as libjpeg's smooth upsampling.

use crate::Region;
use crate::planes::Plane;

/// Produces a component's samples for a part of one row of the image.
pub(crate) struct Upsampler {
    /// Pixels that share a sample, across and down.
    ratio: [usize; 2],
    smooth: bool,
    sums: Vec<u16>,
    row: Vec<u8>,
}

impl Upsampler {
    /// For a component that is `ratio` times smaller than the image, across and down.
    pub(crate) fn new(ratio: [usize; 2], plane: &Plane, smooth: bool) -> Self {
        // Libjpeg's conditions.
        let smooth = match ratio {
            [2, 1 | 2] => smooth && plane.width > 2,
            [1, 2] => smooth,
            _ => false,
        };
        Self { ratio, smooth, sums: Vec::new(), row: Vec::new() }
    }

    /// The region's samples in row `y` of the image.
    pub(crate) fn row<'a>(&'a mut self, plane: &'a Plane, y: usize, region: &Region) -> &'a [u8] {
        let [across, down] = self.ratio;
        let nearest = plane.row((y / down) as isize);
        if across == 1 && !(self.smooth && down == 2) {
            return &nearest[region.left - plane.left..][..region.width];
        }
        // The samples of the region's columns, and one pixel more where the first or last column shares its sample with
        // a pixel outside.
        let first = region.left / across;
        let count = (region.left + region.width - 1) / across + 1 - first;
        let samples = first - plane.left..first - plane.left + count;
        self.row.resize(across * count, 0);
        if !self.smooth {
            for (pixels, &sample) in self.row.chunks_exact_mut(across).zip(&nearest[samples]) {
                pixels.fill(sample);
            }
        } else if across == 1 {
            let (near, far, more) = neighbours(plane, y);
            for ((pixel, &near), &far) in self.row.iter_mut().zip(&near[samples.clone()]).zip(&far[samples]) {
                *pixel = ((3 * u16::from(near) + u16::from(far) + more) >> 2) as u8;
            }
        } else {
            self.sum(plane, y, first, count);
            let (even, odd, shift) = if down == 2 { (8, 7, 4) } else { (1, 2, 2) };
            let (before, middle, after) = (&self.sums[..count], &self.sums[1..=count], &self.sums[2..]);
            let pairs = self.row.as_chunks_mut::<2>().0.iter_mut();
            for (((pair, &a), &b), &c) in pairs.zip(before).zip(middle).zip(after) {
                *pair = [((3 * b + a + even) >> shift) as u8, ((3 * b + c + odd) >> shift) as u8];
            }
        }
        &self.row[region.left - first * across..][..region.width]
    }

    /// Fills `sums` with the samples from one before `first` to one after the last; where rows are doubled, each is
    /// weighted 3:1 with its neighbour row.
    fn sum(&mut self, plane: &Plane, y: usize, first: usize, count: usize) {
        self.sums.resize(count + 2, 0);
        let before = first.saturating_sub(1);
        let after = (first + count).min(plane.width - 1);
        let parts = [(0, before, 1), (1, first, count), (count + 1, after, 1)];
        for (to, from, length) in parts {
            let sums = &mut self.sums[to..to + length];
            let samples = from - plane.left..from - plane.left + length;
            if self.ratio[1] == 2 {
                let (near, far, _) = neighbours(plane, y);
                for ((sum, &near), &far) in sums.iter_mut().zip(&near[samples.clone()]).zip(&far[samples]) {
                    *sum = 3 * u16::from(near) + u16::from(far);
                }
            } else {
                for (sum, &sample) in sums.iter_mut().zip(&plane.row(y as isize)[samples]) {
                    *sum = u16::from(sample);
                }
            }
        }
    }
}

/// The two rows that a pixel lies between, the nearer one first, and the rounding term of their weighted sum.
fn neighbours(plane: &Plane, y: usize) -> (&[u8], &[u8], u16) {
    let near = (y / 2) as isize;
    let (far, rounding) = if y.is_multiple_of(2) { (near - 1, 1) } else { (near + 1, 2) };
    (plane.row(near), plane.row(far), rounding)
}
