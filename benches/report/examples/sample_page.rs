//! Writes pages of made-up numbers, to look at the layout: `cargo run -p overdrive-bench-report --example sample_page`.

use std::error::Error;
use std::path::Path;

use overdrive_bench_report::{html, sample, table, write_atomically};

fn main() -> Result<(), Box<dyn Error>> {
    for (name, report) in [("sample-full", sample::report()), ("sample-quick", sample::quick())] {
        let path = Path::new("target/bench").join(name);
        write_atomically(&path.with_extension("html"), html::render(&report).as_bytes())?;
        write_atomically(&path.with_extension("json"), report.to_json()?.as_bytes())?;
        println!("{}\n{}\n", path.with_extension("html").display(), table::render(&report));
    }
    Ok(())
}
