//! The fuzzers' entry points: one function per format, which takes any bytes and returns a count of what could be read
//! from them (values, samples, columns).
//!
//! The targets of cargo-fuzz call these, and so does the test that replays the corpus, `tests/formats/corpus.rs`. With
//! the count, it checks that something can be read from each format's corpus. Most functions read the bytes as they
//! are, and again with corrected checksums and lengths, which a fuzzer does not find by itself.
#![forbid(unsafe_code)]

mod database;
mod own_files;
mod remote_cache;
mod repair;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use overdrive_dataload::{
    ArrowDataset, Color, CsvDataset, DataError, Dataset, EncodedImage, ImagePipeline, IndexedTokens, Interpolation,
    IterableDataset, JsonLines, MdsDataset, ParquetDataset, RandomResizedCrop, Resize, SafeTensorsFile,
    ShardListDataset, TfRecord, TfRecordDataset, TfRecords, WebDataset, WebSamples, decode_image, decode_npy,
    expand_shards, read_idx,
};
use tempfile::TempDir;

/// Reads bytes, and returns a count of what could be read.
pub type Entry = fn(&[u8]) -> usize;

/// All entries, with the names of their targets and folders in the corpus.
pub const ENTRIES: [(&str, Entry); 20] = [
    ("arrow", arrow),
    ("caches", own_files::caches),
    ("csv", csv),
    ("hugging_face", hugging_face),
    ("idx", idx),
    ("image", image),
    ("index", index),
    ("jpeg", jpeg),
    ("jsonl", jsonl),
    ("lmdb", database::lmdb),
    ("mds", mds),
    ("npy", npy),
    ("parquet", parquet),
    ("remote_cache", remote_cache::remote_cache),
    ("safetensors", safetensors),
    ("shards", shards),
    ("state", own_files::state),
    ("tfrecord", tfrecord),
    ("tokens", tokens),
    ("webdataset", webdataset),
];

/// Runs the entry of this name, and returns its count.
///
/// # Panics
/// When there is no such entry, and when the code under test panics: that is what the fuzzer looks for.
pub fn run(name: &str, bytes: &[u8]) -> usize {
    let (_, entry) = ENTRIES.iter().find(|(entry, _)| *entry == name).expect("an entry of this name");
    entry(bytes)
}

/// A folder for inputs that are read from files.
static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder for temporary files"));

/// A file with this content.
fn file(name: &str, content: &[u8]) -> PathBuf {
    let path = FOLDER.path().join(name);
    // Writing over a file waits for the disk.
    _ = fs::remove_file(&path);
    fs::write(&path, content).expect("room for a temporary file");
    path
}

/// How many samples can be read.
fn good_samples(dataset: &impl Dataset) -> usize {
    (0..dataset.len()).filter(|&index| dataset.get(index).is_ok()).count()
}

/// Reads column by column: the first rows, and all rows with nulls filled and masked.
fn arrow(bytes: &[u8]) -> usize {
    const ROWS: usize = 100;
    let dataset = ArrowDataset::from_bytes(bytes.to_vec(), Path::new("fuzz.arrow"));
    let Ok(dataset) = dataset.map(|dataset| dataset.max_column_bytes(1 << 24)) else { return 0 };
    let names: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
    let read = |name: &String| {
        let column = dataset.clone().select([name])?;
        let rows = (0..column.len().min(ROWS)).filter(|&row| column.get(row).is_ok()).count();
        let masked = column.clone().mask_null(name)?.read();
        let filled = column.clone().fill_null(name, 1.0).or_else(|_| column.fill_null_bytes(name, b"none"))?.read();
        Ok::<_, DataError>(rows + usize::from(masked.is_ok()) + usize::from(filled.is_ok()))
    };
    names.iter().map(|name| read(name).unwrap_or(0)).sum()
}

/// Reads the bytes as the JSON of a saved dataset, and as that of a folder of splits. Returns how many rows can be read.
fn hugging_face(bytes: &[u8]) -> usize {
    const FILE: &[u8] = include_bytes!("../../tests/fixtures/arrow/pictures/test/data-00000-of-00001.arrow");
    const STATE: &[u8] = include_bytes!("../../tests/fixtures/arrow/pictures/test/state.json");
    for folder in ["saved", "splits/test", "splits/train"] {
        fs::create_dir_all(FOLDER.path().join(folder)).expect("a folder");
        file(&format!("{folder}/data-00000-of-00001.arrow"), FILE);
        file(&format!("{folder}/state.json"), if folder == "saved" { bytes } else { STATE });
    }
    file("splits/dataset_dict.json", bytes);
    let saved = ArrowDataset::load_from_disk(FOLDER.path().join("saved"));
    // What a folder of splits is not, its errors say.
    _ = ArrowDataset::load_from_disk(FOLDER.path().join("splits"));
    let splits = ArrowDataset::load_splits(FOLDER.path().join("splits")).unwrap_or_default();
    saved.iter().chain(splits.values()).map(good_samples).sum()
}

