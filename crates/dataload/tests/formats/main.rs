//! The formats through their public interface: files that Python's tools wrote, this crate's writers, damaged input.

// Each format uses some of the helpers.
#![cfg_attr(
    not(all(
        feature = "lmdb",
        feature = "parquet",
        feature = "safetensors",
        feature = "tfrecord",
        feature = "webdataset"
    )),
    allow(dead_code)
)]

#[cfg(feature = "safetensors")]
mod arrays;
#[cfg(all(feature = "arrow", feature = "parquet"))]
mod arrow;
#[cfg(all(feature = "arrow", feature = "parquet"))]
mod arrow_batches;
#[cfg(all(
    feature = "arrow",
    feature = "csv",
    feature = "jsonl",
    feature = "lmdb",
    feature = "mds",
    feature = "parquet",
    feature = "remote",
    feature = "safetensors",
    feature = "tfrecord",
    feature = "webdataset",
    feature = "zstd"
))]
mod corpus;
mod images;
#[cfg(all(feature = "tfrecord", feature = "webdataset"))]
mod index_damage;
#[cfg(all(feature = "tfrecord", feature = "webdataset"))]
mod indexes;
#[cfg(feature = "lmdb")]
mod lmdb;
#[cfg(feature = "lmdb")]
mod lmdb_writer;
#[cfg(all(feature = "mds", feature = "zstd"))]
mod mds;
#[cfg(all(feature = "mds", feature = "webdataset"))]
mod mds_writer;
#[cfg(all(
    feature = "lmdb",
    feature = "mds",
    feature = "parquet",
    feature = "safetensors",
    feature = "tfrecord",
    feature = "webdataset",
    feature = "zstd"
))]
mod mutations;
#[cfg(any(feature = "parquet", feature = "tfrecord", feature = "webdataset"))]
mod names;
#[cfg(feature = "parquet")]
mod parquet;
#[cfg(feature = "parquet")]
mod parquet_batches;
#[cfg(feature = "parquet")]
mod parquet_damage;
#[cfg(feature = "parquet")]
mod parquet_map;
#[cfg(feature = "parquet")]
mod parquet_ranks;
#[cfg(feature = "parquet")]
mod parquet_shuffle;
#[cfg(all(feature = "mds", feature = "webdataset"))]
mod python;
#[cfg(feature = "parquet")]
mod table;
#[cfg(all(feature = "csv", feature = "jsonl"))]
mod text;
#[cfg(feature = "tfrecord")]
mod tfrecord;
mod tokens;
#[cfg(all(feature = "lmdb", feature = "mds", feature = "tfrecord", feature = "webdataset"))]
mod urls;
#[cfg(feature = "webdataset")]
mod webdataset;
#[cfg(feature = "webdataset")]
mod webdataset_damage;

use std::path::PathBuf;

use overdrive_dataload::DataError;

/// A file that `fixtures/make.py` wrote.
fn fixture(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests", "fixtures", name].iter().collect()
}

/// An image that `testing/images/make.py` wrote.
fn image(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "..", "..", "testing", "images", name].iter().collect()
}

/// `sample(i)` of `fixtures/make.py`.
fn sample(i: usize) -> Vec<u8> {
    (0..20 * i).map(|j| (i * 31 + j * 7) as u8).collect()
}

/// Asserts that an error names the file, and returns its text.
fn names_file(error: &DataError, name: &str) -> String {
    let text = error.to_string();
    assert!(text.contains(name), "{text} does not name {name}");
    text
}
