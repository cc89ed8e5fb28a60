//! Changing a group's options while it trains.

use std::fmt;

use overdrive_core::OptimizerError;

use crate::algorithm::{Algorithm, Slot};
use crate::builder::Options;
use crate::optimizer::{Group, with_momentum};

/// New options for a parameter group, made by [`GroupOptimizer::group_mut`](crate::GroupOptimizer::group_mut).
pub type GroupMut<'a, A> = Options<A, Live<'a, A>>;

/// The group that a [`GroupMut`] is for.
pub struct Live<'a, A>(&'a mut Group<A>);

impl<'a, A: Algorithm> GroupMut<'a, A> {
    pub(crate) fn over_group(group: &'a mut Group<A>) -> Self {
        Self::of(Live(group))
    }

    /// Applies the new options from the next step on.
    ///
    /// # Errors
    /// When an option is out of range, or needs other state than the group keeps: amsgrad, momentum in a group without, or
    /// another initial value. The group is unchanged then.
    pub fn apply(self) -> Result<(), OptimizerError> {
        let keeps_momentum = self.scope.0.has_momentum;
        let values = self.over(&self.scope.0.values, keeps_momentum)?;
        let (group, kept) = (self.scope.0, with_momentum(&values.options, keeps_momentum));
        for bucket in &group.buckets {
            for param in bucket.params.to_vec()? {
                let now = bucket.precision.slot().into_iter().chain(kept.slots(&param));
                let kind = |slot: &Slot| (slot.name, slot.fill);
                if !now.map(|slot| kind(&slot)).eq(bucket.slots.iter().map(kind)) {
                    return Err(OptimizerError::OtherState);
                }
            }
        }
        let buckets = std::mem::take(&mut group.buckets);
        group.take_over(values, buckets, keeps_momentum);
        Ok(())
    }
}

impl<A> fmt::Debug for Live<'_, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live").field("parameters", &self.0.len).finish_non_exhaustive()
    }
}
