//! Notes: what is missing, and why.

use super::section;
use super::text::{prose, time};
use crate::{Diagnosis, RunProfile};

/// Notes of the recording, gaps of the monitor, and what could not be judged.
pub(super) fn notes(run: &RunProfile, diagnosis: &Diagnosis) -> String {
    // A diagnosis repeats the notes of the recording.
    let unknown = diagnosis.unknown.iter().filter(|why| !run.notes.contains(why));
    let mut notes: Vec<String> = unknown.map(|why| format!("Not judged: {why}")).collect();
    notes.extend(run.notes.iter().cloned());
    if let Some(steps) = &run.steps {
        notes.extend(steps.device_fault.iter().map(|fault| format!("Device times ended with an error: {fault}")));
        if let Some(lost) = steps.device.as_ref().map(|device| device.lost_steps).filter(|lost| *lost > 0) {
            notes.push(format!("{lost} steps have no device times, mostly because the device was too far behind"));
        }
        if steps.clock_jumps > 0 {
            notes.push(format!("The clock ran backwards {} times; that time counts as 0", steps.clock_jumps));
        }
    }
    notes.extend(run.gaps.iter().map(|gap| {
        let until = gap.to_seconds.map_or_else(|| "to the end".to_owned(), |to| format!("to {}", time(to)));
        format!("Not sampled, from {} {until}: {}: {}", time(gap.from_seconds), gap.source, gap.reason)
    }));
    if notes.is_empty() {
        return section("Notes", "Nothing is missing.", "");
    }
    let items: String = notes.iter().map(|note| format!("<li>{}</li>", prose(note))).collect();
    section("Notes", "", &format!("<div class=\"notes\"><ul>{items}</ul></div>"))
}
