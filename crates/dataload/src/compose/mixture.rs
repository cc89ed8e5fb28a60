//! A weighted mixture of datasets.

use crate::loader::MAX_ORDER;
use crate::permutation::shuffle;
use crate::{DataError, Philox, RandomSampler, Sampler, StoppingStrategy};

/// Separate the random streams of mixtures from those of other samplers with the same seed.
const TURNS: u64 = 0x6d69_7874_7475_726e;
const PASSES: u64 = 0x6d69_7874_7061_7373;

/// After this many epochs, the passes over the datasets begin anew, which bounds the work for an epoch of any number.
const COUNTED_EPOCHS: u64 = 1 << 16;

/// Draws from several datasets in proportion to weights, which may change between epochs and within them.
///
/// It is the order of a loader over the [`Concat`](crate::Concat) of the datasets. Each dataset is gone through in
/// passes of its own, each in a new random order, which go on from one epoch to the next, for 65,536 epochs: no sample
/// comes again before all of its dataset have come, however small the weight and the epochs are. The numbers of draws
/// follow weights above 0 to within two, because only the order of the turns is random. A pass's order is a list in
/// memory, 8 bytes for each sample of each dataset, which is made anew for each epoch.
///
/// An epoch's order is a function of (weights, seed, epoch), so a run resumes in the middle of an epoch with the same
/// rest. It is refused with other weights in that epoch.
///
/// ```
/// use overdrive_dataload::{Concat, DataError, DataLoader, FnDataset, Mixture};
///
/// let data = |kind: &'static str, len| FnDataset::new(len, move |_| Ok(kind.to_owned()));
/// let both = Concat::new([data("text", 900), data("code", 100)])?;
/// let mixture = Mixture::new(both.lens(), [3.0, 1.0], 0)?
///     .num_samples(320)?
///     .weights_from(1, 0, [1.0, 1.0])?          // from epoch 1 on
///     .weights_from(1, 5 * 32, [1.0, 3.0])?;    // from step 5 of epoch 1 on, at 32 samples a step
/// let loader = DataLoader::builder(both).batch_size(32).sampler(mixture).build()?;
/// let code = |batch: Vec<String>| batch.iter().filter(|kind| *kind == "code").count();
/// let epoch = || loader.iter().map(|batch| batch.map(code)).sum::<Result<usize, DataError>>();
/// assert_eq!((epoch()?, epoch()?), (80, 80 + 120));
/// # Ok::<(), DataError>(())
/// ```
///
/// # Source
/// The `probabilities` and `stopping_strategy` of `datasets.interleave_datasets` of Hugging Face, which draws each
/// turn by itself and whose result is the same in every epoch:
/// [`interleave_datasets`](crate::interleave_datasets) here.
#[derive(Clone, Debug)]
#[doc(alias = "interleave_datasets")]
pub struct Mixture {
    lens: Vec<usize>,
    /// From when on which weights count; the first from the start.
    stages: Vec<Stage>,
    num_samples: usize,
    shuffle: bool,
    seed: u64,
}

#[derive(Clone, Debug)]
struct Stage {
    epoch: u64,
    draw: usize,
    /// One per dataset, 1 in total.
    weights: Vec<f64>,
}

impl Mixture {
    /// Draws from datasets of these lengths ([`Concat::lens`](crate::Concat::lens)) by `weights`, which need not add up
    /// to 1. An epoch ends when the first dataset has been gone through once.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for weights that are not one per dataset, a weight that is negative or not finite,
    /// one above 0 for an empty dataset, and where none is above 0.
    pub fn new(lens: impl Into<Vec<usize>>, weights: impl Into<Vec<f64>>, seed: u64) -> Result<Self, DataError> {
        let lens = lens.into();
        if let Some(len) = lens.iter().find(|&&len| len > MAX_ORDER) {
            let expected = format!("at most {MAX_ORDER} samples a dataset, whose order is a list in memory");
            return Err(DataError::option("lens", expected, len));
        }
        let weights = normalized(&weights.into(), &lens)?;
        let mut mixture = Self { lens, stages: Vec::new(), num_samples: 0, shuffle: true, seed };
        mixture.stages.push(Stage { epoch: 0, draw: 0, weights });
        mixture.stopping_strategy(StoppingStrategy::FirstExhausted)
    }

