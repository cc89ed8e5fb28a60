//! 1-bit Adam: an optimizer that sends the signs of its momentum.

mod state;

use std::collections::HashSet;

use overdrive_core::{
    Activity, Behavior, IntoParameters, Optimizer, OptimizerError, OptimizerId, Parameter, Stateful, SyncError,
    activity,
};
use overdrive_ffi::c10d::ReduceOp;
use overdrive_ffi::{Arg, LazyOp, TensorId, TensorList};
use tch::{Kind, Tensor};

use crate::check;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::signed_mean::SignedMean;

static MUL: LazyOp = LazyOp::new("aten::mul_", "Scalar");
static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static LERP: LazyOp = LazyOp::new("aten::lerp_", "Scalar");
static ADD_SCALAR: LazyOp = LazyOp::new("aten::add_", "Scalar");
static ADD: LazyOp = LazyOp::new("aten::add_", "Tensor");
static ADDCMUL: LazyOp = LazyOp::new("aten::addcmul_", "");
static EQ: LazyOp = LazyOp::new("aten::eq", "Scalar");
static MASKED_FILL: LazyOp = LazyOp::new("aten::masked_fill_", "Scalar");

/// Options of [`OneBitAdam`].
#[derive(Clone, Copy, Debug)]
pub struct OneBitAdamOptions {
    /// The learning rate; 1e-3 by default.
    pub lr: f64,
    /// Decay rates of the averages of gradients and of their squares; 0.9 and 0.999 by default.
    pub betas: (f64, f64),
    /// Added to the denominator; 1e-8 by default.
    pub eps: f64,
    /// Decoupled weight decay: each step subtracts this share of each weight, times the learning rate; 0 by default.
    pub weight_decay: f64,
    /// How many steps are plain Adam with whole gradients; after them the average of squares is frozen, and signs are
    /// sent. 100 by default, and at least 1; the paper uses a sixth of the training. Parameters without a gradient in
    /// these steps never move.
    pub freeze_step: u64,
}

impl Default for OneBitAdamOptions {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 0.0, freeze_step: 100 }
    }
}

impl OneBitAdamOptions {
    fn check(&self) -> Result<(), OptimizerError> {
        OptimizerError::check_lr(self.lr)?;
        for (option, beta) in [("beta1", self.betas.0), ("beta2", self.betas.1)] {
            OptimizerError::check_range(option, beta, 0.0..1.0, "at least 0 and below 1")?;
        }
        for (option, value) in [("eps", self.eps), ("weight_decay", self.weight_decay)] {
            OptimizerError::check_range(option, value, 0.0..f64::INFINITY, "a finite number of at least 0")?;
        }
        let at_least_one = "at least 1: the averages of squares come from these steps";
        OptimizerError::check_range("freeze_step", self.freeze_step as f64, 1.0..f64::INFINITY, at_least_one)
    }
}

/// Distributed Adam that sends one bit per parameter each way, after a warm-up of plain Adam.
///
/// After the warm-up the average of squares is frozen; each rank updates the common momentum with its own gradients,
/// and the result is averaged by signs, with error feedback for both roundings. The optimizer communicates by itself,
/// in [`step`](Optimizer::step): use the model without `DistributedDataParallel`. Building it sends rank 0's weights to
/// all. Gradients are not averaged before the step, so clip them by value if at all, not by norm. They have to be
/// dense. A `GradScaler` is refused, because it would skip the step on one rank only (bfloat16 needs none).
///
/// ```no_run
/// use overdrive_core::Optimizer;
/// use overdrive_ddp::{Backend, InitMethod, OneBitAdam, OneBitAdamOptions, init_process_group};
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let options = OneBitAdamOptions { lr: 1e-3, freeze_step: 200, ..Default::default() };
/// let mut opt = OneBitAdam::new(&group, vs.trainable_variables(), options)?;
/// for step in 0..1000 {
///     let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)); // this rank's part
///     model.forward(&inputs).square().mean(Kind::Float).backward();
///     opt.step()?;
///     opt.zero_grad()?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// Tang et al. 2021, arXiv:2102.02888; DeepSpeed's `OnebitAdam`
#[derive(Debug)]
pub struct OneBitAdam {
    id: OptimizerId,
    group: ProcessGroup,
    params: TensorList,
    /// Empty if the parameters have no names.
    names: Vec<String>,
    options: OneBitAdamOptions,
    steps: u64,
    /// Of all parameters, concatenated.
    momentum: Tensor,
    squares: Tensor,
    /// The denominator, once the squares are frozen.
    frozen_root: Option<Tensor>,
    signed: SignedMean,
}

