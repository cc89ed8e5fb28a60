//! Saved tensors in files.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::saved_tensors::{Packed, without_history};
use overdrive_ffi::{Error as TorchError, HostBuffer, SideStream, empty_pinned};
use tch::{Device, Kind, Tensor};

use super::Store;
use super::folder::OwnFolder;
use super::order::Order;
use super::work::Worker;
use crate::error::MemoryError;
use crate::layout::{dense_strides, has_gaps};

/// So many bytes wait to be written; then the forward pass waits.
const MOST_WAITING: u64 = 32 << 20;
/// So many tensors are read before the backward pass asks for them.
const READ_AHEAD: usize = 2;

/// Keeps tensors in the files of a folder of its own, written and read by a thread. That thread waits for the copies from
/// a GPU, and nobody else: the copies back come behind them in the same stream.
pub(super) struct Disk(Arc<Files>);

/// The folder, which is removed with the last tensor in it.
struct Files {
    folder: OwnFolder,
    worker: Worker,
    next: AtomicU64,
    streams: Mutex<HashMap<usize, Arc<SideStream>>>,
    stored: Order<OnDisk>,
    waiting: Mutex<u64>,
    written: Condvar,
}

/// A tensor in a file.
struct OnDisk {
    files: Arc<Files>,
    path: PathBuf,
    place: u64,
    shape: Vec<i64>,
    /// Dense: another layout may have kernels that round otherwise.
    stride: Vec<i64>,
    kind: Kind,
    device: Device,
    /// For a GPU's copies, to and from pinned memory.
    stream: Option<Arc<SideStream>>,
    bytes: usize,
    state: Mutex<State>,
    changed: Condvar,
}

/// Where its values are.
enum State {
    /// In memory, to be written. A GPU's copy to there may be under way.
    Waiting(Tensor),
    InFile,
    /// Being read.
    Reading,
    /// In the file, and in memory ahead of its use.
    Read(Tensor),
    Failed(Arc<io::Error>),
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Disk {
    /// In a new folder within this one.
    pub(super) fn new(folder: &Path) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Disk { path: folder.to_owned(), source: Arc::new(source) };
        Ok(Self(Arc::new(Files {
            folder: OwnFolder::within(folder).map_err(failed)?,
            worker: Worker::start("saved tensors").map_err(failed)?,
            next: AtomicU64::new(0),
            streams: Mutex::default(),
            stored: Order::default(),
            waiting: Mutex::new(0),
            written: Condvar::new(),
        })))
    }
}

impl Store for Disk {
    fn store(&self, tensor: &Tensor) -> Result<Option<Arc<dyn Packed>>, BoxError> {
        let files = &self.0;
        let number = files.next.fetch_add(1, Ordering::Relaxed);
        let (shape, stride) = (tensor.size(), dense_strides(tensor));
        let stream = files.stream(tensor.device())?;
        let values = copied(tensor, &stride, stream.as_deref())?;
        let bytes = values.numel() * values.kind().elt_size_in_bytes();
        files.wait_for_room(bytes as u64);
        let made = files.stored.push(|place| OnDisk {
            files: Arc::clone(files),
            path: files.folder.path().join(number.to_string()),
            place,
            shape,
            stride,
            kind: tensor.kind(),
            device: tensor.device(),
            stream,
            bytes,
            state: Mutex::new(State::Waiting(values)),
            changed: Condvar::new(),
        });
        let to_write = Arc::downgrade(&made);
        files.worker.run(move || {
            if let Some(tensor) = to_write.upgrade() {
                tensor.write();
            }
        });
        Ok(Some(made))
    }
}

