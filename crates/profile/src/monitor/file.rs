//! Samples as JSON, one per line.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

use super::Sample;
use crate::ProfileError;
use crate::error::When as _;

/// A file to which each sample is appended as a line.
#[derive(Debug)]
pub(super) struct JsonLines(File);

impl JsonLines {
    /// Keeps the file's content. Non-blocking, so that a slow reader of a pipe cannot stop the samples: a pipe without
    /// a reader is an error here, and a full one is an error in `write`.
    pub fn open(path: &Path) -> Result<Self, ProfileError> {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        file.when("open it to write samples", path).map(Self)
    }

    /// Writes in one call, so that a reader sees whole lines.
    pub fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let mut line = serde_json::to_vec(sample)?;
        line.push(b'\n');
        self.0.write_all(&line)
    }
}
