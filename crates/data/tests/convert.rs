//! The program as a user runs it: content survives every format, and nothing unfinished is left behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use overdrive_dataload::{
    ArrowDataset, Color, Dataset, Example, Feature, Image, IterableDataset, LmdbDataset, LmdbWriter, TfRecordDataset,
    TfRecordWriter, WebDataset, WebDatasetWriter, decode_image,
};
use tempfile::TempDir;

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data"));
    command.arg("convert").stdin(Stdio::null());
    command
}

fn convert(src: &Path, dst: &Path, options: &[&str]) -> Output {
    program().arg(src).arg(dst).args(options).output().unwrap()
}

fn good(src: &Path, dst: &Path, options: &[&str]) -> String {
    let output = convert(src, dst, options);
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{} to {}: {stderr}", src.display(), dst.display());
    String::from_utf8(output.stdout).unwrap() + &stderr
}

fn bad(src: &Path, dst: &Path, options: &[&str]) -> String {
    let output = convert(src, dst, options);
    assert!(!output.status.success());
    String::from_utf8(output.stderr).unwrap()
}

/// An image that Pillow wrote.
fn picture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testing/images").join(name)).unwrap()
}

fn put(root: &Path, name: &str, content: &[u8]) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, content).unwrap();
}

/// A folder that Hugging Face's `DatasetDict.save_to_disk` made.
fn pictures() -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "dataload", "tests", "fixtures", "arrow", "pictures"].iter().collect()
}

/// Two classes, a nested folder, and notes with an image's name.
fn photos() -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("photos");
    put(&root, "cat/a.jpg", &picture("h2v2.jpg"));
    put(&root, "cat/a.json", b"{\"id\": 1}");
    put(&root, "cat/more/b.png", &picture("grey.png"));
    put(&root, "dog/a.webp", &picture("lossy.webp"));
    put(&root, "dog/a.seg.png", &picture("one.png"));
    (dir, root)
}

/// All files below a folder, by relative path.
fn tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(root: &Path, folder: &Path, files: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, files);
            } else {
                let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                files.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let mut files = BTreeMap::new();
    walk(root, root, &mut files);
    files
}

#[test]
fn every_format_keeps_the_content() {
    let (dir, root) = photos();
    let path = |name: &str| dir.path().join(name);
    let chain = ["a.tar", "b.tfrecord", "c.lmdb", "d.tar.gz", "e.mdb", "f.tfrecord.gz", "h.arrow", "g"];
    let mut from = root.clone();
    for name in chain {
        good(&from, &path(name), if name == "e.mdb" { &["--checksums"] } else { &[] });
        from = match name {
            "a.tar" => path("a-000000.tar"),
            "d.tar.gz" => path("d-000000.tar.gz"),
            name => path(name),
        };
    }
    assert_eq!(tree(&path("g")), tree(&root));
    assert!(LmdbDataset::open(path("e.mdb")).unwrap().has_checksums());
    assert!(path("c.lmdb/data.mdb").is_file());

    // In shards, labels are the classes' numbers.
    let shards = WebDataset::from_files([path("a-000000.tar")]).unwrap();
    let samples: Vec<_> = shards.stream([0]).map(Result::unwrap).collect();
    let labels: Vec<_> = samples.iter().map(|sample| (sample.key(), sample.get("cls").unwrap())).collect();
    assert_eq!(labels, [("cat/a", &b"0"[..]), ("cat/more/b", b"0"), ("dog/a", b"1")]);
    assert_eq!(samples[0].get("jpg"), Some(&*picture("h2v2.jpg")));
    let records = TfRecordDataset::from_files([path("b.tfrecord")]).unwrap();
    let record = records.stream([0]).nth(2).unwrap().unwrap();
    let example = record.example().unwrap();
    assert_eq!((example.int64("cls"), example.bytes("__key__")), (Some(1), Some(&b"dog/a"[..])));
    assert_eq!(example.bytes("seg.png"), Some(&*picture("one.png")));
    // Nothing else is left in the folder.
    let mut names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name()).collect();
    names.sort();
    let expected =
        ["a-000000.tar", "b.tfrecord", "c.lmdb", "d-000000.tar.gz", "e.mdb", "f.tfrecord.gz", "g", "h.arrow", "photos"];
    assert_eq!(names, expected);
}

