//! Meters against what they count, and their lines against Python's.

use overdrive_core::SingleProcess;
use overdrive_nn::NnError;
use overdrive_nn::metrics::{AverageMeter, ProgressMeter, Summary, TopKAccuracy, accuracy};
use tch::{Device, Kind, Tensor};

fn outputs() -> (Tensor, Tensor) {
    let output = Tensor::from_slice2(&[[0.1f32, 0.7, 0.2, 0.0], [0.5, 0.3, 0.2, 0.0], [0.0, 0.1, 0.2, 0.3]]);
    (output, Tensor::from_slice(&[1i64, 2, 0]))
}

#[test]
fn accuracy_counts_targets_among_the_largest() -> Result<(), NnError> {
    let (output, target) = outputs();
    let found = accuracy(&output, &target, &[1, 3, 4])?;
    let values: Vec<f64> = found.iter().map(|it| it.double_value(&[0])).collect();
    assert!(values.iter().zip([100.0 / 3.0, 200.0 / 3.0, 100.0]).all(|(one, other)| (one - other).abs() < 1e-5));
    assert!(found.iter().all(|it| it.size() == [1] && it.kind() == Kind::Float));
    assert!(accuracy(&output, &target, &[])?.is_empty());
    for (target, top_k) in [(&target, 5), (&target, 0), (&target.narrow(0, 0, 2), 1), (&output, 1)] {
        assert!(accuracy(&output, target, &[top_k]).is_err());
    }
    let nothing = accuracy(&output.narrow(0, 0, 0), &target.narrow(0, 0, 0), &[1]).unwrap_err().to_string();
    assert_eq!(nothing, "`accuracy` needs at least one sample, not a tensor of shape [0]");
    let error = accuracy(&output, &target, &[5]).unwrap_err().to_string();
    assert_eq!(error, "accuracy: `top_k` is 5, but has to be from 1 to the number of classes, 4");
    Ok(())
}

#[test]
fn counts_do_not_depend_on_the_batches() -> Result<(), NnError> {
    tch::manual_seed(3);
    let output = Tensor::randn([97, 10], (Kind::Float, Device::Cpu));
    let target = Tensor::randint(10, [97], (Kind::Int64, Device::Cpu));
    let mut whole = TopKAccuracy::new(&[1, 5]);
    assert!(whole.compute()?.iter().all(|share| share.is_nan()));
    whole.update(&output, &target)?;
    let mut parts = TopKAccuracy::new(&[1, 5]);
    for (output, target) in output.split(20, 0).iter().zip(target.split(20, 0)) {
        parts.update(output, &target)?;
    }
    assert_eq!((parts.samples(), parts.compute()?), (97, whole.compute()?));
    let hits = output.argmax(1, false).eq_tensor(&target).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(whole.compute()?[0], hits as f64 * 100.0 / 97.0);
    let error = whole.update(&output, &target.narrow(0, 0, 5)).unwrap_err().to_string();
    let expected = "needs a target of shape [97] for an output of shape [97, 10], not a tensor of shape [5]";
    assert_eq!((error, whole.samples()), (format!("`TopKAccuracy::update` {expected}"), 97));
    let error = whole.update(&output.narrow(1, 0, 4), &target).unwrap_err().to_string();
    assert_eq!(error, "TopKAccuracy::update: `top_k` is 5, but has to be from 1 to the number of classes, 4");
    assert!(whole.update(&target, &target).is_err());
    whole.update(&output.narrow(0, 0, 0), &target.narrow(0, 0, 0))?;
    assert_eq!((whole.samples(), whole.compute()?), (97, parts.compute()?), "nothing was counted");
    parts.reset();
    assert_eq!(parts.samples(), 0);
    Ok(())
}

#[test]
fn averages_weigh_values_by_their_samples() -> Result<(), NnError> {
    let mut meter = AverageMeter::new("Loss");
    assert_eq!((meter.val()?, meter.avg()?, meter.count()), (0.0, 0.0, 0));
    let mut loss = Tensor::from_slice(&[2.0f32]).set_requires_grad(true);
    meter.update(&loss, 3)?;
    tch::no_grad(|| {
        let _ = loss.fill_(100.0);
    });
    assert_eq!(meter.val()?, 2.0, "the meter keeps a copy");
    meter.update(&Tensor::from(6.0f32), 1)?;
    meter.update_host(10.0, 4)?;
    assert_eq!((meter.val()?, meter.sum()?, meter.count(), meter.avg()?), (10.0, 52.0, 8, 6.5));
    for wrong in [Tensor::from_slice(&[1.0, 2.0]), Tensor::new()] {
        assert!(meter.update(&wrong, 1).is_err());
    }
    assert!(meter.update_host(1.0, -1).is_err() && meter.update(&loss, -1).is_err());
    assert!(meter.all_reduce(&SingleProcess).is_ok());
    assert_eq!((meter.sum()?, meter.count()), (52.0, 8));
    meter.reset();
    assert_eq!((meter.sum()?, meter.count()), (0.0, 0));
    Ok(())
}

#[test]
fn lines_are_those_of_python() -> Result<(), NnError> {
    // Written by the meters of PyTorch's ImageNet example from the same values.
    let mut time = AverageMeter::new("Time").fixed(6, 3).summary_type(Summary::None);
    let mut loss = AverageMeter::new("Loss").scientific(4);
    let mut top1 = AverageMeter::new("Acc@1").fixed(6, 2).summary_type(Summary::Sum);
    let count = AverageMeter::new("Seen").summary_type(Summary::Count);
    time.update_host(0.25, 1)?;
    time.update_host(12.0, 1)?;
    loss.update_host(6.907_755_3, 32)?;
    top1.update_host(3.125, 32)?;
    let progress = ProgressMeter::new(5005, "Epoch: [3]");
    let line = progress.display(10, &[&time, &loss, &top1, &count])?;
    let expected = "Epoch: [3][  10/5005]\tTime 12.000 ( 6.125)\tLoss 6.9078e+00 (6.9078e+00)\t\
                    Acc@1   3.12 (  3.12)\tSeen 0.000000 (0.000000)";
    assert_eq!(line, expected);
    assert_eq!(progress.display_summary(&[&time, &loss, &top1, &count])?, " *  Loss 6.908 Acc@1 100.000 Seen 0.000");
    for (value, text) in [(-1.5e-7, "-1.5000e-07"), (2e120, "2.0000e+120"), (f64::NAN, "nan"), (f64::INFINITY, "inf")] {
        let mut meter = AverageMeter::new("x").scientific(4);
        meter.update_host(value, 1)?;
        assert_eq!(meter.to_text()?, format!("x {text} ({text})"));
    }
    Ok(())
}
