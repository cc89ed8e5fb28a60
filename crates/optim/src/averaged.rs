//! Averages of a model's weights over the training: EMA and SWA.

mod state;
mod swapped;

use std::sync::Arc;

use overdrive_core::{Averages, MOVED, OptimizerError, OtherRanks, Parameter, SHARDED, Sharding, TorchError, Weights};
use overdrive_ffi::{TensorId, TensorList};
use tch::{Device, Kind, Tensor};

use crate::foreach;
use state::Part;
use swapped::Swapped;

/// How weights are averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Averaging {
    /// An exponential moving average: each update is average * decay + weights * (1 - decay).
    Ema {
        /// In [0, 1].
        decay: f64,
    },
    /// The plain mean: every update has the same weight.
    Swa,
}

/// Averages of a model's weights, kept separately from the model. The first update copies the weights.
///
/// All parameters are averaged, including frozen ones. Buffers, such as the running statistics of batch norm, are
/// copied at each update, unless [`use_buffers`](AveragedModelBuilder::use_buffers) averages them too. Averages of
/// bfloat16 and float16 parameters are float32: in 16 bits, updates with a decay of 0.999 would be rounded away.
///
/// Of a `FullyShardedDataParallel`, which is given in place of the module, each rank averages its own rows, and
/// nothing is sent. All ranks make the same calls: a forward in [`apply`](Self::apply) gathers the averages. A call that
/// fails on one rank, because memory runs out for instance, is an error on the others at their next exchange, which does
/// not wait for that rank. After an [`update`](Self::update) or a `load_state_dict` that failed on one rank, load the same
/// state on all, or make the averages anew: the ranks have averages of different steps.
///
/// ```
/// # use overdrive_optim::{AveragedModel, Averaging};
/// # use tch::{Device, nn};
/// # fn main() -> Result<(), overdrive_core::OptimizerError> {
/// # let vs = nn::VarStore::new(Device::Cpu);
/// # let _model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut ema = AveragedModel::new(&vs, Averaging::Ema { decay: 0.999 })?;
/// // after each step of the optimizer
/// ema.update()?;
/// // to evaluate with the averages
/// let accuracy = ema.apply(|| 0.98)?;
/// # Ok(())
/// # }
/// ```
///
/// # Source
/// `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` or `get_swa_multi_avg_fn`; Izmailov et al.,
/// "Averaging Weights Leads to Wider Optima and Better Generalization", 2018.
#[derive(Debug)]
#[doc(alias = "EMA")]
#[doc(alias = "SWA")]
pub struct AveragedModel {
    averaging: Averaging,
    warm_up: bool,
    averaged: Kept,
    copied: Kept,
    n_averaged: i64,
    part: Option<Part>,
    other_ranks: Option<Arc<dyn OtherRanks>>,
}

/// Options of an [`AveragedModel`].
#[derive(Debug)]
#[must_use = "options do nothing until `build`"]
pub struct AveragedModelBuilder {
    parameters: Vec<Parameter>,
    buffers: Vec<(String, Tensor)>,
    sharding: Option<Sharding>,
    other_ranks: Option<Arc<dyn OtherRanks>>,
    averaging: Averaging,
    use_buffers: bool,
    warm_up: bool,
    device: Option<Device>,
}

impl AveragedModelBuilder {
    /// Whether floating-point buffers are averaged too; default false: they are copied.
    ///
    /// # Source
    /// `AveragedModel(use_buffers)`
    pub fn use_buffers(mut self, use_buffers: bool) -> Self {
        self.use_buffers = use_buffers;
        self
    }

    /// Whether an EMA's decay starts low, at (1 + n) / (10 + n) after n updates, until that exceeds `decay`; default
    /// false. It makes the average forget the first weights quickly.
    ///
    /// # Source
    /// `num_updates` of TensorFlow's `ExponentialMovingAverage`
    pub fn warm_up(mut self, warm_up: bool) -> Self {
        self.warm_up = warm_up;
        self
    }

    /// The device that holds the averages; default the model's. On the CPU they take no GPU memory, but each update
    /// waits for the copy.
    ///
    /// # Source
    /// `AveragedModel(device)`
    pub fn device(mut self, device: Device) -> Self {
        self.device = Some(device);
        self
    }

