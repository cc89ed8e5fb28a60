//! What is written is written to this machine.

use std::path::Path;

use overdrive_dataload::{
    DataError, DiskCached, FnDataset, IndexedTokensWriter, LmdbWriter, MdsWriter, TfRecordWriter, TokenDtype,
    TokenWriter, WebDatasetWriter,
};

#[test]
fn writers_refuse_urls_by_name_and_make_no_folder_of_that_name() {
    let (url, shards) = ("s3://bucket/data", "s3://bucket/%d.tar");
    let written = |result: Result<(), DataError>| match result {
        Err(error @ DataError::Layout { .. }) => {
            let said = error.to_string();
            assert!(said.contains("s3://bucket/") && said.contains("a path of this machine"), "{said}");
        }
        other => panic!("{other:?}"),
    };
    written(MdsWriter::create(url, &[("text", "str")]).map(drop));
    written(LmdbWriter::builder(url).subdir(true).create().map(drop));
    written(LmdbWriter::builder(url).create().map(drop));
    written(WebDatasetWriter::builder(shards).build().map(drop));
    written(TfRecordWriter::create(url).map(drop));
    written(TokenWriter::create(url, TokenDtype::Uint16).map(drop));
    written(IndexedTokensWriter::create(url, TokenDtype::Uint16).map(drop));
    written(DiskCached::open(FnDataset::new(3, |index| Ok(index as i64)), url).map(drop));
    assert!(!Path::new("s3:").exists());
}
