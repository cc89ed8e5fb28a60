//! Damaged, cut and unsupported files.

use overdrive_jpeg::{Error, Jpeg, Region, Scale};

use crate::{decode, markers, part, read};

/// What is said to be wrong with a damaged file.
fn damage(file: &[u8]) -> &'static str {
    match decode(file) {
        Err(Error::Damaged { at, found }) if at <= file.len() => found,
        other => panic!("{other:?}"),
    }
}

#[test]
fn damage_at_restart_markers_is_noticed() {
    let whole = read("restarts.jpg");
    let restarts = markers(&whole, 0xd0..=0xd7);
    assert_eq!(restarts.len(), 3);
    for &at in &restarts {
        let mut wrong = whole.clone();
        wrong[at + 1] ^= 1;
        assert_eq!(damage(&wrong), "restart markers that are out of order");
        let mut more = whole.clone();
        more.insert(at, 0x55);
        assert_eq!(damage(&more), "surplus bytes before a restart marker");
        let mut fewer = whole.clone();
        fewer.drain(at - 3..at);
        assert_eq!(damage(&fewer), "the end of its data");
    }
    let mut none = whole.clone();
    let last = *restarts.last().unwrap();
    none.drain(last..last + 2);
    assert_eq!(damage(&none), "a wrong number of restart markers");
}

#[test]
fn every_cut_is_an_error_also_for_a_part() {
    for name in ["h2v2", "restarts", "scans", "progressive", "cmyk"] {
        let whole = read(&format!("{name}.jpg"));
        let end = *markers(&whole, 0xd9..=0xd9).last().unwrap();
        for cut in 0..end {
            assert!(decode(&whole[..cut]).is_err(), "{name} cut at {cut}");
            if let Ok(jpeg) = Jpeg::open(&whole[..cut]) {
                let first = Region { top: 0, left: 0, height: 1, width: 1 };
                assert!(part(&jpeg, &first, Scale::Full).is_err(), "{name} cut at {cut}");
            }
        }
    }
}

#[test]
fn stray_bytes_before_markers_are_skipped() {
    let whole = read("h2v2.jpg");
    let expected = decode(&whole).unwrap();
    // The quantization and Huffman tables, the frame and the scan.
    for at in [markers(&whole, 0xc0..=0xc4), markers(&whole, 0xda..=0xdb)].concat() {
        for stray in [&[0x55][..], &[0; 7], b"\xff\x00", b"\x12\xff\x00\x34\xff\xff", b"\xff\xd3", b"\xff\x01"] {
            let file = [&whole[..at], stray, &whole[at..]].concat();
            assert!(decode(&file).unwrap() == expected, "{stray:?} at {at}");
        }
    }
}

#[test]
fn missing_tables_are_named() {
    let whole = read("h2v2.jpg");
    let without = |kind: u8| {
        let mut file = whole.clone();
        for at in markers(&whole, kind..=kind) {
            file[at + 1] = 0xfe;
        }
        file
    };
    assert_eq!(damage(&without(0xc4)), "a missing Huffman table");
    assert_eq!(damage(&without(0xdb)), "a missing quantization table");
    assert_eq!(damage(&without(0xc0)), "a damaged scan header");
    let frame = markers(&whole, 0xc0..=0xc0)[0];
    for (place, value, expected) in [(9, 2, "a damaged frame header"), (12, 9, "a missing quantization table")] {
        let mut other = whole.clone();
        other[frame + place] = value;
        assert_eq!(damage(&other), expected);
    }
    let mut flat = whole.clone();
    flat[frame + 5..frame + 7].fill(0);
    assert_eq!(damage(&flat), "a damaged frame header");
}

#[test]
fn what_is_not_supported_is_told_from_damage() {
    let whole = read("h2v2.jpg");
    let frame = markers(&whole, 0xc0..=0xc0)[0];
    for (place, value, expected) in [
        (1, 0xc3, "a kind of JPEG other than baseline and progressive"),
        (1, 0xc9, "a kind of JPEG other than baseline and progressive"),
        (1, 0xca, "a kind of JPEG other than baseline and progressive"),
        (4, 12, "samples of other than 8 bits"),
        (11, 0x03, "sampling factors that are not supported"),
        (11, 0x51, "sampling factors that are not supported"),
    ] {
        let mut other = whole.clone();
        other[frame + place] = value;
        assert_eq!(decode(&other), Err(Error::Unsupported { at: frame, found: expected }));
    }
}

#[test]
fn declared_sizes_and_coefficients_are_known_before_memory_is_taken() {
    for name in ["h2v2", "progressive", "scans"] {
        let mut file = read(&format!("{name}.jpg"));
        let frame = markers(&file, 0xc0..=0xc2)[0];
        file[frame + 5..frame + 9].fill(0xff);
        let refused = Error::TooShort { width: 65535, height: 65535, bytes: file.len() };
        assert_eq!(decode(&file), Err(refused), "{name}");
        // A file that is long enough for its declared size.
        file.resize(10 << 20, 0);
        let jpeg = Jpeg::open(&file).unwrap();
        // 4096 x 4096 MCUs of 16 x 16 pixels; four blocks of brightness and two of colour, each 64 times two bytes.
        let expected = if name == "h2v2" { 0 } else { 4096 * 4096 * 6 * 64 * 2 };
        assert_eq!(jpeg.coefficient_bytes(), expected, "{name}");
    }
}

#[test]
fn a_file_of_many_scans_ends() {
    let whole = read("progressive.jpg");
    let scan = markers(&whole, 0xda..=0xda);
    let first = &whole[scan[0]..scan[1]];
    let many = [&whole[..scan[0]], &first.repeat(300), &whole[scan[1]..]].concat();
    assert_eq!(damage(&many), "more than 256 scans");
    // Repeats a scan that visits most of the first component's coefficients.
    let (start, tables) = (scan[4], markers(&whole, 0xc4..=0xc4));
    let end = *tables.iter().find(|&&table| table > start).unwrap();
    let many = [&whole[..start], &whole[start..end].repeat(100), &whole[end..]].concat();
    assert_eq!(damage(&many), "scans of more bits than the coefficients have");
}

#[test]
fn files_that_libjpeg_reads_otherwise_do_not_suit_it() {
    for (name, suits) in [("h2v2", true), ("scans", false), ("progressive", true), ("restarts", false), ("cmyk", false)]
    {
        assert_eq!(Jpeg::open(&read(&format!("{name}.jpg"))).unwrap().suits_libjpeg(), suits, "{name}");
    }
    let mut file = read("h2v2.jpg");
    let tables = markers(&file, 0xc4..=0xc4);
    file.truncate(file.len() - 2);
    assert!(!Jpeg::open(&file).unwrap().suits_libjpeg(), "no end");
    file.extend(b"\xff\xd9");
    file[tables[0] + 1] = 0xfe;
    assert!(!Jpeg::open(&file).unwrap().suits_libjpeg(), "no table");
}
