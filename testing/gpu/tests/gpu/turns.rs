//! Which tests run beside others, and what is checked after each.

use std::sync::{Mutex, PoisonError};

use anyhow::{Result, ensure};
use overdrive_fakecuda::Fake;

use crate::CALIBRATION;

/// The device of this process: memory statistics, counts and `ForbidSync` apply to the whole process.
static DEVICE: Mutex<()> = Mutex::new(());

const ALONE: [&str; 5] = [
    "compiled::a_step_compiled_for_the_device_launches_less_and_never_waits",
    "compiled::updates_compiled_for_the_device_are_the_formulas",
    "compiled::gradients_of_convolutions_that_compiled_code_asks_for_have_numbers",
    "loading::nothing_is_early_or_on_another_device",
    "loading::a_loader_begins_on_its_own_device_alone",
];

/// Whether a test only starts processes, and looks at how they end.
pub fn has_processes_of_its_own(name: &str) -> bool {
    name.starts_with("ranks::") || ALONE.contains(&name)
}

/// The order in which tests begin on a fake device: that for which Python compiles longest, then those that run beside
/// others.
pub fn order(name: &str) -> usize {
    match ALONE[0] == name {
        true => 0,
        false => 1 + usize::from(!has_processes_of_its_own(name)),
    }
}

/// Runs a test of this kind, when the device is free.
pub fn run(name: &str, kind: &str, test: fn() -> Result<()>) -> Result<()> {
    if has_processes_of_its_own(name) {
        return test();
    }
    let _alone = DEVICE.lock().unwrap_or_else(PoisonError::into_inner);
    // Those of the calibration ask for what is refused.
    if kind == CALIBRATION { test() } else { checked(test) }
}

/// Runs a test; on a fake device it fails if that has noted anything: the host read what nobody has computed, kernels
/// without numbers, collectives that do not match; or if it has planted a failure that nothing met. What it sets on the
/// fake device ends with it.
pub fn checked(test: impl FnOnce() -> Result<()>) -> Result<()> {
    let Some(fake) = Fake::get().map(Fake::lend) else { return test() };
    fake.reset();
    // What a test before this one has read, and nobody has asked for.
    drop(fake.notes());
    test()?;
    let (notes, planted) = (fake.notes(), fake.planted());
    ensure!(notes.is_empty(), "{}", notes.join("; "));
    ensure!(planted.is_empty(), "planted and not met: {}", planted.join("; "));
    Ok(())
}
