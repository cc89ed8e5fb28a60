//! Folders that Mosaic's `MDSWriter` wrote, plain and compressed, and damage to them.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_dataload::{
    Color, DataError, DataLoader, Dataset, Image, IterableDataset, MdsDataset, MdsSample, MdsValue, OnError,
    ShardListDataset, StreamPosition, decode_image,
};
use serde_json::Value;
use tch::{Kind, Tensor};
use tempfile::TempDir;

use crate::{fixture, names_file, sample};

const SAMPLES: usize = 7;

/// A copy of a fixture, to damage.
fn copy(name: &str) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture("mds").join(name)).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
    }
    let path = dir.path().to_path_buf();
    (dir, path)
}

fn all(dataset: &MdsDataset) -> Vec<MdsSample> {
    dataset.stream(0..dataset.shards()).collect::<Result<_, _>>().unwrap()
}

/// `image(i, mode)` of `make_mds.py`.
fn pixels(i: usize, channels: usize) -> Image {
    let data: Vec<u8> = (0..(i + 1) * 2 * channels).map(|j| ((i + j * 5) % 256) as u8).collect();
    Image::new(data, 2, i + 1, channels).unwrap()
}

fn assert_is_tensor(value: MdsValue<'_>, kind: Kind, shape: &[i64], numbers: impl Iterator<Item = f64>) {
    let MdsValue::Tensor(tensor) = value else { panic!("{value:?} is no tensor") };
    assert_eq!((tensor.kind(), tensor.size()), (kind, shape.to_vec()));
    let found: Vec<f64> = Vec::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap();
    assert_eq!(found, numbers.collect::<Vec<_>>());
}

fn assert_is_row(found: &MdsSample, i: usize) {
    let get = |column: &str| found.get(column).unwrap();
    let int = |column: &str| if let MdsValue::Int(number) = get(column) { number } else { panic!("{column}") };
    let float = |column: &str| if let MdsValue::Float(number) = get(column) { number } else { panic!("{column}") };
    let text = |column: &str| if let MdsValue::Str(text) = get(column) { text.to_owned() } else { panic!("{column}") };
    assert_eq!(found.raw("bytes"), Some(&*sample(i)));
    assert!(matches!(get("bytes"), MdsValue::Bytes(bytes) if bytes == sample(i)));
    assert_eq!((int("int"), int("small")), (i as i64 - (1 << 40), i as i64 - 4));
    assert!(matches!(get("large"), MdsValue::UInt(number) if number == u64::MAX - i as u64));
    let number = i as f64;
    let floats = [float("double"), float("float"), float("half")];
    assert_eq!(floats, [number / 8.0 - 1.0, number * 0.5, number * 0.25]);
    assert_eq!(text("text"), format!("sample {i} é"));
    assert_eq!(text("text_int"), (100_000_000_000_000_000_000 + i as u128).to_string());
    assert_eq!(text("text_float").parse::<f64>().unwrap(), number * 0.1);
    let MdsValue::Json(json) = get("json") else { panic!("json") };
    assert_eq!((&json["id"], &json["tags"][0], json["tags"][1].is_null()), (&i.into(), &"a".into(), true));
    assert_is_tensor(get("fixed"), Kind::Int16, &[2, 3], (0..6).map(|j| j as f64 - number));
    assert_is_tensor(get("list"), Kind::Float, &[i as i64 + 1], (0..=i).map(|j| j as f64 / 4.0));
    let kind = if i % 2 == 1 { Kind::Int64 } else { Kind::Uint8 };
    assert_is_tensor(get("tensor"), kind, &[2, i as i64 + 1], (0..2 * (i + 1)).map(|j| 3.0 * j as f64));
    assert!(matches!(get("raw"), MdsValue::Image(image) if image == pixels(i, 3)));
    let MdsValue::Bytes(png) = get("grey") else { panic!("grey") };
    assert_eq!(decode_image(png, Color::AsStored, Path::new("grey.png")).unwrap(), pixels(i, 1));
    let MdsValue::Bytes(jpeg) = get("photo") else { panic!("photo") };
    assert_eq!(decode_image(jpeg, Color::Rgb, Path::new("photo.jpg")).unwrap().chw(), [3, 2, i + 1]);
}

#[test]
fn folders_that_python_wrote_read_back_with_equal_content() -> Result<(), DataError> {
    for name in ["plain", "zstd"] {
        let dataset = MdsDataset::open(fixture("mds").join(name))?;
        assert_eq!((dataset.shards(), dataset.samples(), dataset.columns().len()), (2, SAMPLES as u64, 17));
        let samples = all(&dataset);
        assert_eq!(samples.len(), SAMPLES);
        samples.iter().enumerate().for_each(|(i, sample)| assert_is_row(sample, i));
        // From every position.
        let mut stream = dataset.stream(0..2);
        for given in 0..=SAMPLES {
            let rest: Vec<_> = dataset.stream_from(0..2, stream.position()).map(|it| it.unwrap().offset()).collect();
            assert!(
                rest.iter().eq(samples[given..].iter().map(MdsSample::offset).collect::<Vec<_>>().iter()),
                "{name}"
            );
            stream.next();
        }
        assert_eq!(dataset.stream_from([0], StreamPosition { shard: 0, sample: u64::MAX }).count(), 0);
    }
    let dataset = MdsDataset::open(fixture("mds/gz"))?;
    assert!(matches!(all(&dataset)[0].get("text")?, MdsValue::Str("packed")));
    Ok(())
}