#[test]
fn labels_and_text_of_shards_survive_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let mut writer = WebDatasetWriter::builder(path("in-%06d.tar").to_str().unwrap()).build().unwrap();
    for i in 0..12 {
        let (label, text) = ((i * 5 % 12).to_string(), format!("0{i}"));
        let fields = [("jpg", picture("one.jpg")), ("cls", label.into()), ("txt", text.into())];
        writer.write(&format!("train/{i:04}"), &fields).unwrap();
    }
    writer.finish().unwrap();
    let samples = |name: &str| -> Vec<_> {
        let dataset = WebDataset::from_files([path(name)]).unwrap();
        let sorted = |sample: overdrive_dataload::WebSample| {
            let key = sample.key().to_owned();
            (key, sample.into_files().into_iter().collect::<BTreeMap<_, _>>())
        };
        dataset.stream([0]).map(|sample| sorted(sample.unwrap())).collect()
    };
    for middle in ["folder", "middle.lmdb", "middle.mdb", "middle.tfrecord"] {
        good(&path("in-000000.tar"), &path(middle), &[]);
        good(&path(middle), &path(&format!("{middle}-out.tar")), &[]);
        assert_eq!(samples(&format!("{middle}-out-000000.tar")), samples("in-000000.tar"), "{middle}");
    }
}

#[test]
fn single_fields_are_plain_values() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let values = [picture("one.jpg"), picture("one.png"), b"plain bytes".to_vec(), Vec::new()];
    let mut writer = LmdbWriter::builder(path("in.mdb")).create().unwrap();
    for (i, value) in values.iter().enumerate() {
        writer.write(format!("n0_{i}.JPEG").as_bytes(), value).unwrap();
    }
    writer.write(b"__len__", b"4").unwrap();
    writer.finish().unwrap();
    good(&path("in.mdb"), &path("middle.tfrecord"), &[]);
    good(&path("middle.tfrecord"), &path("out.mdb"), &[]);
    let dataset = LmdbDataset::open(path("out.mdb")).unwrap();
    let found: Vec<_> = (0..dataset.len()).map(|i| dataset.get(i).unwrap().into_value()).collect();
    assert_eq!(found, values);
    assert_eq!(dataset.key_bytes(0), Some(&b"n0_0.JPEG"[..]));
    good(&path("in.mdb"), &path("out.tar"), &[]);
    let shards = WebDataset::from_files([path("out-000000.tar")]).unwrap();
    let keys: Vec<_> = shards.stream([0]).map(|sample| sample.unwrap().key().to_owned()).collect();
    assert_eq!(keys, ["n0_0", "n0_1", "n0_2", "n0_3"]);
}

#[test]
fn a_url_is_no_target() {
    let (_dir, root) = photos();
    let output = convert(&root, Path::new("s3://bucket/a.tar"), &[]);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && stderr.contains("s3://bucket/a.tar: a target is a path of this"), "{stderr}");
    assert!(!Path::new("s3:").exists());
}

#[test]
fn shards_are_as_large_as_asked() {
    let (dir, root) = photos();
    let names = |start: &str| -> Vec<String> {
        let all = fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = all.filter(|name| name.starts_with(start)).collect();
        names.sort();
        names
    };
    good(&root, &dir.path().join("w-%03d.tar"), &["--samples-per-shard", "2"]);
    assert_eq!(names("w-"), ["w-000.tar", "w-001.tar"]);
    good(&root, &dir.path().join("t.tfrecord"), &["--samples-per-shard", "1"]);
    let shards = ["t-00000-of-00003.tfrecord", "t-00001-of-00003.tfrecord", "t-00002-of-00003.tfrecord"];
    assert_eq!(names("t-"), shards);
    good(&root, &dir.path().join("u.tfrecord"), &["--shard-size", "1"]);
    assert_eq!(names("u-").len(), 3);
    good(&dir.path().join("t-{00000..00002}-of-00003.tfrecord"), &dir.path().join("again"), &["--from", "tfrecord"]);
    assert_eq!(tree(&dir.path().join("again")), tree(&root));
    assert!(bad(&root, &dir.path().join("w-%03d.tar"), &[]).contains("already exists"));
}

