//! Scenarios in which one rank is killed.

use std::time::Duration;

use anyhow::{Context, Result};
use overdrive_ddp::hooks::{CastCompress, OneBit, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{Backend, DdpBuilder, DdpError, DistributedDataParallel, InitMethod, ProcessGroup, ReduceOp};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::{Meeting, PATIENCE};
use crate::moments::{self, doing, drawn, short, told};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub fn while_meeting() -> Result<()> {
    moments::kill("killed_meeting", 13, Duration::from_millis(250), |_| Ok(()))
}

pub fn in_collectives() -> Result<()> {
    moments::kill("killed_collectives", 13, Duration::from_millis(300), |_| Ok(()))
}

pub fn in_backward() -> Result<()> {
    moments::kill("killed_training", 12, Duration::from_millis(300), |_| Ok(()))
}

/// Meets, and then keeps making groups and models, which meet too.
pub fn meeting(meeting: &Meeting) -> Result<()> {
    // A random delay, so that the victim arrives first, last or in between.
    std::thread::sleep(Duration::from_millis((drawn()? >> (8 * meeting.rank)) % 40));
    // Half of the kills count from here, the others from after the first rendezvous.
    if drawn()?.is_multiple_of(2) {
        doing("init_process_group")?;
    }
    let group = match ProcessGroup::builder(Backend::Gloo).timeout(short()?).init(&InitMethod::Auto) {
        Ok(group) => group,
        Err(error) => return told(&error, "could not meet the others at tcp://127.0.0.1"),
    };
    let ranks: Vec<usize> = (0..group.size()).collect();
    let param = Tensor::ones([64], FLOAT).set_requires_grad(true);
    loop {
        doing("new_group")?;
        let sub_group = match group.new_group(&ranks) {
            Ok(sub_group) => sub_group.context("a rank that is no member")?,
            Err(error) => return told(&error, "new_group on rank"),
        };
        doing("DistributedDataParallel")?;
        let params = vec![("w".to_owned(), param.shallow_clone())];
        if let Err(error) = DistributedDataParallel::builder(&sub_group).build_from(params, Vec::new()) {
            return told(&error, "DistributedDataParallel on rank");
        }
    }
}

type Step = fn(&ProcessGroup, &mut [Tensor]) -> Result<(), DdpError>;

/// Each with the text that its error must contain.
const STEPS: &[(&str, Step)] = &[
    ("all_reduce", |group, own| group.all_reduce(&mut own[0], ReduceOp::Avg)),
    ("all_reduce_coalesced", |group, own| group.all_reduce_coalesced(own, ReduceOp::Max)),
    ("reduce", |group, own| group.reduce(&mut own[0], group.size() - 1, ReduceOp::Min)),
    ("broadcast", |group, own| group.broadcast(&mut own[0], 1)),
    ("all_gather", |group, own| group.all_gather(&own[0]).map(drop)),
    ("gather", |group, own| group.gather(&own[0], 0).map(drop)),
    ("scatter", |group, own| {
        let (mut output, root) = (own[0].empty_like(), 1);
        group.scatter(&mut output, if group.rank() == root { own } else { &[] }, root)
    }),
    ("reduce_scatter", |group, own| group.reduce_scatter(own, ReduceOp::Sum).map(drop)),
    ("all_to_all", |group, own| {
        let mut outputs: Vec<Tensor> = own.iter().map(Tensor::empty_like).collect();
        group.all_to_all(&mut outputs, own)
    }),
    ("all_reduce", |group, own| {
        let mut works = Vec::new();
        for tensor in own {
            works.push(group.all_reduce_async(tensor, ReduceOp::Min)?);
        }
        works.into_iter().try_for_each(|work| work.wait())
    }),
    ("barrier", |group, _| group.barrier()),
    ("monitored_barrier", |group, _| group.monitored_barrier(group.timeout(), true)),
    ("broadcast", |group, _| group.broadcast_object(Some(&7), 0).map(drop)),
    ("all_gather", |group, _| group.all_gather_object(&"what a rank says".to_owned()).map(drop)),
    (" on rank", |group, own| {
        // Around the ring: a send's error names the send, a receive's the receive.
        let (rank, size) = (group.rank(), group.size());
        let mut received = own[0].empty_like();
        let sent = group.send_async(&own[0], (rank + 1) % size, 3)?;
        group.recv(&mut received, Some((rank + size - 1) % size), 3)?;
        sent.wait()
    }),
];

pub fn collectives(meeting: &Meeting) -> Result<()> {
    let group = meeting.group_with(PATIENCE, drawn()?.is_multiple_of(4))?;
    let mut own: Vec<Tensor> = (0..group.size()).map(|_| Tensor::rand([50_000], FLOAT)).collect();
    // The first collective may still wait for other ranks to connect.
    group.barrier()?;
    group.set_timeout(short()?)?;
    loop {
        for (name, step) in STEPS {
            doing(name)?;
            if let Err(error) = step(&group, &mut own) {
                told(&error, name)?;
                // The next collective fails too, at once or at the timeout.
                group.barrier().err().context("the group works without a rank")?;
                return Ok(());
            }
        }
    }
}

/// Options of DDP by number; numbers above 4 only have a hook.
fn options(builder: DdpBuilder, way: u64) -> DdpBuilder {
    let builder = builder.bucket_cap_mb(1.0 / 16.0);
    match way {
        1 | 2 => builder.find_unused_parameters(true),
        3 => builder.static_graph(true),
        4 => builder.gradient_as_bucket_view(true),
        _ => builder,
    }
}

fn hook(ddp: &DistributedDataParallel, group: &ProcessGroup, way: u64) -> Result<(), DdpError> {
    let power = PowerSgdOptions { start_power_sgd_iter: 2, min_compression_rate: 1.0, ..Default::default() };
    match way {
        5 => ddp.register_comm_hook(PowerSgd::new(group, power)?),
        6 => ddp.register_comm_hook(OneBit::new(group, 1)),
        7 => ddp.register_comm_hook(TopK::new(group, 0.1, 1)?),
        8 => ddp.register_comm_hook(CastCompress::half(group)),
        9 => ddp.register_fp16_compress(),
        _ => Ok(()),
    }
}

pub fn training(meeting: &Meeting) -> Result<()> {
    let way = drawn()? % 11;
    let group = meeting.group_with(PATIENCE, way == 10)?;
    let vs = nn::VarStore::new(Device::Cpu);
    let layers: Vec<nn::Linear> =
        (0..6).map(|layer| nn::linear(vs.root() / layer, 128, 128, Default::default())).collect();
    let _buffer = vs.root().zeros_no_train("buffer", &[1000]);
    let ddp = options(DistributedDataParallel::builder(&group), way).build(&vs)?;
    hook(&ddp, &group, way)?;
    group.barrier()?;
    group.set_timeout(short()?)?;
    let inputs = Tensor::randn([16, 128], FLOAT);
    for step in 0.. {
        // With unused parameters, another layer is left out each time.
        let left_out = if way == 1 { step % layers.len() } else { layers.len() };
        let used = layers.iter().enumerate().filter(|(index, _)| *index != left_out).map(|(_, layer)| layer);
        doing("forward")?;
        let _held = (way == 0 && step % 3 != 2).then(|| ddp.no_sync());
        let outputs = ddp.forward(|| used.fold(inputs.shallow_clone(), |x, layer| layer.forward(&x).tanh()));
        let outputs = match outputs {
            Ok(outputs) => outputs,
            Err(error) => return told(&error, " on rank"),
        };
        doing("backward")?;
        if let Err(error) = ddp.backward(&outputs.square().mean(Kind::Float)) {
            told(&error, " on rank")?;
            group.barrier().err().context("the group works without a rank")?;
            return Ok(());
        }
        for grad in vs.trainable_variables().iter().map(Tensor::grad).filter(Tensor::defined) {
            drop(grad.shallow_clone().zero_());
        }
    }
    Ok(())
}
