//! Every format, by URL: the samples of the disk, or an error with the file's name.

use std::fmt::Debug;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{
    ArrowDataset, CsvDataset, DataError, Dataset, ImageFolder, IndexedTokens, IndexedTokensWriter, IterableDataset,
    JsonLines, LmdbDataset, LmdbWriter, MdsDataset, Mnist, ParquetDataset, SafeTensorsFile, ShardListDataset,
    TfRecordDataset, TfRecordWriter, TokenDtype, TokenFile, TokenWriter, WebDataset, WebDatasetWriter, WebSample,
    read_idx, read_npy,
};

use crate::bucket;

/// A format: writes a dataset into a folder, and reads it from a folder or from the URL of one.
pub struct Format {
    pub name: &'static str,
    pub write: fn(&Path) -> Result<()>,
    pub samples: fn(&str) -> Result<Vec<String>>,
}

pub const FORMATS: &[Format] = &[
    Format { name: "tar", write: write_tar, samples: tar },
    Format { name: "tar_with_indexes", write: write_indexed_tar, samples: indexed_tar },
    Format { name: "tfrecord", write: |folder| write_records(folder, false), samples: records },
    Format { name: "tfrecord_with_indexes", write: |folder| write_records(folder, true), samples: indexed_records },
    Format { name: "mds", write: |folder| copy("mds/plain", folder), samples: mds },
    Format { name: "mds_in_any_order", write: |folder| copy("mds/plain", folder), samples: indexed_mds },
    Format { name: "parquet", write: |folder| copy("parquet/numbers.parquet", folder), samples: parquet },
    Format { name: "arrow", write: |folder| copy("arrow/numbers.arrow", folder), samples: arrow },
    Format { name: "hugging_face", write: |folder| copy("arrow/pictures", folder), samples: hugging_face },
    Format { name: "lmdb_file", write: |folder| write_lmdb(folder, false), samples: lmdb },
    Format { name: "lmdb_folder", write: |folder| write_lmdb(folder, true), samples: lmdb },
    Format { name: "tokens", write: write_tokens, samples: tokens },
    Format { name: "indexed_tokens", write: write_indexed_tokens, samples: indexed_tokens },
    Format { name: "json_lines", write: write_lines, samples: lines },
    Format { name: "csv", write: write_table, samples: table },
    Format { name: "idx", write: write_idx, samples: idx },
    Format { name: "mnist", write: write_mnist, samples: mnist },
    Format { name: "npy", write: |folder| copy("c-float32.npy", folder), samples: npy },
    Format { name: "safetensors", write: |folder| copy("arrays.safetensors", folder), samples: safetensors },
    Format { name: "images", write: write_images, samples: images },
];

/// Faults that pass, and what is said of those that do not.
pub const PASSING: [&str; 6] = ["whole-0", "cut-1", "short-1", "broken-1", "busy-1", "late-5"];
pub const STAYING: [(&str, &str); 4] = [
    ("refused-0", "check the credentials"),
    ("forbidden-0", "check the credentials"),
    ("changed-0", "changed since it was opened"),
    ("short-99", ""),
];

/// The folder of a dataset below the bucket, and its URL.
pub fn write(format: &Format, fault: &str) -> Result<(PathBuf, String)> {
    let name = format!("{fault}/{}", format.name);
    let folder = bucket().join(&name);
    fs::create_dir_all(&folder)?;
    (format.write)(&folder)?;
    Ok((folder, format!("s3://data/{name}")))
}

pub fn test(format: &Format) -> Result<()> {
    for fault in PASSING {
        let (folder, url) = write(format, fault)?;
        let expected = (format.samples)(&folder.display().to_string())?;
        ensure!(expected.len() > 1, "{expected:?}");
        let found = (format.samples)(&url).context(fault)?;
        ensure!(found == expected, "{fault}: {:?}", found.iter().zip(&expected).find(|(one, other)| one != other));
    }
    for (fault, what) in STAYING {
        let (_, url) = write(format, fault)?;
        fails(format, &url, what).context(fault)?;
    }
    Ok(())
}

