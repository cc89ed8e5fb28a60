//! Passes the ranks' outputs on to the console and to files.

use std::fs::File;
use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::colors::{self, Colors};
use crate::error::LaunchError;
use crate::filters::Filtered;
use crate::lines::{Splitter, Tail};
use crate::lock::lock;

/// Bytes per read. A rank that writes faster than its output is read blocks on the full pipe.
const PIECE: usize = 64 << 10;
const STACK: usize = 128 << 10;
/// How long to wait for outputs that stay open but silent after the ranks' processes have ended.
const SILENCE_LIMIT: Duration = Duration::from_secs(2);

/// Standard output or standard error.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    Out,
    Err,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Out => "standard output",
            Self::Err => "standard error",
        }
    }

    pub fn file_name(self) -> &'static str {
        match self {
            Self::Out => "stdout.log",
            Self::Err => "stderr.log",
        }
    }
}

/// The launcher's standard output and error. One lock for both, because both may be the same terminal.
pub struct Console {
    out: File,
    err: File,
    colors: Colors,
    lock: Mutex<()>,
}

impl Console {
    pub fn new() -> Result<Self, LaunchError> {
        let copy = |fd: io::Result<OwnedFd>| fd.map(File::from).map_err(LaunchError::system("copy standard output"));
        Ok(Self {
            out: copy(io::stdout().as_fd().try_clone_to_owned())?,
            err: copy(io::stderr().as_fd().try_clone_to_owned())?,
            colors: Colors::from_environment(),
            lock: Mutex::new(()),
        })
    }

    /// What is printed before each line of a rank: on a terminal in the rank's colour.
    pub fn prefix(&self, kind: Kind, text: &str, rank: usize) -> Vec<u8> {
        let file = if kind == Kind::Out { &self.out } else { &self.err };
        let colored = self.colors.wanted() && file.is_terminal();
        if colored { colors::of_rank(text, rank).into_bytes() } else { text.as_bytes().to_vec() }
    }

