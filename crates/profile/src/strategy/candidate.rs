//! The strategies, and what each needs.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Cluster, TrainingSize};

/// The share of a GPU's memory that the allocator, kernels and buckets take.
const RESERVED: f64 = 0.1;
/// The share of the computing time with which sending gradients can overlap: the backward pass takes two thirds.
const OVERLAPPED: f64 = 2.0 / 3.0;

/// A way to distribute a training over GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Strategy {
    /// One GPU.
    Single,
    /// Each GPU has everything; gradients are averaged.
    DataParallel,
    /// Each GPU has a part of the optimizer's state.
    Zero1,
    /// Each GPU has a part of the optimizer's state and of the gradients.
    Zero2,
    /// Each GPU has a part of the optimizer's state, the gradients and the parameters.
    Zero3,
    /// ZeRO stage 2 with the optimizer's state in the host's memory, where the host's CPUs update it.
    ZeroOffload,
    /// Each GPU has some of the layers.
    Pipeline,
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Single => "single GPU",
            Self::DataParallel => "data parallel",
            Self::Zero1 => "ZeRO stage 1",
            Self::Zero2 => "ZeRO stage 2",
            Self::Zero3 => "ZeRO stage 3",
            Self::ZeroOffload => "ZeRO with offload",
            Self::Pipeline => "pipeline",
        })
    }
}

/// A strategy's figures, for each GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Candidate {
    /// The strategy.
    pub strategy: Strategy,
    /// Bytes of GPU memory.
    pub gpu_bytes: f64,
    /// Bytes of host memory.
    pub host_bytes: f64,
    /// Whether the GPU's and the host's memory are large enough.
    pub fits: bool,
    /// Bytes that it sends in a step.
    pub sent_bytes: f64,
    /// Seconds of a step in which each GPU trains on as many samples as one GPU does in `compute_seconds`.
    pub step_seconds: f64,
    /// The formulas behind the figures.
    pub arithmetic: String,
}

/// The parts of a training, in bytes.
struct Parts {
    parameters: f64,
    gradients: f64,
    optimizer: f64,
    activations: f64,
}

