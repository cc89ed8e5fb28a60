//! Tells whoever asks by HTTP whether this launcher and its ranks go on: Kubernetes' probes, above all.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::lock::lock;

/// For a whole request; probes send theirs at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Requests at a time. Those beyond are closed without an answer.
const MOST_REQUESTS: usize = 16;

/// What is known of the loops of this process, and of the ranks that it has started.
#[derive(Default)]
pub struct Health {
    loops: Mutex<BTreeMap<&'static str, Instant>>,
    ranks: Mutex<BTreeMap<usize, Rank>>,
}

struct Rank {
    /// The rank sets its time of modification to give a sign of life.
    file: PathBuf,
    /// That time when the file was last looked at, and when it was first seen so. None before the first sign.
    seen: Option<(SystemTime, Instant)>,
}

impl Rank {
    /// How long ago the last sign was given, at the least; None before the first.
    fn silent_for(&mut self, now: Instant) -> Option<Duration> {
        let time = fs::metadata(&self.file).and_then(|it| it.modified()).ok();
        self.seen = match (time, self.seen) {
            (Some(time), Some((last, at))) if time == last => Some((last, at)),
            (Some(time), _) => Some((time, now)),
            (None, seen) => seen,
        };
        self.seen.map(|(_, at)| now.saturating_duration_since(at))
    }
}

impl Health {
    /// A loop goes on.
    pub fn beat(&self, name: &'static str) {
        lock(&self.loops).insert(name, Instant::now());
    }

    /// A loop is over.
    pub fn is_over(&self, name: &'static str) {
        lock(&self.loops).remove(name);
    }

    pub fn started(&self, rank: usize, file: &Path) {
        lock(&self.ranks).insert(rank, Rank { file: file.to_owned(), seen: None });
    }

    pub fn ended(&self, rank: usize) {
        lock(&self.ranks).remove(&rank);
    }

    /// What stands still for longer than `limit`, and a line for each loop and rank.
    fn report(&self, now: Instant, limit: Duration) -> (Vec<String>, String) {
        let (mut stuck, mut lines) = (Vec::new(), String::new());
        for (name, at) in &*lock(&self.loops) {
            let silent = now.saturating_duration_since(*at);
            let _ = writeln!(lines, "{name}: {:.3} s ago", silent.as_secs_f64());
            if silent > limit {
                stuck.push(format!("the {name} stands still since {:.0} s", silent.as_secs_f64()));
            }
        }
        for (number, rank) in &mut *lock(&self.ranks) {
            let Some(silent) = rank.silent_for(now) else {
                let _ = writeln!(lines, "rank {number}: no sign of life yet, and none needed before the first");
                continue;
            };
            let _ = writeln!(lines, "rank {number}: {:.3} s ago", silent.as_secs_f64());
            if silent > limit {
                stuck.push(format!("rank {number} has given no sign of life for {:.0} s", silent.as_secs_f64()));
            }
        }
        (stuck, lines)
    }

    fn answer(&self, limit: Duration) -> String {
        let (stuck, lines) = self.report(Instant::now(), limit);
        let (status, first) = match stuck.is_empty() {
            true => ("200 OK", "ok".to_owned()),
            false => {
                ("503 Service Unavailable", format!("{}; {} s are allowed", stuck.join("; "), limit.as_secs_f64()))
            }
        };
        let body = format!("{first}\n{lines}");
        let length = body.len();
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n\
             {body}"
        )
    }
}

/// Listens on all addresses, because Kubernetes probes a pod at its own.
pub fn serve(port: u16, limit: Duration, health: &Arc<Health>) -> io::Result<()> {
    let at: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let listener = TcpListener::bind(&at[..])?;
    let (health, open) = (Arc::clone(health), Arc::new(AtomicUsize::new(0)));
    thread::Builder::new().name("health".to_owned()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // No descriptors are left, for example.
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            let place = Place::take(&open);
            let health = Arc::clone(&health);
            let answer = move || {
                if place.is_free {
                    // Whoever has asked may have gone.
                    let _ = respond(stream, || health.answer(limit));
                }
            };
            // Without a thread, this probe goes without an answer.
            let _ = thread::Builder::new().name("probe".to_owned()).spawn(answer);
        }
    })?;
    Ok(())
}

/// One of the requests at a time.
struct Place {
    open: Arc<AtomicUsize>,
    is_free: bool,
}

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        Self { open: Arc::clone(open), is_free: open.fetch_add(1, Ordering::Relaxed) < MOST_REQUESTS }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Answers any request alike.
fn respond(mut stream: TcpStream, answer: impl FnOnce() -> String) -> io::Result<()> {
    let until = Instant::now() + REQUEST_TIMEOUT;
    let (mut request, mut chunk) = (Vec::new(), [0; 1024]);
    // The connection would be reset, and the answer lost, if it were closed before the request is read.
    while !request.ends_with(b"\r\n\r\n") && request.len() < 16 << 10 {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut chunk)? {
            0 => break,
            read => request.extend_from_slice(&chunk[..read]),
        }
    }
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    stream.write_all(answer().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_still_is_named() {
        let (health, limit) = (Health::default(), Duration::from_secs(60));
        let folder = tempfile::tempdir().unwrap();
        let file = |rank: usize| folder.path().join(rank.to_string());
        health.beat("launcher");
        health.started(3, &file(3));
        health.started(4, &file(4));
        let start = Instant::now();
        let stuck = |seconds: u64| health.report(start + Duration::from_secs(seconds), limit).0;
        assert_eq!(stuck(0), [""; 0]);
        // Rank 4 never gives a sign, and need not.
        fs::write(file(3), "").unwrap();
        assert_eq!(stuck(10), [""; 0]);
        assert_eq!(stuck(55), [""; 0]);
        let both = ["the launcher stands still since 75 s", "rank 3 has given no sign of life for 65 s"];
        assert_eq!(stuck(75), both);
        // Another sign, whatever its time is: clocks may be set back.
        let file = fs::File::options().write(true).open(file(3)).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1)).unwrap();
        assert_eq!(stuck(80), ["the launcher stands still since 80 s"]);
        health.is_over("launcher");
        assert_eq!(stuck(139), [""; 0]);
        assert_eq!(stuck(141), ["rank 3 has given no sign of life for 61 s"]);
        health.ended(3);
        assert_eq!(stuck(200), [""; 0]);
    }
}
