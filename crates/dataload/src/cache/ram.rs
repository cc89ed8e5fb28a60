//! Samples kept in memory once they have been read.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_core::FillingCache;

use crate::{DataError, Dataset};

/// A dataset that keeps every sample in memory from its first access on.
///
/// Each access returns a clone, which for an [`Image`](crate::Image) shares the bytes. Two threads that ask for the
/// same new sample at once may both read it; one of the two results is kept. Failures are not kept: the next access
/// tries again.
pub struct Cached<D: Dataset> {
    dataset: D,
    samples: Box<[OnceLock<D::Sample>]>,
    budget: Option<Budget<D::Sample>>,
    fill: FillingCache,
}

struct Budget<S> {
    max_bytes: usize,
    bytes_of: Box<dyn Fn(&S) -> usize + Send + Sync>,
    used: AtomicUsize,
}

impl<D: Dataset> Cached<D> {
    /// Keeps everything.
    pub fn new(dataset: D) -> Self {
        let samples: Box<[_]> = (0..dataset.len()).map(|_| OnceLock::new()).collect();
        let fill = FillingCache::new(samples.len() as u64);
        Self { dataset, samples, budget: None, fill }
    }

    /// Keeps samples while their sizes, as `bytes_of` reports them, fit into `max_bytes`; the others are read each
    /// time.
    pub fn with_budget(
        dataset: D,
        max_bytes: usize,
        bytes_of: impl Fn(&D::Sample) -> usize + Send + Sync + 'static,
    ) -> Self {
        let budget = Budget { max_bytes, bytes_of: Box::new(bytes_of), used: AtomicUsize::new(0) };
        Self { budget: Some(budget), ..Self::new(dataset) }
    }

    /// How many samples are in memory.
    pub fn cached(&self) -> usize {
        self.samples.iter().filter(|sample| sample.get().is_some()).count()
    }

    /// Keeps the sample unless another thread was quicker; returns whether it did.
    fn keep(&self, slot: &OnceLock<D::Sample>, sample: &D::Sample) -> bool
    where
        D::Sample: Clone,
    {
        let is_kept = slot.set(sample.clone()).is_ok();
        if is_kept {
            self.fill.keep_one();
        }
        is_kept
    }

    /// The cached dataset.
    pub fn inner(&self) -> &D {
        &self.dataset
    }
}

impl<S> Budget<S> {
    /// Estimates how many samples fit, from the `now` samples that it holds. `None` before the first.
    fn samples(&self, now: u64) -> Option<u64> {
        let used = self.used.load(Ordering::Relaxed) as u128;
        (u128::from(now) * self.max_bytes as u128).checked_div(used)?.try_into().ok()
    }

    /// Reserves the sample's bytes; false when they do not fit.
    fn reserve(&self, bytes: usize) -> bool {
        let add = |used: usize| used.checked_add(bytes).filter(|&total| total <= self.max_bytes);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
    }
}

impl<D: Dataset> Dataset for Cached<D>
where
    D::Sample: Clone + Sync,
{
    type Sample = D::Sample;

    fn len(&self) -> usize {
        self.samples.len()
    }

    fn get(&self, index: usize) -> Result<D::Sample, DataError> {
        let slot = self.samples.get(index).ok_or(DataError::IndexOutOfRange { index, len: self.samples.len() })?;
        if let Some(sample) = slot.get() {
            return Ok(sample.clone());
        }
        let sample = self.dataset.get(index)?;
        match &self.budget {
            None => _ = self.keep(slot, &sample),
            Some(budget) => {
                let bytes = (budget.bytes_of)(&sample);
                // Another thread kept its copy: return what was reserved for this one.
                if budget.reserve(bytes) && !self.keep(slot, &sample) {
                    budget.used.fetch_sub(bytes, Ordering::Relaxed);
                }
                let all = self.samples.len() as u64;
                self.fill.expect(budget.samples(self.fill.kept()).map_or(all, |fit| fit.min(all)));
            }
        }
        Ok(sample)
    }

    fn key(&self, index: usize) -> Option<String> {
        self.dataset.key(index)
    }
}

impl<D: Dataset> fmt::Debug for Cached<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cached {{ {} of {} samples }}", self.cached(), self.samples.len())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::FnDataset;

    fn counting(len: usize) -> (impl Dataset<Sample = Arc<[u8]>>, Arc<AtomicUsize>) {
        let reads = Arc::new(AtomicUsize::new(0));
        let counter = reads.clone();
        let dataset = FnDataset::new(len, move |index| {
            counter.fetch_add(1, Ordering::Relaxed);
            Ok(Arc::from(vec![index as u8; 10]))
        });
        (dataset, reads)
    }

    #[test]
    fn each_sample_is_read_once_and_shared() {
        let (dataset, reads) = counting(50);
        let cached = Cached::new(dataset);
        let first: Vec<_> = (0..50).map(|i| cached.get(i).unwrap()).collect();
        let second: Vec<_> = (0..50).map(|i| cached.get(i).unwrap()).collect();
        assert!(first.iter().zip(&second).all(|(a, b)| Arc::ptr_eq(a, b)));
        assert_eq!((reads.load(Ordering::Relaxed), cached.cached()), (50, 50));
        assert!(matches!(cached.get(50), Err(DataError::IndexOutOfRange { .. })));
    }

    #[test]
    fn threads_see_the_same_samples() {
        let (dataset, _) = counting(200);
        let cached = Cached::new(dataset);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..200).for_each(|i| assert_eq!(cached.get(i).unwrap()[0], i as u8)));
            }
        });
        assert_eq!(cached.cached(), 200);
    }

    #[test]
    fn the_budget_is_kept_and_failures_are_not() {
        let (dataset, reads) = counting(10);
        let cached = Cached::with_budget(dataset, 35, |sample: &Arc<[u8]>| sample.len());
        (0..20).for_each(|i| assert_eq!(cached.get(i % 10).unwrap()[0], (i % 10) as u8));
        assert_eq!((cached.cached(), reads.load(Ordering::Relaxed)), (3, 17));
        // Of the 35 bytes, 5 are left.
        assert_eq!((cached.fill.kept(), cached.fill.wanted()), (3, 3));

        let tries = AtomicUsize::new(0);
        let flaky = Cached::new(FnDataset::new(1, |index| match tries.fetch_add(1, Ordering::Relaxed) {
            0 => Err(DataError::other("not yet")),
            _ => Ok(index),
        }));
        assert!(flaky.get(0).is_err());
        assert_eq!(flaky.get(0).unwrap(), 0);
    }
}
