//! The whole optimizer's parameters and groups, and this rank's part of them.

use std::collections::HashMap;
use std::ops::Range;

use overdrive_core::{Entry, Growth, Optimizer, OptimizerError, Parameter, StateDict, Stateful};
use overdrive_ddp::{Backend, ProcessGroup};
use overdrive_ffi::TensorId;
use tch::{Device, Kind, Tensor};

use crate::partition::owners;

pub(crate) const PART: &str = "ZeroRedundancyOptimizer";

/// The parameters and groups of the optimizer over all ranks: the same on each.
#[derive(Debug)]
pub(crate) struct Ownership {
    /// All parameters, in the order of the groups.
    pub(crate) params: Vec<Parameter>,
    /// The group of each parameter.
    pub(crate) group_of: Vec<usize>,
    /// The rank that has the state of each parameter.
    pub(crate) owner: Vec<usize>,
    pub(crate) groups: Vec<Group>,
    /// The optimizer keeps copies of the parameters, such as float32 masters.
    pub(crate) keeps_copies: bool,
    /// The options of the groups, where the optimizer tells them: names as in its state, and values.
    options: Vec<(String, String)>,
    /// Indices of parameters, in the order in which they were given.
    pub(crate) given: Vec<usize>,
}

/// What schedules set of a group. It is kept here too, because a rank may own no parameter of a group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) lr: Option<f64>,
    pub(crate) momentum: Option<f64>,
}

/// The optimizer of this rank's parameters.
#[derive(Debug)]
pub(crate) struct Own<O> {
    pub(crate) inner: O,
    /// For each of its parameters, in its order: the index among all.
    pub(crate) params: Vec<usize>,
    /// For each of its groups: the number among all.
    pub(crate) groups: Vec<usize>,
}

