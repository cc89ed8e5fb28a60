//! Tests of compiled steps, mostly beside the same steps uncompiled.

mod averages;
mod batches;
mod beside;
mod changes;
mod draws;
mod half_precision;
mod indices;
mod inference;
mod life;
mod losses;
mod machines;
mod models;
mod outside;
mod own_memory;
mod processes;
mod refusals;
mod resume;
mod sizes;
mod strict;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks out the other tests that draw random numbers, because all threads of a process share libtorch's generator.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// As [`alone`], for tests that compile; `None` on a machine that cannot compile.
fn compiling() -> Option<MutexGuard<'static, ()>> {
    match overdrive_compile::check_compiler() {
        Ok(()) => Some(alone()),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// A tensor that is a new object at each call, and that no recorded operator has made.
fn outside() -> tch::Tensor {
    std::thread::spawn(|| tch::Tensor::from(2.0f32)).join().unwrap()
}
