//! Writes a checkpoint: under a temporary name first, synced, then renamed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::mpsc;
use std::thread;

use overdrive_ffi::HostBuffer;
use serde_json::Value;
use tch::Tensor;

use crate::checksums::Checksums;
use crate::error::{CheckpointError, Context};
use crate::first;
use crate::folder::{Folder, sync_folder};
use crate::layout::Layout;
use crate::manifest::{self, FORMAT, Manifest, Plain, Sharing};
use crate::names::tensors_file;
use crate::retention::Retention;
use crate::run::Run;

/// Bytes per write: small enough to stay in a core's cache between the copy, the checksum and the write.
const CHUNK: usize = 1 << 20;

/// Bytes per sync, which runs while more is written.
const SYNCED: usize = 64 << 20;

/// A checkpoint to be written.
pub(crate) struct Pending {
    pub step: u64,
    /// From this step on, existing checkpoints belong to an abandoned branch of the run.
    pub abandoned_from: u64,
    /// The run whose abandoned branch is set aside in other folders too; none where ranks have done so before.
    pub run: Option<Run>,
    pub ranks: Option<manifest::Rank>,
    pub metric: Option<manifest::Metric>,
    pub parts: Vec<PendingPart>,
    pub fields: BTreeMap<String, Value>,
}

pub(crate) struct PendingPart {
    pub name: String,
    pub header: Vec<u8>,
    pub pieces: Vec<(String, usize)>,
    pub values: BTreeMap<String, Plain>,
    pub ranks: Sharing,
    pub rows: BTreeMap<String, manifest::Rows>,
    pub body: Body,
}

/// The tensors of a part.
pub(crate) enum Body {
    /// A contiguous copy of all tensors in reusable memory: this many bytes of the buffer.
    Copied(HostBuffer, usize),
    /// The tensors themselves and their bytes; they do not change while they are written.
    Live(Vec<Tensor>, usize),
}

impl Pending {
    fn abandon_others(&self, from: u64) -> Result<(), CheckpointError> {
        self.run.as_ref().map_or(Ok(()), |run| run.abandon_others(from))
    }
}

impl PendingPart {
    /// A part whose state may differ by rank. With `copies`, its tensors are copied to `buffer`, or to new memory if it is
    /// too small; else it refers to them, for a write that the caller waits for.
    pub fn new(
        name: &str,
        layout: Layout,
        is_own: bool,
        copies: bool,
        buffer: Option<HostBuffer>,
    ) -> Result<Self, CheckpointError> {
        let Layout { header, tensors, pieces, bytes, values, rows, shard } = layout;
        let ranks = Sharing::of(shard, is_own);
        let body = match copies {
            true => copied(&tensors, bytes, buffer)?,
            false => Body::Live(tensors, bytes),
        };
        Ok(Self { name: name.to_owned(), header, pieces, values, ranks, rows, body })
    }
}

fn copied(tensors: &[Tensor], bytes: usize, buffer: Option<HostBuffer>) -> Result<Body, CheckpointError> {
    let mut buffer = match buffer.filter(|buffer| buffer.len() >= bytes) {
        Some(buffer) => buffer,
        None => HostBuffer::zeroed(bytes, tensors.iter().any(|tensor| tensor.device().is_cuda()))?,
    };
    let mut at = 0;
    for tensor in tensors {
        buffer.copy_from(at, tensor)?;
        at += tensor.numel() * tensor.kind().elt_size_in_bytes();
    }
    Ok(Body::Copied(buffer, bytes))
}

impl Body {
    fn bytes(&self) -> usize {
        match self {
            Self::Copied(_, bytes) | Self::Live(_, bytes) => *bytes,
        }
    }

    /// Passes all bytes to `each`, in chunks.
    fn chunks(&self, mut each: impl FnMut(&[u8]) -> Result<(), CheckpointError>) -> Result<(), CheckpointError> {
        match self {
            Self::Copied(buffer, bytes) => buffer.as_slice()[..*bytes].chunks(CHUNK).try_for_each(each),
            Self::Live(tensors, _) => {
                let mut staging = HostBuffer::zeroed(CHUNK, false)?;
                let mut filled = 0;
                for tensor in tensors {
                    let size = tensor.kind().elt_size_in_bytes();
                    let torch = |error| CheckpointError::Torch(tch::TchError::into(error));
                    let flat = tensor.f_contiguous().and_then(|tensor| tensor.f_view(-1)).map_err(torch)?;
                    let (mut start, end) = (0, tensor.numel());
                    while start < end {
                        let count = (end - start).min((CHUNK - filled) / size);
                        staging.copy_from(filled, &flat.f_narrow(0, start as i64, count as i64).map_err(torch)?)?;
                        (start, filled) = (start + count, filled + count * size);
                        if CHUNK - filled < size {
                            each(&staging.as_slice()[..filled])?;
                            filled = 0;
                        }
                    }
                }
                each(&staging.as_slice()[..filled])
            }
        }
    }
}

