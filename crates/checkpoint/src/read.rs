//! Reads a checkpoint or some of it, and compares the checksums before any tensor is returned.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;

use crc32fast::Hasher;

use overdrive_core::safetensors::{FORMAT_KEY, MAX_HEADER_BYTES, kind_of, parse_header};
use overdrive_core::{Entry, Rows, StateDict};
use overdrive_ffi::HostBuffer;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::Value;
use tch::{Kind, TchError, Tensor};

use crate::error::{CheckpointError, Context};
use crate::manifest::{self, BLOCK, Manifest, Part, Pieces, checksum};
use crate::names::tensors_file;

/// More threads do not read faster: memory is the limit.
const MOST_THREADS: usize = 4;

/// Whether to read the entry of this name.
pub(crate) type Wanted<'a> = &'a dyn Fn(&str) -> bool;

/// A checkpoint in memory, or some of its parts.
pub(crate) struct Saved {
    pub folder: PathBuf,
    pub step: u64,
    /// The number of what ranks have saved together.
    pub together: u64,
    /// Parts that are there and not loaded.
    pub left_out: BTreeSet<String>,
    pub parts: BTreeMap<String, StateDict>,
    pub fields: BTreeMap<String, Value>,
}

/// Reads only the parts that are asked for.
pub(crate) fn read_parts(
    folder: &Path,
    manifest: Manifest,
    asked: impl Fn(&str) -> bool,
) -> Result<Saved, CheckpointError> {
    let (mut parts, together) = (BTreeMap::new(), manifest.together());
    for (name, part) in manifest.parts {
        if asked(&name) {
            let state = read_entries(folder, &name, part, None)?;
            parts.insert(name, state);
        }
    }
    let (folder, step, left_out) = (folder.to_path_buf(), manifest.step, BTreeSet::new());
    Ok(Saved { folder, step, together, left_out, parts, fields: manifest.fields })
}

/// Reads the wanted entries of a part, or all.
pub(crate) fn read_entries(
    folder: &Path,
    name: &str,
    part: Part,
    wanted: Option<Wanted<'_>>,
) -> Result<StateDict, CheckpointError> {
    let mut state = part.ranks.shard().map_or_else(StateDict::new, StateDict::of_shard);
    if let Some(expected) = part.file {
        let path = tensors_file(folder, name);
        let mut file = Source::open(&path, &expected)?;
        let wanted = wanted.unwrap_or(&|_| true);
        match &expected.pieces {
            Some(pieces) => file.read_each(pieces, wanted, &mut state)?,
            None => file.read_whole(&expected.crc32, wanted, &mut state)?,
        }
    }
    for (key, value) in part.values {
        if wanted.is_none_or(|wanted| wanted(&key)) {
            state.insert(key, value.into_entry());
        }
    }
    for (key, rows) in part.rows {
        // Others are not wanted.
        if let Ok(Entry::Tensor(tensor)) = state.get(&key) {
            let tensor = tensor.shallow_clone();
            if !rows.fit(&tensor.size()) {
                let found = format!("a tensor of shape {:?}", tensor.size());
                return Err(CheckpointError::damaged(&folder.join(manifest::FILE), key, rows, found));
            }
            state.insert_rows(key, tensor, Rows { first: rows.first, whole: rows.whole });
        }
    }
    Ok(state)
}

/// A safetensors file that is being read.
pub(crate) struct Source<'a> {
    path: &'a Path,
    file: File,
    bytes: u64,
    /// The checksum of the bytes read since the last `check`.
    crc: Hasher,
}

