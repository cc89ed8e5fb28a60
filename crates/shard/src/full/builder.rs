//! Shards a model unit by unit.

use std::collections::HashSet;

use overdrive_core::{AVERAGED, IntoParameters, Marked, OptimizerError, Parameter, SHARDED, SHARDED_GRADIENTS};
use overdrive_ddp::Backend;
use overdrive_ffi::{GradHook, TensorId};
use tch::{Device, Kind, Tensor};

use super::forward::ShardedUnit;
use super::home::{Home, OffloadPolicy};
use super::layout::Layout;
use super::param::ShardedParam;
use super::ranks::Ranks;
use super::reduction::reductions;
use super::unit::UnitState;
use super::{FullyShardedDataParallel, Shared};
use crate::agree;
use crate::error::ShardError;

const SHARDING: &str = "sharding a unit";
/// The name of the unit that has the parameters which no other one has.
const ROOT: &str = "root";

/// Shards a model unit by unit, made by [`FullyShardedDataParallel::builder`]. All ranks make the same calls.
#[derive(Debug)]
pub struct FullyShardedBuilder {
    shared: Shared,
    ranks: Ranks,
    hooks: Vec<GradHook>,
    names: HashSet<String>,
    reshard_after_forward: bool,
    param_kind: Option<Kind>,
    reduce_kind: Option<Kind>,
    offload: OffloadPolicy,
}

impl FullyShardedBuilder {
    pub(super) fn new(ranks: Ranks) -> Result<Self, ShardError> {
        Ok(Self {
            shared: Shared::new(&ranks)?,
            ranks,
            hooks: Vec::new(),
            names: HashSet::new(),
            reshard_after_forward: true,
            param_kind: None,
            reduce_kind: None,
            offload: OffloadPolicy::None,
        })
    }

    /// Whether units that are made from here on free their whole parameters after the forward, and gather them again for
    /// the backward: least memory, and the default. Otherwise they keep them in between: least to send.
    ///
    /// # Source
    /// `fully_shard(reshard_after_forward=..)`
    #[must_use]
    pub fn reshard_after_forward(mut self, reshard: bool) -> Self {
        self.reshard_after_forward = reshard;
        self
    }

    /// Whether the unit that comes next is gathered while one computes, which is the default. It needs memory for two.
    #[must_use]
    pub fn prefetch(self, prefetch: bool) -> Self {
        self.shared.lock().prefetches = prefetch;
        self
    }

    /// The dtype of whole floating-point parameters and their gradients, of the units that are made from here on, where
    /// it is not that of the parameters as given: these are the shards, which the optimizer steps. `reduce`: the dtype
    /// in which gradients are averaged, `param` by default. The model's inputs have to be of the dtype `param`.
    ///
    /// # Source
    /// `MixedPrecisionPolicy(param_dtype, reduce_dtype)`, which casts the inputs too
    #[doc(alias = "MixedPrecisionPolicy")]
    #[must_use]
    pub fn mixed_precision(mut self, param: Kind, reduce: Option<Kind>) -> Self {
        (self.param_kind, self.reduce_kind) = (Some(param), reduce);
        self
    }

    /// Where each rank keeps its rows, their gradients and the optimizer's state, which is that of the device by default.
    /// Set it before the first unit.
    ///
    /// With parameters on a GPU, rows are copied to it before they are gathered, two units ahead, and means of gradients
    /// are copied back during the backward pass, at whose end the host waits for them. The optimizer steps on the CPU:
    /// results are those of its CPU kernels.
    ///
    /// # Source
    /// `fully_shard(offload_policy=..)`; DeepSpeed's `offload_param`
    #[must_use]
    pub fn offload_policy(mut self, policy: OffloadPolicy) -> Self {
        self.offload = policy;
        self
    }

