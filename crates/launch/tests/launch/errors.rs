//! The errors that ranks record in `TORCHELASTIC_ERROR_FILE`, and the launcher's report of them.

use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc::{Sender, channel};
use std::thread;

use overdrive_launch::{Launch, LaunchError, record};
use rustix::process::{Signal, kill_process};
use tempfile::TempDir;

use crate::launcher::{Ended, Launcher, limited, wait_for};
use crate::nodes::both;

crate::tests![
    each_rank_has_an_error_file_of_its_own,
    an_error_is_reported_with_its_causes,
    a_panic_is_reported_with_its_backtrace,
    a_panic_of_another_thread_is_reported_with_the_error,
    a_panic_of_another_thread_is_reported_with_the_panic_that_follows,
    a_panic_of_another_thread_that_is_passed_on_is_reported,
    a_panic_is_not_replaced_by_those_that_it_causes,
    a_panic_during_a_panic_is_reported,
    a_panic_that_was_caught_is_not_recorded,
    success_records_nothing,
    the_file_has_pytorchs_format,
    an_error_that_cannot_be_shown_is_recorded,
    without_a_launcher_the_error_is_shown_only,
    a_python_traceback_is_reported,
    the_error_that_was_recorded_first_is_named,
    errors_of_other_nodes_are_reported,
    errors_of_an_earlier_attempt_are_not_shown,
    error_files_are_kept_beside_the_logs,
    a_damaged_error_file_is_reported_and_does_no_harm,
    error_files_are_removed_when_the_run_ends,
    error_files_are_removed_when_the_launcher_or_the_guard_is_killed,
];

