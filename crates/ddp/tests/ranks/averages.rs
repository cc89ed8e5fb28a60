//! `SyncBatchNorm` and local SGD, compared with one process that computes the same.

use anyhow::{Result, ensure};
use overdrive_core::Stateful;
use overdrive_ddp::hooks::PostLocalSgd;
use overdrive_ddp::{DdpError, DistributedDataParallel, ModelAverager, ProcessGroup, SyncBatchNorm};
use tch::nn::{self, Module, ModuleT};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

/// Batches of different sizes, one of them empty, with values far from zero, beside which they differ little.
fn part(step: usize, rank: usize, kind: Kind) -> Tensor {
    tch::manual_seed((500 + step * 10 + rank) as i64);
    let rows = [5, 0, 3][(rank + step) % 3];
    Tensor::randn([rows, 4, 3], (kind, Device::Cpu)) * 0.3 + 1000.0
}

pub fn sync_batch_norm(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    equals_the_large_batch(meeting, &group, Kind::Double, (1e-6, 1e-9))?;
    // In float32 a mean of 1000 is known to 6e-5, and so an output to a few times 2e-4.
    equals_the_large_batch(meeting, &group, Kind::Float, (1e-4, 5e-3))
}

/// Compares outputs, running statistics and gradients with tch's batch normalisation of all parts at once, from the
/// first step on, when the running mean is still far from the batch's.
fn equals_the_large_batch(
    meeting: &Meeting,
    group: &ProcessGroup,
    kind: Kind,
    (relative, absolute): (f64, f64),
) -> Result<()> {
    tch::manual_seed(1);
    let mut vs = nn::VarStore::new(Device::Cpu);
    let ours = SyncBatchNorm::new(vs.root(), 4, Default::default(), group);
    vs.set_kind(kind);
    let mut reference_vs = nn::VarStore::new(Device::Cpu);
    let reference = nn::batch_norm1d(reference_vs.root(), 4, Default::default());
    reference_vs.set_kind(kind);
    tch::no_grad(|| {
        for (name, mut one) in vs.variables() {
            one.copy_(&reference_vs.variables()[&name]);
        }
    });
    let ddp = DistributedDataParallel::new(&vs, group)?;
    let close = |found: &Tensor, expected: &Tensor, what: &str| {
        ensure!(found.allclose(expected, relative, absolute, false), "{kind:?} {what}: {found} instead of {expected}");
        Ok(())
    };
    let ranks = group.size();
    for step in 0..50 {
        let parts: Vec<Tensor> = (0..ranks).map(|rank| part(step, rank, kind)).collect();
        let whole = Tensor::cat(&parts, 0).set_requires_grad(true);
        let expected = reference.forward_t(&whole, true);
        (expected.sin().sum(kind) / ranks as f64).backward();

        let own = parts[meeting.rank].detach().set_requires_grad(true);
        let found = ddp.forward(|| ours.forward_t(&own, true))??;
        ddp.backward(&found.sin().sum(kind))?;

        let start: i64 = parts[..meeting.rank].iter().map(|part| part.size()[0]).sum();
        let rows = own.size()[0];
        close(&found, &expected.narrow(0, start, rows), "outputs")?;
        // The reference's loss is divided by the number of ranks.
        close(&(own.grad() / ranks as f64), &whole.grad().narrow(0, start, rows), "gradients of the inputs")?;
        for (name, found) in vs.variables() {
            let expected = &reference_vs.variables()[&name];
            close(&found, expected, &name)?;
            if found.requires_grad() {
                close(&found.grad(), &expected.grad(), &format!("the gradient of {name}"))?;
            }
        }
        for mut param in vs.trainable_variables().into_iter().chain(reference_vs.trainable_variables()) {
            tch::no_grad(|| drop(param.f_sub_(&(param.grad() * 0.01))));
            param.zero_grad();
        }
    }
    let inputs = part(0, 0, kind);
    close(&ours.forward_t(&inputs, false)?, &reference.forward_t(&inputs, false), "evaluation")?;
    let refused = ours.forward_t(&Tensor::ones([2, 5], (kind, Device::Cpu)), true);
    ensure!(matches!(refused, Err(DdpError::InvalidTensor { .. })));
    Ok(())
}

/// Rank r's gradient is `param - target(r)`, so the result of every step is known.
pub fn local_sgd(meeting: &Meeting) -> Result<()> {
    const LR: f64 = 0.25;
    let group = meeting.group()?;
    let target = |rank: usize| rank as f64 * 3.0;
    let average = |params: &[f64; 3]| params.iter().sum::<f64>() / 3.0;
    let (global_steps, period) = (4, 3);
    let vs = nn::VarStore::new(Device::Cpu);
    let mut model = nn::linear(vs.root(), 1, 1, nn::LinearConfig { bias: false, ..Default::default() });
    let _ = tch::no_grad(|| model.ws.fill_(8.0));
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    ddp.register_comm_hook(PostLocalSgd::new(&group, None, global_steps))?;
    let mut averager = ModelAverager::new(&group, &vs.trainable_variables(), period, global_steps)?;
    let mut expected = [8.0; 3];
    for step in 0..14u64 {
        let one = Tensor::ones([1, 1], (Kind::Float, Device::Cpu));
        let loss = (ddp.forward(|| model.forward(&one))? - target(meeting.rank)).square().sum(Kind::Float) / 2.0;
        ddp.backward(&loss)?;
        tch::no_grad(|| {
            let grad = model.ws.grad();
            let _ = model.ws.g_sub_(&(grad * LR));
            model.ws.zero_grad();
        });
        if step == 6 {
            // A resumed run continues in the middle of its period.
            let mut resumed = ModelAverager::new(&group, &vs.trainable_variables(), period, global_steps)?;
            resumed.load_state_dict(&averager.state_dict()?)?;
            averager = resumed;
        }
        let averaged = averager.average_parameters()?;

        let grads: Vec<f64> = (0..3).map(|rank| expected[rank] - target(rank)).collect();
        let mean = grads.iter().sum::<f64>() / 3.0;
        for rank in 0..3 {
            expected[rank] -= LR * if step < global_steps { mean } else { grads[rank] };
        }
        let due = step >= global_steps && (step - global_steps).is_multiple_of(period);
        if due {
            expected = [average(&expected); 3];
        }
        ensure!(averaged == due, "step {step}");
        let found = model.ws.double_value(&[0, 0]);
        ensure!((found - expected[meeting.rank]).abs() < 1e-5, "step {step}: {found} instead of {expected:?}");
    }
    ensure!(matches!(ModelAverager::new(&group, &[], 1, 0), Err(DdpError::NoParameters)));
    let period = ModelAverager::new(&group, &vs.trainable_variables(), 0, 0);
    ensure!(matches!(period, Err(DdpError::InvalidOption { option: "period", .. })));
    Ok(())
}
