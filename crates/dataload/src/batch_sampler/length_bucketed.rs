//! Batches of samples of similar length.

use std::ops::Range;

use crate::permutation::shuffle;
use crate::{BatchPlan, BatchSampler, DataError, Philox};

/// Samples of similar length, cut into batches of one size.
#[derive(Clone, Debug)]
struct Bucket {
    /// The range of its samples in `LengthBucketed::indices`.
    range: Range<usize>,
    batch_size: usize,
}

/// Random batches of samples of similar length, so that little of a padded batch is padding.
///
/// Samples are grouped into buckets by length; every epoch shuffles each bucket, cuts it into batches, and shuffles the
/// batches of all buckets. Only a bucket's last batch may be smaller than its others. The number of batches is the same
/// in every epoch. For several ranks there is
/// [`DistributedBatches::split_batches`](crate::DistributedBatches::split_batches).
///
/// A sample is padded to the longest of its batch, so in a bucket of a given width by fewer elements than that width.
/// With 20,000 log-normal lengths (median 90, sigma 0.8) in batches of 32, padding is 75 % of the elements of random
/// batches, 6 % with the default of up to 100 buckets, 22 % with 20 of them, and 5 % with buckets 16 wide.
///
/// ```
/// use overdrive_dataload::{BatchSampler, LengthBucketed};
///
/// let lengths = vec![9, 3, 14, 4, 2, 13];
/// let batches = LengthBucketed::builder(lengths).batch_size(2).num_buckets(3).build()?;
/// let mut batch = batches.plan(0).batch(0).unwrap_or_default().to_vec();
/// batch.sort_unstable();
/// assert!([[1, 4], [0, 3], [2, 5]].contains(&[batch[0], batch[1]]));
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `BucketIterator` of torchtext, `group_by_length` of Hugging Face Transformers.
#[derive(Clone, Debug)]
#[doc(alias = "BucketIterator")]
#[doc(alias = "group_by_length")]
pub struct LengthBucketed {
    /// The samples' indices, sorted by length.
    indices: Vec<usize>,
    buckets: Vec<Bucket>,
    /// `None` with `max_tokens`.
    batch_size: Option<usize>,
    drop_last: bool,
    seed: u64,
}

impl LengthBucketed {
    /// Starts from the length of every sample of the dataset.
    pub fn builder(lengths: impl Into<Vec<usize>>) -> LengthBucketedBuilder {
        LengthBucketedBuilder {
            lengths: lengths.into(),
            batch_size: None,
            max_tokens: None,
            num_buckets: None,
            bucket_width: None,
            drop_last: false,
            seed: overdrive_core::base_seed(),
        }
    }

    /// The range of each batch in `indices`.
    fn cuts(&self) -> impl Iterator<Item = Range<usize>> {
        self.buckets.iter().flat_map(|Bucket { range, batch_size }| {
            let cut = |start: usize| start..start.saturating_add(*batch_size).min(range.end);
            let whole = |cut: &Range<usize>| !self.drop_last || cut.len() == *batch_size;
            range.clone().step_by(*batch_size).map(cut).filter(whole)
        })
    }
}

impl BatchSampler for LengthBucketed {
    fn len(&self) -> usize {
        self.cuts().count()
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        let mut bits = Philox::new(self.seed, epoch).bits();
        let mut indices = self.indices.clone();
        for bucket in &self.buckets {
            shuffle(&mut indices[bucket.range.clone()], || bits.draw());
        }
        let mut cuts: Vec<_> = self.cuts().collect();
        shuffle(&mut cuts, || bits.draw());
        cuts.into_iter().map(|cut| &indices[cut]).collect()
    }

    fn global_batch_size(&self) -> usize {
        self.batch_size.unwrap_or(0)
    }
}

/// Collects the options of a [`LengthBucketed`]; made by [`LengthBucketed::builder`].
#[derive(Clone, Debug)]
#[must_use = "call build() to get the batch sampler"]
pub struct LengthBucketedBuilder {
    lengths: Vec<usize>,
    batch_size: Option<usize>,
    max_tokens: Option<usize>,
    num_buckets: Option<usize>,
    bucket_width: Option<usize>,
    drop_last: bool,
    seed: u64,
}

