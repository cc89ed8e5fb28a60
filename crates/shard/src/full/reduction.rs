//! Averages a unit's gradients over ranks, each rank's rows on that rank.

use overdrive_ddp::{ProcessGroup, ReduceOp, Work};
use overdrive_ffi::{Arg, LazyOp};
use tch::{Device, Kind, Tensor};

use super::param::ShardedParam;
use crate::error::ShardError;

static MUL: LazyOp = LazyOp::new("aten::mul_", "Scalar");

/// The trained parameters of a unit whose gradients are of one dtype.
pub(super) struct Reduction {
    /// Their indices in the unit, and where their parts begin, in elements.
    members: Vec<(usize, i64)>,
    /// Elements of all parts of a rank.
    numel: i64,
    kind: Kind,
    device: Device,
    /// The gradients of a pass, `[ranks, elements of a rank]`.
    all: Option<Tensor>,
    under_way: Option<(Tensor, Option<Work>)>,
}

/// One for each dtype that gradients are sent in; `reduced`: this dtype, or each parameter's own.
pub(super) fn reductions(params: &[ShardedParam], reduced: Option<Kind>) -> Vec<Reduction> {
    let mut all: Vec<Reduction> = Vec::new();
    for (index, param) in params.iter().enumerate().filter(|(_, param)| param.is_trained) {
        let kind = reduced.unwrap_or(param.kind);
        let device = param.shard.tensor().device();
        let at = all.iter().position(|it| it.kind == kind).unwrap_or_else(|| {
            all.push(Reduction { members: Vec::new(), numel: 0, kind, device, all: None, under_way: None });
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

    /// Takes the gradient of a parameter. Returns whether it has one.
    pub(super) fn take(&mut self, index: usize, param: &ShardedParam) -> Result<bool, ShardError> {
        if !param.whole().f_grad()?.defined() {
            return Ok(false);
        }
        let _no_grad = tch::no_grad_guard();
        let all = self.prepared(param.layout.ranks)?;
        let first = self.members.iter().find(|(member, _)| *member == index).map_or(0, |(_, first)| *first);
        param.take_grad(&all.f_narrow(1, first, param.layout.part_numel())?)
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
    pub(super) fn send(&mut self, group: &ProcessGroup) -> Result<(), ShardError> {
        let _no_grad = tch::no_grad_guard();
        let all = self.prepared(group.size() as i64)?;
        self.all = None;
        if group.size() == 1 {
            self.under_way = Some((all.f_view([-1])?, None));
            return Ok(());
        }
        // Before the sum, as DDP does: float16 would overflow.
        MUL.call(&[Arg::Tensor(&all), Arg::Double(1.0 / group.size() as f64)])?;
        let mut own = Tensor::f_empty([self.numel], (self.kind, self.device))?;
        let work = group.reduce_scatter_into_async(&mut own, &all.f_view([-1])?, ReduceOp::Sum)?;
        self.under_way = Some((own, Some(work)));
        Ok(())
    }

    /// Waits for the means.
    pub(super) fn wait(&mut self) -> Result<(), ShardError> {
        if let Some((_, work)) = &mut self.under_way
            && let Some(work) = work.take()
        {
            work.wait()?;
        }
        Ok(())
    }

    /// Gives the shards the means, those of parameters that some rank has used.
    pub(super) fn give(&mut self, params: &[ShardedParam], is_used: impl Fn(usize) -> bool) -> Result<(), ShardError> {
        self.wait()?;
        let Some((own, _)) = self.under_way.take() else { return Ok(()) };
        let _no_grad = tch::no_grad_guard();
        for &(index, first) in self.members.iter().filter(|(index, _)| is_used(*index)) {
            let param = &params[index];
            param.add_mean(&own.f_narrow(0, first, param.layout.part_numel())?)?;
        }
        Ok(())
    }

    pub(super) fn clear(&mut self) {
        (self.all, self.under_way) = (None, None);
    }
}
