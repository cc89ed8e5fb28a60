//! A checkpoint that several ranks have saved together, read by others: each reads the rows that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use overdrive_core::{Entry, Rows, Shapes, StateDict, StateError, Stateful};
use overdrive_ffi::HostBuffer;
use tch::{Kind, Tensor};

use crate::error::CheckpointError;
use crate::folder::Folder;
use crate::manifest::{self, Manifest, Part, Plain, Rank, Sharing};
use crate::names::{rank_folder, tensors_file};
use crate::outline::{Outline, Piece, Places, Whole};
use crate::read::{Source, names_of, view};

/// The checkpoints of all ranks of one step, or that of a single process.
pub(crate) struct Together {
    pub folder: PathBuf,
    pub step: u64,
    /// Each rank's.
    saved: Vec<(PathBuf, Manifest)>,
    /// Parts of which rank 0's state is taken where ranks have saved different ones.
    from_rank_0: BTreeSet<String>,
}

impl Together {
    /// Finds the step's checkpoint below `root`: that of a single process, which is in `root` itself, or those of all ranks.
    pub fn open(root: &Path, step: u64, from_rank_0: &BTreeSet<String>) -> Result<Self, CheckpointError> {
        let alone = Folder::reading(root).step(step);
        let damage = match alone.exists().then(|| Self::alone(&alone, step)).transpose() {
            Ok(None) => None,
            Ok(Some(saved)) => return Ok(Self::of(saved, step, from_rank_0)),
            // Ranks may have the same step.
            Err(error) if error.is_damage() => Some(error),
            Err(error) => return Err(error),
        };
        match (Self::of_ranks(root, step), damage) {
            (Ok(saved), _) => Ok(Self::of(saved, step, from_rank_0)),
            (Err(error), Some(damage)) if error.is_damage() => Err(damage),
            (Err(error), _) => Err(error),
        }
    }

    fn of(saved: Vec<(PathBuf, Manifest)>, step: u64, from_rank_0: &BTreeSet<String>) -> Self {
        Self { folder: saved[0].0.clone(), step, saved, from_rank_0: from_rank_0.clone() }
    }

    fn alone(folder: &Path, step: u64) -> Result<Vec<(PathBuf, Manifest)>, CheckpointError> {
        let manifest = Manifest::of_step(folder, step)?;
        match manifest.ranks {
            None => Ok(vec![(folder.to_path_buf(), manifest)]),
            // The folder of one rank was opened in place of the run's.
            Some(found) => {
                let (expected, found) = ("a single process".to_owned(), found.to_string());
                Err(CheckpointError::Rank { path: folder.to_path_buf(), expected, found })
            }
        }
    }

    fn of_ranks(root: &Path, step: u64) -> Result<Vec<(PathBuf, Manifest)>, CheckpointError> {
        let read = |rank| {
            let folder = Folder::reading(&rank_folder(root, rank)).step(step);
            let manifest = Manifest::of_step(&folder, step)?;
            Ok::<_, CheckpointError>((folder, manifest))
        };
        let mut saved: Vec<(PathBuf, Manifest)> = vec![read(0)?];
        let mark = saved[0].1.ranks;
        for rank in 1..mark.map_or(1, |mark| mark.world_size) {
            saved.push(read(rank)?);
        }
        for (rank, (folder, manifest)) in saved.iter().enumerate() {
            let expected = Rank { rank, ..mark.unwrap_or(Rank { rank: 0, world_size: 1, together: 0 }) };
            let found = manifest.ranks;
            if !found.is_some_and(|found| found.is(&expected)) {
                let found = found.map_or("a single process".to_owned(), |found| found.to_string());
                return Err(CheckpointError::Rank { path: folder.clone(), expected: expected.to_string(), found });
            }
            if found != Some(expected) {
                return Err(CheckpointError::OtherRun { folder: root.to_path_buf(), step });
            }
        }
        Ok(saved)
    }

    pub fn ranks(&self) -> usize {
        self.saved.len()
    }

    pub fn first(&self) -> &Manifest {
        &self.saved[0].1
    }

    /// The checkpoint of this rank of so many, or of a single process.
    pub fn own(&self, mark: Option<Rank>, rank: usize) -> Option<(&Path, &Manifest)> {
        let (folder, manifest) = self.saved.get(rank)?;
        let is_own = match (mark, manifest.ranks) {
            (Some(own), Some(found)) => own.is(&found),
            (own, found) => own.is_none() && found.is_none(),
        };
        is_own.then_some((folder.as_path(), manifest))
    }

