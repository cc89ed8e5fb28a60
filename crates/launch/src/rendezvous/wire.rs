//! Messages as lines of JSON, sealed.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::seal::Seal;

/// A failure report of every rank of the largest run stays below.
const LONGEST: usize = 16 << 20;

/// Nobody who is alive lets a message that is to be read wait that long.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes that have come, line by line.
pub struct Lines {
    stream: TcpStream,
    bytes: Vec<u8>,
    /// How many of them are known to hold no end of a line.
    searched: usize,
}

impl Lines {
    /// After what was read already.
    pub fn new(stream: TcpStream, bytes: Vec<u8>) -> Self {
        Self { stream, bytes, searched: 0 }
    }

    /// The next line, of at most `longest` bytes and its end; the error says in words why there is none. Each wait for
    /// bytes lasts as long as `patience` says then.
    pub fn next(&mut self, longest: usize, patience: impl Fn() -> Duration) -> Result<Vec<u8>, String> {
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
                return Err("it sent a message without end".to_owned());
            }
            let patience = patience();
            let silent = || Err(format!("nothing was heard of it for {} s", patience.as_secs_f64()));
            if patience.is_zero() {
                return silent();
            }
            let read = self.stream.set_read_timeout(Some(patience)).and_then(|()| self.stream.read(&mut chunk));
            match read {
                Ok(0) => return Err("the connection was closed".to_owned()),
                Ok(read) => self.bytes.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                    return silent();
                }
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// What the other side says.
pub struct Reader {
    pub lines: Lines,
    pub seal: Seal,
}

impl Reader {
    /// The next message; the error says in words why there is none. Each wait for a part of it lasts as long as
    /// `patience` says then.
    pub fn next<T: DeserializeOwned>(&mut self, patience: impl Fn() -> Duration) -> Result<T, String> {
        let line = self.lines.next(LONGEST, patience)?;
        let Some(message) = self.seal.open(&line) else {
            return Err("somebody who does not know the secret wrote a message".to_owned());
        };
        serde_json::from_slice(message).map_err(|error| format!("it does not speak this protocol: {error}"))
    }
}

/// What this side says.
pub struct Speaker {
    pub stream: TcpStream,
    pub seal: Seal,
}

impl Speaker {
    /// Fails instead of waiting for somebody who does not read, and closes the connection then: after a part of a message
    /// no other one can be understood.
    pub fn say(&mut self, message: &impl Serialize) -> io::Result<()> {
        let line = self.seal.close(&serde_json::to_vec(message)?);
        let said = self.stream.set_write_timeout(Some(PATIENCE)).and_then(|()| self.stream.write_all(&line));
        said.inspect_err(|_| self.hang_up())
    }

    /// Neither side hears anything more.
    pub fn hang_up(&self) {
        // It may be closed already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}