    /// Makes a unit of these parameters, such as those of a block: gives all ranks rank 0's values, keeps this rank's
    /// rows, and frees the whole parameters. So a model that does not fit a rank's memory is made block by block, each
    /// one followed by this call.
    ///
    /// The model's tensors stay the same, and have no values outside of [`ShardedUnit::forward`]. A parameter that is
    /// used in several units, a tied one, is given to none: [`build`](Self::build) has it then.
    ///
    /// # Errors
    /// On every rank, and nothing has changed: [`ShardError::Unit`] when there are no parameters or the name is taken;
    /// [`ShardError::Optimizer`] with the parameter that is in another unit, has no rows, shares its memory, or is
    /// otherwise not to be sharded, on the rank that has it, and [`ShardError::OtherRank`] on the others;
    /// [`ShardError::RanksDisagree`] with the first parameter that is not the same on all. [`ShardError::Ddp`] when a rank
    /// has exited or does not call it within the group's timeout. Where memory runs out in the middle, the model's
    /// parameters are lost.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn unit(&mut self, name: &str, params: impl IntoParameters) -> Result<ShardedUnit, ShardError> {
        let reshard = self.reshard_after_forward;
        self.shard(name, params.into_parameters(), reshard)
    }

    /// Makes the last unit, of those parameters of the model that are in no other: its forward is that of the whole model.
    /// It keeps its whole parameters from its forward to its backward. `model`: all parameters, under the names
    /// that the optimizer and states give them, and, of a module, the buffers, which states have too.
    ///
    /// # Errors
    /// As [`unit`](Self::unit); and [`ShardError::Unit`] when the model has no parameters, lacks some of the units', or has
    /// a buffer under the name of another tensor.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn build(mut self, model: impl IntoParameters) -> Result<FullyShardedDataParallel, ShardError> {
        let (buffers, growth) = (model.buffers(), model.growth());
        let all = model.into_parameters();
        let rest: Vec<Parameter> = {
            let engine = self.shared.lock();
            let is_sharded = |param: &Parameter| {
                let id = TensorId::of(param.tensor());
                engine.units.iter().any(|unit| unit.position(id).is_some())
            };
            all.iter().filter(|param| !is_sharded(param)).map(Parameter::share).collect()
        };
        let (is_empty, missing) = {
            let engine = self.shared.lock();
            (engine.units.is_empty(), missing(&engine.units, &all))
        };
        let told = format!("{} {missing:?}", rest.is_empty());
        let told =
            check_buffers(&buffers, &all).map(|()| (told, buffers.iter().map(describe_buffer).collect::<Vec<_>>()));
        let (alone, saved): (Vec<_>, Vec<_>) = agree::all_have(&self.ranks.all, SHARDING, told)?.into_iter().unzip();
        agree::on_text("whether all parameters of the model are in units", &alone)?;
        agree::on_lines("the buffers of the model", &saved)?;
        if let Some((name, param)) = missing {
            let reason =
                format!("its parameter {param} is not in the model: give `build` all parameters, the units' too");
            return Err(ShardError::Unit { name, reason });
        }
        let root = match rest.is_empty() && !is_empty {
            true => ShardedUnit { shared: self.shared.clone(), unit: None },
            false => self.shard(ROOT, rest, false)?,
        };
        let marked = {
            let mut engine = self.shared.lock();
            engine.put_in_order(&all);
            engine.growth = growth;
            marks(engine.params())
        };
        Ok(FullyShardedDataParallel::new(self.shared, self.ranks, root, self.hooks, buffers, marked))
    }

    fn shard(&mut self, name: &str, params: Vec<Parameter>, reshard: bool) -> Result<ShardedUnit, ShardError> {
        let params = once_each(params);
        let number = self.shared.lock().units.len();
        let checked = self.check(name, &params).and_then(|()| self.open_home(name, params[0].tensor().device()));
        let hooks = checked.and_then(|()| self.hooks_of(number, &params));
        let kinds = (self.param_kind, self.reduce_kind);
        let prefetches = self.shared.lock().prefetches;
        let tell = |_: &Vec<GradHook>| describe(name, &params, reshard, kinds, (prefetches, &self.offload));
        let (hooks, all) = agree::built(&self.ranks.all, SHARDING, hooks, tell)?;
        agree::on_lines("the parameters of a unit", &all)?;
        self.send_values(&params)?;
        let made = params.iter().map(|param| self.shard_parameter(name, param)).collect::<Result<Vec<_>, ShardError>>();
        // Memory or a disk may run out in the middle, on one rank alone.
        let (made, _) = agree::built(&self.ranks.all, SHARDING, made, |_| ())?;
        self.hooks.extend(hooks);
        self.names.insert(name.to_owned());
        let reductions = reductions(&made, self.reduce_kind);
        self.shared.lock().units.push(UnitState::new(name.to_owned(), made, reductions, reshard));
        Ok(ShardedUnit { shared: self.shared.clone(), unit: Some(number) })
    }

    fn hooks_of(&self, unit: usize, params: &[Parameter]) -> Result<Vec<GradHook>, ShardError> {
        let trained = params.iter().enumerate().filter(|(_, param)| param.tensor().requires_grad());
        let hook = |(index, param): (usize, &Parameter)| {
            let shared = self.shared.clone();
            let hook = GradHook::new(param.tensor(), move || shared.lock().ready(unit, index));
            hook.map_err(|error| {
                let reason = format!("{}: it must be a leaf, and have no other hook", error.message());
                OptimizerError::parameter(param, index, reason).into()
            })
        };
        trained.map(hook).collect()
    }

    /// Gives all ranks rank 0's values.
    fn send_values(&self, params: &[Parameter]) -> Result<(), ShardError> {
        let _no_grad = tch::no_grad_guard();
        let mut sent = params.iter().filter(|_| self.ranks.all.size() > 1);
        sent.try_for_each(|param| Ok(self.ranks.all.broadcast(&mut param.tensor().f_detach()?, 0)?))
    }

    /// The rows that this rank keeps.
    fn shard_parameter(&self, unit: &str, param: &Parameter) -> Result<ShardedParam, ShardError> {
        let _no_grad = tch::no_grad_guard();
        let layout = Layout::new(param.tensor().size(), self.ranks.parts.rank(), self.ranks.parts.size());
        let kind = self.param_kind.unwrap_or(param.tensor().kind());
        Ok(ShardedParam::new(param, layout, kind, unit, &self.shared.lock().home)?)
    }

    /// With the first unit, opens what the policy needs.
    fn open_home(&self, name: &str, device: Device) -> Result<(), ShardError> {
        let mut engine = self.shared.lock();
        if engine.units.is_empty() {
            engine.home = Home::open(&self.offload, device)?;
        }
        let unit = |reason: String| Err(ShardError::Unit { name: name.to_owned(), reason });
        if *engine.home.policy() != self.offload {
            return unit("its `offload_policy` is another one than the first unit's: set it before".to_owned());
        }
        if self.offload != OffloadPolicy::None && engine.home.device != device {
            let first = engine.home.device;
            return unit(format!(
                "it is on {device:?}, but should be on {first:?}, as the first unit: rows are offloaded"
            ));
        }
        Ok(())
    }

    fn check(&self, name: &str, params: &[Parameter]) -> Result<(), ShardError> {
        let unit = |reason: &str| Err(ShardError::Unit { name: name.to_owned(), reason: reason.to_owned() });
        if params.is_empty() {
            return unit("it has no parameters: give it those of the layers that it computes");
        }
        let is_real = |kind: &Kind| matches!(kind, Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double);
        if let Some(kind) = [self.param_kind, self.reduce_kind].into_iter().flatten().find(|kind| !is_real(kind)) {
            let expected = "float16, bfloat16, float32 or float64";
            return unit(&format!("its `mixed_precision` is of {kind:?}, but should be of {expected}"));
        }
        if self.names.contains(name) {
            return unit("its name is that of another unit");
        }
        let device = params[0].tensor().device();
        for (index, param) in params.iter().enumerate() {
            let of_unit = |reason| OptimizerError::parameter(param, index, format!("{reason} (the unit is `{name}`)"));
            self.check_parameter(param, device).map_err(of_unit)?;
        }
        Ok(())
    }

    fn check_parameter(&self, param: &Parameter, device: Device) -> Result<(), String> {
        let tensor = param.tensor();
        if !tensor.defined() || tensor.is_sparse() || tensor.is_mkldnn() {
            return Err("it is undefined or not dense".to_owned());
        }
        let id = TensorId::of(tensor);
        let engine = self.shared.lock();
        if let Some(unit) = engine.units.iter().find(|unit| unit.position(id).is_some()) {
            return Err(format!(
                "it is in the unit `{}` already: give a parameter that several units use to none, so that `build` has it",
                unit.name
            ));
        }
        if SHARDED.contains(tensor) || SHARDED_GRADIENTS.contains(tensor) || AVERAGED.contains(tensor) {
            return Err("another part shards it or averages its gradient: use one of them".to_owned());
        }
        if tensor.dim() == 0 || tensor.numel() == 0 {
            return Err("it has no rows to part: give it one dimension at least, and elements".to_owned());
        }
        if !matches!(tensor.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
            return Err(format!(
                "it is of dtype {:?}, but should be of float16, bfloat16, float32 or float64",
                tensor.kind()
            ));
        }
        if !tensor.is_leaf() {
            return Err("it is no leaf, but computed from others".to_owned());
        }
        if tensor.device() != device {
            return Err(format!("it is on {:?}, and others of its unit on {device:?}", tensor.device()));
        }
        let is_sent = tensor.device().is_cuda() || (self.ranks.all.backend() != Backend::Nccl && device == Device::Cpu);
        if !is_sent {
            return Err(format!(
                "it is on {device:?}, from where the group cannot send it: NCCL sends from GPUs alone"
            ));
        }
        if !overdrive_ffi::is_alone(tensor).unwrap_or(false) {
            return Err(
                "its memory is not contiguous or shared with another tensor, which would lose its values: shard a model \
                 before its parameters are used, and copy parts of larger tensors"
                    .to_owned(),
            );
        }
        Ok(())
    }
}

