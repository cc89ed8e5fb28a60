//! Runs of loops in processes of their own: memory, threads and the profiler are then the run's alone.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use overdrive_launch::Launch;
use overdrive_profile::RunProfile;
use serde::{Deserialize, Serialize};

use super::{Form, HEALTHY, PLANTS, Plan, Plant};

/// The variable that tells a process what to run.
const ORDER: &str = "OVERDRIVE_PLANT";

#[derive(Serialize, Deserialize)]
struct Order {
    name: String,
    form: Form,
    plan: Plan,
    /// Where the records go.
    folder: PathBuf,
}

/// What this process does if [`Plant::record`] has started it. First in the `main` of each program that calls that.
pub fn main_if_told() -> Option<Result<()>> {
    overdrive_launch::helper();
    let order = std::env::var(ORDER).ok()?;
    Some(run(&order))
}

fn run(order: &str) -> Result<()> {
    let order: Order = serde_json::from_str(order).with_context(|| format!("{ORDER} is not one of this program's"))?;
    let mut plants = PLANTS.iter().chain(&HEALTHY);
    let plant = plants.find(|plant| plant.name == order.name).with_context(|| format!("no loop {}", order.name))?;
    // One thread computes, so that loaders and ranks find a core on small machines too.
    tch::set_num_threads(1);
    tch::manual_seed(0);
    let run = (plant.run)(order.form, &order.plan)?;
    Ok(run.write_json(record_of(&order.folder, run.rank))?)
}

fn record_of(folder: &Path, rank: u64) -> PathBuf {
    folder.join(format!("profile.rank{rank}.json"))
}

impl Plant {
    /// Runs it in processes of its own, and returns the record of all ranks.
    ///
    /// # Errors
    /// When a process cannot be started, or fails.
    pub fn record(&self, form: Form) -> Result<RunProfile> {
        let folder = tempfile::tempdir()?;
        let order = Order { name: self.name.to_owned(), form, plan: self.plan(), folder: folder.path().to_owned() };
        let ranks = self.needs.processes();
        let launch = Launch::current_program().nproc(ranks).env(ORDER, serde_json::to_string(&order)?);
        launch.run().with_context(|| format!("{}, {form:?}", self.name))?;
        let runs = (0..ranks as u64).map(|rank| RunProfile::read_json(record_of(folder.path(), rank)));
        Ok(RunProfile::merge_ranks(runs.collect::<Result<_, _>>()?)?)
    }
}
