//! All recorded comparisons on one page, by machine: the newest result of each, the ratios that were measured before,
//! and the peers that were missing.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::html::{escape, fill};
use crate::versus::brief;
use crate::{MissingPeer, VersusReport, VersusRow};

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

/// One result of a comparison.
struct Entry<'a> {
    day: &'a str,
    /// The value of `--pairs`, if it was given.
    asked: Option<u32>,
    row: &'a VersusRow,
}

/// What was recorded on one machine.
#[derive(Default)]
struct Recorded<'a> {
    /// The results of each case and peer, the newest first.
    rows: BTreeMap<(&'a str, &'a str), Vec<Entry<'a>>>,
    /// Peers that were missing and have not been measured since, each with the day.
    missing: Vec<(&'a str, &'a MissingPeer)>,
}

impl<'a> Recorded<'a> {
    /// Adds a report that is older than those added before.
    fn add(&mut self, day: &'a str, report: &'a VersusReport) {
        for row in &report.rows {
            let entry = Entry { day, asked: report.pairs_asked, row };
            self.rows.entry((&row.case, &row.peer_name)).or_default().push(entry);
        }
        for peer in &report.missing {
            if !self.knows(peer) {
                self.missing.push((day, peer));
            }
        }
    }

    /// Whether what is missing was measured later, or is known to be missing.
    fn knows(&self, peer: &MissingPeer) -> bool {
        // The case of a row ends with the meaning of its ratio, in brackets.
        let is_case = |case: &str| case.strip_prefix(&peer.case).is_some_and(|meaning| meaning.starts_with(" ("));
        let mut measured = self.rows.keys();
        measured.any(|(case, name)| is_case(case) && name.trim_end() == peer.peer_name.trim_end())
            || self.missing.iter().any(|(_, known)| known.case == peer.case && known.peer_name == peer.peer_name)
    }
}

/// The HTML page.
pub fn page(records: &[Record]) -> String {
    let mut machines: BTreeMap<String, Recorded<'_>> = BTreeMap::new();
    for Record { day, report } in records.iter().rev() {
        let machine = format!("{}, {} cores", report.machine.cpu, report.machine.cores);
        machines.entry(machine).or_default().add(day, report);
    }
    let sections: String = machines.iter().map(|(machine, recorded)| section(machine, recorded)).collect();
    fill(
        include_str!("records.html"),
        &[("style", include_str!("html/page.css")), ("sections", &sections), ("count", &records.len().to_string())],
    )
}

/// One table for a machine: each comparison is a group of rows, one for each peer. Below it, what is missing.
fn section(machine: &str, recorded: &Recorded<'_>) -> String {
    let mut out = format!(
        "<section><h2>{}</h2><div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{0}\"><table><thead><tr>\
         <th>Peer</th><th>Ratio (low\u{2013}high)</th><th>Goal</th><th>Ours</th><th>Peer\u{2019}s</th><th>Pairs</th>\
         <th>Day</th><th>Before</th></tr></thead>",
        escape(machine)
    );
    let mut shown = None;
    for ((case, peer), history) in &recorded.rows {
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
    out + "</tbody></table></div>" + &missing(&recorded.missing) + "</section>"
}

fn missing(peers: &[(&str, &MissingPeer)]) -> String {
    let item = |(day, peer): &(&str, &MissingPeer)| {
        let said = format!("{} for {} ({day}): {}", peer.peer_name.trim_end(), peer.case, peer.reason);
        format!("<li>{}</li>", escape(&said))
    };
    let items: String = peers.iter().map(item).collect();
    if items.is_empty() { items } else { format!("<h3>Not measured</h3><ul class=\"missing\">{items}</ul>") }
}

fn cells(newest: &Entry<'_>, before: &[Entry<'_>]) -> [String; 7] {
    let row = newest.row;
    let before = before.iter().map(|Entry { day, asked, row }| {
        let asked = asked.map_or_else(String::new, |asked| format!(", {asked} pairs asked"));
        format!("{:.2} ({day}{asked})", row.ratio_median)
    });
    let goal = match (row.decided(), row.target) {
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
        match newest.asked {
            Some(asked) => format!("{} pairs, {asked} asked", row.pairs),
            None => row.pairs.to_string(),
        },
        newest.day.to_owned(),
        before.collect::<Vec<_>>().join(", "),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Machine, Ratio, Target};

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
    fn an_older_record_is_shown_by_the_rule_of_today() {
        let mut old = record("2026-01-01", 8.0, "A");
        let samples: (&[f64], &[f64]) = (&[7.0, 8.0, 9.0], &[10.0; 3]);
        let target = Some(Target::AtMost(0.85));
        let row = VersusRow::of_pairs("a step", "peer", "ms", samples, Ratio::ShareOfCost, target).unwrap();
        // The median alone meets the bound.
        old.report.rows = vec![VersusRow { met: Some(true), ..row }];
        let page = page(&[old]);
        assert!(page.contains("<td>undecided</td>") && !page.contains("<td>met</td>"), "{page}");
    }

    #[test]
    fn the_number_of_pairs_that_was_asked_for_is_shown() {
        let mut records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A")];
        assert!(page(&records).contains("<td>3</td>"));
        records[0].report.pairs_asked = Some(15);
        records[1].report.pairs_asked = Some(31);
        let page = page(&records);
        assert!(page.contains("<td>3 pairs, 31 asked</td>"), "{page}");
        assert!(page.contains("0.80 (2026-01-01, 15 pairs asked)"), "{page}");
    }

    #[test]
    fn missing_peers_are_shown_with_the_newest_reason_until_they_are_measured() {
        let missing = |peer: &str, reason: &str| MissingPeer {
            case: "a <step>".to_owned(),
            peer_name: peer.to_owned(),
            reason: reason.to_owned(),
        };
        let mut records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A")];
        records[0].report.rows[0].peer_name = "another".to_owned();
        records[0].report.missing = vec![missing("peer", "not there yet"), missing("spdl", "no FFmpeg")];
        records[1].report.missing = vec![missing("spdl", "pip install spdl")];
        let page = page(&records);
        assert!(page.contains("<li>spdl for a &lt;step&gt; (2026-02-01): pip install spdl</li>"), "{page}");
        assert!(!page.contains("not there yet") && !page.contains("no FFmpeg"), "{page}");
    }

    #[test]
    fn records_of_another_decoder_have_cases_of_their_own() {
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../record")).unwrap() {
            let path = entry.unwrap().path();
            let is_turbo = path.to_string_lossy().ends_with("libjpeg-turbo.json");
            let text = if is_turbo { fs::read_to_string(path).unwrap() } else { continue };
            let report: VersusReport = serde_json::from_str(&text).unwrap();
            assert!(report.rows.iter().all(|row| row.case.contains(", ours with libjpeg-turbo")), "{}", report.table());
        }
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
