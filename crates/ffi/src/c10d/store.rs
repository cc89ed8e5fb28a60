//! Key-value stores through which ranks find each other.

use std::net::ToSocketAddrs;
use std::os::fd::IntoRawFd;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::listen::{self, Listening};
use super::{c_string, millis, receive_bytes};
use crate::error::{Error, check};
use crate::raw_c10d as raw;

/// A key-value store shared by ranks. Its calls take turns, so a call that waits blocks others: give each thread that
/// waits its own store. Keys with `remote_error:`, or with `NCCL_` and `_trace_`, and `exception_dump` are NCCL's: setting one
/// may be lost.
///
/// The process that serves a store over TCP may be frozen, or its host gone. Then calls fail with a timeout, one to three
/// seconds after their own timeout or else the store's; PyTorch waits without a limit. What failed may still take effect if
/// the server goes on. Until it does, a call to this store fails at once if its timeout has passed since the server was
/// last asked. `set` does not wait for an answer: only a large value can fail so.
///
/// # Source
/// `torch.distributed.Store`
#[derive(Debug)]
pub struct Store(NonNull<raw::Store>);

// SAFETY: libtorch's stores lock around each operation, and are counted atomically.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

/// The address of a [`Store::tcp`], and how it is served.
#[derive(Clone, Debug)]
pub struct TcpStoreOptions<'a> {
    /// The server's name or address.
    pub host: &'a str,
    /// The server's port; 0 lets a server take any free one.
    pub port: u16,
    /// Whether this process serves the store. It listens only at the host's address, or at all addresses if `host` is
    /// not an address of this host (behind address translation). Anyone who can connect can read and change the store:
    /// its protocol has no authentication.
    pub is_server: bool,
    /// Whether all clients are on this host. If not, and the host's name (other than `localhost`) resolves to a
    /// loopback address here, it is assumed to resolve to another address elsewhere, and a server listens at all
    /// addresses.
    pub one_host: bool,
    /// How many clients there will be, including the server's own.
    pub world_size: usize,
    /// Whether a server waits until all clients have connected.
    pub wait_for_workers: bool,
    /// How long connecting and waiting for clients may take.
    pub connect_timeout: Duration,
    /// How long each answer of the server may take later.
    pub timeout: Duration,
}

impl Store {
    /// A store over TCP, served by one of its users, and its port.
    ///
    /// # Errors
    /// When the port is taken; and when the host's name is still unknown, the server cannot be reached or clients are
    /// missing after `connect_timeout`, which is reported at most two seconds later.
    ///
    /// # Syncs
    /// Waits for the server; a server waits for its clients if asked to.
    ///
    /// # Source
    /// `TCPStore`
    pub fn tcp(options: &TcpStoreOptions<'_>) -> Result<(Self, u16), Error> {
        let (is_server, port, one_host) = (options.is_server, options.port, options.one_host);
        let (timeout, of_answers) = (options.connect_timeout, options.timeout);
        let place = format!("{}:{port}", options.host);
        // libtorch waits forever for an answer if the server is frozen, or another program listens at this port: hence a
        // thread and a deadline.
        const GRACE: Duration = Duration::from_secs(2);
        let (sender, receiver) = std::sync::mpsc::channel();
        let workers = (i64::try_from(options.world_size).unwrap_or(i64::MAX), options.wait_for_workers);
        let name = options.host.to_owned();
        let is_known = Arc::new(AtomicBool::new(false));
        let known_now = Arc::clone(&is_known);
        let connect = move || {
            let store = known(&name, timeout).and_then(|left| {
                known_now.store(true, Ordering::Relaxed);
                let server = is_server.then(|| listen::at(&name, port, one_host)).transpose();
                let server = server.map_err(|error| cannot_listen(&name, port, &error))?;
                Self::connect(&name, port, server, workers, [left, of_answers])
            });
            // After the deadline the receiver is gone, and the store is dropped.
            let _ = sender.send(store);
        };
        let thread = std::thread::Builder::new().name("tcp-store".to_owned());
        thread.spawn(connect).map_err(|error| Error::refused(format!("no thread to connect on: {error}")))?;
        receiver.recv_timeout(timeout.saturating_add(GRACE)).unwrap_or_else(|_| {
            // The name's server does not answer, or this machine is so busy that the thread is late.
            if !is_known.load(Ordering::Relaxed) {
                return Err(unknown(options.host, timeout));
            }
            Err(Error::timed_out(if is_server {
                format!("timed out after {timeout:.1?}: serving a store at {place}; does another program use that port?")
            } else {
                format!(
                    "timed out: the store at {place} has not answered within {timeout:.1?}; is rank 0's process stopped, \
                     or does another program use that port?"
                )
            }))
        })
    }

