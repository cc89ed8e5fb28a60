#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    overdrive_jpeg_fuzz::jpeg(bytes);
});
