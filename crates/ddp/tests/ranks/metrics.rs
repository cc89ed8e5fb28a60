//! Results gathered over ranks, compared with those of one process.

use anyhow::{Result, ensure};
use overdrive_ddp::{DdpError, ProcessGroup};
use tch::{Device, Kind, Tensor};

use crate::collectives::same;
use crate::harness::Meeting;

/// This rank's samples: every `size`-th one from `rank` on, beginning again after the last, equally many on each rank.
fn dealt(group: &ProcessGroup, samples: usize) -> Vec<i64> {
    let share = samples.div_ceil(group.size());
    (0..share).map(|turn| ((group.rank() + turn * group.size()) % samples) as i64).collect()
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    for (samples, batch) in [(10, 2), (11, 3), (12, 4), (1, 1), (2, 5), (7, 1), (6, 2)] {
        let (mut numbers, mut rows, mut remaining) = (Vec::new(), Vec::new(), samples);
        for own in dealt(&group, samples).chunks(batch) {
            let number = Tensor::from_slice(own);
            // A view with other strides.
            let row = Tensor::stack(&[&number, &(&number * 10)], 0).to_kind(Kind::Float).transpose(0, 1);
            let before = remaining;
            let all = group.gather_for_metrics(&[&number, &row], &mut remaining)?;
            ensure!(all[0].size()[0] as usize == before - remaining && all.len() == 2);
            numbers.push(all[0].shallow_clone());
            rows.push(all[1].shallow_clone());
        }
        let expected = Tensor::arange(samples as i64, (Kind::Int64, Device::Cpu));
        let what = format!("{samples} samples in batches of {batch}");
        ensure!(remaining == 0, "{what}: {remaining} remain");
        same(&Tensor::cat(&numbers, 0), &expected, &what)?;
        let rows_expected = Tensor::stack(&[&expected, &(&expected * 10)], 1).to_kind(Kind::Float);
        same(&Tensor::cat(&rows, 0), &rows_expected, &what)?;
    }
    Ok(())
}

pub fn refusals(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let two = Tensor::from_slice(&[1i64, 2]);
    let (scalar, three) = (Tensor::from(1i64), Tensor::from_slice(&[1i64, 2, 3]));
    for wrong in [&[][..], &[&scalar], &[&two, &three], &[&two, &Tensor::new()]] {
        let mut remaining = 5;
        let error = group.gather_for_metrics(wrong, &mut remaining).unwrap_err();
        ensure!(matches!(error, DdpError::InvalidTensor { op: "gather_for_metrics", .. }), "{error}");
        ensure!(remaining == 5);
    }
    // Nothing was sent, so the group still works.
    let mut remaining = 3;
    let all = group.gather_for_metrics(&[&two], &mut remaining)?;
    same(&all[0], &Tensor::from_slice(&[1i64, 1, 2]), "after refusals")
}
