//! The pictures in `docs/schedules` are up to date.

use std::fs;
use std::path::Path;

// The example that writes them; its `main` is not run here.
#[expect(dead_code)]
#[path = "../../examples/plots.rs"]
mod plots;

#[test]
fn the_pictures_in_the_docs_are_up_to_date() -> Result<(), Box<dyn std::error::Error>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/schedules");
    let remedy = "run `cargo run -p overdrive-sched --no-default-features --example plots`";
    let pictures = plots::pictures()?;
    for (name, svg) in &pictures {
        let path = folder.join(format!("{name}.svg"));
        let found = fs::read_to_string(&path).map_err(|error| format!("{}: {error}; {remedy}", path.display()))?;
        assert!(found == *svg, "{} is not what the crate draws; {remedy}", path.display());
    }
    let page = fs::read_to_string(folder.join("../schedules.md"))?;
    for (name, _) in &pictures {
        assert!(page.contains(&format!("schedules/{name}.svg")), "docs/schedules.md does not show {name}");
    }
    assert_eq!(fs::read_dir(&folder)?.count(), pictures.len(), "a file that is not a picture of the example");
    Ok(())
}
