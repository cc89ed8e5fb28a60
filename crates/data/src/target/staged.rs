//! A file that appears complete or not at all.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tempfile::NamedTempFile;

use super::make_readable;

/// Writes to a hidden file beside the target, which is deleted on drop.
pub struct Staged {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
}

impl Staged {
    pub fn create(path: &Path) -> Result<Self> {
        let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let made = tempfile::Builder::new().prefix(&format!(".{name}.")).suffix(".part").tempfile_in(parent);
        let file = made.with_context(|| format!("cannot write in {}", parent.display()))?;
        Ok(Self { path: path.to_owned(), file: BufWriter::with_capacity(1 << 18, file) })
    }

    /// Moves the file to its final name.
    pub fn finish(self) -> Result<()> {
        let Self { path, file } = self;
        let finish = || -> Result<()> {
            let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
            file.as_file().sync_all()?;
            make_readable(file.path(), 0o644)?;
            file.persist_noclobber(&path)?;
            Ok(())
        };
        finish().with_context(|| format!("cannot create {}", path.display()))
    }
}

impl Write for Staged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
