//! Averages a unit's gradients over ranks, each rank's rows on that rank.

use overdrive_ddp::{ProcessGroup, ReduceOp, Work};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use super::home::Home;
use super::param::ShardedParam;
use super::ranks::Ranks;
use crate::error::ShardError;
use crate::packing::free_sent;

static MUL: LazyOp = LazyOp::new("aten::mul_", "Scalar");

/// The trained parameters of a unit whose gradients are of one dtype; or a large one.
pub(super) struct Reduction {
    /// Their indices in the unit, and where their parts begin, in elements.
    members: Vec<(usize, i64)>,
    /// Elements of all parts of a rank.
    numel: i64,
    kind: Kind,
    device: Device,
    is_large: bool,
    /// The gradients of a pass, `[ranks, elements of a rank]`.
    all: Option<Tensor>,
    under_way: Option<UnderWay>,
}

/// Means on their way.
struct UnderWay {
    /// This rank's part.
    own: Tensor,
    /// All parts, of which this rank's is to be copied when they are here, and where it begins.
    all: Option<(Tensor, i64)>,
    work: Option<Work>,
    /// It was waited for, and is where this rank keeps it.
    is_home: bool,
    /// Whose sums are to be added.
    replicas: Option<ProcessGroup>,
}

/// One for each dtype that gradients are sent in, and for each large parameter; `reduced`: this dtype, or each parameter's
/// own.
pub(super) fn reductions(params: &[ShardedParam], reduced: Option<Kind>) -> Vec<Reduction> {
    let mut all: Vec<Reduction> = Vec::new();
    for (index, param) in params.iter().enumerate().filter(|(_, param)| param.is_trained) {
        let kind = reduced.unwrap_or(param.kind);
        let device = param.whole().device();
        let is_large = param.layout.is_large(kind);
        let at = all.iter().position(|it| it.kind == kind && !it.is_large && !is_large).unwrap_or_else(|| {
            all.push(Reduction { members: Vec::new(), numel: 0, kind, device, is_large, all: None, under_way: None });
            all.len() - 1
        });
        let first = all[at].numel;
        all[at].members.push((index, first));
        all[at].numel += param.layout.part_numel();
    }
    all
}

impl Reduction {
    pub(super) fn has(&self, index: usize) -> bool {
        self.members.iter().any(|(member, _)| *member == index)
    }

    pub(super) fn is_wider(&self, kind: Kind) -> bool {
        self.kind.elt_size_in_bytes() > kind.elt_size_in_bytes()
    }

    /// Takes the gradient of a parameter, adding it to one that was taken before. Returns whether it has one.
    pub(super) fn take(&mut self, index: usize, param: &ShardedParam, adds: bool) -> Result<bool, ShardError> {
        if !param.whole().f_grad()?.defined() {
            return Ok(false);
        }
        let _no_grad = tch::no_grad_guard();
        if self.is_large && self.all.is_none() {
            self.all = param.take_whole_grad(self.kind)?;
            if self.all.is_some() {
                return Ok(true);
            }
        }
        let all = self.prepared(param.layout.ranks)?;
        let first = self.members.iter().find(|(member, _)| *member == index).map_or(0, |(_, first)| *first);
        param.take_grad(&all.f_narrow(1, first, param.layout.part_numel())?, adds)
    }

    /// The memory for a pass: zeros, also in place of gradients that this rank does not have.
    fn prepared(&mut self, ranks: i64) -> Result<Tensor, ShardError> {
        if let Some(all) = &self.all {
            return Ok(all.shallow_clone());
        }
        let all = Tensor::f_zeros([ranks, self.numel], (self.kind, self.device))?;
        Ok(self.all.insert(all).shallow_clone())
    }

    /// Starts to average.
    pub(super) fn send(&mut self, ranks: &Ranks) -> Result<(), ShardError> {
        let _no_grad = tch::no_grad_guard();
        let all = self.prepared(ranks.parts.size() as i64)?;
        self.all = None;
        if ranks.all.size() > 1 {
            // Before the sum, as DDP does: float16 would overflow.
            MUL.call(&[Arg::Tensor(&all), Arg::Double(1.0 / ranks.all.size() as f64)])?;
        }
        let mut all = all.f_view([-1])?;
        let mut under_way = UnderWay {
            own: all.shallow_clone(),
            all: None,
            work: None,
            is_home: false,
            replicas: ranks.replicas.clone(),
        };
        if ranks.parts.size() > 1 {
            let mut own = Tensor::f_empty([self.numel], (self.kind, self.device))?;
            under_way.work = Some(if self.device == Device::Cpu {
                // As Gloo's reduce-scatter does, but that it makes a copy first.
                let work = ranks.parts.all_reduce_async(&mut all, ReduceOp::Sum)?;
                under_way.all = Some((all, ranks.parts.rank() as i64 * self.numel));
                work
            } else {
                ranks.parts.reduce_scatter_into_async(&mut own, &all, ReduceOp::Sum)?
            });
            under_way.own = own;
        }
        self.under_way = Some(under_way);
        Ok(())
    }

    /// Waits for this rank's part, and frees what it has sent. Nothing is sent.
    pub(super) fn wait_for_parts(&mut self) -> Result<(), ShardError> {
        let Some(under_way) = &mut self.under_way else { return Ok(()) };
        // Both at once: where the wait fails, the sums are not there.
        let (work, all) = (under_way.work.take(), under_way.all.take());
        if let Some(work) = work {
            work.wait()?;
        }
        if let Some((all, first)) = all {
            let _no_grad = tch::no_grad_guard();
            under_way.own.f_copy_(&all.f_narrow(0, first, self.numel)?)?;
            free_sent(&all)?;
        }
        Ok(())
    }

    /// Waits for the means, and takes them home. Where the home has no room, they stay: [`take_home`](Self::take_home) tries
    /// again when nothing more is to be sent, so that no other rank waits for this one.
    pub(super) fn wait(&mut self, home: &mut Home) -> Result<(), ShardError> {
        self.wait_for_parts()?;
        let Some(under_way) = &mut self.under_way else { return Ok(()) };
        // All ranks wait in the same order.
        if let Some(replicas) = under_way.replicas.take() {
            replicas.all_reduce(&mut under_way.own, ReduceOp::Sum)?;
        }
        let _tried_again = self.take_home(home);
        Ok(())
    }

    /// Takes the means home that were waited for.
    pub(super) fn take_home(&mut self, home: &mut Home) -> Result<(), ShardError> {
        let Some(under_way) = self.under_way.as_mut().filter(|it| !it.is_home) else { return Ok(()) };
        under_way.own = home.take(&under_way.own)?;
        under_way.is_home = true;
        Ok(())
    }

    /// Gives the shards the means that are home, those of parameters that some rank has used.
    pub(super) fn give(
        &mut self,
        params: &[ShardedParam],
        is_used: impl Fn(usize) -> bool,
        home: &Home,
    ) -> Result<(), ShardError> {
        let Some(UnderWay { own, .. }) = self.under_way.take() else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        let own = home.settle(own)?;
        home.make(|| {
            self.members.iter().filter(|(index, _)| is_used(*index)).try_for_each(|&(index, first)| {
                let param = &params[index];
                param.add_mean(&own.f_narrow(0, first, param.layout.part_numel())?)
            })
        })?
    }

    /// Forgets gradients that are not on their way.
    pub(super) fn clear_grads(&mut self) {
        self.all = None;
    }

    pub(super) fn clear(&mut self) {
        (self.all, self.under_way) = (None, None);
    }
}
