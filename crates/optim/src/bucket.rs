//! Buckets: parameters with the same device, dtype and slots (the tensors of state per parameter, such as Adam's
//! `exp_avg`), which can be updated together.

use overdrive_core::{GradScale, OptimizerError, Parameter, TorchError};
use overdrive_ffi::TensorList;
use tch::{Device, Kind, Tensor};

use crate::algorithm::{Algorithm, Slot, Step};
use crate::constants::Constants;
use crate::low_precision::{LowPrecision, follow_written};
use crate::pieces;
use crate::step_count::StepCounts;

/// The most bytes of parameters in a list on the CPU, unless a single parameter is larger. Each libtorch operator
/// passes over the whole list: a short list stays in the processor's cache from one operator to the next, and its
/// intermediate results are small.
pub(crate) const CPU_LIST_BYTES: usize = 1 << 20;

/// Parameters of one group that are stepped together, and their state.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) params: TensorList,
    /// Their indices among all parameters of the optimizer.
    pub(crate) indices: Vec<usize>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) precision: LowPrecision,
    /// `None` before the first step with a gradient, so that a model that does not train has no optimizer state in
    /// memory.
    pub(crate) state: Option<State>,
}

/// The state of the parameters of a bucket.
#[derive(Debug)]
pub(crate) struct State {
    /// One list per slot.
    pub(crate) slots: Vec<TensorList>,
    pub(crate) counts: StepCounts,
    /// Which parameters have been stepped.
    pub(crate) started: Vec<bool>,
    constants: Constants,
    /// `params.writes()` after the last step: if it has changed since, other code has written to the parameters. `None`
    /// before the first step and after loading.
    written: Option<u64>,
}

impl State {
    /// A second handle to the same tensors.
    pub(crate) fn share(&self) -> Result<Self, TorchError> {
        let slots = self.slots.iter().map(TensorList::share).collect::<Result<_, _>>()?;
        let (counts, started) = (self.counts.share()?, self.started.clone());
        Ok(Self { slots, counts, started, constants: Constants::default(), written: None })
    }
}

/// How the parameters of a group are divided into buckets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) fused: bool,
    pub(crate) precision: LowPrecision,
    /// Whether each parameter gets its own bucket, so that it can be stepped alone.
    pub(crate) apart: bool,
}

impl Packing {
    /// Refuses parameters that no fused kernel steps, if the steps are fused; `first` is the index of `params[0]` among
    /// those of all groups.
    pub(crate) fn check<A: Algorithm>(self, params: &[Parameter], first: usize) -> Result<(), OptimizerError> {
        match params.iter().position(|param| !has_fused_kernel::<A>(param, self.precision)) {
            Some(index) if self.fused => {
                let reason = "libtorch has no fused kernel that is right for its device and dtype: build with \
                              `fused(false)`";
                Err(OptimizerError::parameter(&params[index], first + index, reason))
            }
            _ => Ok(()),
        }
    }

    /// How many bytes a bucket may hold before the next one is started.
    fn limit(self, device: Device, precision: LowPrecision) -> usize {
        match device {
            // A fused kernel is a single pass over the parameters, so a short list gains nothing. With other precisions
            // than `Nearest`, operators run before and after it.
            Device::Cpu if !self.fused || precision != LowPrecision::Nearest => CPU_LIST_BYTES,
            _ => usize::MAX,
        }
    }
}

/// Whether libtorch has a fused kernel that is right for a parameter.
pub(crate) fn has_fused_kernel<A: Algorithm>(param: &Parameter, precision: LowPrecision) -> bool {
    let (device, kind) = (param.tensor().device(), param.tensor().kind());
    A::has_fused_kernel(device, precision.stepped_kind(kind))
}

/// Divides a group's parameters into buckets, in order; `first` is the index of `params[0]` among the parameters of all
/// groups.
pub(crate) fn buckets<A: Algorithm>(
    params: &[Tensor],
    first: usize,
    algorithm: &A,
    packing: Packing,
) -> Result<Vec<Bucket>, TorchError> {
    struct Open<'a> {
        key: (Device, Kind, Vec<&'static str>),
        slots: Vec<Slot>,
        members: Vec<&'a Tensor>,
        indices: Vec<usize>,
        bytes: usize,
    }
    let mut open: Vec<Open<'_>> = Vec::new();
    let mut full = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let precision = packing.precision.of(param.kind());
        let slots: Vec<Slot> = precision.slot().into_iter().chain(algorithm.slots(param)).collect();
        let key = (param.device(), param.kind(), slots.iter().map(|slot| slot.name).collect::<Vec<_>>());
        let bytes = param.numel() * param.kind().elt_size_in_bytes();
        let room = packing.limit(key.0, precision).saturating_sub(bytes);
        let fits = |it: &&mut Open<'_>| !packing.apart && it.key == key && it.bytes <= room;
        match open.iter_mut().find(fits) {
            Some(it) => {
                it.members.push(param);
                it.indices.push(first + index);
                it.bytes += bytes;
            }
            None => {
                // Only the newest bucket of each key stays open, so that a bucket holds neighbouring parameters.
                if let Some(place) = open.iter().position(|it| it.key == key) {
                    full.push(open.swap_remove(place));
                }
                open.push(Open { key, slots, members: vec![param], indices: vec![first + index], bytes });
            }
        }
    }
    full.extend(open);
    full.sort_by_key(|it| it.indices[0]);
    let close = |it: Open<'_>| {
        let precision = packing.precision.of(it.key.1);
        Ok(Bucket {
            params: TensorList::new(&it.members)?,
            indices: it.indices,
            slots: it.slots,
            precision,
            state: None,
        })
    };
    full.into_iter().map(close).collect()
}

