//! Weighted mixtures of datasets and of streams: shares, passes, and resume to the sample.

use std::collections::{BTreeMap, BTreeSet};

use overdrive_core::{StateError, Stateful};
use overdrive_dataload::{
    Concat, DataError, DataLoader, Dataset, DistributedSampler, FnStream, IterableDataset, Mixture, Sampler,
    StoppingStrategy, StreamMixture,
};

use crate::resume::{Numbers, rest, resumed, stopped};
use crate::{WORKERS, alone, listed, uneven};

const LENS: [usize; 3] = [50, 7, 1000];

/// The dataset that each index of the concatenation belongs to.
fn dataset(index: usize) -> usize {
    [50, 57].into_iter().filter(|&end| end <= index).count()
}

fn counts(order: &[usize]) -> [usize; 3] {
    let mut counts = [0; 3];
    order.iter().for_each(|&index| counts[dataset(index)] += 1);
    counts
}

fn mixture() -> Result<Mixture, DataError> {
    Mixture::new(LENS, [0.5, 0.1, 0.4], 7)?.num_samples(90)
}

#[test]
fn draws_follow_the_weights_exactly_over_any_number_of_epochs() -> Result<(), DataError> {
    for weights in [[0.5, 0.1, 0.4], [0.999, 0.0005, 0.0005], [0.3, 0.3, 0.4], [1.0, 0.0, 2.0]] {
        let mixture = Mixture::new(LENS, weights, 7)?.num_samples(31)?;
        let (mut drawn, total) = ([0; 3], weights.iter().sum::<f64>());
        for epoch in 0..200 {
            let counts = counts(&mixture.order(epoch));
            drawn.iter_mut().zip(counts).for_each(|(drawn, count)| *drawn += count);
            for (drawn, weight) in drawn.iter().zip(weights) {
                let expected = (31 * (epoch + 1)) as f64 * weight / total;
                assert!((*drawn as f64 - expected).abs() < 2.0, "{weights:?}, epoch {epoch}: {drawn}, not {expected}");
            }
        }
    }
    Ok(())
}

#[test]
fn no_sample_comes_again_before_all_of_its_dataset_have() -> Result<(), DataError> {
    let changed = mixture()?.weights_from(3, 11, [0.1, 0.8, 0.1])?.weights_from(3, 50, [0.0, 0.0, 1.0])?;
    for mixture in [mixture()?, changed.weights_from(9, 0, [1.0, 1.0, 1.0])?] {
        let mut seen: [Vec<usize>; 3] = Default::default();
        for index in (0..40).flat_map(|epoch| mixture.order(epoch)) {
            seen[dataset(index)].push(index);
        }
        for (len, seen) in LENS.into_iter().zip(&seen) {
            assert!(seen.len() > len, "{len}: {}", seen.len());
            for pass in seen.chunks(len) {
                let mut pass = pass.to_vec();
                pass.sort_unstable();
                assert!(pass.windows(2).all(|pair| pair[0] < pair[1]), "a sample twice in one pass of {len}");
            }
        }
        assert_ne!(seen[1][..7], seen[1][7..14], "each pass has its own order");
    }
    let in_order = mixture()?.shuffle(false);
    let first: Vec<usize> = (0..3).flat_map(|epoch| in_order.order(epoch)).filter(|&i| dataset(i) == 0).collect();
    assert!(first.iter().enumerate().all(|(place, &index)| index == place % 50));
    Ok(())
}

#[test]
fn turns_are_random_and_differ_by_epoch_and_seed() -> Result<(), DataError> {
    let order = |seed, epoch| Ok::<_, DataError>(Mixture::new([5, 5], [1.0, 1.0], seed)?.num_samples(10)?.order(epoch));
    assert_eq!(order(1, 2)?, order(1, 2)?);
    assert_ne!(order(1, 2)?, order(1, 3)?);
    assert_ne!(order(1, 2)?, order(2, 2)?);
    // How often the first draw is from the first of two equal datasets.
    let first = (0..4000).map(|seed| Ok(usize::from(order(seed, 0)?[0] < 5))).sum::<Result<usize, DataError>>()?;
    // Five standard deviations of a binomial count with p = 1/2.
    assert!(first.abs_diff(2000) < 158, "{first}");
    // A number that no run reaches takes no longer than any other.
    assert_eq!(order(1, u64::MAX)?.len(), 10);
    Ok(())
}

