//! Writes a dataset that Mosaic's streaming reads.

use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::encoding::{Encoding, MdsValue};
use super::index::{FILE, MAX_SAMPLES, VERSION};
use crate::DataError;
use crate::output::Output;
use crate::read::require_local;

/// Mosaic's `size_limit`.
const SHARD_BYTES: usize = 1 << 26;

/// Writes shards of MDS and, at the end, the `index.json` without which they are no dataset.
///
/// ```
/// use overdrive_dataload::{IterableDataset, MdsDataset, MdsValue, MdsWriter};
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path().join("reviews");
///
/// let mut writer = MdsWriter::create(&folder, &[("text", "str"), ("stars", "int")])?;
/// writer.write(&[MdsValue::Str("good"), MdsValue::Int(4)])?;
/// writer.finish()?;
/// let sample = MdsDataset::open(&folder)?.stream([0]).next().transpose()?;
/// assert!(matches!(sample.as_ref().map(|it| it.get("stars")), Some(Ok(MdsValue::Int(4)))));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `streaming.MDSWriter` of mosaicml-streaming, without compression and hashes, so that every sample is read in constant
/// time.
#[doc(alias = "MDSWriter")]
pub struct MdsWriter {
    folder: PathBuf,
    /// Sorted by name, as Mosaic has them.
    columns: Vec<Column>,
    shard_bytes: usize,
    /// What a shard says of its columns, in JSON.
    config: Value,
    config_bytes: usize,
    /// The samples of the next shard, and where each ends.
    samples: Vec<u8>,
    ends: Vec<usize>,
    shards: Vec<Value>,
}

struct Column {
    name: String,
    /// Mosaic's name of the encoding.
    kind: String,
    encoding: Encoding,
    /// Which of the values that `write` gets.
    place: usize,
}

impl MdsWriter {
    /// Starts a dataset with these columns: their names, and Mosaic's names of their encodings.
    ///
    /// # Errors
    /// [`DataError::Layout`] for a folder that has an `index.json`, and for a URL; [`DataError::InvalidOption`] for no
    /// column, for two of one name, and for an encoding that is not written: `pil`, `pkl`, arrays; [`DataError::Io`].
    pub fn create(folder: impl AsRef<Path>, columns: &[(&str, &str)]) -> Result<Self, DataError> {
        let folder = folder.as_ref();
        require_local(folder)?;
        let mut made = Vec::new();
        for (place, &(name, kind)) in columns.iter().enumerate() {
            let encoding = Encoding::parse(kind);
            if matches!(encoding, Encoding::Pil | Encoding::Array(..) | Encoding::Other(_)) {
                let expected = format!("bytes, jpeg, png, str, json, int or float in the column {name:?}");
                return Err(DataError::option("encoding", expected, kind));
            }
            made.push(Column { name: name.to_owned(), kind: kind.to_owned(), encoding, place });
        }
        made.sort_by(|one, other| one.name.cmp(&other.name));
        if made.is_empty() || made.windows(2).any(|pair| pair[0].name == pair[1].name) {
            return Err(DataError::option("columns", "at least one, each of another name", format!("{columns:?}")));
        }
        if folder.join(FILE).exists() {
            return Err(DataError::layout(folder, "a folder without a dataset", format!("one with {FILE}")));
        }
        std::fs::create_dir_all(folder).map_err(DataError::io(folder))?;
        let (samples, ends, shards) = (Vec::new(), Vec::new(), Vec::new());
        let (folder, config, config_bytes) = (folder.to_owned(), Value::Null, 0);
        let this =
            Self { folder, columns: made, shard_bytes: SHARD_BYTES, config, config_bytes, samples, ends, shards };
        Ok(this.shard_bytes(SHARD_BYTES))
    }

