//! Prints a choice with its arithmetic.

use std::fmt;

use super::StrategyChoice;

impl fmt::Display for StrategyChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GB: f64 = 1e9;
        let (size, cluster) = (&self.size, &self.cluster);
        writeln!(
            f,
            "{:.2} billion parameters of {} + {} + {} bytes (parameter, gradient, optimizer), {:.1} GB of activations;",
            size.parameters / 1e9,
            size.parameter_bytes,
            size.gradient_bytes,
            size.optimizer_bytes,
            size.activation_bytes / GB
        )?;
        writeln!(
            f,
            "N = {} GPUs of {:.0} GB, of which 90% are used; {:.1} GB/s from one to the next",
            cluster.gpus,
            cluster.gpu_memory_bytes / GB,
            cluster.link_bytes_per_second / GB
        )?;
        writeln!(f, "\n{:<20}{:>10}{:>10}{:>8}{:>10}{:>10}", "", "GPU GB", "host GB", "fits", "sends GB", "step s")?;
        for it in &self.candidates {
            writeln!(
                f,
                "{:<20}{:>10.1}{:>10.1}{:>8}{:>10.2}{:>10.3}",
                it.strategy,
                it.gpu_bytes / GB,
                it.host_bytes / GB,
                if it.fits { "yes" } else { "no" },
                it.sent_bytes / GB,
                it.step_seconds
            )?;
        }
        writeln!(f)?;
        for it in &self.candidates {
            writeln!(f, "{}: {}", it.strategy, it.arithmetic)?;
        }
        match self.chosen {
            Some(strategy) => write!(f, "\nrecommended: {strategy} (a model, not a measurement)"),
            None => {
                f.write_str("\nnothing fits: try more GPUs, a smaller model, smaller batches, activation checkpointing")
            }
        }
    }
}
