//! What would make a step fit.

use overdrive_core::{MemoryForecast, MemoryTechnique, MemoryUse};
use overdrive_ffi::allocations::Category;

use super::estimate::{Estimate, Point};
use super::record::device_name;

/// The times of a forecast are at most so many.
const MOST_TIMES: usize = 1000;

/// What a block of 8-bit state takes of float32's: a byte an element, and a scale for 256.
const EIGHT_BIT: f64 = (1.0 + 4.0 / 256.0) / 4.0;

/// What is left of activations with a checkpoint around each layer: their inputs, and the layer that runs again. An eighth
/// of a transformer of 24 layers, measured; more of one with fewer layers.
const CHECKPOINTED: f64 = 0.125;

impl Estimate {
    /// The step with a batch size over time, and its peak with techniques, for
    /// `overdrive_profile::RunRecorder::memory_forecast`. Those that fit into `limit_bytes` come first, the ones that
    /// cost the least time before others. For an estimate by batch size: smaller micro-batches are among them.
    ///
    /// The peak with smaller micro-batches follows from the estimate. For other techniques it is rough: what they free is
    /// subtracted, and what they need themselves is not known. For an exact peak, estimate the step with the technique in it.
    pub fn forecast(&self, batch_size: i64, limit_bytes: Option<u64>) -> MemoryForecast {
        let peak = self.peak(batch_size);
        let mut forecast = MemoryForecast::default();
        forecast.device = device_name(self.device);
        (forecast.batch_size, forecast.peak_bytes, forecast.limit_bytes) = (batch_size, peak.total(), limit_bytes);
        forecast.largest_batch = limit_bytes.and_then(|limit| self.largest_batch(limit));
        let times = self.times(batch_size);
        forecast.seconds = times.iter().map(|point| point.nanoseconds as f64 / 1e9).collect();
        forecast.uses = Category::ALL
            .into_iter()
            .map(|category| MemoryUse {
                name: name(category).to_owned(),
                at_peak: peak.of(category),
                bytes: times.iter().map(|point| point.bytes_of(category, batch_size as f64) as u64).collect(),
            })
            .filter(|it| it.bytes.iter().any(|&bytes| bytes > 0))
            .collect();
        forecast.uses.sort_by_key(|it| std::cmp::Reverse(it.at_peak));
        forecast.techniques = self.techniques(batch_size, limit_bytes);
        forecast
    }

    fn techniques(&self, batch_size: i64, limit_bytes: Option<u64>) -> Vec<MemoryTechnique> {
        let with = |name: &str, shares: &[(Category, f64)]| MemoryTechnique {
            name: name.to_owned(),
            peak_bytes: self.peak_with(batch_size, shares),
            is_rough: true,
        };
        let mut all = vec![
            with(
                "gradients used within the backward pass: `InBackward` of overdrive-optim",
                &[(Category::Gradient, 0.0)],
            ),
            with("8-bit optimizer state: `AdamW8Bit` of overdrive-optim", &[(Category::OptimizerState, EIGHT_BIT)]),
            with("autocast to bfloat16: overdrive-amp", &[(Category::Activation, 0.5)]),
        ];
        let micro_batches =
            std::iter::successors(Some(batch_size / 2), |size| Some(size / 2)).take_while(|&size| size > 0);
        let fits = |peak: u64| limit_bytes.is_none_or(|limit| peak <= limit);
        let fitting =
            micro_batches.map(|size| (size, self.peak_in_parts(batch_size, size))).find(|&(_, peak)| fits(peak));
        all.extend(fitting.map(|(size, peak_bytes)| MemoryTechnique {
            name: format!("micro-batches of {size}: `AutoMicroBatch`, or `Accumulator` of overdrive-accum"),
            peak_bytes,
            is_rough: false,
        }));
        all.push(with("`checkpoint` around each layer, or `SavedTensors`", &[(Category::Activation, CHECKPOINTED)]));
        all.push(with(
            "`checkpoint`, 8-bit state and gradients used within the backward pass together",
            &[(Category::Activation, CHECKPOINTED), (Category::OptimizerState, EIGHT_BIT), (Category::Gradient, 0.0)],
        ));
        let now = self.peak(batch_size).total();
        all.retain(|technique| technique.peak_bytes < now);
        all.sort_by_key(|technique| !fits(technique.peak_bytes));
        all
    }

    /// The peak of parts of a batch, whose gradients add up: from the second one on, all gradients are there. All inputs are.
    fn peak_in_parts(&self, batch_size: i64, size: i64) -> u64 {
        let most = |category, size: i64| {
            self.points.iter().map(|point| point.bytes_of(category, size as f64)).fold(0.0, f64::max)
        };
        let gradients = most(Category::Gradient, size);
        let inputs = most(Category::Input, batch_size) - most(Category::Input, size);
        let bytes = |point: &Point| point.at(size as f64) + gradients - point.bytes_of(Category::Gradient, size as f64);
        (self.points.iter().map(bytes).fold(0.0, f64::max) + inputs) as u64
    }

    /// The peak if categories take another share of what they take.
    fn peak_with(&self, batch_size: i64, shares: &[(Category, f64)]) -> u64 {
        let share = |category| shares.iter().find(|it| it.0 == category).map_or(1.0, |it| it.1);
        let bytes = |point: &Point| {
            let of = |category| share(category) * point.bytes_of(category, batch_size as f64);
            Category::ALL.into_iter().map(of).sum::<f64>()
        };
        self.points.iter().map(bytes).fold(0.0, f64::max) as u64
    }

    /// The points with the most bytes in each span of time.
    fn times(&self, batch_size: i64) -> Vec<&Point> {
        let length = self.points.len().div_ceil(MOST_TIMES).max(1);
        let most = |points: &'_ [Point]| -> Option<usize> {
            (0..points.len()).max_by(|&one, &other| {
                points[one].at(batch_size as f64).total_cmp(&points[other].at(batch_size as f64))
            })
        };
        self.points.chunks(length).filter_map(|points| Some(&points[most(points)?])).collect()
    }
}

fn name(category: Category) -> &'static str {
    match category {
        Category::Parameter => "parameters",
        Category::Gradient => "gradients",
        Category::OptimizerState => "optimizer state",
        Category::Input => "inputs",
        Category::Activation => "activations",
        Category::Temporary => "temporaries",
    }
}
