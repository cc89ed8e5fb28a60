//! A run as an HTML page: a single file that loads nothing else, light or dark as the reader's system.

mod areas;
mod chart;
mod diagnosis;
mod forecast;
mod machine;
mod notes;
mod ops;
mod ranks;
mod steps;
pub(crate) mod summary;
mod table;
pub(crate) mod text;

use std::path::Path;

use self::text::{escape, fill, prose};
use crate::trace::replace;
use crate::{Diagnosis, ProfileError, RunProfile};

impl RunProfile {
    /// The run as an HTML page: what bounds it, where the time of its steps goes, operators, memory, CPUs, GPUs, ranks
    /// and threads. The page loads nothing else, and is complete without its script, which sorts tables.
    pub fn html(&self, diagnosis: &Diagnosis) -> String {
        let sections = [
            summary::figures(self),
            steps::timeline(self),
            steps::phases(self),
            ops::operators(self),
            ops::scopes(self),
            ops::gaps(self),
            machine::memory(self),
            forecast::forecast(self),
            machine::use_over_time(self),
            ranks::ranks(self),
            machine::threads(self),
            notes::notes(self, diagnosis),
        ];
        fill(
            include_str!("page.html"),
            &[
                ("title", &escape(&format!("Profile of {}", summary::program(self)))),
                ("style", include_str!("page.css")),
                ("summary", &summary::line(self)),
                ("headline", &escape(&diagnosis::headline(diagnosis))),
                ("diagnosis", &diagnosis::findings(diagnosis)),
                ("sections", &sections.concat()),
                ("script", include_str!("page.js")),
            ],
        )
    }

    /// Writes [`html`](Self::html) to a file, which appears when it is complete.
    ///
    /// # Errors
    /// `Io` when the file cannot be written, or something other than a regular file is there. Links are followed.
    pub fn write_html(&self, diagnosis: &Diagnosis, path: impl AsRef<Path>) -> Result<(), ProfileError> {
        replace(path.as_ref(), |out| out.write_all(self.html(diagnosis).as_bytes()))
    }
}

/// A section of the page. `body` is HTML.
fn section(title: &str, explanation: &str, body: &str) -> String {
    let explanation = match explanation {
        "" => String::new(),
        text => format!("<p class=\"quiet\">{}</p>\n", prose(text)),
    };
    format!("<section>\n<h2>{}</h2>\n{explanation}{body}\n</section>\n", escape(title))
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
