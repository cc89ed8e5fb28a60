//! Reading undecoded samples of tar shards, which are in the page cache.

use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{DataLoader, IterableDataset, WebDataset, WebSample};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::{Bench, WORKERS, path_text};
use crate::versus::turns::{Case, Turns};

const ONE: &str = "undecoded 40 kB samples of cached tar shards, read by one thread";
const TWO: &str = "undecoded 40 kB samples of cached tar shards, 2 workers, batch 64";
const SAMPLES: usize = 4000;
const SAMPLES_A_SHARD: usize = 500;
const BYTES: usize = 40_000;
const BATCH_SIZE: usize = 64;
const TARGET: Option<Target> = Some(Target::AtLeast(10.0));
const REMEDY: &str = "pip install webdataset";

pub fn measure(bench: &mut Bench) -> Result<()> {
    let folder = bench.work.join("shards");
    let options = json!({
        "folder": path_text(&folder), "samples": SAMPLES, "samples_a_shard": SAMPLES_A_SHARD, "bytes": BYTES,
        "batch_size": BATCH_SIZE, "workers": WORKERS,
    });
    // The peer also writes the shards, so without the peer there is nothing to read.
    let program = bench.packaged("webdataset", include_str!("../../../peers/loader_shards.py"), &options, REMEDY);
    if let Some(reason) = program.reason() {
        bench.missing(ONE, "webdataset", reason);
        return Ok(());
    }
    let dataset = WebDataset::open(&format!("{}/*.tar", path_text(&folder)))?;
    let collate = |samples: Vec<WebSample>| Ok(samples);
    let builder = DataLoader::stream(dataset.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
    let loader = builder.collate(collate).build()?;

    let samples = SAMPLES as f64;
    let mut turns = Turns::default();
    turns.ours("one thread", || {
        rate(|| dataset.stream(0..dataset.shards()).try_fold(0, |seen, sample| Ok(seen + complete(&sample?)?)))
    });
    turns.peer("webdataset, one process", &program, |peer| Ok(samples / peer.measure("one", 1)?));
    turns.ours("2 workers", || {
        rate(|| {
            loader.iter().try_fold(0, |seen, batch| batch?.iter().try_fold(seen, |seen, one| Ok(seen + complete(one)?)))
        })
    });
    turns.peer("webdataset's WebLoader, 2 workers", &program, |peer| Ok(samples / peer.measure("workers", 1)?));
    turns.take("shards", bench.pairs)?;

    let case = |text| Case { text, unit: "samples/s", ratio: Ratio::TimesFasterByRate };
    turns.compare(&mut bench.findings, case(ONE), ("one thread", "webdataset, one process"), TARGET)?;
    turns.compare(&mut bench.findings, case(TWO), ("2 workers", "webdataset's WebLoader, 2 workers"), TARGET)
}

/// Checks that a sample has its image, and returns 1 to count it.
fn complete(sample: &WebSample) -> Result<usize> {
    ensure!(sample.get("jpg").is_some_and(|jpg| jpg.len() == BYTES), "{}: no jpg of {BYTES} bytes", sample.key());
    Ok(1)
}

/// Samples per second.
fn rate(epoch: impl FnOnce() -> Result<usize>) -> Result<f64> {
    let started = Instant::now();
    let seen = epoch()?;
    ensure!(seen == SAMPLES, "{seen} of {SAMPLES} samples");
    Ok(seen as f64 / started.elapsed().as_secs_f64())
}
