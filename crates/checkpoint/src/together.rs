//! A checkpoint that several ranks have saved together, read by others: each reads the rows that it needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::safetensors::kind_of;
use overdrive_core::{Entry, Rows, Shapes, StateDict, Stateful};
use overdrive_ffi::HostBuffer;
use safetensors::tensor::TensorInfo;
use tch::Kind;

use crate::error::{CheckpointError, Context};
use crate::folder::Folder;
use crate::manifest::{self, Manifest, Part, Plain, Rank, Sharing};
use crate::read::{Source, names_of, view};

/// The folder of a rank.
pub(crate) fn rank_folder(root: &Path, rank: usize) -> PathBuf {
    root.join(format!("rank-{rank}"))
}

/// The ranks that have folders here, with the steps of their checkpoints.
fn ranks_in(root: &Path) -> Result<BTreeMap<usize, Vec<u64>>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
        entries => entries.when("list it", root)?,
    };
    let mut ranks = BTreeMap::new();
    for entry in entries {
        let name = entry.when("list it", root)?.file_name();
        let rank = name.to_str().and_then(|name| name.strip_prefix("rank-")?.parse::<usize>().ok());
        if let Some(rank) = rank {
            ranks.insert(rank, steps_of(&rank_folder(root, rank))?);
        }
    }
    Ok(ranks)
}

/// Whether ranks from `ranks` on have checkpoints in this folder.
pub(crate) fn has_ranks_from(root: &Path, ranks: usize) -> Result<bool, CheckpointError> {
    Ok(ranks_in(root)?.range(ranks..).any(|(_, steps)| !steps.is_empty()))
}

/// If the only checkpoint is one that was never completed, how many ranks were to: all have the folders that they made when
/// the run began, and some none in it.
pub(crate) fn unfinished(root: &Path) -> Result<Option<usize>, CheckpointError> {
    let ranks = ranks_in(root)?;
    let mut saved = ranks.iter().filter_map(|(&rank, steps)| Some((rank, *steps.last()?)));
    let Some((rank, step)) = saved.next() else { return Ok(None) };
    let manifest = Manifest::read(&Folder::reading(&rank_folder(root, rank)).step(step))?;
    let count = manifest.ranks.map_or(0, |mark| mark.world_size);
    let is_first = (0..count).all(|rank| ranks.get(&rank).is_some_and(|steps| steps.len() < 2));
    let lacks = (0..count).any(|rank| ranks.get(&rank).is_some_and(Vec::is_empty));
    Ok((is_first && lacks).then_some(count))
}

/// The steps in a folder, which may not exist.
pub(crate) fn steps_of(folder: &Path) -> Result<Vec<u64>, CheckpointError> {
    match folder.is_dir() {
        true => Folder::reading(folder).steps(),
        false => Ok(Vec::new()),
    }
}

/// The steps of which there may be checkpoints of all ranks, or of a single process.
pub(crate) fn steps(root: &Path) -> Result<Vec<u64>, CheckpointError> {
    let mut steps = steps_of(root)?;
    steps.extend(steps_of(&rank_folder(root, 0))?);
    steps.sort_unstable();
    steps.dedup();
    Ok(steps)
}

/// The checkpoints of all ranks of one step.
pub(crate) struct Together {
    pub folder: PathBuf,
    pub step: u64,
    /// Each rank's.
    saved: Vec<(PathBuf, Manifest)>,
}

/// A tensor of the whole state.
pub(crate) struct Whole {
    pub kind: Kind,
    pub shape: Vec<i64>,
    /// Where its rows are, by the first.
    pieces: Vec<Piece>,
}

/// Some rows of a tensor in a rank's file.
struct Piece {
    rank: usize,
    /// The tensor's name in the file, which another name may be tied to.
    key: String,
    /// Its first byte in the file, and how many.
    place: (u64, usize),
    first: i64,
    count: i64,
}

impl Whole {
    fn row_bytes(&self) -> usize {
        self.shape.iter().skip(1).product::<i64>() as usize * self.kind.elt_size_in_bytes()
    }
}

/// The whole state of a part.
pub(crate) struct Outline {
    pub values: StateDict,
    pub tensors: BTreeMap<String, Whole>,
}

impl Outline {
    /// Names that are tied to others, each with the one under which the tensor is kept.
    pub fn tied(&self) -> BTreeMap<&str, &str> {
        let (mut kept, mut tied) = (BTreeMap::new(), BTreeMap::new());
        for (name, tensor) in &self.tensors {
            let Some(first) = tensor.pieces.first() else { continue };
            let name = name.as_str();
            let before = *kept.entry((first.rank, &first.key)).or_insert(name);
            if before != name {
                tied.insert(name, before);
            }
        }
        tied
    }
}

