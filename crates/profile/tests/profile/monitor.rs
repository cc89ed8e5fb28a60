//! The monitor's threads, files and HTTP server.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::fs::{CWD, Mode, mkfifoat};

use overdrive_profile::{GapSource, GpuSample, GpuSource, Monitor, MonitorBuilder, ProfileError, Sample};

/// Records when it is dropped, which is when the monitor's thread has ended.
struct Watched(Arc<AtomicBool>);

impl GpuSource for Watched {
    fn count(&mut self) -> Result<u32, ProfileError> {
        Ok(1)
    }

    fn sample(&mut self, index: u32) -> Result<GpuSample, ProfileError> {
        Ok(GpuSample { index, ..GpuSample::default() })
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn quick() -> MonitorBuilder {
    Monitor::builder().interval(Duration::from_millis(10)).without_gpus()
}

/// A server of metrics whose clients may take as long as they need on a busy machine.
fn served() -> MonitorBuilder {
    quick().http(0).http_timeout(Duration::from_secs(3600))
}

/// Waits without a limit until something holds.
fn until(holds: impl Fn() -> bool) {
    while !holds() {
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn samples_are_kept_up_to_the_window() {
    let mut monitor = quick().window(3).start().unwrap();
    until(|| monitor.latest().is_some());
    let first = monitor.latest().unwrap();
    until(|| monitor.samples().len() == 3 && monitor.samples()[0].elapsed_seconds > first.elapsed_seconds);
    monitor.stop();
    monitor.stop();
    let samples = monitor.samples();
    assert_eq!(samples.len(), 3);
    assert!(samples.is_sorted_by(|one, next| one.elapsed_seconds < next.elapsed_seconds));
    assert!(samples.iter().all(|sample| sample.system.is_some() && sample.process.is_some() && sample.gpus.is_empty()));
    assert!(samples[2].process.unwrap().rates.is_some());
    assert!(monitor.http_address().is_none());
    assert!(monitor.gaps().is_empty(), "{:?}", monitor.gaps());
}

#[test]
fn dropping_it_ends_its_thread_even_in_a_panic() {
    let [dropped, panicked, live] = std::array::from_fn(|_| Arc::new(AtomicBool::new(false)));
    // An interval that is too long to wait for.
    let slow = |ended: &Arc<AtomicBool>| {
        Monitor::builder().interval(Duration::from_secs(3600)).gpus(Watched(ended.clone())).http(0)
    };
    drop(slow(&dropped).start().unwrap());
    assert!(dropped.load(Ordering::SeqCst));
    let result = catch_unwind(AssertUnwindSafe(|| {
        let _monitor = slow(&panicked).start().unwrap();
        panic!("planted");
    }));
    assert_eq!(result.expect_err("it panics").downcast_ref(), Some(&"planted"));
    assert!(panicked.load(Ordering::SeqCst));
    let mut monitor = slow(&live).live(true).start().unwrap();
    monitor.stop();
    assert!(live.load(Ordering::SeqCst));
    // The samples at the start and at the end.
    assert_eq!(monitor.samples().len(), 2);
    assert_eq!(monitor.samples()[1].gpus.len(), 1);
}

#[test]
fn the_file_has_the_samples_in_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("samples.jsonl");
    std::fs::write(&path, "kept\n").unwrap();
    let mut monitor = quick().json_lines(&path).start().unwrap();
    until(|| monitor.samples().len() >= 4);
    monitor.stop();
    let text = std::fs::read_to_string(&path).unwrap();
    let (first, lines) = text.split_once('\n').unwrap();
    assert_eq!(first, "kept");
    let read: Vec<Sample> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(read, monitor.samples().iter().map(|sample| (**sample).clone()).collect::<Vec<_>>());
}

#[test]
fn a_file_that_cannot_be_written_is_an_error_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("no reader");
    mkfifoat(CWD, &pipe, Mode::from(0o600)).unwrap();
    for path in [folder.path().to_owned(), folder.path().join("missing/samples.jsonl"), pipe] {
        let ended = Arc::new(AtomicBool::new(false));
        let error = quick().gpus(Watched(ended.clone())).json_lines(&path).start().expect_err("no file");
        assert!(matches!(&error, ProfileError::Io { path: named, .. } if *named == path), "{error}");
        assert!(ended.load(Ordering::SeqCst), "the source is not dropped");
    }
}

#[test]
fn a_disk_that_is_full_is_a_gap() {
    let mut monitor = quick().json_lines("/dev/full").start().unwrap();
    until(|| monitor.samples().len() >= 5);
    monitor.stop();
    let gaps = monitor.gaps();
    assert_eq!(gaps.len(), 1, "{gaps:?}");
    assert_eq!((gaps[0].source, gaps[0].to_seconds), (GapSource::File, None));
}

#[test]
fn invalid_settings_are_refused() {
    for (builder, name) in [
        (quick().interval(Duration::ZERO), "interval"),
        (quick().interval(Duration::MAX), "interval"),
        (quick().http_timeout(Duration::ZERO), "http_timeout"),
        (quick().http_timeout(Duration::MAX), "http_timeout"),
        (quick().window(0), "window"),
        (quick().window(usize::MAX), "window"),
    ] {
        assert!(matches!(builder.start(), Err(ProfileError::Setting { name: found, .. }) if found == name), "{name}");
    }
}

#[test]
fn a_port_that_is_taken_is_an_error() {
    let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = taken.local_addr().unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let error = quick().gpus(Watched(ended.clone())).http(address.port()).start().expect_err("the port is taken");
    assert!(matches!(error, ProfileError::Listen { address: named, .. } if named == address), "{error}");
    assert!(error.to_string().contains(&address.to_string()));
    assert!(ended.load(Ordering::SeqCst), "the source is not dropped");
}

fn ask(monitor: &Monitor, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(monitor.http_address().unwrap()).unwrap();
    stream.write_all(request).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_are_served_to_this_machine() {
    let monitor = served().start().unwrap();
    until(|| monitor.samples().len() >= 2);
    let address = monitor.http_address().unwrap();
    assert!(address.ip().is_loopback() && address.port() != 0);
    let answer = ask(&monitor, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())));
    check_metrics(body);
    for name in ["overdrive_system_cpu_utilization_ratio", "overdrive_process_resident_memory_bytes"] {
        assert!(body.contains(name), "{name}\n{body}");
    }
    let head = ask(&monitor, b"HEAD /metrics?x=1 HTTP/1.0\r\n\r\n");
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.ends_with("\r\n\r\n"));
}

