//! `overdrive-profile show` with the folders of several hosts.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_profile::RunProfile;
use tempfile::TempDir;

use crate::program::{Ended, command, end, run_script};

crate::tests![
    ranks_of_two_hosts_are_diagnosed_together,
    the_notes_of_a_hosts_run_are_kept,
    files_of_single_ranks_are_accepted,
    duplicate_ranks_are_refused,
    ranks_of_different_runs_are_refused,
    merged_records_are_refused,
];

fn show(paths: &[&Path], more: &[&str]) -> Ended {
    let paths = paths.iter().map(|path| path.to_str().unwrap());
    end(command(&["show"].into_iter().chain(paths).chain(more.iter().copied()).collect::<Vec<_>>()))
}

/// Records one of two ranks, on its own host, with forward passes of this many milliseconds. The samples of the machine
/// are removed: on a busy one, they would explain why a rank is slow.
fn record(out: &Path, rank: u64, milliseconds: u64) {
    let script = format!("RANK={rank} WORLD_SIZE=2 OVERDRIVE_TEST_FORWARD={milliseconds} exec \"$TRAIN\"");
    let ended = end(run_script(out, &script));
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let record = out.join(format!("profile.rank{rank}.json"));
    let mut run = RunProfile::read_json(&record).unwrap();
    run.machine.host = format!("machine{rank}");
    run.samples.clear();
    run.write_json(record).unwrap();
}

/// Writes records of these ranks of a run with `size` ranks, and returns the folder.
fn made_up(folder: &Path, name: &str, size: u64, ranks: &[u64]) -> PathBuf {
    let folder = folder.join(name);
    fs::create_dir(&folder).unwrap();
    for &rank in ranks {
        let mut run = RunProfile::default();
        (run.schema, run.rank, run.world_size) = (1, rank, size);
        run.command = ["train", "--epochs", "3"].map(str::to_owned).to_vec();
        run.write_json(folder.join(format!("profile.rank{rank}.json"))).unwrap();
    }
    folder
}

fn ranks_of_two_hosts_are_diagnosed_together() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    let [one, other, page, json] = ["one", "other", "all.html", "all.json"].map(at);
    record(&one, 0, 2);
    record(&other, 1, 40);
    // With the ranks of a single host, no rank is slow.
    let alone = show(&[&other], &[]);
    assert!(alone.code == Some(0) && !alone.out.contains("look at rank"), "{}{}", alone.out, alone.err);

    let files = ["--html", page.to_str().unwrap(), "--json", json.to_str().unwrap()];
    let together = show(&[&other, &one], &files);
    assert_eq!(together.code, Some(0), "{}", together.err);
    assert!(together.out.contains("look at rank 1 on machine1: its data"), "{}", together.out);
    let page = fs::read_to_string(page).unwrap();
    for part in ["<h2>Ranks</h2>", ">Host<", ">machine0<", ">machine1<", "look at rank 1 on machine1"] {
        assert!(page.contains(part), "{part:?} is not on the page");
    }
    let run = RunProfile::read_json(&json).unwrap();
    // Each folder's note that the other host's rank is missing is gone.
    assert_eq!((run.rank, run.ranks.len(), run.notes.len()), (0, 2, 0), "{:?}", run.notes);
    assert_eq!(show(&[&json], &[]).out, together.out);
    let compared = end(command(&["diff", json.to_str().unwrap(), json.to_str().unwrap()]));
    assert_eq!(compared.code, Some(0), "{}", compared.err);
}

