//! Reads thousands of damaged files: no panic, no hang, no allocation beyond the files' content.
//!
//! `fuzz/` searches deeper in the same parsers; this test runs every time.

use std::fs;
use std::path::Path;

#[cfg(feature = "arrow")]
use overdrive_dataload::ArrowDataset;
use overdrive_dataload::{
    DataError, Dataset, IterableDataset, LmdbDataset, MdsDataset, ParquetDataset, Philox, SafeTensorsFile,
    ShardListDataset, TfRecordDataset, TfRecordWriter, TfRecords, WebDataset, WebSamples, decode_npy,
};

use crate::fixture;

const ROUNDS: u64 = 1500;
const SEED: u64 = 7;
/// A header that is trusted would allocate gigabytes; a zstd window and the allocator's overhead are far below this.
pub(crate) const MOST_GROWTH_BYTES: u64 = 1 << 30;

pub(crate) struct Random {
    numbers: Philox,
    drawn: u64,
}

impl Random {
    pub(crate) fn new(stream: u64) -> Self {
        Self { numbers: Philox::new(SEED, stream), drawn: 0 }
    }

    fn below(&mut self, limit: usize) -> usize {
        self.drawn += 1;
        (self.numbers.at(self.drawn) % limit.max(1) as u64) as usize
    }
}

/// One to four changes of the kinds that break parsers.
pub(crate) fn mutate(good: &[u8], random: &mut Random) -> Vec<u8> {
    const NUMBERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0x7fff_ffff_ffff_ffff, u64::MAX];
    let mut bytes = good.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(64)).min(bytes.len());
        match random.below(8) {
            0 => bytes.truncate(at),
            1 | 2 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            3 if at < bytes.len() => bytes[at] = random.below(256) as u8,
            4 => {
                bytes.iter_mut().skip(at).zip(NUMBERS[random.below(8)].to_le_bytes()).for_each(|(to, from)| *to = from)
            }
            5 => drop(bytes.drain(at.min(end)..end)),
            6 => {
                let piece = bytes[at.min(end)..end].to_vec();
                let to = random.below(bytes.len() + 1);
                bytes.splice(to..to, piece);
            }
            // Digits in headers: sizes of tar, shapes of npy and safetensors.
            7 => {
                let digits: Vec<usize> = (0..bytes.len()).filter(|&i| bytes[i].is_ascii_digit()).collect();
                if !digits.is_empty() {
                    let position = digits[random.below(digits.len())];
                    bytes[position] = b'0' + random.below(10) as u8;
                }
            }
            _ => {}
        }
    }
    bytes
}

/// Corrects the checksum of every block that could be a tar header, so that its fields are parsed.
fn with_tar_checksums(mut bytes: Vec<u8>) -> Vec<u8> {
    for block in bytes.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    bytes
}

pub(crate) fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// The CPU time of this thread, which does not depend on other processes.
fn cpu_seconds() -> f64 {
    let times = fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    times.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).unwrap_or(0.0) / 1e9
}

/// The fixtures are read in milliseconds: this only turns what would be a hang on a larger file into a failure.
const MOST_CPU_SECONDS: f64 = 60.0;

fn hammer(names: &[&str], read: impl Fn(Vec<u8>, u64) -> usize) {
    let before = peak_bytes();
    let mut given = 0;
    for (number, name) in names.iter().enumerate() {
        let good = fs::read(fixture(name)).unwrap();
        let mut random = Random::new(number as u64);
        for round in 0..ROUNDS {
            let begun = cpu_seconds();
            given += read(mutate(&good, &mut random), round);
            let took = cpu_seconds() - begun;
            assert!(took < MOST_CPU_SECONDS, "{name}, round {round}: one file took {took} s of a CPU");
        }
    }
    // Some damage only hits padding or values: if everything were refused, the test would prove nothing.
    assert!(given > 0);
    let growth = peak_bytes().saturating_sub(before);
    assert!(growth < MOST_GROWTH_BYTES, "{names:?} took {growth} bytes");
}

#[test]
fn damaged_shards() {
    let path = Path::new("damaged.tar");
    let count = |bytes| WebSamples::from_bytes(bytes, path).map_or(0, |samples| samples.filter(Result::is_ok).count());
    hammer(&["web-002.tar", "names-pax.tar", "names-gnu.tar"], |bytes, round| match round % 2 {
        0 => count(with_tar_checksums(bytes)),
        _ => count(bytes),
    });
    hammer(&["web.tar.gz", "web.tar.zst"], |bytes, _| count(bytes));
}

