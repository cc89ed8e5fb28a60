//! Prints a diagnosis.

use std::fmt;

use super::finding::{Bottleneck, Diagnosis, Finding};

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bound_by, self.findings.is_empty()) {
            (None, _) => f.write_str("what bounds this run is not known")?,
            (Some(bound), true) => write!(f, "bound by {bound}: nothing to improve was found")?,
            (Some(bound), false) => write!(f, "bound by {bound}")?,
        }
        for (place, finding) in self.findings.iter().enumerate() {
            write!(f, "\n\n{}. {finding}", place + 1)?;
        }
        for unknown in &self.unknown {
            write!(f, "\n\nnote: {unknown}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bottleneck)?;
        if let Some(scope) = &self.scope {
            write!(f, " in `{scope}`")?;
        }
        if let Some(op) = &self.op {
            write!(f, " ({op})")?;
        }
        if self.bottleneck == Bottleneck::MemoryGrowth {
            f.write_str(": it will end the run")?;
        } else if self.share == 0.0 {
            f.write_str(": its cost is not known")?;
        } else {
            let (share, bound) = (100.0 * self.share, self.speedup_bound());
            write!(f, ": {share:.0}% of a step; without it up to {bound:.2} times as fast")?;
        }
        for figure in &self.evidence {
            write!(f, "\n   {figure}")?;
        }
        write!(f, "\n   remedy: {}", self.remedy)
    }
}
