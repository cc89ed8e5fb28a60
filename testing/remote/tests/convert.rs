//! `overdrive-data convert` from URLs, as a user runs it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{IterableDataset, WebDataset, WebDatasetWriter};

use crate::{bucket, files, web};

pub const TESTS: &[files::Test] = &[
    ("images_are_converted_from_every_format_by_url", images_are_converted_from_every_format_by_url),
    ("texts_are_converted_from_every_format_by_url", texts_are_converted_from_every_format_by_url),
    ("faults_of_servers_are_errors_of_convert", faults_of_servers_are_errors_of_convert),
    #[cfg(target_os = "linux")]
    ("ctrl_c_is_seen_while_a_server_is_waited_for", ctrl_c_is_seen_while_a_server_is_waited_for),
];

/// What it prints, and whether it succeeded. Its cache is in the folder of the target.
fn run(src: &str, dst: &Path, options: &[&str]) -> Result<(bool, String)> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data-remote"));
    command.env("XDG_CACHE_HOME", dst.parent().context("a folder")?.join("cache"));
    let output = command.stdin(Stdio::null()).args(["convert", src]).arg(dst).args(options).output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.success(), String::from_utf8(said)?))
}

fn good(src: &str, dst: &Path, options: &[&str]) -> Result<()> {
    let (is_good, said) = run(src, dst, options)?;
    ensure!(is_good, "{src}: {said}");
    Ok(())
}

