//! Tests of [`super`].

use super::*;
use crate::sample;

#[test]
fn the_page_stands_alone_and_every_place_of_the_template_is_filled() {
    for cuda in [false, true] {
        let page = render(&sample::report(cuda));
        for outside in ["http:", "https:", "<script", "@import", "url(", "{{", "NaN", "inf%"] {
            assert!(!page.contains(outside), "{outside} is in the page");
        }
        for row in &sample::report(cuda).rows {
            assert!(page.matches(row.technique.name()).count() >= 3, "{} is missing", row.technique);
        }
    }
}

#[test]
fn text_from_outside_is_escaped_and_never_taken_for_a_template() {
    let mut report = sample::report(false);
    report.setting.machine.cpu = "<b>\"A & B\"</b> {{facts}}".to_owned();
    report.advice = "Use <i>this</i>".to_owned();
    let page = render(&report);
    assert!(page.contains("&lt;b&gt;&quot;A &amp; B&quot;&lt;/b&gt; {{facts}}"));
    assert!(page.contains("<h1>Use &lt;i&gt;this&lt;/i&gt;</h1>"));
}

#[test]
fn a_single_row_of_one_epoch_and_rows_of_two_devices_have_pages_too() {
    let mut report = sample::report(false);
    report.rows.truncate(1);
    report.rows[0].curve.truncate(1);
    assert!(!render(&report).contains("NaN"));
    report.rows.extend(sample::report(true).rows);
    let page = render(&report);
    assert!(page.contains("On the processor") && page.contains("On the GPU"));
    report.rows.clear();
    report.advice.clear();
    assert!(render(&report).contains("No advice"));
}

#[test]
fn elements_are_closed_in_order() {
    let page = render(&sample::report(true));
    let mut open = Vec::new();
    for tag in page.split('<').skip(1).map(|rest| rest.split('>').next().unwrap_or_default()) {
        let name = tag.split([' ', '\n']).next().unwrap_or_default();
        match name.strip_prefix('/') {
            Some(closed) => assert_eq!(open.pop(), Some(closed), "in <{tag}>"),
            None if tag.ends_with('/') || ["!doctype", "meta", "link"].contains(&name) => {}
            None => open.push(name),
        }
    }
    assert!(open.is_empty(), "never closed: {open:?}");
}

#[test]
fn ticks_are_round_and_cover_the_range() {
    assert_eq!(ticks(0.0, 31.2, 5.0), [0.0, 10.0, 20.0, 30.0]);
    let percents: Vec<f64> = ticks(0.93, 0.99, 4.0).iter().map(|tick| (tick * 100.0).round()).collect();
    assert_eq!(percents, [94.0, 96.0, 98.0]);
    assert_eq!(ticks(0.0, 0.6, 6.0), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]);
    assert_eq!(ticks(1.0, 1.0, 4.0), [1.0]);
}
