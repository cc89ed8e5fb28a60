//! Communication hooks over a link of 200 Mbit/s between two network namespaces: the measured speed-up, against what
//! the bytes that they send predict.

use std::cell::RefCell;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use overdrive_bench_report::stats::median;
use overdrive_bench_report::{MissingPeer, Ratio, Target, VersusRow};

use super::{Part, rank};
use crate::versus::Options;
use crate::versus::peer::Peer;
use crate::versus::turns::{Findings, Turns};

/// Each hook's name in requests, and its name in rows.
const HOOKS: [(&str, &str); 5] = [
    ("PowerSGD", "PowerSGD of rank 4"),
    ("top-k", "top-k of 1%"),
    ("1-bit", "1-bit"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
];
const MEGABITS: f64 = 200.0;

/// A batch size, and what is measured with it.
struct Load {
    part: Part,
    /// A rank's batch size, as a multiple of `rank::BATCH`.
    times: u32,
    /// How many of `HOOKS` are measured. The first ones send the fewest bytes, so their compute time counts most.
    hooks: usize,
    pairs: u32,
    /// Steps per sample.
    steps: u32,
}

const LOADS: [Load; 3] = [
    Load { part: Part::Link, times: 1, hooks: 5, pairs: 7, steps: 3 },
    Load { part: Part::Link16x, times: 16, hooks: 3, pairs: 5, steps: 2 },
    Load { part: Part::Link32x, times: 32, hooks: 3, pairs: 5, steps: 2 },
];

/// Measurements with one hook, or without any: one sample per round.
#[derive(Default)]
struct Samples {
    /// Seconds per step over the link.
    linked: Vec<f64>,
    /// Bytes per step that the first rank sent over it.
    bytes: Vec<f64>,
    /// Seconds per step of ranks on one host, without the link.
    unlinked: Vec<f64>,
}

impl Samples {
    /// The predicted seconds per step over the link: the time to send the bytes, plus `other`.
    fn predicted(&self, round: usize, other: f64) -> f64 {
        other + self.bytes[round] * 8.0 / (MEGABITS * 1e6)
    }
}

/// `unlinked` are two ranks on this host, without the link.
pub fn compare(options: &Options, unlinked: &RefCell<Peer>, findings: &mut Findings) -> Result<()> {
    let loads: Vec<&Load> = LOADS.iter().filter(|load| options.ddp.has(load.part)).collect();
    if loads.is_empty() {
        return Ok(());
    }
    let link = match Link::new() {
        Ok(link) => link,
        Err(error) => {
            let case = format!("hooks over a link of {MEGABITS} Mbit/s");
            let reason = format!("{error:#}; needs root, `ip` and `tc`");
            findings.missing.push(MissingPeer { case, peer_name: "the prediction by bytes".to_owned(), reason });
            return Ok(());
        }
    };
    let linked = RefCell::new(rank::start(super::RANKS, |rank, port| link.command(rank, port))?);
    loads.into_iter().try_for_each(|load| compare_at(load, options, (&linked, &link), unlinked, findings))
}

fn compare_at(
    load: &Load,
    options: &Options,
    (linked, link): (&RefCell<Peer>, &Link),
    unlinked: &RefCell<Peer>,
    findings: &mut Findings,
) -> Result<()> {
    let hooks = &HOOKS[..load.hooks];
    let (model, steps) = (format!("mlp*{}", load.times), load.steps);
    let step = |ranks: &RefCell<Peer>, way: &str| -> Result<f64> {
        let mut ranks = ranks.borrow_mut();
        Ok(ranks.measure(&format!("{model}_{way}"), steps)? / f64::from(steps))
    };
    // One step that is not timed, because the first request makes the model.
    let warm_up = |ranks: &RefCell<Peer>, way: &str| ranks.borrow_mut().measure(&format!("{model}_{way}"), 1);
    let names: Vec<&str> = ["none"].into_iter().chain(hooks.iter().map(|(name, _)| *name)).collect();
    let samples: Vec<RefCell<Samples>> = names.iter().map(|_| RefCell::default()).collect();
    let local = RefCell::new(Vec::new());
    let mut turns = Turns::default();
    for (&name, samples) in names.iter().zip(&samples) {
        let (step, warm_up) = (&step, &warm_up);
        turns.ours(name, move || {
            warm_up(linked, name)?;
            let before = link.sent_bytes()?;
            let seconds = step(linked, name)?;
            let mut samples = samples.borrow_mut();
            samples.linked.push(seconds);
            samples.bytes.push((link.sent_bytes()? - before) / f64::from(steps));
            warm_up(unlinked, name)?;
            samples.unlinked.push(step(unlinked, name)?);
            Ok(seconds)
        });
    }
    turns.ours("local", || {
        warm_up(unlinked, "local")?;
        let seconds = step(unlinked, "local")?;
        local.borrow_mut().push(seconds);
        Ok(seconds)
    });
    turns.take(&format!("ddp, link, {} times the samples", load.times), options.pairs.unwrap_or(load.pairs))?;
    drop(turns);

    let (samples, local) = (samples.into_iter().map(RefCell::into_inner).collect::<Vec<_>>(), local.borrow());
    let [none, by_hook @ ..] = &samples[..] else { bail!("no samples") };
    // The first round is the warm-up.
    let rounds = 1..none.linked.len();
    let millis = |samples: &[f64]| median(&samples[1..]).unwrap_or(f64::NAN) * 1e3;
    for ((_, hook), samples) in hooks.iter().zip(by_hook) {
        let mut case =
            format!("speed-up of a step by {hook}, MLP of 10.0 million parameters, 2 ranks, {MEGABITS} Mbit/s");
        if load.times > 1 {
            case += &format!(", {} samples a rank", rank::BATCH * i64::from(load.times));
        }
        let measured: Vec<f64> = rounds.clone().map(|round| none.linked[round] / samples.linked[round]).collect();
        let by_bytes = |round: usize| none.predicted(round, local[round]) / samples.predicted(round, local[round]);
        let by_both = |round: usize| {
            none.predicted(round, none.unlinked[round]) / samples.predicted(round, samples.unlinked[round])
        };
        for (peer, predicted) in [
            ("its bytes and its own work predict", rounds.clone().map(by_both).collect::<Vec<_>>()),
            ("its bytes alone predict", rounds.clone().map(by_bytes).collect()),
        ] {
            let (ratio, target) = (Ratio::ShareOfRate, Some(Target::Within(0.15)));
            let pairs = (&measured[..], &predicted[..]);
            findings.rows.push(VersusRow::of_pairs(&case, peer, "times", pairs, ratio, target)?.limit());
        }
    }
    for (way, samples) in names.iter().zip(&samples) {
        eprintln!(
            "{way}: {:.1} ms per step over the link, {:.1} ms without it, {:.3} MB sent per step ({:.2}%)",
            millis(&samples.linked),
            millis(&samples.unlinked),
            median(&samples.bytes[1..]).unwrap_or(f64::NAN) / 1e6,
            samples.bytes.iter().sum::<f64>() / none.bytes.iter().sum::<f64>() * 100.0
        );
    }
    eprintln!("no communication: {:.1} ms per step", millis(&local));
    Ok(())
}

/// Two network namespaces, one for each rank, and a link between them that is limited to `MEGABITS`.
struct Link {
    hosts: [String; 2],
}

const INTERFACE: &str = "cable";

impl Link {
    fn new() -> Result<Self> {
        let link = Self { hosts: [0, 1].map(|host| format!("overdrive-{}-{host}", std::process::id())) };
        let [a, b] = &link.hosts;
        for host in &link.hosts {
            ip(&["netns", "add", host])?;
        }
        ip(&["link", "add", INTERFACE, "netns", a, "type", "veth", "peer", "name", INTERFACE, "netns", b])?;
        for (number, host) in link.hosts.iter().enumerate() {
            ip(&["-n", host, "addr", "add", &format!("{}/24", address(number)), "dev", INTERFACE])?;
            ip(&["-n", host, "link", "set", INTERFACE, "up"])?;
            ip(&["-n", host, "link", "set", "lo", "up"])?;
            let rate = format!("{MEGABITS}mbit");
            let limit = ["rate", &rate, "burst", "64kb", "latency", "100ms"];
            let tc = ["netns", "exec", host, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf"];
            ip(&[&tc[..], &limit].concat())?;
        }
        Ok(link)
    }

    /// The command that runs a rank in its namespace.
    fn command(&self, rank: usize, port: u16) -> Result<Command> {
        let own = rank::command(rank, port)?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.hosts[rank]]).arg(own.get_program()).args(own.get_args());
        command.envs(own.get_envs().filter_map(|(key, value)| Some((key, value?))));
        command.env("MASTER_ADDR", address(0)).env("GLOO_SOCKET_IFNAME", INTERFACE);
        Ok(command)
    }

    /// The bytes that the first rank has sent so far.
    fn sent_bytes(&self) -> Result<f64> {
        let counter = format!("/sys/class/net/{INTERFACE}/statistics/tx_bytes");
        let sent = ip(&["netns", "exec", &self.hosts[0], "cat", &counter])?;
        sent.trim().parse().with_context(|| format!("{counter}: {sent:?}"))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        for host in &self.hosts {
            // This also removes the link. If the namespace was never made, the error does not matter.
            let _ = ip(&["netns", "del", host]);
        }
    }
}

fn address(host: usize) -> String {
    format!("10.213.0.{}", host + 1)
}

/// Runs `ip`, and returns its standard output.
fn ip(args: &[&str]) -> Result<String> {
    let output = Command::new("ip").args(args).output().context("cannot run ip")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {}: {}", args.join(" "), said.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
