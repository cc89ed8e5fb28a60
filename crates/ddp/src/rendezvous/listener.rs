//! Waiting for rank 0 to listen.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Ranks that were started together are there within this time of each other.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits a short while for somebody to listen, and returns what is left of `timeout` for the meeting itself.
///
/// libtorch's client that finds nobody tries again half a second later: that would be most of a launch.
pub(super) fn wait(host: &str, port: u16, timeout: Duration) -> Duration {
    let started = Instant::now();
    let patience = PATIENCE.min(timeout / 2);
    // A name that is not known yet is the store's to wait for.
    let addresses = addresses(host, port, patience);
    while !addresses.is_empty() && started.elapsed() < patience {
        let left = || patience.saturating_sub(started.elapsed()).max(PAUSE);
        if addresses.iter().any(|address| TcpStream::connect_timeout(address, left()).is_ok()) {
            return timeout;
        }
        sleep(PAUSE);
    }
    timeout.saturating_sub(started.elapsed())
}

/// None for a name that is not known, or not within `patience`: a resolver may take its time, whatever the timeout.
fn addresses(host: &str, port: u16, patience: Duration) -> Vec<SocketAddr> {
    let (found, addresses) = mpsc::channel();
    let host = host.to_owned();
    // Nobody may be waiting any more.
    let look_up = move || drop(found.send((host.as_str(), port).to_socket_addrs().into_iter().flatten().collect()));
    match thread::Builder::new().spawn(look_up) {
        Ok(_) => addresses.recv_timeout(patience).unwrap_or_default(),
        Err(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn what_was_waited_in_vain_is_taken_off() {
        let timeout = Duration::from_millis(100);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        assert_eq!(wait("127.0.0.1", port, timeout), timeout);
        drop(listener);
        assert!(wait("127.0.0.1", port, timeout) <= timeout / 2);
    }
}
