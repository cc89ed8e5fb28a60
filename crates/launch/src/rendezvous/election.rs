//! Which node is node 0, where etcd says it: the first that sets a key. The key has a lease that node 0 renews; when it
//! ends, the nodes that are left elect another one.

use std::net::{IpAddr, TcpListener};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::door::Heard;
use super::etcd::{Etcd, Found, Trouble};
use crate::error::LaunchError;
use crate::host_name::{is_loopback, without_brackets};
use crate::plan::Plan;

/// For a call to etcd, at most.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Node 0 asks for a renewal after this part of the lease, and waits as long for the answer. After half of the lease
/// without a renewal it gives up: at two thirds at the latest, before another node can become node 0.
const PART: u32 = 6;

/// What a node knows of the last start in which it took part.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Past {
    pub attempt: u32,
    pub restarts: u32,
    pub nnodes: usize,
}

impl Past {
    /// What the next start has if this start's node 0 is lost. In an elastic run that is no restart that counts.
    pub fn after_a_loss(self, is_elastic: bool) -> Self {
        let counted = u32::from(!is_elastic);
        Self { attempt: self.attempt + 1, restarts: self.restarts + counted, nnodes: self.nnodes.saturating_sub(1) }
    }
}

/// What this node is.
pub enum Role {
    /// Node 0 is at this host and port.
    Follows(String, u16),
    /// This node is node 0, and the others reach it at the address `own`.
    Leads { listener: TcpListener, own: String, lease: Lease },
}

/// The value of the key.
#[derive(Debug, Deserialize, PartialEq, Serialize)]
struct Leader {
    host: String,
    port: u16,
}

pub struct Election {
    etcd: Etcd,
    key: String,
    /// This host's address for the other nodes; None: the one from which it reaches etcd.
    own: Option<String>,
    /// How long a lease lasts without a renewal.
    time: Duration,
}

impl Election {
    pub fn new(plan: &Plan, host: &str, port: u16) -> Self {
        let key = format!("/overdrive-run/{}/node-0", plan.run_id);
        let etcd = Etcd::new(host, port, plan.etcd.clone(), (plan.lease / PART).min(TIMEOUT));
        Self { etcd, key, own: plan.master_addr.clone(), time: plan.lease }
    }

    pub fn place(&self) -> String {
        self.etcd.place()
    }

    /// Asks which node is node 0, and becomes it if there is none. An error of kind `NodesMissing` may be temporary.
    pub fn find(&self) -> Result<Role, LaunchError> {
        let (value, seen) = self.etcd.get(&self.key)?;
        if self.own.is_none() && seen.to_canonical().is_loopback() {
            return Err(LaunchError::Options(format!(
                "etcd at {} is reached from {}, where other hosts cannot reach this one; give --local-addr with this \
                 host's address for the others",
                self.place(),
                seen.to_canonical()
            )));
        }
        let role = match value {
            Some(value) => self.follow(&value),
            None => self.lead(seen),
        };
        Ok(role?)
    }

    /// Where node 0 is, if there is one.
    pub fn leader(&self) -> Result<Option<(String, u16)>, LaunchError> {
        let (value, _) = self.etcd.get(&self.key)?;
        Ok(match value.map(|value| self.follow(&value)).transpose()? {
            Some(Role::Follows(host, port)) => Some((host, port)),
            _ => None,
        })
    }

    /// Becomes node 0, unless another node is faster.
    fn lead(&self, seen: IpAddr) -> Result<Role, Trouble> {
        let system = |error: std::io::Error| format!("cannot listen for the other nodes: {error}");
        let own = self.own.clone().unwrap_or_else(|| seen.to_canonical().to_string());
        // If the options give an address that is not this host's own (behind NAT), connections arrive at another one.
        let listener = match &self.own {
            None => TcpListener::bind((seen, 0)),
            Some(own) if is_loopback(own) => TcpListener::bind((without_brackets(own), 0)),
            Some(_) => TcpListener::bind("[::]:0").or_else(|_| TcpListener::bind("0.0.0.0:0")),
        };
        let listener = listener.map_err(system)?;
        let port = listener.local_addr().map_err(system)?.port();
        let asked = Instant::now();
        let id = self.etcd.grant(self.time)?;
        let text = serde_json::to_string(&Leader { host: own.clone(), port }).map_err(|error| error.to_string())?;
        // If the lease cannot be given back, it ends by itself.
        let give_back = || drop(self.etcd.revoke(&id));
        // An error may come after etcd has set the key.
        match self.etcd.set_if_free(&self.key, &text, &id).inspect_err(|_| give_back())? {
            Found::Free => {
                let lease = Lease { etcd: self.etcd.clone(), id, time: self.time, renewed: asked };
                Ok(Role::Leads { listener, own, lease })
            }
            Found::Taken(value) => {
                give_back();
                self.follow(&value)
            }
        }
    }

    fn follow(&self, value: &str) -> Result<Role, Trouble> {
        let leader: Leader = serde_json::from_str(value)
            .map_err(|error| format!("etcd at {} has {value:?} as {}: {error}", self.place(), self.key))?;
        Ok(Role::Follows(leader.host, leader.port))
    }
}

/// The lease of node 0's key.
pub struct Lease {
    pub etcd: Etcd,
    pub id: String,
    pub time: Duration,
    pub renewed: Instant,
}

impl Lease {
    /// Renews the lease in a thread, until it cannot, which the coordinator hears, or until it is released.
    pub fn keep(mut self, heard: Sender<Heard>) -> std::io::Result<Kept> {
        let (release, released) = channel::<()>();
        let thread = thread::Builder::new().name("lease".to_owned()).spawn(move || {
            // Until it is released.
            while released.recv_timeout(self.time / PART) == Err(RecvTimeoutError::Timeout) {
                let asked = Instant::now();
                let over = match self.etcd.renew(&self.id) {
                    Ok(true) => {
                        self.renewed = asked;
                        continue;
                    }
                    Ok(false) => "its lease in etcd has ended".to_owned(),
                    Err(why) if self.renewed.elapsed() >= self.time / 2 => why.to_string(),
                    Err(_) => continue,
                };
                let _ = heard.send(Heard::Deposed(over));
                let _ = released.recv();
                break;
            }
            // If this fails, it ends by itself.
            let _ = self.etcd.revoke(&self.id);
        })?;
        Ok(Kept { release: Some(release), thread: Some(thread) })
    }
}

/// A lease that is renewed; dropping it gives the lease back.
pub struct Kept {
    release: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.release.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
