//! The indexes that `convert --index` and `index` write, as a user runs them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use overdrive_dataload::{Dataset, ShardListDataset, TfRecordDataset, TfRecordWriter, WebDataset};

fn run(arguments: &[&Path]) -> Result<String, String> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data"));
    let output = command.args(arguments).stdin(Stdio::null()).output().unwrap();
    match output.status.success() {
        true => Ok(String::from_utf8(output.stdout).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// 30 texts in two classes.
fn texts(folder: &Path) -> PathBuf {
    let path = folder.join("in.tfrecord");
    let mut writer = TfRecordWriter::create(&path).unwrap();
    for i in 0..30 {
        let bytes = |text: String| overdrive_dataload::Feature::Bytes(vec![text.into_bytes().into()]);
        let example = overdrive_dataload::Example::new();
        let example =
            example.with("__key__", bytes(format!("{}/{i:02}", i % 2))).with("txt", bytes(format!("text {i}")));
        writer.write_example(&example).unwrap();
    }
    writer.finish().unwrap()
}

#[test]
fn converted_shards_have_indexes_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let source = texts(dir.path());
    let index = Path::new("--index");
    for (target, options, shards) in [
        ("a.tar", &["--samples-per-shard", "20"][..], ["a-000000.tar", "a-000001.tar"]),
        ("b.tar.zst", &["--samples-per-shard", "20"], ["b-000000.tar.zst", "b-000001.tar.zst"]),
        ("c.tfrecord", &["--samples-per-shard", "20"], ["c-00000-of-00002.tfrecord", "c-00001-of-00002.tfrecord"]),
        ("d.tfrecord.zst", &[], ["d.tfrecord.zst", "d.tfrecord.zst"]),
    ] {
        let options: Vec<&Path> = options.iter().map(Path::new).collect();
        let target = path(target);
        run(&[&[Path::new("convert"), &source, &target, index], &options[..]].concat()).unwrap();
        for shard in shards {
            assert!(
                path(shard).is_file() && path(&format!("{shard}.idx")).is_file(),
                "{shard}: {:?}",
                names(dir.path())
            );
        }
    }
    let shards = WebDataset::from_files(["a-000000.tar", "a-000001.tar"].map(path)).unwrap();
    let list = ShardListDataset::new(shards).unwrap();
    assert_eq!((list.len(), list.get(29).unwrap().get("txt")), (30, Some(&b"text 29"[..])));
    let list = ShardListDataset::new(TfRecordDataset::from_files([path("d.tfrecord.zst")]).unwrap()).unwrap();
    assert_eq!(list.get(17).unwrap().example().unwrap().bytes("txt"), Some(&b"text 17"[..]));

    // Without the option there are none, and a folder cannot have any.
    run(&[Path::new("convert"), &source, &path("plain.tar")]).unwrap();
    assert!(!path("plain-000000.tar.idx").exists());
    for (target, part) in [("folder", "for webdataset and tfrecord"), ("e.tar.gz", "gzip"), ("e.tfrecord.gz", "gzip")] {
        let error = run(&[Path::new("convert"), &source, &path(target), index]).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
    assert!(names(dir.path()).iter().all(|name| !name.starts_with('e') && !name.starts_with('.')));
}

#[test]
fn the_index_of_shards_is_that_of_the_writer() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let source = texts(dir.path());
    for target in ["a.tar", "b.tar.zst", "c.tfrecord", "d.tfrecord.zst"] {
        run(&[Path::new("convert"), &source, &path(target), Path::new("--index")]).unwrap();
    }
    let indexes: Vec<_> = names(dir.path()).into_iter().filter(|name| name.ends_with(".idx")).collect();
    assert_eq!(indexes.len(), 4);
    let texts: Vec<_> = indexes.iter().map(|name| fs::read(path(name)).unwrap()).collect();
    indexes.iter().for_each(|name| fs::remove_file(path(name)).unwrap());
    let shards = [path("a-{000000..000000}.tar"), path("b-*.tar.zst"), path("c.tfrecord"), path("d.tfrecord.zst")];
    let said = run(&[&[Path::new("index")], &shards.each_ref().map(PathBuf::as_path)[..]].concat()).unwrap();
    assert_eq!(said, "4 shards with 120 samples\n");
    let again: Vec<_> = indexes.iter().map(|name| fs::read(path(name)).unwrap()).collect();
    assert!(again == texts);
}

#[test]
fn shards_that_cannot_have_an_index_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let source = texts(dir.path());
    run(&[Path::new("convert"), &source, &path("a.tar.gz")]).unwrap();
    let error = run(&[Path::new("index"), &path("a-000000.tar.gz")]).unwrap_err();
    assert!(error.contains("a-000000.tar.gz") && error.contains("in frames"), "{error}");
    let error = run(&[Path::new("index"), dir.path()]).unwrap_err();
    assert!(error.contains("only webdataset and tfrecord"), "{error}");
    let error = run(&[Path::new("index"), &path("none-{0..3}.tar")]).unwrap_err();
    assert!(error.contains("none-0.tar"), "{error}");
    assert!(run(&[Path::new("index")]).unwrap_err().contains("SHARDS"));
    assert!(names(dir.path()).iter().all(|name| !name.ends_with(".idx")));
}