impl OneBitAdam {
    /// Builds the optimizer, and overwrites the parameters with rank 0's.
    ///
    /// # Errors
    /// When there are no parameters, they differ in dtype or device, their number differs between ranks, or an option
    /// is outside its range.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn new(
        group: &ProcessGroup,
        params: impl IntoParameters,
        options: OneBitAdamOptions,
    ) -> Result<Self, OptimizerError> {
        let parameters = params.into_parameters();
        let wrong = |index: usize, reason: String| OptimizerError::parameter(&parameters[index], index, reason);
        let names: Vec<String> = parameters.iter().filter_map(|it| Some(it.name()?.to_owned())).collect();
        let params: Vec<Tensor> = parameters.iter().map(|it| it.tensor().shallow_clone()).collect();
        let first = params.first().ok_or(OptimizerError::NoParameters)?;
        if let Some(index) = params.iter().position(|it| !it.defined()) {
            return Err(wrong(index, "it is undefined".to_owned()));
        }
        if let Some(index) = parameters.iter().position(|it| it.name().is_some() == names.is_empty()) {
            return Err(wrong(index, "name all parameters or none".to_owned()));
        }
        let other_layout = params.iter().enumerate().find_map(|(index, it)| Some((index, check::other_layout(it)?)));
        if let Some((index, layout)) = other_layout {
            return Err(wrong(index, format!("it is {layout}, but should be dense")));
        }
        // float16 cannot hold eps and small squares.
        if !matches!(first.kind(), Kind::Float | Kind::Double | Kind::BFloat16) {
            return Err(wrong(0, format!("it is {:?}, but should be of float32, float64 or bfloat16", first.kind())));
        }
        if let Some(index) = params.iter().position(|it| (it.kind(), it.device()) != (first.kind(), first.device())) {
            return Err(wrong(index, "all parameters should have one dtype and be on one device".to_owned()));
        }
        let mut seen = HashSet::new();
        if let Some(index) = params.iter().position(|it| !seen.insert(TensorId::of(it))) {
            return Err(wrong(index, "it is given twice".to_owned()));
        }
        options.check()?;
        let count: usize = params.iter().map(Tensor::numel).sum();
        start_as_rank_0(group, &params, count).map_err(failed)?;
        let zeros = || first.f_new_zeros([count as i64], (first.kind(), first.device()));
        let zeros = || zeros().map_err(overdrive_core::TorchError::from);
        let momentum = zeros()?;
        let signed = SignedMean::new(group, &momentum).map_err(failed)?;
        let (id, params) = (OptimizerId::new(), TensorList::new(&params)?);
        Ok(Self {
            id,
            group: group.clone(),
            params,
            names,
            options,
            steps: 0,
            momentum,
            squares: zeros()?,
            frozen_root: None,
            signed,
        })
    }

    /// Whether the next step sends signs.
    pub fn is_compressing(&self) -> bool {
        self.steps >= self.options.freeze_step
    }

    fn try_step(&mut self) -> Result<(), DdpError> {
        let _no_grad = tch::no_grad_guard();
        let OneBitAdamOptions { betas: (beta1, beta2), freeze_step, .. } = self.options;
        let mut grads = self.flat_grads()?;
        let next = self.steps + 1;
        if self.is_compressing() {
            let own = self.momentum.f_detach_copy()?;
            LERP.call(&[Arg::Tensor(&own), Arg::Tensor(&grads), Arg::Double(1.0 - beta1)])?;
            let in_flight = self.signed.start(&own)?;
            self.signed.finish(in_flight, &self.momentum)?;
        } else {
            self.group.all_reduce(&mut grads, ReduceOp::Avg)?;
            LERP.call(&[Arg::Tensor(&self.momentum), Arg::Tensor(&grads), Arg::Double(1.0 - beta1)])?;
            MUL.call(&[Arg::Tensor(&self.squares), Arg::Double(beta2)])?;
            let (squares, grads) = (Arg::Tensor(&self.squares), Arg::Tensor(&grads));
            ADDCMUL.call(&[squares, grads, grads, Arg::Double(1.0 - beta2)])?;
        }
        self.steps = next;
        // Adam's bias corrections; that of the squares is frozen with them.
        let correction = |beta: f64, steps: u64| 1.0 - beta.powf(steps as f64);
        let root = match &self.frozen_root {
            Some(root) => root.shallow_clone(),
            None => self.root(correction(beta2, next.min(freeze_step)), next > freeze_step)?,
        };
        if next > freeze_step {
            self.frozen_root = Some(root.shallow_clone());
        }
        let update = self.momentum.f_div(&root)?;
        self.apply(&update, self.options.lr / correction(beta1, next))
    }

    /// The denominator of Adam's update.
    fn root(&self, correction: f64, is_frozen: bool) -> Result<Tensor, DdpError> {
        let mut root = DIV.tensor(&[Arg::Tensor(&self.squares), Arg::Double(correction)])?;
        let _in_place = root.f_sqrt_()?;
        ADD_SCALAR.call(&[Arg::Tensor(&root), Arg::Double(self.options.eps)])?;
        if is_frozen {
            // Signs would move every parameter; those that no gradient reached in the warm-up must not move.
            let unknown = EQ.tensor(&[Arg::Tensor(&self.squares), Arg::Double(0.0)])?;
            MASKED_FILL.call(&[Arg::Tensor(&root), Arg::Tensor(&unknown), Arg::Double(f64::INFINITY)])?;
        }
        Ok(root)
    }

    fn apply(&self, update: &Tensor, factor: f64) -> Result<(), DdpError> {
        let mut start = 0;
        for param in self.params.to_vec()? {
            let count = param.numel() as i64;
            start += count;
            if !param.requires_grad() {
                continue;
            }
            let part = update.f_narrow(0, start - count, count)?.f_view(&param.size()[..])?;
            if self.options.weight_decay > 0.0 {
                MUL.call(&[Arg::Tensor(&param), Arg::Double(1.0 - self.options.lr * self.options.weight_decay)])?;
            }
            ADD.call(&[Arg::Tensor(&param), Arg::Tensor(&part), Arg::Double(-factor)])?;
        }
        Ok(())
    }

    /// All gradients concatenated; zeros where there is none.
    fn flat_grads(&self) -> Result<Tensor, DdpError> {
        let flat = |param: Tensor| {
            let grad = param.f_grad()?;
            if grad.defined() { grad.f_reshape([-1]) } else { param.f_zeros_like()?.f_reshape([-1]) }
        };
        let grads = self.params.to_vec()?.into_iter().map(flat).collect::<Result<Vec<_>, _>>()?;
        Ok(Tensor::f_cat(&grads, 0)?)
    }
}

