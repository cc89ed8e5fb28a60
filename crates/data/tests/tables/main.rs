//! Conversions to and from tables, text, MDS and tokens, as a user runs them.

mod fields;
mod kinds;
mod tokens;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use overdrive_dataload::{
    CsvDataset, Dataset, IndexedTokens, IterableDataset, JsonLines, MdsDataset, MdsValue, ParquetDataset, TokenDtype,
    TokenFile, WebDataset, WebDatasetWriter,
};

fn convert(src: &Path, dst: &Path, options: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data"));
    command.arg("convert").stdin(Stdio::null()).arg(src).arg(dst).args(options).output().unwrap()
}

fn good(src: &Path, dst: &Path, options: &[&str]) {
    let output = convert(src, dst, options);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} to {}: {stderr}", src.display(), dst.display());
}

fn bad(src: &Path, dst: &Path, options: &[&str]) -> String {
    let output = convert(src, dst, options);
    assert!(!output.status.success(), "{} to {}", src.display(), dst.display());
    assert!(!dst.exists(), "{}", dst.display());
    String::from_utf8(output.stderr).unwrap()
}

type Samples = Vec<(String, BTreeMap<String, Vec<u8>>)>;

fn samples(shard: &Path) -> Samples {
    let dataset = WebDataset::from_files([shard]).unwrap();
    let samples = dataset.stream([0]).map(Result::unwrap);
    samples.map(|sample| (sample.key().to_owned(), sample.into_files().into_iter().collect())).collect()
}

/// A shard of `count` samples with these fields.
fn shard(folder: &Path, name: &str, count: usize, fields: impl Fn(usize) -> Vec<(&'static str, Vec<u8>)>) {
    let pattern = folder.join(format!("{name}-%06d.tar"));
    let mut writer = WebDatasetWriter::builder(pattern.to_str().unwrap()).build().unwrap();
    for i in 0..count {
        writer.write(&format!("train/{i:04}"), &fields(i)).unwrap();
    }
    writer.finish().unwrap();
}

fn text(i: usize) -> Vec<(&'static str, Vec<u8>)> {
    let caption = format!("line {i}, \"quoted\"\nand\tü");
    vec![
        ("cls", (i * 5 % 7).to_string().into_bytes()),
        ("txt", caption.into_bytes()),
        ("json", format!("{{\"id\":{i},\"tags\":[\"a\",null]}}").into_bytes()),
        ("boxes.json", format!("[[{i},2.5]]").into_bytes()),
    ]
}

#[test]
fn samples_survive_tables_and_text() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    shard(dir.path(), "text", 1100, text);
    shard(dir.path(), "photos", 30, |i| {
        [vec![("jpg", vec![0xff, 0xd8, 0xff, i as u8]), ("npy", vec![0; i])], text(i)].concat()
    });
    // A field that some samples do not have, and one that is empty.
    shard(dir.path(), "some", 20, |i| {
        let mut fields = vec![("png", vec![i as u8; 9]), ("cls", b"3".to_vec()), ("txt", Vec::new())];
        fields.truncate(if i % 3 == 0 { 2 } else { 3 });
        fields.extend((i % 2 == 0).then(|| ("seg.png", vec![i as u8])));
        fields
    });
    for (name, formats) in [
        ("text", &["a.jsonl", "a.csv", "a.tsv", "a.parquet", "a.mds", "a.arrow", "a.hf"][..]),
        ("photos", &["b.parquet", "b.mds", "b.hf"]),
        ("some", &["c.parquet", "c.arrow", "c.hf"]),
    ] {
        let source = path(&format!("{name}-000000.tar"));
        for format in formats {
            good(&source, &path(format), &[]);
            good(&path(format), &path(&format!("{format}-back.tar")), &[]);
            let back = samples(&path(&format!("{format}-back-000000.tar")));
            assert!(back == samples(&source), "{format}: {:?} for {:?}", back[0], samples(&source)[0]);
        }
    }
    // As training reads them.
    let line = JsonLines::open(path("a.jsonl")).unwrap().get(3).unwrap();
    assert_eq!((&line["cls"], &line["json"]["id"], &line["boxes"][0][1]), (&1.into(), &3.into(), &2.5.into()));
    assert_eq!(CsvDataset::open(path("a.csv")).unwrap().get(3).unwrap()["cls"], "1");
    let table = ParquetDataset::from_files([path("b.parquet")]).unwrap().select(["cls"]).unwrap().read().unwrap();
    assert_eq!(table.tensor("cls").unwrap().size(), [30]);
    let sample = MdsDataset::open(path("b.mds")).unwrap().stream([0]).nth(3).unwrap().unwrap();
    assert!(matches!(sample.get("cls").unwrap(), MdsValue::Int(1)));
    assert!(matches!(sample.get("json").unwrap(), MdsValue::Json(json) if json["id"] == 3));
    good(&path("text-000000.tar"), &path("small.mds"), &["--shard-size", "10K"]);
    assert!(MdsDataset::open(path("small.mds")).unwrap().shards() > 5);
}

