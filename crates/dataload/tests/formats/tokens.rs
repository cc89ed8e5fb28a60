//! Files of tokens: windows, Megatron's index, and damage at every byte of it.

use std::fs;
use std::path::{Path, PathBuf};

use overdrive_dataload::{
    DataError, DataLoader, Dataset, IndexedTokens, IndexedTokensWriter, PackTokens, TokenDtype, TokenFile,
    TokenWindows, TokenWriter,
};
use tch::{Kind, Tensor};

use crate::{fixture, names_file};

fn values(tensor: &Tensor) -> Vec<i64> {
    assert_eq!(tensor.kind(), Kind::Int64);
    Vec::try_from(tensor.view(-1)).unwrap()
}

/// A file of 16-bit tokens.
fn written(folder: &Path, tokens: &[u16]) -> PathBuf {
    let path = folder.join("train.bin");
    fs::write(&path, tokens.iter().flat_map(|token| token.to_le_bytes()).collect::<Vec<u8>>()).unwrap();
    path
}

#[test]
fn windows_are_those_of_nanogpt() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let tokens: Vec<u16> = (0..100).map(|i| (i * 653) as u16).collect();
    let file = TokenFile::open(written(folder.path(), &tokens))?;
    assert!(file.tokens(0..100)?.iter().any(|&token| token > 1 << 15), "tokens have no sign");
    let windows = file.clone().windows(8)?;
    // torch.randint(len(data) - block_size, ..)
    assert_eq!(windows.len(), 92);
    for index in 0..windows.len() {
        let (inputs, targets) = windows.get(index)?;
        let expected: Vec<i64> = tokens[index..index + 9].iter().map(|&token| token.into()).collect();
        assert_eq!((values(&inputs), values(&targets)), (expected[..8].to_vec(), expected[1..].to_vec()));
    }
    assert!(matches!(windows.get(92), Err(DataError::IndexOutOfRange { index: 92, len: 92 })));
    let loader = DataLoader::builder(windows.stride(8)?).batch_size(5).num_workers(2).build()?;
    let batches: Vec<(Tensor, Tensor)> = loader.iter().collect::<Result<_, _>>()?;
    assert_eq!(batches.iter().map(|(inputs, _)| inputs.size()).collect::<Vec<_>>(), [[5, 8], [5, 8], [2, 8]]);
    let inputs: Vec<i64> = batches.iter().flat_map(|(inputs, _)| values(inputs)).collect();
    let targets: Vec<i64> = batches.iter().flat_map(|(_, targets)| values(targets)).collect();
    assert_eq!((inputs, targets), (file.tokens(0..96)?, file.tokens(1..97)?));
    Ok(())
}

#[test]
fn windows_fill_files_to_the_last_token() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    for (tokens, block_size, stride, windows) in
        [(9, 8, 1, 1), (9, 8, 50, 1), (16, 8, 8, 1), (17, 8, 8, 2), (25, 8, 8, 3), (20, 3, 2, 9), (2, 1, 1, 1)]
    {
        let file = TokenFile::open(written(folder.path(), &vec![1; tokens]))?;
        let windows_of = file.windows(block_size)?.stride(stride)?;
        assert_eq!(windows_of.len(), windows, "{tokens} tokens, {block_size}, {stride}");
        assert!((0..windows).all(|index| windows_of.get(index).is_ok()));
    }
    let file = TokenFile::open(written(folder.path(), &[1; 8]))?;
    let refused = |windows: Result<TokenWindows, DataError>| windows.unwrap_err().to_string();
    let short = "expected more than 8 tokens, for a window and the token that follows it, found 8 tokens";
    assert!(refused(file.clone().windows(8)).ends_with(short));
    assert!(refused(file.clone().windows(usize::MAX)).ends_with("found 8 tokens"));
    assert_eq!(refused(file.clone().windows(0)), "block_size: expected at least 1, found 0");
    assert_eq!(refused(file.windows(3)?.stride(0)), "stride: expected at least 1, found 0");
    Ok(())
}

