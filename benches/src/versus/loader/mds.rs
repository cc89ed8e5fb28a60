//! Reading undecoded samples of MDS shards, which are in the page cache.

use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{DataLoader, IterableDataset, MdsDataset, MdsSample};
use overdrive_bench_report::Ratio;
use serde_json::json;

use super::{Bench, WORKERS, path_text};
use crate::versus::turns::{Case, Turns};

const ONE: &str = "undecoded 40 kB samples of cached MDS shards, read by one thread";
const TWO: &str = "undecoded 40 kB samples of cached MDS shards, 2 workers, batch 64";
const SAMPLES: usize = 4000;
const SHARDS: usize = 8;
const BYTES: usize = 40_000;
const BATCH_SIZE: usize = 64;
pub const PEER: &str = "mosaicml-streaming";
/// What it imports when it reads.
pub const MODULES: [&str; 7] = ["brotli", "catalogue", "snappy", "tqdm", "transformers", "xxhash", "zstd"];
pub const PACKAGES: [&str; 7] = ["brotli", "catalogue", "python-snappy", "tqdm", "transformers", "xxhash", "zstd"];
const REMEDY: &str = "pip install mosaicml-streaming";

pub fn measure(bench: &mut Bench) -> Result<()> {
    let folder = bench.work.join("mds");
    let options = json!({
        "folder": path_text(&folder), "samples": SAMPLES, "samples_a_shard": SAMPLES / SHARDS, "bytes": BYTES,
        "batch_size": BATCH_SIZE, "workers": WORKERS,
    });
    // The peer also writes the shards, so without the peer there is nothing to read.
    let program = bench.packaged(PEER, include_str!("../../../peers/loader_mds.py"), &options, REMEDY);
    if let Some(reason) = program.reason() {
        bench.missing(ONE, PEER, reason);
        return Ok(());
    }
    let dataset = MdsDataset::open(&folder)?;
    let builder = DataLoader::stream(dataset.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
    let loader = builder.collate(|samples: Vec<MdsSample>| Ok(samples)).build()?;

    let samples = SAMPLES as f64;
    let mut turns = Turns::default();
    turns.ours("one thread", || {
        rate(|| dataset.stream(0..dataset.shards()).try_fold(0, |seen, sample| Ok(seen + complete(&sample?)?)))
    });
    turns.peer("StreamingDataset, one process", &program, |peer| Ok(samples / peer.measure("one", 1)?));
    turns.ours("2 workers", || {
        rate(|| {
            let add = |seen, sample: &MdsSample| Ok(seen + complete(sample)?);
            loader.iter().try_fold(0, |seen, batch| batch?.iter().try_fold(seen, add))
        })
    });
    turns.peer("StreamingDataset in a DataLoader, 2 workers", &program, |peer| {
        Ok(samples / peer.measure("workers", 1)?)
    });
    turns.take("mds", bench.pairs)?;

    let case = |text| Case { text, unit: "samples/s", ratio: Ratio::TimesFasterByRate };
    turns.compare(&mut bench.findings, case(ONE), ("one thread", "StreamingDataset, one process"), None)?;
    turns.compare(&mut bench.findings, case(TWO), ("2 workers", "StreamingDataset in a DataLoader, 2 workers"), None)
}

/// Checks that a sample has its image, and returns 1 to count it.
fn complete(sample: &MdsSample) -> Result<usize> {
    let is_whole = sample.raw("jpg").is_some_and(|jpg| jpg.len() == BYTES);
    ensure!(is_whole, "byte {} of {}: no jpg of {BYTES} bytes", sample.offset(), sample.shard().display());
    Ok(1)
}

/// Samples per second.
fn rate(epoch: impl FnOnce() -> Result<usize>) -> Result<f64> {
    let started = Instant::now();
    let seen = epoch()?;
    ensure!(seen == SAMPLES, "{seen} of {SAMPLES} samples");
    Ok(seen as f64 / started.elapsed().as_secs_f64())
}