    fn connect(
        host: &str,
        port: u16,
        server: Option<Listening>,
        (world_size, wait_workers): (i64, bool),
        [connect_timeout, timeout]: [Duration; 2],
    ) -> Result<(Self, u16), Error> {
        let name = c_string(host)?;
        let is_server = server.is_some();
        let (socket, port) = match server {
            Some(Listening::At(listener)) => {
                let bound = listener.local_addr().map_err(|error| cannot_listen(host, port, &error))?;
                // libtorch closes it.
                (listener.into_raw_fd(), bound.port())
            }
            // Several groups of one process share a server, as in PyTorch.
            Some(Listening::Taken) | None => (-1, port),
        };
        let wanted = raw::TcpStore {
            host: name.as_ptr(),
            port,
            is_server: i32::from(is_server),
            socket,
            world_size,
            wait_workers: i32::from(wait_workers),
            connect_ms: millis(connect_timeout),
            timeout_ms: millis(timeout),
        };
        // SAFETY: the options and the host's name outlive the call, which takes the socket over.
        let store = Self::receive(|out, err| unsafe { raw::od_tcp_store_new(&wanted, out, err) })?;
        Ok((store, port))
    }

    /// A store in a file that all ranks can write to. The file should not exist before.
    ///
    /// # Errors
    /// When the path holds a zero byte or is not UTF-8.
    ///
    /// # Source
    /// `FileStore`
    pub fn file(path: &Path, world_size: usize, timeout: Duration) -> Result<Self, Error> {
        let text = path.to_str().ok_or_else(|| Error::refused(format!("the path {} is not UTF-8", path.display())))?;
        let text = c_string(text)?;
        let ranks = i32::try_from(world_size).unwrap_or(i32::MAX);
        // SAFETY: the path outlives the call.
        Self::receive(|out, err| unsafe { raw::od_file_store_new(text.as_ptr(), ranks, millis(timeout), out, err) })
    }

    /// A store within this process.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Source
    /// `HashStore`
    pub fn hash() -> Result<Self, Error> {
        // SAFETY: no pointers but the results'.
        Self::receive(|out, err| unsafe { raw::od_hash_store_new(out, err) })
    }

    /// The same store with `prefix` and a slash before each key.
    ///
    /// # Errors
    /// When the prefix holds a zero byte.
    ///
    /// # Source
    /// `PrefixStore`
    pub fn prefixed(&self, prefix: &str) -> Result<Self, Error> {
        let prefix = c_string(prefix)?;
        // SAFETY: the prefix outlives the call and the handle is live.
        Self::receive(|out, err| unsafe { raw::od_prefix_store_new(prefix.as_ptr(), self.as_ptr(), out, err) })
    }

