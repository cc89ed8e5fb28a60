//! Traces: their format, where they may be written, and writing while training continues.

use std::collections::{BTreeMap, HashMap};
use std::io::Read as _;
use std::os::unix::fs::{FileTypeExt as _, symlink};
use std::path::Path;
use std::sync::{Arc, Mutex};

use overdrive_profile::{Profile, ProfileError, Profiler, Schedule, record_function, tensorboard_trace_handler};
use rustix::fs::{CWD, Mode, mkfifoat};
use serde_json::Value;

use crate::{Model, alone, full, profile_of};

fn read(path: &Path) -> Value {
    let bytes = std::fs::read(path).unwrap();
    if path.extension().is_some_and(|extension| extension == "gz") {
        let mut text = Vec::new();
        flate2::read::GzDecoder::new(bytes.as_slice()).read_to_end(&mut text).unwrap();
        return serde_json::from_slice(&text).unwrap();
    }
    serde_json::from_slice(&bytes).unwrap()
}

fn some_profile() -> Arc<Profile> {
    let model = Model::new();
    profile_of(full().metadata_json("run", "\"a test\""), || {
        std::thread::spawn(|| drop(record_function("elsewhere"))).join().unwrap();
        let _scope = record_function("two \"steps\" \\ größe\n");
        (0..2).for_each(|_| model.step());
    })
}

fn files(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.collect();
    names.sort();
    names
}

/// A time in the file in nanoseconds, without losing digits.
fn ns(event: &Value, key: &str) -> i64 {
    (event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}")) * 1000.0).round() as i64
}

/// Start, end and name of an event that takes time.
type Slice<'a> = (i64, i64, &'a str);

/// Checks that no event of a thread ends after an event in which it began.
fn assert_nested(mut slices: Vec<Slice<'_>>) {
    slices.sort_by_key(|(start, end, _)| (*start, std::cmp::Reverse(*end)));
    let mut around: Vec<i64> = Vec::new();
    for (start, end, name) in slices {
        while around.last().is_some_and(|last| *last <= start) {
            around.pop();
        }
        assert!(around.last().is_none_or(|last| end <= *last), "{name} ends after an event around it");
        around.push(end);
    }
}

#[test]
fn a_trace_has_the_chrome_format() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let profile = some_profile();
    profile.export_chrome_trace(&path).unwrap();
    assert_eq!(files(folder.path()), ["trace.json"]);
    let trace = read(&path);

    assert_eq!(trace["schemaVersion"], 1);
    assert_eq!(trace["traceName"], path.to_str().unwrap());
    assert_eq!(trace["run"], "a test");
    for key in ["profile_memory", "record_shapes", "with_flops"] {
        assert_eq!(trace[key], 1, "{key}");
    }
    let base = trace["baseTimeNanoseconds"].as_i64().unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    // For each thread and category, in the file's order.
    let mut tracks: BTreeMap<(String, &str), Vec<Slice<'_>>> = BTreeMap::new();
    let mut flows: HashMap<(String, u64), BTreeMap<&str, i64>> = HashMap::new();
    let named = |name: &str| events.iter().find(|event| event["name"] == name).unwrap();
    let window = ns(named("PyTorch Profiler (0)"), "ts")..=ns(named("Record Window End"), "ts");
    for event in events {
        let phase = event["ph"].as_str().unwrap();
        for key in ["name", "pid", "tid", "ts"] {
            assert!(!event[key].is_null(), "{key} of {event}");
        }
        let start = ns(event, "ts");
        assert!(window.contains(&start), "{event} is outside of {window:?}");
        match phase {
            "X" => {
                let category = event["cat"].as_str().unwrap();
                assert!(["cpu_op", "user_annotation", "Trace"].contains(&category), "{event}");
                let length = ns(event, "dur");
                assert!(length >= 0 && window.contains(&(start + length)), "{event} in {window:?}");
                if category != "Trace" {
                    let track = tracks.entry((event["tid"].to_string(), category)).or_default();
                    track.push((start, start + length, event["name"].as_str().unwrap()));
                }
            }
            "s" | "f" => {
                let key = (event["cat"].to_string(), event["id"].as_u64().unwrap());
                assert!(flows.entry(key).or_default().insert(phase, start).is_none(), "twice: {event}");
                assert_eq!(event["bp"].as_str(), (phase == "f").then_some("e"), "{event}");
            }
            "i" => assert!(!event["s"].is_null(), "{event}"),
            "M" => assert!(event["args"].is_object(), "{event}"),
            other => panic!("{other} is not a phase of a trace event: {event}"),
        }
    }
    // Each flow has a start, and an end that is not before it.
    assert!(flows.len() >= 4, "{flows:?}");
    for (flow, ends) in flows {
        assert!(ends.len() == 2 && ends["s"] <= ends["f"], "{flow:?}: {ends:?}");
    }
    // Events are written in the order of their start.
    for (track, slices) in &tracks {
        assert!(slices.is_sorted_by_key(|(start, ..)| *start), "{track:?}: {slices:?}");
    }
    // There are two threads. On each, operators and annotations nest.
    let mut threads: BTreeMap<String, Vec<Slice<'_>>> = BTreeMap::new();
    for ((thread, _), slices) in tracks {
        threads.entry(thread).or_default().extend(slices);
    }
    assert_eq!(threads.len(), 2);
    threads.into_values().for_each(assert_nested);
    // The same times as in the events.
    let listed = profile.events().unwrap();
    for name in ["two 'steps' / gr??e?", "elsewhere"] {
        let in_trace = events.iter().find(|event| event["name"] == name).unwrap();
        let in_list = listed.iter().find(|event| &*event.name == name).unwrap();
        let at = base + ns(in_trace, "ts") - profile.start_ns();
        assert!((at - in_list.start_ns).abs() < 2000, "{name}: {at} and {}", in_list.start_ns);
        assert!((ns(in_trace, "dur") - in_list.elapsed_ns()).abs() <= 1, "{name}");
    }
    // The recorded properties of operators and memory.
    let addmm = events.iter().find(|event| event["name"] == "aten::addmm").unwrap();
    for key in ["External id", "Sequence number", "Record function id", "Input type", "Input Dims", "Ev Idx"] {
        assert!(!addmm["args"][key].is_null(), "{key} of {addmm}");
    }
    let memory: i64 = events
        .iter()
        .filter(|event| event["name"] == "[memory]")
        .map(|event| event["args"]["Bytes"].as_i64().unwrap())
        .sum();
    assert_eq!(memory, *profile.memory_timeline().unwrap()[0].in_use.last().unwrap());
}

