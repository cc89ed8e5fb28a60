//! Nesting, self times, memory and FLOPs: computed by hand, by a naive algorithm, and for a real model.

use overdrive_profile::{DeviceType, EventList, FunctionEvent, Grouping, Kernel, Recording};

use crate::{Model, alone, full, profile_of};

fn event(name: &str, thread: u64, start_us: i64, end_us: i64) -> FunctionEvent {
    FunctionEvent::new(name, thread, start_us * 1000, end_us * 1000)
}

/// Pseudo-random numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

#[test]
fn times_are_those_of_the_nesting() {
    let cuda = Recording { cuda: true, ..Recording::default() };
    let mut gemm = event("gemm", 1, 20, 60);
    gemm.kernels = vec![Kernel { name: "kernel".into(), device: 0, duration_ns: 7000 }];
    let mut kernel = event("kernel", 7, 65, 72);
    kernel.device_type = DeviceType::Cuda;
    let events = vec![event("child", 1, 10, 70), gemm, event("outer", 1, 0, 100), event("outer", 2, 0, 5), kernel];
    let events = EventList::new(events, cuda);
    let averages = events.key_averages(Grouping::default());
    let figures = |name: &str| {
        let sum = averages.get(name).unwrap();
        [sum.cpu_time_total_ns, sum.self_cpu_time_total_ns, sum.device_time_total_ns, sum.self_device_time_total_ns]
            .map(|ns| ns / 1000)
    };
    assert_eq!(figures("outer"), [105, 45, 7, 0]);
    assert_eq!(figures("child"), [60, 20, 7, 0]);
    assert_eq!(figures("gemm"), [40, 40, 7, 7]);
    assert_eq!(figures("kernel"), [0, 0, 7, 7]);
    let total = events.total_average();
    assert_eq!((&*total.key, total.count), ("Total", 5));
    assert_eq!(total.self_cpu_time_total_ns, 105_000);
    // Without CUDA there is no device time.
    let events = EventList::new(events.to_vec(), Recording::default());
    assert_eq!(events.key_averages(Grouping::default()).get("kernel").unwrap().device_time_total_ns, 0);
}

#[test]
fn an_only_child_of_the_same_name_is_merged_into_its_parent() {
    let mut inner = event("add", 1, 2, 8);
    inner.kernels = vec![Kernel { name: "kernel".into(), device: 0, duration_ns: 500 }];
    let events = vec![event("add", 1, 0, 10), event("add", 1, 1, 9), inner, event("fill", 1, 3, 4)];
    let events = EventList::new(events, Recording { cuda: true, ..Recording::default() });
    assert_eq!(events.len(), 2);
    assert_eq!((events[0].cpu_children.as_slice(), events[1].cpu_parent), ([1].as_slice(), Some(0)));
    assert_eq!(events[0].kernels.len(), 1);
    // Two children with the same name are two calls.
    let twice = vec![event("add", 1, 0, 10), event("add", 1, 1, 2), event("add", 1, 3, 4)];
    assert_eq!(EventList::new(twice, Recording::default()).len(), 3);
}

#[test]
fn an_async_event_has_no_parent_children_or_self_time() {
    let mut passing = event("async", 1, 1, 50);
    passing.is_async = true;
    let events = EventList::new(vec![event("outer", 1, 0, 100), passing], Recording::default());
    assert_eq!((events[0].cpu_children.len(), events[1].cpu_parent), (0, None));
    assert_eq!((events.self_cpu_time_total_ns(1), events[1].cpu_time_total_ns()), (0, 49_000));
}