#[test]
fn images_are_scaled_and_masks_are_not() {
    let (dir, root) = photos();
    let out = dir.path().join("out");
    put(&root, "dog/wide.png", &picture("h2v2.png"));
    let size = |bytes: &[u8]| -> Image { decode_image(bytes, Color::Rgb, Path::new("image")).unwrap() };
    let before = size(&picture("h2v2.png"));
    let side = before.height().min(before.width()) / 2;
    good(&root, &out, &["--shorter-side", &side.to_string(), "--quality", "95", "--workers", "2"]);
    let files = tree(&out);
    let scaled = size(&files["dog/wide.jpg"]);
    assert_eq!(scaled.height().min(scaled.width()), side);
    assert_eq!(scaled.height() * before.width() / before.height(), scaled.width());
    let mean = |image: &Image| image.data().iter().map(|&it| f64::from(it)).sum::<f64>() / image.data().len() as f64;
    assert!((mean(&scaled) - mean(&before)).abs() < 3.0);
    assert!(files["dog/wide.jpg"].starts_with(&[0xff, 0xd8, 0xff]));
    assert_eq!(files["dog/a.seg.png"], picture("one.png"));
    assert_eq!(files["cat/a.json"], b"{\"id\": 1}");
    // Images that are small enough do not change.
    let same = dir.path().join("same");
    good(&root, &same, &["--shorter-side", "65535"]);
    assert_eq!(tree(&same), tree(&root));
}

