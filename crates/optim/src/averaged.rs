//! Averages of a model's weights over its training: EMA and SWA.

use overdrive_core::{Entry, OptimizerError, StateDict, StateError, Stateful, TorchError};
use overdrive_ffi::TensorList;
use tch::{Tensor, nn};

use crate::foreach;

/// How weights are averaged.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Averaging {
    /// An exponential moving average, which keeps `decay` of itself at each update.
    Ema {
        /// In [0, 1].
        decay: f64,
    },
    /// Every update counts the same.
    Swa,
}

/// Averages of a model's weights, beside the model. The first update copies the weights.
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
    names: Vec<String>,
    model: TensorList,
    averages: TensorList,
    n_averaged: i64,
}

impl AveragedModel {
    /// Averages of the trainable variables of `vs`. Buffers, such as the running statistics of batch norm, stay the
    /// model's own.
    ///
    /// # Errors
    /// When `decay` is outside [0, 1], or memory runs out.
    pub fn new(vs: &nn::VarStore, averaging: Averaging) -> Result<Self, OptimizerError> {
        Self::over(vs, averaging, |variable| variable.requires_grad())
    }

    /// Averages of all floating-point variables of `vs`, buffers among them.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// # Source
    /// `AveragedModel(use_buffers=True)`
    #[doc(alias = "use_buffers")]
    pub fn with_buffers(vs: &nn::VarStore, averaging: Averaging) -> Result<Self, OptimizerError> {
        Self::over(vs, averaging, Tensor::is_floating_point)
    }

    fn over(vs: &nn::VarStore, averaging: Averaging, is_averaged: fn(&Tensor) -> bool) -> Result<Self, OptimizerError> {
        if let Averaging::Ema { decay: found } = averaging
            && !(0.0..=1.0).contains(&found)
        {
            return Err(OptimizerError::InvalidOption { option: "decay", found, expected: "at least 0 and at most 1" });
        }
        let _no_grad = tch::no_grad_guard();
        let mut variables: Vec<_> = vs.variables().into_iter().filter(|(_, variable)| is_averaged(variable)).collect();
        variables.sort_by(|(one, _), (other, _)| one.cmp(other));
        let (names, model): (Vec<_>, Vec<_>) = variables.into_iter().unzip();
        let averages = model.iter().map(Tensor::f_detach_copy).collect::<Result<Vec<_>, _>>();
        let averages = TensorList::new(&averages.map_err(TorchError::from)?)?;
        Ok(Self { averaging, names, model: TensorList::new(&model)?, averages, n_averaged: 0 })
    }

    /// Takes the model's weights into the averages; goes after the optimizer's step.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    ///
    /// # Source
    /// `update_parameters`
    #[doc(alias = "update_parameters")]
    pub fn update(&mut self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        if !self.names.is_empty() {
            match self.averaging {
                _ if self.n_averaged == 0 => foreach::copy_(&self.averages, &self.model)?,
                Averaging::Ema { decay } => foreach::lerp_(&self.averages, &self.model, 1.0 - decay)?,
                Averaging::Swa => foreach::lerp_(&self.averages, &self.model, 1.0 / (self.n_averaged + 1) as f64)?,
            }
        }
        self.n_averaged += 1;
        Ok(())
    }

    /// How many updates there have been.
    pub fn n_averaged(&self) -> i64 {
        self.n_averaged
    }

    /// The averages by the names of their variables, in order, sharing their data.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn averages(&self) -> Result<Vec<(&str, Tensor)>, OptimizerError> {
        Ok(self.names.iter().map(String::as_str).zip(self.averages.to_vec()?).collect())
    }

    /// Runs `work` while the model has the averages for weights, an evaluation say. Afterwards, and when `work` panics,
    /// the model has its own again; what `work` changes of them is taken into the averages.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn apply<T>(&mut self, work: impl FnOnce() -> T) -> Result<T, OptimizerError> {
        self.swap()?;
        let swapped = Swapped(self);
        let result = work();
        std::mem::forget(swapped);
        self.swap()?;
        Ok(result)
    }

    /// Gives the averages to the model for good.
    ///
    /// # Errors
    /// When libtorch fails.
    pub fn copy_to_model(&self) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        match self.names.is_empty() {
            true => Ok(()),
            false => Ok(foreach::copy_(&self.model, &self.averages)?),
        }
    }

    fn swap(&self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        // One by one, so that the third copy is a single tensor.
        for (mut model, mut average) in self.model.to_vec()?.into_iter().zip(self.averages.to_vec()?) {
            let own = model.f_detach_copy()?;
            model.f_copy_(&average)?;
            average.f_copy_(&own)?;
        }
        Ok(())
    }
}

/// Swaps back when `work` panics.
struct Swapped<'a>(&'a AveragedModel);

impl Drop for Swapped<'_> {
    fn drop(&mut self) {
        // The panic goes on; an error on top of it has nobody to go to.
        let _ = self.0.swap();
    }
}

/// `n_averaged`, and the averages under `module.` and their names, as in PyTorch.
impl Stateful for AveragedModel {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("n_averaged", Entry::Int(self.n_averaged));
        for (name, average) in self.names.iter().zip(self.averages.to_vec()?) {
            state.insert(format!("module.{name}"), Entry::Tensor(average));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let _no_grad = tch::no_grad_guard();
        let n_averaged = state.int("n_averaged")?;
        if n_averaged < 0 {
            let (expected, found) = ("at least 0".to_owned(), n_averaged.to_string());
            return Err(StateError::Mismatch { key: "n_averaged".to_owned(), expected, found });
        }
        let keys: Vec<String> = self.names.iter().map(|name| format!("module.{name}")).collect();
        let mut saved = Vec::new();
        for (key, own) in keys.iter().zip(self.averages.to_vec()?) {
            saved.push(state.tensor(key, &own.size(), own.kind())?.shallow_clone());
        }
        state.refuse_unknown(&keys.iter().map(String::as_str).chain(["n_averaged"]).collect::<Vec<_>>())?;
        if !keys.is_empty() {
            foreach::copy_(&self.averages, &TensorList::new(&saved)?)?;
        }
        self.n_averaged = n_averaged;
        Ok(())
    }
}
