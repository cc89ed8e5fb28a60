//! Tests the profiler's diagnosis. In a loop with a planted bottleneck, it must name that bottleneck first. In a
//! healthy loop, it must find nothing.
//!
//! The diagnosis depends on times, which are wrong on a busy machine. Records of runs on an idle machine are therefore
//! kept in `benches/record/planted`, and their diagnosis is tested. Each loop is also run here, however fast this
//! machine is, and its record must have the same steps, scopes and calls as the kept one.
//!
//! On an idle machine, `UPDATE_RECORDS=1 cargo test --test planted` runs the loops anew, and keeps each record whose
//! diagnosis is right.
#![forbid(unsafe_code)]

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use libtest_mimic::{Arguments, Failed, Trial};
use overdrive_benches::planted::{self, Form, HEALTHY, PLANTS, Plant, timeless};
use overdrive_profile::RunProfile;

fn main() -> Result<()> {
    if let Some(result) = planted::main_if_told() {
        return result;
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

fn record_path(plant: &Plant) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("record/planted");
    folder.join(plant.name).with_extension("json")
}

fn kept_record(plant: &Plant) -> Result<RunProfile> {
    let advice = "cannot read the kept record; `UPDATE_RECORDS=1 cargo test --test planted` makes it";
    RunProfile::read_json(record_path(plant)).context(advice)
}

fn judge_record(plant: &Plant) -> Result<()> {
    plant.judge(&kept_record(plant)?)
}

fn record(plant: &Plant) -> Result<()> {
    let (now, then) = (timeless(&plant.record(Form::Planted)?), timeless(&kept_record(plant)?));
    let lines = |of: &mut dyn Iterator<Item = &String>| of.map(|line| format!("\n  {line}")).collect::<String>();
    let (more, fewer) = (lines(&mut now.difference(&then)), lines(&mut then.difference(&now)));
    ensure!(now == then, "only in this run:{more}\nonly in the kept record:{fewer}");
    Ok(())
}

fn record_anew(plant: &Plant) -> Result<()> {
    let mut run = plant.record(Form::Planted)?;
    // The command and the hosts do not matter. The memory timeline is most of the file, and the diagnosis only uses
    // `kept_bytes`, which was computed from it.
    run.command = vec![plant.name.to_owned()];
    run.machine.host = "host".to_owned();
    run.rank_info.iter_mut().for_each(|info| info.host = "host".to_owned());
    run.profiled.iter_mut().for_each(|profiled| profiled.memory.clear());
    plant.judge(&run)?;
    Ok(run.write_json(record_path(plant))?)
}
