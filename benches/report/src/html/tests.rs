use super::*;
use crate::sample;

#[test]
fn the_page_is_whole_and_fetches_nothing() {
    for report in [sample::report(), sample::quick()] {
        let page = render(&report);
        assert!(
            !page.contains("{{") && !page.contains("}}") && !page.contains("NaN") && !page.contains("inf%"),
            "{page}"
        );
        for fetched in ["http://", "https://", "<script", "url("] {
            assert!(!page.contains(fetched), "{fetched}");
        }
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
        assert!(page.contains(&escape(&report.conclusion[0])));
    }
}

#[test]
fn what_was_not_measured_is_not_shown() {
    let (whole, quick) = (render(&sample::report()), render(&sample::quick()));
    for shown in ["Loss over time", "3 steps by phase", "What would speed up"] {
        assert!(whole.contains(shown) && !quick.contains(shown), "{shown}");
    }
    assert!(quick.contains("pytorch is absent: no torch in python3"));
    assert!(quick.contains("disturbed by other use of the machine"));
}

#[test]
fn names_and_reasons_are_escaped() {
    let mut report = sample::quick();
    report.workloads[0].measurements.absent[0].1 = "<b>&\"'".to_owned();
    report.setting.machine.cpu = "<script>".to_owned();
    let page = render(&report);
    assert!(page.contains("&lt;b&gt;&amp;&quot;&#39;") && !page.contains("<script"));
}

#[test]
fn ticks_are_round_numbers_within_the_range() {
    assert_eq!(ticks(0.0, 31.0, 5.0), [0.0, 10.0, 20.0, 30.0]);
    assert_eq!(ticks(0.958, 0.99, 4.0), [0.96, 0.97, 0.98, 0.99]);
    assert_eq!(ticks(1.0, 1.0, 4.0), [1.0]);
}
