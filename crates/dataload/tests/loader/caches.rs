//! Caches in the loader.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use overdrive_dataload::{
    DataError, DataLoader, Dataset, Disk, DiskCached, FnDataset, Image, OnDevice, OnError, Ram, Stack,
};
use tch::{Device, Tensor};

use crate::{WORKERS, alone};

type Batches = Vec<(Tensor, Tensor)>;

/// 30 images, and a count of reads.
fn counted() -> (impl Dataset<Sample = (Image, i64)> + 'static, Arc<AtomicUsize>) {
    let reads = Arc::new(AtomicUsize::new(0));
    let counter = reads.clone();
    let dataset = FnDataset::new(30, move |index| {
        counter.fetch_add(1, SeqCst);
        Ok((Image::new(vec![index as u8; 6], 1, 2, 3)?, index as i64))
    });
    (dataset, reads)
}

/// The batches of two epochs.
fn epochs(loader: DataLoader<(Tensor, Tensor)>) -> Result<[Batches; 2], DataError> {
    Ok([loader.epoch(0).collect::<Result<_, _>>()?, loader.epoch(1).collect::<Result<_, _>>()?])
}

fn same(one: &[Batches; 2], other: &[Batches; 2]) -> bool {
    let pairs = one.as_flattened_batches().zip(other.as_flattened_batches());
    pairs.fold(true, |same, (a, b)| {
        same && a.0.equal(&b.0.to_device(Device::Cpu)) && a.1.equal(&b.1.to_device(Device::Cpu))
    })
}

trait Flatten {
    fn as_flattened_batches(&self) -> impl Iterator<Item = &(Tensor, Tensor)>;
}

impl Flatten for [Batches; 2] {
    fn as_flattened_batches(&self) -> impl Iterator<Item = &(Tensor, Tensor)> {
        self.iter().flatten()
    }
}

#[test]
fn every_cache_gives_the_same_batches_and_reads_once() -> Result<(), DataError> {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for workers in WORKERS {
        let (dataset, reads) = counted();
        let dataset = Arc::new(dataset);
        let builder = || DataLoader::builder(dataset.clone()).batch_size(7).shuffle(true).num_workers(workers);
        let expected = epochs(builder().collate(Stack).build()?)?;
        assert_eq!(reads.swap(0, SeqCst), 60);
        assert!(same(&expected, &epochs(builder().cache(Ram)?.collate(Stack).build()?)?));
        assert_eq!(reads.swap(0, SeqCst), 30);
        let path = dir.path().join(workers.to_string());
        assert!(same(&expected, &epochs(builder().cache(Disk(path))?.collate(Stack).build()?)?));
        assert_eq!(reads.swap(0, SeqCst), 30);
        let device = Device::cuda_if_available();
        let on_device = epochs(builder().collate(Stack).cache(OnDevice(device))?.build()?)?;
        assert!(
            on_device.as_flattened_batches().all(|(images, labels)| [images.device(), labels.device()] == [device; 2])
        );
        assert!(same(&expected, &on_device));
        assert_eq!(reads.swap(0, SeqCst), 30);
    }
    Ok(())
}

#[test]
fn batches_that_do_not_fit_the_device_cache_are_errors() -> Result<(), DataError> {
    let _alone = alone();
    let growing = FnDataset::new(4, |index| Ok((Image::new(vec![0; index / 2 + 1], 1, index / 2 + 1, 1)?, 0)));
    let builder = DataLoader::builder(growing).batch_size(2).collate(Stack).cache(OnDevice(Device::Cpu))?;
    let error = builder.build()?.iter().nth(1).unwrap().unwrap_err().to_string();
    assert!(error.starts_with("cache(OnDevice): expected a Uint8 tensor of shape [2, 1, 1, 1]"), "{error}");
    let summed = |samples: Vec<usize>| Ok(Tensor::from(samples.len() as i64));
    let builder = DataLoader::builder(FnDataset::new(4, Ok)).collate(summed).cache(OnDevice(Device::Cpu))?;
    assert!(builder.build()?.iter().next().unwrap().is_err());
    Ok(())
}

