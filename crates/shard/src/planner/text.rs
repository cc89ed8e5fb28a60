//! Prints a plan with its arithmetic.

use std::fmt;

use super::{Candidate, Place, Plan};
use crate::deepspeed::ZeroStage;

impl Candidate {
    /// What is partitioned and where it is, in words.
    pub fn name(&self) -> String {
        let stage = match self.stage {
            ZeroStage::Disabled => "data parallel".to_owned(),
            stage => format!("ZeRO stage {}", stage.number()),
        };
        let place = match self.place {
            Place::Device => "",
            Place::Host => ", on the host",
            Place::Disk => ", on disk",
        };
        stage + place + if self.recomputes { ", recomputing" } else { "" }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GB: f64 = 1e9;
        let (workload, cluster) = (&self.workload, &self.cluster);
        writeln!(
            f,
            "{:.3} billion parameters in {} units, {} bytes of state each; {:.2} GB of activations, {:.2} GB recomputing;",
            workload.elements() / 1e9,
            workload.units.len(),
            workload.state_bytes,
            workload.kept / GB,
            workload.recomputed / GB
        )?;
        writeln!(
            f,
            "N = {} ranks with {:.2} GB each, of which 90% are used; {:.2} GB/s from one to the next",
            cluster.ranks,
            cluster.memory_bytes / GB,
            cluster.link_bytes_per_second / GB
        )?;
        let head = ["device GB", "host GB", "disk GB", "fits", "sends GB", "step s"];
        write!(f, "\n{:<38}", "")?;
        head.iter().try_for_each(|name| write!(f, "{name:>10}"))?;
        writeln!(f)?;
        for (at, it) in self.candidates.iter().enumerate() {
            let mark = if self.chosen == Some(at) { "*" } else { " " };
            let [device, host, disk, sent] =
                [it.device_bytes, it.host_bytes, it.disk_bytes, it.sent_bytes].map(|it| it / GB);
            let fits = if it.fits { "yes" } else { "no" };
            let seconds = it.seconds;
            writeln!(
                f,
                "{mark} {:<36}{device:>10.2}{host:>10.2}{disk:>10.2}{fits:>10}{sent:>10.2}{seconds:>10.3}",
                it.name()
            )?;
        }
        match self.chosen() {
            Some(chosen) => write!(f, "\n* recommended (a model, not a measurement): {}", chosen.arithmetic),
            None => f.write_str("\nnothing fits: more ranks, smaller batches, or a disk to offload to would help"),
        }
    }
}