#[test]
fn weights_change_at_their_draw() -> Result<(), DataError> {
    let changing = mixture()?.weights_from(1, 30, [0.0, 0.0, 1.0])?.weights_from(2, 0, [1.0, 0.0, 1.0])?;
    assert_eq!(changing.order(0), mixture()?.order(0));
    let order = changing.order(1);
    assert_eq!(counts(&order[..30]), [15, 3, 12]);
    assert_eq!(counts(&order[30..]), [0, 0, 60]);
    assert_eq!((counts(&changing.order(2)), counts(&changing.order(77))), ([45, 0, 45], [45, 0, 45]));
    // A change beyond an epoch's end counts from the next epoch on.
    let late = mixture()?.weights_from(0, 500, [0.0, 1.0, 0.0])?;
    assert_eq!((late.order(0), counts(&late.order(1))), (mixture()?.order(0), [0, 90, 0]));
    Ok(())
}

#[test]
fn an_epoch_ends_when_the_first_or_every_dataset_is_exhausted() -> Result<(), DataError> {
    let first = Mixture::new(LENS, [0.5, 0.1, 0.4], 0)?;
    assert_eq!((first.len(), counts(&first.order(0))), (70, [35, 7, 28]));
    let all = first.stopping_strategy(StoppingStrategy::AllExhausted)?;
    assert_eq!((all.len(), counts(&all.order(0))), (2500, [1250, 250, 1000]));
    assert_eq!(Mixture::new([10, 0, 10], [0.5, 0.0, 0.5], 0)?.len(), 20);
    let refused = all.stopping_strategy(StoppingStrategy::AllExhaustedWithoutReplacement).unwrap_err().to_string();
    assert!(refused.starts_with("stopping_strategy: expected FirstExhausted or AllExhausted"), "{refused}");
    Ok(())
}

/// A sample tells its dataset and its index there, so that equal batches are equal to the sample.
fn loader(mixture: Mixture, workers: usize) -> Result<Numbers, DataError> {
    let data = |number: usize| uneven(LENS[number]).map(move |index| Ok(number * 10_000 + index));
    let builder = DataLoader::builder(Concat::new([0, 1, 2].map(data))?).batch_size(8).sampler(mixture);
    builder.num_workers(workers).collate(listed).build()
}

#[test]
fn every_batch_is_a_place_to_resume_also_where_weights_change() -> Result<(), DataError> {
    let _alone = alone();
    let changing = || mixture()?.weights_from(0, 40, [0.2, 0.4, 0.4])?.weights_from(2, 16, [0.0, 0.5, 0.5]);
    let expected = rest(&loader(changing()?, 0)?, 3);
    assert_eq!(expected.len(), 3 * 12);
    for (workers, others) in [(0, 2), (2, 0), (4, 1)] {
        for given in 0..=expected.len() {
            let first = loader(changing()?, workers)?;
            let mut seen = Vec::new();
            while seen.len() < given {
                seen.extend(first.iter().take(given - seen.len()).map(Result::unwrap));
            }
            seen.extend(rest(&resumed(loader(changing()?, others)?, &first.state_dict().unwrap()), 3));
            assert_eq!(seen, expected, "{workers} workers, after {given}");
        }
    }
    Ok(())
}

#[test]
fn other_weights_in_the_saved_epoch_are_refused_and_later_ones_taken() -> Result<(), DataError> {
    let first = loader(mixture()?, 0)?;
    first.iter().take(3).for_each(|batch| drop(batch.unwrap()));
    let state = first.state_dict().unwrap();
    let later = resumed(loader(mixture()?.weights_from(1, 0, [0.0, 1.0, 0.0])?, 2)?, &state);
    assert!(later.iter().map(Result::unwrap).eq(first.epoch(0).skip(3).map(Result::unwrap)));
    assert!(later.iter().all(|batch| batch.unwrap().iter().all(|place| place / 10_000 == 1)));
    let error = loader(mixture()?.weights_from(0, 80, [0.0, 1.0, 0.0])?, 0)?.load_state_dict(&state).unwrap_err();
    assert!(error.to_string().contains("order"), "{error}");
    Ok(())
}

#[test]
fn ranks_together_draw_what_one_draws() -> Result<(), DataError> {
    for world_size in [2, 3] {
        let ranks: Vec<Vec<usize>> = (0..world_size)
            .map(|rank| Ok(DistributedSampler::new(mixture()?, world_size, rank)?.order(4)))
            .collect::<Result<_, DataError>>()?;
        let together: Vec<usize> = (0..90).map(|place| ranks[place % world_size][place / world_size]).collect();
        assert_eq!(together, mixture()?.order(4));
    }
    let mut times = BTreeMap::new();
    for workers in WORKERS {
        _ = times.insert(loader(mixture()?, workers)?.epoch(5).map(Result::unwrap).collect::<Vec<_>>(), workers);
    }
    assert_eq!(times.len(), 1, "the same batches for any number of workers");
    Ok(())
}

