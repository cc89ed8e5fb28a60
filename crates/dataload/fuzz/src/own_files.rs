//! Files and states that the crate itself writes and reads back: caches, indices, loader states.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use overdrive_core::{Entry, Stateful};
use overdrive_dataload::{
    DataError, DataLoader, Dataset, DiskCached, FnDataset, FnStream, Image, LmdbDataset, ParquetDataset, Samples,
};

const SAMPLES: usize = 4;
/// The length of the header before a cache's table.
const CACHE_HEADER: usize = 64;
const CACHE_ENTRY: usize = 24;
/// The length of an index's header: magic, length and checksum.
const INDEX_HEADER: usize = 20;
/// The length of the part of an index that identifies its database.
const INDEX_STAMP: usize = 32;

fn images() -> impl Dataset<Sample = (Image, i64)> {
    FnDataset::new(SAMPLES, |index| Ok((Image::new([index as u8; 6], 1, 2, 3)?, index as i64)))
}

/// The header of a valid cache.
static CACHE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let path = super::file("good.cache", &[]);
    drop(DiskCached::open(images(), &path).expect("a new cache"));
    fs::read(path).expect("the cache that was just made")[..CACHE_HEADER].to_vec()
});

/// A database, its index, and the beginning of a valid index.
static INDEX: LazyLock<(PathBuf, PathBuf, Vec<u8>)> = LazyLock::new(|| {
    let database = super::file("good.mdb", include_bytes!("../../tests/fixtures/lmdb/one.mdb"));
    let index = database.with_extension("index");
    drop(LmdbDataset::builder(&database).index_file(&index).open().expect("an intact database"));
    let start = fs::read(&index).expect("the index that was just made")[..INDEX_HEADER + INDEX_STAMP].to_vec();
    (database, index, start)
});

/// Twenty rows, of which a loader's batches belong to its rank.
static ROWS: LazyLock<ParquetDataset> = LazyLock::new(|| {
    let file = super::file("good.parquet", include_bytes!("../../tests/fixtures/parquet/part-0.parquet"));
    ParquetDataset::from_files([file]).and_then(|rows| rows.select(["int64"])).expect("an intact file")
});

/// Opens the bytes as a disk cache (as they are, then with correct checksums) and as an LMDB index file. Returns how
/// many cached samples and values could be read.
pub(crate) fn caches(bytes: &[u8]) -> usize {
    cache(bytes.to_vec()) + cache(with_checksums(bytes)) + index(bytes)
}

/// Opens a cache file with this content after its header, and returns how many samples it has cached. Whatever the
/// content is, all samples must be readable, because those that are not cached are read from the dataset.
fn cache(content: Vec<u8>) -> usize {
    let path = super::file("fuzz.cache", &[&CACHE[..], &content].concat());
    let Ok(cache) = DiskCached::open(images(), &path) else { return 0 };
    let cached = cache.cached();
    for index in 0..SAMPLES {
        assert!(cache.get(index).is_ok(), "a damaged cache must not lose samples");
    }
    cached
}

/// Corrects the checksums in the table's entries: those of the samples, and those of the entries themselves.
fn with_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut content = bytes.to_vec();
    content.resize(bytes.len().max(SAMPLES * CACHE_ENTRY), 0);
    for index in 0..SAMPLES {
        let entry = &content[index * CACHE_ENTRY..][..CACHE_ENTRY];
        let [offset, length] = [0, 8].map(|at| {
            let number = entry[at..at + 8].iter().rev();
            number.fold(0u64, |number, &byte| number << 8 | u64::from(byte))
        });
        let place = crc32c::crc32c(&[(index as u64).to_le_bytes(), offset.to_le_bytes()].concat());
        let sample = usize::try_from(offset).ok().and_then(|offset| {
            let start = offset.checked_sub(CACHE_HEADER)?;
            content.get(start..start.checked_add(usize::try_from(length).ok()?)?)
        });
        let sample = crc32c::crc32c_append(place, sample.unwrap_or_default());
        let entry = &mut content[index * CACHE_ENTRY..][..CACHE_ENTRY];
        entry[16..20].copy_from_slice(&sample.to_le_bytes());
        let own = crc32c::crc32c_append(crc32c::crc32c(&(index as u64).to_le_bytes()), &entry[..20]);
        entry[20..].copy_from_slice(&own.to_le_bytes());
    }
    content
}

/// Opens an intact database with an index file whose keys are the bytes, most of which the database does not have.
/// Returns how many values could be read.
fn index(bytes: &[u8]) -> usize {
    let (database, index, start) = &*INDEX;
    let body = [&start[INDEX_HEADER..], bytes].concat();
    let length = (body.len() as u64).to_le_bytes();
    let content = [&start[..8], &length, &crc32c::crc32c(&body).to_le_bytes(), &body].concat();
    fs::write(index, content).expect("room for a temporary file");
    let Ok(dataset) = LmdbDataset::builder(database).index_file(index).open() else { return 0 };
    (0..dataset.len()).filter(|&index| dataset.get(index).is_ok()).count()
}

/// Replaces entries of loaders' states by lines of `key=value`, where a value is a number or text, and loads the
/// states. Returns how many batches follow.
pub(crate) fn state(bytes: &[u8]) -> usize {
    let Ok(text) = str::from_utf8(bytes) else { return 0 };
    let builder = DataLoader::builder(FnDataset::new(10, Ok)).batch_size(3).shuffle(true);
    let mut total = resume(text, builder.collate(listed).build());
    let shards = FnStream::new(5, |shard| {
        let items = (0..shard * 2).map(move |item| Ok(10 * shard + item));
        Ok(Box::new(items) as Samples<usize>)
    });
    for batches in [None, Some(9)] {
        let builder = DataLoader::stream(shards.clone()).batch_size(3).shuffle(true).shuffle_buffer(3).interleave(3);
        let builder = match batches {
            Some(batches) => builder.batches_per_epoch(batches),
            None => builder,
        };
        total += resume(text, builder.collate(listed).build());
    }
    let rows = ROWS.batches(2).and_then(|batches| batches.window(1).rank(1, 3));
    total + resume(text, rows.and_then(|rows| rows.loader().num_workers(0).build()))
}

fn listed(samples: Vec<usize>) -> Result<Vec<usize>, DataError> {
    Ok(samples)
}

/// How many batches follow after the state is loaded.
fn resume<B: Send + 'static>(text: &str, loader: Result<DataLoader<B>, DataError>) -> usize {
    const EPOCHS: usize = 2;
    let mut loader = loader.expect("good options");
    let mut state = loader.state_dict().expect("a new loader's state");
    for line in text.lines() {
        let (key, value) = line.split_once('=').unwrap_or((line, ""));
        let entry = value.parse().map_or_else(|_| Entry::Text(value.to_owned()), Entry::Int);
        // `ahead` is text, even where it is one number.
        let entry = if key == "ahead" { Entry::Text(value.to_owned()) } else { entry };
        state.insert(key, entry);
    }
    if loader.load_state_dict(&state).is_err() {
        return 0;
    }
    let mut batches = 0;
    loader.state_dict().expect("the loaded state");
    for batch in (0..EPOCHS).flat_map(|_| loader.iter()) {
        loader.state_dict().expect("a state after a batch");
        match batch {
            Ok(_) => batches += 1,
            Err(error) => match error.innermost() {
                DataError::StreamPanicked { .. } | DataError::WorkerDied { .. } => panic!("{error}"),
                _ => {}
            },
        }
    }
    batches
}