pub(super) fn all(size: &TrainingSize, cluster: &Cluster) -> Vec<Candidate> {
    let parts = Parts {
        parameters: size.parameters * size.parameter_bytes,
        gradients: size.parameters * size.gradient_bytes,
        optimizer: size.parameters * size.optimizer_bytes,
        activations: size.activation_bytes,
    };
    let mut all = vec![];
    if cluster.gpus == 1 {
        all.push(replicated(Strategy::Single, size, cluster, &parts));
    } else {
        let stages = [Strategy::DataParallel, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
        all.extend(stages.map(|strategy| replicated(strategy, size, cluster, &parts)));
    }
    all.push(offload(size, cluster, &parts));
    if cluster.gpus > 1 && size.layers >= cluster.gpus {
        all.push(pipeline(size, cluster, &parts));
    }
    all
}

/// Strategies in which each GPU computes all layers.
fn replicated(strategy: Strategy, size: &TrainingSize, cluster: &Cluster, parts: &Parts) -> Candidate {
    let gpus = f64::from(cluster.gpus);
    let ring = (gpus - 1.0) / gpus;
    let Parts { parameters: p, gradients: g, optimizer: o, activations: a } = *parts;
    let (state, formula) = match strategy {
        Strategy::Zero1 => (p + g + o / gpus, "parameters + gradients + optimizer / N"),
        Strategy::Zero2 => (p + (g + o) / gpus, "parameters + (gradients + optimizer) / N"),
        Strategy::Zero3 => ((p + g + o) / gpus, "(parameters + gradients + optimizer) / N"),
        _ => (p + g + o, "parameters + gradients + optimizer"),
    };
    // An all-reduce sends everything twice; a reduce-scatter and an all-gather once each.
    let (sent, volume) = match strategy {
        Strategy::Single => (0.0, "nothing"),
        Strategy::DataParallel => (2.0 * ring * g, "2 (N-1)/N gradients"),
        Strategy::Zero3 => (ring * (g + 2.0 * p), "(N-1)/N (gradients + 2 parameters)"),
        _ => (ring * (g + p), "(N-1)/N (gradients + parameters)"),
    };
    let seconds = sent / cluster.link_bytes_per_second;
    // Stages 1 and 2 gather the parameters before the next forward pass, which overlaps with nothing; stage 3 gathers
    // them layer by layer, which does.
    let (hidden, exposed) = match strategy {
        Strategy::Zero1 | Strategy::Zero2 => {
            let gathered = ring * p / cluster.link_bytes_per_second;
            (seconds - gathered, gathered)
        }
        _ => (seconds, 0.0),
    };
    let overlap = if strategy == Strategy::Zero3 { 1.0 } else { OVERLAPPED } * size.compute_seconds;
    let gpu_bytes = state + a;
    Candidate {
        strategy,
        gpu_bytes,
        host_bytes: 0.0,
        fits: fits(gpu_bytes, 0.0, cluster),
        sent_bytes: sent,
        step_seconds: size.compute_seconds + (hidden - overlap).max(0.0) + exposed,
        arithmetic: format!("memory: {formula} + activations; sends {volume}"),
    }
}

fn offload(size: &TrainingSize, cluster: &Cluster, parts: &Parts) -> Candidate {
    let gpus = f64::from(cluster.gpus);
    let ring = (gpus - 1.0) / gpus;
    let Parts { parameters: p, gradients: g, optimizer: o, activations: a } = *parts;
    let sent = ring * (g + p);
    let over_links = sent / cluster.link_bytes_per_second + (g + p) / gpus / cluster.host_link_bytes_per_second;
    // The state is read and written once.
    let update = 2.0 * o / gpus / cluster.host_memory_bytes_per_second;
    let (gpu_bytes, host_bytes) = (p + g / gpus + a, (g + o) / gpus);
    Candidate {
        strategy: Strategy::ZeroOffload,
        gpu_bytes,
        host_bytes,
        fits: fits(gpu_bytes, host_bytes, cluster),
        sent_bytes: sent,
        step_seconds: size.compute_seconds + (over_links - OVERLAPPED * size.compute_seconds).max(0.0) + update,
        arithmetic:
            "memory: parameters + gradients / N + activations; the host has (gradients + optimizer) / N, reads and \
                     writes the state in each step"
                .to_owned(),
    }
}

fn pipeline(size: &TrainingSize, cluster: &Cluster, parts: &Parts) -> Candidate {
    let (stages, micro_batches) = (f64::from(cluster.gpus), f64::from(size.micro_batches));
    let state = (parts.parameters + parts.gradients + parts.optimizer) / stages;
    // A stage keeps the activations of its layers for all micro-batches in flight.
    let gpu_bytes = state + parts.activations;
    // Each of the N stages computes an Nth of the layers for the samples of N GPUs.
    let bubble = (stages - 1.0) / micro_batches;
    let sent = 2.0 * size.boundary_bytes * stages;
    Candidate {
        strategy: Strategy::Pipeline,
        gpu_bytes,
        host_bytes: 0.0,
        fits: fits(gpu_bytes, 0.0, cluster),
        sent_bytes: sent,
        step_seconds: size.compute_seconds * (1.0 + bubble) + sent / cluster.link_bytes_per_second,
        arithmetic: format!(
            "memory: (parameters + gradients + optimizer) / N + activations; idle for (N-1)/M = {bubble:.2} of the \
             computing time; sends the activations between stages forward and their gradients back"
        ),
    }
}

fn fits(gpu_bytes: f64, host_bytes: f64, cluster: &Cluster) -> bool {
    gpu_bytes <= (1.0 - RESERVED) * cluster.gpu_memory_bytes && host_bytes <= cluster.host_memory_bytes
}