/// Saved under their names, as the parameters are.
fn check_buffers(buffers: &[(String, Tensor)], params: &[Parameter]) -> Result<(), ShardError> {
    let mut names: HashSet<&str> = params.iter().filter_map(Parameter::name).collect();
    match buffers.iter().find(|(name, _)| !names.insert(name)) {
        Some((buffer, _)) => {
            let reason = format!("the model has two tensors of the name {buffer}: give its buffer another one");
            Err(ShardError::Unit { name: ROOT.to_owned(), reason })
        }
        None => Ok(()),
    }
}

fn describe_buffer((name, tensor): &(String, Tensor)) -> (String, String) {
    let what = match tensor.defined() {
        true => format!("{:?} of shape {:?}", tensor.kind(), tensor.size()),
        false => "undefined".to_owned(),
    };
    (format!("buffer {name}"), what)
}

/// The first parameter that the model lacks, with its unit: it would have no name of its own there.
fn missing(units: &[UnitState], model: &[Parameter]) -> Option<(String, String)> {
    let there: HashSet<TensorId> = model.iter().map(|param| TensorId::of(param.tensor())).collect();
    units.iter().find_map(|unit| {
        let index = unit.params.iter().position(|param| !there.contains(&TensorId::of(param.whole())))?;
        Some((unit.name.clone(), unit.params[index].shard.label(index)))
    })
}

