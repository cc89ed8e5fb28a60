//! Datasets made of other datasets.

use std::collections::{BTreeMap, BTreeSet};

use overdrive_core::Stateful;
use overdrive_dataload::{
    Chain, Concat, DataError, DataLoader, Dataset, FnDataset, FnStream, IterableDataset, OnError, StoppingStrategy,
    StreamMixture, Zip, interleave_datasets, map_style,
};

use crate::resume::{rest, resumed, shards, stopped};
use crate::{WORKERS, alone, listed};

fn all<D: Dataset>(dataset: &D) -> Result<Vec<D::Sample>, DataError> {
    (0..dataset.len()).map(|index| dataset.get(index)).collect()
}

fn message<T>(result: Result<T, DataError>) -> String {
    result.err().expect("an error").to_string()
}

/// Numbers with names.
struct Named(Vec<usize>);

impl Dataset for Named {
    type Sample = usize;

    fn len(&self) -> usize {
        self.0.len()
    }

    fn get(&self, index: usize) -> Result<usize, DataError> {
        Ok(self.0[index])
    }

    fn key(&self, index: usize) -> Option<String> {
        Some(format!("number {}", self.0[index]))
    }
}

#[test]
fn concatenated_datasets_follow_each_other() -> Result<(), DataError> {
    let parts: [Box<dyn Dataset<Sample = usize>>; 4] = [
        Box::new(FnDataset::new(3, Ok)),
        Box::new(FnDataset::new(0, Ok)),
        Box::new(Named(vec![70, 80])),
        Box::new(map_style(vec![9])),
    ];
    let whole = Concat::new(parts)?;
    assert_eq!(all(&whole)?, [0, 1, 2, 70, 80, 9]);
    assert_eq!((whole.lens(), whole.cumulative_sizes()), (vec![3, 0, 2, 1], &[3, 3, 5, 6][..]));
    assert_eq!([2, 3, 5].map(|index| whole.locate(index).unwrap()), [(0, 2), (2, 0), (3, 0)]);
    assert_eq!((whole.key(4).as_deref(), whole.key(0), whole.key(6)), (Some("number 80"), None, None));
    assert!(matches!(whole.get(6), Err(DataError::IndexOutOfRange { index: 6, len: 6 })));
    assert_eq!(message(Concat::<Named>::new([])), "datasets: expected at least one, found 0");
    let long = || FnDataset::new(usize::MAX, Ok);
    assert!(matches!(Concat::new([long(), long()]), Err(DataError::InvalidOption { option: "datasets", .. })));
    Ok(())
}

#[test]
fn zipped_datasets_are_side_by_side() -> Result<(), DataError> {
    let triples = Zip::new((FnDataset::new(2, Ok), Named(vec![7, 8]), map_style(["a", "b"])))?;
    assert_eq!(all(&triples)?, [(0, 7, "a"), (1, 8, "b")]);
    assert_eq!(triples.key(1).as_deref(), Some("number 8"));
    assert!(matches!(triples.get(2), Err(DataError::IndexOutOfRange { index: 2, len: 2 })));
    let maps = BTreeMap::from(["x", "y"].map(|name| (name.to_owned(), map_style(vec![name.len(), 2]))));
    assert_eq!(Zip::new(maps)?.get(1)?, BTreeMap::from([("x".to_owned(), 2), ("y".to_owned(), 2)]));
    let uneven = Zip::new((FnDataset::new(2, Ok), FnDataset::new(3, Ok)));
    assert_eq!(message(uneven), "datasets: expected one length for all, found [2, 3]");
    assert_eq!(message(Zip::new(BTreeMap::<String, Named>::new())), "datasets: expected at least one, found 0");
    Ok(())
}