/// Reads the rows of a table with names of the columns, and of one without.
fn csv(bytes: &[u8]) -> usize {
    let path = file("fuzz.csv", bytes);
    let named = CsvDataset::open(&path).map_or(0, |table| good_samples(&table));
    let unnamed = CsvDataset::builder(&path).has_headers(false).open();
    named + unnamed.map_or(0, |table| good_samples(&table.typed::<Vec<String>>()))
}

fn jsonl(bytes: &[u8]) -> usize {
    JsonLines::open(file("fuzz.jsonl", bytes)).map_or(0, |lines| good_samples(&lines))
}

/// Reads the bytes as the index of 64 bytes of tokens. What it promises must be there.
fn tokens(bytes: &[u8]) -> usize {
    file("fuzz-tokens.bin", &[1; 64]);
    let Ok(data) = IndexedTokens::open(file("fuzz-tokens.idx", bytes)) else { return 0 };
    assert_eq!(good_samples(&data), data.len());
    1 + (0..data.documents()).filter(|&document| data.document(document).is_ok()).count()
}

fn idx(bytes: &[u8]) -> usize {
    // 1 for the header, so that an empty array counts too.
    read_idx(file("fuzz.idx", bytes)).map_or(0, |array| 1 + array.data.len())
}

/// Reads the bytes as the index of a tar shard and of a file of records, or as a zstd file of records with an index.
fn index(bytes: &[u8]) -> usize {
    const RECORDS: &[u8] = include_bytes!("../../tests/fixtures/examples.tfrecord");
    const LINES: &[u8] = include_bytes!("../../tests/fixtures/index/examples.tfrecord.idx");
    let records = |shard: &[u8], index: &[u8]| {
        let shard = file("fuzz-records", shard);
        file("fuzz-records.idx", index);
        let list = TfRecordDataset::from_files([shard]).and_then(ShardListDataset::new);
        list.map_or(0, |list| good_samples(&list))
    };
    if bytes.starts_with(b"\x28\xb5\x2f\xfd") {
        return records(bytes, LINES);
    }
    let shard = file("fuzz-shard.tar", include_bytes!("../../tests/fixtures/web-001.tar"));
    file("fuzz-shard.tar.idx", bytes);
    let samples = WebDataset::from_files([shard]).and_then(ShardListDataset::new);
    records(RECORDS, bytes) + samples.map_or(0, |list| good_samples(&list))
}

/// Reads the bytes as the index of a good shard, or as a shard, of whose length and number of samples the index knows.
fn mds(bytes: &[u8]) -> usize {
    const INDEX: &str = include_str!("../../tests/fixtures/mds/plain/index.json");
    let folder = FOLDER.path().join("mds");
    fs::create_dir_all(&folder).expect("a folder");
    file("mds/shard.00001.mds", include_bytes!("../../tests/fixtures/mds/plain/shard.00001.mds"));
    if bytes.starts_with(b"{") {
        file("mds/shard.00000.mds", include_bytes!("../../tests/fixtures/mds/plain/shard.00000.mds"));
        file("mds/index.json", bytes);
    } else {
        let samples = bytes.first_chunk().map_or(0, |count| u32::from_le_bytes(*count));
        file("mds/shard.00000.mds", bytes);
        let index = INDEX.replace("\"bytes\": 4447", &format!("\"bytes\": {}", bytes.len()));
        file("mds/index.json", index.replace("\"samples\": 4", &format!("\"samples\": {samples}")).as_bytes());
    }
    let Ok(dataset) = MdsDataset::open(&folder) else { return 0 };
    let samples = dataset.stream(0..dataset.shards()).flatten();
    samples.map(|sample| sample.columns().filter(|column| sample.get(column).is_ok()).count()).sum()
}

/// Decodes an image of any format, as it is and, if it is a PNG, with correct checksums.
fn image(bytes: &[u8]) -> usize {
    let read = |bytes: &[u8]| usize::from(decode_image(bytes, Color::Rgb, Path::new("fuzz.png")).is_ok());
    let repaired = repair::png_checksums(bytes);
    read(bytes) + repaired.map_or(0, |bytes| read(&bytes))
}

