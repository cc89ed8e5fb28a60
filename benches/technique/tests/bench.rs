//! Runs the program as a user does, with small settings. No test asserts a time.
#![forbid(unsafe_code)]

use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use overdrive_bench_report::{Contender, Report, Workload};

fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-bench"));
    // Generated data goes into `target/` of the current folder.
    command.current_dir(folder).args(arguments).args(["--json", "out/report.json", "--report", "out/report.html"]);
    command
}

fn bench(folder: &Path, arguments: &[&str]) -> Output {
    command(folder, arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn report(folder: &Path) -> Report {
    serde_json::from_str(&std::fs::read_to_string(folder.join("out/report.json")).unwrap()).unwrap()
}

#[test]
fn without_python_its_columns_are_absent_and_ours_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("target")).unwrap();
    let arguments = ["--quick", "--workload", "digits,text", "--only", "pytorch,fused,cache_prefetch,combined"];
    let ended = bench(folder.path(), &[&arguments[..], &["--rounds", "1", "--python", "no-such-python"]].concat());
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let report = report(folder.path());
    let names: Vec<_> = report.workloads.iter().map(|it| it.measurements.workload).collect();
    assert_eq!(names, [Workload::Digits, Workload::Text]);
    for workload in &report.workloads {
        let contenders: Vec<_> = workload.rows.iter().map(|row| row.contender).collect();
        let expected = match workload.measurements.workload {
            Workload::Digits => vec![Contender::Tch, Contender::CachePrefetch, Contender::Fused, Contender::Combined],
            _ => vec![Contender::Tch, Contender::Fused, Contender::Combined],
        };
        assert_eq!(contenders, expected);
        assert!(workload.rows.iter().all(|row| row.rate.is_some_and(|rate| rate.low > 0.0)), "{:?}", workload.rows);
        let (absent, reason) = &workload.measurements.absent[0];
        assert!(*absent == Contender::Pytorch && reason.contains("no-such-python cannot be run"), "{reason}");
        let all = workload.measurements.workload.contenders(false);
        let parts = &workload.measurements.parts;
        // A first look tries nothing, so nothing can have been left out.
        assert!(workload.measurements.left_out.is_empty());
        assert!(parts.contains(&Contender::Fused) && parts.iter().all(|part| all.contains(part)), "{parts:?}");
    }
    let (table, page) = (text(&ended.stdout), folder.path().join("out/report.html"));
    assert!(table.contains("PyTorch as written is absent") && table.contains("Overdrive uses"), "{table}");
    assert!(std::fs::read_to_string(page).unwrap().contains("</html>"));
}

