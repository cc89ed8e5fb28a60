//! Top-k accuracy: how often the right class is among the k most likely ones.

use tch::{Kind, Tensor};

use crate::error::NnError;

/// The top-k accuracy for each k: the percentage of samples whose target is among the k largest outputs.
///
/// # Shapes
/// `output`: `[batch, classes]`; `target`: `[batch]`, indices of classes, int64. Returns a float32 tensor of shape
/// `[1]` for each k.
///
/// # Errors
/// When the shapes do not fit, there is no sample, or a k is not from 1 to the number of classes.
///
/// # Syncs
/// No.
///
/// # Source
/// `accuracy(output, target, topk)` of PyTorch's ImageNet example
pub fn accuracy(output: &Tensor, target: &Tensor, top_k: &[i64]) -> Result<Vec<Tensor>, NnError> {
    let hits = hits("accuracy", output, target, top_k)?;
    let shape = target.size();
    if shape == [0] {
        let expected = "at least one sample".to_owned();
        return Err(NnError::InvalidShape { function: "accuracy", expected, shape });
    }
    let percent = |hits: Tensor| Ok(hits.f_to_kind(Kind::Float)?.f_reshape([1])? * (100.0 / shape[0] as f64));
    hits.into_iter().map(percent).collect()
}

/// For each k, how many targets are among the k largest outputs: int64 scalars. `function` is for errors.
fn hits(function: &'static str, output: &Tensor, target: &Tensor, top_k: &[i64]) -> Result<Vec<Tensor>, NnError> {
    let _no_grad = tch::no_grad_guard();
    let (output_size, target_size) = (output.size(), target.size());
    if output_size.len() != 2 {
        let expected = "an output of shape [batch, classes]".to_owned();
        return Err(NnError::InvalidShape { function, expected, shape: output_size });
    }
    if output_size[..1] != target_size {
        let expected = format!("a target of shape {:?} for an output of shape {output_size:?}", &output_size[..1]);
        return Err(NnError::InvalidShape { function, expected, shape: target_size });
    }
    let classes = output_size[1];
    if let Some(k) = top_k.iter().find(|&k| !(1..=classes).contains(k)) {
        let (found, expected) = (k.to_string(), format!("from 1 to the number of classes, {classes}"));
        return Err(NnError::InvalidOption { layer: function, option: "top_k", found, expected });
    }
    let Some(&largest) = top_k.iter().max() else { return Ok(Vec::new()) };
    let (_, predicted) = output.f_topk(largest, 1, true, true)?;
    let correct = predicted.f_eq_tensor(&target.f_unsqueeze(1)?)?;
    top_k.iter().map(|&k| Ok(correct.f_narrow(1, 0, k)?.f_sum(Kind::Int64)?)).collect()
}

/// The top-k accuracy over many batches. The counts are integers on the device, so the result does not depend on how
/// the samples were divided into batches, and only [`compute`](Self::compute) waits.
///
/// ```
/// use overdrive_nn::metrics::TopKAccuracy;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_nn::NnError> {
/// let mut meter = TopKAccuracy::new(&[1, 2]);
/// let output = Tensor::from_slice2(&[[0.1, 0.7, 0.2], [0.5, 0.3, 0.2]]);
/// meter.update(&output, &Tensor::from_slice(&[1i64, 1]))?;
/// assert_eq!(meter.compute()?, [50.0, 100.0]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct TopKAccuracy {
    top_k: Vec<i64>,
    hits: Vec<Tensor>,
    samples: i64,
}

impl TopKAccuracy {
    /// A meter that counts for each of these k.
    pub fn new(top_k: &[i64]) -> Self {
        Self { top_k: top_k.to_vec(), hits: Vec::new(), samples: 0 }
    }

    /// Counts a batch, which may be empty.
    ///
    /// # Shapes
    /// As [`accuracy`].
    ///
    /// # Errors
    /// When the shapes do not fit, or a k is not from 1 to the number of classes. The counts stay as they were.
    ///
    /// # Syncs
    /// No.
    pub fn update(&mut self, output: &Tensor, target: &Tensor) -> Result<(), NnError> {
        let new = hits("TopKAccuracy::update", output, target, &self.top_k)?;
        self.hits = match self.hits.is_empty() {
            true => new,
            false => self.hits.iter().zip(&new).map(|(old, new)| old.f_add(new)).collect::<Result<_, _>>()?,
        };
        self.samples += target.size()[0];
        Ok(())
    }

    /// The percentage for each k; NaN before the first sample.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// Waits for the device.
    pub fn compute(&self) -> Result<Vec<f64>, NnError> {
        if self.samples == 0 {
            return Ok(vec![f64::NAN; self.top_k.len()]);
        }
        let percent = |hits: &Tensor| Ok(hits.f_int64_value(&[])? as f64 * 100.0 / self.samples as f64);
        self.hits.iter().map(percent).collect()
    }

    /// How many samples were counted.
    pub fn samples(&self) -> i64 {
        self.samples
    }

    /// Sets all counts to zero.
    pub fn reset(&mut self) {
        (self.hits, self.samples) = (Vec::new(), 0);
    }
}
