//! What a step's memory is used for, and what would make it fit.

use super::areas::{Area, draw};
use super::section;
use super::table::{Cell, numbers, table, words};
use super::text::bytes;
use crate::RunProfile;

/// Empty if the program has told nothing.
pub(super) fn forecast(run: &RunProfile) -> String {
    let Some(forecast) = &run.memory_forecast else { return String::new() };
    // The longest lived at the bottom.
    let mut uses: Vec<_> = forecast.uses.iter().collect();
    uses.sort_by_key(|it| place(&it.name));
    let areas: Vec<_> =
        uses.iter().map(|it| Area { name: &it.name, class: CLASSES[place(&it.name)], values: &it.bytes }).collect();
    let title = format!("A step with {} samples on {}", forecast.batch_size, forecast.device);
    let chart = draw(&title, &forecast.seconds, &areas, forecast.limit_bytes).unwrap_or_default();
    let size = |bytes_of: u64| bytes(bytes_of as f64);
    let mut explanation = format!("At its peak the step needs {}", size(forecast.peak_bytes));
    if let Some(limit) = forecast.limit_bytes {
        explanation += &format!(", and {} are allowed", size(limit));
        match forecast.largest_batch {
            Some(batch) => explanation += &format!(": enough for batches of {batch}"),
            None => explanation += ": not enough for one sample",
        }
    }
    explanation += ".";
    let columns = [words("With"), numbers("Peak"), words("Fits")];
    let rows = forecast.techniques.iter().map(|technique| {
        let about = if technique.is_rough { "about " } else { "" };
        let fits = forecast.limit_bytes.map_or("", |limit| if technique.peak_bytes <= limit { "yes" } else { "no" });
        vec![
            Cell::text(&technique.name.replace('`', "")),
            Cell::number(format!("{about}{}", size(technique.peak_bytes)), technique.peak_bytes as f64),
            Cell::text(fits),
        ]
    });
    let techniques = table("memory-techniques", &columns, rows.collect());
    section("What memory is used for", &explanation, &(chart + &techniques))
}

const NAMES: [&str; 6] = ["parameters", "optimizer state", "gradients", "inputs", "activations", "temporaries"];
const CLASSES: [&str; 7] = ["data", "optimizer", "backward", "copy", "forward", "other", "communication"];

fn place(name: &str) -> usize {
    NAMES.iter().position(|it| *it == name).unwrap_or(NAMES.len())
}