    /// The averages.
    ///
    /// # Errors
    /// When `decay` is outside [0, 1], the parameters are those of a module whose values are sharded over ranks, or
    /// memory runs out.
    pub fn build(self) -> Result<AveragedModel, OptimizerError> {
        if let Averaging::Ema { decay: found } = self.averaging
            && !(0.0..=1.0).contains(&found)
        {
            return Err(OptimizerError::InvalidOption { option: "decay", found, expected: "at least 0 and at most 1" });
        }
        if let Some(index) = SHARDED.position(self.parameters.iter().map(Parameter::tensor)) {
            let reason = "its values are sharded over the ranks: average those of the `FullyShardedDataParallel`";
            return Err(OptimizerError::parameter(&self.parameters[index], index, reason));
        }
        let (mut averaged, mut copied) = (Vec::new(), Vec::new());
        for (index, parameter) in self.parameters.iter().enumerate() {
            let name = parameter.name().map_or_else(|| index.to_string(), str::to_owned);
            averaged.push((name, parameter.tensor().shallow_clone()));
        }
        let names = averaged.iter().map(|(name, _)| name.clone());
        let part = self.sharding.map(|it| Part {
            shard: it.shard,
            rows: names.zip(it.rows).collect(),
            differs_by_rank: it.differs_by_rank,
        });
        for (name, buffer) in self.buffers {
            let is_averaged = self.use_buffers && buffer.is_floating_point();
            if is_averaged { averaged.push((name, buffer)) } else { copied.push((name, buffer)) }
        }
        [&mut averaged, &mut copied].into_iter().for_each(|list| list.sort_by(|(one, _), (other, _)| one.cmp(other)));
        let kept = Kept::new(averaged, self.device).and_then(|it| Ok((it, Kept::new(copied, self.device)?)));
        let (averaged, copied) = told(&self.other_ranks, "making", kept)?;
        Ok(AveragedModel {
            averaging: self.averaging,
            warm_up: self.warm_up,
            averaged,
            copied,
            n_averaged: 0,
            part,
            other_ranks: self.other_ranks,
        })
    }
}

impl AveragedModel {
    /// Averages of the parameters of a module, a `VarStore` or a `FullyShardedDataParallel`, on the model's device;
    /// buffers are copied.
    ///
    /// # Errors
    /// As [`build`](AveragedModelBuilder::build).
    pub fn new(model: &impl Weights, averaging: Averaging) -> Result<Self, OptimizerError> {
        Self::builder(model, averaging).build()
    }

    /// A builder for more options.
    pub fn builder(model: &impl Weights, averaging: Averaging) -> AveragedModelBuilder {
        AveragedModelBuilder {
            parameters: model.own_parameters(),
            buffers: model.own_buffers(),
            sharding: model.sharding(),
            other_ranks: model.other_ranks(),
            averaging,
            use_buffers: false,
            warm_up: false,
            device: None,
        }
    }

    /// Adds the model's weights to the averages; call it after the optimizer's step.
    ///
    /// # Errors
    /// While SAM has moved the weights, between its `ascend` and its step; when libtorch fails.
    ///
    /// # Syncs
    /// Only when the averages are on another device.
    ///
    /// # Source
    /// `update_parameters`
    #[doc(alias = "update_parameters")]
    pub fn update(&mut self) -> Result<(), OptimizerError> {
        self.check_in_place()?;
        let followed = self.averaged.follow(self.next_weight()).and_then(|()| self.copied.follow(1.0));
        told(&self.other_ranks, "adding to", followed)?;
        self.n_averaged += 1;
        Ok(())
    }

    fn check_in_place(&self) -> Result<(), OptimizerError> {
        for kept in [&self.averaged, &self.copied] {
            if let Some(index) = MOVED.position(&kept.model.to_vec()?) {
                let reason = "SAM's `ascend` has moved it: call `step` first, which moves it back".to_owned();
                return Err(OptimizerError::InvalidParameter { parameter: format!("`{}`", kept.names[index]), reason });
            }
        }
        Ok(())
    }

    /// The number of updates so far.
    pub fn n_averaged(&self) -> i64 {
        self.n_averaged
    }