impl<'a> Source<'a> {
    pub fn open(path: &'a Path, expected: &manifest::File) -> Result<Self, CheckpointError> {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let file = format!("a file of {} bytes", expected.bytes);
                return Err(CheckpointError::damaged(path, "the tensors", file, "none"));
            }
            other => other.when("open it", path)?,
        };
        let bytes = file.metadata().when("read its metadata", path)?.len();
        let source = Self { path, file, bytes, crc: Hasher::new() };
        if bytes != expected.bytes {
            return Err(source.damaged("its size", format!("{} bytes", expected.bytes), format!("{bytes} bytes")));
        }
        Ok(source)
    }

    pub fn damaged(&self, field: &str, expected: impl ToString, found: impl ToString) -> CheckpointError {
        CheckpointError::damaged(self.path, field, expected, found)
    }

    fn take(&mut self, at: u64, buffer: &mut [u8]) -> Result<(), CheckpointError> {
        self.file.read_exact_at(buffer, at).when("read it", self.path)?;
        self.crc.update(buffer);
        Ok(())
    }

    /// Compares the checksum of the bytes read since the last check.
    fn check(&mut self, what: &str, expected: &str) -> Result<(), CheckpointError> {
        let crc = std::mem::take(&mut self.crc);
        self.compare(what, expected, crc)
    }

    /// The checksum that a tensor should have.
    pub fn checksum_of<'p>(&self, pieces: &'p Pieces, key: &str) -> Result<&'p str, CheckpointError> {
        let crc32 = pieces.tensors.get(key);
        crc32.map(String::as_str).ok_or_else(|| self.damaged(key, "a checksum in the manifest", "none"))
    }

    fn compare(&self, what: &str, expected: &str, crc: Hasher) -> Result<(), CheckpointError> {
        let found = checksum(crc.finalize());
        if found == expected { Ok(()) } else { Err(self.damaged(&format!("crc32 of {what}"), expected, found)) }
    }

    /// Reads the header's bytes, unparsed, and returns them with the tensors' position.
    fn header(&mut self) -> Result<(Vec<u8>, u64), CheckpointError> {
        let limit = MAX_HEADER_BYTES.min(self.bytes.saturating_sub(8));
        if self.bytes < 8 {
            return Err(self.damaged("its size", "at least 8 bytes", format!("{} bytes", self.bytes)));
        }
        let mut length = [0; 8];
        self.take(0, &mut length)?;
        let length = u64::from_le_bytes(length);
        if length > limit {
            return Err(self.damaged("the header's length", format!("at most {limit}"), length));
        }
        let mut header = vec![0; length as usize];
        self.take(8, &mut header)?;
        Ok((header, 8 + length))
    }

    /// Parses a header whose checksum is right; `body` is the number of bytes of tensors.
    fn parse(&self, header: &[u8], body: u64) -> Result<Metadata, CheckpointError> {
        parse_header(header, body).map_err(|error| self.damaged("the header", "that of a safetensors file", error))
    }

    /// Reads the header, and where the tensors begin.
    pub fn checked_header(&mut self, pieces: &Pieces) -> Result<(Metadata, u64), CheckpointError> {
        let (header, start) = self.header()?;
        self.check("the header", &pieces.header)?;
        Ok((self.parse(&header, self.bytes - start)?, start))
    }

    /// Reads some bytes of a tensor, which begins at `start` and has `length` bytes, and passes them to `each` when their
    /// checksums are right. Whole blocks are read.
    pub fn take_some(
        &self,
        key: &str,
        pieces: &Pieces,
        (start, length): (u64, usize),
        wanted: Range<usize>,
        mut each: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        if wanted.is_empty() {
            return Ok(());
        }
        let mut block = vec![0; BLOCK.min(length)];
        for number in wanted.start / BLOCK..wanted.end.div_ceil(BLOCK) {
            let begin = number * BLOCK;
            let block = &mut block[..BLOCK.min(length - begin)];
            self.file.read_exact_at(block, start + begin as u64).when("read it", self.path)?;
            let expected = match length <= BLOCK {
                true => pieces.tensors.get(key),
                false => pieces.blocks.get(key).and_then(|blocks| blocks.get(number)),
            };
            let expected = expected.ok_or_else(|| self.damaged(key, "checksums in the manifest", "none"))?;
            let mut crc = Hasher::new();
            crc.update(block);
            self.compare(&format!("`{key}`, block {number}"), expected, crc)?;
            each(&block[wanted.start.max(begin) - begin..wanted.end.min(begin + block.len()) - begin])?;
        }
        Ok(())
    }

    /// Reads the whole file, and keeps the wanted tensors. They share the memory that the file was read into.
    fn read_whole(&mut self, crc32: &str, wanted: Wanted<'_>, state: &mut StateDict) -> Result<(), CheckpointError> {
        let (header, start) = self.header()?;
        for (body, crc) in self.take_tensors(&[(start, (self.bytes - start) as usize)])? {
            self.crc.combine(&crc);
            self.check("the file", crc32)?;
            let header = self.parse(&header, self.bytes - start)?;
            for (key, (info, names)) in names_of(&header, wanted) {
                let tensor = self.tensor(&key, info, &body, info.data_offsets.0)?;
                names.into_iter().for_each(|name| state.insert(name, Entry::Tensor(tensor.shallow_clone())));
            }
        }
        Ok(())
    }

    /// Reads the header and the wanted tensors, each with its own checksum and into its own memory.
    fn read_each(&mut self, pieces: &Pieces, wanted: Wanted<'_>, state: &mut StateDict) -> Result<(), CheckpointError> {
        let (header, start) = self.checked_header(pieces)?;
        let mut found: Vec<_> = names_of(&header, wanted).into_iter().collect();
        // As they are in the file.
        found.sort_by_key(|(_, (info, _))| info.data_offsets);
        let place = |info: &TensorInfo| (start + info.data_offsets.0 as u64, info.data_offsets.1 - info.data_offsets.0);
        let read = self.take_tensors(&found.iter().map(|(_, (info, _))| place(info)).collect::<Vec<_>>())?;
        for ((key, (info, names)), (bytes, crc)) in found.into_iter().zip(read) {
            self.compare(&format!("`{key}`"), self.checksum_of(pieces, &key)?, crc)?;
            let tensor = self.tensor(&key, info, &bytes, 0)?;
            names.into_iter().for_each(|name| state.insert(name, Entry::Tensor(tensor.shallow_clone())));
        }
        Ok(())
    }

    /// Reads parts of the file, given by their place and length, into byte tensors, with several threads that also compute
    /// their checksums.
    fn take_tensors(&self, parts: &[(u64, usize)]) -> Result<Vec<(Tensor, Hasher)>, CheckpointError> {
        let (file, path) = (&self.file, self.path);
        let threads = thread::available_parallelism().map_or(1, usize::from).min(MOST_THREADS);
        let sizes: Vec<usize> = parts.iter().map(|&(_, bytes)| bytes).collect();
        let filled = HostBuffer::filled(&sizes, threads, Hasher::new, |crc, (number, offset), memory| {
            let read = read_some_at(file, memory, parts[number].0 + offset as u64).when("read it", path)?;
            crc.update(read);
            Ok::<_, CheckpointError>(read)
        })?;
        let tensor = |(buffer, checksums): (HostBuffer, Vec<Hasher>)| {
            let mut crc = Hasher::new();
            checksums.iter().for_each(|part| crc.combine(part));
            let shape = [buffer.len() as i64];
            let tensor =
                buffer.into_tensor(Kind::Uint8, &shape).map_err(|error| CheckpointError::Torch(error.into()))?;
            Ok((tensor, crc))
        };
        filled.into_iter().map(tensor).collect()
    }

    /// A tensor whose bytes begin at `start`.
    fn tensor(&self, key: &str, info: &TensorInfo, bytes: &Tensor, start: usize) -> Result<Tensor, CheckpointError> {
        let kind = kind_of(info.dtype);
        let kind = kind.ok_or_else(|| self.damaged(key, "a dtype that tch has", format!("{:?}", info.dtype)))?;
        let shape: Result<Vec<i64>, _> = info.shape.iter().map(|&side| i64::try_from(side)).collect();
        let shape = shape.map_err(|_| self.damaged(key, "a shape below 2^63", format!("{:?}", info.shape)))?;
        let length = info.data_offsets.1 - info.data_offsets.0;
        view(bytes, start, length, kind, &shape).map_err(|error| self.damaged(key, "a tensor", error))
    }
}