/// Records with these keys and an image each.
fn records(path: &Path, keys: &[&str]) {
    let mut writer = TfRecordWriter::create(path).unwrap();
    for key in keys {
        let bytes = |content: Vec<u8>| Feature::Bytes(vec![content.into()]);
        let example = Example::new().with("__key__", bytes(key.as_bytes().to_vec()));
        writer
            .write_example(&example.with("jpg", bytes(picture("one.jpg"))).with("cls", Feature::Int64(vec![7])))
            .unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn keys_that_lead_out_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    let path = |name: &str| inner.join(name);
    for key in ["../climbed", "/tmp/climbed", "a/nul", "a\0b", "C:x"] {
        records(&path("in.tfrecord"), &["good/1", key, "good/2"]);
        let text = bad(&path("in.tfrecord"), &path("out"), &[]);
        assert!(text.contains("cannot be a file name") && text.contains("--skip-errors"), "{key:?}: {text}");
        assert_eq!(tree(dir.path()).len(), 1, "{key:?}");
        let text = good(&path("in.tfrecord"), &path("out"), &["--skip-errors"]);
        assert!(text.contains("2 samples, 1 skipped as bad") && text.contains("skipped: key"), "{text}");
        let files: Vec<_> = tree(&path("out")).into_keys().collect();
        assert_eq!(files, ["good/1.cls", "good/1.jpg", "good/2.cls", "good/2.jpg"]);
        fs::remove_dir_all(path("out")).unwrap();
        // Device and drive names only matter for folders: shards do not refuse them.
        if !["C:x", "a/nul"].contains(&key) {
            assert!(bad(&path("in.tfrecord"), &path("out.tar"), &[]).contains("key"), "{key:?}");
        }
    }
    // A sample whose key has no folder goes to that of its class; a repeated name is an error.
    records(&path("in.tfrecord"), &["1", "2"]);
    good(&path("in.tfrecord"), &path("out"), &[]);
    assert!(path("out/7/1.jpg").is_file());
    records(&path("in.tfrecord"), &["a/1", "a/1"]);
    assert!(bad(&path("in.tfrecord"), &path("twice"), &[]).contains("already exists"));
    assert!(bad(&path("in.tfrecord"), &path("twice.mdb"), &[]).contains("does not have yet"));
    assert!(!path("twice").exists() && !path("twice.mdb").exists());
}

#[test]
fn errors_for_bad_sources_and_options_name_a_remedy() {
    let (dir, root) = photos();
    let path = |name: &str| dir.path().join(name);
    let before = tree(dir.path());
    for (src, dst, options, part) in [
        (root.clone(), path("out.zip"), &[][..], "--to"),
        (path("none.zip"), path("out"), &[], "--from"),
        (path("none.tar"), path("out"), &[], "none.tar"),
        (path("none.mdb"), path("out"), &[], "none.mdb"),
        (path("none"), path("out.tar"), &["--from", "folder"], "none"),
        (root.clone(), root.clone(), &[], "already exists"),
        (root.clone(), path("out"), &["--checksums"], "for lmdb"),
        (root.clone(), path("out.mdb"), &["--shard-size", "1G"], "for webdataset and tfrecord"),
        (root.clone(), path("out.tar"), &["--shard-size", "none"], "500M"),
        (root.clone(), path("out.tar"), &["--quality", "80"], "--shorter-side"),
        (root.join("cat"), path("out.tar"), &["--from", "tfrecord"], "regular file"),
        (root.join("cat/a.json"), path("out"), &["--from", "webdataset"], "tar header"),
        (root.join("cat/a.json"), path("out"), &["--from", "tfrecord"], "record"),
        (root.join("cat/a.jpg"), path("out"), &["--from", "lmdb"], "LMDB"),
    ] {
        let text = bad(&src, &dst, options);
        assert!(text.contains(part), "{}: {text}", dst.display());
        assert_eq!(tree(dir.path()), before, "{}", dst.display());
    }
    // Nothing to convert.
    LmdbWriter::builder(path("empty.mdb")).create().unwrap().finish().unwrap();
    fs::write(path("empty.tfrecord"), "").unwrap();
    fs::create_dir(path("empty")).unwrap();
    for (name, part) in [("empty.mdb", "no sample"), ("empty.tfrecord", "no sample"), ("empty", "no image")] {
        assert!(bad(&path(name), &path("out"), &[]).contains(part), "{name}");
        assert!(!path("out").exists());
    }
    // A truncated image.
    put(&root, "cat/broken.jpg", &picture("h2v2.jpg")[..60]);
    assert!(bad(&root, &path("out.tar"), &["--shorter-side", "8"]).contains("cat/broken.jpg"));
    let text = good(&root, &path("out.tar"), &["--shorter-side", "8", "--skip-errors"]);
    assert!(
        text.contains("3 samples, 1 skipped as bad") && text.contains("skipped: cannot scale cat/broken"),
        "{text}"
    );
}

#[test]
#[cfg(unix)]
fn an_interrupted_conversion_leaves_nothing() {
    let (dir, root) = photos();
    let image = picture("h2v2.png");
    for i in 0..4000 {
        put(&root, &format!("many/{i}.png"), &image);
    }
    let content = || -> Vec<_> { fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name()).collect() };
    for name in ["out", "out.tar", "out.tfrecord", "out.mdb"] {
        let (before, target) = (content(), dir.path().join(name));
        // On a busy machine a conversion may end before the signal comes: then it gets the same images many times more.
        for times in [1, 10, 100] {
            for link in (1..times).map(|number| root.join(format!("many{number}"))).filter(|link| !link.exists()) {
                std::os::unix::fs::symlink(root.join("many"), link).unwrap();
            }
            if interrupted(&root, &target) {
                break;
            }
            assert!(times < 100, "{name} ended in spite of the signal");
            for made in content().iter().filter(|made| !before.contains(made)).map(|made| dir.path().join(made)) {
                if made.is_dir() { fs::remove_dir_all(&made).unwrap() } else { fs::remove_file(&made).unwrap() }
            }
        }
        assert_eq!(content(), before, "{name}");
    }
}

