//! Rank 0, which serves the store, is frozen while rank 1 asks the store: every question ends with an error.

use std::fs;
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive_core::{TorchError, TorchErrorKind};
use overdrive_ddp::{Backend, DdpError, InitMethod, ProcessGroup, Store, TcpStoreOptions};
use rustix::process::{Pid, Signal, getpid, kill_process};

use crate::harness::{Meeting, PATIENCE, all_through, free_port, start};

/// Long enough for ranks to meet on a busy machine.
const LIMIT: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_millis(5);
/// Rank 0 listens so late, which is a part of rank 1's time to meet, but not of the store's timeout.
const LATE: Duration = Duration::from_secs(3);
/// Set if rank 1 wakes rank 0 again. Otherwise it ends before that.
const THAWS: &str = "OVERDRIVE_TEST_THAWS";
/// The server takes at most twice as much at once.
const LARGE: usize = 4 << 20;
/// As many large values are more than sockets hold, so that sending them waits for the server.
const MANY: usize = 64;

type Question = fn(&Store) -> Result<(), TorchError>;

const QUESTIONS: [(&str, Question); 7] = [
    ("wait", |store| store.wait(&["never"], LIMIT)),
    ("get", |store| store.get("known", LIMIT).map(drop)),
    ("set", |store| (0..MANY).try_for_each(|_| store.set("large", &vec![7; LARGE]))),
    ("add", |store| store.add("sum", 1).map(drop)),
    ("check", |store| store.check(&["known"]).map(drop)),
    ("compare_set", |store| store.compare_set("compared", b"", b"given up").map(drop)),
    ("delete", |store| store.delete("deleted").map(drop)),
];

fn client(timeout: Duration) -> Result<Store, TorchError> {
    let port = std::env::var("MASTER_PORT").ok().and_then(|port| port.parse().ok()).unwrap_or_default();
    let options = TcpStoreOptions {
        host: "127.0.0.1",
        port,
        is_server: false,
        one_host: true,
        world_size: 1,
        wait_for_workers: false,
        connect_timeout: timeout,
        timeout,
    };
    Store::tcp(&options).map(|(store, _)| store)
}

/// The error names the store and how long it was waited for.
fn is_late(result: Result<(), TorchError>) -> Result<()> {
    let error = result.err().context("a frozen server has answered")?;
    let text = error.to_string();
    ensure!(error.kind() == TorchErrorKind::Timeout, "{error:?}");
    let place = format!("the store at 127.0.0.1:{} has not answered within 20", std::env::var("MASTER_PORT")?);
    ensure!(text.contains(&place) && text.contains("is rank 0's process stopped"), "{text}");
    Ok(())
}

/// Whether no thread of a process runs.
fn is_frozen(process: &str) -> Result<bool> {
    for thread in fs::read_dir(format!("/proc/{process}/task"))? {
        let stat = fs::read_to_string(thread?.path().join("stat"))?;
        let (_, state) = stat.rsplit_once(") ").context("no state")?;
        if !state.starts_with('T') {
            return Ok(false);
        }
    }
    Ok(true)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    if meeting.rank == 0 {
        sleep(LATE);
    }
    let group = ProcessGroup::builder(Backend::Gloo).timeout(LIMIT).init(&InitMethod::Auto)?;
    let part = group.new_group(&[0, 1])?.context("both are members")?;
    let server = getpid().as_raw_pid().to_string();
    if meeting.rank == 0 {
        let store = client(PATIENCE)?;
        store.set("known", b"value")?;
        store.set("server", server.as_bytes())?;
        store.wait(&["freeze"], PATIENCE)?;
        kill_process(getpid(), Signal::STOP)?;
        return Ok(store.wait(&["done"], PATIENCE)?);
    }
    let waker = client(PATIENCE)?;
    let server = String::from_utf8(waker.get("server", PATIENCE)?)?;
    let clients = QUESTIONS.iter().map(|_| client(LIMIT)).collect::<Result<Vec<_>, _>>()?;
    waker.set("freeze", b"")?;
    while !is_frozen(&server)? {
        sleep(PAUSE);
    }
    let thaws = std::env::var_os(THAWS).is_some();
    if !thaws {
        closes(&part)?;
    }
    asks(&group, &clients)?;
    if !thaws {
        // The clients and the group are dropped, and the process ends.
        return Ok(());
    }
    let pid = server.parse().ok().and_then(Pid::from_raw).context("no process")?;
    kill_process(pid, Signal::CONT)?;
    goes_on(&clients)?;
    Ok(waker.set("done", b"")?)
}

