//! A thousand hostile connections ("strangers") of ten kinds, while ranks on one and on two nodes meet, are restarted
//! and end with the right result. All of them are made on this machine, and are closed when the run ends.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::ReduceOp;
use overdrive_launch::{Launch, LaunchError, Streams};
use tch::Tensor;

use crate::harness::{Meeting, TOLD, free_port};

/// Names the folder through which the test and its ranks report their progress to each other.
const FOLDER: &str = "OVERDRIVE_TEST_BESIEGED";
/// Connections of each kind in a run.
const TIMES: usize = 50;
/// Only against hanging.
const LIMIT: Duration = Duration::from_secs(600);
const SECRET: &str = "what no stranger knows";
/// The launchers', so that nothing else is wrong with a greeting.
const PROTOCOL: u32 = 7;
const END: &str = r#"{"Ended":{"attempt":0,"how":{"Interrupted":15},"ends":[]}}"#;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    ClosesAtOnce,
    SaysNothing,
    Drips,
    NeverEnds,
    Garbage,
    OtherRun,
    WrongCode,
    Replays,
    RefusedThenEnds,
    StoreKeys,
}

const KINDS: [(Kind, &str); 10] = [
    (Kind::ClosesAtOnce, "connects and closes at once"),
    (Kind::SaysNothing, "connects and sends nothing"),
    (Kind::Drips, "sends a byte at a time"),
    (Kind::NeverEnds, "a message without end"),
    (Kind::Garbage, "garbage, TLS, HTTP"),
    (Kind::OtherRun, "a greeting of another run"),
    (Kind::WrongCode, "a valid greeting, a wrong code"),
    (Kind::Replays, "replays a node's messages"),
    (Kind::RefusedThenEnds, "refused, then asks to end the run"),
    (Kind::StoreKeys, "sets and deletes the store's keys"),
];

fn hello(run: &str) -> String {
    format!(
        r#"{{"Hello":{{"protocol":{PROTOCOL},"run_id":"{run}","nnodes":"2","node_rank":1,"nproc":1,"max_restarts":1,"failure_window":{{"secs":1,"nanos":0}},"keep_alive":[5000,15000],"host":"stranger","past":null,"unfit":null}}}}"#
    )
}

/// A rank: sums until the test creates the file `go`, fails in the first attempt, and writes its result.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let folder = PathBuf::from(std::env::var(FOLDER)?);
    let attempt = std::env::var("TORCHELASTIC_RESTART_COUNT")?;
    let group = meeting.group()?;
    let mut steps = 0;
    loop {
        let mut sum = Tensor::from_slice(&[meeting.rank as i64 + 1, i64::from(folder.join("go").exists())]);
        group.all_reduce(&mut sum, ReduceOp::Sum)?;
        ensure!(sum.int64_value(&[0]) == 3, "{sum}");
        steps += 1;
        if steps == 1 {
            leave(&folder, &format!("ready-{attempt}-{}", meeting.rank), &std::env::var("MASTER_PORT")?)?;
        }
        if sum.int64_value(&[1]) > 0 && steps >= 10 {
            break;
        }
        thread::sleep(Duration::from_millis(5));
    }
    ensure!(attempt != "0" || meeting.rank == 0, "the first attempt fails");
    if attempt == "0" {
        // The launcher ends this rank.
        thread::sleep(LIMIT);
    }
    leave(&folder, &format!("result-{}", meeting.rank), &attempt)
}

/// Writes a file atomically.
fn leave(folder: &Path, name: &str, text: &str) -> Result<()> {
    let part = folder.join(format!("{name}.part"));
    std::fs::write(&part, text)?;
    Ok(std::fs::rename(part, folder.join(name))?)
}

