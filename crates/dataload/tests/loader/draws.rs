//! Randomness belongs to the draw: two draws of one sample differ, and each is reproducible for any workers and ranks.

use std::collections::BTreeSet;

use overdrive_core::Stateful;
use overdrive_dataload::{
    BatchPlan, BatchSampler, BatchSamples, Collate, DataError, DataLoader, DistributedBatches, DistributedSampler,
    EncodedImage, FixedBatches, FnDataset, FnStream, ImagePipeline, OnError, RandomResizedCrop, Sampler,
    WeightedRandomSampler,
};

use crate::{WORKERS, alone};

const JPEG: &[u8] = include_bytes!("../../../../testing/images/h2v2.jpg");

/// The same photograph at every index.
fn photographs(len: usize) -> FnDataset<impl Fn(usize) -> Result<(EncodedImage, i64), DataError>> {
    FnDataset::new(len, |index| Ok((EncodedImage::new(JPEG.to_vec(), format!("{index}.jpg")), index as i64)))
}

/// Decodes and crops; returns the label and the pixels of every sample.
struct Crops(ImagePipeline);

type Crop = (i64, Vec<i64>);

impl Crops {
    fn new() -> Self {
        Self(ImagePipeline::new(1).then(RandomResizedCrop::new(12)))
    }
}

impl Collate<(EncodedImage, i64)> for Crops {
    type Batch = Vec<Crop>;

    fn collate(&self, _: Vec<(EncodedImage, i64)>) -> Result<Vec<Crop>, DataError> {
        unreachable!("the loader calls the other form")
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, (EncodedImage, i64)>) -> Result<Vec<Crop>, DataError> {
        let (pixels, labels) = self.0.collate_from(samples)?;
        let labels = Vec::<i64>::try_from(labels)?;
        let pixels = pixels.f_reshape([labels.len() as i64, -1])?.f_to_kind(tch::Kind::Int64)?;
        Ok(labels.into_iter().zip(Vec::<Vec<i64>>::try_from(pixels)?).collect())
    }
}

fn crops(
    sampler: impl Sampler + 'static,
    batch_size: usize,
    workers: usize,
) -> Result<DataLoader<Vec<Crop>>, DataError> {
    let builder = DataLoader::builder(photographs(8)).sampler(sampler).batch_size(batch_size).num_workers(workers);
    builder.collate(Crops::new()).build()
}

fn all(loader: &DataLoader<Vec<Crop>>) -> Result<Vec<Crop>, DataError> {
    Ok(loader.iter().collect::<Result<Vec<_>, _>>()?.concat())
}

fn distinct(crops: &[Crop]) -> usize {
    crops.iter().collect::<BTreeSet<_>>().len()
}

#[test]
fn a_sample_drawn_twice_gets_two_crops() -> Result<(), DataError> {
    let _alone = alone();
    let weighted = WeightedRandomSampler::new([1.0, 20.0, 1.0], 30, 3)?;
    for workers in WORKERS {
        let loader = crops(weighted.clone(), 4, workers)?;
        let (first, second) = (all(&loader)?, all(&loader)?);
        assert!(first.iter().filter(|(label, _)| *label == 1).count() > 20);
        assert_eq!(distinct(&first), 30);
        assert_eq!(distinct(&[first, second].concat()), 60, "and others in the next epoch");
    }
    Ok(())
}

#[test]
fn a_draw_gets_the_same_crop_with_any_workers_and_after_resume() -> Result<(), DataError> {
    let _alone = alone();
    let expected = all(&crops(vec![5, 5, 2, 5, 2, 2, 5], 2, 0)?)?;
    for workers in WORKERS {
        for given in 0..4 {
            let first = crops(vec![5, 5, 2, 5, 2, 2, 5], 2, workers)?;
            let mut seen = first.iter().take(given).collect::<Result<Vec<_>, _>>()?.concat();
            let mut second = crops(vec![5, 5, 2, 5, 2, 2, 5], 2, (workers + 1) % 3)?;
            second.load_state_dict(&first.state_dict().unwrap()).unwrap();
            seen.extend(all(&second)?);
            assert_eq!(seen, expected, "{workers} workers, after {given}");
        }
    }
    Ok(())
}

