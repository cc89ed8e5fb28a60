use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use overdrive_core::Stateful;
use overdrive_dataload::{
    Cancellation, DataError, DataLoader, Deferred, IterableDataset, StreamPosition, WebDataset, WebDatasetWriter,
    WebSample, WebSamples,
};

use crate::{fixture, names_file, sample};

fn open(pattern: &str) -> WebDataset {
    WebDataset::open(fixture(pattern).to_str().unwrap()).unwrap()
}

fn all(dataset: &WebDataset) -> Vec<WebSample> {
    dataset.stream(0..dataset.shards()).collect::<Result<_, _>>().unwrap()
}

fn assert_is_web_sample(found: &WebSample, i: usize) {
    assert_eq!(found.key(), format!("train/{i:04}"));
    let expected: [(&str, Vec<u8>); 4] = [
        ("bin", sample(i)),
        ("cls", (i % 3).to_string().into_bytes()),
        ("seg.json", format!("{{\"id\": {i}}}").into_bytes()),
        ("txt", format!("sample {i}").into_bytes()),
    ];
    assert!(found.files().eq(expected.iter().map(|(extension, bytes)| (*extension, bytes.as_slice()))), "{found:?}");
}

#[test]
fn shards_that_python_wrote_read_back_with_equal_content() {
    for pattern in [
        "web-{000..002}.tar",
        "web-*.tar",
        "web.tar.gz",
        #[cfg(feature = "zstd")]
        "web.tar.zst",
    ] {
        let samples = all(&open(pattern));
        assert_eq!(samples.len(), 10, "{pattern}");
        samples.iter().enumerate().for_each(|(i, sample)| assert_is_web_sample(sample, i));
    }
}

#[test]
fn only_selected_files_are_read() {
    let samples = all(&open("web-*.tar").select(["CLS", "seg.json"]));
    assert_eq!(samples.len(), 10);
    assert!(samples.iter().all(|sample| sample.files().len() == 2 && sample.get("bin").is_none()));
    assert!(all(&open("web-*.tar").select(["png"])).is_empty());
}

/// The ends of windows depend on the bytes of samples.
#[test]
fn a_state_of_another_selection_is_refused() -> Result<(), DataError> {
    let loader = |extensions: &[&str]| {
        let stream = open("web-*.tar").select(extensions).map(|sample| Ok(sample.key().to_owned()));
        DataLoader::stream(stream).batch_size(2).num_workers(0).collate(|keys: Vec<String>| Ok(keys)).build()
    };
    let state = loader(&["cls"])?.state_dict().unwrap();
    loader(&["cls"])?.load_state_dict(&state).unwrap();
    for other in [&["cls", "bin"][..], &["bin"]] {
        assert!(loader(other)?.load_state_dict(&state).is_err(), "{other:?}");
    }
    Ok(())
}

#[test]
fn long_names_links_folders_and_hidden_files() {
    for name in ["names-pax.tar", "names-gnu.tar"] {
        let mut samples = all(&open(name));
        let long = format!("{}/été", ["folder-with-a-long-name"; 8].join("/"));
        let keys: Vec<_> = samples.iter().map(WebSample::key).collect();
        assert_eq!(keys, ["a.b/one", "a.b/two", &long]);
        assert_eq!((samples[0].get("jpg"), samples[0].get("seg.png")), (Some(&b"first"[..]), Some(&b""[..])));
        assert_eq!(samples[2].take("txt").unwrap(), b"name");
        assert_eq!(samples[2].shard(), fixture(name));
    }
}

#[test]
fn every_position_resumes_exactly() {
    for (pattern, shards) in [("web-{000..002}.tar", 3), ("web.tar.gz", 1)] {
        let dataset = open(pattern);
        let whole = all(&dataset);
        let mut stream = dataset.stream(0..shards);
        for given in 0..=whole.len() {
            let rest: Vec<_> = dataset.stream_from(0..shards, stream.position()).map(Result::unwrap).collect();
            assert_eq!(rest, whole[given..]);
            stream.next();
        }
        let beyond = StreamPosition { shard: 0, sample: u64::MAX };
        assert_eq!(dataset.stream_from([0], beyond).count(), 0);
    }
}

