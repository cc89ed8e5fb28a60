//! Tests of groups of calls without streams: each step of each rank is the test's.

use std::sync::Arc;

use super::call::{Call, Kind, Place};
use super::code::{Code, Failure};
use super::communicator::{Communicator, Step};
use super::file::{new_id, path_of};
use super::reduce::{DataType, Reduction};
use super::round::Round;
use crate::progress::Meeting;

fn ranks(count: usize) -> Vec<Arc<Communicator>> {
    let path = path_of(&new_id()).unwrap();
    let sit = |rank| {
        let own = Communicator::new(rank, true, Step::Gathering);
        own.sit(path.clone(), Place { rank, ranks: count }).unwrap();
        Arc::new(own)
    };
    let all: Vec<_> = (0..count).map(sit).collect();
    all.iter().for_each(|own| assert_eq!(own.wait(), Code::SUCCESS));
    all
}

fn sum(own: &Arc<Communicator>, number: &mut i32) -> Round {
    let at = std::ptr::from_mut(number) as usize;
    let (data, reduction) = (DataType::Int32, Reduction::Sum);
    let call = Call { kind: Kind::AllReduce, send: at, receive: at, count: 1, data, reduction, peer: 0 };
    Round::new(own, vec![call]).unwrap()
}

#[test]
fn what_all_have_come_to_is_done_although_another_rank_broke_the_communicator_then() {
    let (all, mut numbers) = (ranks(2), [1, 2, 4]);
    let [first, second, later] = &mut numbers;
    let (mut one, mut other, mut next) = (sum(&all[0], first), sum(&all[1], second), sum(&all[0], later));
    assert!(!one.advance() && other.advance());
    all[1].break_with(&Failure::new(Code::REMOTE, "a rank has ended"));
    assert_eq!(all[0].poll(), Code::SUCCESS, "not before what is there is done");
    assert!(one.advance());
    assert_eq!(all[0].poll(), Code::SUCCESS);
    assert!(next.advance());
    assert_eq!((all[0].poll(), all[1].poll(), numbers), (Code::REMOTE, Code::REMOTE, [3, 3, 4]));
}

#[test]
fn groups_of_a_communicator_follow_each_other_and_the_first_is_wanted_for_the_second() {
    let (all, mut numbers) = (ranks(2), [1, 2, 10, 20]);
    let [first, second, third, fourth] = &mut numbers;
    let (mut one, mut two) = (sum(&all[0], first), sum(&all[0], third));
    let (mut other_one, mut other_two) = (sum(&all[1], second), sum(&all[1], fourth));
    assert!(!one.is_wanted() && !two.advance());
    assert!(one.is_wanted() && !other_one.is_wanted(), "nothing of it was told to the other rank");
    assert!(!one.advance() && other_one.is_wanted() && !other_two.is_wanted());
    assert!(other_one.advance() && !other_two.advance() && one.advance() && two.advance() && other_two.advance());
    assert_eq!(numbers, [3, 3, 30, 30]);
}
