use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::*;

/// Counts the bytes read.
struct Counted(io::Cursor<Vec<u8>>, Arc<AtomicU64>);

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.0.read(buffer)?;
        self.1.fetch_add(read as u64, Relaxed);
        Ok(read)
    }
}

impl Seek for Counted {
    fn seek(&mut self, to: io::SeekFrom) -> io::Result<u64> {
        self.0.seek(to)
    }
}

fn counted(bytes: Vec<u8>) -> (Content, Arc<AtomicU64>) {
    let (read, length, path) = (Arc::new(AtomicU64::new(0)), bytes.len() as u64, Path::new("some").into());
    (Content::new(Counted(io::Cursor::new(bytes), read.clone()), length, path).unwrap(), read)
}

#[test]
fn skipping_contents_reads_little_more_than_headers() {
    const HEADER: u64 = 512;
    const FILE: u64 = 100_000;
    let bytes: Vec<u8> = (0..50 * (HEADER + FILE)).map(|position| (position * 31) as u8).collect();
    let (mut content, read) = counted(bytes);
    for file in 0..50 {
        let start = content.at();
        assert_eq!(content.bytes(HEADER, "a header").unwrap()[7], ((start + 7) * 31) as u8);
        match file {
            // Contents that are read after skips are right byte for byte.
            49 => {
                let start = content.at();
                let file = content.bytes(FILE, "a file").unwrap();
                assert!((start..).zip(&file).all(|(position, &byte)| byte == (position * 31) as u8));
            }
            _ => content.skip(FILE, "a file").unwrap(),
        }
    }
    let most = BUFFER_BYTES as u64 + 49 * HEADER_BYTES as u64 + FILE;
    assert!(read.load(Relaxed) <= most, "{} bytes", read.load(Relaxed));
}

/// Frames of 1000 bytes, then a table of them that may say something else.
#[cfg(feature = "zstd")]
fn in_frames(content: &[u8], change: impl Fn(usize, [u32; 2]) -> [u32; 2]) -> Vec<u8> {
    let (mut file, mut table) = (Vec::new(), Vec::new());
    for (number, piece) in content.chunks(1000).enumerate() {
        let frame = zstd::bulk::compress(piece, 0).unwrap();
        table.extend(change(number, [frame.len() as u32, piece.len() as u32]));
        file.extend(frame);
    }
    let count = table.len() as u32 / 2;
    let words = [TABLE_MAGIC, 8 * count + 9].into_iter().chain(table).chain([count]);
    file.extend(words.flat_map(u32::to_le_bytes));
    file.push(0);
    file.extend(FOOTER_MAGIC.to_le_bytes());
    file
}

#[test]
#[cfg(feature = "zstd")]
fn a_zstd_file_in_frames_is_read_in_its_middle() {
    let bytes: Vec<u8> = (0..1_000_500u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (mut content, read) = counted(in_frames(&bytes, |_, sizes| sizes));
    assert_eq!(content.seekable_length().unwrap(), bytes.len() as u64);
    let table = read.load(Relaxed);
    assert!(table < 3 * HEADER_BYTES as u64 + 8 * 1001);
    for at in [999_990, 0, 999, 1000, 1001, 500_000, 500_001, 499_999, 1_000_499, 700_123] {
        content.seek(at).unwrap();
        assert_eq!(content.at(), at);
        let length = 700.min(bytes.len() as u64 - at);
        assert_eq!(content.bytes(length, "a part").unwrap(), bytes[at as usize..(at + length) as usize]);
    }
    assert!(read.load(Relaxed) < table + 20 * 1100, "{} bytes", read.load(Relaxed));
    content.seek(bytes.len() as u64).unwrap();
    assert_eq!(content.fill(&mut [0; 9]).unwrap(), 0);
    // From front to back, too.
    content.seek(0).unwrap();
    assert!(content.bytes(bytes.len() as u64, "everything").unwrap() == bytes);
}

#[test]
#[cfg(feature = "zstd")]
fn a_table_of_other_frames_is_none_or_an_error() {
    let bytes = vec![7; 5000];
    let open = |change: fn(usize, [u32; 2]) -> [u32; 2]| counted(in_frames(&bytes, change)).0;
    // The sizes in the file do not add up, or a frame is larger than any that is read at once.
    for change in [(|_, [packed, bytes]| [packed + 1, bytes]) as fn(usize, [u32; 2]) -> [u32; 2], |_, [packed, _]| {
        [packed, u32::MAX]
    }] {
        let mut content = open(change);
        assert!(matches!(content.seekable_length(), Err(DataError::Layout { .. })));
        // It is still read from front to back.
        assert!(content.bytes(5000, "everything").unwrap() == bytes);
    }
    // A size of content that is wrong shows when its frame is read, and no other frame is lost.
    for wrong in [999, 1001] {
        let mut content = match wrong {
            999 => open(|number, [packed, bytes]| [packed, if number == 2 { 999 } else { bytes }]),
            _ => open(|number, [packed, bytes]| [packed, if number == 2 { 1001 } else { bytes }]),
        };
        assert_eq!(content.seekable_length().unwrap(), 4000 + wrong);
        content.seek(2100).unwrap_err();
        content.seek(1100).unwrap();
        assert_eq!(content.bytes(900, "a part").unwrap(), [7; 900]);
        assert!(matches!(content.bytes(1, "a part"), Err(DataError::Corrupt { .. })));
        content.seek(3000 + wrong).unwrap();
        assert_eq!(content.bytes(1000, "a part").unwrap(), [7; 1000]);
    }
}

/// The table of a file with holes would take as much memory as the file seems to have bytes.
#[test]
#[cfg(feature = "zstd")]
fn a_table_that_is_too_large_is_none() {
    const FRAMES: u32 = 1 << 23;
    let open = |frames: u32| {
        // All are empty.
        let mut file = [TABLE_MAGIC, 8 * frames + 9].map(u32::to_le_bytes).concat();
        file.resize(file.len() + 8 * frames as usize, 0);
        file.extend(frames.to_le_bytes());
        file.push(0);
        file.extend(FOOTER_MAGIC.to_le_bytes());
        seekable::read_table(&mut io::Cursor::new(file)).unwrap()
    };
    assert_eq!(open(FRAMES).map(|starts| starts.len()), Some(FRAMES as usize + 1));
    assert!(open(FRAMES + 1).is_none());
}
