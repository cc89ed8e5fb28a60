//! The ranks' output: prefixes, files, floods.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::launcher::{Launcher, PROGRAM, limited};

crate::tests![
    each_line_has_its_ranks_prefix_and_stream,
    lines_are_never_mixed,
    bytes_that_are_not_utf8_pass_through,
    a_last_line_without_newline_gets_one,
    a_flood_without_end_of_line_takes_bounded_memory,
    redirected_outputs_go_to_files_only,
    teed_outputs_go_to_both,
    choices_by_local_rank,
    the_filter_hides_ranks_but_not_their_files,
    lines_that_match_a_filter_are_copied,
    the_prefix_is_torchruns_template,
    a_closed_console_ends_the_rank_as_a_closed_pipe_does,
];

fn each_line_has_its_ranks_prefix_and_stream() {
    let ended = Launcher::script(&["--nproc-per-node", "3"], "echo out $RANK; echo err $RANK >&2").end();
    assert_eq!(ended.code, Some(0));
    assert_eq!(ended.sorted(), ["[rank0]: out 0", "[rank1]: out 1", "[rank2]: out 2"]);
    ended.says("[rank1]: err 1\n");
}

fn lines_are_never_mixed() {
    // Each line is written in two parts, which would mix if the launcher passed on parts.
    let script = "i=0; while [ $i -lt 300 ]; do printf 'a%s' $RANK; printf 'b%s\\n' $RANK; i=$((i+1)); done";
    let ended = Launcher::script(&["--nproc-per-node", "4"], script).end();
    assert_eq!(ended.out.lines().count(), 1200);
    for rank in 0..4 {
        let line = format!("[rank{rank}]: a{rank}b{rank}");
        assert_eq!(ended.out.lines().filter(|it| *it == line).count(), 300);
    }
}

fn bytes_that_are_not_utf8_pass_through() {
    let ended = Launcher::script(&[], r"printf '\377\000\200\r\n'").end();
    assert_eq!(ended.raw_out, b"[rank0]: \xff\x00\x80\r\n");
}

fn a_last_line_without_newline_gets_one() {
    let ended = Launcher::script(&[], "printf 'one\\ntwo'").end();
    assert_eq!(ended.out, "[rank0]: one\n[rank0]: two\n");
}

fn a_flood_without_end_of_line_takes_bounded_memory() {
    // A rank's parent is the guard, which reads this.
    let script = "head -c 60000000 /dev/zero | tr '\\0' x; echo; grep VmHWM /proc/$PPID/status >&2";
    let ended = Launcher::script(&[], script).end();
    assert_eq!(ended.raw_out.iter().filter(|byte| **byte == b'x').count(), 60_000_000);
    let peak = ended.err.split_whitespace().nth(2).unwrap().parse::<u64>().unwrap();
    assert!(peak < 30_000, "the guard took {peak} KiB");
    assert!(ended.out.lines().all(|line| line.starts_with("[rank0]: ") && line.len() < 70_000));
}

/// The only folder that a run made in `base`.
fn run_folder(base: &TempDir) -> PathBuf {
    let folders: Vec<PathBuf> = fs::read_dir(base).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(folders.len(), 1, "{folders:?}");
    folders[0].clone()
}

fn text(folder: &Path, path: &str) -> Option<String> {
    fs::read_to_string(folder.join(path)).ok()
}

const BOTH: &str = "echo out $RANK; echo err $RANK >&2";

fn redirected_outputs_go_to_files_only() {
    let base = TempDir::new().unwrap();
    let folder = base.path().to_str().unwrap();
    let ended =
        Launcher::script(&["--nproc-per-node", "2", "-r", "3", "--log-dir", folder, "--rdzv-id", "job"], BOTH).end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), ""));
    assert!(!ended.err.contains("err 0"));
    let run = run_folder(&base);
    assert!(run.file_name().unwrap().to_str().unwrap().starts_with("job_"));
    assert_eq!(text(&run, "attempt_0/1/stdout.log").unwrap(), "out 1\n");
    assert_eq!(text(&run, "attempt_0/0/stderr.log").unwrap(), "err 0\n");
}

fn teed_outputs_go_to_both() {
    let base = TempDir::new().unwrap();
    let ended = Launcher::script(&["--tee=1", "--log_dir", base.path().to_str().unwrap()], BOTH).end();
    assert_eq!(ended.out, "[rank0]: out 0\n");
    ended.says("[rank0]: err 0\n");
    let run = run_folder(&base);
    assert_eq!(text(&run, "attempt_0/0/stdout.log").unwrap(), "out 0\n");
    assert_eq!(text(&run, "attempt_0/0/stderr.log"), None);
}

fn choices_by_local_rank() {
    let base = TempDir::new().unwrap();
    let folder = base.path().to_str().unwrap();
    let ended = Launcher::script(&["--nproc-per-node=2", "-r", "0:1,1:2", "--log-dir", folder], BOTH).end();
    assert_eq!(ended.out, "[rank1]: out 1\n");
    assert!(ended.err.contains("[rank0]: err 0") && !ended.err.contains("[rank1]: err 1"));
}

fn the_filter_hides_ranks_but_not_their_files() {
    let base = TempDir::new().unwrap();
    let options =
        ["--nproc-per-node=3", "--local-ranks-filter=0,2", "-t", "1", "--log-dir", base.path().to_str().unwrap()];
    let ended = Launcher::script(&options, "echo out $RANK").end();
    assert_eq!(ended.sorted(), ["[rank0]: out 0", "[rank2]: out 2"]);
    assert_eq!(text(&run_folder(&base), "attempt_0/1/stdout.log").unwrap(), "out 1\n");
}

fn lines_that_match_a_filter_are_copied() {
    let base = TempDir::new().unwrap();
    let folder = base.path().to_str().unwrap();
    let options = [
        "--nproc-per-node=3",
        "--local-ranks-filter=0,2",
        "--duplicate-stdout-filters=loss,a,,b",
        "--duplicate_stderr_filters=warn",
        "--log-dir",
        folder,
    ];
    let script = "echo loss $RANK; echo step $RANK; printf 'a,b %s' $RANK; echo warning $RANK >&2; echo loss >&2";
    let ended = Launcher::script(&options, script).end();
    // The console shows all of them.
    assert_eq!((ended.code, ended.out.matches("step").count(), ended.out.lines().count()), (Some(0), 2, 6));
    let run = run_folder(&base);
    let lines = |file: &str| {
        let mut lines: Vec<String> = text(&run, file).unwrap().lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let [first, third] = ["[rank0]: ", "[rank2]: "];
    assert_eq!(
        lines("attempt_0/filtered_stdout.log"),
        [format!("{first}a,b 0"), format!("{first}loss 0"), format!("{third}a,b 2"), format!("{third}loss 2")]
    );
    assert_eq!(lines("attempt_0/filtered_stderr.log"), [format!("{first}warning 0"), format!("{third}warning 2")]);
    assert_eq!(text(&run, "attempt_0/0/stdout.log"), None);
}

fn the_prefix_is_torchruns_template() {
    let launcher = Launcher::script(&["--role", "trainer"], "echo hi");
    let ended = launcher.env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "${role_name}-${rank}/${local_rank}|").end();
    assert_eq!(ended.out, "trainer-0/0|hi\n");
}

fn a_closed_console_ends_the_rank_as_a_closed_pipe_does() {
    let script = format!("{PROGRAM} sh -c 'while true; do echo y; done' | head -n 1");
    let output = limited("sh").args(["-c", &script]).output().unwrap();
    assert_eq!(output.stdout, b"[rank0]: y\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("SIGPIPE"), "{output:?}");
}
