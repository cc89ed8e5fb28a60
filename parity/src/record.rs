//! A case's inputs and expected values from Python, and its results in Rust.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tch::Tensor;

/// One value to compare, with its tolerances.
#[derive(Debug, Deserialize)]
pub struct Check {
    pub name: String,
    pub rtol: f64,
    pub atol: f64,
}

#[derive(Debug, Deserialize)]
struct Text {
    checks: Vec<Check>,
    values: BTreeMap<String, serde_json::Value>,
    failure: Option<String>,
    #[serde(default)]
    missing: Option<String>,
}

/// What Python wrote for one case.
pub struct Record {
    pub checks: Vec<Check>,
    pub failure: Option<String>,
    /// A Python package that the case needs and that is not installed.
    pub missing: Option<String>,
    values: BTreeMap<String, serde_json::Value>,
    tensors: BTreeMap<String, Tensor>,
}

impl Record {
    pub fn read(dir: &Path, name: &str) -> Result<Self> {
        let text = std::fs::read(dir.join(format!("{name}.json")))?;
        let Text { checks, values, failure, missing } = serde_json::from_slice(&text)?;
        if missing.is_some() {
            return Ok(Self { checks, failure, missing, values, tensors: BTreeMap::new() });
        }
        let tensors = Tensor::read_safetensors(dir.join(format!("{name}.safetensors")))?.into_iter().collect();
        Ok(Self { checks, failure, missing, values, tensors })
    }

    pub fn expected(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(&format!("expected.{name}"))
    }
}

/// A case's inputs from Python.
pub struct Given<'a> {
    record: &'a Record,
    records: PathBuf,
    mnist: PathBuf,
}

impl<'a> Given<'a> {
    pub fn new(record: &'a Record, records: &Path, mnist: &Path) -> Self {
        Self { record, records: records.to_owned(), mnist: mnist.to_owned() }
    }

    /// The folder with Python's files, for another process of the same case.
    pub fn records(&self) -> &Path {
        &self.records
    }

    /// A copy of the tensor that Python gave under this name.
    pub fn tensor(&self, name: &str) -> Result<Tensor> {
        let tensor = self.record.tensors.get(&format!("given.{name}"));
        Ok(tensor.with_context(|| format!("Python gave no tensor `{name}`"))?.copy())
    }

    /// The plain value that Python gave under this name.
    pub fn value<T: DeserializeOwned>(&self, name: &str) -> Result<T> {
        let value = self.record.values.get(name).with_context(|| format!("Python gave no value `{name}`"))?;
        T::deserialize(value).with_context(|| format!("Python's `{name}` has an unexpected type"))
    }

    /// The folder with the shipped MNIST images.
    pub fn mnist(&self) -> &Path {
        &self.mnist
    }
}

/// A case's results, by the names that Python uses for the expected values.
#[derive(Default)]
pub struct Found(BTreeMap<String, Tensor>);

impl Found {
    pub fn insert(&mut self, name: impl Into<String>, tensor: &Tensor) {
        // A copy, because most cases later change the tensor in place.
        self.0.insert(name.into(), tensor.detach().copy());
    }

    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.0.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}
