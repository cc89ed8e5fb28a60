//! Timeouts, `worker_init_fn`, `in_order(false)`, tuning, statistics.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread::sleep;
use std::time::Duration;

use overdrive_dataload::{Auto, ComputeThreads, DataError, DataLoader, FnDataset, Image, SequentialSampler, Stack};
use tch::Device;

use crate::{WORKERS, alone, listed, uneven, wait_until};

#[test]
fn a_stuck_sample_is_a_timeout_and_not_a_hang() -> Result<(), DataError> {
    let _alone = alone();
    let released = Arc::new(AtomicBool::new(false));
    let reads = Arc::new(AtomicUsize::new(0));
    let (gate, counter) = (released.clone(), reads.clone());
    let dataset = FnDataset::new(40, move |index| {
        counter.fetch_add(1, SeqCst);
        while index == 20 && !gate.load(SeqCst) {
            sleep(Duration::from_millis(1));
        }
        Ok(index)
    });
    let builder = DataLoader::builder(dataset).batch_size(10).num_workers(2).timeout(Duration::from_secs(2));
    let loader = builder.collate(listed).build()?;
    let mut epoch = loader.iter();
    // The first batches are ready while one worker is stuck in the third and the other has read the fourth.
    wait_until(|| reads.load(SeqCst) == 31);
    assert!(epoch.next().unwrap().is_ok() && epoch.next().unwrap().is_ok());
    let error = epoch.next().unwrap().unwrap_err();
    assert!(matches!(error, DataError::Timeout { batch: 2, .. }), "{error}");
    assert!(epoch.next().is_none());
    drop(epoch);
    released.store(true, SeqCst);
    // All batches are made before one is asked for, so that none is late on a busy machine.
    let mut epoch = loader.iter();
    wait_until(|| epoch.ready() == 4);
    assert_eq!(epoch.by_ref().take(4).filter(Result::is_ok).count(), 4, "the loader stays usable");
    drop(epoch);
    // The detached thread ends by itself.
    wait_until(|| crate::loader_threads() == 0);
    Ok(())
}

#[test]
fn every_worker_is_initialised_and_a_failure_is_reported() -> Result<(), DataError> {
    let _alone = alone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = seen.clone();
    let builder = || DataLoader::builder(FnDataset::new(12, Ok)).batch_size(2).num_workers(3).collate(listed);
    let loader = builder()
        .worker_init_fn(move |worker| {
            log.lock().unwrap().push(worker);
            Ok(())
        })
        .build()?;
    assert_eq!(loader.iter().count(), 6);
    let mut workers = seen.lock().unwrap().clone();
    workers.sort_unstable();
    assert_eq!(workers, [0, 1, 2]);

    let failing = builder().worker_init_fn(|worker| match worker {
        1 => Err(DataError::other("no licence")),
        _ => Ok(()),
    });
    let outcomes: Vec<_> = failing.build()?.iter().collect();
    assert_eq!(
        outcomes.last().unwrap().as_ref().unwrap_err().to_string(),
        "worker 1: worker_init_fn failed: no licence"
    );
    let panicking = builder().worker_init_fn(|_| panic!("boom")).build()?;
    let error = panicking.iter().next().unwrap().unwrap_err();
    assert!(error.to_string().contains("worker_init_fn failed: it panicked: boom"), "{error}");
    Ok(())
}

#[test]
fn out_of_order_delivers_everything_and_a_slow_batch_delays_no_other() -> Result<(), DataError> {
    let _alone = alone();
    let released = Arc::new(AtomicBool::new(false));
    let gate = released.clone();
    let dataset = FnDataset::new(40, move |index| {
        while index == 0 && !gate.load(SeqCst) {
            sleep(Duration::from_millis(1));
        }
        Ok(index)
    });
    let builder = DataLoader::builder(dataset).batch_size(4).num_workers(2).in_order(false);
    let loader = builder.collate(listed).build()?;
    let mut epoch = loader.iter();
    let mut seen: Vec<usize> = (0..8).flat_map(|_| epoch.next().unwrap().unwrap()).collect();
    assert!(!seen.contains(&0));
    released.store(true, SeqCst);
    seen.extend(epoch.flat_map(|batch| batch.unwrap()));
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<_>>());
    Ok(())
}

