//! A node's side: finding out whether it coordinates, and the connection to the one that does.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::wire::{Reader, send};
use super::{FromNodeZero, Hello, ToNodeZero};
use crate::attempt::Event;
use crate::error::LaunchError;
use crate::host_name::without_brackets;
use crate::plan::Plan;

/// Between two attempts to reach node 0.
const RETRY: Duration = Duration::from_millis(100);

/// How this node takes part.
pub enum Entry {
    /// It is node 0 and has the port.
    Coordinates(TcpListener),
    Joins,
}

impl Entry {
    /// Node 0 takes the endpoint's port. Where nobody said who that is, it is whoever the endpoint's address belongs
    /// to.
    pub fn find(plan: &Plan, host: &str, port: u16) -> Result<Self, LaunchError> {
        // On all addresses: a host's own name often means one that only the host itself can reach.
        let any = [SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)), (Ipv4Addr::UNSPECIFIED, port).into()];
        let failed = LaunchError::system(format!("listen on port {port} for the other nodes"));
        match plan.is_host.or(plan.node_rank.map(|rank| rank == 0)) {
            Some(false) => Ok(Self::Joins),
            Some(true) => TcpListener::bind(&any[..]).map(Self::Coordinates).map_err(failed),
            None if !is_own(host) => Ok(Self::Joins),
            None => match TcpListener::bind(&any[..]) {
                Ok(listener) => Ok(Self::Coordinates(listener)),
                // Another launcher on this host was first.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(Self::Joins),
                Err(error) => Err(failed(error)),
            },
        }
    }
}

/// Whether a name means this host: only then can a socket be bound to its address.
fn is_own(host: &str) -> bool {
    resolve(host, 0).unwrap_or_default().into_iter().any(|address| TcpListener::bind(address).is_ok())
}

fn resolve(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    // IPv6 addresses come in brackets.
    let host = without_brackets(host);
    Ok((host, port).to_socket_addrs()?.collect())
}

/// The connection to node 0. What comes of it becomes events; a lost connection too.
pub struct Link {
    stream: Arc<Mutex<TcpStream>>,
}

impl Link {
    /// Connects, again and again until the time for joining is over, and says hello.
    pub fn join(
        plan: &Plan,
        own_name: &str,
        endpoint: (&str, u16),
        node_rank: Option<usize>,
        events: Sender<Event>,
        mut stop: impl FnMut() -> Option<LaunchError>,
    ) -> Result<Self, LaunchError> {
        let start = Instant::now();
        let stream = loop {
            let error = match connect(endpoint.0, endpoint.1) {
                Ok(stream) => break stream,
                Err(error) => error,
            };
            if let Some(error) = stop() {
                return Err(error);
            }
            if start.elapsed() > plan.join_timeout {
                return Err(LaunchError::NodesMissing(format!(
                    "node 0 could not be reached at {}:{} within {} s: {error}",
                    endpoint.0,
                    endpoint.1,
                    plan.join_timeout.as_secs_f64()
                )));
            }
            thread::sleep(RETRY);
        };
        let hello = Hello::new(plan, own_name, node_rank);
        let talk = LaunchError::system(format!("talk to node 0 at {}:{}", endpoint.0, endpoint.1));
        start_talking(plan, stream, &ToNodeZero::Hello(hello), events).map_err(talk)
    }

    pub fn send(&self, message: &ToNodeZero) {
        // The reader reports a connection that is gone.
        let _ = send(&lock(&self.stream), message);
    }
}

fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut last = io::Error::other("the name has no address");
    for address in resolve(host, port)? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            // Where nobody listens on a port of this host, TCP may connect a socket to itself.
            Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn start_talking(plan: &Plan, stream: TcpStream, hello: &ToNodeZero, events: Sender<Event>) -> io::Result<Link> {
    stream.set_nodelay(true)?;
    send(&stream, hello)?;
    let mut reader = Reader::new(&stream, plan.silence)?;
    thread::Builder::new().name("from-node-0".to_owned()).spawn(move || {
        loop {
            let (said, last) = match reader.next() {
                Ok(FromNodeZero::Alive) => continue,
                Ok(said) => (said, false),
                Err(why) => (FromNodeZero::Lost(why), true),
            };
            if events.send(Event::NodeZero(said)).is_err() || last {
                return;
            }
        }
    })?;
    let stream = Arc::new(Mutex::new(stream));
    let (beating, interval) = (Arc::clone(&stream), plan.keep_alive);
    thread::Builder::new().name("heartbeat".to_owned()).spawn(move || {
        while send(&lock(&beating), &ToNodeZero::Alive).is_ok() {
            thread::sleep(interval);
        }
    })?;
    Ok(Link { stream })
}

fn lock(stream: &Mutex<TcpStream>) -> MutexGuard<'_, TcpStream> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}
