//! Averages gradients over ranks in buckets, each on the rank that owns its parameters.

use std::collections::{HashSet, VecDeque};

use overdrive_core::{OptimizerError, Parameter, TorchError};
use overdrive_ddp::{ProcessGroup, ReduceOp, Work};
use overdrive_ffi::{Arg, LazyOp, set_grad, take_grad};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::error::ShardError;
use crate::link::Link;
use crate::ownership::Ownership;
use crate::packing::{bytes_of, free_sent, packed};

static MUL: LazyOp = LazyOp::new("aten::mul_", "Scalar");

/// How many reductions are under way at a time: so many, and more while they have no more bytes than a full bucket.
const AT_ONCE: usize = 2;
const SMALL_AT_ONCE: usize = 4;

/// Gradients of one rank's parameters, of one dtype and device, sent as one tensor.
struct Bucket {
    owner: usize,
    members: Vec<Member>,
}

struct Member {
    /// The index among all parameters.
    index: usize,
    parameter: Parameter,
    /// Its gradient is the mean over ranks, on the owner; otherwise it is this rank's own.
    is_averaged: bool,
    /// The mean of earlier passes, until this pass's is added to it.
    kept: Option<Tensor>,
    /// `kept` was set in this pass: the gradient stays even if no rank used the parameter now.
    has_earlier: bool,
    /// A plain `loss.backward()` has added to its gradient, and the sum can no longer be told from the mean.
    is_stray: bool,
}

impl Member {
    fn param(&self) -> &Tensor {
        self.parameter.tensor()
    }
}

/// A backward pass that averages.
#[derive(Default)]
struct Pass {
    /// For each bucket, how many of its gradients are not computed yet.
    pending: Vec<usize>,
    /// Indices of parameters whose gradients are computed.
    ready: HashSet<usize>,
    /// The first bucket that is not under way. Ranks send buckets in the same order.
    next: usize,
    under_way: VecDeque<(usize, Tensor, Work)>,
    told: Passed,
    /// What is wrong with a gradient of this rank: the pass goes on with zeros in its place, as the others wait.
    refused: Option<ShardError>,
    /// Communication has failed: nothing more is sent.
    broken: Option<ShardError>,
}

/// What a rank tells of a good pass.
#[derive(Clone, Default, Deserialize, Serialize)]
pub(super) struct Passed {
    /// Indices of parameters without a gradient on this rank.
    pub(super) missing: Vec<usize>,
    /// How often gradients were freed since the last exchange.
    pub(super) freed: u64,
    /// A pass that left gradients local had failed, and they were freed since.
    pub(super) is_anew: bool,
}

/// The buckets, and the pass under way.
pub(super) struct Reduction {
    group: ProcessGroup,
    link: Link,
    buckets: Vec<Bucket>,
    /// Of a full bucket.
    bytes: usize,
    pass: Option<Pass>,
    /// A pass that leaves gradients local is under way.
    is_local: bool,
    /// Such a pass has failed since gradients were last averaged, when they had been freed so often.
    failed: Option<u64>,
    /// How often they had been freed when they were last averaged.
    freed: u64,
}

impl Reduction {
    /// Buckets of at most `bytes` of the trained parameters, and large ones alone, in the order in which backward passes are
    /// about to complete them: they come to the last parameter that was given first, however the optimizer groups them.
    pub(super) fn new(group: &ProcessGroup, ownership: &Ownership, link: &Link, bytes: usize) -> Self {
        let trained = ownership.given.iter().rev().map(|&index| (index, &ownership.params[index])).enumerate();
        let keyed = trained.filter(|(_, (_, param))| param.tensor().requires_grad()).map(|(place, (index, param))| {
            let (tensor, parameter) = (param.tensor(), param.share());
            let member =
                Member { index, parameter, is_averaged: false, kept: None, has_earlier: false, is_stray: false };
            ((ownership.owner[index], tensor.kind(), tensor.device()), bytes_of(tensor), (place, member))
        });
        let mut packed = packed(keyed, bytes);
        packed.sort_by_key(|(_, members)| members.last().map(|(place, _)| *place));
        let members = |members: Vec<(usize, Member)>| members.into_iter().map(|(_, member)| member).collect();
        let buckets = packed.into_iter().map(|((owner, ..), it)| Bucket { owner, members: members(it) }).collect();
        let (group, link, freed) = (group.clone(), link.clone(), link.freed());
        Self { group, link, buckets, bytes, pass: None, is_local: false, failed: None, freed }
    }

    /// What has to be the same on all ranks, a line for each bucket.
    pub(super) fn describe(&self) -> Vec<(String, String)> {
        let of = |(number, bucket): (usize, &Bucket)| {
            let members: Vec<String> = bucket.members.iter().map(|it| it.parameter.label(it.index)).collect();
            (format!("bucket {number} of gradients"), members.join(", "))
        };
        self.buckets.iter().enumerate().map(of).collect()
    }

