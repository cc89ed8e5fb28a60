//! Datasets in turns.

use super::pcg64::Pcg64;
use crate::{Concat, DataError, Dataset, Subset};

/// More samples than a loader can put into an order are surely a mistake; their indices would take 32 GiB.
const MAX_SAMPLES: usize = u32::MAX as usize;

/// How far probabilities may be from adding up to 1: the square root of f64's precision, as in NumPy.
const TOLERANCE: f64 = 1.490_116_119_384_765_6e-8;

/// When interleaved datasets end.
///
/// # Source
/// `stopping_strategy` of `datasets.interleave_datasets` of Hugging Face.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[doc(alias = "stopping_strategy")]
pub enum StoppingStrategy {
    /// With the last sample of the dataset that ends first.
    #[default]
    FirstExhausted,
    /// When every sample was there at least once; a dataset that ends before begins again.
    AllExhausted,
    /// When every sample was there once; a dataset that ends before is left out from there on.
    AllExhaustedWithoutReplacement,
}

/// Puts datasets into one, whose samples come from them in turns, or from one at a time at random.
///
/// The result is the same in every epoch. For weights that change, and other samples of a large dataset in each epoch,
/// see [`Mixture`](crate::Mixture).
///
/// ```
/// use overdrive_dataload::{Dataset, StoppingStrategy, interleave_datasets, map_style};
///
/// let data = || [map_style(vec![0, 1, 2]), map_style(vec![10, 11, 12]), map_style(vec![20, 21, 22])];
/// let in_turns = interleave_datasets(data()).build()?;
/// assert_eq!((0..5).map(|index| in_turns.get(index)).collect::<Result<Vec<_>, _>>()?, [0, 10, 20, 1, 11]);
///
/// let mixed = interleave_datasets(data())
///     .probabilities([0.7, 0.2, 0.1])
///     .seed(42)
///     .stopping_strategy(StoppingStrategy::AllExhausted)
///     .build()?;
/// assert_eq!((0..5).map(|index| mixed.get(index)).collect::<Result<Vec<_>, _>>()?, [10, 0, 11, 1, 2]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `datasets.interleave_datasets` of Hugging Face; with a seed, the samples are in its order.
pub fn interleave_datasets<D: Dataset>(datasets: impl IntoIterator<Item = D>) -> InterleaveBuilder<D> {
    InterleaveBuilder {
        datasets: datasets.into_iter().collect(),
        probabilities: None,
        seed: overdrive_core::base_seed(),
        stopping_strategy: StoppingStrategy::default(),
    }
}

/// Collects the options of [`interleave_datasets`].
#[derive(Clone, Debug)]
#[must_use = "call build() to get the dataset"]
pub struct InterleaveBuilder<D> {
    datasets: Vec<D>,
    probabilities: Option<Vec<f64>>,
    seed: u64,
    stopping_strategy: StoppingStrategy,
}

impl<D: Dataset> InterleaveBuilder<D> {
    /// Takes each sample from a dataset drawn with these probabilities; in turns unless set.
    pub fn probabilities(mut self, probabilities: impl Into<Vec<f64>>) -> Self {
        self.probabilities = Some(probabilities.into());
        self
    }

    /// The seed of these draws; unless set, that of [`seed_everything`](overdrive_core::seed_everything), and 0 where
    /// that was not called.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// When the result ends; [`StoppingStrategy::FirstExhausted`] unless set.
    pub fn stopping_strategy(mut self, stopping_strategy: StoppingStrategy) -> Self {
        self.stopping_strategy = stopping_strategy;
        self
    }