    /// Sets a key.
    ///
    /// # Errors
    /// When the server is gone, or does not answer within the store's timeout.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), Error> {
        let key = c_string(key)?;
        // SAFETY: key and value outlive the call.
        check(|err| unsafe { raw::od_store_set(self.as_ptr(), key.as_ptr(), value.as_ptr(), value.len(), err) })
    }

    /// Waits until a key is set, and returns its value.
    ///
    /// # Errors
    /// When it is not set within the timeout, or the server is gone or does not answer.
    ///
    /// # Syncs
    /// Waits for the key.
    pub fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>, Error> {
        let key = c_string(key)?;
        let mut value = Vec::new();
        let visitor = ptr::from_mut(&mut value).cast();
        // SAFETY: the visitor is the vector above, which `receive_bytes` expects.
        check(|err| unsafe {
            raw::od_store_get(self.as_ptr(), key.as_ptr(), millis(timeout), visitor, receive_bytes, err)
        })?;
        Ok(value)
    }

    /// Sets a key if its value is `expected` (empty: if it is not set), and returns its value afterwards.
    ///
    /// # Errors
    /// When the server is gone, or does not answer within the store's timeout.
    pub fn compare_set(&self, key: &str, expected: &[u8], value: &[u8]) -> Result<Vec<u8>, Error> {
        let key = c_string(key)?;
        let mut now = Vec::new();
        let visitor = ptr::from_mut(&mut now).cast();
        // SAFETY: as in `get`; both values outlive the call.
        check(|err| unsafe {
            raw::od_store_compare_set(
                self.as_ptr(),
                key.as_ptr(),
                expected.as_ptr(),
                expected.len(),
                value.as_ptr(),
                value.len(),
                visitor,
                receive_bytes,
                err,
            )
        })?;
        Ok(now)
    }

    /// Adds to a counter, which starts at 0, and returns its new value.
    ///
    /// # Errors
    /// When the server is gone, or does not answer within the store's timeout.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64, Error> {
        let key = c_string(key)?;
        let mut sum = 0;
        // SAFETY: the key outlives the call.
        check(|err| unsafe { raw::od_store_add(self.as_ptr(), key.as_ptr(), amount, &mut sum, err) })?;
        Ok(sum)
    }

    /// Whether all keys are set.
    ///
    /// # Errors
    /// When the server is gone, or does not answer within the store's timeout.
    pub fn check(&self, keys: &[&str]) -> Result<bool, Error> {
        let keys = keys.iter().map(|key| c_string(key)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = keys.iter().map(|key| key.as_ptr()).collect();
        let mut all = 0;
        // SAFETY: the keys outlive the call.
        check(|err| unsafe { raw::od_store_check(self.as_ptr(), pointers.as_ptr(), pointers.len(), &mut all, err) })?;
        Ok(all != 0)
    }

    /// Waits until all keys are set.
    ///
    /// # Errors
    /// When one is not set within the timeout, or the server is gone or does not answer.
    ///
    /// # Syncs
    /// Waits for the keys.
    pub fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), Error> {
        let keys = keys.iter().map(|key| c_string(key)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = keys.iter().map(|key| key.as_ptr()).collect();
        // SAFETY: the keys outlive the call.
        check(|err| unsafe {
            raw::od_store_wait(self.as_ptr(), pointers.as_ptr(), pointers.len(), millis(timeout), err)
        })
    }

    /// Deletes a key, and returns whether it existed.
    ///
    /// # Errors
    /// When the server is gone, or does not answer within the store's timeout.
    pub fn delete(&self, key: &str) -> Result<bool, Error> {
        let key = c_string(key)?;
        let mut deleted = 0;
        // SAFETY: the key outlives the call.
        check(|err| unsafe { raw::od_store_delete(self.as_ptr(), key.as_ptr(), &mut deleted, err) })?;
        Ok(deleted != 0)
    }

    pub(super) fn as_ptr(&self) -> *const raw::Store {
        self.0.as_ptr()
    }

    fn receive(call: impl FnOnce(*mut *mut raw::Store, *mut crate::raw::Error) -> i32) -> Result<Self, Error> {
        let mut out = ptr::null_mut();
        check(|err| call(&mut out, err))?;
        NonNull::new(out).map(Self).ok_or_else(|| Error::refused("libtorch returned no store"))
    }
}

fn cannot_listen(host: &str, port: u16, error: &std::io::Error) -> Error {
    Error::refused(format!("cannot listen at {host}:{port}: {error}"))
}

/// Waits until a host's name can be resolved, which may take a while in a new cluster, and returns what is left of
/// `timeout`. libtorch would wait twice as long, and not report the reason.
fn known(host: &str, timeout: Duration) -> Result<Duration, Error> {
    const PAUSE: Duration = Duration::from_millis(200);
    let (started, mut left) = (Instant::now(), timeout);
    while (host, 0).to_socket_addrs().is_err() {
        if left.is_zero() {
            return Err(unknown(host, timeout));
        }
        sleep(PAUSE.min(left));
        left = timeout.saturating_sub(started.elapsed());
    }
    Ok(left.max(Duration::from_millis(1)))
}

fn unknown(host: &str, timeout: Duration) -> Error {
    Error::timed_out(format!("timed out after {timeout:.1?}: no host is known by the name {host:?}"))
}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { raw::od_store_free(self.0.as_ptr()) }
    }
}