#[test]
fn no_key_appears_twice_in_a_trace() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    some_profile().export_chrome_trace(&path).unwrap();
    let trace = read(&path);
    let mut profiler = full().start().unwrap();
    let mut refused = 0;
    for key in trace.as_object().unwrap().keys().filter(|key| *key != "run") {
        for error in [
            profiler.add_metadata_json(key, "[]").expect_err(key),
            Profiler::builder().metadata_json(key, "[]").build().expect_err(key),
        ] {
            assert!(matches!(&error, ProfileError::Metadata { key: named, .. } if named == key), "{error}");
        }
        refused += 1;
    }
    assert!(refused >= 10, "{refused}: {trace}");
    profiler.add_metadata_json("run", "\"another\"").unwrap();
    profiler.stop().unwrap();
}

#[test]
fn a_trace_may_be_written_again_and_compressed() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let profile = some_profile();
    let at = |name: &str| folder.path().join(name);
    profile.export_chrome_trace(at("first.json.gz")).unwrap();
    profile.export_chrome_trace(at("second.json")).unwrap();
    std::fs::remove_file(at("first.json.gz")).unwrap();
    // Replaces the existing file.
    profile.export_chrome_trace(at("second.json")).unwrap();
    profile.export_chrome_trace(at("third.json.gz")).unwrap();
    assert_eq!(files(folder.path()), ["second.json", "third.json.gz"]);
    assert_eq!(read(&at("second.json"))["traceEvents"], read(&at("third.json.gz"))["traceEvents"]);
}

#[test]
fn a_trace_replaces_only_regular_files() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let profile = some_profile();
    mkfifoat(CWD, at("pipe"), Mode::from(0o600)).unwrap();
    std::fs::write(at("file"), "old").unwrap();
    symlink("file", at("link")).unwrap();
    symlink("not yet", at("link.gz")).unwrap();
    let before = files(folder.path());
    let error = profile.export_chrome_trace(at("pipe")).expect_err("a pipe");
    assert!(matches!(&error, ProfileError::Io { path, .. } if *path == at("pipe")), "{error}");
    assert!(error.to_string().contains("a named pipe"), "{error}");
    assert!(std::fs::metadata(at("pipe")).unwrap().file_type().is_fifo());
    assert_eq!(files(folder.path()), before);
    // The profile can still be written. The name of the link decides the compression; the link's target is written.
    profile.export_chrome_trace(at("link")).unwrap();
    profile.export_chrome_trace(at("link.gz")).unwrap();
    assert!(at("link").is_symlink() && at("link.gz").is_symlink());
    assert!(!read(&at("file"))["traceEvents"].as_array().unwrap().is_empty());
    assert_eq!(read(&at("link.gz"))["traceEvents"], read(&at("link"))["traceEvents"]);
    assert!(at("not yet").is_file());
}

