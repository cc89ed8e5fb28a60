//! Messages as lines of JSON.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A failure report of every rank of the largest run stays below.
const LONGEST: u64 = 16 << 20;

/// Nobody who is alive lets a greeting, or a message that is to be read, wait that long.
pub const PATIENCE: Duration = Duration::from_secs(10);

pub struct Reader {
    stream: BufReader<TcpStream>,
    silence: Duration,
}

impl Reader {
    /// Counts the other side as lost after so long without a word.
    pub fn new(stream: &TcpStream, silence: Duration) -> io::Result<Self> {
        let stream = stream.try_clone()?;
        stream.set_read_timeout(Some(silence))?;
        Ok(Self { stream: BufReader::new(stream), silence })
    }

    pub fn set_silence(&mut self, silence: Duration) -> io::Result<()> {
        self.silence = silence;
        self.stream.get_ref().set_read_timeout(Some(silence))
    }

    /// The next message; the error says in words why there is none.
    pub fn next<T: DeserializeOwned>(&mut self) -> Result<T, String> {
        let mut line = Vec::new();
        match self.stream.by_ref().take(LONGEST).read_until(b'\n', &mut line) {
            Ok(_) if line.ends_with(b"\n") => {
                serde_json::from_slice(&line).map_err(|error| format!("it does not speak this protocol: {error}"))
            }
            Ok(_) if line.len() as u64 == LONGEST => Err("it sent a message without end".to_owned()),
            Ok(_) => Err("the connection was closed".to_owned()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                Err(format!("nothing was heard of it for {} s", self.silence.as_secs_f64()))
            }
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Fails instead of waiting for somebody who does not read.
pub fn send(mut stream: &TcpStream, message: &impl Serialize) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}
