//! Waiting for rank 0 to listen.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Ranks that were started together usually arrive within this time of each other.
const PATIENCE: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(5);

/// Waits a short while for rank 0 to listen, and returns what is left of `timeout` for the rendezvous itself.
///
/// libtorch's client retries only half a second after a refused connection, which would be most of a launch's time.
pub(super) fn wait(host: &str, port: u16, timeout: Duration) -> Duration {
    wait_at_most(PATIENCE.min(timeout / 2), host, port, timeout)
}

fn wait_at_most(patience: Duration, host: &str, port: u16, timeout: Duration) -> Duration {
    let started = Instant::now();
    // If the name cannot be resolved yet, the store's client waits for it.
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

/// Empty for a name that is unknown, or not resolved within `patience`. Runs on a thread, because resolvers have no
/// timeout.
fn addresses(host: &str, port: u16, patience: Duration) -> Vec<SocketAddr> {
    let (found, addresses) = mpsc::channel();
    let host = host.to_owned();
    // The receiver may be gone already, so a failed send is ignored.
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
    fn time_spent_waiting_is_subtracted_from_the_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let long = Duration::from_secs(600);
        assert_eq!(wait_at_most(long, "127.0.0.1", address.port(), long), long);
        // Nothing can listen at the port of a connection.
        let connection = TcpStream::connect(address).unwrap();
        let silent = connection.local_addr().unwrap().port();
        let timeout = Duration::from_millis(100);
        assert!(wait("127.0.0.1", silent, timeout) <= timeout / 2);
    }
}
