//! Why an attempt ended badly.

use super::NodeEnd;
use crate::error::LaunchError;
use crate::failures::Failures;

pub enum Cause {
    Failed(Failures),
    Lost(String),
    /// No restart follows this.
    Other(LaunchError),
}

impl Cause {
    /// None: it ended well.
    pub fn of(how: NodeEnd, host: &str) -> Option<Self> {
        Some(match how {
            NodeEnd::Done => return None,
            NodeEnd::Failed { age, first, also, .. } => Self::Failed(Failures::heard(age, first, also)),
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
