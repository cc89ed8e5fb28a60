//! Replays the corpus of the fuzzers in `fuzz/`.

use std::fs;
use std::path::Path;

use crate::mutations::{MOST_GROWTH_BYTES, Random, mutate, peak_bytes};

/// The entries whose files are also read with random changes: those that no other test changes at random.
const CHANGED: [&str; 3] = ["csv", "jsonl", "tokens"];
const ROUNDS: u64 = 300;

#[path = "../../fuzz/src/lib.rs"]
mod entries;

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort_unstable();
    names
}

#[test]
fn every_file_of_the_corpus_is_read_or_refused() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // The decoder's crate has the JPEG files.
    let corpus = |name| crates.join(if name == "jpeg" { "jpeg" } else { "dataload" }).join("fuzz/corpus");
    let mut folders = [names(&corpus("")), names(&corpus("jpeg"))].concat();
    folders.sort_unstable();
    assert_eq!(folders, entries::ENTRIES.map(|(name, _)| name), "a folder for each entry");
    let before = peak_bytes();
    for (name, _) in entries::ENTRIES {
        let folder = corpus(name).join(name);
        let files = names(&folder);
        let given: usize = files.iter().map(|file| entries::run(name, &fs::read(folder.join(file)).unwrap())).sum();
        // A corpus from which nothing can be read would prove nothing.
        assert!(given > 0, "{name}: {} files", files.len());
        for file in files.iter().filter(|_| CHANGED.contains(&name)) {
            let good = fs::read(folder.join(file)).unwrap();
            for round in 0..ROUNDS {
                _ = entries::run(name, &mutate(&good, &mut Random::new(round)));
            }
        }
    }
    let growth = peak_bytes().saturating_sub(before);
    assert!(growth < MOST_GROWTH_BYTES, "{growth} bytes");
}
