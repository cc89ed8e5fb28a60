//! Why an attempt ended.

use super::NodeEnd;
use crate::error::LaunchError;
use crate::failures::Failures;

pub enum Cause {
    Failed(Failures),
    Lost(String),
    /// An elastic run goes on with other nodes: one was lost, left or joined.
    Members(String),
    /// No restart follows this.
    Other(LaunchError),
}

impl Cause {
    /// None if the node's ranks succeeded.
    pub fn of(how: NodeEnd, host: &str) -> Option<Self> {
        Some(match how {
            NodeEnd::Done => return None,
            NodeEnd::Failed { age, first, also, .. } => Self::Failed(Failures::with_age(age, first, also)),
            NodeEnd::Interrupted(signal) => {
                Self::Other(LaunchError::Interrupted { signal, host: Some(host.to_owned()) })
            }
            NodeEnd::Broken(error) => Self::Other(error),
            NodeEnd::Stopped => {
                Self::Other(LaunchError::NodeLost(format!("host {host} stopped without being told to")))
            }
        })
    }
}
