//! Records the error that ends a rank, for the launcher's report.

use std::backtrace::Backtrace;
use std::error::Error;
use std::io::{self, Write};
use std::panic::{self, PanicHookInfo};
use std::path::{Path, PathBuf};
use std::process::{ExitCode, Termination};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error_file;
use crate::lock::lock;

/// Runs a program's `main`, and records the error that it returns, or the panic that ends it, for the launcher.
///
/// The launcher, `overdrive-run` or torchrun, shows what was recorded in its report of the failed rank. An error is
/// recorded with its causes ([`Error::source`]), and with its backtrace if it has one (`anyhow`'s, with
/// `RUST_BACKTRACE=1`); a panic with its place and backtrace. Panics of other threads before it are recorded too: they
/// may be the cause.
///
/// The error is also written to standard error, as when `main` returns it. The exit code is 1 for an error, 101 for a
/// panic. Without a launcher, when `TORCHELASTIC_ERROR_FILE` is not set, nothing is recorded.
///
/// ```no_run
/// use std::process::ExitCode;
///
/// fn main() -> ExitCode {
///     overdrive_launch::record(train)
/// }
///
/// fn train() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///     Ok(())
/// }
/// ```
///
/// # Source
/// `torch.distributed.elastic.multiprocessing.errors.record`.
pub fn record<T, E>(main: impl FnOnce() -> Result<T, E>) -> ExitCode
where
    T: Termination,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let file = std::env::var_os(error_file::VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    if let Some(file) = &file {
        remember_panics(file.clone());
    }
    let unwinding = WritesPanic(file.clone());
    let result = main();
    drop(unwinding);
    match result {
        Ok(value) => value.report(),
        Err(error) => {
            let error: Box<dyn Error + Send + Sync> = error.into();
            let (message, mut text) = describe(&*error);
            let shown = text.clone();
            if let Some(file) = &file {
                for earlier in remembered().iter().rev() {
                    text.push_str(&before_that(earlier));
                }
                write(file, &message, &text, now());
            }
            say(&shown);
            ExitCode::FAILURE
        }
    }
}

fn before_that(earlier: &Panic) -> String {
    format!("\n\nBefore that, {}", earlier.text())
}

/// Written when a panic unwinds out of `main`, so that a panic that is caught is not recorded.
struct WritesPanic(Option<PathBuf>);

impl Drop for WritesPanic {
    fn drop(&mut self) {
        let Some(file) = self.0.as_ref().filter(|_| thread::panicking()) else { return };
        write_panic(file, &remembered());
    }
}

struct Panic {
    thread: ThreadId,
    message: String,
    /// Looking up its names takes long, so that is done only if they are needed.
    backtrace: Backtrace,
    time: Duration,
}

/// How many panics are remembered; of one thread the last two. Programs may catch any number of them.
const MOST: usize = 8;

/// By time.
static PANICS: Mutex<Vec<Arc<Panic>>> = Mutex::new(Vec::new());

/// A copy, so that nothing is locked while the names of backtraces are looked up.
fn remembered() -> Vec<Arc<Panic>> {
    lock(&PANICS).clone()
}

fn remember(panic: Panic) {
    let mut panics = lock(&PANICS);
    let same: Vec<usize> = (0..panics.len()).filter(|place| panics[*place].thread == panic.thread).collect();
    let dropped = match same[..] {
        [first, _, ..] => Some(first),
        _ => (panics.len() >= MOST).then_some(0),
    };
    dropped.map(|place| panics.remove(place));
    panics.push(Arc::new(panic));
}

fn remember_panics(file: PathBuf) {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        match said(info) {
            // What Rust says before it aborts the program. The panic that led to this is remembered.
            Some("panic in a destructor during cleanup") => write_panic_in_a_destructor(&file, &remembered()),
            Some("panic in a function that cannot unwind") => write_panic(&file, &remembered()),
            _ => {
                remember(Panic::new(info));
                // With `panic = "abort"` nothing unwinds, so this is the last chance.
                if cfg!(panic = "abort") {
                    write_panic(&file, &remembered());
                }
            }
        }
        before(info);
    }));
}

fn said<'a>(info: &'a PanicHookInfo<'_>) -> Option<&'a str> {
    let payload = info.payload();
    payload.downcast_ref::<&str>().copied().or_else(|| Some(payload.downcast_ref::<String>()?.as_str()))
}

/// The last panic of this thread, and what other threads had panicked with before it: that may be its cause. If this
/// thread has had none, it passes on that of another one (`resume_unwind`), which is taken to be the last.
fn write_panic(file: &Path, panics: &[Arc<Panic>]) {
    let own = thread::current().id();
    let last = panics.iter().rposition(|panic| panic.thread == own);
    let Some(last) = last.or(panics.len().checked_sub(1)) else { return };
    let others = panics[..last].iter().rev().filter(|panic| panic.thread != panics[last].thread);
    let text = others.fold(panics[last].text(), |text, panic| text + &before_that(panic));
    write(file, &panics[last].message, &text, panics[last].time);
}