/// Reading ends with an error of the server's that names the URL and says this.
pub fn fails(format: &Format, url: &str, what: &str) -> Result<()> {
    let error = (format.samples)(url).err().context("it should be an error")?;
    let error = error.downcast_ref::<DataError>().context("another error")?;
    ensure!(matches!(error.innermost(), DataError::Remote { .. }), "{error:?}");
    let said = error.to_string();
    ensure!(said.contains(url) && said.contains(what), "{said}");
    Ok(())
}

/// Copies a file or folder of the fixtures of `overdrive-dataload`.
fn copy(name: &str, to: &Path) -> Result<()> {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../crates/dataload/tests/fixtures").join(name);
    copy_into(&from, to, from.is_dir())
}

fn copy_into(from: &Path, to: &Path, is_folder: bool) -> Result<()> {
    if !is_folder {
        fs::copy(from, to.join(from.file_name().context("a name")?))?;
        return Ok(());
    }
    for entry in fs::read_dir(from)? {
        let (entry, to) = (entry?, to.to_owned());
        let is_folder = entry.file_type()?.is_dir();
        let to = if is_folder { to.join(entry.file_name()) } else { to };
        fs::create_dir_all(&to)?;
        copy_into(&entry.path(), &to, is_folder)?;
    }
    Ok(())
}

fn all<D: Dataset<Sample: Debug>>(data: &D) -> Result<Vec<String>> {
    (0..data.len()).map(|index| Ok(format!("{:?}", data.get(index)?))).collect()
}

fn web(sample: &WebSample) -> String {
    format!("{} {:?}", sample.key(), sample.files().collect::<Vec<_>>())
}

fn write_tar(folder: &Path) -> Result<()> {
    ["web-000.tar", "web-001.tar", "web.tar.gz", "web.tar.zst"].iter().try_for_each(|name| copy(name, folder))
}

fn tar(root: &str) -> Result<Vec<String>> {
    let data = WebDataset::open(&format!("{root}/*.tar*"))?;
    data.stream(0..data.shards()).map(|sample| Ok(web(&sample?))).collect()
}

fn write_indexed_tar(folder: &Path) -> Result<()> {
    // One by the writer, which notes the shard's length, and one without it.
    let mut writer = WebDatasetWriter::builder(folder.join("a-%d.tar").display().to_string()).index(true).build()?;
    (0..5).try_for_each(|number| writer.write(&format!("{number}"), &[("txt", "x".repeat(number))]))?;
    writer.finish()?;
    copy("web-001.tar", folder)?;
    copy("index/web-001.idx", folder)
}

fn indexed_tar(root: &str) -> Result<Vec<String>> {
    let data = WebDataset::open(&format!("{root}/*.tar"))?;
    let streamed: Vec<String> = data.stream(0..2).map(|sample| Ok(web(&sample?))).collect::<Result<_, DataError>>()?;
    let samples = all(&ShardListDataset::new(data)?.map(|sample| Ok(web(&sample))))?;
    ensure!(streamed.iter().map(|sample| format!("{sample:?}")).eq(samples.iter().cloned()));
    Ok(samples)
}

fn write_records(folder: &Path, index: bool) -> Result<()> {
    let path = folder.join("part-0.tfrecord");
    let mut writer = if index { TfRecordWriter::with_index(path)? } else { TfRecordWriter::create(path)? };
    (0..9).try_for_each(|number| writer.write(&vec![number; 100 * usize::from(number)]))?;
    writer.finish()?;
    if index { Ok(()) } else { copy("examples.tfrecord.gz", folder) }
}

fn records(root: &str) -> Result<Vec<String>> {
    let data = TfRecordDataset::open(&format!("{root}/*.tfrecord*"))?;
    data.stream(0..data.shards()).map(|record| Ok(format!("{:?}", record?.bytes()))).collect()
}

