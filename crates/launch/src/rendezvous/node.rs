//! A node's side: deciding whether it is node 0, and connecting to node 0.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use super::seal::{Nonce, Seal};
use super::wire::{Lines, Reader, Speaker};
use super::{FromNodeZero, GREETING, Hello, PROTOCOL, ToNodeZero};
use crate::error::LaunchError;
use crate::host::Event;
use crate::host_name::{is_loopback, without_brackets};
use crate::lock::lock;
use crate::output::Console;
use crate::plan::Plan;
use crate::secret::Trust;

/// The first and the longest pause between attempts to reach node 0.
const RETRY: Duration = Duration::from_millis(100);
const LATE_RETRY: Duration = Duration::from_secs(1);

/// For connecting to one address, and for the exchange of greetings.
const TIMEOUT: Duration = Duration::from_secs(5);

/// How this node takes part.
pub enum Entry {
    /// It is node 0, and listens on the endpoint's port.
    Coordinates(TcpListener),
    /// It connects to node 0.
    Joins,
}

impl Entry {
    /// Node 0 listens on the endpoint's port. Unless options say which host that is, it is the one with the endpoint's
    /// address.
    pub fn find(plan: &Plan, host: &str, port: u16) -> Result<Self, LaunchError> {
        let failed = LaunchError::system(format!("listen on port {port} for the other nodes"));
        let at = match is_loopback(host) {
            true => resolve(host, port).unwrap_or_default(),
            // On all addresses: a host often resolves its own name to an address that other hosts cannot reach.
            false => vec![(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()],
        };
        match plan.is_host.or(plan.node_rank.map(|rank| rank == 0)) {
            Some(false) => Ok(Self::Joins),
            Some(true) => TcpListener::bind(&at[..]).map(Self::Coordinates).map_err(failed),
            None if !is_own(host) => Ok(Self::Joins),
            None => match TcpListener::bind(&at[..]) {
                Ok(listener) => Ok(Self::Coordinates(listener)),
                // Another launcher on this host has the port.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(Self::Joins),
                Err(error) => Err(failed(error)),
            },
        }
    }
}

/// Whether a name means this host: only a host itself can bind a socket to its address.
fn is_own(host: &str) -> bool {
    resolve(host, 0).unwrap_or_default().into_iter().any(|address| TcpListener::bind(address).is_ok())
}

pub fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    // IPv6 addresses may have brackets.
    let host = without_brackets(host);
    Ok((host, port).to_socket_addrs()?.collect())
}

/// The connection to node 0. Its messages, and its loss, become events.
pub struct Link {
    speaker: Arc<Mutex<Speaker>>,
}

impl Link {
    /// Connects and greets node 0, with retries until the timeout.
    pub fn join(
        plan: &Plan,
        hello: Hello,
        endpoint: (&str, u16),
        timeout: Duration,
        console: Option<&Console>,
        events: Sender<Event>,
        mut stop: impl FnMut() -> Option<LaunchError>,
    ) -> Result<Self, LaunchError> {
        let (start, mut pause) = (Instant::now(), RETRY);
        let place = format!("{}:{}", endpoint.0, endpoint.1);
        let hello = ToNodeZero::Hello(hello);
        let (speaker, reader) = loop {
            let why = match resolve(endpoint.0, endpoint.1).and_then(|all| connect(&all, |_| TIMEOUT)) {
                Err(error) => error.to_string(),
                Ok(stream) => match greet(stream, &plan.trust, &hello) {
                    Ok(met) => break met,
                    Err(why) => {
                        // Another program may use the port until node 0 starts, or the secrets may differ.
                        if let Some(console) = console.filter(|_| pause == RETRY) {
                            console.say(&format!("node 0 at {place}: {why}; trying again"));
                        }
                        pause = (2 * pause).min(LATE_RETRY);
                        why
                    }
                },
            };
            if let Some(error) = stop() {
                return Err(error);
            }
            if start.elapsed() > timeout {
                return Err(LaunchError::NodesMissing(format!(
                    "node 0 could not be reached at {place} within {} s: {why}",
                    timeout.as_secs_f64()
                )));
            }
            thread::sleep(pause);
        };
        start_talking(plan, speaker, reader, events).map_err(LaunchError::system(format!("talk to node 0 at {place}")))
    }

