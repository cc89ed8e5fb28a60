//! The user's scopes, and spans, on one thread and on several.

use std::thread;

use overdrive_profile::{EventList, Profiler, RecordScope, SpanLayer, record_function};
use tch::Tensor;
use tracing_subscriber::layer::SubscriberExt as _;

use crate::{FLOAT, alone, profile_of};

fn work() {
    let _ = Tensor::ones([64], FLOAT).sum(tch::Kind::Float);
}

/// The name of the event around the first event of this name.
fn parent(events: &EventList, name: &str) -> Option<String> {
    let event = events.iter().find(|event| &*event.name == name).unwrap_or_else(|| panic!("no {name}"));
    event.cpu_parent.map(|parent| events[parent].name.to_string())
}

fn count(events: &EventList, name: &str) -> usize {
    events.iter().filter(|event| &*event.name == name).count()
}

#[test]
fn scopes_hold_the_operators_within_them() {
    let _alone = alone();
    let profile = profile_of(Profiler::builder(), || {
        let _outer = record_function("outer");
        {
            let _inner = record_function("inner");
            work();
        }
        let _last = record_function("last \"of\" all, größe");
    });
    let events = profile.events().unwrap();
    assert_eq!(parent(events, "aten::sum"), Some("inner".to_owned()));
    assert_eq!(parent(events, "inner"), Some("outer".to_owned()));
    assert_eq!(parent(events, "last 'of' all, gr??e"), Some("outer".to_owned()));
    let outer = events.iter().find(|event| &*event.name == "outer").unwrap();
    assert!(outer.is_user_annotation && outer.scope == RecordScope::User);
    assert_eq!(parent(events, "outer"), None);
}

#[test]
fn scopes_that_cross_a_start_or_a_stop_do_no_harm() {
    let _alone = alone();
    let before = record_function("before");
    let mut profiler = Profiler::builder().start().unwrap();
    let cut = record_function("cut");
    let within_cut = record_function("within cut");
    drop(before);
    work();
    profiler.stop().unwrap();
    let first = profiler.profile().unwrap().clone();
    // Another profile begins before the scopes have ended.
    profiler.start().unwrap();
    drop(cut);
    drop(within_cut);
    work();
    let forgotten = record_function("forgotten");
    std::mem::forget(forgotten);
    profiler.stop().unwrap();
    let second = profiler.profile().unwrap();
    let (first, second) = (first.events().unwrap(), second.events().unwrap());
    assert_eq!(["before", "cut", "within cut"].map(|name| count(first, name)), [0, 1, 1]);
    assert_eq!(parent(first, "aten::sum"), Some("within cut".to_owned()));
    assert_eq!(["before", "cut", "within cut", "forgotten"].map(|name| count(second, name)), [0, 0, 0, 1]);
}

#[test]
fn scopes_that_end_in_another_order_are_split_and_nest() {
    let _alone = alone();
    let profile = profile_of(Profiler::builder(), || {
        let a = record_function("a");
        let b = record_function("b");
        let c = record_function("c");
        drop(a);
        work();
        drop(b);
        drop(c);
    });
    let events = profile.events().unwrap();
    // b and c continue as second pieces, and c as a third one when b ends.
    assert_eq!(["a", "b", "c"].map(|name| count(events, name)), [1, 2, 3]);
    assert_eq!(parent(events, "aten::sum"), Some("c".to_owned()));
    let second = events.iter().filter(|event| &*event.name == "b").nth(1).unwrap();
    assert_eq!(second.cpu_parent, None);
}

