//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use overdrive_dataload::TokenDtype;

use crate::format::Format;

/// Works with training data
#[derive(Debug, Parser)]
#[command(name = "overdrive-data", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Convert(ConvertOptions),
    Index(IndexOptions),
}

/// Write the index of each shard beside it
///
/// With it, training resumes in the middle of a shard, and samples are read in any order, in constant time. For
/// `train-000000.tar` it is `train-000000.tar.idx`, in the format of DALI's wds2idx; for `part-0.tfrecord` it is
/// `part-0.tfrecord.idx`, in the format of tfrecord2idx. An index that is there already is replaced.
///
/// A shard that is compressed as a whole, by gzip or by zstd in one frame, cannot be read in the middle: `convert` it
/// to `.tar.zst` or `.tfrecord.zst`, which it writes in many frames.
#[derive(Args, Debug)]
pub struct IndexOptions {
    /// Files, or patterns of shards like 'train-{000000..000127}.tar'
    #[arg(required = true)]
    pub shards: Vec<PathBuf>,

    /// The format of the shards, webdataset or tfrecord [default: by their names]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub from: Option<Format>,
}

/// Convert a dataset from one format to another
///
/// A sample is a key and named fields: `train/0001` with `jpg`, `cls` and `json`.
///
///   folder      root/class/name.jpg, and other files with the image's name and another extension; the
///               class's number in alphabetical order becomes the field `cls`
///   webdataset  tar shards: DST `train.tar` makes `train-000000.tar` and so on, `.tar.gz` and `.tar.zst`
///               compress; SRC may be a pattern: 'train-{000000..000127}.tar'
///   tfrecord    records of tf.train.Example, one feature per field, the key in `__key__`, `cls` as a number
///   lmdb        DST `.lmdb` makes a folder with data.mdb in it, `.mdb` a file; a single field is the value
///               itself, several are a tf.train.Example; entries like `__len__` are skipped
///   arrow       a column for each field of the first samples, of integers, text or bytes as they have it, `__key__` for
///               the key; SRC may also be a folder that Hugging Face's `save_to_disk` made
///   parquet     columns as for arrow
///   mds         Mosaic's streaming: a folder of shards with an index.json, DST `.mds`; columns as for arrow, which
///               every sample must have
///   jsonl       an object on every line, `__key__` for the key; text, numbers and JSON alone: `json` and fields in
///               `.json` are values as they are written, but null, which is a field that is not there
///   csv         columns as for arrow, of text alone; `.tsv` has tabs; an empty cell is a field that is not there
///   megatron    a pair PREFIX.idx and PREFIX.bin: each sample is a document of one sequence, the integers of its field
///               `input_ids`, else of `tokens`
///   tokens      the same integers one after the other, as nanoGPT reads them; nothing in the file says where a sample
///               ends, so of SRC --end-of-text or --block-size does
///
/// With the feature `remote`, SRC may be a URL: s3://, gs://, az://, http:// or https://.
///
/// The target appears only when it is complete. An error or Ctrl-C leaves nothing of it behind, but for the folders
/// that it was to be in.
#[derive(Args, Clone, Debug)]
#[command(verbatim_doc_comment)]
pub struct ConvertOptions {
    /// What to read: a file, a folder, or a pattern of shards, here or (feature `remote`) by a URL
    pub src: PathBuf,

    /// What to create, on this machine; it must not exist yet
    pub dst: PathBuf,

    /// The format of SRC [default: by its name]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub from: Option<Format>,

    /// The format of DST [default: by its name; a name without an extension is a folder]
    #[arg(long, value_name = "FORMAT", value_enum)]
    pub to: Option<Format>,

    /// Scale larger images down to this length of the shorter side, in pixels, and encode them as JPEG; other images,
    /// and fields like seg.png, are not changed
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub shorter_side: Option<u16>,

    /// Quality of the JPEG files that --shorter-side makes, 1 to 100
    #[arg(long, value_name = "Q", default_value = "90", requires = "shorter_side", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub quality: u8,

    /// The most bytes per shard, like 500M or 1G (webdataset, tfrecord, mds) [default: 3G for webdataset, one file for
    /// tfrecord, 64 MiB for mds]
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    pub shard_size: Option<u64>,

    /// The most samples per shard (webdataset, tfrecord) [default: 100000 for webdataset, one file for tfrecord]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub samples_per_shard: Option<u64>,

    /// Write an index beside each shard, with which training resumes in its middle in constant time; see `index`
    /// (webdataset, tfrecord; not with .gz)
    #[arg(long)]
    pub index: bool,

    /// How tokens are stored in DST (megatron, tokens) [default: uint16]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub token_dtype: Option<TokenType>,

    /// How tokens are stored in SRC (tokens; megatron's index says it) [default: uint16]
    #[arg(long, value_name = "TYPE", value_enum)]
    pub src_token_dtype: Option<TokenType>,

    /// A sample of SRC ends with each of these tokens: 50256 where nanoGPT has prepared the file (tokens)
    #[arg(long, value_name = "TOKEN", allow_negative_numbers = true)]
    pub end_of_text: Option<i64>,

    /// A sample of SRC ends after so many tokens, if not before (tokens)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1 << 27))]
    pub block_size: Option<u32>,

    /// Store a checksum of every value, which the reader verifies (lmdb; the other formats have checksums)
    #[arg(long)]
    pub checksums: bool,

    /// Skip bad samples: they are listed and counted, and the rest is converted
    #[arg(long)]
    pub skip_errors: bool,

    /// Threads that scale and encode images [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub workers: Option<u16>,
}

/// The integers of files of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenType {
    Uint8,
    Uint16,
    Int32,
    Uint32,
    Int64,
}

impl From<TokenType> for TokenDtype {
    fn from(kind: TokenType) -> Self {
        match kind {
            TokenType::Uint8 => Self::Uint8,
            TokenType::Uint16 => Self::Uint16,
            TokenType::Int32 => Self::Int32,
            TokenType::Uint32 => Self::Uint32,
            TokenType::Int64 => Self::Int64,
        }
    }
}

/// Parses a number that may end in K, M or G (10^3, 10^6, 10^9).
fn bytes(text: &str) -> Result<u64, String> {
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1_000),
        Some((at, 'm' | 'M')) => (&text[..at], 1_000_000),
        Some((at, 'g' | 'G')) => (&text[..at], 1_000_000_000),
        _ => (text, 1),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    bytes.filter(|&bytes| bytes > 0).ok_or_else(|| "expected a number of bytes above 0, like 500M".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_are_numbers_with_a_letter() {
        assert_eq!(["7", "2k", "500M", "3G"].map(bytes), [Ok(7), Ok(2_000), Ok(500_000_000), Ok(3_000_000_000)]);
        for text in ["", "0", "M", "-1", "1.5G", "1T", "99999999999G", "5é"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
