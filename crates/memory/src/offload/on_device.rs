//! The copies of parameters and gradients.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{
    AVERAGED, IGNORED, Marked, NOT_AVERAGED, OptimizerError, Parameter, STEPPED_IN_BACKWARD, TorchError,
};
use overdrive_ffi::{GradHook, SideStream, SyncTensor, TensorList, Transfer, empty_pinned, set_grad};
use tch::Tensor;

use super::overlap::Overlap;
use crate::layout::dense_strides;

/// So many gradients that are to be freed may be on their way to the host.
const UNDER_WAY: usize = 4;

/// Parameters on a device.
#[derive(Debug)]
pub(super) struct OnDevice {
    copies: Arc<Copies>,
    pub(super) params: TensorList,
    /// The copies of the parameters.
    masters: Vec<Tensor>,
    /// How often the parameters were written when they were equal to their copies.
    writes: u64,
    /// Whether the copies were stepped, and the parameters do not have all of their values yet.
    owes: bool,
    /// If copies to the device are to overlap with the forward pass.
    overlap: Option<Overlap>,
    hooks: Vec<GradHook>,
    /// Marks the parameters whose gradients are freed, so that clipping refuses them.
    marked: Option<Marked>,
}

/// What the hooks and the step share.
#[derive(Debug)]
struct Copies {
    stream: SideStream,
    grads: Vec<Mutex<Grad>>,
    /// Gradients that were freed, whose memory the device still reads.
    under_way: Mutex<VecDeque<Transfer>>,
    /// Whether an error of a backward pass was returned, so that not all gradients are there.
    is_lost: AtomicBool,
    /// Whether the copies were stepped with these gradients.
    is_used: AtomicBool,
}

/// A gradient on the host.
#[derive(Debug)]
struct Grad {
    host: Tensor,
    /// Whether it is that of the next step, and the device's is freed.
    is_taken: bool,
    failed: Option<OptimizerError>,
}

/// Why gradients cannot be taken.
fn refused(reason: &'static str) -> OptimizerError {
    OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason }
}

const TWO_PASSES: &str = "it frees gradients, but there were two backward passes before a step: build it with `new`";
const LOST: &str = "gradients were lost by an error in the backward pass: call `zero_grad`, and run the pass again";
const USED: &str = "the last step's update is done, though its copy to the device failed the first time: do not step again \
                    with these gradients, call `zero_grad`, and run the backward pass again";
const SPARSE: &str = "a gradient is sparse, and is copied to the host only if it is dense: set `sparse: false` in the \
                      embedding";

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pinned tensor with a tensor's shape, dtype and strides.
fn pinned_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    let flat = empty_pinned(&[tensor.numel() as i64], tensor.kind())?;
    Ok(flat.f_as_strided(tensor.size(), dense_strides(tensor), None)?)
}

/// The copy of a parameter, as a leaf.
pub(super) fn master(param: &Parameter) -> Result<Tensor, TorchError> {
    let _no_grad = tch::no_grad_guard();
    let mut host = pinned_like(param.tensor())?.f_detach()?;
    host.f_copy_(param.tensor())?;
    Ok(host.f_set_requires_grad(true)?)
}

impl OnDevice {
    pub(super) fn new(
        device: usize,
        params: &[Parameter],
        masters: Vec<Tensor>,
        frees: bool,
    ) -> Result<Self, OptimizerError> {
        let grad = |param: &Parameter| -> Result<_, TorchError> {
            Ok(Mutex::new(Grad { host: pinned_like(param.tensor())?, is_taken: false, failed: None }))
        };
        let grads = params.iter().map(grad).collect::<Result<_, _>>()?;
        let copies = Arc::new(Copies {
            stream: SideStream::new(device)?,
            grads,
            under_way: Mutex::default(),
            is_lost: AtomicBool::new(false),
            is_used: AtomicBool::new(false),
        });
        let tensors: Vec<_> = params.iter().map(|it| it.tensor().shallow_clone()).collect();
        let list = TensorList::new(&tensors)?;
        let mut on_device = Self {
            copies,
            writes: list.writes()?,
            params: list,
            masters,
            owes: false,
            overlap: None,
            hooks: Vec::new(),
            marked: None,
        };
        if frees {
            let all: Arc<[SyncTensor]> = tensors.iter().map(|it| SyncTensor(it.shallow_clone())).collect();
            for (at, param) in params.iter().enumerate() {
                let (copies, tensor) = (Arc::clone(&on_device.copies), param.tensor().shallow_clone());
                let all = Arc::clone(&all);
                let hook = GradHook::new(param.tensor(), move || copies.is_complete(at, &tensor, &all));
                let refused = |error: TorchError| OptimizerError::parameter(param, at, error.message());
                on_device.hooks.push(hook.map_err(refused)?);
            }
            on_device.marked = Some(STEPPED_IN_BACKWARD.mark(tensors));
        }
        Ok(on_device)
    }

    pub(super) fn overlap(&mut self) {
        self.overlap = Some(Overlap::new(self.masters.len()));
    }

    /// What the device is given from now on waits for the parameters.
    pub(super) fn arrive(&mut self) -> Result<(), TorchError> {
        self.overlap.as_mut().map_or(Ok(()), Overlap::end)
    }

    pub(super) fn frees(&self) -> bool {
        self.marked.is_some()
    }

    /// The host waits until the copies are equal.
    pub(super) fn synchronize(&self) -> Result<(), TorchError> {
        self.copies.stream.synchronize()
    }

