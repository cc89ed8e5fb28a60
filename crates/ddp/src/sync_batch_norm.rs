//! Batch normalisation over all ranks' batches.

use overdrive_core::is_recomputing;
use overdrive_ffi::{Arg, LazyOp};
use tch::{Kind, Tensor, nn};

use crate::error::DdpError;
use crate::group::ProcessGroup;

static DIV: LazyOp = LazyOp::new("aten::div", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");
static ADD: LazyOp = LazyOp::new("aten::add", "Scalar");

/// Batch normalisation by the mean and variance of all ranks' batches together, as if they were one batch.
///
/// In training mode every rank must run it the same number of times, because each run waits for the others. A rank's
/// batch may be empty.
///
/// # Source
/// `torch.nn.SyncBatchNorm`
#[derive(Debug)]
pub struct SyncBatchNorm {
    group: ProcessGroup,
    /// The running mean of each channel.
    pub running_mean: Tensor,
    /// The running unbiased variance of each channel.
    pub running_var: Tensor,
    /// The scale of each channel; `None` if not `affine`.
    pub weight: Option<Tensor>,
    /// The shift of each channel; `None` if not `affine`.
    pub bias: Option<Tensor>,
    config: nn::BatchNormConfig,
}

impl SyncBatchNorm {
    /// A layer for inputs with `channels` in dimension 1. Its variables have the same names as those of
    /// `nn::batch_norm2d`.
    pub fn new(path: nn::Path<'_>, channels: i64, config: nn::BatchNormConfig, group: &ProcessGroup) -> Self {
        let affine = |name: &str, init| config.affine.then(|| path.var(name, &[channels], init));
        Self {
            group: group.clone(),
            running_mean: path.zeros_no_train("running_mean", &[channels]),
            running_var: path.ones_no_train("running_var", &[channels]),
            weight: affine("weight", config.ws_init),
            bias: affine("bias", config.bs_init),
            config,
        }
    }

    /// Normalises by the statistics of all ranks' batches in training, and by the running statistics otherwise.
    ///
    /// # Shapes
    /// Any batch with the channels in dimension 1; the output has the same shape.
    ///
    /// # Errors
    /// When the shape does not fit, all ranks' batches together hold fewer than two values per channel, or a rank has
    /// exited or does not take part within the group's timeout.
    ///
    /// # Syncs
    /// In training, waits for all ranks, in backward too. On a GPU its stream waits, not the host, unless this rank has
    /// fewer than two values per channel.
    pub fn forward_t(&self, inputs: &Tensor, train: bool) -> Result<Tensor, DdpError> {
        let channels = self.running_mean.numel() as i64;
        let shape = inputs.size();
        if shape.len() < 2 || shape[1] != channels {
            return Err(DdpError::InvalidTensor {
                op: "SyncBatchNorm",
                argument: "inputs".to_owned(),
                found: format!("of shape {shape:?}"),
                expected: format!("of at least 2 dimensions with {channels} channels in the second"),
            });
        }
        if !train {
            let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
            let (mean, var) = (Some(&self.running_mean), Some(&self.running_var));
            let config = &self.config;
            return Ok(inputs.f_batch_norm(weight, bias, mean, var, false, config.momentum, config.eps, false)?);
        }
        let (mean, var) = self.statistics(inputs, channels)?;
        let per_channel = |tensor: &Tensor| {
            let mut view = vec![1; shape.len()];
            view[1] = channels;
            tensor.f_view(&view[..])
        };
        let scale = ADD.tensor(&[Arg::Tensor(&var), Arg::Double(self.config.eps)])?.f_rsqrt()?;
        let precise = inputs.f_to_kind(mean.kind())?;
        let mut outputs = precise.f_sub(&per_channel(&mean)?)?.f_mul(&per_channel(&scale)?)?;
        if let Some(weight) = &self.weight {
            outputs = outputs.f_mul(&per_channel(weight)?)?;
        }
        if let Some(bias) = &self.bias {
            outputs = outputs.f_add(&per_channel(bias)?)?;
        }
        Ok(outputs.f_to_kind(inputs.kind())?)
    }

    /// The mean and variance of each channel over all ranks; updates the running statistics.
    fn statistics(&self, inputs: &Tensor, channels: i64) -> Result<(Tensor, Tensor), DdpError> {
        let kind = match inputs.kind() {
            Kind::Half | Kind::BFloat16 => Kind::Float,
            kind => kind,
        };
        let rows = inputs.f_to_kind(kind)?.f_transpose(0, 1)?.f_reshape([channels, -1])?;
        let own = inputs.numel() as i64 / channels.max(1);
        // The variance as a difference of sums of squares would lose its digits if the mean is large. So each rank
        // sends its mean and its sum of squared deviations from that mean. They are combined as Chan et al. do, as in
        // PyTorch.
        let sum = rows.f_sum_dim_intlist(1, false, kind)?;
        let own_mean = DIV.tensor(&[Arg::Tensor(&sum), Arg::Double(own.max(1) as f64)])?;
        let own_squares = rows.f_sub(&own_mean.f_unsqueeze(1)?)?.f_square()?.f_sum_dim_intlist(1, false, kind)?;
        let count = Tensor::f_full([1], own, (kind, inputs.device()))?;
        let stats = self.of_each_rank(&Tensor::f_cat(&[own_mean, own_squares, count], 0)?)?;
        let (means, squares) = (stats.f_narrow(1, 0, channels)?, stats.f_narrow(1, channels, channels)?);
        let counts = stats.f_narrow(1, 2 * channels, 1)?.f_detach()?;
        let total = counts.f_sum(kind)?;
        // Reading `total` waits for the device and the other ranks. A rank with two values or more knows that `total`
        // is at least 2, so it does not read it.
        if own < 2 && total.f_double_value(&[])? < 2.0 {
            let count = total.f_double_value(&[])?;
            return Err(DdpError::InvalidTensor {
                op: "SyncBatchNorm",
                argument: "the batch over all ranks".to_owned(),
                found: format!("of {count} values per channel"),
                expected: "of at least 2".to_owned(),
            });
        }
        let over_ranks = |per_rank: Tensor| per_rank.f_sum_dim_intlist(0, false, kind)?.f_div(&total);
        let mean = over_ranks(means.f_mul(&counts)?)?;
        let moved = means.f_sub(&mean)?.f_square()?.f_mul(&counts)?;
        let var = over_ranks(squares.f_add(&moved)?)?;
        self.update_running_statistics(&mean, &var, &total)?;
        Ok((mean, var))
    }

    /// Gathers every rank's vector into the rows of a matrix. The backward pass sums the gradients over ranks.
    fn of_each_rank(&self, own: &Tensor) -> Result<Tensor, DdpError> {
        let (ranks, rank, length) = (self.group.size() as i64, self.group.rank() as i64, own.numel() as i64);
        // On each rank the other ranks' rows are zeros, so the sum over ranks has every rank's row.
        let padded = own.f_constant_pad_nd([rank * length, (ranks - 1 - rank) * length])?;
        Ok(self.group.sum_with_grad("SyncBatchNorm", &padded)?.f_view([ranks, length])?)
    }

    /// Moves the running statistics towards the batch's. The running variance is the unbiased one.
    fn update_running_statistics(&self, mean: &Tensor, var: &Tensor, count: &Tensor) -> Result<(), DdpError> {
        // A batch counts once, also where a checkpointed part of the model sees it again.
        if is_recomputing() {
            return Ok(());
        }
        let _no_grad = tch::no_grad_guard();
        let momentum = self.config.momentum;
        let count = count.f_to_kind(Kind::Double)?;
        let fewer = ADD.tensor(&[Arg::Tensor(&count), Arg::Double(-1.0)])?;
        let unbiased = var.f_mul(&count.f_div(&fewer)?.f_to_kind(var.kind())?)?;
        for (running, seen) in [(&self.running_mean, mean), (&self.running_var, &unbiased)] {
            let kept = MUL.tensor(&[Arg::Tensor(running), Arg::Double(1.0 - momentum)])?;
            let new = MUL.tensor(&[Arg::Tensor(&seen.f_to_kind(running.kind())?), Arg::Double(momentum)])?;
            running.shallow_clone().f_copy_(&kept.f_add(&new)?)?;
        }
        Ok(())
    }
}
