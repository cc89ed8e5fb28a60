//! Layers, models and files, beyond what the parity cases compare with PyTorch.

mod attention;
mod bad_input;
mod files;
mod hostile;
mod hostile_pt;
mod loading;
mod models;
mod summary;