/// A group whose members have met ends without its store.
fn closes(group: &ProcessGroup) -> Result<()> {
    let since = Instant::now();
    let _either = group.close();
    ensure!(since.elapsed() < LIMIT, "it has waited for the store: {:?}", since.elapsed());
    Ok(())
}

fn asks(group: &ProcessGroup, clients: &[Store]) -> Result<()> {
    scope(|scope| {
        let mut threads = Vec::new();
        for ((name, question), store) in QUESTIONS.iter().zip(clients) {
            threads.push(scope.spawn(move || is_late(question(store)).context(*name)));
        }
        threads.push(scope.spawn(|| is_late(client(LIMIT).map(drop)).context("the first connection")));
        let error = group.new_group(&[0, 1]).err().context("a group without rank 0")?;
        let DdpError::TimedOut { context, source } = error else { anyhow::bail!("{error:?}") };
        ensure!(context.op == "new_group");
        is_late(Err(source)).context("new_group")?;
        threads.into_iter().try_for_each(|thread| thread.join().expect("no panic"))
    })?;
    // Whoever asks again does not wait for the timeout again.
    let again = Instant::now();
    for store in clients {
        is_late(store.wait(&["known"], LIMIT))?;
        is_late(store.set("known", b"another value"))?;
    }
    is_late(group.store().add("sum", 100).map(drop)).context("the group's store")?;
    ensure!(again.elapsed() < LIMIT, "it has waited: {:?}", again.elapsed());
    Ok(())
}

/// Each client reads the answer that came too late, and then only its own.
fn goes_on(clients: &[Store]) -> Result<()> {
    let since = Instant::now();
    for ((name, _), store) in QUESTIONS.iter().zip(clients) {
        while let Err(error) = store.check(&["known"]) {
            let waits = error.kind() == TorchErrorKind::Timeout && since.elapsed() < PATIENCE;
            ensure!(waits, "{name}: the server has not gone on: {error}");
            sleep(PAUSE);
        }
        let own = format!("of {name}");
        ensure!(store.add(&own, 3)? == 3 && store.add(&own, 4)? == 7, "{name}");
        ensure!(store.get("known", PATIENCE)? == b"value", "{name}");
        ensure!(!store.check(&["never"])?, "{name}");
        ensure!(!store.delete("nothing")?, "{name}");
    }
    // What was given up has taken effect once.
    let store = client(PATIENCE)?;
    ensure!(store.add("sum", 10)? == 11);
    ensure!(store.get("large", PATIENCE)? == vec![7; LARGE]);
    ensure!(store.get("compared", PATIENCE)? == b"given up");
    Ok(())
}

fn with_server_frozen(vars: &[(&str, &str)]) -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let mut ranks = (0..2).map(|rank| start("frozen", rank, 2, port, vars)).collect::<Result<Vec<_>>>()?;
    if vars.is_empty() {
        // It stays frozen.
        let asked = ranks.split_off(1);
        return all_through(asked, started).map(drop);
    }
    all_through(ranks, started).map(drop)
}

pub fn ends_questions() -> Result<()> {
    with_server_frozen(&[])
}

pub fn goes_on_when_it_thaws() -> Result<()> {
    with_server_frozen(&[(THAWS, "")])
}
