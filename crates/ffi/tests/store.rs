//! A store over TCP that several threads of one process ask, and whose server may stand still.
#![cfg(feature = "distributed")]

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::thread::{self, scope, sleep};
use std::time::Duration;

use overdrive_ffi::Error;
use overdrive_ffi::c10d::{Store, TcpStoreOptions};

/// Only against hanging.
const PATIENCE: Duration = Duration::from_secs(60);

/// `timeout`: of answers.
fn at(port: u16, is_server: bool, timeout: Duration) -> (Store, u16) {
    let options = TcpStoreOptions {
        host: "127.0.0.1",
        port,
        is_server,
        one_host: true,
        world_size: 1,
        wait_for_workers: false,
        connect_timeout: PATIENCE,
        timeout,
    };
    Store::tcp(&options).unwrap()
}

/// A server's own client, which has set a key, and another one.
fn pair(timeout: Duration) -> [Store; 2] {
    let (server, port) = at(0, true, PATIENCE);
    server.set("known", b"").unwrap();
    [server, at(port, false, timeout).0]
}

const BUSY: &str = "another thread has waited for the store at 127.0.0.1";

/// Until another thread waits on this store.
fn until_taken(store: &Store) {
    let is_busy = |error: Error| error.to_string().contains(BUSY);
    while !store.wait(&["known"], Duration::from_millis(1)).is_err_and(is_busy) {}
}

/// Lets one client connect to a server. Each answer passes when `passes` has returned.
fn relay(server: u16, mut passes: impl FnMut() + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || -> io::Result<()> {
        let (mut client, mut server) = (listener.accept()?.0, TcpStream::connect(("127.0.0.1", server))?);
        let (mut questions, mut asked) = (client.try_clone()?, server.try_clone()?);
        thread::spawn(move || {
            let _ended = io::copy(&mut questions, &mut asked);
            asked.shutdown(Shutdown::Both)
        });
        let mut answer = [0; 1 << 10];
        loop {
            let bytes = server.read(&mut answer)?;
            passes();
            client.write_all(&answer[..bytes])?;
            if bytes == 0 {
                return client.shutdown(Shutdown::Both);
            }
        }
    });
    port
}

#[test]
fn who_has_waited_for_its_turn_asks_only_for_the_time_that_is_left() {
    let [_server, client] = pair(PATIENCE);
    // A server that is late for a second, on a busy machine, is taken for a stopped one.
    let found = (0..5).any(|round| {
        let limit = Duration::from_secs(4);
        let said = scope(|scope| {
            let _waits = scope.spawn(|| client.wait(&["never"], limit - Duration::from_millis(1500)));
            until_taken(&client);
            client.get("nothing", limit).unwrap_err().to_string()
        });
        client.add("sum", 1).unwrap_or_else(|error| panic!("a healthy server: {error}, after {said}"));
        println!("{round}: {said}");
        said.contains("wait timeout after")
    });
    assert!(found, "a healthy server was late five times");
}

#[test]
fn who_waits_too_long_for_another_thread_is_told_so_and_has_asked_nothing() {
    let [server, client] = pair(Duration::from_secs(1));
    scope(|scope| {
        let waits = scope.spawn(|| client.wait(&["turn"], PATIENCE));
        until_taken(&client);
        let said = client.add("turns", 1).unwrap_err().to_string();
        assert!(said.contains(BUSY), "{said}");
        server.set("turn", b"").unwrap();
        waits.join().unwrap().unwrap();
        assert_eq!(server.add("turns", 1).unwrap(), 1);
        client.wait(&["turns"], PATIENCE).unwrap();
    });
}

/// Set in a process that is frozen.
const FREEZES: &str = "OVERDRIVE_TEST_FREEZES";
const FROZEN: Duration = Duration::from_secs(6);

/// Two threads that wait shorter than this process is frozen.
fn freezes() {
    let [_server, client] = pair(PATIENCE);
    scope(|scope| {
        let _waits = scope.spawn(|| client.wait(&["never"], FROZEN - Duration::from_secs(2)));
        until_taken(&client);
        let gets = scope.spawn(|| client.get("known", FROZEN - Duration::from_secs(1)));
        // It has begun, or will begin later and show nothing.
        sleep(Duration::from_millis(200));
        println!("\nwaits");
        gets.join().unwrap().unwrap();
    });
}

