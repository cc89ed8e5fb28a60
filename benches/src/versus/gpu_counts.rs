//! `versus gpu-counts`: launches, waits and bytes of a training step, beside PyTorch's at its best setting. Both run on the
//! same stand-in for CUDA's runtime, which counts them; no GPU is needed, and no time is measured.

use std::io::Write;
use std::panic::resume_unwind;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail};
use overdrive_fakecuda::{Counts, Fake};
use serde::Deserialize;

use crate::gpu_steps::ours::Kept;
use crate::gpu_steps::{
    Counted, DISTANCE_WITHIN, OUR_OPTIMIZERS, Recipe, Step, count, count_plain_tch, difference, differences, recipes,
};

/// How far the losses may be apart, as a share of PyTorch's. On one machine they are equal, also with half precision.
const LOSSES_WITHIN: f64 = 1e-5;

/// What the Python side prints for a recipe.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    counts: Counts,
    /// With `capturable`, if its optimizer has that.
    capturable: Option<Counts>,
    #[serde(default)]
    losses: Vec<f64>,
    #[serde(default)]
    distance: f64,
    #[serde(default)]
    kept: Kept,
    error: Option<String>,
}

/// A recipe on both sides.
pub struct Row {
    /// What is trained.
    pub name: String,
    /// Ours.
    pub ours: Counted,
    /// PyTorch's.
    pub pytorch: Counted,
    /// tch's own, where it can train so.
    pub plain_tch: Option<Counted>,
    /// The largest relative difference between the losses of both.
    pub difference: f64,
    /// The relative difference between the distances that the weights have gone.
    pub distance: f64,
    /// The largest relative difference between what else the steps have changed.
    pub kept: f64,
}

impl Row {
    /// The meter keeps the latest loss: a copy, because the caller may write to the tensor. Python's sums alone.
    fn kept_losses(&self) -> f64 {
        let one_a_batch = self.name.split(", ").any(|part| part == "meter");
        if one_a_batch { 1.0 } else { 0.0 }
    }

    /// What ours does more often than PyTorch's, or computes otherwise.
    pub fn worse(&self) -> Option<String> {
        let (ours, theirs) = (&self.ours, &self.pytorch);
        let counts = [
            ("launches", ours.launches, theirs.launches),
            (
                "launches, copies and fills",
                ours.launches + ours.copies,
                theirs.launches + theirs.copies + self.kept_losses(),
            ),
            ("waits", ours.waits, theirs.waits),
            ("bytes uploaded", ours.uploaded, theirs.uploaded),
            ("copies to the host", ours.reads, theirs.reads),
            ("allocations", ours.allocations, theirs.allocations),
            ("events", ours.events, theirs.events),
        ];
        let more = counts.iter().filter(|(_, ours, theirs)| ours > theirs);
        let mut words: Vec<String> =
            more.map(|(what, ours, theirs)| format!("{ours} {what}, PyTorch's {theirs}")).collect();
        if self.difference > LOSSES_WITHIN {
            words.push(format!("losses differ by {:.1e}", self.difference));
        }
        if self.distance > DISTANCE_WITHIN {
            words.push(format!("the distances that weights have gone differ by {:.1e}", self.distance));
        }
        if self.kept > DISTANCE_WITHIN {
            words.push(format!("averages or buffers differ by {:.1e}", self.kept));
        }
        (!words.is_empty()).then(|| format!("{}: {}", self.name, words.join(", ")))
    }
}

/// Counts PyTorch's steps, in a process of their own.
fn pytorch(python: &Path, recipes: &[Recipe]) -> Result<Vec<Answer>> {
    let mut command = Command::new(python);
    command.args(["-c", include_str!("../../peers/gpu_counts.py")]).env_remove("LD_LIBRARY_PATH");
    command.envs(overdrive_fakecuda::environment(1)).env("OMP_NUM_THREADS", "1");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().context("cannot run Python")?;
    let mut input = child.stdin.take().context("no standard input")?;
    input.write_all(&serde_json::to_vec(recipes)?)?;
    drop(input);
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("Python's side has ended with {}; its error is above", output.status);
    }
    serde_json::from_slice(&output.stdout).context("Python's side printed something else")
}

