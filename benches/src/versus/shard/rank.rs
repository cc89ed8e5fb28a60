//! A rank of `versus shard`, which measures on request, together with the others.

use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::ffi::host_memory;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, InitMethod, ProcessGroup, ReduceOp, init_process_group};

use super::run::{self, Run, Shape};
use crate::versus::memory::disk::told_by_system;

/// Answers each line `WHAT-WAY-DETAIL NUMBER` with what it measures:
///
/// - `peak` and `resident`: the most bytes of a rank in steps of a model with so many large blocks, `DETAIL` the dtype
/// - `capped`: 1 if so many small blocks can be trained with `DETAIL` bytes, 0 if memory runs out
/// - `step`: the seconds of so many steps of an MLP
pub fn serve() -> Result<()> {
    tch::set_num_threads(1);
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    println!("{}", env!("CARGO_PKG_VERSION"));
    let mut trained = BTreeMap::new();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let (name, number) = line.split_once(' ').context("expected a name and a number")?;
        let number: u32 = number.parse()?;
        let parts: Vec<&str> = name.split('-').collect();
        let [what, way, detail] = parts[..] else { anyhow::bail!("expected WHAT-WAY-DETAIL, not {name}") };
        let answer = match what {
            "step" => {
                if !trained.contains_key(way) {
                    let mut run = Run::new(&group, way, Shape::mlp(), Kind::Float)?;
                    // Until units are gathered ahead, and optimizers have their state.
                    (0..3).try_for_each(|_| run.step())?;
                    trained.insert(way.to_owned(), run);
                }
                let run = trained.get_mut(way).context("no training")?;
                group.barrier()?;
                let begun = Instant::now();
                (0..number).try_for_each(|_| run.step())?;
                begun.elapsed().as_secs_f64()
            }
            "capped" => capped(&group, way, detail.parse()?, number)?,
            _ => {
                let kind = if detail == "float" { Kind::Float } else { Kind::BFloat16 };
                host_memory::count(usize::MAX)?;
                let mut run = Run::new(&group, way, Shape::blocks(run::WIDTH, number), kind)?;
                (0..3).try_for_each(|_| run.step())?;
                let own = if what == "peak" {
                    host_memory::stats()?.peak as f64
                } else {
                    told_by_system("status", "VmHWM:")? as f64 * 1024.0
                };
                largest(&group, own)?
            }
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// Whether the blocks can be trained. A failure of one rank is one of all.
fn capped(group: &ProcessGroup, way: &str, bytes: usize, blocks: u32) -> Result<f64> {
    host_memory::count(bytes)?;
    let trained = Run::new(group, way, Shape::blocks(run::NARROW, blocks), Kind::Float)
        .and_then(|mut run| (0..2).try_for_each(|_| run.step()));
    if let Err(error) = trained {
        // Of this rank or of another one, which has told.
        let text = format!("{error:#}");
        ensure!(host_memory::stats()?.refused > 0 || text.contains("bytes and may have"), "{blocks} blocks: {text}");
        // The others may wait for this rank: it answers for all, and ends.
        println!("0");
        std::io::stdout().flush()?;
        // Without the frames that libtorch adds.
        eprintln!("{blocks} blocks: {}", text.lines().next().unwrap_or_default());
        std::process::exit(0);
    }
    Ok(1.0)
}

fn largest(group: &ProcessGroup, own: f64) -> Result<f64> {
    let mut all = Tensor::from(own);
    group.all_reduce(&mut all, ReduceOp::Max)?;
    Ok(all.double_value(&[]))
}
