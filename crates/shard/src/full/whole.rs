//! Whole tensors of all ranks' rows, and this rank's rows of whole ones.

use overdrive_core::TorchError;
use overdrive_ddp::ProcessGroup;
use tch::{Device, Tensor};

use super::layout::Layout;
use crate::error::ShardError;

/// The whole on rank `to`, on the host. Every rank calls it.
pub(super) fn gathered(
    group: &ProcessGroup,
    layout: &Layout,
    own: &Tensor,
    to: usize,
) -> Result<Option<Tensor>, ShardError> {
    let _no_grad = tch::no_grad_guard();
    let own = own.f_detach()?.f_reshape([-1])?;
    if group.size() == 1 {
        return Ok(Some(own.f_to_device(Device::Cpu)?.f_view(&layout.shape[..])?.f_detach_copy()?));
    }
    let part = Tensor::f_zeros([layout.part_numel()], (own.kind(), group.device()))?;
    part.f_narrow(0, 0, layout.own_numel())?.f_copy_(&own)?;
    let Some(parts) = group.gather(&part, to)? else { return Ok(None) };
    let all = Tensor::f_cat(&parts, 0)?.f_to_device(Device::Cpu)?;
    drop(parts);
    let numel = layout.shape.iter().product();
    let whole = all.f_narrow(0, 0, numel)?.f_view(&layout.shape[..])?;
    Ok(Some(if all.numel() as i64 == numel { whole } else { whole.f_detach_copy()? }))
}

/// This rank's rows.
pub(super) fn rows_of(layout: &Layout, whole: &Tensor) -> Result<Tensor, TorchError> {
    let (first, rows) = layout.own_rows();
    Ok(whole.f_detach()?.f_narrow(0, first, rows)?)
}