impl Together {
    /// Finds the step's checkpoints of all ranks below `root`; those of a single process are in `root` itself.
    pub fn open(root: &Path, step: u64) -> Result<Self, CheckpointError> {
        let read = |folder: &Path| {
            let folder = Folder::reading(folder).step(step);
            let manifest = Manifest::read(&folder)?;
            match manifest.step == step {
                true => Ok((folder, manifest)),
                false => Err(CheckpointError::damaged(&folder.join(manifest::FILE), "step", step, manifest.step)),
            }
        };
        let first = rank_folder(root, 0);
        let is_alone = !Folder::reading(&first).step(step).exists() && Folder::reading(root).step(step).exists();
        let first = read(if is_alone { root } else { &first })?;
        let Some(mark) = first.1.ranks else {
            return Ok(Self { folder: first.0.clone(), step, saved: vec![first] });
        };
        let mut saved = vec![first];
        for rank in 1..mark.world_size {
            saved.push(read(&rank_folder(root, rank))?);
        }
        for (rank, (folder, manifest)) in saved.iter().enumerate() {
            let expected = Rank { rank, ..mark };
            let found = manifest.ranks;
            if !found.is_some_and(|found| found.is(&expected)) {
                let found = found.map_or("a single process".to_owned(), |found| found.to_string());
                return Err(CheckpointError::Rank { path: folder.clone(), expected: expected.to_string(), found });
            }
            if found != Some(expected) {
                return Err(CheckpointError::OtherRun { folder: root.to_path_buf(), step });
            }
        }
        Ok(Self { folder: saved[0].0.clone(), step, saved })
    }

    pub fn ranks(&self) -> usize {
        self.saved.len()
    }

    /// The number by which those of another run are told.
    pub fn mark(&self) -> u64 {
        self.first().ranks.map_or(0, |mark| mark.together)
    }

    pub fn first(&self) -> &Manifest {
        &self.saved[0].1
    }

    /// The checkpoint of a rank.
    pub fn of_rank(&self, rank: usize) -> Option<(&Path, &Manifest)> {
        self.saved.get(rank).map(|(folder, manifest)| (folder.as_path(), manifest))
    }

    /// The names of the parts that other ranks load; `anew`: those that they do not, if each rank has saved its own.
    pub fn parts(&self, anew: &BTreeSet<String>) -> Result<BTreeSet<String>, CheckpointError> {
        let mut names = BTreeSet::new();
        for (name, part) in &self.first().parts {
            match part.ranks {
                Sharing::Own if anew.contains(name) => {}
                Sharing::Own => {
                    return Err(CheckpointError::OtherRanks { part: name.clone(), saved: self.ranks() });
                }
                Sharing::Same | Sharing::Shard { .. } => drop(names.insert(name.clone())),
            }
        }
        Ok(names)
    }

    /// The ranks that have the part, if it is sharded, or else the first one; each with its manifest's entry.
    fn owners(&self, name: &str) -> Result<Vec<(usize, &Part)>, CheckpointError> {
        let mut owners = Vec::new();
        for (rank, (folder, manifest)) in self.saved.iter().enumerate() {
            let Some(part) = manifest.parts.get(name) else {
                let found = manifest.parts.keys().cloned().collect();
                return Err(CheckpointError::Parts { path: folder.clone(), expected: vec![name.to_owned()], found });
            };
            owners.push((rank, part));
            if part.ranks == Sharing::Same {
                break;
            }
        }
        Ok(owners)
    }

    fn file(&self, rank: usize, name: &str) -> PathBuf {
        self.saved[rank].0.join(format!("{name}.safetensors"))
    }

