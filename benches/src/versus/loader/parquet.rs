//! Reading numeric columns of a Parquet file, which is in the page cache, as tensors.

use std::cell::Cell;
use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::ParquetDataset;
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::{Bench, path_text};
use crate::versus::turns::{Case, Turns};

const TABLE: &str = "1,000,000 rows of 8 numeric Parquet columns as tensors, all cores";
const BATCHES: &str = "the same in shuffled batches of 1024, row group by row group";
const ROWS: usize = 1_000_000;
const ROW_GROUP: usize = 50_000;
const BATCH_SIZE: usize = 1024;
const PEER: &str = "pyarrow to torch";
/// Readings per sample, which then takes some tenths of a second.
const TIMES: u32 = 4;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let path = bench.work.join("numbers.parquet");
    let options = json!({ "path": path_text(&path), "rows": ROWS, "row_group": ROW_GROUP, "batch_size": BATCH_SIZE });
    // The peer also writes the file, so without the peer there is nothing to read.
    let source = include_str!("../../../peers/loader_parquet.py");
    let program = bench.packaged("pyarrow", source, &options, "pip install pyarrow");
    if let Some(reason) = program.reason() {
        bench.missing(TABLE, PEER, reason);
        return Ok(());
    }
    let dataset = ParquetDataset::open(&path_text(&path))?;
    let batches = dataset.batches(BATCH_SIZE)?.shuffle(true).window(1);
    let epoch = Cell::new(0);

    let peer_rate = |seconds: f64| ROWS as f64 * f64::from(TIMES) / seconds;
    let mut turns = Turns::default();
    turns.ours("table", || rate(|| Ok(dataset.read()?.tensor("integer0")?.size()[0])));
    turns.peer("pyarrow's table to torch", &program, |peer| Ok(peer_rate(peer.measure("table", TIMES)?)));
    turns.ours("batches", || {
        rate(|| {
            let number = epoch.replace(epoch.get() + 1);
            batches.epoch(number).try_fold(0, |rows, batch| Ok(rows + batch?.tensor("integer0")?.size()[0]))
        })
    });
    turns.peer("pyarrow's row groups to torch", &program, |peer| Ok(peer_rate(peer.measure("batches", TIMES)?)));
    turns.take("parquet", bench.pairs)?;
    let case = |text| Case { text, unit: "rows/s", ratio: Ratio::TimesFasterByRate };
    let findings = &mut bench.findings;
    turns.compare(findings, case(TABLE), ("table", "pyarrow's table to torch"), Some(Target::AtLeast(1.0)))?;
    turns.compare(findings, case(BATCHES), ("batches", "pyarrow's row groups to torch"), Some(Target::AtLeast(1.5)))
}

/// Rows per second.
fn rate(mut read: impl FnMut() -> Result<i64>) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..TIMES {
        let rows = read()?;
        ensure!(rows == ROWS as i64, "{rows} of {ROWS} rows");
    }
    Ok(ROWS as f64 * f64::from(TIMES) / started.elapsed().as_secs_f64())
}
