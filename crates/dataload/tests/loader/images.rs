//! Image datasets through the loader.

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use overdrive_dataload::{
    Cached, DataError, DataLoader, Dataset, FnDataset, Image, ImageFolder, Mnist, Stack, ToFloat,
};

use crate::{WORKERS, alone, listed, loader_threads, wait_until};

#[test]
fn images_become_tensors_and_a_mismatch_names_its_sample() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = |odd: usize| {
        FnDataset::new(20, move |index| {
            let side = if index == odd { 3 } else { 2 };
            Ok((Image::new(vec![index as u8; side * side], side, side, 1)?, index as i64))
        })
    };
    for workers in WORKERS {
        let builder = |dataset| DataLoader::builder(dataset).batch_size(8).num_workers(workers);
        let cached = Arc::new(Cached::new(dataset(usize::MAX)));
        let loader = builder(cached.clone()).collate(Stack).build()?;
        for _ in 0..2 {
            for (number, batch) in loader.iter().enumerate() {
                let (images, labels) = batch?;
                assert_eq!(images.size()[1..], [1, 2, 2]);
                assert_eq!(images.int64_value(&[3, 0, 1, 1]), labels.int64_value(&[3]));
                assert_eq!(labels.int64_value(&[0]), number as i64 * 8);
            }
        }
        assert_eq!(cached.cached(), 20);
        let error = builder(Arc::new(Cached::new(dataset(11))))
            .collate(ToFloat::unit())
            .build()?
            .iter()
            .nth(1)
            .unwrap()
            .unwrap_err();
        assert_eq!(error.index(), Some(11));
        assert!(matches!(error.innermost(), DataError::ShapeMismatch { position: 3, .. }), "{error}");
    }
    Ok(())
}

#[test]
#[cfg(target_os = "linux")]
fn workers_start_no_threads_of_libtorch() -> Result<(), DataError> {
    let _alone = alone();
    // The kernel may list joined threads of other tests for a moment longer.
    wait_until(|| loader_threads() == 0);
    let dataset = FnDataset::new(8, |_| Ok((Image::new(vec![1; 1_000_000], 1000, 1000, 1)?, 0)));
    let loader = DataLoader::builder(dataset).batch_size(2).num_workers(1).collate(ToFloat::unit()).build()?;
    let mut epoch = loader.iter();
    assert_eq!(epoch.next().unwrap()?.0.size(), [2, 1, 1000, 1000]);
    // The worker has made several batches by now; a thread pool of libtorch would have inherited its name.
    assert!(loader_threads() <= 1, "{} threads", loader_threads());
    Ok(())
}

#[test]
fn a_truncated_png_names_its_file_and_index() -> Result<(), DataError> {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    for class in ["cat", "dog"] {
        std::fs::create_dir(dir.path().join(class)).unwrap();
        for number in 0..4 {
            let file = std::fs::File::create(dir.path().join(class).join(format!("{number}.png"))).unwrap();
            let mut encoder = png::Encoder::new(file, 5, 4);
            encoder.set_color(png::ColorType::Rgb);
            encoder.write_header().unwrap().write_image_data(&[number * 10; 60]).unwrap();
        }
    }
    let spoiled = dir.path().join("dog/2.png");
    let whole = std::fs::read(&spoiled).unwrap();
    for workers in WORKERS {
        std::fs::write(&spoiled, &whole[..whole.len() - 7]).unwrap();
        let folder = ImageFolder::open(dir.path())?.decoded();
        let loader = DataLoader::builder(Cached::new(folder)).batch_size(3).num_workers(workers).build()?;
        let mut outcomes: Vec<_> = loader.iter().collect();
        let error = outcomes.pop().unwrap().unwrap_err();
        assert_eq!((outcomes.len(), error.index()), (2, Some(6)));
        assert!(error.to_string().contains("dog/2.png"), "{error}");
        std::fs::write(&spoiled, &whole).unwrap();
        let labels: Vec<Vec<i64>> = loader.iter().map(|batch| Vec::try_from(batch.unwrap().1).unwrap()).collect();
        assert_eq!(labels.concat(), [0, 0, 0, 0, 1, 1, 1, 1]);
    }
    Ok(())
}

#[test]
fn waiting_is_measured() -> Result<(), DataError> {
    let _alone = alone();
    let slow = || {
        FnDataset::new(8, |index| {
            sleep(Duration::from_millis(5));
            Ok(index)
        })
    };
    let inline = DataLoader::builder(slow()).batch_size(2).collate(listed).build()?;
    assert_eq!(inline.iter().count(), 4);
    assert_eq!(inline.stats().batches, 4);
    assert!(inline.stats().wait_seconds >= 0.04, "{:?}", inline.stats());
    assert!(inline.stats().wait_seconds_per_batch() >= 0.01);
    inline.reset_stats();
    assert_eq!((inline.stats().batches, inline.stats().wait_seconds), (0, 0.0));
    Ok(())
}

#[test]
fn damaged_mnist_files_never_open() {
    let dir = tempfile::tempdir().unwrap();
    let idx = |shape: &[u32], bytes: usize| {
        let mut file = vec![0, 0, 8, shape.len() as u8];
        shape.iter().for_each(|size| file.extend(size.to_be_bytes()));
        file.extend(vec![1; bytes]);
        file
    };
    let files = [
        ("train-images-idx3-ubyte", idx(&[3, 28, 28], 3 * 784)),
        ("train-labels-idx1-ubyte", idx(&[3], 3)),
        ("t10k-images-idx3-ubyte", idx(&[2, 28, 28], 2 * 784)),
        ("t10k-labels-idx1-ubyte", idx(&[2], 2)),
    ];
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    files.iter().for_each(|(name, bytes)| write(name, bytes));
    assert_eq!(Mnist::open(dir.path()).unwrap().train.len(), 3);
    for (name, bytes) in &files {
        for damaged in [&bytes[..bytes.len() - 1], &bytes[..5], &[], &[bytes.as_slice(), &[0]].concat()] {
            write(name, damaged);
            let error = Mnist::open(dir.path()).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
        write(name, bytes);
    }
}
