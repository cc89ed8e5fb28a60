//! How ranks find each other.

mod launchers;
mod listener;
mod url;

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use overdrive_ffi::c10d::{Store, TcpStoreOptions, is_loopback};

use crate::error::DdpError;

/// How [`init_process_group`](crate::init_process_group) learns its rank, the number of ranks, and where they meet.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum InitMethod {
    /// From the first of these launchers' variables that are set: `RANK`, Slurm's, Open MPI's.
    #[default]
    Auto,
    /// From `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, as torchrun, overdrive-run and Kubernetes' PyTorchJob
    /// set them.
    Env,
    /// From `SLURM_PROCID`, `SLURM_NTASKS` and `SLURM_NODELIST`; `MASTER_ADDR` and `MASTER_PORT` override the address
    /// and port derived from them.
    Slurm,
    /// From `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE`, with `MASTER_ADDR` and `MASTER_PORT`.
    OpenMpi,
    /// Rank 0 listens at an address.
    Tcp {
        /// Rank 0's host.
        host: String,
        /// A free port there. A single rank may give 0: the system then chooses one.
        port: u16,
        /// This process's rank.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
    },
    /// A file that all ranks can write to and that does not exist yet.
    File {
        /// The file.
        path: PathBuf,
        /// This process's rank.
        rank: usize,
        /// How many ranks there are.
        world_size: usize,
    },
}

/// A rank's place among the ranks, and where they meet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rendezvous {
    pub rank: usize,
    pub world_size: usize,
    pub local_rank: Option<usize>,
    /// How many ranks are on this host, where the launcher sets it.
    pub local_world_size: Option<usize>,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// `served`: the launcher's agent serves the store, so rank 0 is a client too.
    Tcp {
        host: String,
        port: u16,
        served: bool,
    },
    File(PathBuf),
}

/// libtorch stores ranks as `int`.
const MOST_RANKS: usize = i32::MAX as usize;

/// Port 0 means any free port, which is enough if no other rank has to connect.
fn is_port(port: u16, world_size: usize) -> bool {
    port > 0 || world_size == 1
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port, .. } => write!(f, "tcp://{host}:{port}"),
            Self::File(path) => write!(f, "file://{}", path.display()),
        }
    }
}

impl InitMethod {
    /// Parses PyTorch's notation: `env://`, `tcp://host:port?rank=0&world_size=2` or
    /// `file:///path?rank=0&world_size=2`.
    ///
    /// # Errors
    /// When it is none of these.
    ///
    /// # Source
    /// `init_process_group(init_method=..)`
    pub fn parse(address: &str) -> Result<Self, DdpError> {
        url::parse(address)
    }

