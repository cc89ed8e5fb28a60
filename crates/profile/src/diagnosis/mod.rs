//! What bounds a run.

mod finding;

use std::fmt;

pub use finding::{Bottleneck, Diagnosis, Finding};

use crate::RunProfile;

impl Diagnosis {
    /// What bounds a run.
    pub fn of(_run: &RunProfile) -> Self {
        Self { bound_by: None, findings: Vec::new(), unknown: vec!["nothing is judged yet".to_owned()] }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "bound by: {}", self.bound_by.map_or("not known", Bottleneck::name))
    }
}
