//! What memory is used for over time.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use overdrive_core::{Entry, Module, Stateful};
use overdrive_ffi::allocations::{AllocationWatch, Block, Category, History, Moment};
use tch::{Device, Tensor};

use crate::error::MemoryError;

/// Records what memory is allocated for, until [`end`](Self::end): one step, say.
///
/// What a tensor is used for has to be said, by one of the `tag` functions, while it is in use; most simply at the end
/// of the step. For the rest it is told by time: what is in use when a backward pass begins counts as activations, and
/// what a backward pass has allocated and left as gradients.
///
/// Memory of the whole process is seen, on the host (but for pinned memory) and on CUDA devices. Tensors that are older
/// are seen if they are tagged, or freed meanwhile.
#[derive(Debug)]
pub struct MemoryRecorder {
    watch: AllocationWatch,
    began: SystemTime,
}

impl MemoryRecorder {
    /// Begins.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Syncs
    /// No. Where there is a CUDA device, CUDA is initialised.
    ///
    /// # Source
    /// `torch.cuda.memory._record_memory_history`, which sees devices only
    pub fn begin() -> Result<Self, MemoryError> {
        Self::new(false)
    }

    /// [`begin`](Self::begin), and notes which line of the program had each piece of memory allocated, for
    /// [`MemoryRecord::save_snapshot`]. Each allocation then takes a walk of the stack.
    ///
    /// # Errors
    /// When memory runs out.
    pub fn with_callers() -> Result<Self, MemoryError> {
        Self::new(true)
    }

    fn new(with_callers: bool) -> Result<Self, MemoryError> {
        Ok(Self { watch: AllocationWatch::begin(with_callers)?, began: SystemTime::now() })
    }

    /// Says what tensors are used for.
    ///
    /// # Errors
    /// For a tensor without memory of its own.
    pub fn tag<'t>(
        &self,
        category: Category,
        tensors: impl IntoIterator<Item = &'t Tensor>,
    ) -> Result<(), MemoryError> {
        for tensor in tensors.into_iter().filter(|tensor| tensor.defined()) {
            if tensor.is_sparse() {
                let parts = [tensor.f_internal_indices()?, tensor.f_internal_values()?];
                parts.iter().try_for_each(|part| self.watch.tag(part, category))?;
            } else {
                self.watch.tag(tensor, category)?;
            }
        }
        Ok(())
    }

    /// Says that parameters and buffers are a module's, and what gradients there are.
    ///
    /// # Errors
    /// As [`tag`](Self::tag).
    pub fn tag_module(&self, module: &impl Module) -> Result<(), MemoryError> {
        for parameter in module.named_parameters() {
            self.tag(Category::Parameter, [parameter.tensor()])?;
            self.tag(Category::Gradient, [&parameter.tensor().grad()])?;
        }
        module.named_buffers().iter().try_for_each(|(_, buffer)| self.tag(Category::Parameter, [buffer]))
    }

    /// Says that an optimizer's state is its.
    ///
    /// # Errors
    /// As [`tag`](Self::tag); when the state cannot be read.
    pub fn tag_state(&self, optimizer: &impl Stateful) -> Result<(), MemoryError> {
        let state = optimizer.state_dict()?;
        let tensors = state.iter().filter_map(|(_, entry)| match entry {
            Entry::Tensor(tensor) => Some(tensor),
            _ => None,
        });
        self.tag(Category::OptimizerState, tensors)
    }

    /// Ends.
    pub fn end(self) -> MemoryRecord {
        let since_1970 = self.began.duration_since(UNIX_EPOCH).unwrap_or_default();
        let began_us = i64::try_from(since_1970.as_micros()).unwrap_or_default();
        MemoryRecord { history: self.watch.end(), began_us }
    }
}

/// What memory was used for while a [`MemoryRecorder`] looked.
#[derive(Clone, Debug)]
pub struct MemoryRecord {
    pub(super) history: History,
    /// When it began, in microseconds since 1970.
    pub(super) began_us: i64,
}

/// An allocation or a free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// The block's number in the history.
    pub(super) block: usize,
    pub(super) at: Moment,
    pub(super) is_freed: bool,
    pub(super) bytes: u64,
    pub(super) category: Category,
}

/// Bytes in use, by what for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use(pub(super) [u64; Category::ALL.len()]);

impl Use {
    /// For one purpose.
    pub fn of(&self, category: Category) -> u64 {
        self.0[category as usize]
    }

    /// For all.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

impl MemoryRecord {
    /// The devices on which memory was allocated.
    pub fn devices(&self) -> Vec<Device> {
        let indices: BTreeSet<_> = self.history.blocks.iter().map(|block| cuda_index(block.device)).collect();
        indices.into_iter().map(|index| index.map_or(Device::Cpu, Device::Cuda)).collect()
    }

    /// The bytes in use after each allocation and each free, with its time in nanoseconds since the beginning.
    pub fn timeline(&self, device: Device) -> Vec<(u64, Use)> {
        let mut now = Use::default();
        let after = |change: Change| {
            let bytes = &mut now.0[change.category as usize];
            *bytes = if change.is_freed { bytes.saturating_sub(change.bytes) } else { *bytes + change.bytes };
            (change.at.nanoseconds, now)
        };
        self.changes(device).into_iter().map(after).collect()
    }

    /// The first moment at which most was in use; zeros if nothing was.
    pub fn peak(&self, device: Device) -> Use {
        let uses = self.timeline(device).into_iter().map(|(_, it)| it);
        uses.reduce(|most, it| if it.total() > most.total() { it } else { most }).unwrap_or_default()
    }

    /// Allocations and frees, in their order; a block that is older than the record comes first.
    pub(super) fn changes(&self, device: Device) -> Vec<Change> {
        let blocks = self.history.blocks.iter().enumerate().filter(|(_, block)| block.device == device);
        let mut changes: Vec<_> = blocks
            .flat_map(|(number, block)| {
                let change = Change {
                    block: number,
                    at: block.allocated,
                    is_freed: false,
                    bytes: block.bytes,
                    category: self.category(block),
                };
                let freed = block.freed.map(|at| Change { at, is_freed: true, ..change });
                [Some(change), freed].into_iter().flatten()
            })
            .collect();
        changes.sort_by_key(|change| (change.at.event, change.is_freed));
        changes
    }

    /// What a piece of memory was used for.
    pub(super) fn category(&self, block: &Block) -> Category {
        let end = |pass: &(_, Option<_>)| pass.1.unwrap_or(self.history.end);
        let mut passes = self.history.passes.iter();
        block.tag.unwrap_or_else(|| {
            if passes.clone().any(|pass| block.is_alive_at(pass.0.event)) {
                return Category::Activation;
            }
            let is_left = passes.any(|pass| {
                block.allocated > pass.0 && block.allocated <= end(pass) && block.is_alive_at(end(pass).event)
            });
            if is_left { Category::Gradient } else { Category::Temporary }
        })
    }
}

/// As in messages.
pub(super) fn device_name(device: Device) -> String {
    cuda_index(device).map_or_else(|| "the host".to_owned(), |index| format!("CUDA device {index}"))
}

/// None for the host.
pub(super) fn cuda_index(device: Device) -> Option<usize> {
    match device {
        Device::Cuda(index) => Some(index),
        _ => None,
    }
}