/// Writes a checkpoint. If it fails, earlier checkpoints are unchanged.
pub(crate) fn write(folder: &Folder, pending: &Pending) -> Result<(), CheckpointError> {
    let written = fill(&folder.writing(pending.step), pending)
        // Before the new checkpoint counts. Otherwise, after a crash in between, the checkpoint that the run came from
        // would not be the newest.
        .and_then(|()| folder.abandon(pending.abandoned_from, Some(pending.step)))
        .and_then(|()| pending.abandon_others(pending.abandoned_from))
        .and_then(|()| folder.publish(pending.step))
        .and_then(|()| first::end(folder))
        // One of the same step counted until now.
        .and_then(|()| pending.abandon_others(pending.step));
    if written.is_err() {
        // Removes what was written. The error to report is that of the write.
        let _ = fs::remove_dir_all(folder.writing(pending.step));
    }
    written
}

/// Removes the surplus checkpoints up to `upto`, after `written` is in place. Returns and logs those that could not be
/// removed.
pub(crate) fn remove_surplus(
    run: &Run,
    folder: &Folder,
    retention: &Retention,
    upto: u64,
    written: u64,
) -> Vec<CheckpointError> {
    let removed = match retention.surplus(run, folder, upto, written) {
        Ok(surplus) => folder.remove(&surplus),
        Err(error) => vec![error],
    };
    let not_removed = |error| CheckpointError::NotRemoved { step: written, error: Box::new(error) };
    removed.into_iter().map(not_removed).inspect(|warning| tracing::warn!("{warning}")).collect()
}

fn fill(aside: &Path, pending: &Pending) -> Result<(), CheckpointError> {
    if aside.exists() {
        fs::remove_dir_all(aside).when("remove it", aside)?;
    }
    fs::create_dir(aside).when("make the folder", aside)?;
    let mut parts = BTreeMap::new();
    for part in &pending.parts {
        let file = match part.pieces.is_empty() {
            true => None,
            false => Some(write_tensors(&tensors_file(aside, &part.name), part)?),
        };
        let (values, ranks, rows) = (part.values.clone(), part.ranks, part.rows.clone());
        parts.insert(part.name.clone(), manifest::Part { file, values, ranks, rows });
    }
    let path = aside.join(manifest::FILE);
    let written_by = concat!("overdrive-checkpoint ", env!("CARGO_PKG_VERSION")).to_owned();
    let manifest = Manifest {
        format: FORMAT,
        step: pending.step,
        written_by,
        ranks: pending.ranks,
        metric: pending.metric.clone(),
        parts,
        fields: pending.fields.clone(),
        checksum: 0,
    };
    let text = manifest.to_text().map_err(|error| CheckpointError::Field { name: "*".to_owned(), error })?;
    let action = || format!("write {} bytes", text.len());
    let mut file = File::create(&path).when("make the file", &path)?;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).when(action(), &path)?;
    sync_folder(aside)
}

fn write_tensors(path: &Path, part: &PendingPart) -> Result<manifest::File, CheckpointError> {
    let bytes = (part.header.len() + part.body.bytes()) as u64;
    let action = || format!("write its {bytes} bytes");
    let file = File::create(path).when("make the file", path)?;
    let mut checksums = Checksums::new(part.header.len(), &part.pieces);
    // A second thread syncs while this one copies; with one sync at the end, disk and processor would idle in turn.
    let synced = thread::scope(|scope| {
        let (more, requests) = mpsc::channel();
        let sync = || requests.into_iter().try_for_each(|()| file.sync_data());
        let syncing = thread::Builder::new().spawn_scoped(scope, sync).when("start a thread to sync it", path)?;
        let mut unsynced = 0;
        let mut put = |chunk: &[u8]| {
            checksums.update(chunk);
            (&file).write_all(chunk).when(action(), path)?;
            unsynced += chunk.len();
            if unsynced >= SYNCED {
                unsynced = 0;
                // Fails only if the thread has ended with an error, which is returned below.
                let _ = more.send(());
            }
            Ok(())
        };
        let written = put(&part.header).and_then(|()| part.body.chunks(put));
        drop(more);
        let synced = syncing.join().unwrap_or_else(|_| Err(io::Error::other("a thread panicked")));
        written.map(|()| synced)
    })?;
    synced.and_then(|()| file.sync_all()).when(action(), path)?;
    Ok(checksums.finish(bytes))
}