/// The variable with a rank's task: how it ends.
const TASK: &str = "OVERDRIVE_TEST_RECORD";

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failure(&'static str, #[source] Option<Box<Failure>>);

/// A task of this program as a rank.
pub fn be_a_rank_if_told() -> Option<ExitCode> {
    let task = env::var(TASK).ok()?;
    Some(record(|| a_function_of_the_rank(&task)))
}

/// Ends a thread that waits for images.
struct Ends(Option<(Sender<()>, thread::JoinHandle<()>)>);

impl Drop for Ends {
    fn drop(&mut self) {
        if let Some((images, loader)) = self.0.take() {
            drop(images);
            let _panic = loader.join();
        }
    }
}

struct Panics;

impl Drop for Panics {
    fn drop(&mut self) {
        panic!("not saved")
    }
}

#[inline(never)]
fn a_function_of_the_rank(task: &str) -> Result<ExitCode, Failure> {
    match task {
        "error" => Err(Failure("cannot train", Some(Box::new(Failure("no data", None))))),
        "panic" => panic!("the {task} of rank {}", env::var("RANK").unwrap_or_default()),
        "thread" => {
            let loader = thread::Builder::new().name("loader".into()).spawn(|| panic!("damaged image"));
            let _panic = loader.unwrap().join();
            Err(Failure("the loader has ended", None))
        }
        "caught" => {
            let _panic = std::panic::catch_unwind(|| panic!("too large"));
            Ok(ExitCode::from(3))
        }
        "waiting" => {
            let (images, waiting) = channel::<()>();
            let loader = move || {
                let _images = images;
                panic!("damaged image")
            };
            thread::Builder::new().name("loader".into()).spawn(loader).unwrap();
            waiting.recv().unwrap();
            Ok(ExitCode::SUCCESS)
        }
        "waited for" => {
            let (images, waiting) = channel::<()>();
            let loader = thread::Builder::new().name("loader".into()).spawn(move || waiting.recv().unwrap());
            let _ends = Ends(Some((images, loader.unwrap())));
            panic!("no data")
        }
        "resume" => {
            let loader = thread::Builder::new().name("loader".into()).spawn(|| panic!("damaged image"));
            let panic = loader.unwrap().join().unwrap_err();
            std::panic::resume_unwind(panic)
        }
        "destructor" => {
            let _panics = Panics;
            panic!("no data")
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// A launcher of this program as ranks with a task.
fn ranks(options: &[&str], task: &str) -> Launcher {
    let program = env::current_exe().unwrap();
    Launcher::new(options).args(&[program.to_str().unwrap()]).env(TASK, task)
}

fn each_rank_has_an_error_file_of_its_own() {
    let script = "echo $TORCHELASTIC_ERROR_FILE; echo '{}' > $TORCHELASTIC_ERROR_FILE";
    let ended = Launcher::script(&["--nproc-per-node=2"], script).env("TORCHELASTIC_ERROR_FILE", "/outer").end();
    assert_eq!((ended.code, ended.err.matches("No such file").count()), (Some(0), 0), "{ended:?}");
    let files: Vec<&str> = ended.out.lines().map(|line| line.split_once(": ").unwrap().1).collect();
    assert!(files.iter().all(|file| file.starts_with('/') && *file != "/outer"), "{files:?}");
    assert!(files.len() == 2 && files[0] != files[1], "{files:?}");
}

fn an_error_is_reported_with_its_causes() {
    let ended = ranks(&[], "error").end();
    assert_eq!(ended.code, Some(1));
    let error = ["Error: cannot train", "", "Caused by:", "    0: no data"];
    ended.says(&format!("\n  the error that it has recorded:\n    {}\n", error.join("\n    ")));
    // On standard error too, as without `record`.
    ended.says("[rank0]: Error: cannot train\n");
}

fn a_panic_is_reported_with_its_backtrace() {
    let ended = ranks(&[], "panic").env("RUST_BACKTRACE", "0").end();
    assert_eq!(ended.code, Some(101));
    let error = recorded(&ended);
    assert!(error.starts_with("    panicked at "), "{error}");
    assert!(error.contains("errors.rs:") && error.contains(": the panic of rank 0\n"), "{error}");
    assert!(error.contains("a_function_of_the_rank") && !error.contains("core::panicking"), "{error}");
}

fn a_panic_of_another_thread_is_reported_with_the_error() {
    let ended = ranks(&[], "thread").end();
    assert_eq!(ended.code, Some(1));
    ended.says("\n    Error: the loader has ended\n");
    ended.says("\n    Before that, thread `loader` panicked at ");
    ended.says(": damaged image\n");
}

/// What the launcher shows of the error that a rank has recorded.
fn recorded(ended: &Ended) -> &str {
    let (_, report) = ended.err.split_once("the error that it has recorded:\n").unwrap_or_else(|| panic!("{ended:?}"));
    report.split_once("the end of its standard error").unwrap().0
}

fn a_panic_of_another_thread_is_reported_with_the_panic_that_follows() {
    let ended = ranks(&[], "waiting").end();
    assert_eq!(ended.code, Some(101));
    let error = recorded(&ended);
    assert!(error.starts_with("    panicked at ") && error.contains("RecvError"), "{error}");
    let (_, before) = error.split_once("\n    Before that, thread `loader` panicked at ").unwrap();
    assert!(before.contains(": damaged image\n"), "{error}");
}

fn a_panic_of_another_thread_that_is_passed_on_is_reported() {
    let ended = ranks(&[], "resume").end();
    assert_eq!(ended.code, Some(101));
    let error = recorded(&ended);
    assert!(error.starts_with("    thread `loader` panicked at ") && error.contains(": damaged image\n"), "{error}");
    assert!(!error.contains("Before that"), "{error}");
}

fn a_panic_is_not_replaced_by_those_that_it_causes() {
    let ended = ranks(&[], "waited for").end();
    assert_eq!(ended.code, Some(101));
    assert!(recorded(&ended).contains(": no data\n") && !recorded(&ended).contains("RecvError"), "{ended:?}");
}

fn a_panic_during_a_panic_is_reported() {
    let ended = ranks(&[], "destructor").end();
    assert_eq!(ended.code, Some(134));
    let (cause, after) = recorded(&ended).split_once("\n    After that, panicked at ").unwrap();
    assert!(cause.contains(": no data\n") && after.contains(": not saved\n"), "{ended:?}");
}

fn a_panic_that_was_caught_is_not_recorded() {
    let ended = ranks(&[], "caught").end();
    assert_eq!(ended.code, Some(3));
    ended.says("too large");
    assert!(!ended.err.contains("recorded"), "{}", ended.err);
}

fn success_records_nothing() {
    let base = TempDir::new().unwrap();
    let ended = ranks(&["--log-dir", base.path().to_str().unwrap()], "success").end();
    assert_eq!(ended.code, Some(0));
    assert_eq!(files_named(base.path(), "error.json"), Vec::<PathBuf>::new());
}

/// This program alone, with a task and the variable set.
fn alone(task: &str, file: &Path) -> std::process::Output {
    let mut command = limited(env::current_exe().unwrap());
    command.env(TASK, task).env("TORCHELASTIC_ERROR_FILE", file).output().unwrap()
}

fn the_file_has_pytorchs_format() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("error.json");
    assert_eq!(alone("error", &file).status.code(), Some(1));
    let text = fs::read_to_string(&file).unwrap();
    // What PyTorch's `ProcessFailure` looks up; the time is a text with whole seconds.
    assert!(text.starts_with(r#"{"message":{"#), "{text}");
    assert!(text.contains(r#""message":"cannot train: no data""#), "{text}");
    assert!(text.contains(r#""py_callstack":"Error: cannot train\n\nCaused by:\n    0: no data""#), "{text}");
    let (_, time) = text.split_once(r#""timestamp":""#).unwrap();
    assert!(time.split('"').next().unwrap().parse::<u64>().unwrap() > 1_700_000_000, "{text}");
    // A folder that is not there: the error is still shown.
    let output = alone("error", &folder.path().join("absent/error.json"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("Error: cannot train\n"), "{said}");
    assert!(said.contains("cannot record this error in "), "{said}");
}

fn an_error_that_cannot_be_shown_is_recorded() {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("error.json");
    let mut command = limited(env::current_exe().unwrap());
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let status = command.env(TASK, "error").env("TORCHELASTIC_ERROR_FILE", &file).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(fs::read_to_string(&file).unwrap().contains("cannot train: no data"));
}

fn without_a_launcher_the_error_is_shown_only() {
    let output = alone("error", Path::new(""));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!((output.status.code(), said.as_str()), (Some(1), "Error: cannot train\n\nCaused by:\n    0: no data\n"));
    assert_eq!(alone("success", Path::new("")).status.code(), Some(0));
}

/// A shell command that writes an error file as Python's `@record` does.
fn python_error(message: &str, time: &str) -> String {
    format!(
        r#"printf '%s' '{{"message": {{"message": "{message}", "extraInfo": {{"py_callstack": "Traceback (most recent call last):\n  File \"train.py\", line 3, in main\n{message}\n", "timestamp": "{time}"}}}}}}' > $TORCHELASTIC_ERROR_FILE"#
    )
}

fn a_python_traceback_is_reported() {
    let script = format!("{}; exit 1", python_error("ValueError: no data", "1764163200"));
    let ended = Launcher::script(&[], &script).end();
    let lines = ["Traceback (most recent call last):", "  File \"train.py\", line 3, in main", "ValueError: no data"];
    ended.says(&format!("\n  the error that it has recorded:\n    {}\n  it wrote nothing", lines.join("\n    ")));
}

/// Ranks 0 and 1 fail, rank 0 first, but the error of rank 1 is the older one.
fn causes(of_first: &str, of_second: &str) -> String {
    let script = format!(
        "case $RANK in \
         0) {}; while ! [ -e $READY ]; do sleep 0.01; done; echo $$ > $READY.tmp; mv $READY.tmp $READY.0; exit 1;; \
         1) {}; touch $READY; while ! [ -e $READY.0 ]; do sleep 0.01; done; \
            while kill -0 $(cat $READY.0) 2> /dev/null; do sleep 0.01; done; exit 2;; esac",
        python_error("ConnectionError: lost", of_first),
        python_error("ValueError: no data", of_second)
    );
    let folder = TempDir::new().unwrap();
    let launcher = Launcher::script(&["--nproc-per-node=2", "--failure-window=600"], &script);
    let ended = launcher.env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(1));
    ended.says("overdrive-run: rank 0 failed: exit code 1");
    ended.says("ConnectionError: lost");
    ended.says("    the error that it has recorded:\n");
    ended.err
}

fn the_error_that_was_recorded_first_is_named() {
    let report = causes("1764163205", "1764163202");
    let cause = "\n  the first error was that of rank 1, 3.000 s earlier: ValueError: no data\n";
    assert!(report.contains(cause), "{report}");
    assert!(report.contains("      Traceback (most recent call last):\n"), "{report}");
    // At the same time, the first to end counts, and of the others only the messages are shown.
    let report = causes("1764163202", "1764163202");
    assert!(!report.contains("the first error was"), "{report}");
    assert!(report.contains("      ValueError: no data\n"), "{report}");
    assert!(!report.contains("      Traceback"), "{report}");
}

fn errors_of_other_nodes_are_reported() {
    let error = python_error("ValueError: no data", "1764163200");
    let script = format!("[ $RANK = 0 ] && sleep 1000; {error}; exit 4");
    for ended in both(&[], &script).map(|node| node.end()) {
        assert_eq!(ended.code, Some(4));
        ended.says("rank 1 failed: exit code 4");
        ended.says("    ValueError: no data\n");
    }
}

fn errors_of_an_earlier_attempt_are_not_shown() {
    let error = python_error("ValueError: no data", "1764163200");
    let script = format!("[ $TORCHELASTIC_RESTART_COUNT = 1 ] && exit 5; {error}; exit 4");
    let ended = Launcher::script(&["--max-restarts=1"], &script).end();
    assert_eq!(ended.code, Some(5));
    assert!(!ended.err.contains("ValueError"), "{}", ended.err);
    // Nor is one of a start whose port was taken.
    let script = format!(
        "[ -e $READY ] && exit 5; touch $READY; {error}; echo 'EADDRINUSE: address already in use' >&2; exit 4"
    );
    let folder = TempDir::new().unwrap();
    let ended = Launcher::script(&[], &script).env("READY", folder.path().join("ready")).end();
    assert_eq!(ended.code, Some(5));
    assert!(!ended.err.contains("ValueError"), "{}", ended.err);
}

fn files_named(folder: &Path, name: &str) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    let found = paths.flat_map(|path| if path.is_dir() { files_named(&path, name) } else { vec![path] });
    found.filter(|path| path.ends_with(name)).collect()
}

fn error_files_are_kept_beside_the_logs() {
    let base = TempDir::new().unwrap();
    let program = env::current_exe().unwrap();
    let logs = base.path().join(OsStr::from_bytes(b"not UTF-8: \xff"));
    let launch = Launch::new(program).env(TASK, "error").nproc(2).local_ranks_filter([]).log_dir(logs);
    let LaunchError::Rank(report) = launch.run().unwrap_err() else { panic!("no rank has failed") };
    let error = report.first.error.as_ref().unwrap();
    assert_eq!(error.message, "cannot train: no data");
    assert_eq!(error.traceback.first().map(String::as_str), Some("Error: cannot train"));
    assert!(error.time.is_some() && report.cause().error.is_some());
    let kept = files_named(base.path(), &format!("attempt_0/{}/error.json", report.first.rank));
    assert_eq!(kept.len(), 1, "{kept:?}");
}

fn a_damaged_error_file_is_reported_and_does_no_harm() {
    for damaged in ["echo '{' >", "mkdir", "head -c 2000000 /dev/zero >"] {
        let ended = Launcher::script(&[], &format!("{damaged} $TORCHELASTIC_ERROR_FILE; echo why >&2; exit 6")).end();
        assert_eq!(ended.code, Some(6), "{ended:?}");
        ended.says("its error file ");
        ended.says(" cannot be read: ");
        ended.says("the end of its standard error:\n    why\n");
    }
    // A file that no one can write to its end.
    let ended = Launcher::script(&[], "mkfifo $TORCHELASTIC_ERROR_FILE; exit 6").end();
    assert_eq!(ended.code, Some(6), "{ended:?}");
    ended.says("it is not a file");
}

/// A launcher whose temporary files are in `folder`.
fn in_folder(folder: &TempDir, script: &str) -> Launcher {
    Launcher::script(&[], script).env("TMPDIR", folder.path()).env("READY", folder.path().join("ready"))
}

fn left_in(folder: &TempDir) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|it| it.unwrap().path());
    paths.filter(|path| !path.ends_with("ready")).collect()
}

fn error_files_are_removed_when_the_run_ends() {
    for end in ["exit 0", "exit 1"] {
        let folder = TempDir::new().unwrap();
        let script = format!("echo '{{}}' > $TORCHELASTIC_ERROR_FILE; ls $TMPDIR > $READY; {end}");
        let ended: Ended = in_folder(&folder, &script).end();
        assert!(ended.code.is_some());
        // It was there.
        assert!(fs::read_to_string(folder.path().join("ready")).unwrap().contains("overdrive-errors-"));
        assert_eq!(left_in(&folder), Vec::<PathBuf>::new());
    }
}

fn error_files_are_removed_when_the_launcher_or_the_guard_is_killed() {
    for kills_the_guard in [false, true] {
        let folder = TempDir::new().unwrap();
        let script = "echo '{}' > $TORCHELASTIC_ERROR_FILE; touch $READY; sleep 1000";
        let running = in_folder(&folder, script).start();
        running.wait_for_file(&folder.path().join("ready"));
        assert_eq!(left_in(&folder).len(), 1);
        if kills_the_guard {
            kill_process(running.guard(), Signal::KILL).unwrap();
        } else {
            running.signal(Signal::KILL);
        }
        running.wait_until_gone();
        running.end();
        wait_for("the folder's removal", || left_in(&folder).is_empty().then_some(()));
    }
}