    /// The gradients are not needed any more.
    pub(super) fn forget(&self) {
        lock(&self.copies.under_way).clear();
        self.copies.is_lost.store(false, Ordering::Relaxed);
        self.copies.is_used.store(false, Ordering::Relaxed);
        for grad in &self.copies.grads {
            let mut grad = lock(grad);
            (grad.is_taken, grad.failed) = (false, None);
        }
    }

    /// The errors of a step that are known before anything changes.
    pub(super) fn check(&self) -> Result<(), OptimizerError> {
        if self.copies.is_lost.load(Ordering::Relaxed) {
            return Err(refused(LOST));
        }
        if self.params.sparse_grad()?.is_some() {
            return Err(refused(SPARSE));
        }
        for (at, grad) in self.copies.grads.iter().enumerate() {
            // A pass for which hooks were not called, such as one under DDP's `no_sync`.
            if lock(grad).is_taken && self.params.get(at)?.grad().defined() {
                return Err(refused(TWO_PASSES));
            }
        }
        Ok(())
    }

    /// Completes a step that failed when the parameters were to get their values, unless those were written since. An error
    /// as long as its gradients are there.
    pub(super) fn catch_up(&mut self) -> Result<(), OptimizerError> {
        if self.owes {
            if self.params.writes()? == self.writes { self.give()? } else { self.copy_params()? }
        }
        if self.copies.is_used.load(Ordering::Relaxed) { Err(refused(USED)) } else { Ok(()) }
    }

    /// Gives the copies the values of the parameters, if those were written.
    pub(super) fn follow(&mut self) -> Result<(), TorchError> {
        if self.params.writes()? != self.writes { self.copy_params() } else { Ok(()) }
    }

    pub(super) fn copy_params(&mut self) -> Result<(), TorchError> {
        let writes = self.params.writes()?;
        for (at, master) in self.masters.iter().enumerate() {
            drop(self.copies.stream.copy(&self.params.get(at)?.f_detach()?, master)?);
        }
        (self.writes, self.owes) = (writes, false);
        Ok(())
    }

    /// Gives the copies the gradients of the parameters, and waits until they are there.
    pub(super) fn take_gradients(&self) -> Result<(), OptimizerError> {
        self.hooks.iter().for_each(GradHook::resume_panic);
        let mut are_there = Vec::new();
        for (at, grad) in self.copies.grads.iter().enumerate() {
            let (mut grad, found) = (lock(grad), self.params.get(at)?.grad());
            if let Some(error) = grad.failed.take() {
                self.copies.is_lost.store(true, Ordering::Relaxed);
                return Err(error);
            }
            if found.defined() {
                drop(self.copies.start(&grad.host, &found)?);
            }
            are_there.push(found.defined() || grad.is_taken);
        }
        // The host computes with them: it waits, once a step.
        self.copies.stream.synchronize()?;
        for ((master, is_there), grad) in self.masters.iter().zip(are_there).zip(&self.copies.grads) {
            set_grad(master, is_there.then_some(&lock(grad).host))?;
        }
        Ok(())
    }

    /// The optimizer on the host was called, and has used the gradients up or has failed.
    pub(super) fn is_stepped(&self, is_used: bool) {
        self.copies.is_used.store(is_used, Ordering::Relaxed);
    }

    /// The copies were stepped: gives the parameters their values. What the device is given from now on waits, or what uses
    /// a parameter does.
    pub(super) fn give(&mut self) -> Result<(), TorchError> {
        self.owes = true;
        let given = self.give_all();
        // Also after an error: what is written from now on is the program's.
        self.writes = self.params.writes()?;
        self.owes = given.is_err();
        given
    }

    fn give_all(&mut self) -> Result<(), TorchError> {
        let copy = |at: usize| self.copies.stream.copy(&self.masters[at], &self.params.get(at)?.f_detach()?);
        match &mut self.overlap {
            Some(overlap) => {
                let transfers = overlap.order().iter().map(|&at| copy(at)).collect::<Result<_, _>>()?;
                overlap.begin(transfers)
            }
            None => (0..self.masters.len()).map(copy).collect::<Result<Vec<_>, _>>().map(drop),
        }
    }
}

impl Copies {
    /// In the backward pass: a gradient is complete.
    fn is_complete(&self, at: usize, param: &Tensor, all: &[SyncTensor]) {
        let mut grad = lock(&self.grads[at]);
        if let Err(error) = self.take(&mut grad, param, all) {
            grad.failed.get_or_insert(error);
        }
    }

    fn take(&self, grad: &mut Grad, param: &Tensor, all: &[SyncTensor]) -> Result<(), OptimizerError> {
        let found = param.grad();
        if grad.is_taken {
            return Err(refused(TWO_PASSES));
        }
        if found.is_sparse() {
            return Err(refused(SPARSE));
        }
        let is_alone = !AVERAGED.is_empty() && !AVERAGED.contains(param) && !IGNORED.contains(param);
        if is_alone && AVERAGED.position(all.iter().map(|it| &**it)).is_some() {
            return Err(refused(NOT_AVERAGED));
        }
        let transfer = self.start(&grad.host, &found)?;
        set_grad(param, None)?;
        grad.is_taken = true;
        let mut under_way = lock(&self.under_way);
        under_way.push_back(transfer);
        if under_way.len() > UNDER_WAY {
            under_way.pop_front();
        }
        Ok(())
    }

    /// Starts the copy of a gradient.
    fn start(&self, host: &Tensor, found: &Tensor) -> Result<Transfer, TorchError> {
        let found = found.f_detach()?;
        if found.stride() == host.stride() {
            return self.stream.copy(&found, host);
        }
        let mut like = Tensor::f_empty_strided(host.size(), host.stride(), (found.kind(), found.device()))?;
        like.f_copy_(&found)?;
        self.stream.copy(&like, host)
    }
}