fn wait<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> Result<T> {
    let started = Instant::now();
    loop {
        if let Some(value) = ready() {
            return Ok(value);
        }
        ensure!(started.elapsed() < LIMIT, "{what}: not ready within {LIMIT:?}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// A run under attack.
struct Siege {
    /// The endpoint where launchers meet, if there are several.
    door: Option<SocketAddr>,
    /// Addresses of this host at which the run does not listen.
    outside: Vec<IpAddr>,
    store: u16,
    overheard: Arc<Mutex<Vec<u8>>>,
    held: Vec<(Kind, TcpStream)>,
    tried: [usize; KINDS.len()],
    /// Of those tried: the connections that were refused, and those that got no answer but the greeting.
    unconnected: [usize; KINDS.len()],
    unheard: [usize; KINDS.len()],
}

impl Siege {
    fn new(door: Option<u16>, overheard: Arc<Mutex<Vec<u8>>>) -> Self {
        // Connecting a UDP socket sends no packet, but selects this host's outgoing address.
        let other = UdpSocket::bind("0.0.0.0:0").and_then(|socket| {
            socket.connect("192.0.2.1:9")?;
            socket.local_addr()
        });
        let mut outside = vec![IpAddr::from([127, 0, 0, 2])];
        outside.extend(other.map(|address| address.ip()).ok().filter(|ip| !ip.is_loopback()));
        let door = door.map(|port| (Ipv4Addr::LOCALHOST, port).into());
        let none = [0; KINDS.len()];
        let (tried, unconnected, unheard) = (none, none, none);
        Self { door, outside, store: 0, overheard, held: Vec::new(), tried, unconnected, unheard }
    }

    /// Up to `times` of every kind that can be tried now.
    fn attack(&mut self, times: usize) -> Result<()> {
        for time in 0..times {
            for (kind, _) in KINDS {
                let place = kind as usize;
                let at = match self.door {
                    Some(door) if kind != Kind::StoreKeys => door,
                    _ if self.store == 0 => continue,
                    _ => (self.outside[time % self.outside.len()], self.store).into(),
                };
                let nothing_heard = self.overheard().is_empty();
                if self.tried[place] == TIMES || kind == Kind::Replays && self.door.is_some() && nothing_heard {
                    continue;
                }
                self.tried[place] += 1;
                match TcpStream::connect_timeout(&at, LIMIT) {
                    Ok(stream) => self.act(kind, time, stream)?,
                    Err(error) if error.kind() == ErrorKind::ConnectionRefused => self.unconnected[place] += 1,
                    Err(error) => bail!("{kind:?}: {error}"),
                }
            }
        }
        Ok(())
    }

    fn overheard(&self) -> Vec<u8> {
        lock(&self.overheard).clone()
    }

    /// Acts as one hostile connection. Write errors are ignored: the launcher may close the connection early.
    fn act(&mut self, kind: Kind, time: usize, mut stream: TcpStream) -> Result<()> {
        stream.set_write_timeout(Some(LIMIT))?;
        let zeros = "0".repeat(64);
        let greeting = |hello: &str| format!("{zeros} {zeros} {hello}\n");
        let _ = match kind {
            Kind::ClosesAtOnce => stream.shutdown(Shutdown::Both),
            Kind::SaysNothing | Kind::Drips => Ok(()),
            Kind::NeverEnds => (0..64).try_for_each(|_| stream.write_all(&[b'a'; 16 << 10])),
            Kind::Garbage => stream.write_all(match time % 3 {
                0 => &[0xff; 2000],
                // The beginning of a TLS handshake.
                1 => b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                _ => b"GET / HTTP/1.1\r\nHost: node0\r\n\r\n",
            }),
            Kind::OtherRun => stream.write_all(greeting(&hello("other")).as_bytes()),
            Kind::WrongCode => stream.write_all(greeting(&hello("besieged")).as_bytes()),
            Kind::Replays => stream.write_all(&self.overheard()),
            Kind::RefusedThenEnds => {
                let plain = format!("{}\n{END}\n", hello("besieged"));
                let sealed = format!("{}{zeros} {END}\n", greeting(&hello("other")));
                stream.write_all(if time.is_multiple_of(2) { plain } else { sealed }.as_bytes())
            }
            Kind::StoreKeys => stream.write_all(&store_commands()),
        };
        for (_, dripping) in self.held.iter_mut().filter(|(kind, _)| *kind == Kind::Drips) {
            let _ = dripping.write(b"0");
        }
        self.held.push((kind, stream));
        Ok(())
    }

    /// After the run's end: checks that no connection received more than the greeting with its single-use number.
    fn count(&mut self) -> Result<()> {
        for (kind, mut stream) in std::mem::take(&mut self.held) {
            stream.set_read_timeout(Some(LIMIT))?;
            let (mut said, mut chunk) = (Vec::new(), [0; 1024]);
            let end = loop {
                match stream.read(&mut chunk) {
                    Ok(0) => break Ok(()),
                    Ok(read) => said.extend_from_slice(&chunk[..read]),
                    Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                        break Err(error);
                    }
                    // Closed in the middle of its message.
                    Err(_) => break Ok(()),
                }
            };
            end.with_context(|| format!("{kind:?} is still connected"))?;
            let said = String::from_utf8_lossy(&said).into_owned();
            let is_number =
                said.strip_prefix(&format!("overdrive-run {PROTOCOL} ")).is_some_and(|rest| rest.len() == 65);
            ensure!(said.is_empty() || is_number, "{kind:?} received {said:?}");
            self.unheard[kind as usize] += 1;
        }
        Ok(())
    }
}

/// A client of libtorch's store: it validates, sets the counter of workers to text, and deletes it.
fn store_commands() -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u64).to_ne_bytes(), text.as_bytes()].concat();
    let validate = [&[0][..], &0x3C85_F7CE_u32.to_ne_bytes()].concat();
    [validate, vec![1], text("init/"), text("no number"), vec![8], text("init/")].concat()
}

