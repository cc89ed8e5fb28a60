use std::sync::{Arc, Mutex};

use super::*;
use crate::api::nccl_tests::alone;
use crate::clock::Access;
use crate::faults::{Moment, change};
use crate::operation::{Kind, Operation};
use crate::waiting::Locked;

/// A world with two streams, and a list that its kernels append to.
struct Scene {
    world: Locked,
    main: u64,
    side: u64,
    ran: Arc<Mutex<Vec<&'static str>>>,
}

impl Scene {
    fn new() -> Self {
        let mut world = World::of_a_test();
        let [main, side] = [0; 2].map(|_| world.progress.add_stream(0, Order::NonBlocking));
        Self { world, main, side, ran: Arc::default() }
    }

    fn capturing() -> Self {
        let mut scene = Self::new();
        scene.world.begin_capture(scene.main, Mode::Global).unwrap();
        scene
    }

    fn kernel(&mut self, name: &'static str, stream: u64) -> Result<(), CudaError> {
        let ran = self.ran.clone();
        let accesses = vec![Access { bytes: 0..8, writes: true }];
        let work: crate::operation::Work = Arc::new(move || ran.lock().unwrap().push(name));
        self.world.issue(stream, Operation { accesses, work, ..Operation::kernel(name) })
    }

    fn end(&mut self) -> Result<usize, CudaError> {
        self.world.end_capture(self.main)
    }

    fn ran(&self) -> Vec<&'static str> {
        std::mem::take(&mut self.ran.lock().unwrap())
    }

    fn counted(&self, what: &str) -> u64 {
        self.world.counts.get(what).copied().unwrap_or(0)
    }

    fn launchable(&mut self, graph: usize) -> usize {
        let graph = self.world.graphs.graphs[&graph].clone();
        self.world.instantiate(graph)
    }
}

#[test]
fn captured_work_runs_at_each_launch_and_only_then() {
    let mut scene = Scene::capturing();
    scene.kernel("one", scene.main).unwrap();
    scene.kernel("two", scene.main).unwrap();
    let graph = scene.end().unwrap();
    scene.world.synchronize_all();
    assert_eq!(scene.ran(), [""; 0]);
    assert_eq!((scene.counted("launches"), scene.counted("captured nodes")), (0, 2));
    let executable = scene.launchable(graph);
    scene.kernel("before", scene.side).unwrap();
    scene.world.launch_graph(executable, scene.side).unwrap();
    scene.world.launch_graph(executable, scene.side).unwrap();
    assert_eq!(scene.ran(), [""; 0], "it waits in its stream");
    scene.world.synchronize(scene.side).unwrap();
    assert_eq!(scene.ran(), ["before", "one", "two", "one", "two"]);
    let counts = ["launches", "graph launches", "in graphs: launches", "in graphs: kernel one"];
    assert_eq!(counts.map(|what| scene.counted(what)), [1, 2, 4, 2]);
    assert_eq!(scene.world.launch_graph(3, scene.side), Err(CudaError::INVALID_VALUE));
}

#[test]
fn launches_of_one_graph_follow_each_other_in_any_streams_and_those_of_two_race() {
    let mut scene = Scene::capturing();
    scene.world.finds_races = true;
    scene.kernel("kernel", scene.main).unwrap();
    let graph = scene.end().unwrap();
    let [one, other] = [0; 2].map(|_| scene.launchable(graph));
    scene.world.launch_graph(one, scene.main).unwrap();
    scene.world.launch_graph(one, scene.side).unwrap();
    assert_eq!(scene.counted("races"), 0);
    scene.world.launch_graph(other, scene.main).unwrap();
    assert_eq!(scene.counted("races"), 1, "with the launch in the other stream: {:?}", scene.world.notes);
}

#[test]
fn branches_without_an_order_race_within_their_graph() {
    for joins in [false, true] {
        let mut scene = Scene::capturing();
        scene.world.finds_races = true;
        let event = scene.world.progress.add_event(false);
        scene.world.record_event(event, scene.main, false).unwrap();
        scene.world.wait_for_event(scene.side, event, false).unwrap();
        scene.kernel("side", scene.side).unwrap();
        scene.world.record_event(event, scene.side, false).unwrap();
        if joins {
            scene.world.wait_for_event(scene.main, event, false).unwrap();
        }
        scene.kernel("main", scene.main).unwrap();
        scene.world.wait_for_event(scene.main, event, false).unwrap();
        scene.end().unwrap();
        assert_eq!(scene.counted("races"), u64::from(!joins), "{:?}", scene.world.notes);
    }
}

