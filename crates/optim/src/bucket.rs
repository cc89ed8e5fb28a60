//! Parameters that can be updated together: of one device, one dtype and one set of slots.

use std::collections::{HashMap, HashSet};

use overdrive_core::{GradScale, OptimizerError, Parameter, TorchError};
use overdrive_ffi::TensorList;
use tch::{Device, Kind, Tensor};

use crate::algorithm::{Algorithm, Slot, Step};
use crate::low_precision::{LowPrecision, follow_written};
use crate::pieces;
use crate::step_count::StepCounts;

/// How many bytes of parameters a list on the CPU holds at most, beyond its first parameter. libtorch goes over such a
/// list once an operator: short ones stay in the processor's cache from one operator to the next, and what the operators
/// make in between is small.
pub(crate) const CPU_LIST_BYTES: usize = 1 << 20;

/// Parameters of one group that are stepped together, and what is kept for them.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub(crate) params: TensorList,
    /// Their places among all parameters of the optimizer.
    pub(crate) indices: Vec<usize>,
    pub(crate) slots: Vec<Slot>,
    pub(crate) precision: LowPrecision,
    /// Made at the first step, so that a loaded or frozen model costs nothing before it trains.
    pub(crate) state: Option<State>,
}

/// What is kept for the parameters of a bucket.
#[derive(Debug)]
pub(crate) struct State {
    /// One list a slot.
    pub(crate) slots: Vec<TensorList>,
    pub(crate) counts: StepCounts,
    /// Which parameters have been stepped.
    pub(crate) started: Vec<bool>,
    /// How often the parameters had been written to behind the last step; none before it, and behind loading.
    written: Option<u64>,
}

impl State {
    /// The same tensors once more, with counts of their own to come.
    pub(crate) fn share(&self) -> Result<Self, TorchError> {
        let slots = self.slots.iter().map(TensorList::share).collect::<Result<_, _>>()?;
        Ok(Self { slots, counts: self.counts.share()?, started: self.started.clone(), written: None })
    }
}

/// How the parameters of a group are put together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packing {
    pub(crate) fused: bool,
    pub(crate) precision: LowPrecision,
    /// Each parameter by itself, so that it can be stepped alone.
    pub(crate) apart: bool,
}

impl Packing {
    /// How many bytes a bucket may hold before the next is begun.
    fn limit(self, device: Device, precision: LowPrecision) -> usize {
        match device {
            Device::Cpu if !self.fused || precision != LowPrecision::Nearest => CPU_LIST_BYTES,
            _ => usize::MAX,
        }
    }
}

/// Splits a group's parameters, in order; `first` is the place of the first among those of all groups.
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
                // Only the newest of a kind stays open, so that a bucket holds neighbours.
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
        let _no_grad = tch::no_grad_guard();
        let params = self.params.to_vec()?;
        let device = params.first().map_or(Device::Cpu, Tensor::device);
        let mut slots: Vec<Vec<Tensor>> = self.slots.iter().map(|_| Vec::with_capacity(params.len())).collect();
        for param in &params {
            let param = self.precision.stepped(param)?;
            for (slot, made) in self.slots.iter().zip(&mut slots) {
                made.push((slot.fresh)(&param, slot.fill)?);
            }
        }
        Ok(State {
            slots: slots.iter().map(|made| TensorList::new(made)).collect::<Result<_, _>>()?,
            counts: match A::COUNTS_STEPS {
                // Fused kernels read the counts where they run; most others are read here.
                true if fused || algorithm.counts_on_device() => StepCounts::zeros(params.len(), device)?,
                true => StepCounts::zeros(params.len(), Device::Cpu)?,
                false => StepCounts::none()?,
            },
            started: vec![false; params.len()],
            written: None,
        })
    }

    /// An error when it could not step because a gradient is sparse.
    pub(crate) fn check_grads(&self, names: Option<&[String]>) -> Result<(), OptimizerError> {
        let Some(place) = self.params.sparse_grad()? else { return Ok(()) };
        let (index, param) = (self.indices[place], self.params.get(place)?);
        match names {
            Some(names) => Err(sparse(&Parameter::named(&names[index], param), index)),
            None => Err(sparse(&Parameter::unnamed(param), index)),
        }
    }

    /// What a step updates: the float32 masters once there are some, else the parameters.
    pub(crate) fn trained(&self) -> Result<TensorList, TorchError> {
        match (&self.state, self.precision) {
            (Some(state), LowPrecision::MasterCopy) => state.slots[0].share(),
            _ => self.params.share(),
        }
    }

    /// Lets float32 masters follow their parameters.
    pub(crate) fn renew_masters(&self) -> Result<(), TorchError> {
        match (&self.state, self.precision) {
            (Some(state), LowPrecision::MasterCopy) => follow_written(&self.params, &state.slots[0]),
            _ => Ok(()),
        }
    }

    /// Updates the parameters that have gradients.
    pub(crate) fn step<A: Algorithm>(
        &mut self,
        (algorithm, lr, fused): (&A, f64, bool),
        scale: Option<GradScale<'_>>,
    ) -> Result<(), TorchError> {
        let grads = self.params.grads_in_layout()?;
        if grads.list.is_empty() {
            return Ok(());
        }
        if self.state.is_none() {
            self.state = Some(self.fresh_state(algorithm, fused)?);
        }
        let Some(state) = &mut self.state else { return Ok(()) };
        let has_masters = self.precision == LowPrecision::MasterCopy;
        if has_masters && state.written != Some(self.params.writes()?) {
            // Loaded, averaged over ranks or clamped since the last step.
            follow_written(&self.params, &state.slots[0])?;
        }
        // A bucket on another device than the scaler needs copies of the two scalars there.
        let device = grads.list.get(0)?.device();
        let near = |tensor: &Tensor| tensor.f_to_device_(device, tensor.kind(), device.is_cuda(), false);
        let moved =
            scale.map(|s| Ok::<_, TorchError>((s.scale.map(near).transpose()?, near(s.found_inf)?))).transpose()?;
        let scale = moved.as_ref().map(|(scale, found_inf)| GradScale { scale: scale.as_ref(), found_inf });

        let complete = grads.complete();
        if !complete {
            state.counts.part()?;
        }
        let of = |list: &TensorList| match complete || list.is_empty() {
            true => list.share(),
            false => list.select(&grads.defined),
        };
        let (params, counts) = (of(&self.params)?, of(state.counts.list())?);
        let slots = state.slots.iter().map(of).collect::<Result<Vec<_>, _>>()?;
        let first: Vec<bool> =
            state.started.iter().zip(&grads.defined).filter(|(_, has)| **has).map(|(started, _)| !started).collect();

        state.counts.add(&counts, 1.0)?;
        let stepped = self.precision.step(&params, &grads.list, &slots, |params, grads, slots| {
            let step = Step {
                lr,
                fused,
                params,
                grads,
                slots,
                counts: &counts,
                same_counts: state.counts.shared(),
                first: &first,
                scale,
            };
            pieces::step(algorithm, &step)
        });
        if let Err(error) = stepped {
            // A step that failed does not count.
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
            // Nor does one that was skipped.
            Some(scale) => state.counts.subtract(&counts, scale.found_inf),
            None => Ok(()),
        }
    }
}

