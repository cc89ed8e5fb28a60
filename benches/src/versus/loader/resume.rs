//! The time to load a state in the middle of an epoch, and to get the first batch after that.
//!
//! Both are timed, because what has to be read again may delay only the first batch. Decoding makes every first batch
//! slow, so it is also compared with the first batch of a new epoch.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::core::{StateDict, Stateful};
use overdrive::dataload::{
    DataError, DataLoader, Dataset, ImageFolder, LmdbDataset, LmdbSample, Philox, WebDataset, WebDatasetWriter,
    WebSample,
};
use overdrive_bench_report::{Ratio, Target};

use super::{Bench, WORKERS, images, lmdb, path_text};
use crate::versus::turns::{Case, Turns};

const ENTRIES: usize = 1_200_000;
const SHARDS: usize = 8;
const SAMPLES_A_SHARD: usize = 5_000;
/// Of the shards with indexes, which take 1 GB.
const SAMPLES_AN_INDEX: usize = 12_500;
const SAMPLE_BYTES: usize = 10_000;
const BATCH_SIZE: usize = 64;
/// The limit of the time to resume, in milliseconds.
const ALLOWED: f64 = 50.0;
const LIMIT: &str = "the 50 ms allowed";
const FIRST_OF_EPOCH: &str = "the first batch of an epoch";

/// The end of what is timed when a loader resumes.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    /// The state is loaded and the workers have begun.
    Begun,
    /// The loader has returned the first batch.
    FirstBatch,
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let path = lmdb::make(&bench.work, "index", ENTRIES, 100)?;
    let entries = Arc::new(LmdbDataset::builder(&path).index_file(path.with_extension("mdb.index")).open()?);
    let sizes = |values: Vec<LmdbSample>| Ok(values.iter().map(|sample| sample.value().len()).collect::<Vec<_>>());
    let what = "1.2 million entries, shuffled, half an epoch in, batch 64, 2 workers";
    compare(bench, what, ENTRIES / BATCH_SIZE / 2, Until::FirstBatch, || {
        let builder = DataLoader::builder(entries.clone()).batch_size(BATCH_SIZE).shuffle(true).num_workers(WORKERS);
        builder.collate(sizes).build()
    })?;

    let shards = write_shards(&bench.work)?;
    let what =
        "tar shards of 5,000 samples of 10 kB, 4 side by side, mixed by 500, an eighth to go, batch 64, 2 workers";
    let batches = SHARDS * SAMPLES_A_SHARD / BATCH_SIZE * 7 / 8;
    compare_shards(bench, what, batches, &format!("{}/*.tar", path_text(&shards)), 500)?;
    for (ending, what) in [
        ("tar", "1 GB of tar shards with indexes, samples of 10 kB, 4 side by side, half to go, batch 64, 2 workers"),
        (
            "tar.zst",
            "1 GB of tar.zst shards with indexes, samples of 10 kB, 4 side by side, half to go, batch 64, 2 workers",
        ),
    ] {
        let shards = write_indexed(&bench.work, ending)?;
        let batches = SHARDS * SAMPLES_AN_INDEX / BATCH_SIZE / 2;
        compare_shards(bench, what, batches, &format!("{}/*.{ending}", path_text(&shards)), 1)?;
    }

    let what = photographs!("photographs decoded and cropped, half an epoch in, batch 64, 2 workers");
    let Some(photos) = bench.photos(what) else { return Ok(()) };
    let folder = Arc::new(ImageFolder::open(&photos)?);
    compare(bench, what, folder.len() / BATCH_SIZE / 2, Until::Begun, || images::loader(&folder, BATCH_SIZE, WORKERS))
}