#[test]
fn sequences_of_integers_become_files_of_tokens() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let lines = ["{\"input_ids\":[1,2,65535]}", "{\"input_ids\":[]}", "{\"input_ids\":[7]}"];
    fs::write(path("a.jsonl"), lines.join("\n")).unwrap();
    good(&path("a.jsonl"), &path("b.idx"), &[]);
    let data = IndexedTokens::open(path("b")).unwrap();
    assert_eq!((data.len(), data.documents(), data.get(0).unwrap()), (3, 3, vec![1, 2, 65535]));
    good(&path("b.idx"), &path("c.jsonl"), &[]);
    let back = JsonLines::open(path("c.jsonl")).unwrap();
    let expected: Vec<serde_json::Value> = lines.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!((0..3).all(|line| back.get(line).unwrap()["input_ids"] == expected[line]["input_ids"]));

    good(&path("a.jsonl"), &path("train.bin"), &["--token-dtype", "int32"]);
    let tokens = TokenFile::with_dtype(path("train.bin"), TokenDtype::Int32).unwrap();
    assert_eq!(tokens.tokens(0..4).unwrap(), [1, 2, 65535, 7]);
    assert!(bad(&path("train.bin"), &path("d.jsonl"), &[]).contains("where a sample ends"));
    // As other formats hold lists.
    shard(dir.path(), "lists", 2, |i| vec![("tokens", format!("{i} 5 9").into_bytes())]);
    good(&path("lists-000000.tar"), &path("lists.idx"), &[]);
    assert_eq!(IndexedTokens::open(path("lists")).unwrap().get(1).unwrap(), [1, 5, 9]);
    assert!(
        bad(&path("lists-000000.tar"), &path("lists.bin.idx"), &["--to", "tokens", "--shard-size", "1M"])
            .contains("--shard-size")
    );
    fs::write(path("large.jsonl"), "{\"tokens\": [1, 65536]}").unwrap();
    let error = bad(&path("large.jsonl"), &path("large.idx"), &[]);
    assert!(error.contains("65536") && error.contains("--token-dtype"), "{error}");
    assert!(!path("large.bin").exists());
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    shard(dir.path(), "photos", 3, |i| {
        let mut fields = vec![("jpg", vec![0xff, 0xd8, 0xff]), ("json", b"{".to_vec())];
        fields.truncate(if i == 1 { 1 } else { 2 });
        fields
    });
    shard(dir.path(), "uneven", 3, |i| if i == 1 { vec![("txt", vec![b'a'])] } else { text(i) });
    let (photos, uneven) = (path("photos-000000.tar"), path("uneven-000000.tar"));
    for (src, dst, part) in [
        (&photos, "a.csv", "field \"jpg\" is not text, and csv holds nothing else"),
        (&photos, "a.jsonl", "field \"jpg\" is not text, and jsonl holds nothing else"),
        (&photos, "a.mds", "field \"json\" is no JSON"),
        (&photos, "a.idx", "has to be tokenized first"),
        (&uneven, "a.mds", "train/0001: field \"cls\" is missing, and mds has all columns"),
    ] {
        let error = bad(src, &path(dst), &[]);
        assert!(error.contains(part), "{dst}: {error}");
    }
    good(&uneven, &path("a.mds"), &["--skip-errors"]);
    assert_eq!(MdsDataset::open(path("a.mds")).unwrap().samples(), 2);
    fs::write(path("list.jsonl"), "[1, 2]").unwrap();
    assert!(bad(&path("list.jsonl"), &path("b.tar"), &[]).contains("expected an object"));
    // Nothing unfinished is left.
    let mut names: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["a.mds", "list.jsonl", "photos-000000.tar", "uneven-000000.tar"]);
}