/// Counts these recipes on both sides.
///
/// # Errors
/// When this process does not run on the stand-ins, or a step fails.
pub fn rows(python: &Path, recipes: &[Recipe]) -> Result<Vec<Row>> {
    let fake = Fake::get().context("there are no stand-ins, so nothing can be counted")?;
    fake.compute().map_err(anyhow::Error::msg)?;
    tch::set_num_threads(1);
    let ours = |recipe: &Recipe| -> Result<_> {
        let plain_tch = count_plain_tch(recipe).with_context(|| format!("plain tch, {}", recipe.name()))?;
        Ok((count(recipe).with_context(|| recipe.name())?, plain_tch))
    };
    // Each side takes one core.
    let (ours, theirs) = thread::scope(|scope| {
        let theirs = scope.spawn(|| pytorch(python, recipes));
        let ours: Result<Vec<_>> = recipes.iter().map(ours).collect();
        (ours, theirs.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    let row = |((recipe, (ours, plain_tch)), theirs): ((&Recipe, (Step, Option<Counted>)), Answer)| {
        let name = recipe.name();
        if let Some(error) = theirs.error {
            bail!("{name}: PyTorch: {error}");
        }
        let Step { counted: ours, losses, distance, kept, .. } = ours;
        let (apart, kept) = (differences(&losses, &theirs.losses), differences(&kept, &theirs.kept));
        let pytorch = Counted::of(&theirs.counts, 4);
        let pytorch = theirs.capturable.map_or(pytorch.clone(), |other| pytorch.least(&Counted::of(&other, 4)));
        let distance = difference(distance, theirs.distance);
        Ok(Row { name, ours, pytorch, plain_tch, difference: apart, distance, kept })
    };
    recipes.iter().zip(ours?).zip(theirs?).map(row).collect()
}

/// A table in Markdown.
pub fn table(rows: &[Row]) -> String {
    let mut text =
        "| a training step | launches: ours, PyTorch's | plain tch | copies and fills | waits | bytes uploaded | \
         allocations | events |\n|---|---|---|---|---|---|---|---|\n"
            .to_owned();
    for row in rows {
        let pair = |field: fn(&Counted) -> f64| format!("{}, {}", field(&row.ours), field(&row.pytorch));
        let of_tch = |it: &Counted| format!("{}, {}, {}", it.launches, it.copies, it.waits);
        let tch = row.plain_tch.as_ref().map_or_else(String::new, of_tch);
        let cells = [pair(|it| it.launches), tch, pair(|it| it.copies), pair(|it| it.waits), pair(|it| it.uploaded)];
        let more = [pair(|it| it.allocations), pair(|it| it.events)];
        text += &format!("| {} | {} | {} |\n", row.name, cells.join(" | "), more.join(" | "));
    }
    text
}

/// Our own optimizers' steps of the MLP, as a table in Markdown.
///
/// # Errors
/// As [`rows`].
pub fn table_of_ours() -> Result<String> {
    let mut text =
        "| a step of the MLP | launches | copies and fills | waits | bytes uploaded | allocations | events |\n\
                    |---|---|---|---|---|---|---|\n"
            .to_owned();
    for optimizer in OUR_OPTIMIZERS {
        let it = count(&Recipe::new("mlp", optimizer)).with_context(|| optimizer)?.counted;
        let cells = [it.launches, it.copies, it.waits, it.uploaded, it.allocations, it.events].map(|it| it.to_string());
        text += &format!("| {optimizer} | {} |\n", cells.join(" | "));
    }
    Ok(text)
}

/// Prints the tables.
pub fn run(python: &Path) -> Result<()> {
    overdrive_fakecuda::start_fake(1)?;
    println!("Counted on a fake device (a stand-in for CUDA's runtime), for both sides; no GPU was used.\n");
    let rows = rows(python, &recipes())?;
    println!("{}\n{}", table(&rows), table_of_ours()?);
    rows.iter().filter_map(Row::worse).for_each(|worse| println!("{worse}"));
    Ok(())
}
