//! Messages: lines of JSON, each authenticated by a [`Seal`].

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::seal::Seal;

/// In bytes. Failure reports of the largest run are smaller.
const LONGEST: usize = 16 << 20;

/// A peer that is alive reads its messages sooner.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

const CLOSED: &str = "the connection was closed";

/// Reads a connection line by line.
pub struct Lines {
    stream: TcpStream,
    bytes: Vec<u8>,
    /// How many of `bytes` are known to contain no newline.
    searched: usize,
}

impl Lines {
    /// Starts with `bytes`, which were already read from `stream`.
    pub fn new(stream: TcpStream, bytes: Vec<u8>) -> Self {
        Self { stream, bytes, searched: 0 }
    }

    /// The next line without its newline, of at most `longest` bytes, or a message why there is none. `timeout` is
    /// called before each read and limits it.
    pub fn next(&mut self, longest: usize, timeout: impl Fn() -> Duration) -> Result<Vec<u8>, String> {
        let mut chunk = [0; 16 << 10];
        loop {
            if let Some(at) = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.bytes.split_off(self.searched + at + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                self.searched = 0;
                return Ok(line);
            }
            self.searched = self.bytes.len();
            if self.searched > longest {
                return Err("it sent a message that is too long".to_owned());
            }
            let timeout = timeout();
            let silent = || Err(format!("it was silent for {} s", timeout.as_secs_f64()));
            if timeout.is_zero() {
                return silent();
            }
            let read = self.stream.set_read_timeout(Some(timeout)).and_then(|()| self.stream.read(&mut chunk));
            match read {
                Ok(0) => return Err(CLOSED.to_owned()),
                Ok(read) => self.bytes.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return silent();
                }
                // The peer ended before it had read everything.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(CLOSED.to_owned()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Receives messages.
pub struct Reader {
    pub lines: Lines,
    pub seal: Seal,
}

impl Reader {
    /// The next message, or why there is none. `timeout` is called before each read and limits it.
    pub fn next<T: DeserializeOwned>(&mut self, timeout: impl Fn() -> Duration) -> Result<T, String> {
        let line = self.lines.next(LONGEST, timeout)?;
        let Some(message) = self.seal.verify(&line) else {
            return Err("a message came from a sender that does not know the secret".to_owned());
        };
        serde_json::from_slice(message).map_err(|error| format!("it does not speak this protocol: {error}"))
    }
}

/// Sends messages.
pub struct Speaker {
    pub stream: TcpStream,
    pub seal: Seal,
}

impl Speaker {
    /// Fails after a timeout if the peer does not read, and closes the connection then: after an incomplete message the
    /// peer could not parse the next one.
    pub fn say(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = self.seal.sign(&serde_json::to_vec(message)?);
        let sent = self.stream.set_write_timeout(Some(WRITE_TIMEOUT)).and_then(|()| self.stream.write_all(&line));
        sent.inspect_err(|_| self.hang_up())
    }

    /// Closes both directions.
    pub fn hang_up(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