    /// When an epoch ends, at the first weights: when the first dataset, or every dataset with a weight above 0, has
    /// been gone through once.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for [`StoppingStrategy::AllExhaustedWithoutReplacement`], under which the numbers of
    /// draws cannot follow the weights.
    pub fn stopping_strategy(mut self, stopping_strategy: StoppingStrategy) -> Result<Self, DataError> {
        let present = self.lens.iter().zip(&self.stages[0].weights).filter(|&(_, &weight)| weight > 0.0);
        let draws = present.map(|(&len, weight)| len as f64 / weight);
        let draws = match stopping_strategy {
            StoppingStrategy::FirstExhausted => draws.fold(f64::INFINITY, f64::min).floor(),
            StoppingStrategy::AllExhausted => draws.fold(0.0, f64::max).ceil(),
            StoppingStrategy::AllExhaustedWithoutReplacement => {
                let expected = "FirstExhausted or AllExhausted, or a plain order of all samples";
                return Err(DataError::option("stopping_strategy", expected, format!("{stopping_strategy:?}")));
            }
        };
        self.num_samples = (draws as usize).max(1);
        Ok(self)
    }

    /// How many samples an epoch has; see [`new`](Self::new) and [`stopping_strategy`](Self::stopping_strategy) unless
    /// set.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0.
    pub fn num_samples(mut self, num_samples: usize) -> Result<Self, DataError> {
        DataError::at_least_1("num_samples", num_samples)?;
        self.num_samples = num_samples;
        Ok(self)
    }

    /// Whether each pass over a dataset has a new random order; on unless set. If off, it has the dataset's own.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// Other weights from draw number `draw` of `epoch` on, of all ranks together: at step `s`, `s * batch_size *
    /// world_size`.
    ///
    /// Weights that depend on how training goes are set by building the loader again with one more call of this, for
    /// the epoch that follows, and [`set_epoch`](crate::DataLoader::set_epoch).
    ///
    /// # Errors
    /// As [`new`](Self::new); [`DataError::InvalidOption`] for a time that is not after that of the call before.
    pub fn weights_from(mut self, epoch: u64, draw: usize, weights: impl Into<Vec<f64>>) -> Result<Self, DataError> {
        let weights = normalized(&weights.into(), &self.lens)?;
        if let Some(last) = self.stages.last().filter(|last| (last.epoch, last.draw) >= (epoch, draw)) {
            let expected = format!("a time after epoch {}, draw {}", last.epoch, last.draw);
            return Err(DataError::option("weights_from", expected, format!("epoch {epoch}, draw {draw}")));
        }
        self.stages.push(Stage { epoch, draw, weights });
        Ok(self)
    }

    /// The parts of an epoch with equal weights: how many draws each has, and its weights.
    fn stretches(&self, epoch: u64) -> impl Iterator<Item = (usize, &[f64])> {
        let first = self.stages.partition_point(|stage| (stage.epoch, stage.draw) <= (epoch, 0)) - 1;
        let end = self.stages.partition_point(|stage| stage.epoch <= epoch);
        (first..end).map(move |stage| {
            let start = if stage == first { 0 } else { self.stages[stage].draw.min(self.num_samples) };
            let next = self.stages[..end].get(stage + 1).map_or(usize::MAX, |next| next.draw);
            (next.min(self.num_samples) - start, self.stages[stage].weights.as_slice())
        })
    }

    /// The samples of a dataset in the order of its passes, from draw number `from` of this dataset on.
    fn samples(&self, dataset: usize, from: u64, since: u64) -> impl Iterator<Item = usize> {
        let len = self.lens[dataset];
        let seed = Philox::new(self.seed ^ PASSES, dataset as u64).at(since);
        let pass = move |pass: u64| -> Box<dyn Iterator<Item = usize>> {
            match self.shuffle {
                true => Box::new(RandomSampler::new(len, seed).order(pass).into_iter()),
                false => Box::new(0..len),
            }
        };
        let (passes, rest) = (from / len.max(1) as u64, from % len.max(1) as u64);
        (passes..).flat_map(pass).skip(rest as usize)
    }
}

impl Sampler for Mixture {
    fn len(&self) -> usize {
        self.num_samples
    }

