//! All recorded comparisons on one page, by machine: the newest result of each, the ratios that were measured before,
//! and the peers that were missing.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::html::{escape, fill};
use crate::versus::{Bound, brief, ratio, rounded};
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
    let texts = paths.into_iter().map(|path| {
        let text = fs::read_to_string(&path).map_err(failed(&path))?;
        Ok((path, text))
    });
    of_texts(&texts.collect::<Result<Vec<_>, _>>()?)
}

/// As [`read`], from files that have been read: their paths in order, and their texts.
///
/// # Errors
/// As [`read`]'s for a file's text.
pub fn of_texts(files: &[(PathBuf, impl AsRef<str>)]) -> Result<Vec<Record>, RecordError> {
    let mut records = Vec::new();
    for (path, text) in files {
        let json = |source| RecordError::Json { path: path.clone(), source };
        let value: serde_json::Value = serde_json::from_str(text.as_ref()).map_err(json)?;
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
    let Some((bound, value)) = row.target_is.zip(row.target.map(rounded)) else { return "no goal".to_owned() };
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
#[path = "records_tests.rs"]
mod tests;
