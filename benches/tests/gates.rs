//! What a training step may cost on a GPU: exact counts, on a stand-in for CUDA's runtime. No time is measured.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive::nn::metrics::AverageMeter;
use overdrive::prelude::*;
use overdrive_benches::gpu_steps::ours::Fault;
use overdrive_benches::gpu_steps::{
    DISTANCE_WITHIN, OUR_OPTIMIZERS, Recipe, Step, combinations, count, difference, differences, losses_on_host, ours,
    recipes, waits_of_a_step, with_fault,
};
use overdrive_benches::versus::gpu_counts;
use overdrive_fakecuda::{Fake, waits};

fn main() -> Result<()> {
    let mut arguments = Arguments::from_args();
    // The counts are the process's.
    arguments.test_threads = Some(1);
    // Wherever there are stand-ins, they have to work, unless they are switched off.
    let has_stand_ins = !overdrive_fakecuda::is_off();
    let is_required = overdrive_fakecuda::is_required();
    ensure!(has_stand_ins || !is_required, "FAKECUDA=1, but {}", overdrive_fakecuda::LEFT_OUT);
    if has_stand_ins {
        overdrive_fakecuda::start_fake(1)?;
        let fake = Fake::get().context("this process does not run on a fake device")?;
        fake.compute().map_err(anyhow::Error::msg)?;
    } else {
        let why = Some(overdrive_fakecuda::LEFT_OUT).filter(|why| !why.is_empty());
        println!("skipped: {}", why.unwrap_or("the stand-ins are switched off (FAKECUDA=0)"));
    }
    tch::set_num_threads(1);
    let trial = |name: String, test: Box<dyn FnOnce() -> Result<()> + Send>| {
        let test = move || test().map_err(|error| Failed::from(format!("{error:#}")));
        // Counts and losses of the same step.
        Trial::test(name, test).with_kind("control flow, numbers").with_ignored_flag(!has_stand_ins)
    };
    let ours = OUR_OPTIMIZERS.map(|optimizer| Recipe::new("mlp", optimizer));
    let steps = recipes().into_iter().chain(ours);
    let mut trials: Vec<Trial> =
        steps.map(|recipe| trial(recipe.name(), Box::new(move || costs_what_it_may(&recipe)))).collect();
    type Test = fn() -> Result<()>;
    let others: [(&str, Test); 8] = [
        ("a_meter_read_after_100_steps_waits_once", a_meter_read_after_100_steps_waits_once),
        ("a_missing_or_doubled_update_is_told", a_missing_or_doubled_update_is_told),
        ("a_wrong_average_or_buffer_is_told", a_wrong_average_or_buffer_is_told),
        ("every_combination_costs_what_it_may", every_combination_costs_what_it_may),
        ("every_optimizer_has_a_gate", every_optimizer_has_a_gate),
        ("our_own_optimizers_cost_what_the_book_says", our_own_optimizers_cost_what_the_book_says),
        ("the_list_of_computed_operators", the_list_of_computed_operators),
        ("the_gates_fail_where_their_stand_in_is_not_loaded", || {
            ensure!(overdrive_fakecuda::fails_without_stand_ins()?, "they would be skipped");
            Ok(())
        }),
    ];
    trials.extend(others.map(|(name, test)| trial(name.to_owned(), Box::new(test))));
    let python = python();
    if python.is_none() {
        println!("no_step_costs_more_than_pytorchs: skipped: no Python with torch");
    }
    let is_missing = !has_stand_ins || (python.is_none() && !is_required);
    let compare = trial("no_step_costs_more_than_pytorchs".to_owned(), Box::new(move || no_more_than_pytorch(python)));
    // First, because Python's side runs beside ours, which the others need too.
    trials.insert(0, compare.with_ignored_flag(is_missing));
    libtest_mimic::run(&arguments, trials).exit()
}

/// The Python that `cargo xtask setup` has made.
fn python() -> Option<PathBuf> {
    let given = std::env::var_os("OVERDRIVE_PYTHON").map(PathBuf::from);
    given.or_else(|| {
        Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("../.libtorch/bin/python")).filter(|it| it.exists())
    })
}

/// After the first steps: no wait, nothing from the driver, and only the batch goes to the device. Its losses are the
/// host's.
fn costs_what_it_may(recipe: &Recipe) -> Result<()> {
    let Step { counted, losses, .. } = count(recipe)?;
    let waits = recipe.waits();
    if counted.waits != waits {
        bail!("{} waits instead of {waits}: {counted:?}; in a step:\n{}", counted.waits, waits_of_a_step(recipe)?);
    }
    ensure!(counted.allocations == 0.0 && counted.events == 0.0, "{counted:?}");
    ensure!(waits > 0.0 || counted.reads == 0.0, "{} copies to the host", counted.reads);
    let batch = if recipe.upload { recipe.batch_bytes() } else { 0.0 };
    ensure!(counted.uploaded == batch, "{} bytes uploaded instead of {batch}", counted.uploaded);
    if recipe.equals_host() {
        let host = losses_on_host(recipe)?;
        for (device, host) in losses.iter().zip(&host) {
            ensure!(((device - host) / host).abs() <= 1e-5, "losses {losses:?} instead of {host:?}");
        }
    }
    Ok(())
}

fn every_combination_costs_what_it_may() -> Result<()> {
    combinations().iter().try_for_each(|recipe| costs_what_it_may(recipe).with_context(|| recipe.name()))
}

