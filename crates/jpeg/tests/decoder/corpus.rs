//! Replays the corpus of the fuzzer in `fuzz/`.

use std::fs;
use std::path::Path;

#[path = "../../fuzz/src/lib.rs"]
mod entries;

#[test]
fn every_file_of_the_corpus_is_read_or_refused() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/jpeg");
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let given: usize = files.map(|file| entries::jpeg(&fs::read(file.unwrap().path()).unwrap())).sum();
    // A corpus from which nothing can be read would prove nothing.
    assert!(given > 0);
}

/// A wrong byte anywhere is read or refused too, and where the whole can be read, parts have its pixels.
#[test]
fn changed_bytes_are_read_or_refused() {
    for name in ["odd", "scans", "progressive-restarts"] {
        let whole = crate::read(&format!("{name}.jpg"));
        for at in (0..whole.len()).step_by(3) {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            entries::jpeg(&changed);
        }
    }
}
