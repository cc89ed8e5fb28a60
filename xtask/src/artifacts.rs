//! The programs that cargo has built.

use std::path::PathBuf;

use anyhow::Result;
use serde::Deserialize;

use crate::workspace::{self, Workspace};

/// A program of the workspace.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// The name of its target.
    pub name: String,
    /// The path of its source file.
    pub source: PathBuf,
    pub path: PathBuf,
}

/// The fields of a line of cargo's JSON that say what was built.
#[derive(Debug, Deserialize)]
struct Artifact {
    target: Target,
    executable: Option<PathBuf>,
}

#[derive(Debug, Deserialize)]
struct Target {
    name: String,
    src_path: PathBuf,
}

/// Runs cargo with these arguments, and returns the programs that it built.
pub fn build(ws: &Workspace, args: &[&str]) -> Result<Vec<Program>> {
    let json = workspace::capture(ws.cargo(args).arg("--message-format=json-render-diagnostics"))?;
    Ok(programs(&json))
}

fn programs(json: &str) -> Vec<Program> {
    let artifacts = json.lines().filter_map(|line| serde_json::from_str::<Artifact>(line).ok());
    let program =
        |it: Artifact| Some(Program { name: it.target.name, source: it.target.src_path, path: it.executable? });
    artifacts.filter_map(program).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_cargo_s_json() {
        let json = r#"{"reason":"compiler-artifact","target":{"name":"a","src_path":"/a.rs"},"executable":null}
{"reason":"compiler-artifact","target":{"name":"gpu","src_path":"/gpu.rs"},"executable":"/t/gpu-1"}
{"reason":"build-finished","success":true}
"#;
        let gpu = Program { name: "gpu".into(), source: "/gpu.rs".into(), path: "/t/gpu-1".into() };
        assert_eq!(programs(json), [gpu]);
    }
}