impl LengthBucketedBuilder {
    /// Samples per batch. Either this or [`max_tokens`](Self::max_tokens) has to be set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = Some(batch_size);
        self
    }

    /// Elements per batch, padding included: a batch has as many samples as fit if each is as long as its bucket's
    /// longest.
    pub fn max_tokens(mut self, max_tokens: usize) -> Self {
        self.max_tokens = Some(max_tokens);
        self
    }

    /// How many buckets, of about equally many samples each.
    ///
    /// Unless this or [`bucket_width`](Self::bucket_width) is set, there are 100, or fewer so that a bucket holds at
    /// least four batches of `batch_size`.
    pub fn num_buckets(mut self, num_buckets: usize) -> Self {
        self.num_buckets = Some(num_buckets);
        self
    }

    /// Makes each bucket cover a range of lengths of this width: 1 to `bucket_width`, and so on.
    pub fn bucket_width(mut self, bucket_width: usize) -> Self {
        self.bucket_width = Some(bucket_width);
        self
    }

    /// Whether each bucket's incomplete last batch is dropped; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// The seed of the order; unless set, that of [`seed_everything`](overdrive_core::seed_everything), or 0.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Makes the batch sampler.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for an option of 0, for neither or both of `batch_size` and `max_tokens`, for both
    /// `num_buckets` and `bucket_width`, and for a sample that is longer than `max_tokens`.
    pub fn build(self) -> Result<LengthBucketed, DataError> {
        let given = [
            ("batch_size", self.batch_size),
            ("max_tokens", self.max_tokens),
            ("num_buckets", self.num_buckets),
            ("bucket_width", self.bucket_width),
        ];
        if let Some((option, _)) = given.iter().find(|(_, value)| *value == Some(0)) {
            return Err(DataError::option(option, "at least 1", 0));
        }
        if self.num_buckets.is_some() && self.bucket_width.is_some() {
            return Err(DataError::option("bucket_width", "either it or num_buckets", "both"));
        }
        if self.batch_size.is_some() == self.max_tokens.is_some() {
            let found = if self.batch_size.is_some() { "both" } else { "neither" };
            return Err(DataError::option("batch_size", "either it or max_tokens", found));
        }
        let mut indices: Vec<usize> = (0..self.lengths.len()).collect();
        indices.sort_by_key(|&index| self.lengths[index]);
        let longest = indices.last().map(|&index| (index, self.lengths[index]));
        if let (Some((index, length)), Some(limit)) = (longest, self.max_tokens)
            && length > limit
        {
            let expected = format!("at least the longest sample's length, {length} at index {index}");
            return Err(DataError::option("max_tokens", expected, limit));
        }
        let mut buckets = Vec::new();
        let mut start = 0;
        for members in self.split(&indices) {
            let longest = members.last().map_or(1, |&index| self.lengths[index].max(1));
            let fitting = self.max_tokens.map(|limit| limit / longest);
            // Both are at least 1 by the checks above; `max(1)` only guards `step_by` from 0.
            let batch_size = self.batch_size.or(fitting).unwrap_or(1).max(1);
            buckets.push(Bucket { range: start..start + members.len(), batch_size });
            start += members.len();
        }
        let Self { batch_size, drop_last, seed, .. } = self;
        Ok(LengthBucketed { indices, buckets, batch_size, drop_last, seed })
    }

    /// Splits the samples, sorted by length, into buckets.
    fn split<'a>(&'a self, indices: &'a [usize]) -> Box<dyn Iterator<Item = &'a [usize]> + 'a> {
        if let Some(width) = self.bucket_width {
            let number = move |&index: &usize| self.lengths[index].div_ceil(width);
            return Box::new(indices.chunk_by(move |a, b| number(a) == number(b)));
        }
        let size = match self.num_buckets {
            Some(buckets) => indices.len().div_ceil(buckets),
            None => indices.len().div_ceil(100).max(self.batch_size.unwrap_or(0).saturating_mul(4)),
        };
        Box::new(indices.chunks(size.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DistributedBatches, Draws, FixedBatches, RandomSampler};

    /// Log-normal lengths, as in texts.
    fn lengths(count: usize) -> Vec<usize> {
        let mut draws = Draws::new(1, 2, 3, 4);
        let normal = |draws: &mut Draws| (0..12).map(|_| draws.uniform(0.0, 1.0)).sum::<f64>() - 6.0;
        (0..count).map(|_| (90.0 * (0.8 * normal(&mut draws)).exp()).ceil() as usize).collect()
    }

    /// Per cent of the elements of padded batches that are padding.
    fn padding(plan: &BatchPlan, lengths: &[usize]) -> usize {
        let padded = |batch: &[usize]| batch.len() * batch.iter().map(|&index| lengths[index]).max().unwrap_or(0);
        let whole: usize = plan.batches().map(padded).sum();
        let real: usize = plan.batches().flatten().map(|&index| lengths[index]).sum();
        100 * (whole - real) / whole
    }

    fn visited(plan: &BatchPlan) -> Vec<usize> {
        let mut indices: Vec<usize> = plan.batches().flatten().copied().collect();
        indices.sort_unstable();
        indices
    }

    #[test]
    fn batches_of_similar_length_need_little_padding() -> Result<(), DataError> {
        let lengths = lengths(20_000);
        let plain = FixedBatches::new(RandomSampler::new(lengths.len(), 0), 32, false)?.plan(0);
        let builder = || LengthBucketed::builder(lengths.clone()).batch_size(32);
        let percents = [
            padding(&plain, &lengths),
            padding(&builder().build()?.plan(0), &lengths),
            padding(&builder().num_buckets(20).build()?.plan(0), &lengths),
            padding(&builder().bucket_width(16).build()?.plan(0), &lengths),
        ];
        assert_eq!(percents, [75, 6, 22, 5], "the documentation states these");
        Ok(())
    }

    #[test]
    fn every_epoch_has_each_sample_once_in_another_order() -> Result<(), DataError> {
        let lengths = lengths(1000);
        for builder in [
            LengthBucketed::builder(lengths.clone()).batch_size(7),
            LengthBucketed::builder(lengths.clone()).batch_size(usize::MAX).bucket_width(1),
            LengthBucketed::builder(lengths.clone()).max_tokens(4000).num_buckets(13),
            LengthBucketed::builder(lengths.clone()).max_tokens(4000).bucket_width(32),
        ] {
            let batches = builder.seed(5).build()?;
            for epoch in 0..3 {
                let plan = batches.plan(epoch);
                assert_eq!((plan.len(), visited(&plan)), (batches.len(), (0..1000).collect()));
                assert_eq!(plan, batches.plan(epoch));
            }
            assert_ne!(batches.plan(0), batches.plan(1));
        }
        Ok(())
    }

    #[test]
    fn a_batch_keeps_to_its_bucket_and_its_tokens() -> Result<(), DataError> {
        let lengths = lengths(1000);
        let batches = LengthBucketed::builder(lengths.clone()).max_tokens(2000).bucket_width(25).build()?;
        for batch in batches.plan(3).batches() {
            let of = |index: &usize| lengths[*index];
            let (shortest, longest) = (batch.iter().map(of).min().unwrap(), batch.iter().map(of).max().unwrap());
            assert!(batch.len() * longest <= 2000 && shortest.div_ceil(25) == longest.div_ceil(25));
        }
        let fixed = LengthBucketed::builder(lengths).batch_size(16).num_buckets(3).drop_last(true).build()?;
        assert!(fixed.plan(0).batches().all(|batch| batch.len() == 16));
        assert_eq!((fixed.plan(0).len(), fixed.len()), (20 + 20 + 20, 60));
        Ok(())
    }

    #[test]
    fn every_rank_gets_as_many_batches_of_similar_length() -> Result<(), DataError> {
        let lengths = lengths(1003);
        let batches = LengthBucketed::builder(lengths.clone()).batch_size(24).bucket_width(20).build()?;
        let whole = batches.plan(2);
        let mut ranks = Vec::new();
        for rank in 0..4 {
            ranks.push(DistributedBatches::new(batches.clone(), 4, rank)?.split_batches(true).plan(2));
        }
        for (number, batch) in whole.batches().enumerate() {
            let mut parts: Vec<usize> = ranks.iter().flat_map(|plan| plan.batch(number).unwrap()).copied().collect();
            assert_eq!(parts.len(), batch.len().next_multiple_of(4));
            parts.sort_unstable();
            parts.dedup();
            let mut batch = batch.to_vec();
            batch.sort_unstable();
            assert_eq!(parts, batch);
        }
        Ok(())
    }

    #[test]
    fn options_that_make_no_sense_are_refused() {
        let builder = || LengthBucketed::builder([3, 9, 4]);
        let message = |builder: LengthBucketedBuilder| builder.build().unwrap_err().to_string();
        assert_eq!(message(builder()), "batch_size: expected either it or max_tokens, found neither");
        assert!(message(builder().batch_size(1).max_tokens(9)).ends_with("found both"));
        assert_eq!(message(builder().batch_size(0)), "batch_size: expected at least 1, found 0");
        assert_eq!(message(builder().batch_size(1).bucket_width(0)), "bucket_width: expected at least 1, found 0");
        assert!(message(builder().batch_size(1).bucket_width(2).num_buckets(2)).starts_with("bucket_width: "));
        let expected = "max_tokens: expected at least the longest sample's length, 9 at index 1, found 8";
        assert_eq!(message(builder().max_tokens(8)), expected);
        assert!(LengthBucketed::builder([]).max_tokens(8).build().is_ok_and(|batches| batches.is_empty()));
        assert_eq!(LengthBucketed::builder([0; 9]).max_tokens(8).build().map(|batches| batches.len()).ok(), Some(9));
    }
}
