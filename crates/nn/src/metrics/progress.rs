//! Lines that show how far an epoch is.

use overdrive_core::TorchError;

use crate::metrics::AverageMeter;

/// Lines of progress: which batch of how many, and some meters.
///
/// # Source
/// `ProgressMeter` of PyTorch's ImageNet example
#[derive(Clone, Debug)]
pub struct ProgressMeter {
    num_batches: usize,
    prefix: String,
}

impl ProgressMeter {
    /// For an epoch of `num_batches`; `prefix` comes before each line.
    pub fn new(num_batches: usize, prefix: impl Into<String>) -> Self {
        Self { num_batches, prefix: prefix.into() }
    }

    /// The line of a batch: `Epoch: [0][  10/5005]`, then each meter after a tab. Print it.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Reads the meters.
    pub fn display(&self, batch: usize, meters: &[&AverageMeter]) -> Result<String, TorchError> {
        let of = self.num_batches.to_string();
        let mut line = format!("{}[{batch:>width$}/{of}]", self.prefix, width = of.len());
        for meter in meters {
            line.push('\t');
            line.push_str(&meter.to_text()?);
        }
        Ok(line)
    }

    /// The line of an epoch: the meters' summaries after ` *`.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Reads the meters.
    pub fn display_summary(&self, meters: &[&AverageMeter]) -> Result<String, TorchError> {
        let mut line = " *".to_owned();
        for meter in meters {
            line.push(' ');
            line.push_str(&meter.summary()?);
        }
        Ok(line)
    }
}