#[test]
fn damaged_records() {
    hammer(&["examples.tfrecord", "examples.tfrecord.gz"], |bytes, round| {
        let records = TfRecords::from_bytes(bytes, Path::new("damaged.tfrecord"));
        let records = records.map(|records| records.verify_crc(round % 4 == 0));
        records.map_or(0, |records| records.flatten().filter(|record| record.example().is_ok()).count())
    });
}

#[test]
fn damaged_arrays() {
    let names = ["c-float32.npy", "fortran-big-int16.npy", "version-3.npy", "empty.npy", "c-uint16.npy"];
    hammer(&names, |bytes, _| decode_npy(&bytes, Path::new("damaged.npy")).is_ok().into());
    hammer(&["arrays.safetensors"], |bytes, _| {
        let Ok(mut file) = SafeTensorsFile::from_bytes(bytes, Path::new("damaged.safetensors")) else { return 0 };
        file.names().iter().filter(|name| file.tensor(name).is_ok()).count()
    });
}

#[test]
fn damaged_databases() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.mdb");
    let databases = ["lmdb/values.mdb", "lmdb/folder/data.mdb", "lmdb/one.mdb", "lmdb/named.mdb"];
    hammer(&databases, |bytes, round| {
        fs::write(&path, bytes).unwrap();
        let builder = LmdbDataset::builder(&path).read_ahead(round % 2 == 0);
        let builder = if round % 4 < 2 { builder } else { builder.database("train") };
        let Ok(dataset) = builder.open() else { return 0 };
        (0..dataset.len()).filter(|&index| dataset.get(index).is_ok()).count()
    });
}

/// Reads a fourth of the columns each time: whole, filled, masked, and their first rows.
#[cfg(feature = "arrow")]
#[test]
fn damaged_record_batches() {
    let names = ["numbers", "numbers-stream", "nulls", "nested-stream", "nested-lz4", "nested-zstd", "refused"];
    let names = names.map(|name| format!("arrow/{name}.arrow"));
    hammer(&names.each_ref().map(String::as_str), |bytes, round| {
        let Ok(dataset) = ArrowDataset::from_bytes(bytes, Path::new("damaged.arrow")) else { return 0 };
        let columns: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
        let read = |name: &String| {
            let column = dataset.clone().select([name])?;
            let masked = column.clone().mask_null(name)?;
            let rows = (0..masked.len().min(3)).filter(|&row| masked.get(row).is_ok()).count();
            let filled = column.clone().fill_null(name, 0.0).or_else(|_| column.fill_null_bytes(name, b""));
            Ok::<_, DataError>(rows + usize::from(filled?.read().is_ok()) + usize::from(masked.read().is_ok()))
        };
        columns.iter().skip(round as usize % 4).step_by(4).map(|name| read(name).unwrap_or(0)).sum()
    });
}

#[test]
fn damaged_tables() {
    let names = ["numbers", "encodings-1", "encodings-2", "nested", "nested-v2", "pages", "codec-gzip", "codec-lz4-v2"];
    let names = names.map(|name| format!("parquet/{name}.parquet"));
    hammer(&names.each_ref().map(String::as_str), |bytes, round| {
        let dataset = ParquetDataset::from_bytes(bytes, Path::new("damaged.parquet"));
        // One thread, since each allocates its own memory; without checksums, damage reaches the decoders.
        let dataset = dataset.map(|dataset| dataset.threads(1).verify_crc(round % 4 == 0));
        let Ok(dataset) = dataset else { return 0 };
        let columns: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
        let read = |name: &String| {
            dataset.clone().select([name])?.fill_null(name, 0.0).or_else(|_| dataset.clone().select([name]))?.read()
        };
        columns.iter().filter(|name| read(name).is_ok()).count()
    });
}

/// Whatever an index says: each sample once and in its place, or an error.
fn assert_whole<S: PartialEq>(items: &[Result<S, DataError>], good: &[S]) -> usize {
    let found: Vec<&S> = items.iter().flatten().collect();
    let places: Vec<_> = found.iter().map(|item| good.iter().position(|sample| sample == *item)).collect();
    assert!(places.iter().all(Option::is_some) && places.is_sorted_by(|a, b| a < b), "{places:?}");
    assert!(found.len() == good.len() || items.iter().any(Result::is_err), "{places:?} without an error");
    found.len()
}