fn the_notes_of_a_hosts_run_are_kept() {
    let folder = TempDir::new().unwrap();
    let [one, other] = [0, 1].map(|rank| made_up(folder.path(), &format!("host{rank}"), 3, &[rank]));
    // As `run` writes it, next to the ranks' records.
    let mut merged = RunProfile::read_json(other.join("profile.rank1.json")).unwrap();
    merged = RunProfile::merge_ranks(vec![merged]).unwrap();
    merged.notes.push("the program ended early".to_owned());
    merged.write_json(other.join("profile.json")).unwrap();
    fs::write(one.join("profile.rank2.json"), "no").unwrap();
    let json = folder.path().join("all.json");
    let ended = show(&[&one, &other], &["--json", json.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    let notes = RunProfile::read_json(json).unwrap().notes;
    let expected = [
        "2 of 3 ranks left a record; without one: rank 2".to_owned(),
        "rank 0 timed no step".to_owned(),
        "rank 1 timed no step".to_owned(),
        format!("{}: profile.rank2.json is left out: ", one.display()),
        format!("{}: the program ended early", other.display()),
    ];
    assert_eq!(notes.len(), expected.len(), "{notes:?}");
    assert!(notes.iter().zip(&expected).all(|(note, start)| note.starts_with(start)), "{notes:?}");
}

fn files_of_single_ranks_are_accepted() {
    let folder = TempDir::new().unwrap();
    let [one, other] = [0, 1].map(|rank| made_up(folder.path(), &format!("host{rank}"), 2, &[rank]));
    let json = folder.path().join("all.json");
    let ended = show(&[&one, &other.join("profile.rank1.json")], &["--json", json.to_str().unwrap()]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(RunProfile::read_json(json).unwrap().notes, ["rank 0 timed no step", "rank 1 timed no step"]);
}

fn duplicate_ranks_are_refused() {
    let folder = TempDir::new().unwrap();
    let one = made_up(folder.path(), "one", 4, &[0, 1]);
    let other = made_up(folder.path(), "other", 4, &[1, 2]);
    for (second, file) in [(&other, "other/profile.rank1.json"), (&one, "one/profile.rank0.json")] {
        let ended = show(&[&one, second], &[]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        let first = file.replace("other", "one");
        let [first, second] = [first.as_str(), file].map(|name| folder.path().join(name).display().to_string());
        ended.says(&format!("appears twice, in {first} and {second}: give"));
    }
}

fn ranks_of_different_runs_are_refused() {
    let folder = TempDir::new().unwrap();
    let one = made_up(folder.path(), "one", 4, &[0, 1]);
    let smaller = made_up(folder.path(), "smaller", 3, &[2]);
    let longer = made_up(folder.path(), "longer", 4, &[2]);
    let elsewhere = made_up(folder.path(), "elsewhere", 4, &[2, 3]);
    let change = |folder: &Path, command: [&str; 3]| {
        let path = folder.join("profile.rank2.json");
        let mut run = RunProfile::read_json(&path).unwrap();
        run.command = command.map(str::to_owned).to_vec();
        run.write_json(path).unwrap();
    };
    change(&longer, ["train", "--epochs", "5"]);
    for (other, says) in [
        (&smaller, "smaller/profile.rank2.json are of different runs: one of 4 ranks, one of 3"),
        (&longer, "longer/profile.rank2.json are of different runs: \"train --epochs 3\" and \"train --epochs 5\""),
    ] {
        let ended = show(&[&one, other], &["--json", folder.path().join("all.json").to_str().unwrap()]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
        ended.says(says);
        ended.says("one/profile.rank0.json");
    }
    assert!(!folder.path().join("all.json").exists());
    // Hosts may have the program in different folders.
    for rank in [2, 3] {
        let path = elsewhere.join(format!("profile.rank{rank}.json"));
        let mut run = RunProfile::read_json(&path).unwrap();
        run.command[0] = "/opt/train".to_owned();
        run.write_json(path).unwrap();
    }
    let ended = show(&[&one, &elsewhere], &[]);
    assert_eq!(ended.code, Some(0), "{}", ended.err);
}

fn merged_records_are_refused() {
    let folder = TempDir::new().unwrap();
    let one = folder.path().join("one");
    record(&one, 0, 2);
    let other = made_up(folder.path(), "other", 2, &[1]);
    let ended = show(&[&other, &one.join("profile.json")], &[]);
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""));
    ended.says("one/profile.json is a merged record, not that of a single rank");
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).unwrap();
    let ended = show(&[&other, &empty], &[]);
    assert_eq!(ended.code, Some(1));
    ended.says("empty holds no profile.rank*.json");
}
