//! Samples as JSON, one a line.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

use super::Sample;
use crate::ProfileError;
use crate::error::When as _;

/// A file that grows by a line a sample.
#[derive(Debug)]
pub(super) struct JsonLines(File);

impl JsonLines {
    /// What is in the file stays there. A pipe that nobody reads is an error, and one that is read too slowly later on: to
    /// wait for a reader would end the samples.
    pub fn open(path: &Path) -> Result<Self, ProfileError> {
        let flags = OFlags::NONBLOCK.bits() as i32;
        let file = OpenOptions::new().append(true).create(true).custom_flags(flags).open(path);
        file.when("open it to write samples", path).map(Self)
    }

    /// In one call, so that a reader sees whole lines.
    pub fn write(&mut self, sample: &Sample) -> io::Result<()> {
        let mut line = serde_json::to_vec(sample)?;
        line.push(b'\n');
        self.0.write_all(&line)
    }
}
