//! nanoGPT's files of tokens as sources.

use super::*;

/// GPT-2's token behind each text.
const END: u16 = 50256;

fn lines(path: &Path) -> Vec<Vec<i64>> {
    let lines = JsonLines::open(path).unwrap();
    let tokens = |line| serde_json::from_value(lines.get(line).unwrap()["input_ids"].take()).unwrap();
    (0..lines.len()).map(tokens).collect()
}

#[test]
fn texts_of_a_file_of_tokens_end_where_it_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    // Longer than what is read at once, and without an end at last.
    let texts = [vec![1, 2, END], vec![END], vec![7; 70_000], vec![8, END], vec![9]];
    let tokens: Vec<u16> = texts.concat();
    let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    fs::write(path("train.bin"), &bytes).unwrap();
    let wide = |texts: &[Vec<u16>]| -> Vec<Vec<i64>> {
        texts.iter().map(|text| text.iter().map(|&token| token.into()).collect()).collect()
    };
    let said = ["--end-of-text", "50256"];
    let expected = wide(&[vec![1, 2, END], vec![END], [vec![7; 70_000], vec![8, END]].concat(), vec![9]]);
    for (name, from) in [("a.jsonl", "jsonl"), ("a.tar", "webdataset"), ("a.hf", "huggingface"), ("a.idx", "megatron")]
    {
        good(&path("train.bin"), &path(name), &said);
        let made = path(if name == "a.tar" { "a-000000.tar" } else { name });
        if name != "a.jsonl" {
            good(&made, &path(&format!("{name}.jsonl")), &[]);
            assert!(lines(&path(&format!("{name}.jsonl"))) == expected, "{name}");
        }
        // There and back.
        let back = path(&format!("{name}.bin"));
        good(&made, &back, &["--from", from]);
        assert!(fs::read(back).unwrap() == bytes, "{name}");
    }
    assert!(lines(&path("a.jsonl")) == expected);
    assert_eq!(IndexedTokens::open(path("a.idx")).unwrap().documents(), 4);

    good(&path("train.bin"), &path("blocks.jsonl"), &["--block-size", "30000"]);
    assert!(lines(&path("blocks.jsonl")) == wide(&tokens.chunks(30_000).map(<[u16]>::to_vec).collect::<Vec<_>>()));
    good(&path("train.bin"), &path("both.jsonl"), &["--block-size", "30000", "--end-of-text", "50256"]);
    let lengths: Vec<_> = lines(&path("both.jsonl")).iter().map(Vec::len).collect();
    assert_eq!(lengths, [3, 1, 30_000, 30_000, 10_002, 1]);
}

#[test]
fn a_file_of_tokens_is_read_as_it_is_stored() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let tokens = [128_000_u32, 5, 0];
    fs::write(path("wide.bin"), tokens.map(u32::to_le_bytes).concat()).unwrap();
    let block = ["--block-size", "2", "--src-token-dtype", "uint32"];
    good(&path("wide.bin"), &path("a.jsonl"), &block);
    assert_eq!(lines(&path("a.jsonl")), [vec![128_000, 5], vec![0]]);
    good(&path("wide.bin"), &path("same.bin"), &[&block[..], &["--token-dtype", "uint32"]].concat());
    assert!(fs::read(path("same.bin")).unwrap() == fs::read(path("wide.bin")).unwrap());
    let error = bad(&path("wide.bin"), &path("narrow.bin"), &block);
    assert!(error.contains("128000") && error.contains("--token-dtype"), "{error}");
    // Megatron has no such type.
    assert!(
        bad(&path("wide.bin"), &path("b.idx"), &[&block[..], &["--token-dtype", "uint32"]].concat()).contains("Int32")
    );

    fs::write(path("odd.bin"), [0; 3]).unwrap();
    assert!(bad(&path("odd.bin"), &path("b.jsonl"), &block[..2]).contains("a multiple of 2 bytes"));
    fs::write(path("empty.bin"), []).unwrap();
    assert!(bad(&path("empty.bin"), &path("b.jsonl"), &block[..2]).contains("no sample to convert"));
    let error = bad(&path("wide.bin"), &path("b.jsonl"), &[]);
    assert!(error.contains("--end-of-text") && error.contains("--block-size"), "{error}");
    assert!(bad(&path("a.jsonl"), &path("b.tar"), &block[..2]).contains("for tokens as the source"));
    // The index beside it says where samples end, whichever of the two files is named.
    good(&path("a.jsonl"), &path("c.idx"), &["--token-dtype", "int32"]);
    good(&path("c.bin"), &path("c.jsonl"), &[]);
    assert_eq!(lines(&path("c.jsonl")), lines(&path("a.jsonl")));
}

#[test]
fn an_end_of_texts_that_no_text_has_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let tokens = [1_u16, 2, END, 3];
    fs::write(path("train.bin"), tokens.map(u16::to_le_bytes).concat()).unwrap();
    for token in ["70000", "-1"] {
        let error = bad(&path("train.bin"), &path("a.jsonl"), &["--end-of-text", token]);
        assert!(error.contains(token) && error.contains("Uint16") && error.contains("--src-token-dtype"), "{error}");
    }
    let error = bad(&path("train.bin"), &path("a.jsonl"), &["--end-of-text", "9"]);
    assert!(error.contains("no token 9 in it") && error.contains("--block-size"), "{error}");
    // A sample has a length then, and a text may be longer.
    good(&path("train.bin"), &path("a.jsonl"), &["--end-of-text", "9", "--block-size", "3"]);
    assert_eq!(lines(&path("a.jsonl")), [vec![1, 2, i64::from(END)], vec![3]]);
}
