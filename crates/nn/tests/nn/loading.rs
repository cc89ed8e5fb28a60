//! State dicts that do not fit leave the module as it is.

use overdrive_core::Entry;
use overdrive_nn::{
    BatchNorm1d, Buffer, Linear, LoadError, LoadStateDict, Module, Parameter, StateDict, Stateful, module_entries,
};
use tch::{Device, Kind, Tensor};

#[derive(Debug, Module)]
struct Net {
    first: Linear,
    second: Linear,
    norm: BatchNorm1d,
}

impl Net {
    fn new() -> Self {
        Self {
            first: Linear::new(2, 2).unwrap(),
            second: Linear::new(2, 2).unwrap(),
            norm: BatchNorm1d::new(2).unwrap(),
        }
    }

    fn tied() -> Self {
        let mut net = Self::new();
        net.second.weight = net.first.weight.tie();
        net
    }
}

fn tensor(values: &[f32]) -> Entry {
    Entry::Tensor(Tensor::from_slice(values).view([2, 2]))
}

/// Loading has to fail and to change nothing.
fn refusal(net: &Net, load: LoadStateDict<'_>) -> LoadError {
    let before = net.state_dict().unwrap().copied().unwrap();
    let error = load.into(net).unwrap_err();
    for (name, own) in module_entries(net) {
        assert_eq!(&own, before.tensor(&name, &own.size(), own.kind()).unwrap(), "{name} after {error}");
    }
    error
}

fn state() -> StateDict {
    let state = Net::new().state_dict().unwrap().copied().unwrap();
    for (_, entry) in state.iter() {
        if let Entry::Tensor(tensor) = entry {
            let _ = tensor.shallow_clone().fill_(9);
        }
    }
    state
}

#[test]
fn a_batch_norm_from_before_batches_were_counted_loads() {
    let (net, mut old) = (Net::new(), StateDict::new());
    for (name, entry) in state().iter().filter(|(name, _)| !name.ends_with("num_batches_tracked")) {
        let Entry::Tensor(tensor) = entry else { panic!("{name}") };
        old.insert(name, Entry::Tensor(tensor.shallow_clone()));
    }
    assert!(LoadStateDict::new(&old).into(&net).unwrap().missing_keys.is_empty());
    let mut without = StateDict::new();
    without.insert("first.weight", tensor(&[1.0; 4]));
    assert!(refusal(&net, LoadStateDict::new(&without)).to_string().contains("\"norm.num_batches_tracked\""));
}

#[test]
fn a_state_that_fits_is_copied_into_the_same_tensors() {
    let (net, state) = (Net::new(), state());
    let weight = net.first.weight.shallow_clone();
    LoadStateDict::new(&state).into(&net).unwrap();
    assert_eq!(Vec::<f32>::try_from(weight.detach().view(-1)).unwrap(), [9.0; 4]);
    assert!(weight.requires_grad() && weight.is_leaf());
}

#[test]
fn names_that_collide_after_renaming_are_an_error() {
    let (net, mut state) = (Net::new(), state());
    state.insert("module.first.weight", tensor(&[1.0; 4]));
    let strip = |name: &str| name.strip_prefix("module.").unwrap_or(name).to_owned();
    let error = refusal(&net, LoadStateDict::new(&state).rename(strip));
    let expected = "`first.weight` and `module.first.weight` of the state are both renamed to `first.weight`";
    assert_eq!(error.to_string(), expected);
    let not_strict = LoadStateDict::new(&state).rename(|_| "first.weight".to_owned()).strict(false);
    assert!(matches!(refusal(&net, not_strict), LoadError::Renamed { .. }));
}

#[test]
fn every_kind_of_misfit_changes_nothing() {
    let net = Net::new();
    let sparse = Tensor::eye(2, (Kind::Float, Device::Cpu)).to_sparse_sparse_dim(2);
    let cases: [(&str, Entry, &str); 6] = [
        (
            "second.weight",
            Entry::Tensor(Tensor::zeros([2, 3], (Kind::Float, Device::Cpu))),
            "size mismatch for second.weight",
        ),
        ("second.weight", Entry::Tensor(Tensor::new()), "shape torch.Size([undefined])"),
        (
            "second.weight",
            Entry::Tensor(Tensor::zeros([2, 2], (Kind::Int64, Device::Cpu))),
            "dtype mismatch for second.weight",
        ),
        ("second.weight", Entry::Tensor(sparse), "layout mismatch for second.weight"),
        ("second.weight", Entry::Text("x".to_owned()), "received <class 'str'>"),
        ("third.weight", tensor(&[0.0; 4]), "Unexpected key(s) in state_dict: \"third.weight\". "),
    ];
    for (name, entry, said) in cases {
        let mut state = state();
        state.insert(name, entry);
        let error = refusal(&net, LoadStateDict::new(&state));
        assert!(error.to_string().starts_with("Error(s) in loading state_dict for Net:\n\t"), "{error}");
        assert!(error.to_string().contains(said), "{error}");
    }
    let error = refusal(&net, LoadStateDict::new(&StateDict::new()));
    assert!(error.to_string().contains("Missing key(s) in state_dict: \"first.weight\", \"first.bias\","), "{error}");
}

