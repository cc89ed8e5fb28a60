//! Chunks of a tensor: together they have to be the whole one.

use std::collections::BTreeSet;

use super::super::Bad;
use super::damaged;

/// Where a chunk is in its tensor.
#[derive(Debug)]
pub(super) struct Extent {
    pub offsets: Vec<i64>,
    pub sizes: Vec<i64>,
}

impl Extent {
    /// Whether it is within a tensor of this shape.
    pub fn is_within(&self, shape: &[i64]) -> bool {
        let within = |dim: usize| {
            let (offset, size) = (self.offsets[dim], self.sizes[dim]);
            offset >= 0 && size >= 0 && offset.checked_add(size).is_some_and(|end| end <= shape[dim])
        };
        self.offsets.len() == shape.len() && self.sizes.len() == shape.len() && (0..shape.len()).all(within)
    }

    fn end(&self, dim: usize) -> i64 {
        self.offsets[dim] + self.sizes[dim]
    }

    fn overlaps(&self, other: &Self) -> bool {
        (0..self.sizes.len()).all(|dim| self.offsets[dim] < other.end(dim) && other.offsets[dim] < self.end(dim))
    }
}

/// How many elements there are; `None` beyond an `i64`, and for sides below 0.
pub(super) fn elements(shape: &[i64]) -> Option<i64> {
    shape.iter().try_fold(1i64, |product, &side| product.checked_mul(side).filter(|_| side >= 0))
}

/// Checks that each element of a tensor of this shape is in exactly one chunk. Each chunk is within it, and has elements.
pub(super) fn check(name: &str, shape: &[i64], chunks: &[&Extent]) -> Result<(), Bad> {
    let there = chunks.iter().try_fold(0i64, |sum, chunk| sum.checked_add(elements(&chunk.sizes)?));
    if there.is_none_or(|there| Some(there) != elements(shape)) {
        let there = there.map_or("more".to_owned(), |there| there.to_string());
        return damaged(format!("the chunks of `{name}` of shape {shape:?} have {there} elements together"));
    }
    // As many as there should be: so each is there once unless two chunks overlap. They are compared in the order of the
    // dimension with most offsets, each with those that have not ended before it.
    let offsets = |dim: &usize| chunks.iter().map(|chunk| chunk.offsets[*dim]).collect::<BTreeSet<_>>().len();
    // A tensor without dimensions has one chunk.
    let Some(dim) = (0..shape.len()).max_by_key(offsets) else { return Ok(()) };
    let mut sorted = chunks.to_vec();
    sorted.sort_by_key(|chunk| chunk.offsets[dim]);
    let mut open: Vec<&Extent> = Vec::new();
    for chunk in sorted {
        open.retain(|other| other.end(dim) > chunk.offsets[dim]);
        if let Some(other) = open.iter().find(|other| other.overlaps(chunk)) {
            let (one, two) = (&other.offsets, &chunk.offsets);
            return damaged(format!("the chunks of `{name}` at {one:?} and {two:?} overlap"));
        }
        open.push(chunk);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(shape: &[i64], chunks: &[(&[i64], &[i64])]) -> bool {
        let extents: Vec<Extent> =
            chunks.iter().map(|(offsets, sizes)| Extent { offsets: offsets.to_vec(), sizes: sizes.to_vec() }).collect();
        assert!(extents.iter().all(|extent| extent.is_within(shape)));
        check("weight", shape, &extents.iter().collect::<Vec<_>>()).is_ok()
    }

    #[test]
    fn each_element_has_to_be_in_one_chunk() {
        assert!(fits(&[], &[(&[], &[])]) && !fits(&[], &[]) && !fits(&[], &[(&[], &[]), (&[], &[])]));
        assert!(fits(&[0, 3], &[]) && fits(&[4], &[(&[2], &[2]), (&[0], &[2])]));
        // As many elements, with one of them twice.
        assert!(!fits(&[4], &[(&[0], &[2]), (&[0], &[2])]) && !fits(&[4], &[(&[0], &[3]), (&[2], &[1])]));
        // Around a middle, which no cut divides.
        let around: [(&[i64], &[i64]); 5] =
            [(&[0, 0], &[1, 2]), (&[0, 2], &[2, 1]), (&[2, 1], &[1, 2]), (&[1, 0], &[2, 1]), (&[1, 1], &[1, 1])];
        assert!(fits(&[3, 3], &around));
        let mut moved = around;
        moved[4].0 = &[1, 2];
        assert!(!fits(&[3, 3], &moved));
    }

    #[test]
    fn random_grids_fit_until_a_chunk_moves() {
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let cuts = |random: &mut fastrand::Rng| {
                let mut cuts: Vec<i64> = (0..random.i64(0..5)).map(|_| random.i64(1..20)).collect();
                cuts.extend([0, 20]);
                cuts.sort_unstable();
                cuts.dedup();
                cuts
            };
            let (rows, columns) = (cuts(&mut random), cuts(&mut random));
            let mut grid = Vec::new();
            for row in rows.windows(2) {
                for column in columns.windows(2) {
                    let (offsets, sizes) = (vec![row[0], column[0]], vec![row[1] - row[0], column[1] - column[0]]);
                    grid.push(Extent { offsets, sizes });
                }
            }
            random.shuffle(&mut grid);
            let is_whole = |grid: &[Extent]| check("weight", &[20, 20], &grid.iter().collect::<Vec<_>>()).is_ok();
            assert!(is_whole(&grid));
            let at = random.usize(..grid.len());
            if grid[at].offsets[0] > 0 {
                grid[at].offsets[0] -= 1;
                assert!(!is_whole(&grid));
            }
        }
    }

    #[test]
    fn numbers_beyond_64_bits_are_too_many_elements() {
        let huge = Extent { offsets: vec![0, 0], sizes: vec![1 << 62, 4] };
        assert!(check("weight", &[1 << 62, 4], &[&huge]).is_err());
    }
}