#[test]
fn scopes_of_other_threads_have_tracks_with_the_threads_names() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace.json");
    let profile = profile_of(Profiler::builder(), || {
        let threads = (0..3).map(|worker| {
            let builder = thread::Builder::new().name(format!("a worker with a long name {worker}"));
            builder.spawn(move || {
                for _ in 0..=worker {
                    let _batch = record_function("batch");
                    let _decode = record_function("decode");
                    work();
                }
            })
        });
        threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.unwrap().join().unwrap());
        let _own = record_function("own");
    });
    let events = profile.events().unwrap();
    assert_eq!([count(events, "batch"), count(events, "decode"), count(events, "own")], [6, 6, 1]);
    // Operators of other threads are not recorded.
    assert_eq!(count(events, "aten::sum"), 0);
    let decodes = events.iter().filter(|event| &*event.name == "decode");
    assert!(decodes.clone().all(|event| event.cpu_parent.is_some_and(|batch| &*events[batch].name == "batch")));
    let own = events.iter().find(|event| &*event.name == "own").unwrap().thread;
    assert!(decodes.clone().all(|event| event.thread != own));

    profile.export_chrome_trace(&path).unwrap();
    let trace: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let all = trace["traceEvents"].as_array().unwrap();
    for worker in 0..3 {
        let name = format!("a worker with a long name {worker})");
        let named = all.iter().find(|event| {
            event["name"] == "thread_name" && event["args"]["name"].as_str().is_some_and(|text| text.ends_with(&name))
        });
        let tid = &named.unwrap_or_else(|| panic!("no track of {name}"))["tid"];
        let scopes = all.iter().filter(|event| event["name"] == "decode" && event["tid"] == *tid);
        assert_eq!(scopes.count(), worker + 1);
    }
}

#[test]
fn a_thread_may_still_be_in_a_scope_when_the_profiler_stops() {
    let _alone = alone();
    let (stopped, wait) = std::sync::mpsc::channel::<()>();
    let (opened, is_open) = std::sync::mpsc::channel::<()>();
    let mut other = None;
    let profile = profile_of(Profiler::builder(), || {
        other = Some(thread::spawn(move || {
            let _scope = record_function("unfinished");
            opened.send(()).unwrap();
            let _ = wait.recv();
        }));
        is_open.recv().unwrap();
    });
    drop(stopped);
    other.unwrap().join().unwrap();
    assert_eq!(count(profile.events().unwrap(), "unfinished"), 0);
}

#[test]
fn spans_become_scopes_in_every_thread() {
    let _alone = alone();
    let subscriber = tracing_subscriber::registry().with(SpanLayer::new());
    let dispatch = tracing::Dispatch::new(subscriber);
    let profile = profile_of(Profiler::builder(), || {
        tracing::dispatcher::with_default(&dispatch, || {
            let _step = tracing::info_span!("train_step").entered();
            work();
        });
        let elsewhere = dispatch.clone();
        let thread = thread::Builder::new().name("dataload-0".to_owned());
        let thread = thread.spawn(move || {
            tracing::dispatcher::with_default(&elsewhere, || {
                let _batch = tracing::debug_span!("dataload_batch").entered();
                let _decode = tracing::debug_span!("decode").entered();
            });
        });
        thread.unwrap().join().unwrap();
    });
    let events = profile.events().unwrap();
    assert_eq!(parent(events, "aten::sum"), Some("train_step".to_owned()));
    assert_eq!(parent(events, "decode"), Some("dataload_batch".to_owned()));
}

#[test]
fn spans_that_are_exited_out_of_order_or_entered_again_nest() {
    let _alone = alone();
    let subscriber = tracing_subscriber::registry().with(SpanLayer::new());
    let profile = profile_of(Profiler::builder(), || {
        tracing::subscriber::with_default(subscriber, || {
            let (a, b) = (tracing::info_span!("a"), tracing::info_span!("b"));
            let in_a = a.enter();
            let in_b = b.enter();
            drop(in_a);
            work();
            let again = a.enter();
            drop(in_b);
            drop(again);
        });
    });
    let events = profile.events().unwrap();
    assert_eq!(parent(events, "aten::sum"), Some("b".to_owned()));
    // Each end of an outer span cuts the spans within it.
    assert_eq!([count(events, "a"), count(events, "b")], [3, 2]);
}

#[test]
fn spans_across_a_start_and_a_stop_do_no_harm() {
    let _alone = alone();
    let subscriber = tracing_subscriber::registry().with(SpanLayer::new());
    tracing::subscriber::with_default(subscriber, || {
        let before = tracing::info_span!("before").entered();
        let mut profiler = Profiler::builder().start().unwrap();
        let after = tracing::info_span!("after").entered();
        drop(before);
        profiler.stop().unwrap();
        profiler.start().unwrap();
        drop(after);
        work();
        profiler.stop().unwrap();
        let events = profiler.profile().unwrap().events().unwrap();
        assert_eq!([count(events, "before"), count(events, "after"), count(events, "aten::sum")], [0, 0, 1]);
    });
}
