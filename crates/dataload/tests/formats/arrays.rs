use std::fs;
use std::path::Path;

use overdrive_dataload::{DataError, SafeTensorsFile, decode_npy, read_npy};
use tch::{Kind, Tensor};

use crate::{fixture, names_file};

/// The arrays of `fixtures/make.py`, and the kind that each is read as.
const KINDS: [(&str, Kind); 13] = [
    ("bool", Kind::Bool),
    ("int8", Kind::Int8),
    ("int16", Kind::Int16),
    ("int32", Kind::Int),
    ("int64", Kind::Int64),
    ("uint8", Kind::Uint8),
    ("uint16", Kind::Int),
    ("uint32", Kind::Int64),
    ("float16", Kind::Half),
    ("float32", Kind::Float),
    ("float64", Kind::Double),
    ("complex64", Kind::ComplexFloat),
    ("complex128", Kind::ComplexDouble),
];

/// Compares with `array(dtype)` of `fixtures/make.py`, and its imaginary part where there is one.
fn assert_is_array(found: &Tensor, name: &str) {
    assert_eq!((found.size(), found.is_contiguous()), (vec![2, 3, 4], true), "{name}");
    let values: Vec<f64> = (0..24).map(|i| f64::from(i * 5 % 7)).collect();
    let read = |tensor: Tensor| Vec::<f64>::try_from(tensor.to_kind(Kind::Double).view(-1)).unwrap();
    if name.contains("complex") {
        assert_eq!(read(found.real()), values);
        assert_eq!(read(found.imag()), values.iter().map(|value| 6.0 - 2.0 * value).collect::<Vec<_>>());
        return;
    }
    let expected = values.iter().map(|value| match name {
        "bool" => f64::from(*value > 3.0),
        name if name.starts_with("uint") => *value,
        _ => value - 3.0,
    });
    assert_eq!(read(found.shallow_clone()), expected.collect::<Vec<_>>(), "{name}");
}

#[test]
fn arrays_that_numpy_wrote_read_back_with_equal_values() {
    for (name, kind) in KINDS {
        let array = read_npy(fixture(&format!("c-{name}.npy"))).unwrap();
        assert_eq!(array.kind(), kind);
        assert_is_array(&array, name);
    }
    for name in ["int16", "int64", "float32", "float64", "complex128", "uint32"] {
        assert_is_array(&read_npy(fixture(&format!("big-{name}.npy"))).unwrap(), name);
    }
    for name in ["fortran-float32", "fortran-big-int16", "version-1", "version-2", "version-3"] {
        assert_is_array(&read_npy(fixture(&format!("{name}.npy"))).unwrap(), name);
    }
    let scalar = read_npy(fixture("scalar.npy")).unwrap();
    assert_eq!((scalar.size(), scalar.double_value(&[])), (vec![], 2.5));
    assert_eq!(read_npy(fixture("empty.npy")).unwrap().size(), [3, 0, 2]);
}

#[test]
fn arrays_without_a_kind_are_refused() {
    for (name, part) in [("uint64", "<u8"), ("text", "<U2"), ("record", "numeric array")] {
        let error = read_npy(fixture(&format!("refused-{name}.npy"))).unwrap_err();
        let text = names_file(&error, &format!("refused-{name}.npy"));
        assert!(text.contains(part), "{text}");
    }
}

/// An npy file of version 1 with this header and these values.
fn npy(header: &str, values: &[u8]) -> Vec<u8> {
    let length = (header.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &length[..], header.as_bytes(), values].concat()
}

