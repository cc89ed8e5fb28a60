//! Any bytes as a TFRecord file, and as an example in a record of their own.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use overdrive_dataload::{DataError, TfRecord, TfRecords};

fn read(file: Vec<u8>) {
    let Ok(records) = TfRecords::from_bytes(file, Path::new("fuzz.tfrecord")) else { return };
    // No fuzzer finds a checksum by itself.
    for record in records.verify_crc(false) {
        _ = record.and_then(|record: TfRecord| -> Result<(), DataError> { record.example().map(drop) });
    }
}

fuzz_target!(|bytes: &[u8]| {
    read(bytes.to_vec());
    read([&(bytes.len() as u64).to_le_bytes()[..], &[0; 4], bytes, &[0; 4]].concat());
});
