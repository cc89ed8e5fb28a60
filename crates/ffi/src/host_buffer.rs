//! Bytes that are written in place and become a tensor without a copy.

use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, ScopedJoinHandle};
use std::{fmt, io, slice};

use tch::{Kind, Tensor};

use crate::error::{Error, check};
use crate::raw;

/// How much of a buffer [`HostBuffer::filled`] asks for at a time: it stays in a core's cache.
const CHUNK: usize = 1 << 20;

/// Host memory that is written as plain bytes and then becomes a tensor. It is cleared, unless it comes from a
/// [`BufferPool`](crate::BufferPool).
///
/// ```
/// use overdrive_ffi::HostBuffer;
/// use tch::Kind;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut buffer = HostBuffer::zeroed(6, false)?;
/// buffer.as_mut_slice()[4] = 7;
/// let tensor = buffer.into_tensor(Kind::Uint8, &[2, 3])?;
/// assert_eq!(tensor.int64_value(&[1, 1]), 7);
/// # Ok(())
/// # }
/// ```
pub struct HostBuffer {
    /// One dimension of uint8, whose memory nothing else reads or writes.
    tensor: Tensor,
    data: NonNull<u8>,
    bytes: usize,
}

// SAFETY: nothing else reads or writes its memory, and any thread may.
unsafe impl Send for HostBuffer {}
// SAFETY: a shared reference only reads its bytes.
unsafe impl Sync for HostBuffer {}

impl HostBuffer {
    /// Cleared memory of this many bytes, page-locked when `pinned`.
    ///
    /// # Errors
    /// `OutOfMemory`; `Cuda` or `Other` for pinned memory without a CUDA device.
    ///
    /// # Syncs
    /// Pinned memory that the caching allocator does not hold yet may wait for the driver.
    pub fn zeroed(bytes: usize, pinned: bool) -> Result<Self, Error> {
        let (tensor, data) = allocate(bytes, pinned)?;
        // SAFETY: the tensor has `bytes` bytes at `data`, and nothing else has access to them yet.
        unsafe { ptr::write_bytes(data.as_ptr(), 0, bytes) };
        Ok(Self { tensor, data, bytes })
    }

    /// Page-locked memory of this many bytes, with arbitrary old contents: libtorch keeps freed blocks and waits for their
    /// copies, and clearing a batch that is overwritten at once would cost as much as writing it.
    ///
    /// # Errors
    /// `OutOfMemory`; `Cuda` or `Other` without a CUDA device.
    ///
    /// # Syncs
    /// Memory that the caching allocator does not hold yet may wait for the driver.
    pub fn pinned(bytes: usize) -> Result<Self, Error> {
        let (tensor, data) = allocate(bytes, true)?;
        // The bytes are initialised: the driver locks pages that the system has cleared, and nobody unwrites them.
        Ok(Self { tensor, data, bytes })
    }