/// A copy on the host, because the tensor may be changed in place before it is written.
fn copied(tensor: &Tensor, stride: &[i64], stream: Option<&SideStream>) -> Result<Tensor, TorchError> {
    let (shape, kind) = (tensor.size(), tensor.kind());
    let Some(stream) = stream else {
        let mut values = Tensor::f_empty_strided(&shape, stride, (kind, Device::Cpu))?;
        values.f_copy_(&tensor.f_detach()?)?;
        return Ok(values);
    };
    let values = empty_pinned(&[tensor.numel() as i64], kind)?.f_as_strided(&shape, stride, None)?;
    let dense = if has_gaps(tensor) { tensor.f_contiguous()? } else { without_history(tensor)? };
    // What the device is given next waits for the copy: it may change the tensor in place, or reuse its memory.
    drop(stream.copy(&dense, &values)?);
    Ok(values)
}

impl Files {
    /// The stream of a GPU.
    fn stream(&self, device: Device) -> Result<Option<Arc<SideStream>>, TorchError> {
        let Device::Cuda(number) = device else { return Ok(None) };
        let mut streams = lock(&self.streams);
        if let Some(stream) = streams.get(&number) {
            return Ok(Some(Arc::clone(stream)));
        }
        let made = Arc::new(SideStream::new(number)?);
        Ok(Some(Arc::clone(streams.entry(number).or_insert(made))))
    }

    fn wait_for_room(&self, bytes: u64) {
        let mut waiting = lock(&self.waiting);
        while *waiting > 0 && *waiting + bytes > MOST_WAITING {
            waiting = self.written.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        *waiting += bytes;
    }

    /// What is no longer waiting.
    fn is_done(&self, bytes: usize) {
        *lock(&self.waiting) -= bytes as u64;
        self.written.notify_all();
    }

    /// Reads tensors that were stored before this one.
    fn read_ahead(&self, of: u64) {
        for tensor in self.stored.before(of, READ_AHEAD) {
            self.worker.run(move || {
                if let Some(tensor) = tensor.upgrade() {
                    tensor.read_ahead();
                }
            });
        }
    }
}

impl OnDisk {
    fn set(&self, state: State) {
        *lock(&self.state) = state;
        self.changed.notify_all();
    }

    /// On the worker.
    fn write(&self) {
        let values = match &*lock(&self.state) {
            State::Waiting(values) => values.shallow_clone(),
            _ => return,
        };
        let write = || -> io::Result<()> {
            if let Some(stream) = &self.stream {
                stream.synchronize().map_err(io::Error::other)?;
            }
            let mut bytes = vec![0; self.bytes];
            let flat = values.f_as_strided([values.numel() as i64], [1], None);
            let flat = flat.and_then(|values| values.f_view_dtype(Kind::Uint8)).map_err(io::Error::other)?;
            flat.f_copy_data_u8(&mut bytes, self.bytes).map_err(io::Error::other)?;
            File::create_new(&self.path)?.write_all(&bytes)
        };
        self.set(match write() {
            Ok(()) => State::InFile,
            Err(error) => State::Failed(Arc::new(error)),
        });
        drop(values);
        self.files.is_done(self.bytes);
    }

    fn read(&self) -> io::Result<Tensor> {
        let buffer = if self.stream.is_some() { HostBuffer::pinned } else { |bytes| HostBuffer::zeroed(bytes, false) };
        let mut buffer = buffer(self.bytes).map_err(io::Error::other)?;
        File::open(&self.path)?.read_exact(buffer.as_mut_slice())?;
        let flat = buffer.into_tensor(self.kind, &[self.shape.iter().product()]).map_err(io::Error::other)?;
        flat.f_as_strided(&self.shape, &self.stride, None).map_err(io::Error::other)
    }

    /// On the worker.
    fn read_ahead(&self) {
        {
            let mut state = lock(&self.state);
            if !matches!(*state, State::InFile) {
                return;
            }
            *state = State::Reading;
        }
        self.set(match self.read() {
            Ok(tensor) => State::Read(tensor),
            Err(error) => State::Failed(Arc::new(error)),
        });
    }