#[test]
fn unusable_weights_are_refused() {
    let refused = |lens: &[usize], weights: &[f64]| Mixture::new(lens, weights, 0).unwrap_err().to_string();
    assert_eq!(refused(&[3, 3], &[1.0]), "weights: expected one for each of 2, found 1");
    let finite = "weights: expected finite numbers of at least 0, found ";
    assert!(refused(&[3, 1 << 33], &[1.0, 1.0]).contains("samples a dataset, whose order is a list in memory"));
    assert_eq!(refused(&[3, 3], &[1.0, -0.5]), format!("{finite}-0.5 at place 1"));
    assert_eq!(refused(&[3, 3], &[f64::NAN, 1.0]), format!("{finite}NaN at place 0"));
    assert_eq!(refused(&[3, 3], &[1.0, f64::INFINITY]), format!("{finite}inf at place 1"));
    assert_eq!(refused(&[3, 3], &[0.0, 0.0]), "weights: expected at least one above 0, found none of 2");
    assert_eq!(refused(&[], &[]), "weights: expected at least one above 0, found none of 0");
    let empty = "weights: expected 0 where there is nothing to draw from, found 1 at place 0";
    assert_eq!(refused(&[0, 3], &[1.0, 1.0]), empty);
    assert!(Mixture::new([3, 3], [1e308, 1e308], 0).is_ok_and(|mixture| mixture.len() == 6));
    let mixture = mixture().unwrap();
    let twice = mixture.clone().weights_from(2, 5, [1.0; 3]).unwrap().weights_from(2, 5, [1.0; 3]).unwrap_err();
    let expected = "weights_from: expected a time after epoch 2, draw 5, found epoch 2, draw 5";
    assert_eq!(twice.to_string(), expected);
    assert!(mixture.clone().weights_from(0, 0, [1.0; 3]).is_err(), "the first weights count from there");
    assert!(mixture.clone().weights_from(1, 0, [1.0; 2]).is_err());
    assert!(mixture.num_samples(0).is_err());
}

/// Two streams of three shards with 40 items each: the items of the second are from 1000 on.
fn two_streams() -> [impl IterableDataset<Sample = usize> + 'static; 2] {
    [0, 1000].map(|from| FnStream::new(3, move |shard| Ok((0..40).map(move |item| Ok(from + 100 * shard + item)))))
}

/// The first stream up to item 21, then the second up to item 44, then both.
fn in_stages(stopping: StoppingStrategy) -> Result<StreamMixture<impl IterableDataset<Sample = usize>>, DataError> {
    let mixture = StreamMixture::new(two_streams(), [1.0, 0.0], 5)?.stopping_strategy(stopping);
    mixture.weights_from(21, [0.0, 1.0])?.weights_from(44, [0.5, 0.5])
}

fn streamed(mixture: impl IterableDataset<Sample = usize> + 'static, workers: usize) -> Result<Numbers, DataError> {
    let interleave = mixture.shards();
    let builder = DataLoader::stream(mixture).batch_size(4).interleave(interleave).num_workers(workers);
    builder.collate(listed).build()
}

fn from_first(items: &[usize]) -> usize {
    items.iter().filter(|&&item| item < 1000).count()
}

#[test]
fn weights_of_streams_change_at_their_item() -> Result<(), DataError> {
    let _alone = alone();
    let once = StoppingStrategy::AllExhaustedWithoutReplacement;
    for shards in [1, 2, 3] {
        let items = rest(&streamed(in_stages(once)?.num_shards(shards)?, 2)?, 1).concat();
        assert_eq!((from_first(&items[..21]), from_first(&items[21..44])), (21, 0), "{shards} shards");
        // Five standard deviations of a binomial count with p = 1/2.
        assert!(from_first(&items[44..144]).abs_diff(50) < 25, "{shards} shards: {items:?}");
        assert_eq!((items.len(), items.iter().collect::<BTreeSet<_>>().len()), (240, 240));
    }
    Ok(())
}

