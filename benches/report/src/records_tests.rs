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
    assert!(page.contains("A, 2 cores") && page.contains("B, 2 cores") && page.contains("a &lt;step&gt;"), "{page}");
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
    let mut records = [record("2026-01-01", 8.0, "A"), record("2026-02-01", 6.0, "A"), record("2026-01-01", 8.0, "A")];
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