    /// Buffers of these sizes that several threads write, each an equal share of all bytes, from its first to its last.
    ///
    /// `fill` gets a place, the number of the buffer and an offset in it, and the memory of the next bytes there, at most a
    /// mebibyte, and returns what it has written: the first of them. `rustix::io::pread` returns such a slice. If it has
    /// written none, it is asked again. It also gets a state that is made for each part of a buffer; each buffer is
    /// returned with those of its parts, in order. Where no thread can be started, for example at a limit on processes,
    /// the calling thread writes the share.
    ///
    /// # Errors
    /// The first error of `fill`; `OutOfMemory`; `Other` when `fill` returns another slice.
    ///
    /// # Panics
    /// When `fill` does.
    pub fn filled<S, E>(
        sizes: &[usize],
        threads: usize,
        state: impl Fn() -> S + Sync,
        fill: impl for<'a> Fn(&mut S, Place, &'a mut [MaybeUninit<u8>]) -> Result<&'a mut [u8], E> + Sync,
    ) -> Result<Vec<(Self, Vec<S>)>, E>
    where
        S: Send,
        E: From<Error> + Send,
    {
        let allocated = sizes.iter().map(|&bytes| allocate(bytes, false)).collect::<Result<Vec<_>, _>>()?;
        let memory = allocated.iter().zip(sizes).map(|((_, data), &bytes)| {
            // SAFETY: the tensor has `bytes` bytes at `data`, and nothing else has access to them yet; uninitialised bytes
            // are valid as `MaybeUninit`.
            unsafe { slice::from_raw_parts_mut(data.as_ptr().cast::<MaybeUninit<u8>>(), bytes) }
        });
        // Each is locked once, by the thread that writes it.
        let shares: Vec<_> = shares(memory.collect(), threads.max(1)).into_iter().map(Mutex::new).collect();
        let write = &|number: usize| {
            let mut share = shares[number].lock().unwrap_or_else(PoisonError::into_inner);
            let part = |(place, memory): &mut Part<'_>| Ok((place.0, fill_part(state(), *place, memory, &fill)?));
            share.iter_mut().map(part).collect::<Result<Vec<_>, E>>()
        };
        let written: Result<Vec<_>, E> = match shares.len() {
            // Not worth a thread.
            count @ (0 | 1) => (0..count).map(write).collect(),
            count => thread::scope(|scope| {
                on_threads(count, write, |job| thread::Builder::new().spawn_scoped(scope, job)).into_iter().collect()
            }),
        };
        // Every byte of every buffer was written, or there is an error.
        let buffers = allocated.into_iter().zip(sizes).map(|((tensor, data), &bytes)| Self { tensor, data, bytes });
        let mut filled: Vec<_> = buffers.map(|buffer| (buffer, Vec::new())).collect();
        written?.into_iter().flatten().for_each(|(number, state)| filled[number].1.push(state));
        Ok(filled)
    }

    /// Memory that a pool owns.
    ///
    /// # Safety
    /// `data` points to the memory of `tensor`: `bytes` initialised bytes, which nothing else reads or writes as long
    /// as the buffer or a tensor made of it lives.
    pub(crate) unsafe fn recycled(tensor: Tensor, data: NonNull<u8>, bytes: usize) -> Self {
        Self { tensor, data, bytes }
    }

    /// How many bytes there are.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes, to be written.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: `data` points to `bytes` initialised bytes that live as long as `self.tensor`, and that nothing else
        // reads or writes; the borrow of `self` keeps the slice unique.
        unsafe { slice::from_raw_parts_mut(self.data.as_ptr(), self.bytes) }
    }

    /// The bytes, to be read.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: as in `as_mut_slice`; the borrow of `self` excludes writes.
        unsafe { slice::from_raw_parts(self.data.as_ptr(), self.bytes) }
    }

    /// Copies a tensor's values to the bytes from `at` on, row-major and in the machine's byte order.
    ///
    /// # Errors
    /// `Other` for an undefined tensor, one that does not fit, one that is not dense, and for an `at` that is not a
    /// multiple of the element's size; `Cuda`. The contents of the bytes are undefined then.
    ///
    /// # Syncs
    /// For a tensor on another device, waits until it is copied.
    pub fn copy_from(&mut self, at: usize, source: &Tensor) -> Result<(), Error> {
        if !source.defined() {
            return Err(Error::refused("an undefined tensor has no values to copy"));
        }
        let _no_grad = tch::no_grad_guard();
        let kind = source.kind();
        let bytes = source.numel() * kind.elt_size_in_bytes();
        let place = self.tensor.f_narrow(0, i64::try_from(at).unwrap_or(i64::MAX), bytes as i64)?;
        Ok(place.f_view_dtype(kind)?.f_view(source.size().as_slice())?.f_copy_(source)?)
    }

    /// The bytes as a tensor in the machine's byte order; `shape` may need fewer bytes than there are.
    ///
    /// # Errors
    /// [`tch::TchError`] when the shape needs more bytes than there are, or is negative, and for `Kind::Bool` when a byte
    /// is neither 0 nor 1.
    pub fn into_tensor(self, kind: Kind, shape: &[i64]) -> Result<Tensor, tch::TchError> {
        let wanted = shape.iter().try_fold(kind.elt_size_in_bytes() as i64, |product, &side| product.checked_mul(side));
        let wanted = wanted.unwrap_or(i64::MAX);
        let flat = self.tensor.f_narrow(0, 0, wanted)?;
        if kind == Kind::Bool && !are_bools(&self.as_slice()[..wanted as usize]) {
            return Err(tch::TchError::Convert("for Kind::Bool every byte should be 0 or 1".to_owned()));
        }
        // `f_data`, so that autograd does not see a view.
        flat.f_view_dtype(kind)?.f_view(shape)?.f_data()
    }
}

/// The number of a buffer, and an offset in it.
pub type Place = (usize, usize);

/// Memory that one thread writes, and where it is.
type Part<'a> = (Place, &'a mut [MaybeUninit<u8>]);

/// Divides memory into at most `count` shares of equally many bytes; a share is parts of one buffer or several.
fn shares(buffers: Vec<&mut [MaybeUninit<u8>]>, count: usize) -> Vec<Vec<Part<'_>>> {
    let bytes: usize = buffers.iter().map(|memory| memory.len()).sum();
    let share = bytes.div_ceil(count).next_multiple_of(CHUNK).max(CHUNK);
    let mut shares = vec![Vec::new()];
    let mut room = share;
    for (number, mut memory) in buffers.into_iter().enumerate() {
        let mut offset = 0;
        while !memory.is_empty() {
            let (now, rest) = memory.split_at_mut(room.min(memory.len()));
            let place = (number, offset);
            (offset, room, memory) = (offset + now.len(), room - now.len(), rest);
            let last = shares.len() - 1;
            shares[last].push((place, now));
            if room == 0 {
                shares.push(Vec::new());
                room = share;
            }
        }
    }
    shares.retain(|share| !share.is_empty());
    shares
}

