//! Any bytes as a Parquet file, column by column.

#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use overdrive_dataload::ParquetDataset;

fuzz_target!(|bytes: &[u8]| {
    let Ok(dataset) = ParquetDataset::from_bytes(bytes.to_vec(), Path::new("fuzz.parquet")) else { return };
    // Without checksums the damage gets further. A small limit, since a few bytes may stand for many equal values.
    let dataset = dataset.threads(1).verify_crc(false).max_column_bytes(1 << 24);
    let names: Vec<String> = dataset.fields().map(|field| field.name().to_owned()).collect();
    for name in names {
        _ = dataset.clone().select([&name]).and_then(|column| column.read());
        _ = dataset.clone().select([&name]).and_then(|column| column.fill_null(&name, 0.0)?.read());
    }
});