#[test]
fn a_filter_keeps_order_and_names_and_reports_bad_samples() -> Result<(), DataError> {
    let odd = Named(vec![4, 5, 7, 8, 9]).filter(|number| Ok(number % 2 == 1))?;
    assert_eq!((all(&odd)?, odd.indices()), (vec![5, 7, 9], &[1, 2, 4][..]));
    assert_eq!(odd.key(1).as_deref(), Some("number 7"));
    let refused = Named(vec![4, 5]).filter(|number| match number {
        5 => Err(DataError::other("not five")),
        _ => Ok(true),
    });
    assert_eq!(message(refused), "sample 1 (number 5): not five");
    let mapped = FnDataset::new(10, Ok).map(|number| Ok(number * 3)).filter(|number| Ok(number % 2 == 0))?;
    assert_eq!(all(&mapped.map(|number| Ok(number + 1)))?, [1, 7, 13, 19, 25]);
    Ok(())
}

/// Numbers up to 19 times 100 a shard, some bad, without those that four divides.
fn filtered() -> impl IterableDataset<Sample = usize> + 'static {
    shards().filter(|number| match number {
        813 => Err(DataError::other("no 813")),
        _ => Ok(number % 4 != 0),
    })
}

#[test]
fn a_filtered_stream_keeps_errors_and_resumes_at_every_item() {
    let seen = |items: &mut dyn Iterator<Item = Result<usize, DataError>>| -> Vec<String> {
        items.map(|item| item.map_or_else(|error| error.to_string(), |number| number.to_string())).collect()
    };
    let whole = seen(&mut shards().stream(0..11));
    let kept = |text: &String| text.parse::<usize>().map_or(true, |number| number % 4 != 0);
    let mut expected: Vec<String> = whole.into_iter().filter(kept).collect();
    expected.iter_mut().filter(|text| *text == "813").for_each(|text| *text = "no 813".to_owned());
    assert!(expected.iter().any(|text| text == "no 813") && expected.iter().any(|text| text == "bad item"));
    let stream = filtered();
    assert_eq!(seen(&mut stream.stream(0..11)), expected);
    let mut at = stream.stream(0..11);
    for given in 0..=expected.len() {
        assert_eq!(seen(&mut stream.stream_from(0..11, at.position())), expected[given..], "after {given}");
        at.next();
    }
}

/// All items but the first hundred are left out, for ever.
#[test]
fn an_epoch_of_a_filter_that_keeps_nothing_more_ends_when_it_is_dropped() -> Result<(), DataError> {
    let _alone = alone();
    for workers in [1, 3] {
        let endless = FnStream::new(1, |_| Ok((0..).map(Ok))).filter(|number: &usize| Ok(*number < 100));
        let loader = DataLoader::stream(endless).batch_size(10).num_workers(workers).collate(listed).build()?;
        assert_eq!(loader.iter().next().unwrap()?, (0..10).collect::<Vec<_>>());
    }
    Ok(())
}

#[test]
fn a_loader_resumes_in_a_filtered_and_chained_stream() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers| {
        let more = FnStream::new(2, |shard| Ok((0..9).map(move |i| Ok(5000 + shard * 100 + i))));
        let streams: [Box<dyn IterableDataset<Sample = usize>>; 2] = [Box::new(filtered()), Box::new(more)];
        let builder = DataLoader::stream(Chain::new(streams)?).batch_size(4).shuffle(true).shuffle_buffer(5).seed(2);
        builder.on_error(OnError::Skip).num_workers(workers).collate(listed).build()
    };
    let expected = rest(&build(0)?, 2);
    let mut numbers = expected.concat();
    numbers.sort_unstable();
    let mut twice: Vec<usize> = filtered().stream(0..11).flatten().collect();
    twice.extend((0..2).flat_map(|shard| (0..9).map(move |i| 5000 + shard * 100 + i)));
    twice = [twice.clone(), twice].concat();
    twice.sort_unstable();
    assert_eq!(numbers, twice);
    for workers in WORKERS {
        for given in [1, 7, expected.len() / 2 + 2] {
            let loader = build(workers)?;
            let (mut seen, state) = stopped(&loader, given);
            seen.extend(rest(&resumed(build(2)?, &state), 2));
            assert_eq!(seen, expected, "{workers} workers, after {given}");
        }
    }
    Ok(())
}

