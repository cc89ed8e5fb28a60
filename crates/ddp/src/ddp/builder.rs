//! Builds a `DistributedDataParallel`.

use std::cell::RefCell;
use std::collections::HashMap;

use overdrive_core::{AVERAGED, IGNORED, IS_SHARDED, Module, Parameter, SHARDED, STEPPED_IN_BACKWARD};
use overdrive_ffi::c10d::{Reducer, ReducerOptions};
use overdrive_ffi::{TensorId, TensorList, data_address};
use tch::Tensor;

use super::buffers::Buffers;
use super::precision::{IN_BACKWARD, MixedPrecision, is_floating};
use super::{DistributedDataParallel, State, agree};
use crate::check;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::hooks;

/// How many bytes of parameters and buffers are packed together when they are broadcast: as many as gradients. PyTorch takes
/// 250 MiB, which are there beside all parameters and gradients when a large model is built.
pub(super) const BROADCAST_BYTES: usize = 25 << 20;

/// Options of a [`DistributedDataParallel`]. The defaults are PyTorch's.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `build`"]
pub struct DdpBuilder {
    group: ProcessGroup,
    bucket_cap_mb: Option<f64>,
    bucket_cap_mb_list: Vec<f64>,
    skip_all_reduce_unused_params: bool,
    find_unused_parameters: bool,
    static_graph: bool,
    gradient_as_bucket_view: bool,
    broadcast_buffers: bool,
    check_model: bool,
    ignored: Vec<String>,
    sparse: Vec<String>,
    precision: Option<MixedPrecision>,
}

impl DdpBuilder {
    pub(super) fn new(group: &ProcessGroup) -> Self {
        Self {
            group: group.clone(),
            bucket_cap_mb: None,
            bucket_cap_mb_list: Vec::new(),
            skip_all_reduce_unused_params: false,
            find_unused_parameters: false,
            static_graph: false,
            gradient_as_bucket_view: false,
            broadcast_buffers: true,
            check_model: true,
            ignored: Vec::new(),
            sparse: Vec::new(),
            precision: None,
        }
    }

    /// The largest size of a gradient bucket, in MiB. Smaller buckets are sent earlier, larger ones have less overhead.
    /// 25 by default, with a first bucket of 1.
    pub fn bucket_cap_mb(mut self, mib: f64) -> Self {
        self.bucket_cap_mb = Some(mib);
        self
    }

    /// The largest sizes of the buckets, in MiB, in the order in which their gradients become ready; the last one holds for
    /// all further buckets. In place of [`bucket_cap_mb`](Self::bucket_cap_mb). With
    /// [`find_unused_parameters`](Self::find_unused_parameters), where that order is not learnt, it is the parameters' order.
    pub fn bucket_cap_mb_list(mut self, mib: impl IntoIterator<Item = f64>) -> Self {
        self.bucket_cap_mb_list = mib.into_iter().collect();
        self
    }

    /// Do not reduce parameters that a search finds unused: they have to be the same on all ranks in all passes, or ranks
    /// wait for each other until the timeout. Only with [`find_unused_parameters`](Self::find_unused_parameters). Passes
    /// cannot be held back then, for accumulation or by `no_sync`, and `join` is refused.
    pub fn skip_all_reduce_unused_params(mut self, skip: bool) -> Self {
        self.skip_all_reduce_unused_params = skip;
        self
    }

    /// Search the graph before each backward for parameters that it does not reach. Needed where there can be some.
    /// Costs time, and the buckets keep their first order.
    pub fn find_unused_parameters(mut self, find: bool) -> Self {
        self.find_unused_parameters = find;
        self
    }

    /// Promise that every backward reaches the same parameters equally often. Allows unused parameters and activation
    /// checkpointing without a search.
    pub fn static_graph(mut self, is_static: bool) -> Self {
        self.static_graph = is_static;
        self
    }

