//! Several processes that share a folder of packages, some of them without Python.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use overdrive::optim::AdamW;
use overdrive_compile as compile;
use overdrive_compile::Prepared;

use crate::losses::{batch, mlp};

/// The variable that is set for a process that trains.
const TRAINS: &str = "OVERDRIVE_TEST_COMPILE_TRAINS";

/// How many seconds such a process waits for a compilation.
pub const TIMEOUT: &str = "OVERDRIVE_TEST_COMPILE_TIMEOUT";

/// Trains, and prints how the steps ran. The tests below start it.
#[test]
fn a_process_that_trains() {
    if std::env::var_os(TRAINS).is_none() {
        return;
    }
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut options = compile::Options::default();
    if let Some(seconds) = std::env::var(TIMEOUT).ok().and_then(|seconds| seconds.parse().ok()) {
        options.timeout = std::time::Duration::from_secs(seconds);
    }
    let mut step = compile::step(&model, |batch| Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])))
        .options(options);
    let losses: Vec<f64> = (0..6)
        .map(|number| {
            let batch = batch(number);
            tch::manual_seed(number);
            step.run(&mut opt, &batch).unwrap().double_value(&[])
        })
        .collect();
    println!("\nlast loss {:.6}, compiled: {}", losses[5], step.why_eager().unwrap_or("yes"));
}

pub fn start(cache: &Path, python: Option<&str>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    if let Some(python) = python {
        command.env("OVERDRIVE_PYTHON", python).env("PATH", "");
    }
    start_by(command, cache)
}

/// A command that starts this program again, to train.
pub fn start_by(mut command: Command, cache: &Path) -> Child {
    command.args(["--exact", "processes::a_process_that_trains", "--nocapture"]).env(TRAINS, "1");
    command.env("OVERDRIVE_COMPILE_CACHE", cache);
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// The line that the process has printed, and its errors.
pub fn end(child: Child) -> (String, String) {
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let (out, errors) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr).into_owned());
    assert!(status.success(), "{out}{errors}");
    let line = out.lines().find(|line| line.starts_with("last loss")).expect("no losses").to_owned();
    (line, errors)
}

#[test]
fn of_four_processes_one_compiles_and_all_run() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let children: Vec<Child> = (0..4).map(|_| start(folder.path(), None)).collect();
    let ended: Vec<(String, String)> = children.into_iter().map(end).collect();
    assert!(ended.iter().all(|(line, _)| line == &ended[0].0 && line.ends_with("compiled: yes")), "{ended:?}");
    let compiled = ended.iter().filter(|(_, errors)| errors.contains("compiling a step")).count();
    assert_eq!(compiled, 1, "{ended:?}");
}

/// `CXX` is set as for ccache, and only this process uses the folder for temporary files.
#[test]
fn a_compiler_with_arguments_compiles_and_nothing_is_left_among_temporary_files() {
    let Some(_alone) = crate::compiling() else { return };
    let [cache, temporary] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for _ in 0..2 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env("CXX", "env g++").env("TMPDIR", temporary.path());
        let (line, errors) = end(start_by(command, cache.path()));
        assert!(line.ends_with("compiled: yes"), "{line}\n{errors}");
        let left: Vec<_> = std::fs::read_dir(temporary.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(left.is_empty(), "{left:?}");
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env("CXX", "no-such-compiler --fast");
    let (line, _) = end(start_by(command, tempfile::tempdir().unwrap().path()));
    assert!(line.contains("the C++ compiler no-such-compiler --fast was not found"), "{line}");
}

#[test]
fn a_machine_without_python_runs_a_package_that_was_prepared_elsewhere() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let without = || end(start(folder.path(), Some("/no/python")));
    let (line, errors) = without();
    assert!(line.contains("compiled: no Python with torch") && line.contains("overdrive-compile prepare"), "{line}");
    assert!(errors.contains("not compiled"), "{errors}");

    let mut said = Vec::new();
    compile::prepare(folder.path(), |_, prepared| said.push(prepared.unwrap())).unwrap();
    assert!(said.iter().all(|prepared| matches!(prepared, Prepared::Compiled)) && !said.is_empty(), "{said:?}");
    let explained = compile::explain(folder.path()).unwrap();
    assert!(explained.contains("_fused_adamw_") && explained.contains("cpp_fused_"), "{explained}");
    let lines: Vec<&str> = explained.lines().collect();
    assert!(lines.windows(2).all(|pair| pair[0] != pair[1]), "a kernel is listed twice:\n{explained}");

    let (prepared, _) = without();
    assert!(prepared.ends_with("compiled: yes"), "{prepared}");
    assert_eq!(prepared.split(',').next(), line.split(',').next(), "the losses");
    let mut again = Vec::new();
    compile::prepare(folder.path(), |_, prepared| again.push(prepared.unwrap())).unwrap();
    assert!(again.iter().all(|prepared| matches!(prepared, Prepared::Present)), "{again:?}");
}