#[test]
fn every_integer_type_is_read_and_other_files_are_refused() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokens.bin");
    let bytes: Vec<u8> = [1_u64, 0x8000_0000_0000_00ff, u64::MAX].iter().flat_map(|n| n.to_le_bytes()).collect();
    fs::write(&path, bytes).unwrap();
    let last = |dtype| {
        let file = TokenFile::with_dtype(&path, dtype)?;
        Ok::<_, DataError>((file.len(), file.tokens(file.len() - 1..file.len())?[0]))
    };
    assert_eq!(last(TokenDtype::Uint8)?, (24, 255));
    assert_eq!(last(TokenDtype::Int8)?, (24, -1));
    assert_eq!(last(TokenDtype::Uint16)?, (12, 65_535));
    assert_eq!(last(TokenDtype::Int16)?, (12, -1));
    assert_eq!(last(TokenDtype::Uint32)?, (6, 4_294_967_295));
    assert_eq!(last(TokenDtype::Int32)?, (6, -1));
    assert_eq!(last(TokenDtype::Int64)?, (3, -1));
    let file = TokenFile::with_dtype(&path, TokenDtype::Int64)?;
    assert_eq!((file.tokens(0..1)?, file.tokens(3..3)?), (vec![1], vec![]));
    assert_eq!(file.tokens(1..2)?, [i64::MIN + 255]);
    for beyond in [2..4, 4..4, usize::MAX - 1..usize::MAX] {
        assert!(matches!(file.tokens(beyond), Err(DataError::IndexOutOfRange { len: 3, .. })));
    }
    fs::write(&path, [0; 5]).unwrap();
    let error = TokenFile::open(&path).unwrap_err();
    let odd = "expected a multiple of 2 bytes, which a token of Uint16 takes, found 5 bytes";
    assert!(names_file(&error, "tokens.bin").ends_with(odd), "{error}");
    assert!(matches!(TokenFile::open(folder.path()), Err(DataError::Layout { .. })));
    assert!(matches!(TokenFile::open(folder.path().join("none")), Err(DataError::Io { .. })));
    fs::write(&path, []).unwrap();
    assert!(TokenFile::open(&path)?.is_empty());
    Ok(())
}

/// A pair of files as Megatron's `IndexedDatasetBuilder` writes it.
struct Pair {
    sequences: Vec<Vec<i32>>,
    /// The first sequence of each document, and the end.
    documents: Vec<i64>,
}

impl Pair {
    fn example() -> Self {
        let sequences = vec![vec![5, 6, 7], vec![], vec![70_000, -1], vec![9]];
        Self { sequences, documents: vec![0, 2, 4] }
    }

    fn index(&self) -> Vec<u8> {
        let mut index = b"MMIDIDX\0\0".to_vec();
        index.extend(1_u64.to_le_bytes());
        index.push(4);
        index.extend((self.sequences.len() as u64).to_le_bytes());
        index.extend((self.documents.len() as u64).to_le_bytes());
        index.extend(self.sequences.iter().flat_map(|tokens| (tokens.len() as i32).to_le_bytes()));
        let mut pointer = 0_i64;
        for tokens in &self.sequences {
            index.extend(pointer.to_le_bytes());
            pointer += 4 * tokens.len() as i64;
        }
        index.extend(self.documents.iter().flat_map(|document| document.to_le_bytes()));
        index
    }

    /// Writes the tokens, and `index` beside them.
    fn write(&self, folder: &Path, index: &[u8]) -> PathBuf {
        let tokens: Vec<u8> = self.sequences.iter().flatten().flat_map(|token| token.to_le_bytes()).collect();
        fs::write(folder.join("corpus.v1_text.bin"), tokens).unwrap();
        fs::write(folder.join("corpus.v1_text.idx"), index).unwrap();
        folder.join("corpus.v1_text")
    }
}

#[test]
fn megatrons_pair_gives_its_sequences_and_documents() -> Result<(), DataError> {
    let (folder, pair) = (tempfile::tempdir().unwrap(), Pair::example());
    let prefix = pair.write(folder.path(), &pair.index());
    for path in [prefix.clone(), folder.path().join("corpus.v1_text.idx"), folder.path().join("corpus.v1_text.bin")] {
        let data = IndexedTokens::open(path)?;
        let sequences = (0..data.len()).map(|index| data.get(index)).collect::<Result<Vec<_>, _>>()?;
        assert_eq!(sequences, [vec![5, 6, 7], vec![], vec![70_000, -1], vec![9]]);
        assert_eq!((data.documents(), data.document(0)?, data.document(1)?), (2, 0..2, 2..4));
        assert!(matches!(data.document(2), Err(DataError::IndexOutOfRange { index: 2, len: 2 })));
        assert!(matches!(data.get(4), Err(DataError::IndexOutOfRange { index: 4, len: 4 })));
        assert_eq!(data.tokens().tokens(0..6)?, [5, 6, 7, 70_000, -1, 9]);
        assert_eq!(data.tokens().clone().windows(2)?.stride(2)?.len(), 2);
    }
    let packed = DataLoader::builder(IndexedTokens::open(&prefix)?).batch_size(4).collate(PackTokens::new()).build()?;
    let batch = packed.iter().next().unwrap()?;
    assert_eq!(Vec::<i32>::try_from(&batch.cu_seqlens)?, [0, 3, 3, 5, 6]);
    // A byte for each sequence's mode may follow.
    pair.write(folder.path(), &[pair.index(), vec![0; 4]].concat());
    assert_eq!(IndexedTokens::open(&prefix)?.len(), 4);
    let none = Pair { sequences: Vec::new(), documents: vec![0] };
    let none = IndexedTokens::open(none.write(folder.path(), &none.index()))?;
    assert_eq!((none.len(), none.documents()), (0, 0));
    Ok(())
}

