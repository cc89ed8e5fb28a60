//! Reading undecoded samples of tar shards, which are in the page cache.

use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{DataLoader, IterableDataset, WebDataset, WebSample};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::{Bench, WORKERS, path_text};
use crate::versus::turns::{Case, Turns};

/// Of a size of samples: the folder of its shards, their number, the rows' texts, and how many times faster ours should be.
struct Size {
    folder: &'static str,
    bytes: usize,
    samples: usize,
    one: &'static str,
    two: &'static str,
    target: f64,
}

const SIZES: [Size; 2] = [
    Size {
        folder: "shards",
        bytes: 40_000,
        samples: 4000,
        one: "undecoded 40 kB samples of cached tar shards, read by one thread",
        two: "undecoded 40 kB samples of cached tar shards, 2 workers, batch 64",
        target: 10.0,
    },
    Size {
        folder: "shards-150",
        bytes: 150_000,
        samples: 2000,
        one: "undecoded 150 kB samples of cached tar shards, read by one thread",
        two: "undecoded 150 kB samples of cached tar shards, 2 workers, batch 64",
        target: 5.0,
    },
];
/// Each size has eight.
const SHARDS: usize = 8;
const BATCH_SIZE: usize = 64;
const REMEDY: &str = "pip install webdataset";

pub fn measure(bench: &mut Bench) -> Result<()> {
    SIZES.iter().try_for_each(|size| measure_size(bench, size))
}

fn measure_size(bench: &mut Bench, size: &Size) -> Result<()> {
    let folder = bench.work.join(size.folder);
    let options = json!({
        "folder": path_text(&folder), "samples": size.samples, "samples_a_shard": size.samples / SHARDS,
        "bytes": size.bytes, "batch_size": BATCH_SIZE, "workers": WORKERS,
    });
    // The peer also writes the shards, so without the peer there is nothing to read.
    let program = bench.packaged("webdataset", include_str!("../../../peers/loader_shards.py"), &options, REMEDY);
    if let Some(reason) = program.reason() {
        bench.missing(size.one, "webdataset", reason);
        return Ok(());
    }
    let dataset = WebDataset::open(&format!("{}/*.tar", path_text(&folder)))?;
    let collate = |samples: Vec<WebSample>| Ok(samples);
    let builder = DataLoader::stream(dataset.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
    let loader = builder.collate(collate).build()?;

    let samples = size.samples as f64;
    let mut turns = Turns::default();
    turns.ours("one thread", || {
        size.rate(|| {
            dataset.stream(0..dataset.shards()).try_fold(0, |seen, sample| Ok(seen + size.complete(&sample?)?))
        })
    });
    turns.peer("webdataset, one process", &program, |peer| Ok(samples / peer.measure("one", 1)?));
    turns.ours("2 workers", || {
        size.rate(|| {
            let complete = |seen, one: &WebSample| Ok(seen + size.complete(one)?);
            loader.iter().try_fold(0, |seen, batch| batch?.iter().try_fold(seen, complete))
        })
    });
    turns.peer("webdataset's WebLoader, 2 workers", &program, |peer| Ok(samples / peer.measure("workers", 1)?));
    turns.take(size.folder, bench.pairs)?;

    let case = |text| Case { text, unit: "samples/s", ratio: Ratio::TimesFasterByRate };
    let (findings, target) = (&mut bench.findings, Some(Target::AtLeast(size.target)));
    turns.compare(findings, case(size.one), ("one thread", "webdataset, one process"), target)?;
    turns.compare(findings, case(size.two), ("2 workers", "webdataset's WebLoader, 2 workers"), target)
}

impl Size {
    /// Checks that a sample has its image, and returns 1 to count it.
    fn complete(&self, sample: &WebSample) -> Result<usize> {
        let is_whole = sample.get("jpg").is_some_and(|jpg| jpg.len() == self.bytes);
        ensure!(is_whole, "{}: no jpg of {} bytes", sample.key(), self.bytes);
        Ok(1)
    }

    /// Samples per second.
    fn rate(&self, epoch: impl FnOnce() -> Result<usize>) -> Result<f64> {
        let started = Instant::now();
        let seen = epoch()?;
        ensure!(seen == self.samples, "{seen} of {} samples", self.samples);
        Ok(seen as f64 / started.elapsed().as_secs_f64())
    }
}