    /// Make the gradients views of the buckets, which saves memory and a copy. Zero them in place then: freed gradients
    /// are copied into the buckets and become views again. The `zero_grad` of tch's tensors and optimizers fails on
    /// views; that of [`TchOptimizer`](overdrive_core::TchOptimizer) does not.
    pub fn gradient_as_bucket_view(mut self, view: bool) -> Self {
        self.gradient_as_bucket_view = view;
        self
    }

    /// Overwrite buffers with rank 0's before a forward pass that follows a synchronised backward. True by default.
    pub fn broadcast_buffers(mut self, broadcast: bool) -> Self {
        self.broadcast_buffers = broadcast;
        self
    }

    /// Compare the model over ranks through the store, and report the first difference on every rank. True by default.
    /// Switch it off on all ranks if some run Python, which does not take part in it; libtorch's own check remains.
    pub fn check_model(mut self, check: bool) -> Self {
        self.check_model = check;
        self
    }

    /// Names of parameters and buffers to leave alone, because each rank has different ones or the program averages
    /// them itself: they are neither sent nor averaged nor compared.
    ///
    /// # Source
    /// `DistributedDataParallel._set_params_and_buffers_to_ignore_for_model`
    #[doc(alias = "_set_params_and_buffers_to_ignore_for_model")]
    pub fn ignore<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.ignored.extend(names.into_iter().map(Into::into));
        self
    }

    /// Names of parameters whose gradients are sparse, such as those of an embedding with `sparse: true`. They are averaged
    /// over Gloo, as sparse tensors of the rows that any rank has. Every pass has to reach them, and there can be no
    /// communication hook.
    ///
    /// PyTorch finds them by the class of their module.
    pub fn sparse_gradients<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.sparse.extend(names.into_iter().map(Into::into));
        self
    }

    /// Runs passes in a lower precision, and steps in full precision. From [`forward`](DistributedDataParallel::forward)
    /// to the end of its backward the parameters are copies of `param_dtype`; the program gives inputs of that dtype.
    /// Before and after that, where the optimizer steps and checkpoints are made, they are the parameters that were
    /// wrapped, and so are their gradients, averaged in `reduce_dtype`: call neither between forward and backward
    /// (gradients may be zeroed there). Passes whose gradients stay local add up in full precision, where PyTorch rounds
    /// them. Each forward pass has one backward pass, before the next forward; another one is an error.
    ///
    /// Not with [`gradient_as_bucket_view`](Self::gradient_as_bucket_view), [`static_graph`](Self::static_graph),
    /// [`sparse_gradients`](Self::sparse_gradients), a communication hook, `join` by active ranks, or an
    /// optimizer that steps in backward.
    ///
    /// # Source
    /// `DistributedDataParallel(mixed_precision=_MixedPrecision(..))`
    pub fn mixed_precision(mut self, precision: MixedPrecision) -> Self {
        self.precision = Some(precision);
        self
    }

    /// Wraps a module, or a `VarStore`: its parameters in their order, and its buffers.
    ///
    /// # Errors
    /// As [`build_from`](Self::build_from).
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn build(self, model: &impl Module) -> Result<DistributedDataParallel, DdpError> {
        let named = |(index, it): (usize, Parameter)| {
            let name = it.name().map_or_else(|| index.to_string(), str::to_owned);
            (name, it.tensor().shallow_clone())
        };
        let params = model.named_parameters().into_iter().enumerate().map(named).collect();
        self.build_from(params, model.named_buffers())
    }

    /// Wraps parameters and buffers that are given by name, in the same order on all ranks. Parameters that require no
    /// gradient are only broadcast at the start.
    ///
    /// # Errors
    /// [`DdpError::ModelMismatch`] on every rank when the models differ; [`DdpError::NoParameters`] when no parameter
    /// requires a gradient; also when an option is outside its range, a name to ignore is unknown, a parameter is not a
    /// leaf, a parameter or buffer is sparse or of a dtype that no backend sends, or a rank has exited or does not take
    /// part within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn build_from(
        self,
        params: Vec<(String, Tensor)>,
        buffers: Vec<(String, Tensor)>,
    ) -> Result<DistributedDataParallel, DdpError> {
        let in_bytes = |mib: &f64| bucket_bytes(*mib).map(|bytes| bytes as i64);
        let bucket_list = self.bucket_cap_mb_list.iter().map(in_bytes).collect::<Result<Vec<_>, _>>()?;
        let bucket_bytes = self.bucket_cap_mb.map(bucket_bytes).transpose()?;
        let unknown = |option, names: &[String], expected, is_given: &dyn Fn(&String) -> bool| {
            let found = names.iter().find(|name| !is_given(name));
            found.map_or(Ok(()), |name| Err(DdpError::InvalidOption { option, found: format!("{name:?}"), expected }))
        };
        let is_parameter = |name: &String| params.iter().any(|(given, _)| given == name);
        let is_buffer = |name: &String| buffers.iter().any(|(given, _)| given == name);
        let expected = "names of the model's parameters and buffers";
        unknown("ignore", &self.ignored, expected, &|name| is_parameter(name) || is_buffer(name))?;
        unknown("sparse_gradients", &self.sparse, "names of the model's parameters", &is_parameter)?;
        let is_named = |name: &String| self.sparse.contains(name);
        if params.iter().any(|(name, it)| is_named(name) && check::carried_by_nccl(&self.group, it.device())) {
            let reason = "only Gloo averages sparse gradients: make the embedding with `sparse: false`".to_owned();
            return Err(DdpError::Unsupported { op: "sparse_gradients", reason });
        }
        let is_ignored = |(name, _): &(String, Tensor)| self.ignored.contains(name);
        let (ignored, params): (Vec<_>, Vec<_>) = params.into_iter().partition(is_ignored);
        let buffers: Vec<_> = buffers.into_iter().filter(|it| !is_ignored(it)).collect();
        check_parameters(&params)?;
        for (name, tensor) in &buffers {
            check::in_model(tensor).map_err(|reason| DdpError::InvalidBuffer { name: name.clone(), reason })?;
        }
        let precision = self.precision.unwrap_or_default();
        self.check_precision(&params)?;
        precision.convert(&buffers)?;
        if self.check_model {
            agree::on_model(&self.group, &params, &buffers)?;
        }
        let detached = |named: &[(String, Tensor)]| {
            named.iter().map(|(_, tensor)| tensor.f_detach()).collect::<Result<Vec<_>, _>>()
        };
        let mut states = detached(&params)?;
        let named: Vec<_> = buffers.iter().map(|(name, _)| name.clone()).zip(detached(&buffers)?).collect();
        states.extend(named.iter().map(|(_, buffer)| buffer.shallow_clone()));
        let states = TensorList::new(&states)?;
        let buffers = if self.broadcast_buffers { Buffers::new(named)? } else { None };
        let (trained, frozen): (Vec<_>, Vec<_>) = params.into_iter().partition(|(_, tensor)| tensor.requires_grad());
        if trained.is_empty() {
            return Err(DdpError::NoParameters);
        }
        // An optimizer that steps in backward can wait for one reducer only.
        let twice = |tensor: &Tensor| AVERAGED.contains(tensor) && STEPPED_IN_BACKWARD.contains(tensor);
        if let Some((name, _)) = trained.iter().find(|(_, tensor)| twice(tensor)) {
            return Err(DdpError::WrappedTwice { name: name.clone() });
        }
        let failed = |source| DdpError::between(self.group.context("DistributedDataParallel"), source);
        let list = TensorList::new(&trained.iter().map(|(_, tensor)| tensor).collect::<Vec<_>>())?;
        self.group.engine().verify_params(&list).map_err(failed)?;
        self.group.engine().broadcast_coalesced(&states, BROADCAST_BYTES, 0).map_err(failed)?;
        let low_frozen = precision.frozen(&frozen)?;
        let options = ReducerOptions {
            bucket_bytes,
            bucket_list: &bucket_list,
            skip_unused: self.skip_all_reduce_unused_params && self.find_unused_parameters,
            find_unused_parameters: self.find_unused_parameters,
            gradient_as_bucket_view: self.gradient_as_bucket_view,
            static_graph: self.static_graph,
            broadcast_buffers: self.broadcast_buffers,
            low: precision.param_dtype,
            frozen: low_frozen.as_ref(),
        };
        let is_sparse = |name: &str| self.sparse.iter().any(|sparse| sparse == name);
        let mut reducer = Reducer::new(self.group.engine(), &trained, is_sparse, &options).map_err(failed)?;
        let mut hook = None;
        if self.precision.is_some() {
            let (driven, carried) = hooks::driven(precision.hook(&self.group));
            reducer.set_hook(driven)?;
            hook = Some(carried);
        }
        Ok(DistributedDataParallel {
            reducer: RefCell::new(reducer),
            hook: RefCell::new(hook),
            is_mixed: self.precision.is_some(),
            _marked: [
                AVERAGED.mark(trained.iter().map(|(_, tensor)| tensor.shallow_clone()).collect()),
                IGNORED.mark(ignored.into_iter().map(|(_, tensor)| tensor).collect()),
            ],
            averaged: trained.iter().map(|(_, tensor)| TensorId::of(tensor)).collect(),
            params: trained,
            frozen,
            buffers,
            states,
            finds_unused: self.find_unused_parameters && !self.static_graph,
            is_static: self.static_graph,
            has_sparse: !self.sparse.is_empty(),
            skips_unused: self.skip_all_reduce_unused_params && self.find_unused_parameters,
            state: RefCell::new(State { needs_buffers: true, ..State::default() }),
            group: self.group,
        })
    }
}

