//! Damaged and malicious `.pt` files: an error, never a panic, a hang or a large allocation.

use std::fs;
use std::io::{Cursor, Read, Write};
use std::path::{Path, PathBuf};

use overdrive_core::Entry;
use overdrive_nn::{FileError, StateDict, load_pt};
use tch::Kind;
use zip::write::FileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

const LEGACY: &[u8] = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.\x80\x02M\xe9\x03.";
/// A size that is trusted would need far more.
pub const MOST_GROWTH: u64 = 1 << 30;

fn fixture(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

/// A folder with one file that is read again and again.
struct Disk {
    _folder: tempfile::TempDir,
    path: PathBuf,
}

impl Disk {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        Self { path: folder.path().join("state.pt"), _folder: folder }
    }

    fn load(&self, bytes: &[u8]) -> Result<StateDict, FileError> {
        fs::write(&self.path, bytes).unwrap();
        load_pt(&self.path)
    }

    /// What is said of a file that is damaged.
    fn damage(&self, bytes: &[u8]) -> String {
        match self.load(bytes) {
            Err(FileError::Damaged { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }

    fn refusal(&self, bytes: &[u8]) -> String {
        match self.load(bytes) {
            Err(FileError::Refused { what, .. }) => what,
            other => panic!("{other:?}"),
        }
    }
}

/// A legacy file with this value and no storages.
fn legacy(pickle: &[u8]) -> Vec<u8> {
    [LEGACY, b"}.", pickle, b"]."].concat()
}

/// A zip file with this value, whose storages have the keys 0, 1, ...
pub fn zipped(pickle: &[u8], storages: &[Vec<u8>]) -> Vec<u8> {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = FileOptions::default().compression_method(CompressionMethod::Stored);
    let data = storages.iter().enumerate().map(|(key, bytes)| (format!("archive/data/{key}"), &bytes[..]));
    for (name, bytes) in [("archive/data.pkl".to_owned(), pickle)].into_iter().chain(data) {
        writer.start_file(name, stored).unwrap();
        writer.write_all(bytes).unwrap();
    }
    writer.finish().unwrap().into_inner()
}

/// The parts that `zipped` puts together.
fn unzipped(bytes: &[u8]) -> (Vec<u8>, Vec<Vec<u8>>) {
    let mut archive = ZipArchive::new(Cursor::new(bytes)).unwrap();
    let root = archive.file_names().find_map(|name| name.strip_suffix("/data.pkl")).unwrap().to_owned();
    let mut file = |name: String| {
        let mut bytes = Vec::new();
        archive.by_name(&format!("{root}/{name}")).ok()?.read_to_end(&mut bytes).unwrap();
        Some(bytes)
    };
    (file("data.pkl".to_owned()).unwrap(), (0..).map_while(|key| file(format!("data/{key}"))).collect())
}

/// One to four changes of the kinds that break parsers.
fn mutated(good: &[u8], random: &mut fastrand::Rng) -> Vec<u8> {
    const NUMBERS: [u64; 8] = [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0x7fff_ffff_ffff_ffff, u64::MAX];
    let mut bytes = good.to_vec();
    for _ in 0..=random.usize(..4) {
        if bytes.is_empty() {
            break;
        }
        let at = random.usize(..bytes.len());
        let end = (at + 1 + random.usize(..64)).min(bytes.len());
        match random.usize(..7) {
            0 => bytes.truncate(at),
            1 | 2 => bytes[at] ^= 1 << random.u32(..8),
            3 => bytes[at] = random.u8(..),
            4 => bytes
                .iter_mut()
                .skip(at)
                .zip(NUMBERS[random.usize(..8)].to_le_bytes())
                .for_each(|(to, from)| *to = from),
            5 => drop(bytes.drain(at..end)),
            _ => {
                let piece = bytes[at..end].to_vec();
                let to = random.usize(..=bytes.len());
                bytes.splice(to..to, piece);
            }
        }
    }
    bytes
}

pub fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmPeak:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
}

/// Reads every number of every tensor, as far as that is no work.
fn read_all(state: &StateDict) {
    for (_, entry) in state.iter() {
        if let Entry::Tensor(tensor) = entry
            && tensor.numel() < 1 << 20
        {
            let _ = tensor.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
        }
    }
}

#[test]
fn the_files_that_are_damaged_can_be_read_whole() {
    let disk = Disk::new();
    let (pickle, storages) = unzipped(&fixture("zip.pt"));
    for bytes in [fixture("zip.pt"), fixture("legacy.pt"), zipped(&pickle, &storages)] {
        let state = disk.load(&bytes).unwrap();
        let weight = state.tensor("model.weight", &[3, 2], Kind::Float).unwrap();
        assert_eq!(Vec::<f32>::try_from(weight.contiguous().view(-1)).unwrap(), [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
        assert_eq!((state.int("epoch").unwrap(), state.float("groups.0.betas.1").unwrap()), (3, 0.999));
        assert_eq!(state.len(), 12);
    }
}

#[test]
fn files_cut_off_anywhere_are_an_error() {
    let disk = Disk::new();
    for name in ["zip.pt", "legacy.pt"] {
        let bytes = fixture(name);
        for length in (0..bytes.len()).step_by(37) {
            let error = disk.load(&bytes[..length]).expect_err(&format!("{length} bytes of {name}"));
            assert!(matches!(error, FileError::Damaged { .. } | FileError::Refused { .. }), "{error:?}");
        }
    }
}

#[test]
fn thousands_of_mutated_files_are_an_error_or_a_state() {
    let (disk, mut random) = (Disk::new(), fastrand::Rng::with_seed(17));
    let (pickle, storages) = unzipped(&fixture("zip.pt"));
    let before = peak();
    let (mut read, mut refused) = (0, 0);
    for round in 0..4000 {
        let bytes = match round % 4 {
            0 => mutated(&fixture("zip.pt"), &mut random),
            1 => mutated(&fixture("legacy.pt"), &mut random),
            // With right checksums, so that the pickle is read.
            _ => zipped(&mutated(&pickle, &mut random), &storages),
        };
        match disk.load(&bytes) {
            Ok(state) => {
                read_all(&state);
                read += 1;
            }
            Err(FileError::Damaged { .. } | FileError::Refused { .. }) => refused += 1,
            Err(error) => panic!("round {round}: {error:?}"),
        }
    }
    assert!(read > 10 && refused > 2000, "{read} read, {refused} refused");
    assert!(peak() - before < MOST_GROWTH, "{} bytes more", peak() - before);
}

/// Where the bytes differ from the checksum beside them, unless there is none.
#[test]
fn flipped_bits_of_numbers_are_noticed() {
    let (disk, whole) = (Disk::new(), fixture("zip.pt"));
    let (_, storages) = unzipped(&whole);
    for storage in storages.iter().filter(|storage| storage.len() >= 16) {
        let at = whole.windows(storage.len()).position(|it| it == &storage[..]).unwrap();
        for bit in 0..8 {
            let mut bytes = whole.clone();
            bytes[at + storage.len() / 2] ^= 1 << bit;
            let told = disk.damage(&bytes);
            assert!(told.contains("checksum"), "{told}");
        }
    }
    // `set_crc32_options(False)` leaves zeros.
    let mut bytes = whole.clone();
    for start in 0..bytes.len() - 20 {
        let checksum = match &bytes[start..start + 4] {
            b"PK\x01\x02" => start + 16,
            b"PK\x03\x04" => start + 14,
            b"PK\x07\x08" => start + 4,
            _ => continue,
        };
        bytes[checksum..checksum + 4].fill(0);
    }
    assert_eq!(disk.load(&bytes).unwrap().len(), 12);
}

#[test]
fn code_is_refused_by_name() {
    let disk = Disk::new();
    let call = |name: &str| [b"c", name.as_bytes(), b"\nX\x02\x00\x00\x00ls\x85R."].concat();
    for (name, global) in [
        ("posix\nsystem", "`posix.system`"),
        ("builtins\neval", "`builtins.eval`"),
        ("numpy._core.multiarray\n_reconstruct", "`numpy._core.multiarray._reconstruct`"),
        ("__main__\nNet", "`__main__.Net`"),
        ("torch\nload", "`torch.load`"),
        ("torch\nstorage.FloatStorage", "`torch.storage.FloatStorage`"),
        ("collections\nOrderedDict.fromkeys", "`collections.OrderedDict.fromkeys`"),
        ("\n", "`.`"),
    ] {
        assert_eq!(disk.refusal(&legacy(&call(name))), global);
        assert_eq!(disk.refusal(&zipped(&call(name), &[])), global);
    }
    // By texts on the stack, though it is never called, and by operations of other protocols.
    assert_eq!(disk.refusal(&legacy(b"\x8c\x05posix\x8c\x06system\x93.")), "`posix.system`");
    assert_eq!(disk.refusal(&legacy(b"}cos\nsystem\n0.")), "`os.system`");
    assert_eq!(disk.refusal(&legacy(b"(iposix\nsystem\n.")), "the pickle operation 0x69");
    assert_eq!(disk.refusal(&legacy(b"\x82\x01.")), "the pickle operation 0x82");
    assert_eq!(disk.refusal(&legacy(b"ctorch\nSize\n.")), "`torch.Size`");
    let message = disk.load(&legacy(b"cos\nsystem\n.")).unwrap_err().to_string();
    let path = disk.path.display();
    let expected = "holds `os.system`, which is neither a tensor nor a plain container: save `model.state_dict()`";
    assert_eq!(message, format!("{path} {expected}"));
}

#[test]
fn small_files_of_endless_values_are_an_error() {
    let disk = Disk::new();
    let before = peak();
    let many = |piece: &[u8], count: usize| piece.repeat(count);
    let whole = |pieces: &[&[u8]]| legacy(&pieces.concat());
    // Tuples in tuples, and the same with each stored.
    assert!(disk.damage(&whole(&[b"N", &many(b"\x85", 500_000), b"."])).contains("without end"));
    assert!(disk.damage(&whole(&[b"N", &many(b"\x85\x94", 100_000), b"."])).contains("without end"));
    // A list that holds itself, and one that holds another twice, and so on.
    assert!(disk.damage(&legacy(b"]q\x00h\x00a.")).contains("itself"));
    let doubled: Vec<u8> = (0..60).flat_map(|n| [b']', b'q', n + 1, b'h', n, b'a', b'h', n, b'a']).collect();
    assert!(disk.damage(&whole(&[b"]q\x00", &doubled, b"."])).contains("too many values"));
    // A long text, used many times; as a name; and a long size.
    let text = [&b"X\x40\x42\x0f\x00"[..], &many(b"a", 1_000_000), b"q\x00"].concat();
    assert!(disk.damage(&whole(&[b"(", &text, &many(b"h\x00", 100_000), b"l."])).contains("too long"));
    let pairs: Vec<u8> = (0..50_000u32).flat_map(|n| [&b"J"[..], &n.to_le_bytes(), b"}h\x00K\x01s"].concat()).collect();
    assert!(disk.damage(&whole(&[&text, b"0}(", &pairs, b"u."])).contains("too long"));
    let nested = many(b"}h\x00", 90);
    assert!(disk.damage(&whole(&[&text, b"0", &nested, b"K\x01", &many(b"s", 90), b"."])).contains("too long"));
    assert!(peak() - before < MOST_GROWTH, "{} bytes more", peak() - before);
}

/// The pickle of a tensor over storage 0, by the numbers in its text.
pub fn tensor(elements: i64, offset: i64, size: &[i64], stride: &[i64]) -> Vec<u8> {
    let number = |value: i64| [&b"\x8a\x08"[..], &value.to_le_bytes()].concat();
    let tuple =
        |values: &[i64]| [&b"("[..], &values.iter().flat_map(|it| number(*it)).collect::<Vec<_>>(), b"t"].concat();
    let storage =
        [&b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000N"[..], &number(elements), b"tQ"];
    let arguments = [number(offset), tuple(size), tuple(stride)].concat();
    [b"ctorch._utils\n_rebuild_tensor_v2\n(", &storage.concat()[..], &arguments, b"\x89NtR."].concat()
}

#[test]
fn tensors_beyond_their_storage_are_an_error() {
    let disk = Disk::new();
    let before = peak();
    let file = |elements, offset, size: &[i64], stride: &[i64]| {
        zipped(&tensor(elements, offset, size, stride), &[vec![0; 16]])
    };
    let state = disk.load(&file(4, 1, &[3], &[1])).unwrap();
    assert_eq!(state.tensor("", &[3], Kind::Float).unwrap().numel(), 3);
    for (elements, offset, size, stride) in [
        (5, 0, &[4][..], &[1][..]),
        (1 << 60, 0, &[4], &[1]),
        (i64::MAX, 0, &[4], &[1]),
        (-1, 0, &[4], &[1]),
        (i64::MIN, 0, &[4], &[1]),
        (4, 0, &[5], &[1]),
        (4, 1, &[4], &[1]),
        (4, -1, &[2], &[1]),
        (4, i64::MAX, &[2], &[1]),
        (4, i64::MIN, &[2], &[1]),
        (4, 0, &[-1], &[1]),
        (4, 0, &[2], &[-1]),
        (4, 0, &[2, 2], &[1]),
        (4, 0, &[2], &[i64::MAX]),
        (4, 0, &[1 << 62, 1 << 62], &[1, 1]),
        (4, 0, &[i64::MAX], &[i64::MAX]),
        (4, 0, &[i64::MAX, i64::MAX], &[0, 0]),
        (4, 0, &[1; 65], &[1; 65]),
    ] {
        let bytes = file(elements, offset, size, stride);
        assert!(matches!(disk.load(&bytes), Err(FileError::Damaged { .. })), "{elements} {offset} {size:?} {stride:?}");
    }
    assert!(peak() - before < MOST_GROWTH, "{} bytes more", peak() - before);
}

#[test]
fn archives_that_claim_more_than_the_file_has_are_an_error() {
    let disk = Disk::new();
    let storages = vec![vec![7; 4096]; 2];
    let good = zipped(&tensor(1024, 0, &[4], &[1]), &storages);
    assert!(disk.load(&good).is_ok());
    // The directory says that the first storage is longer; every record of it has the size at 20 and 24.
    let mut bytes = good.clone();
    let records: Vec<usize> = (0..bytes.len() - 4).filter(|at| bytes[*at..].starts_with(b"PK\x01\x02")).collect();
    for at in [20, 24] {
        bytes[records[1] + at..][..4].copy_from_slice(&0x7000_0000u32.to_le_bytes());
    }
    assert!(disk.damage(&bytes).contains("larger than the file"));
    // Compressed files are not of torch.save.
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    let deflated = FileOptions::default().compression_method(CompressionMethod::Deflated);
    writer.start_file("archive/data.pkl", deflated).unwrap();
    writer.write_all(&b"N".repeat(10_000_000)).unwrap();
    let bytes = writer.finish().unwrap().into_inner();
    assert!(disk.damage(&bytes).contains("compressed"), "a zip bomb of {} bytes", bytes.len());
    // Two pickles: which one counts?
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    for name in ["a/data.pkl", "b/data.pkl"] {
        writer.start_file(name, FileOptions::default().compression_method(CompressionMethod::Stored)).unwrap();
        writer.write_all(b"}.").unwrap();
    }
    assert!(disk.damage(&writer.finish().unwrap().into_inner()).contains("one data.pkl"));
    assert!(disk.damage(b"").contains("does not begin"));
    disk.damage(b"PK\x03\x04");
}

#[test]
fn what_would_read_as_other_values_is_refused() {
    let disk = Disk::new();
    let call = |more: &[u8]| {
        let mut pickle = tensor(4, 0, &[2], &[1]);
        assert_eq!(pickle.split_off(pickle.len() - 3), b"tR.");
        zipped(&[&pickle, more, b"tR."].concat(), &[vec![0; 16]])
    };
    // Whether it requires a gradient, hooks, and what torch.save says of conjugated and negated views.
    assert!(disk.load(&call(b"}")).is_ok());
    let lazy = "a tensor that is conjugated or negated lazily";
    assert_eq!(disk.refusal(&call(b"}X\x04\0\0\0conj\x88s")), lazy);
    assert_eq!(disk.refusal(&call(b"}X\x03\0\0\0neg\x88s")), lazy);
    // A storage that is a view of another, as PyTorch before 0.4 wrote it.
    let storage = b"(X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x04";
    let read = |view: &[u8]| legacy(&[b"\x80\x02", &storage[..], view, b"tQ."].concat());
    assert_eq!(disk.refusal(&read(b"X\x01\0\0\0vK\x02K\x02\x87")), "a view of a storage");
    assert_eq!(disk.refusal(&read(b"N")), "a storage without a tensor");
}

#[test]
fn two_values_of_one_dotted_name_are_an_error() {
    // {"a.b": 1, "a": {"b": 2}}
    let pickle = b"\x80\x02}(X\x03\0\0\0a.bK\x01X\x01\0\0\0a}X\x01\0\0\0bK\x02su.";
    assert_eq!(Disk::new().damage(&legacy(pickle)), "two of its values have the name `a.b`");
}
