//! Python's `datasets` loads what is written for it, and the other way. `OVERDRIVE_PYTHON` sets the interpreter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use overdrive_dataload::{IterableDataset, WebDataset, WebDatasetWriter};

fn convert(src: &Path, dst: &Path) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data"));
    let output = command.arg("convert").stdin(Stdio::null()).arg(src).arg(dst).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs a script of this folder; `None`, and a note, without a Python that has `datasets`.
fn python(script: &str, arguments: &[&Path]) -> Option<Vec<String>> {
    let python = env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let imported = Command::new(&python).args(["-c", "import datasets"]).output();
    if !imported.is_ok_and(|output| output.status.success()) {
        println!("skipped: no Python with the package datasets");
        return None;
    }
    let script: PathBuf = [env!("CARGO_MANIFEST_DIR"), "tests", script].iter().collect();
    let output = Command::new(&python).arg(script).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect())
}

fn samples(shard: &Path) -> Vec<(String, BTreeMap<String, Vec<u8>>)> {
    let samples = WebDataset::from_files([shard]).unwrap().stream([0]).map(Result::unwrap).collect::<Vec<_>>();
    samples.into_iter().map(|it| (it.key().to_owned(), it.into_files().into_iter().collect())).collect()
}

#[test]
fn python_loads_the_datasets_that_are_written_and_saves_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/images");
    let image = |name: &str| fs::read(images.join(name)).unwrap();
    let mut writer = WebDatasetWriter::builder(path("in-%06d.tar").to_str().unwrap()).build().unwrap();
    // More than one record batch.
    for i in 0..1100_usize {
        let mut fields = vec![
            ("jpg", image("one.jpg")),
            ("cls", (i % 7).to_string().into_bytes()),
            ("txt", format!("text ü {i}").into_bytes()),
            ("raw", vec![i as u8; i % 4]),
        ];
        // Two columns of images, one of them with nulls.
        fields.extend((i % 3 == 0).then(|| ("seg.png", image("one.png"))));
        writer.write(&format!("train/{i:04}"), &fields).unwrap();
    }
    writer.finish().unwrap();
    convert(&path("in-000000.tar"), &path("ours.hf"));
    convert(&path("ours.hf"), &path("ours.tar"));
    assert!(samples(&path("ours-000000.tar")) == samples(&path("in-000000.tar")));

    let Some(found) = python("load_from_disk.py", &[&path("ours.hf"), &path("theirs")]) else { return };
    let expected = [
        "__key__: Value('string')",
        "jpg: Image(mode=None, decode=True)",
        "cls: Value('int64')",
        "txt: Value('string')",
        "raw: Value('binary')",
        "seg.png: Image(mode=None, decode=True)",
        "1100 rows",
    ];
    assert_eq!(found[..7], expected);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let line = |i: usize| {
        let mask = if i.is_multiple_of(3) { hex(&image("one.png")) } else { "None".to_owned() };
        let (photo, raw) = (hex(&image("one.jpg")), hex(&vec![i as u8; i % 4]));
        format!("train/{i:04} {photo} {} text ü {i} {raw} {mask}", i % 7)
    };
    assert!(found[7..].iter().enumerate().all(|(i, found)| *found == line(i)), "{}", found[7]);
    // What they save is read again: a few files, of which each is a part.
    convert(&path("theirs"), &path("theirs.tar"));
    assert!(samples(&path("theirs-000000.tar")) == samples(&path("in-000000.tar")));
}