/// A tensor of this many uninitialised bytes, and their place.
fn allocate(bytes: usize, pinned: bool) -> Result<(Tensor, NonNull<u8>), Error> {
    let (mut tensor, mut data) = (ptr::null_mut(), ptr::null_mut());
    let size = i64::try_from(bytes).unwrap_or(i64::MAX);
    // SAFETY: both out-parameters live through the call; on success `tensor` is ours.
    check(|err| unsafe { raw::od_host_buffer(size, i32::from(pinned), &mut tensor, &mut data, err) })?;
    // SAFETY: as above.
    Ok((unsafe { Tensor::from_ptr(tensor) }, NonNull::new(data).unwrap_or(NonNull::dangling())))
}

type Job<'scope, T> = Box<dyn FnOnce() -> T + Send + 'scope>;

/// Calls `work` with each number below `count`, on a thread of its own, or on the calling thread where `spawn` cannot
/// start one. Returns the results in the order of the numbers.
fn on_threads<'scope, T: Send + 'scope>(
    count: usize,
    work: &'scope (impl Fn(usize) -> T + Sync),
    mut spawn: impl FnMut(Job<'scope, T>) -> io::Result<ScopedJoinHandle<'scope, T>>,
) -> Vec<T> {
    let start = |number| spawn(Box::new(move || work(number))).map_err(|_| number);
    let started: Vec<Result<_, usize>> = (0..count).map(start).collect();
    // All threads are under way before the calling thread does its part.
    let done: Vec<Result<_, T>> = started.into_iter().map(|thread| thread.map_err(work)).collect();
    let join = |thread: ScopedJoinHandle<'scope, T>| match thread.join() {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    done.into_iter().map(|thread| thread.map_or_else(|result| result, join)).collect()
}

/// Writes all bytes of a part, which begins at `offset` of the buffer with this number.
fn fill_part<S, E: From<Error>>(
    mut state: S,
    (number, offset): Place,
    memory: &mut [MaybeUninit<u8>],
    fill: &impl for<'a> Fn(&mut S, Place, &'a mut [MaybeUninit<u8>]) -> Result<&'a mut [u8], E>,
) -> Result<S, E> {
    let mut done = 0;
    while done < memory.len() {
        let end = memory.len().min(done + CHUNK);
        let rest = &mut memory[done..end];
        let (start, room) = (rest.as_ptr().cast::<u8>(), rest.len());
        let written = fill(&mut state, (number, offset + done), rest)?;
        // Only initialised bytes can be in a `&mut [u8]`, so this slice proves that they are.
        if !written.is_empty() && (!ptr::eq(written.as_ptr(), start) || written.len() > room) {
            return Err(Error::refused("the function has to return the bytes that it was asked to write").into());
        }
        done += written.len();
    }
    Ok(state)
}