#[test]
fn who_thaws_gets_a_turn_though_its_time_is_over() {
    if std::env::var_os(FREEZES).is_some() {
        return freezes();
    }
    let thaws = || {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "who_thaws_gets_a_turn_though_its_time_is_over", "--nocapture"]).env(FREEZES, "");
        let mut frozen = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut told = BufReader::new(frozen.stdout.take().unwrap()).lines();
        assert!(told.any(|line| line.unwrap() == "waits"), "it has ended");
        let signal = |name: &str| Command::new("kill").args([name, &frozen.id().to_string()]).status().unwrap();
        assert!(signal("-STOP").success());
        sleep(FROZEN);
        assert!(signal("-CONT").success());
        told.for_each(drop);
        frozen.wait().unwrap().success()
    };
    // On a busy machine, a second may be too short for an answer.
    assert!((0..3).any(|_| thaws()));
}

#[test]
fn the_short_limit_of_a_call_is_not_that_of_the_next_one() {
    let (_server, port) = at(0, true, PATIENCE);
    let passes = Arc::new(Mutex::new(()));
    let waits = Arc::clone(&passes);
    let (client, _) = at(relay(port, move || drop(waits.lock())), false, PATIENCE);
    assert_eq!(client.add("sum", 1).unwrap(), 1);
    let held = passes.lock().unwrap();
    let said = client.wait(&["stop"], Duration::from_millis(10)).unwrap_err().to_string();
    assert!(said.contains("has not answered within 0.01 s"), "{said}");
    scope(|scope| {
        let adds = scope.spawn(|| client.add("sum", 1));
        // It has begun, or will begin, which should make no difference.
        sleep(Duration::from_millis(200));
        drop(held);
        assert_eq!(adds.join().unwrap().unwrap(), 2, "a pause of a second is not one of a minute");
    });
}

#[test]
fn a_value_comes_within_the_limit_of_the_call_too() {
    let (server, port) = at(0, true, PATIENCE);
    server.set("known", b"value").unwrap();
    let (frees, freed) = channel::<()>();
    let is_last = Arc::new(AtomicBool::new(false));
    let stops = Arc::clone(&is_last);
    let mut has_stopped = false;
    let passes = move || {
        if has_stopped {
            let _free = freed.recv();
        }
        has_stopped = stops.load(Ordering::Relaxed);
    };
    let (client, _) = at(relay(port, passes), false, PATIENCE);
    assert_eq!(client.get("known", PATIENCE).unwrap(), b"value");
    // The server says that the key is there, and then nothing.
    is_last.store(true, Ordering::Relaxed);
    let said = client.get("known", Duration::from_secs(1)).unwrap_err().to_string();
    assert!(said.contains("has not answered within 1 s"), "{said}");
    drop(frees);
    // Who asks next gets their own answer.
    assert_eq!(client.add("sum", 1).unwrap(), 1);
}

#[test]
fn signals_do_not_wait_for_other_threads() {
    let [server, client] = pair(PATIENCE);
    scope(|scope| {
        let waits = scope.spawn(|| client.wait(&["go"], PATIENCE));
        until_taken(&client);
        client.set("exception_dump", b"dump").unwrap();
        assert_eq!(server.get("exception_dump", PATIENCE / 2).unwrap(), b"dump", "a signal is lost");
        // False as well where no answer has come yet.
        while !client.check(&["exception_dump"]).unwrap() {
            assert!(!waits.is_finished(), "a signal is not seen");
        }
        server.set("go", b"").unwrap();
        waits.join().unwrap().unwrap();
    });
}

/// NCCL's watchdog asks for it before it ends a process, which the launcher and the other ranks wait for.
#[test]
fn a_signal_is_given_up_sooner_than_a_question() {
    let (_server, port) = at(0, true, PATIENCE);
    let held = Arc::new(Mutex::new(()));
    let gives_up_sooner = || {
        let [monitor, asks] = [(); 2].map(|()| {
            let waits = Arc::clone(&held);
            at(relay(port, move || drop(waits.lock())), false, PATIENCE).0
        });
        let _held = held.lock().unwrap();
        scope(|scope| {
            // With the second that a question gets for its answer.
            let asks = scope.spawn(|| asks.wait(&["never"], Duration::from_millis(500)).unwrap_err());
            assert!(!monitor.check(&["exception_dump"]).unwrap());
            let is_sooner = !asks.is_finished();
            assert!(asks.join().unwrap().to_string().contains("has not answered within 0.5 s"));
            is_sooner
        })
    };
    // Half a second, and a second more: a busy machine may turn them round, but not each time.
    assert!((0..5).any(|_| gives_up_sooner()));
}
