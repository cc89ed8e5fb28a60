//! NCCL's functions for communicators. Those for collectives are in [`super::nccl_calls`].

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::Arc;

use crate::nccl::call::Place;
use crate::nccl::code::{self, Code, Failure, result};
use crate::nccl::communicator::{self, Communicator, Step};
use crate::nccl::members::{self, Exchange, NO_COLOR};
use crate::nccl::{ID_BYTES, MAX_RANKS, group, new_id, path_of};
use crate::world::{CURRENT, lock, world};

/// `NCCL_VERSION_CODE` of the header that libtorch was built with.
const VERSION: i32 = 22_809;
/// What `NCCL_CONFIG_INITIALIZER` begins with, and what it leaves undefined.
const MAGIC: u32 = 0xcafe_beef;
const UNDEFINED: i32 = i32::MIN;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; ID_BYTES]);

/// `ncclConfig_t`, as far as it matters here.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

#[cfg(test)]
impl Config {
    pub fn of(blocking: i32) -> Self {
        Self { size: size_of::<Self>(), magic: MAGIC, version: VERSION as u32, blocking }
    }
}

pub fn invalid(text: &str) -> Failure {
    Failure::new(Code::INVALID_ARGUMENT, text)
}

/// Where a result goes.
///
/// # Safety
/// `place` has to be null or valid for writes.
pub unsafe fn place<'a, T>(place: *mut T) -> Result<&'a mut T, Failure> {
    // SAFETY: as the caller says.
    unsafe { place.as_mut() }.ok_or_else(|| invalid("an argument is NULL"))
}

/// Whether calls block. `usual`: what an undefined one means.
///
/// # Safety
/// `config` has to be null or valid for reads.
unsafe fn blocks(config: *const Config, usual: bool) -> Result<bool, Failure> {
    // SAFETY: as the caller says.
    let Some(config) = (unsafe { config.as_ref() }) else { return Ok(usual) };
    if config.magic != MAGIC || config.size < size_of::<Config>() {
        return Err(invalid("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
    }
    match config.blocking {
        UNDEFINED => Ok(usual),
        0 | 1 => Ok(config.blocking == 1),
        _ => Err(invalid("ncclConfig_t: blocking is neither 0 nor 1")),
    }
}

fn number(number: i32) -> Result<usize, Failure> {
    usize::try_from(number).map_err(|_| invalid("a number below 0"))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(error: i32) -> *const c_char {
    Code(error).words().as_ptr().cast()
}

/// The thread's last failure, whichever communicator is named.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_communicator: usize) -> *const c_char {
    code::last()
}

/// # Safety
/// `version` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    result(unsafe { place(version) }.map(|version| *version = VERSION).map(|()| Code::SUCCESS))
}

/// # Safety
/// `id` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> i32 {
    // SAFETY: as the caller says.
    result(unsafe { place(id) }.map(|id| *id = UniqueId(new_id())).map(|()| Code::SUCCESS))
}

/// Gives a communicator to the caller, and waits for its ranks unless a group is open or it does not block.
fn begin(own: &mut usize, new: Arc<Communicator>) -> Result<Code, Failure> {
    let handle = communicator::add(&new);
    *own = handle;
    let begun = group::within(|| {
        group::begin(new);
        Ok(())
    });
    begun.inspect_err(|_| {
        communicator::remove(handle);
        *own = 0;
    })
}

/// A communicator on a device, by its file.
fn sit(device: usize, path: PathBuf, place: Place, blocks: bool) -> Result<Arc<Communicator>, Failure> {
    let used = world().use_device(device);
    used.map_err(|error| Failure::new(Code::UNHANDLED_CUDA, error.words().1))?;
    let new = Communicator::new(device, blocks, Step::Gathering);
    new.sit(path, place)?;
    Ok(Arc::new(new))
}

fn init(
    own: &mut usize,
    (rank, ranks): (i32, i32),
    id: &UniqueId,
    blocks: bool,
    device: usize,
) -> Result<Code, Failure> {
    let place = Place { rank: number(rank)?, ranks: number(ranks)? };
    if place.rank >= place.ranks || place.ranks > MAX_RANKS {
        return Err(invalid(&format!("Invalid rank requested : {rank}/{ranks}")));
    }
    let path = path_of(&id.0).ok_or_else(|| invalid("not an id of ncclGetUniqueId"))?;
    begin(own, sit(device, path, place, blocks)?)
}

/// # Safety
/// `own` has to be null or valid for writes, `config` null or valid for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    own: *mut usize,
    ranks: i32,
    id: UniqueId,
    rank: i32,
    config: *const Config,
) -> i32 {
    // SAFETY: as the caller says.
    let arguments = unsafe { place(own).and_then(|own| Ok((own, blocks(config, true)?))) };
    result(arguments.and_then(|(own, blocks)| init(own, (rank, ranks), &id, blocks, CURRENT.get())))
}

/// # Safety
/// `own` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(own: *mut usize, ranks: i32, id: UniqueId, rank: i32) -> i32 {
    // SAFETY: as the caller says.
    unsafe { ncclCommInitRankConfig(own, ranks, id, rank, std::ptr::null()) }
}

