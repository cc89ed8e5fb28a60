//! All recorded comparisons on one page, by machine: the newest result of each, and the ratios that were measured
//! before.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::html::{escape, fill};
use crate::versus::brief;
use crate::{VersusReport, VersusRow};

/// A recorded report, and when it was measured.
#[derive(Clone, Debug)]
pub struct Record {
    /// The day, which is the beginning of the file's name: `2026-11-21`.
    pub day: String,
    /// What was measured.
    pub report: VersusReport,
}

/// A record that cannot be read.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The file or the folder cannot be read.
    #[error("{}: cannot be read: {source}", .path.display())]
    Io {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file is not JSON, or looks like a report of `cargo xtask versus` but cannot be read as one.
    #[error("{}: is not a report of `cargo xtask versus`: {source}", .path.display())]
    Json {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// The reports of comparisons in a folder, the oldest first. Other JSON files, such as the technique benchmark's, are
/// skipped.
///
/// # Errors
/// When the folder or a JSON file in it cannot be read, when such a file is not valid JSON, or when it looks like a
/// report of comparisons (its first row has a `peer_name`) but cannot be read as one.
pub fn read(folder: &Path) -> Result<Vec<Record>, RecordError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| RecordError::Io { path, source }
    };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed(folder))? {
        paths.push(entry.map_err(failed(folder))?.path());
    }
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    paths.sort();
    let mut records = Vec::new();
    for path in paths {
        let text = fs::read_to_string(&path).map_err(failed(&path))?;
        let json = |source| RecordError::Json { path: path.clone(), source };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(json)?;
        if value["rows"][0]["peer_name"].is_string() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let day = name.get(..10).unwrap_or(&name).to_owned();
            records.push(Record { day, report: serde_json::from_value(value).map_err(json)? });
        }
    }
    Ok(records)
}

/// The results of one comparison on one machine with their days, the newest first.
type History<'a> = Vec<(&'a str, &'a VersusRow)>;

/// The HTML page.
pub fn page(records: &[Record]) -> String {
    let mut machines: BTreeMap<String, BTreeMap<(&str, &str), History<'_>>> = BTreeMap::new();
    for Record { day, report } in records.iter().rev() {
        let machine = format!("{}, {} cores", report.machine.cpu, report.machine.cores);
        let rows = machines.entry(machine).or_default();
        for row in &report.rows {
            rows.entry((&row.case, &row.peer_name)).or_default().push((day, row));
        }
    }
    let sections: String = machines.iter().map(|(machine, rows)| section(machine, rows)).collect();
    fill(
        include_str!("records.html"),
        &[("style", include_str!("html/page.css")), ("sections", &sections), ("count", &records.len().to_string())],
    )
}

/// One table for a machine: each comparison is a group of rows, one for each peer.
fn section(machine: &str, rows: &BTreeMap<(&str, &str), History<'_>>) -> String {
    let mut out = format!(
        "<section><h2>{}</h2><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table><thead><tr>\
         <th>Peer</th><th>Ratio (low\u{2013}high)</th><th>Goal</th><th>Ours</th><th>Peer\u{2019}s</th><th>Pairs</th>\
         <th>Day</th><th>Before</th></tr></thead>",
        escape(machine)
    );
    let mut shown = None;
    for ((case, peer), history) in rows {
        let Some((newest, before)) = history.split_first() else { continue };
        if shown.replace(case) != Some(case) {
            let end = if shown.is_some() { "</tbody>" } else { "" };
            out += &format!(
                "{end}<tbody><tr class=\"group\"><th colspan=\"8\" scope=\"rowgroup\"><span>{}</span></th></tr>",
                escape(case)
            );
        }
        out += &format!("<tr><th scope=\"row\">{}</th>", escape(peer));
        out.extend(cells(newest, before).iter().map(|cell| format!("<td>{}</td>", escape(cell))));
        out += "</tr>";
    }
    out + "</tbody></table></div></section>"
}

fn cells((day, row): &(&str, &VersusRow), before: &[(&str, &VersusRow)]) -> [String; 7] {
    let before: Vec<String> = before.iter().map(|(day, row)| format!("{:.2} ({day})", row.ratio_median)).collect();
    let goal = match (row.met, row.target) {
        (Some(true), _) => "met",
        (Some(false), _) => "missed",
        (None, Some(_)) => "undecided",
        (None, None) if row.is_limit => "limit",
        (None, None) => "\u{2013}",
    };
    [
        format!("{:.2} ({:.2}\u{2013}{:.2})", row.ratio_median, row.ratio_low, row.ratio_high),
        goal.to_owned(),
        format!("{} {}", brief(row.ours), row.unit),
        format!("{} {}", brief(row.peer), row.unit),
        row.pairs.to_string(),
        (*day).to_owned(),
        before.join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Ratio};

    fn record(day: &str, ours: f64, cpu: &str) -> Record {
        let samples: (&[f64], &[f64]) = (&[ours; 3], &[10.0; 3]);
        let row = VersusRow::of_pairs("a <step>", "peer", "ms", samples, Ratio::ShareOfCost, None).unwrap();
        let machine = Machine { cpu: cpu.to_owned(), cores: 2, ..Machine::default() };
        Record { day: day.to_owned(), report: VersusReport { rows: vec![row], machine, ..VersusReport::default() } }
    }

    #[test]
    fn the_newest_result_of_each_machine_is_shown_with_the_earlier_ratios() {
        let records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A"), record("2026-01-15", 9.0, "B")];
        let page = page(&records);
        assert!(page.contains("0.60 (0.60\u{2013}0.60)") && page.contains("0.80 (2026-01-01)"), "{page}");
        assert!(
            page.contains("A, 2 cores") && page.contains("B, 2 cores") && page.contains("a &lt;step&gt;"),
            "{page}"
        );
        assert!(!page.contains("{{"), "{page}");
    }

    #[test]
    fn other_files_are_skipped_and_broken_ones_named() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        write("2026-03-01-x-step.json", &record("", 1.0, "A").report.to_json().unwrap());
        write("2026-03-01-x-bench.json", "{\"schema\": 2}");
        write("notes.md", "no JSON");
        let records = read(folder.path()).unwrap();
        assert_eq!(records.iter().map(|record| record.day.as_str()).collect::<Vec<_>>(), ["2026-03-01"]);
        write("2026-03-02-x-step.json", "{\"rows\": [{\"peer_name\": \"x\"}]}");
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("2026-03-02-x-step.json: is not a report"), "{error}");
    }
}