#[test]
fn samples_are_read_in_any_order() -> Result<(), DataError> {
    let list = ShardListDataset::new(MdsDataset::open(fixture("mds/plain"))?)?;
    assert_eq!(list.len(), SAMPLES);
    (0..SAMPLES).rev().for_each(|i| assert_is_row(&list.get(i).unwrap(), i));
    let error = ShardListDataset::new(MdsDataset::open(fixture("mds/zstd"))?).unwrap_err();
    assert!(names_file(&error, "shard.00000.mds.zstd").contains("read it as a stream"), "{error}");
    // Without compression where a shard is there both ways, as Mosaic leaves it in its cache.
    let (_dir, folder) = copy("zstd");
    for shard in ["shard.00000.mds", "shard.00001.mds"] {
        fs::write(
            folder.join(shard),
            zstd::decode_all(&*fs::read(folder.join(shard).with_extension("mds.zstd")).unwrap()).unwrap(),
        )
        .unwrap();
    }
    let list = ShardListDataset::new(MdsDataset::open(&folder)?)?;
    (0..SAMPLES).for_each(|i| assert_is_row(&list.get(i).unwrap(), i));
    Ok(())
}

/// What is in an array of the fixture, as a batch.
#[test]
fn a_loader_reads_them_as_a_stream() -> Result<(), DataError> {
    let numbers = MdsDataset::open(fixture("mds/zstd"))?.map(|sample| match sample.get("fixed")? {
        MdsValue::Tensor(tensor) => Ok(tensor),
        other => Err(DataError::other(format!("{other:?}"))),
    });
    let loader = DataLoader::stream(numbers).batch_size(SAMPLES).interleave(1).num_workers(2).build()?;
    let batch: Tensor = loader.iter().next().unwrap()?;
    assert_eq!((batch.size(), batch.int64_value(&[6, 1, 2])), (vec![7, 2, 3], -1));
    Ok(())
}