/// Copies rank 0's parameters to all ranks, after checking that all have equally many: other ranks could not take part.
fn start_as_rank_0(group: &ProcessGroup, params: &[Tensor], count: usize) -> Result<(), DdpError> {
    let own = Tensor::f_from_slice(&[params.len() as i64, count as i64])?.f_to_device(group.device())?;
    let all = group.on_host(group.all_gather_async(&own)?)?;
    let all = all.iter().map(Vec::<i64>::try_from).collect::<Result<Vec<_>, _>>()?;
    if let Some(rank) = all.iter().position(|one| *one != all[0]) {
        let text = |one: &[i64]| format!("{} with {} numbers", one[0], one[1]);
        let (found, expected) = (text(&all[rank]), text(&all[0]));
        return Err(DdpError::ModelMismatch { what: "the parameters of OneBitAdam".to_owned(), rank, found, expected });
    }
    let _no_grad = tch::no_grad_guard();
    for param in params {
        let mut first = param.f_detach()?.f_contiguous()?;
        group.broadcast(&mut first, 0)?;
        param.shallow_clone().f_copy_(&first)?;
    }
    Ok(())
}

fn failed(error: DdpError) -> OptimizerError {
    OptimizerError::Sync(SyncError::from(error))
}

impl Optimizer for OneBitAdam {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        self.params.to_vec().unwrap_or_default()
    }

    fn parameters(&self) -> Vec<Parameter> {
        let named = |(index, param)| match self.names.get(index) {
            Some(name) => Parameter::named(name, param),
            None => Parameter::unnamed(param),
        };
        self.params().into_iter().enumerate().map(named).collect()
    }

    fn behavior(&self) -> Behavior {
        let mut behavior = Behavior::default();
        behavior.communicates = true;
        behavior
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, group: usize) -> Option<f64> {
        (group == 0).then_some(self.options.lr)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        if group > 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_lr(lr)?;
        self.options.lr = lr;
        Ok(())
    }

    fn momentum(&self, group: usize) -> Option<f64> {
        (group == 0).then_some(self.options.betas.0)
    }

    fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
        if group > 0 {
            return Err(OptimizerError::NoSuchGroup { group, groups: 1 });
        }
        OptimizerError::check_range("beta1", momentum, 0.0..1.0, "at least 0 and below 1")?;
        self.options.betas.0 = momentum;
        Ok(())
    }

    /// Communicates, and waits for all ranks. A failed step may leave the momentum changed.
    fn step(&mut self) -> Result<(), OptimizerError> {
        let _step = activity(|| Activity::OptimizerStep(&*self));
        // Before anything is sent.
        if let Some(index) = self.params.sparse_grad()? {
            let reason = "its gradient is sparse, but should be dense: make an embedding with `sparse: false`";
            let parameter = self.parameters().swap_remove(index);
            return Err(OptimizerError::parameter(&parameter, index, reason));
        }
        self.try_step().map_err(failed)
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(self.params.clear_grads()?)
    }

    fn as_stateful(&self) -> Option<&dyn Stateful> {
        Some(self)
    }

    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        Some(self)
    }
}
