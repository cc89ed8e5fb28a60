//! Record batches of Arrow in memory, as tensors that take their buffers over.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use arrow_array::{ArrayRef, Float32Array, RecordBatch};
use overdrive::dataload::ArrowColumns;
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;

use super::Bench;
use crate::versus::turns::{Case, Turns};

const CASE: &str = "a record batch of 16 float32 columns of 1024 rows to tensors, without a copy";
const COLUMNS: usize = 16;
const ROWS: usize = 1024;
/// Batches per sample.
const BATCHES: u32 = 5000;
/// Microseconds.
const LIMIT: f64 = 10.0;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let options = json!({ "columns": COLUMNS, "rows": ROWS });
    let source = include_str!("../../../peers/loader_arrow.py");
    let program = bench.packaged("pyarrow", source, &options, "pip install pyarrow");
    let mut turns = Turns::default();
    turns.ours("ours", convert);
    turns.peer("pyarrow and torch.from_numpy", &program, |peer| {
        Ok(1e6 * peer.measure("convert", BATCHES)? / f64::from(BATCHES))
    });
    turns.ours("10 us a batch", || Ok(LIMIT));
    turns.take("arrow", bench.pairs)?;
    let case = |ratio| Case { text: CASE, unit: "us", ratio };
    let findings = &mut bench.findings;
    let faster = case(Ratio::TimesFasterByTime);
    turns.compare(findings, faster, ("ours", "pyarrow and torch.from_numpy"), Some(Target::AtLeast(1.0)))?;
    turns.compare(findings, case(Ratio::ShareOfCost), ("ours", "10 us a batch"), Some(Target::AtMost(1.0)))
}

/// Microseconds per batch. Nothing else has the batches' buffers; making and freeing them is not timed.
fn convert() -> Result<f64> {
    let batches = (0..BATCHES).map(|_| batch()).collect::<Result<Vec<_>>>()?;
    let columns = ArrowColumns::new(batches[0].schema_ref());
    let address = |batch: &RecordBatch| Some(batch.column(0).to_data().buffers().first()?.as_ptr() as usize);
    let before = address(&batches[0]).context("a column has a buffer")?;
    let started = Instant::now();
    let tables = batches.into_iter().map(|batch| columns.table(batch)).collect::<Result<Vec<_>, _>>()?;
    let seconds = started.elapsed().as_secs_f64();
    ensure!(tables[0].tensor("column0")?.data_ptr() as usize == before, "the buffers were copied");
    Ok(1e6 * seconds / f64::from(BATCHES))
}

fn batch() -> Result<RecordBatch> {
    let column = |number| {
        let values: ArrayRef = Arc::new(Float32Array::from_iter_values((0..ROWS).map(|row| row as f32)));
        (format!("column{number}"), values)
    };
    Ok(RecordBatch::try_from_iter((0..COLUMNS).map(column))?)
}