#[test]
fn a_wrong_index_is_refused_with_its_place() {
    let (folder, pair) = (tempfile::tempdir().unwrap(), Pair::example());
    let refused = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut index = pair.index();
        change(&mut index);
        let error = IndexedTokens::open(pair.write(folder.path(), &index)).unwrap_err();
        assert!(matches!(error, DataError::Corrupt { .. }), "{error}");
        names_file(&error, "corpus.v1_text.idx").split_once(".idx: ").unwrap().1.to_owned()
    };
    let put =
        |at: usize, number: u64| move |index: &mut Vec<u8>| index[at..at + 8].copy_from_slice(&number.to_le_bytes());
    let magic = refused(&|index| index[..9].copy_from_slice(b"TNTIDX\0\0\x01"));
    assert_eq!(magic, r"at byte 0: expected MMIDIDX\x00\x00, as every index begins, found TNTIDX\x00\x00\x01");
    assert_eq!(refused(&put(9, 2)), "at byte 9: expected version 1, found 2");
    let float = refused(&|index| index[17] = 6);
    assert_eq!(float, "at byte 17: expected the code of an integer type: 1 to 5, or 8, found 6");
    let cut = refused(&|index| index.truncate(20));
    assert_eq!(cut, "at byte 0: expected a header of 34 bytes, found a file of 20");
    for sequences in [3, 5, u64::MAX, u64::MAX / 12, u64::MAX / 12 + 1] {
        let expected = format!(
            "at byte 18: expected a file for {sequences} sequences and 3 boundaries of documents, found one of 106 bytes"
        );
        assert_eq!(refused(&put(18, sequences)), expected);
    }
    assert!(refused(&put(26, u64::MAX)).starts_with("at byte 18: expected a file for 4 sequences"));
    let astray = "expected a sequence within 6 tokens of 4 bytes, found sequence";
    let long = refused(&|index| index[34..38].copy_from_slice(&7_i32.to_le_bytes()));
    assert_eq!(long, format!("at byte 50: {astray} 0 with 7 tokens from byte 0 on"));
    let negative = refused(&|index| index[38..42].copy_from_slice(&(-1_i32).to_le_bytes()));
    assert_eq!(negative, format!("at byte 58: {astray} 1 with -1 tokens from byte 12 on"));
    assert_eq!(refused(&put(66, 13)), format!("at byte 66: {astray} 2 with 2 tokens from byte 13 on"));
    assert_eq!(refused(&put(66, u64::MAX - 3)), format!("at byte 66: {astray} 2 with 2 tokens from byte -4 on"));
    let far = i64::MAX as u64 - 3;
    assert_eq!(refused(&put(66, far)), format!("at byte 66: {astray} 2 with 2 tokens from byte {far} on"));
    let boundary = refused(&put(90, 5));
    assert_eq!(boundary, "at byte 90: expected the number of a sequence from 0 to 4, found 5");
    assert_eq!(refused(&put(98, 1)), "at byte 98: expected the number of a sequence from 2 to 4, found 1");
}

#[test]
fn an_index_with_any_byte_changed_or_missing_is_read_or_refused() {
    let (folder, pair) = (tempfile::tempdir().unwrap(), Pair::example());
    let good = pair.index();
    let read = |index: &[u8]| {
        let Ok(data) = IndexedTokens::open(pair.write(folder.path(), index)) else { return false };
        // What the index promises is there.
        assert!((0..data.len()).all(|sequence| data.get(sequence).is_ok()));
        assert!((0..data.documents()).all(|document| data.document(document).unwrap().end <= data.len()));
        true
    };
    assert!(read(&good));
    for at in 0..good.len() {
        assert!(!read(&good[..at]), "cut at {at}");
        for bit in 0..8 {
            let mut changed = good.clone();
            changed[at] ^= 1 << bit;
            _ = read(&changed);
        }
        let mut changed = good.clone();
        changed.insert(at, 0);
        _ = read(&changed);
    }
}

