//! Damaged Parquet files: always an error with its place, never a panic or wrong values.

use std::fs;
use std::path::Path;

use overdrive_dataload::{Column, DataError, ParquetDataset, Table};

use crate::parquet::open;
use crate::table::floats;
use crate::{fixture, names_file};

fn bytes_of(name: &str) -> Vec<u8> {
    fs::read(fixture("parquet").join(format!("{name}.parquet"))).unwrap()
}

fn parse(bytes: Vec<u8>) -> Result<ParquetDataset, DataError> {
    ParquetDataset::from_bytes(bytes, Path::new("some.parquet")).map(|dataset| dataset.threads(1))
}

fn read(bytes: Vec<u8>) -> Result<Table, DataError> {
    parse(bytes)?.read()
}

/// A table as text, for comparison.
fn content(table: Table) -> String {
    let columns = table.into_iter().map(|(name, values)| match values {
        Column::Tensor(tensor) => format!("{name} {:?}", floats(&tensor)),
        Column::Bytes(bytes) => format!("{name} {:?}", bytes.iter().collect::<Vec<_>>()),
        Column::Ragged(ragged) => {
            let (values, offsets) = ragged.into_tensors().unwrap();
            format!("{name} {:?} {:?}", floats(&values), offsets.iter().map(floats).collect::<Vec<_>>())
        }
        other => panic!("{other:?}"),
    });
    columns.collect::<Vec<_>>().join("\n")
}

/// The footer's offset.
fn footer_start(file: &[u8]) -> usize {
    let (tail, _) = file[file.len() - 8..].split_first_chunk::<4>().unwrap();
    file.len() - 8 - u32::from_le_bytes(*tail) as usize
}

#[test]
fn a_cut_anywhere_is_an_error() {
    let file = bytes_of("codec-snappy");
    for cut in 0..file.len() {
        names_file(&parse(file[..cut].to_vec()).err().unwrap(), "some.parquet");
    }
    // Pages are missing, but the footer is complete.
    let footer = footer_start(&file);
    for cut in 4..footer {
        let ended = [&file[..cut], &file[footer..]].concat();
        names_file(&read(ended).expect_err(&format!("cut at {cut}")), "some.parquet");
    }
    assert!(matches!(parse(Vec::new()), Err(DataError::Corrupt { offset: 0, .. })));
    assert!(matches!(parse(vec![0; 4096]), Err(DataError::Corrupt { offset: 0, .. })));
    let dir = tempfile::tempdir().unwrap();
    assert!(matches!(ParquetDataset::from_files([dir.path()]), Err(DataError::Layout { .. })));
}

#[test]
fn the_footer_is_not_trusted() {
    let file = bytes_of("numbers");
    let end = file.len();
    let with = |at: usize, bytes: &[u8]| {
        let mut changed = file.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        parse(changed).err().unwrap()
    };
    assert!(with(0, b"PARX").to_string().contains("at byte 0"));
    assert!(with(end - 4, b"PARX").to_string().contains(&format!("at byte {}", end - 4)));
    assert!(matches!(with(end - 4, b"PARE"), DataError::Layout { .. }));
    assert!(matches!(with(end - 8, &u32::MAX.to_le_bytes()), DataError::TooLarge { .. }));
    assert!(matches!(with(end - 8, &(end as u32).to_le_bytes()), DataError::Corrupt { .. }));
    assert!(matches!(with(end - 8, &[0; 4]), DataError::Corrupt { .. }));

    // A schema that nests 100,000 deep, one with 2^31 children, and a list of 2^31 bools.
    let footer = |footer: Vec<u8>| {
        let length = (footer.len() as u32).to_le_bytes();
        parse([b"PAR1", footer.as_slice(), &length, b"PAR1"].concat()).err().unwrap().to_string()
    };
    let nested =
        [&[0x15, 2, 0x19, 0xfc, 0xa0, 0x8d, 0x06][..], &[0x48, 1, b'a', 0x15, 2, 0].repeat(100_000), &[0]].concat();
    assert!(footer(nested).contains("nests at most 64 deep"));
    let wide = vec![0x15, 2, 0x19, 0x1c, 0x48, 1, b'a', 0x15, 0xfe, 0xff, 0xff, 0xff, 0x0f, 0, 0x16, 0, 0x19, 0x0c, 0];
    assert!(footer(wide).contains("with columns missing"));
    assert!(footer(vec![0x15, 2, 0x49, 0xf1, 0xff, 0xff, 0xff, 0xff, 7, 0]).contains("a list that fits"));
}