impl Bucket {
    /// The state before the first step.
    pub(crate) fn fresh_state<A: Algorithm>(&self, algorithm: &A, fused: bool) -> Result<State, TorchError> {
        self.make_state(algorithm, fused, Slot::fresh)
    }

    /// A state whose tensors are to be overwritten.
    pub(crate) fn blank_state<A: Algorithm>(&self, algorithm: &A, fused: bool) -> Result<State, TorchError> {
        self.make_state(algorithm, fused, Slot::blank)
    }

    fn make_state<A: Algorithm>(
        &self,
        algorithm: &A,
        fused: bool,
        make: fn(&Slot, &Tensor) -> Result<Tensor, TorchError>,
    ) -> Result<State, TorchError> {
        let _no_grad = tch::no_grad_guard();
        let params = self.params.to_vec()?;
        let device = params.first().map_or(Device::Cpu, Tensor::device);
        let mut slots: Vec<Vec<Tensor>> = self.slots.iter().map(|_| Vec::with_capacity(params.len())).collect();
        for param in &params {
            let param = self.precision.stepped(param)?;
            for (slot, made) in self.slots.iter().zip(&mut slots) {
                made.push(make(slot, &param)?);
            }
        }
        Ok(State {
            slots: slots.iter().map(|made| TensorList::new(made)).collect::<Result<_, _>>()?,
            counts: match A::COUNTS_STEPS {
                // Fused and capturable steps read the counts on the device; all others on the host.
                true if fused || algorithm.counts_on_device() => StepCounts::zeros(params.len(), device)?,
                true => StepCounts::zeros(params.len(), Device::Cpu)?,
                false => StepCounts::none()?,
            },
            started: vec![false; params.len()],
            constants: Constants::default(),
            written: None,
        })
    }

    /// An error if a gradient is sparse or dense where a step could not use it.
    pub(crate) fn check_grads<A: Algorithm>(&self, names: Option<&[String]>) -> Result<(), OptimizerError> {
        let unfit = if A::SPARSE { self.dense_grad()? } else { self.params.sparse_grad()? };
        let Some(place) = unfit else { return Ok(()) };
        let (index, param) = (self.indices[place], self.params.get(place)?);
        let param = match names {
            Some(names) => Parameter::named(&names[index], param),
            None => Parameter::unnamed(param),
        };
        match A::SPARSE {
            true => Err(dense(&param, index)),
            false => Err(sparse(&param, index)),
        }
    }

    /// The place of the first parameter whose gradient is dense.
    fn dense_grad(&self) -> Result<Option<usize>, TorchError> {
        for (place, param) in self.params.to_vec()?.iter().enumerate() {
            let grad = param.f_grad()?;
            if grad.defined() && !grad.is_sparse() {
                return Ok(Some(place));
            }
        }
        Ok(None)
    }

    /// The tensors that a step updates: the float32 masters once they exist, else the parameters.
    pub(crate) fn trained(&self) -> Result<TensorList, TorchError> {
        match (&self.state, self.precision) {
            (Some(state), LowPrecision::MasterCopy) => state.slots[0].share(),
            _ => self.params.share(),
        }
    }

    /// Copies parameters that were written to into their float32 masters.
    pub(crate) fn renew_masters(&self) -> Result<(), TorchError> {
        match (&self.state, self.precision) {
            (Some(state), LowPrecision::MasterCopy) => follow_written(&self.params, &state.slots[0]),
            _ => Ok(()),
        }
    }

