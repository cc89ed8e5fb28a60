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
    assert!(quick.contains("PyTorch as written is absent: no torch in python3"));
    assert!(quick.contains("disturbed by other use of the machine"));
}

#[test]
fn readers_see_the_names_of_readme_and_what_overdrive_is_made_of() {
    let page = render(&sample::report());
    for name in ["PyTorch as written", "PyTorch tuned by hand", "plain tch", "Overdrive"] {
        assert!(page.contains(&format!("<div class=\"name\"><b>{name}</b>")), "{name}");
    }
    assert!(page.contains("<b>Overdrive</b><span>cache_prefetch and fused</span>"), "{page}");
    let shown = page.split("</style>").nth(1).unwrap();
    assert!(!shown.contains(">combined") && !shown.contains("pytorch_tuned"), "{shown}");
}

#[test]
fn numbers_that_say_nothing_are_not_set_in_bold() {
    let mut all = sample::report().workloads.remove(0).measurements;
    for one in &mut all.measured {
        one.turns.iter_mut().for_each(|turn| turn.disturbance.other_cpus = 1.0);
        one.wholes.iter_mut().for_each(|whole| whole.disturbance.other_cpus = 1.0);
    }
    let page = render(&Report::new(sample::report().setting, vec![all]));
    assert!(page.contains("<p>Every timing was disturbed by other use of the machine"), "{page}");
    assert!(!page.contains("class=\"goals\"") && !page.contains("as fast as"), "{page}");
    assert!(!page.contains("<tr class=\"combined\">"), "its cells are bold");
}

#[test]
fn a_workload_that_failed_has_a_section_with_the_reason() {
    let mut report = sample::report();
    report.workloads.pop();
    report.setting.failures = vec!["text: cannot start plain tch: <no file>".to_owned()];
    let page = render(&report);
    assert!(page.contains("<h2>text</h2><p>Not measured: cannot start plain tch: &lt;no file&gt;</p>"), "{page}");
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