impl Ownership {
    /// Builds the whole optimizer once, without state, to learn its groups.
    pub(crate) fn new<O: Optimizer>(
        given: &[Parameter],
        ranks: usize,
        build: &impl Fn(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Self, OptimizerError> {
        check_parameters(given)?;
        let whole = build(given.iter().map(Parameter::share).collect())?;
        check_behavior(PART, &whole)?;
        let places = places_in(given.iter().map(Parameter::tensor));
        let order = indices(&places, &whole.params())?;
        if order.len() != given.len() {
            return refuse("it leaves out parameters that it was given: build it over all that the closure gets");
        }
        let lens = group_lens(&whole)?;
        let mut group_of = Vec::with_capacity(order.len());
        for (group, len) in lens.iter().enumerate() {
            group_of.extend(std::iter::repeat_n(group, *len));
        }
        if group_of.len() != order.len() {
            return refuse("its groups have another number of parameters than it has");
        }
        let params: Vec<Parameter> = order.iter().map(|&index| given[index].share()).collect();
        let mut sizes: Vec<Vec<usize>> = vec![Vec::new(); lens.len()];
        for (param, &group) in params.iter().zip(&group_of) {
            sizes[group].push(param.tensor().numel());
        }
        let owner = owners(&sizes, ranks).concat();
        let groups = (0..lens.len()).map(|it| Group { lr: whole.lr(it), momentum: whole.momentum(it) }).collect();
        let keeps_copies = whole.behavior().keeps_copies;
        let mut in_order = vec![0; order.len()];
        for (index, &place) in order.iter().enumerate() {
            in_order[place] = index;
        }
        Ok(Self { params, group_of, owner, groups, keeps_copies, options: options_of(&whole), given: in_order })
    }

    /// Refuses parameters that the group cannot send.
    pub(crate) fn check_devices(&self, group: &ProcessGroup) -> Result<(), OptimizerError> {
        let is_sent = |param: &Parameter| match (group.backend(), param.tensor().device()) {
            (Backend::Nccl, device) => device.is_cuda(),
            (_, device) => device.is_cuda() || device == Device::Cpu,
        };
        match self.params.iter().position(|param| !is_sent(param)) {
            Some(at) => {
                let found = self.params[at].tensor().device();
                let reason =
                    format!("it is on {found:?}, from where the group cannot send it: NCCL sends from GPUs alone");
                Err(OptimizerError::parameter(&self.params[at], at, reason))
            }
            None => Ok(()),
        }
    }

    /// Builds the optimizer of a rank's parameters; `None` if it has none.
    pub(crate) fn build_own<O: Optimizer>(
        &self,
        rank: usize,
        build: &impl Fn(Vec<Parameter>) -> Result<O, OptimizerError>,
    ) -> Result<Option<Own<O>>, OptimizerError> {
        let own: Vec<usize> = self.given.iter().copied().filter(|&index| self.owner[index] == rank).collect();
        if own.is_empty() {
            return Ok(None);
        }
        let mut inner = build(own.iter().map(|&index| self.params[index].share()).collect())?;
        check_behavior(PART, &inner)?;
        let places = places_in(own.iter().map(|&index| self.params[index].tensor()));
        let params: Vec<usize> = indices(&places, &inner.params())?.into_iter().map(|place| own[place]).collect();
        let lens = group_lens(&inner)?;
        if params.len() != own.len() || lens.iter().sum::<usize>() != own.len() {
            return refuse("it leaves out parameters that it was given: build it over all that the closure gets");
        }
        let mut groups = Vec::with_capacity(lens.len());
        // An empty group can be told only by its number.
        let are_all = lens.len() == self.groups.len();
        let mut first = 0;
        for (number, len) in lens.into_iter().enumerate() {
            let members = &params[first..first + len];
            first += len;
            let group = members.first().map(|&index| self.group_of[index]).or(are_all.then_some(number));
            let Some(group) = group.filter(|group| !groups.contains(group)) else {
                return refuse(OTHER_GROUPS);
            };
            if members.iter().any(|&index| self.group_of[index] != group) {
                return refuse(OTHER_GROUPS);
            }
            groups.push(group);
        }
        // A closure may compute rates from all parameters that it gets, as a decay over layers does.
        for (own, &group) in groups.iter().enumerate() {
            if let Some(lr) = self.groups[group].lr.filter(|&lr| inner.lr(own) != Some(lr)) {
                inner.set_lr(own, lr)?;
            }
        }
        Ok(Some(Own { inner, params, groups }))
    }

    /// What has to be the same on all ranks, a line for each parameter, group and option.
    pub(crate) fn describe(&self) -> Vec<(String, String)> {
        let of_param = |(index, param): (usize, &Parameter)| {
            let tensor = param.tensor();
            let frozen = if tensor.requires_grad() { "" } else { ", frozen" };
            let group = self.group_of[index];
            let what = format!("{:?} of shape {:?} in group {group}{frozen}", tensor.kind(), tensor.size());
            (format!("parameter {}", param.label(index)), what)
        };
        let of_group = |(number, group): (usize, &Group)| {
            let rate = group.lr.map_or("no learning rate".to_owned(), |lr| format!("learning rate {lr}"));
            (format!("group {number}"), rate)
        };
        let params = self.params.iter().enumerate().map(of_param);
        let groups = self.groups.iter().enumerate().map(of_group);
        params.chain(groups).chain(self.options.iter().cloned()).collect()
    }

    /// Inserts which parameters the groups have, as the whole optimizer does.
    pub(crate) fn tell_parameters(&self, state: &mut StateDict) {
        let mut counts = vec![0; self.groups.len()];
        for (param, &group) in self.params.iter().zip(&self.group_of) {
            if let Some(name) = param.name() {
                let key = format!("param_groups.{group}.param_names.{}", counts[group]);
                state.insert(key, Entry::Text(name.to_owned()));
            }
            counts[group] += 1;
        }
        for (group, count) in counts.into_iter().enumerate() {
            state.insert(format!("param_groups.{group}.params"), Entry::Int(count));
        }
    }

    /// The rates of a group under the names that the whole optimizer saves them under.
    pub(crate) fn rates(&self, number: usize) -> impl Iterator<Item = (String, f64)> {
        let Group { lr, momentum } = self.groups[number];
        let is_saved = |key: &String| self.options.iter().any(|(name, _)| name == key);
        let named = [("lr", lr), ("momentum", momentum), ("betas.0", momentum)];
        let key = move |(name, value): (&str, Option<f64>)| Some((format!("param_groups.{number}.{name}"), value?));
        named.into_iter().filter_map(key).filter(move |(key, _)| is_saved(key))
    }

    /// The parameters' names, if they have any.
    pub(crate) fn names(&self) -> Option<Vec<&str>> {
        self.params.iter().map(Parameter::name).collect()
    }
}

pub(crate) fn options_of(whole: &dyn Optimizer) -> Vec<(String, String)> {
    let Ok(state) = whole.state_dict() else { return Vec::new() };
    let value = |(key, entry): (&str, &Entry)| {
        let value = match entry {
            Entry::Tensor(_) | Entry::Text(_) => return None,
            Entry::Bool(value) => value.to_string(),
            Entry::Int(value) => value.to_string(),
            Entry::Float(value) => value.to_string(),
        };
        key.contains("param_groups.").then(|| (key.to_owned(), value))
    };
    state.iter().filter_map(value).collect()
}

const OTHER_GROUPS: &str = "the closure puts parameters into other groups when it gets a part of them: it should decide by \
                            name, shape or dtype alone";

fn refuse<T>(reason: &'static str) -> Result<T, OptimizerError> {
    Err(OptimizerError::DoesNotFit { part: PART, reason })
}

fn check_parameters(params: &[Parameter]) -> Result<(), OptimizerError> {
    if params.is_empty() {
        return Err(OptimizerError::NoParameters);
    }
    let mut seen = HashMap::new();
    let are_named = params[0].name().is_some();
    for (index, param) in params.iter().enumerate() {
        let wrong = |reason: String| Err(OptimizerError::parameter(param, index, reason));
        let tensor = param.tensor();
        if !tensor.defined() {
            return wrong("it is undefined".to_owned());
        }
        if tensor.is_sparse() || tensor.is_mkldnn() {
            return wrong("it is not dense, but should be: its values are sent to the other ranks".to_owned());
        }
        if !matches!(tensor.kind(), Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double) {
            let expected = "should be of float16, bfloat16, float32 or float64";
            return wrong(format!("it is of dtype {:?}, but {expected}", tensor.kind()));
        }
        if param.name().is_some() != are_named {
            return wrong("name all parameters or none".to_owned());
        }
        if let Some(before) = seen.insert(TensorId::of(tensor), index) {
            return wrong(format!("it is parameter {before} again: give each once"));
        }
    }
    check_memory(params)
}

/// Each rank steps a part of the parameters, and sends them: two in one memory would not be the same on all ranks.
fn check_memory(params: &[Parameter]) -> Result<(), OptimizerError> {
    let mut ranges: Vec<_> = params.iter().enumerate().map(|(index, param)| (memory(param.tensor()), index)).collect();
    ranges.retain(|(range, _)| !range.is_empty());
    ranges.sort_by_key(|(range, index)| (range.start, *index));
    for pair in ranges.windows(2) {
        let [(first, one), (second, other)] = pair else { continue };
        if first.end > second.start {
            let (index, before) = (*one.max(other), *one.min(other));
            let other = params[before].label(before);
            let reason = format!("it shares memory with parameter {other}: give the same tensor for both, or a copy");
            return Err(OptimizerError::parameter(&params[index], index, reason));
        }
    }
    Ok(())
}

/// The addresses between a dense tensor's first and last byte.
fn memory(tensor: &Tensor) -> Range<usize> {
    let (first, size, stride) = (tensor.data_ptr() as usize, tensor.size(), tensor.stride());
    if tensor.numel() == 0 {
        return first..first;
    }
    let last: i64 = size.iter().zip(&stride).map(|(size, stride)| (size - 1) * stride).sum();
    first..first + (last as usize + 1) * tensor.kind().elt_size_in_bytes()
}

/// No rank would step or send what was added later.
pub(crate) fn check_growth(growth: &Option<Growth>) -> Result<(), OptimizerError> {
    match growth.as_ref().and_then(Growth::added) {
        Some((param, index)) => {
            let reason =
                "it was added to the model after that was sharded, and would not be trained: shard the model anew";
            Err(OptimizerError::parameter(&param, index, reason))
        }
        None => Ok(()),
    }
}

pub(crate) fn check_behavior(part: &'static str, inner: &impl Optimizer) -> Result<(), OptimizerError> {
    let refuse = |reason| Err(OptimizerError::DoesNotFit { part, reason });
    let behavior = inner.behavior();
    if behavior.couples_parameters {
        return refuse(
            "its step of a parameter depends on all others (Prodigy, LAMB with `max_grad_norm`, L-BFGS), and each rank \
             steps a part of them: use an optimizer that steps each parameter by itself",
        );
    }
    if behavior.steps_in_backward || behavior.moves_parameters || behavior.keeps_average {
        return refuse(
            "it steps in the backward pass, or moves or averages parameters besides its steps, which the other ranks \
             would not see: use another optimizer",
        );
    }
    if behavior.communicates {
        return refuse("its steps wait for other ranks, which step other parameters: use another optimizer");
    }
    Ok(())
}

fn places_in<'a>(params: impl Iterator<Item = &'a Tensor>) -> HashMap<TensorId, usize> {
    params.map(TensorId::of).zip(0..).collect()
}

/// Where these parameters are among those that the closure was given.
fn indices(places: &HashMap<TensorId, usize>, params: &[Tensor]) -> Result<Vec<usize>, OptimizerError> {
    match params.iter().map(|param| places.get(&TensorId::of(param)).copied()).collect() {
        Some(indices) => Ok(indices),
        None => refuse("it has parameters that it was not given: build it over what the closure gets"),
    }
}

fn group_lens(inner: &impl Optimizer) -> Result<Vec<usize>, OptimizerError> {
    match inner.group_lens() {
        Some(lens) => Ok(lens),
        None if inner.num_groups() == 1 => Ok(vec![inner.params().len()]),
        None => refuse("it does not tell which parameters its groups have"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_that_share_memory_are_refused_and_parts_of_one_memory_are_not() {
        let whole = Tensor::zeros([6, 4], (Kind::Float, Device::Cpu));
        let check = |tensors: &[Tensor]| {
            let params: Vec<Parameter> = tensors.iter().map(|it| Parameter::unnamed(it.shallow_clone())).collect();
            check_memory(&params).map_err(|error| error.to_string())
        };
        let part = |first, rows| whole.narrow(0, first, rows);
        assert_eq!(check(&[part(3, 3), part(0, 3), part(1, 0)]), Ok(()));
        for [one, other] in [[part(0, 6), part(2, 1)], [part(0, 3), part(2, 2)], [whole.detach(), whole.detach()]] {
            let apart = Tensor::zeros([2], (Kind::Float, Device::Cpu));
            let error = check(&[apart, one, other]).unwrap_err();
            assert!(error.contains("shares memory with parameter number 1"), "{error}");
        }
    }
}
