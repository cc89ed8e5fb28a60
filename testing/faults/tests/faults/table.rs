//! Rows of the table: one kind of fault, over one transport, at many moments.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use tempfile::TempDir;

use crate::cases::{Case, Fault, Seen, run};
use crate::harness::free_port;
use crate::moments::{self, Random};
use crate::nodes::{Plan, Transport};

/// How many kills, stalls, cut links and lost nodes.
const NUMBERS: &str = "OVERDRIVE_FAULTS";
const FEW: [usize; 4] = [2, 2, 1, 2];
/// Seconds for which ranks wait. On a busy machine they may pass before the fault: then it is repeated with the next.
const TIMEOUTS: [u64; 3] = [3, 20, 100];
/// How much later than the timeout all should be over. On a busy machine it may take longer, so it is only counted.
const ALLOWED: Duration = Duration::from_secs(2);

pub fn numbers() -> Result<[usize; 4]> {
    let Ok(text) = std::env::var(NUMBERS) else { return Ok(FEW) };
    let numbers = text.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>();
    let wrong = || format!("{NUMBERS} is {text:?}, but should be four numbers, like 50,20,20,10");
    numbers.with_context(wrong)?.try_into().ok().with_context(wrong)
}

/// Runs a row and prints it.
pub fn row(transport: Transport, fault: Fault, count: usize) -> Result<()> {
    let seed = moments::seed()?;
    let mut random = Random::new(seed, &format!("{transport:?} {fault:?}"));
    let mark = format!("{}-{}-{}", std::process::id(), transport.name(), fault.name());
    let mut undisturbed: BTreeMap<usize, TempDir> = BTreeMap::new();
    let (mut causes, mut seen, mut in_time, mut repeated) = (BTreeMap::new(), Vec::new(), 0, 0);
    for number in 0..count {
        let case = Case::draw(transport, fault, &mut random);
        let whole = match undisturbed.entry(case.ranks) {
            Entry::Occupied(whole) => whole.into_mut(),
            Entry::Vacant(place) => place.insert(alone(transport, case.ranks, &mark)?),
        };
        let one = until_undisturbed(&case, &mark, whole.path());
        let (is_in_time, again, one) =
            one.with_context(|| format!("OVERDRIVE_TEST_SEED={seed}, number {number}, {case:?}"))?;
        in_time += usize::from(is_in_time);
        repeated += again;
        *causes.entry(one.cause).or_insert(0) += 1;
        seen.push(one);
    }
    let mut over: Vec<f64> = seen.iter().map(|one| one.over.as_secs_f64()).collect();
    over.sort_by(f64::total_cmp);
    let told = seen.iter().filter_map(|one| one.told).max();
    println!(
        "{} {}: {count} with seed {seed}; named: {causes:?}; the last error of a rank {} after the fault; over after \
         {:.2} s in the median, {:.2} s at most, {in_time} within the timeout and 2 s; {repeated} repeated; nothing left; the same bytes",
        transport.name(),
        fault.name(),
        told.map_or("-".to_owned(), |it| format!("{:.2} s", it.as_secs_f64())),
        over.get(over.len() / 2).unwrap_or(&0.0),
        over.last().unwrap_or(&0.0),
    );
    Ok(())
}

/// A run that nothing disturbs.
fn alone(transport: Transport, ranks: usize, mark: &str) -> Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let plan = Plan {
        transport,
        ranks,
        nodes: 1,
        restarts: 0,
        timeout: Duration::from_secs(TIMEOUTS[2]),
        folder: folder.path(),
        mark,
        hosts: None,
        ports: [free_port(), free_port()],
        moment: None,
    };
    for mut node in plan.start_all()? {
        ensure!(node.end()? == 0, "undisturbed:\n{}", node.said()?);
    }
    Ok(folder)
}

/// Repeats a run with longer and longer timeouts, until none passes before the fault. Returns whether it was over in time,
/// and how often it was repeated.
fn until_undisturbed(case: &Case, mark: &str, undisturbed: &Path) -> Result<(bool, usize, Seen)> {
    for (again, seconds) in TIMEOUTS.into_iter().enumerate() {
        let timeout = Duration::from_secs(seconds);
        match run(case, timeout, mark, undisturbed)? {
            Some(seen) => return Ok((seen.over <= timeout + ALLOWED, again, seen)),
            None => println!("{case:?}: a timeout of {seconds} s passed before the fault"),
        }
    }
    bail!("ranks gave up before the fault with each of the timeouts {TIMEOUTS:?} s")
}