#[test]
fn headers_and_lengths_must_agree() {
    let name = Path::new("some.npy");
    let good = fs::read(fixture("c-float32.npy")).unwrap();
    for cut in 0..good.len() {
        names_file(&decode_npy(&good[..cut], name).unwrap_err(), "some.npy: at byte");
    }
    let longer = [good.as_slice(), b"x"].concat();
    assert!(decode_npy(&longer, name).unwrap_err().to_string().contains("at byte 224"));
    let header = |shape: &str| format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape})}}");
    for shape in ["5", "18446744073709551615", "4294967296, 4294967296", "1, 0, 9223372036854775807, 3", "99999999999"]
    {
        let error = decode_npy(&npy(&header(shape), &[0; 16]), name).unwrap_err();
        assert!(matches!(error, DataError::Corrupt { .. }), "{error}");
    }
    assert_eq!(decode_npy(&npy(&header("2, 2"), &[0; 16]), name).unwrap().size(), [2, 2]);
    let truth = "{'descr': '|b1', 'fortran_order': False, 'shape': (2,)}";
    assert!(decode_npy(&npy(truth, &[1, 2]), name).unwrap_err().to_string().contains("found 2"));
    let long = [b"\x93NUMPY\x02\x00", &u32::MAX.to_le_bytes()[..], b"{}"].concat();
    assert!(matches!(decode_npy(&long, name), Err(DataError::TooLarge { .. })));
}

#[test]
fn tensors_that_safetensors_wrote_read_back_with_equal_values() {
    let mut file = SafeTensorsFile::open(fixture("arrays.safetensors")).unwrap();
    assert_eq!(file.metadata()["made by"], "make.py");
    assert_eq!((file.names().len(), file.shape("int8")), (14, Some(&[2, 3, 4][..])));
    for (name, kind) in KINDS.iter().filter(|(name, _)| !name.contains("complex")) {
        let tensor = file.tensor(name).unwrap();
        assert_eq!(tensor.kind(), *kind);
        assert_is_array(&tensor, name);
    }
    assert_eq!(file.tensor("scalar").unwrap().double_value(&[]), 2.5);
    assert_eq!(file.tensor("empty").unwrap().size(), [3, 0, 2]);
    assert!(names_file(&file.tensor("refused").unwrap_err(), "arrays.safetensors").contains("U64"));
    assert!(file.tensor("none").unwrap_err().to_string().contains("none"));
    // Files written by tch are read as well.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tch.safetensors");
    let written = Tensor::arange(6, (Kind::BFloat16, tch::Device::Cpu)).view([2, 3]);
    Tensor::write_safetensors(&[("a", &written)], &path).unwrap();
    let read = SafeTensorsFile::open(&path).unwrap().tensor("a").unwrap();
    assert!(read.equal(&written) && read.kind() == Kind::BFloat16);
}

fn safetensors(header: &str, values: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), values].concat()
}

#[test]
fn a_bad_safetensors_header_is_refused() {
    let open = |bytes: Vec<u8>| SafeTensorsFile::from_bytes(bytes, Path::new("some.safetensors")).map(drop);
    let good = fs::read(fixture("arrays.safetensors")).unwrap();
    for cut in 0..good.len() {
        names_file(&open(good[..cut].to_vec()).unwrap_err(), "some.safetensors");
    }
    open([good.as_slice(), b"x"].concat()).unwrap_err();
    let one = |fields: &str| safetensors(&format!("{{\"a\": {{{fields}}}}}"), &[0; 8]);
    open(one(r#""dtype": "F32", "shape": [2], "data_offsets": [0, 8]"#)).unwrap();
    for fields in [
        r#""dtype": "F32", "shape": [3], "data_offsets": [0, 8]"#,
        r#""dtype": "F32", "shape": [1], "data_offsets": [4, 8]"#,
        r#""dtype": "F32", "shape": [2], "data_offsets": [8, 0]"#,
        r#""dtype": "F32", "shape": [4611686018427387904, 2], "data_offsets": [0, 8]"#,
        r#""dtype": "F32", "shape": [-2], "data_offsets": [0, 8]"#,
        r#""dtype": "F99", "shape": [2], "data_offsets": [0, 8]"#,
        r#""dtype": "U8", "shape": [18446744073709551615], "data_offsets": [0, 18446744073709551615]"#,
    ] {
        open(one(fields)).expect_err(fields);
    }
    open(safetensors(&"[".repeat(100_000), &[])).unwrap_err();
    for length in [u64::MAX, 1 << 40, 1000] {
        open([&length.to_le_bytes()[..], b"{}"].concat()).unwrap_err();
    }
    let bool = safetensors(r#"{"a": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}}"#, &[7]);
    let mut file = SafeTensorsFile::from_bytes(bool, Path::new("some.safetensors")).unwrap();
    assert!(file.tensor("a").unwrap_err().to_string().contains("found 7"));
}
