//! Runs a training loop, one with a planted bottleneck or a healthy one, in its own processes, so that memory, threads
//! and the profiler belong to that run alone.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use overdrive_launch::Launch;
use overdrive_profile::RunProfile;
use serde::{Deserialize, Serialize};

use super::{Form, HEALTHY, PLANTS, Plan, Plant};

/// The environment variable that tells a process which loop to run: a [`Job`] as JSON.
const JOB: &str = "OVERDRIVE_PLANT";

#[derive(Serialize, Deserialize)]
struct Job {
    name: String,
    form: Form,
    plan: Plan,
    /// The folder for the records.
    folder: PathBuf,
}

/// If [`Plant::record`] started this process, runs the loop that it asks for; otherwise returns `None`.
///
/// [`Plant::record`] starts the program that calls it once more. So the `main` of every such program has to call this
/// first.
pub fn main_if_told() -> Option<Result<()>> {
    // Launchers start this program as their helper too; this does not return then.
    overdrive_launch::helper();
    let job = std::env::var(JOB).ok()?;
    Some(run(&job))
}

fn run(job: &str) -> Result<()> {
    let job: Job = serde_json::from_str(job).with_context(|| format!("{JOB} does not describe a loop to run"))?;
    let mut plants = PLANTS.iter().chain(&HEALTHY);
    let plant =
        plants.find(|plant| plant.name == job.name).with_context(|| format!("there is no loop {}", job.name))?;
    // Compute with one thread, which leaves a core to the loader's workers or the other rank on small machines.
    tch::set_num_threads(1);
    tch::manual_seed(0);
    let run = (plant.run)(job.form, &job.plan)?;
    Ok(run.write_json(record_path(&job.folder, run.rank))?)
}

fn record_path(folder: &Path, rank: u64) -> PathBuf {
    folder.join(format!("profile.rank{rank}.json"))
}

impl Plant {
    /// Runs the loop in its own processes, and returns the merged record of all ranks.
    ///
    /// # Errors
    /// When a process cannot be started or fails, or its record cannot be read.
    pub fn record(&self, form: Form) -> Result<RunProfile> {
        let folder = tempfile::tempdir()?;
        let job = Job { name: self.name.to_owned(), form, plan: self.plan(), folder: folder.path().to_owned() };
        let ranks = self.needs.processes();
        let launch = Launch::current_program().nproc(ranks).env(JOB, serde_json::to_string(&job)?);
        launch.run().with_context(|| format!("cannot record the loop {} ({form:?})", self.name))?;
        let runs = (0..ranks as u64).map(|rank| RunProfile::read_json(record_path(folder.path(), rank)));
        Ok(RunProfile::merge_ranks(runs.collect::<Result<_, _>>()?)?)
    }
}
