#![no_main]

use std::collections::BTreeSet;
use std::panic::{set_hook, take_hook};
use std::sync::{Mutex, PoisonError};

/// The places of guarded panics that were printed already.
static SEEN: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// The crate turns panics of the `parquet` crate into errors. Their places are printed; any other panic ends the run.
fn let_guarded_panics_pass() {
    let abort = take_hook();
    set_hook(Box::new(move |panic| match panic.location() {
        Some(place) if ["/parquet-", "/bytes-"].iter().any(|guarded| place.file().contains(guarded)) => {
            let place = place.to_string();
            if SEEN.lock().unwrap_or_else(PoisonError::into_inner).insert(place.clone()) {
                eprintln!("guarded: {place}");
            }
        }
        _ => abort(panic),
    }));
}

libfuzzer_sys::fuzz_target!(init: let_guarded_panics_pass(), |bytes: &[u8]| {
    overdrive_dataload_fuzz::run("parquet", bytes);
});
