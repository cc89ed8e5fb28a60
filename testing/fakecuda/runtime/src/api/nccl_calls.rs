//! NCCL's functions for collectives, sends and receives, groups and operators.

use super::nccl::{invalid, place};
use crate::nccl::call::{Call, Kind};
use crate::nccl::code::{Code, result};
use crate::nccl::communicator;
use crate::nccl::group::{self, Asked};
use crate::nccl::reduce::{DataType, Reduction, Scalar};

/// Where a call's numbers are, and how many of which type.
#[derive(Clone, Copy)]
struct Buffers {
    send: usize,
    receive: usize,
    count: usize,
    data: i32,
}

/// Adds a call to the thread's group, or makes one of it. `root`: the root or the other rank.
fn call(kind: Kind, buffers: Buffers, (reduction, root): (i32, i32), communicator: usize, stream: usize) -> i32 {
    let Buffers { send, receive, count, data } = buffers;
    result(group::within(|| {
        let data = DataType::new(data).ok_or_else(|| invalid(&format!("{} : invalid type {data}", kind.name())))?;
        let peer = usize::try_from(root).map_err(|_| invalid(&format!("{} : invalid root {root}", kind.name())))?;
        let call = Call { kind, send, receive, count, data, reduction: Reduction::Sum, peer };
        group::add(Asked { call, reduction, communicator, stream })
    }))
}

macro_rules! with_reduction {
    ($($name:ident: $kind:ident;)+) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            send: usize,
            receive: usize,
            count: usize,
            data: i32,
            reduction: i32,
            communicator: usize,
            stream: usize,
        ) -> i32 {
            call(Kind::$kind, Buffers { send, receive, count, data }, (reduction, 0), communicator, stream)
        }
    )+};
}

with_reduction! {
    ncclAllReduce: AllReduce;
    ncclReduceScatter: ReduceScatter;
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclReduce(
    send: usize,
    receive: usize,
    count: usize,
    data: i32,
    reduction: i32,
    root: i32,
    communicator: usize,
    stream: usize,
) -> i32 {
    call(Kind::Reduce, Buffers { send, receive, count, data }, (reduction, root), communicator, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclBcast(
    buffer: usize,
    count: usize,
    data: i32,
    root: i32,
    communicator: usize,
    stream: usize,
) -> i32 {
    ncclBroadcast(buffer, buffer, count, data, root, communicator, stream)
}

macro_rules! with_root {
    ($($name:ident: $kind:ident;)+) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            send: usize,
            receive: usize,
            count: usize,
            data: i32,
            root: i32,
            communicator: usize,
            stream: usize,
        ) -> i32 {
            call(Kind::$kind, Buffers { send, receive, count, data }, (0, root), communicator, stream)
        }
    )+};
}

with_root! {
    ncclBroadcast: Broadcast;
    ncclGather: Gather;
    ncclScatter: Scatter;
}

macro_rules! without_root {
    ($($name:ident: $kind:ident;)+) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $name(
            send: usize,
            receive: usize,
            count: usize,
            data: i32,
            communicator: usize,
            stream: usize,
        ) -> i32 {
            call(Kind::$kind, Buffers { send, receive, count, data }, (0, 0), communicator, stream)
        }
    )+};
}

without_root! {
    ncclAllGather: AllGather;
    ncclAlltoAll: AlltoAll;
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclSend(send: usize, count: usize, data: i32, peer: i32, communicator: usize, stream: usize) -> i32 {
    call(Kind::Send, Buffers { send, receive: 0, count, data }, (0, peer), communicator, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRecv(
    receive: usize,
    count: usize,
    data: i32,
    peer: i32,
    communicator: usize,
    stream: usize,
) -> i32 {
    call(Kind::Recv, Buffers { send: 0, receive, count, data }, (0, peer), communicator, stream)
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> i32 {
    group::start();
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> i32 {
    result(group::end())
}

/// # Safety
/// `own` has to be null or valid for writes. `scalar`: a number of the type, at the host until this returns, or where
/// the host or a device finds it until the last collective with it is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    own: *mut i32,
    scalar: usize,
    data: i32,
    residence: i32,
    communicator: usize,
) -> i32 {
    const DEVICE: i32 = 0;
    result((|| {
        // SAFETY: as the caller says.
        let own = unsafe { place(own) }?;
        let communicator = communicator::of(communicator)?;
        communicator.ready()?;
        let data = DataType::new(data).filter(|_| scalar != 0).ok_or_else(|| invalid("no such type, or no scalar"))?;
        let scalar = if residence == DEVICE {
            Scalar::At(crate::world::world().on_host(scalar))
        } else {
            let mut bytes = [0; 8];
            // SAFETY: as the caller says.
            unsafe { std::ptr::copy_nonoverlapping(scalar as *const u8, bytes.as_mut_ptr(), data.size()) };
            Scalar::Bytes(bytes)
        };
        let operators = &mut communicator.counters().operators;
        // Behind the built-in ones.
        let free = (5..i32::MAX).find(|number| !operators.contains_key(number));
        *own = free.ok_or_else(|| invalid("too many operators"))?;
        operators.insert(*own, (data, Reduction::PreMulSum(scalar)));
        Ok(Code::SUCCESS)
    })())
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclRedOpDestroy(own: i32, communicator: usize) -> i32 {
    result(communicator::of(communicator).and_then(|communicator| {
        let removed = communicator.counters().operators.remove(&own);
        removed
            .map(|_| Code::SUCCESS)
            .ok_or_else(|| invalid("ncclRedOpDestroy : operator unknown to this communicator"))
    }))
}