#[test]
fn a_flipped_bit_in_a_page_is_found() {
    for name in ["numbers", "codec-snappy-v2"] {
        let file = bytes_of(name);
        let good = content(read(file.clone()).unwrap());
        for position in 4..footer_start(&file) {
            let mut flipped = file.clone();
            flipped[position] ^= 1 << (position % 8);
            match read(flipped) {
                Ok(table) => assert_eq!(content(table), good, "{name} flipped at {position}"),
                Err(error) => {
                    let text = names_file(&error, "some.parquet");
                    assert!(text.contains("column") && text.contains("row group"), "{text}");
                    assert!(!text.contains("Some(") && !text.contains("None"), "{text}");
                }
            }
        }
    }
}

/// Found by a fuzzer: the decoder read past the end of the page, and panicked.
#[test]
fn split_streams_have_a_value_for_every_level() {
    let mut file = bytes_of("encodings-1");
    // The definition levels of 25 values, of which 21 are present, are changed to 22.
    let levels = [5, 0, 0, 0, 9, 0xf7, 0xfb, 0xfd, 0];
    let places: Vec<usize> = (0..file.len()).filter(|&at| file[at..].starts_with(&levels)).collect();
    assert!(places.len() > 2);
    places.iter().for_each(|at| file[at + 5] = 0xff);
    for (column, bytes) in [("float16", 2), ("float32", 4), ("float64", 8)] {
        let dataset = parse(file.clone()).unwrap().verify_crc(false).select([column]).unwrap();
        let error = dataset.fill_null(column, 0.0).unwrap().read().unwrap_err();
        let expected = format!("{} bytes in the split streams of 22 values in column {column:?}", 22 * bytes);
        let text = names_file(&error, "some.parquet");
        assert!(text.contains(&expected) && text.contains(&format!("found {}", 21 * bytes)), "{text}");
    }
}

#[test]
fn checksums_are_verified_unless_turned_off() {
    let mut file = bytes_of("numbers");
    let good = read(file.clone()).unwrap();
    // The values of the last plain column, which only a checksum protects.
    let value = (0..footer_start(&file)).rev().find(|&at| file[at..].starts_with(b"text 5")).unwrap();
    file[value] ^= 1;
    let error = read(file.clone()).unwrap_err();
    let text = names_file(&error, "some.parquet");
    assert!(matches!(error, DataError::Corrupt { .. }) && text.contains("checksum"), "{text}");
    let table = parse(file).unwrap().verify_crc(false).read().unwrap();
    assert_ne!(content(table), content(good));
}

#[test]
fn exceeding_the_memory_limit_is_an_error() {
    for (column, least) in [("int64", 25 * 8), ("text", 10), ("float32", 25 * 4)] {
        let dataset = open("numbers").select([column]).unwrap();
        assert!(dataset.clone().max_column_bytes(1 << 20).read().is_ok());
        let error = dataset.max_column_bytes(least - 1).read().unwrap_err();
        assert!(matches!(error, DataError::TooLarge { .. }), "{error}");
        names_file(&error, "numbers.parquet");
    }
    let lists = open("nested").select(["ints"]).unwrap().max_column_bytes(7);
    assert!(matches!(lists.read(), Err(DataError::TooLarge { limit: 7, .. })));
}
