//! Layers, beyond what the parity cases compare with PyTorch.

mod metrics;