#[test]
fn the_devices_clock_runs_branches_at_the_same_time() {
    let mut scene = Scene::capturing();
    scene.world.costs.kernel = 100;
    let event = scene.world.progress.add_event(false);
    scene.kernel("first", scene.main).unwrap();
    scene.world.record_event(event, scene.main, false).unwrap();
    scene.world.wait_for_event(scene.side, event, false).unwrap();
    scene.kernel("side", scene.side).unwrap();
    scene.kernel("side", scene.side).unwrap();
    scene.kernel("main", scene.main).unwrap();
    scene.world.record_event(event, scene.side, false).unwrap();
    scene.world.wait_for_event(scene.main, event, false).unwrap();
    let graph = scene.end().unwrap();
    let executable = scene.launchable(graph);
    let [begin, end] = [0; 2].map(|_| scene.world.progress.add_event(true));
    scene.world.record_event(begin, scene.main, false).unwrap();
    scene.world.launch_graph(executable, scene.main).unwrap();
    scene.world.record_event(end, scene.main, false).unwrap();
    assert_eq!(scene.world.progress.elapsed(begin, end), Err(CudaError::NOT_READY));
    scene.world.synchronize(scene.main).unwrap();
    assert_eq!(scene.world.progress.elapsed(begin, end), Ok(300));
}

#[test]
fn external_events_are_nodes() {
    let mut scene = Scene::capturing();
    let [outer, inner] = [0; 2].map(|_| scene.world.progress.add_event(false));
    scene.world.wait_for_event(scene.main, outer, true).unwrap();
    scene.kernel("kernel", scene.main).unwrap();
    scene.world.record_event(inner, scene.main, true).unwrap();
    let graph = scene.end().unwrap();
    assert_eq!(scene.counted("captured nodes"), 3);
    let executable = scene.launchable(graph);
    scene.kernel("outer", scene.side).unwrap();
    scene.world.record_event(outer, scene.side, false).unwrap();
    scene.world.launch_graph(executable, scene.main).unwrap();
    assert_eq!(scene.world.progress.has_happened(inner), Some(false));
    scene.world.synchronize(scene.main).unwrap();
    assert_eq!((scene.ran(), scene.world.progress.has_happened(inner)), (vec!["outer", "kernel"], Some(true)));
}

