//! Any bytes as a safetensors file, each of its tensors read.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use overdrive_dataload::SafeTensorsFile;

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut file) = SafeTensorsFile::from_bytes(bytes.to_vec(), Path::new("fuzz.safetensors")) else { return };
    for name in file.names() {
        _ = file.tensor(&name);
    }
});