fn launch(folder: &Path, node: usize) -> Result<Launch> {
    let logs = folder.join(format!("node-{node}"));
    Ok(Launch::new(std::env::current_exe()?)
        .max_restarts(1)
        .join_timeout(LIMIT)
        .grace_period(LIMIT)
        // Silence of a busy machine is no loss.
        .keep_alive(Duration::from_secs(5), 120)
        .run_id("besieged")
        .redirects(Streams::All)
        .log_dir(logs)
        .env(TOLD, "besieged")
        .env(FOLDER, folder)
        .env("OMP_NUM_THREADS", "1"))
}

fn start(launch: Launch) -> JoinHandle<Result<(), LaunchError>> {
    thread::spawn(move || launch.run())
}

fn lock(overheard: &Mutex<Vec<u8>>) -> MutexGuard<'_, Vec<u8>> {
    overheard.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forwards bytes between one node and `port`, and keeps what the node sends over its latest connection: on a busy
/// machine it may connect again.
fn overhear(listener: TcpListener, port: u16, overheard: Arc<Mutex<Vec<u8>>>) {
    let pass = move |mut node: TcpStream| -> std::io::Result<()> {
        lock(&overheard).clear();
        let mut node_zero = TcpStream::connect(("127.0.0.1", port))?;
        let (mut from, mut to) = (node_zero.try_clone()?, node.try_clone()?);
        thread::spawn(move || {
            let _ = std::io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
        let mut chunk = [0; 4096];
        loop {
            let read = node.read(&mut chunk)?;
            if read == 0 {
                return node_zero.shutdown(Shutdown::Both);
            }
            lock(&overheard).extend_from_slice(&chunk[..read]);
            node_zero.write_all(&chunk[..read])?;
        }
    };
    // If it fails, the run fails too.
    thread::spawn(move || listener.incoming().flatten().for_each(|node| drop(pass(node))));
}

fn besiege(nodes: usize) -> Result<Siege> {
    let folder = tempfile::tempdir()?;
    let overheard = Arc::new(Mutex::new(Vec::new()));
    let mut runs = Vec::new();
    let mut siege;
    if nodes == 1 {
        siege = Siege::new(None, overheard);
        runs.push(start(launch(folder.path(), 0)?.nproc(2)));
    } else {
        let (port, listener) = (free_port(), TcpListener::bind("127.0.0.1:0")?);
        let behind = listener.local_addr()?.port();
        siege = Siege::new(Some(port), Arc::clone(&overheard));
        let node = |rank: usize, port: u16| -> Result<_> {
            let launch = launch(folder.path(), rank)?.nnodes(2).node_rank(rank).rdzv_endpoint("127.0.0.1", port);
            Ok(start(launch.secret(SECRET)?))
        };
        runs.push(node(0, port)?);
        wait("node 0", || TcpStream::connect(("127.0.0.1", port)).ok())?;
        // Before the other node connects.
        siege.attack(TIMES / 2)?;
        overhear(listener, port, overheard);
        runs.push(node(1, behind)?);
    }
    let ready = |attempt: usize, rank: usize| {
        let file = folder.path().join(format!("ready-{attempt}-{rank}"));
        let over = || runs.iter().any(JoinHandle::is_finished);
        let ready =
            wait("the ranks", || std::fs::read_to_string(&file).ok().map(Some).or_else(|| over().then_some(None)));
        ready?.context("a launcher has ended before its ranks were there")
    };
    ready(0, 1)?;
    siege.store = ready(0, 0)?.parse()?;
    siege.attack(TIMES)?;
    // Now a rank fails, and all are restarted.
    leave(folder.path(), "go", "")?;
    for run in runs {
        run.join().map_err(|_| anyhow::anyhow!("a launch panicked"))??;
    }
    for rank in 0..2 {
        let result = std::fs::read_to_string(folder.path().join(format!("result-{rank}")))?;
        ensure!(result == "1", "rank {rank} ended in attempt {result}");
    }
    siege.count()?;
    Ok(siege)
}

pub fn change_nothing() -> Result<()> {
    let sieges = [besiege(1).context("one node")?, besiege(2).context("two nodes")?];
    println!("{:34} {:>11} {:>11} {:>7}  effect on the runs", "strangers", "connections", "unconnected", "unheard");
    let mut all = 0;
    for (kind, name) in KINDS {
        let count = |of: fn(&Siege) -> &[usize; KINDS.len()]| -> usize {
            sieges.iter().map(|siege| of(siege)[kind as usize]).sum()
        };
        let tried = count(|siege| &siege.tried);
        let (unconnected, unheard) = (count(|siege| &siege.unconnected), count(|siege| &siege.unheard));
        println!("{name:34} {tried:>11} {unconnected:>11} {unheard:>7}  none");
        ensure!(tried == 2 * TIMES && unconnected + unheard == tried, "{name}: some of {tried} were let in");
        // These connections cannot reach the address of the store, but that of two nodes' launchers.
        let reached = if kind == Kind::StoreKeys { 0 } else { TIMES };
        ensure!(unheard == reached, "{name}: {unheard} connections, not {reached}");
        all += tried;
    }
    ensure!(all == 1000, "{all} connections");
    Ok(())
}
