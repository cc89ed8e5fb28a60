//! Runs `overdrive-run` with a time limit, and finds the processes that it leaves behind.

use std::fs;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Only stops tests that hang: no test takes a hundredth of it.
pub const LIMIT: Duration = Duration::from_secs(600);

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_overdrive-run");

/// How a launcher ended.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
    pub raw_out: Vec<u8>,
}

impl Ended {
    /// Standard output's lines, sorted: ranks write in any order.
    pub fn sorted(&self) -> Vec<&str> {
        let mut lines: Vec<&str> = self.out.lines().collect();
        lines.sort_unstable();
        lines
    }

    pub fn says(&self, what: &str) {
        assert!(self.err.contains(what), "{what:?} is not in\n{}", self.err);
    }
}

/// A launcher, and a token that all of its processes carry in their environment.
pub struct Launcher {
    command: Command,
    token: String,
}

impl Launcher {
    /// With these options.
    pub fn new(options: &[&str]) -> Self {
        // Ranks of a busy machine may take long to end. Later options win.
        Self::of_program(PROGRAM, &[&["--grace-period=600"], options].concat())
    }

    /// A program that starts launchers.
    pub fn of_program(program: &str, options: &[&str]) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let token = format!("{}.{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let mut command = Command::new(program);
        command.args(options).env("OVERDRIVE_TEST_TOKEN", &token);
        // The tests may run with these variables set, for example under a launcher.
        for name in ["RANK", "OMP_NUM_THREADS", "PYTHON_EXEC", "TORCHELASTIC_USE_AGENT_STORE", "OVERDRIVE_SECRET"] {
            command.env_remove(name);
        }
        let of_a_scheduler = |name: &str| name.starts_with("SLURM_") || name.starts_with("PET_");
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(of_a_scheduler)) {
            command.env_remove(name);
        }
        Self { command, token }
    }

    /// Ranks that run a shell script. [`Running::left`] also finds processes that have `$TOKEN` as an argument.
    pub fn script(options: &[&str], script: &str) -> Self {
        let mut launcher = Self::new(options);
        let script = script.replace("$TOKEN", &launcher.token);
        launcher.command.args(["sh", "-c", &script]);
        launcher
    }

    pub fn args(mut self, args: &[&str]) -> Self {
        self.command.args(args);
        self
    }

    pub fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    pub fn start(mut self) -> Running {
        // A new process group, as a shell would create.
        self.command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = self.command.spawn().unwrap();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let written = [Written::read(out), Written::read(err)];
        Running { child: Killed(child), written, token: self.token }
    }

    pub fn end(self) -> Ended {
        self.start().end()
    }
}

/// A program that is killed after the limit.
pub fn limited(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("timeout");
    command.arg("--signal=KILL").arg(LIMIT.as_secs().to_string()).arg(program);
    command
}

/// What a launcher has written so far, and the thread that reads it.
struct Written {
    bytes: Arc<Mutex<Vec<u8>>>,
    reader: JoinHandle<()>,
}

impl Written {
    fn read(mut from: impl Read + Send + 'static) -> Self {
        let bytes: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (kept, mut chunk) = (Arc::clone(&bytes), vec![0; 64 << 10]);
        let reader = thread::spawn(move || {
            loop {
                match from.read(&mut chunk).unwrap() {
                    0 => return,
                    read => kept.lock().unwrap().extend_from_slice(&chunk[..read]),
                }
            }
        });
        Self { bytes, reader }
    }

    fn all(self) -> Vec<u8> {
        self.reader.join().unwrap();
        std::mem::take(&mut *self.bytes.lock().unwrap())
    }
}

/// Kills the launcher, and with it the ranks, when a test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
    }
}

/// A launcher that was started.
pub struct Running {
    child: Killed,
    written: [Written; 2],
    token: String,
}

