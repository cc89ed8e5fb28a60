//! Bad samples under each policy.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use overdrive_dataload::{
    BatchSamples, Collate, DataError, DataLoader, DistributedSampler, EncodedImage, FnDataset, Image, ImagePipeline,
    OnError, Resize, Stack, SubsetRandomSampler,
};

use tch::Tensor;

use crate::{WORKERS, alone, listed};

/// 100 samples, of which every tenth cannot be read.
fn bad_tenth() -> FnDataset<impl Fn(usize) -> Result<usize, DataError>> {
    FnDataset::new(100, |index| match index % 10 {
        3 => Err(DataError::other("worn out")),
        _ => Ok(index),
    })
}

#[test]
fn skip_drops_bad_samples_and_reports_them() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = DataLoader::builder(bad_tenth()).batch_size(8).num_workers(workers).on_error(OnError::Skip);
        let loader = builder.collate(listed).build()?;
        let batches: Vec<Vec<usize>> = loader.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches.len(), 13);
        assert_eq!(batches.concat(), (0..100).filter(|index| index % 10 != 3).collect::<Vec<_>>());
        let (stats, faults) = (loader.stats(), loader.faults());
        assert_eq!((stats.batches, stats.samples, stats.faults), (13, 90, 10));
        let indices: BTreeSet<u64> = faults.iter().map(|fault| fault.index).collect();
        assert_eq!(indices, (0..10).map(|i| i * 10 + 3).collect());
        assert!(faults.iter().all(|fault| fault.error == "worn out" && fault.epoch == 0 && fault.key.is_none()));
        loader.reset_stats();
        assert!(loader.faults().is_empty() && loader.stats().faults == 0);
    }
    Ok(())
}

#[test]
fn a_batch_of_bad_samples_alone_is_not_delivered() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = || {
        FnDataset::new(12, |index| match index {
            4..8 => Err(DataError::other("bad")),
            _ => Ok(index),
        })
    };
    for workers in WORKERS {
        let builder = DataLoader::builder(dataset()).batch_size(4).num_workers(workers).on_error(OnError::Skip);
        let batches: Vec<_> = builder.collate(listed).build()?.iter().collect::<Result<_, _>>()?;
        assert_eq!(batches, [[0, 1, 2, 3], [8, 9, 10, 11]]);
    }
    Ok(())
}

#[test]
fn replace_keeps_every_batch_full_and_draws_the_same_for_any_number_of_workers() -> Result<(), DataError> {
    let _alone = alone();
    let run = |workers, seed, epoch| -> Result<Vec<Vec<usize>>, DataError> {
        let builder = DataLoader::builder(bad_tenth()).batch_size(8).shuffle(true).seed(seed).num_workers(workers);
        let loader = builder.on_error(OnError::Replace).collate(listed).build()?;
        let batches = loader.epoch(epoch).collect::<Result<_, _>>()?;
        assert!(loader.stats().faults >= 10);
        Ok(batches)
    };
    let expected = run(0, 1, 0)?;
    assert_eq!(expected.iter().map(Vec::len).sum::<usize>(), 100);
    assert!(expected.concat().iter().all(|index| index % 10 != 3));
    for workers in WORKERS {
        assert_eq!(run(workers, 1, 0)?, expected);
    }
    let substitutes = |batches: Vec<Vec<usize>>| {
        let mut all = batches.concat();
        all.sort_unstable();
        all
    };
    assert_ne!(substitutes(run(1, 1, 1)?), substitutes(expected.clone()), "another epoch");
    assert_ne!(substitutes(run(1, 2, 0)?), substitutes(expected), "another seed");
    Ok(())
}

#[test]
fn replace_gives_up_where_nothing_is_good() -> Result<(), DataError> {
    let _alone = alone();
    let bad = FnDataset::new(10, |_| Err::<usize, _>(DataError::other("all bad")));
    let loader = DataLoader::builder(bad).on_error(OnError::Replace).collate(listed).build()?;
    let error = loader.iter().next().unwrap().unwrap_err();
    assert!(matches!(error, DataError::Sample { .. }), "{error}");
    assert_eq!(loader.faults().len(), 256);
    Ok(())
}