    /// The dataset. It keeps its order in memory, 8 bytes a sample.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no dataset, or an empty one; for probabilities that are not one per
    /// dataset, from 0 to 1, and 1 in total; for a probability of 0 where every dataset has to be exhausted; and for
    /// 2^32 or more samples.
    pub fn build(self) -> Result<Subset<Concat<D>>, DataError> {
        let datasets = Concat::new(self.datasets)?;
        let lens = datasets.lens();
        if lens.contains(&0) {
            return Err(DataError::option("datasets", "at least one sample in each", format!("lengths {lens:?}")));
        }
        let places = match &self.probabilities {
            None => in_turns(&lens, self.stopping_strategy)?,
            Some(probabilities) => {
                check(probabilities, &lens, self.stopping_strategy)?;
                at_random(&lens, probabilities, self.seed, self.stopping_strategy)?
            }
        };
        let start = |dataset: usize| datasets.cumulative_sizes()[dataset] - lens[dataset];
        let indices: Vec<usize> = places.into_iter().map(|(dataset, index)| start(dataset) + index).collect();
        datasets.subset(indices)
    }
}

/// The dataset and the index there, for each sample of the result.
type Places = Vec<(usize, usize)>;

fn in_turns(lens: &[usize], stopping: StoppingStrategy) -> Result<Places, DataError> {
    let all = stopping != StoppingStrategy::FirstExhausted;
    let rounds = if all { lens.iter().max() } else { lens.iter().min() }.copied().unwrap_or(0);
    if rounds.saturating_mul(lens.len()) > MAX_SAMPLES {
        return Err(too_many());
    }
    let again = stopping == StoppingStrategy::AllExhausted;
    let round = |index: usize| {
        let present = lens.iter().enumerate().filter(move |&(_, &len)| again || index < len);
        present.map(move |(dataset, len)| (dataset, index % len))
    };
    Ok((0..rounds).flat_map(round).collect())
}

fn at_random(
    lens: &[usize],
    probabilities: &[f64],
    seed: u64,
    stopping: StoppingStrategy,
) -> Result<Places, DataError> {
    let mut total = 0.0;
    let mut ends: Vec<f64> = probabilities
        .iter()
        .map(|probability| {
            total += probability;
            total
        })
        .collect();
    ends.iter_mut().for_each(|end| *end /= total);
    let mut generator = Pcg64::default_rng(seed);
    let (mut next, mut exhausted) = (vec![0; lens.len()], vec![false; lens.len()]);
    let mut places = Places::new();
    loop {
        let over = match stopping {
            StoppingStrategy::FirstExhausted => exhausted.contains(&true),
            _ => !exhausted.contains(&false),
        };
        if over {
            return Ok(places);
        }
        let draw = generator.random();
        let dataset = ends.partition_point(|&end| end <= draw).min(lens.len() - 1);
        if exhausted[dataset] && stopping == StoppingStrategy::AllExhaustedWithoutReplacement {
            continue;
        }
        if places.len() == MAX_SAMPLES {
            return Err(too_many());
        }
        places.push((dataset, next[dataset]));
        next[dataset] += 1;
        if next[dataset] == lens[dataset] {
            (next[dataset], exhausted[dataset]) = (0, true);
        }
    }
}

fn check(probabilities: &[f64], lens: &[usize], stopping: StoppingStrategy) -> Result<(), DataError> {
    let wrong = |expected: &str| Err(DataError::option("probabilities", expected, format!("{probabilities:?}")));
    if probabilities.len() != lens.len() {
        return wrong(&format!("one for each of {} datasets", lens.len()));
    }
    let total: f64 = probabilities.iter().sum();
    if probabilities.iter().any(|probability| !(0.0..=1.0).contains(probability)) || (total - 1.0).abs() > TOLERANCE {
        return wrong("numbers from 0 to 1 that add up to 1");
    }
    let all = stopping != StoppingStrategy::FirstExhausted;
    if all && probabilities.contains(&0.0) {
        return wrong("numbers above 0, since every dataset has to be exhausted");
    }
    // About as many draws as it takes until the last dataset that has to be exhausted is.
    let draws = lens.iter().zip(probabilities).map(|(&len, probability)| len as f64 / probability);
    let draws = if all { draws.fold(0.0, f64::max) } else { draws.fold(f64::INFINITY, f64::min) };
    if draws > MAX_SAMPLES as f64 { Err(too_many()) } else { Ok(()) }
}

fn too_many() -> DataError {
    DataError::option("datasets", format!("at most {MAX_SAMPLES} samples in the result"), "more")
}
