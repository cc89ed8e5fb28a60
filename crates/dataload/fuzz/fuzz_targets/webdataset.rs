//! Any bytes as a shard, as they are and with good checksums.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use overdrive_dataload::WebSamples;

fn read(shard: Vec<u8>) {
    if let Ok(samples) = WebSamples::from_bytes(shard, Path::new("fuzz.tar")) {
        samples.for_each(drop);
    }
}

fuzz_target!(|bytes: &[u8]| {
    read(bytes.to_vec());
    let mut checked = bytes.to_vec();
    for block in checked.chunks_exact_mut(512).filter(|block| block[257..262] == *b"ustar") {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    read(checked);
});
