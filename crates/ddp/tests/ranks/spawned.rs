//! `spawn`: this program starts itself again.

use std::process::{Command, Output};

use anyhow::{Result, ensure};
use overdrive_ddp::{Backend, InitMethod, ReduceOp, init_process_group, spawn};
use tch::Tensor;

const TOLD: &str = "OVERDRIVE_TEST_SPAWN";

/// `main` of a process with `TOLD` set: it spawns ranks, and is run again as each of them.
pub fn main_if_told() -> Option<Result<()>> {
    let how = std::env::var(TOLD).ok()?;
    let spawned = spawn(2, || {
        let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
        let mut sum = Tensor::from(group.rank() as i64 + 1);
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        println!("the sum is {}", sum.int64_value(&[]));
        ensure!(how == "well" || group.rank() == 0, "rank 1 was told to fail");
        // Ended by the launcher when rank 1 fails.
        let end = if how == "well" { 0 } else { 120 };
        std::thread::sleep(std::time::Duration::from_secs(end));
        Ok(())
    });
    Some(spawned.map_err(anyhow::Error::from))
}

fn run(how: &str) -> Result<(Output, String)> {
    let output = Command::new(std::env::current_exe()?).env(TOLD, how).env("OMP_NUM_THREADS", "1").output()?;
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    Ok((output, said))
}

pub fn ranks_meet() -> Result<()> {
    let (output, said) = run("well")?;
    ensure!(output.status.success(), "{said}");
    for line in ["[rank0]: the sum is 3", "[rank1]: the sum is 3"] {
        ensure!(said.contains(line), "{said}");
    }
    Ok(())
}

pub fn a_failure_is_reported() -> Result<()> {
    let (output, said) = run("badly")?;
    ensure!(!output.status.success(), "{said}");
    ensure!(said.contains("rank 1") && said.contains("rank 1 was told to fail"), "{said}");
    Ok(())
}