#[test]
fn auto_finds_a_size_within_its_bounds_and_changes_no_batch() -> Result<(), DataError> {
    let _alone = alone();
    let image = |index: usize| {
        sleep(Duration::from_micros(200));
        Ok((Image::new(vec![index as u8; 64], 8, 8, 1)?, index as i64))
    };
    let builder = || DataLoader::builder(FnDataset::new(800, image)).batch_size(4);
    let labels = |loader: &DataLoader<_>| -> Result<Vec<i64>, DataError> {
        let batches: Vec<(tch::Tensor, tch::Tensor)> = loader.iter().collect::<Result<_, _>>()?;
        Ok(batches.iter().flat_map(|(_, labels)| Vec::<i64>::try_from(labels).unwrap()).collect())
    };
    let loader = builder().collate(Stack).num_workers(Auto).prefetch(Auto).memory_budget(10_000).build()?;
    assert_eq!(labels(&loader)?, (0..800).collect::<Vec<_>>());
    let stats = loader.stats();
    let cores = std::thread::available_parallelism().unwrap().get() as u64;
    assert!((1..=cores).contains(&stats.workers), "{stats}");
    // 4 * (64 + 8) bytes per batch.
    assert!(stats.in_flight <= 10_000 / 288, "{stats}");
    Ok(())
}

#[test]
fn statistics_show_where_the_time_goes() -> Result<(), DataError> {
    let _alone = alone();
    let dataset = Arc::new(FnDataset::new(40, |index| {
        sleep(Duration::from_millis(1));
        Ok(index)
    }));
    let slow_collate = |samples: Vec<usize>| {
        sleep(Duration::from_millis(2));
        Ok(samples)
    };
    for workers in WORKERS {
        let loader =
            DataLoader::builder(dataset.clone()).batch_size(10).num_workers(workers).collate(slow_collate).build()?;
        assert_eq!(loader.iter().count(), 4);
        let stats = loader.stats();
        assert!(stats.read_seconds >= 0.04 && stats.collate_seconds >= 0.008, "{stats:?}");
        assert_eq!(stats.decode_seconds, 0.0);
        assert_eq!((stats.workers as usize, stats.samples), (workers, 40));
        assert!(stats.to_string().contains("4 batches, 40 samples, 0 faults"), "{stats}");
    }
    Ok(())
}

#[test]
fn options_that_make_no_sense_are_refused() {
    let builder =
        || DataLoader::builder(FnDataset::new(9, |i| Ok((Image::new([i as u8], 1, 1, 1)?, 0)))).collate(Stack);
    let option = |result: Result<DataLoader<_>, DataError>| match result {
        Err(DataError::InvalidOption { option, .. }) => option,
        other => panic!("expected an invalid option, got {other:?}"),
    };
    assert_eq!(option(builder().timeout(Duration::from_secs(1)).build()), "timeout");
    assert_eq!(option(builder().num_workers(1).timeout(Duration::ZERO).build()), "timeout");
    assert_eq!(option(builder().worker_nice(20).build()), "worker_nice");
    // A list of their order would abort the process.
    for samples in [1 << 40, usize::MAX] {
        let numbers = || DataLoader::builder(FnDataset::new(samples, |i| Ok(i as i64)));
        assert!(matches!(numbers().build(), Err(DataError::InvalidOption { option: "sampler", .. })));
        assert!(matches!(numbers().shuffle(true).build(), Err(DataError::InvalidOption { option: "sampler", .. })));
        assert_eq!(option(builder().sampler(SequentialSampler::new(samples)).build()), "sampler");
    }
    let late = builder().pin_memory(true).collate(|samples: Vec<(Image, i64)>| Ok(samples.len()));
    assert!(matches!(late.build(), Err(DataError::InvalidOption { option: "collate", .. })));
    if !tch::Cuda::is_available() {
        assert!(matches!(builder().to_device(Device::Cuda(0)).build(), Err(DataError::Torch(_))));
    }
}

#[test]
fn batches_go_to_the_device() -> Result<(), DataError> {
    let _alone = alone();
    let device = Device::cuda_if_available();
    for workers in WORKERS {
        let dataset = FnDataset::new(20, |i| Ok((Image::new(vec![i as u8; 4], 2, 2, 1)?, i as i64)));
        let builder = DataLoader::builder(dataset).batch_size(4).num_workers(workers).collate(Stack);
        let loader = builder.pin_memory(true).to_device(device).build()?;
        for (number, batch) in loader.iter().enumerate() {
            let (images, labels) = batch?;
            assert_eq!((images.device(), labels.device()), (device, device));
            assert_eq!(
                (images.int64_value(&[3, 0, 1, 1]), labels.int64_value(&[0])),
                (number as i64 * 4 + 3, number as i64 * 4)
            );
        }
    }
    Ok(())
}

