#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod array;
#[cfg(feature = "arrow")]
mod arrow;
#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
mod bad;
mod batch_sampler;
mod batch_samples;
mod cache;
mod cancellation;
mod checks;
mod collate;
// Lists of different lengths are always there, tables only with a format that has them.
#[cfg_attr(not(any(feature = "arrow", feature = "parquet")), allow(dead_code, unused_imports))]
mod columns;
mod compose;
// Each of these three formats uses only a part of `content`, so without all of them some of it is dead code.
#[cfg_attr(not(all(feature = "safetensors", feature = "tfrecord", feature = "webdataset")), expect(dead_code))]
mod content;
mod dataset;
mod decode;
mod deferred;
mod encoded;
mod error;
mod fn_stream;
mod generator;
mod idx;
mod image;
mod image_folder;
mod image_pipeline;
#[cfg(feature = "lmdb")]
mod lmdb;
mod loader;
mod local;
#[cfg(feature = "mds")]
mod mds;
mod mnist;
mod output;
pub mod pacing;
mod pack_tokens;
mod packing;
mod pad_sequence;
#[cfg(feature = "parquet")]
mod parquet;
mod permutation;
mod pieces;
mod points;
mod random_split;
mod rank;
mod read;
#[cfg(feature = "remote")]
#[cfg_attr(not(all(feature = "tfrecord", feature = "webdataset")), allow(dead_code, unused_imports))]
mod remote;
mod rng;
mod sample_bytes;
mod sampler;
mod shards;
mod stack;
mod stream;
mod targets;
mod tensor;
mod tensor_batch;
mod tensor_dataset;
#[cfg(any(feature = "csv", feature = "jsonl"))]
mod text;
#[cfg(feature = "tfrecord")]
mod tfrecord;
mod to_float;
#[cfg(feature = "tokenizers")]
mod tokenizer;
mod tokens;
mod transforms;
mod tuples;
#[cfg(feature = "webdataset")]
mod webdataset;

#[cfg(feature = "safetensors")]
pub use array::SafeTensorsFile;
pub use array::{decode_npy, read_npy};
#[cfg(feature = "arrow")]
pub use arrow::{ArrowColumns, ArrowDataset, ArrowWriter};
pub use batch_sampler::{
    BatchPlan, BatchSampler, DistributedBatches, FixedBatches, LengthBucketed, LengthBucketedBuilder, TokenPacking,
    TokenPackingBuilder, pack,
};
pub use batch_samples::{BatchSamples, Drawn, Stage};
pub use cache::{CacheKind, Cached, Disk, DiskCached, OnDevice, Ram, Storable};
pub use cancellation::Cancellation;
pub use collate::Collate;
pub use columns::Ragged;
#[cfg(any(feature = "arrow", feature = "parquet"))]
pub use columns::{BytesColumn, Column, Field, FieldKind, Row, Table, Value};
pub use compose::{
    Chain, Concat, Filter, InterleaveBuilder, MapStyle, Mixture, StoppingStrategy, StreamMixture, Zip, ZipParts,
    interleave_datasets, map_style,
};
pub use dataset::{Dataset, FnDataset, Map, Subset};
pub use decode::{MAX_IMAGE_BYTES, decode_image};
pub use deferred::Deferred;
pub use encoded::EncodedImage;
pub use error::DataError;
pub use fn_stream::FnStream;
pub use generator::Generator;
pub use idx::{IdxArray, read_idx};
pub use image::{Color, Image};
pub use image_folder::{DecodedImageFolder, ImageFolder};
pub use image_pipeline::{CollateTargets, FloatPipeline, ImagePipeline};
#[cfg(feature = "lmdb")]
pub use lmdb::{LmdbDataset, LmdbDatasetBuilder, LmdbSample, LmdbWriter, LmdbWriterBuilder};
#[cfg(feature = "progress")]
pub use loader::Progress;
pub use loader::{
    Auto, ComputeThreads, DataLoader, DataLoaderBuilder, Epoch, Fault, FromDataset, FromStream, LoaderStats,
    NumWorkers, OnError, SampleSource,
};
#[cfg(feature = "mds")]
pub use mds::{MdsDataset, MdsSample, MdsValue, MdsWriter};
pub use mnist::{Mnist, MnistSplit};
pub use overdrive_jpeg::Region;
pub use pack_tokens::{PackTokens, PackedTokens};
pub use packing::{JoinPacks, Pack, Packing};
pub use pad_sequence::PadSequence;
#[cfg(feature = "parquet")]
pub use parquet::{FromParquet, ParquetBatches, ParquetDataset, ParquetEpoch, WholeTable};
pub use pieces::Pieces;
pub use points::{PointCloud, StackPoints};
pub use random_split::{PartLength, random_split, split_lengths};
pub use read::{list_store, read_bytes};
#[cfg(feature = "remote")]
pub use remote::{RemoteOptions, RemoteStats, configure_remote, remote_stats};
pub use rng::Philox;
pub use sampler::{
    Curriculum, DistributedSampler, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler,
    WeightedRandomSampler,
};
pub use shards::expand_shards;
#[cfg(any(feature = "mds", feature = "tfrecord", feature = "webdataset"))]
pub use shards::{IndexedShards, ShardListDataset};
pub use stack::{Stack, Stackable};
pub use stream::{IterableDataset, Samples, ShardStream, StreamPosition};
pub use targets::{
    BoundingBoxFormat, BoundingBoxes, KeyPoints, Mask, PerBox, PerBoxItem, PerBoxRows, Target, TargetPart,
};
pub use tensor_batch::TensorBatch;
pub use tensor_dataset::{GatherRows, TensorDataset};
#[cfg(feature = "jsonl")]
pub use text::JsonLines;
#[cfg(feature = "csv")]
pub use text::{CsvDataset, CsvDatasetBuilder};
#[cfg(feature = "tfrecord")]
pub use tfrecord::{Example, Feature, TfRecord, TfRecordDataset, TfRecordWriter, TfRecords};
pub use to_float::ToFloat;
#[cfg(feature = "tokenizers")]
pub use tokenizer::Tokenizer;
pub use tokens::{IndexedTokens, IndexedTokensWriter, TokenDtype, TokenFile, TokenWindows, TokenWriter};
pub use transforms::{
    AugMix, Canvas, CenterCrop, ClampBoundingBoxes, ClampKeyPoints, ColorJitter, ConvertBoundingBoxFormat, CutMix,
    Draws, ErasingValue, GaussianBlur, Interpolation, MixUp, Operation, Padding, PaddingMode, RandAugment,
    RandomAffine, RandomCrop, RandomErasing, RandomHorizontalFlip, RandomResizedCrop, RandomRotation,
    RandomVerticalFlip, Resize, SanitizeBoundingBoxes, SanitizeKeyPoints, Size, Transform, TrivialAugmentWide,
};
#[cfg(feature = "webdataset")]
pub use webdataset::{WebDataset, WebDatasetWriter, WebDatasetWriterBuilder, WebSample, WebSamples};