    /// Runs `work` on the parameters that have been stepped, as the algorithm sees them, and its first slot of each.
    pub(crate) fn with_first_slot(
        &mut self,
        work: impl FnOnce(&TensorList, &TensorList) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        self.renew_masters()?;
        let Some(state) = self.state.as_mut().filter(|state| state.started.contains(&true)) else { return Ok(()) };
        let started = |list: &TensorList| list.select(&state.started);
        let slots = state.slots.iter().map(started).collect::<Result<Vec<_>, _>>()?;
        let no_grads = TensorList::new::<Tensor>(&[])?;
        self.precision.step(&started(&self.params)?, &no_grads, &slots, |params, _, slots| work(params, &slots[0]))?;
        state.written = Some(self.params.writes()?);
        Ok(())
    }

    /// Whether its parameters have one count of steps together.
    pub(crate) fn shares_count(&self) -> bool {
        self.state.as_ref().is_some_and(|state| state.counts.shared())
    }

    /// Updates the parameters that have gradients.
    pub(crate) fn step<A: Algorithm>(
        &mut self,
        given: (&A, f64, bool),
        scale: Option<GradScale<'_>>,
    ) -> Result<(), TorchError> {
        self.step_by(given, scale, &mut |step| step.map_or(Ok(()), |step| pieces::step(given.0, &step)))
    }

    /// Updates them by `work`, which is given `None` if there are none.
    pub(crate) fn step_by<A: Algorithm>(
        &mut self,
        (algorithm, lr, fused): (&A, f64, bool),
        scale: Option<GradScale<'_>>,
        work: &mut dyn FnMut(Option<Step<'_>>) -> Result<(), TorchError>,
    ) -> Result<(), TorchError> {
        let grads = if A::SPARSE { self.params.grads()? } else { self.params.grads_in_layout()? };
        if grads.list.is_empty() {
            return work(None);
        }
        if self.state.is_none() {
            self.state = Some(self.fresh_state(algorithm, fused)?);
        }
        let Some(state) = &mut self.state else { return Ok(()) };
        let has_masters = self.precision == LowPrecision::MasterCopy;
        if has_masters && state.written != Some(self.params.writes()?) {
            // The parameters were loaded, averaged over ranks or clamped since the last step.
            follow_written(&self.params, &state.slots[0])?;
        }
        // A bucket on another device than the scaler needs copies of the scale and the flag there.
        let device = grads.list.get(0)?.device();
        let to_bucket_device = |tensor: &Tensor| tensor.f_to_device_(device, tensor.kind(), device.is_cuda(), false);
        let copied = scale
            .map(|s| Ok::<_, TorchError>((s.scale.map(to_bucket_device).transpose()?, to_bucket_device(s.found_inf)?)))
            .transpose()?;
        let scale = copied.as_ref().map(|(scale, found_inf)| GradScale { scale: scale.as_ref(), found_inf });

        let complete = grads.complete();
        if !complete {
            state.counts.split()?;
        }
        let with_gradients = |list: &TensorList| match complete || list.is_empty() {
            true => list.share(),
            false => list.select(&grads.defined),
        };
        let (params, counts) = (with_gradients(&self.params)?, with_gradients(state.counts.list())?);
        let slots = state.slots.iter().map(with_gradients).collect::<Result<Vec<_>, _>>()?;
        let first: Vec<bool> =
            state.started.iter().zip(&grads.defined).filter(|(_, has)| **has).map(|(started, _)| !started).collect();

        state.counts.add(&counts, 1.0)?;
        let stepped = self.precision.step(&params, &grads.list, &slots, |params, grads, slots| {
            work(Some(Step {
                lr,
                fused,
                params,
                grads,
                slots,
                counts: &counts,
                same_counts: state.counts.shared(),
                first: &first,
                constants: &state.constants,
                scale,
            }))
        });
        if let Err(error) = stepped {
            // A failed step does not count.
            state.counts.add(&counts, -1.0)?;
            return Err(error);
        }
        if has_masters {
            state.written = Some(self.params.writes()?);
        }
        for (started, has) in state.started.iter_mut().zip(&grads.defined) {
            *started |= has;
        }
        match scale {
            // A skipped step does not count either: `found_inf` is 1 then. It is subtracted on the device, so that the
            // host does not wait.
            Some(scale) => state.counts.subtract(&counts, scale.found_inf),
            None => Ok(()),
        }
    }
}

/// The error for a sparse gradient; `index` is the parameter's among all of the optimizer's.
pub(crate) fn sparse(param: &Parameter, index: usize) -> OptimizerError {
    OptimizerError::parameter(
        param,
        index,
        "its gradient is sparse, but should be dense: set `sparse: false` in the embedding",
    )
}

/// The error for a dense gradient where only sparse ones are taken.
fn dense(param: &Parameter, index: usize) -> OptimizerError {
    let reason = "its gradient is dense: SparseAdam does not support dense gradients, please consider Adam instead";
    OptimizerError::parameter(param, index, reason)
}
