//! What `cargo metadata` says about the workspace's own packages.

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::workspace::{self, Workspace};

#[derive(Debug, Deserialize)]
struct Metadata {
    packages: Vec<Package>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct Package {
    pub name: String,
    pub manifest_path: PathBuf,
    pub license: Option<String>,
    #[serde(default)]
    pub dependencies: Vec<Dependency>,
    #[serde(default)]
    pub targets: Vec<Target>,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct Dependency {
    /// Set for packages of the workspace.
    pub path: Option<PathBuf>,
    /// `dev` or `build`; `None` for those of the library and the programs.
    pub kind: Option<String>,
    /// Whether only a feature needs it.
    #[serde(default)]
    pub optional: bool,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct Target {
    pub name: String,
    pub kind: Vec<String>,
    pub src_path: PathBuf,
}

/// The packages of the workspace.
pub fn packages(ws: &Workspace) -> Result<Vec<Package>> {
    let json = workspace::capture(&mut ws.cargo(["metadata", "--no-deps", "--format-version", "1"]))?;
    Ok(serde_json::from_str::<Metadata>(&json).context("cannot read what `cargo metadata` printed")?.packages)
}