/// The error of a sparse gradient; `index` tells a parameter's place among all of the optimizer's.
pub(crate) fn sparse(param: &Parameter, index: usize) -> OptimizerError {
    OptimizerError::parameter(
        param,
        index,
        "its gradient is sparse: have it made dense, an embedding by `sparse: false`",
    )
}

/// An error unless all parameters can be optimized, each in one place and under one name; groups hold their parameters in
/// order.
pub(crate) fn check<'a, A: Algorithm>(
    groups: impl Iterator<Item = (&'a A, &'a [Parameter])>,
) -> Result<(), OptimizerError> {
    let (mut seen, mut names) = (HashMap::new(), HashSet::new());
    let mut index = 0;
    for (group, (algorithm, params)) in groups.enumerate() {
        for (place, param) in params.iter().enumerate() {
            let tensor = param.tensor();
            let reason = check_one(tensor).err().or_else(|| algorithm.refuses(tensor));
            // Empty tensors have no data to share.
            let known = match reason.is_none() && tensor.numel() > 0 {
                true => seen.insert(tensor.data_ptr() as usize, (group, place)),
                false => None,
            };
            let again = known.map(|(other, at)| {
                format!(
                    "it is given twice, as number {at} of group {other} and as number {place} of group {group}: each \
                     parameter belongs to one group once"
                )
            });
            let misnamed = match param.name() {
                Some(name) if !names.insert(name.to_owned()) => {
                    Some("another parameter has the same name: tell models apart with `prefixed`")
                }
                Some(_) if names.len() <= index => Some("it has a name, but others have none: name all or none"),
                None if !names.is_empty() => Some("it has no name, but others have one: name all or none"),
                _ => None,
            };
            if let Some(reason) = reason.or(again).or(misnamed.map(str::to_owned)) {
                return Err(OptimizerError::parameter(param, index, reason));
            }
            index += 1;
        }
    }
    Ok(())
}

fn check_one(param: &Tensor) -> Result<(), String> {
    if !param.defined() {
        return Err("it is undefined".to_owned());
    }
    let kind = param.kind();
    if !matches!(kind, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Err(format!("its dtype is {kind:?}, but should be Float, Double, Half or BFloat16"));
    }
    if param.is_sparse() {
        return Err("it is sparse: give a dense one".to_owned());
    }
    if !is_dense(&param.size(), &param.stride()) {
        let layout = format!("size {:?}, strides {:?}", param.size(), param.stride());
        return Err(format!("it does not fill its memory ({layout}): give a contiguous copy"));
    }
    if !param.is_leaf() {
        return Err("it is not a leaf: give the variable itself, not what was computed from it".to_owned());
    }
    Ok(())
}

/// Whether the elements fill their memory without gaps or overlaps, in any order of dimensions. The fused kernels walk
/// over the memory and look at no strides.
fn is_dense(size: &[i64], stride: &[i64]) -> bool {
    let mut dims: Vec<_> = stride.iter().zip(size).filter(|(_, size)| **size != 1).collect();
    dims.sort();
    let mut expected = 1;
    let follows = |(&stride, &size): (&i64, &i64)| {
        let as_expected = stride == expected;
        expected *= size;
        as_expected
    };
    size.contains(&0) || dims.into_iter().all(follows)
}