#[test]
fn damaged_indexes() {
    let dir = tempfile::tempdir().unwrap();
    let (shard, index) = (dir.path().join("web-001.tar"), dir.path().join("web-001.idx"));
    fs::copy(fixture("web-001.tar"), &shard).unwrap();
    let dataset = WebDataset::from_files([&shard]).unwrap();
    let good: Vec<_> = dataset.stream([0]).map(Result::unwrap).collect();
    hammer(&["index/web-001.idx"], |bytes, round| {
        fs::write(&index, bytes).unwrap();
        let selected = match round % 2 {
            0 => dataset.clone(),
            _ => dataset.clone().select(["bin", "cls", "seg.json", "txt"]),
        };
        let listed = ShardListDataset::new(selected.clone()).map_or(0, |list| list.len());
        assert!(listed <= good.len());
        assert_whole(&selected.stream([0]).collect::<Vec<_>>(), &good) + listed
    });
    let (shard, index) = (dir.path().join("examples.tfrecord"), dir.path().join("examples.idx"));
    fs::copy(fixture("examples.tfrecord"), &shard).unwrap();
    let dataset = TfRecordDataset::from_files([&shard]).unwrap();
    let good: Vec<_> = dataset.stream([0]).map(Result::unwrap).collect();
    hammer(&["index/examples.tfrecord.idx"], |bytes, _| {
        fs::write(&index, bytes).unwrap();
        let listed = ShardListDataset::new(dataset.clone()).map_or(0, |list| list.len());
        assert!(listed <= good.len());
        assert_whole(&dataset.stream([0]).collect::<Vec<_>>(), &good) + listed
    });
}

/// Damage to frames and to their table, with a good index beside them.
#[test]
fn damaged_frames() {
    let dir = tempfile::tempdir().unwrap();
    let records: Vec<Vec<u8>> = (0..40).map(|i| vec![i; 40_000 + usize::from(i)]).collect();
    let mut writer = TfRecordWriter::with_index(dir.path().join("a.tfrecord.zst")).unwrap();
    records.iter().for_each(|record| writer.write(record).unwrap());
    let shard = writer.finish().unwrap();
    let (dataset, good) = (TfRecordDataset::from_files([&shard]).unwrap(), fs::read(&shard).unwrap());
    let mut random = Random::new(99);
    let (mut given, mut lost) = (0, 0);
    for round in 0..ROUNDS / 5 {
        // All of it, or the table at the end.
        let start = if round % 2 == 0 { 0 } else { good.len() - 60 };
        let bytes = [&good[..start], &mutate(&good[start..], &mut random)].concat();
        if bytes.is_empty() {
            // A file without records, as TensorFlow writes it.
            continue;
        }
        fs::write(&shard, bytes).unwrap();
        let items: Vec<_> = dataset.stream([0]).map(|record| record.map(|record| record.into_bytes())).collect();
        given += assert_whole(&items, &records);
        lost += items.iter().filter(|item| item.is_err()).count();
    }
    assert!(given > 0 && lost > 0);
}

#[test]
fn damaged_folders_of_mosaic() {
    for name in ["plain", "zstd"] {
        let dir = tempfile::tempdir().unwrap();
        let folder = fixture("mds").join(name);
        let files: Vec<_> = fs::read_dir(&folder).unwrap().map(|it| it.unwrap().file_name()).collect();
        for file in &files {
            for file in &files {
                fs::copy(folder.join(file), dir.path().join(file)).unwrap();
            }
            let path = format!("mds/{name}/{}", file.to_str().unwrap());
            hammer(&[&path], |bytes, round| {
                fs::write(dir.path().join(file), &bytes).unwrap();
                // The index states the length.
                if *file != *"index.json" && round % 8 > 0 {
                    let text = fs::read_to_string(folder.join("index.json")).unwrap();
                    let stated = |bytes: u64| format!("\"bytes\": {bytes},");
                    let length = fs::metadata(folder.join(file)).unwrap().len();
                    let text = text.replace(&stated(length), &stated(bytes.len() as u64));
                    fs::write(dir.path().join("index.json"), text).unwrap();
                }
                let Ok(dataset) = MdsDataset::open(dir.path()) else { return 0 };
                let samples: Vec<_> = dataset.stream(0..dataset.shards()).take(100).flatten().collect();
                let columns = |sample: &overdrive_dataload::MdsSample| {
                    sample.columns().filter(|column| sample.get(column).is_ok()).count()
                };
                let listed = ShardListDataset::new(dataset).map_or(0, |list| list.len());
                samples.iter().map(columns).sum::<usize>() + listed
            });
        }
    }
}