fn indexed_records(root: &str) -> Result<Vec<String>> {
    let data = TfRecordDataset::open(&format!("{root}/*.tfrecord"))?;
    all(&ShardListDataset::new(data)?.map(|record| Ok(record.bytes().to_vec())))
}

fn mds(root: &str) -> Result<Vec<String>> {
    let data = MdsDataset::open(root)?;
    let columns: Vec<String> = data.columns().map(str::to_owned).collect();
    let sample = |sample: Result<overdrive_dataload::MdsSample, DataError>| {
        let sample = sample?;
        Ok(format!("{:?}", columns.iter().map(|column| sample.raw(column)).collect::<Vec<_>>()))
    };
    data.stream(0..data.shards()).map(sample).collect()
}

fn indexed_mds(root: &str) -> Result<Vec<String>> {
    let data = MdsDataset::open(root)?;
    let columns: Vec<String> = data.columns().map(str::to_owned).collect();
    let raw = move |sample: overdrive_dataload::MdsSample| {
        Ok(columns.iter().map(|column| sample.raw(column).map(<[u8]>::to_vec)).collect::<Vec<_>>())
    };
    all(&ShardListDataset::new(data)?.map(raw))
}

fn parquet(root: &str) -> Result<Vec<String>> {
    all(&ParquetDataset::open(&format!("{root}/*.parquet"))?)
}

fn arrow(root: &str) -> Result<Vec<String>> {
    all(&ArrowDataset::open(&format!("{root}/*.arrow"))?)
}

fn hugging_face(root: &str) -> Result<Vec<String>> {
    let mut samples = Vec::new();
    for (name, data) in ArrowDataset::load_splits(root)? {
        samples.push(name);
        samples.extend(all(&data)?);
    }
    Ok(samples)
}

/// Of more than one chunk.
fn write_lmdb(folder: &Path, subdir: bool) -> Result<()> {
    let mut writer = LmdbWriter::builder(folder.join("train.lmdb")).subdir(subdir).checksums(true).create()?;
    for number in 0..60_u8 {
        writer.write(&[b'k', number], &vec![number; 100_000])?;
    }
    writer.finish()?;
    Ok(())
}

pub fn lmdb(root: &str) -> Result<Vec<String>> {
    let data = LmdbDataset::open(format!("{root}/train.lmdb"))?;
    ensure!(data.has_checksums());
    all(&data.map(|sample| Ok((sample.key().to_vec(), sample.value().len(), sample.value()[0]))))
}

/// Of more than one chunk.
fn write_tokens(folder: &Path) -> Result<()> {
    let mut writer = TokenWriter::create(folder.join("train.bin"), TokenDtype::Uint16)?;
    writer.write(&(0..3_000_000).map(|token| token % 50_000).collect::<Vec<_>>())?;
    writer.finish()?;
    Ok(())
}

pub fn tokens(root: &str) -> Result<Vec<String>> {
    let data = TokenFile::open(format!("{root}/train.bin"))?;
    let parts = (0..data.len()).step_by(100_000).map(|start| data.tokens(start..start + 100_000));
    parts.map(|part| Ok(part?.iter().zip(1..).map(|(token, at)| token * at).sum::<i64>().to_string())).collect()
}

fn write_indexed_tokens(folder: &Path) -> Result<()> {
    let mut writer = IndexedTokensWriter::create(folder.join("corpus.v1"), TokenDtype::Int32)?;
    for length in 1..40 {
        writer.write(&(0..length).collect::<Vec<_>>())?;
        writer.end_document();
    }
    writer.finish()?;
    Ok(())
}

fn indexed_tokens(root: &str) -> Result<Vec<String>> {
    let data = IndexedTokens::open(format!("{root}/corpus.v1"))?;
    ensure!(data.documents() == 39);
    all(&data)
}

