//! `overdrive-profile run`.

use std::fs;

use overdrive_profile::RunProfile;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::child::TASK;
use crate::program::{command, end, names, run_script, start, wait_for_file};

crate::tests![
    a_run_is_recorded,
    the_folder_is_found_from_another_working_directory,
    the_exit_code_is_the_programs,
    the_record_of_a_killed_program_is_used,
    without_a_record_it_says_what_to_do,
    a_program_that_cannot_be_started_gives_the_exit_code_of_shells,
    signals_reach_the_program,
    signals_that_were_ignored_stay_ignored,
    ranks_are_merged,
    missing_and_broken_ranks_are_noted,
    of_several_records_one_is_kept_and_the_others_are_noted,
    foreign_files_are_not_touched,
    an_earlier_record_is_replaced_only_by_a_complete_one,
];

const FILES: [&str; 3] = ["profile.html", "profile.json", "trace.json.gz"];

fn a_run_is_recorded() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("made/for/it");
    let ended = end(run_script(&out, "cat; exec \"$TRAIN\""));
    assert_eq!((ended.code, ended.out.as_str()), (Some(0), "trained\n"), "{}", ended.err);
    assert_eq!(names(&out), FILES);
    FILES.iter().for_each(|name| ended.says(out.join(name).to_str().unwrap()));
    let run = RunProfile::read_json(out.join("profile.json")).unwrap();
    let profiled = run.profiled.as_ref().unwrap();
    let steps = run.steps.as_ref().unwrap();
    assert_eq!((profiled.steps, steps.steps_seen, run.notes.len()), (2, 12, 0), "{:?}", run.notes);
    // 3 timed steps, 1 that warms the profiler up, 2 profiled ones; then steps while the trace is written do not count.
    assert!((3..=9).contains(&steps.steps), "{steps:?}");
    assert!(profiled.ops.iter().any(|op| op.name == "aten::mm"), "{:?}", profiled.ops);
    let page = fs::read_to_string(out.join("profile.html")).unwrap();
    assert!(page.contains("aten::mm") && page.trim_end().ends_with("</html>"));
}

fn the_folder_is_found_from_another_working_directory() {
    let folder = TempDir::new().unwrap();
    let mut command = run_script("here".as_ref(), "cd / && exec \"$TRAIN\"");
    command.current_dir(&folder);
    let ended = end(command);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(names(&folder.path().join("here")), FILES);
}

fn the_exit_code_is_the_programs() {
    let folder = TempDir::new().unwrap();
    let mut command = run_script(folder.path(), "exec \"$TRAIN\"");
    command.env(TASK, "exit 7");
    let ended = end(command);
    assert_eq!(ended.code, Some(7), "{}", ended.err);
    let notes = RunProfile::read_json(folder.path().join("profile.json")).unwrap().notes;
    assert!(notes.len() == 1 && notes[0].contains("ended early") && notes[0].contains('7'), "{notes:?}");
}

fn the_record_of_a_killed_program_is_used() {
    let folder = TempDir::new().unwrap();
    let mut command = run_script(folder.path(), "exec \"$TRAIN\"");
    command.env(TASK, "kill");
    let ended = end(command);
    assert_eq!(ended.code, Some(137), "{}", ended.err);
    let run = RunProfile::read_json(folder.path().join("profile.json")).unwrap();
    assert_eq!((run.steps.unwrap().steps, run.profiled.unwrap().steps), (3, 2));
    assert!(run.notes.iter().any(|note| note.contains("ended early")), "{:?}", run.notes);
    // The trace may have been written by then, or not.
    assert!(names(folder.path()).starts_with(&["profile.html".to_owned(), "profile.json".to_owned()]));
    assert!(names(folder.path()).iter().all(|name| FILES.contains(&name.as_str())));
}

fn without_a_record_it_says_what_to_do() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    for (script, code, status) in [("exit 0", 1, "exited with 0"), ("exit 5", 5, "5"), ("kill -9 $$", 137, "9")] {
        let ended = end(run_script(&out, script));
        assert_eq!(ended.code, Some(code), "{script}");
        [status, "feature `record`", "StepTimer", "--before 0"].iter().for_each(|what| ended.says(what));
        assert!(!out.exists(), "{script} leaves an empty folder");
    }
}

fn a_program_that_cannot_be_started_gives_the_exit_code_of_shells() {
    let folder = TempDir::new().unwrap();
    let (out, text) = (folder.path().join("out"), folder.path().join("text"));
    fs::write(&text, "no program").unwrap();
    let out = out.to_str().unwrap();
    for (program, code) in [("no-such-program-anywhere", 127), (text.to_str().unwrap(), 126)] {
        let ended = end(command(&["run", "--out", out, program]));
        assert_eq!(ended.code, Some(code), "{}", ended.err);
        ended.says(&format!("cannot start {program}: "));
        assert_eq!(names(folder.path()), ["text"]);
    }
}

