//! Ranks on two hosts, which are simulated.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use overdrive_ddp::hooks::{CastCompress, HierarchicalAllReduce, OneBit, PowerSgd, PowerSgdOptions, TopK};
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup, ReduceOp};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::faults;
use crate::harness::{Meeting, PATIENCE, Rank, all_through, free_port, start_by};
use crate::hosts::{CABLE, Hosts};
use crate::{hooks, listeners};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// One rank on each host.
fn start(hosts: &Hosts, scenario: &str, vars: &[(&str, &str)]) -> Result<Vec<Rank>> {
    start_several(hosts, scenario, 1, vars)
}

/// So many ranks on each host.
fn start_several(hosts: &Hosts, scenario: &str, each: usize, vars: &[(&str, &str)]) -> Result<Vec<Rank>> {
    let (port, program) = (free_port(), std::env::current_exe()?);
    let vars = [&[("MASTER_ADDR", hosts.address(0)), ("GLOO_SOCKET_IFNAME", CABLE)], vars].concat();
    let on = |rank: usize| start_by(hosts.command(rank / each, &program), scenario, rank, 2 * each, port, &vars);
    (0..2 * each).map(on).collect()
}

pub fn bytes_on_the_wire() -> Result<()> {
    let (hosts, started) = (Hosts::new()?, Instant::now());
    for rank in all_through(start(&hosts, "wire", &[])?, started)? {
        rank.output.lines().filter(|line| line.contains("bytes")).for_each(|line| println!("{line}"));
    }
    Ok(())
}

/// Two ranks on each host: what their means are, and what crosses the cable.
pub fn a_host_sends_once() -> Result<()> {
    let (hosts, started) = (Hosts::new()?, Instant::now());
    for rank in all_through(start_several(&hosts, "hierarchy_on_the_wire", 2, &[])?, started)? {
        rank.output.lines().filter(|line| line.contains("bytes")).for_each(|line| println!("{line}"));
    }
    Ok(())
}