#[test]
fn ranks_draw_differently_but_together_the_same_for_any_world_size() -> Result<(), DataError> {
    let _alone = alone();
    let ranks = |world_size: usize, len: usize| -> Result<BTreeSet<Crop>, DataError> {
        let mut together = BTreeSet::new();
        for rank in 0..world_size {
            let sampler = DistributedSampler::new(vec![3; len], world_size, rank)?;
            together.extend(all(&crops(sampler, 4 / world_size, 0)?)?);
        }
        Ok(together)
    };
    let one = ranks(1, 8)?;
    assert_eq!(one.len(), 8);
    assert_eq!(ranks(2, 8)?, one);
    assert_eq!(ranks(4, 8)?, one);
    // Seven draws for two ranks: the repeat that fills up is a separate draw.
    assert_eq!(ranks(2, 7)?.len(), 8);
    Ok(())
}

#[test]
fn distributed_batches_draw_differently_on_each_rank() -> Result<(), DataError> {
    let _alone = alone();
    for split in [false, true] {
        let mut together = Vec::new();
        for rank in 0..2 {
            let batches = FixedBatches::new(vec![3; 11], 4, false)?;
            let batches = DistributedBatches::new(batches, 2, rank)?.split_batches(split);
            let builder = DataLoader::builder(photographs(8)).batch_sampler(batches);
            together.extend(all(&builder.collate(Crops::new()).build()?)?);
        }
        // To fill up, whole batches repeat the first one; split batches repeat a sample of the last one.
        assert_eq!((together.len(), distinct(&together)), if split { (12, 12) } else { (15, 15) }, "{split}");
    }
    Ok(())
}

#[test]
fn a_custom_sampler_draws_differently_for_other_samples() -> Result<(), DataError> {
    let _alone = alone();
    struct Own(usize);
    impl BatchSampler for Own {
        fn len(&self) -> usize {
            2
        }

        fn plan(&self, _epoch: u64) -> BatchPlan {
            [[self.0, self.0], [self.0, self.0]].into_iter().collect()
        }
    }
    let of = |own| {
        let builder = DataLoader::builder(photographs(8)).batch_sampler(Own(own)).collate(Crops::new());
        Ok::<_, DataError>(all(&builder.build()?)?.into_iter().map(|(_, pixels)| (0, pixels)).collect::<Vec<_>>())
    };
    assert_eq!(distinct(&[of(1)?, of(2)?].concat()), 8);
    Ok(())
}

#[test]
fn a_second_pass_over_a_stream_gets_other_crops() -> Result<(), DataError> {
    let _alone = alone();
    let run = |workers, world_size: usize| -> Result<Vec<Crop>, DataError> {
        let mut together = Vec::new();
        for rank in 0..world_size {
            let stream = FnStream::new(2, |shard| {
                Ok((0..3).map(move |i| Ok((EncodedImage::new(JPEG.to_vec(), "some.jpg"), (shard * 10 + i) as i64))))
            });
            let builder = DataLoader::stream(stream).batch_size(2 / world_size).interleave(2).rank(rank, world_size);
            let loader = builder.batches_per_epoch(7).num_workers(workers).collate(Crops::new()).build()?;
            together.extend(all(&loader)?);
        }
        together.sort_unstable();
        Ok(together)
    };
    let expected = run(0, 1)?;
    assert_eq!((expected.len(), distinct(&expected)), (14, 14));
    for workers in WORKERS {
        assert_eq!(run(workers, 1)?, expected);
    }
    assert_eq!(run(0, 2)?, expected);
    Ok(())
}

#[test]
fn substitutes_of_a_bad_sample_drawn_twice_differ() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = FnDataset::new(1000, |index| match index {
        0 => Err(DataError::other("bad")),
        _ => Ok(index),
    });
    let order: Vec<usize> = [0; 6].into_iter().chain(1..1000).collect();
    let builder = DataLoader::builder(dataset).sampler(order).batch_size(6).on_error(OnError::Replace);
    let first = builder.collate(crate::listed).build()?.iter().next().unwrap()?;
    assert!(first.iter().collect::<BTreeSet<_>>().len() > 3, "{first:?}");
    Ok(())
}