/// Checks that each metric's type precedes its values, that names and values are valid, and that counters end in
/// `_total`.
fn check_metrics(body: &str) {
    let mut kinds: BTreeMap<&str, &str> = BTreeMap::new();
    let mut values = 0;
    for line in body.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        match &words[..] {
            ["#", "HELP", _, ..] => {}
            ["#", "TYPE", name, kind] => {
                assert!(kinds.insert(*name, *kind).is_none(), "{line}");
                assert_eq!(*kind == "counter", name.ends_with("_total"), "{line}");
                assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_'));
            }
            [name, value] => {
                assert!(kinds.contains_key(name) && value.parse::<f64>().unwrap().is_finite(), "{line}");
                values += 1;
            }
            _ => panic!("{line:?}"),
        }
    }
    assert!(values >= 15 && values == kinds.len(), "{values} {kinds:?}");
    assert!(body.ends_with('\n'));
}

#[test]
fn invalid_requests_are_answered() {
    let monitor = served().start().unwrap();
    for (request, status) in [
        (&b"GET / HTTP/1.1\r\n\r\n"[..], "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"hello\r\n\r\n", "400"),
        (b"GET /metrics HTTP/1.1 more\r\n\r\n", "400"),
        (b"\xff\xfe /metrics HTTP/1.1\r\n\r\n", "400"),
    ] {
        let answer = ask(&monitor, request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
    }
    // A request without end is cut off at 8 KiB.
    let answer = ask(&monitor, &[b'x'; (8 << 10) + 1]);
    assert!(answer.starts_with("HTTP/1.1 400 "), "{answer}");
}

#[test]
fn silent_connections_delay_neither_others_nor_the_end() {
    // Nothing else listens at this address, whatever the port.
    let mut monitor = served().http_at((Ipv4Addr::new(127, 83, 7, 1), 0)).start().unwrap();
    let address = monitor.http_address().unwrap();
    let silent: Vec<_> = (0..2).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert!(ask(&monitor, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    let (end, ended) = mpsc::channel();
    let stop = thread::spawn(move || {
        monitor.stop();
        end.send(()).unwrap();
    });
    // Without the end, the silent ones would have a quarter of an hour.
    ended.recv_timeout(Duration::from_secs(600)).expect("it waits for silent connections");
    stop.join().unwrap();
    assert!(TcpStream::connect(address).is_err(), "the server still listens");
    drop(silent);
}

#[test]
fn silent_connections_are_closed_in_the_end() {
    let monitor = quick().http(0).http_timeout(Duration::from_millis(100)).start().unwrap();
    let mut silent = TcpStream::connect(monitor.http_address().unwrap()).unwrap();
    let mut answer = String::new();
    silent.read_to_string(&mut answer).unwrap();
    assert_eq!(answer, "");
}

#[test]
fn requests_are_answered_while_others_are_still_being_sent() {
    let monitor = served().start().unwrap();
    until(|| monitor.latest().is_some());
    let address = monitor.http_address().unwrap();
    let mut slow: Vec<_> = (0..4).map(|_| TcpStream::connect(address).unwrap()).collect();
    slow.iter_mut().for_each(|stream| stream.write_all(b"GET /met").unwrap());
    assert!(ask(&monitor, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200"));
    // The slow ones are answered too.
    for mut stream in slow {
        stream.write_all(b"rics HTTP/1.1\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

#[test]
fn the_path_may_be_an_absolute_url() {
    let monitor = served().start().unwrap();
    until(|| monitor.latest().is_some());
    for (target, status) in [
        ("http://localhost:9090/metrics", "200"),
        ("HTTP://localhost/metrics?x=1", "200"),
        ("http://localhost", "404"),
        ("http://localhost?/metrics", "404"),
        ("http://localhost/other/metrics", "404"),
    ] {
        let answer = ask(&monitor, format!("GET {target} HTTP/1.1\r\n\r\n").as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{target}: {answer}");
    }
}
