//! One run with one fault, and what has to come of it.

use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, Error, Result, bail, ensure};

use crate::harness::free_port;
use crate::hosts::Hosts;
use crate::left;
use crate::moments::Random;
use crate::nodes::{Node, Plan, Transport};
use crate::rank::{self, STEPS};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A rank gets SIGKILL.
    Kill,
    /// A rank does nothing any more: frozen by SIGSTOP, or away from the collectives.
    Stall,
    /// A cable between two hosts, whose connections stay open; over NCCL the links of a rank.
    Cut,
    /// The launcher of one of two nodes gets SIGKILL.
    Node,
}

impl Fault {
    pub const ALL: [Self; 4] = [Self::Kill, Self::Stall, Self::Cut, Self::Node];

    pub fn name(self) -> &'static str {
        match self {
            Self::Kill => "with_a_killed_rank",
            Self::Stall => "with_a_stalled_rank",
            Self::Cut => "with_a_cut_link",
            Self::Node => "with_a_lost_node",
        }
    }
}

/// What the victim does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Kill,
    Freeze,
    Park,
    CutLinks,
    /// It asks the test for the fault.
    Outside,
}

const ACTS: [Act; 5] = [Act::Kill, Act::Freeze, Act::Park, Act::CutLinks, Act::Outside];

/// When a fault happens: so long after the beginning of one of the victim's steps.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub victim: usize,
    pub step: u64,
    pub delay: Duration,
    pub act: Act,
}

impl FromStr for Moment {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let numbers = text.split(':').map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        let [victim, step, micros, act] = numbers[..] else { bail!("{text:?} is no moment") };
        let act = *ACTS.get(usize::try_from(act)?).context("no such act")?;
        Ok(Self { victim: usize::try_from(victim)?, step, delay: Duration::from_micros(micros), act })
    }
}

impl Moment {
    fn text(&self) -> String {
        let act = ACTS.iter().position(|act| *act == self.act).unwrap_or(0);
        format!("{}:{}:{}:{act}", self.victim, self.step, self.delay.as_micros())
    }
}

/// A run, as drawn.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub transport: Transport,
    pub fault: Fault,
    pub ranks: usize,
    pub moment: Moment,
}

impl Case {
    pub fn draw(transport: Transport, fault: Fault, random: &mut Random) -> Self {
        let nodes = matches!((transport, fault), (Transport::Gloo, Fault::Cut) | (_, Fault::Node));
        let ranks = if nodes { 2 } else { 2 + random.below(2) as usize };
        let act = match (fault, transport) {
            (Fault::Kill, _) => Act::Kill,
            (Fault::Stall, _) => [Act::Freeze, Act::Park][random.below(2) as usize],
            (Fault::Cut, Transport::Nccl) => Act::CutLinks,
            _ => Act::Outside,
        };
        // So that the fault comes before the end, and within what a step takes.
        let (step, delay) = (random.below(STEPS - 5), Duration::from_micros(random.below(6000)));
        Self {
            transport,
            fault,
            ranks,
            moment: Moment { victim: random.below(ranks as u64) as usize, step, delay, act },
        }
    }

    fn nodes(&self) -> usize {
        if self.moment.act == Act::Outside { 2 } else { 1 }
    }

    /// A cut run ends, because its nodes cannot tell each other to go on, and so does one that has lost node 0.
    fn goes_on(&self) -> bool {
        match self.fault {
            Fault::Kill | Fault::Stall => true,
            Fault::Cut => self.transport == Transport::Nccl,
            Fault::Node => self.moment.victim == 1,
        }
    }
}

/// What NCCL's watchdog says.
const WATCHDOG: &str = "Watchdog caught collective operation timeout";

/// What was seen of a run.
pub struct Seen {
    /// From the fault to the last error of a rank.
    pub told: Option<Duration>,
    /// From the fault until all ranks had ended, and were started again or the launchers had ended too.
    pub over: Duration,
    /// What the launchers and ranks named.
    pub cause: &'static str,
}

/// None where a timeout passed before the fault, as on a busy machine.
pub fn run(case: &Case, timeout: Duration, mark: &str, undisturbed: &Path) -> Result<Option<Seen>> {
    let folder = tempfile::tempdir()?;
    let hosts = (case.transport == Transport::Gloo && case.fault == Fault::Cut).then(Hosts::new).transpose()?;
    let ports = [free_port(), free_port()];
    let mut plan = Plan {
        transport: case.transport,
        ranks: case.ranks,
        nodes: case.nodes(),
        restarts: u32::from(case.goes_on()),
        timeout,
        folder: folder.path(),
        mark,
        hosts: hosts.as_ref(),
        ports,
        moment: Some(case.moment.text()),
    };
    let mut nodes = plan.start_all()?;
    let seen = disturb(case, &plan, &mut nodes)?;
    let said = nodes.iter().map(Node::said).collect::<Result<String>>()?;
    let Some((told, over)) = seen else { return Ok(None) };
    let cause = cause(case, &said)?;
    left::nothing(folder.path(), mark, &ports)?;
    if !case.goes_on() {
        hosts.as_ref().map_or(Ok(()), |hosts| hosts.mend(case.moment.victim))?;
        plan.moment = None;
        for mut node in plan.start_all()? {
            ensure!(node.end()? == 0, "started again:\n{}", node.said()?);
        }
        left::nothing(folder.path(), mark, &ports)?;
    }
    same(folder.path(), undisturbed, case.ranks).with_context(|| said)?;
    Ok(Some(Seen { told, over, cause }))
}