/// The files in a folder of packages, except locks and notes about the machine.
fn left_in(cache: &Path) -> Vec<String> {
    let names = std::fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| !name.ends_with(".lock") && !name.starts_with("vectors-")).collect()
}

/// The process that has this parent.
fn child_of(parent: u32) -> Option<u32> {
    let is_child = |pid: &u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line.split_whitespace().eq(["PPid:", &parent.to_string()]))
    };
    let pids = std::fs::read_dir("/proc").unwrap().flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).find(is_child)
}

#[test]
fn a_killed_compiler_leaves_an_uncompiled_run_and_the_next_one_compiles() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    let mut child = start(folder.path(), None);
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("compiling its kernels")));
    let python = child_of(child.id()).expect("a Python that compiles").to_string();
    assert!(Command::new("kill").args(["-KILL", &python]).status().unwrap().success());
    let reader = std::thread::spawn(move || said.collect::<Vec<_>>());
    let (line, _) = end(child);
    let errors = reader.join().unwrap().join("\n");
    assert!(line.contains("signal: 9") && errors.contains("not compiled"), "{line}\n{errors}");
    let left = left_in(folder.path());
    // The loss alone was compiled then; of the step whose compiler was killed, the record is left.
    let packages = left.iter().filter(|name| name.ends_with(".pt2")).count();
    assert!(packages == 1 && !left.iter().any(|name| name.contains("compiling-")), "{left:?}");

    let (again, _) = end(start(folder.path(), None));
    assert!(again.ends_with("compiled: yes"), "{again}");
    assert_eq!(again.split(',').next(), line.split(',').next(), "the losses");
}

/// A disk of this size, on which this program trains; `None` if this user cannot mount one.
fn start_on_disk(size: &str, folder: &Path) -> Option<Child> {
    let mount = r#"mount -t tmpfs -o mode=700,size="$0" none "$1" || exit 99; shift; exec "$@""#;
    let on_disk = |program: &[&std::ffi::OsStr]| {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c", mount, size]).arg(folder).args(program);
        command
    };
    let tried = on_disk(&["true".as_ref()]).output();
    if !tried.is_ok_and(|tried| tried.status.success()) {
        println!("skipped: this user cannot mount a disk");
        return None;
    }
    Some(start_by(on_disk(&[std::env::current_exe().unwrap().as_ref()]), folder))
}

#[test]
fn a_full_disk_leaves_an_uncompiled_run() {
    let Some(_alone) = crate::compiling() else { return };
    let folder = tempfile::tempdir().unwrap();
    // The second disk has room for the record.
    for (size, expected) in [("4k", "cannot write the record"), ("256k", "No space left on device")] {
        let Some(child) = start_on_disk(size, folder.path()) else { return };
        let (line, errors) = end(child);
        assert!(!line.ends_with("compiled: yes") && errors.contains("not compiled"), "{line}\n{errors}");
        assert!(errors.contains(expected) && errors.contains("No space left on device"), "{size}: {errors}");
    }
}

#[test]
fn records_of_other_processors_and_versions_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refused = |text: &str| {
        std::fs::write(folder.path().join("0.json"), text).unwrap();
        let mut said = Vec::new();
        compile::prepare(folder.path(), |_, prepared| said.push(prepared.unwrap_err().to_string())).unwrap();
        said.remove(0)
    };
    let text = refused("no JSON");
    assert!(text.contains("no record of a step") && !text.contains("delete it"), "{text}");
    assert!(refused(r#"{"machine": "z80", "request": {}}"#).contains("another kind of processor"));
    for absent in ["0.json", "misspelt"].map(|name| folder.path().join(name)) {
        let error = compile::prepare(&absent, |_, _| ()).unwrap_err().to_string();
        assert!(error.contains(&*absent.to_string_lossy()) && !absent.is_dir(), "{error}");
    }
}