#[test]
fn threads_share_a_dataset() {
    let dataset = open("web-*.tar");
    let counts: usize = std::thread::scope(|scope| {
        let count = |worker: usize| dataset.stream((worker..3).step_by(2)).map(Result::unwrap).count();
        let workers: Vec<_> = (0..2).map(|worker| scope.spawn(move || count(worker))).collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).sum()
    });
    assert_eq!(counts, 10);
}

#[test]
fn a_missing_shard_is_named() {
    let error = WebDataset::open(fixture("web-{000..003}.tar").to_str().unwrap()).unwrap_err();
    names_file(&error, "web-003.tar");
    assert!(matches!(WebDataset::from_files(Vec::<PathBuf>::new()), Err(DataError::InvalidOption { .. })));
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.tar"), fs::read(fixture("web-000.tar")).unwrap()).unwrap();
    let dataset = WebDataset::from_files([dir.path().join("a.tar")]).unwrap();
    fs::remove_file(dir.path().join("a.tar")).unwrap();
    names_file(&dataset.stream(0..1).next().unwrap().unwrap_err(), "a.tar");
}

/// All samples of a shard's bytes.
pub fn read(bytes: &[u8]) -> Result<Vec<WebSample>, DataError> {
    WebSamples::from_bytes(bytes.to_vec(), Path::new("some.tar"))?.collect()
}

fn corrupt_at(bytes: &[u8]) -> u64 {
    match read(bytes) {
        Err(error @ DataError::Corrupt { offset, .. }) => {
            names_file(&error, "some.tar");
            offset
        }
        other => panic!("expected a corrupt shard, got {other:?}"),
    }
}

#[test]
fn a_cut_anywhere_is_an_error() {
    for name in [
        "web-002.tar",
        "web.tar.gz",
        #[cfg(feature = "zstd")]
        "web.tar.zst",
    ] {
        let whole = fs::read(fixture(name)).unwrap();
        // After the end mark, a plain archive only has padding.
        let end = if name == "web-002.tar" { whole.iter().rposition(|&byte| byte != 0).unwrap() } else { whole.len() };
        for cut in (0..end).step_by(if end > 4096 { 7 } else { 1 }) {
            assert!(read(&whole[..cut]).is_err(), "{name} cut at {cut}");
        }
    }
    assert_eq!(corrupt_at(&[]), 0);
}

#[test]
fn a_flipped_bit_in_a_compressed_shard_is_found() {
    for name in [
        "web.tar.gz",
        #[cfg(feature = "zstd")]
        "web.tar.zst",
    ] {
        let whole = fs::read(fixture(name)).unwrap();
        let good = read(&whole).unwrap();
        for position in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[position] ^= 0x10;
            // A header's time and a frame's unused bits carry no data.
            if let Ok(samples) = read(&flipped) {
                assert_eq!(samples, good, "{name} flipped at {position}");
            }
        }
    }
}

#[test]
fn bad_headers_are_errors_with_their_offset() {
    let good = fs::read(fixture("web-002.tar")).unwrap();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        changed
    };
    assert_eq!(corrupt_at(b"not a tar"), 0);
    assert_eq!(corrupt_at(&[b'x'; 4096]), 0);
    assert_eq!(corrupt_at(&with(3, b"x")), 0);
    assert_eq!(corrupt_at(&checked(with(124, b"77777777777"))), 0);
    assert_eq!(corrupt_at(&checked(with(124, &[0x80, 0, 0, 0, 0x7f, 255, 255, 255, 255, 255, 255, 255]))), 0);
    assert_eq!(corrupt_at(&checked(with(124, b"not a size!"))), 0);
    assert_eq!(corrupt_at(&checked(with(0, b"\xff\xfe.jpg\0"))), 0);
    assert_eq!(corrupt_at(&checked(with(156, b"S"))), 0);
    // Two concatenated archives: everything after the first end mark would be lost.
    assert_eq!(corrupt_at(&[good.as_slice(), &good].concat()), good.len() as u64);
}

