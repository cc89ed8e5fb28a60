//! The diagnosis of loops with a planted bottleneck: it has to be named, and named first. In healthy ones nothing is to be
//! found.
//!
//! A diagnosis follows times, and those of a machine that does something else besides are of no loop. So the records of runs
//! on a machine at rest are kept in `benches/record/planted` and judged here; and each loop is run here, as quickly or slowly
//! as this machine lets it, and has to leave a record of the same steps, scopes and calls. On a machine at rest,
//! `UPDATE_RECORDS=1 cargo test --test planted` judges what it runs, and keeps it if it is judged right.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_benches::planted::{self, Form, HEALTHY, PLANTS, Plant, timeless};
use overdrive_profile::RunProfile;

fn main() -> Result<()> {
    if let Some(ended) = planted::main_if_told() {
        return ended;
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let is_update = std::env::var_os("UPDATE_RECORDS").is_some();
    let trial = |kind: &str, plant: &'static Plant, test: fn(&Plant) -> Result<()>| {
        let name = format!("{}_{kind}", plant.name);
        let unmet = plant.needs.unmet();
        if let Some(reason) = unmet
            && !arguments.list
        {
            println!("{name}: skipped: {reason}");
        }
        let test = move || test(plant).map_err(|error| Failed::from(format!("{error:#}")));
        Trial::test(name, test).with_ignored_flag(unmet.is_some())
    };
    let plants = PLANTS.iter().chain(&HEALTHY);
    let trials: Vec<Trial> = match is_update {
        true => plants.map(|plant| trial("is_recorded_anew", plant, record_anew)).collect(),
        false => plants
            .flat_map(|plant| [trial("is_judged_right", plant, judge_record), trial("is_recorded", plant, record)])
            .collect(),
    };
    libtest_mimic::run(&arguments, trials).exit()
}

fn path_of(plant: &Plant) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("record/planted");
    folder.join(plant.name).with_extension("json")
}

fn kept(plant: &Plant) -> Result<RunProfile> {
    RunProfile::read_json(path_of(plant)).context("`UPDATE_RECORDS=1 cargo test --test planted` makes the record")
}

fn judge_record(plant: &Plant) -> Result<()> {
    plant.judge(&kept(plant)?)
}

fn record(plant: &Plant) -> Result<()> {
    let (now, then) = (timeless(&plant.record(Form::Planted)?), timeless(&kept(plant)?));
    let lines = |of: &mut dyn Iterator<Item = &String>| of.map(|line| format!("\n  {line}")).collect::<String>();
    let (more, fewer) = (lines(&mut now.difference(&then)), lines(&mut then.difference(&now)));
    ensure!(now == then, "in this run alone:{more}\nin the record alone:{fewer}");
    Ok(())
}

fn record_anew(plant: &Plant) -> Result<()> {
    let mut run = plant.record(Form::Planted)?;
    // Nobody asks where it was recorded; memory over time is most of the file, and the diagnosis has its own sums of that.
    run.command = vec![plant.name.to_owned()];
    run.machine.host = "host".to_owned();
    run.rank_info.iter_mut().for_each(|info| info.host = "host".to_owned());
    run.profiled.iter_mut().for_each(|profiled| profiled.memory.clear());
    plant.judge(&run)?;
    Ok(run.write_json(path_of(plant))?)
}