    fn order(&self, epoch: u64) -> Vec<usize> {
        let since = epoch - epoch % COUNTED_EPOCHS;
        let mut tally = Tally::new(self.lens.len());
        for before in since..epoch {
            self.stretches(before).for_each(|(draws, weights)| drop(tally.draw(draws, weights)));
        }
        let passes = tally.drawn.iter().enumerate();
        let mut samples: Vec<_> = passes.map(|(dataset, &drawn)| self.samples(dataset, drawn, since)).collect();
        let mut bits = Philox::new(self.seed ^ TURNS, epoch).bits();
        let mut turns = Vec::with_capacity(self.num_samples);
        for (draws, weights) in self.stretches(epoch) {
            let start = turns.len();
            for (dataset, count) in tally.draw(draws, weights).into_iter().enumerate() {
                turns.resize(turns.len() + count, dataset);
            }
            shuffle(&mut turns[start..], || bits.draw());
        }
        let ends = self.lens.iter().scan(0usize, |end, len| {
            *end = end.saturating_add(*len);
            Some(*end)
        });
        let starts: Vec<usize> = ends.zip(&self.lens).map(|(end, len)| end - len).collect();
        turns.into_iter().filter_map(|dataset| Some(starts[dataset] + samples[dataset].next()?)).collect()
    }
}

/// How often each dataset was drawn, and how far that is behind its weight.
struct Tally {
    drawn: Vec<u64>,
    /// By how many draws each dataset is behind; below 0 where it is ahead. All are small, so that no error adds up.
    behind: Vec<f64>,
}

impl Tally {
    fn new(datasets: usize) -> Self {
        Self { drawn: vec![0; datasets], behind: vec![0.0; datasets] }
    }

    /// Divides the next draws among the datasets.
    fn draw(&mut self, draws: usize, weights: &[f64]) -> Vec<usize> {
        for (behind, weight) in self.behind.iter_mut().zip(weights) {
            *behind = if *weight > 0.0 { *behind + draws as f64 * weight } else { 0.0 };
        }
        let mut counts: Vec<usize> = self.behind.iter().map(|behind| behind.max(0.0).floor() as usize).collect();
        let mut total: usize = counts.iter().sum();
        // What rounding leaves, at most a few draws: one more for the dataset that is furthest behind, or one less for
        // the one that is furthest ahead.
        while total != draws {
            let behind = |&dataset: &usize| self.behind[dataset] - counts[dataset] as f64;
            let later = |a: &usize, b: &usize| behind(a).total_cmp(&behind(b));
            let all = (0..counts.len()).filter(|&dataset| weights[dataset] > 0.0);
            let (dataset, more) = match total < draws {
                true => (all.max_by(later), true),
                false => (all.filter(|&dataset| counts[dataset] > 0).min_by(later), false),
            };
            let Some(dataset) = dataset else { break };
            counts[dataset] = if more { counts[dataset] + 1 } else { counts[dataset] - 1 };
            total = if more { total + 1 } else { total - 1 };
        }
        for (dataset, &count) in counts.iter().enumerate() {
            self.drawn[dataset] += count as u64;
            self.behind[dataset] -= count as f64;
        }
        counts
    }
}

/// The weights as shares of 1.
pub(super) fn normalized(weights: &[f64], lens: &[usize]) -> Result<Vec<f64>, DataError> {
    let wrong = |expected: &str, found: String| Err(DataError::option("weights", expected, found));
    if weights.len() != lens.len() {
        return wrong(&format!("one for each of {}", lens.len()), weights.len().to_string());
    }
    if let Some(dataset) = weights.iter().position(|weight| !(weight.is_finite() && *weight >= 0.0)) {
        return wrong("finite numbers of at least 0", format!("{} at place {dataset}", weights[dataset]));
    }
    if let Some(dataset) = (0..lens.len()).find(|&dataset| lens[dataset] == 0 && weights[dataset] > 0.0) {
        return wrong("0 where there is nothing to draw from", format!("{} at place {dataset}", weights[dataset]));
    }
    let most = weights.iter().copied().fold(0.0, f64::max);
    if most == 0.0 {
        return wrong("at least one above 0", format!("none of {}", weights.len()));
    }
    // By the largest first, so that their sum is finite.
    let total: f64 = weights.iter().map(|weight| weight / most).sum();
    Ok(weights.iter().map(|weight| weight / most / total).collect())
}