/// Replaces a part of a file.
fn change(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

#[test]
fn a_bad_index_is_refused_by_name() {
    for (from, to, part) in [
        ("\"version\": 2}", "\"version\": 3}", "expected version 2, found version 3"),
        ("\"format\": \"mds\"", "\"format\": \"csv\"", "version 2 of the format mds in shard 0"),
        ("\"samples\": 4", "\"samples\": 4000000000", "4000000000 samples in 4447 bytes"),
        ("\"bytes\": 4447", "\"bytes\": 4448", "expected 4448 bytes, as index.json says, found 4447 bytes"),
        ("\"bytes\": 4447", "\"bytes\": 99999999999", "at most 4 GiB"),
        ("shard.00000.mds", "../shard.00000.mds", "the name of a file in the folder in shard 0"),
        ("shard.00000.mds", "/etc/passwd", "the name of a file in the folder in shard 0"),
        ("shard.00000.mds", "http://127.0.0.1/shard.00000.mds", "the name of a file in the folder in shard 0"),
        ("shard.00001.mds", "shard.00009.mds", "shard.00009.mds"),
        ("[\"bytes\", \"float64\",", "[\"float64\",", "a name, an encoding and a size for each column in shard 0"),
        ("{\"shards\"", "{\"shard\"", "line 1: expected the index of an MDS dataset, found missing field"),
        ("{", "", "line 1"),
    ] {
        let (_dir, folder) = copy("plain");
        change(&folder.join("index.json"), from, to);
        let error = MdsDataset::open(&folder).unwrap_err().to_string();
        assert!(error.contains(folder.to_str().unwrap()) && error.contains(part), "{error} does not say {part}");
    }
    let (_dir, folder) = copy("plain");
    fs::write(folder.join("index.json"), "{\"version\": 2, \"shards\": []}").unwrap();
    assert!(MdsDataset::open(&folder).unwrap_err().to_string().contains("at least one shard"));
    names_file(&MdsDataset::open(folder.join("none")).unwrap_err(), "none/index.json");
    let changed = |name: &str, change: &dyn Fn(&mut Vec<Value>)| {
        let (_dir, folder) = copy(name);
        let mut index: Value = serde_json::from_slice(&fs::read(folder.join("index.json")).unwrap()).unwrap();
        change(index["shards"].as_array_mut().unwrap());
        fs::write(folder.join("index.json"), index.to_string()).unwrap();
        names_file(&MdsDataset::open(&folder).unwrap_err(), "index.json")
    };
    // The table of so many would take half a gigabyte, and compressed next to nothing.
    let error = changed("zstd", &|shards| {
        shards[0]["raw_data"]["bytes"] = u32::MAX.into();
        shards[0]["samples"] = 100_000_000.into();
    });
    assert!(error.contains("2^26 samples") && error.contains("in shard 0, found 100000000 samples"), "{error}");
    // A text of any length is not shown whole.
    for part in ["format", "samples"] {
        let error = changed("plain", &|shards| shards[0][part] = "x".repeat(1 << 20).into());
        assert!(error.contains("found") && error.len() < 1000, "{} bytes", error.len());
    }
    // Its samples would be read twice.
    let error = changed("plain", &|shards| shards.push(shards[0].clone()));
    assert!(error.ends_with("expected each shard once in shard 2, found shard.00000.mds again"), "{error}");
    let error = MdsDataset::open(fixture("mds/br")).unwrap_err();
    assert!(
        names_file(&error, "index.json").contains("expected no compression, zstd or gz in shard 0, found \"br\""),
        "{error}"
    );
}

#[test]
fn damage_is_named_with_shard_column_and_byte() -> Result<(), DataError> {
    let good = fs::read(fixture("mds/plain/shard.00000.mds")).unwrap();
    let offsets: Vec<usize> =
        all(&MdsDataset::open(fixture("mds/plain"))?).iter().map(|it| it.offset() as usize).collect();
    let (_dir, folder) = copy("plain");
    let shard = folder.join("shard.00000.mds");
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = good.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(&shard, changed).unwrap();
        let items: Vec<_> = MdsDataset::open(&folder).unwrap().stream([0]).collect();
        items
    };
    // The table: the shard is lost as a whole, and counted.
    for (at, bytes, part) in [
        (0, [5, 0, 0, 0], "at byte 0: expected 4 samples, as index.json says, found 5"),
        (4, [1, 0, 0, 0], "at byte 4: expected an offset of 24 or more, found 1"),
        (12, [1, 0, 0, 0], "at byte 12: expected an offset of"),
        (20, [255, 255, 255, 255], "at byte 20: expected the end of the shard at byte 4447"),
    ] {
        let items = with(at, &bytes);
        let text = names_file(items[0].as_ref().unwrap_err(), "shard.00000.mds");
        assert!(
            items.len() == 1 && text.contains(part) && text.contains("the 4 samples of the shard are lost"),
            "{text}"
        );
    }
    // The length of the first value, and of the last one.
    for at in [offsets[1], offsets[1] + 4 * 9] {
        let items = with(at, &[255, 255, 255, 0]);
        assert_eq!(items.iter().map(Result::is_ok).collect::<Vec<_>>(), [true, false, true, true]);
        let text = names_file(items[1].as_ref().unwrap_err(), "shard.00000.mds");
        assert!(text.contains("a value of the column") && text.contains("ends within the sample"), "{text}");
    }
    let shorter = with(offsets[1], &[0, 0, 0, 0]);
    assert!(shorter[1].as_ref().unwrap_err().to_string().contains("20 more bytes"), "{:?}", shorter[1]);
    // A value.
    let json = good.windows(9).position(|bytes| bytes == b"{\"id\": 0,").unwrap();
    let items = with(json, b"[");
    let error = items[0].as_ref().unwrap().get("json").unwrap_err();
    let text = names_file(&error, "shard.00000.mds");
    assert!(text.contains(&format!("at byte {json}: expected JSON in the column \"json\"")), "{text}");
    let text = items[0].as_ref().unwrap().get("jsn").unwrap_err().to_string();
    assert!(text.contains("expected a column \"jsn\", found the columns [\"bytes\""), "{text}");
    // Loaders name the item.
    let numbers = MdsDataset::open(&folder)?.map(|sample| sample.get("json").map(|_| 0_i64));
    let loader = DataLoader::stream(numbers).on_error(OnError::Skip).interleave(1).batch_size(9).build()?;
    assert_eq!(loader.iter().map(|batch: Result<Tensor, _>| batch.unwrap().size()[0]).sum::<i64>(), 6);
    assert!(
        loader.faults()[0].key.as_ref().unwrap().ends_with(&format!("byte {}", offsets[0])),
        "{:?}",
        loader.faults()
    );
    Ok(())
}

#[test]
fn a_cut_shard_ends_with_an_error_that_counts_what_is_lost() {
    let (_dir, folder) = copy("zstd");
    let shard = folder.join("shard.00000.mds.zstd");
    let good = fs::read(&shard).unwrap();
    change(&folder.join("index.json"), &format!("\"bytes\": {}", good.len()), "\"bytes\": 900");
    fs::write(&shard, &good[..900]).unwrap();
    let dataset = MdsDataset::open(&folder).unwrap();
    let items: Vec<_> = dataset.stream([0]).collect();
    let good = items.iter().filter(|item| item.is_ok()).count();
    assert!(items.len() == good + 1 && good < 4, "{good}");
    let text = names_file(items[good].as_ref().unwrap_err(), "shard.00000.mds.zstd");
    assert!(text.contains("are lost"), "{text}");
    // A resumed reader counts the error as the first one did.
    let mut stream = dataset.stream([0]);
    for given in 0..=items.len() {
        let rest = dataset.stream_from([0], stream.position()).map(|item| item.map(|it| it.offset()).ok());
        let whole = items[given..].iter().map(|item| item.as_ref().map(|it| it.offset()).ok());
        assert!(rest.eq(whole), "from {given}");
        stream.next();
    }
}
