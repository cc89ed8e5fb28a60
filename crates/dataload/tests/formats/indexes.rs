//! Indexes beside shards: any sample in few bytes, and the same samples as without.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::Stateful;
use overdrive_dataload::{
    DataError, DataLoader, Dataset, IterableDataset, Philox, ShardListDataset, StreamPosition, TfRecord,
    TfRecordDataset, TfRecordWriter, WebDataset, WebDatasetWriter, WebSample,
};
use tempfile::TempDir;

use crate::fixture;

/// Bytes that do not compress.
fn noise(stream: u64, bytes: usize) -> Vec<u8> {
    let numbers = Philox::new(3, stream);
    (0..bytes.div_ceil(8) as u64).flat_map(|at| numbers.at(at).to_le_bytes()).take(bytes).collect()
}

/// The files of sample `i`; every third one has no label.
fn files(i: usize, bytes: usize) -> Vec<(&'static str, Vec<u8>)> {
    let mut files = vec![("bin", noise(i as u64, bytes))];
    if !i.is_multiple_of(3) {
        files.push(("cls", i.to_string().into_bytes()));
    }
    files
}

pub(crate) fn tar(folder: &Path, ending: &str, samples: usize, bytes: usize) -> PathBuf {
    let pattern = format!("{}/%d.{ending}", folder.display());
    let mut writer = WebDatasetWriter::builder(pattern).index(true).build().unwrap();
    (0..samples).for_each(|i| writer.write(&format!("train/{i:04}"), &files(i, bytes)).unwrap());
    writer.finish().unwrap().remove(0)
}

pub(crate) fn records(folder: &Path, ending: &str, count: usize, bytes: usize) -> PathBuf {
    let mut writer = TfRecordWriter::with_index(folder.join(format!("0.{ending}"))).unwrap();
    (0..count).for_each(|i| writer.write(&noise(i as u64, bytes + i)).unwrap());
    writer.finish().unwrap()
}

pub(crate) fn index_of(shard: &Path) -> PathBuf {
    PathBuf::from(format!("{}.idx", shard.display()))
}

/// The same shard without an index.
fn without_index(shard: &Path) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join(shard.file_name().unwrap());
    fs::copy(shard, &copy).unwrap();
    (dir, copy)
}

pub(crate) fn web(shard: &Path) -> WebDataset {
    WebDataset::from_files([shard]).unwrap()
}

pub(crate) fn tfrecord(shard: &Path) -> TfRecordDataset {
    TfRecordDataset::from_files([shard]).unwrap()
}

/// What a sample consists of, without its shard.
pub(crate) fn content(sample: WebSample) -> (String, Vec<(String, Vec<u8>)>) {
    (sample.key().to_owned(), sample.into_files())
}

const ENDINGS: [&str; 2] = ["tar", if cfg!(feature = "zstd") { "tar.zst" } else { "tar" }];

/// Compares the rest from every position, and every sample in reverse order.
fn assert_same<S: PartialEq>(whole: &[S], from: impl Fn(StreamPosition) -> Vec<S>, list: &impl Dataset<Sample = S>) {
    for sample in 0..=whole.len() + 1 {
        let rest = from(StreamPosition { shard: 0, sample: sample as u64 });
        assert!(rest == whole[whole.len().min(sample)..], "from {sample}");
    }
    assert_eq!(list.len(), whole.len());
    (0..whole.len()).rev().for_each(|index| assert!(list.get(index).unwrap() == whole[index], "{index}"));
    assert!(matches!(list.get(whole.len()), Err(DataError::IndexOutOfRange { .. })));
}