    /// Each parameter with its index among all and its bucket's number, in any order.
    pub(super) fn places(&self) -> Vec<(Parameter, usize, usize)> {
        let of_bucket = |(number, bucket): (usize, &Bucket)| {
            let of_member = move |member: &Member| (member.parameter.share(), member.index, number);
            bucket.members.iter().map(of_member).collect::<Vec<_>>()
        };
        self.buckets.iter().enumerate().flat_map(of_bucket).collect()
    }

    pub(super) fn is_within_pass(&self) -> bool {
        self.pass.is_some()
    }

    /// Begins a pass that averages. What is in an owner's gradient from earlier ones is set aside.
    pub(super) fn begin(&mut self) -> Result<(), TorchError> {
        let freed = self.link.freed();
        let failed = self.failed.take();
        let is_anew = failed.is_some_and(|at| freed > at);
        let mut refused = (failed.is_some() && !is_anew).then(|| {
            let reason = "a backward pass that left gradients local has failed since the last exchange: call the \
                          optimizer's `zero_grad` on all ranks, and begin the window anew on all";
            OptimizerError::NotNow { part: "ShardedDataParallel", reason }
        });
        for member in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.members) {
            let grad = member.param().f_grad()?;
            (member.kept, member.has_earlier) = (None, false);
            if std::mem::take(&mut member.is_stray) && grad.defined() {
                let reason =
                    "`loss.backward()` has added to its gradient: call `backward` of the `ShardedDataParallel`";
                refused.get_or_insert(OptimizerError::parameter(&member.parameter, member.index, reason));
            }
            if std::mem::take(&mut member.is_averaged) && grad.defined() {
                set_grad(member.param(), None)?;
                member.kept = Some(grad);
            }
        }
        let pending = self.buckets.iter().map(|bucket| bucket.members.len()).collect();
        let told = Passed { missing: Vec::new(), freed: freed - self.freed, is_anew };
        self.freed = freed;
        self.link.set_local(false);
        self.pass = Some(Pass { pending, told, refused: refused.map(ShardError::from), ..Pass::default() });
        Ok(())
    }

    /// Begins a pass that leaves gradients local. Multiplies the owner's mean by the number of ranks: the next average
    /// divides the sum by it, and only the owner has this mean.
    pub(super) fn begin_local(&mut self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        let ranks = self.group.size() as f64;
        for member in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.members) {
            let grad = member.param().f_grad()?;
            if std::mem::take(&mut member.is_averaged) && grad.defined() && ranks > 1.0 {
                MUL.call(&[Arg::Tensor(&grad), Arg::Double(ranks)])?;
            }
            member.is_stray &= grad.defined();
        }
        self.is_local = true;
        self.link.set_local(true);
        Ok(())
    }

    /// Ends such a pass.
    pub(super) fn end_local(&mut self, is_good: bool) {
        self.is_local = false;
        if !is_good {
            self.failed = Some(self.link.freed());
        }
    }

    /// The gradient of this parameter of this bucket is complete.
    pub(super) fn ready(&mut self, bucket: usize, index: usize) {
        let Some(member) = self.buckets[bucket].members.iter_mut().find(|it| it.index == index) else { return };
        let Some(pass) = &mut self.pass else {
            member.is_stray |= !self.is_local;
            self.link.set_local(true);
            return;
        };
        if !pass.ready.insert(index) {
            let reason = "it got a gradient twice in one backward pass, the second after the first may have been sent: run \
                          no backward pass within the pass, or hold it back by `no_sync`";
            let error = OptimizerError::parameter(&member.parameter, index, reason);
            pass.refused.get_or_insert(error.into());
            return;
        }
        pass.pending[bucket] = pass.pending[bucket].saturating_sub(1);
        while self.pass.as_ref().is_some_and(|pass| pass.pending.get(pass.next) == Some(&0)) {
            self.send_next();
        }
    }

    /// Sends all that is left, and waits. Returns what to tell the other ranks, or what was wrong with a gradient.
    ///
    /// The outer error is one of communication.
    pub(super) fn finish(&mut self) -> Result<Result<Passed, ShardError>, ShardError> {
        while self.pass.as_ref().is_some_and(|pass| pass.next < self.buckets.len()) {
            self.send_next();
        }
        while self.pass.as_ref().is_some_and(|pass| !pass.under_way.is_empty()) {
            self.wait_for_first();
        }
        let Some(pass) = self.pass.take() else { return Ok(Ok(Passed::default())) };
        if let Some(broken) = pass.broken {
            return Err(broken);
        }
        Ok(pass.refused.map_or(Ok(pass.told), Err))
    }

    /// Takes away the gradients of parameters that had none on any rank, unless earlier passes gave them one.
    pub(super) fn without(&mut self, unused: &[usize]) -> Result<(), TorchError> {
        for member in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.members) {
            if unused.contains(&member.index) && member.is_averaged && !member.has_earlier {
                set_grad(member.param(), None)?;
                member.is_averaged = false;
            }
        }
        Ok(())
    }

    /// Frees all gradients, after a pass that has failed.
    pub(super) fn clear(&mut self) -> Result<(), TorchError> {
        self.pass = None;
        self.link.free();
        for member in self.buckets.iter_mut().flat_map(|bucket| &mut bucket.members) {
            (member.is_averaged, member.is_stray, member.kept) = (false, false, None);
            set_grad(member.param(), None)?;
        }
        Ok(())
    }

    /// The averaged gradients of this rank.
    pub(super) fn own(&self) -> Result<Vec<Tensor>, TorchError> {
        let own = self.buckets.iter().filter(|bucket| bucket.owner == self.group.rank());
        let grads = own.flat_map(|bucket| &bucket.members).map(|member| Ok(member.param().f_grad()?));
        let grads = grads.collect::<Result<Vec<_>, TorchError>>()?;
        Ok(grads.into_iter().filter(Tensor::defined).collect())
    }

    fn send_next(&mut self) {
        let Some(pass) = &mut self.pass else { return };
        let number = pass.next;
        pass.next += 1;
        if pass.broken.is_some() {
            return;
        }
        if let Err(error) = self.send(number) {
            self.broken(error);
        }
    }

    fn broken(&mut self, error: ShardError) {
        self.link.breaks();
        if let Some(pass) = &mut self.pass {
            pass.under_way.clear();
            pass.broken.get_or_insert(error);
        }
    }

    fn send(&mut self, number: usize) -> Result<(), ShardError> {
        while !self.has_room(number) {
            self.wait_for_first();
        }
        let Some(pass) = self.pass.as_mut().filter(|pass| pass.broken.is_none()) else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let bucket = &self.buckets[number];
        let mut parts = Vec::with_capacity(bucket.members.len());
        for member in &bucket.members {
            let grad = member.param().f_grad()?;
            if !grad.defined() {
                pass.told.missing.push(member.index);
            } else if grad.is_sparse() || grad.is_mkldnn() {
                let reason = "its gradient is sparse, but should be dense: make an embedding with `sparse: false`";
                let error = OptimizerError::parameter(&member.parameter, member.index, reason);
                pass.refused.get_or_insert(error.into());
            } else if bucket.members.len() == 1 {
                drop(grad);
                // The reduction overwrites it.
                let taken = take_grad(member.param())?.map(|grad| grad.f_reshape([-1])).transpose()?;
                parts.extend(taken);
                continue;
            } else {
                parts.push(grad.f_reshape([-1])?);
                continue;
            }
            parts.push(member.param().f_zeros_like()?.f_detach()?.f_reshape([-1])?);
        }
        let mut flat = match &parts[..] {
            [one] => one.f_detach()?,
            several => Tensor::f_cat(several, 0)?,
        };
        drop(parts);
        for member in &bucket.members {
            set_grad(member.param(), None)?;
        }
        // Before the sum, as DDP does: float16 would overflow.
        MUL.call(&[Arg::Tensor(&flat), Arg::Double(1.0 / self.group.size() as f64)])?;
        let work = self.group.reduce_async(&mut flat, bucket.owner, ReduceOp::Sum)?;
        pass.under_way.push_back((number, flat, work));
        Ok(())
    }

    /// Whether another bucket may be under way.
    fn has_room(&self, number: usize) -> bool {
        let Some(pass) = &self.pass else { return true };
        let of_flat = |(_, flat, _): &(usize, Tensor, Work)| bytes_of(flat);
        let own: usize = self.buckets[number].members.iter().map(|member| bytes_of(member.param())).sum();
        let bytes = pass.under_way.iter().map(of_flat).sum::<usize>().saturating_add(own);
        pass.under_way.len() < AT_ONCE || (pass.under_way.len() < SMALL_AT_ONCE && bytes <= self.bytes)
    }

    fn wait_for_first(&mut self) {
        let Some((number, flat, work)) = self.pass.as_mut().and_then(|pass| pass.under_way.pop_front()) else { return };
        let done = work.wait().map_err(ShardError::from).and_then(|()| self.take(number, &flat));
        if let Err(error) = done {
            self.broken(error);
        }
    }

    /// Gives the owner's parameters their means.
    fn take(&mut self, number: usize, flat: &Tensor) -> Result<(), ShardError> {
        let _no_grad = tch::no_grad_guard();
        let bucket = &mut self.buckets[number];
        if bucket.owner != self.group.rank() {
            return Ok(free_sent(flat)?);
        }
        let mut first = 0;
        for member in &mut bucket.members {
            let numel = member.param().numel() as i64;
            let mut mean = flat.f_narrow(0, first, numel)?.f_view(&member.param().size()[..])?;
            first += numel;
            if let Some(kept) = member.kept.take() {
                mean = mean.f_add_(&kept)?;
                member.has_earlier = true;
            }
            set_grad(member.param(), Some(&mean))?;
            member.is_averaged = true;
        }
        Ok(())
    }
}
