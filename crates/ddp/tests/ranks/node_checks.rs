//! Checks of hosts: what a healthy one reaches, and what is said of one that is not.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive_ddp::{DdpError, NodeCheckOptions, check_node};
use overdrive_launch::{Launch, LaunchError};

use crate::harness::Meeting;

const SMALL: NodeCheckOptions =
    NodeCheckOptions { memory_mib: 40, compute: Duration::ZERO, side: 64, least_gflops: 0.0, least_mb_per_second: 0.0 };

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let report = check_node(&group, &SMALL)?;
    ensure!(report.gflops > 0.0 && report.mb_per_second > 0.0, "{report:?}");
    for (options, what) in [
        (NodeCheckOptions { least_gflops: 1e15, ..SMALL }, "GFLOP/s in products of matrices, and at least"),
        (NodeCheckOptions { least_mb_per_second: 1e15, ..SMALL }, "MB/s in an all-reduce, and at least"),
        (NodeCheckOptions { memory_mib: 1 << 40, ..SMALL }, "MiB of memory"),
        (NodeCheckOptions { memory_mib: usize::MAX, ..SMALL }, "more than any device has"),
    ] {
        let error = check_node(&group, &options).err().with_context(|| format!("{options:?} are met"))?;
        let is_meant = matches!(error, DdpError::UnfitNode { .. }) && error.to_string().contains(what);
        ensure!(is_meant, "{error}");
    }
    Ok(group.close()?)
}

/// The program, as a launcher runs it before the ranks.
pub fn by_a_launcher() -> Result<()> {
    let program = env!("CARGO_BIN_EXE_overdrive-node-check");
    let run = |more: &[&str]| {
        let options = [&["--backend", "gloo", "--memory-mib", "8", "--seconds", "0"], more].concat();
        Launch::new("true").nproc(2).node_check(program, options).run()
    };
    run(&[])?;
    match run(&["--least-gflops", "1e15"]) {
        Err(LaunchError::NodeUnfit(why)) if why.contains("GFLOP/s in products of matrices") => Ok(()),
        other => anyhow::bail!("a host that is too slow: {other:?}"),
    }
}