/// The first bytes of `memory`, read from a place in a file; none if a signal came first.
fn read_some_at<'a>(file: &File, memory: &'a mut [MaybeUninit<u8>], at: u64) -> io::Result<&'a mut [u8]> {
    match rustix::io::pread(file, memory, at) {
        Err(rustix::io::Errno::INTR) => Ok(&mut []),
        Err(error) => Err(error.into()),
        Ok(([], _)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok((read, _)) => Ok(read),
    }
}

pub(crate) fn view(bytes: &Tensor, start: usize, length: usize, kind: Kind, shape: &[i64]) -> Result<Tensor, TchError> {
    let tensor = bytes.f_narrow(0, start as i64, length as i64)?;
    // Copies a tensor that is not aligned, as can be in files of other programs.
    let tensor = match start.is_multiple_of(kind.elt_size_in_bytes()) {
        true => tensor,
        false => tensor.f_to_dtype(Kind::Uint8, false, true)?,
    };
    match kind {
        // Converts the bytes: any byte but 0 is true, whereas a bool tensor must not contain a 2.
        Kind::Bool => tensor.f_to_kind(Kind::Bool)?.f_view(shape),
        _ => tensor.f_view_dtype(kind)?.f_view(shape),
    }
}

/// The tensors of a file that are wanted, each with its wanted names; a tied tensor has several.
pub(crate) fn names_of<'a>(
    header: &'a Metadata,
    wanted: Wanted<'_>,
) -> BTreeMap<String, (&'a TensorInfo, BTreeSet<String>)> {
    let mut names: BTreeMap<String, (&TensorInfo, BTreeSet<String>)> = BTreeMap::new();
    let own = header.offset_keys().into_iter().map(|key| (key.clone(), key));
    let aliases = header.metadata().iter().flatten().filter(|(name, kept)| {
        // Other metadata are remarks of the program that wrote the file.
        *name != FORMAT_KEY && header.info(name).is_none() && header.info(kept).is_some()
    });
    for (name, kept) in own.chain(aliases.map(|(name, kept)| (name.clone(), kept.clone()))) {
        if wanted(&name)
            && let Some(info) = header.info(&kept)
        {
            names.entry(kept).or_insert_with(|| (info, BTreeSet::new())).1.insert(name);
        }
    }
    names
}
