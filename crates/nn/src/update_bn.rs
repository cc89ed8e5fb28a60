//! The statistics of batch norm layers, computed anew.

use std::collections::HashSet;

use overdrive_core::{Module, ModuleState, Setting, layer_states};
use overdrive_ffi::{Error as TorchError, TensorId};
use tch::Tensor;

use crate::batch_norm::BatchNorm;
use crate::error::NnError;

/// Computes the running statistics of all batch norm layers anew, as the mean over these batches: for weights that have
/// not trained themselves, such as averages.
///
/// `forward` gets the model in training mode, with each batch: whatever the iterator yields, the `Result`s of a loader
/// among it. Afterwards, also after an error or a panic, each layer has the mode and momentum that it had. A model without
/// batch norm layers is left alone; one with others than [`BatchNorm`]s (tch's, in a `VarStore`) is refused.
///
/// ```
/// # use overdrive_nn::{BatchNorm1d, Linear, Module, NnError, sequential, update_bn};
/// # use tch::{Device, Kind, Tensor};
/// # fn main() -> Result<(), NnError> {
/// # let model = sequential![Linear::new(4, 3)?, BatchNorm1d::new(3)?];
/// # let batches: Vec<Result<Tensor, NnError>> = vec![Ok(Tensor::randn([8, 4], (Kind::Float, Device::Cpu)))];
/// update_bn(batches, &model, |model, batch| model.forward(&batch?))?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`NnError::InvalidOption`] for other batch norm layers; nothing has changed then. Those of `forward`, and when libtorch
/// fails; the statistics are then those of the batches before.
///
/// # Syncs
/// Once for each batch and layer.
///
/// # Source
/// `torch.optim.swa_utils.update_bn`
pub fn update_bn<M: Module, B, T, E: From<NnError>>(
    batches: impl IntoIterator<Item = B>,
    model: &M,
    mut forward: impl FnMut(&M, B) -> Result<T, E>,
) -> Result<(), E> {
    refuse_others(model)?;
    let pass = Pass::begin(model).map_err(NnError::from)?;
    if pass.momenta.is_empty() {
        return Ok(());
    }
    let _no_grad = tch::no_grad_guard();
    batches.into_iter().try_for_each(|batch| forward(model, batch).map(drop))
}

/// An error if a layer that is no [`BatchNorm`] keeps a running mean.
fn refuse_others<M: Module>(model: &M) -> Result<(), NnError> {
    let modules = model.named_modules();
    let own = modules.iter().flat_map(|(_, module)| [mean::<1>(*module), mean::<2>(*module), mean::<3>(*module)]);
    let own: HashSet<TensorId> = own.flatten().map(TensorId::of).collect();
    let is_other = |(name, buffer): &(String, Tensor)| {
        name.rsplit('.').next() == Some("running_mean") && !own.contains(&TensorId::of(buffer))
    };
    match model.named_buffers().into_iter().find(is_other) {
        Some((found, _)) => {
            let expected =
                "of a `BatchNorm` of this crate: the statistics of others cannot be computed anew".to_owned();
            Err(NnError::InvalidOption { layer: "update_bn", option: "model", found, expected })
        }
        None => Ok(()),
    }
}

fn mean<const N: usize>(module: &dyn Module) -> Option<&Tensor> {
    module.downcast_ref::<BatchNorm<N>>()?.running_mean.as_deref()
}

/// Batch norm layers that count all batches alike, and layers in training mode, until it is dropped.
struct Pass<'a> {
    momenta: Vec<(&'a Setting<Option<f64>>, Option<f64>)>,
    modes: Vec<(&'a ModuleState, bool)>,
}

impl<'a> Pass<'a> {
    fn begin<M: Module>(model: &'a M) -> Result<Self, TorchError> {
        let mut pass = Self { momenta: Vec::new(), modes: Vec::new() };
        for (_, module) in model.named_modules() {
            pass.look_at::<1>(module)?;
            pass.look_at::<2>(module)?;
            pass.look_at::<3>(module)?;
        }
        if pass.momenta.is_empty() {
            return Ok(pass);
        }
        for state in layer_states(model) {
            pass.modes.push((state, state.is_training()));
            state.set_training(true);
        }
        Ok(pass)
    }

    fn look_at<const N: usize>(&mut self, module: &'a dyn Module) -> Result<(), TorchError> {
        let Some(layer) = module.downcast_ref::<BatchNorm<N>>() else { return Ok(()) };
        layer.reset_running_stats()?;
        self.momenta.push((&layer.momentum, layer.momentum.replace(None)));
        Ok(())
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.momenta.iter().for_each(|(momentum, was)| momentum.set(*was));
        self.modes.iter().for_each(|(state, was)| state.set_training(*was));
    }
}

impl<const N: usize> BatchNorm<N> {
    /// Sets the running statistics to those of no batch: a mean of 0 and a variance of 1.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Source
    /// `reset_running_stats`
    pub fn reset_running_stats(&self) -> Result<(), TorchError> {
        let _no_grad = tch::no_grad_guard();
        for buffer in [&self.running_mean, &self.num_batches_tracked].into_iter().flatten() {
            let _ = buffer.shallow_clone().f_zero_()?;
        }
        if let Some(variance) = &self.running_var {
            let mut variance = variance.shallow_clone();
            variance.f_copy_(&variance.f_ones_like()?)?;
        }
        Ok(())
    }
}
