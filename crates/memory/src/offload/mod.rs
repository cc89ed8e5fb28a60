//! An optimizer on the host for parameters on a GPU.

mod on_device;
mod on_disk;
mod overlap;

use std::collections::HashMap;
use std::path::Path;

use overdrive_core::{
    Activity, Behavior, Entry, IS_SHARDED, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter, SHARDED,
    StateDict, StateError, Stateful, activity, check_averaged, check_not_stepped_in_backward,
};
use overdrive_ffi::{TensorId, data_address};
use tch::{Device, Tensor};

use crate::error::MemoryError;
use on_device::{OnDevice, master};
use on_disk::OnDisk;

/// Smaller tensors are in memory.
const SMALLEST_FILE: usize = 256 << 10;

/// Steps on the host, where an optimizer keeps its state and computes, for parameters on a GPU.
///
/// The optimizer is built over copies of the parameters in pinned host memory. A step copies the gradients there, waits for
/// them, steps, and copies the new parameters back while the host goes on; what the device is given after the step waits
/// for them all, or with [`overlap_forward`](Self::overlap_forward) what uses one for that one. Steps are those of the
/// optimizer on a CPU, to the bit. Parameters of a CPU are given to the optimizer themselves.
///
/// Gradients may be added up, clipped or unscaled before the step; they are dense. Parameters that something else has
/// written in place, such as loaded weights, are copied to the host in the next step. What is written past autograd
/// (`Tensor::data`, `set_data`) needs a call of [`params_changed`](Optimizer::params_changed).
///
/// ```
/// use overdrive_core::Optimizer;
/// use overdrive_memory::CpuOffloadOptimizer;
/// # use overdrive_core::{OptimizerError, OptimizerId, Parameter};
/// # use tch::{Device, Kind, Tensor};
/// # struct Sgd(Vec<Parameter>, OptimizerId);
/// # impl Optimizer for Sgd {
/// #     fn id(&self) -> OptimizerId { self.1 }
/// #     fn params(&self) -> Vec<Tensor> { self.0.iter().map(|it| it.tensor().shallow_clone()).collect() }
/// #     fn num_groups(&self) -> usize { 1 }
/// #     fn lr(&self, _: usize) -> Option<f64> { None }
/// #     fn set_lr(&mut self, _: usize, _: f64) -> Result<(), OptimizerError> { Ok(()) }
/// #     fn step(&mut self) -> Result<(), OptimizerError> { Ok(()) }
/// #     fn zero_grad(&mut self) -> Result<(), OptimizerError> { Ok(()) }
/// # }
/// # impl Sgd { fn new(params: Vec<Parameter>) -> Result<Self, OptimizerError> { Ok(Self(params, OptimizerId::new())) } }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let weight = Tensor::zeros([8, 8], (Kind::Float, Device::cuda_if_available())).set_requires_grad(true);
/// let mut opt = CpuOffloadOptimizer::new(&[&weight], Sgd::new)?;      // `AdamW::builder(params).build()`
/// weight.sum(Kind::Float).f_backward()?;
/// opt.step()?;
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torchao.optim.CPUOffloadOptimizer`
#[doc(alias = "CPUOffloadOptimizer")]
#[derive(Debug)]
pub struct CpuOffloadOptimizer<O> {
    inner: O,
    params: Vec<Parameter>,
    /// `None` where the parameters are on a CPU.
    device: Option<OnDevice>,
    /// Where its state is, if not in memory.
    disk: Option<OnDisk>,
}

impl<O: Optimizer> CpuOffloadOptimizer<O> {
    /// Builds the optimizer over the parameters' copies, which have their names.
    ///
    /// # Errors
    /// Those of `build`; when the parameters are on several devices; and when the optimizer steps in the backward pass or
    /// moves or averages parameters besides its steps.
    ///
    /// # Syncs
    /// Yes, for the copies of the parameters.
    pub fn new(
        params: impl IntoParameters,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Self, OptimizerError> {
        Self::build(params.into_parameters(), build, false)
    }

    /// The same, and each gradient is copied to the host while the backward pass goes on, and freed: there are never more
    /// than a few of them on the device. Under `DistributedDataParallel` they are copied and freed at the end of the pass.
    /// One backward pass a step; nothing can look at gradients before the step.
    ///
    /// # Errors
    /// As for [`new`](Self::new), and when a parameter is stepped in the backward pass by another optimizer.
    ///
    /// # Syncs
    /// As for `new`.
    ///
    /// # Source
    /// `CPUOffloadOptimizer(offload_gradients=True)`
    pub fn with_offloaded_gradients(
        params: impl IntoParameters,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Self, OptimizerError> {
        Self::build(params.into_parameters(), build, true)
    }

    fn build(
        params: Vec<Parameter>,
        build: impl FnOnce(Vec<Parameter>) -> Result<O, OptimizerError>,
        frees: bool,
    ) -> Result<Self, OptimizerError> {
        let first = params.first().ok_or(OptimizerError::NoParameters)?.tensor().device();
        if let Some(at) = params.iter().position(|param| param.tensor().device() != first) {
            let reason = format!("it is on {:?}, but the first one is on {first:?}", params[at].tensor().device());
            return Err(OptimizerError::parameter(&params[at], at, reason));
        }
        let Device::Cuda(number) = first else {
            let inner = checked(build(params.iter().map(Parameter::share).collect())?)?;
            return Ok(Self { params: inner.parameters(), inner, device: None, disk: None });
        };
        check_leaves(&params)?;
        let masters = params.iter().map(master).collect::<Result<Vec<_>, _>>()?;
        let named = |(param, master): (&Parameter, &Tensor)| match param.name() {
            Some(name) => Parameter::named(name, master.shallow_clone()),
            None => Parameter::unnamed(master.shallow_clone()),
        };
        let inner = checked(build(params.iter().zip(&masters).map(named).collect())?)?;
        // In the order of the optimizer's groups.
        let places: HashMap<_, _> = masters.iter().map(TensorId::of).zip(0..).collect();
        let ordered =
            inner.params().iter().map(|it| places.get(&TensorId::of(it)).copied()).collect::<Option<Vec<usize>>>();
        let Some(places) = ordered else {
            let reason = "it has parameters that it was not given: build it over what the closure gets";
            return Err(OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason });
        };
        let params: Vec<_> = places.iter().map(|&at| params[at].share()).collect();
        let masters = places.iter().map(|&at| masters[at].shallow_clone()).collect();
        let device = OnDevice::new(number, &params, masters, frees)?;
        Ok(Self { inner, params, device: Some(device), disk: None })
    }

    /// The state that the optimizer makes from now on is in files in this folder, mapped into memory, as of
    /// [`in_files`](overdrive_ffi::host_memory::in_files): the host needs memory for what a step uses at a time. The
    /// system writes while training goes on. Steps are the same to the bit. Call it before the first step. For
    /// parameters of a CPU, too.
    ///
    /// That is what [`make_state`](Optimizer::make_state) makes, and what is loaded; state of less than 256 KiB stays in memory,
    /// and so does all of optimizers that make theirs within a step (tch's, L-BFGS). A step for whose state the disk has no
    /// room is an error, and changes nothing. A disk that goes away while it is used ends the process by SIGBUS, as the files
    /// are memory to the program.
    ///
    /// # Errors
    /// When the folder cannot be opened, and when the optimizer has made its state.
    ///
    /// # Source
    /// DeepSpeed's `offload_optimizer` with `"device": "nvme"`
    pub fn state_on_disk(mut self, folder: impl AsRef<Path>) -> Result<Self, MemoryError> {
        let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
        let is_there = |entry: &Entry| matches!(entry, Entry::Tensor(tensor) if bytes(tensor) >= SMALLEST_FILE);
        let state = self.inner.as_stateful().map(Stateful::state_dict).transpose()?;
        if state.is_some_and(|state| state.iter().any(|(_, entry)| is_there(entry))) {
            let reason = "it has made its state, which would stay in memory: call `state_on_disk` before the first step and \
                          before a state is loaded";
            return Err(OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason }.into());
        }
        self.disk = Some(OnDisk::open(folder.as_ref())?);
        Ok(self)
    }

    /// Copies of new parameters to the device overlap with the next forward pass: each one holds up the first operator that
    /// uses its parameter, in place of all that the device is given after the step. From the second step on they are copied
    /// in the order in which the pass before has used them. Steps are the same to the bit. For parameters of a CPU it does
    /// nothing.
    ///
    /// Operators of libtorch wait by themselves, and so do compiled steps of overdrive-compile. What accesses a parameter's
    /// memory without an operator, while its copy may be under way, gets an error that names
    /// [`wait_for_copies`](Self::wait_for_copies), or a panic where it uses tch's `data_ptr`. A CUDA graph that is replayed
    /// is seen by nobody: call that before it. It waits on the stream that uses a parameter first: where a program runs on
    /// several streams, call it on the step's stream before the others are ordered after that. Parameters that are parts of
    /// one memory wait for one another's copies. Until all parameters were used, each operator takes the host a little
    /// longer.
    ///
    /// The step itself does not overlap with the next forward pass: on the host it is one call over all parameters, because
    /// optimizers count steps and may compute with the norm of all, and a pass with the weights of the step before would
    /// not be exact (DeepSpeed's `delayed_param_update`).
    pub fn overlap_forward(mut self) -> Self {
        if let Some(device) = &mut self.device {
            device.overlap();
        }
        self
    }

    /// What the device is given from now on waits for the parameters that [`overlap_forward`](Self::overlap_forward) copies.
    ///
    /// # Errors
    /// When CUDA fails.
    ///
    /// # Syncs
    /// No.
    pub fn wait_for_copies(&mut self) -> Result<(), OptimizerError> {
        Ok(self.device.as_mut().map_or(Ok(()), OnDevice::arrive)?)
    }

    /// What is wrong before a step.
    fn check(&self) -> Result<(), OptimizerError> {
        check_averaged(self)?;
        if !self.behavior().steps_in_backward {
            check_not_stepped_in_backward(self)?;
        }
        if self.inner.params().len() != self.params.len() {
            let reason = "parameters were added to the optimizer on the host: build it anew over all of them";
            return Err(OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason });
        }
        self.device.as_ref().map_or(Ok(()), OnDevice::check)
    }

    /// The optimizer on the host.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// The optimizer on the host, to change its options. Call `step` and load states on the wrapper, and add no parameters.
    pub fn inner_mut(&mut self) -> &mut O {
        &mut self.inner
    }
}

/// What an optimizer checks of its parameters, and cannot see in their copies.
fn check_leaves(params: &[Parameter]) -> Result<(), OptimizerError> {
    let mut seen = HashMap::new();
    for (at, param) in params.iter().enumerate() {
        let refused = |reason: String| Err(OptimizerError::parameter(param, at, reason));
        if !param.tensor().is_leaf() {
            return refused("it is not a leaf: give the variable itself, not a tensor computed from it".to_owned());
        }
        if SHARDED.contains(param.tensor()) {
            return refused(IS_SHARDED.to_owned());
        }
        if param.tensor().numel() > 0
            && let Some(before) = seen.insert(data_address(param.tensor()), at)
        {
            return refused(format!("it is the same memory as parameter {before}: give each parameter once"));
        }
    }
    Ok(())
}

fn checked<O: Optimizer>(inner: O) -> Result<O, OptimizerError> {
    let Behavior { steps_in_backward, moves_parameters, keeps_average, .. } = inner.behavior();
    if steps_in_backward || moves_parameters || keeps_average {
        let reason = "it steps in the backward pass, or moves or averages parameters besides its steps, which the \
                      device's parameters would not follow: use another optimizer on the host";
        return Err(OptimizerError::DoesNotFit { part: "CpuOffloadOptimizer", reason });
    }
    Ok(inner)
}

/// A step, whose state is on disk.
fn step(inner: &mut impl Optimizer, disk: Option<&OnDisk>) -> Result<(), OptimizerError> {
    disk.map_or(Ok(()), |disk| disk.make(|| inner.make_state())?)?;
    inner.step()
}

impl<O: Optimizer> Optimizer for CpuOffloadOptimizer<O> {
    fn id(&self) -> OptimizerId {
        self.inner.id()
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.iter().map(|param| param.tensor().shallow_clone()).collect()
    }

    fn parameters(&self) -> Vec<Parameter> {
        self.params.iter().map(Parameter::share).collect()
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = self.inner.behavior();
        // The same holds for them.
        behavior.steps_in_backward = self.device.as_ref().is_some_and(OnDevice::frees);
        // On a device it notices that weights were written.
        behavior.keeps_copies &= self.device.is_none();
        behavior
    }

    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        if self.device.is_some() { Ok(self.params()) } else { self.inner.trained() }
    }

    fn num_groups(&self) -> usize {
        self.inner.num_groups()
    }

    fn group_lens(&self) -> Option<Vec<usize>> {
        self.inner.group_lens()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.inner.lr(group)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.inner.set_lr(group, lr)
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        self.inner.momentum(group)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        self.inner.set_momentum(group, momentum)
    }

    /// # Syncs
    /// Once, until the gradients are on the host.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        self.check()?;
        let Some(device) = &mut self.device else { return step(&mut self.inner, self.disk.as_ref()) };
        device.arrive()?;
        device.catch_up()?;
        device.follow()?;
        device.take_gradients()?;
        let stepped = step(&mut self.inner, self.disk.as_ref());
        device.is_stepped(stepped.is_ok());
        device.give()?;
        // After an error, the gradients are there for another try.
        stepped?;
        device.forget();
        Ok(())
    }

    fn check_step(&self) -> Result<(), OptimizerError> {
        self.check()?;
        self.inner.check_step()
    }

    fn make_state(&mut self) -> Result<(), OptimizerError> {
        match &self.disk {
            Some(disk) => disk.make(|| self.inner.make_state())?,
            None => self.inner.make_state(),
        }
    }

    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        self.inner.step_skipped()
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        if let Some(device) = &self.device {
            device.forget();
            device.params.clear_grads()?;
        }
        self.inner.zero_grad()
    }

    /// # Syncs
    /// Yes.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        if let Some(device) = &mut self.device {
            // Not all that writes says so.
            device.arrive()?;
            device.copy_params()?;
            device.synchronize()?;
        }
        self.inner.params_changed()
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        self.inner.as_stateful().map(|_| self as &dyn Stateful)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        self.inner.as_stateful().is_some().then_some(self as &mut dyn Stateful)
    }
}

/// That of the optimizer on the host, which an optimizer on the device can load, and the other way round.
impl<O: Optimizer> Stateful for CpuOffloadOptimizer<O> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        (&self.inner as &dyn Optimizer).state_dict()
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let mut load = || (&mut self.inner as &mut dyn Optimizer).load_state_dict(state);
        match &self.disk {
            Some(disk) => disk.make(load)?,
            None => load(),
        }
    }

    fn differs_by_rank(&self) -> bool {
        (&self.inner as &dyn Optimizer).differs_by_rank()
    }
}