#[test]
fn a_chain_has_the_shards_of_all_streams() -> Result<(), DataError> {
    let named = |name: &'static str, shards| {
        FnStream::new(shards, move |shard| Ok((0..2).map(move |i| Ok((name, shard, i))))).shard_names([name])
    };
    let chain = Chain::new([named("a", 1), named("b", 0), named("c", 2)])?;
    assert_eq!((chain.shards(), chain.shard_name(1).as_deref(), chain.shard_name(2)), (3, Some("c"), None));
    let items: Vec<_> = chain.stream([2, 0]).collect::<Result<_, _>>()?;
    assert_eq!(items, [("c", 1, 0), ("c", 1, 1), ("a", 0, 0), ("a", 0, 1)]);
    assert!(matches!(chain.open_shard(3, 0), Err(DataError::IndexOutOfRange { index: 3, len: 3 })));
    assert!(Chain::<Box<dyn IterableDataset<Sample = u8>>>::new([]).is_err());
    Ok(())
}

/// Numbers below 1000 and from there on, in shards of different lengths.
fn two_streams() -> [impl IterableDataset<Sample = usize> + 'static; 2] {
    [(0, 4), (1000, 6)].map(|(from, shards)| {
        let items = move |shard: usize| Ok((0..3 + 5 * shard).map(move |i| Ok(from + 30 * shard + i)));
        FnStream::new(shards, items).shard_names((0..shards).map(move |shard| format!("{from}-{shard}")))
    })
}

fn mixed(weights: [f64; 2], stopping: StoppingStrategy) -> impl IterableDataset<Sample = usize> + 'static {
    StreamMixture::new(two_streams(), weights, 3).unwrap().stopping_strategy(stopping)
}

#[test]
fn mixed_streams_have_each_item_as_often_as_their_strategy_says() -> Result<(), DataError> {
    let [first, second] = two_streams();
    let all: Vec<usize> = first.stream(0..4).chain(second.stream(0..6)).collect::<Result<_, _>>()?;
    let items = |weights, stopping| {
        let stream = mixed(weights, stopping);
        assert_eq!(stream.shards(), 4);
        stream.stream(0..4).collect::<Result<Vec<usize>, _>>()
    };
    let mut once = items([0.3, 0.7], StoppingStrategy::AllExhaustedWithoutReplacement)?;
    // Each stream's own items keep their order within a shard: those of shard 0 of one, of 0 and 4 of the other.
    let own: Vec<usize> = once.iter().copied().filter(|&item| item >= 1000).collect();
    let expected: Vec<usize> = second.stream([0, 4, 1, 5, 2, 3]).collect::<Result<_, _>>()?;
    assert_eq!(own, expected);
    assert!(once.windows(2).filter(|pair| (pair[0] < 1000) != (pair[1] < 1000)).count() > 20, "{once:?}");
    once.sort_unstable();
    let mut sorted = all.clone();
    sorted.sort_unstable();
    assert_eq!(once, sorted);
    let mut repeated = items([0.9, 0.1], StoppingStrategy::AllExhausted)?;
    assert!(repeated.len() > all.len());
    repeated.sort_unstable();
    repeated.dedup();
    assert_eq!(repeated, sorted);
    let short = items([0.5, 0.5], StoppingStrategy::FirstExhausted)?;
    assert!(short.len() > 20 && short.len() < all.len());
    assert_eq!(short.iter().collect::<BTreeSet<_>>().len(), short.len());
    // A stream of weight 0 is as if it was not there.
    assert_eq!(items([1.0, 0.0], StoppingStrategy::AllExhausted)?, first.stream(0..4).collect::<Result<Vec<_>, _>>()?);
    Ok(())
}

/// What states of streams are bound to: the files' names, wherever the files are.
#[test]
fn a_mixture_is_the_same_in_another_folder() {
    let of = |folder: &str, file: &str| {
        let stream = || FnStream::new(1, |_| Ok((0..3).map(Ok::<usize, DataError>)));
        let named = [file, "b"].map(|file| stream().shard_names([format!("{folder}/{file}")]));
        StreamMixture::new(named, [0.5, 0.5], 3).unwrap().fingerprint()
    };
    assert_eq!(of("/data", "a"), of("/copy/of", "a"));
    assert_ne!(of("/data", "a"), of("/data", "c"));
}