    /// The names of the parts that other ranks load; `anew`: those that they do not, if they cannot.
    pub fn parts(&self, anew: &BTreeSet<String>) -> Result<BTreeSet<String>, CheckpointError> {
        let mut names = BTreeSet::new();
        for (name, part) in &self.first().parts {
            let is_whole = match part.ranks {
                Sharing::Own => Err(CheckpointError::OtherRanks { part: name.clone(), saved: self.ranks() }),
                Sharing::Same => self.check_same(name, part),
                Sharing::Shard { .. } if anew.contains(name) => self.outline(name).map(drop),
                Sharing::Shard { .. } => Ok(()),
            };
            match is_whole {
                Ok(()) => drop(names.insert(name.clone())),
                Err(CheckpointError::OtherRanks { .. } | CheckpointError::RanksDiffer { .. })
                    if anew.contains(name) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(names)
    }

    /// An error when ranks have saved different states of a part that should be the same on all.
    fn check_same(&self, name: &str, first: &Part) -> Result<(), CheckpointError> {
        if self.from_rank_0.contains(name) {
            return Ok(());
        }
        for rank in 1..self.ranks() {
            if let Some(entry) = first.difference(self.part(rank, name)?) {
                return Err(self.differs(name, entry));
            }
        }
        Ok(())
    }

    fn differs(&self, part: &str, entry: &str) -> CheckpointError {
        CheckpointError::RanksDiffer { part: part.to_owned(), entry: entry.to_owned(), saved: self.ranks() }
    }

    fn part(&self, rank: usize, name: &str) -> Result<&Part, CheckpointError> {
        let (folder, manifest) = &self.saved[rank];
        manifest.parts.get(name).ok_or_else(|| {
            let found = manifest.parts.keys().cloned().collect();
            CheckpointError::Parts { path: folder.clone(), expected: vec![name.to_owned()], found }
        })
    }

    /// The ranks whose files have the whole part, each with its manifest's entry: the first one, or all if it is sharded.
    fn owners(&self, name: &str) -> Result<Vec<(usize, &Part)>, CheckpointError> {
        let first = self.part(0, name)?;
        match first.ranks {
            Sharing::Own => return Err(CheckpointError::OtherRanks { part: name.to_owned(), saved: self.ranks() }),
            Sharing::Same => {
                self.check_same(name, first)?;
                return Ok(vec![(0, first)]);
            }
            Sharing::Shard { .. } => {}
        }
        let mut owners = Vec::new();
        for (rank, (folder, _)) in self.saved.iter().enumerate() {
            let part = self.part(rank, name)?;
            if part.ranks.shard().is_none() {
                let field = format!("`ranks` of the part {name:?}");
                return Err(CheckpointError::damaged(&folder.join(manifest::FILE), field, "a shard", "none"));
            }
            owners.push((rank, part));
        }
        Ok(owners)
    }

    fn file(&self, rank: usize, name: &str) -> PathBuf {
        tensors_file(&self.saved[rank].0, name)
    }

    /// What the whole state of a part has, without reading its tensors.
    pub fn outline(&self, of: &str) -> Result<Outline, CheckpointError> {
        let mut outline = Outline { values: StateDict::new(), tensors: BTreeMap::new() };
        // The checksums of tensors that are whole, and so the same where several ranks have them.
        let mut whole: BTreeMap<String, String> = BTreeMap::new();
        let mut plain: BTreeMap<&String, &Plain> = BTreeMap::new();
        let from_rank_0 = self.from_rank_0.contains(of);
        for (rank, part) in self.owners(of)? {
            for (key, value) in &part.values {
                if *plain.entry(key).or_insert(value) != value && !from_rank_0 {
                    return Err(self.differs(of, key));
                }
            }
            // It has no tensors.
            let Some(expected) = &part.file else { continue };
            let path = self.file(rank, of);
            let mut source = Source::open(&path, expected)?;
            let Some(pieces) = &expected.pieces else {
                return Err(source.damaged("pieces", "checksums of single tensors", "none"));
            };
            let (header, start) = source.checked_header(pieces)?;
            for (key, (info, names)) in names_of(&header, &|_| true) {
                for name in names {
                    let rows = part.rows.get(&name);
                    if rows.is_none() {
                        // Running statistics, say, are not the same.
                        let crc32 = source.checksum_of(pieces, &key)?;
                        match whole.entry(name.clone()).or_insert_with(|| crc32.to_owned()) == crc32 {
                            true => {}
                            false if from_rank_0 => continue,
                            false => return Err(self.differs(of, &name)),
                        }
                    }
                    let (kind, shape, piece) = Piece::of(&source, rank, (&key, info), start, rows)?;
                    let new = || Whole { kind, shape: shape.clone(), pieces: Vec::new() };
                    let tensor = outline.tensors.entry(name.clone()).or_insert_with(new);
                    if (tensor.kind, &tensor.shape) != (kind, &shape) {
                        let expected = format!("part of a {:?} tensor of shape {:?}", tensor.kind, tensor.shape);
                        let found = format!("of a {kind:?} tensor of shape {shape:?}");
                        return Err(source.damaged(&name, expected, found));
                    }
                    tensor.pieces.push(piece);
                }
            }
        }
        for (key, value) in plain {
            outline.values.insert(key.clone(), value.clone().into_entry());
        }
        for (key, tensor) in &mut outline.tensors {
            if let Some(row) = tensor.first_missing() {
                return Err(self.missing(of, key, row));
            }
        }
        Ok(outline)
    }

    fn missing(&self, name: &str, key: &str, row: i64) -> CheckpointError {
        let field = format!("row {row} of `{key}` of the part {name:?}");
        CheckpointError::damaged(&self.folder, field, "in the part of a rank", "in none")
    }

    /// Passes the bytes of some rows to `each`, in order.
    pub fn rows(
        &self,
        name: &str,
        key: &str,
        tensor: &Whole,
        rows: Range<i64>,
        mut each: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let row_bytes = tensor.row_bytes();
        let mut at = rows.start;
        while at < rows.end {
            let piece = tensor.piece(at).ok_or_else(|| self.missing(name, key, at))?;
            let end = rows.end.min(piece.first + piece.count);
            let bytes = (at - piece.first) as usize * row_bytes..(end - piece.first) as usize * row_bytes;
            let file = self.part(piece.rank, name)?.file.as_ref();
            let Some((file, pieces)) = file.and_then(|file| Some((file, file.pieces.as_ref()?))) else {
                return Err(self.missing(name, key, at));
            };
            let path = self.file(piece.rank, name);
            Source::open(&path, file)?.take_some(&piece.key, pieces, piece.place, bytes, &mut each)?;
            at = end;
        }
        Ok(())
    }

    /// Reads some of these parts to compare checksums: all ranks together, of which this is `rank` of so many, read all.
    pub fn verify(&self, parts: &BTreeSet<String>, rank: usize, ranks: usize) -> Result<(), CheckpointError> {
        for name in parts {
            for (key, tensor) in &self.outline(name)?.tensors {
                let rows = tensor.rows().end;
                let share = (rows / ranks as i64).saturating_add(1);
                let first = share.saturating_mul(rank as i64).min(rows);
                self.rows(name, key, tensor, first..first.saturating_add(share).min(rows), |_| Ok(()))?;
            }
        }
        Ok(())
    }

    /// What this rank's part loads of the whole state.
    pub fn read(&self, name: &str, part: &dyn Stateful) -> Result<StateDict, CheckpointError> {
        let Outline { values: mut state, tensors } = self.outline(name)?;
        let shapes: Shapes = tensors.iter().map(|(key, tensor)| (key.clone(), tensor.shape.clone())).collect();
        let part_error = |error| CheckpointError::Part { part: name.to_owned(), error };
        let wanted = part.rows_to_load(&state, &shapes).map_err(part_error)?;
        // Tied tensors share their memory.
        let mut read: BTreeMap<(Places<'_>, i64, i64), Tensor> = BTreeMap::new();
        for (key, rows) in wanted {
            let Some(tensor) = tensors.get(&key) else { return Err(part_error(StateError::Missing { key })) };
            let all = tensor.rows();
            if rows.start < 0 || rows.start > rows.end || rows.end > all.end {
                let (expected, found) = (format!("rows of {all:?}"), format!("asked for as {rows:?}"));
                return Err(part_error(StateError::Mismatch { key, expected, found }));
            }
            let place = (tensor.places(), rows.start, rows.end);
            let loaded = match read.get(&place) {
                Some(tied) => tied.shallow_clone(),
                None => self.tensor(name, &key, tensor, rows.clone())?,
            };
            read.insert(place, loaded.shallow_clone());
            match rows == all {
                true => state.insert(key, Entry::Tensor(loaded)),
                false => {
                    state.insert_rows(key, loaded, Rows { first: rows.start, whole: tensor.shape.clone() });
                }
            }
        }
        Ok(state)
    }

    /// Some rows of a tensor.
    fn tensor(&self, name: &str, key: &str, tensor: &Whole, rows: Range<i64>) -> Result<Tensor, CheckpointError> {
        let count = rows.end - rows.start;
        let mut buffer = HostBuffer::zeroed(count as usize * tensor.row_bytes(), false)?;
        let mut at = 0;
        self.rows(name, key, tensor, rows, |bytes| {
            buffer.as_mut_slice()[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
            Ok(())
        })?;
        let torch = |error| CheckpointError::Torch(tch::TchError::into(error));
        let (shape, length) = (vec![buffer.len() as i64], buffer.len());
        let bytes = buffer.into_tensor(Kind::Uint8, &shape).map_err(torch)?;
        let mut shape = tensor.shape.clone();
        if let Some(first) = shape.first_mut() {
            *first = count;
        }
        view(&bytes, 0, length, tensor.kind, &shape).map_err(torch)
    }
}
