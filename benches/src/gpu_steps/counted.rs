//! What a step costs, as the stand-in counts it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail, ensure};
use overdrive::tch::Device;
use overdrive_fakecuda::{Counts, Fake, Pace, allocations, created, waits};
use serde::{Deserialize, Serialize};

use super::ours::{Fault, Kept};
use super::{Recipe, ours, plain_tch};

/// Steps before the counted ones, in which state is allocated; and the counted ones.
const WARM_UP: usize = 4;
const STEPS: u64 = 4;

/// The counts of one step.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counted {
    /// Kernels, those of libraries among them.
    pub launches: f64,
    /// Copies within the device, and fills: they cost the host as much as a kernel does.
    pub copies: f64,
    /// How often the host waited for the device.
    pub waits: f64,
    /// Bytes from the host to the device.
    pub uploaded: f64,
    /// Copies from the device to the host, also those for which it does not wait.
    pub reads: f64,
    /// Allocations from the driver: of the device, and of pinned memory.
    pub allocations: f64,
    /// Events and streams created.
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
            copies: sum(&|name| name == "copies device to device" || name == "fills"),
            waits: waits(counts) as f64 / steps as f64,
            uploaded: sum(&|name| name.starts_with("bytes host to device")),
            reads: sum(&|name| name.starts_with("copies device to host")),
            allocations: allocations(counts) as f64 / steps as f64,
            events: created(counts) as f64 / steps as f64,
        }
    }

    /// The smaller one of each count.
    pub fn least(&self, other: &Self) -> Self {
        Self {
            launches: self.launches.min(other.launches),
            copies: self.copies.min(other.copies),
            waits: self.waits.min(other.waits),
            uploaded: self.uploaded.min(other.uploaded),
            reads: self.reads.min(other.reads),
            allocations: self.allocations.min(other.allocations),
            events: self.events.min(other.events),
        }
    }
}

/// How far the distances that the weights have gone may be apart, as a share. One update that is missing or made twice
/// moves them by a tenth.
pub const DISTANCE_WITHIN: f64 = 1e-5;

/// What was found out about a step.
#[derive(Clone, Debug)]
pub struct Step {
    /// The counts of one.
    pub counted: Counted,
    /// The loss of each, also of those before the counted ones.
    pub losses: Vec<f64>,
    /// How far the weights are from where they began, after these steps.
    pub distance: f64,
    /// What else they have changed.
    pub kept: Kept,
    /// The operators that the stand-in has computed.
    pub operators: Vec<String>,
}

/// Counts a step of ours, once in a process.
///
/// # Errors
/// When this process does not run on the stand-ins, the step fails, or something reads what nobody has computed.
pub fn count(recipe: &Recipe) -> Result<Step> {
    static KNOWN: Mutex<BTreeMap<String, Step>> = Mutex::new(BTreeMap::new());
    let key = format!("{recipe:?}");
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(step) = known().get(&key) {
        return Ok(step.clone());
    }
    let step = counted(recipe, ours::step(recipe, Device::Cuda(0))?, true)?;
    known().insert(key, step.clone());
    Ok(step)
}

/// Counts the same step by what tch has; `None` where it lacks something for it.
///
/// # Errors
/// As [`count`].
pub fn count_plain_tch(recipe: &Recipe) -> Result<Option<Counted>> {
    if !plain_tch::has(recipe) {
        return Ok(None);
    }
    let step = counted(recipe, plain_tch::step(recipe, Device::Cuda(0))?, false)?;
    ensure!(step.distance > 0.0, "{}: plain tch has moved no weight", recipe.name());
    Ok(Some(step.counted))
}

/// How far two numbers are apart, as a share of the second one.
pub fn difference(ours: f64, theirs: f64) -> f64 {
    match ours == theirs {
        true => 0.0,
        false => Some(((ours - theirs) / theirs).abs()).filter(|it| it.is_finite()).unwrap_or(f64::INFINITY),
    }
}