impl DdpBuilder {
    /// Refuses what mixed precision cannot do.
    fn check_precision(&self, params: &[(String, Tensor)]) -> Result<(), DdpError> {
        let Some(precision) = self.precision else { return Ok(()) };
        precision.check()?;
        let with = [
            (self.gradient_as_bucket_view, "gradient_as_bucket_view"),
            (self.static_graph, "static_graph"),
            (!self.sparse.is_empty(), "sparse_gradients"),
        ];
        let unsupported = |reason: String| Err(DdpError::Unsupported { op: "mixed_precision", reason });
        if let Some((_, option)) = with.into_iter().find(|(is_set, _)| *is_set) {
            return unsupported(format!("it cannot be used together with {option}"));
        }
        if params.iter().any(|(_, param)| STEPPED_IN_BACKWARD.contains(param)) {
            return unsupported(IN_BACKWARD.to_owned());
        }
        let is_other = |tensor: &Tensor| tensor.requires_grad() && !is_floating(tensor.kind());
        match params.iter().find(|(_, tensor)| is_other(tensor)) {
            Some((name, tensor)) => unsupported(format!("the parameter {name:?} is {:?}", tensor.kind())),
            None => Ok(()),
        }
    }
}

fn bucket_bytes(mib: f64) -> Result<usize, DdpError> {
    let bytes = mib * f64::from(1 << 20);
    if bytes >= 1.0 && bytes < i64::MAX as f64 {
        return Ok(bytes as usize);
    }
    Err(DdpError::InvalidOption { option: "bucket_cap_mb", found: mib.to_string(), expected: "above 0 and finite" })
}

fn check_parameters(params: &[(String, Tensor)]) -> Result<(), DdpError> {
    let mut seen = HashMap::new();
    for (index, (name, tensor)) in params.iter().enumerate() {
        let wrong = |reason: String| DdpError::InvalidParameter { name: name.clone(), reason };
        check::in_model(tensor).map_err(wrong)?;
        if SHARDED.contains(tensor) {
            return Err(wrong(format!("cannot be used here: {IS_SHARDED}")));
        }
        if tensor.requires_grad() && !tensor.is_leaf() {
            return Err(wrong("was computed from other tensors, but should be a leaf".to_owned()));
        }
        if tensor.numel() > 0
            && tensor.requires_grad()
            && let Some(other) = seen.insert(data_address(tensor), index)
        {
            let other = &params[other].0;
            return Err(wrong(format!("is the same tensor as {other:?}, but should be given once")));
        }
    }
    Ok(())
}
