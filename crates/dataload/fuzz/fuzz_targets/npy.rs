//! Any bytes as an npy file.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    _ = overdrive_dataload::decode_npy(bytes, Path::new("fuzz.npy"));
});
