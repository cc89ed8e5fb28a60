//! `overdrive-profile show` and `diff`, and invalid arguments.

use std::fs;
use std::path::Path;

use overdrive_profile::{Phase, RunProfile, StepTimes};
use tempfile::TempDir;

use crate::program::{command, end};

crate::tests![
    a_record_is_shown_again,
    files_that_are_not_records_are_refused,
    two_runs_are_compared,
    a_comparison_can_be_printed_as_json,
    wrong_arguments_are_refused,
];

/// Writes a run of 64 steps, which take this long with small variations.
fn write(path: &Path, seconds: f64) {
    let mut run = RunProfile::default();
    run.schema = 1;
    run.command = vec!["train".to_owned()];
    for number in 0..64 {
        let mut step = StepTimes::default();
        step.step = number;
        step.samples = 8;
        step.host_seconds = vec![0.0; Phase::ALL.len()];
        step.host_seconds[Phase::Backward as usize] = seconds * (1.0 + 0.001 * (number * 37 % 11) as f64);
        run.step_times.push(step);
    }
    run.write_json(path).unwrap();
}

fn a_record_is_shown_again() {
    let folder = TempDir::new().unwrap();
    let (record, page) = (folder.path().join("profile.json"), folder.path().join("page.html"));
    write(&record, 0.01);
    let by_folder = end(command(&["show", folder.path().to_str().unwrap()]));
    let by_file = end(command(&["show", record.to_str().unwrap(), "--html", page.to_str().unwrap()]));
    assert_eq!((by_folder.code, by_file.code), (Some(0), Some(0)), "{}{}", by_folder.err, by_file.err);
    assert!(!by_folder.out.trim().is_empty() && by_folder.out == by_file.out);
    assert!(fs::read_to_string(page).unwrap().contains("<title>Profile of train</title>"));
}

fn files_that_are_not_records_are_refused() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    fs::write(at("text.json"), "no").unwrap();
    fs::write(at("later.json"), serde_json::json!({ "schema": 2 }).to_string()).unwrap();
    let mut run = RunProfile::default();
    run.schema = 2;
    run.write_json(at("newer.json")).unwrap();
    for (path, says) in [
        (at(""), "holds no profile.json"),
        (at("missing.json"), "missing.json"),
        (at("text.json"), "is not a `profile.json`"),
        (at("later.json"), "is not a `profile.json`"),
        (at("newer.json"), "is of version 2"),
    ] {
        for args in [vec!["show", &path], vec!["diff", &path, &path]] {
            let ended = end(command(&args));
            assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{args:?}");
            ended.says(says);
        }
    }
}

fn two_runs_are_compared() {
    let folder = TempDir::new().unwrap();
    let (before, after) = (folder.path().join("before.json"), folder.path().join("after.json"));
    write(&before, 0.010);
    write(&after, 0.008);
    let ended = end(command(&["diff", before.to_str().unwrap(), after.to_str().unwrap()]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    for part in
        ["64 steps before", "-20.0%", "faster", "Faster: step (-20.0%), backward", "Slower: nothing beyond noise."]
    {
        assert!(ended.out.contains(part), "{part:?} is not in\n{}", ended.out);
    }
    let same = end(command(&["diff", before.to_str().unwrap(), before.to_str().unwrap()]));
    assert!(same.out.contains("within noise") && same.out.contains("Faster: nothing beyond noise."), "{}", same.out);
}

fn a_comparison_can_be_printed_as_json() {
    let folder = TempDir::new().unwrap();
    let (before, after) = (folder.path().join("before.json"), folder.path().join("after.json"));
    write(&before, 0.010);
    write(&after, 0.020);
    let ended = end(command(&["diff", "--json", before.to_str().unwrap(), after.to_str().unwrap()]));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let found: serde_json::Value = serde_json::from_str(&ended.out).unwrap();
    let step = &found["times"][0];
    assert_eq!((&found["schema"], &step["name"], &step["verdict"]), (&1.into(), &"step".into(), &"slower".into()));
    let ratio = |value: &serde_json::Value| value.as_f64().unwrap();
    let interval = &step["ratio_interval"];
    assert!((ratio(&step["ratio"]) - 2.0).abs() < 1e-9);
    assert!(ratio(&interval[0]) > 1.9 && ratio(&interval[1]) < 2.1, "{step}");
}

fn wrong_arguments_are_refused() {
    for args in [
        vec![],
        vec!["walk"],
        vec!["run"],
        vec!["run", "--steps", "many", "true"],
        vec!["run", "--before=-1", "true"],
        vec!["run", "--steps=18446744073709551615", "true"],
        vec!["run", "--before=1000000001", "true"],
        vec!["run", "--fast", "true"],
        vec!["show"],
        vec!["diff", "one"],
    ] {
        let ended = end(command(&args));
        assert_eq!((ended.code, ended.out.as_str()), (Some(2), ""), "{args:?}: {}", ended.err);
        ended.says("--help");
    }
    for args in [["--help"], ["--version"]] {
        assert_eq!(end(command(&args)).code, Some(0));
    }
}
