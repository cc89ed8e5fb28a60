//! The lines of all ranks that match a filter, in one file.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::LaunchError;
use crate::output;

/// A file with the lines that contain one of some texts.
pub struct Filtered {
    texts: Vec<Vec<u8>>,
    file: Mutex<Option<File>>,
}

impl Filtered {
    /// None without texts.
    pub fn create(texts: &[String], path: &Path) -> Result<Option<Arc<Self>>, LaunchError> {
        if texts.is_empty() {
            return Ok(None);
        }
        let texts = texts.iter().map(|text| text.as_bytes().to_vec()).collect();
        Ok(Some(Arc::new(Self { texts, file: Mutex::new(Some(output::create(path)?)) })))
    }

    /// Writes a line with its prefix if it matches. After an error, nothing more is written.
    pub fn push(&self, prefix: &[u8], line: &[u8]) {
        let contains = |text: &Vec<u8>| line.windows(text.len()).any(|part| part == text);
        if !self.texts.iter().any(contains) {
            return;
        }
        let mut whole = [prefix, line].concat();
        if !line.ends_with(b"\n") {
            whole.push(b'\n');
        }
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.as_mut().is_some_and(|file| file.write_all(&whole).is_err()) {
            *file = None;
        }
    }
}
