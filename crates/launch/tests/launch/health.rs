//! Health checks: what a probe hears of a launcher and of its ranks.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::elastic::lose;
use crate::launcher::{Launcher, Running, wait_for};
use crate::nodes::node;
use crate::port::free_port;

crate::tests![
    a_launcher_that_goes_on_is_healthy,
    a_launcher_that_waits_for_others_is_healthy,
    a_rank_that_gives_no_more_signs_of_life_is_named,
    a_launcher_that_is_frozen_does_not_answer,
    a_taken_port_is_an_error,
    impossible_health_checks_are_refused,
];

/// Longer than any test.
const PATIENT: &str = "--health-timeout=6000";

/// Status and text of an answer, None if there is none.
fn probe(port: u16) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: pod\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "))?;
    assert_eq!(length, body.len().to_string());
    Some((head.split(' ').nth(1)?.parse().unwrap(), body.to_owned()))
}

/// Waits for an answer.
fn answer(port: u16) -> (u16, String) {
    wait_for("an answer", || probe(port))
}

/// How long ago a loop has said that it goes on.
fn age(text: &str, name: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")))?;
    Some(line.strip_suffix(" s ago").unwrap().parse().unwrap())
}

/// Waits until a loop has said again that it goes on, although nothing happens.
fn goes_on(port: u16, name: &str) {
    let mut longest = 0.0;
    wait_for(name, || {
        let (code, text) = probe(port)?;
        assert_eq!((code, text.lines().next()), (200, Some("ok")), "{text}");
        let age = age(&text, name)?;
        let has_begun_anew = age < longest;
        longest = age.max(longest);
        has_begun_anew.then_some(())
    });
}

/// A launcher whose rank runs until `$FILE.done` exists, and the folder of that file.
fn start(port: u16, options: &[&str], script: &str) -> (Running, TempDir) {
    let folder = TempDir::new().unwrap();
    let port = format!("--health-port={port}");
    let script = format!("{script} while ! [ -e $FILE.done ]; do sleep 0.01; done");
    let launcher = Launcher::script(&[&[port.as_str()], options].concat(), &script);
    (launcher.env("FILE", folder.path().join("file")).start(), folder)
}

fn end(running: Running, folder: &TempDir) {
    fs::write(folder.path().join("file.done"), "").unwrap();
    let ended = running.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

fn a_launcher_that_goes_on_is_healthy() {
    let port = free_port();
    let (running, folder) = start(port, &[PATIENT], "[ -z $TORCHELASTIC_HEALTH_CHECK_PORT ] || exit 3;");
    goes_on(port, "launcher");
    assert!(answer(port).1.contains("rank 0: no sign of life yet, and none needed before the first\n"));
    end(running, &folder);
    assert_eq!(probe(port), None);
}

fn a_launcher_that_waits_for_others_is_healthy() {
    let (meeting, ports) = (free_port(), [free_port(), free_port()]);
    let check = |rank: usize| {
        let options = [format!("--node-rank={rank}"), PATIENT.to_owned()];
        let options: Vec<&str> = options.iter().map(String::as_str).collect();
        node(meeting, &options, "true").env("TORCHELASTIC_HEALTH_CHECK_PORT", ports[rank].to_string())
    };
    // It looks for node 0.
    let second = check(1).start();
    goes_on(ports[1], "launcher");
    lose(second);
    // It waits for node 1.
    let first = check(0).start();
    goes_on(ports[0], "launcher");
    goes_on(ports[0], "coordinator");
    lose(first);
}

fn a_rank_that_gives_no_more_signs_of_life_is_named() {
    let port = free_port();
    // The rank gives one sign, and more while a file exists.
    let script = "touch $OVERDRIVE_HEARTBEAT_FILE; while ! [ -e $FILE.done ]; do \
                  [ -e $FILE.more ] && touch $OVERDRIVE_HEARTBEAT_FILE; sleep 0.01; done;";
    let (running, folder) = start(port, &["--health-timeout=2", "--nproc-per-node=2"], script);
    let silent =
        |text: &str| text.starts_with("rank 0 has given no sign of life for ") || text.contains("; rank 0 has");
    wait_for("the silence", || probe(port).filter(|(code, text)| *code == 503 && silent(text)));
    fs::write(folder.path().join("file.more"), "").unwrap();
    // On a busy machine, another two seconds may pass between two signs.
    wait_for("health", || probe(port).filter(|(code, _)| *code == 200));
    end(running, &folder);
}

fn a_launcher_that_is_frozen_does_not_answer() {
    let port = free_port();
    let (running, folder) = start(port, &[PATIENT], "");
    answer(port);
    let guard = running.guard();
    kill_process(guard, Signal::STOP).unwrap();
    wait_for("the freeze", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", guard.as_raw_pid())).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('T').then_some(())
    });
    // Linux accepts the connection, and nobody answers.
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    assert!(stream.read(&mut [0; 16]).is_err());
    kill_process(guard, Signal::CONT).unwrap();
    answer(port);
    end(running, &folder);
}

fn a_taken_port_is_an_error() {
    let taken = std::net::TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let ended = Launcher::script(&[&format!("--health-port={port}")], "echo ran").end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    ended.says(&format!("cannot listen on port {port} for health checks: "));
}

fn impossible_health_checks_are_refused() {
    for (options, what) in [
        (vec!["--health-port=0"], "0 is not in 1..=65535"),
        (vec!["--health-port=1234", "--health-timeout=0"], "give a number of seconds above 0"),
        (vec!["--health-port=1234", "--health-timeout=-1"], "give a number of seconds above 0"),
    ] {
        let ended = Launcher::script(&options, "echo ran").end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{ended:?}");
        ended.says(what);
    }
}
