//! [`Optimizer`] and [`Stateful`] for `Box` and `&mut`, so that an optimizer chosen at run time can be wrapped and
//! saved.

use tch::Tensor;

use crate::optimizer::{Behavior, GradScale, Optimizer, OptimizerError, OptimizerId};
use crate::parameter::Parameter;
use crate::ranks::SkipAgreement;
use crate::state::{RowsToLoad, Shapes, StateDict, StateError, Stateful};

macro_rules! pass_on {
    ($($pointer:ty),+) => {$(
        impl<O: Optimizer + ?Sized> Optimizer for $pointer {
            fn id(&self) -> OptimizerId {
                (**self).id()
            }

            fn params(&self) -> Vec<Tensor> {
                (**self).params()
            }

            fn parameters(&self) -> Vec<Parameter> {
                (**self).parameters()
            }

            fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
                (**self).trained()
            }

            fn behavior(&self) -> Behavior {
                (**self).behavior()
            }

            fn num_groups(&self) -> usize {
                (**self).num_groups()
            }

            fn group_lens(&self) -> Option<Vec<usize>> {
                (**self).group_lens()
            }

            fn revision(&self) -> Option<u64> {
                (**self).revision()
            }

            fn lr(&self, group: usize) -> Option<f64> {
                (**self).lr(group)
            }

            fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
                (**self).set_lr(group, lr)
            }

            fn momentum(&self, group: usize) -> Option<f64> {
                (**self).momentum(group)
            }

            fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), OptimizerError> {
                (**self).set_momentum(group, momentum)
            }

            fn step(&mut self) -> Result<(), OptimizerError> {
                (**self).step()
            }

            fn takes_grad_scale(&self) -> bool {
                (**self).takes_grad_scale()
            }

            fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
                (**self).step_scaled(scale)
            }

            fn check_step(&self) -> Result<(), OptimizerError> {
                (**self).check_step()
            }

            fn make_state(&mut self) -> Result<(), OptimizerError> {
                (**self).make_state()
            }

            fn skip_agreement(&self) -> Option<&dyn SkipAgreement> {
                (**self).skip_agreement()
            }

            fn step_skipped(&mut self) -> Result<(), OptimizerError> {
                (**self).step_skipped()
            }

            fn gradients_used(&self) -> u64 {
                (**self).gradients_used()
            }

            fn used_found_inf(&self) -> Vec<Tensor> {
                (**self).used_found_inf()
            }

            fn zero_grad(&mut self) -> Result<(), OptimizerError> {
                (**self).zero_grad()
            }

            fn params_changed(&mut self) -> Result<(), OptimizerError> {
                (**self).params_changed()
            }

            fn as_stateful(&self) -> Option<&dyn Stateful> {
                (**self).as_stateful()
            }

            fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
                (**self).as_stateful_mut()
            }
        }

        impl<O: Stateful + ?Sized> Stateful for $pointer {
            fn state_dict(&self) -> Result<StateDict, StateError> {
                (**self).state_dict()
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
                (**self).load_state_dict(state)
            }

            fn assign_state_dict(&mut self, state: StateDict) -> Result<(), StateError> {
                (**self).assign_state_dict(state)
            }

            fn differs_by_rank(&self) -> bool {
                (**self).differs_by_rank()
            }

            fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
                (**self).rows_to_load(values, shapes)
            }
        }
    )+};
}

pass_on!(Box<O>, &mut O);

macro_rules! by_dyn {
    ($($object:ty),+) => {$(
        /// The state of the optimizer inside; [`StateError::NotSaved`] if it has none that can be saved (tch's).
        impl Stateful for $object {
            fn state_dict(&self) -> Result<StateDict, StateError> {
                self.as_stateful().ok_or(NO_STATE)?.state_dict()
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
                self.as_stateful_mut().ok_or(NO_STATE)?.load_state_dict(state)
            }

            fn assign_state_dict(&mut self, state: StateDict) -> Result<(), StateError> {
                self.as_stateful_mut().ok_or(NO_STATE)?.assign_state_dict(state)
            }

            fn differs_by_rank(&self) -> bool {
                self.as_stateful().is_some_and(Stateful::differs_by_rank)
            }

            fn rows_to_load(&self, values: &StateDict, shapes: &Shapes) -> Result<RowsToLoad, StateError> {
                self.as_stateful().ok_or(NO_STATE)?.rows_to_load(values, shapes)
            }
        }
    )+};
}

const NO_STATE: StateError = StateError::NotSaved {
    reason: "this optimizer does not show its state (tch's does not): use one of overdrive-optim's",
};

by_dyn!(dyn Optimizer + '_, dyn Optimizer + Send + '_);
