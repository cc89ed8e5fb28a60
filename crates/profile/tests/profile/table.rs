//! PyTorch's table. The parity case `profile_tables` shows that it equals PyTorch's letter by letter.

use overdrive_profile::{EventList, FunctionEvent, ProfileError, Recording, SortBy, TableOptions};

fn events() -> EventList {
    let event = |name: &str, start, end| FunctionEvent::new(name, 1, start, end);
    let recording = Recording { profile_memory: true, ..Recording::default() };
    let mut sum = event("aten::sum", 20_000, 50_000);
    sum.cpu_memory_usage = 2048;
    EventList::new(vec![event("outer", 0, 1_062_500), sum, event("aten::sum", 60_000, 61_500)], recording)
}

#[test]
fn a_table_has_pytorchs_columns() {
    let table = events().key_averages(Default::default()).table(&TableOptions::sorted_by(SortBy::SelfCpuTimeTotal));
    let ruler = "-------------".to_owned() + &"  ------------".repeat(8) + "  ";
    let expected = [
        &ruler,
        "         Name    Self CPU %      Self CPU   CPU total %     CPU total  CPU time avg       CPU Mem  Self CPU Mem    # of Calls  ",
        &ruler,
        "        outer        97.04%       1.031ms       100.00%       1.062ms       1.062ms           0 B      -2.00 KB             1  ",
        "    aten::sum         2.96%      31.500us         2.96%      31.500us      15.750us       2.00 KB       2.00 KB             2  ",
        &ruler,
        "Self CPU time total: 1.062ms",
        "",
    ]
    .join("\n");
    assert_eq!(table, expected, "\n{table}");
}

#[test]
fn rows_are_limited_and_names_cut() {
    let averages = events().key_averages(Default::default());
    let options = TableOptions {
        max_name_column_width: Some(10),
        header: Some("A header".to_owned()),
        top_level_events_only: true,
        ..TableOptions::default()
    };
    let table = averages.table(&options);
    assert!(table.contains("\nA header\n") && table.contains("only display top-level ops"), "{table}");
    assert!(!table.contains("aten"), "{table}");
    let table = averages.table(&TableOptions { max_name_column_width: Some(10), ..TableOptions::default() });
    assert!(table.contains("aten::s..."), "{table}");
    let table = averages.table(&TableOptions::default().row_limit(1));
    assert!(table.contains("outer") && !table.contains("aten::sum"), "{table}");
    // A width of 0 does no harm.
    averages.table(&TableOptions { max_name_column_width: Some(0), ..TableOptions::default() });
}

#[test]
fn every_key_of_pytorch_sorts() {
    for (name, key) in SortBy::ALL {
        assert_eq!(name.parse::<SortBy>().unwrap(), key);
        assert_eq!(name.replace("device", "cuda").parse::<SortBy>().unwrap(), key);
        let table = events().key_averages(Default::default()).table(&TableOptions::sorted_by(key));
        assert_eq!(table.lines().count(), 7);
    }
    let error = "duration".parse::<SortBy>().expect_err("unknown");
    assert!(matches!(error, ProfileError::UnknownSortKey(_)));
    assert!(error.to_string().contains("self_cpu_time_total"), "{error}");
}
