//! One call of a checkpointed function: what it would have saved, by number.

use std::any::TypeId;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::ThreadId;

use overdrive_core::is_recomputing;
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::keep::Keeper;
use overdrive_ffi::saved_tensors::{
    Hooks, Packed, SavedTensor, backward_pass, keep_for_pass, set_version, version, without_history,
};
use overdrive_ffi::{Error as TorchError, Leaves};
use tch::{Device, Kind, Tensor};

use super::budget::Measure;
use super::checksum::checksum;
use super::context::Context;
use super::{ActivationCheckpoint, DeterminismCheck};
use crate::error::MemoryError;

/// Runs the function again.
type Again = Box<dyn Fn(Vec<Tensor>) -> Result<(), BoxError> + Send + Sync>;

/// One call of a function. The graph keeps it as long as it keeps a tensor that the call has saved.
pub(super) struct Frame {
    pub(super) scope: String,
    pub(super) context: Context,
    pub(super) again: Again,
    pub(super) early_stop: bool,
    /// The results that are kept.
    pub(super) keeper: Option<Keeper>,
    /// What measures the first run.
    measure: Option<Arc<Measure>>,
    check: DeterminismCheck,
    /// What it uses, also where no operator saves it.
    leaves: Leaves,
    inputs: Vec<SavedTensor>,
    /// How often the inputs had been changed in place.
    versions: Vec<i64>,
    /// Where the inputs are.
    devices: Vec<Device>,
    slots: Mutex<Vec<Slot>>,
    is_forward_done: AtomicBool,
    /// Of the first run.
    thread: ThreadId,
    /// Whether the first run is within another function's second run.
    is_made_again: bool,
}

/// A tensor that the function has saved, without its values.
struct Slot {
    about: About,
    /// Whether the graph still needs it.
    is_alive: bool,
    /// What backward passes have computed again and not used yet.
    again: Vec<SavedAgain>,
}

/// A tensor as it was saved again, for one pass.
struct SavedAgain {
    pass: Pass,
    tensor: Tensor,
    version: i64,
}

/// What is compared when the function runs again.
#[derive(Clone, Debug, PartialEq)]
struct About {
    shape: Vec<i64>,
    kind: Kind,
    device: Device,
    version: i64,
    /// Only if they are compared.
    values: Option<i64>,
}

impl About {
    fn of(tensor: &Tensor, check: DeterminismCheck) -> Result<Self, TorchError> {
        let values = if check == DeterminismCheck::Values { checksum(tensor)? } else { None };
        let (shape, kind, device, version) = (tensor.size(), tensor.kind(), tensor.device(), version(tensor));
        Ok(Self { shape, kind, device, version, values })
    }
}

/// A backward pass. A saved tensor that is asked for outside of one counts as a pass of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pass(i64);

impl Pass {
    fn now() -> Self {
        static LOOKS: AtomicI64 = AtomicI64::new(-1);
        Self(backward_pass().unwrap_or_else(|| LOOKS.fetch_sub(1, Ordering::Relaxed)))
    }
}

impl Frame {
    pub(super) fn new(
        scope: String,
        options: &ActivationCheckpoint,
        context: Context,
        inputs: &[Tensor],
        function: TypeId,
        again: impl Fn(Vec<Tensor>) -> Result<(), BoxError> + Send + Sync + 'static,
    ) -> Result<Self, TorchError> {
        let (keeper, measure) = options.policy.keeper(function, inputs)?;
        Ok(Self {
            scope,
            context,
            again: Box::new(again),
            early_stop: options.early_stop,
            keeper,
            measure,
            check: options.determinism_check,
            leaves: Leaves::begin()?,
            versions: inputs.iter().map(version).collect(),
            devices: inputs.iter().filter(|input| input.defined()).map(Tensor::device).collect(),
            inputs: inputs.iter().map(SavedTensor::new).collect::<Result<_, _>>()?,
            slots: Mutex::default(),
            is_forward_done: AtomicBool::new(false),
            thread: std::thread::current().id(),
            is_made_again: is_recomputing(),
        })
    }

