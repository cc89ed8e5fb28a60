//! What is read from a server is what is on the disk, or an error.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use overdrive_core::Stateful;
use overdrive_dataload::{
    ArrowDataset, ArrowWriter, CsvDataset, DataError, DataLoader, Dataset, IterableDataset, JsonLines, OnError,
    ParquetDataset, RemoteOptions, ShardListDataset, TfRecordDataset, TfRecordWriter, TokenFile, WebDataset,
    WebDatasetWriter, WebSample, configure_remote, expand_shards, read_idx,
};

use crate::{bucket, web};

pub type Test = (&'static str, fn() -> Result<()>);

pub const TESTS: &[Test] = &[
    ("shards_of_a_store_are_those_of_the_disk", shards_of_a_store_are_those_of_the_disk),
    ("faults_that_pass_are_not_seen", faults_that_pass_are_not_seen),
    ("faults_that_stay_are_errors_with_the_file_s_name", faults_that_stay_are_errors_with_the_file_s_name),
    ("a_file_that_changes_is_an_error", a_file_that_changes_is_an_error),
    ("what_is_opened_anew_is_as_it_is_now", what_is_opened_anew_is_as_it_is_now),
    ("what_was_expanded_is_opened_as_it_is_then", what_was_expanded_is_opened_as_it_is_then),
    ("schemes_are_in_upper_or_lower_case", schemes_are_in_upper_or_lower_case),
    ("what_is_open_keeps_its_version", what_is_open_keeps_its_version),
    ("what_was_read_once_is_not_fetched_again", what_was_read_once_is_not_fetched_again),
    ("a_loader_resumes_in_the_middle", a_loader_resumes_in_the_middle),
    ("lines_and_tables_are_read_in_any_order", lines_and_tables_are_read_in_any_order),
    ("web_servers_are_read_too", web_servers_are_read_too),
    ("no_policy_for_bad_samples_hides_an_outage", no_policy_for_bad_samples_hides_an_outage),
    ("what_cannot_be_a_remote_file_is_refused", what_cannot_be_a_remote_file_is_refused),
];

/// Writes shards of some megabytes below the bucket, and returns their samples.
pub fn write(folder: &str, shards: usize) -> Result<Vec<WebSample>> {
    let folder = bucket().join(folder);
    fs::create_dir_all(&folder)?;
    let mut samples = Vec::new();
    for shard in 0..shards {
        let name = folder.join("%02d.tar").display().to_string();
        let mut writer = WebDatasetWriter::builder(name).start_shard(shard as u64).build()?;
        for number in 0..7 {
            let byte = |at: usize| (at * 31 + number * 7 + shard) as u8;
            let bytes: Vec<u8> = (0..700_000 + 1000 * number).map(byte).collect();
            writer.write(&format!("{shard:02}-{number:02}"), &[("bin", &bytes)])?;
        }
        writer.finish()?;
    }
    for shard in 0..shards {
        let local = WebDataset::open(&folder.join(format!("{shard:02}.tar")).display().to_string())?;
        samples.extend(all(&local)?);
    }
    Ok(samples)
}

pub fn all(dataset: &WebDataset) -> Result<Vec<WebSample>> {
    let shards = (0..dataset.shards()).map(|shard| dataset.open_shard(shard, 0));
    let mut samples = Vec::new();
    for shard in shards {
        for sample in shard? {
            samples.push(sample?);
        }
    }
    Ok(samples)
}

pub fn are_equal(found: &[WebSample], expected: &[WebSample]) -> bool {
    let parts = |sample: &WebSample| (sample.key().to_owned(), sample.get("bin").map(<[u8]>::to_vec));
    found.iter().map(parts).eq(expected.iter().map(parts))
}

fn shards_of_a_store_are_those_of_the_disk() -> Result<()> {
    let expected = write("plain", 3)?;
    for pattern in ["s3://data/plain/{00..02}.tar", "s3://data/plain/*.tar", "s3://data/plai*/0[012].tar"] {
        let files = expand_shards(pattern)?;
        ensure!(files.len() == 3 && files[0].starts_with("s3://data"), "{files:?}");
        ensure!(are_equal(&all(&WebDataset::from_files(files)?)?, &expected), "{pattern}");
    }
    Ok(())
}

fn faults_that_pass_are_not_seen() -> Result<()> {
    for fault in ["cut-2", "short-2", "broken-2", "busy-1", "late-40"] {
        let expected = write(fault, 2)?;
        let found = all(&WebDataset::open(&format!("s3://data/{fault}/{{00..01}}.tar"))?).context(fault)?;
        ensure!(are_equal(&found, &expected), "{fault}");
    }
    Ok(())
}

pub fn told<T>(result: Result<T, DataError>) -> Result<String> {
    match result {
        Ok(_) => bail!("it should be an error"),
        Err(error) => Ok(error.to_string()),
    }
}

fn faults_that_stay_are_errors_with_the_file_s_name() -> Result<()> {
    write("refused-0", 1)?;
    let refused = told(WebDataset::open("s3://data/refused-0/00.tar"))?;
    ensure!(refused.contains("s3://data/refused-0/00.tar") && refused.contains("check the credentials"), "{refused}");
    write("short-99", 1)?;
    let short =
        all(&WebDataset::open("s3://data/short-99/00.tar")?).err().context("it should be an error")?.to_string();
    ensure!(short.contains("s3://data/short-99/00.tar") && short.contains("bytes came"), "{short}");
    let missing = told(WebDataset::open("s3://data/plain/none.tar"))?;
    ensure!(missing.contains("s3://data/plain/none.tar") && missing.contains("there is no such file"), "{missing}");
    let unmatched = told(WebDataset::open("s3://data/nothing/*.tar"))?;
    ensure!(unmatched.contains("files that match"), "{unmatched}");
    Ok(())
}

fn a_file_that_changes_is_an_error() -> Result<()> {
    write("changing", 1)?;
    let dataset = WebDataset::open("s3://data/changing/00.tar")?;
    let path = bucket().join("changing/00.tar");
    let mut bytes = fs::read(&path)?;
    let last = bytes.len() - 2000;
    bytes[last] ^= 1;
    fs::write(&path, bytes)?;
    let error = all(&dataset).err().context("it should be an error")?.to_string();
    ensure!(error.contains("changed since it was opened") && error.contains("s3://data/changing/00.tar"), "{error}");
    Ok(())
}

/// Also where it was opened before and not read.
fn what_is_opened_anew_is_as_it_is_now() -> Result<()> {
    write("anew", 1)?;
    let unread = WebDataset::open("s3://data/anew/00.tar")?;
    let path = bucket().join("anew/00.tar");
    let mut bytes = fs::read(&path)?;
    bytes[700] ^= 1;
    fs::write(&path, bytes)?;
    let expected = all(&WebDataset::open(&path.display().to_string())?)?;
    ensure!(are_equal(&all(&WebDataset::open("s3://data/anew/00.tar")?)?, &expected));
    drop(unread);
    Ok(())
}

/// Of files of the same length; the pattern says nothing of who opens them.
fn what_was_expanded_is_opened_as_it_is_then() -> Result<()> {
    let folder = bucket().join("expanded");
    fs::create_dir_all(&folder)?;
    let write = |byte: u8| -> Result<()> {
        fs::write(folder.join("a.idx"), [0, 0, 8, 1, 0, 0, 0, 1, byte])?;
        fs::write(folder.join("a.jsonl"), format!("{{\"row\": {byte}}}\n"))?;
        fs::write(folder.join("a.csv"), format!("row\n{byte}\n"))?;
        fs::write(folder.join("a.bin"), u16::from(byte).to_le_bytes())?;
        let column: std::sync::Arc<dyn arrow_array::Array> =
            std::sync::Arc::new(arrow_array::UInt8Array::from(vec![byte]));
        let batch = arrow_array::RecordBatch::try_from_iter([("row", column)])?;
        let mut file = ArrowWriter::create(folder.join("a.arrow"), batch.schema())?;
        file.write(&batch)?;
        file.finish()?;
        Ok(())
    };
    let read = |path: &Path| -> Result<String> {
        Ok(match path.extension().and_then(|it| it.to_str()).context("an extension")? {
            "idx" => read_idx(path)?.data[0].to_string(),
            "jsonl" => JsonLines::open(path)?.get(0)?["row"].to_string(),
            "csv" => CsvDataset::open(path)?.get(0)?["row"].to_string(),
            "bin" => TokenFile::open(path)?.tokens(0..1)?[0].to_string(),
            _ => format!("{:?}", ArrowDataset::from_files([path])?.get(0)?),
        })
    };
    for pattern in ["s3://data/expanded/a.*", "s3://data/expanded/a.{idx,jsonl,csv,bin,arrow}"] {
        write(1)?;
        let files = expand_shards(pattern)?;
        ensure!(files.len() == 5, "{files:?}");
        write(2)?;
        for file in files {
            let local = bucket().join("expanded").join(file.file_name().context("a name")?);
            let found = read(&file).with_context(|| file.display().to_string())?;
            ensure!(found == read(&local)? && found.contains('2'), "{}: {found}", file.display());
        }
    }
    Ok(())
}

fn schemes_are_in_upper_or_lower_case() -> Result<()> {
    let expected = write("cases", 2)?;
    for pattern in ["S3://data/cases/*.tar", "S3://data/cases/{00..01}.tar"] {
        ensure!(are_equal(&all(&WebDataset::open(pattern)?)?, &expected), "{pattern}");
    }
    let web = web().replace("http", "HTTP");
    let found = all(&WebDataset::open(&format!("{web}/data/cases/{{00..01}}.tar"))?)?;
    ensure!(are_equal(&found, &expected));
    let listed = told(WebDataset::open(&format!("{web}/data/cases/*.tar")))?;
    ensure!(listed.contains("web servers do not list files"), "{listed}");
    Ok(())
}

/// A dataset that opens its file for each sample, by an index or a footer of it, also where others have opened a later
/// version of the same length meanwhile.
fn what_is_open_keeps_its_version() -> Result<()> {
    let folder = bucket().join("kept");
    fs::create_dir_all(&folder)?;
    let write = |byte: u8| -> Result<()> {
        let mut writer = TfRecordWriter::with_index(folder.join("0.tfrecord"))?;
        (0..3).try_for_each(|_| writer.write(&[byte; 100]))?;
        writer.finish()?;
        Ok(())
    };
    let records = || ShardListDataset::new(TfRecordDataset::open("s3://data/kept/0.tfrecord")?);
    write(1)?;
    let open = records()?;
    write(2)?;
    let anew = records()?;
    for _ in 0..2 {
        ensure!((open.get(1)?.bytes(), anew.get(1)?.bytes()) == (&[1; 100][..], &[2; 100][..]));
    }

    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/dataload/tests/fixtures/parquet");
    let mut bytes = fs::read(fixture.join("numbers.parquet"))?;
    let local = ParquetDataset::from_bytes(bytes.clone(), Path::new("numbers"))?;
    fs::write(folder.join("numbers.parquet"), &bytes)?;
    let open = ParquetDataset::open("s3://data/kept/numbers.parquet")?;
    // The header of the first page.
    bytes[4] ^= 0xff;
    fs::write(folder.join("numbers.parquet"), bytes)?;
    ensure!(format!("{:?}", open.get(0)?) == format!("{:?}", local.get(0)?));
    Ok(())
}

fn what_was_read_once_is_not_fetched_again() -> Result<()> {
    let expected = write("once-0", 2)?;
    for _ in 0..2 {
        let dataset = WebDataset::open("s3://data/once-0/{00..01}.tar")?;
        ensure!(are_equal(&all(&dataset)?, &expected));
    }
    Ok(())
}

fn a_loader_resumes_in_the_middle() -> Result<()> {
    let expected = write("resumed", 3)?;
    resumes("s3://data/resumed/*.tar", &expected)
}

pub fn resumes(shards: &str, expected: &[WebSample]) -> Result<()> {
    let loader = || -> Result<DataLoader<Vec<WebSample>>> {
        let dataset = WebDataset::open(shards)?;
        Ok(DataLoader::stream(dataset)
            .batch_size(5)
            .num_workers(2)
            .collate(|samples: Vec<WebSample>| Ok(samples))
            .build()?)
    };
    let (first, mut found) = (loader()?, Vec::new());
    let mut epoch = first.iter();
    for _ in 0..3 {
        found.extend(epoch.next().context("a batch")??);
    }
    let state = first.state_dict()?;
    drop(epoch);
    let mut second = loader()?;
    second.load_state_dict(&state)?;
    for batch in second.iter() {
        found.extend(batch?);
    }
    let keys = |samples: &[WebSample]| {
        let mut keys: Vec<String> = samples.iter().map(|sample| sample.key().to_owned()).collect();
        keys.sort();
        keys
    };
    ensure!(keys(&found) == keys(expected), "{:?}", keys(&found));
    Ok(())
}

fn lines_and_tables_are_read_in_any_order() -> Result<()> {
    // Answers are cut, and the files are longer than a chunk.
    let folder = bucket().join("cut-1");
    fs::create_dir_all(&folder)?;
    let rows = 60_000;
    let line = |row: usize| format!("{{\"row\": {row}, \"text\": \"{}\"}}\n", "x".repeat(row % 200));
    fs::write(folder.join("lines.jsonl"), (0..rows).map(line).collect::<String>())?;
    let table = |row: usize| format!("{row},\"{}\n\"\n", "y".repeat(row % 200));
    fs::write(folder.join("table.csv"), format!("row,text\n{}", (0..rows).map(table).collect::<String>()))?;
    let lines = JsonLines::open("s3://data/cut-1/lines.jsonl")?;
    let table = CsvDataset::open("s3://data/cut-1/table.csv")?;
    ensure!((lines.len(), table.len()) == (rows, rows));
    for row in (0..rows).step_by(997).chain([rows - 1]).rev() {
        ensure!(lines.get(row)?["row"] == row && table.get(row)?["row"] == row.to_string());
        ensure!(table.get(row)?["text"].len() == row % 200 + 1);
    }
    let loader = DataLoader::builder(lines.map(|line| Ok(line["row"].as_i64().unwrap_or(-1))));
    let loader = loader.batch_size(1000).shuffle(true).num_workers(2).build()?;
    let mut seen: Vec<i64> = Vec::new();
    for batch in &loader {
        seen.extend(Vec::<i64>::try_from(batch?)?);
    }
    seen.sort_unstable();
    ensure!(seen.into_iter().eq(0..rows as i64));
    let missing = told(JsonLines::open("s3://data/plain/none.jsonl"))?;
    ensure!(missing.contains("s3://data/plain/none.jsonl"), "{missing}");
    Ok(())
}

fn web_servers_are_read_too() -> Result<()> {
    let expected = write("web", 1)?;
    let found = all(&WebDataset::open(&format!("{}/data/web/00.tar", web()))?)?;
    ensure!(are_equal(&found, &expected));
    let idx = [0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9];
    fs::write(bucket().join("three.idx"), idx)?;
    ensure!(read_idx(format!("{}/data/three.idx", web()))?.data == [7, 8, 9]);
    ensure!(read_idx("s3://data/three.idx")?.data == [7, 8, 9]);
    // As on the disk, reading again gives the new content.
    fs::write(bucket().join("three.idx"), [0, 0, 8, 1, 0, 0, 0, 3, 4, 5, 6])?;
    ensure!(read_idx("s3://data/three.idx")?.data == [4, 5, 6]);
    // A thread of tokio's must not wait for an answer itself.
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    ensure!(runtime.block_on(async { read_idx("s3://data/three.idx") })?.data == [4, 5, 6]);
    // A file without a byte has no chunk.
    fs::create_dir_all(bucket().join("empty"))?;
    fs::write(bucket().join("empty/0.tfrecord"), [])?;
    let empty = TfRecordDataset::open("s3://data/empty/0.tfrecord")?;
    empty.read_ahead(0);
    ensure!(empty.open_shard(0, 0)?.next().is_none());
    let listed = told(WebDataset::open(&format!("{}/data/web/*.tar", web())))?;
    ensure!(listed.contains("web servers do not list files"), "{listed}");
    Ok(())
}

/// The network or the server has failed, and not the data.
fn no_policy_for_bad_samples_hides_an_outage() -> Result<()> {
    write("forbidden-0", 2)?;
    let stream = WebDataset::open("s3://data/forbidden-0/{00..01}.tar")?;
    let loader = DataLoader::stream(stream).batch_size(5).on_error(OnError::Skip).num_workers(2);
    let loader = loader.collate(|samples: Vec<WebSample>| Ok(samples)).build()?;
    let first = loader.iter().next().context("an error")?;
    let error = first.err().context("it should be an error")?;
    ensure!(matches!(error.innermost(), DataError::Remote { .. }), "{error:?}");
    ensure!(loader.faults().is_empty());
    Ok(())
}

fn what_cannot_be_a_remote_file_is_refused() -> Result<()> {
    for wrong in ["s3://data", "s3://", "http://nowhere"] {
        let error = told(TfRecordDataset::open(wrong))?;
        ensure!(error.contains("url") || error.contains("bucket"), "{wrong}: {error}");
    }
    for wrong in ["http://host/get?id=1", "http://host/x.idx#part"] {
        let error = told(read_idx(wrong))?;
        ensure!(error.contains("a query or a fragment would be left out"), "{wrong}: {error}");
    }
    let cache = configure_remote(RemoteOptions::default().cache("s3://data/cache"));
    ensure!(told(cache)?.contains("expected a folder of this machine, found s3://data/cache"));
    for unknown in ["ftp://data/x", "gcs://data/*.tfrecord", "file:///x"] {
        let error = told(TfRecordDataset::open(unknown))?;
        ensure!(error.contains("`gs://bucket/key`") && error.contains(unknown), "{unknown}: {error}");
    }
    ensure!(!Path::new("s3:").exists());
    Ok(())
}