/// The panic that was on its way, and then that of the destructor.
fn write_panic_in_a_destructor(file: &Path, panics: &[Arc<Panic>]) {
    let own = thread::current().id();
    let mut own = panics.iter().filter(|panic| panic.thread == own).rev();
    match (own.next(), own.next()) {
        (Some(second), Some(first)) => {
            let text = format!("{}\n\nAfter that, {}", first.text(), second.text());
            write(file, &first.message, &text, first.time);
        }
        _ => write_panic(file, panics),
    }
}

impl Panic {
    fn new(info: &PanicHookInfo<'_>) -> Self {
        let place = info.location().map(|it| format!(" at {it}")).unwrap_or_default();
        let thread = thread::current();
        let who = thread.name().filter(|name| *name != "main").map(|name| format!("thread `{name}` "));
        let message = format!("{}panicked{place}: {}", who.unwrap_or_default(), said(info).unwrap_or("no message"));
        Self { thread: thread.id(), message, backtrace: Backtrace::force_capture(), time: now() }
    }

    fn text(&self) -> String {
        format!("{}\n\nStack backtrace:\n{}", self.message, own_frames(&self.backtrace.to_string()))
    }
}

fn write(file: &Path, message: &str, text: &str, time: Duration) {
    if let Err(error) = error_file::write(file, &error_file::to_json(message, text, time)) {
        say(&format!("cannot record this error in {}: {error}", file.display()));
    }
}

/// Unlike `eprintln!`, does not panic if standard error is closed.
fn say(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// An error and its causes on one line, and as Rust's `main` shows them, with the backtrace.
fn describe(error: &(dyn Error + 'static)) -> (String, String) {
    let mut line = error.to_string();
    let mut text = format!("Error: {line}");
    let mut cause = error.source();
    let mut number = 0;
    while let Some(error) = cause {
        let said = error.to_string();
        // Many errors repeat their source at the end of their own message.
        if !line.ends_with(&said) {
            text.push_str(if number == 0 { "\n\nCaused by:" } else { "" });
            text.push_str(&format!("\n    {number}: {}", said.replace('\n', "\n       ")));
            line = format!("{line}: {said}");
            number += 1;
        }
        cause = error.source();
    }
    // Errors have no stable way to ask for their backtrace; anyhow's and eyre's show it so.
    const BACKTRACE: &str = "Stack backtrace:\n";
    if let Some((_, frames)) = format!("{error:?}").split_once(BACKTRACE) {
        text.push_str(&format!("\n\n{BACKTRACE}{}", frames.trim_end()));
    }
    (line, text)
}

/// A panic's backtrace without the frames of the standard library at both ends.
fn own_frames(backtrace: &str) -> String {
    let lines: Vec<&str> = backtrace.trim_end().lines().collect();
    let is_panic = |line: &&str| line.contains("core::panicking::") || line.contains("std::panicking::begin_panic");
    let is_place = |line: &&&str| line.trim_start().starts_with("at ");
    let first = lines.iter().rposition(is_panic).map_or(0, |last| last + 1);
    let first = first + lines[first..].iter().take_while(is_place).count();
    let rest = &lines[first..];
    let end = rest.iter().position(|line| line.contains("__rust_begin_short_backtrace")).unwrap_or(rest.len());
    // Without symbols nothing is recognised, and all is kept.
    if end == 0 { lines.join("\n") } else { rest[..end].join("\n") }
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Chained(&'static str, #[source] Option<Box<Chained>>);

    #[test]
    fn an_error_is_described_with_its_causes() {
        let chain = |texts: &[&'static str]| {
            texts.iter().rev().fold(None, |inner, text| Some(Box::new(Chained(text, inner)))).unwrap()
        };
        let (line, text) = describe(&*chain(&["cannot train", "cannot load the data", "no such file"]));
        assert_eq!(line, "cannot train: cannot load the data: no such file");
        assert_eq!(text, "Error: cannot train\n\nCaused by:\n    0: cannot load the data\n    1: no such file");
        // A message that repeats its source.
        assert_eq!(describe(&*chain(&["cannot load: no such file", "no such file"])).0, "cannot load: no such file");
        let traced = describe(&Traced);
        assert_eq!(traced, ("traced".into(), "Error: traced\n\nStack backtrace:\n   0: train::main".into()));
    }

    /// Shows its backtrace as anyhow's error does.
    struct Traced;

    impl fmt::Display for Traced {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("traced")
        }
    }

    impl fmt::Debug for Traced {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("traced\n\nStack backtrace:\n   0: train::main\n")
        }
    }

    impl Error for Traced {}

    #[test]
    fn frames_of_the_standard_library_are_left_out() {
        let text = "   0: std::backtrace::Backtrace::force_capture\n   1: core::panicking::panic_fmt\n             \
                    at /rustc/panicking.rs:75:14\n   2: train::load\n             at ./src/main.rs:3:5\n   \
                    3: train::main\n   4: std::sys::backtrace::__rust_begin_short_backtrace\n   5: main";
        assert_eq!(own_frames(text), "   2: train::load\n             at ./src/main.rs:3:5\n   3: train::main");
        assert_eq!(own_frames("   0: <unknown>\n   1: <unknown>"), "   0: <unknown>\n   1: <unknown>");
    }
}
