//! Reading numeric columns of a Parquet file, which is in the page cache, as tensors.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{DataLoader, ParquetDataset, Table};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::{Bench, WORKERS, path_text};
use crate::versus::turns::{Case, Program, Turns};

const TABLE: &str = "1,000,000 rows of 8 numeric Parquet columns as tensors, all cores";
const BATCHES: &str = "the same in shuffled batches of 1024, row group by row group";
const ORDERED: &str = "1,000,000 rows of 16 float32 Parquet columns through DataLoader, 2 workers, batch 1024";
const SHUFFLED: &str = "the same shuffled, row group by row group";
const ROWS: usize = 1_000_000;
const ROW_GROUP: usize = 50_000;
const BATCH_SIZE: usize = 1024;
const TABLE_PEER: &str = "pyarrow's table to torch";
const GROUPS_PEER: &str = "pyarrow's row groups to torch";
/// Readings per sample, which then takes some tenths of a second.
const TIMES: u32 = 4;

pub fn measure(bench: &mut Bench) -> Result<()> {
    numbers(bench)?;
    floats(bench)
}

/// Four columns of float32 and four of int64, without a loader.
fn numbers(bench: &mut Bench) -> Result<()> {
    let (path, program) = pyarrow(bench, "numbers", [4, 4]);
    if let Some(reason) = program.reason() {
        bench.missing(TABLE, TABLE_PEER, reason);
        return Ok(());
    }
    let dataset = ParquetDataset::open(&path_text(&path))?;
    let batches = dataset.batches(BATCH_SIZE)?.shuffle(true).window(1);
    let epoch = Cell::new(0);

    let mut turns = Turns::default();
    turns.ours("table", || rate(|| rows(&dataset.read()?)));
    turns.peer(TABLE_PEER, &program, |peer| Ok(peer_rate(peer.measure("table", TIMES)?)));
    turns.ours("batches", || {
        rate(|| {
            let number = epoch.replace(epoch.get() + 1);
            batches.epoch(number).try_fold(0, |seen, batch| Ok(seen + rows(&batch?)?))
        })
    });
    turns.peer(GROUPS_PEER, &program, |peer| Ok(peer_rate(peer.measure("shuffled", TIMES)?)));
    turns.take("parquet", bench.pairs)?;
    let findings = &mut bench.findings;
    turns.compare(findings, case(TABLE), ("table", TABLE_PEER), Some(Target::AtLeast(1.0)))?;
    turns.compare(findings, case(BATCHES), ("batches", GROUPS_PEER), Some(Target::AtLeast(1.5)))
}

/// Sixteen columns of float32, through the loader.
fn floats(bench: &mut Bench) -> Result<()> {
    let (path, program) = pyarrow(bench, "floats", [16, 0]);
    if let Some(reason) = program.reason() {
        bench.missing(ORDERED, GROUPS_PEER, reason);
        return Ok(());
    }
    let dataset = ParquetDataset::open(&path_text(&path))?;
    let batches = || dataset.batches(BATCH_SIZE);
    let ordered = batches()?.loader().num_workers(WORKERS).build()?;
    let shuffled = batches()?.shuffle(true).window(1).loader().num_workers(WORKERS).build()?;

    let mut turns = Turns::default();
    for (name, loader) in [("ordered", &ordered), ("shuffled", &shuffled)] {
        turns.ours(name, || rate(|| epoch(loader)));
        let peer_name = format!("{GROUPS_PEER}{}", if name == "shuffled" { " " } else { "" });
        turns.peer(&peer_name, &program, move |peer| Ok(peer_rate(peer.measure(name, TIMES)?)));
    }
    turns.take("parquet through the loader", bench.pairs)?;
    let findings = &mut bench.findings;
    turns.compare(findings, case(ORDERED), ("ordered", GROUPS_PEER), Some(Target::AtLeast(1.0)))?;
    turns.compare(findings, case(SHUFFLED), ("shuffled", &format!("{GROUPS_PEER} ")), Some(Target::AtLeast(1.5)))
}

/// A file of so many columns of float32 and int64, and the peer, which writes it: without the peer there is nothing to
/// read.
fn pyarrow(bench: &mut Bench, name: &str, [floats, integers]: [usize; 2]) -> (PathBuf, Program) {
    let path = bench.work.join(format!("{name}.parquet"));
    let options = json!({
        "path": path_text(&path), "rows": ROWS, "row_group": ROW_GROUP, "batch_size": BATCH_SIZE,
        "floats": floats, "integers": integers,
    });
    let source = include_str!("../../../peers/loader_parquet.py");
    let program = bench.packaged("pyarrow", source, &options, "pip install pyarrow");
    (path, program)
}

fn case(text: &str) -> Case<'_> {
    Case { text, unit: "rows/s", ratio: Ratio::TimesFasterByRate }
}

fn epoch(loader: &DataLoader<Table>) -> Result<i64> {
    loader.iter().try_fold(0, |seen, batch| Ok(seen + rows(&batch?)?))
}

fn rows(table: &Table) -> Result<i64> {
    Ok(table.tensor("float0")?.size()[0])
}

fn peer_rate(seconds: f64) -> f64 {
    ROWS as f64 * f64::from(TIMES) / seconds
}

/// Rows per second.
fn rate(mut read: impl FnMut() -> Result<i64>) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..TIMES {
        let rows = read()?;
        ensure!(rows == ROWS as i64, "{rows} of {ROWS} rows");
    }
    Ok(peer_rate(started.elapsed().as_secs_f64()))
}
