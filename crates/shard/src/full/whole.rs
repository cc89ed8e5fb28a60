//! Whole tensors of all ranks' rows, and this rank's rows of whole ones.

use overdrive_ddp::ProcessGroup;
use tch::{Device, Tensor};

use super::Shared;
use super::layout::Layout;
use super::meeting::Event;
use crate::error::ShardError;

/// The wholes on rank `to`, on the host, of each rank's rows. Every rank calls it. Ranks agree before each gather on
/// whether all can send, and after the last one: what fails on one is an error of all.
pub(super) fn gathered<'a>(
    shared: &Shared,
    rows: impl Iterator<Item = (&'a Layout, &'a Tensor)>,
    to: usize,
) -> Result<Vec<Option<Tensor>>, ShardError> {
    let _no_grad = tch::no_grad_guard();
    let mut engine = shared.lock();
    let group = engine.ranks.parts.clone();
    let (mut wholes, mut failed) = (Vec::new(), Ok(()));
    for (layout, own) in rows {
        let (part, own) = match failed.and_then(|()| part_of(&group, layout, own)) {
            Ok(part) => (Some(part), Ok(())),
            Err(error) => (None, Err(error)),
        };
        engine.agree(Event::Save, own)?;
        let parts = match part {
            Some(part) if group.size() > 1 => {
                let gathered = group.gather(&part, to).map_err(ShardError::from);
                engine.link.watch(gathered)?
            }
            part => part.map(|part| vec![part]),
        };
        let whole = parts.map(|parts| joined(&parts, layout)).transpose();
        failed = whole.map(|whole| wholes.push(whole));
    }
    engine.agree(Event::Save, failed)?;
    Ok(wholes)
}

/// This rank's rows as it sends them.
fn part_of(group: &ProcessGroup, layout: &Layout, own: &Tensor) -> Result<Tensor, ShardError> {
    let own = own.f_detach()?.f_reshape([-1])?;
    let device = if group.size() == 1 { Device::Cpu } else { group.device() };
    let part = Tensor::f_zeros([layout.part_numel()], (own.kind(), device))?;
    part.f_narrow(0, 0, layout.own_numel())?.f_copy_(&own)?;
    Ok(part)
}

fn joined(parts: &[Tensor], layout: &Layout) -> Result<Tensor, ShardError> {
    let all = Tensor::f_cat(parts, 0)?.f_to_device(Device::Cpu)?;
    let numel = layout.shape.iter().product();
    let whole = all.f_narrow(0, 0, numel)?.f_view(&layout.shape[..])?;
    Ok(if all.numel() as i64 == numel { whole } else { whole.f_detach_copy()? })
}