    /// The values on the host. What was read ahead is handed out once: it may be asked for again only if the graph is kept.
    fn values(&self) -> Result<Tensor, Arc<io::Error>> {
        let mut state = lock(&self.state);
        while matches!(*state, State::Reading) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match &*state {
            // Copied to the GPU behind the copy from there.
            State::Waiting(values) if self.stream.is_some() => Ok(values.shallow_clone()),
            // A copy: who gets it may change it in place, and it is still to be written.
            State::Waiting(values) => values.f_detach_copy().map_err(|error| Arc::new(io::Error::other(error))),
            State::Failed(error) => Err(Arc::clone(error)),
            State::InFile | State::Reading => self.read().map_err(Arc::new),
            State::Read(values) => {
                let values = values.shallow_clone();
                *state = State::InFile;
                Ok(values)
            }
        }
    }
}

impl Packed for OnDisk {
    fn unpack(&self) -> Result<Tensor, BoxError> {
        self.files.read_ahead(self.place);
        let failed = |source| MemoryError::Disk { path: self.path.clone(), source };
        let values = self.values().map_err(failed)?;
        let Some(stream) = &self.stream else { return Ok(values) };
        // Of the current stream's memory. libtorch's allocator keeps the pinned memory until the copy has ended.
        let tensor = Tensor::f_empty_strided(&self.shape, &self.stride, (self.kind, self.device))?;
        Ok(stream.copy(&values, &tensor)?.tensor()?)
    }
}

impl Drop for OnDisk {
    fn drop(&mut self) {
        self.files.stored.remove(self.place);
        if matches!(*lock(&self.state), State::Waiting(_)) {
            self.files.is_done(self.bytes);
        }
        // It was not written yet, or the folder is gone.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_layout_without_gaps_comes_back_and_values_of_views_are_those_that_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::new(folder.path()).unwrap();
        let x = Tensor::rand([2, 3, 4, 5], (Kind::ComplexFloat, Device::Cpu));
        for (tensor, is_dense) in
            [(x.permute([0, 3, 1, 2]), true), (x.narrow(3, 1, 2), false), (x.conj(), true), (x.conj().imag(), false)]
        {
            let stored = disk.store(&tensor).unwrap().unwrap();
            // After this the worker has written it.
            let (done, told) = channel();
            disk.0.worker.run(move || done.send(()).unwrap());
            told.recv().unwrap();
            let found = stored.unpack().unwrap();
            assert_eq!(found, tensor.contiguous().resolve_conj().resolve_neg());
            assert!(!is_dense || found.stride() == tensor.stride(), "{:?} of {:?}", found.stride(), tensor.stride());
        }
    }

    /// The forward pass waits while too much is to be written; what is not written yet is read from memory.
    #[test]
    fn a_slow_disk_holds_the_forward_pass_up_and_loses_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let disk = Disk::new(folder.path()).unwrap();
        let half = (MOST_WAITING / 8) as i64;
        let tensor = |value: f64| Tensor::full([half], value, (Kind::Float, Device::Cpu));
        let store = |value: f64| disk.store(&tensor(value)).unwrap().unwrap();
        // The disk does nothing until it is told to.
        let (go_on, told) = channel::<()>();
        disk.0.worker.run(move || _ = told.recv());
        let stored = [store(1.0), store(2.0)];
        let unwritten = stored[1].unpack().unwrap();
        assert_eq!(unwritten, tensor(2.0));
        // Who gets it may change it: it is no longer what is to be written.
        let _ = unwritten.shallow_clone().fill_(7.0);
        let written = disk.0.folder.path().join("0");
        let has_gone_on = AtomicBool::new(false);
        let third = std::thread::scope(|scope| {
            let third = scope.spawn(|| {
                let third = disk.store(&tensor(3.0)).unwrap().unwrap();
                has_gone_on.store(true, Ordering::SeqCst);
                assert!(written.exists(), "there was no room before");
                third
            });
            for _ in 0..50 {
                assert!(!has_gone_on.load(Ordering::SeqCst));
                std::thread::sleep(Duration::from_millis(1));
            }
            go_on.send(()).unwrap();
            third.join().unwrap()
        });
        for (stored, value) in stored.iter().chain([&third]).zip([1.0, 2.0, 3.0]) {
            assert_eq!(stored.unpack().unwrap(), tensor(value));
        }
    }
}