#[test]
fn a_folder_that_cannot_be_written_is_named_and_the_profile_stays() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let profile = some_profile();
    std::fs::write(folder.path().join("file"), "no folder").unwrap();
    for bad in ["missing/trace.json", "file/trace.json", "file/trace.json.gz", "missing/nul\0.json"] {
        let error = profile.export_chrome_trace(folder.path().join(bad)).expect_err(bad);
        assert!(matches!(error, ProfileError::Io { .. }), "{error}");
        assert!(error.to_string().contains(bad.split('\0').next().unwrap()), "{error}");
    }
    // There is a folder at the file's path.
    std::fs::create_dir_all(folder.path().join("taken/trace.json")).unwrap();
    profile.export_chrome_trace(folder.path().join("taken/trace.json")).expect_err("a folder");
    assert_eq!(files(&folder.path().join("taken")), ["trace.json"]);

    profile.export_chrome_trace(folder.path().join("trace.json")).unwrap();
    assert!(!read(&folder.path().join("trace.json"))["traceEvents"].as_array().unwrap().is_empty());
    assert!(profile.key_averages(false).unwrap().get("aten::addmm").is_some());
}

#[test]
fn traces_are_written_while_the_next_ones_are_recorded() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let writers = Arc::new(Mutex::new(Vec::new()));
    let started = writers.clone();
    let into = folder.path().to_owned();
    let mut profiler = full()
        .schedule(Schedule::new(0, 0, 2).unwrap())
        .on_trace_ready(move |profile: Arc<Profile>| {
            let path = into.join(format!("{}.json", profile.steps().start()));
            started.lock().unwrap().push(profile.export_chrome_trace_in_background(path)?);
            // Events can be read meanwhile.
            let products = profile.key_averages(false)?.get("aten::addmm").map_or(0, |group| group.count);
            assert_eq!(products, if *profile.steps().start() == 40 { 0 } else { 20 });
            Ok(())
        })
        .start()
        .unwrap();
    let model = Model::new();
    for _ in 0..40 {
        (0..5).for_each(|_| model.step());
        profiler.step().unwrap();
    }
    profiler.stop().unwrap();
    for writer in writers.lock().unwrap().drain(..) {
        writer.wait().unwrap();
    }
    let names = files(folder.path());
    // Windows of two steps each, and one that was open when the profiler stopped.
    assert_eq!(names.len(), 21);
    for name in names.iter().filter(|name| *name != "40.json") {
        let trace = read(&folder.path().join(name));
        let named =
            |name: &str| trace["traceEvents"].as_array().unwrap().iter().filter(|event| event["name"] == name).count();
        assert_eq!(named("aten::addmm"), 20, "{name}");
    }
}

#[test]
fn waiting_returns_a_background_failure() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let profile = some_profile();
    let writer = profile.export_chrome_trace_in_background(folder.path().join("missing/trace.json")).unwrap();
    assert!(writer.path().ends_with("missing/trace.json"));
    assert!(matches!(writer.wait(), Err(ProfileError::Io { .. })));
    // Dropping also waits.
    drop(profile.export_chrome_trace_in_background(folder.path().join("trace.json")).unwrap());
    assert_eq!(files(folder.path()), ["trace.json"]);
}

#[test]
fn tensorboard_finds_its_files() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let into = folder.path().join("a/new/folder");
    let model = Model::new();
    for (use_gzip, ending) in [(false, ".pt.trace.json"), (true, ".pt.trace.json.gz")] {
        let handler = tensorboard_trace_handler(&into).worker_name("rank 0").use_gzip(use_gzip);
        let mut profiler =
            full().schedule(Schedule::new(0, 0, 1).unwrap().repeat(2)).on_trace_ready(handler).start().unwrap();
        for _ in 0..3 {
            model.step();
            profiler.step().unwrap();
        }
        profiler.stop().unwrap();
        let names: Vec<_> = files(&into).into_iter().filter(|name| name.ends_with(ending)).collect();
        assert_eq!(names.len(), 2, "{names:?}");
        for name in names {
            let parts: Vec<&str> = name.split('.').collect();
            assert_eq!(parts[0], "rank 0");
            parts[1].parse::<u64>().unwrap();
            assert!(!read(&into.join(name))["traceEvents"].as_array().unwrap().is_empty());
        }
    }
    // The default worker is the host and the process.
    let handler = tensorboard_trace_handler(folder.path().join("default"));
    let mut profiler = Profiler::builder().on_trace_ready(handler).start().unwrap();
    model.step();
    profiler.stop().unwrap();
    let names = files(&folder.path().join("default"));
    assert!(names[0].contains(&format!("_{}.", std::process::id())), "{names:?}");
}

#[test]
fn the_step_reports_a_tensorboard_folder_that_cannot_be_created() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "no folder").unwrap();
    let handler = tensorboard_trace_handler(folder.path().join("file/traces"));
    let mut profiler = full().schedule(Schedule::new(0, 0, 1).unwrap()).on_trace_ready(handler).start().unwrap();
    let model = Model::new();
    for _ in 0..2 {
        model.step();
        let error = profiler.step().expect_err("there is no folder");
        assert!(matches!(error, ProfileError::Io { .. }), "{error}");
        let profile = profiler.profile().unwrap();
        profile.export_chrome_trace(folder.path().join("elsewhere.json")).unwrap();
    }
    profiler.stop().expect_err("the last window has no folder either");
}
