//! The formats, and how they are recognised by name.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use clap::ValueEnum;

/// A format of training data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Files in one folder per class
    Folder,
    /// Tar shards
    #[value(name = "webdataset")]
    WebDataset,
    /// Records of tf.train.Example
    #[value(name = "tfrecord")]
    TfRecord,
    /// An LMDB database
    Lmdb,
    /// Arrow IPC files
    Arrow,
    /// A folder of Hugging Face's save_to_disk
    #[value(name = "huggingface")]
    HuggingFace,
    /// Parquet files
    Parquet,
    /// A JSON object on every line
    Jsonl,
    /// A table of text, with the columns' names in its first row
    Csv,
    /// A folder of Mosaic's streaming
    Mds,
    /// Megatron's tokens with an index
    Megatron,
    /// Tokens and nothing else, as nanoGPT stores them
    Tokens,
}

/// File name endings and their formats; longer endings come before their suffixes.
const ENDINGS: [(&str, Format); 27] = [
    (".tar.gz", Format::WebDataset),
    (".tar.zst", Format::WebDataset),
    (".tgz", Format::WebDataset),
    (".tar", Format::WebDataset),
    (".tfrecord.gz", Format::TfRecord),
    (".tfrecord.zst", Format::TfRecord),
    (".tfrecords.gz", Format::TfRecord),
    (".tfrecords.zst", Format::TfRecord),
    (".tfrecord", Format::TfRecord),
    (".tfrecords", Format::TfRecord),
    (".tfrec", Format::TfRecord),
    (".lmdb", Format::Lmdb),
    (".mdb", Format::Lmdb),
    (".arrow", Format::Arrow),
    (".feather", Format::Arrow),
    (".hf", Format::HuggingFace),
    (".hf/", Format::HuggingFace),
    (".parquet", Format::Parquet),
    (".jsonl", Format::Jsonl),
    (".ndjson", Format::Jsonl),
    (".csv", Format::Csv),
    (".tsv", Format::Csv),
    (".mds", Format::Mds),
    (".mds/", Format::Mds),
    (".idx", Format::Megatron),
    (".bin", Format::Tokens),
    ("/", Format::Folder),
];

impl Format {
    /// The format of a source.
    pub fn of_source(path: &Path) -> Result<Self> {
        if path.is_dir() {
            let has = |name: &str| path.join(name).is_file();
            return Ok(match () {
                () if has("data.mdb") => Self::Lmdb,
                () if has("state.json") || has("dataset_dict.json") => Self::HuggingFace,
                () if has("index.json") => Self::Mds,
                () => Self::Folder,
            });
        }
        let problem = match is_url(path) || path.exists() {
            true => UNKNOWN,
            false => "there is no such file or folder, and as a pattern it has an unknown format",
        };
        match by_ending(path).ok_or_else(|| unknown(path, problem, "--from"))? {
            // An index beside it says where samples end.
            Self::Tokens if path.with_extension("idx").is_file() => Ok(Self::Megatron),
            // Wrong tokens are nothing that a reader of the other format would notice.
            Self::Tokens if is_url(path) => bail!(
                "{}: nanoGPT's file of tokens, or Megatron's with an index: state --from tokens, or the index (.idx)",
                path.display()
            ),
            format => Ok(format),
        }
    }

    /// The format of a target.
    pub fn of_target(path: &Path) -> Result<Self> {
        match by_ending(path) {
            Some(format) => Ok(format),
            None if path.extension().is_none() => Ok(Self::Folder),
            None => Err(unknown(path, UNKNOWN, "--to")),
        }
    }
}

/// Whether it is a file or folder elsewhere.
pub fn is_url(path: &Path) -> bool {
    path.to_string_lossy().contains("://")
}

fn by_ending(path: &Path) -> Option<Format> {
    let name = path.to_string_lossy().to_lowercase();
    ENDINGS.iter().find(|(ending, _)| name.ends_with(ending)).map(|(_, format)| *format)
}

const UNKNOWN: &str = "unknown format";

fn unknown(path: &Path, problem: &str, option: &str) -> anyhow::Error {
    anyhow!(
        "{}: {problem}; state it with {option} (folder, webdataset, tfrecord, lmdb, arrow, \
         huggingface, parquet, jsonl, csv, mds, megatron, tokens)",
        path.display()
    )
}

/// Splits a name into its stem and a known ending, which may be empty.
pub fn split_ending(name: &str) -> (&str, &str) {
    let lower = name.to_lowercase();
    let known = ENDINGS.iter().find(|(ending, _)| lower.ends_with(ending));
    // Endings are ASCII, but a letter before them may change its length in lower case.
    let at = known.and_then(|(ending, _)| name.len().checked_sub(ending.len()));
    at.and_then(|at| name.split_at_checked(at)).unwrap_or((name, ""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_tell_formats() {
        let target = |name: &str| Format::of_target(Path::new(name)).ok();
        assert_eq!(target("out/train.tar"), Some(Format::WebDataset));
        assert_eq!(target("train-%06d.TAR.GZ"), Some(Format::WebDataset));
        assert_eq!(target("a.b/train.tfrecord.gz"), Some(Format::TfRecord));
        assert_eq!(target("train.lmdb"), Some(Format::Lmdb));
        assert_eq!(target("train.arrow"), Some(Format::Arrow));
        assert_eq!(target("reviews.hf"), Some(Format::HuggingFace));
        assert_eq!(target("train.parquet"), Some(Format::Parquet));
        assert_eq!(target("out.mds"), Some(Format::Mds));
        assert_eq!(target("corpus_text_document.idx"), Some(Format::Megatron));
        assert_eq!(target("out"), Some(Format::Folder));
        assert_eq!(target("out.d/"), Some(Format::Folder));
        assert_eq!(target("train.zip"), None);
        let error = Format::of_source(Path::new("none")).unwrap_err().to_string();
        assert!(error.contains("no such file or folder") && error.contains("--from"), "{error}");
        let error = Format::of_source(Path::new("s3://bucket/train.bin")).unwrap_err().to_string();
        assert!(error.contains("--from tokens"), "{error}");
        let error = Format::of_source(Path::new("s3://bucket/none")).unwrap_err().to_string();
        assert!(error.contains("none: unknown format"), "{error}");
        assert_eq!(Format::of_source(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap(), Format::Folder);
    }

    #[test]
    fn endings_are_split_off() {
        assert_eq!(split_ending("train.tar.gz"), ("train", ".tar.gz"));
        assert_eq!(split_ending("a.b.TFRecord"), ("a.b", ".TFRecord"));
        assert_eq!(split_ending("train"), ("train", ""));
        assert_eq!(split_ending("İİİ.tar"), ("İİİ", ".tar"));
    }
}
