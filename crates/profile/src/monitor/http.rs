//! Serves the metrics to Prometheus. Connections are limited in number, memory and time, because anyone may connect.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::ProfileError;

/// How often new connections are checked for.
const POLL: Duration = Duration::from_millis(50);
/// How many connections are answered at once, each by a thread. More wait to be accepted.
const MOST_AT_ONCE: usize = 16;
/// How long a connection may take in all, unless the settings say otherwise. Its first byte has to come in a quarter of
/// the time.
pub(super) const TIMEOUT: Duration = Duration::from_secs(2);
/// The longest request, in bytes.
const LONGEST_REQUEST: usize = 8 << 10;

/// A server that answers requests until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(
        address: SocketAddr,
        timeout: Duration,
        page: impl Fn() -> String + Send + Sync + 'static,
    ) -> Result<Self, ProfileError> {
        let listening = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let (address, listener) = listening.map_err(|error| ProfileError::Listen { address, error })?;
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = Builder::new().name("monitor-http".to_owned()).spawn(move || {
            let busy = AtomicUsize::new(0);
            // The end of the scope waits for the connections that are being answered.
            thread::scope(|scope| {
                let mut open: Vec<Weak<TcpStream>> = Vec::new();
                loop {
                    let has_room = busy.load(Ordering::Acquire) < MOST_AT_ONCE;
                    let wait = match has_room.then(|| listener.accept()) {
                        Some(Ok((stream, _))) => {
                            let (place, stream, page) = (Place::take(&busy), Arc::new(stream), &page);
                            open.retain(|other| other.strong_count() > 0);
                            open.push(Arc::downgrade(&stream));
                            // Errors are ignored: a client hung up, sent garbage, or is disconnected because no thread
                            // could be started.
                            let _ = Builder::new().name("monitor-http".to_owned()).spawn_scoped(scope, move || {
                                let _place = place;
                                let _ = answer(&stream, timeout, page);
                            });
                            Duration::ZERO
                        }
                        // No connection, too many open files, or all places taken: try again later.
                        _ => POLL,
                    };
                    if stopped.recv_timeout(wait) != Err(RecvTimeoutError::Timeout) {
                        break;
                    }
                }
                // Requests that are not complete end here. An error means that the connection is closed already.
                for stream in open.iter().filter_map(Weak::upgrade) {
                    let _ = stream.shutdown(Shutdown::Read);
                }
            });
        });
        let thread = thread.map_err(ProfileError::Thread)?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that served metrics panicked");
        }
    }
}

/// Counts a connection as busy until it is dropped.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(busy: &'a AtomicUsize) -> Self {
        busy.fetch_add(1, Ordering::AcqRel);
        Self(busy)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn answer(mut stream: &TcpStream, timeout: Duration, page: &impl Fn() -> String) -> io::Result<()> {
    let until = Instant::now() + timeout;
    stream.set_nonblocking(false)?;
    let request = read_request(stream, timeout / 4, until)?;
    let (status, body) = match request.as_deref().map(method_and_path) {
        Some(Some(("GET" | "HEAD", "/metrics"))) => ("200 OK", page()),
        Some(Some(("GET" | "HEAD", _))) => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        Some(Some(_)) => ("405 Method Not Allowed", "only GET and HEAD are answered\n".to_owned()),
        _ => ("400 Bad Request", "this is not an HTTP/1 request\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    let is_head = request.is_some_and(|request| request.starts_with(b"HEAD "));
    let whole = if is_head { head } else { head + &body };
    let mut rest = whole.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(until)?))?;
        let written = stream.write(rest)?;
        if written == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        rest = &rest[written..];
    }
    stream.shutdown(Shutdown::Write)
}

/// Reads a request up to the empty line; its first byte has to come within `silence`. None if it is too long or
/// incomplete.
fn read_request(mut stream: &TcpStream, silence: Duration, until: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = left(until)?;
        stream.set_read_timeout(Some(if request.is_empty() { left.min(silence) } else { left }))?;
        let read = stream.read(&mut part)?;
        if read == 0 || request.len() + read > LONGEST_REQUEST {
            return Ok(None);
        }
        request.extend_from_slice(&part[..read]);
    }
    Ok(Some(request))
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

fn method_and_path(request: &[u8]) -> Option<(&str, &str)> {
    let line = std::str::from_utf8(request.split(|byte| *byte == b'\r').next()?).ok()?;
    let mut words = line.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let path = path_of(target).split('?').next()?;
    (version.starts_with("HTTP/1.") && words.next().is_none()).then_some((method, path))
}

/// A proxy may ask for `http://host/path`.
fn path_of(target: &str) -> &str {
    const SCHEME: &str = "http://";
    match target.split_at_checked(SCHEME.len()) {
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case(SCHEME) => match rest.find(['/', '?']) {
            Some(end) if rest[end..].starts_with('/') => &rest[end..],
            _ => "/",
        },
        _ => target,
    }
}
