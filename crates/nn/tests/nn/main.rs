//! Modules, files and functions as a user calls them, beyond what the parity cases compare with PyTorch.

mod attention;
mod bad_input;
mod custom_fwd;
mod dcp;
mod files;
mod function;
mod grad;
mod gradcheck;
mod hostile;
mod hostile_pt;
mod loading;
mod metrics;
mod models;
mod summary;