#[test]
fn replace_finds_good_samples_among_many_bad_ones() -> Result<(), DataError> {
    let _alone = alone();
    // Unshuffled, the bad samples are next to each other, as when a folder is lost; shuffled, every batch has some.
    for (good, shuffle) in [(700, false), (700, true), (100, true)] {
        let expected = std::cell::OnceCell::new();
        for workers in WORKERS {
            let dataset = FnDataset::new(1000, move |index| match index < good {
                true => Ok(index),
                false => Err(DataError::other("lost")),
            });
            let builder = DataLoader::builder(dataset).batch_size(100).shuffle(shuffle).num_workers(workers);
            let loader = builder.on_error(OnError::Replace).collate(listed).build()?;
            for epoch in 0..5 {
                let batches: Vec<Vec<usize>> = loader.epoch(epoch).collect::<Result<_, _>>()?;
                assert!(batches.len() == 10 && batches.iter().flatten().all(|index| *index < good));
                assert!(batches.iter().all(|batch| batch.len() == 100));
                if epoch == 0 {
                    assert_eq!(expected.get_or_init(|| batches.clone()), &batches, "{workers} workers");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn errors_of_the_collate_function_follow_the_policy_too() -> Result<(), DataError> {
    let _alone = alone();
    let odd_sizes = || {
        FnDataset::new(20, |index| {
            let side = if index % 7 == 5 { 3 } else { 2 };
            Ok((Image::new(vec![index as u8; side * side], side, side, 1)?, index as i64))
        })
    };
    for workers in WORKERS {
        let builder = || DataLoader::builder(odd_sizes()).batch_size(4).num_workers(workers);
        let sizes = |policy| -> Result<Vec<i64>, DataError> {
            builder().on_error(policy).collate(Stack).build()?.iter().map(|batch| Ok(batch?.0.size()[0])).collect()
        };
        assert_eq!(sizes(OnError::Skip)?, [4, 3, 4, 3, 3], "5, 12 and 19 are missing");
        assert_eq!(sizes(OnError::Replace)?, [4; 5]);
        assert_eq!(sizes(OnError::Fail).unwrap_err().index(), Some(5));
        // A custom collate function can name the sample by its index.
        let picky = |samples: Vec<(Image, i64)>| match samples.iter().find(|(image, _)| image.height() == 3) {
            Some((_, label)) => {
                let error = Box::new(DataError::other("too large"));
                Err(DataError::Sample { index: *label as usize, key: None, error })
            }
            None => Ok(samples.len()),
        };
        let sizes: Vec<usize> =
            builder().on_error(OnError::Skip).collate(picky).build()?.iter().collect::<Result<_, _>>()?;
        assert_eq!(sizes, [4, 3, 4, 3, 3]);
    }
    Ok(())
}

#[test]
fn images_that_do_not_decode_follow_the_policy() -> Result<(), DataError> {
    let _alone = alone();
    let jpeg: Vec<u8> = include_bytes!("../../../../testing/images/h2v2.jpg").to_vec();
    let cut = jpeg[..jpeg.len() / 2].to_vec();
    for workers in WORKERS {
        let (jpeg, cut) = (jpeg.clone(), cut.clone());
        let dataset = FnDataset::new(10, move |index| {
            let bytes = if index == 6 { cut.clone() } else { jpeg.clone() };
            Ok((EncodedImage::new(bytes, format!("{index}.jpg")), index as i64))
        });
        let dataset = std::sync::Arc::new(dataset);
        let load = |policy| -> Result<Vec<Vec<i64>>, DataError> {
            let pipeline = ImagePipeline::new(0).then(Resize::new(16));
            let builder = DataLoader::builder(dataset.clone()).batch_size(5).num_workers(workers).on_error(policy);
            let loader = builder.collate(pipeline).build()?;
            loader
                .iter()
                .map(|batch| {
                    let (images, labels) = batch?;
                    assert_eq!(images.size()[0], labels.size()[0]);
                    Vec::try_from(labels).map_err(DataError::Tensor)
                })
                .collect()
        };
        assert_eq!(load(OnError::Skip)?, [vec![0, 1, 2, 3, 4], vec![5, 7, 8, 9]]);
        let replaced = load(OnError::Replace)?;
        assert_eq!((replaced.len(), replaced[1].len()), (2, 5));
        assert!(!replaced[1].contains(&6));
        let error = load(OnError::Fail).unwrap_err();
        assert_eq!(error.index(), Some(6));
        assert!(error.to_string().contains("6.jpg"), "{error}");
    }
    Ok(())
}

#[test]
fn panics_end_the_epoch_whatever_the_policy() -> Result<(), DataError> {
    let _alone = alone();
    for policy in [OnError::Skip, OnError::Replace] {
        for workers in WORKERS {
            let dataset = FnDataset::new(9, |index| if index == 4 { panic!("a bug") } else { Ok(index) });
            let builder = DataLoader::builder(dataset).batch_size(3).num_workers(workers).on_error(policy);
            let outcomes: Vec<_> = builder.collate(listed).build()?.iter().collect();
            assert!(matches!(outcomes.last(), Some(Err(DataError::WorkerPanicked { index: 4, .. }))));
        }
    }
    Ok(())
}

#[test]
fn a_collate_function_that_draws_and_rejects() -> Result<(), DataError> {
    /// Accepts only even numbers.
    struct Even;

    impl Collate<usize> for Even {
        type Batch = Vec<(u64, usize)>;

        fn collate(&self, _samples: Vec<usize>) -> Result<Self::Batch, DataError> {
            unreachable!("the loader calls the other form")
        }

        fn collate_from(
            &self,
            samples: &mut overdrive_dataload::BatchSamples<'_, usize>,
        ) -> Result<Self::Batch, DataError> {
            let mut even = Vec::new();
            while let Some(drawn) = samples.next()? {
                match drawn.sample % 2 {
                    0 => even.push((drawn.index, drawn.sample)),
                    _ => samples.reject(DataError::other("odd"))?,
                }
            }
            Ok(even)
        }
    }

    let _alone = alone();
    for workers in WORKERS {
        let builder = || DataLoader::builder(FnDataset::new(6, Ok)).batch_size(3).num_workers(workers);
        let skipped: Vec<_> =
            builder().on_error(OnError::Skip).collate(Even).build()?.iter().collect::<Result<_, _>>()?;
        assert_eq!(skipped, [vec![(0, 0), (2, 2)], vec![(4, 4)]]);
        let loader = builder().on_error(OnError::Replace).collate(Even).build()?;
        assert!(loader.iter().all(|batch| batch.is_ok_and(|batch| batch.len() == 3)));
        let error = builder().collate(Even).build()?.iter().next().unwrap().unwrap_err();
        assert_eq!(error.to_string(), "sample 1: odd");
    }
    Ok(())
}

#[test]
fn a_panic_outside_of_samples_and_batches_is_an_error_too() -> Result<(), DataError> {
    struct BadKeys;

    impl overdrive_dataload::Dataset for BadKeys {
        type Sample = usize;

        fn len(&self) -> usize {
            9
        }

        fn get(&self, index: usize) -> Result<usize, DataError> {
            if index == 4 { Err(DataError::other("bad")) } else { Ok(index) }
        }

        fn key(&self, _index: usize) -> Option<String> {
            panic!("no key")
        }
    }

    let _alone = alone();
    for workers in WORKERS {
        for policy in [OnError::Fail, OnError::Skip, OnError::Replace] {
            let builder = DataLoader::builder(BadKeys).batch_size(3).num_workers(workers).on_error(policy);
            let outcomes: Vec<_> = builder.collate(listed).build()?.iter().collect();
            let error = outcomes.last().unwrap().as_ref().unwrap_err().to_string();
            assert!(error.contains("no key"), "{error}");
        }
    }
    Ok(())
}

#[test]
fn substitutes_come_from_the_samples_of_the_epoch_and_are_the_same_for_any_number_of_ranks() -> Result<(), DataError> {
    let _alone = alone();
    // The first half is for training, the second for validation.
    let half = || SubsetRandomSampler::new((0..50).collect::<Vec<_>>(), 4);
    let global = |world_size: usize| -> Result<Vec<usize>, DataError> {
        let mut all = Vec::new();
        for rank in 0..world_size {
            let sampler = DistributedSampler::new(half(), world_size, rank)?;
            let builder = DataLoader::builder(bad_tenth()).sampler(sampler).batch_size(5).on_error(OnError::Replace);
            let batches: Vec<Vec<usize>> = builder.collate(listed).build()?.iter().collect::<Result<_, _>>()?;
            all.extend(batches.concat());
        }
        all.sort_unstable();
        Ok(all)
    };
    let one = global(1)?;
    assert_eq!(one.len(), 50);
    assert!(one.iter().all(|index| *index < 50), "{one:?}");
    assert_eq!(global(2)?, one);
    Ok(())
}

#[test]
fn samples_that_do_not_fit_are_all_found_at_once() -> Result<(), DataError> {
    let _alone = alone();
    let reads = Arc::new(AtomicUsize::new(0));
    let counter = reads.clone();
    let dataset = FnDataset::new(32, move |index| {
        counter.fetch_add(1, Relaxed);
        let side = if index % 3 == 1 { 3 } else { 2 };
        Ok((Image::new(vec![0; side * side], side, side, 1)?, index as i64))
    });
    let loader = DataLoader::builder(dataset).batch_size(32).on_error(OnError::Skip).collate(Stack).build()?;
    assert_eq!(loader.iter().next().unwrap()?.0.size(), [21, 1, 2, 2]);
    assert_eq!((loader.faults().len(), reads.load(Relaxed)), (11, 32 + 21));
    Ok(())
}

#[test]
fn a_bad_sample_is_read_once_for_a_batch_that_is_made_again() -> Result<(), DataError> {
    let _alone = alone();
    let read = Arc::new(AtomicUsize::new(0));
    let counter = read.clone();
    // Sample 5 does not fit in with the others, and the last of the order does not exist.
    let dataset = FnDataset::new(8, move |index| match index {
        3 => {
            counter.fetch_add(1, Relaxed);
            Err(DataError::other("bad"))
        }
        index => Ok(Tensor::from_slice(&vec![index as i64; if index == 5 { 3 } else { 2 }])),
    });
    for policy in [OnError::Skip, OnError::Replace] {
        let order = SubsetRandomSampler::new((0..8).chain([9]).collect::<Vec<_>>(), 1);
        let builder = DataLoader::builder(dataset.clone()).sampler(order).batch_size(9).on_error(policy);
        let loader = builder.build()?;
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?.len(), 1);
        let mut faults: Vec<u64> = loader.faults().iter().map(|fault| fault.index).collect();
        faults.sort_unstable();
        assert_eq!((read.swap(0, Relaxed), faults), (1, vec![3, 5, 9]), "{policy:?}");
    }
    Ok(())
}

#[test]
fn a_batch_of_misfits_is_not_read_forever() -> Result<(), DataError> {
    let _alone = alone();
    let reads = Arc::new(AtomicUsize::new(0));
    let counter = reads.clone();
    // No two of them have the same shape.
    let dataset = FnDataset::new(10_000, move |index| {
        counter.fetch_add(1, Relaxed);
        Ok((Image::new(vec![0; index + 1], index + 1, 1, 1)?, index as i64))
    });
    let builder = DataLoader::builder(dataset).batch_size(8).on_error(OnError::Replace);
    let loader = builder.collate(Stack).build()?;
    let error = loader.iter().next().unwrap().unwrap_err();
    assert!(matches!(&error, DataError::Sample { error, .. } if error.to_string().contains("shape")), "{error}");
    // Made once, then 64 more times.
    assert_eq!(reads.load(Relaxed), 8 * 65);
    assert!((64..=7 * 64).contains(&loader.stats().faults), "{}", loader.stats().faults);
    Ok(())
}

#[test]
fn a_sample_is_rejected_once() -> Result<(), DataError> {
    struct Twice;
    impl Collate<usize> for Twice {
        type Batch = usize;

        fn collate(&self, _: Vec<usize>) -> Result<usize, DataError> {
            Ok(0)
        }

        fn collate_from(&self, samples: &mut BatchSamples<'_, usize>) -> Result<usize, DataError> {
            let mut drawn = 0;
            while samples.next()?.is_some() {
                drawn += 1;
            }
            samples.reject(DataError::other("the last"))?;
            samples.reject(DataError::other("again"))?;
            Ok(drawn)
        }
    }
    let dataset = FnDataset::new(4, Ok);
    let loader = DataLoader::builder(dataset).batch_size(4).on_error(OnError::Skip).collate(Twice).build()?;
    let error = loader.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("again"), "{error}");
    assert_eq!(loader.faults()[0].index, 3);
    Ok(())
}
