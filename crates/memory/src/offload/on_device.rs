//! The copies of parameters and gradients.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{Marked, OptimizerError, Parameter, STEPPED_IN_BACKWARD, TorchError};
use overdrive_ffi::{GradHook, SideStream, TensorList, Transfer, empty_pinned, set_grad};
use tch::Tensor;

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
}

/// A gradient on the host.
#[derive(Debug)]
struct Grad {
    host: Tensor,
    /// Whether it is that of the next step, and the device's is freed.
    is_taken: bool,
    failed: Option<OptimizerError>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A pinned tensor with a tensor's shape, dtype and strides.
fn pinned_like(tensor: &Tensor) -> Result<Tensor, TorchError> {
    // What a new tensor of the same layout has, without gaps.
    let layout = tensor.f_empty_like()?.stride();
    let flat = empty_pinned(&[tensor.numel() as i64], tensor.kind())?;
    Ok(flat.f_as_strided(tensor.size(), layout, None)?)
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
        let copies = Arc::new(Copies { stream: SideStream::new(device)?, grads, under_way: Mutex::default() });
        let tensors: Vec<_> = params.iter().map(|it| it.tensor().shallow_clone()).collect();
        let list = TensorList::new(&tensors)?;
        let mut on_device =
            Self { copies, writes: list.writes()?, params: list, masters, hooks: Vec::new(), marked: None };
        if frees {
            for (at, param) in params.iter().enumerate() {
                let (copies, tensor) = (Arc::clone(&on_device.copies), param.tensor().shallow_clone());
                let hook = GradHook::new(param.tensor(), move || copies.is_complete(at, &tensor));
                let refused = |error: TorchError| OptimizerError::parameter(param, at, error.message());
                on_device.hooks.push(hook.map_err(refused)?);
            }
            on_device.marked = Some(STEPPED_IN_BACKWARD.mark(tensors));
        }
        Ok(on_device)
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
        for grad in &self.copies.grads {
            let mut grad = lock(grad);
            (grad.is_taken, grad.failed) = (false, None);
        }
    }

    /// Gives the copies the values of the parameters, if those were written.
    pub(super) fn follow(&mut self) -> Result<(), TorchError> {
        let writes = self.params.writes()?;
        if writes != self.writes {
            for (at, master) in self.masters.iter().enumerate() {
                drop(self.copies.stream.copy(&self.params.get(at)?.f_detach()?, master)?);
            }
            self.writes = writes;
        }
        Ok(())
    }

    /// Gives the copies the gradients of the parameters, and waits until they are there.
    pub(super) fn take_gradients(&self) -> Result<(), OptimizerError> {
        self.hooks.iter().for_each(GradHook::resume_panic);
        let mut are_there = Vec::new();
        for (at, grad) in self.copies.grads.iter().enumerate() {
            let (mut grad, found) = (lock(grad), self.params.get(at)?.grad());
            if let Some(error) = grad.failed.take() {
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

    /// Gives the parameters the values of the copies. What the device is given from now on waits.
    pub(super) fn give(&mut self) -> Result<(), TorchError> {
        let copy = |(at, master)| self.copies.stream.copy(master, &self.params.get(at)?.f_detach()?);
        let transfers = self.masters.iter().enumerate().map(copy).collect::<Result<Vec<_>, _>>()?;
        drop(transfers);
        self.writes = self.params.writes()?;
        Ok(())
    }
}

impl Copies {
    /// In the backward pass: a gradient is complete.
    fn is_complete(&self, at: usize, param: &Tensor) {
        let mut grad = lock(&self.grads[at]);
        if let Err(error) = self.take(&mut grad, param) {
            grad.failed.get_or_insert(error);
        }
    }

    fn take(&self, grad: &mut Grad, param: &Tensor) -> Result<(), OptimizerError> {
        if grad.is_taken {
            let reason = "it frees gradients, but there were two backward passes before a step: build it with `new`";
            return Err(OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason });
        }
        let transfer = self.start(&grad.host, &param.grad())?;
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