    /// The averages with the names of their variables, in order of the names, sharing their data; copied buffers are
    /// last.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn averages(&self) -> Result<Vec<Parameter>, OptimizerError> {
        let mut all = Vec::new();
        for kept in [&self.averaged, &self.copied] {
            all.extend(kept.names.iter().zip(kept.own.to_vec()?).map(|(name, own)| Parameter::named(name, own)));
        }
        Ok(all)
    }

    /// Runs `work`, an evaluation say, while the model has the averages as its weights. Afterwards, also if `work`
    /// panics, the model gets its own weights back; changes that `work` made to the averages (batch norm statistics,
    /// say) are kept in the averages.
    ///
    /// # Errors
    /// While SAM has moved the weights; when libtorch fails. If it fails while the model gets its own weights back, some
    /// are still the averages.
    pub fn apply<T>(&mut self, work: impl FnOnce() -> T) -> Result<T, OptimizerError> {
        self.check_in_place()?;
        let mut swapped = Swapped::new([&self.averaged, &self.copied]);
        told(&self.other_ranks, "applying", swapped.lend())?;
        let result = work();
        told(&self.other_ranks, "taking back", swapped.give_back())?;
        Ok(result)
    }

    /// Copies the averages into the model permanently. If the optimizer keeps copies of the weights
    /// ([`Lookahead`](crate::Lookahead), a schedule-free one), call
    /// [`params_changed`](overdrive_core::Optimizer::params_changed) afterwards: its next step would bring the old ones
    /// back.
    ///
    /// # Errors
    /// While SAM has moved the weights; when libtorch fails.
    pub fn copy_to_model(&self) -> Result<(), OptimizerError> {
        self.check_in_place()?;
        let _no_grad = tch::no_grad_guard();
        let mut kept = [&self.averaged, &self.copied].into_iter().filter(|kept| !kept.names.is_empty());
        let copied = kept.try_for_each(|kept| foreach::copy_(&kept.model, &kept.own));
        Ok(told(&self.other_ranks, "copying", copied)?)
    }
}

/// Tells the other ranks where this one has failed: they go on, and would wait for it.
fn told<T>(others: &Option<Arc<dyn OtherRanks>>, what: &str, done: Result<T, TorchError>) -> Result<T, TorchError> {
    if let (Err(error), Some(others)) = (&done, others) {
        others.tell_failure(&format!("{what} the averages of weights: {error}"));
    }
    done
}

impl Averages for AveragedModel {
    fn id(&self) -> Option<TensorId> {
        self.averaged.own.get(0).ok().map(|first| TensorId::of(&first))
    }

    fn update(&mut self) -> Result<(), OptimizerError> {
        self.update()
    }

    fn next_weight(&self) -> f64 {
        let n = self.n_averaged as f64;
        match self.averaging {
            _ if self.n_averaged == 0 => 1.0,
            Averaging::Ema { decay } if self.warm_up => 1.0 - decay.min((1.0 + n) / (10.0 + n)),
            Averaging::Ema { decay } => 1.0 - decay,
            Averaging::Swa => 1.0 / (n + 1.0),
        }
    }

    fn count_update(&mut self) {
        self.n_averaged += 1;
    }
}

/// Variables of the model, and the average or copy of each.
#[derive(Debug)]
struct Kept {
    names: Vec<String>,
    model: TensorList,
    own: TensorList,
    /// Whether each pair has the same dtype and device.
    alike: bool,
}

impl Kept {
    fn new(variables: Vec<(String, Tensor)>, device: Option<Device>) -> Result<Self, TorchError> {
        let _no_grad = tch::no_grad_guard();
        let (names, model): (Vec<_>, Vec<_>) = variables.into_iter().unzip();
        let copy = |tensor: &Tensor| {
            let kind = match tensor.kind() {
                Kind::Half | Kind::BFloat16 => Kind::Float,
                kind => kind,
            };
            tensor.f_detach()?.f_to_device_(device.unwrap_or(tensor.device()), kind, false, true)
        };
        let own = model.iter().map(copy).collect::<Result<Vec<_>, _>>()?;
        let alike = model.iter().zip(&own).all(|(one, other)| is_alike(one, other));
        Ok(Self { names, model: TensorList::new(&model)?, own: TensorList::new(&own)?, alike })
    }

    /// Moves the kept values by the fraction `weight` towards the model's.
    fn follow(&self, weight: f64) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        if self.names.is_empty() {
            return Ok(());
        }
        if weight == 1.0 {
            return foreach::copy_(&self.own, &self.model);
        }
        if self.alike {
            return foreach::lerp_(&self.own, &self.model, weight);
        }
        let near = |(model, own): (&Tensor, &Tensor)| model.f_to_device_(own.device(), own.kind(), false, false);
        let near = self.model.to_vec()?.iter().zip(&self.own.to_vec()?).map(near).collect::<Result<Vec<_>, _>>()?;
        foreach::lerp_(&self.own, &TensorList::new(&near)?, weight)
    }
}

fn is_alike(one: &Tensor, other: &Tensor) -> bool {
    (one.kind(), one.device()) == (other.kind(), other.device())
}
