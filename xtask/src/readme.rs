//! README's tables: of the technique benchmark, made of a record, and of single parts, made of the newest comparisons.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use overdrive_bench_report::readme_parts::with_parts;
use overdrive_bench_report::{Report, readme, records, write_atomically};

use crate::workspace::Workspace;

const README: &str = "README.md";
const RECORDS: &str = "benches/record";

/// Write README's table of the technique benchmark from a record, and that of single parts from the newest comparisons
#[derive(Args)]
pub struct Options {
    /// The record: the JSON of `cargo xtask bench --full`, in benches/record
    record: PathBuf,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let given = std::env::current_dir()?.join(&options.record).canonicalize();
    let path = given.with_context(|| format!("cannot find {}", options.record.display()))?;
    let record = path.strip_prefix(ws.root().canonicalize()?).ok();
    let record = record.context("the record has to be in the workspace: copy it to benches/record")?;
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let report: Report = serde_json::from_str(&text).context("it is no report of the technique benchmark")?;
    let file = ws.root().join(README);
    let old = fs::read_to_string(&file).context("cannot read README.md")?;
    let report = report.read_anew();
    let new = readme::with_table(&old, &report, &record.to_string_lossy());
    let new = new.context("README.md lacks the marks `bench-table`")?;
    let records = records::read(&ws.join(RECORDS))?;
    let new = with_parts(&new, &records, &report.setting.machine).context("README.md lacks the marks `parts-table`")?;
    write_atomically(&file, new.as_bytes())?;
    println!("wrote the tables of {} and of the newest comparisons to {README}", record.display());
    Ok(ExitCode::SUCCESS)
}

fn is_record(path: &str) -> bool {
    path.strip_prefix(RECORDS).is_some_and(|name| name.ends_with(".json") && name.matches('/').count() == 1)
}

/// What is wrong with README's tables, given the workspace's files.
pub fn problems(files: &BTreeMap<String, String>) -> Vec<String> {
    let Some(text) = files.get(README) else { return Vec::new() };
    let Some(record) = readme::record_of(text) else { return Vec::new() };
    let report = files.get(record).and_then(|json| serde_json::from_str::<Report>(json).ok());
    let comparisons = files.iter().filter(|(path, _)| is_record(path)).map(|(path, text)| (PathBuf::from(path), text));
    let comparisons = match records::of_texts(&comparisons.collect::<Vec<_>>()) {
        Ok(comparisons) => comparisons,
        Err(error) => return vec![error.to_string()],
    };
    let right = report.and_then(|report| {
        let report = report.read_anew();
        let text = readme::with_table(text, &report, record)?;
        with_parts(&text, &comparisons, &report.setting.machine).or(Some(text))
    });
    match right {
        Some(right) if right == *text => Vec::new(),
        Some(_) => vec![format!(
            "{README}: its tables are not those of {record} and the newest comparisons: run `cargo xtask readme {record}`"
        )],
        None => vec![format!("{README}: its table names {record}, which is no report of the technique benchmark")],
    }
}

#[cfg(test)]
mod tests {
    use overdrive_bench_report::sample;

    use super::*;

    #[test]
    fn a_table_that_is_not_its_records_is_a_problem() {
        let json = sample::report().to_json().unwrap();
        let empty = "<!-- bench-table -->\n<!-- /bench-table -->\n";
        let right = readme::with_table(empty, &sample::report(), "a.json").unwrap();
        let wrong = right.replacen("1 (", "2 (", 1);
        let of = |text: &str, record: &str| {
            let files = [(README, text), (record, &json)];
            problems(&files.map(|(name, text)| (name.to_owned(), text.to_owned())).into())
        };
        assert_eq!(of(&right, "a.json"), Vec::<String>::new());
        assert!(of(&wrong, "a.json")[0].contains("run `cargo xtask readme a.json`"));
        assert!(of(&right, "b.json")[0].contains("names a.json"));
        assert_eq!(of(empty, "a.json"), Vec::<String>::new());
    }
}