fn compare_shards(bench: &mut Bench, what: &str, batches: usize, pattern: &str, buffer: usize) -> Result<()> {
    let dataset = WebDataset::open(pattern)?;
    compare(bench, what, batches, Until::FirstBatch, || {
        let builder = DataLoader::stream(dataset.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
        let builder = builder.shuffle(true).interleave(4).shuffle_buffer(buffer);
        builder.collate(|samples: Vec<WebSample>| Ok(samples)).build()
    })
}

/// Compares a loader that resumes after `batches` batches with the limit, which is a target up to `limited`, and with
/// the first batch of an epoch.
fn compare<B: Send + 'static>(
    bench: &mut Bench,
    what: &str,
    batches: usize,
    limited: Until,
    make: impl Fn() -> Result<DataLoader<B>, DataError>,
) -> Result<()> {
    let state = state_after(&make()?, batches)?;
    let resumed = |until: Until| {
        let mut loader = make()?;
        let started = Instant::now();
        loader.load_state_dict(&state)?;
        let mut epoch = loader.iter();
        if until == Until::FirstBatch {
            epoch.next().context("the loader gave no batch")??;
        }
        Ok(1e3 * started.elapsed().as_secs_f64())
    };
    let first = Cell::new(0);
    let mut turns = Turns::default();
    turns.ours("begun", || resumed(Until::Begun));
    turns.ours("first batch", || resumed(Until::FirstBatch));
    turns.ours(FIRST_OF_EPOCH, || {
        let loader = make()?;
        // A new epoch each time, so that it begins with other shards and entries, as after loading a state.
        loader.set_epoch(first.replace(first.get() + 1));
        let started = Instant::now();
        loader.iter().next().context("the loader gave no batch")??;
        Ok(1e3 * started.elapsed().as_secs_f64())
    });
    turns.ours(LIMIT, || Ok(ALLOWED));
    turns.take(&format!("resume, {what}"), bench.pairs)?;
    let target = |of| (of == limited).then_some(Target::AtMost(1.0));
    let texts = [
        (Until::Begun, "begun", format!("a state put back, and workers begun: {what}")),
        (Until::FirstBatch, "first batch", format!("a state put back, up to the first batch: {what}")),
    ];
    for (until, ours, text) in &texts {
        let case = Case { text, unit: "ms", ratio: Ratio::ShareOfCost };
        turns.compare(&mut bench.findings, case, (ours, LIMIT), target(*until))?;
    }
    let case = Case { text: &texts[1].2, unit: "ms", ratio: Ratio::ShareOfCost };
    turns.compare(&mut bench.findings, case, ("first batch", FIRST_OF_EPOCH), None)
}

/// The state of a loader after the training loop has taken `batches` batches.
fn state_after<B: Send + 'static>(loader: &DataLoader<B>, batches: usize) -> Result<StateDict> {
    let mut epoch = loader.iter();
    for _ in 0..batches {
        epoch.next().context("the epoch has too few batches")??;
    }
    let state = loader.state_dict()?;
    let bytes: usize = state.iter().map(|(key, entry)| key.len() + format!("{entry:?}").len()).sum();
    eprintln!("resume: the state after {batches} batches has {bytes} bytes as text");
    Ok(state)
}

/// Writes the shards without indexes.
fn write_shards(work: &Path) -> Result<PathBuf> {
    write(work, "resume", "tar", SAMPLES_A_SHARD, false, |number| {
        (0..SAMPLE_BYTES).map(|position| (position * 31 + number) as u8).collect()
    })
}

/// Writes those with indexes, of samples that do not compress, as images do not.
fn write_indexed(work: &Path, ending: &str) -> Result<PathBuf> {
    write(work, &format!("resume-{ending}"), ending, SAMPLES_AN_INDEX, true, |number| {
        let numbers = Philox::new(0, number as u64);
        (0..SAMPLE_BYTES as u64 / 8).flat_map(|position| numbers.at(position).to_le_bytes()).collect()
    })
}

/// Writes shards into a folder in `work`, unless they exist.
fn write(
    work: &Path,
    name: &str,
    ending: &str,
    samples: usize,
    index: bool,
    sample: impl Fn(usize) -> Vec<u8>,
) -> Result<PathBuf> {
    let folder = work.join(name);
    if folder.is_dir() {
        return Ok(folder);
    }
    let aside = tempfile::tempdir_in(work)?;
    let made = aside.path().join(name);
    std::fs::create_dir(&made)?;
    let mut writer = WebDatasetWriter::builder(format!("{}/%04d.{ending}", path_text(&made)))
        .max_count(samples as u64)
        .index(index)
        .build()?;
    for number in 0..SHARDS * samples {
        writer.write(&format!("{number:08}"), &[("jpg", &sample(number)[..]), ("cls", &b"0"[..])])?;
    }
    writer.finish()?;
    std::fs::rename(&made, &folder)?;
    Ok(folder)
}
