//! `DistributedDataParallel`: gradients averaged over ranks while backward runs.

mod agree;
mod buffers;
mod builder;
mod join;
mod outputs;
mod precision;
mod state;
mod sync;

use std::cell::RefCell;
use std::collections::HashSet;

use overdrive_core::{Activity, Marked, Module, activity};
use overdrive_ffi::c10d::{self, Reducer};
use overdrive_ffi::context::grad_enabled;
use overdrive_ffi::{TensorId, TensorList, record};
use tch::Tensor;

use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::hooks::{self, Carried, CommHook};

pub use buffers::BufferHookLocation;
use buffers::Buffers;
pub use builder::DdpBuilder;
pub use join::{JoinOptions, Joinable};
pub use outputs::Outputs;
pub use precision::MixedPrecision;
pub use sync::NoSync;

/// Trains one model on all ranks of a group: each rank computes gradients of its own part of a batch, and the mean over
/// ranks is in every rank's gradients when backward ends. Gradients are sent while backward still runs.
///
/// The mean of the ranks' mean losses equals the large batch's only where all ranks have equally many samples; where
/// they have not, `overdrive-accum` weights by counts.
///
/// While this value lives, it hooks into the parameters' gradients. Optimizers that step during the backward pass step
/// once the averages are there, at the pass's end; after a pass that leaves gradients local they do not step.
///
/// ```no_run
/// use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, init_process_group};
/// use tch::nn::{Module, OptimizerConfig};
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = nn::Sgd::default().build(&vs, 0.1)?;
///
/// let ddp = DistributedDataParallel::new(&vs, &group)?;
/// for batch in 0..10 {
///     let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));   // this rank's part
///     let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
///     ddp.backward(&loss)?;
///     opt.step();
///     opt.zero_grad();
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.nn.parallel.DistributedDataParallel`
#[derive(Debug)]
pub struct DistributedDataParallel {
    /// Declared first, so that it is dropped before the group that it uses.
    reducer: RefCell<Reducer>,
    /// The communication hook, which the reducer runs.
    hook: RefCell<Option<Carried>>,
    /// Passes run in mixed precision.
    is_mixed: bool,
    params: Vec<(String, Tensor)>,
    averaged: HashSet<TensorId>,
    /// Other parts look these marks up: an accumulator made without this `DistributedDataParallel` refuses the
    /// parameters.
    _marked: [Marked; 2],
    /// Parameters that required no gradient when this was made: the reducer does not know them.
    frozen: Vec<(String, Tensor)>,
    /// `None` where they are not broadcast.
    buffers: Option<Buffers>,
    /// All parameters and buffers, without their gradients.
    states: TensorList,
    finds_unused: bool,
    /// Buckets change after the first passes, whatever was loaded.
    is_static: bool,
    /// Some gradients are sparse.
    has_sparse: bool,
    /// Unused parameters are not reduced, so that gradients from an earlier pass would stay local.
    skips_unused: bool,
    state: RefCell<State>,
    group: ProcessGroup,
}

const HELD_BACK_UNUSED: &str = "with skip_all_reduce_unused_params every pass averages its gradients: a parameter that the \
                                last pass of a window does not use would keep those of an earlier one";

/// Why a compiled step cannot have a forward pass of a `DistributedDataParallel` within: gradients would stay local.
const RECORDED: &str = "`DistributedDataParallel::forward` within the step would prepare no later backward pass: leave it \
                        out of the closure, and wrap the compiled loss (`ddp.forward(|| loss_of.run(&batch))`)";

#[derive(Debug, Default)]
struct State {
    /// Backward passes leave the gradients local.
    held: bool,
    /// A synchronised backward has begun since buffers were last broadcast.
    needs_buffers: bool,
    /// Outputs of the last forward pass, empty unless the reducer searches them for unused parameters; `None` when
    /// there was no forward pass.
    outputs: Option<Vec<Tensor>>,
    /// In `join`.
    joining: Option<JoinOptions>,
    /// The loop in `join` has ended because a rank has no more inputs.
    is_exhausted: bool,
}

impl DistributedDataParallel {
    /// Wraps a module, or all variables of a `VarStore`, with PyTorch's defaults.
    ///
    /// # Errors
    /// When the models differ (an error on every rank), no variable is trainable, or a rank has exited or does not take
    /// part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(model: &impl Module, group: &ProcessGroup) -> Result<Self, DdpError> {
        Self::builder(group).build(model)
    }

    /// A builder with options. The defaults are PyTorch's.
    pub fn builder(group: &ProcessGroup) -> DdpBuilder {
        DdpBuilder::new(group)
    }

    /// Runs a forward pass whose backward averages the gradients, and returns the model's outputs.
    ///
    /// Under [`tch::no_grad`] this only runs the model, so single ranks may call it alone. PyTorch broadcasts buffers there
    /// too, once after each training step: before an evaluation by several ranks, call
    /// [`sync_buffers`](Self::sync_buffers), or each rank uses its own running statistics.
    ///
    /// # Errors
    /// When the last backward left out parameters without
    /// [`find_unused_parameters`](DdpBuilder::find_unused_parameters), the hook has failed, or a rank has exited or
    /// does not take part within the group's timeout; [`DdpError::Unfrozen`] for a parameter that required no gradient
    /// when this was made; [`DdpError::WithinBackward`] from within a hook.
    ///
    /// # Panics
    /// Resumes the panic of a communication hook in the last backward, or of the model.
    ///
    /// # Syncs
    /// Waits for other ranks where there are buffers, and once when the buckets are rebuilt.
    pub fn forward<O: Outputs>(&self, model: impl FnOnce() -> O) -> Result<O, DdpError> {
        self.check_hook()?;
        self.outside_backward("forward")?;
        let lowered = self.lower()?;
        if !grad_enabled() {
            return Ok(model());
        }
        if let Some((name, _)) = self.frozen.iter().find(|(_, tensor)| tensor.requires_grad()) {
            return Err(DdpError::Unfrozen { name: name.clone() });
        }
        record::refuse(RECORDED);
        self.before_forward()?;
        let mut outputs = model();
        self.after_forward(outputs.tensors_mut())?;
        // A model that has failed, or whose outputs need no gradient, has no backward pass that would end this one.
        if outputs.tensors_mut().iter().any(|output| output.requires_grad()) {
            lowered.keep();
        }
        Ok(outputs)
    }

    /// Runs backward from a loss. `loss.backward()` does the same, but panics where this returns an error.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// [`DdpError::TimedOut`] or [`DdpError::Lost`] when a rank has exited or does not take part within the group's
    /// timeout, [`DdpError::Hook`] when the communication hook fails, [`DdpError::HookHasFailed`] from then on,
    /// [`DdpError::SparseGradient`] when a gradient is sparse, and the errors of backward itself.
    ///
    /// # Panics
    /// Resumes a panic of the communication hook.
    ///
    /// # Syncs
    /// Over Gloo, waits for all ranks.
    pub fn backward(&self, loss: &Tensor) -> Result<(), DdpError> {
        let _backward = activity(|| Activity::Backward);
        self.run_backward(loss)
    }

    fn run_backward(&self, loss: &Tensor) -> Result<(), DdpError> {
        self.check_hook()?;
        let ran = c10d::backward(loss);
        // Where it has failed, nothing has ended the pass.
        let raised = self.raise();
        self.check_hook()?;
        raised?;
        ran.map_err(|source| self.failed("backward", source))
    }

    /// Communicates gradients by a hook instead of an all-reduce, from the next backward pass on. Call it once, and on
    /// all ranks before the same pass.
    ///
    /// # Errors
    /// [`DdpError::HookTaken`] when there is one already, [`DdpError::WithinBackward`] in the middle of a pass.
    ///
    /// # Source
    /// `register_comm_hook`; PyTorch requires it before the first backward, but accepts it later too
    pub fn register_comm_hook(&self, hook: impl CommHook + 'static) -> Result<(), DdpError> {
        self.outside_backward("register_comm_hook")?;
        self.without_sparse("register_comm_hook")?;
        let (driven, carried) = hooks::driven(hook);
        self.reducer.borrow_mut().set_hook(driven).map_err(hook_taken)?;
        *self.hook.borrow_mut() = Some(carried);
        Ok(())
    }

    /// Communicates gradients as float16 by libtorch's own hook, from the next backward pass on. Call it once, and on
    /// all ranks before the same pass.
    ///
    /// # Errors
    /// As [`register_comm_hook`](Self::register_comm_hook).
    ///
    /// # Source
    /// `BuiltinCommHookType.FP16_COMPRESS`
    pub fn register_fp16_compress(&self) -> Result<(), DdpError> {
        self.outside_backward("register_fp16_compress")?;
        self.without_sparse("register_fp16_compress")?;
        self.reducer.borrow_mut().compress_to_half().map_err(hook_taken)
    }

    /// A hook is given a bucket of dense gradients.
    fn without_sparse(&self, op: &'static str) -> Result<(), DdpError> {
        match self.has_sparse {
            true => Err(DdpError::Unsupported { op, reason: "sparse gradients are averaged without hooks".to_owned() }),
            false => Ok(()),
        }
    }

    /// Measures the times in [`logging_data`](Self::logging_data) every `steps` steps, besides the first ten; 100 by
    /// default. On a GPU nothing is measured before this call, because reading the timers waits for the device, unless
    /// `TORCH_DISTRIBUTED_DEBUG` is `DETAIL`; PyTorch always reads them.
    ///
    /// # Errors
    /// [`DdpError::InvalidOption`] when `steps` is 0, or beyond `i32`; [`DdpError::WithinBackward`] in the middle of a
    /// pass.
    ///
    /// # Syncs
    /// From now on [`forward`](Self::forward) waits for the GPU in the measured steps.
    ///
    /// # Source
    /// `_set_ddp_runtime_logging_sample_rate`
    pub fn set_logging_sample_rate(&self, steps: u32) -> Result<(), DdpError> {
        if steps == 0 || i32::try_from(steps).is_err() {
            let (option, found) = ("the logging sample rate", steps.to_string());
            return Err(DdpError::InvalidOption { option, found, expected: "1 to 2147483647 steps" });
        }
        self.outside_backward("set_logging_sample_rate")?;
        Ok(self.reducer.borrow_mut().set_log_rate(steps)?)
    }

    /// What libtorch logs about the run, as names and values: bucket sizes, settings, times of some steps. Values that
    /// are fixed at construction are missing in a group with [`verify`](crate::ProcessGroupBuilder::verify). On a GPU,
    /// what changes from step to step, also the sizes of the rebuilt buckets, is there only after
    /// [`set_logging_sample_rate`](Self::set_logging_sample_rate).
    ///
    /// # Errors
    /// When libtorch fails, and while a backward pass is under way.
    ///
    /// # Source
    /// `_get_ddp_logging_data`
    pub fn logging_data(&self) -> Result<Vec<(String, String)>, DdpError> {
        self.outside_backward("logging_data")?;
        Ok(self.reducer.borrow().log()?)
    }

    /// The parameters whose gradients are averaged, by name.
    pub fn parameters(&self) -> &[(String, Tensor)] {
        &self.params
    }

    /// The group that it averages over.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    fn before_forward(&self) -> Result<(), DdpError> {
        let (synchronised, joining) = {
            let state = self.state.borrow();
            (!state.held, state.joining)
        };
        if self.skips_unused && !synchronised {
            return Err(DdpError::CannotHoldBack(HELD_BACK_UNUSED));
        }
        if let Some(options) = joining {
            let active = self.announce_forward(options)?;
            self.reducer.borrow().divide_by(active.engine(), !options.by_active_ranks)?;
        }
        self.begin_forward(synchronised, "forward")?;
        self.sync_buffers_at(BufferHookLocation::PreForward, true)?;
        if joining.is_some() {
            self.announce_backward(synchronised)?;
        }
        Ok(())
    }

    /// Tells the reducer, which may divide the parameters into other buckets now, and then the hook.
    fn begin_forward(&self, synchronised: bool, op: &'static str) -> Result<(), DdpError> {
        let rebuilt = self.reducer.borrow().before_forward(synchronised).map_err(|source| self.failed(op, source))?;
        if let Some(hook) = self.hook.borrow().as_ref().filter(|_| rebuilt) {
            hook.lock().rebuilt();
        }
        Ok(())
    }

    fn after_forward(&self, mut outputs: Vec<&mut Tensor>) -> Result<(), DdpError> {
        self.sync_buffers_at(BufferHookLocation::PostForward, true)?;
        let handles: Vec<Tensor> = outputs.iter().map(|tensor| tensor.shallow_clone()).collect();
        let seen = self.reducer.borrow().sink(&TensorList::new(&handles)?)?.to_vec()?;
        for (output, seen) in outputs.iter_mut().zip(&seen) {
            **output = seen.shallow_clone();
        }
        let held = {
            let mut state = self.state.borrow_mut();
            state.outputs = Some(if self.finds_unused { seen } else { Vec::new() });
            state.held
        };
        if held { Ok(()) } else { self.arm() }
    }

    /// Makes the next backward pass average the gradients, if there was a forward pass before it.
    fn arm(&self) -> Result<(), DdpError> {
        let mut state = self.state.borrow_mut();
        let Some(outputs) = &state.outputs else { return Ok(()) };
        let outputs = TensorList::new(outputs)?;
        self.reducer.borrow().arm(&outputs).map_err(|source| self.failed("forward", source))?;
        state.needs_buffers = true;
        Ok(())
    }

    /// Refuses calls during a backward pass: a hook may hold a handle to this object, while the reducer is locked.
    fn outside_backward(&self, call: &'static str) -> Result<(), DdpError> {
        if self.reducer.borrow().is_within_backward() { Err(DdpError::WithinBackward { call }) } else { Ok(()) }
    }

    /// Returns the hook's failure itself the first time, and from then on an error with its message.
    fn check_hook(&self) -> Result<(), DdpError> {
        if let Some(error) = self.reducer.borrow().hook_failure() {
            return Err(DdpError::Hook(error));
        }
        self.hook_works()
    }

    /// The same without taking the failure: one that was not returned yet stays for `forward` and `backward`.
    fn hook_works(&self) -> Result<(), DdpError> {
        match self.reducer.borrow().first_hook_failure() {
            None => Ok(()),
            Some(first) => Err(DdpError::HookHasFailed { first: first.to_owned() }),
        }
    }

    fn failed(&self, op: &'static str, source: overdrive_core::TorchError) -> DdpError {
        match DdpError::between(self.group.context(op), source) {
            DdpError::Torch(source) => self.sparse_gradient().unwrap_or(DdpError::Torch(source)),
            between => between,
        }
    }

    /// Finds a sparse gradient as the cause of a failure that libtorch reports only as a tensor without storage. It
    /// cannot be detected earlier, because there is no gradient before backward.
    fn sparse_gradient(&self) -> Option<DdpError> {
        let is_sparse = |param: &Tensor| param.f_grad().is_ok_and(|grad| grad.defined() && grad.is_sparse());
        let (name, _) = self.params.iter().find(|(_, param)| is_sparse(param))?;
        Some(DdpError::SparseGradient { name: name.clone() })
    }
}

fn hook_taken(source: overdrive_core::TorchError) -> DdpError {
    if source.message().contains("register_") { DdpError::HookTaken } else { DdpError::Torch(source) }
}
