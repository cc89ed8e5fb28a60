//! Tests of lanes: the ranks are views of one file.

use std::path::PathBuf;

use super::code::{Code, Failure};
use super::file::{new_id, path_of};
use super::lanes::{Lane, Lanes};
use super::liveness::Process;

fn path() -> PathBuf {
    path_of(&new_id()).unwrap()
}

fn ranks(count: usize) -> Vec<Lanes> {
    let path = path();
    let all = (0..count).map(|rank| Lanes::attach(&path, (rank, count), rank as u64).unwrap()).collect();
    std::fs::remove_file(&path).unwrap();
    all
}

#[test]
fn records_are_read_in_order_by_each_reader_on_its_own() {
    let all = ranks(3);
    let lane = Lane::Collectives(0);
    assert_eq!(all[1].next(lane).unwrap(), None);
    all[0].post(lane, [1, 2, 3], b"first").unwrap();
    all[0].post(lane, [4, 5, 6], b"").unwrap();
    assert_eq!(all[0].records(lane), 2);
    for reader in &all {
        let record = reader.next(lane).unwrap().unwrap();
        assert_eq!((record.words, record.bytes), ([1, 2, 3], 5));
        let mut bytes = [0; 3];
        reader.take(lane, 2, &mut bytes).unwrap();
        assert_eq!(&bytes, b"rst");
        reader.skip(lane, record);
        let record = reader.next(lane).unwrap().unwrap();
        assert_eq!((record.words, record.bytes), ([4, 5, 6], 0));
        reader.skip(lane, record);
        assert_eq!(reader.next(lane).unwrap(), None);
    }
}

#[test]
fn a_lane_goes_around_its_end_and_refuses_what_does_not_fit() {
    let mut all = ranks(2);
    // Two pages: records of 3000 bytes come to lie over the end.
    all.iter_mut().for_each(|lanes| lanes.set_room(8192));
    let lane = Lane::Pair(0, 1);
    for number in 0..20u8 {
        let end = all[0].post(lane, [u64::from(number), 0, 0], &[number; 3000]).unwrap();
        assert!(!all[0].is_received(lane, end));
        let record = all[1].next(lane).unwrap().unwrap();
        let mut bytes = vec![0; 3000];
        all[1].take(lane, 0, &mut bytes).unwrap();
        assert_eq!((record.words[0], bytes), (u64::from(number), vec![number; 3000]));
        all[1].skip(lane, record);
        assert!(all[0].is_received(lane, end));
    }
    all[0].post(lane, [0; 3], &[0; 5000]).unwrap();
    assert_eq!(all[0].post(lane, [0; 3], &[0; 5000]).unwrap_err().code, Code::SYSTEM);
}

#[test]
fn only_the_first_reason_breaks_a_communicator_and_all_ranks_read_it() {
    let all = ranks(2);
    assert_eq!(all[1].broken(), None);
    let long = "x".repeat(1000);
    all[0].break_with(&Failure::new(Code::REMOTE, long.clone()));
    all[1].break_with(&Failure::new(Code::SYSTEM, "later"));
    assert_eq!(all[1].broken(), Some(Failure::new(Code::REMOTE, &long[..512])));
}

#[test]
fn a_seat_is_taken_once_and_all_agree_on_how_many_there_are() {
    let path = path();
    let first = Lanes::attach(&path, (0, 2), 7).unwrap();
    let code = |place| Lanes::attach(&path, place, 0).err().map(|failure| failure.code);
    assert_eq!(code((0, 2)), Some(Code::INVALID_USAGE));
    assert_eq!(code((1, 3)), Some(Code::INVALID_ARGUMENT));
    assert_eq!(code((0, 1)), Some(Code::INVALID_ARGUMENT));
    assert_eq!((first.head().device(0), first.head().device(1)), (Some(7), None));
    assert_eq!((first.head().is_alive(0), first.head().is_alive(1)), (Some(true), None));
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn files_whose_processes_are_gone_are_removed_by_the_next_id() {
    let own = path();
    let folder = own.parent().unwrap();
    // No process has this number: the largest is below.
    let gone = Process { id: 0x7fff_ffff, start: 1 };
    let [empty, left] = [0, 1]
        .map(|last| (last, std::process::id()))
        .map(|(last, own)| folder.join(format!("overdrive-nccl-{}-{}-{own}.{last}", gone.id, gone.start)));
    std::fs::write(&empty, "").unwrap();
    let rank = Lanes::attach(&left, (0, 2), 0).unwrap();
    Lanes::attach(&own, (0, 2), 0).unwrap();
    new_id();
    assert_eq!([&empty, &left, &own].map(|path| path.exists()), [false, true, true], "a rank of `left` is alive");
    drop(rank);
    [left, own].iter().for_each(|path| std::fs::remove_file(path).unwrap());
    assert_eq!(path_of(&[b'x'; 128]), None);
    assert_eq!(path_of(&[0; 128]), None);
}