/// What a capture refuses: a call, its code, and whether the capture is invalid after it.
type Refusal = (&'static str, fn(&mut Scene) -> Result<(), CudaError>, CudaError);

const REFUSALS: [Refusal; 8] = [
    ("a wait for the stream", |it| it.world.use_stream("", it.main), CudaError::CAPTURE_UNSUPPORTED),
    ("a wait for the device", |it| it.world.use_device_as_a_whole("", 0), CudaError::CAPTURE_UNSUPPORTED),
    ("an allocation", |it| it.world.use_unsafe(""), CudaError::CAPTURE_UNSUPPORTED),
    ("a question about any event", |it| it.world.use_event("", 1), CudaError::CAPTURE_UNSUPPORTED),
    (
        "a wait for a captured event",
        |it| {
            let event = it.world.progress.add_event(false);
            it.world.record_event(event, it.main, false)?;
            it.world.use_event("", event)
        },
        CudaError::CAPTURED_EVENT,
    ),
    (
        "the time of a captured event",
        |it| {
            let event = it.world.progress.add_event(true);
            it.world.record_event(event, it.side, false)?;
            it.world.record_event(event, it.main, false)?;
            it.world.elapsed(event, event).map(drop)
        },
        CudaError::CAPTURED_EVENT,
    ),
    (
        "a wait for an event from outside",
        |it| {
            let event = it.world.progress.add_event(false);
            it.world.record_event(event, it.side, false)?;
            it.world.wait_for_event(it.main, event, false)
        },
        CudaError::CAPTURE_ISOLATION,
    ),
    (
        "the legacy stream after a captured event",
        |it| {
            let (event, legacy) = (it.world.progress.add_event(false), it.world.devices[0].legacy);
            it.world.record_event(event, it.main, false)?;
            it.world.wait_for_event(legacy, event, false)
        },
        CudaError::CAPTURE_IMPLICIT,
    ),
];

#[test]
fn what_is_refused_ends_the_capture_and_nothing_else() {
    for (what, call, error) in REFUSALS {
        let mut scene = Scene::capturing();
        assert_eq!(call(&mut scene), Err(error), "{what}");
        assert_eq!(scene.kernel("late", scene.main), Err(CudaError::CAPTURE_INVALIDATED), "{what}");
        assert_eq!(scene.end(), Err(CudaError::CAPTURE_INVALIDATED), "{what}");
        assert_eq!((scene.counted("refused by captures"), scene.world.notes.len()), (3, 3), "{what}");
        // Everything works again.
        scene.kernel("plain", scene.main).unwrap();
        scene.world.synchronize_all();
        assert_eq!(scene.ran(), ["plain"], "{what}");
        scene.world.begin_capture(scene.main, Mode::Global).unwrap();
        scene.kernel("captured", scene.main).unwrap();
        assert!(scene.end().is_ok(), "{what}");
    }
}

#[test]
fn the_legacy_stream_is_unusable_only_while_a_blocking_stream_is_captured() {
    let mut scene = Scene::capturing();
    let legacy = scene.world.devices[0].legacy;
    assert!(!scene.world.legacy_is_unusable(legacy));
    scene.kernel("legacy", legacy).unwrap();
    scene.end().unwrap();
    let blocking = scene.world.progress.add_stream(0, Order::Blocking);
    scene.world.begin_capture(blocking, Mode::Relaxed).unwrap();
    assert!(scene.world.legacy_is_unusable(legacy) && !scene.world.legacy_is_unusable(scene.side));
    scene.kernel("beside it", scene.side).unwrap();
    assert_eq!(scene.kernel("legacy", legacy), Err(CudaError::CAPTURE_IMPLICIT));
    assert_eq!(scene.world.end_capture(blocking), Err(CudaError::CAPTURE_INVALIDATED));
    scene.kernel("legacy", legacy).unwrap();
    assert_eq!(scene.world.begin_capture(legacy, Mode::Global), Err(CudaError::CAPTURE_UNSUPPORTED));
}

#[test]
fn numbers_are_captured_and_counted_nowhere() {
    let mut scene = Scene::capturing();
    let ran = scene.ran.clone();
    scene.world.push(scene.main, "numbers", &[], Arc::new(move || ran.lock().unwrap().push("numbers"))).unwrap();
    let graph = scene.end().unwrap();
    assert_eq!(scene.counted("captured nodes"), 0);
    let executable = scene.launchable(graph);
    scene.world.launch_graph(executable, scene.main).unwrap();
    scene.world.synchronize_all();
    assert_eq!(scene.ran(), ["numbers"]);
    assert_eq!(crate::operation::Costs { kernel: 5 }.of(Kind::Numbers), 0);
}

#[test]
fn planted_failures_of_captured_work_are_met_at_the_launch_of_its_graph() {
    alone("capturing::tests::planted_failures_of_captured_work_are_met_at_the_launch_of_its_graph", || {
        const CODE: CudaError = CudaError::INVALID_CONFIGURATION;
        let mut scene = Scene::capturing();
        for kernel in ["planted in a graph: one", "planted in a graph: two"] {
            scene.kernel(kernel, scene.main).unwrap();
        }
        let graph = scene.end().unwrap();
        let executable = scene.launchable(graph);
        change(|faults| faults.plan("planted in a graph: two", 1, CODE.0, Moment::Issued));
        let launched = scene.world.launch_graph(executable, scene.main);
        assert_eq!((launched, scene.counted("graph launches"), scene.counted("failed work")), (Err(CODE), 0, 1));
        scene.world.drain(scene.main).unwrap();
        assert_eq!(scene.ran(), [""; 0], "none of its nodes was launched");
        change(|faults| faults.plan("planted in a graph: two", 1, CODE.0, Moment::Run));
        assert_eq!(scene.world.launch_graph(executable, scene.main), Ok(()));
        scene.world.drain(scene.main).unwrap();
        assert_eq!(scene.ran(), ["planted in a graph: one"]);
        assert_eq!((scene.world.synchronize(scene.main), scene.world.synchronize(scene.main)), (Err(CODE), Ok(())));
    });
}