/// Whether Rust can read these as `bool`s, as `Vec::<bool>::try_from` does with a tensor.
pub(crate) fn are_bools(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte <= 1)
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer {{ {} bytes }}", self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_a_tensor() -> Result<(), Box<dyn std::error::Error>> {
        let mut buffer = HostBuffer::zeroed(24, false)?;
        assert_eq!((buffer.len(), buffer.as_mut_slice()), (24, &mut [0; 24][..]));
        for (place, value) in buffer.as_mut_slice().chunks_exact_mut(4).zip([1.5f32, -2.0, 3.0]) {
            place.copy_from_slice(&value.to_ne_bytes());
        }
        let tensor = buffer.into_tensor(Kind::Float, &[3, 1])?.set_requires_grad(true);
        assert_eq!(Vec::<f32>::try_from(tensor.view(-1))?, [1.5, -2.0, 3.0]);
        tensor.sum(Kind::Float).backward();
        assert_eq!(tensor.grad().size(), [3, 1]);
        assert!(HostBuffer::zeroed(0, false)?.into_tensor(Kind::Uint8, &[0, 4])?.size() == [0, 4]);
        Ok(())
    }

    #[test]
    fn threads_fill_buffers_to_their_last_bytes() {
        type Slice<'a> = &'a mut [MaybeUninit<u8>];
        // The value of a byte is a function of its place. Never more than 700,000 at once, as from a slow file.
        fn value(number: usize, offset: usize) -> u8 {
            ((7 * number + offset) % 251) as u8
        }
        fn write<'a>(count: &mut usize, (number, offset): Place, memory: Slice<'a>) -> Result<&'a mut [u8], Error> {
            let room = memory.len().min(700_000);
            *count += room;
            Ok(written(&mut memory[..room], |at| value(number, offset + at)))
        }
        fn written(memory: Slice<'_>, value: impl Fn(usize) -> u8) -> &mut [u8] {
            memory.iter_mut().enumerate().for_each(|(at, byte)| _ = byte.write(value(at)));
            // SAFETY: all of them were written in the line above.
            unsafe { slice::from_raw_parts_mut(memory.as_mut_ptr().cast(), memory.len()) }
        }
        let large = 5 << 20;
        let cases: [(&[usize], usize); 8] = [
            (&[], 2),
            (&[0], 2),
            (&[1], 4),
            (&[large], 1),
            (&[large + 3], 3),
            (&[3], 0),
            (&[5, 0, large, 7, large + 1, 0], 2),
            (&[100; 50], 3),
        ];
        for (sizes, threads) in cases {
            let filled = HostBuffer::filled(sizes, threads, || 0, write).unwrap();
            assert_eq!(filled.iter().map(|(buffer, _)| buffer.len()).collect::<Vec<_>>(), sizes);
            for (number, (buffer, counts)) in filled.iter().enumerate() {
                assert!(buffer.as_slice().iter().enumerate().all(|(at, &byte)| byte == value(number, at)), "{sizes:?}");
                assert_eq!(counts.iter().sum::<usize>(), buffer.len());
            }
        }
        let filled = |fill: for<'a> fn(&mut (), Place, Slice<'a>) -> Result<&'a mut [u8], Error>| {
            HostBuffer::filled(&[2 << 20, 1 << 20], 2, || (), fill).unwrap_err().to_string()
        };
        assert!(filled(|_, _, memory| Ok(written(&mut memory[1..], |_| 0))).contains("asked to write"));
        assert!(filled(|_, _, _| Ok(Box::leak(Box::new([1u8])))).contains("asked to write"));
        assert!(filled(|_, _, _| Err(Error::refused("no"))).contains("no"));
    }

    #[test]
    fn work_without_a_thread_is_done_by_the_caller() {
        let caller = thread::current().id();
        for with_thread in [[true, false, true, false], [false; 4], [true; 4]] {
            let work = |number: usize| (number, thread::current().id() != caller);
            let done = thread::scope(|scope| {
                let mut asked = with_thread.into_iter();
                on_threads(4, &work, |job| match asked.next() {
                    Some(true) => thread::Builder::new().spawn_scoped(scope, job),
                    _ => Err(io::ErrorKind::WouldBlock.into()),
                })
            });
            assert_eq!(done, with_thread.into_iter().enumerate().collect::<Vec<_>>());
        }
    }

    #[test]
    fn values_of_any_strides_are_copied() -> Result<(), Box<dyn std::error::Error>> {
        let mut buffer = HostBuffer::zeroed(20, false)?;
        let columns = Tensor::from_slice(&[1i16, 2, 3, 4]).view([2, 2]).tr();
        buffer.copy_from(2, &columns)?;
        buffer.copy_from(12, &Tensor::from(1.5f32).set_requires_grad(true))?;
        buffer.copy_from(20, &Tensor::zeros([0, 3], (Kind::Float, tch::Device::Cpu)))?;
        assert_eq!(buffer.as_slice()[..10], [0, 0, 1, 0, 3, 0, 2, 0, 4, 0]);
        assert_eq!(buffer.as_slice()[12..16], 1.5f32.to_ne_bytes());
        for (at, tensor) in [(1, &columns), (14, &columns), (usize::MAX, &columns), (0, &Tensor::new())] {
            assert!(buffer.copy_from(at, tensor).is_err(), "{at}");
        }
        Ok(())
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let buffer = || HostBuffer::zeroed(10, false).unwrap();
        assert!(buffer().into_tensor(Kind::Uint8, &[11]).is_err());
        assert!(buffer().into_tensor(Kind::Uint8, &[-1]).is_err());
        assert!(buffer().into_tensor(Kind::Double, &[i64::MAX, 2]).is_err());
        assert!(HostBuffer::zeroed(usize::MAX, false).is_err());
        let mut bytes = buffer();
        bytes.as_mut_slice()[..4].copy_from_slice(&[0, 1, 1, 2]);
        assert_eq!(Vec::<bool>::try_from(bytes.into_tensor(Kind::Bool, &[3]).unwrap()).unwrap(), [false, true, true]);
        bytes = buffer();
        bytes.as_mut_slice()[2] = 2;
        assert!(bytes.into_tensor(Kind::Bool, &[3]).is_err(), "2 is no bool");
    }
}
