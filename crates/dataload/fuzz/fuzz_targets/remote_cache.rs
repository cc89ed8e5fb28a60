#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    overdrive_dataload_fuzz::run("remote_cache", bytes);
});
