//! All recorded comparisons on one page, by machine: the newest result of each, the ratios that were measured before,
//! and the peers that were missing.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::html::{escape, fill};
use crate::versus::{Bound, brief, ratio};
use crate::{MissingPeer, VersusReport, VersusRow};

/// A recorded report, and when it was measured.
#[derive(Clone, Debug)]
pub struct Record {
    /// The day, which is the beginning of the file's name: `2026-11-21`.
    pub day: String,
    /// What was measured.
    pub report: VersusReport,
}

impl Record {
    /// When it was measured, as precisely as is known: an order by time.
    fn time(&self) -> &str {
        self.report.measured_at.as_deref().unwrap_or(&self.day)
    }
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
    // Of one day, by the time of day.
    records.sort_by(|one, other| one.time().cmp(other.time()));
    Ok(records)
}

/// Peers that are limits: constants, bounds and other ways of ours; a name that ends with a blank is the beginning of
/// several. Older records do not say so.
const LIMITS: [&str; 14] = [
    "1 worker",
    "a bare loop on ",
    "a limit of ",
    "copy",
    "its bytes alone predict",
    "its bytes and its own work predict",
    "itself, before them",
    "plain",
    "the 50 ms allowed",
    "the best of a grid: ",
    "the diagnosis' bound",
    "the first batch of an epoch",
    "the same steps, nothing written",
    "the same without",
];

/// Cases that older records have by another name: that name, and the one of today.
const RENAMED: [(&str, &str); 1] = [(
    "loading, checksums compared, 1.02 GB, 576 tensors (times faster than the peer)",
    "loading 1.02 GB from memory that holds the file, checksums compared (times faster than the peer)",
)];

/// A case without the figures of its day, which older records have in its text: a hook's share of the bytes, the time of
/// a step.
fn lasting(case: &str) -> String {
    let renamed = RENAMED.iter().find(|(old, _)| *old == case);
    let case = renamed.map_or(case, |(_, new)| new);
    let (text, meaning) = case.rsplit_once(" (").unwrap_or((case, ""));
    let parts = text.split(", ").filter(|part| !part.ends_with("% of the bytes"));
    let parts: Vec<&str> = parts.map(|part| part.find(RANK).map_or(part, |at| &part[..at + RANK.len() - 2])).collect();
    if meaning.is_empty() { parts.join(", ") } else { format!("{} ({meaning}", parts.join(", ")) }
}

/// A peer without the setting that was the best on its day.
fn lasting_peer(peer: &str) -> &str {
    if peer.starts_with(GRID) { GRID } else { peer }
}

/// What a step's time follows.
const RANK: &str = " a rank: ";
const GRID: &str = "the best of a grid";

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
    rows: BTreeMap<(String, &'a str), Vec<Entry<'a>>>,
    /// Peers that were missing and have not been measured since, each with the day.
    missing: Vec<(&'a str, &'a MissingPeer)>,
}