/// The only wait of 100 steps is that for the average.
fn a_meter_read_after_100_steps_waits_once() -> Result<()> {
    let fake = Fake::get().context("this process does not run on a fake device")?.lend();
    let mut step = ours::step(&Recipe::new("mlp", "AdamW"), Device::Cuda(0))?;
    let mut meter = AverageMeter::new("loss");
    let mut losses = Vec::new();
    fake.reset();
    fake.trace_waits(true);
    for _ in 0..100 {
        let loss = (step.train)()?;
        meter.update(&loss, 64)?;
        losses.push(loss);
    }
    ensure!(waits(&fake.counts()) == 0, "the steps wait: {}", fake.waits());
    let average = meter.avg()?;
    ensure!(waits(&fake.counts()) == 1, "reading the average: {}", fake.waits());
    let expected = losses.iter().map(|loss| loss.double_value(&[])).sum::<f64>() / 100.0;
    ensure!((average - expected).abs() <= 1e-6 * expected, "{average} instead of {expected}");
    Ok(())
}

/// The comparison with PyTorch tells a step whose update is missing, and one whose update is made twice, with each kind
/// of numbers: the weights have gone another way by more than it allows.
fn a_missing_or_doubled_update_is_told() -> Result<()> {
    for (model, kind) in ["mlp", "cnn", "gpt"].iter().flat_map(|model| KINDS.map(|kind| (*model, kind))) {
        let recipe = Recipe { autocast: kind, ..Recipe::new(model, "AdamW") };
        let right = count(&recipe)?.distance;
        for fault in [Fault::Rate(0.0), Fault::Rate(2.0)] {
            let difference = difference(with_fault(&recipe, fault)?.0, right);
            ensure!(difference > DISTANCE_WITHIN, "{}, {fault:?}: {difference:e}", recipe.name());
        }
    }
    Ok(())
}

/// So it does with an average of the weights that is not updated, a loss that is not counted, and buffers that are updated
/// once more, though the weights are the same.
fn a_wrong_average_or_buffer_is_told() -> Result<()> {
    let recipe = Recipe { ema: true, meter: true, ..Recipe::new("cnn", "AdamW") };
    let right = count(&recipe)?;
    for fault in [Fault::NoAverage, Fault::NoMeter, Fault::Statistics] {
        let (distance, kept) = with_fault(&recipe, fault)?;
        let difference = differences(&kept, &right.kept);
        ensure!(distance == right.distance && difference > DISTANCE_WITHIN, "{fault:?}: {difference:e}");
    }
    Ok(())
}

const KINDS: [Option<&str>; 3] = [None, Some("bfloat16"), Some("float16")];

/// Each optimizer of the crate, by its builder, is in a step that is held.
fn every_optimizer_has_a_gate() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/optim/src/lib.rs");
    let words = std::fs::read_to_string(path)?;
    let words = words.split(|it: char| !it.is_ascii_alphanumeric());
    let builders: BTreeSet<String> =
        words.filter_map(|word| word.strip_suffix("Builder")).map(str::to_ascii_lowercase).collect();
    let held: BTreeSet<String> =
        recipes().iter().map(|recipe| recipe.optimizer).chain(OUR_OPTIMIZERS).map(str::to_ascii_lowercase).collect();
    // A builder of any optimizer, and one of averages, which step no weights.
    let others = ["group", "averagedmodel"];
    let missing: Vec<&String> = builders.difference(&held).filter(|it| !others.contains(&it.as_str())).collect();
    ensure!(builders.len() > 20 && missing.is_empty(), "in no gate: {missing:?} of {builders:?}");
    Ok(())
}

fn our_own_optimizers_cost_what_the_book_says() -> Result<()> {
    let table = gpu_counts::table_of_ours()?;
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu-counts.md"))?;
    ensure!(page.contains(&table), "put this table into docs/gpu-counts.md:\n{table}");
    Ok(())
}

/// The operators whose kernels the stand-in computes in these steps.
fn the_list_of_computed_operators() -> Result<()> {
    let mut found = BTreeMap::new();
    for recipe in recipes() {
        for operator in count(&recipe)?.operators {
            found.entry(operator).or_insert_with(BTreeSet::new).insert(recipe.model);
        }
    }
    let rows = found.iter().map(|(operator, models)| {
        format!("| `{operator}` | {} |\n", models.iter().copied().collect::<Vec<_>>().join(", "))
    });
    let table: String = rows.collect();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testing/fakecuda/README.md");
    let page = std::fs::read_to_string(path)?;
    ensure!(page.contains(&table), "put this table into testing/fakecuda/README.md:\n{table}");
    print!("{table}");
    Ok(())
}

fn no_more_than_pytorch(python: Option<PathBuf>) -> Result<()> {
    let listed = recipes();
    let all = [&listed[..], &combinations()].concat();
    let rows = gpu_counts::rows(&python.context("no Python with torch")?, &all)?;
    let told = |(row, recipe): (&gpu_counts::Row, &Recipe)| {
        let mut worse = row.worse()?;
        if row.ours.waits > row.pytorch.waits {
            let waits = waits_of_a_step(recipe).unwrap_or_else(|error| format!("{error:#}"));
            worse += &format!("; where ours waits in a step:\n{waits}");
        }
        Some(worse)
    };
    let more: Vec<String> = rows.iter().zip(&all).filter_map(told).collect();
    ensure!(more.is_empty(), "{}", more.join("\n"));
    let page = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/gpu-counts.md"))?;
    let table = gpu_counts::table(&rows[..listed.len()]);
    ensure!(
        page.contains(&table),
        "`cargo xtask versus gpu-counts` prints another table than docs/gpu-counts.md:\n{table}"
    );
    Ok(())
}
