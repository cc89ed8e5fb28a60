//! Tar shards.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use overdrive_dataload::WebDatasetWriter;
use tempfile::TempDir;

use super::{Refused, Target, move_all, staging_folder, with_indexes};
use crate::cli::ConvertOptions;
use crate::format::split_ending;
use crate::names::without_dots;
use crate::sample::{Sample, extension};

pub struct Shards {
    parent: PathBuf,
    /// Declared before `_staging`, so that it is dropped before its folder.
    writer: WebDatasetWriter,
    _staging: TempDir,
}

impl Shards {
    /// A name without a number pattern gets one: `train.tar` becomes `train-%06d.tar`.
    pub fn create(options: &ConvertOptions, parent: &Path, name: &OsStr) -> Result<Self> {
        let name = name.to_str().context("the name of shards must be UTF-8")?;
        let pattern = match (name.contains('%'), split_ending(name)) {
            (true, _) => name.to_owned(),
            (false, (stem, "")) => format!("{stem}-%06d.tar"),
            (false, (stem, ending)) => format!("{stem}-%06d{ending}"),
        };
        let (before, after) = pattern.split_once('%').unwrap_or_default();
        let after = after.split_once('d').map_or(after, |(_, after)| after);
        refuse_shards(parent, before, after)?;
        let staging = staging_folder(parent, before.as_ref())?;
        let pattern = staging.path().join(pattern);
        let mut writer = WebDatasetWriter::builder(pattern.to_str().context("the name of shards must be UTF-8")?);
        writer = writer.index(options.index);
        if let Some(samples) = options.samples_per_shard {
            writer = writer.max_count(samples);
        }
        if let Some(bytes) = options.shard_size {
            writer = writer.max_size(bytes);
        }
        Ok(Self { parent: parent.to_owned(), writer: writer.build()?, _staging: staging })
    }
}

/// An error if shards of an earlier run exist: a reader would take them for a part of this one.
fn refuse_shards(parent: &Path, before: &str, after: &str) -> Result<()> {
    for entry in parent.read_dir().with_context(|| format!("cannot read the folder {}", parent.display()))? {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(before)?.strip_suffix(after));
        let taken = number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()));
        let path = parent.join(&name);
        ensure!(!taken, "{} already exists: remove it, or choose another name", path.display());
    }
    Ok(())
}

impl Target for Shards {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let fields: Vec<_> = sample.fields.iter().map(|(name, content)| (extension(name), content)).collect();
        Ok(self.writer.write(&without_dots(&sample.key), &fields)?)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { parent, writer, _staging } = *self;
        let target = |file: PathBuf| {
            let to = parent.join(file.file_name().unwrap_or_default());
            (file, to)
        };
        move_all(&with_indexes(writer.finish()?.into_iter().map(target)))
    }
}