/// Decodes the whole image, then parts of it at several scales.
fn jpeg(bytes: &[u8]) -> usize {
    const SIDE: usize = 9;
    // Other formats are left to `image`.
    if !bytes.starts_with(b"\xff\xd8\xff") {
        return 0;
    }
    let path = Path::new("fuzz.jpg");
    let whole = decode_image(bytes, Color::AsStored, path).is_ok();
    let sample = EncodedImage::new(bytes, path);
    let mut slot = [0; 3 * SIDE * SIDE];
    let mut parts = 0;
    for (index, interpolation) in [Interpolation::Bilinear, Interpolation::Bicubic].into_iter().enumerate() {
        let crop = RandomResizedCrop::new(SIDE).interpolation(interpolation);
        let pipeline = ImagePipeline::new(0).then(crop).exif_orientation(true).dct_scaling(index == 0);
        parts += usize::from(pipeline.decode_into(&sample, bytes.len() as u64, 0, &mut slot).is_ok());
    }
    let small = ImagePipeline::new(0).then(Resize::new(SIDE)).dct_scaling(true);
    parts += usize::from(small.decode_into(&sample, 0, 0, &mut slot).is_ok());
    usize::from(whole) + parts
}

fn npy(bytes: &[u8]) -> usize {
    let read = |bytes: &[u8]| usize::from(decode_npy(bytes, Path::new("fuzz.npy")).is_ok());
    read(bytes) + repair::npy_length(bytes).map_or(0, |bytes| read(&bytes))
}

/// Reads bytes that end like a Parquet file as such a file. Other bytes become the footer, and the pages, of an
/// otherwise valid file.
fn parquet(bytes: &[u8]) -> usize {
    if bytes.ends_with(b"PAR1") {
        return table(bytes.to_vec());
    }
    table(repair::with_footer(bytes)) + table(repair::with_pages(bytes))
}

/// Reads column by column, and returns how many could be read.
fn table(file: Vec<u8>) -> usize {
    let Ok(dataset) = ParquetDataset::from_bytes(file, Path::new("fuzz.parquet")) else { return 0 };
    // Checksums are not verified, so that damaged pages reach the decoders. The limit is small, because a few bytes may
    // encode many equal values.
    let dataset = dataset.threads(1).verify_crc(false).max_column_bytes(1 << 24);
    let names: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
    let read = |name: &String| {
        let column = dataset.clone().select([name])?;
        let plain = column.read();
        column.fill_null(name, 0.0)?.read().or(plain)
    };
    names.iter().filter(|name| read(name).is_ok()).count()
}

fn safetensors(bytes: &[u8]) -> usize {
    let read = |bytes: &[u8]| {
        let file = SafeTensorsFile::from_bytes(bytes.to_vec(), Path::new("fuzz.safetensors"));
        file.map_or(0, |mut file| file.names().iter().filter(|name| file.tensor(name).is_ok()).count())
    };
    read(bytes) + repair::safetensors_length(bytes).map_or(0, |bytes| read(&bytes))
}

/// Expands braces. Patterns with globs are left out, because their matches depend on the machine.
fn shards(bytes: &[u8]) -> usize {
    let pattern = str::from_utf8(bytes).unwrap_or("*");
    if pattern.contains(['*', '?', '[', '/']) {
        return 0;
    }
    match expand_shards(pattern) {
        Ok(files) => files.len(),
        // The pattern is valid, and its first file does not exist.
        Err(DataError::Io { .. }) => 1,
        Err(_) => 0,
    }
}

/// Reads the bytes as a file of records, and as an example in a single record.
fn tfrecord(bytes: &[u8]) -> usize {
    let read = |file: Vec<u8>, verify| {
        let Ok(records) = TfRecords::from_bytes(file, Path::new("fuzz.tfrecord")) else { return 0 };
        let example = |record: TfRecord| record.example().map(drop);
        records.verify_crc(verify).map(|record| record.and_then(example)).filter(Result::is_ok).count()
    };
    let record = [&(bytes.len() as u64).to_le_bytes()[..], &[0; 4], bytes, &[0; 4]].concat();
    read(bytes.to_vec(), false) + read(repair::tfrecord_checksums(bytes), true) + read(record, false)
}

fn webdataset(bytes: &[u8]) -> usize {
    let read = |shard: Vec<u8>| {
        let samples = WebSamples::from_bytes(shard, Path::new("fuzz.tar"));
        samples.map_or(0, |samples| samples.filter(Result::is_ok).count())
    };
    read(bytes.to_vec()) + read(repair::tar_checksums(bytes))
}