    fn write(&self, kind: Kind, text: &[u8]) -> io::Result<()> {
        let _whole = lock(&self.lock);
        let mut file = if kind == Kind::Out { &self.out } else { &self.err };
        let mut rest = text;
        while !rest.is_empty() {
            match file.write(rest) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(length) => rest = &rest[length..],
                // Another process has made the terminal or pipe non-blocking, and it is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(Duration::from_millis(1)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Prints a message of the launcher itself.
    pub fn say(&self, text: &str) {
        // Ignored: if standard error is closed, there is nowhere to report it.
        let _ = self.write(Kind::Err, format!("overdrive-run: {text}\n").as_bytes());
    }
}

/// What the reader threads of one attempt have done, so that [`drain`] can tell a slow output from a stalled one.
#[derive(Default)]
pub struct Progress {
    bytes: AtomicU64,
    /// How many readers are passing bytes on. Those that wait for bytes do not count.
    busy: AtomicUsize,
}

/// Where one output of one rank goes.
pub struct Route {
    pub kind: Kind,
    /// Printed before each line on the console.
    pub prefix: Vec<u8>,
    /// The same without colours, for files.
    pub plain_prefix: Vec<u8>,
    pub console: Option<Arc<Console>>,
    pub file: Option<File>,
    /// Takes the lines that match a filter, of all ranks.
    pub filtered: Option<Arc<Filtered>>,
    pub progress: Arc<Progress>,
}

/// An output of a rank and the thread that reads it.
pub struct Output {
    pub kind: Kind,
    tail: Arc<Mutex<Tail>>,
    reader: JoinHandle<()>,
    /// Belongs to the reader, which closes it.
    source: Weak<File>,
}

impl Output {
    pub fn start(source: impl Into<OwnedFd>, route: Route) -> Result<Self, LaunchError> {
        let (kind, tail) = (route.kind, Arc::<Mutex<Tail>>::default());
        let (own, kept) = (Arc::new(File::from(source.into())), Arc::clone(&tail));
        let source = Arc::downgrade(&own);
        let reader = thread::Builder::new().name(kind.file_name().to_owned()).stack_size(STACK);
        let reader = reader.spawn(move || pump(&own, route, &kept)).map_err(LaunchError::system("start a thread"))?;
        Ok(Self { kind, tail, reader, source })
    }

    /// Whether there is something for the reader: bytes, or the end.
    fn is_ready(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let is_ready = |source: Arc<File>| poll(&mut [PollFd::new(&*source, PollFlags::IN)], Some(&now)) != Ok(0);
        self.source.upgrade().is_some_and(is_ready)
    }

    /// The last lines so far.
    pub fn tail(&self) -> Vec<String> {
        lock(&self.tail).lines()
    }
}

/// Waits until the remaining output of ended ranks has been passed on. Returns early when `stop` returns true, or when
/// an output stays open but silent: then a process outside this launch holds the pipe open. An output is not silent
/// while its reader only waits for a CPU.
pub fn drain<'a>(outputs: impl Iterator<Item = &'a Output>, progress: &Progress, mut stop: impl FnMut() -> bool) {
    let mut open: Vec<&Output> = outputs.collect();
    let mut seen = (progress.bytes.load(Ordering::SeqCst), Instant::now());
    let mut pause = Duration::from_micros(50);
    loop {
        open.retain(|output| !output.reader.is_finished());
        // In this order: a reader is busy before it takes bytes from its pipe, and counts them before it is idle again.
        let is_ready = open.iter().any(|output| output.is_ready());
        let is_busy = progress.busy.load(Ordering::SeqCst) > 0;
        let bytes = progress.bytes.load(Ordering::SeqCst);
        let is_silent = !is_ready && !is_busy && bytes == seen.0;
        if !is_silent {
            seen = (bytes, Instant::now());
        }
        if open.is_empty() || is_silent && seen.1.elapsed() > SILENCE_LIMIT || stop() {
            return;
        }
        thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

pub fn create(path: &Path) -> Result<File, LaunchError> {
    File::create(path).map_err(LaunchError::system(format!("create {}", path.display())))
}

/// Reads an output to its end. If its file cannot be written, reading continues without the file. If the console fails
/// and there is no file, the pipe is closed, and the rank gets SIGPIPE or EPIPE as it would without a launcher.
fn pump(mut source: &File, mut route: Route, tail: &Mutex<Tail>) {
    let mut piece = vec![0; PIECE];
    let mut text = Vec::new();
    let mut lines = Splitter::default();
    let progress = Arc::clone(&route.progress);
    loop {
        while poll(&mut [PollFd::new(source, PollFlags::IN)], None) == Err(Errno::INTR) {}
        progress.busy.fetch_add(1, Ordering::SeqCst);
        let length = match source.read(&mut piece) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                progress.busy.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            Err(_) => 0,
        };
        text.clear();
        let mut emit = |line: &[u8]| {
            lock(tail).push(line);
            if let Some(filtered) = &route.filtered {
                let written = filtered.push(&route.plain_prefix, line);
                if let (Err(error), Some(console)) = (written, &route.console) {
                    console.say(&format!("cannot write {} any more: {error}", filtered.path().display()));
                }
            }
            if route.console.is_some() {
                text.extend_from_slice(&route.prefix);
                text.extend_from_slice(line);
                // The next line on the console may be another rank's, so this one has to end.
                if !line.ends_with(b"\n") && !line.ends_with(b"\r") {
                    text.push(b'\n');
                }
            }
        };
        match length {
            0 => lines.finish(&mut emit),
            _ => lines.push(&piece[..length], &mut emit),
        }
        let wanted = route.pass_on(&piece[..length], &text);
        progress.bytes.fetch_add(length as u64, Ordering::SeqCst);
        progress.busy.fetch_sub(1, Ordering::SeqCst);
        if length == 0 || !wanted {
            return;
        }
    }
}

impl Route {
    /// Returns false when the console has failed and there is no file.
    fn pass_on(&mut self, raw: &[u8], text: &[u8]) -> bool {
        if let Some(file) = &mut self.file
            && let Err(error) = file.write_all(raw)
        {
            if let Some(console) = &self.console {
                console.say(&format!("cannot write {} any more: {error}", self.kind.file_name()));
            }
            self.file = None;
        }
        if let Some(console) = &self.console
            && !text.is_empty()
            && console.write(self.kind, text).is_err()
        {
            self.console = None;
            return self.file.is_some();
        }
        true
    }
}
