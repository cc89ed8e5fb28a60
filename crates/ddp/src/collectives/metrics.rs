//! Results of a whole dataset, gathered from the ranks that evaluated its parts.

use tch::Tensor;

use super::check;
use crate::error::DdpError;
use crate::group::ProcessGroup;

const OP: &str = "gather_for_metrics";

impl ProcessGroup {
    /// Every rank's tensors of one batch (predictions and labels, say), joined in the order of the dataset's sampler,
    /// without the samples that the sampler repeats to fill its last round.
    ///
    /// For a loader with a `DistributedSampler`, which deals the samples out one by one, and repeats the first ones so
    /// that all ranks get equally many. A metric over such repeats would be wrong.
    ///
    /// `remaining` is how many samples of the dataset were not gathered yet: its length before the first batch. It is
    /// lowered by the number of samples returned.
    ///
    /// ```no_run
    /// # use overdrive_ddp::{DdpError, ProcessGroup};
    /// # use tch::Tensor;
    /// # fn evaluate(group: &ProcessGroup, batches: Vec<(Tensor, Tensor)>, samples: usize) -> Result<(), DdpError> {
    /// let (mut correct, mut remaining) = (0.0, samples);
    /// for (predictions, labels) in batches {
    ///     let all = group.gather_for_metrics(&[&predictions, &labels], &mut remaining)?;
    ///     correct += all[0].eq_tensor(&all[1]).sum(tch::Kind::Double).double_value(&[]);
    /// }
    /// println!("{}", correct / samples as f64);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Shapes
    /// Each tensor: `[batch, ..]`, with the same batch for all and the same shape on all ranks; to at most
    /// `[ranks * batch, ..]`.
    ///
    /// # Errors
    /// When the tensors do not have one first dimension in common, a tensor cannot be sent, or a rank has exited or
    /// does not take part within the group's timeout. `remaining` is unchanged then.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `Accelerator.gather_for_metrics` of Hugging Face Accelerate, which drops the repeats at the end of its own
    /// loader
    pub fn gather_for_metrics(&self, tensors: &[&Tensor], remaining: &mut usize) -> Result<Vec<Tensor>, DdpError> {
        let batch = check::one_batch(self, OP, tensors)?;
        let kept = batch.saturating_mul(self.size() as i64).min(i64::try_from(*remaining).unwrap_or(i64::MAX));
        let _no_grad = tch::no_grad_guard();
        let gathered = tensors.iter().map(|tensor| {
            let parts = self.all_gather(&tensor.f_contiguous()?)?;
            // The sampler deals the samples out in turn, so one of each rank, then the next of each.
            Ok(Tensor::f_stack(&parts, 1)?.f_flatten(0, 1)?.f_narrow(0, 0, kept)?)
        });
        let gathered = gathered.collect::<Result<Vec<_>, DdpError>>()?;
        *remaining -= kept as usize;
        Ok(gathered)
    }
}
