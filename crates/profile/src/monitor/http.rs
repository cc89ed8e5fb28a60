//! A page of metrics for Prometheus. One request at a time, in little memory and time, whoever asks.

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::ProfileError;

/// How long a request may wait until it is looked at.
const POLL: Duration = Duration::from_millis(50);
/// How long one connection may take in all.
const DEADLINE: Duration = Duration::from_secs(2);
/// The longest request that is read.
const LONGEST_REQUEST: usize = 8 << 10;

/// Answers until it is dropped.
#[derive(Debug)]
pub(super) struct Server {
    address: SocketAddr,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub fn start(address: SocketAddr, page: impl Fn() -> String + Send + 'static) -> Result<Self, ProfileError> {
        let listening = TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok((listener.local_addr()?, listener))
        });
        let (address, listener) = listening.map_err(|error| ProfileError::Listen { address, error })?;
        let (stop, stopped) = mpsc::channel::<()>();
        let thread = Builder::new().name("monitor-http".to_owned()).spawn(move || {
            loop {
                match listener.accept() {
                    Ok((stream, _)) => {
                        // Whoever hangs up or sends nonsense is not told about.
                        let _ = answer(stream, &page);
                        if stopped.try_recv() != Err(mpsc::TryRecvError::Empty) {
                            break;
                        }
                    }
                    // Nobody there, or too many open files: both may pass.
                    Err(_) => {
                        if stopped.recv_timeout(POLL) != Err(RecvTimeoutError::Timeout) {
                            break;
                        }
                    }
                }
            }
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

fn answer(mut stream: TcpStream, page: &impl Fn() -> String) -> io::Result<()> {
    let until = Instant::now() + DEADLINE;
    stream.set_nonblocking(false)?;
    let request = read_request(&mut stream, until)?;
    let (status, body) = match request.as_deref().map(method_and_path) {
        Some(Some(("GET" | "HEAD", "/metrics"))) => ("200 OK", page()),
        Some(Some(("GET" | "HEAD", _))) => ("404 Not Found", "metrics are at /metrics\n".to_owned()),
        Some(Some(_)) => ("405 Method Not Allowed", "only GET is answered\n".to_owned()),
        _ => ("400 Bad Request", "this is no HTTP request\n".to_owned()),
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
    stream.shutdown(std::net::Shutdown::Write)
}

/// Up to the empty line. None for what is too long or breaks off.
fn read_request(stream: &mut TcpStream, until: Instant) -> io::Result<Option<Vec<u8>>> {
    let mut request = Vec::new();
    let mut part = [0; 1024];
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        stream.set_read_timeout(Some(left(until)?))?;
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
    let path = target.split('?').next()?;
    (version.starts_with("HTTP/1.") && words.next().is_none()).then_some((method, path))
}
