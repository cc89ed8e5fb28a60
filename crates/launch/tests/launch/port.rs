//! Ports for tests that run in parallel, in this process and in others.

use std::fs::File;
use std::net::TcpListener;
use std::sync::Mutex;

/// A port that is free now, and that no other test takes until this process ends. It is below the ephemeral ports that
/// the system assigns.
pub fn free_port() -> u16 {
    // The system releases a file's lock however the process ends.
    static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let mut held = HELD.lock().unwrap();
    let first = std::process::id() % 20_000;
    for number in 0..20_000 {
        let port = 10_000 + ((first + number) % 20_000) as u16;
        // Another user's file cannot be opened: then that user's tests may have the port.
        let Ok(lock) = File::create(std::env::temp_dir().join(format!("overdrive-test-port-{port}"))) else { continue };
        if lock.try_lock().is_ok() && TcpListener::bind(("0.0.0.0", port)).is_ok() {
            held.push(lock);
            return port;
        }
    }
    panic!("no port between 10000 and 30000 is free");
}