#[test]
fn parents_are_the_shortest_events_around() {
    let mut numbers = Numbers(6);
    for round in 0..200 {
        // Intervals that nest or are disjoint, as on a real thread: each splits a part of an outer one.
        let mut events = Vec::new();
        for thread in 0..3 {
            let mut spans = vec![(0u64, 1000u64)];
            while let Some((from, to)) = spans.pop() {
                if to - from < 4 || events.len() > 60 {
                    continue;
                }
                let start = from + numbers.below((to - from) / 2);
                let end = start + 1 + numbers.below(to - start - 1);
                events.push(event(&format!("event {}", events.len()), thread, start as i64, end as i64));
                spans.extend([(start, end), (end, to)]);
            }
        }
        let events = EventList::new(events, Recording::default());
        for (place, inner) in events.iter().enumerate() {
            let around = events.iter().enumerate().filter(|(other, outer)| {
                let within = outer.start_ns <= inner.start_ns && inner.end_ns <= outer.end_ns;
                outer.thread == inner.thread && *other < place && within
            });
            let shortest = around.min_by_key(|(other, outer)| (outer.elapsed_ns(), std::cmp::Reverse(*other)));
            assert_eq!(inner.cpu_parent, shortest.map(|(outer, _)| outer), "round {round}, event {place}");
        }
    }
}

#[test]
fn shapes_and_overloads_separate_groups_if_asked() {
    let shaped = |shape: &[i64], overload: &str| {
        let mut event = event("add", 1, 0, 0);
        event.input_shapes = vec![shape.to_vec()];
        event.overload_name = overload.into();
        event
    };
    let events = vec![shaped(&[2], "Tensor"), shaped(&[3], "Tensor"), shaped(&[2], "out"), shaped(&[2], "Tensor")];
    let events = EventList::new(events, Recording::default());
    let counts = |input_shapes, overload_names| {
        let averages = events.key_averages(Grouping { input_shapes, overload_names });
        averages.iter().map(|group| group.count).collect::<Vec<_>>()
    };
    assert_eq!(counts(false, false), [4]);
    assert_eq!(counts(true, false), [3, 1]);
    assert_eq!(counts(false, true), [3, 1]);
    assert_eq!(counts(true, true), [2, 1, 1]);
}

#[test]
fn the_sums_of_a_real_model_agree_with_each_other() {
    let _alone = alone();
    let model = Model::new();
    let profile = profile_of(full(), || (0..3).for_each(|_| model.step()));
    let events = profile.events().unwrap();
    let averages = profile.key_averages(false).unwrap();
    assert_eq!(averages.iter().map(|group| group.count).sum::<u64>(), events.len() as u64);

    // The self times add up to the times of the top-level events.
    let top: i64 =
        events.iter().filter(|event| event.cpu_parent.is_none()).map(|event| event.cpu_time_total_ns()).sum();
    assert_eq!(averages.self_cpu_time_total_ns(), top);
    let top: i64 = events.iter().filter(|event| event.cpu_parent.is_none()).map(|event| event.cpu_memory_usage).sum();
    assert_eq!(averages.iter().map(|group| group.self_cpu_memory_usage).sum::<i64>(), top);

    // 2 m n k per product: 8x16x32 and 8x32x4 in the forward pass, three times.
    let addmm = averages.get("aten::addmm").unwrap();
    assert_eq!((addmm.count, addmm.flops), (6, 3 * 2 * (8 * 16 * 32 + 8 * 32 * 4)));
    let by_shape = profile.key_averages(true).unwrap();
    let shapes: Vec<_> = by_shape.iter().filter(|group| &*group.key == "aten::addmm").collect();
    assert_eq!(shapes.len(), 2);
    assert_eq!(shapes[0].input_shapes.as_ref().unwrap()[..3], [vec![32], vec![8, 16], vec![16, 32]]);
    let first = events.iter().find(|event| &*event.name == "aten::addmm").unwrap();
    assert_eq!(
        first.input_types[..4].iter().map(|kind| &**kind).collect::<Vec<_>>(),
        ["float", "float", "float", "Scalar"]
    );
    // The sequence number links the forward and the backward operator.
    let backward = events.iter().find(|event| &*event.name == "AddmmBackward0").unwrap();
    assert!(events.iter().any(|event| &*event.name == "aten::addmm" && event.sequence_nr == backward.sequence_nr));
}

#[test]
fn nothing_recorded_is_empty() {
    let _alone = alone();
    let profile = profile_of(full(), || {});
    assert!(profile.key_averages(true).unwrap().is_empty());
    assert_eq!(profile.table(&Default::default()).unwrap(), "");
    assert_eq!(profile.total_average().unwrap().count, 0);
    assert!(profile.memory_timeline().unwrap().is_empty());
}
