//! Safe calls that could break memory: each is refused, or does what it says.

#[cfg(feature = "distributed")]
mod groups;
mod hooks;
mod ops;
#[cfg(feature = "distributed")]
mod reducers;

use std::sync::{Mutex, PoisonError, mpsc};
use std::time::Duration;

use tch::{Device, Kind};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Runs a test that hangs when what it shows does not hold. One at a time: what goes at the end of a backward pass goes when
/// no other is under way in the process.
fn ends(test: impl FnOnce() + Send + 'static) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let (done, ended) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        test();
        let _ = done.send(());
    });
    match ended.recv_timeout(Duration::from_secs(120)) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        _ => thread.join().unwrap(),
    }
}