#[test]
fn mixed_streams_follow_their_weights_and_resume_at_every_item() -> Result<(), DataError> {
    let long = |from: usize| FnStream::new(1, move |_| Ok((0..100_000).map(move |i| Ok(from + i))));
    let long = StreamMixture::new([long(0), long(1 << 20)], [3.0, 1.0], 1)?;
    let first: Vec<usize> = long.stream([0]).take(10_000).collect::<Result<_, _>>()?;
    // Five standard deviations of a binomial count with p = 3/4.
    assert!(first.iter().filter(|&&item| item < 1 << 20).count().abs_diff(7500) < 217);
    for stopping in [StoppingStrategy::FirstExhausted, StoppingStrategy::AllExhausted] {
        let stream = mixed([0.4, 0.6], stopping);
        let expected: Vec<usize> = stream.stream([2, 0]).collect::<Result<_, _>>()?;
        let mut at = stream.stream([2, 0]);
        for given in 0..=expected.len() {
            let rest = stream.stream_from([2, 0], at.position()).collect::<Result<Vec<_>, _>>()?;
            assert_eq!(rest, expected[given..], "after {given}");
            at.next();
        }
    }
    Ok(())
}

#[test]
fn a_loader_resumes_in_a_mixture_of_streams_and_names_bad_items() -> Result<(), DataError> {
    let _alone = alone();
    let build = |workers| {
        let stream = mixed([0.4, 0.6], StoppingStrategy::AllExhaustedWithoutReplacement);
        let builder = DataLoader::stream(stream).batch_size(4).shuffle(true).shuffle_buffer(5).seed(2);
        builder.num_workers(workers).collate(listed).build()
    };
    let expected = rest(&build(0)?, 2);
    for workers in WORKERS {
        for given in [3, expected.len() / 2 + 3] {
            let loader = build(workers)?;
            let (mut seen, state) = stopped(&loader, given);
            seen.extend(rest(&resumed(build(2)?, &state), 2));
            assert_eq!(seen, expected, "{workers} workers, after {given}");
        }
    }
    // The state of another mixture.
    let state = build(0)?.state_dict().unwrap();
    let other = mixed([0.5, 0.5], StoppingStrategy::AllExhaustedWithoutReplacement);
    let other = DataLoader::stream(other).batch_size(4).shuffle(true).shuffle_buffer(5).seed(2).num_workers(0);
    assert!(other.collate(listed).build()?.load_state_dict(&state).is_err());
    let bad = mixed([0.0, 1.0], StoppingStrategy::FirstExhausted).map(|item| match item {
        1121 => Err(DataError::other("no 1121")),
        item => Ok(item),
    });
    let loader = DataLoader::stream(bad).batch_size(1).interleave(1).collate(listed).build()?;
    let error = loader.iter().find_map(Result::err).unwrap().to_string();
    assert!(error.contains("1000-4") && error.ends_with("no 1121"), "{error}");
    Ok(())
}

#[test]
fn mixtures_without_anything_to_draw_are_refused() {
    let refused = |weights: &[f64]| message(StreamMixture::new(two_streams(), weights, 0));
    assert_eq!(refused(&[1.0]), "weights: expected one for each of 2, found 1");
    assert_eq!(refused(&[0.0, 0.0]), "weights: expected at least one above 0, found none of 2");
    let none = || FnStream::new(0, |_| Ok([Ok(1)].into_iter()));
    let empty = message(StreamMixture::new([none(), none()], [0.5, 0.5], 0));
    assert_eq!(empty, "weights: expected 0 where there is nothing to draw from, found 0.5 at place 0");
    // Shards without items end; even where one is due almost always.
    let hollow = |items: usize| FnStream::new(1, move |_| Ok((0..items).map(Ok)));
    for stopping in [StoppingStrategy::AllExhausted, StoppingStrategy::AllExhaustedWithoutReplacement] {
        let mixed = StreamMixture::new([hollow(0), hollow(3)], [1.0, 1e-12], 0).unwrap().stopping_strategy(stopping);
        assert_eq!(mixed.stream([0]).map(Result::unwrap).collect::<Vec<_>>(), [0, 1, 2]);
    }
    assert!(mixed([0.5, 0.5], StoppingStrategy::FirstExhausted).open_shard(4, 0).is_err());
}

