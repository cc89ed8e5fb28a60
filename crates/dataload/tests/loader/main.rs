//! The loader as a user sees it: order, epochs, errors, panics, and threads that go away.

mod faults;
mod options;
mod resume;
mod streams;

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use overdrive_dataload::{
    BatchPlan, BatchSampler, Cached, DataError, DataLoader, Dataset, FnDataset, Image, ImageFolder, Mnist, Sampler,
    SequentialSampler, Stack, ToFloat,
};

const WORKERS: [usize; 4] = [0, 1, 2, 4];

/// Tests that start workers run one at a time, so that threads can be counted.
fn alone() -> MutexGuard<'static, ()> {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a batch as the list of its samples.
fn listed<S: Send>(samples: Vec<S>) -> Result<Vec<S>, DataError> {
    Ok(samples)
}

/// A dataset whose samples take unequal times, so that batches finish out of order.
fn uneven(len: usize) -> impl Dataset<Sample = usize> + 'static {
    FnDataset::new(len, |index| {
        if index % 7 == 0 {
            sleep(Duration::from_micros((index % 5) as u64 * 200));
        }
        Ok(index)
    })
}

/// Gives background threads up to ten seconds, as a busy machine may need.
fn wait_until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(10), "the condition never came true");
        sleep(Duration::from_millis(1));
    }
}

fn batches<B: Send + 'static>(loader: &DataLoader<B>, epoch: u64) -> Vec<B> {
    loader.epoch(epoch).collect::<Result<_, _>>().unwrap()
}

#[test]
fn the_order_is_the_same_for_any_number_of_workers() -> Result<(), DataError> {
    let _alone = alone();
    let loader = |workers| {
        DataLoader::builder(uneven(203))
            .batch_size(8)
            .shuffle(true)
            .seed(3)
            .num_workers(workers)
            .collate(listed)
            .build()
    };
    let expected = batches(&loader(0)?, 5);
    let mut seen: Vec<usize> = expected.concat();
    seen.sort_unstable();
    assert_eq!(seen, (0..203).collect::<Vec<_>>());
    for workers in WORKERS {
        assert_eq!(batches(&loader(workers)?, 5), expected, "{workers} workers");
        assert_ne!(batches(&loader(workers)?, 6), expected, "{workers} workers");
    }
    Ok(())
}

#[test]
fn each_iteration_is_a_new_epoch() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let mut loader =
            DataLoader::builder(uneven(50)).batch_size(4).shuffle(true).num_workers(workers).collate(listed).build()?;
        let first: Vec<_> = loader.iter().collect::<Result<_, _>>()?;
        let second: Vec<_> = (&loader).into_iter().collect::<Result<_, _>>()?;
        let third: Vec<_> = (&mut loader).into_iter().collect::<Result<_, _>>()?;
        assert_eq!([&first, &second, &third], [0, 1, 2].map(|epoch| batches(&loader, epoch)).each_ref());
        loader.set_epoch(1);
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?, second);
        assert_eq!(loader.iter().collect::<Result<Vec<_>, _>>()?, third);
    }
    Ok(())
}

#[test]
fn incomplete_batches_are_kept_or_dropped() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        for (drop_last, sizes) in [(false, vec![4, 4, 2]), (true, vec![4, 4])] {
            let loader = DataLoader::builder(uneven(10))
                .batch_size(4)
                .num_workers(workers)
                .drop_last(drop_last)
                .collate(listed)
                .build()?;
            assert_eq!(loader.len(), Some(sizes.len()));
            assert_eq!(batches(&loader, 0).iter().map(Vec::len).collect::<Vec<_>>(), sizes);
        }
    }
    Ok(())
}

#[test]
fn an_error_comes_in_its_place_and_the_loader_lives_on() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let broken = Arc::new(AtomicUsize::new(17));
        let seen = broken.clone();
        let dataset = FnDataset::new(40, move |index| match index == seen.load(SeqCst) {
            true => Err(DataError::other("cosmic ray")),
            false => Ok(index),
        });
        let loader = DataLoader::builder(dataset).batch_size(4).num_workers(workers).collate(listed).build()?;
        let mut epoch = loader.iter();
        for batch in 0..4 {
            assert_eq!(epoch.next().unwrap()?, (batch * 4..batch * 4 + 4).collect::<Vec<_>>());
        }
        let error = epoch.next().unwrap().unwrap_err();
        assert_eq!((error.index(), error.to_string().as_str()), (Some(17), "sample 17: cosmic ray"));
        assert!(matches!(error.innermost(), DataError::Other(_)));
        assert!(epoch.next().is_none() && epoch.next().is_none());
        broken.store(usize::MAX, SeqCst);
        assert_eq!(loader.iter().count(), 10, "{workers} workers");
    }
    Ok(())
}

#[test]
fn panics_become_errors_with_their_place() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let dataset = FnDataset::new(40, |index| match index {
            21 => panic!("sample {index} explodes"),
            _ => Ok(index),
        });
        let loader = DataLoader::builder(dataset).batch_size(4).num_workers(workers).collate(listed).build()?;
        let outcomes: Vec<_> = loader.iter().collect();
        assert_eq!(outcomes.len(), 6);
        assert!(matches!(
            &outcomes[5],
            Err(DataError::WorkerPanicked { index: 21, message, .. }) if message == "sample 21 explodes"
        ));

        let explode = |samples: Vec<usize>| match samples[0] {
            8 => std::panic::panic_any(samples),
            _ => Ok(samples),
        };
        let loader = DataLoader::builder(uneven(40)).batch_size(4).num_workers(workers).collate(explode).build()?;
        let outcomes: Vec<_> = loader.iter().collect();
        assert!(matches!(outcomes.last(), Some(Err(DataError::CollatePanicked { batch: 2, .. }))));
        assert_eq!(outcomes.len(), 3, "{workers} workers");
    }
    Ok(())
}

