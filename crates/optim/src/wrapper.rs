//! The methods that wrapper optimizers forward to the optimizer inside.

/// The methods of `Optimizer` that a wrapper with a field `inner` forwards unchanged.
macro_rules! pass_on_to_inner {
    () => {
        fn id(&self) -> overdrive_core::OptimizerId {
            self.inner.id()
        }

        fn params(&self) -> Vec<tch::Tensor> {
            self.inner.params()
        }

        fn parameters(&self) -> Vec<overdrive_core::Parameter> {
            self.inner.parameters()
        }

        fn trained(&self) -> Result<Vec<tch::Tensor>, overdrive_core::OptimizerError> {
            self.inner.trained()
        }

        fn num_groups(&self) -> usize {
            self.inner.num_groups()
        }

        fn lr(&self, group: usize) -> Option<f64> {
            self.inner.lr(group)
        }

        fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), overdrive_core::OptimizerError> {
            self.inner.set_lr(group, lr)
        }

        fn momentum(&self, group: usize) -> Option<f64> {
            self.inner.momentum(group)
        }

        fn set_momentum(&mut self, group: usize, momentum: f64) -> Result<(), overdrive_core::OptimizerError> {
            self.inner.set_momentum(group, momentum)
        }

        fn skip_agreement(&self) -> Option<&dyn overdrive_core::SkipAgreement> {
            self.inner.skip_agreement()
        }

        fn make_state(&mut self) -> Result<(), overdrive_core::OptimizerError> {
            self.inner.make_state()
        }

        fn check_step(&self) -> Result<(), overdrive_core::OptimizerError> {
            self.inner.check_step()
        }

        fn zero_grad(&mut self) -> Result<(), overdrive_core::OptimizerError> {
            self.inner.zero_grad()
        }
    };
}

pub(crate) use pass_on_to_inner;
