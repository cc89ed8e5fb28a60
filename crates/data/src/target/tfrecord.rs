//! Records of `tf.train.Example`, in one file or in shards with TensorFlow's naming.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use overdrive_dataload::TfRecordWriter;
use tempfile::TempDir;

use super::{Refused, Target, move_all, staging_folder, with_indexes};
use crate::cli::ConvertOptions;
use crate::example;
use crate::format::split_ending;
use crate::sample::Sample;

pub struct Shards {
    parent: PathBuf,
    stem: String,
    ending: String,
    /// The most samples and bytes per shard; `None` for a single file.
    limits: Option<[u64; 2]>,
    index: bool,
    /// Declared before `staging`, so that it is dropped before its folder.
    writer: Option<TfRecordWriter>,
    samples: u64,
    bytes: u64,
    files: Vec<PathBuf>,
    staging: TempDir,
}

impl Shards {
    pub fn create(options: &ConvertOptions, parent: &Path, name: &OsStr) -> Result<Self> {
        let name = name.to_str().context("the name of shards must be UTF-8")?;
        let (stem, ending) = split_ending(name);
        let limits = [options.samples_per_shard, options.shard_size];
        let limits = limits.iter().any(Option::is_some).then(|| limits.map(|limit| limit.unwrap_or(u64::MAX)));
        Ok(Self {
            parent: parent.to_owned(),
            stem: stem.to_owned(),
            ending: ending.to_owned(),
            limits,
            index: options.index,
            writer: None,
            samples: 0,
            bytes: 0,
            files: Vec::new(),
            staging: staging_folder(parent, name.as_ref())?,
        })
    }

    fn close(&mut self) -> Result<(), Refused> {
        if let Some(writer) = self.writer.take() {
            self.files.push(writer.finish()?);
            (self.samples, self.bytes) = (0, 0);
        }
        Ok(())
    }
}

impl Target for Shards {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let record = example::encode(Some(&sample.key), &sample.fields);
        let bytes = record.len() as u64;
        let full = |[samples, most]: [u64; 2]| self.samples >= samples || self.bytes.saturating_add(bytes) > most;
        if self.samples > 0 && self.limits.is_some_and(full) {
            self.close()?;
        }
        let writer = match &mut self.writer {
            Some(writer) => writer,
            None => {
                let path = self.staging.path().join(format!("{}{}", self.files.len(), self.ending));
                self.writer.insert(match self.index {
                    true => TfRecordWriter::with_index(path)?,
                    false => TfRecordWriter::create(path)?,
                })
            }
        };
        writer.write(&record)?;
        self.samples += 1;
        self.bytes += bytes;
        Ok(())
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.close().map_err(|(Refused::Sample(error) | Refused::All(error))| error)?;
        let Self { parent, stem, ending, limits, files, .. } = &*self;
        let of = files.len();
        let target = |(number, file): (usize, &PathBuf)| match limits {
            Some(_) => (file.clone(), parent.join(format!("{stem}-{number:05}-of-{of:05}{ending}"))),
            None => (file.clone(), parent.join(format!("{stem}{ending}"))),
        };
        move_all(&with_indexes(files.iter().enumerate().map(target)))
    }
}
