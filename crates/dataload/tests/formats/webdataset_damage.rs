//! Shards with damaged headers.

use std::fs;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use overdrive_dataload::{DataError, IterableDataset, WebDataset, WebDatasetWriter, WebSample, WebSamples};

use crate::webdataset::read;
use crate::{fixture, sample};

/// Six samples of two files each.
fn pairs(long: bool) -> (Vec<u8>, Vec<WebSample>) {
    let dir = tempfile::tempdir().unwrap();
    // Its first 100 bytes, without the extended header before them, look like a name with an extension.
    let folder = if long { "a-long-folder.name-".repeat(8) + "/" } else { String::new() };
    let mut writer = WebDatasetWriter::builder(format!("{}/%d.tar", dir.path().display())).build().unwrap();
    for i in 0..6 {
        writer.write(&format!("{folder}{i}"), &[("bin", sample(i)), ("cls", vec![b'0' + i as u8])]).unwrap();
    }
    let bytes = fs::read(&writer.finish().unwrap()[0]).unwrap();
    let samples = read(&bytes).unwrap();
    (bytes, samples)
}

/// The offsets of the headers.
fn headers(shard: &[u8]) -> Vec<usize> {
    (0..shard.len()).step_by(512).filter(|&at| shard[at + 257..at + 262] == *b"ustar").collect()
}

fn items(bytes: &[u8]) -> Vec<Result<WebSample, DataError>> {
    WebSamples::from_bytes(bytes.to_vec(), Path::new("some.tar")).unwrap().collect()
}

#[test]
fn samples_behind_a_damaged_header_are_found_again() {
    let (good, _) = pairs(false);
    let (headers, mut bytes) = (headers(&good), good.clone());
    // The second file of the third sample.
    bytes[headers[5] + 3] ^= 1;
    let found = items(&bytes);
    let keys: Vec<_> = found.iter().map(|item| item.as_ref().ok().map(WebSample::key)).collect();
    assert_eq!(keys, [Some("0"), Some("1"), None, Some("4"), Some("5")]);
    let error = found[2].as_ref().unwrap_err().to_string();
    let [at, next] = [headers[5], headers[6]];
    let note = format!(
        "the next header is at byte {next}, and the {} bytes before it are lost; the samples beside it, which may lack a \
         file, are left out",
        next - at
    );
    assert!(error.contains(&format!("some.tar: at byte {at}")) && error.ends_with(&note), "{error}");
    // A resumed reader counts the error as the first one did.
    let dir = tempfile::tempdir().unwrap();
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&bytes).unwrap();
    for (name, bytes) in [("a.tar", &bytes), ("a.tar.gz", &packed.finish().unwrap())] {
        fs::write(dir.path().join(name), bytes).unwrap();
        let dataset = WebDataset::from_files([dir.path().join(name)]).unwrap();
        let key = |item: Result<WebSample, _>| item.ok().map(|sample| sample.key().to_owned());
        let mut stream = dataset.stream([0]);
        for given in 0..=keys.len() {
            let rest: Vec<_> = dataset.stream_from([0], stream.position()).map(key).collect();
            assert!(rest.iter().map(Option::as_deref).eq(keys[given..].iter().copied()), "{name}: {rest:?}");
            stream.next();
        }
    }
    // Where no header follows, the error says so.
    let mut last = good.clone();
    last[headers[11]] ^= 1;
    let error = items(&last).pop().unwrap().unwrap_err().to_string();
    assert!(error.ends_with("the samples after it are lost: how many is unknown"), "{error}");
    assert_eq!(items(&last)[..5].iter().flatten().count(), 5);
}

#[test]
fn samples_behind_zeros_are_found_again() {
    let (good, _) = pairs(false);
    let keys = |bytes: &[u8]| -> Vec<Option<String>> {
        items(bytes).into_iter().map(|item| item.ok().map(|sample| sample.key().to_owned())).collect()
    };
    // The header of the third sample's second file.
    let mut blank = good.clone();
    blank[headers(&good)[5]..][..512].fill(0);
    let named = |key: &str| Some(key.to_owned());
    assert_eq!(keys(&blank), [named("0"), named("1"), None, named("4"), named("5")]);
    // Another archive behind the first one.
    let both = [&good[..], &good].concat();
    assert_eq!(keys(&both).iter().filter(|key| key.is_none()).count(), 1, "{:?}", keys(&both));
    assert!(keys(&both).iter().flatten().count() >= 10, "{:?}", keys(&both));
    // A byte within a block of zeros, which the end of a member of gzip may part from the block's start.
    let mut apart = [&good[..], &[0; 1536], &good].concat();
    apart[good.len() + 700] = 1;
    let whole = keys(&apart);
    assert_eq!(whole.iter().filter(|key| key.is_none()).count(), 1, "{whole:?}");
    assert!(whole.iter().flatten().count() >= 10, "{whole:?}");
    for cut in (good.len()..good.len() + 1536).step_by(50) {
        let mut packed = Vec::new();
        for part in [&apart[..cut], &apart[cut..]] {
            let mut member = GzEncoder::new(&mut packed, Compression::fast());
            member.write_all(part).unwrap();
            member.finish().unwrap();
        }
        assert_eq!(keys(&packed), whole, "cut at {cut}");
    }
}

/// What states of streams are bound to.
#[test]
fn the_order_of_the_extensions_selects_the_same() {
    let shard = fixture("web-001.tar");
    let of = |extensions: &[&str]| WebDataset::from_files([&shard]).unwrap().select(extensions).fingerprint();
    assert_eq!(of(&["cls", "bin"]), of(&["bin", "cls"]));
    assert_ne!(of(&["cls", "bin"]), of(&["bin"]));
}

#[test]
fn no_sample_beside_a_damaged_header_lacks_a_file() {
    for long in [false, true] {
        let (good, samples) = pairs(long);
        for header in headers(&good) {
            for position in (header..header + 512).step_by(13) {
                let mut bytes = good.clone();
                bytes[position] ^= 0x11;
                let found = items(&bytes);
                let whole = found.iter().flatten().filter(|found| samples.contains(found)).count();
                assert_eq!(found.iter().flatten().count(), whole, "an incomplete sample, flipped at {position}");
                assert!(
                    whole >= 4 && (whole == 6 || found.iter().any(Result::is_err)),
                    "flipped at {position}: {whole}"
                );
            }
        }
    }
}

#[test]
fn samples_behind_a_bad_one_follow_it() {
    let (good, _) = pairs(false);
    // The third sample has a file twice, and the sixth is too large.
    let headers = headers(&good);
    let twice = [&good[..headers[6]], &good[headers[4]..]].concat();
    let keys: Vec<_> = items(&twice).into_iter().map(|item| item.ok().map(|sample| sample.key().to_owned())).collect();
    let named = |key: &str| Some(key.to_owned());
    assert_eq!(keys, [named("0"), named("1"), None, named("3"), named("4"), named("5")]);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.tar"), &good).unwrap();
    let limited = WebDataset::from_files([dir.path().join("a.tar")]).unwrap().max_sample_bytes(sample(3).len() as u64);
    let fits: Vec<bool> = limited.stream([0]).map(|item| item.is_ok()).collect();
    assert_eq!(fits, [true, true, true, false, false, false], "each with a label of one byte");
}