/// The cache keeps tensors alone: names would be the first batch's for ever, and a tensor that is missing would be
/// memory that nobody wrote.
#[test]
fn batches_of_more_than_tensors_or_of_another_structure_are_errors() -> Result<(), DataError> {
    let _alone = alone();
    let refused = |name: &str, error: Option<DataError>| {
        let error = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(error.starts_with("cache(OnDevice): expected batches of the same structure"), "{name}: {error:?}");
    };
    fn column(samples: &[usize]) -> Tensor {
        Tensor::from_slice(&samples.iter().map(|&sample| sample as f32).collect::<Vec<_>>())
    }
    fn named(samples: Vec<usize>) -> Result<(Tensor, Vec<String>), DataError> {
        Ok((column(&samples), samples.iter().map(usize::to_string).collect()))
    }
    let data = || DataLoader::builder(FnDataset::new(4, Ok)).batch_size(2);

    let loader = data().collate(named).cache(OnDevice(Device::Cpu))?.build()?;
    refused("names", loader.iter().find_map(Result::err));

    // The second batch has fewer tensors, more, or as many in another place.
    for [first, second] in
        [[(true, true), (true, false)], [(true, false), (true, true)], [(true, false), (false, true)]]
    {
        let sometimes = move |samples: Vec<usize>| {
            let (one, other) = if samples[0] < 2 { first } else { second };
            Ok((one.then(|| column(&samples)), other.then(|| column(&samples))))
        };
        let loader = data().collate(sometimes).cache(OnDevice(Device::Cpu))?.build()?;
        refused("tensors", loader.iter().find_map(Result::err));
    }
    Ok(())
}

#[test]
fn a_bad_sample_stays_out_of_the_device_cache() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = FnDataset::new(8, |index| match index {
        5 => Err(DataError::other("bad")),
        _ => Ok((Image::new([index as u8], 1, 1, 1)?, index as i64)),
    });
    let builder = DataLoader::builder(dataset).batch_size(4).on_error(OnError::Skip).collate(Stack);
    let [first, second] = epochs(builder.cache(OnDevice(Device::Cpu))?.build()?)?;
    assert_eq!(Vec::<i64>::try_from(&first[1].1)?, [4, 6, 7]);
    assert_eq!(Vec::<i64>::try_from(&second[1].1)?, [4, 6, 7]);
    Ok(())
}

#[test]
fn a_disk_cache_keeps_the_length_that_it_was_opened_with() -> Result<(), DataError> {
    struct Growing(AtomicUsize);
    impl Dataset for Growing {
        type Sample = Vec<u8>;

        fn len(&self) -> usize {
            self.0.load(SeqCst)
        }

        fn get(&self, index: usize) -> Result<Vec<u8>, DataError> {
            Ok(vec![index as u8])
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache");
    let dataset = Arc::new(Growing(AtomicUsize::new(3)));
    let cache = DiskCached::open(dataset.clone(), &path)?;
    dataset.0.store(5, SeqCst);
    assert!(matches!(cache.get(4), Err(DataError::IndexOutOfRange { index: 4, len: 3 })));
    assert_eq!((cache.len(), cache.get(2)?), (3, vec![2]));

    dataset.0.store(1 << 40, SeqCst);
    let absurd = DiskCached::open(dataset, dir.path().join("absurd"));
    assert!(matches!(absurd, Err(DataError::InvalidOption { option: "cache(Disk)", .. })));
    let other = dir.path().join("other");
    std::fs::write(&other, "a short text").unwrap();
    let error = DiskCached::open(Growing(AtomicUsize::new(3)), &other).unwrap_err();
    assert!(matches!(error, DataError::Layout { .. }) && error.to_string().contains("not a cache"), "{error}");
    assert_eq!(std::fs::read(&other).unwrap(), b"a short text");
    Ok(())
}