    /// What the whole state of a part has, without reading its tensors.
    pub fn outline(&self, of: &str) -> Result<Outline, CheckpointError> {
        let mut outline = Outline { values: StateDict::new(), tensors: BTreeMap::new() };
        // The checksums of tensors that are whole, and so the same where several ranks have them.
        let mut whole: BTreeMap<String, String> = BTreeMap::new();
        let mut plain: BTreeMap<&String, &Plain> = BTreeMap::new();
        // Slow weights of a wrapper around rows, say.
        let differs = || CheckpointError::OtherRanks { part: of.to_owned(), saved: self.ranks() };
        for (rank, part) in self.owners(of)? {
            for (key, value) in &part.values {
                if *plain.entry(key).or_insert(value) != value {
                    return Err(differs());
                }
            }
            let Some(expected) = &part.file else { continue };
            let path = self.file(rank, of);
            let mut source = Source::open(&path, expected)?;
            let Some(pieces) = &expected.pieces else {
                return Err(source.damaged("pieces", "checksums of single tensors", "none"));
            };
            let (header, start) = source.checked_header(pieces)?;
            for (key, names) in names_of(&header, &|_| true) {
                let Some(info) = header.info(&key) else { continue };
                for name in names {
                    let rows = part.rows.get(&name);
                    if rows.is_none() {
                        let crc32 = pieces.tensors.get(&key).cloned().unwrap_or_default();
                        if *whole.entry(name.clone()).or_insert_with(|| crc32.clone()) != crc32 {
                            return Err(differs());
                        }
                    }
                    let (kind, shape, piece) = piece(&source, rank, &key, info, start, rows)?;
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
        outline.tensors.values_mut().for_each(|tensor| tensor.pieces.sort_by_key(|piece| piece.first));
        Ok(outline)
    }

    /// Passes the bytes of some rows to `each`, in order.
    pub fn rows(
        &self,
        name: &str,
        key: &str,
        tensor: &Whole,
        rows: std::ops::Range<i64>,
        mut each: impl FnMut(&[u8]) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let row_bytes = tensor.row_bytes();
        let mut at = rows.start;
        while at < rows.end {
            let has = |piece: &&Piece| (piece.first..piece.first + piece.count).contains(&at);
            let Some(piece) = tensor.pieces.iter().find(has) else {
                let field = format!("row {at} of `{key}` of the part {name:?}");
                return Err(CheckpointError::damaged(&self.folder, field, "in the part of a rank", "in none"));
            };
            let end = rows.end.min(piece.first + piece.count);
            let bytes = (at - piece.first) as usize * row_bytes..(end - piece.first) as usize * row_bytes;
            let path = self.file(piece.rank, name);
            if let Some(file) = self.saved[piece.rank].1.parts.get(name).and_then(|part| part.file.as_ref())
                && let Some(pieces) = &file.pieces
            {
                Source::open(&path, file)?.take_some(&piece.key, pieces, piece.place, bytes, &mut each)?;
            }
            at = end;
        }
        Ok(())
    }

    /// What this rank's part loads of the whole state.
    pub fn read(&self, name: &str, part: &dyn Stateful) -> Result<StateDict, CheckpointError> {
        let outline = self.outline(name)?;
        let shapes: Shapes = outline.tensors.iter().map(|(key, tensor)| (key.clone(), tensor.shape.clone())).collect();
        let part_error = |error| CheckpointError::Part { part: name.to_owned(), error };
        let wanted = part.rows_to_load(&outline.values, &shapes).map_err(part_error)?;
        let mut state = outline.values;
        for (key, rows) in wanted {
            let Some(tensor) = outline.tensors.get(&key) else { continue };
            let all = Rows::all(&tensor.shape);
            if rows.start < 0 || rows.start > rows.end || rows.end > all.end {
                continue;
            }
            let count = rows.end - rows.start;
            let mut buffer = HostBuffer::zeroed(count as usize * tensor.row_bytes(), false)?;
            let mut at = 0;
            self.rows(name, &key, tensor, rows.clone(), |bytes| {
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
            let rows_there = view(&bytes, 0, length, tensor.kind, &shape).map_err(torch)?;
            match rows == all {
                true => state.insert(key, Entry::Tensor(rows_there)),
                false => {
                    let rows = Rows { first: rows.start, whole: tensor.shape.clone() };
                    state.insert_rows(key, rows_there, rows);
                }
            }
        }
        Ok(state)
    }
}

/// Of a tensor in a rank's file: its dtype, the whole one's shape, and where these rows of it are.
fn piece(
    source: &Source<'_>,
    rank: usize,
    key: &str,
    info: &TensorInfo,
    start: u64,
    rows: Option<&manifest::Rows>,
) -> Result<(Kind, Vec<i64>, Piece), CheckpointError> {
    let kind = kind_of(info.dtype);
    let kind = kind.ok_or_else(|| source.damaged(key, "a dtype that tch has", format!("{:?}", info.dtype)))?;
    let shape = overdrive_core::safetensors::sizes_of(info);
    let own = shape.ok_or_else(|| source.damaged(key, "a shape below 2^63", format!("{:?}", info.shape)))?;
    let count = Rows::all(&own).end;
    let (first, whole) = rows.map_or((0, &own), |rows| (rows.first, &rows.whole));
    let fits = match rows {
        Some(rows) => {
            let all = rows.whole.first().copied().unwrap_or(-1);
            own.len() == rows.whole.len()
                && own[1..] == rows.whole[1..]
                && first >= 0
                && first.checked_add(count).is_some_and(|end| end <= all)
        }
        None => true,
    };
    if !fits {
        let expected = format!("rows from {first} on of a tensor of shape {whole:?}");
        return Err(source.damaged(key, expected, format!("a tensor of shape {own:?}")));
    }
    let (begin, end) = info.data_offsets;
    let place = (start + begin as u64, end - begin);
    Ok((kind, whole.clone(), Piece { rank, key: key.to_owned(), place, first, count }))
}
