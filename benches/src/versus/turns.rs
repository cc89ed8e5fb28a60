//! Interleaved measurements of several ways to do the same work: one sample of each way, then the next sample of each.

use std::cell::RefCell;
use std::ops::RangeInclusive;
use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use overdrive_bench_report::versus::SCHEMA;
use overdrive_bench_report::{Machine, MissingPeer, Ratio, Target, Versions, VersusReport, VersusRow};

use serde_json::json;

use super::peer::Peer;

/// Where this variable is set, peers are left out, and each sample of ours waits for a line of standard input: `in_turns.py`
/// has two versions of this program take turns.
const IN_TURNS: &str = "OVERDRIVE_VERSUS_IN_TURNS";

/// A peer that several ways can share, or the reason why there is none.
#[derive(Clone)]
pub struct Program(Result<Rc<RefCell<Peer>>, String>);

impl Program {
    /// Starts the Python program `source`. If that fails, the reason ends with `remedy`, which says what would help.
    pub fn start(python: &Path, source: &str, options: &serde_json::Value, remedy: &str) -> Self {
        Self::together(Peer::start(python, source, &[options.to_string()]), remedy)
    }

    /// Wraps a peer, or the error of starting it.
    pub fn together(peer: Result<Peer>, remedy: &str) -> Self {
        Self(peer.map(|peer| Rc::new(RefCell::new(peer))).map_err(|error| format!("{error:#}; {remedy}")))
    }

    /// A peer that cannot be started, with the reason.
    pub fn missing(reason: impl Into<String>) -> Self {
        Self(Err(reason.into()))
    }

    /// The version that it reported.
    pub fn version(&self) -> Option<String> {
        self.0.as_ref().ok().map(|peer| peer.borrow().version().to_owned())
    }

    /// Why there is no peer.
    pub fn reason(&self) -> Option<&str> {
        self.0.as_ref().err().map(String::as_str)
    }
}

type Measure<'a> = Box<dyn FnMut() -> Result<f64> + 'a>;

enum Measured<'a> {
    Ours(Measure<'a>),
    Peer(Measure<'a>),
    Missing(String),
}

struct Way<'a> {
    name: String,
    measured: Measured<'a>,
    samples: Vec<f64>,
}

/// Ways to do the same work, and the samples taken of each.
#[derive(Default)]
pub struct Turns<'a> {
    ways: Vec<Way<'a>>,
}

/// What is compared: the text of the row, the unit of its samples and how their ratio is taken.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub text: &'a str,
    pub unit: &'a str,
    pub ratio: Ratio,
}

/// The rows of a report, and the peers that could not be measured.
#[derive(Default)]
pub struct Findings {
    pub rows: Vec<VersusRow>,
    pub missing: Vec<MissingPeer>,
}

impl Findings {
    /// The report of this machine and software.
    pub fn report(self, machine: Machine, versions: Versions) -> VersusReport {
        let Self { rows, missing } = self;
        VersusReport { schema: SCHEMA, machine, versions, rows, missing, ..VersusReport::default() }
    }
}

impl<'a> Turns<'a> {
    /// Adds a way of this program, or a constant. Compared with, it is a limit. If it fails, the whole measurement fails.
    pub fn ours(&mut self, name: &str, measure: impl FnMut() -> Result<f64> + 'a) {
        self.add(name, Measured::Ours(Box::new(measure)));
    }

    /// Adds a way of a peer. If it fails, it is reported as missing.
    pub fn peer(&mut self, name: &str, program: &Program, mut measure: impl FnMut(&mut Peer) -> Result<f64> + 'a) {
        let measured = match &program.0 {
            _ if std::env::var_os(IN_TURNS).is_some() => {
                Measured::Missing("two versions of ours take turns".to_owned())
            }
            Err(reason) => Measured::Missing(reason.clone()),
            Ok(peer) => {
                let peer = peer.clone();
                Measured::Peer(Box::new(move || measure(&mut peer.borrow_mut())))
            }
        };
        self.add(name, measured);
    }

    fn add(&mut self, name: &str, measured: Measured<'a>) {
        self.ways.push(Way { name: name.to_owned(), measured, samples: Vec::new() });
    }

    /// Takes one sample of each way, without a warm-up: for what is counted and the same each time.
    pub fn once(&mut self, what: &str) -> Result<()> {
        self.rounds(what, 1..=1)
    }

    /// Takes one sample of each way as a warm-up, then `pairs` samples of each.
    pub fn take(&mut self, what: &str, pairs: u32) -> Result<()> {
        self.rounds(what, 0..=pairs)
    }

