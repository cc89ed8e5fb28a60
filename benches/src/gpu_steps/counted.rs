//! What a step costs, as the stand-in counts it.

use anyhow::{Result, bail};
use overdrive::tch::Device;
use overdrive_fakecuda::{Counts, Fake};
use serde::{Deserialize, Serialize};

use super::ours::Step;
use super::{Recipe, ours, plain_tch};

/// Steps before the counted ones, in which state is allocated; and the counted ones.
const WARM_UP: usize = 4;
const STEPS: u64 = 4;

/// The counts of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Kernels, those of libraries among them.
    pub launches: f64,
    /// How often the host waited for the device.
    pub waits: f64,
    /// Bytes from the host to the device.
    pub uploaded: f64,
    /// Allocations from the driver: of the device, and of pinned memory.
    pub allocations: f64,
    /// Events created.
    pub events: f64,
}

impl Counted {
    /// From the counts of several steps.
    pub fn of(counts: &Counts, steps: u64) -> Self {
        let sum = |matches: &dyn Fn(&str) -> bool| {
            counts.iter().filter(|(name, _)| matches(name)).map(|(_, times)| *times).sum::<u64>() as f64 / steps as f64
        };
        Self {
            launches: sum(&|name| name == "launches"),
            waits: sum(&|name| name.starts_with("waits for ") || name == "copies that wait"),
            uploaded: sum(&|name| name.starts_with("bytes host to device")),
            allocations: sum(&|name| name == "device allocations" || name == "pinned allocations"),
            events: sum(&|name| name == "events created"),
        }
    }
}

/// Counts a step of ours, and returns the loss of each step too.
///
/// # Errors
/// When this process does not run on the stand-ins, the step fails, or something reads what nobody has computed.
pub fn count(recipe: &Recipe) -> Result<(Counted, Vec<f64>)> {
    counted(recipe, ours::step(recipe, Device::Cuda(0))?)
}

/// Counts the same step by what tch has; `None` where it lacks something for it.
///
/// # Errors
/// As [`count`].
pub fn count_plain_tch(recipe: &Recipe) -> Result<Option<Counted>> {
    if !plain_tch::has(recipe) {
        return Ok(None);
    }
    Ok(Some(counted(recipe, plain_tch::step(recipe, Device::Cuda(0))?)?.0))
}

fn counted(recipe: &Recipe, mut step: Step) -> Result<(Counted, Vec<f64>)> {
    let Some(fake) = Fake::get() else { bail!("this process does not run on a fake device") };
    let mut losses = Vec::new();
    for _ in 0..WARM_UP {
        losses.push(step()?);
    }
    fake.reset();
    for _ in 0..STEPS {
        losses.push(step()?);
    }
    let counted = Counted::of(&fake.counts(), STEPS);
    let losses = losses.iter().map(|loss| loss.double_value(&[])).collect();
    match fake.notes().as_slice() {
        [] => Ok((counted, losses)),
        notes => bail!("{}: {}", recipe.name(), notes.join("; ")),
    }
}

/// The losses of the same steps on the host.
///
/// # Errors
/// When a step fails.
pub fn losses_on_host(recipe: &Recipe) -> Result<Vec<f64>> {
    let mut step = ours::step(recipe, Device::Cpu)?;
    (0..WARM_UP + STEPS as usize).map(|_| Ok(step()?.double_value(&[]))).collect()
}