/// A program in place of Python.
fn fake_python(folder: &Path, script: &str) -> String {
    let python = folder.join("python");
    std::fs::write(&python, script).unwrap();
    std::fs::set_permissions(&python, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    python.display().to_string()
}

/// A first look at the smallest workload, with this program in place of Python's.
fn first_look(folder: &Path, python: &str, arguments: &[&str]) -> Output {
    let data = noise(folder, 256);
    let smallest = ["--quick", "--workload", "digits", "--data", &data, "--python", python];
    bench(folder, &[&smallest[..], arguments].concat())
}

#[test]
fn a_python_contender_that_fails_is_absent_and_the_others_are_measured() {
    let folder = tempfile::tempdir().unwrap();
    // Ready, and gone at the first request.
    let python = fake_python(folder.path(), "#!/bin/sh\necho '{\"Ready\":{\"choices\":[]}}'\nread request\nexit 3\n");
    let ended = first_look(folder.path(), &python, &["--only", "pytorch", "--rounds", "1"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let report = report(folder.path());
    let digits = &report.workloads[0];
    let (contender, reason) = &digits.measurements.absent[0];
    assert!(*contender == Contender::Pytorch && reason.contains("ended (exit status: 3)"), "{reason}");
    assert!(digits.rows.len() == 1 && digits.rows[0].contender == Contender::Tch && digits.rows[0].rate.is_some());
}

#[test]
fn rounds_have_different_orders() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let turn = r#"{"Turn":{"seconds":1.0,"wait_seconds":0.0,"samples":1000}}"#;
    // Writes its name down at each request.
    let script = format!(
        "#!/bin/sh\ncase \"$2\" in *pytorch_tuned*) name=tuned;; *) name=usual;; esac\n\
         echo '{{\"Ready\":{{\"choices\":[]}}}}'\n\
         while read ask; do case \"$ask\" in *Warm*) echo '\"Warm\"';; *) echo $name >> {}; echo '{turn}';; esac; done\n\
         echo '{{\"End\":{{}}}}'\n",
        log.display()
    );
    let python = fake_python(folder.path(), &script);
    let ended = first_look(folder.path(), &python, &["--only", "pytorch,pytorch_tuned", "--rounds", "4"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    // A disturbed turn is repeated at once.
    let mut order: Vec<_> = std::fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect();
    let turns = report(folder.path()).workloads[0].measurements.of(Contender::Pytorch).unwrap().turns.len();
    order.dedup();
    // The rounds: usual, tuned, tch; tch, tuned, usual; tuned, tch, usual; usual, tch, tuned.
    assert_eq!((order, turns), (["usual", "tuned", "usual", "tuned", "usual", "tuned"].map(str::to_owned).to_vec(), 4));
}

/// MNIST's files with `count` images each, all of them noise.
fn noise(folder: &Path, count: u32) -> String {
    for (name, images, count) in
        [("train", true, count), ("train", false, count), ("t10k", true, 8), ("t10k", false, 8)]
    {
        let (kind, magic) = if images { ("images-idx3", 2051u32) } else { ("labels-idx1", 2049) };
        let sizes = if images { vec![magic, count, 28, 28] } else { vec![magic, count] };
        let length = if images { count * 28 * 28 } else { count };
        let value = |at: u32| (at.wrapping_mul(2_654_435_761) >> 24) as u8;
        let values = (0..length).map(|at| if images { value(at) } else { (at % 10) as u8 });
        let bytes: Vec<u8> = sizes.into_iter().flat_map(u32::to_be_bytes).chain(values).collect();
        std::fs::write(folder.join(format!("{name}-{kind}-ubyte")), bytes).unwrap();
    }
    folder.display().to_string()
}

#[test]
fn whole_trainings_take_turns_at_each_mark() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let turn = r#"{"Turn":{"seconds":1.0,"wait_seconds":0.0,"samples":1000}}"#;
    let whole = r#"{"Whole":{"seed":0,"seconds":1.0,"wait_seconds":0.0,"marks":[]}}"#;
    // Has five marks, and writes its name down at each.
    let script = format!(
        "#!/bin/sh\ncase \"$2\" in *pytorch_tuned*) name=tuned;; *) name=usual;; esac\nmarks=0\n\
         echo '{{\"Ready\":{{\"choices\":[]}}}}'\n\
         while read ask; do case \"$ask\" in *Warm*) echo '\"Warm\"';; *Turn*) echo '{turn}';; *)\n\
         echo $name >> {}; marks=$((marks + 1)); if [ $marks = 5 ]; then echo '{whole}'; else echo '\"Mark\"'; fi;;\n\
         esac; done\necho '{{\"End\":{{}}}}'\n",
        log.display()
    );
    let python = fake_python(folder.path(), &script);
    let data = noise(folder.path(), 256);
    let arguments = ["--workload", "digits", "--only", "pytorch,pytorch_tuned", "--rounds", "1", "--data", &data];
    let ended = bench(folder.path(), &[&arguments[..], &["--python", &python]].concat());
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let order: Vec<_> = std::fs::read_to_string(log).unwrap().lines().map(str::to_owned).collect();
    for pair in order.chunks(2) {
        assert!(pair.contains(&"usual".to_owned()) && pair.contains(&"tuned".to_owned()), "{order:?}");
    }
    let report = report(folder.path());
    let wholes = |contender| report.workloads[0].measurements.of(contender).unwrap().wholes.len();
    assert_eq!((order.len(), wholes(Contender::Pytorch), wholes(Contender::Tch)), (10, 1, 1));
    let tch = &report.workloads[0].measurements.of(Contender::Tch).unwrap().wholes[0];
    assert!(tch.marks.len() == 5 && tch.marks.is_sorted_by(|a, b| a.seconds < b.seconds), "{tch:?}");
}

#[test]
fn what_a_late_failure_leaves_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    // Answers every turn, and ends with an error.
    let turn = r#"{"Turn":{"seconds":1.0,"wait_seconds":0.0,"samples":1000}}"#;
    let script = format!(
        "#!/bin/sh\necho '{{\"Ready\":{{\"choices\":[]}}}}'\n\
         while read ask; do case \"$ask\" in *Warm*) echo '\"Warm\"';; *) echo '{turn}';; esac; done\nexit 3\n"
    );
    let python = fake_python(folder.path(), &script);
    let ended = first_look(folder.path(), &python, &["--only", "pytorch", "--rounds", "2"]);
    assert!(ended.status.success(), "{}", text(&ended.stderr));
    let report = report(folder.path());
    let python = report.workloads[0].measurements.of(Contender::Pytorch).unwrap();
    assert!(python.turns.len() == 2 && python.turns[0].samples == 1000, "{python:?}");
    assert!(python.failure.as_ref().unwrap().contains("exit status: 3"), "{python:?}");
    assert!(report.workloads[0].row(Contender::Tch).unwrap().against.len() == 1);
}

#[test]
fn ctrl_c_ends_the_run_by_its_signal_and_says_what_is_left() {
    let folder = tempfile::tempdir().unwrap();
    // It fills the pipe, so that the message has to wait until somebody reads, and the contenders have ended long before.
    let script = "#!/bin/sh\necho asked >&2\nhead -c 1000000 /dev/zero >&2 &\nsleep 600\n";
    let python = fake_python(folder.path(), script);
    let mut command =
        command(folder.path(), &["--quick", "--workload", "text", "--only", "pytorch", "--python", &python]);
    // As from a terminal, the contenders get the signal too.
    command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(errors.any(|line| line == "asked"));
    assert!(Command::new("kill").args(["-INT", "--", &format!("-{}", child.id())]).status().unwrap().success());
    std::thread::sleep(Duration::from_secs(1));
    let said: Vec<String> = errors.collect();
    assert!(said.iter().any(|line| line.contains("interrupted: no workload was measured to its end")), "{said:?}");
    let ended = child.wait_with_output().unwrap();
    assert!(ended.status.signal() == Some(2) && ended.stdout.is_empty(), "{ended:?}");
}

/// What a Python program prints that imports the peers' common file, beside packages that are not what they are called.
fn with_common(version: &str, program: &str) -> String {
    let peers = Path::new(env!("CARGO_MANIFEST_DIR")).join("peers");
    let folder = tempfile::tempdir().unwrap();
    for package in ["PIL", "torch", "torchvision"] {
        let text =
            format!("import types\n__version__ = '{version}'\ndevice = lambda it: types.SimpleNamespace(type=it)\n");
        std::fs::write(folder.path().join(format!("{package}.py")), text).unwrap();
    }
    let mut python = Command::new("python3");
    python
        .args(["-c", program, r#"{"contender": "pytorch_tuned", "device": "cpu", "threads": 2}"#])
        .env("PYTHONPATH", std::env::join_paths([folder.path(), &peers]).unwrap());
    text(&python.output().unwrap().stdout)
}

#[test]
fn a_python_with_another_torch_is_absent() {
    let said = with_common("2.4.0+cpu", "import common");
    assert!(said.starts_with(r#"{"Missing": "it has torch 2.4.0+cpu: give a Python with torch 2.11.0"#), "{said}");
}

#[test]
fn what_python_has_chosen_is_said_in_words() {
    let said = with_common(
        "2.11.0",
        "import common\n\
         print(common.in_words(dict(reader='draft', workers=2, threads=1, fused=True, precision='bfloat16')))\n\
         print(common.in_words(dict(workers=1, channels_last=False)))\n\
         print(common.best_in_words(2, [0, 1, 2], 'worker'))\n\
         print(common.best_in_words(1, [1], 'worker'))",
    );
    let expected = [
        "decoded with draft, 2 workers, 1 of 2 threads compute, fused, bfloat16",
        "1 worker, not channels_last",
        "2 workers, the fastest of 0, 1 and 2",
        "1 worker",
    ];
    assert_eq!(said.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn what_cannot_run_is_refused_before_anything_is_measured() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(folder.path().join("few/class")).unwrap();
    std::fs::write(folder.path().join("few/class/1.jpg"), "").unwrap();
    for (arguments, said) in [
        (&["--only", "tf32", "--device", "cpu"][..], "--only tf32 needs a CUDA device"),
        (&["--workload", "photos", "--photos", "nowhere", "--only", "tch"], "--photos: cannot read nowhere"),
        (&["--workload", "digits", "--data", "nowhere"], "cannot read MNIST from nowhere"),
        (
            &["--workload", "photos", "--photos", "few", "--only", "tch"],
            "few holds 1 photographs, fewer than a batch of 16",
        ),
    ] {
        let ended = bench(folder.path(), arguments);
        let error = text(&ended.stderr);
        assert!(!ended.status.success() && error.contains(said), "{error}");
    }
    let ended = bench(folder.path(), &["--quick", "--report", "out/report.json"]);
    assert!(text(&ended.stderr).contains("cannot be used multiple times"), "{}", text(&ended.stderr));
}
