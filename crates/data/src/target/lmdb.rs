//! An LMDB database.

use std::path::Path;

use anyhow::Result;
use overdrive_dataload::LmdbWriter;

use super::{Refused, Target};
use crate::cli::ConvertOptions;
use crate::example;
use crate::sample::Sample;
use crate::source::lmdb_fields;

pub struct Database(LmdbWriter);

impl Database {
    /// A path in `.mdb` becomes a file, any other a folder, the default of Python's `lmdb.open`.
    pub fn create(options: &ConvertOptions) -> Result<Self> {
        let is_file = options.dst.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("mdb"));
        let writer = LmdbWriter::builder(&options.dst).subdir(!is_file).checksums(options.checksums);
        Ok(Self(writer.create()?))
    }
}

impl Target for Database {
    fn write(&mut self, sample: Sample) -> Result<(), Refused> {
        let Sample { key, mut fields } = sample;
        let value = match fields.as_mut_slice() {
            // A field needs no name only if reading guesses the same name from its content.
            [(name, content)] if is_plain(name, content) => std::mem::take(content),
            fields => example::encode(None, fields),
        };
        Ok(self.0.write(key.as_bytes(), &value)?)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.0.finish()?;
        Ok(())
    }
}

fn is_plain(name: &str, content: &[u8]) -> bool {
    matches!(lmdb_fields(content, Path::new("")).as_deref(), Ok([(found, value)]) if found == name && value == content)
}