impl<'a> Recorded<'a> {
    /// Adds a report that is older than those added before.
    fn add(&mut self, day: &'a str, report: &'a VersusReport) {
        for row in &report.rows {
            let entry = Entry { day, asked: report.pairs_asked, row };
            self.rows.entry((lasting(&row.case), lasting_peer(&row.peer_name))).or_default().push(entry);
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
         <th>Measured</th><th>Before</th></tr></thead>",
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
        let says_so = peer.starts_with("a limit of ");
        let limit = if is_limit(newest.row) && !says_so { "limit: " } else { "" };
        out += &format!("<tr><th scope=\"row\">{limit}{}</th>", escape(peer));
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

fn is_limit(row: &VersusRow) -> bool {
    let is_it = |limit: &&str| match limit.ends_with(' ') {
        true => row.peer_name.starts_with(*limit),
        false => row.peer_name == **limit,
    };
    row.is_limit || LIMITS.iter().any(is_it)
}

fn cells(newest: &Entry<'_>, before: &[Entry<'_>]) -> [String; 7] {
    let row = newest.row;
    let earlier = before.iter().map(|it| format!("{} ({}, n = {})", ratio(it.row.ratio_median), it.day, it.row.pairs));
    [
        format!("{} ({}\u{2013}{})", ratio(row.ratio_median), ratio(row.ratio_low), ratio(row.ratio_high)),
        goal(row),
        format!("{} {}", brief(row.ours), row.unit),
        format!("{} {}", brief(row.peer), row.unit),
        pairs(newest, before),
        newest.day.to_owned(),
        earlier.collect::<Vec<_>>().join(", "),
    ]
}

/// The goal of a ratio, and whether it is met: `at least 2: met`.
fn goal(row: &VersusRow) -> String {
    let Some((bound, value)) = row.target_is.zip(row.target) else { return "no goal".to_owned() };
    let wanted = match bound {
        Bound::AtLeast => format!("at least {value}"),
        Bound::AtMost => format!("at most {value}"),
        Bound::Within => format!("1 \u{b1} {value}"),
    };
    format!("{wanted}: {}", outcome(row))
}

fn outcome(row: &VersusRow) -> &'static str {
    match row.decided() {
        Some(true) => "met",
        Some(false) => "missed",
        None => "undecided",
    }
}

/// The number of pairs, and why it is not the usual one.
fn pairs(newest: &Entry<'_>, before: &[Entry<'_>]) -> String {
    let number = newest.row.pairs;
    let fewer = before.iter().find(|it| it.row.pairs < number && it.row.target.is_some());
    match (newest.asked, fewer) {
        (None, _) => number.to_string(),
        (Some(_), Some(it)) if it.row.decided() != Some(true) => {
            format!("{number}, because {} on {}: {}", it.row.pairs, it.day, outcome(it.row))
        }
        (Some(_), _) => format!("{number}, asked for"),
    }
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
        assert!(page.contains("0.60 (0.60\u{2013}0.60)") && page.contains("0.80 (2026-01-01, n = 3)"), "{page}");
        assert!(
            page.contains("A, 2 cores") && page.contains("B, 2 cores") && page.contains("a &lt;step&gt;"),
            "{page}"
        );
        assert!(!page.contains("{{"), "{page}");
    }

    #[test]
    fn records_of_one_day_are_in_the_order_of_their_times_and_not_of_their_names() {
        let folder = tempfile::tempdir().unwrap();
        for (name, ours, time) in
            [("a", 5.0, Some("2026-01-01 09:00 UTC")), ("b", 6.0, Some("2026-01-01 08:00 UTC")), ("c", 7.0, None)]
        {
            let mut report = record("", ours, "A").report;
            report.measured_at = time.map(str::to_owned);
            fs::write(folder.path().join(format!("2026-01-01-{name}.json")), report.to_json().unwrap()).unwrap();
        }
        let ours: Vec<f64> = read(folder.path()).unwrap().iter().map(|record| record.report.rows[0].ours).collect();
        assert_eq!(ours, [7.0, 6.0, 5.0]);
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
        assert!(page.contains("<td>at most 0.85: undecided</td>"), "{page}");
    }

    #[test]
    fn more_pairs_than_usual_are_shown_with_the_reason() {
        let mut records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A")];
        assert!(page(&records).contains("<td>3</td>"));
        records[1].report.pairs_asked = Some(3);
        let text = page(&records);
        assert!(text.contains("<td>3, asked for</td>") && text.contains("0.80 (2026-01-01, n = 3)"), "{text}");
        // Measured again, because fewer pairs had missed the goal.
        records[1].report.pairs_asked = Some(31);
        records[1].report.rows[0].pairs = 31;
        for (target, reason) in [(0.7, "because 3 on 2026-01-01: missed"), (0.9, "asked for")] {
            let before = &mut records[0].report.rows[0];
            (before.target, before.target_is) = (Some(target), Some(Bound::AtMost));
            let text = page(&records);
            assert!(text.contains(&format!("<td>31, {reason}</td>")), "{text}");
        }
    }

    #[test]
    fn an_older_record_of_a_limit_or_a_renamed_case_is_shown_as_today() {
        let mut records =
            [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A"), record("2026-01-01", 8.0, "A")];
        let (old, new) = RENAMED[0];
        records[0].report.rows[0].case = old.to_owned();
        records[1].report.rows[0].case = new.to_owned();
        records[2].report.rows[0].peer_name = "the 50 ms allowed".to_owned();
        let of_tch = VersusRow { peer_name: "plain tch".to_owned(), ..records[2].report.rows[0].clone() };
        records[2].report.rows.push(of_tch);
        let page = page(&records);
        assert!(!page.contains(old) && page.contains("0.80 (2026-01-01, n = 3)"), "{page}");
        assert!(page.contains("<th scope=\"row\">limit: the 50 ms allowed</th>"), "{page}");
        // Another tool is no limit, though `plain` alone is one.
        assert!(
            page.contains("<th scope=\"row\">peer</th>") && page.contains("<th scope=\"row\">plain tch</th>"),
            "{page}"
        );
    }

    #[test]
    fn a_case_whose_text_holds_a_figure_of_its_day_is_one_case() {
        let mut records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A")];
        for (record, case, peer) in [
            (0, "by top-k of 1%, 1.99% of the bytes, MLP, 512 samples a rank: 233 ms a step", "the best of a grid: 2"),
            (1, "by top-k of 1%, MLP, 512 samples a rank", "the best of a grid: 4"),
        ] {
            let row = &mut records[record].report.rows[0];
            (row.case, row.peer_name) = (format!("{case} (share of the peer's)"), peer.to_owned());
        }
        let page = page(&records);
        assert!(page.contains("<span>by top-k of 1%, MLP, 512 samples a rank (share of the peer"), "{page}");
        assert!(page.contains("0.80 (2026-01-01, n = 3)"), "{page}");
        assert!(page.contains("<th scope=\"row\">limit: the best of a grid</th>"), "{page}");
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