#[test]
fn every_sample_is_found_with_an_index_as_without() -> Result<(), DataError> {
    for ending in ENDINGS {
        let dir = tempfile::tempdir().unwrap();
        // Samples that lie in one of zstd's frames, and in two.
        let shard = tar(dir.path(), ending, 25, 70_000);
        let (_kept, plain) = without_index(&shard);
        // All of them; those that have a label.
        for (extensions, count) in [(&["bin", "cls"][..], 25), (&["CLS"], 16)] {
            let open = |shard: &Path| web(shard).select(extensions);
            let whole: Vec<_> = open(&plain).stream([0]).map(|sample| content(sample.unwrap())).collect();
            assert_eq!(whole.len(), count);
            let from = |position| open(&shard).stream_from([0], position).map(|it| content(it.unwrap())).collect();
            let list = ShardListDataset::new(open(&shard))?;
            assert_eq!(list.key(7), Some(format!("{}, sample 7", shard.display())));
            assert_same(&whole, from, &list.map(|sample| Ok(content(sample))));
        }
    }
    Ok(())
}

#[test]
fn every_record_is_found_with_an_index_as_without() -> Result<(), DataError> {
    for ending in ENDINGS.map(|ending| ending.replace("tar", "tfrecord")) {
        let dir = tempfile::tempdir().unwrap();
        let shard = records(dir.path(), &ending, 25, 70_000);
        let (_kept, plain) = without_index(&shard);
        let content = |record: TfRecord| (record.offset(), record.into_bytes());
        let whole: Vec<_> = tfrecord(&plain).stream([0]).map(|record| content(record.unwrap())).collect();
        assert_eq!(whole.len(), 25);
        let from = |position| tfrecord(&shard).stream_from([0], position).map(|it| content(it.unwrap())).collect();
        let list = ShardListDataset::new(tfrecord(&shard))?;
        assert_same(&whole, from, &list.map(move |record| Ok(content(record))));
    }
    Ok(())
}

/// The bytes that this thread has read.
#[cfg(target_os = "linux")]
fn bytes_read() -> u64 {
    let counts = fs::read_to_string("/proc/thread-self/io").unwrap();
    let line = counts.lines().find_map(|line| line.strip_prefix("rchar: "));
    line.and_then(|count| count.parse().ok()).unwrap()
}

#[test]
#[cfg(target_os = "linux")]
fn resuming_and_random_access_read_few_bytes() -> Result<(), DataError> {
    const SAMPLES: usize = 120;
    const BYTES: usize = 100_000;
    // In zstd's frames of 512 KiB: the last one, to check the index, and those of the sample.
    let limits = [300_000, 4 << 19];
    for (ending, limit) in ENDINGS.into_iter().zip(limits) {
        let dir = tempfile::tempdir().unwrap();
        let shard = tar(dir.path(), ending, SAMPLES, BYTES);
        let record = records(dir.path(), &ending.replace("tar", "tfrecord"), SAMPLES, BYTES);
        assert!(fs::metadata(&shard).unwrap().len() > 5 * limit);

        let of_shard = web(&shard).map(|sample| Ok(content(sample).0));
        let numbers: Vec<Vec<u8>> = (0..SAMPLES).map(|i| noise(i as u64, BYTES + i)).collect();
        let of_record = tfrecord(&record).map(|record| Ok(record.into_bytes()));
        resumes(of_shard, |key| key == "train/0080", limit);
        resumes(of_record, |bytes| bytes == numbers[80], limit);

        let list = ShardListDataset::new(web(&shard))?;
        let before = bytes_read();
        assert_eq!(list.get(70)?.key(), "train/0070");
        assert!(bytes_read() - before < limit, "{ending}: {} bytes", bytes_read() - before);
        let list = ShardListDataset::new(tfrecord(&record))?;
        let before = bytes_read();
        assert_eq!(list.get(70)?.bytes(), numbers[70]);
        assert!(bytes_read() - before < limit, "{ending}: {} bytes", bytes_read() - before);
    }
    Ok(())
}

/// Takes 80 batches of one sample, and resumes.
#[cfg(target_os = "linux")]
fn resumes<D>(dataset: D, is_81st: impl Fn(D::Sample) -> bool, limit: u64)
where
    D: IterableDataset + Clone + 'static,
{
    let build = || {
        let builder = DataLoader::stream(dataset.clone()).batch_size(1).interleave(1).num_workers(0);
        builder.collate(|mut samples: Vec<D::Sample>| Ok(samples.remove(0))).build().unwrap()
    };
    let first = build();
    first.iter().take(80).for_each(|batch| drop(batch.unwrap()));
    let state = first.state_dict().unwrap();
    let mut second = build();
    second.load_state_dict(&state).unwrap();
    let before = bytes_read();
    assert!(is_81st(second.iter().next().unwrap().unwrap()));
    assert!(bytes_read() - before < limit, "{} bytes", bytes_read() - before);
}

