//! Everything that CI runs, cheapest first, so that simple mistakes show before the long steps start.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::totals::Totals;
use crate::workspace::{self, Workspace};
use crate::{parity, setup, test, tidy};

/// The version that deny.toml was checked with; updated by hand, so that a new release cannot break a build.
const CARGO_DENY: &str = "0.20.2";

type Step = (&'static str, fn(&Workspace, &mut Results) -> Result<()>);

const STEPS: [Step; 13] = [
    ("fmt", |ws, _| workspace::succeed(&mut ws.cargo(["fmt", "--all", "--check"]))),
    ("tidy", |ws, _| tidy::run(ws).map(drop)),
    ("deny", |ws, _| deny(ws)),
    // Runs before `setup`, so that there may be no libtorch yet: tests the crates that must not need it.
    ("no-torch", |ws, _| {
        ["overdrive-sched", "overdrive-launch", "overdrive-jpeg"].into_iter().try_for_each(|package| {
            workspace::succeed(&mut ws.cargo(["test", "--package", package, "--no-default-features"]))
        })
    }),
    ("setup", |ws, _| setup::quietly(ws).map(drop)),
    ("clippy", |ws, _| {
        let mut clippy = ws.cargo(["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"]);
        workspace::succeed(&mut clippy)
    }),
    ("docs", |ws, _| {
        workspace::succeed(ws.cargo(["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings"))
    }),
    ("test", |ws, results| results.add(test::totals(ws, &test::Options::default())?)),
    ("formats", |ws, results| results.add(test::beside_python(ws)?)),
    ("gpu", |ws, results| results.add(test::on_the_stand_in(ws)?)),
    ("compile", |ws, results| results.add(test::compiled(ws)?)),
    ("parity", |ws, results| {
        let (status, line) = parity::all(ws)?;
        results.parity = line;
        if status.success() { Ok(()) } else { bail!("parity failed") }
    }),
    ("recipes", |ws, results| {
        let (status, line) = parity::all_recipes(ws)?;
        results.recipes = line;
        if status.success() { Ok(()) } else { bail!("recipes differ from Python's") }
    }),
];

/// The totals of the last steps.
#[derive(Default)]
struct Results {
    tests: Option<Totals>,
    parity: String,
    recipes: String,
}

impl Results {
    fn add(&mut self, totals: Totals) -> Result<()> {
        *self.tests.get_or_insert_default() += totals;
        if totals.failed == 0 { Ok(()) } else { bail!("{} tests failed", totals.failed) }
    }
}

/// Run everything that CI runs, cheapest first
#[derive(Args, Default)]
pub struct Options {
    /// Only these steps, separated by commas: fmt, tidy, deny, no-torch, setup, clippy, docs, test, formats, gpu,
    /// compile, parity, recipes
    #[arg(long, value_name = "STEPS", value_delimiter = ',')]
    only: Vec<String>,
}

impl Options {
    fn check(&self) -> Result<()> {
        let known = STEPS.map(|(name, _)| name);
        let unknown = self.only.iter().find(|step| !known.contains(&step.as_str()));
        ensure!(unknown.is_none(), "--only {}: the steps are {}", unknown.map_or("", String::as_str), known.join(", "));
        Ok(())
    }

    fn has(&self, step: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == step)
    }
}

/// Stops at the first step that fails. The last line has the totals of the tests, if they were run.
pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    options.check()?;
    let start = Instant::now();
    let mut results = Results::default();
    let mut summary = Vec::new();
    let mut outcome = Ok(());
    for (name, step) in STEPS.into_iter().filter(|(name, _)| options.has(name)) {
        println!("\n== {name}");
        let begun = Instant::now();
        outcome = step(ws, &mut results).with_context(|| format!("step `{name}`"));
        summary.push(format!(
            "{name:<8} {:<6} {}",
            if outcome.is_ok() { "ok" } else { "FAILED" },
            clock(begun.elapsed())
        ));
        if outcome.is_err() {
            break;
        }
    }
    println!("\n{}\n{:<15} {}", summary.join("\n"), "total", clock(start.elapsed()));
    if !results.parity.is_empty() {
        println!("parity: {}", results.parity);
    }
    if !results.recipes.is_empty() {
        println!("losses of recipes: {}", results.recipes);
    }
    if let Err(error) = &outcome {
        eprintln!("error: {error:#}");
    }
    if let Some(tests) = results.tests {
        println!("{tests}");
    }
    Ok(if outcome.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    format!("{}:{:02}", seconds / 60, seconds % 60)
}

/// Checks licences, bans and sources. Advisories have a separate CI job, because they change without a change here.
fn deny(ws: &Workspace) -> Result<()> {
    let check = ["check", "bans", "licenses", "sources"];
    if workspace::runs(&mut ws.cargo(["deny", "--version"])) {
        return workspace::succeed(ws.cargo(["deny"]).args(check));
    }
    // Not installed: install it once under target/, which takes about three minutes.
    let tools = ws.join("target/tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let install = ["install", "--locked", "--version", CARGO_DENY, "cargo-deny", "--root"];
        workspace::succeed(ws.cargo(install).arg(&tools)).context(
            "cannot install cargo-deny\n\
             remedy: install it by hand (`cargo install --locked cargo-deny`) or check the network",
        )?;
    }
    workspace::succeed(ws.command(program).args(check))
}