/// The first id is enough.
///
/// # Safety
/// As `ncclCommInitRankConfig`; `ids` has to be null or valid for reads of as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    own: *mut usize,
    ranks: i32,
    rank: i32,
    id_count: i32,
    ids: *const UniqueId,
    config: *const Config,
) -> i32 {
    if ids.is_null() || id_count < 1 || id_count > ranks {
        return result(Err(invalid("no ids, or more than ranks")));
    }
    // SAFETY: as the caller says.
    unsafe { ncclCommInitRankConfig(own, ranks, *ids, rank, config) }
}

/// # Safety
/// `all` has to be null or valid for writes of as many as there are devices, `devices` null or valid for so many reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(all: *mut usize, count: i32, devices: *const i32) -> i32 {
    if all.is_null() || count < 1 {
        return result(Err(invalid("no place for communicators, or none of them")));
    }
    let id = UniqueId(new_id());
    result(group::within(|| {
        for rank in 0..count {
            // SAFETY: as the caller says.
            let (own, device) = unsafe {
                let device = if devices.is_null() { rank } else { *devices.add(rank as usize) };
                (&mut *all.add(rank as usize), device)
            };
            init(own, (rank, count), &id, true, number(device)?)?;
        }
        Ok(())
    }))
}

/// # Safety
/// `new` has to be null or valid for writes, `config` null or valid for reads.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    own: usize,
    color: i32,
    key: i32,
    new: *mut usize,
    config: *const Config,
) -> i32 {
    result((|| {
        let parent = communicator::of(own)?;
        // SAFETY: as the caller says.
        let (new, blocks) = unsafe { (place(new)?, blocks(config, parent.blocks)?) };
        *new = 0;
        if color < NO_COLOR {
            return Err(invalid("a color below 0"));
        }
        let exchange = Exchange::begin(&parent, color, key)?;
        if color == NO_COLOR {
            return Ok(Code::SUCCESS);
        }
        begin(new, Arc::new(Communicator::new(parent.device, blocks, Step::Exchange(exchange))))
    })())
}

/// # Safety
/// As `ncclCommSplit`; `excluded` has to be null or valid for reads of as many.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommShrink(
    own: usize,
    excluded: *const i32,
    count: i32,
    new: *mut usize,
    config: *const Config,
    flags: i32,
) -> i32 {
    const ABORT: i32 = 1;
    result((|| {
        let parent = communicator::of(own)?;
        // SAFETY: as the caller says.
        let (new, blocks) = unsafe { (place(new)?, blocks(config, parent.blocks)?) };
        *new = 0;
        if excluded.is_null() {
            return Err(invalid("excludeRanksList is NULL"));
        }
        // SAFETY: as the caller says.
        let excluded = unsafe { std::slice::from_raw_parts(excluded, number(count)?) };
        let excluded = excluded.iter().map(|rank| number(*rank)).collect::<Result<Vec<_>, _>>()?;
        if flags & ABORT != 0 {
            abort(&parent);
        } else {
            parent.ready()?;
        }
        let (path, place) = members::without(&parent, &excluded)?;
        begin(new, sit(parent.device, path, place, blocks)?)
    })())
}

/// Ends a communicator's work, also that which waits for other ranks.
fn abort(own: &Communicator) {
    own.abort();
    lock().progress.serve();
}

fn finalize(own: &Communicator) -> Result<Code, Failure> {
    own.ready()?;
    if std::mem::replace(&mut own.counters().is_finalized, true) {
        return Err(invalid("the communicator was finalized"));
    }
    own.flush();
    Ok(if own.blocks { own.wait() } else { own.poll() })
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommFinalize(own: usize) -> i32 {
    if own == 0 {
        return Code::SUCCESS.0;
    }
    result(communicator::of(own).and_then(|own| finalize(&own)))
}

/// Waits for what was issued, unless it was finalized. One that has failed can only be aborted, as with NCCL.
#[unsafe(no_mangle)]
pub extern "C" fn ncclCommDestroy(own: usize) -> i32 {
    if own == 0 {
        return Code::SUCCESS.0;
    }
    result(communicator::of(own).and_then(|communicator| {
        communicator.ready()?;
        let is_finalized = communicator.counters().is_finalized;
        if !is_finalized {
            finalize(&communicator)?;
            communicator.wait();
        }
        communicator::remove(own);
        Ok(Code::SUCCESS)
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclCommAbort(own: usize) -> i32 {
    if own == 0 {
        return Code::SUCCESS.0;
    }
    result(communicator::of(own).map(|communicator| {
        abort(&communicator);
        communicator::remove(own);
        Code::SUCCESS
    }))
}

/// # Safety
/// `error` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(own: usize, error: *mut i32) -> i32 {
    // SAFETY: as the caller says.
    let found = communicator::of(own).and_then(|own| Ok((own, unsafe { place(error) }?)));
    result(found.map(|(own, error)| {
        *error = own.poll().0;
        Code::SUCCESS
    }))
}

macro_rules! questions {
    ($($name:ident: |$own:ident| $answer:expr;)+) => {$(
        /// # Safety
        /// `answer` has to be null or valid for writes.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(own: usize, answer: *mut i32) -> i32 {
            // SAFETY: as the caller says.
            let found = communicator::of(own).and_then(|own| Ok((own, unsafe { place(answer) }?)));
            result(found.and_then(|($own, answer)| {
                *answer = $answer;
                Ok(Code::SUCCESS)
            }))
        }
    )+};
}

questions! {
    ncclCommCount: |own| own.ready()?.place.ranks as i32;
    ncclCommUserRank: |own| own.ready()?.place.rank as i32;
    ncclCommCuDevice: |own| own.device as i32;
}
