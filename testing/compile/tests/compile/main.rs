//! Compiled steps beside plain ones.

mod averages;
mod batches;
mod beside;
mod changes;
mod halves;
mod indices;
mod inference;
mod life;
mod losses;
mod machines;
mod models;
mod outside;
mod processes;
mod refusals;
mod resume;
mod sizes;
mod strict;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests that draw numbers run one after the other: libtorch's generator is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The same for tests that compile; `None` where nothing can be compiled.
fn compiling() -> Option<MutexGuard<'static, ()>> {
    match overdrive_compile::check_compiler() {
        Ok(()) => Some(alone()),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// A tensor that is a new object each time, made where no recorder sees it.
fn outside() -> tch::Tensor {
    std::thread::spawn(|| tch::Tensor::from(2.0f32)).join().unwrap()
}