/// Lets the fault happen, and waits for the launchers' ends.
fn disturb(case: &Case, plan: &Plan<'_>, nodes: &mut [Node]) -> Result<Option<(Option<Duration>, Duration)>> {
    let victim = case.moment.victim;
    if case.moment.act == Act::Outside {
        let asked = rank::asked_at(plan.folder);
        // A run that a timeout has ended before does not ask.
        nodes[victim].wait_for("the fault", |node| Ok((asked.exists() || node.ended()?.is_some()).then_some(())))?;
        std::thread::sleep(case.moment.delay);
        fs::write(rank::fault_at(plan.folder), rank::now()?.to_string())?;
        match plan.hosts {
            Some(hosts) => hosts.cut(victim)?,
            None => nodes[victim].kill()?,
        }
    }
    let restarts = |said: &str| said.contains("; restart 1 of 1");
    let over = if case.goes_on() {
        nodes[0].wait_for("a restart", |node| {
            let is_over = restarts(&node.said()?) || node.ended()?.is_some();
            is_over.then(rank::now).transpose()
        })?
    } else {
        let last = nodes.iter_mut().enumerate().filter(|(node, _)| case.fault == Fault::Cut || *node != victim);
        last.map(|(_, node)| node.end().and_then(|_| rank::now())).last().context("no node")??
    };
    if case.fault == Fault::Node && case.goes_on() {
        nodes[1] = plan.start(1)?;
    }
    let mut codes = Vec::new();
    for node in &mut *nodes {
        codes.push(node.end()?);
    }
    let said = || nodes.iter().map(Node::said).collect::<Result<String>>();
    let Ok(fault) = fs::read_to_string(rank::fault_at(plan.folder)) else { return early(&said()?) };
    let (fault, mut told) = (fault.parse::<u64>()?, None);
    for name in left::names(plan.folder)?.iter().filter(|name| name.starts_with(rank::TOLD)) {
        let text = fs::read_to_string(plan.folder.join(name))?;
        let at: u64 = text.split(' ').next().context("no time")?.parse()?;
        if at < fault {
            return early(&said()?);
        }
        told = told.max(Some(Duration::from_micros(at - fault)));
    }
    if over < fault {
        return early(&said()?);
    }
    ensure!(!case.goes_on() || codes.iter().all(|code| *code == 0), "ended with {codes:?}:\n{}", said()?);
    Ok(Some((told, Duration::from_micros(over - fault))))
}

/// A run that was over before its fault: an error, unless a timeout has passed.
fn early<T>(said: &str) -> Result<Option<T>> {
    let is_timeout = [" within the timeout", WATCHDOG].iter().any(|text| said.contains(text));
    ensure!(is_timeout, "it failed before the fault, and no timeout is named:\n{said}");
    Ok(None)
}

/// What names the cause; an error where nothing does.
fn cause(case: &Case, said: &str) -> Result<&'static str> {
    let victim = case.moment.victim;
    let killed = [format!("rank {victim} failed: signal 9 (SIGKILL)"), format!("rank {victim}: signal 9 (SIGKILL)")];
    let lost = [format!("node {victim} (host "), "node 0 at 127.0.0.1:".to_owned()];
    let names: &[(&str, bool)] = match case.fault {
        Fault::Kill => &[("the killed rank and its signal", killed.iter().any(|text| said.contains(text)))],
        Fault::Node => {
            let named = said.contains(&lost[victim ^ 1]) && said.contains("was lost: the connection was closed");
            &[("the lost node", named)]
        }
        Fault::Stall | Fault::Cut => &[
            ("the silent node", case.nodes() == 2 && said.contains("was lost: it was silent for")),
            ("the collective that timed out", said.contains(" did not arrive within the timeout")),
            ("the collective that timed out, by the watchdog", said.contains(WATCHDOG)),
        ],
    };
    let named = names.iter().find(|(_, is_named)| *is_named);
    Ok(named.with_context(|| format!("the cause is not named:\n{said}"))?.0)
}

/// Compares all checkpoints and the last weights of each rank.
fn same(disturbed: &Path, undisturbed: &Path, ranks: usize) -> Result<()> {
    let checkpoints = |folder: &Path| left::names(&folder.join("checkpoints"));
    let steps = checkpoints(undisturbed)?;
    ensure!(checkpoints(disturbed)? == steps, "the checkpoints are {:?}, not {steps:?}", checkpoints(disturbed)?);
    let mut files = Vec::new();
    for step in steps.iter().filter(|name| !name.starts_with('.')) {
        let step = Path::new("checkpoints").join(step);
        files.extend(left::names(&undisturbed.join(&step))?.into_iter().map(|name| step.join(name)));
    }
    ensure!(!files.is_empty(), "no checkpoint");
    files.extend((0..ranks).map(|rank| format!("weights-{rank}").into()));
    for file in files {
        let read = |folder: &Path| fs::read(folder.join(&file)).with_context(|| file.display().to_string());
        ensure!(read(disturbed)? == read(undisturbed)?, "{} differs from the undisturbed run's", file.display());
    }
    Ok(())
}