#[test]
fn weights_of_streams_end_where_nothing_is_left_to_draw_by_them() -> Result<(), DataError> {
    use StoppingStrategy::{AllExhausted, AllExhaustedWithoutReplacement, FirstExhausted};
    let items = |first, from, last, stopping| {
        let mixture = StreamMixture::new(two_streams(), first, 5)?.weights_from(from, last)?;
        mixture.stopping_strategy(stopping).stream(0..3).collect::<Result<Vec<usize>, _>>()
    };
    // The second stream begins where the first is exhausted, before its time.
    let late = items([1.0, 0.0], 3 * 1000, [0.0, 1.0], AllExhaustedWithoutReplacement)?;
    assert_eq!((late.len(), from_first(&late[..40]), from_first(&late[40..80])), (240, 40, 0));
    assert_eq!(items([1.0, 0.0], 3 * 1000, [0.0, 1.0], FirstExhausted)?.len(), 120);
    // With replacement it is repeated until then.
    let repeated = items([1.0, 0.0], 3 * 1000, [0.0, 1.0], AllExhausted)?;
    assert_eq!((repeated.len(), from_first(&repeated)), (3 * 1040, 3 * 1000));
    // The second stream is not drawn any more, so that it need not be exhausted.
    let left = items([0.5, 0.5], 3 * 10, [1.0, 0.0], AllExhausted)?;
    assert_eq!(from_first(&left), 120);
    assert!(left.len() > 120 && left.iter().all(|&item| item < 1000 || item % 100 < 10), "{left:?}");
    Ok(())
}

#[test]
fn every_item_of_a_mixture_of_streams_is_a_place_to_resume() -> Result<(), DataError> {
    let _alone = alone();
    for stopping in [StoppingStrategy::FirstExhausted, StoppingStrategy::AllExhausted] {
        let mixture = in_stages(stopping)?;
        let expected: Vec<usize> = mixture.stream([2, 0]).collect::<Result<_, _>>()?;
        let mut at = mixture.stream([2, 0]);
        for given in 0..=expected.len() {
            let rest = mixture.stream_from([2, 0], at.position()).collect::<Result<Vec<_>, _>>()?;
            assert_eq!(rest, expected[given..], "after {given}");
            at.next();
        }
        let expected = rest(&streamed(in_stages(stopping)?, 0)?, 2);
        for workers in [0, 2] {
            for given in 0..=expected.len() {
                let (mut seen, state) = stopped(&streamed(in_stages(stopping)?, workers)?, given);
                seen.extend(rest(&resumed(streamed(in_stages(stopping)?, 2 - workers)?, &state), 2));
                assert_eq!(seen, expected, "{workers} workers, after {given}");
            }
        }
    }
    Ok(())
}

#[test]
fn other_weights_of_streams_and_unusable_ones_are_refused() -> Result<(), DataError> {
    let stopping = StoppingStrategy::FirstExhausted;
    let state = streamed(in_stages(stopping)?, 0)?.state_dict().unwrap();
    streamed(in_stages(stopping)?, 0)?.load_state_dict(&state).unwrap();
    for (item, weights) in [(90, [0.5, 0.5]), (91, [0.5, 0.4])] {
        let other = in_stages(stopping)?.weights_from(item, weights)?;
        let error = streamed(other, 0)?.load_state_dict(&state).unwrap_err();
        assert!(matches!(&error, StateError::Mismatch { key, .. } if key == "fingerprint"), "{error}");
    }
    let mixture = || StreamMixture::new(two_streams(), [1.0, 0.0], 5);
    let refused = |result: Result<StreamMixture<_>, DataError>| result.map(drop).unwrap_err().to_string();
    assert_eq!(refused(mixture()?.weights_from(0, [0.5, 0.5])), "weights_from: expected an item after 0, found 0");
    assert_eq!(refused(mixture()?.weights_from(9, [0.5])), "weights: expected one for each of 2, found 1");
    assert_eq!(refused(mixture()?.num_shards(0)), "num_shards: expected 1 to 3, found 0");
    assert_eq!(refused(mixture()?.num_shards(4)), "num_shards: expected 1 to 3, found 4");
    // A stream counts from when it is drawn.
    let uneven = [3, 0].map(|shards| FnStream::new(shards, |_| Ok([Ok(1)].into_iter())));
    let nothing = "weights: expected 0 where there is nothing to draw from, found 0.5 at place 1";
    let result = StreamMixture::new(uneven, [1.0, 0.0], 5)?.weights_from(9, [0.5; 2]);
    assert_eq!(result.map(drop).unwrap_err().to_string(), nothing);
    let uneven = [3, 2].map(|shards| FnStream::new(shards, |_| Ok([Ok(1)].into_iter())));
    assert_eq!(StreamMixture::new(uneven, [1.0, 0.0], 5)?.weights_from(9, [0.5; 2])?.shards(), 2);
    Ok(())
}