#[test]
fn indexes_that_python_wrote_are_read_and_ours_are_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let shard = dir.path().join("web-001.tar");
    fs::copy(fixture("web-001.tar"), &shard).unwrap();
    // Under the name that `wds2idx` gives it.
    let theirs = fs::read_to_string(fixture("index/web-001.idx")).unwrap();
    fs::write(dir.path().join("web-001.idx"), &theirs).unwrap();
    let list = ShardListDataset::new(web(&shard)).unwrap();
    let expected: Vec<_> = web(&fixture("web-001.tar")).stream([0]).map(|sample| content(sample.unwrap())).collect();
    assert!((0..list.len()).map(|index| content(list.get(index).unwrap())).eq(expected));
    assert_eq!(web(&shard).write_index(0).unwrap(), 4);
    let ours = fs::read_to_string(index_of(&shard)).unwrap();
    assert_eq!(ours.lines().skip(1).collect::<Vec<_>>(), theirs.lines().skip(1).collect::<Vec<_>>());
    assert!(ours.starts_with("v1.2 4 "), "DALI reads the first two words");

    let shard = dir.path().join("examples.tfrecord");
    fs::copy(fixture("examples.tfrecord"), &shard).unwrap();
    assert_eq!(tfrecord(&shard).write_index(0).unwrap(), 6);
    let theirs = fs::read_to_string(fixture("index/examples.tfrecord.idx")).unwrap();
    assert_eq!(fs::read_to_string(index_of(&shard)).unwrap(), theirs);
}

#[test]
fn extended_headers_and_other_files_lie_between_samples() {
    for name in ["names-pax.tar", "names-gnu.tar"] {
        let dir = tempfile::tempdir().unwrap();
        let shard = dir.path().join(name);
        fs::copy(fixture(name), &shard).unwrap();
        assert_eq!(web(&shard).write_index(0).unwrap(), 3);
        let expected: Vec<_> = web(&fixture(name)).stream([0]).map(|sample| content(sample.unwrap())).collect();
        let read = || {
            let list = ShardListDataset::new(web(&shard)).unwrap();
            (0..list.len()).map(|index| content(list.get(index).unwrap())).collect::<Vec<_>>()
        };
        assert_eq!(read(), expected);
        // Of a copy, whose time of the last change differs, the headers between the samples are read again.
        let text = fs::read_to_string(index_of(&shard)).unwrap();
        let lines: Vec<&str> = text.lines().skip(1).collect();
        fs::write(index_of(&shard), format!("v1.2 3\n{}\n", lines.join("\n"))).unwrap();
        assert_eq!(read(), expected);
        // As `wds2idx` lists files that belong to no sample.
        let readme = format!("v1.2 4\nfolder/README 2048 6 folder/README\n{}\n", lines.join("\n"));
        fs::write(index_of(&shard), readme).unwrap();
        assert_eq!(read(), expected);
    }
}

/// Any other reader of zstd reads what the frames hold.
#[test]
#[cfg(feature = "zstd")]
fn shards_in_frames_are_plain_zstd() {
    let dir = tempfile::tempdir().unwrap();
    for (samples, bytes) in [(0, 0), (1, 0), (20, 70_000)] {
        let shard = records(dir.path(), "tfrecord.zst", samples, bytes);
        let plain = records(dir.path(), "tfrecord", samples, bytes);
        let unpacked = zstd::decode_all(&*fs::read(&shard).unwrap()).unwrap();
        assert!(unpacked == fs::read(&plain).unwrap(), "{samples} records");
        assert_eq!(fs::read(index_of(&shard)).unwrap(), fs::read(index_of(&plain)).unwrap());
    }
}
