//! Names and JSON keep what they are.

use super::*;

/// The fields of the samples in a shard that was made of these lines.
fn from_lines(lines: &str) -> Samples {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("a.jsonl"), lines).unwrap();
    good(&dir.path().join("a.jsonl"), &dir.path().join("a.tar"), &[]);
    samples(&dir.path().join("a-000000.tar"))
}

fn texts(fields: &BTreeMap<String, Vec<u8>>) -> Vec<(&str, &str)> {
    fields.iter().map(|(name, content)| (name.as_str(), str::from_utf8(content).unwrap())).collect()
}

#[test]
fn json_survives_json_lines_to_the_byte() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let fields = |i: usize| {
        let fields = [
            ("score.json", "0.750"),
            ("name.json", "\"x\""),
            ("flag.json", "true"),
            ("json", if i == 0 { "\"x\"" } else { "[1.50, 123456789012345678901]" }),
            ("meta.json", "{\"b\": 1, \"a\": {\"z\": 1e400, \"y\": -0.0}, \"b\": \"\\u00e9\"}"),
            ("json.json", "[]"),
            ("deep.json.json", "[1]"),
            ("both", "text"),
            ("both.json", "{}"),
            ("label", "7"),
            ("__key__.json", "{\"a\": 1}"),
        ];
        fields.map(|(name, text)| (name, text.as_bytes().to_vec())).to_vec()
    };
    shard(dir.path(), "a", 2, fields);
    shard(dir.path(), "b", 2, |i| vec![("label.json", format!("[{i}]").into_bytes()), ("txt", b"x".to_vec())]);
    for name in ["a", "b"] {
        let source = path(&format!("{name}-000000.tar"));
        good(&source, &path(&format!("{name}.jsonl")), &[]);
        good(&path(&format!("{name}.jsonl")), &path(&format!("{name}-back.tar")), &[]);
        assert_eq!(samples(&path(&format!("{name}-back-000000.tar"))), samples(&source));
    }
    // Breaks of lines between its parts go, and nothing else.
    shard(dir.path(), "lines", 1, |_| vec![("json", b"{\n  \"a b\": [\r\n1,\n 2]}\n".to_vec())]);
    good(&path("lines-000000.tar"), &path("lines.jsonl"), &[]);
    let expected = "{\"__key__\":\"train/0000\",\"json\":{  \"a b\": [1, 2]}}\n";
    assert_eq!(fs::read_to_string(path("lines.jsonl")).unwrap(), expected);
    // A null would be a field that is not there.
    for (name, field) in [("null", "json"), ("inner", "x.json")] {
        shard(dir.path(), name, 1, |_| vec![(field, b" null ".to_vec())]);
        let error = bad(&path(&format!("{name}-000000.tar")), &path("null.jsonl"), &[]);
        assert!(error.contains(&format!("field {field:?}: is null")), "{error}");
    }
}

#[test]
fn values_of_lines_stay_as_they_are_written() {
    let lines = [
        r#"{"big": 123456789012345678901, "price": 1.50, "gone": null, "list": [1.0, {"b": 1, "a": 2}], "t": "\u00e9"}"#,
        r#"{"__key__": 5, "meta.json": "x", "json": "y", "label": 3}"#,
        r#"{"label": 3}"#,
    ];
    let found = from_lines(&lines.join("\n"));
    assert_eq!(found.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>(), ["000000000", "5", "000000002"]);
    let big = ("big", "123456789012345678901");
    assert_eq!(texts(&found[0].1), [big, ("list.json", r#"[1.0, {"b": 1, "a": 2}]"#), ("price", "1.50"), ("t", "é")]);
    assert_eq!(texts(&found[1].1), [("json", "\"y\""), ("label", "3"), ("meta.json", "\"x\"")]);
    // Without keys, it is a table that `datasets` may have written.
    assert_eq!(texts(&found[2].1), [("cls", "3")]);
}

#[test]
fn two_fields_of_one_name_are_refused_and_names_keep_their_case() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("twice.jsonl"), "{\"cls\": 1, \"id\": 1, \"id\": 2}").unwrap();
    fs::write(path("key.jsonl"), "{\"cls\": 1, \"__key__\": [1]}").unwrap();
    fs::write(path("cases.jsonl"), "{\"__key__\": 12, \"cls\": 1, \"ID\": 1, \"id\": 2, \"a/b\": 3, \"a.b\": 4}")
        .unwrap();
    let targets = ["a.tar", "b.tfrecord", "c.mdb", "d.arrow", "e.parquet", "f.mds", "g.jsonl", "h.csv", "i"];
    for name in ["a.tar", "b.tfrecord", "c.mdb", "g.jsonl"] {
        let error = bad(&path("twice.jsonl"), &path(name), &[]);
        assert!(error.contains("field \"id\" is there twice"), "{name}: {error}");
    }
    assert!(bad(&path("key.jsonl"), &path("a.tar"), &[]).contains("the key is no text"));
    for name in targets {
        // File names are in lower case and have no slashes, so that these would be one.
        if ["a.tar", "i"].contains(&name) {
            let error = bad(&path("cases.jsonl"), &path(name), &[]);
            assert!(error.contains("id"), "{name}: {error}");
            continue;
        }
        good(&path("cases.jsonl"), &path(name), &[]);
        let back = path(&format!("{name}-back.jsonl"));
        good(&path(name), &back, &[]);
        let line = JsonLines::open(&back).unwrap().get(0).unwrap();
        let found = ["__key__", "cls", "ID", "id", "a/b", "a.b"].map(|field| line[field].to_string());
        assert_eq!(found, ["\"12\"", "1", "\"1\"", "\"2\"", "\"3\"", "\"4\""], "{name}");
    }
}

#[test]
fn tokens_are_those_of_input_ids_where_there_are_both() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let fields = [("tokens", b"7 8 9".to_vec()), ("input_ids", b"1 2".to_vec())];
    let json = [("tokens.json", b"[\"a\", \"b\"]".to_vec()), ("input_ids.json", b"[1, 2]".to_vec())];
    for (at, mut fields) in [fields, json].into_iter().enumerate() {
        for order in ["one", "other"] {
            shard(dir.path(), &format!("{order}{at}"), 1, |_| fields.to_vec());
            good(&path(&format!("{order}{at}-000000.tar")), &path(&format!("{order}{at}.idx")), &[]);
            let data = IndexedTokens::open(path(&format!("{order}{at}"))).unwrap();
            assert_eq!(data.get(0).unwrap(), [1, 2], "{fields:?}");
            fields.reverse();
        }
    }
    let error = bad(&path("one0-000000.tar"), &path("a.tar"), &["--token-dtype", "int32"]);
    assert!(error.contains("--token-dtype is for megatron and tokens"), "{error}");
}