#[test]
fn dropping_an_epoch_joins_its_threads_at_once() -> Result<(), DataError> {
    let _alone = alone();
    let slow = Arc::new(FnDataset::new(100_000, |index| {
        sleep(Duration::from_millis(2));
        Ok(index)
    }));
    let loader = DataLoader::builder(slow.clone()).batch_size(500).num_workers(3).collate(listed).build()?;
    for _ in 0..10 {
        let epoch = loader.iter();
        // A thread takes its name once it runs.
        wait_until(|| loader_threads() == 3);
        let dropped = Instant::now();
        drop(epoch);
        // A batch takes a second: only stopping within it can be this quick.
        assert!(dropped.elapsed() < Duration::from_millis(700), "{:?}", dropped.elapsed());
    }
    // The kernel may still be taking a joined thread off its list.
    wait_until(|| loader_threads() == 0);
    drop(loader);
    assert_eq!(Arc::strong_count(&slow), 1);
    Ok(())
}

#[cfg(target_os = "linux")]
fn loader_threads() -> usize {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    threads
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("comm")).ok())
        .filter(|name| name.starts_with("dataload-"))
        .count()
}

#[test]
fn an_epoch_outlives_its_loader_and_begins_before_it_is_asked() -> Result<(), DataError> {
    let _alone = alone();
    let reads = Arc::new(AtomicUsize::new(0));
    let counter = reads.clone();
    let dataset = FnDataset::new(1000, move |index| {
        counter.fetch_add(1, SeqCst);
        Ok(index)
    });
    let loader =
        DataLoader::builder(dataset).batch_size(10).num_workers(2).prefetch_factor(3).collate(listed).build()?;
    let epoch = loader.iter();
    wait_until(|| reads.load(SeqCst) >= 60);
    sleep(Duration::from_millis(20));
    assert_eq!(reads.load(SeqCst), 60, "num_workers * prefetch_factor batches, and no more");
    drop(loader);
    assert_eq!(epoch.size_hint(), (0, Some(100)));
    assert_eq!(epoch.map(|batch| batch.unwrap().len()).sum::<usize>(), 1000);
    Ok(())
}

#[test]
fn empty_datasets_and_bad_options() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = || DataLoader::builder(uneven(0)).batch_size(4).num_workers(workers);
        let loader = builder().shuffle(true).collate(listed).build()?;
        assert!(loader.is_empty() && loader.iter().next().is_none());
    }
    let refused = |result: Result<DataLoader<_>, DataError>| match result {
        Err(DataError::InvalidOption { option, .. }) => option,
        other => panic!("expected an invalid option, got {other:?}"),
    };
    let builder = || DataLoader::builder(FnDataset::new(9, Ok)).collate(listed::<usize>);
    assert_eq!(refused(builder().batch_size(0).build()), "batch_size");
    assert_eq!(refused(builder().num_workers(usize::MAX).build()), "num_workers");
    assert_eq!(refused(builder().prefetch_factor(0).build()), "prefetch_factor");
    assert_eq!(refused(builder().shuffle(true).sampler(SequentialSampler::new(9)).build()), "sampler");
    assert_eq!(refused(builder().batch_size(2).batch_sampler(Fixed).build()), "batch_sampler");
    let absurd = builder().num_workers(2).prefetch_factor(usize::MAX).build()?;
    assert_eq!(absurd.iter().count(), 9);
    Ok(())
}

struct Fixed;

impl BatchSampler for Fixed {
    fn len(&self) -> usize {
        2
    }

    fn plan(&self, epoch: u64) -> BatchPlan {
        [vec![epoch as usize], vec![1, 1, 2]].into_iter().collect()
    }
}

struct Far;

impl Sampler for Far {
    fn len(&self) -> usize {
        3
    }

    fn order(&self, _epoch: u64) -> Vec<usize> {
        vec![0, 99, 1]
    }
}

#[test]
fn own_samplers_are_followed_and_checked() -> Result<(), DataError> {
    let _alone = alone();
    for workers in WORKERS {
        let builder = || DataLoader::builder(uneven(9)).num_workers(workers).collate(listed);
        assert_eq!(batches(&builder().batch_sampler(Fixed).build()?, 4), [vec![4], vec![1, 1, 2]]);
        let outcomes: Vec<_> = builder().sampler(Far).build()?.iter().collect();
        assert_eq!(outcomes.len(), 2);
        let error = outcomes[1].as_ref().unwrap_err();
        assert!(matches!(error.innermost(), DataError::IndexOutOfRange { index: 99, len: 9 }), "{error}");
    }
    Ok(())
}

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
    let dataset = FnDataset::new(8, |_| Ok((Image::new(vec![1; 1_000_000], 1000, 1000, 1)?, 0)));
    let loader = DataLoader::builder(dataset).batch_size(2).num_workers(1).collate(ToFloat::unit()).build()?;
    let mut epoch = loader.iter();
    assert_eq!(epoch.next().unwrap()?.0.size(), [2, 1, 1000, 1000]);
    // The worker is at its later batches. A pool of its own would carry its name.
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
        let folder = ImageFolder::open(dir.path())?;
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