/// Converts, and sends a signal as soon as the target's temporary folder or file is there. Returns whether that
/// interrupted it; if not, it has ended well.
#[cfg(unix)]
fn interrupted(root: &Path, target: &Path) -> bool {
    let count = || fs::read_dir(target.parent().unwrap()).unwrap().count();
    let before = count();
    let options = ["--shorter-side", "8", "--workers", "1"];
    let mut child = program().arg(root).arg(target).args(options).stderr(Stdio::piped()).spawn().unwrap();
    let begun = Instant::now();
    while count() == before {
        assert!(begun.elapsed() < Duration::from_secs(600), "{} never began", target.display());
        sleep(Duration::from_millis(1));
    }
    let killed = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(killed.success());
    let status = child.wait().unwrap();
    assert!(matches!(status.code(), Some(0 | 130)), "{}: {status}", target.display());
    status.code() == Some(130)
}

#[test]
fn images_that_differ_by_a_number_are_separate_samples() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("photos");
    for number in 1..4 {
        put(&root, &format!("cat/img.{number}.jpg"), &picture("h2v2.jpg"));
    }
    good(&root, &dir.path().join("out.tar"), &[]);
    good(&dir.path().join("out*.tar"), &dir.path().join("back"), &[]);
    let names: Vec<String> = tree(&dir.path().join("back")).into_keys().collect();
    assert_eq!(names.iter().filter(|name| name.ends_with(".jpg")).count(), 3, "{names:?}");
    assert!(names.iter().any(|name| name.contains("img_2")), "{names:?}");
}

#[test]
fn datasets_of_hugging_face_become_samples_and_samples_columns() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    good(&pictures().join("train"), &path("a.tar"), &[]);
    let shards = WebDataset::from_files([path("a-000000.tar")]).unwrap();
    let samples: Vec<_> = shards.stream([0]).map(Result::unwrap).collect();
    assert_eq!(samples.iter().map(|sample| sample.key()).collect::<Vec<_>>(), ["000000000", "000000001"]);
    assert_eq!(samples[0].get("jpg"), Some(&*picture("one.jpg")));
    let text = |name: &str| str::from_utf8(samples[1].get(name).unwrap()).unwrap();
    assert_eq!(samples[1].get("png"), Some(&*picture("even-8.png")));
    assert_eq!(["cls", "caption", "embedding"].map(text), ["1", "text 2text 2", "-3.25 6 -10"]);
    assert!(bad(&pictures(), &path("b.tar"), &[]).contains("[\"train\", \"test\"]"));

    good(&path("a-000000.tar"), &path("c.arrow"), &[]);
    let table = ArrowDataset::from_files([path("c.arrow")]).unwrap().mask_null("jpg").unwrap();
    let row = table.select(["__key__", "cls", "caption"]).unwrap().get(1).unwrap();
    assert_eq!((row.bytes("__key__"), row.int("cls")), (Some(&b"000000001"[..]), Some(1)));
    assert_eq!(row.bytes("caption"), Some(&b"text 2text 2"[..]));
    let many = ["x"; 1001].iter().enumerate().map(|(i, x)| (format!("cat/{i:04}.png"), x)).collect::<Vec<_>>();
    many.iter().for_each(|(name, x)| put(&path("many"), name, x.as_bytes()));
    put(&path("many"), "cat/1000.json", b"{}");
    assert!(bad(&path("many"), &path("d.arrow"), &[]).contains("cat/1000: field \"json\" is not one of"));
    good(&path("many"), &path("d.arrow"), &["--skip-errors"]);
    assert_eq!(ArrowDataset::from_files([path("d.arrow")]).unwrap().len(), 1000);
}