/// Tied parameters of one unit are one.
fn once_each(params: Vec<Parameter>) -> Vec<Parameter> {
    let mut seen = HashSet::new();
    params.into_iter().filter(|param| !param.tensor().defined() || seen.insert(TensorId::of(param.tensor()))).collect()
}

/// What has to be the same on all ranks.
fn describe(
    name: &str,
    params: &[Parameter],
    reshard: bool,
    kinds: (Option<Kind>, Option<Kind>),
    (prefetches, offload): (bool, &OffloadPolicy),
) -> Vec<(String, String)> {
    let of_param = |(index, param): (usize, &Parameter)| {
        let tensor = param.tensor();
        let frozen = if tensor.requires_grad() { "" } else { ", frozen" };
        let what = format!("{:?} of shape {:?}{frozen}", tensor.kind(), tensor.size());
        (format!("parameter {} of the unit `{name}`", param.label(index)), what)
    };
    let of_unit = [
        ("the unit's name", format!("`{name}`")),
        ("`reshard_after_forward`", reshard.to_string()),
        ("`mixed_precision`", format!("{kinds:?}")),
        ("`prefetch`", prefetches.to_string()),
        ("`offload_policy`", offload.place().to_owned()),
    ];
    let of_unit = of_unit.into_iter().map(|(what, how)| (what.to_owned(), how));
    of_unit.chain(params.iter().enumerate().map(of_param)).collect()
}

/// Other parts look these marks up.
fn marks<'a>(params: impl Iterator<Item = &'a ShardedParam>) -> Vec<Marked> {
    let (mut wholes, mut shards): (Vec<Tensor>, Vec<Tensor>) = (Vec::new(), Vec::new());
    for param in params {
        wholes.push(param.whole().shallow_clone());
        shards.push(param.shard.tensor().shallow_clone());
    }
    let share = |tensors: &[Tensor]| tensors.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
    // Optimizers of the whole parameters would step nothing; a norm of this rank's shards is not that of all.
    let averaged = wholes.iter().chain(&shards).map(Tensor::shallow_clone).collect();
    vec![SHARDED.mark(share(&wholes)), AVERAGED.mark(averaged), SHARDED_GRADIENTS.mark(share(&shards))]
}