fn signals_reach_the_program() {
    let folder = TempDir::new().unwrap();
    let (out, ready) = (folder.path().join("out"), folder.path().join("ready"));
    let wait = "touch \"$READY\"; while true; do sleep 0.01; done";
    let cases = [
        (format!("trap 'echo told; exit 9' TERM; {wait}"), Signal::TERM, 9, "told\n"),
        (format!("trap 'echo saved; exit 0' USR1; {wait}"), Signal::USR1, 1, "saved\n"),
        (wait.to_owned(), Signal::INT, 130, ""),
        (wait.to_owned(), Signal::TERM, 143, ""),
    ];
    for (script, signal, code, output) in cases {
        let mut command = run_script(&out, &script);
        // If these tests run in a shell's background, they ignore SIGINT. A handler restores the default for the
        // script.
        let _own = signal_hook::flag::register_conditional_default(2, std::sync::Arc::new(true.into())).unwrap();
        command.env("READY", &ready);
        let running = start(command);
        wait_for_file(&ready);
        running.signal(signal);
        let ended = running.end();
        assert_eq!((ended.code, ended.out.as_str()), (Some(code), output), "{script}: {}", ended.err);
        fs::remove_file(&ready).unwrap();
    }
}

fn signals_that_were_ignored_stay_ignored() {
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    // As under nohup: SIGHUP kills the script only if the script does not inherit that it is ignored.
    let inner = "kill -HUP $$; echo on";
    let program = command(&[]).get_program().to_owned();
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "trap '' HUP; exec \"$0\" run --out \"$1\" -- sh -c \"$2\""]).arg(program).arg(&out).arg(inner);
    let ended = end(shell);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), "on\n"), "{}", ended.err);
}

fn ranks_are_merged() {
    let folder = TempDir::new().unwrap();
    let script = "export WORLD_SIZE=2; RANK=0 \"$TRAIN\" & RANK=1 \"$TRAIN\"; wait";
    let ended = end(run_script(folder.path(), script));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let expected = [
        "profile.html",
        "profile.json",
        "profile.rank0.json",
        "profile.rank1.json",
        "trace.rank0.json.gz",
        "trace.rank1.json.gz",
    ];
    assert_eq!(names(folder.path()), expected);
    let run = RunProfile::read_json(folder.path().join("profile.json")).unwrap();
    assert_eq!((run.rank, run.world_size, run.ranks.len(), run.notes.len()), (0, 2, 2, 0), "{:?}", run.notes);
    assert!(fs::read_to_string(folder.path().join("profile.html")).unwrap().contains("<h2>Ranks</h2>"));
}

fn missing_and_broken_ranks_are_noted() {
    let folder = TempDir::new().unwrap();
    let script =
        "echo '{\"schema\": 1' > \"$OVERDRIVE_PROFILE/profile.rank0.json\"; RANK=1 WORLD_SIZE=2 exec \"$TRAIN\"";
    let ended = end(run_script(folder.path(), script));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let run = RunProfile::read_json(folder.path().join("profile.json")).unwrap();
    let noted = |what: &str| run.notes.iter().any(|note| note.contains(what));
    assert!(run.rank == 1 && noted("1 of 2 ranks") && noted("profile.rank0.json is left out"), "{:?}", run.notes);

    let out = folder.path().join("out");
    let ended = end(run_script(&out, "echo no > \"$OVERDRIVE_PROFILE/profile.json\""));
    assert_eq!((ended.code, out.exists()), (Some(1), false));
    ended.says("profile.json is left out");
}

fn of_several_records_one_is_kept_and_the_others_are_noted() {
    let folder = TempDir::new().unwrap();
    // The first program's record, under a name with the numbers of a process and a timer.
    let first = "cd \"$OVERDRIVE_PROFILE\" && OVERDRIVE_PROFILE=first \"$TRAIN\" && mv first/profile*.json profile.7-0.json \
                 && mv first/trace*.json.gz trace.7-0.json.gz && rmdir first && exec \"$TRAIN\"";
    let ended = end(run_script(folder.path(), first));
    assert_eq!((ended.code, names(folder.path())), (Some(0), FILES.map(str::to_owned).to_vec()), "{}", ended.err);
    let notes = RunProfile::read_json(folder.path().join("profile.json")).unwrap().notes;
    let expected = "a record of rank 0 is left out, with 12 steps of `";
    assert!(notes.len() == 1 && notes[0].starts_with(expected), "{notes:?}");
}

fn foreign_files_are_not_touched() {
    for (name, content) in
        [("profile.json", "{\"mine\": 1}"), ("profile.html", "mine"), ("trace.rank0.json.gz", "mine")]
    {
        let folder = TempDir::new().unwrap();
        let path = folder.path().join(name);
        fs::write(&path, content).unwrap();
        let ended = end(run_script(folder.path(), "echo started"));
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        ended.says(&format!("{name} is not of an earlier run: give another folder by --out"));
        assert_eq!(
            (names(folder.path()), fs::read_to_string(&path).unwrap()),
            (vec![name.to_owned()], content.to_owned())
        );
    }
}

fn an_earlier_record_is_replaced_only_by_a_complete_one() {
    let folder = TempDir::new().unwrap();
    let path = folder.path();
    fs::write(path.join("notes.txt"), "mine").unwrap();
    let script = "export WORLD_SIZE=2; RANK=0 \"$TRAIN\" & RANK=1 \"$TRAIN\"; wait";
    assert_eq!(end(run_script(path, script)).code, Some(0));
    let (before, json) = (names(path), fs::read(path.join("profile.json")).unwrap());
    assert!(before.len() == 7, "{before:?}");
    assert_eq!(end(run_script(path, "exit 3")).code, Some(3));
    assert_eq!((names(path), fs::read(path.join("profile.json")).unwrap()), (before, json));
    assert_eq!(end(run_script(path, "exec \"$TRAIN\"")).code, Some(0));
    assert_eq!(names(path), ["notes.txt", "profile.html", "profile.json", "trace.json.gz"]);
}