#[test]
fn a_hundred_epochs_with_breaks_leave_no_thread() -> Result<(), DataError> {
    let _alone = alone();
    let loader = DataLoader::builder(uneven(200)).batch_size(4).shuffle(true).num_workers(3).collate(listed).build()?;
    let taken = AtomicUsize::new(0);
    for epoch in 0..100 {
        for batch in loader.iter().take(epoch % 7) {
            taken.fetch_add(batch?.len(), SeqCst);
        }
    }
    assert_eq!(taken.into_inner(), (0..100).map(|epoch| epoch % 7 * 4).sum::<usize>());
    wait_until(|| crate::loader_threads() == 0);
    Ok(())
}

#[test]
fn libtorch_operators_stay_on_the_worker_threads() -> Result<(), DataError> {
    let _alone = alone();
    let before = tch::get_num_threads();
    tch::set_num_threads(2);
    let threads = |workers| -> Result<Vec<i32>, DataError> {
        let loader =
            DataLoader::builder(uneven(20)).num_workers(workers).collate(|_: Vec<usize>| Ok(tch::get_num_threads()));
        loader.build()?.iter().collect()
    };
    assert!(threads(0)?.iter().all(|&count| count == 2), "the training thread keeps its thread count");
    assert!(threads(2)?.iter().all(|&count| count == 1));
    assert_eq!(tch::get_num_threads(), 2);
    tch::set_num_threads(before);
    Ok(())
}

#[test]
fn out_of_order_batches_run_ahead_of_a_stuck_one_only_so_far() -> Result<(), DataError> {
    let _alone = alone();
    let released = Arc::new(AtomicBool::new(false));
    let gate = released.clone();
    let dataset = FnDataset::new(3000, move |index| {
        while index == 0 && !gate.load(SeqCst) {
            sleep(Duration::from_millis(1));
        }
        Ok(index)
    });
    let builder = DataLoader::builder(dataset).num_workers(2).in_order(false);
    let loader = builder.collate(|samples: Vec<usize>| Ok(samples[0])).build()?;
    let mut epoch = loader.iter();
    // These are all batches that may be made before the first one; no further batch is started, so the first must be
    // next.
    let mut seen: Vec<usize> = epoch.by_ref().take(1023).collect::<Result<_, _>>()?;
    seen.sort_unstable();
    assert_eq!(seen, (1..1024).collect::<Vec<_>>());
    let state = overdrive_core::Stateful::state_dict(&loader).unwrap();
    let ahead = format!("{:?}", state.get("ahead").unwrap());
    assert!(ahead.contains("1-1023"), "{ahead}");
    released.store(true, SeqCst);
    assert_eq!(epoch.next().unwrap()?, 0);
    assert_eq!(epoch.count(), 3000 - 1024);
    Ok(())
}

/// `LOCAL_WORLD_SIZE` for the child process, which runs this test as one of many ranks on this host.
const LOCAL_RANKS: &str = "1000";

#[test]
fn auto_leaves_the_cores_of_the_other_ranks_of_the_host_alone() -> Result<(), DataError> {
    let _alone = alone();
    if std::env::var("LOCAL_WORLD_SIZE").as_deref() != Ok(LOCAL_RANKS) {
        let mut again = std::process::Command::new(std::env::current_exe().map_err(DataError::other)?);
        let name = "options::auto_leaves_the_cores_of_the_other_ranks_of_the_host_alone";
        let again = again.args(["--exact", name]).env("LOCAL_WORLD_SIZE", LOCAL_RANKS);
        let output = again.output().map_err(DataError::other)?;
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        return Ok(());
    }
    // The training loop only waits for data, so without other ranks it would get more workers.
    let slow = FnDataset::new(400, |index| {
        sleep(Duration::from_millis(1));
        Ok(index)
    });
    let loader = DataLoader::builder(slow).batch_size(4).num_workers(Auto).collate(listed).build()?;
    for batch in &loader {
        batch?;
        assert_eq!(loader.stats().workers, 1);
    }
    Ok(())
}

