//! Variables of the device, which a program registers by the address of their twin on the host.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use super::code;
use super::memory::{cudaMemcpy, cudaMemcpyAsync};
use crate::error::CudaError;
use crate::poison::poison;
use crate::world::{CURRENT, world};

/// A variable: its size, and its block on each device that has asked for it.
#[derive(Default)]
struct Variable {
    bytes: usize,
    blocks: HashMap<usize, usize>,
}

/// Asked for with the world's lock held, never the other way round.
static VARIABLES: LazyLock<Mutex<HashMap<usize, Variable>>> = LazyLock::new(Mutex::default);

#[unsafe(no_mangle)]
pub extern "C" fn __cudaRegisterVar(
    _handle: *const c_void,
    host: usize,
    _device_address: usize,
    _device_name: *const c_char,
    _extern: i32,
    bytes: usize,
    _constant: i32,
    _global: i32,
) {
    let variable = Variable { bytes, blocks: HashMap::new() };
    VARIABLES.lock().unwrap_or_else(PoisonError::into_inner).insert(host, variable);
}

/// The address of a variable on the thread's device, and its size. What it is initialised with is in device code, which
/// nobody reads here: it begins as zeros.
fn variable(symbol: usize) -> Result<(usize, usize), CudaError> {
    let (mut world, device) = (world(), CURRENT.get());
    world.use_device(device)?;
    let mut variables = VARIABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let own = variables.get_mut(&symbol).ok_or(CudaError::INVALID_SYMBOL)?;
    if let Some(block) = own.blocks.get(&device) {
        return Ok((*block, own.bytes));
    }
    let block = world.allocate(device, own.bytes).ok_or(CudaError::MEMORY_ALLOCATION)?;
    let at = world.on_host(block);
    poison().clear(at, own.bytes);
    // SAFETY: a new block of this size, which nothing uses yet.
    unsafe { (at as *mut u8).write_bytes(0, own.bytes) };
    own.blocks.insert(device, block);
    Ok((block, own.bytes))
}

/// # Safety
/// `address` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetSymbolAddress(address: *mut usize, symbol: usize) -> i32 {
    if address.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    // SAFETY: as the caller says, and it is not null.
    code(variable(symbol).map(|(block, _)| unsafe { *address = block }))
}

/// # Safety
/// `bytes` has to be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cudaGetSymbolSize(bytes: *mut usize, symbol: usize) -> i32 {
    if bytes.is_null() {
        return code(Err(CudaError::INVALID_VALUE));
    }
    // SAFETY: as the caller says, and it is not null.
    code(variable(symbol).map(|(_, own)| unsafe { *bytes = own }))
}

/// Where bytes of a variable are, if it has so many.
fn part(symbol: usize, count: usize, offset: usize) -> Result<usize, CudaError> {
    let (block, bytes) = variable(symbol)?;
    let fits = offset.checked_add(count).is_some_and(|end| end <= bytes);
    if fits { Ok(block + offset) } else { Err(CudaError::INVALID_VALUE) }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyToSymbol(symbol: usize, from: usize, count: usize, offset: usize, kind: i32) -> i32 {
    match part(symbol, count, offset) {
        Ok(to) => cudaMemcpy(to, from, count, kind),
        Err(error) => code(Err(error)),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyFromSymbol(to: usize, symbol: usize, count: usize, offset: usize, kind: i32) -> i32 {
    match part(symbol, count, offset) {
        Ok(from) => cudaMemcpy(to, from, count, kind),
        Err(error) => code(Err(error)),
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn cudaMemcpyToSymbolAsync(
    symbol: usize,
    from: usize,
    count: usize,
    offset: usize,
    kind: i32,
    stream: usize,
) -> i32 {
    match part(symbol, count, offset) {
        Ok(to) => cudaMemcpyAsync(to, from, count, kind, stream),
        Err(error) => code(Err(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_one_address_and_keeps_what_is_copied_to_it() {
        let host = 0x5000;
        __cudaRegisterVar(std::ptr::null(), host, 0, std::ptr::null(), 0, 8, 0, 0);
        let (mut one, mut again, mut bytes) = (0, 0, 0);
        // SAFETY: all are valid for writes.
        unsafe {
            assert_eq!((cudaGetSymbolAddress(&raw mut one, host), cudaGetSymbolAddress(&raw mut again, host)), (0, 0));
            assert_eq!((cudaGetSymbolSize(&raw mut bytes, host), bytes), (0, 8));
            assert_eq!(cudaGetSymbolAddress(&raw mut one, 0x6000), CudaError::INVALID_SYMBOL.0);
        }
        assert_eq!(one, again);
        let (from, to) = ([1_u8, 2, 3, 4], [9_u8; 8]);
        assert_eq!(cudaMemcpyToSymbol(host, from.as_ptr() as usize, 4, 2, 1), 0);
        assert_eq!(cudaMemcpyFromSymbol(to.as_ptr() as usize, host, 8, 0, 2), 0);
        assert_eq!(std::hint::black_box(to), [0, 0, 1, 2, 3, 4, 0, 0]);
        assert_eq!(cudaMemcpyToSymbol(host, from.as_ptr() as usize, 4, 5, 1), CudaError::INVALID_VALUE.0);
    }
}
