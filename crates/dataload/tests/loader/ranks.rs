//! Several ranks, and a state that is loaded with another number of ranks.

use overdrive_core::Stateful;
use overdrive_dataload::{
    BatchSampler, Curriculum, DataError, DataLoader, DistributedBatches, DistributedSampler, FnDataset, LengthBucketed,
    TokenPacking, WeightedRandomSampler, pacing,
};

use crate::{alone, batches, listed, uneven};

type Numbers = DataLoader<Vec<usize>>;

/// The loaders of all ranks, for global batches of 12 of 100 samples.
fn ranks(world_size: usize) -> Result<Vec<Numbers>, DataError> {
    let rank = |rank| {
        let sampler = DistributedSampler::shuffled(100, world_size, rank, 6)?;
        let builder = DataLoader::builder(FnDataset::new(100, Ok)).sampler(sampler).num_workers(rank % 3);
        builder.batch_size(12 / world_size).collate(listed).build()
    };
    (0..world_size).map(rank).collect()
}

/// The next `count` batches of all ranks together, sorted.
fn step(ranks: &[Numbers], count: usize) -> Vec<Vec<usize>> {
    let mut steps = vec![Vec::new(); count];
    for rank in ranks {
        for (step, batch) in steps.iter_mut().zip(rank.iter().take(count)) {
            step.extend(batch.unwrap());
        }
    }
    steps.iter_mut().for_each(|step| step.sort_unstable());
    steps
}

#[test]
fn a_run_resumes_with_another_number_of_ranks() -> Result<(), DataError> {
    let _alone = alone();
    let expected = step(&ranks(1)?, 8);
    for (before, after) in [(1, 4), (4, 1), (2, 6), (3, 2)] {
        let first = ranks(before)?;
        let mut seen = step(&first, 3);
        // The last rank's state fits all ranks.
        let state = first[before - 1].state_dict().unwrap();
        let mut second = ranks(after)?;
        second.iter_mut().for_each(|rank| rank.load_state_dict(&state).unwrap());
        seen.extend(step(&second, 5));
        assert_eq!(seen, expected, "{before} ranks, then {after}");
    }
    Ok(())
}

#[test]
fn packs_dealt_to_another_number_of_ranks_are_refused() -> Result<(), DataError> {
    let _alone = alone();
    let loader = |world_size| {
        let packing = TokenPacking::builder(vec![3; 100], 10).build()?;
        let part = DistributedBatches::new(packing, world_size, 0)?;
        DataLoader::builder(FnDataset::new(100, Ok)).batch_sampler(part).collate(listed::<usize>).build()
    };
    let state = loader(2)?.state_dict().unwrap();
    assert!(loader(2)?.load_state_dict(&state).is_ok());
    assert!(loader(4)?.load_state_dict(&state).is_err());
    Ok(())
}

#[test]
fn any_order_is_the_same_for_any_number_of_workers() -> Result<(), DataError> {
    let _alone = alone();
    let scores: Vec<f64> = (0..203).map(|index| f64::from(index * 37 % 203)).collect();
    let lengths: Vec<usize> = (0..203).map(|index| 1 + index * 37 % 203).collect();
    let builder = |workers| DataLoader::builder(uneven(203)).num_workers(workers).collate(listed::<usize>);
    let with_sampler = |workers| -> Result<[Numbers; 2], DataError> {
        let weighted = WeightedRandomSampler::new(scores.clone(), 150, 4)?.replacement(false)?;
        let curriculum = Curriculum::new(&scores, 3.0, 1, pacing::root(0.1, 2.0)?)?;
        Ok([
            builder(workers).batch_size(8).sampler(weighted).build()?,
            builder(workers).batch_size(8).sampler(curriculum).build()?,
        ])
    };
    let with_batches = |workers| -> Result<[Numbers; 2], DataError> {
        let bucketed = LengthBucketed::builder(lengths.clone()).max_tokens(1000).bucket_width(20).build()?;
        let packing = TokenPacking::builder(lengths.clone(), 512).build()?;
        assert!(!bucketed.is_empty() && !packing.is_empty());
        Ok([builder(workers).batch_sampler(bucketed).build()?, builder(workers).batch_sampler(packing).build()?])
    };
    let all = |workers| -> Result<Vec<_>, DataError> {
        let loaders = with_sampler(workers)?.into_iter().chain(with_batches(workers)?);
        Ok(loaders.map(|loader| batches(&loader, 2)).collect())
    };
    let expected = all(0)?;
    for workers in [1, 3] {
        assert_eq!(all(workers)?, expected, "{workers} workers");
    }
    Ok(())
}
