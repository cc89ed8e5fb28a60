//! The verdicts: equal, refused, or wrong.

use std::collections::BTreeMap;
use std::fmt;

use anyhow::Result;
use tch::{Kind, Tensor};

use crate::choices::{Cell, Opt, Overflow, PARTS};
use crate::data::{self, Trained};
use crate::runner::caught;
use crate::{reference, refusals};

pub enum Verdict {
    Equal,
    Refused(&'static str),
    Wrong(String),
}

/// Compares all ranks' results with the plain loop.
pub fn judge(cell: &Cell, found: Vec<Result<Trained>>) -> Verdict {
    let reasons = refusals::expected(cell);
    let (mut trained, mut errors) = (Vec::new(), Vec::new());
    for found in found {
        match found {
            Ok(found) => trained.push(found),
            Err(error) => errors.push(format!("{error:#}")),
        }
    }
    if !errors.is_empty() {
        // If only one rank sees the reason, the others report that another rank failed.
        let is_others = |text: &str| text.contains("its own error says why");
        let refuses = |text: &String| reasons.iter().find(|reason| text.contains(**reason)).copied();
        let reason = errors.iter().find_map(refuses);
        let all = trained.is_empty() && errors.iter().all(|text| refuses(text).is_some() || is_others(text));
        return match reason.filter(|_| all) {
            Some(reason) => Verdict::Refused(reason),
            None => Verdict::Wrong(format!("{} ranks ran, and the others: {}", trained.len(), errors.join("; "))),
        };
    }
    if !reasons.is_empty() {
        return Verdict::Wrong(format!("it ran, but should be refused: {reasons:?}"));
    }
    let expected = match caught(|| reference::run(cell)) {
        Ok(expected) => expected,
        Err(error) => return Verdict::Wrong(format!("the plain loop failed: {error:#}")),
    };
    if (cell.overflow == Overflow::Never) != (expected.skipped == 0) {
        return Verdict::Wrong(format!("{} steps were skipped", expected.skipped));
    }
    let differs = |(rank, found)| Some(format!("rank {rank}: {}", difference(cell, found, &expected)?));
    trained.iter().enumerate().find_map(differs).map_or(Verdict::Equal, Verdict::Wrong)
}

fn difference(cell: &Cell, found: &Trained, expected: &Trained) -> Option<String> {
    if found.windows != expected.windows {
        return Some(format!("{} windows instead of {}", found.windows, expected.windows));
    }
    if found.scale != expected.scale {
        return Some(format!("a scale of {} instead of {}", found.scale, expected.scale));
    }
    let far = |one: &f64, other: &f64| (one - other).abs() > 1e-12;
    if found.rates.len() != expected.rates.len() || found.rates.iter().zip(&expected.rates).any(|(a, b)| far(a, b)) {
        return Some(format!("rates {:?} instead of {:?}", found.rates, expected.rates));
    }
    let of_weights = tensors_differ(cell, "weight", &found.weights, &expected.weights);
    of_weights.or_else(|| tensors_differ(cell, "average", &found.averages, &expected.averages))
}

fn tensors_differ(
    cell: &Cell,
    what: &str,
    found: &[(String, Tensor)],
    expected: &[(String, Tensor)],
) -> Option<String> {
    if found.len() != expected.len() {
        return Some(format!("{} of {what} instead of {}", found.len(), expected.len()));
    }
    for (name, expected) in expected {
        let Some((_, found)) = found.iter().find(|(other, _)| other == name) else {
            return Some(format!("no {what} {name}"));
        };
        let found = found.to_kind(Kind::Double);
        let tolerance = match cell.optimizer {
            // Gradients have 8 significant bits: allows a tenth of the weight's total change, plus a weight's last bit.
            Opt::Masters => 0.1 * largest(&(expected - data::initial(name))) + 0.01,
            _ => 1e-9,
        };
        let off = largest(&(&found - expected));
        if off.is_nan() || off > tolerance {
            return Some(format!(
                "{what} {name} is off by {off:e}: {:?} instead of {:?}",
                values(&found),
                values(expected)
            ));
        }
    }
    None
}

fn largest(tensor: &Tensor) -> f64 {
    tensor.abs().max().double_value(&[])
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.reshape([-1])).unwrap_or_default()
}

/// The numbers of equal and refused cells with a pair of parts.
#[derive(Clone, Copy, Default)]
struct Counts {
    equal: usize,
    refused: usize,
}

#[derive(Default)]
pub struct Totals {
    all: Counts,
    by_reason: BTreeMap<&'static str, usize>,
    by_pair: BTreeMap<(usize, usize), Counts>,
    pub wrong: Vec<String>,
}

impl Totals {
    pub fn add(&mut self, cell: &Cell, verdict: Verdict) {
        let refused = match verdict {
            Verdict::Equal => false,
            Verdict::Refused(reason) => {
                *self.by_reason.entry(reason).or_default() += 1;
                true
            }
            Verdict::Wrong(what) => {
                eprintln!("WRONG {}\n      {what}", cell.name());
                self.wrong.push(cell.name());
                return;
            }
        };
        // A part's first choice means that it is absent, except for the optimizer and the data, which are always
        // present.
        let is_there = |part: usize, number: usize| number > 0 || matches!(PARTS[part].0, "optimizer" | "data");
        let numbers = cell.numbers();
        let there: Vec<usize> = (0..numbers.len()).filter(|&part| is_there(part, numbers[part])).collect();
        self.all.add(refused);
        for (at, &one) in there.iter().enumerate() {
            for &other in &there[at + 1..] {
                self.by_pair.entry((one, other)).or_default().add(refused);
            }
        }
        let done = self.all.equal + self.all.refused;
        if done.is_multiple_of(5000) {
            eprintln!("{done} cells, {} wrong", self.wrong.len());
        }
    }
}

impl Counts {
    fn add(&mut self, refused: bool) {
        *(if refused { &mut self.refused } else { &mut self.equal }) += 1;
    }
}

impl fmt::Display for Totals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Counts { equal, refused } = self.all;
        writeln!(f, "{equal} cells equal the plain loop, {refused} are refused, {} are wrong", self.wrong.len())?;
        for (reason, count) in &self.by_reason {
            writeln!(f, "  {count:>6} refused: {reason}")?;
        }
        writeln!(f, "by pair of parts that are there, equal/refused:")?;
        for (&(one, other), Counts { equal, refused }) in &self.by_pair {
            writeln!(f, "  {:<24} {equal}/{refused}", format!("{} x {}", PARTS[one].0, PARTS[other].0))?;
        }
        Ok(())
    }
}