    /// Round 0 is the warm-up.
    fn rounds(&mut self, what: &str, rounds: RangeInclusive<u32>) -> Result<()> {
        let pairs = *rounds.end();
        for round in rounds {
            match round {
                0 => eprintln!("{what}: warming up"),
                _ => eprintln!("{what}: {round} of {pairs}"),
            }
            for way in &mut self.ways {
                let sample = match &mut way.measured {
                    Measured::Ours(measure) => {
                        let next = json!({ "next": [what, way.name, round] });
                        in_turns(&next, measure).with_context(|| format!("{what}, {}", way.name))?
                    }
                    Measured::Missing(_) => continue,
                    Measured::Peer(measure) => match measure() {
                        Ok(sample) => sample,
                        Err(error) => {
                            way.measured = Measured::Missing(format!("it failed: {error:#}"));
                            continue;
                        }
                    },
                };
                if round > 0 {
                    way.samples.push(sample);
                }
            }
        }
        Ok(())
    }

    /// Adds the comparison of two ways to `findings`. Spaces at the end of a peer's name are left out of the row: they
    /// tell several ways of one peer apart.
    pub fn compare(
        &self,
        findings: &mut Findings,
        case: Case<'_>,
        (ours, peer): (&str, &str),
        target: Option<Target>,
    ) -> Result<()> {
        let way = |name: &str| {
            self.ways.iter().find(|way| way.name == name).with_context(|| format!("there is no way named {name}"))
        };
        let (ours, peer) = (way(ours)?, way(peer)?);
        if let Measured::Missing(reason) = &peer.measured {
            let (case, peer_name) = (case.text.to_owned(), peer.name.clone());
            findings.missing.push(MissingPeer { case, peer_name, reason: reason.clone() });
            return Ok(());
        }
        let samples = (&ours.samples[..], &peer.samples[..]);
        let row = VersusRow::of_pairs(case.text, peer.name.trim_end(), case.unit, samples, case.ratio, target)?;
        findings.rows.push(if matches!(peer.measured, Measured::Ours(_)) { row.limit() } else { row });
        Ok(())
    }
}

/// Takes a sample; where [`IN_TURNS`] is set, prints which is next, waits until it is asked for, and prints it.
fn in_turns(next: &serde_json::Value, measure: &mut Measure<'_>) -> Result<f64> {
    if std::env::var_os(IN_TURNS).is_none() {
        return measure();
    }
    println!("{next}");
    let asked = std::io::stdin().read_line(&mut String::new())?;
    ensure!(asked > 0, "nobody asks for samples any more");
    let sample = measure()?;
    println!("{}", json!({ "sample": sample }));
    Ok(sample)
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    const CASE: Case<'_> = Case { text: "work", unit: "ms", ratio: Ratio::TimesFasterByTime };

    #[test]
    fn samples_are_taken_in_turns_and_the_first_round_does_not_count() -> Result<()> {
        let order = RefCell::new(String::new());
        let mut turns = Turns::default();
        for name in ["a", "b"] {
            let order = &order;
            turns.ours(name, move || {
                order.borrow_mut().push_str(name);
                Ok(order.borrow().len() as f64)
            });
        }
        turns.take("work", 2)?;
        assert_eq!(*order.borrow(), "ababab");
        let mut findings = Findings::default();
        turns.compare(&mut findings, CASE, ("a", "b"), Some(Target::AtLeast(2.0)))?;
        let row = &findings.rows[0];
        assert_eq!((row.ours, row.peer, row.pairs, row.met), (4.0, 5.0, 2, Some(false)));
        assert!(turns.compare(&mut findings, CASE, ("a", "c"), None).is_err());
        Ok(())
    }

    #[test]
    fn a_peer_that_is_not_there_or_fails_is_missing_and_ours_must_not_fail() -> Result<()> {
        let mut turns = Turns::default();
        turns.ours("ours", || Ok(1.0));
        turns.peer("absent", &Program::missing("pip install absent"), |_| bail!("never asked"));
        turns.take("work", 3)?;
        let mut findings = Findings::default();
        turns.compare(&mut findings, CASE, ("ours", "absent"), None)?;
        assert_eq!((findings.rows.len(), findings.missing[0].reason.as_str()), (0, "pip install absent"));
        turns.ours("broken", || bail!("no data"));
        assert!(turns.take("work", 3).unwrap_err().to_string().contains("broken"));
        Ok(())
    }
}
