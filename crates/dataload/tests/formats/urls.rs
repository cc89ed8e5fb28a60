//! What is written is written to this machine, and what is not known is not read.

use std::path::Path;

use overdrive_dataload::{
    DataError, DiskCached, FnDataset, ImageFolder, IndexedTokensWriter, JsonLines, LmdbDataset, LmdbWriter, MdsDataset,
    MdsWriter, ParquetDataset, TfRecordWriter, TokenDtype, TokenFile, TokenWriter, WebDataset, WebDatasetWriter,
    expand_shards, read_idx,
};

#[test]
fn writers_refuse_urls_by_name_and_make_no_folder_of_that_name() {
    for scheme in ["s3", "S3", "HTTPS", "gcs", "hdfs", "abfs", "file"] {
        let (url, shards) = (&*format!("{scheme}://bucket/data"), &*format!("{scheme}://bucket/%d.tar"));
        let written = |result: Result<(), DataError>| match result {
            Err(error @ DataError::Layout { .. }) => {
                let said = error.to_string();
                assert!(said.contains("://bucket/") && said.contains("a path of this machine"), "{said}");
            }
            other => panic!("{scheme}: {other:?}"),
        };
        written(MdsWriter::create(url, &[("text", "str")]).map(drop));
        written(LmdbWriter::builder(url).subdir(true).create().map(drop));
        written(LmdbWriter::builder(url).create().map(drop));
        written(WebDatasetWriter::builder(shards).build().map(drop));
        written(TfRecordWriter::create(url).map(drop));
        written(TokenWriter::create(url, TokenDtype::Uint16).map(drop));
        written(IndexedTokensWriter::create(url, TokenDtype::Uint16).map(drop));
        written(DiskCached::open(FnDataset::new(3, |index| Ok(index as i64)), url).map(drop));
        assert!(!Path::new(&format!("{scheme}:")).exists());
    }
}

#[test]
fn readers_refuse_urls_of_other_schemes_and_name_those_that_they_know() {
    for scheme in ["gcs", "hdfs", "ABFS", "file"] {
        let url = |name: &str| format!("{scheme}://bucket/{name}");
        let refused = |result: Result<(), DataError>| match result {
            Err(error @ DataError::InvalidOption { option: "url", .. }) => {
                let said = error.to_string();
                assert!(said.contains(&url("")) && said.contains("`gs://bucket/key`"), "{said}");
            }
            other => panic!("{scheme}: {other:?}"),
        };
        refused(WebDataset::open(&url("{0..9}.tar")).map(drop));
        refused(WebDataset::open(&url("*.tar")).map(drop));
        refused(expand_shards(&url("0.tar")).map(drop));
        refused(ImageFolder::open(url("train")).map(drop));
        refused(JsonLines::open(url("lines.jsonl")).map(drop));
        refused(ParquetDataset::open(&url("0.parquet")).map(drop));
        refused(LmdbDataset::open(url("data")).map(drop));
        refused(MdsDataset::open(url("data")).map(drop));
        refused(TokenFile::open(url("train.bin")).map(drop));
        refused(read_idx(url("train.idx")).map(drop));
    }
}