    pub(crate) fn rendezvous(&self) -> Result<Rendezvous, DdpError> {
        // Job templates may set a variable to the empty string: that counts as not set.
        self.resolve(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    /// With `var` in place of the environment.
    fn resolve(&self, var: &dyn Fn(&str) -> Option<String>) -> Result<Rendezvous, DdpError> {
        let (rank, world_size, place) = match self {
            Self::Auto => return launchers::auto(var),
            Self::Env => return launchers::env(var),
            Self::Slurm => return launchers::slurm(var),
            Self::OpenMpi => return launchers::open_mpi(var),
            Self::Tcp { host, port, rank, world_size } => {
                (*rank, *world_size, Place::Tcp { host: host.clone(), port: *port, served: false })
            }
            Self::File { path, rank, world_size } => (*rank, *world_size, Place::File(path.clone())),
        };
        let wrong =
            |option, found: &str, expected| Err(DdpError::InvalidOption { option, found: found.to_owned(), expected });
        if world_size == 0 {
            return wrong("world_size", "0", "the number of ranks, at least 1");
        }
        if world_size > MOST_RANKS {
            return wrong("world_size", &world_size.to_string(), "the number of ranks, at most 2147483647");
        }
        match &place {
            Place::Tcp { port, .. } if !is_port(*port, world_size) => {
                return wrong("port", "0", "a free port of rank 0's host, 1 to 65535");
            }
            Place::Tcp { host, .. } if host.is_empty() => {
                return wrong("host", "empty", "the name or address of rank 0's host");
            }
            Place::File(path) if path.as_os_str().is_empty() => {
                return wrong("path", "empty", "a file that all ranks can write to");
            }
            _ => {}
        }
        if rank >= world_size {
            return Err(DdpError::InvalidRank { what: "this process", rank, size: world_size });
        }
        // A launcher's `LOCAL_WORLD_SIZE` need not count these ranks.
        Ok(Rendezvous { rank, world_size, local_rank: launchers::local_rank(var), local_world_size: None, place })
    }
}

impl Rendezvous {
    /// Whether all ranks are known to be on this host, so that no other host has to reach them.
    pub(crate) fn one_host(&self) -> bool {
        let at_loopback = matches!(&self.place, Place::Tcp { host, .. } if is_loopback(host));
        at_loopback || self.world_size == 1 || self.local_world_size == Some(self.world_size)
    }

    /// The store that the ranks meet through, as PyTorch makes it.
    pub(crate) fn store(&self, timeout: Duration) -> Result<Store, DdpError> {
        let left = match &self.place {
            Place::Tcp { host, port, served: false } if self.rank > 0 => listener::wait(host, *port, timeout),
            Place::File(path) if !has_folder(path, timeout) => {
                let reason = "is in a folder that does not exist".to_owned();
                return Err(DdpError::InvalidAddress {
                    address: self.place.to_string(),
                    reason,
                    expected: url::EXPECTED,
                });
            }
            _ => timeout,
        };
        let store = match &self.place {
            Place::Tcp { host, port, served } => Store::tcp(&TcpStoreOptions {
                host,
                port: *port,
                is_server: !served && self.rank == 0,
                one_host: self.one_host(),
                world_size: self.world_size,
                wait_for_workers: true,
                connect_timeout: left,
                timeout,
            })
            .map(|(store, _)| store),
            Place::File(path) => Store::file(path, self.world_size, timeout),
        };
        store.map_err(|source| self.failed(timeout, source))
    }

    pub(crate) fn failed(&self, timeout: Duration, source: overdrive_core::TorchError) -> DdpError {
        DdpError::Rendezvous { rank: self.rank, size: self.world_size, place: self.place.to_string(), timeout, source }
    }
}

/// Waits for a file's folder, which another host may just have made. libtorch would wait five minutes, whatever the
/// timeout.
fn has_folder(path: &Path, timeout: Duration) -> bool {
    const PAUSE: Duration = Duration::from_millis(20);
    let started = Instant::now();
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    while !folder.is_dir() {
        if started.elapsed() >= timeout {
            return false;
        }
        sleep(PAUSE.min(timeout));
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_rendezvous_options_are_named() {
        let tcp = |port, rank, world_size| InitMethod::Tcp { host: "a".to_owned(), port, rank, world_size };
        let file = |rank, world_size| InitMethod::File { path: "/meet".into(), rank, world_size };
        let said = |method: InitMethod| method.resolve(&|_| None).unwrap_err().to_string();
        assert_eq!(said(tcp(0, 0, 2)), "port is 0, but should be a free port of rank 0's host, 1 to 65535");
        assert_eq!(said(tcp(1, 0, 0)), "world_size is 0, but should be the number of ranks, at least 1");
        assert_eq!(said(file(0, 0)), said(tcp(1, 0, 0)));
        assert_eq!(said(file(2, 2)), "this process is rank 2, but should be below the group's size of 2");
        assert_eq!(said(tcp(0, 1, 1)), "this process is rank 1, but should be below the group's size of 1");
        let most = "world_size is 2147483648, but should be the number of ranks, at most 2147483647";
        assert_eq!(said(tcp(1, 0, 1 << 31)), most);
        let nowhere = InitMethod::Tcp { host: String::new(), port: 1, rank: 0, world_size: 1 };
        assert_eq!(said(nowhere), "host is empty, but should be the name or address of rank 0's host");
        let nothing = InitMethod::File { path: PathBuf::new(), rank: 0, world_size: 1 };
        assert_eq!(said(nothing), "path is empty, but should be a file that all ranks can write to");
        assert_eq!(tcp(0, 0, 1).resolve(&|_| None).unwrap().world_size, 1);
        assert_eq!(tcp(65535, 1, 2).resolve(&|_| None).unwrap().world_size, 2);
    }

    #[test]
    fn an_unknown_host_is_named() {
        // Labels of host names are at most 63 bytes, so no name server is asked.
        let host = "n".repeat(64);
        for rank in 0..2 {
            let method = InitMethod::Tcp { host: host.clone(), port: 1, rank, world_size: 2 };
            let nowhere = method.resolve(&|_| None).unwrap();
            let said = nowhere.store(Duration::from_millis(50)).unwrap_err().to_string();
            assert!(said.contains(&format!("no host is known by the name \"{host}\"")), "{said}");
        }
    }

    #[test]
    fn a_missing_folder_is_reported_within_the_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("absent/meet");
        let rendezvous = InitMethod::File { path: path.clone(), rank: 0, world_size: 1 }.resolve(&|_| None).unwrap();
        let said = rendezvous.store(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(said.contains("absent/meet\" is in a folder that does not exist"), "{said}");
        std::fs::create_dir(path.parent().unwrap()).unwrap();
        assert!(rendezvous.store(Duration::from_secs(600)).is_ok());
        assert!(has_folder(Path::new("meet"), Duration::ZERO), "a file without a folder is in this one");
    }
}