fn write_lines(folder: &Path) -> Result<()> {
    let lines: String = (0..50).map(|row| format!("{{\"row\": {row}}}\n")).collect();
    Ok(fs::write(folder.join("lines.jsonl"), lines)?)
}

fn lines(root: &str) -> Result<Vec<String>> {
    all(&JsonLines::open(format!("{root}/lines.jsonl"))?)
}

fn write_table(folder: &Path) -> Result<()> {
    let rows: String = (0..50).map(|row| format!("{row},\"a\nb\"\n")).collect();
    Ok(fs::write(folder.join("table.csv"), format!("row,text\n{rows}"))?)
}

fn table(root: &str) -> Result<Vec<String>> {
    let rows = CsvDataset::open(format!("{root}/table.csv"))?;
    all(&rows.map(|row| Ok([row["row"].clone(), row["text"].clone()])))
}

fn idx_file(path: PathBuf, shape: &[u8], values: &[u8]) -> Result<()> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    shape.iter().for_each(|&size| bytes.extend([0, 0, 0, size]));
    bytes.extend(values);
    Ok(fs::write(path, bytes)?)
}

fn write_idx(folder: &Path) -> Result<()> {
    idx_file(folder.join("three.idx"), &[3], &[7, 8, 9])
}

fn idx(root: &str) -> Result<Vec<String>> {
    Ok(read_idx(format!("{root}/three.idx"))?.data.iter().map(u8::to_string).collect())
}

fn write_mnist(folder: &Path) -> Result<()> {
    for (split, count) in [("train", 3), ("t10k", 2)] {
        let pixels = vec![count; usize::from(count) * 784];
        // One of the four spellings for each.
        let ending = if count == 3 { "-idx" } else { ".idx" };
        idx_file(folder.join(format!("{split}-images{ending}3-ubyte")), &[count, 28, 28], &pixels)?;
        idx_file(folder.join(format!("{split}-labels{ending}1-ubyte")), &[count], &vec![1; usize::from(count)])?;
    }
    Ok(())
}

fn mnist(root: &str) -> Result<Vec<String>> {
    let Mnist { train, test, .. } = Mnist::open(root)?;
    Ok([train, test].iter().map(|split| format!("{:?} {:?}", split.images(), split.labels())).collect())
}

fn npy(root: &str) -> Result<Vec<String>> {
    let values = read_npy(format!("{root}/c-float32.npy"))?.flatten(0, -1);
    Ok(Vec::<f32>::try_from(values)?.iter().map(f32::to_string).collect())
}

fn safetensors(root: &str) -> Result<Vec<String>> {
    let mut file = SafeTensorsFile::open(format!("{root}/arrays.safetensors"))?;
    // One is of a type that tch lacks.
    let names = file.names();
    names
        .iter()
        .filter(|name| *name != "refused")
        .map(|name| Ok(format!("{name} {}", file.tensor(name)?.to_string(80)?)))
        .collect()
}

fn write_images(folder: &Path) -> Result<()> {
    let names =
        ["dog/b.png", "dog/a.PNG", "cat/z/z.png", "cat/m.webp", "cat/z.jpg", "cat/notes.txt", "README", "a.png"];
    for name in names {
        let path = folder.join(name);
        fs::create_dir_all(path.parent().context("a folder")?)?;
        // Images are not decoded here.
        fs::write(path, name.repeat(1000))?;
    }
    Ok(())
}

pub fn images(root: &str) -> Result<Vec<String>> {
    let folder = ImageFolder::open(root)?;
    let mut samples = vec![format!("{:?}", folder.classes())];
    for index in 0..folder.len() {
        let (image, label) = folder.get(index)?;
        let name = image.path.display().to_string();
        let name = name.strip_prefix(root).context("a path in the folder")?.to_owned();
        samples.push(format!("{name} {label} {:?}", image.bytes));
    }
    Ok(samples)
}