    /// Closes the connection, so that node 0 does not take this node for alive.
    pub fn hang_up(self) {
        lock(&self.speaker).hang_up();
    }

    pub fn send(&self, message: &ToNodeZero) {
        // The reader thread reports a lost connection.
        let _ = lock(&self.speaker).say(message);
    }
}

/// Connects to one of a host's addresses. `timeout` is asked before each, with the number of those that are left.
pub fn connect(addresses: &[SocketAddr], timeout: impl Fn(usize) -> Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for (place, address) in addresses.iter().enumerate() {
        match TcpStream::connect_timeout(address, timeout(addresses.len() - place)) {
            // If nothing listens on a port of this host, TCP may connect a socket to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Reads node 0's nonce, sends the greeting, and checks that the answer is authentic.
fn greet(stream: TcpStream, trust: &Trust, hello: &ToNodeZero) -> Result<(Speaker, Reader), String> {
    let until = Instant::now() + TIMEOUT;
    let left = || until.saturating_duration_since(Instant::now());
    let system = |error: io::Error| error.to_string();
    stream.set_nodelay(true).map_err(system)?;
    let mut lines = Lines::new(stream.try_clone().map_err(system)?, Vec::new());
    let of_node_zero = challenge(&lines.next(LONGEST_CHALLENGE, left)?)?;
    let of_node = Nonce::random().map_err(system)?;
    let (from_node, from_node_zero) = Seal::pair(trust.key(), of_node_zero, of_node);
    let mut speaker = Speaker { stream, seal: from_node };
    let mut reader = Reader { lines, seal: from_node_zero };
    speaker.stream.write_all(format!("{} ", of_node.to_hex()).as_bytes()).map_err(system)?;
    speaker.say(hello).map_err(system)?;
    match reader.next(left) {
        Ok(FromNodeZero::Alive) => Ok((speaker, reader)),
        Ok(_) => Err("it does not speak this protocol".to_owned()),
        Err(why) if *trust == Trust::Anyone => Err(format!("{why}; is it started with --insecure too?")),
        Err(why) => Err(format!("{why}; is its secret the same as here?")),
    }
}

/// Of node 0's first line, in bytes.
const LONGEST_CHALLENGE: usize = 256;

fn challenge(line: &[u8]) -> Result<Nonce, String> {
    let stranger = || "the program that listens there is not a launcher".to_owned();
    let text = std::str::from_utf8(line).map_err(|_| stranger())?;
    let mut words = text.split(' ');
    if words.next() != Some(GREETING) {
        return Err(stranger());
    }
    match words.next().and_then(|it| it.parse::<u32>().ok()).ok_or_else(stranger)? {
        PROTOCOL => words.next().and_then(|it| Nonce::from_hex(it.as_bytes())).ok_or_else(stranger),
        other => {
            Err(format!("its protocol is {other}, and this launcher's is {PROTOCOL}: use one version on all nodes"))
        }
    }
}

fn start_talking(plan: &Plan, speaker: Speaker, mut reader: Reader, events: Sender<Event>) -> io::Result<Link> {
    let silence = plan.silence;
    thread::Builder::new().name("from-node-0".to_owned()).spawn(move || {
        loop {
            let (said, last) = match reader.next(|| silence) {
                Ok(FromNodeZero::Alive) => continue,
                Ok(said) => (said, false),
                Err(why) => (FromNodeZero::Lost(why), true),
            };
            if events.send(Event::NodeZero(said)).is_err() || last {
                return;
            }
        }
    })?;
    let speaker = Arc::new(Mutex::new(speaker));
    let (beating, interval) = (Arc::clone(&speaker), plan.keep_alive);
    thread::Builder::new().name("heartbeat".to_owned()).spawn(move || {
        while lock(&beating).say(&ToNodeZero::Alive).is_ok() {
            thread::sleep(interval);
        }
    })?;
    Ok(Link { speaker })
}
