//! The bundle's scripts, with programs and a `torch` that only say what they were given.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const TORCH: &str = "import os
__version__ = '2.11.0+stub'
class version: cuda = None
class cuda:
    is_available = staticmethod(lambda: False)
    device_count = staticmethod(lambda: int(os.path.exists(os.environ.get('LOST', ''))))
    @staticmethod
    def get_device_name(index): raise RuntimeError('CUDA error: unspecified launch failure')
";

const PROGRAM: &str = "#!/bin/sh
[ \"$1\" != --help ] || exit 0
[ \"$1\" != --check-device ] || { echo 'cuda: false'; exit; }
echo \"$(basename \"$0\") FAKECUDA=$FAKECUDA $*\"
[ -z \"$RESULT\" ] || echo \"test result: ok. $RESULT; 0 measured; 2 filtered out; finished in 0.00s\"
[ -z \"$HANGS\" ] || { echo \"hangs $$\"; exec sleep 100; }
";

/// Why the tests are skipped.
fn lacks() -> Option<&'static str> {
    let starts =
        |program, argument| Command::new(program).arg(argument).output().is_ok_and(|output| output.status.success());
    [("python3", "no python3"), ("timeout", "no timeout"), ("xz", "no xz")]
        .into_iter()
        .find_map(|(program, lacks)| (!starts(program, "--version")).then_some(lacks))
}

/// A bundle, and beside it the `torch` of its Python.
fn bundle() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let write = |path: &str, text: &str| {
        let path = folder.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    };
    write("run.sh", include_str!("../bundle/run.sh"));
    write("collect.py", include_str!("../bundle/collect.py"));
    for name in ["overdrive-bench", "overdrive-versus", "overdrive-parity", "overdrive-gpu-tests"] {
        write(&format!("bin/{name}"), PROGRAM);
        assert!(Command::new("xz").arg(folder.path().join("bin").join(name)).status().unwrap().success());
    }
    write("python/torch/__init__.py", TORCH);
    write("python/torch/lib/libtorch_cuda.so", "");
    folder
}

fn run_sh(bundle: &Path, out: &Path) -> Command {
    let mut command = Command::new(bundle.join("run.sh"));
    command.arg("--out").arg(out).current_dir(bundle).stdin(Stdio::null());
    command.env("OVERDRIVE_PYTHON", "python3").env("PYTHONPATH", bundle.join("python")).env_remove("FAKECUDA");
    command
}

fn results(out: &Path) -> Value {
    assert!(fs::read_to_string(out.join("report.html")).unwrap().contains("Stages of this run"));
    serde_json::from_str(&fs::read_to_string(out.join("results.json")).unwrap()).unwrap()
}

/// The verdicts of the stages, in order.
fn verdicts(results: &Value) -> Vec<&str> {
    results["stages"].as_array().unwrap().iter().map(|stage| stage["verdict"].as_str().unwrap()).collect()
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn every_stage_is_reported_and_none_runs_on_a_fake_gpu() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let out = bundle.path().join("results of today");
    let output = run_sh(bundle.path(), &out).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let results = results(&out);
    assert_eq!(verdicts(&results), ["passed"; 7]);
    for stage in &results["stages"].as_array().unwrap()[1..] {
        assert!(stage["log"].as_str().unwrap().contains("FAKECUDA=0"), "{stage}");
    }
}

#[test]
fn a_stage_whose_tests_were_all_ignored_is_skipped() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let out = bundle.path().join("results");
    for (result, verdict) in [
        ("0 passed; 0 failed; 73 ignored", "skipped"),
        ("1 passed; 0 failed; 72 ignored", "passed"),
        ("0 passed; 0 failed; 0 ignored", "passed"),
    ] {
        let output = run_sh(bundle.path(), &out).env("RESULT", result).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(verdicts(&results(&out))[1..], [verdict; 6], "{result}");
    }
}

#[test]
fn only_the_stages_that_were_asked_for_run() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let out = bundle.path().join("results");
    let output = run_sh(bundle.path(), &out).args(["--only", "parity, versus"]).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let results = results(&out);
    let names: Vec<_> = results["stages"].as_array().unwrap().iter().map(|stage| stage["name"].to_string()).collect();
    assert_eq!(names, ["\"device\"", "\"versus\"", "\"parity\""]);
    for (names, says) in [("speed", "no stage speed; there are gpu-tests"), (", ", "--only needs names of stages")] {
        let output = run_sh(bundle.path(), &out).args(["--only", names]).output().unwrap();
        let text = text(&output);
        assert!(output.status.code() == Some(2) && text.contains(says), "{text}");
    }
}

#[test]
fn a_device_that_was_lost_in_a_stage_takes_no_results_with_it() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let out = bundle.path().join("results");
    let output = run_sh(bundle.path(), &out).env("LOST", bundle.path()).output().unwrap();
    assert!(output.status.success(), "{}", text(&output));
    let gpus = results(&out)["machine"]["gpus"].to_string();
    assert!(gpus.contains("unspecified launch failure"), "{gpus}");
}

#[test]
fn a_folder_that_cannot_be_written_is_refused_before_the_stages() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let output = run_sh(bundle.path(), Path::new("/proc/self")).output().unwrap();
    let text = text(&output);
    assert!(output.status.code() == Some(2) && text.contains("cannot write to /proc/self"), "{text}");
    assert!(!text.contains("== device"), "{text}");
}

#[test]
fn an_interrupted_run_ends_its_stage_and_reports() {
    if let Some(lacks) = lacks() {
        return println!("skipped: {lacks}");
    }
    let bundle = bundle();
    let out = bundle.path().join("results");
    let mut run = run_sh(bundle.path(), &out).env("HANGS", "1").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    let hangs = lines.find_map(|line| line.unwrap().strip_prefix("hangs ").map(str::to_owned)).unwrap();
    let number = run.id().to_string();
    assert!(Command::new("kill").args(["-TERM", number.as_str()]).status().unwrap().success());
    // Its output ends when the stage has.
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    assert_eq!(run.wait().unwrap().code(), Some(1), "{rest:?}");
    assert!(!Path::new("/proc").join(hangs).exists(), "the stage goes on: {rest:?}");
    assert_eq!(verdicts(&results(&out))[..3], ["passed", "interrupted", "not run"], "{rest:?}");
}
