//! What all fused optimizers share: groups, buckets, and which parameters have a gradient.

use overdrive_core::{GradScale, Optimizer, OptimizerError, OptimizerId, TorchError};
use overdrive_ffi::TensorList;
use tch::Tensor;

use crate::bucket::buckets;

/// The options of one parameter group; every algorithm has a learning rate.
pub(crate) trait Options: Clone + std::fmt::Debug {
    fn lr(&self) -> f64;
    fn set_lr(&mut self, lr: f64);
    fn check(&self) -> Result<(), OptimizerError>;
}

/// One algorithm's state over one bucket of parameters.
pub(crate) trait Rule: Sized {
    type Options: Options;

    /// The state before the first step.
    fn new(params: &TensorList, options: &Self::Options) -> Result<Self, TorchError>;

    /// Updates the parameters that have gradients. `scale` is on the bucket's device.
    fn step(
        &mut self,
        stepped: &Stepped<'_>,
        options: &Self::Options,
        scale: Option<GradScale<'_>>,
    ) -> Result<(), TorchError>;
}

/// The parameters of a bucket that have a gradient this time.
pub(crate) struct Stepped<'a> {
    pub(crate) params: &'a TensorList,
    pub(crate) grads: &'a TensorList,
    /// Which of the bucket's parameters they are; none when all.
    pub(crate) only: Option<&'a [bool]>,
}

impl Stepped<'_> {
    /// The entries of a per-parameter list that belong to the stepped parameters; a list that is not used stays empty.
    pub(crate) fn of(&self, list: &TensorList) -> Result<TensorList, TorchError> {
        match self.only {
            Some(only) if !list.is_empty() => list.select(only),
            _ => list.share(),
        }
    }
}

#[derive(Debug)]
struct Bucket<R> {
    params: TensorList,
    /// Made at the first step, so that a loaded or frozen model costs nothing before it trains.
    rule: Option<R>,
}

#[derive(Debug)]
struct Group<R: Rule> {
    options: R::Options,
    buckets: Vec<Bucket<R>>,
}

/// An optimizer whose step is one fused kernel a group, device and dtype.
#[derive(Debug)]
pub(crate) struct Fused<R: Rule> {
    id: OptimizerId,
    groups: Vec<Group<R>>,
    /// All parameters in the order they were given.
    params: TensorList,
}

impl<R: Rule> Fused<R> {
    /// # Errors
    /// When an option is out of range, or a parameter cannot be optimized or is given twice.
    pub(crate) fn new(groups: Vec<(Vec<Tensor>, R::Options)>) -> Result<Self, OptimizerError> {
        let all: Vec<Tensor> = groups.iter().flat_map(|(params, _)| params).map(Tensor::shallow_clone).collect();
        // Checked across groups first; within each group the same checks then pass.
        buckets(&all)?;
        let groups = groups.into_iter().map(|(params, options)| {
            options.check()?;
            let buckets = buckets(&params)?.into_iter().map(|params| Bucket { params, rule: None }).collect();
            Ok(Group { options, buckets })
        });
        let groups = groups.collect::<Result<_, OptimizerError>>()?;
        Ok(Self { id: OptimizerId::new(), groups, params: TensorList::new(&all)? })
    }

    fn step_all(&mut self, scale: Option<GradScale<'_>>) -> Result<(), OptimizerError> {
        let _no_grad = tch::no_grad_guard();
        for group in &mut self.groups {
            for bucket in &mut group.buckets {
                bucket.step(&group.options, scale)?;
            }
        }
        Ok(())
    }

    fn group(&self, group: usize) -> Result<&Group<R>, OptimizerError> {
        self.groups.get(group).ok_or(OptimizerError::NoSuchGroup { group, groups: self.groups.len() })
    }
}

impl<R: Rule> Bucket<R> {
    fn step(&mut self, options: &R::Options, scale: Option<GradScale<'_>>) -> Result<(), TorchError> {
        let grads = self.params.grads_in_layout()?;
        if grads.list.is_empty() {
            return Ok(());
        }
        let rule = match &mut self.rule {
            Some(rule) => rule,
            none => none.insert(R::new(&self.params, options)?),
        };
        // A bucket on another device than the scaler needs copies of the two scalars there.
        let device = grads.list.get(0)?.device();
        let near = |tensor: &Tensor| tensor.f_to_device_(device, tensor.kind(), device.is_cuda(), false);
        let moved =
            scale.map(|s| Ok::<_, TorchError>((s.scale.map(near).transpose()?, near(s.found_inf)?))).transpose()?;
        let scale = moved.as_ref().map(|(scale, found_inf)| GradScale { scale: scale.as_ref(), found_inf });
        if grads.complete() {
            return rule.step(&Stepped { params: &self.params, grads: &grads.list, only: None }, options, scale);
        }
        let params = self.params.select(&grads.defined)?;
        rule.step(&Stepped { params: &params, grads: &grads.list, only: Some(&grads.defined) }, options, scale)
    }
}

impl<R: Rule> Optimizer for Fused<R> {
    fn id(&self) -> OptimizerId {
        self.id
    }

    fn params(&self) -> Vec<Tensor> {
        // The list is as long as it says, so no index can be out of it.
        self.params.to_vec().unwrap_or_default()
    }

    fn num_groups(&self) -> usize {
        self.groups.len()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        Some(self.groups.get(group)?.options.lr())
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.group(group)?;
        OptimizerError::check_lr(lr)?;
        self.groups[group].options.set_lr(lr);
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        self.step_all(None)
    }

    fn takes_grad_scale(&self) -> bool {
        true
    }

    fn step_scaled(&mut self, scale: GradScale<'_>) -> Result<(), OptimizerError> {
        self.step_all(Some(scale))
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(self.params.clear_grads()?)
    }
}

/// Implements [`Optimizer`] for a public type by its only field.
macro_rules! delegate_optimizer {
    ($optimizer:ty) => {
        impl overdrive_core::Optimizer for $optimizer {
            fn id(&self) -> overdrive_core::OptimizerId {
                self.0.id()
            }

            fn params(&self) -> Vec<tch::Tensor> {
                self.0.params()
            }

            fn num_groups(&self) -> usize {
                self.0.num_groups()
            }

            fn lr(&self, group: usize) -> Option<f64> {
                self.0.lr(group)
            }

            fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), overdrive_core::OptimizerError> {
                self.0.set_lr(group, lr)
            }

            fn step(&mut self) -> Result<(), overdrive_core::OptimizerError> {
                self.0.step()
            }

            fn takes_grad_scale(&self) -> bool {
                self.0.takes_grad_scale()
            }

            fn step_scaled(
                &mut self,
                scale: overdrive_core::GradScale<'_>,
            ) -> Result<(), overdrive_core::OptimizerError> {
                self.0.step_scaled(scale)
            }

            fn zero_grad(&mut self) -> Result<(), overdrive_core::OptimizerError> {
                self.0.zero_grad()
            }
        }
    };
}
pub(crate) use delegate_optimizer;
