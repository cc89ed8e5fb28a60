//! A state that is put back in the middle of an epoch, and the first batch after it.
//!
//! Workers begin with what is put back, and what has to be read again on the way shows in the first batch: so both are
//! timed. A first batch is dear by itself where it is decoded, so it stands beside that of an epoch's beginning.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::core::{StateDict, Stateful};
use overdrive::dataload::{
    DataError, DataLoader, Dataset, EncodedImageFolder, LmdbDataset, LmdbSample, WebDataset, WebDatasetWriter,
    WebSample,
};
use overdrive_bench_report::{Ratio, Target};

use super::{Bench, WORKERS, images, lmdb, shown};
use crate::versus::turns::{Case, Turns};

const ENTRIES: usize = 1_200_000;
const SHARDS: usize = 8;
const SAMPLES_A_SHARD: usize = 5_000;
const SAMPLE_BYTES: usize = 10_000;
const BATCH_SIZE: usize = 64;
/// Milliseconds that a state may take to be put back.
const ALLOWED: f64 = 50.0;
const IS_ALLOWED: &str = "the 50 ms allowed";
const FROM_THE_START: &str = "the first batch of an epoch";

/// What is timed of a state that is put back.
#[derive(Clone, Copy, PartialEq)]
enum Until {
    /// Workers have begun.
    Begun,
    FirstBatch,
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let path = lmdb::make(&bench.work, "index", ENTRIES, 100)?;
    let entries = Arc::new(LmdbDataset::builder(&path).index_file(path.with_extension("mdb.index")).open()?);
    let sizes = |values: Vec<LmdbSample>| Ok(values.iter().map(|sample| sample.value().len()).collect::<Vec<_>>());
    let what = "1.2 million entries, shuffled, half an epoch in, batch 64, 2 workers";
    rows(bench, what, ENTRIES / BATCH_SIZE / 2, Until::FirstBatch, || {
        let builder = DataLoader::builder(entries.clone()).batch_size(BATCH_SIZE).shuffle(true).num_workers(WORKERS);
        builder.collate(sizes).build()
    })?;

    let shards = write_shards(&bench.work)?;
    let dataset = WebDataset::open(&format!("{}/*.tar", shown(&shards)))?;
    let what =
        "tar shards of 5,000 samples of 10 kB, 4 side by side, mixed by 500, an eighth to go, batch 64, 2 workers";
    let batches = SHARDS * SAMPLES_A_SHARD / BATCH_SIZE * 7 / 8;
    rows(bench, what, batches, Until::FirstBatch, || {
        let builder = DataLoader::stream(dataset.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
        let builder = builder.shuffle(true).interleave(4).shuffle_buffer(500);
        builder.collate(|samples: Vec<WebSample>| Ok(samples)).build()
    })?;

    let what = "photographs decoded and cropped, half an epoch in, batch 64, 2 workers";
    let Some(photos) = bench.photos(what) else { return Ok(()) };
    let folder = Arc::new(EncodedImageFolder::open(&photos)?);
    rows(bench, what, folder.len() / BATCH_SIZE / 2, Until::Begun, || images::loader(&folder, BATCH_SIZE, WORKERS))
}

/// Compares a loader that goes on after `batches` batches with what is allowed up to `limited`, and with a beginning.
fn rows<B: Send + 'static>(
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
            epoch.next().context("no batch at all")??;
        }
        Ok(1e3 * started.elapsed().as_secs_f64())
    };
    let first = Cell::new(0);
    let mut turns = Turns::default();
    turns.ours("begun", || resumed(Until::Begun));
    turns.ours("first batch", || resumed(Until::FirstBatch));
    turns.limit(FROM_THE_START, || {
        let loader = make()?;
        // Other shards and entries each time, as after a state.
        loader.set_epoch(first.replace(first.get() + 1));
        let started = Instant::now();
        loader.iter().next().context("no batch at all")??;
        Ok(1e3 * started.elapsed().as_secs_f64())
    });
    turns.limit(IS_ALLOWED, || Ok(ALLOWED));
    turns.take(&format!("resume, {what}"), bench.pairs)?;
    let target = |of| (of == limited).then_some(Target::AtMost(1.0));
    let texts = [
        (Until::Begun, "begun", format!("a state put back, and workers begun: {what}")),
        (Until::FirstBatch, "first batch", format!("a state put back, up to the first batch: {what}")),
    ];
    for (until, ours, text) in &texts {
        let case = Case { text, unit: "ms", ratio: Ratio::ShareOfCost };
        turns.compare(&mut bench.findings, case, (ours, IS_ALLOWED), target(*until))?;
    }
    let case = Case { text: &texts[1].2, unit: "ms", ratio: Ratio::ShareOfCost };
    turns.compare(&mut bench.findings, case, ("first batch", FROM_THE_START), None)
}

/// The state of a loader whose training loop has had so many batches.
fn state_after<B: Send + 'static>(loader: &DataLoader<B>, batches: usize) -> Result<StateDict> {
    let mut epoch = loader.iter();
    for _ in 0..batches {
        epoch.next().context("an epoch that is too short")??;
    }
    let state = loader.state_dict()?;
    let bytes: usize = state.iter().map(|(key, entry)| key.len() + format!("{entry:?}").len()).sum();
    eprintln!("resume: after {batches} batches, a state of {bytes} bytes when written as text");
    Ok(state)
}

/// The folder of shards below `work`.
fn write_shards(work: &Path) -> Result<PathBuf> {
    let folder = work.join("resume");
    if folder.is_dir() {
        return Ok(folder);
    }
    let aside = tempfile::tempdir_in(work)?;
    let made = aside.path().join("resume");
    std::fs::create_dir(&made)?;
    let mut writer =
        WebDatasetWriter::builder(format!("{}/%04d.tar", shown(&made))).max_count(SAMPLES_A_SHARD as u64).build()?;
    for number in 0..SHARDS * SAMPLES_A_SHARD {
        let bytes: Vec<u8> = (0..SAMPLE_BYTES).map(|position| (position * 31 + number) as u8).collect();
        writer.write(&format!("{number:08}"), &[("jpg", &bytes[..]), ("cls", &b"0"[..])])?;
    }
    writer.finish()?;
    std::fs::rename(&made, &folder)?;
    Ok(folder)
}