/// Three datasets, as in the documentation of Hugging Face.
fn three(lens: [usize; 3]) -> impl Iterator<Item = impl Dataset<Sample = usize> + Clone> {
    lens.into_iter().enumerate().map(|(tens, len)| FnDataset::new(len, move |index| Ok(tens * 10 + index)))
}

#[test]
fn datasets_interleave_as_those_of_hugging_face() -> Result<(), DataError> {
    use StoppingStrategy::{AllExhausted, AllExhaustedWithoutReplacement, FirstExhausted};
    // The first two results of each are those in the documentation of datasets.interleave_datasets.
    let turns = |stopping| all(&interleave_datasets(three([3, 4, 5])).stopping_strategy(stopping).build()?);
    assert_eq!(turns(FirstExhausted)?, [0, 10, 20, 1, 11, 21, 2, 12, 22]);
    assert_eq!(turns(AllExhausted)?, [0, 10, 20, 1, 11, 21, 2, 12, 22, 0, 13, 23, 1, 10, 24]);
    assert_eq!(turns(AllExhaustedWithoutReplacement)?, [0, 10, 20, 1, 11, 21, 2, 12, 22, 13, 23, 24]);
    let random = |stopping| {
        let mixed = interleave_datasets(three([3; 3])).probabilities([0.7, 0.2, 0.1]).seed(42);
        all(&mixed.stopping_strategy(stopping).build()?)
    };
    assert_eq!(random(FirstExhausted)?, [10, 0, 11, 1, 2]);
    let expected = [10, 0, 11, 1, 2, 20, 12, 10, 0, 1, 2, 21, 0, 11, 1, 2, 0, 1, 12, 2, 10, 0, 22];
    assert_eq!(random(AllExhausted)?, expected);
    assert_eq!(random(AllExhaustedWithoutReplacement)?, [10, 0, 11, 1, 2, 20, 12, 21, 22]);
    Ok(())
}

#[test]
fn interleaving_refuses_what_never_ends_or_does_not_fit() {
    use StoppingStrategy::{AllExhausted, FirstExhausted};
    let build = |lens, probabilities: &[f64], stopping| {
        interleave_datasets(three(lens)).probabilities(probabilities).stopping_strategy(stopping).build()
    };
    let sum = "probabilities: expected numbers from 0 to 1 that add up to 1, found ";
    assert_eq!(message(build([3; 3], &[0.5, 0.4, 0.2], FirstExhausted)), format!("{sum}[0.5, 0.4, 0.2]"));
    assert_eq!(message(build([3; 3], &[1.5, -0.5, 0.0], FirstExhausted)), format!("{sum}[1.5, -0.5, 0.0]"));
    assert_eq!(message(build([3; 3], &[f64::NAN; 3], FirstExhausted)), format!("{sum}[NaN, NaN, NaN]"));
    let one_each = "probabilities: expected one for each of 3 datasets, found [0.5, 0.5]";
    assert_eq!(message(build([3; 3], &[0.5, 0.5], FirstExhausted)), one_each);
    assert!(build([3; 3], &[0.5, 0.5, 0.0], FirstExhausted).is_ok());
    let above =
        "probabilities: expected numbers above 0, since every dataset has to be exhausted, found [0.5, 0.5, 0.0]";
    assert_eq!(message(build([3; 3], &[0.5, 0.5, 0.0], AllExhausted)), above);
    let rare = build([3; 3], &[0.5, 0.5 - 1e-12, 1e-12], AllExhausted);
    assert_eq!(message(rare), "datasets: expected at most 4294967295 samples in the result, found more");
    let empty = message(interleave_datasets(three([3, 0, 3])).build());
    assert_eq!(empty, "datasets: expected at least one sample in each, found lengths [3, 0, 3]");
    let long = interleave_datasets(three([usize::MAX / 4, 2, 2])).stopping_strategy(AllExhausted).build();
    assert!(message(long).contains("at most 4294967295 samples"));
}
