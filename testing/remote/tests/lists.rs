//! Lists that never end are errors.

use anyhow::{Context, Result, ensure};
use overdrive_dataload::{DataError, ImageFolder, WebDataset, list_store};

use crate::files;

pub const TESTS: &[files::Test] = &[("lists_that_never_end_are_errors", lists_that_never_end_are_errors)];

fn lists_that_never_end_are_errors() -> Result<()> {
    for (fault, what) in [
        ("endless-0", "expected a list of files that ends, found two pages that begin with endless-0/shards/00.tar"),
        ("hollow-0", "expected a list of files that ends, found more than 1000 pages without a file"),
        ("flood-0", "it could not be fetched"),
    ] {
        files::write(&format!("{fault}/shards"), 2)?;
        let folder = format!("s3://data/{fault}/shards");
        let mut asked = vec![(folder.clone(), list_store(&folder).err())];
        // The others take as many requests.
        if fault == "endless-0" {
            let pattern = format!("{folder}/*.tar");
            asked.push((pattern.clone(), WebDataset::open(&pattern).err()));
            asked.push((folder.clone(), ImageFolder::open(&folder).err()));
        }
        for (asked, found) in asked {
            let error = found.context("it should be an error")?;
            let is_typed = matches!(error, DataError::Layout { .. } | DataError::Remote { .. });
            let said = error.to_string();
            ensure!(is_typed && said.contains(what) && said.starts_with(&asked), "{fault}: {said}");
        }
    }
    Ok(())
}