#[test]
fn what_is_written_is_read() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let dtypes = [
        (TokenDtype::Uint8, 0, 255),
        (TokenDtype::Int8, -128, 127),
        (TokenDtype::Int16, -32768, 32767),
        (TokenDtype::Uint16, 0, 65535),
        (TokenDtype::Int32, i64::from(i32::MIN), i64::from(i32::MAX)),
        (TokenDtype::Uint32, 0, i64::from(u32::MAX)),
        (TokenDtype::Int64, i64::MIN, i64::MAX),
    ];
    for (dtype, least, most) in dtypes {
        let path = folder.path().join(format!("{dtype:?}.bin"));
        let mut writer = TokenWriter::create(&path, dtype)?;
        writer.write(&[least, 5, most])?;
        for astray in [least.checked_sub(1), most.checked_add(1)].into_iter().flatten() {
            // Nothing of the call is written.
            let error = writer.write(&[1, astray]).unwrap_err().to_string();
            assert!(error.contains(&astray.to_string()), "{error}");
        }
        assert!(!path.exists());
        assert_eq!(writer.finish()?, path);
        assert_eq!(TokenFile::with_dtype(&path, dtype)?.tokens(0..3)?, [least, 5, most]);

        let prefix = folder.path().join(format!("in.dexed-{dtype:?}"));
        let Ok(mut writer) = IndexedTokensWriter::create(&prefix, dtype) else {
            assert_eq!(dtype, TokenDtype::Uint32);
            continue;
        };
        writer.write(&[least])?;
        assert!(most == i64::MAX || writer.write(&[most + 1]).is_err());
        writer.write(&[])?;
        writer.end_document();
        writer.write(&[1, 2, most])?;
        writer.finish()?;
        let data = IndexedTokens::open(&prefix)?;
        let sequences: Vec<Vec<i64>> = (0..data.len()).map(|index| data.get(index)).collect::<Result<_, _>>()?;
        assert_eq!(sequences, [vec![least], vec![], vec![1, 2, most]]);
        assert_eq!((data.documents(), data.document(0)?, data.document(1)?), (2, 0..2, 2..3));
    }
    assert!(TokenWriter::create(folder.path().join("some.bin.zst"), TokenDtype::Uint8).is_err());
    Ok(())
}

#[test]
fn a_pair_appears_as_a_whole_or_not_at_all() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::create_dir(path("taken.idx")).unwrap();
    let mut writer = IndexedTokensWriter::create(path("taken"), TokenDtype::Uint16)?;
    writer.write(&[1, 2])?;
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("taken.idx"), "{error}");
    let names = || -> Vec<_> { fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect() };
    assert_eq!(names(), ["taken.idx"]);

    // A name in capitals is that of one of the two as well.
    let mut writer = IndexedTokensWriter::create(path("a.b.IDX"), TokenDtype::Uint16)?;
    writer.write(&[1, 2])?;
    assert_eq!(writer.finish()?, path("a.b.idx"));
    assert_eq!(IndexedTokens::files(path("a.b.Bin")), [path("a.b.idx"), path("a.b.bin")]);
    assert_eq!(IndexedTokens::files(path("a.b")), [path("a.b.idx"), path("a.b.bin")]);
    assert_eq!(IndexedTokens::open(path("a.b.BIN"))?.get(0)?, [1, 2]);
    Ok(())
}

#[test]
fn pairs_are_those_of_megatron_to_the_byte() -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let documents: [&[&[i64]]; 2] = [&[&[1, 2, 200]], &[&[], &[7], &[5, 0, 127, 3]]];
    for (name, dtype) in [
        ("uint8", TokenDtype::Uint8),
        ("uint16", TokenDtype::Uint16),
        ("int32", TokenDtype::Int32),
        ("int64", TokenDtype::Int64),
    ] {
        let mut writer = IndexedTokensWriter::create(folder.path().join(name), dtype)?;
        for document in documents {
            document.iter().try_for_each(|sequence| writer.write(sequence))?;
            writer.end_document();
        }
        writer.finish()?;
        let theirs = fixture("megatron").join(name);
        for (ours, theirs) in IndexedTokens::files(folder.path().join(name)).iter().zip(IndexedTokens::files(&theirs)) {
            assert_eq!(fs::read(ours).unwrap(), fs::read(&theirs).unwrap(), "{}", theirs.display());
        }
        let data = IndexedTokens::open(theirs)?;
        assert_eq!((data.len(), data.documents(), data.get(3)?), (4, 2, vec![5, 0, 127, 3]));
    }
    Ok(())
}