#[test]
fn tied_names_with_two_values_are_an_error() {
    let net = Net::tied();
    let mut state = net.state_dict().unwrap().copied().unwrap();
    state.insert("first.weight", tensor(&[1.0, f32::NAN, f32::INFINITY, -0.0]));
    state.insert("second.weight", tensor(&[1.0, f32::NAN, f32::INFINITY, 0.5]));
    let error = refusal(&net, LoadStateDict::new(&state));
    let expected = "`first.weight` and `second.weight` are tied in the module, but differ in the state";
    assert!(error.to_string().starts_with(expected), "{error}");
    // NaN is equal to NaN here.
    state.insert("second.weight", tensor(&[1.0, f32::NAN, f32::INFINITY, 0.0]));
    LoadStateDict::new(&state).into(&net).unwrap();
    assert_eq!(net.first.weight.double_value(&[1, 0]), f64::INFINITY);
    // One name is enough, either one.
    for (name, value) in [("first.weight", 3.0), ("second.weight", 4.0)] {
        let mut one = StateDict::new();
        one.insert(name, tensor(&[value; 4]));
        let keys = LoadStateDict::new(&one).strict(false).into(&net).unwrap();
        assert!(!keys.missing_keys.iter().any(|name| name.contains("weight") && !name.starts_with("norm")), "{keys:?}");
        assert_eq!(net.second.weight.double_value(&[0, 0]), f64::from(value));
    }
    let error = refusal(&net, LoadStateDict::new(&StateDict::new())).to_string();
    assert!(error.contains("\"first.weight\"") && error.contains("\"second.weight\""), "{error}");
}

#[test]
fn floating_point_dtypes_are_converted() {
    let (net, mut state) = (Net::new(), state());
    for (kind, value) in [(Kind::Double, 0.5), (Kind::Half, 0.25), (Kind::BFloat16, 2.0)] {
        state.insert("first.weight", Entry::Tensor(Tensor::full([2, 2], value, (kind, Device::Cpu))));
        LoadStateDict::new(&state).into(&net).unwrap();
        assert_eq!((net.first.weight.kind(), net.first.weight.double_value(&[1, 1])), (Kind::Float, value));
    }
}

#[test]
fn a_tensor_that_cannot_be_written_is_named_before_anything_changes() {
    #[derive(Debug, Module)]
    struct Expanded {
        weight: Parameter,
        buffer: Buffer,
    }
    let ones = |shape: &[i64]| Tensor::ones(shape, (Kind::Float, Device::Cpu));
    let net =
        Expanded { weight: Parameter::new(&ones(&[2])).unwrap(), buffer: Buffer::new(&ones(&[1]).expand([3], false)) };
    let mut state = StateDict::new();
    state.insert("weight", Entry::Tensor(ones(&[2]) * 5));
    state.insert("buffer", Entry::Tensor(ones(&[3])));
    let error = LoadStateDict::new(&state).into(&net).unwrap_err().to_string();
    assert!(error.contains("buffer cannot be written"), "{error}");
    assert_eq!(Vec::<f32>::try_from(net.weight.detach()).unwrap(), [1.0; 2]);
}

#[test]
fn a_scalar_that_was_saved_with_a_dimension_loads() {
    let net = Net::new();
    let mut state = StateDict::new();
    for (name, entry) in net.state_dict().unwrap().iter() {
        let Entry::Tensor(tensor) = entry else { panic!("{name}") };
        let is_count = name.ends_with("num_batches_tracked");
        state.insert(name, Entry::Tensor(if is_count { tensor.view([1]) + 7 } else { tensor.copy() }));
    }
    LoadStateDict::new(&state).into(&net).unwrap();
    assert_eq!(net.norm.num_batches_tracked.as_ref().unwrap().int64_value(&[]), 7);
}
