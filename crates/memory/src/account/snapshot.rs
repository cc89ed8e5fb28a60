//! A record in the form of PyTorch's memory visualiser.

use std::io::Write;
use std::path::Path;

use overdrive_ffi::allocations::{Block, Caller, Category, Moment};
use serde::Serialize;
use tch::Device;

use super::record::{MemoryRecord, cuda_index};
use crate::error::MemoryError;

/// What `torch.cuda.memory._dump_snapshot` writes, as far as readers need it.
#[derive(Serialize)]
struct Snapshot {
    segments: Vec<Segment>,
    device_traces: Vec<Vec<Event>>,
}

/// Memory that is in use at the end. Here each block has a segment of its own.
#[derive(Serialize)]
struct Segment {
    device: usize,
    address: i64,
    total_size: i64,
    allocated_size: i64,
    active_size: i64,
    requested_size: i64,
    stream: i64,
    segment_type: &'static str,
    segment_pool_id: (i64, i64),
    is_expandable: bool,
    frames: Vec<Frame>,
    blocks: Vec<LiveBlock>,
}

#[derive(Serialize)]
struct LiveBlock {
    address: i64,
    size: i64,
    requested_size: i64,
    state: &'static str,
    frames: Vec<Frame>,
}

#[derive(Serialize)]
struct Event {
    action: &'static str,
    addr: i64,
    size: i64,
    stream: i64,
    time_us: i64,
    frames: Vec<Frame>,
    /// Colours and a legend in the timeline.
    category: &'static str,
    user_metadata: &'static str,
}

#[derive(Clone, Serialize)]
struct Frame {
    filename: String,
    line: i64,
    name: String,
}

impl MemoryRecord {
    /// Writes what was allocated and freed for PyTorch's memory visualiser, <https://pytorch.org/memory_viz>, and for
    /// `python -m torch.cuda._memory_viz`. The host is the last device.
    ///
    /// Lines of the program are in it if the recorder noted callers. Finding one takes milliseconds a block.
    ///
    /// # Errors
    /// When the file cannot be written; one that is there stays as it is then.
    ///
    /// # Source
    /// `torch.cuda.memory._dump_snapshot`
    pub fn save_snapshot(&self, path: impl AsRef<Path>) -> Result<(), MemoryError> {
        let path = path.as_ref();
        let write = || {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let mut file = tempfile::NamedTempFile::new_in(folder.unwrap_or(Path::new(".")))?;
            let pickle = serde_pickle::to_vec(&self.snapshot(), serde_pickle::SerOptions::new());
            file.write_all(&pickle.map_err(std::io::Error::other)?)?;
            file.persist(path).map_err(|error| error.error)
        };
        write().map(drop).map_err(|error| MemoryError::Disk { path: path.to_path_buf(), source: error.into() })
    }

    fn snapshot(&self) -> Snapshot {
        let devices = self.devices();
        // CUDA's keep their numbers.
        let host = devices.iter().filter_map(|device| cuda_index(*device)).max().map_or(0, |last| last + 1);
        let number = |device| cuda_index(device).unwrap_or(host);
        let frames: Vec<_> = self.history.blocks.iter().map(frames).collect();
        let mut traces = Vec::new();
        traces.resize_with(host + 1, Vec::new);
        for device in devices {
            traces[number(device)] = self.trace(device, &frames);
        }
        let alive = self.history.blocks.iter().zip(&frames).filter(|(block, _)| block.freed.is_none());
        let segments = alive.map(|(block, frames)| segment(number(block.device), block, frames)).collect();
        Snapshot { segments, device_traces: traces }
    }

    fn trace(&self, device: Device, frames: &[Vec<Frame>]) -> Vec<Event> {
        let time_us = |at: Moment| self.began_us + signed(at.nanoseconds / 1000);
        let mut trace = Vec::new();
        for change in self.changes(device) {
            // Readers look for a block in its segment.
            let actions: &[_] = match change.is_freed {
                true => &["free_requested", "free_completed", "segment_free"],
                false => &["segment_alloc", "alloc"],
            };
            let name = name(change.category);
            trace.extend(actions.iter().map(|&action| Event {
                action,
                addr: signed(self.history.blocks[change.block].address),
                size: signed(change.bytes),
                stream: 0,
                time_us: time_us(change.at),
                frames: frames[change.block].clone(),
                category: name,
                user_metadata: name,
            }));
        }
        // As PyTorch ends a trace. The visualiser fails where categories are given and this one is not among them.
        let (time_us, size) = (time_us(self.history.end), signed(self.in_use(device)));
        let (category, user_metadata) = ("unknown", "");
        let frames = Vec::new();
        trace.push(Event { action: "snapshot", addr: 0, size, stream: 0, time_us, frames, category, user_metadata });
        trace
    }

    /// Bytes of a device at the end.
    fn in_use(&self, device: Device) -> u64 {
        let alive = self.history.blocks.iter().filter(|block| block.device == device && block.freed.is_none());
        alive.map(|block| block.bytes).sum()
    }
}

fn segment(device: usize, block: &Block, frames: &[Frame]) -> Segment {
    let (size, address) = (signed(block.bytes), signed(block.address));
    let live = LiveBlock { address, size, requested_size: size, state: "active_allocated", frames: frames.to_vec() };
    Segment {
        device,
        address,
        total_size: size,
        allocated_size: size,
        active_size: size,
        requested_size: size,
        stream: 0,
        segment_type: if size < 1 << 20 { "small" } else { "large" },
        segment_pool_id: (0, 0),
        is_expandable: false,
        frames: Vec::new(),
        blocks: vec![live],
    }
}

/// The visualiser's reader takes no unsigned number of 64 bits.
fn signed(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// As PyTorch's profiler names it.
fn name(category: Category) -> &'static str {
    match category {
        Category::Parameter => "parameter",
        Category::Gradient => "gradient",
        Category::OptimizerState => "optimizer_state",
        Category::Input => "input",
        Category::Activation => "activation",
        Category::Temporary => "temporary",
    }
}

fn frames(block: &Block) -> Vec<Frame> {
    let frame = |Caller { function, file, line }| Frame { filename: file, line, name: function };
    block.caller().map(frame).into_iter().collect()
}
