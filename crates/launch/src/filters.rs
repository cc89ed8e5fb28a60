//! The lines of all ranks that match a filter, in one file.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::error::LaunchError;
use crate::lock::lock;
use crate::output;

/// A file with the lines that contain one of some texts.
pub struct Filtered {
    texts: Vec<Vec<u8>>,
    path: PathBuf,
    file: Mutex<Option<File>>,
}

impl Filtered {
    /// None without texts.
    pub fn create(texts: &[String], path: &Path) -> Result<Option<Arc<Self>>, LaunchError> {
        if texts.is_empty() {
            return Ok(None);
        }
        let texts = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        Ok(Some(Arc::new(Self { texts, path: path.to_owned(), file: Mutex::new(Some(output::create(path)?)) })))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes a line with its prefix if it matches. After an error, nothing more is written.
    pub fn push(&self, prefix: &[u8], line: &[u8]) -> io::Result<()> {
        let contains = |text: &Vec<u8>| line.windows(text.len()).any(|part| part == text);
        if !self.texts.iter().any(contains) {
            return Ok(());
        }
        let mut whole = [prefix, line].concat();
        if !line.ends_with(b"\n") {
            whole.push(b'\n');
        }
        let mut file = lock(&self.file);
        let written = file.as_mut().map_or(Ok(()), |file| file.write_all(&whole));
        written.inspect_err(|_| *file = None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_reported_once() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let filtered = Filtered { texts: vec![b"loss".to_vec()], path: "full".into(), file: Mutex::new(Some(full)) };
        assert!(filtered.push(b"[rank0]: ", b"step 1\n").is_ok());
        assert_eq!(filtered.push(b"", b"loss 2\n").unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert!(filtered.push(b"", b"loss 1\n").is_ok());
    }
}
