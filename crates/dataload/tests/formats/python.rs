//! Python's libraries read what this crate writes, and the other way. `OVERDRIVE_PYTHON` sets the interpreter.

use std::path::Path;
use std::process::Command;
use std::{env, fs};

use overdrive_dataload::{IterableDataset, WebDataset, WebDatasetWriter};

use crate::fixture;

/// Runs a script, and returns its lines; `None`, and a note, without a Python that has the package.
pub fn python(package: &str, script: &Path, arguments: &[&Path]) -> Option<Vec<String>> {
    let python = env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let imported = Command::new(&python).args(["-c", &format!("import {package}")]).output();
    if !imported.is_ok_and(|output| output.status.success()) {
        println!("skipped: no Python with the package {package}");
        return None;
    }
    let output = Command::new(&python).arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect())
}

/// A sample as `web.py` prints it.
fn line(key: &str, mut files: Vec<(String, Vec<u8>)>) -> String {
    files.sort();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let files: Vec<_> = files.iter().map(|(name, content)| format!("\"{name}\": \"{}\"", hex(content))).collect();
    format!("{{\"files\": {{{}}}, \"key\": \"{key}\"}}", files.join(", "))
}

fn ours(shard: &Path) -> Vec<String> {
    let dataset = WebDataset::from_files([shard]).unwrap();
    let samples = dataset.stream([0]).map(Result::unwrap);
    samples
        .map(|sample| {
            let key = sample.key().to_owned();
            line(&key, sample.into_files())
        })
        .collect()
}

#[test]
fn webdataset_reads_the_shards_that_are_written() {
    let dir = tempfile::tempdir().unwrap();
    for ending in ["tar", "tar.gz"] {
        let pattern = dir.path().join(format!("%06d.{ending}"));
        let mut writer = WebDatasetWriter::builder(pattern.to_str().unwrap()).build().unwrap();
        // Names that need extended headers, contents of every padding.
        for i in 0..40_u8 {
            let key = if i % 8 == 5 { format!("{}/{i}", "long".repeat(40)) } else { format!("cat/ü{i:04}") };
            let mut fields = vec![("jpg", vec![i; 100 * usize::from(i)]), ("cls", i.to_string().into_bytes())];
            if i % 3 == 0 {
                fields.push(("seg.png", b"mask".to_vec()));
            }
            writer.write(&key, &fields).unwrap();
        }
        let shards = writer.finish().unwrap();
        let Some(theirs) = python("webdataset", &fixture("web.py"), &[Path::new("read"), &shards[0]]) else { return };
        // In JSON, Python escapes what is not ASCII.
        assert_eq!(theirs, ours(&shards[0]).iter().map(|line| line.replace('ü', "\\u00fc")).collect::<Vec<_>>());
        assert_eq!(theirs.len(), 40);
    }
}

#[test]
fn shards_that_webdataset_wrote_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("theirs.tar");
    let script = fixture("web.py");
    let Some(_) = python("webdataset", &script, &[Path::new("write"), &shard]) else { return };
    let expected = (0..30_u8).map(|i| {
        let text = |text: String| text.into_bytes();
        let mut files = vec![
            ("cls".to_owned(), text((i % 7).to_string())),
            ("txt".to_owned(), text(format!("caption {i}"))),
            ("jpg".to_owned(), (0..i).collect()),
        ];
        files.extend((i % 3 == 0).then(|| ("seg.png".to_owned(), text(format!("mask {i}")))));
        files.extend((i % 2 == 1).then(|| ("json".to_owned(), text(format!("{{\"id\": {i}}}")))));
        line(&format!("train/{i:04}"), files)
    });
    assert_eq!(ours(&shard), expected.collect::<Vec<_>>());
    let zipped = dir.path().join("theirs.tar.gz");
    python("webdataset", &script, &[Path::new("write"), &zipped]).unwrap();
    assert!(fs::read(&zipped).unwrap().starts_with(b"\x1f\x8b"));
    assert_eq!(ours(&zipped), ours(&shard));
    assert_eq!(python("webdataset", &script, &[Path::new("read"), &shard]).unwrap(), ours(&shard));
}