#[test]
fn libtorch_computes_with_all_threads_only_while_workers_rest() -> Result<(), DataError> {
    let _alone = alone();
    let allowed = Arc::new(AtomicUsize::new(usize::MAX));
    let gate = allowed.clone();
    let dataset = FnDataset::new(40, move |index| {
        wait_until(|| index < gate.load(SeqCst));
        Ok(index)
    });
    let threads = ComputeThreads { beside_workers: 1, alone: 3 };
    let before = tch::get_num_threads();
    let builder = DataLoader::builder(dataset).batch_size(2).num_workers(2).prefetch_factor(2);
    let loader = builder.compute_threads(threads).collate(listed).build()?;
    let ready = |epoch: &overdrive_dataload::Epoch<Vec<usize>>, batches| wait_until(|| epoch.ready() == batches);
    let mut epoch = loader.iter();
    let next =
        |epoch: &mut overdrive_dataload::Epoch<Vec<usize>>| (epoch.next().unwrap().unwrap(), tch::get_num_threads());
    // Four batches are made ahead. Workers rest until one of them is left, then make three more.
    ready(&epoch, 4);
    allowed.store(0, SeqCst);
    assert_eq!(next(&mut epoch), (vec![0, 1], 3));
    assert_eq!((epoch.ready(), next(&mut epoch)), (3, (vec![2, 3], 3)));
    assert_eq!((epoch.ready(), next(&mut epoch)), (2, (vec![4, 5], 1)));
    assert_eq!((epoch.ready(), next(&mut epoch)), (1, (vec![6, 7], 1)));
    // A batch that is made at last is not all of them.
    allowed.store(10, SeqCst);
    assert_eq!(next(&mut epoch), (vec![8, 9], 1));
    allowed.store(usize::MAX, SeqCst);
    for _ in 0..4 {
        ready(&epoch, 4);
        assert_eq!([(); 3].map(|()| next(&mut epoch).1), [3, 3, 1]);
    }
    // One of three permits finds no batch left: that worker ends, and the last steps have all threads.
    wait_until(|| epoch.ready() == 3 && crate::loader_threads() == 1);
    assert_eq!(next(&mut epoch), (vec![34, 35], 3));
    drop(epoch);
    // After an epoch that is broken off, whatever was set meanwhile; and for the next one.
    for _ in 0..2 {
        let mut epoch = loader.iter();
        ready(&epoch, 4);
        (0..2).for_each(|_| assert_eq!(next(&mut epoch).1, 3));
        allowed.store(0, SeqCst);
        tch::set_num_threads(2);
        assert_eq!(next(&mut epoch).1, 1);
        allowed.store(usize::MAX, SeqCst);
        drop(epoch);
        assert_eq!(tch::get_num_threads(), 3);
    }
    tch::set_num_threads(before);
    Ok(())
}

#[test]
fn workers_that_load_two_batches_ahead_rest_too() -> Result<(), DataError> {
    let _alone = alone();
    let before = tch::get_num_threads();
    let builder = DataLoader::builder(FnDataset::new(8, Ok)).num_workers(1).prefetch_factor(2);
    let loader = builder.compute_threads(ComputeThreads { beside_workers: 1, alone: 3 }).collate(listed).build()?;
    let mut epoch = loader.iter();
    for _ in 0..2 {
        wait_until(|| epoch.ready() == 2);
        assert!(epoch.next().is_some_and(|batch| batch.is_ok()));
        assert_eq!(tch::get_num_threads(), 3);
        assert!(epoch.next().is_some_and(|batch| batch.is_ok()));
    }
    drop(epoch);
    tch::set_num_threads(before);
    Ok(())
}

#[test]
fn numbers_of_threads_that_make_no_sense_are_refused() {
    let refused = |workers, beside_workers, alone| {
        let builder = DataLoader::builder(FnDataset::new(4, Ok)).num_workers(workers).collate(listed);
        builder.compute_threads(ComputeThreads { beside_workers, alone }).build().unwrap_err().to_string()
    };
    assert!(refused(0, 1, 2).contains("compute_threads") && refused(0, 1, 2).contains("at least one worker"));
    for (beside_workers, alone) in [(0, 2), (3, 2), (-1, -1), (1, 100_000)] {
        assert!(refused(1, beside_workers, alone).contains(&format!("{beside_workers} and {alone}")));
    }
    let one = DataLoader::builder(FnDataset::new(4, Ok)).num_workers(1).prefetch_factor(1).collate(listed);
    let error = one.compute_threads(ComputeThreads { beside_workers: 1, alone: 2 }).build().unwrap_err().to_string();
    assert!(error.contains("at least two batches ahead"), "{error}");
    let auto = DataLoader::builder(FnDataset::new(4, Ok)).num_workers(Auto).collate(listed);
    let error = auto.compute_threads(ComputeThreads { beside_workers: 1, alone: 2 }).build().unwrap_err().to_string();
    assert!(error.contains("a fixed number of workers"), "{error}");
}
