//! Tells whoever asks by HTTP whether this launcher and its ranks go on: Kubernetes' probes, above all.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::lock::lock;

/// For a whole request; probes send theirs at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Between tries to listen.
const RETRY: Duration = Duration::from_millis(200);

/// Requests at a time. Beyond that, the one that has been open for longest is closed: probes send theirs at once, so it is
/// none of those.
const MOST_REQUESTS: usize = 64;

/// Asked for, ranks do not count.
const LAUNCHER_ALONE: &str = "/launcher";

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
    /// How long ago the last sign was given, at the least; None before the first. `time` is that of the file now.
    fn silent_for(&mut self, time: Option<SystemTime>, now: Instant) -> Option<Duration> {
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

    /// No rank runs any more, or can be ended.
    pub fn all_ended(&self) {
        lock(&self.ranks).clear();
    }

    /// What stands still for longer than `limit`, and a line for each loop and rank. `time_of` tells when a file was modified.
    fn report(
        &self,
        now: Instant,
        limit: Duration,
        of_ranks: bool,
        time_of: impl Fn(&Path) -> Option<SystemTime>,
    ) -> (Vec<String>, String) {
        let (mut stuck, mut lines) = (Vec::new(), String::new());
        for (name, at) in &*lock(&self.loops) {
            let silent = now.saturating_duration_since(*at);
            let _ = writeln!(lines, "{name}: {:.3} s ago", silent.as_secs_f64());
            if silent > limit {
                stuck.push(format!("the {name} stands still since {:.0} s", silent.as_secs_f64()));
            }
        }
        if !of_ranks {
            return (stuck, lines);
        }
        // A file system may not answer. The lock, which the loops take too, is not held meanwhile.
        let files: Vec<_> = lock(&self.ranks).iter().map(|(number, rank)| (*number, rank.file.clone())).collect();
        let times: Vec<_> = files.into_iter().map(|(number, file)| (number, time_of(&file), file)).collect();
        let mut ranks = lock(&self.ranks);
        for (number, time, file) in times {
            // It may have ended.
            let Some(rank) = ranks.get_mut(&number).filter(|rank| rank.file == file) else { continue };
            let Some(silent) = rank.silent_for(time, now) else {
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

    fn answer(&self, limit: Duration, path: &str) -> String {
        let time_of = |file: &Path| fs::metadata(file).and_then(|it| it.modified()).ok();
        let (stuck, lines) = self.report(Instant::now(), limit, path != LAUNCHER_ALONE, time_of);
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

/// Listens on all addresses, because Kubernetes probes a pod at its own. A port that is taken is tried again for as long as
/// `patience`: a killed launcher's guard may still have it. `waits` is called before that.
pub fn listen(port: u16, patience: Duration, waits: impl FnOnce()) -> io::Result<TcpListener> {
    let at: [SocketAddr; 2] = [(Ipv6Addr::UNSPECIFIED, port).into(), (Ipv4Addr::UNSPECIFIED, port).into()];
    let (until, mut waits) = (Instant::now() + patience, Some(waits));
    loop {
        match TcpListener::bind(&at[..]) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                waits.take().into_iter().for_each(|waits| waits());
                thread::sleep(RETRY);
            }
            other => return other,
        }
    }
}

/// Answers whoever connects.
pub fn serve(listener: TcpListener, limit: Duration, health: &Arc<Health>) -> io::Result<()> {
    let (health, open) = (Arc::clone(health), Arc::new(Open::default()));
    thread::Builder::new().name("health".to_owned()).spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else {
                // No descriptors are left, for example.
                thread::sleep(Duration::from_millis(100));
                continue;
            };
            // Threads that wait for a file system.
            if Arc::strong_count(&open) > 4 * MOST_REQUESTS {
                continue;
            }
            let Ok(place) = Place::take(&open, &stream) else { continue };
            let health = Arc::clone(&health);
            let answer = move || {
                // Whoever has asked may have gone.
                let _ = respond(stream, |path| health.answer(limit, path));
                drop(place);
            };
            // Without a thread, this probe goes without an answer.
            let _ = thread::Builder::new().name("probe".to_owned()).spawn(answer);
        }
    })?;
    Ok(())
}

/// The requests that are open, by age.
#[derive(Default)]
struct Open(Mutex<VecDeque<(SocketAddr, TcpStream)>>);

/// One of them.
struct Place {
    open: Arc<Open>,
    peer: SocketAddr,
}

impl Place {
    fn take(open: &Arc<Open>, stream: &TcpStream) -> io::Result<Self> {
        let (peer, copy) = (stream.peer_addr()?, stream.try_clone()?);
        let mut all = lock(&open.0);
        while all.len() >= MOST_REQUESTS
            && let Some((_, oldest)) = all.pop_front()
        {
            // Its thread reads the end.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        all.push_back((peer, copy));
        Ok(Self { open: Arc::clone(open), peer })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.open.0).retain(|(peer, _)| *peer != self.peer);
    }
}

/// Answers a request of any kind by its first line.
fn respond(mut stream: TcpStream, answer: impl FnOnce(&str) -> String) -> io::Result<()> {
    let until = Instant::now() + REQUEST_TIMEOUT;
    let mut chunk = [0; 1024];
    let mut read = |stream: &mut TcpStream| -> io::Result<Vec<u8>> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        let read = stream.read(&mut chunk)?;
        Ok(chunk[..read].to_vec())
    };
    let mut request = Vec::new();
    while !request.contains(&b'\n') && request.len() < 16 << 10 {
        match read(&mut stream)? {
            more if more.is_empty() => break,
            more => request.extend(more),
        }
    }
    let line = String::from_utf8_lossy(&request);
    let path = line.split_ascii_whitespace().nth(1).unwrap_or_default();
    let path = path.split_once('?').map_or(path, |(path, _)| path);
    stream.set_write_timeout(Some(REQUEST_TIMEOUT))?;
    stream.write_all(answer(path).as_bytes())?;
    stream.shutdown(Shutdown::Write)?;
    // The connection would be reset, and the answer lost, if it were closed before the request is read.
    while !read(&mut stream)?.is_empty() {}
    Ok(())
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
        let time_of = |file: &Path| {
            // Loops and ranks go on, however long the file system takes.
            assert!(health.ranks.try_lock().is_ok() && health.loops.try_lock().is_ok());
            fs::metadata(file).and_then(|it| it.modified()).ok()
        };
        let report =
            |seconds: u64, of_ranks| health.report(start + Duration::from_secs(seconds), limit, of_ranks, time_of);
        let stuck = |seconds: u64| report(seconds, true).0;
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
        assert_eq!(report(139, false).0, ["the launcher stands still since 139 s"]);
        health.is_over("launcher");
        assert_eq!(stuck(139), [""; 0]);
        assert_eq!(stuck(141), ["rank 3 has given no sign of life for 61 s"]);
        assert_eq!(report(141, false).0, [""; 0]);
        health.ended(3);
        assert_eq!(stuck(200), [""; 0]);
        // Another one of the same file, which cannot be ended.
        health.started(3, &folder.path().join("3"));
        assert_eq!(stuck(210), [""; 0]);
        assert_eq!(stuck(280).len(), 1);
        health.all_ended();
        assert_eq!(stuck(300), [""; 0]);
    }

    #[test]
    fn a_port_that_stays_taken_is_an_error() {
        let taken = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = listen(port, Duration::ZERO, || panic!("waits")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }
}