/// The largest of the differences between numbers.
pub fn differences(ours: &[f64], theirs: &[f64]) -> f64 {
    ours.iter().zip(theirs).map(|(ours, theirs)| difference(*ours, *theirs)).fold(0.0, f64::max)
}

/// The distance and what else was changed, with a fault in the first counted step.
///
/// # Errors
/// When a step fails.
pub fn with_fault(recipe: &Recipe, fault: Fault) -> Result<(f64, Kept)> {
    let mut step = ours::step(recipe, Device::Cuda(0))?;
    for number in 0..WARM_UP + STEPS as usize {
        step.fault.set(if number == WARM_UP { fault } else { Fault::None });
        drop((step.train)()?);
    }
    Ok(((step.distance)()?, (step.kept)()?))
}

/// Where the host waits in a step of ours: how often, and the functions that led there.
///
/// # Errors
/// As [`count`].
pub fn waits_of_a_step(recipe: &Recipe) -> Result<String> {
    let Some(fake) = Fake::get().map(Fake::lend) else { bail!("this process does not run on a fake device") };
    let mut step = ours::step(recipe, Device::Cuda(0))?;
    for _ in 0..WARM_UP {
        drop((step.train)()?);
    }
    fake.reset();
    fake.trace_waits(true);
    drop((step.train)()?);
    Ok(fake.waits())
}

fn counted(recipe: &Recipe, mut step: ours::Step, is_ours: bool) -> Result<Step> {
    let Some(fake) = Fake::get() else { bail!("this process does not run on a fake device") };
    let mut losses = Vec::new();
    for _ in 0..WARM_UP {
        losses.push((step.train)()?);
    }
    let scale = (step.scale)()?;
    fake.reset();
    for _ in 0..STEPS {
        losses.push((step.train)()?);
    }
    let (counted, operators) = (Counted::of(&fake.counts(), STEPS), fake.computed());
    is_quiet(recipe, fake)?;
    let (distance, kept) = ((step.distance)()?, (step.kept)()?);
    if is_ours {
        let behind = lagging(recipe, &mut step)?;
        ensure!(behind == counted, "{}: a device that lags: {behind:?} instead of {counted:?}", recipe.name());
    }
    let losses: Vec<f64> = losses.iter().map(|loss| loss.double_value(&[])).collect();
    ensure!(losses.iter().all(|loss| loss.is_finite()), "{}: no loss: {losses:?}", recipe.name());
    ensure!((step.scale)()? == scale, "{}: the scaler has skipped a step", recipe.name());
    is_quiet(recipe, fake)?;
    Ok(Step { counted, losses, distance, kept, operators })
}

/// The counts of a step on a device that runs behind the host, so that libtorch's allocators cannot use again what it
/// may still use. Nothing may be used too early.
fn lagging(recipe: &Recipe, step: &mut ours::Step) -> Result<Counted> {
    let Some(fake) = Fake::get().map(Fake::lend) else { bail!("this process does not run on a fake device") };
    fake.set_pace(Pace::Lazy);
    fake.find_races(true);
    for _ in 0..WARM_UP / 2 {
        drop((step.train)()?);
    }
    is_quiet(recipe, *fake)?;
    fake.reset();
    for _ in 0..STEPS {
        drop((step.train)()?);
    }
    let counts = fake.counts();
    is_quiet(recipe, *fake)?;
    Ok(Counted::of(&counts, STEPS))
}

fn is_quiet(recipe: &Recipe, fake: Fake) -> Result<()> {
    match fake.notes().as_slice() {
        [] => Ok(()),
        notes => bail!("{}: {}", recipe.name(), notes.join("; ")),
    }
}

/// The losses of the same steps on the host.
///
/// # Errors
/// When a step fails.
pub fn losses_on_host(recipe: &Recipe) -> Result<Vec<f64>> {
    let mut step = ours::step(recipe, Device::Cpu)?;
    (0..WARM_UP + STEPS as usize).map(|_| Ok((step.train)()?.double_value(&[]))).collect()
}
