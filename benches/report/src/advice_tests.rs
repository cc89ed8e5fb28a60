//! Tests of [`super`].

use super::*;

/// A row that is `speedup` times as fast as a baseline of 10 s that waits 60% of its time.
fn row(technique: Technique, speedup: f64, wait: f64) -> Row {
    Row {
        technique,
        device: DeviceKind::Cpu,
        seconds: vec![10.0 / speedup; 3],
        seconds_median: 10.0 / speedup,
        speedup,
        speedup_low: speedup * 0.99,
        speedup_high: speedup * 1.01,
        accuracy: 0.98,
        accuracy_delta_points: 0.0,
        kept_accuracy: true,
        final_loss: None,
        peak_rss_bytes: Some(400 << 20),
        peak_device_bytes: None,
        data_wait_seconds: wait * 10.0 / speedup,
        data_wait_fraction: wait,
        won_back_fraction: None,
        curve: Vec::new(),
    }
}

fn said(rows: &[Row], flags: &[&str]) -> Vec<String> {
    let cpu_flags = flags.iter().map(|&flag| flag.to_owned()).collect();
    advise(rows, &Machine { cpu_flags, ..Machine::default() })
}

fn baseline() -> Row {
    row(Technique::Baseline, 1.0, 0.6)
}

#[test]
fn the_fastest_row_that_kept_accuracy_is_advised_with_the_reason() {
    let mut fast_and_wrong = row(Technique::Combined, 4.0, 0.01);
    (fast_and_wrong.kept_accuracy, fast_and_wrong.accuracy_delta_points) = (false, -0.8);
    let lines = said(&[baseline(), row(Technique::CachePrefetch, 2.5, 0.01), fast_and_wrong], &[]);
    assert_eq!(lines[0], "Use cache_prefetch: 2.50x as fast as baseline.");
    assert_eq!(
        lines[1],
        "10.0 s went down to 4.00 s, with accuracy at 98.00% (0.00 points): baseline spent 60% of its time on data, \
         cache_prefetch spends 1.0%."
    );
    assert!(lines.iter().any(|line| line.starts_with("combined changed accuracy by -0.80 points")), "{lines:?}");
}

#[test]
fn of_rows_within_the_noise_the_simplest_is_advised() {
    let lines = said(&[baseline(), row(Technique::Cache, 2.45, 0.02), row(Technique::Combined, 2.5, 0.01)], &[]);
    assert!(lines[0].starts_with("Use cache:"), "{lines:?}");
}

#[test]
fn one_tensor_is_advised_only_where_the_data_fits_and_caching_gains_nothing_over_it() {
    let rows = [baseline(), row(Technique::InMemory, 2.6, 0.0), row(Technique::CachePrefetch, 2.5, 0.01)];
    let lines = said(&rows, &[]);
    assert!(lines[0].starts_with("Use cache_prefetch: 2.50x"), "{lines:?}");
    assert!(lines[2].contains("fits as one tensor, in_memory is faster still: 2.60x"));
    assert!(lines.contains(
        &"Caching gains nothing over in_memory, one tensor, where the data fits as one: cache_prefetch took 4.00 s \
          against 3.85 s."
            .to_owned()
    ));
}

#[test]
fn slow_bf16_is_blamed_on_the_processor_only_where_it_lacks_the_hardware() {
    let rows = [baseline(), row(Technique::AmpBf16, 0.7, 0.4)];
    let blamed =
        |flags| said(&rows, flags).into_iter().find(|line| line.starts_with("amp_bf16 (0.70x) took longer")).unwrap();
    assert!(blamed(&["avx512f"]).contains("has no bfloat16 hardware"));
    assert!(!blamed(&["amx_bf16"]).contains("has no bfloat16 hardware"));
    assert!(said(&rows, &[])[0].starts_with("Keep the baseline"));
}

#[test]
fn rows_of_which_the_same_is_to_be_said_share_a_sentence() {
    let rows = [baseline(), row(Technique::AmpFp16, 1.0, 0.6), row(Technique::Tf32, 1.01, 0.6)];
    let lines = said(&rows, &[]);
    assert!(lines.iter().any(|line| line.starts_with("amp_fp16 (1.00x) and tf32 (1.01x) made no clear")), "{lines:?}");
}

#[test]
fn a_gain_that_one_repetition_did_not_see_is_no_gain() {
    let mut shaky = row(Technique::Cache, 1.2, 0.1);
    shaky.speedup_low = 0.9;
    let lines = said(&[baseline(), shaky], &[]);
    assert!(lines[0].starts_with("Keep the baseline"), "{lines:?}");
    assert!(lines.contains(&"cache (1.20x) made no clear difference.".to_owned()), "{lines:?}");
}

#[test]
fn accumulation_is_judged_by_its_memory() {
    let mut small = row(Technique::Accumulate, 0.9, 0.5);
    let lines = |row: &Row| said(&[baseline(), row.clone()], &[]).join("\n");
    assert!(lines(&small).contains("accumulate saved no memory"));
    small.peak_rss_bytes = Some(300 << 20);
    assert!(lines(&small).contains("300 MiB against 400 MiB at the peak, at 0.90x of baseline's speed"));
}

#[test]
fn combined_is_called_out_where_a_part_alone_does_better() {
    let rows = [baseline(), row(Technique::CachePrefetch, 2.5, 0.01), row(Technique::Combined, 1.6, 0.01)];
    let lines = said(&rows, &[]);
    assert!(
        lines.iter().any(|line| line.starts_with("combined reached 1.60x, less than cache_prefetch alone (2.50x)"))
    );
}

#[test]
fn each_device_has_its_own_headline() {
    let on_gpu = |mut row: Row| {
        row.device = DeviceKind::Cuda;
        row
    };
    let rows = [baseline(), on_gpu(baseline()), on_gpu(row(Technique::Cache, 2.0, 0.1))];
    let lines = said(&rows, &[]);
    assert!(lines[0].starts_with("On the GPU: Use cache"), "{lines:?}");
    assert!(lines.iter().any(|line| line.starts_with("On the processor: Keep the baseline")), "{lines:?}");
}

#[test]
fn a_disturbed_machine_gets_no_advice() {
    let steady = [baseline(), row(Technique::Cache, 2.5, 0.02)];
    assert!(said(&steady, &[])[0].starts_with("Use cache"));
    let mut disturbed = row(Technique::Cache, 2.5, 0.02);
    disturbed.seconds = vec![4.0, 4.1, 6.2];
    let lines = said(&[baseline(), disturbed], &[]);
    assert_eq!(lines.len(), 2);
    assert!(lines[0].starts_with("No advice"), "{lines:?}");
    assert!(lines[1].contains("from 4.00 s to 6.20 s"), "{lines:?}");
}