/// The cable is cut in the middle: no connection closes, and each rank gets an error within its timeout.
pub fn cut_link() -> Result<()> {
    for (scenario, host) in [("endless_training", 0), ("endless_sums", 1)] {
        let hosts = Hosts::new()?;
        let folder = tempfile::tempdir()?;
        let ready = folder.path().join("ready");
        let started = Instant::now();
        let mut ranks = start(&hosts, scenario, &[(faults::READY, &ready.display().to_string())])?;
        while !faults::are_ready(&ready, 2) {
            let ended = ranks.iter_mut().any(|rank| !matches!(rank.try_wait(), Ok(None)));
            if ended || started.elapsed() > PATIENCE {
                all_through(ranks, started)?;
                bail!("{scenario} was never under way");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        hosts.cut(host)?;
        let cut = Instant::now();
        all_through(ranks, started).context(scenario)?;
        println!("{scenario}: both ranks ended {:.1?} after the cut", cut.elapsed());
    }
    Ok(())
}

/// Each rank listens where the other host can reach it, and nowhere else.
pub fn listeners() -> Result<()> {
    let (hosts, started) = (Hosts::new()?, Instant::now());
    let ended = all_through(start(&hosts, "listeners", &[])?, started)?;
    listeners::only_at(&ended, |rank, ip| ip.to_string() == hosts.address(rank))
}

/// On one host, whatever its name resolves to: by default Gloo would listen at the address of the host's name.
pub fn listeners_of_one_host() -> Result<()> {
    let (port, started) = (free_port(), Instant::now());
    let start = |rank| {
        let mut command = Command::new("unshare");
        command.args(["--uts", "sh", "-c", "hostname 127.0.0.2 && exec \"$0\""]).arg(std::env::current_exe()?);
        start_by(command, "listeners", rank, 2, port, &[])
    };
    let ended = all_through((0..2).map(start).collect::<Result<_>>()?, started)?;
    listeners::only_at(&ended, |_, ip| ip.to_string() == "127.0.0.1")
}

/// The side of each of the model's two square matrices.
const SIDE: i64 = 1024;
const WEIGHTS: u64 = 2 * (SIDE * SIDE) as u64;
/// After these steps every hook compresses, and the buckets have been rebuilt.
const WARM_UP: usize = 3;
const MEASURED: usize = 4;
const SHARE: f64 = 0.01;
const POWER_RANK: u64 = 4;

type Register = fn(&DistributedDataParallel, &ProcessGroup) -> Result<(), DdpError>;

/// The payload in bytes that each of two ranks sends in a step, by the hooks' definitions.
const HOOKS: &[(&str, u64, Register)] = &[
    // Half in the reduce-scatter and half in the all-gather that an all-reduce consists of.
    ("none", 4 * WEIGHTS, |_, _| Ok(())),
    ("float16", 2 * WEIGHTS, |ddp, group| ddp.register_comm_hook(CastCompress::half(group))),
    ("bfloat16", 2 * WEIGHTS, |ddp, group| ddp.register_comm_hook(CastCompress::bfloat16(group))),
    ("PowerSGD", 4 * POWER_RANK * 2 * (SIDE + SIDE) as u64, |ddp, group| {
        let matrix_approximation_rank = POWER_RANK as usize;
        let options = PowerSgdOptions { start_power_sgd_iter: 2, matrix_approximation_rank, ..Default::default() };
        ddp.register_comm_hook(PowerSgd::new(group, options)?)
    }),
    // A value and its index, to the one other rank.
    ("top-k", (8.0 * SHARE * WEIGHTS as f64) as u64, |ddp, group| ddp.register_comm_hook(TopK::new(group, SHARE, 1)?)),
    // Half the signs to the rank that averages them, and as many signs of this rank's part of the mean back.
    ("1-bit", WEIGHTS / 8, |ddp, group| ddp.register_comm_hook(OneBit::new(group, 1))),
];

fn sent() -> Result<u64> {
    let path = Path::new("/sys/class/net").join(CABLE).join("statistics/tx_bytes");
    Ok(std::fs::read_to_string(path)?.trim().parse()?)
}

/// Compares the mean over all four ranks by hosts with a flat one: to the bit, and by the bytes that a host of two
/// ranks sends over the cable, which is slower than what ranks of one host share.
pub fn hierarchy(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut hook = HierarchicalAllReduce::new(&group, 2)?;
    // Whole numbers, whose sums are the same in any order.
    let gradients = |rank: usize| {
        tch::manual_seed(rank as i64);
        Tensor::randint_low(-1000, 1000, [SIDE * SIDE], FLOAT)
    };
    let counted = |run: &mut dyn FnMut(Tensor) -> Result<Tensor>| -> Result<(Tensor, f64, Duration)> {
        // The first exchange of two ranks connects them.
        drop(run(gradients(meeting.rank))?);
        let gradients = gradients(meeting.rank);
        group.barrier()?;
        let before = sent()?;
        // Nobody sends before all have read.
        group.barrier()?;
        let began = Instant::now();
        let mean = run(gradients)?;
        group.barrier()?;
        Ok((mean, (sent()? - before) as f64 / (4 * SIDE * SIDE) as f64, began.elapsed()))
    };
    let (flat, flat_bytes, flat_time) = counted(&mut |mut gradients| {
        group.all_reduce(&mut gradients, ReduceOp::Avg)?;
        Ok(gradients)
    })?;
    let (mean, bytes, time) = counted(&mut |gradients| hooks::runs(&mut hook, &gradients, &[SIDE, SIDE]))?;
    println!(
        "rank {}: its host sends {flat_bytes:.4} times the gradients' bytes in {flat_time:.1?} flat, and {bytes:.4} \
         times in {time:.1?} by hosts",
        meeting.rank
    );
    let all: Vec<Tensor> = (0..group.size()).map(gradients).collect();
    ensure!(mean.equal(&flat) && mean.equal(&hooks::mean(&all)), "the means are not the same to the bit");
    // In a ring of N = 4 ranks each sends 2 (N - 1) / N times the bytes, and one of a host's two over the cable; by
    // hosts, 2 (H - 1) / H times for H = 2. With headers and acknowledgements, as below.
    let is_near = |found: f64, payload: f64| (payload..1.11 * payload + 0.01).contains(&found);
    ensure!(is_near(flat_bytes, 1.5) && is_near(bytes, 1.0), "{flat_bytes} flat, and {bytes} by hosts");
    Ok(())
}

/// Counts the bytes that this host sends over the cable while a model is trained with each hook.
pub fn wire(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let inputs = Tensor::randn([2, SIDE], FLOAT);
    for (name, payload, register) in HOOKS {
        tch::manual_seed(3);
        let vs = nn::VarStore::new(Device::Cpu);
        let linear =
            |path| nn::linear(vs.root() / path, SIDE, SIDE, nn::LinearConfig { bias: false, ..Default::default() });
        let model = nn::seq().add(linear("0")).add_fn(Tensor::tanh).add(linear("1"));
        let ddp = DistributedDataParallel::builder(&group).broadcast_buffers(false).build(&vs)?;
        register(&ddp, &group)?;
        let mut before = 0;
        for step in 0..WARM_UP + MEASURED {
            if step == WARM_UP {
                group.barrier()?;
                before = sent()?;
            }
            let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
            ddp.backward(&loss)?;
            tch::no_grad(|| {
                for mut param in vs.trainable_variables() {
                    let grad = param.grad();
                    let _ = param.g_sub_(&(grad * 0.1));
                    param.zero_grad();
                }
            });
        }
        group.barrier()?;
        let per_step = (sent()? - before) as f64 / MEASURED as f64;
        let ratio = per_step / *payload as f64;
        println!("rank {} sends {per_step:.0} bytes a step with {name}: {ratio:.4} of its {payload}", meeting.rank);
        // On top of the payload: headers of Ethernet, IP and TCP, 66 to 78 bytes for at most 1,448 (4.6% to 5.4%); as
        // much for acknowledgements of what is received (at most one per packet); and Gloo's headers of the few
        // messages.
        let headers = 0.054 * *payload as f64 + 0.054 * *payload as f64 + 4096.0;
        ensure!(
            per_step >= *payload as f64 && per_step <= *payload as f64 + headers,
            "{name}: {per_step} bytes a step, but its definition says {payload} and at most {headers} of headers"
        );
        // Both ranks have trained the same model.
        for param in vs.trainable_variables() {
            let sum = param.detach().to_kind(Kind::Double).sum(Kind::Double);
            ensure!(group.all_gather(&sum)?.iter().all(|other| other.equal(&sum)), "{name}: the ranks' models differ");
        }
    }
    Ok(())
}
