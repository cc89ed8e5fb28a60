//! README's table of single parts beside other tools, made of the newest records.

use crate::records::Record;
use crate::text::{rate, times};
use crate::{Machine, VersusRow};

/// The marks around the table in README.md.
const MARKS: [&str; 2] = ["<!-- parts-table -->", "<!-- /parts-table -->"];

/// What README shows: a name for it, the beginning of the case, the beginning of the peer's name. Chosen for what a
/// newcomer would port first, and not by how it ends: undecided ones stay.
const PARTS: [(&str, &str, &str); 10] = [
    (
        "photographs decoded, cropped and collated, 2 workers",
        "500x375 JPEG photographs, RandomResizedCrop 224 and flip, batch 64, 2 persistent workers (",
        "DataLoader with pillow",
    ),
    (
        "the same",
        "500x375 JPEG photographs, RandomResizedCrop 224 and flip, batch 64, 2 persistent workers (",
        "spdl with torchvision.io",
    ),
    (
        "WebDataset shards, 2 workers",
        "undecoded 40 kB samples of cached tar shards, 2 workers",
        "webdataset's WebLoader",
    ),
    ("Parquet columns in shuffled batches", "the same in shuffled batches of 1024, row group by row group", "pyarrow"),
    (
        "an AdamW step of a small MLP, compiled",
        "AdamW step of an MLP 784-128-128-10, batch 16, 1 thread",
        "PyTorch, fused AdamW",
    ),
    (
        "a data-parallel step of a 10M MLP, 2 ranks",
        "training step with AdamW, MLP of 10.0 million parameters",
        "PyTorch DDP, AdamW(fused=True)",
    ),
    (
        "the same, gradients averaged by `SharedMemory`",
        "training step with AdamW and the hook SharedMemory, MLP of 10.0 million parameters",
        "PyTorch DDP, AdamW(fused=True)",
    ),
    ("4 ranks started, up to their first all-reduce", "launch of 4 ranks to the first all-reduce", "torchrun"),
    (
        "a checkpoint of 1 GB loaded, and compared with its checksums",
        "loading 1.02 GB from memory",
        "torch.load and load_state_dict",
    ),
    (
        "a checkpoint of 1 GB saved in the background: what training waits",
        "what a save in the background stalls",
        "DCP's async_save",
    ),
];

/// `readme` with the table of these records between its marks, of those machines that are like `like`. None if the marks
/// are missing.
pub fn with_parts(readme: &str, records: &[Record], like: &Machine) -> Option<String> {
    let (before, rest) = readme.split_once(MARKS[0])?;
    let (_, after) = rest.split_once(MARKS[1])?;
    Some(format!("{before}{}\n{}{}{after}", MARKS[0], table(records, like), MARKS[1]))
}

fn table(records: &[Record], like: &Machine) -> String {
    let mut text =
        "| | beside | as fast (low-high) | Overdrive | the other | day |\n|---|---|---|---|---|---|\n".to_owned();
    for (name, case, peer) in PARTS {
        // The newest is the last.
        let found = records.iter().rev().filter(|record| is_like(&record.report.machine, like)).find_map(|record| {
            let is_it = |row: &&VersusRow| row.case.starts_with(case) && row.peer_name.starts_with(peer);
            Some((record.report.rows.iter().find(is_it)?, &record.day))
        });
        if let Some((row, day)) = found {
            text += &line(name, row, day);
        }
    }
    text
}

fn is_like(machine: &Machine, like: &Machine) -> bool {
    (&machine.cpu, machine.cores, &machine.gpu) == (&like.cpu, like.cores, &like.gpu)
}

/// Whichever way the record has its ratio, here more is better.
fn line(name: &str, row: &VersusRow, day: &str) -> String {
    let (middle, low, high) = match row.case.ends_with("(share of the peer's)") {
        true => (1.0 / row.ratio_median, 1.0 / row.ratio_high, 1.0 / row.ratio_low),
        false => (row.ratio_median, row.ratio_low, row.ratio_high),
    };
    let side = match (low, high) {
        (low, _) if low > 1.0 => "",
        (_, high) if high < 1.0 => ", slower",
        _ => ", undecided",
    };
    let bare = |ratio: f64| times(ratio).trim_end_matches('x').to_owned();
    let of = |value: f64| format!("{} {}", rate(value), row.unit);
    let spread = format!("{} ({}-{})", times(middle), bare(low), bare(high));
    format!("| {name} | {} | **{spread}**{side} | {} | {} | {day} |\n", row.peer_name, of(row.ours), of(row.peer))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VersusReport;

    fn record(day: &str, cores: usize, rows: &[(usize, &str, [f64; 3])]) -> Record {
        let rows = rows.iter().map(|&(part, meaning, [ratio_median, ratio_low, ratio_high])| VersusRow {
            case: format!("{}{meaning})", PARTS[part].1.trim_end_matches('(')),
            ours: 80.0,
            peer: 100.0,
            peer_name: format!("{} 1.0", PARTS[part].2),
            unit: "ms".to_owned(),
            ratio_median,
            ratio_low,
            ratio_high,
            pairs: 9,
            target: None,
            target_is: None,
            met: None,
            is_limit: false,
        });
        let machine = Machine { cores, ..Machine::detect(None) };
        let (versions, rows) = (Default::default(), rows.collect());
        let report =
            VersusReport { schema: 1, machine, versions, rows, missing: vec![], pairs_asked: None, measured_at: None };
        Record { day: day.to_owned(), report }
    }

    #[test]
    fn the_newest_row_of_a_like_machine_is_shown_and_more_is_better() {
        let records = [
            record(
                "2026-11-20",
                2,
                &[(0, "(times faster than the peer", [9.0, 8.0, 9.5]), (7, " (share of the peer's", [0.5, 0.4, 0.8])],
            ),
            record(
                "2026-11-21",
                2,
                &[
                    (0, "(times faster than the peer", [3.0, 2.0, 4.0]),
                    (8, " (times faster than the peer", [1.1, 0.9, 1.2]),
                ],
            ),
            record("2026-11-22", 64, &[(0, "(times faster than the peer", [7.0, 6.0, 8.0])]),
        ];
        let readme = format!("before\n{}\nold\n{}\nafter\n", MARKS[0], MARKS[1]);
        let new = with_parts(&readme, &records, &records[0].report.machine).unwrap();
        assert!(new.starts_with("before\n") && new.ends_with("\nafter\n") && !new.contains("old"), "{new}");
        let lines: Vec<&str> = new.lines().filter(|line| line.contains("2026")).collect();
        assert_eq!(lines.len(), 3, "{new}");
        assert!(lines[0].contains("| **3.00x (2.00-4.00)** | 80.0 ms | 100 ms | 2026-11-21 |"), "{}", lines[0]);
        assert!(lines[1].contains("| **2.00x (1.25-2.50)** |"), "{}", lines[1]);
        assert!(lines[2].contains("| **1.10x (0.90-1.20)**, undecided |"), "{}", lines[2]);
        assert_eq!(with_parts("no marks", &records, &records[0].report.machine), None);
    }
}