    pub(super) fn forward_is_done(&self, is_ok: bool) {
        if let Some(measure) = self.measure.as_ref().filter(|_| is_ok) {
            measure.finish();
        }
        if let Some(keeper) = &self.keeper {
            if !self.early_stop {
                keeper.need();
            }
            keeper.finish();
        }
        self.is_forward_done.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_forward_done(&self) -> bool {
        self.is_forward_done.load(Ordering::SeqCst)
    }

    /// What a second run would compute otherwise, if there is something.
    pub(super) fn changed_leaf(&self) -> Result<Option<String>, TorchError> {
        if self.check == DeterminismCheck::None {
            return Ok(None);
        }
        let leaf = self.leaves.changed()?;
        Ok(leaf.map(|leaf| {
            let (kind, shape) = (leaf.kind(), leaf.size());
            format!("a {kind:?} leaf of shape {shape:?} that it uses was changed in place since it ran")
        }))
    }

    /// The inputs as they were.
    pub(super) fn inputs(&self) -> Result<Vec<Tensor>, TorchError> {
        let again = |(input, of_first): (&SavedTensor, &i64)| {
            let tensor = input.unpack()?;
            // A copy that hooks around the function have made counts otherwise.
            if version(&tensor) != *of_first {
                set_version(&tensor, *of_first)?;
            }
            Ok(tensor)
        };
        self.inputs.iter().zip(&self.versions).map(again).collect()
    }

    /// Whether the function may have drawn from the generator of this device: it has inputs or saved tensors there.
    /// Generators of other devices are left alone: another thread may be drawing from them.
    pub(super) fn uses(&self, device: Device) -> bool {
        !device.is_cuda()
            || self.devices.contains(&device)
            || self.slots().iter().any(|slot| slot.about.device == device)
    }

    fn slots(&self) -> MutexGuard<'_, Vec<Slot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many tensors the function has saved so far.
    pub(super) fn len(&self) -> usize {
        self.slots().len()
    }

    /// Takes the tensor with this number as it was computed again; returns how it differs, if it does.
    pub(super) fn fill(&self, number: usize, pass: Pass, tensor: &Tensor) -> Result<Option<String>, TorchError> {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(number) else { return Ok(None) };
        let found = About::of(tensor, self.check)?;
        if self.check != DeterminismCheck::None && found != slot.about {
            let values = if found.values != slot.about.values { " (with other values)" } else { "" };
            return Ok(Some(format!("saved tensor {number} was {}, and then {found}{values}", slot.about)));
        }
        if slot.is_alive {
            slot.again.push(SavedAgain { pass, tensor: without_history(tensor)?, version: found.version });
        }
        Ok(None)
    }

    pub(super) fn changed(&self, difference: String) -> BoxError {
        MemoryError::Changed { scope: self.scope.clone(), difference }.into()
    }

    /// The tensor with this number, if this pass has computed it again. It is handed out once.
    fn take(&self, number: usize, pass: Pass) -> Result<Option<Tensor>, BoxError> {
        let mut slots = self.slots();
        let Some(slot) = slots.get_mut(number) else { return Ok(None) };
        let Some(place) = slot.again.iter().position(|it| it.pass == pass) else { return Ok(None) };
        let SavedAgain { tensor, version: saved, .. } = slot.again.swap_remove(place);
        match version(&tensor) {
            now if now == saved => Ok(Some(tensor)),
            _ => Err(self.changed(format!("saved tensor {number} was changed in place afterwards"))),
        }
    }

    /// Whether this thread may run the function again. While it runs, another thread would wait for it forever: the
    /// thread that runs it waits for the backward pass.
    pub(super) fn may_run(&self) -> bool {
        let is_running = !self.is_forward_done() || self.is_made_again;
        !is_running || self.thread == std::thread::current().id()
    }
}

impl std::fmt::Display for About {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { shape, kind, device, version, .. } = self;
        write!(f, "{kind:?} {shape:?} on {device:?}, {version} times changed in place")
    }
}

/// The first run, until it ends in whatever way. The frame holds its own graph meanwhile.
pub(super) struct FirstRun<'f>(pub(super) &'f Frame);

impl Drop for FirstRun<'_> {
    fn drop(&mut self) {
        self.0.leaves.finish();
    }
}

/// The hooks of the first run.
pub(super) struct Forward(pub(super) Arc<Frame>);

impl Hooks for Forward {
    fn pack(&self, tensor: &Tensor) -> Result<Option<Box<dyn Packed>>, BoxError> {
        if let Some(keeper) = &self.0.keeper {
            keeper.need();
        }
        if let Some(measure) = &self.0.measure {
            measure.saves(tensor);
        }
        self.0.leaves.see(tensor)?;
        let about = About::of(tensor, self.0.check)?;
        let mut slots = self.0.slots();
        slots.push(Slot { about, is_alive: true, again: Vec::new() });
        Ok(Some(Box::new(Number { frame: Arc::clone(&self.0), number: slots.len() - 1 })))
    }
}

/// In the graph, in place of a tensor.
struct Number {
    frame: Arc<Frame>,
    number: usize,
}

impl Packed for Number {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        let (frame, pass) = (&self.frame, Pass::now());
        if let Some(tensor) = frame.take(self.number, pass)? {
            return Ok(tensor);
        }
        let unused = Unused { frame: Arc::downgrade(frame), pass };
        frame.recompute(pass)?;
        let tensor = frame.take(self.number, pass)?;
        keep_for_pass(unused)?;
        tensor.ok_or_else(|| frame.changed(format!("it did not save tensor {} again", self.number)))
    }
}

/// Frees what a pass has computed again and not used.
struct Unused {
    frame: Weak<Frame>,
    pass: Pass,
}

impl Drop for Unused {
    fn drop(&mut self) {
        if let Some(frame) = self.frame.upgrade() {
            frame.slots().iter_mut().for_each(|slot| slot.again.retain(|it| it.pass != self.pass));
        }
    }
}

impl Drop for Number {
    fn drop(&mut self) {
        if let Some(slot) = self.frame.slots().get_mut(self.number) {
            slot.is_alive = false;
            slot.again = Vec::new();
        }
    }
}
