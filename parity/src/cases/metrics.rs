//! Meters of a training loop, compared with those of PyTorch's ImageNet example.

use anyhow::Result;
use overdrive_nn::metrics::{AverageMeter, ProgressMeter, Summary, TopKAccuracy, accuracy};
use tch::Tensor;

use crate::record::{Found, Given};

fn text(line: &str) -> Tensor {
    Tensor::from_slice(line.as_bytes())
}

pub fn meters(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let mut time = AverageMeter::new("Time").fixed(6, 3).summary_type(Summary::None);
    let mut losses = AverageMeter::new("Loss").scientific(4);
    let mut top1 = AverageMeter::new("Acc@1").fixed(6, 2);
    let mut top5 = AverageMeter::new("Acc@5").fixed(6, 2).summary_type(Summary::Sum);
    let mut both = TopKAccuracy::new(&[1, 5]);
    let progress = ProgressMeter::new(1250, "Epoch: [1]");
    for (number, size) in given.value::<Vec<i64>>("sizes")?.into_iter().enumerate() {
        let output = given.tensor(&format!("output.{number}"))?;
        let target = given.tensor(&format!("target.{number}"))?;
        let shares = accuracy(&output, &target, &[1, 5])?;
        found.insert(format!("{number}.acc1"), &shares[0]);
        found.insert(format!("{number}.acc5"), &shares[1]);
        losses.update(&output.cross_entropy_for_logits(&target), size)?;
        top1.update(&shares[0], size)?;
        top5.update(&shares[1], size)?;
        both.update(&output, &target)?;
        time.update_host(0.125 * (number * number) as f64, 1)?;
        let meters = [&time, &losses, &top1, &top5];
        let sums = meters.iter().map(|meter| meter.sum()).collect::<Result<Vec<_>, _>>()?;
        let averages = meters.iter().map(|meter| meter.avg()).collect::<Result<Vec<_>, _>>()?;
        found.insert(format!("{number}.sum"), &Tensor::from_slice(&sums));
        found.insert(format!("{number}.avg"), &Tensor::from_slice(&averages));
        found.insert(format!("{number}.line"), &text(&progress.display(number + 1, &meters)?));
    }
    found.insert("summary", &text(&progress.display_summary(&[&time, &losses, &top1, &top5])?));
    let whole = both.compute()?;
    let rounded = [top1.avg()?, top5.avg()?];
    // The averages are of rounded percentages.
    anyhow::ensure!(whole.iter().zip(rounded).all(|(one, other)| (one - other).abs() < 1e-4), "{whole:?}, {rounded:?}");
    Ok(found)
}
