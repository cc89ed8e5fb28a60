//! Groups that several threads use, and groups with invalid arguments.

use std::sync::Arc;
use std::time::Duration;

use overdrive_ffi::TensorList;
use overdrive_ffi::c10d::{Backend, Collective, CollectiveKind, GroupOptions, ProcessGroup, ReduceOp, Store, Work};
use tch::{Device, Kind, Tensor};

use super::{FLOAT, ends};

fn member(store: &Store, name: &str, rank: usize, size: usize, verify: bool) -> ProcessGroup {
    let global_ranks: Vec<usize> = (0..size).collect();
    let options = GroupOptions {
        backend: Backend::Gloo,
        rank,
        global_ranks: &global_ranks,
        name,
        verify,
        cuda_device: None,
        one_host: true,
        timeout: Duration::from_secs(600),
        high_priority: false,
        split: None,
    };
    ProcessGroup::new(store, &options).unwrap()
}

pub(super) fn alone(name: &str) -> ProcessGroup {
    member(&Store::hash().unwrap(), name, 0, 1, false)
}

/// Two ranks in one process, each with its own threads.
fn pair(name: &str, verify: bool) -> [ProcessGroup; 2] {
    let store = Store::hash().unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| member(&store, name, 0, 2, verify));
        let second = member(&store, name, 1, 2, verify);
        [first.join().unwrap(), second]
    })
}

fn start(
    group: &ProcessGroup,
    kind: CollectiveKind,
    inputs: &[Tensor],
    outputs: &[Tensor],
    splits: Option<(&[i64], &[i64])>,
    tag: i32,
) -> Result<Work, overdrive_ffi::Error> {
    let (inputs, outputs) = (TensorList::new(inputs).unwrap(), TensorList::new(outputs).unwrap());
    let wanted = Collective { kind, inputs: Some(&inputs), outputs: Some(&outputs), splits, tag, timeout: None };
    group.start(&wanted)
}

#[test]
fn threads_may_use_one_group_at_once() {
    ends(|| {
        const ROUNDS: usize = 300;
        let groups = pair("threads", false).map(Arc::new);
        // All collectives are the same, so it does not matter which of them meet.
        let threads: Vec<_> = groups
            .into_iter()
            .flat_map(|group| {
                let other = group.clone();
                let backward = std::thread::spawn(move || {
                    for _ in 0..ROUNDS {
                        let x = Tensor::ones([1], FLOAT).set_requires_grad(true);
                        group.sum_with_grad(&x).unwrap().sum(Kind::Float).f_backward().unwrap();
                        assert_eq!(x.grad().double_value(&[0]), 2.0);
                    }
                });
                let reduce = std::thread::spawn(move || {
                    for _ in 0..ROUNDS {
                        let x = Tensor::ones([1], FLOAT);
                        let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
                        start(&other, kind, &[], &[x.shallow_clone()], None, 0).unwrap().wait(None).unwrap();
                        assert_eq!(x.double_value(&[0]), 2.0);
                    }
                });
                [backward, reduce]
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// A group that verifies waits for the other ranks before it starts a collective: it must not hold a lock that they
/// need.
#[test]
fn ranks_that_verify_may_be_threads_of_one_process() {
    ends(|| {
        let two_groups = [pair("one verifies", true), pair("another verifies", true)];
        std::thread::scope(|scope| {
            for group in two_groups.iter().flatten() {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let x = Tensor::ones([1], FLOAT);
                        let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
                        start(group, kind, &[], &[x.shallow_clone()], None, 0).unwrap().wait(None).unwrap();
                        assert_eq!(x.double_value(&[0]), 2.0);
                    }
                });
            }
        });
    });
}

/// libtorch registers a group in a map of all groups, at the group's first collective.
#[test]
fn threads_may_use_separate_groups_at_once() {
    ends(|| {
        const THREADS: usize = 4;
        for round in 0..60 {
            let together = std::sync::Barrier::new(THREADS);
            let first_collectives = &|thread: usize| {
                let groups: Vec<_> = (0..8).map(|number| alone(&format!("own {round} {thread} {number}"))).collect();
                together.wait();
                for group in &groups {
                    let x = Tensor::ones([1], FLOAT);
                    let kind = CollectiveKind::AllReduce(ReduceOp::Sum);
                    start(group, kind, &[], &[x.shallow_clone()], None, 0).unwrap().wait(None).unwrap();
                    assert_eq!(x.double_value(&[0]), 1.0);
                }
            };
            std::thread::scope(|scope| {
                (0..THREADS).for_each(|thread| _ = scope.spawn(move || first_collectives(thread)));
            });
        }
    });
}

/// libtorch's barrier keeps its tensor in a static variable.
#[test]
fn threads_may_wait_in_barriers_of_separate_groups_at_once() {
    ends(|| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || {
                    let group = alone(&format!("barrier {thread}"));
                    let begin = |_| start(&group, CollectiveKind::Barrier, &[], &[], None, 1).unwrap();
                    for _ in 0..150 {
                        let barriers: Vec<Work> = (0..500).map(begin).collect();
                        barriers.iter().for_each(|barrier| barrier.wait(None).unwrap());
                    }
                });
            }
        });
    });
}