type Samples = Vec<(String, BTreeMap<String, Vec<u8>>)>;
type Fields = Vec<(&'static str, Vec<u8>)>;

fn samples(shard: &Path) -> Result<Samples> {
    let dataset = WebDataset::from_files([shard])?;
    let samples = dataset.stream([0]).map(|sample| {
        let sample = sample?;
        Ok((sample.key().to_owned(), sample.into_files().into_iter().collect()))
    });
    samples.collect()
}

/// A folder below the bucket, and its shard `in-000000.tar` with these fields.
fn shard(name: &str, fields: fn(u8) -> Fields) -> Result<PathBuf> {
    let folder = bucket().join(name);
    fs::create_dir_all(&folder)?;
    let mut writer = WebDatasetWriter::builder(folder.join("in-%06d.tar").display().to_string()).build()?;
    (0..9).try_for_each(|i| writer.write(&format!("{}/{i:04}", ["cat", "dog"][usize::from(i > 4)]), &fields(i)))?;
    writer.finish()?;
    Ok(folder)
}

/// Makes each of these of the shard, and reads it by its URL: the name of the target and that of the source.
fn each(folder: &Path, name: &str, formats: &[(&str, &str)], options: &[&str]) -> Result<Vec<Samples>> {
    let here = tempfile::tempdir()?;
    let found = formats.iter().enumerate().map(|(number, (made, read))| {
        good(&folder.join("in-000000.tar").display().to_string(), &folder.join(made), &[])?;
        let url = if *read == "lines.jsonl" { format!("{}/data", web()) } else { "s3://data".to_owned() };
        let options = if made.ends_with(".bin") { options } else { &[] };
        good(&format!("{url}/{name}/{read}"), &here.path().join(format!("{number}.tar")), options)?;
        samples(&here.path().join(format!("{number}-000000.tar"))).context(read.to_string())
    });
    found.collect()
}

fn images_are_converted_from_every_format_by_url() -> Result<()> {
    let name = "convert/images";
    let folder = shard(name, |i| {
        let image = vec![0xff, 0xd8, 0xff, i];
        vec![("jpg", image), ("cls", vec![b'0' + u8::from(i > 4)]), ("json", format!("{{\"id\":{i}}}").into_bytes())]
    })?;
    let expected = samples(&folder.join("in-000000.tar"))?;
    let formats = [
        ("photos", "photos/"),
        ("a.tar", "a-{000000..000000}.tar"),
        ("b.tar.zst", "b-*.tar.zst"),
        ("c.tfrecord", "c.tfrecord"),
        ("d.lmdb", "d.lmdb"),
        ("e.mdb", "e.mdb"),
        ("f.arrow", "f.arrow"),
        ("g.parquet", "g.parquet"),
        ("h.mds", "h.mds"),
        ("i.hf", "i.hf"),
    ];
    for (found, (_, read)) in each(&folder, name, &formats, &[])?.iter().zip(formats) {
        ensure!(*found == expected, "{read}: {:?} for {:?}", found.first(), expected.first());
    }
    Ok(())
}

fn texts_are_converted_from_every_format_by_url() -> Result<()> {
    let name = "convert/texts";
    let folder =
        shard(name, |i| vec![("txt", vec![b'a'; i.into()]), ("input_ids.json", format!("[{i},9]").into_bytes())])?;
    let expected = samples(&folder.join("in-000000.tar"))?;
    let formats = [("lines.jsonl", "lines.jsonl"), ("b.csv", "b.csv"), ("c.idx", "c.idx"), ("d.bin", "d.bin")];
    let found = each(&folder, name, &formats, &["--block-size", "2", "--from", "tokens"])?;
    ensure!(found[0] == expected, "{:?}", found[0]);
    // An empty cell is a field that is not there, and tokens are all that their files have.
    let of = |samples: &Samples, field: &str| -> Vec<_> {
        samples.iter().filter_map(|(_, fields)| fields.get(field).filter(|field| !field.is_empty()).cloned()).collect()
    };
    ensure!(of(&found[1], "txt") == of(&expected, "txt"), "{:?}", found[1]);
    for found in &found {
        ensure!(of(found, "input_ids.json") == of(&expected, "input_ids.json"), "{found:?}");
    }
    Ok(())
}

fn faults_of_servers_are_errors_of_convert() -> Result<()> {
    let here = tempfile::tempdir()?;
    for fault in ["cut-1", "broken-1"] {
        let folder = shard(&format!("{fault}/convert"), |i| vec![("bin", vec![i; 100_000])])?;
        let url = format!("s3://data/{fault}/convert/in-*.tar");
        good(&url, &here.path().join(format!("{fault}.mdb")), &[])?;
        good(
            &here.path().join(format!("{fault}.mdb")).display().to_string(),
            &here.path().join(format!("{fault}.tar")),
            &[],
        )?;
        ensure!(samples(&here.path().join(format!("{fault}-000000.tar")))? == samples(&folder.join("in-000000.tar"))?);
    }
    shard("refused-0/convert", |i| vec![("txt", vec![i])])?;
    shard("changed-0/convert", |i| vec![("bin", vec![i; 100_000])])?;
    for (src, dst, part) in [
        ("s3://data/refused-0/convert/in-000000.tar", "a.lmdb", "check the credentials"),
        ("s3://data/changed-0/convert/in-000000.tar", "a.lmdb", "changed since it was opened"),
        ("s3://data/none/none.tar", "a.tfrecord", "there is no such file"),
        ("s3://data/none/", "a.tfrecord", "no image in it"),
        (&format!("{}/data/photos/", web()), "a.tar", "as web servers do not list files"),
        ("gcs://data/in.tar", "a.tfrecord", "`gs://bucket/key`"),
        ("s3://data/none", "a.tar", "state it with --from"),
    ] {
        let (is_good, said) = run(src, &here.path().join(dst), &[])?;
        ensure!(!is_good && said.contains(part) && said.contains(src), "{src}: {said}");
        ensure!(!here.path().join(dst).exists(), "{src}");
    }
    let (is_good, said) = run("s3://data/refused-0/convert/in-000000.tar", Path::new("s3://data/out.mdb"), &[])?;
    ensure!(!is_good && said.contains("s3://data/out.mdb: a target is a path of this machine"), "{said}");
    Ok(())
}

/// The server is silent for longer than anybody waits for its list.
#[cfg(target_os = "linux")]
fn ctrl_c_is_seen_while_a_server_is_waited_for() -> Result<()> {
    let here = tempfile::tempdir()?;
    let target = here.path().join("target");
    fs::create_dir(&target)?;
    let mut command = Command::new(env!("CARGO_BIN_EXE_overdrive-data-remote"));
    command.env("XDG_CACHE_HOME", here.path().join("cache")).stdin(Stdio::null()).stderr(Stdio::piped());
    let mut child =
        command.args(["convert", "s3://data/late-3600000/convert/in-*.tar"]).arg(target.join("a.lmdb")).spawn()?;
    // A signal that it does not catch yet would end it before it can say so.
    let catches = |child: &std::process::Child| {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).map(str::trim);
        caught.and_then(|caught| u64::from_str_radix(caught, 16).ok()).is_some_and(|caught| caught & 0b10 != 0)
    };
    while !catches(&child) && child.try_wait()?.is_none() {
        std::thread::yield_now();
    }
    ensure!(Command::new("kill").args(["-INT", &child.id().to_string()]).status()?.success());
    let output = child.wait_with_output()?;
    let said = String::from_utf8(output.stderr)?;
    ensure!(said.contains("interrupted") && output.status.code() == Some(130), "{said}");
    ensure!(fs::read_dir(&target)?.next().is_none());
    Ok(())
}