    /// The most bytes of a shard, which is also the memory that is used; 64 MiB unless set, and less than 4 GiB, which is
    /// the most that the format has. A sample that is larger has a shard of its own.
    #[doc(alias = "size_limit")]
    pub fn shard_bytes(mut self, bytes: usize) -> Self {
        // Shards have places in 32 bits.
        let bytes = bytes.min(u32::MAX as usize);
        let of = |part: &dyn Fn(&Column) -> Value| self.columns.iter().map(part).collect::<Vec<_>>();
        self.config = json!({
            "version": VERSION,
            "format": "mds",
            "compression": null,
            "hashes": [],
            "size_limit": bytes,
            "column_names": of(&|column| json!(column.name)),
            "column_encodings": of(&|column| json!(column.kind)),
            "column_sizes": of(&|column| json!(column.encoding.size())),
        });
        (self.shard_bytes, self.config_bytes) = (bytes, self.config.to_string().len());
        self
    }

    /// Adds a sample: a value for each column, in the order of [`create`](Self::create).
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for another number of values, or one that its column's encoding cannot hold: then
    /// nothing of the sample is written; [`DataError::Io`].
    pub fn write(&mut self, values: &[MdsValue<'_>]) -> Result<(), DataError> {
        if values.len() != self.columns.len() {
            return Err(DataError::option("values", format!("{}, one a column", self.columns.len()), values.len()));
        }
        let (mut sizes, mut contents) = (Vec::new(), Vec::new());
        for Column { name, kind, encoding, place } in &self.columns {
            let start = contents.len();
            encoding.encode(&values[*place], &mut contents).map_err(|found| {
                let expected = format!("{kind} in the column {name:?}");
                DataError::option("value", expected, found)
            })?;
            if encoding.size().is_none() {
                let bytes = u32::try_from(contents.len() - start);
                let bytes =
                    bytes.map_err(|_| DataError::option("value", "less than 4 GiB", format!("more in {name:?}")))?;
                sizes.extend(bytes.to_le_bytes());
            }
        }
        let bytes = sizes.len() + contents.len();
        let is_full = self.ends.len() as u64 == MAX_SAMPLES || self.shard_size(1, bytes) > self.shard_bytes;
        if !self.ends.is_empty() && is_full {
            self.flush()?;
        }
        if u32::try_from(self.shard_size(1, bytes)).is_err() {
            return Err(DataError::option("sample", "less than 4 GiB", format!("{bytes} bytes")));
        }
        self.samples.extend(sizes);
        self.samples.extend(contents);
        self.ends.push(self.samples.len());
        Ok(())
    }

    /// The bytes of the next shard with so many samples more.
    fn shard_size(&self, samples: usize, bytes: usize) -> usize {
        4 * (self.ends.len() + samples + 2) + self.config_bytes + self.samples.len() + bytes
    }

    fn flush(&mut self) -> Result<(), DataError> {
        let name = format!("shard.{:05}.mds", self.shards.len());
        let (mut entry, count) = (self.config.clone(), self.ends.len());
        let config = entry.to_string();
        let start = 4 * (count + 2) + config.len();
        let offsets = std::iter::once(start).chain(self.ends.iter().map(|end| start + end));
        let header: Vec<u8> = std::iter::once(count).chain(offsets).flat_map(|it| (it as u32).to_le_bytes()).collect();
        let path = self.folder.join(&name);
        let mut output = Output::create(&path)?;
        let pieces = [&header, config.as_bytes(), &self.samples];
        pieces.iter().try_for_each(|piece| output.write_all(piece)).map_err(DataError::io(&path))?;
        output.finish()?;
        entry["raw_data"] = json!({"basename": name, "bytes": start + self.samples.len(), "hashes": {}});
        entry["samples"] = json!(count);
        entry["zip_data"] = Value::Null;
        self.shards.push(entry);
        self.samples.clear();
        self.ends.clear();
        Ok(())
    }

    /// Writes the last shard and the index, and returns the folder.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a dataset without samples; [`DataError::Io`].
    pub fn finish(mut self) -> Result<PathBuf, DataError> {
        if !self.ends.is_empty() {
            self.flush()?;
        }
        if self.shards.is_empty() {
            return Err(DataError::option("samples", "at least one", 0));
        }
        let path = self.folder.join(FILE);
        let mut output = Output::create(&path)?;
        let index = json!({"version": VERSION, "shards": self.shards});
        output.write_all(index.to_string().as_bytes()).map_err(DataError::io(&path))?;
        output.finish()?;
        Ok(self.folder)
    }
}