#[test]
fn invalid_numbers_that_collectives_do_not_check_are_refused() {
    use CollectiveKind as K;
    let group = alone("numbers");
    let bytes = || Tensor::zeros([4], (Kind::Uint8, Device::Cpu));
    let (input, output) = (bytes(), bytes());
    for splits in [(&[-4][..], &[4][..]), (&[4], &[-4]), (&[5], &[4]), (&[4], &[5]), (&[4, 0], &[4, 0])] {
        let refused =
            start(&group, K::AllToAllSingle, &[input.shallow_clone()], &[output.shallow_clone()], Some(splits), 0);
        assert!(refused.is_err(), "{splits:?}");
    }
    for kind in [K::Send(1), K::Send(7), K::Recv(1), K::Recv(usize::MAX), K::Broadcast(1), K::Reduce(ReduceOp::Sum, 3)]
    {
        let refused = start(&group, kind, &[input.shallow_clone()], &[output.shallow_clone()], None, 0);
        assert!(refused.is_err(), "{kind:?}");
    }
    assert!(start(&group, K::Send(0), &[input.shallow_clone()], &[], None, -1).is_err());
    // Tensors with fewer numbers in memory than elements, or with gaps.
    for spread in [Tensor::ones([1], FLOAT).expand([1000], false), Tensor::ones([8], FLOAT).slice(0, 0, 8, 2)] {
        assert!(start(&group, K::AllReduce(ReduceOp::Sum), &[], &[spread], None, 0).is_err());
    }
    let undefined = || Tensor::new();
    for kind in
        [K::AllReduce(ReduceOp::Sum), K::Broadcast(0), K::AllGatherInto, K::AllGather, K::Gather(0), K::Scatter(0)]
    {
        assert!(start(&group, kind, &[undefined()], &[undefined()], None, 0).is_err(), "{kind:?}");
        assert!(start(&group, kind, &[], &[], None, 0).is_err(), "{kind:?}");
        let short = Tensor::zeros([1], (Kind::Double, Device::Cpu));
        let _unequal = start(&group, kind, &[input.shallow_clone()], &[short], None, 0);
    }
}

#[test]
fn invalid_tensors_are_refused() {
    let group = alone("tensors");
    let list = |tensors: &[Tensor]| TensorList::new(tensors).unwrap();
    let undefined = list(&[Tensor::new()]);
    assert!(group.sum_with_grad(&Tensor::new()).is_err());
    assert!(group.broadcast_coalesced(&undefined, 100, 0).is_err());
    assert!(group.broadcast_coalesced(&list(&[Tensor::ones([3], FLOAT)]), 100, 7).is_err());
    assert!(group.verify_params(&undefined).is_err());
    for bytes in [0, usize::MAX] {
        let _ends = group.broadcast_coalesced(&list(&[Tensor::ones([3], FLOAT)]), bytes, 0);
    }
    let _ends = (group.broadcast_coalesced(&list(&[]), 100, 0), group.verify_params(&list(&[])));
}

#[test]
fn a_dropped_send_or_receive_keeps_its_memory() {
    ends(|| {
        let [first, second] = pair("dropped", false);
        let numbers = |value: f64| Tensor::full([100_000], value, FLOAT);
        for round in 0..20 {
            let received = numbers(0.0);
            drop(start(&second, CollectiveKind::Recv(0), &[], &[numbers(0.0)], None, 1));
            drop(start(&first, CollectiveKind::Send(1), &[numbers(1.0)], &[], None, 1));
            let wanted = start(&second, CollectiveKind::Recv(0), &[], &[received.shallow_clone()], None, 2).unwrap();
            let sent = start(&first, CollectiveKind::Send(1), &[numbers(f64::from(round))], &[], None, 2).unwrap();
            sent.wait(None).unwrap();
            wanted.wait(None).unwrap();
            assert_eq!(received.double_value(&[99_999]), f64::from(round));
        }
    });
}

/// The store's destructor writes to the file again.
#[test]
fn a_store_whose_folder_is_gone_is_dropped_without_a_crash() {
    ends(|| {
        let folder = std::env::temp_dir().join(format!("overdrive-store-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let store = Store::file(&folder.join("meet"), 1, Duration::from_secs(1)).unwrap();
        let group = member(&store, "gone", 0, 1, false);
        std::fs::remove_dir_all(&folder).unwrap();
        drop(group);
        drop(store);
    });
}
