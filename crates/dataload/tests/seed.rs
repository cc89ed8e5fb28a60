//! `seed_everything` and loaders. In a program of its own, because the seed is the process's.

use overdrive_core::seed_everything;
use overdrive_dataload::{BatchSampler, DataError, DataLoader, FnDataset, LengthBucketed, TokenPacking};

fn loader(seed: Option<u64>) -> Result<DataLoader<Vec<usize>>, DataError> {
    let builder = DataLoader::builder(FnDataset::new(50, Ok)).batch_size(50).shuffle(true);
    let builder = match seed {
        Some(seed) => builder.seed(seed),
        None => builder,
    };
    builder.collate(|samples: Vec<usize>| Ok(samples)).build()
}

fn order(loader: &DataLoader<Vec<usize>>) -> Result<Vec<usize>, DataError> {
    Ok(loader.epoch(0).collect::<Result<Vec<_>, _>>()?.concat())
}

#[test]
fn parts_that_are_built_later_without_a_seed_take_the_one_of_everything() -> Result<(), DataError> {
    let lengths = || (1..200).collect::<Vec<usize>>();
    let packing = || TokenPacking::builder(lengths(), 512);
    let buckets = || LengthBucketed::builder(lengths()).batch_size(8);
    let before = loader(None)?;
    assert_eq!(order(&before)?, order(&loader(Some(0))?)?);
    assert_eq!(packing().build()?.plan(0), packing().seed(0).build()?.plan(0));
    assert_eq!(buckets().build()?.plan(0), buckets().seed(0).build()?.plan(0));
    seed_everything(9);
    assert_eq!(order(&before)?, order(&loader(Some(0))?)?);
    assert_eq!(order(&loader(None)?)?, order(&loader(Some(9))?)?);
    assert_ne!(order(&loader(None)?)?, order(&before)?);
    assert_eq!(packing().build()?.plan(0), packing().seed(9).build()?.plan(0));
    assert_eq!(buckets().build()?.plan(0), buckets().seed(9).build()?.plan(0));
    assert_ne!(buckets().build()?.plan(0), buckets().seed(0).build()?.plan(0));
    Ok(())
}
