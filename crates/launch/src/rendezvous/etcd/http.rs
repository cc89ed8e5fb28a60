//! One request by HTTP, with TLS if it is asked for, within a deadline.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Deserializer, Value};

use super::Trouble;
use crate::etcd_access::Tls;
use crate::rendezvous::node::{connect, resolve};

/// In bytes; answers are short.
const LONGEST_ANSWER: usize = 1 << 20;

/// A connection whose reads and writes end at a time, however slowly the other side is.
pub struct Timed {
    stream: TcpStream,
    until: Instant,
}

impl Timed {
    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        // For the system, zero means no limit.
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Timed {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes)
    }
}

impl Write for Timed {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// Posts JSON. Returns the answer, and the own address from which it was asked. An empty `Passing` means that there was no
/// answer by `until`.
pub fn post(
    (host, port): (&str, u16),
    tls: Option<&Tls>,
    path: &str,
    request: &Value,
    token: Option<&str>,
    until: Instant,
) -> Result<(Value, IpAddr), Trouble> {
    let text = request.to_string();
    let token = token.map(|token| format!("Authorization: {token}\r\n")).unwrap_or_default();
    // By HTTP/1.0 the answer is not chunked, and ends with the connection.
    let request = format!(
        "POST {path} HTTP/1.0\r\nHost: {host}:{port}\r\n{token}Content-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{text}",
        text.len()
    );
    let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let connected = || {
        let addresses = resolve_within(host, port, left())?;
        let stream = connect(&addresses, |addresses| left().div_f64(addresses as f64))?;
        let own = stream.local_addr()?.ip();
        Ok((Timed { stream, until }, own))
    };
    let (stream, own) = connected().map_err(of_system)?;
    let answer = match tls {
        None => exchange(stream, request.as_bytes()).map_err(of_system)?,
        Some(tls) => with_tls(stream, tls, host, request.as_bytes())?,
    };
    Ok((parse(&answer)?, own))
}

fn of_system(error: io::Error) -> Trouble {
    match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => Trouble::Passing(String::new()),
        _ => Trouble::Passing(error.to_string()),
    }
}

#[cfg(feature = "tls")]
fn with_tls(stream: Timed, tls: &Tls, host: &str, request: &[u8]) -> Result<Vec<u8>, Trouble> {
    let stream = super::tls::secured(stream, tls, host)?;
    exchange(stream, request).map_err(|error| super::tls::of_handshake(error, tls, host).unwrap_or_else(of_system))
}

#[cfg(not(feature = "tls"))]
fn with_tls(_: Timed, _: &Tls, _: &str, _: &[u8]) -> Result<Vec<u8>, Trouble> {
    Err(Trouble::Lasting(crate::etcd_access::WITHOUT_TLS.to_owned()))
}

/// In a thread of its own, because the system's look-up of a name has no limit.
fn resolve_within(host: &str, port: u16, limit: Duration) -> io::Result<Vec<SocketAddr>> {
    let (found, addresses) = channel();
    let host = host.to_owned();
    let look_up = move || drop(found.send(resolve(&host, port)));
    thread::Builder::new().name("look-up".to_owned()).spawn(look_up)?;
    addresses.recv_timeout(limit).unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
}

fn exchange(mut stream: impl Read + Write, request: &[u8]) -> io::Result<Vec<u8>> {
    // A server that refuses this client may close the connection first: then the reason is what can still be read.
    let sent = stream.write_all(request).and_then(|()| stream.flush());
    let (mut answer, mut chunk) = (Vec::new(), [0; 4096]);
    while answer.len() < LONGEST_ANSWER {
        match stream.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&chunk[..read]),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    if answer.is_empty() { sent.map(|()| answer) } else { Ok(answer) }
}

/// The JSON of an answer; the first value of a stream.
pub fn parse(answer: &[u8]) -> Result<Value, String> {
    let stranger = || "what listens there does not speak HTTP".to_owned();
    let end = answer.windows(4).position(|part| part == b"\r\n\r\n").ok_or_else(stranger)?;
    let head = String::from_utf8_lossy(&answer[..end]);
    let mut words = head.lines().next().unwrap_or_default().split(' ');
    if !words.next().is_some_and(|version| version.starts_with("HTTP/1.")) {
        return Err(stranger());
    }
    let body = &answer[end + 4..];
    match words.next() {
        Some("200") => {}
        Some("404") => return Err("it has no version 3 of etcd's API; etcd 3.4 or later is needed".to_owned()),
        status => {
            let said = String::from_utf8_lossy(&body[..body.len().min(300)]);
            return Err(format!("it has answered {}: {}", status.unwrap_or("nothing"), said.trim()));
        }
    }
    let first = Deserializer::from_slice(body).into_iter::<Value>().next();
    match first {
        Some(Ok(value)) if value.get("error").is_none() => Ok(value),
        Some(Ok(value)) => Err(format!("it has answered {value}")),
        Some(Err(error)) => Err(format!("its answer is not JSON: {error}")),
        None => Err("its answer is empty".to_owned()),
    }
}