/// Corrects the first header's checksum.
fn checked(mut shard: Vec<u8>) -> Vec<u8> {
    shard[148..156].fill(b' ');
    let sum: u32 = shard[..512].iter().map(|&byte| u32::from(byte)).sum();
    shard[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    shard
}

#[test]
fn absurd_sizes_take_no_memory() {
    // A header declares 64 GiB of name or file, which gzip could compress to almost nothing; only the start is there.
    for kind in [b'L', b'x', b'0'] {
        let mut header = fs::read(fixture("web-002.tar")).unwrap()[..512].to_vec();
        header[124..136].copy_from_slice(&[0x80, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0]);
        header[156] = kind;
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(&checked(header)).unwrap();
        (0..64).for_each(|_| packed.write_all(&[0; 1 << 16]).unwrap());
        let error = read(&packed.finish().unwrap()).unwrap_err();
        assert!(matches!(error, DataError::TooLarge { .. }), "{error}");
    }
    let small = open("web-*.tar").max_sample_bytes(100);
    assert!(matches!(small.stream([2]).next(), Some(Err(DataError::TooLarge { limit: 100, .. }))));
}

#[test]
fn a_file_twice_in_a_sample_is_an_error() {
    let good = fs::read(fixture("web-002.tar")).unwrap();
    assert_eq!(corrupt_at(&[&good[..1024], &good[..1024]].concat()), 1024);
}

#[test]
fn written_samples_read_back() {
    for ending in [
        "tar",
        "tar.gz",
        "tgz",
        #[cfg(feature = "zstd")]
        "tar.zst",
    ] {
        let dir = tempfile::tempdir().unwrap();
        let pattern = format!("{}/out-%04d.{ending}", dir.path().display());
        let mut writer = WebDatasetWriter::builder(pattern).max_count(4).max_size(400).start_shard(7).build().unwrap();
        let long = "a-long-folder-name/".repeat(20);
        for i in 0..10 {
            writer.write(&format!("{long}{i}"), &[("bin", sample(i)), ("txt", vec![b'0' + i as u8])]).unwrap();
        }
        let files = writer.finish().unwrap();
        assert_eq!(files[0], dir.path().join(format!("out-0007.{ending}")));
        let dataset = WebDataset::from_files(&files).unwrap();
        let counts: Vec<_> = (0..files.len()).map(|shard| dataset.stream([shard]).count()).collect();
        // Shards end by count at first, then by size: samples 0..4, then 80 + 100 + 120 bytes and their texts, then two
        // and one.
        assert_eq!((counts.iter().sum::<usize>(), counts[0], counts[1]), (10, 4, 3), "{counts:?}");
        for (i, found) in all(&dataset).iter().enumerate() {
            assert_eq!((found.key(), found.get("bin")), (format!("{long}{i}").as_str(), Some(&*sample(i))));
        }
        assert!(fs::read_dir(dir.path()).unwrap().all(|entry| entry.unwrap().path().extension().unwrap() != "part"));
    }
}

#[test]
fn skipping_samples_stops_when_cancelled() {
    for name in ["web-000.tar", "web.tar.gz"] {
        let dataset = open(name);
        let cancelled = Cancellation::new();
        let from = |position| dataset.open_deferred(0, position, &cancelled).unwrap();
        let sample = from(2).next().unwrap().and_then(Deferred::get).unwrap();
        assert!(sample.key() == "train/0002");
        let mut begun = from(0);
        assert!(begun.next().unwrap().is_ok());
        cancelled.cancel();
        assert!(from(2).next().is_none());
        assert!(matches!(begun.next(), Some(Err(DataError::Cancelled))));
    }
}

#[test]
#[cfg(feature = "zstd")]
fn a_window_of_samples_that_compress_to_nothing_is_bounded_by_their_bytes() -> Result<(), DataError> {
    const BYTES: usize = 1 << 18;
    let dir = tempfile::tempdir().unwrap();
    let mut writer = WebDatasetWriter::builder(format!("{}/%d.tar.zst", dir.path().display())).build()?;
    for i in 0..24 {
        writer.write(&format!("{i:02}"), &[("bin", vec![0; BYTES])])?;
    }
    let files = writer.finish()?;
    assert!(fs::metadata(&files[0]).unwrap().len() < 24 * BYTES as u64 / 100);
    let keys = WebDataset::from_files(files)?.map(|sample| Ok(sample.key().to_owned()));
    let builder = DataLoader::stream(keys).batch_size(4).interleave(1).shuffle_buffer(24);
    let loader = builder.shuffle_buffer_bytes(4 * BYTES).collate(|keys: Vec<String>| Ok(keys)).build()?;
    for (number, batch) in loader.iter().enumerate() {
        let mut batch = batch?;
        batch.sort_unstable();
        let window: Vec<String> = (4 * number..4 * number + 4).map(|i| format!("{i:02}")).collect();
        assert_eq!(batch, window, "a window has four samples");
    }
    Ok(())
}