impl Running {
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child.0)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for the guard.
    pub fn guard(&self) -> Pid {
        wait_for("the guard", || self.living_guard())
    }

    /// The guard process, which is the launcher's first child; `None` before it has started.
    pub fn living_guard(&self) -> Option<Pid> {
        children(self.pid().as_raw_pid()).first().copied().and_then(Pid::from_raw)
    }

    /// Whether the launcher has ended. It stays a zombie until [`end`](Self::end).
    pub fn has_ended(&self) -> bool {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.pid().as_raw_pid())).unwrap_or_default();
        stat.rsplit_once(") ").is_none_or(|(_, rest)| rest.starts_with('Z'))
    }

    /// Waits for a file that a rank makes.
    pub fn wait_for_file(&self, path: &Path) {
        wait_for(&format!("{}", path.display()), || path.exists().then_some(()));
    }

    /// Waits until the launcher has said this on standard error.
    pub fn wait_until_it_says(&self, what: &str) {
        let has = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains(what);
        wait_for(what, || has(&self.written[1].bytes.lock().unwrap()).then_some(()));
    }

    /// Processes of this launch that are alive.
    pub fn left(&self) -> Vec<String> {
        left(&self.token)
    }

    /// Waits until nothing is left.
    pub fn wait_until_gone(&self) {
        let start = Instant::now();
        while !self.left().is_empty() {
            assert!(start.elapsed() < LIMIT, "left: {:?}", self.left());
            thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn end(mut self) -> Ended {
        let start = Instant::now();
        let status = loop {
            if let Some(status) = self.child.0.try_wait().unwrap() {
                break status;
            }
            if start.elapsed() > LIMIT {
                self.child.0.kill().unwrap();
                let [out, err] = self.written.map(|it| String::from_utf8_lossy(&it.all()).into_owned());
                panic!("the launcher hangs; it wrote\n{out}\n{err}");
            }
            thread::sleep(Duration::from_millis(2));
        };
        let [out, err] = self.written.map(Written::all);
        let ended = Ended {
            code: status.code(),
            out: String::from_utf8_lossy(&out).into_owned(),
            err: String::from_utf8_lossy(&err).into_owned(),
            raw_out: out,
        };
        // No process survives the launcher, however it ended. If it was killed, the guard needs a moment.
        let start = Instant::now();
        while !left(&self.token).is_empty() {
            assert!(status.code().is_none() && start.elapsed() < LIMIT, "left: {:?}\n{ended:?}", left(&self.token));
            thread::sleep(Duration::from_millis(5));
        }
        ended
    }
}

/// Calls `attempt` with the time factors 1, 10 and 100 until the machine's load does not disturb it. `attempt` returns
/// what it saw as an error if it was disturbed, and panics if a property does not hold.
pub fn undisturbed<T>(attempt: impl Fn(f64) -> Result<T, String>) -> T {
    let mut seen = String::new();
    for times in [1.0, 10.0, 100.0] {
        match attempt(times) {
            Ok(value) => return value,
            Err(why) => seen = why,
        }
    }
    panic!("disturbed even with a hundred times the time:\n{seen}")
}

pub fn wait_for<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = ready() {
            return value;
        }
        assert!(start.elapsed() < LIMIT, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

/// The living processes that carry a token in their environment or their arguments.
fn left(token: &str) -> Vec<String> {
    let variable = format!("OVERDRIVE_TEST_TOKEN={token}");
    let carries = |pid: &i32| {
        let holds = |file: &str, what: &str| {
            let bytes = fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default();
            bytes.split(|byte| *byte == 0).any(|it| it == what.as_bytes())
        };
        holds("environ", &variable) || holds("cmdline", token)
    };
    let shown = |pid: i32| {
        let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        format!("{pid} {}", String::from_utf8_lossy(&words).replace('\0', " "))
    };
    pids().filter(carries).map(shown).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
}

pub fn children(parent: i32) -> Vec<i32> {
    let is_child = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.strip_prefix("PPid:").is_some_and(|it| it.trim() == parent.to_string()))
    };
    pids().filter(is_child).collect()
}
